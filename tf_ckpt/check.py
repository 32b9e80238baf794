"""`check`: is a model, or a layer, exact under recompute on this batch? If not: which layer, by how much, and why."""

import contextlib
import inspect
import numbers
import random
import warnings

import keras
import numpy as np
import tensorflow as tf

from tf_ckpt import graph as keras_graph
from tf_ckpt import python_models, snapshot, tf_internals
from tf_ckpt.check_report import CheckReport
from tf_ckpt.check_runs import Subject, state_of, warmed_up
from tf_ckpt.checking import Findings
from tf_ckpt.compare import no_retracing_warnings
from tf_ckpt.errors import CheckpointError, CheckpointWarning, first_line, quoted
from tf_ckpt.layers.recompute import Recompute
from tf_ckpt.observing import Observer
from tf_ckpt.python_state import PythonState
from tf_ckpt.replay import observed
from tf_ckpt.samples import batches_of, size_of, stated_batch
from tf_ckpt.stages import RECOMPUTES, Stages, reason_to_stay_plain
from tf_ckpt.trainee import check_loss
from tf_ckpt.transform import apply, graph_of, plan_of, remove

MODES = ("eager", "graph", "xla")
_ROWS = 8
_OPTIONS = ("memory", "layers", "target", "levels", "batch_size", "device")


def check(
    model,
    x,
    y=None,
    *,
    strategy=None,
    modes=None,
    batch_size=None,
    loss=None,
    tolerance=None,
    raise_error=True,
):
    """Checks on a batch that a model or layer trains with recompute exactly as without.

    Each recomputed segment runs forward and again as in a training step, and layer by layer both runs are compared: values,
    shapes, dtypes, masks, `training`, what is written to variables. Then outputs, loss, every gradient and every variable after
    the step (BatchNorm statistics, seeds, counters, states of RNNs) are compared with those of the plain model. An exact model
    passes silently. For any other, the error names the first layer that differs, by how much, and the likely cause: unseeded
    random numbers, a Python side effect, state outside of Keras variables, time.

    Afterwards the model, its weights, seeds, metrics and other state, what it is compiled with, and the random state of Keras,
    TensorFlow, NumPy and Python are to the bit what they were, and so are plain data (numbers, texts, arrays, lists, ...) that
    its layers, their classes and functions keep in Python. The optimizer is not touched. What is not built yet is built.

    It holds the values of all layers in both runs: take a small batch.

    Args:
        model: A `keras.Model` of any kind: an applied one, one with `Recompute` layers or with functions of `tf_ckpt.recompute`
            inside, or a plain Functional or Sequential one. Or a single `keras.Layer`, which is checked inside a
            `Recompute`; its float inputs are then differentiated by, too.
        x: An array or nested arrays of samples, or a `tf.data.Dataset` or `keras.utils.PyDataset` of batches. For a layer with
            several arguments: a dict of arrays by their names.
        y: The targets; None if there are none, or `x` is a dataset. Without them or a loss, the mean squares of all outputs,
            and what the layers add, are differentiated.
        strategy: What to recompute in a Functional or Sequential model, as `apply` takes it: a name, a `Plan`, a callable, or a
            pair of one and a dict of arguments of `apply`, such as `("selective", {"target": 0.3})`.
            Defaults to the plan of an applied model, to what there is in a model with `Recompute` layers, and otherwise to
            all that can be recomputed, in as small segments as do not change rounding.
        modes: `"eager"`, `"graph"` or `"xla"`, or a list of these. Defaults to eager and graph, since some differences show in
            one of them only; to eager alone for a model compiled with `run_eagerly=True`.
        batch_size: Integer, how many of the samples to take. Defaults to what the model's inputs state, or else to 8, or to
            all samples if they are fewer; of a dataset, to its first batch.
        loss: As `compile` takes it. Defaults to the one that the model is compiled with.
        tolerance: Number; differences of floats up to this share of the largest value pass. Defaults to 0 in eager mode and in
            graphs, and under XLA, where fusion rounds otherwise, to 2e-5 (3e-3 with float16, 2e-2 with bfloat16).
        raise_error: Whether to raise for a model that is not exact. If False, look at `report.exact`.

    Returns:
        A `CheckReport`: plain data, and a text by `print`. It also says which layers run plain, and why.

    Raises:
        TypeError: If an argument is of the wrong type.
        CheckpointError: If something differs, with the `CheckReport` as its attribute `report`; or if an argument or the model
            cannot be used.

    Example:

    ```python
    tf_ckpt.check(model, x, y, strategy="sqrt")  # before `apply`, or without `strategy` after it
    tf_ckpt.check(MyLayer(64), np.random.normal(size=(8, 32, 64)))  # a layer of one's own

    report = tf_ckpt.check(model, x, y, raise_error=False)
    print(report.first.layer, report.first.cause)
    ```
    """
    model = keras_graph.original(model)
    modes = _checked(model, modes, batch_size, tolerance, raise_error)
    batch = _batch(model, x, y, batch_size)
    alone = not isinstance(model, keras.Model)
    called = _called_with(model, batch[0]) if alone else batch[0]
    draws = _warm_up(model, *(called if alone else ((called,), {})), modes)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_everything_kept(model))
        owner = _Alone(model) if alone else model
        ours, plain, plan, unfit = _models(owner, strategy)
        kind, notes = _compile(model, ours, plain, loss, batch)
        data = (called, *(batch[1:] if kind != "squares" else ()), None, None)[:3]
        optimizer = getattr(model, "optimizer", None)
        scaling = optimizer if kind != "squares" and hasattr(optimizer, "scale_loss") else None
        subject = Subject(plain, ours, data, kind, scaling, inputs=alone, draws=draws)
        findings = Findings(subject, tolerance)
        for mode in modes:
            findings.look(mode)
    if not (findings.segments or findings.plain or findings.differences or findings.not_rerun()):
        raise CheckpointError(
            f"Nothing in '{model.name}' is recomputed: {_nothing(plan, unfit)}. Received: strategy={quoted(strategy)}"
        )
    covered = {name for s in _walk(plan) for name in s.layers}
    report = CheckReport(
        model=model.name,
        modes=modes,
        batch_size=size_of(batch),
        loss=kind,
        differences=tuple(findings.differences),
        segments=tuple(findings.segments),
        not_rerun=tuple(findings.not_rerun()),
        plain={**{n: r for n, r in unfit.items() if r != RECOMPUTES}, **findings.plain},
        unplanned=() if plan is None else tuple(n for n in plan.layers if n not in covered and n not in unfit),
        compared=findings.compared,
        largest_share=findings.largest_share,
        notes=(*notes, *findings.notes),
    )
    if raise_error and not report.exact:
        error = CheckpointError(str(report))
        error.report = report
        raise error
    return report


class _Alone(keras.Model):
    """A model of nothing but one layer."""

    def __init__(self, layer, name=None):
        super().__init__(name=name or layer.name)
        self.layer = layer

    def call(self, inputs, training=None):
        args, kwargs = inputs
        return self.layer(*args, **kwargs)


@contextlib.contextmanager
def _everything_kept(model):
    """A scope after which what `check` may change is as it was. Gives what layers keep in Python."""
    layers = keras_graph.sublayers(model)
    python = PythonState(keras_graph.holders(model))
    with tf_internals.random_operations_kept(), snapshot.kept(state_of(model)), keras_graph.losses_kept(layers):
        try:
            with no_retracing_warnings():
                yield python
        finally:
            python.restore()


def _warm_up(model, args, kwargs, modes):
    """Calls a model once, so that all is built. Returns whether TensorFlow's own random operations are drawn from.

    Nothing else is changed, unless something was built: that draws random numbers, and may leave data in layers, for good.
    """

    def built():
        return [(id(layer), layer.built, len(layer.variables)) for layer in keras_graph.sublayers(model)]

    before, made = built(), None
    with _everything_kept(model) as python:
        try:
            draws = warmed_up(model, args, kwargs, graph=modes[0] != "eager")
        except (ValueError, TypeError, LookupError, tf.errors.OpError) as error:
            shapes = ", ".join(str(np.shape(a)) for a in keras.tree.flatten((args, kwargs))[:4])
            raise CheckpointError(
                f"'{model.name}' cannot take these data: {first_line(error)}. Received: x of shape {shapes}"
            ) from error
        if built() != before:
            python.forget()
            generators = random.getstate(), np.random.get_state()  # noqa: NPY002
            made = *generators, keras_graph.global_seed_generator(), keras_graph.name_counters()
    if made is not None:
        random.setstate(made[0])
        np.random.set_state(made[1])  # noqa: NPY002
        keras_graph.set_global_seed_generator(made[2])
        keras_graph.set_name_counters(made[3])
    return draws


def _called_with(layer, x):
    """Returns what a single layer is called with, as positional and keyword arguments."""
    names = set(inspect.signature(layer.call).parameters)
    return ((), x) if isinstance(x, dict) and x and set(x) <= names else ((x,), {})


def _models(model, strategy):
    """Returns the model with recompute, the one without, the plan or None, and why calls fit in no plan, by name."""
    present = plan_of(model)
    if isinstance(model, _Alone):
        if strategy is not None:
            raise CheckpointError(f"`strategy` goes with a model, not with a layer. Received: strategy={quoted(strategy)}")
        return _Alone(Recompute(model.layer), model.name), _Alone(model.layer, model.name), None, {}
    python = keras_graph.runs_python(model)
    own = any(isinstance(layer, Recompute) for layer in keras_graph.sublayers(model))
    if strategy is None and present is None and (own or python):
        twins = [keras_graph.with_executor(model, None) for _ in range(2)]
        return *twins, None, {}
    options = {}
    if isinstance(strategy, (list, tuple)):
        if len(strategy) != 2 or not isinstance(strategy[1], dict) or not set(strategy[1]) <= set(_OPTIONS):
            raise TypeError(
                "A pair as `strategy` must be a strategy and a dict of arguments of `apply`. "
                f"Received: strategy={quoted(strategy)}"
            )
        strategy, options = strategy
    strategy = strategy if strategy is not None else present if present is not None else _all_that_can_be
    # The report says what would be warned of. Functions that recompute inside of layers are met here, too.
    with warnings.catch_warnings(), observed(Observer(values=False)):
        warnings.simplefilter("ignore", CheckpointWarning)
        ours = apply(model, strategy, **options)  # planned as a user's own `apply` would be, not for this batch
        if python:
            held = python_models.layers_of(remove(model)).items()
            reasons = {name: reason_to_stay_plain(layer) for name, layer in held if name in plan_of(ours).layers}
            unfit = {name: reason for name, reason in reasons.items() if reason}
        else:
            stages = Stages(graph_of(model))
            stages.chain(plan_of(ours).batch_size)
            unfit = stages.unfit
    return ours, keras_graph.with_executor(remove(model), None), plan_of(ours), unfit


def _all_that_can_be(chain):
    """A strategy that recomputes all it may, in the smallest ranges that do not change rounding."""
    ranges, start = [], 0
    for cut in range(1, len(chain) + 1):
        if not chain.exact_cuts[cut] and cut < len(chain):
            continue
        if chain.allowed(start, cut):
            ranges.append((start, cut))
        else:
            ranges += [(k, k + 1) for k in range(start, cut) if chain.allowed(k, k + 1)]
        start = cut
    return ranges


def _compile(model, ours, plain, loss, batch):
    """Compiles the copies. Returns what is differentiated, see `CheckReport.loss`, and notes on it."""
    own = keras_graph.compiled_with(model) or {}
    if loss is not None and len(batch) == 1:
        raise CheckpointError(f"The loss {quoted(loss)} needs targets. Received: y=None")
    if loss is not None:
        check_loss(loss)
    used = {"loss": loss} if loss is not None else {k: own[k] for k in ("loss", "loss_weights") if own.get(k) is not None}
    known = isinstance(model, keras.Model) and (used.get("loss") is not None) and len(batch) > 1
    if isinstance(model, keras.Model) and (known or keras_graph.has_own_loss(model)):
        for twin in (ours, plain):
            keras_graph.compile_alone(twin, optimizer=None, auto_scale_loss=False, **used)
        kind = "compute_loss" if keras_graph.has_own_loss(model) else "given" if loss is not None else "compiled"
        return kind, ()
    if len(batch) > 1:
        return "squares", ("`y` is not used: the model is not compiled with a loss, and none is given.",)
    return "squares", ()


def _batch(model, x, y, batch_size):
    """Returns one batch, as a tuple of nested arrays."""
    whole = isinstance(x, (tf.data.Dataset, keras.utils.PyDataset))
    stated = stated_batch(model) if keras_graph.functional_of(model) is not None else None
    if whole:
        batch = batches_of(x, y, None, 1)[0]
    else:
        total = size_of(batches_of(x, y, None, 1)[0])
        batch = batches_of(x, y, batch_size or stated or min(total, _ROWS), 1)[0]
        floatx = keras.backend.floatx()
        batch = keras.tree.map_structure(lambda a: a.astype(floatx) if a.dtype == np.float64 else a, batch)  # as `fit` does
    if whole and batch_size is not None:
        if batch_size > size_of(batch):
            raise CheckpointError(f"The first batch has {size_of(batch)} samples. Received: batch_size={batch_size!r}")
        batch = keras.tree.map_structure(lambda a: a[:batch_size], batch)
    if stated is not None and size_of(batch) != stated:
        raise CheckpointError(
            f"'{model.name}' takes batches of {stated} only, by its inputs. Received: a batch of {size_of(batch)}"
        )
    return batch


def _walk(plan):
    waiting = list(plan.segments) if plan is not None else []
    while waiting:
        segment = waiting.pop()
        yield segment
        waiting += segment.inside


def _nothing(plan, unfit):
    if plan is None:
        return "it holds no `tf_ckpt.Recompute` layer, and calls no function of `tf_ckpt.recompute`"
    if unfit:
        return "; ".join(f"'{name}' runs plain: {reason}" for name, reason in unfit.items())
    return f"the plan of {plan.strategy!r} has no segments"


def _checked(model, modes, batch_size, tolerance, raise_error):
    """Refuses wrong arguments, and returns the modes."""
    if not isinstance(model, keras.Layer):
        raise TypeError(
            "`model` must be a `keras.Model` or a `keras.Layer`. "
            f"Received: model={quoted(model)} of type {type(model).__name__}"
        )
    if getattr(model, "distribute_strategy", None) is not None and model.distribute_strategy.num_replicas_in_sync > 1:
        raise CheckpointError(
            f"'{model.name}' is replicated; a check runs on one device: make the model outside of the strategy's scope. "
            f"Received: a model with {model.distribute_strategy.num_replicas_in_sync} replicas"
        )
    if modes is None:
        modes = ("eager",) if getattr(model, "run_eagerly", False) else ("eager", "graph")
    found = (modes,) if isinstance(modes, str) else modes
    if not isinstance(found, (list, tuple)):
        raise TypeError(f"`modes` must be one of {MODES}, or a list of these. Received: modes={quoted(modes)}")
    if not found or any(mode not in MODES for mode in found):
        raise CheckpointError(f"`modes` must be one of {MODES}, or a list of these. Received: modes={quoted(modes)}")
    if batch_size is not None and (not isinstance(batch_size, numbers.Integral) or isinstance(batch_size, bool)):
        raise TypeError(f"`batch_size` must be an integer. Received: batch_size={quoted(batch_size)}")
    if batch_size is not None and batch_size < 1:
        raise CheckpointError(f"`batch_size` must be at least 1. Received: batch_size={batch_size!r}")
    if tolerance is not None and (not isinstance(tolerance, numbers.Real) or isinstance(tolerance, bool)):
        raise TypeError(f"`tolerance` must be a number. Received: tolerance={quoted(tolerance)}")
    if tolerance is not None and not 0 <= tolerance < 1:
        raise CheckpointError(f"`tolerance` must be a share from 0 up to, not including, 1. Received: tolerance={tolerance!r}")
    if not isinstance(raise_error, bool):
        raise TypeError(f"`raise_error` must be True or False. Received: raise_error={quoted(raise_error)}")
    return tuple(dict.fromkeys(found))
