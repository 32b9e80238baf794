"""`compare`: the plain model and strategies, trained in turns on the same weights, seeds and batches."""

import contextlib
import statistics

import keras
import tensorflow as tf

from tf_ckpt import memory as device_memory
from tf_ckpt import snapshot
from tf_ckpt.budgets import device_bytes
from tf_ckpt.child import Package, check_verbose, simulated_bytes
from tf_ckpt.comparison import Comparison, Row
from tf_ckpt.errors import CheckpointError, quoted
from tf_ckpt.memory import MIB
from tf_ckpt.mirrors import can_move, share_of, sharing
from tf_ckpt.plan import Plan
from tf_ckpt.planning import make_plan
from tf_ckpt.samples import batches_of, size_of, stated_batch
from tf_ckpt.trainee import OUT_OF_MEMORY, TRAINED, Trainee, check_data, training_arguments
from tf_ckpt.transform import graph_of

PLAIN = "plain"
_WARM_UP = 2  # the first step traces, the second may still plan its memory


def compare(
    model,
    x,
    y=None,
    strategies=("sqrt", "selective"),
    steps=5,
    *,
    batch_size=None,
    memory=None,
    optimizer=None,
    loss=None,
    jit_compile=None,
    isolate=None,
    verbose="auto",
):
    """Trains the plain model and each strategy for some steps, and says what memory and time each took.

    All start from the model's present weights, optimizer state and seeds, see the same batches, and take turns step by
    step, so that a machine that is busy, or slows down, hurts all alike. The first two steps, which trace, count for losses
    only. Metrics are left out. Losses are those of one `fit` over these batches: what `fit` does at its end, such as putting
    an optimizer's moving averages in the place of the weights, is left out. Afterwards the weights, seeds, states, other
    non-trainable variables, optimizer state and metrics of `model` are to the bit what they were, also after an error; what
    it is compiled with is never touched. What layers keep in Python, not in variables, is not put back.

    A strategy that runs out of memory is a row that says so. Under XLA such a step may free buffers that are in use, and on the
    CPU some kernels end the process. So each contestant trains in a process of its own under XLA on a GPU, and on a CPU whose
    memory is limited. Elsewhere a step that fails is an error that leaves all buffers as they are, and each turn starts from
    copies in the host's memory. On a GPU the processes do not take turns step by step, since together they would not find the
    memory, and there must be some left for them: `TF_FORCE_GPU_ALLOW_GROWTH=true` in the environment of this process.

    Under a `tf.distribute.MirroredStrategy` memory is that of each device. Logical devices of a CPU share one allocator: what
    is measured is an equal share of it, beside what is predicted for the samples that one replica gets.

    Args:
        model: A built Functional or Sequential `keras.Model`, compiled unless `loss` is given. It may be replicated by a
            `tf.distribute.MirroredStrategy`.
        x: Array or nested arrays of samples, or a `tf.data.Dataset` or `keras.utils.PyDataset` of batches.
        y: The targets, or None if there are none or `x` is a dataset.
        strategies: A list of strategies as `apply` takes them: names, `Plan`s, callables, or pairs of one of these and a dict
            of arguments of `apply`, such as `("selective", {"target": 0.3})`.
        steps: Integer, how many steps are measured.
        batch_size: Integer. Defaults to what the model's inputs state, or else to 32, or to all samples if they are fewer.
            Steps go through the full batches of the data again and again, in order.
        memory: Bytes as an integer, or a string such as `"6GiB"`: trains on a simulated device of that size, in processes of
            their own. Such a device has whole MiB: less than one is refused, and what is above the last is left out, as
            `memory_bytes` of the result says. Defaults to the device as it is.
        optimizer: A `keras.optimizers.Optimizer` or its name. Defaults to the one that the model is compiled with.
        loss: As `compile` takes it. Defaults to the one that the model is compiled with.
        jit_compile: As `compile` takes it. Defaults to what the model is compiled with.
        isolate: Whether each contestant trains in a process of its own. Defaults to True where running out of memory could
            harm this one (see above), and with `memory`. A process cannot load classes of a script or notebook: move these
            to a module, or give False.
        verbose: `"auto"` or 1 for a progress bar, 0 for none.

    Returns:
        A `Comparison`: plain data in `rows`, `table()` and `plot(path)`. Peaks are MiB (2**20 bytes), times wall-clock ms.

    Raises:
        TypeError: If an argument is of the wrong type.
        CheckpointError: If an argument or the model cannot be used, or a step ran out of memory under XLA in this process.

    Example:

    ```python
    model.compile("adam", "sparse_categorical_crossentropy")
    result = tf_ckpt.compare(model, x, y, strategies=["sqrt", ("budget", {"memory": "2GiB"})])
    print(result)
    result.plot("compare.png")
    ```
    """
    level = graph_of(model)
    _check(steps, batch_size, isolate, verbose)
    limit = None if memory is None else simulated_bytes(memory)
    if limit is not None and isolate is False:
        raise CheckpointError(f"`memory` takes processes of their own. Received: memory={memory!r}, isolate=False")
    batches = _batches(model, x, y, batch_size, _WARM_UP + steps)
    # What this makes may draw seeds; an optimizer that it makes is not yet the model's.
    with snapshot.kept(snapshot.state_variables(model)):
        arguments = training_arguments(model, optimizer, loss, jit_compile)
        check_data(model, batches[0], arguments)
        share = share_of(size_of(batches[0]), model)
        plans = {
            name: _planned(name, level, model, strategy, batch_size=share, optimizer=arguments["optimizer"], **options)
            for name, (strategy, options) in _named(strategies).items()
        }
        probe = Trainee(model, plans[PLAIN], arguments, batches)  # knows what "auto" stands for
        if isolate is None:
            fragile = probe.model.jit_compile or not tf.config.get_visible_devices("GPU")
            isolate = limit is not None or (fragile and can_move(model) and device_bytes() is not None)
        total = len(plans) * (_WARM_UP + steps)
        bar = keras.utils.Progbar(total, unit_name="step", verbose=0 if verbose == 0 else 1)
        arguments["jit_compile"] = probe.model.jit_compile
        if isolate:
            found, digests = _apart(model, plans, arguments, batches, steps, limit, bar)
        else:
            found, digests = _together(model, plans, arguments, batches, steps, bar)
    rows = tuple(_row(name, plan, found, digests, sharing(model)) for name, plan in plans.items())
    measured = isolate or bool(device_memory.devices())
    return Comparison(
        rows=rows,
        batch_size=size_of(batches[0]),
        steps=steps,
        jit_compile=bool(arguments["jit_compile"]),
        isolated=bool(isolate),
        note="" if measured else device_memory.hint(),
        memory_bytes=limit,
    )


def _batches(model, x, y, batch_size, count):
    stated = stated_batch(model)
    whole = isinstance(x, (tf.data.Dataset, keras.utils.PyDataset))
    batches = batches_of(x, y, batch_size if batch_size is not None or whole else stated, count)
    size = size_of(batches[0])
    if stated is not None and size != stated:
        said = f"x with batches of {size}" if whole else f"batch_size={batch_size!r}"
        raise CheckpointError(f"Model '{model.name}' takes batches of {stated} only, by its inputs. Received: {said}")
    return batches


def _together(model, plans, arguments, batches, steps, bar):
    """Trains in this process. Returns the outcomes and the digest of the last state, by name."""
    trainees = {name: Trainee(model, plan, arguments, batches) for name, plan in plans.items()}
    variables = snapshot.state_variables(model, arguments["optimizer"])
    start = snapshot.read(variables)
    states = dict.fromkeys(plans, start)

    def turn(name, number):
        snapshot.write(variables, states[name])
        outcome = trainees[name].turn(number)
        if outcome.status == TRAINED:
            states[name] = snapshot.read(variables)
        elif arguments["jit_compile"]:
            raise CheckpointError(
                f"'{name}' ran out of memory under XLA, which may have freed buffers that are in use: restart this process, "
                f"and compare with isolate=True. Received: isolate=False, jit_compile={arguments['jit_compile']!r}"
            )
        return outcome

    try:
        with no_retracing_warnings():
            found = _in_turns(plans, _WARM_UP + steps, turn, bar)
        digests = {}
        for name in plans:
            snapshot.write(variables, states[name])
            digests[name] = snapshot.digest(variables)
        return found, digests
    finally:
        snapshot.write(variables, start)  # the shared seed, too, if it was made meanwhile


@contextlib.contextmanager
def no_retracing_warnings():
    """A scope in which TensorFlow does not warn that several models are traced: each is traced once, and should be."""

    def keep(record):
        return "retracing" not in record.getMessage()

    tf.get_logger().addFilter(keep)
    try:
        yield
    finally:
        tf.get_logger().removeFilter(keep)


def _apart(model, plans, arguments, batches, steps, limit, bar):
    """Trains in processes of their own. Returns the same."""
    gpu = bool(tf.config.get_visible_devices("GPU"))
    found, digests = {}, {}
    with Package(model, arguments) as package:
        for group in [[name] for name in plans] if gpu else [list(plans)]:
            with contextlib.ExitStack() as stack:
                children = {}

                def turn(name, number, children=children, stack=stack):
                    if name not in children:
                        children[name] = stack.enter_context(package.start(plans[name], batches, limit))
                    return children[name].turn(number)

                found |= _in_turns(group, _WARM_UP + steps, turn, bar)
                digests |= {n: children[n].digest() for n in group if found[n][-1].status == TRAINED}
    return found, digests


def _in_turns(names, count, turn, bar):
    """Returns the outcomes of each name's turns. Who ran out of memory has no more of them; nobody always is the first."""
    found = {name: [] for name in names}
    order = list(names)
    for number in range(count):
        for name in order:
            if not found[name] or found[name][-1].status == TRAINED:
                found[name].append(turn(name, number))
            bar.add(1)
        order = [*order[1:], order[0]]
    return found


def _row(name, plan, found, digests, sharers):
    mine, plain = found[name], found[PLAIN]
    measured = {
        "strategy": name,
        "status": mine[-1].status,
        "predicted_peak_mib": plan.peak_bytes / MIB,
        "predicted_overhead": plan.overhead,
    }
    if mine[-1].status == OUT_OF_MEMORY:
        return Row(**measured)
    timed = mine[_WARM_UP:]
    peaks = [outcome.peak for outcome in timed if outcome.peak is not None]
    compared = plain[-1].status == TRAINED
    losses = [outcome.loss for outcome in mine]
    ratios = [a.seconds / b.seconds for a, b in zip(timed, plain[_WARM_UP:], strict=True)] if compared else []
    return Row(
        **measured,
        peak_mib=max(peaks) / sharers / MIB if peaks else None,
        baseline_mib=min(outcome.baseline for outcome in timed) / sharers / MIB if peaks else None,
        step_time_ms=1000 * statistics.median(outcome.seconds for outcome in timed),
        overhead=statistics.median(ratios) - 1 if ratios else None,
        loss=losses[-1],
        losses=tuple(losses),
        # By their texts: a loss that is not a number equals itself here.
        equal=digests[name] == digests[PLAIN] and repr(losses) == repr([o.loss for o in plain]) if compared else None,
    )


def _named(strategies):
    """Returns `{name: (strategy, arguments)}`, plain first."""
    if isinstance(strategies, (str, Plan)) or not isinstance(strategies, (list, tuple)):
        raise TypeError(
            "`strategies` must be a list of names, plans, callables, or pairs of one and a dict of arguments. "
            f"Received: strategies={quoted(strategies)}"
        )
    found = {PLAIN: ("none", {})}
    for entry in strategies:
        strategy, options = entry, {}
        if isinstance(entry, (list, tuple)):
            if (
                len(entry) != 2
                or not isinstance(entry[1], dict)
                or not set(entry[1]) <= {"memory", "layers", "target", "levels"}
            ):
                raise TypeError(
                    "A pair in `strategies` must be a strategy and a dict with `memory`, `layers`, `target` or `levels`. "
                    f"Received: {quoted(entry)}"
                )
            strategy, options = entry
        name = strategy.strategy if isinstance(strategy, Plan) else getattr(strategy, "__name__", str(strategy))
        if options:
            name += f" ({', '.join(f'{k}={v}' for k, v in options.items())})"
        same = sum(1 for n in found if n == name or n.startswith(name + " #"))
        found[f"{name} #{same + 1}" if same else name] = (strategy, options)
    return found


def _planned(name, *args, **kwargs):
    try:
        return make_plan(*args, **kwargs)
    except CheckpointError as error:
        raise CheckpointError(f"Nothing was compared, since {name!r} has no plan. {error}") from error


def _check(steps, batch_size, isolate, verbose):
    for name, value in (("steps", steps), ("batch_size", batch_size)):
        if value is None and name == "batch_size":
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"`{name}` must be an integer. Received: {name}={value!r}")
        if value < 1:
            raise CheckpointError(f"`{name}` must be at least 1. Received: {name}={value!r}")
    if not (isolate is None or isinstance(isolate, bool)):
        raise TypeError(f"`isolate` must be True, False or None. Received: isolate={quoted(isolate)}")
    check_verbose(verbose)
