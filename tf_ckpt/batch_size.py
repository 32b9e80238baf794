"""`max_batch_size`: the largest batch that fits, predicted from two traces and proved by real steps."""

import contextlib

from tf_ckpt import graph as keras_graph
from tf_ckpt.batch_sizes import NO_PLAN, BatchSizes, Largest, Trial
from tf_ckpt.budgets import MARGIN, device_bytes, memory_bytes
from tf_ckpt.child import Package, check_verbose, simulated_bytes
from tf_ckpt.errors import CheckpointError, quoted
from tf_ckpt.memory import MIB
from tf_ckpt.mirrors import sharing
from tf_ckpt.planning import make_plan
from tf_ckpt.samples import batches_of, made_up, repeated, stated_batch
from tf_ckpt.snapshot import kept, state_variables
from tf_ckpt.trainee import TRAINED, check_data, training_arguments
from tf_ckpt.transform import graph_of

PLAIN = "plain"
_STEPS = 3  # the first one also traces, and the second finds what the first has left
_TRACED = (2, 32)  # a batch of one broadcasts, so that it says little of others


def max_batch_size(
    model,
    memory=None,
    strategy="sqrt",
    *,
    x=None,
    y=None,
    layers=None,
    target=None,
    levels=None,
    optimizer=None,
    loss=None,
    jit_compile=None,
    most=4096,
    verify=True,
    verbose="auto",
):
    """Finds the largest batch that a model trains on in some memory, plain and checkpointed.

    The answer is predicted first, from the costs of each layer at two batch sizes. Then it is verified: a process of its own,
    on a device of that memory, trains three steps through `fit`, and the search goes on from what was measured until one batch
    size trains and the next larger one, with the plan for it, runs out of memory. `model` is not trained, and not changed.

    What a device can hold differs a little from run to run where operations run in parallel, and from process to process with
    the order in which memory was taken: leave some room in practice.

    For a model that a `tf.distribute.MirroredStrategy` replicates, batch sizes are those of `fit`, over all replicas, of which
    each gets as many samples. `memory` is that of each device, and `plan`, as all plans, is for the samples that one gets.
    Logical devices of a CPU share one allocator: simulated, it has as much for each, and what is measured is an equal share.

    Args:
        model: A built Functional or Sequential `keras.Model` that takes batches of any size. A model that is not compiled is
            trained with Adam on the mean squared error.
        memory: Bytes as an integer, or a string such as `"6GiB"`. Defaults to the memory of the device, where it reports
            one. On the CPU a device of that size is simulated, which has whole MiB: to verify, less than one is refused, and
            what is above the last is left out. `memory_bytes` of the result says what was tried.
        strategy: As `apply` takes it, but no `Plan`, which is for one batch size. With `"budget"`, `memory` is the budget.
        x: Optional array or nested arrays of one sample or more, which are repeated. Made up by default, with zeros for
            integers, where the model states all sizes but the batch's.
        y: Optional targets to `x`, and nothing without it.
        layers: See `apply`.
        target: See `apply`.
        levels: See `apply`.
        optimizer: A `keras.optimizers.Optimizer` or its name. Defaults to the one that the model is compiled with.
        loss: As `compile` takes it. Defaults to the one that the model is compiled with.
        jit_compile: As `compile` takes it. Defaults to what the model is compiled with.
        most: Integer, the largest batch size that is tried, at least the number of replicas.
        verify: Whether to train. Without, the answer is a prediction, `verified` is False, and the table says so.
        verbose: `"auto"` or 1 to tell of each trial, 0 for silence.

    Returns:
        A `BatchSizes`: `batch_size`, `plain_batch_size`, the `plan` for `apply`, `table()`, and all trials in `rows`.

    Raises:
        TypeError: If an argument is of the wrong type.
        CheckpointError: If an argument or the model cannot be used, no memory is known, or another process cannot load the
            model: `verify=False` then predicts all the same.

    Example:

    ```python
    found = tf_ckpt.max_batch_size(model, memory="6GiB", strategy="sqrt")
    print(found)
    model = tf_ckpt.apply(model, found.plan)
    ```
    """
    level = graph_of(model)
    _check(model, strategy, most, verify, verbose)
    if x is None and y is not None:
        raise CheckpointError(f"`y` holds the targets to `x`: give both, or none. Received: x=None, y={quoted(y)}")
    options = {"layers": layers, "target": target, "levels": levels}
    # From here on, samples are those that one replica gets.
    replicas, sharers = model.distribute_strategy.num_replicas_in_sync, sharing(model)
    simulated, limit, most = memory is not None, _limit(memory, verify, sharers), most // replicas
    with kept(state_variables(model)):
        arguments = training_arguments(model, optimizer, loss, jit_compile, default_loss="mse")
        sample = made_up(model, arguments.get("loss")) if x is None else batches_of(x, y, None, 1)[0]
        check_data(model, sample, arguments, made_up=x is None)
        rows, budget = [], limit if simulated else int((1 - MARGIN) * limit)
        goal = {"memory": budget} if strategy == "budget" else {}
        predictions = {
            PLAIN: _Prediction(level, model, "none", arguments["optimizer"], most, {}),
            _name(strategy): _Prediction(level, model, strategy, arguments["optimizer"], most, {**options, **goal}),
        }
        predicted = {name: prediction.largest(budget) for name, prediction in predictions.items()}  # before any trial
        with _package(model, arguments) if verify else contextlib.nullcontext() as package:
            for name, prediction in predictions.items():
                trials = None
                if verify:
                    device = limit if simulated else None
                    trials = _Trials(package, prediction, sample, device, replicas, sharers, verbose, name)
                rows.append(_largest(name, prediction, predicted[name], trials, limit, most, replicas))
    return BatchSizes(rows=tuple(rows), memory_bytes=limit, verified=verify, most=most * replicas)


class _Prediction:
    """Plans for many batch sizes, from traces for a few."""

    def __init__(self, level, model, strategy, optimizer, most, options):
        self._make = lambda batch, between: make_plan(
            level, model, strategy, batch_size=batch, optimizer=optimizer, between=between, **options
        )
        self._most, self._high, self._plans = most, min(_TRACED[1], most), {}

    def plan(self, batch):
        """Returns the plan for a batch size, or None if the strategy finds none that fits."""
        if batch not in self._plans:
            while batch > self._high:
                self._high = min(8 * self._high, max(self._most, batch))
            between = (_TRACED[0], self._high) if _TRACED[0] <= batch else None
            try:
                self._plans[batch] = self._make(batch, between)
            except CheckpointError as error:
                if "No plan fits" not in str(error):
                    raise
                self._plans[batch] = None
        return self._plans[batch]

    def largest(self, limit, scale=1.0):
        """Returns the largest batch size whose predicted peak fits, if all but weights and slots is `scale` times as large."""

        def fits(batch):
            plan = self.plan(batch)
            return plan is not None and plan.weight_bytes + plan.optimizer_bytes + scale * plan.activation_bytes <= limit

        low, high = 0, 1
        while high <= self._most and fits(high):
            low, high = high, 2 * high
        high = min(high, self._most + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low


class _Trials:
    """Real steps in processes of their own, each batch size once."""

    def __init__(self, package, prediction, sample, memory, replicas, sharers, verbose, name):
        self._package, self._prediction, self._sample, self._memory = package, prediction, sample, memory
        self._replicas, self._sharers, self._verbose, self._name = replicas, sharers, verbose, name
        self.done = []

    def __call__(self, batch):
        """Returns the `Trial` of a batch size, of as many samples for each replica."""
        plan, size = self._prediction.plan(batch), batch * self._replicas
        if plan is None:
            trial = Trial(size, NO_PLAN, None)
        else:
            with self._package.start(plan, [repeated(self._sample, size)], self._memory) as child:
                outcome = child.turn(0, _STEPS)
            trial = Trial(size, outcome.status, outcome.peak and outcome.peak / self._sharers / MIB)
        self.done.append(trial)
        if self._verbose != 0:
            peak = "" if trial.peak_mib is None else f", peak {trial.peak_mib:,.1f} MiB"
            print(f"{self._name}, batch size {size}: {trial.status}{peak}")
        return trial


def _largest(name, prediction, predicted, trials, limit, most, replicas):
    """Returns the `Largest` of one strategy, by trials unless they are None."""
    found = _search(prediction, trials, predicted, limit, most) if trials is not None else predicted
    plan, done = prediction.plan(found) if found else None, trials.done if trials is not None else ()
    return Largest(
        strategy=name,
        batch_size=found * replicas,
        predicted_batch_size=predicted * replicas,
        predicted_peak_mib=None if plan is None else plan.peak_bytes / MIB,
        peak_mib=next((trial.peak_mib for trial in done if trial.batch_size == found * replicas), None),
        trials=tuple(done),
        plan=plan,
    )


def _search(prediction, trial, predicted, limit, most):
    """Returns the largest batch size that trains where one more does not (or is more than `most`).

    A trial that fits takes as long as its steps, one that does not ten seconds more, in which TensorFlow's allocator waits for
    memory to be freed. So the search comes from below.
    """
    low, high, guess = 0, most + 1, max(1, min(round(0.8 * predicted), most))
    step, measured = max(1, predicted // 64), False
    while high - low > 1:
        done = trial(guess)
        low, high = (guess, high) if done.status == TRAINED else (low, guess)
        if done.status == TRAINED and done.peak_mib is not None and not measured:
            # Once what the allocator really takes is known, the prediction is right to some percent.
            plan, measured = prediction.plan(guess), True
            fixed = plan.weight_bytes + plan.optimizer_bytes
            scale = max(done.peak_mib * MIB - fixed, 1) / max(plan.activation_bytes, 1)
            guess = prediction.largest(limit, scale)
        elif high > most:
            guess, step = low + step, 2 * step
        else:
            guess = low + max(1, (high - low) // 3) if low else high // 2
        guess = min(max(guess, low + 1), high - 1)
    return low


def _package(model, arguments):
    try:
        return Package(model, arguments)
    except CheckpointError as error:
        raise CheckpointError(f"{error} `max_batch_size(..., verify=False)` predicts without a trial.") from error


def _limit(memory, verify, sharers):
    if memory is not None:
        return simulated_bytes(memory) if verify or isinstance(memory, float) else memory_bytes(memory, 0)
    limit = device_bytes()
    if limit is None:
        raise CheckpointError(
            "No device reports how much memory it has: say it, in bytes or as text such as '6GiB'. Received: memory=None"
        )
    return limit // sharers


def _name(strategy):
    if strategy == "none":
        return PLAIN
    return strategy if isinstance(strategy, str) else getattr(strategy, "__name__", "callable")


def _check(model, strategy, most, verify, verbose):
    if not (isinstance(strategy, str) or callable(strategy)):
        raise TypeError(
            f"`strategy` must be a name or a callable: a plan is for one batch size. Received: strategy={quoted(strategy)}"
        )
    if not isinstance(most, int) or isinstance(most, bool):
        raise TypeError(f"`most` must be an integer. Received: most={most!r}")
    replicas = model.distribute_strategy.num_replicas_in_sync
    if most < replicas:
        each = "" if replicas == 1 else f", one sample for each of the {replicas} replicas of model '{model.name}'"
        raise CheckpointError(f"`most` must be at least {replicas}{each}. Received: most={most!r}")
    if not isinstance(verify, bool):
        raise TypeError(f"`verify` must be True or False. Received: verify={verify!r}")
    check_verbose(verbose)
    if stated_batch(model) is not None:
        raise CheckpointError(
            "The model takes one batch size only: give its inputs no batch size. "
            f"Received: model '{model.name}' with inputs of shape {', '.join(str(x.shape) for x in model.inputs[:4])}"
        )
    if not keras_graph.compiled_with(model) and not model.trainable_variables:
        raise CheckpointError(f"The model has nothing to train. Received: model '{model.name}'")
