"""`apply`, `remove`, `plan`: the model that executes a plan."""

import itertools
import warnings
import weakref

import keras

from tf_ckpt import graph as keras_graph
from tf_ckpt import python_models
from tf_ckpt.errors import CheckpointError, CheckpointWarning
from tf_ckpt.execution import executing
from tf_ckpt.planning import default_strategy, make_plan
from tf_ckpt.stages import Stages, refusal
from tf_ckpt.strategies.tree import tree_of

_plans = weakref.WeakKeyDictionary()  # applied model -> (plan, plain model, weak reference to the graph that runs by it)


def plan(
    model,
    strategy=None,
    *,
    batch_size=None,
    memory=None,
    layers=None,
    target=None,
    levels=None,
    optimizer=None,
    device=None,
):
    """Plans what to recompute, and does nothing with it yet.

    Args:
        model: As for `apply`.
        strategy: See `apply`.
        batch_size: Integer that the predicted bytes are for. Defaults to the batch size that the model's inputs state,
            or else 32.
        memory: See `apply`.
        layers: See `apply`.
        target: See `apply`.
        levels: See `apply`.
        optimizer: The optimizer whose slots count, or its name. Defaults to the one that the model is compiled with, or
            else Adam. One that clips by the global norm, scales the loss or accumulates gradients holds all of them at once.
        device: See `apply`.

    Returns:
        A `Plan`, which can be looked at (`summary()`, `plot(path)`), stored (`save(path)`) and applied.

    Raises:
        TypeError: If `model` is not a Keras model, or an argument is of the wrong type.
        CheckpointError: If the model is no graph of layers and `layers` is not given, or the strategy or layers do not exist.
    """
    options = {"memory": memory, "layers": layers, "target": target, "levels": levels}
    options |= {"batch_size": batch_size, "optimizer": optimizer, "device": device}
    model = keras_graph.original(model)
    if isinstance(model, keras.Model) and keras_graph.runs_python(model):
        return _python_plan(model, strategy, options)
    level = graph_of(model)
    strategy = default_strategy(options) if strategy is None else strategy
    made = make_plan(level, model, strategy, curve=True, **options)
    _check_fits(Stages(level), made, model)
    return made


def _python_plan(model, strategy, options):
    strategy = default_strategy(options) if strategy is None else strategy
    return python_models.make_plan(remove(model), strategy, **options)


def apply(model, strategy=None, *, batch_size=None, memory=None, layers=None, target=None, levels=None, device=None):
    """Makes a model that keeps less for the backward pass and recomputes the rest, exactly.

    The result has the class, layers, names, variables (the same objects), inputs and outputs of `model`, which is not
    changed. Compile and fit it as you would `model`. Training is the same to the bit wherever that of `model` is
    deterministic: see "What is exact" in the README. Saved to a `.keras` file, cloned or copied, it keeps its plan; weight
    files are those of `model`, and `export` writes the plain graph.

    Args:
        model: A built Functional or Sequential `keras.Model`, of any subclass. Nested models are planned inside. An
            applied model gets the new plan instead of its own. With `layers`, also a model whose `call` is Python code,
            built or not: its layers are then recomputed one by one wherever its code finds them, in attributes, lists,
            dicts and layers inside layers. What the result holds in the place of such layers are stand-ins that share all
            state with them; what costs and saves how much is not predicted there.
        strategy: What to recompute. Defaults to the one that the other arguments go with, or else to `"sqrt"`. One of:

            - `"sqrt"`: about sqrt(n) segments, balanced by bytes. The least memory for at most one more forward run.
            - `"selective"`: the calls of `layers`; without `layers`, what frees most bytes for each FLOP that is run again,
              parts inside layers among it (the core of attention, activations), until half of the activation bytes are
              gone, or 5 % of the step's FLOPs are added, or `target` is reached.
            - `"full"`: every stretch between two cuts that a single tensor crosses; one that alone frees nothing is joined
              to the next.
            - `"budget"`: the least recompute whose predicted peak fits `memory`, segments within segments included.
            - `"recursive"`: segments within segments, `levels` deep: the least memory of all, for deep models.
            - `"none"`: nothing.
            - a `Plan`, or a callable that takes a `tf_ckpt.strategies.Chain` and returns a `Plan`, or ranges of its stages:
              pairs (start, stop) or `tf_ckpt.strategies.Range`s.
        batch_size: Integer, the batch size to plan for. Defaults to the one that the model's inputs state, or else 32.
        memory: With `"budget"`: bytes as an integer, a string such as `"6GiB"`, or a share of the plain model's peak above 0
            and below 1. Weights, optimizer slots, gradients and activations must fit, after the first step (which makes
            the slots), and what an allocator loses on a bad day: 4 % and 1.6 times the largest tensor, at most 29 % together.
            Defaults to the memory of the device, less a margin of 8 %, where it reports one.
        layers: With `"selective"`: a list of layer names, layer classes, `fnmatch` patterns of names, layers, and
            `tf_ckpt.strategies.Pick`s, which take these by position (every k-th, the first, the last); or a callable
            `layer -> bool`. Where `call` is Python code, a layer also has the name of the attribute that holds it:
            `"encoder"`, `"blocks/0"` in a list or dict, `"encoder/blocks/0"` inside another layer.
        target: With `"selective"`: the share of the activation bytes to come down to, above 0 and below 1.
        levels: With `"recursive"`: how deep segments may lie within segments. Defaults to as many as pay.
        device: A `Calibration` from `tf_ckpt.calibrate`, or the path of its file: what is run again is then counted in the
            seconds that it should take on that device. Defaults to FLOPs.

    Returns:
        A model of the same class as `model`.

    Raises:
        TypeError: If `model` is not a Keras model, or an argument is of the wrong type.
        CheckpointError: If the model is no graph of layers and `layers` is not given, or the strategy or layers do not exist.

    Example:

    ```python
    model = keras.applications.ResNet50(weights=None, classes=10)
    model = tf_ckpt.apply(model, strategy="sqrt")
    model.compile("adam", "sparse_categorical_crossentropy")
    model.fit(x, y)

    model = tf_ckpt.apply(MyTransformer(), layers=[Block])  # its `call` is Python code
    ```
    """
    model = keras_graph.original(model)
    options = {"memory": memory, "layers": layers, "target": target, "levels": levels}
    options |= {"batch_size": batch_size, "device": device}
    if isinstance(model, keras.Model) and keras_graph.runs_python(model):
        made, plain = _python_plan(model, strategy, options), remove(model)
        applied = python_models.executing(plain, made)
        _plans[applied] = (made, plain, _no_graph)
        return applied
    level = graph_of(model)
    strategy = default_strategy(options) if strategy is None else strategy
    made = make_plan(level, model, strategy, **options)
    plain = remove(model)
    stages = Stages(level)
    _check_fits(stages, made, model)
    if made.segments:
        applied = executing(level, stages, tree_of(made.ranges()), _Reminder(model.name))
    else:
        applied = keras_graph.with_executor(plain, None)
        if isinstance(strategy, str) and strategy != "none":
            _warn(f"Nothing in model '{model.name}' is worth recomputing by strategy {made.strategy!r}: it trains as it was.")
    if made.segments and not keras_graph.runs_its_graph(model):
        _warn(
            f"Model '{model.name}' has a `call` of its own that does not seem to run its graph (`super().call`), so that "
            "nothing is recomputed and no memory saved. Training is right. Use `tf_ckpt.Recompute` on its layers."
        )
    _plans[applied] = (made, plain, weakref.ref(keras_graph.functional_of(applied)))
    return applied


def _no_graph():
    return None


def _warn(message):
    warnings.warn(message, CheckpointWarning, stacklevel=3)


class _Reminder:
    """Says that a plan ends: each of its methods when Keras does what its name says."""

    def __init__(self, name):
        self._name, self._said, self._said_unfrozen = name, False, False

    def changed(self):
        if not self._said:
            self._said = True
            warnings.warn(
                f"The layers of model '{self._name}' were changed, or built again, so that its plan no longer applies: it runs "
                "plain from now on. Call `tf_ckpt.apply` on it again.",
                CheckpointWarning,
                stacklevel=3,
            )

    def unfrozen(self):
        if not self._said_unfrozen:
            self._said_unfrozen = True
            warnings.warn(
                f"Weights of model '{self._name}' that were frozen when its plan was made are trainable now. What comes before "
                "the plan's segments kept nothing then, and keeps all now. Training is right. Call `tf_ckpt.apply` again.",
                CheckpointWarning,
                stacklevel=3,
            )

    def legacy_format(self):
        warnings.warn(
            f"The plan of model '{self._name}' is not stored: an HDF5 file has no place for it, and what is loaded is the "
            "plain model. Save to a `.keras` file, or call `tf_ckpt.apply` again on what is loaded. "
            "(`tf_ckpt.remove(model)` gives the plain model, which is stored without this warning.)",
            CheckpointWarning,
            stacklevel=3,
        )


def remove(model):
    """Returns the plain model that `model` was made from by `apply`, or `model` itself if it has no plan, or none any more.

    Args:
        model: A `keras.Model`.

    Returns:
        A model with the same layers and variables, that keeps all activations.

    Raises:
        TypeError: If `model` is not a Keras model.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"`model` must be a `keras.Model`. Received: model={model!r} of type {type(model).__name__}")
    model = keras_graph.original(model)
    if plan_of(model) is None:
        return model
    _, plain, graph = _plans[model]
    late = graph is _no_graph and model.built and not plain.built
    return keras_graph.plain_copy(model) if late else plain  # what the model has made since is to be there


def plan_of(model):
    """Returns the `Plan` that `model` executes, or None if it is a plain model."""
    if not isinstance(model, keras.Model) or model not in _plans:
        return None
    made, _, graph = _plans[model]
    return made if graph() is keras_graph.functional_of(model) else None  # `Sequential.add` makes another graph


def had_plan(model):
    """Returns True if `model` was made by `apply` with something to recompute, executed or not."""
    return model in _plans and bool(_plans[model][0].segments)


def graph_of(model):
    """Returns the `graph.Level` of a model, or raises the error that says why there is none."""
    if not isinstance(model, keras.Model):
        hint = " For a single layer use `tf_ckpt.Recompute`." if isinstance(model, keras.Layer) else ""
        raise TypeError(f"`model` must be a `keras.Model`.{hint} Received: model={model!r} of type {type(model).__name__}")
    level = keras_graph.read(model)
    if level is None:
        what = (
            ("is not built yet: call it on data or give it a `keras.Input`" if model.layers else "has no layers yet: add some")
            if isinstance(model, keras.Sequential)
            else (
                "is no graph of layers, since its `call` is Python code. What its layers cost cannot be predicted: "
                "`tf_ckpt.apply(model, layers=[...])` recomputes those that it is told; or wrap them where they are made:\n\n"
                f"{python_models.TWO_LINES}\n"
            )
        )
        raise CheckpointError(f"Model '{model.name}' {what}.\nReceived: model of class {type(model).__name__}")
    return level


def _check_fits(stages, made, model):
    if tuple(stages.names) != made.layers:
        raise CheckpointError(_difference(stages.names, made.layers, made.strategy))
    why = refusal(stages, made)
    if why:
        raise CheckpointError(
            f"The plan does not fit model '{model.name}': {why}. Received: plan of strategy {made.strategy!r}"
        )


def _difference(have, want, strategy):
    pairs = itertools.zip_longest(have, want, fillvalue="nothing")
    number, (mine, theirs) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    return (
        "A plan fits models of the same calls only: `tf_ckpt.plan(model, ...)` makes one for this. "
        f"Received: a plan of strategy {strategy!r}; its call {number} is '{theirs}', the model's is '{mine}'."
    )
