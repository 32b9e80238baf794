"""`apply`, `remove`, `plan`: the model that executes a plan."""

import itertools
import warnings
import weakref

import keras

from tf_ckpt import graph as keras_graph
from tf_ckpt import inspection
from tf_ckpt.errors import CheckpointError, CheckpointWarning
from tf_ckpt.planning import make_plan
from tf_ckpt.replay import run
from tf_ckpt.stages import Stages

_plans = weakref.WeakKeyDictionary()  # applied model -> (plan, plain model)


def plan(model, strategy="sqrt", *, layers=None, batch_size=None):
    """Plans what to recompute, and does nothing with it yet.

    Args:
        model: A built Functional or Sequential `keras.Model`, of any subclass.
        strategy: See `apply`.
        layers: See `apply`.
        batch_size: Integer that the predicted bytes are for. Defaults to the batch size that the model's inputs state,
            or else 32.

    Returns:
        A `Plan`.

    Raises:
        TypeError: If `model` is not a Keras model, or an argument is of the wrong type.
        CheckpointError: If the model is no graph of layers, or the strategy or layers do not exist.
    """
    return make_plan(_graph_of(model), model, strategy, layers, batch_size)


def apply(model, strategy="sqrt", *, layers=None, batch_size=None):
    """Makes a model that keeps less for the backward pass and recomputes the rest, exactly.

    The result has the class, layers, names, variables (the same objects), inputs and outputs of `model`, which is not
    changed. Compile and fit it as you would `model`. Training is the same to the bit wherever that of `model` is
    deterministic: see "What is exact" in the README.

    Args:
        model: A built Functional or Sequential `keras.Model`, of any subclass. Nested models are planned inside. An
            applied model gets the new plan instead of its own.
        strategy: What to recompute. One of:

            - `"sqrt"`: about sqrt(n) segments, balanced by bytes. The least memory for at most one more forward run.
            - `"selective"`: the calls of `layers`; without `layers`, what is cheap and large (normalisation, activations,
              dropout, pooling, adding, attention), so that convolutions and dense layers are not run again.
            - `"full"`: every stretch between two cuts that a single tensor crosses; one that alone frees nothing is joined
              to the next.
            - `"none"`: nothing.
            - a `Plan`, or a callable that takes a `tf_ckpt.strategies.Chain` and returns ranges of its stages or a `Plan`.
        layers: With `"selective"`: a list of layer names, layer classes and `fnmatch` patterns of names, or a callable
            `layer -> bool`.
        batch_size: Integer, the batch size to plan for. It decides how far weight gradients count against activations.
            Defaults to the one that the model's inputs state, or else 32.

    Returns:
        A model of the same class as `model`.

    Raises:
        TypeError: If `model` is not a Keras model, or an argument is of the wrong type.
        CheckpointError: If the model is no graph of layers, or the strategy or layers do not exist.

    Example:

    ```python
    model = keras.applications.ResNet50(weights=None, classes=10)
    model = tf_ckpt.apply(model, strategy="sqrt")
    model.compile("adam", "sparse_categorical_crossentropy")
    model.fit(x, y)
    ```
    """
    level = _graph_of(model)
    made = make_plan(level, model, strategy, layers, batch_size)
    plain = remove(model)
    stages = Stages(level)
    if tuple(stages.names) != made.layers:
        raise CheckpointError(_difference(stages.names, made.layers))
    if made.segments:
        applied = _executing(level, stages, made.ranges(), "", 0, _Reminder(model.name))
    else:
        applied = keras_graph.with_executor(plain, None)
        if isinstance(strategy, str) and strategy != "none":
            _warn(f"Nothing in model '{model.name}' is worth recomputing by strategy {made.strategy!r}: it trains as it was.")
    if made.segments and not keras_graph.runs_its_graph(model):
        _warn(
            f"Model '{model.name}' has a `call` of its own that does not seem to run its graph (`super().call`), so that "
            "nothing is recomputed and no memory saved. Training is right. Use `tf_ckpt.Recompute` on its layers."
        )
    _plans[applied] = (made, plain)
    return applied


def _warn(message):
    warnings.warn(message, CheckpointWarning, stacklevel=3)


class _Reminder:
    """Says once that a saved, cloned or pickled model is a plain one."""

    def __init__(self, name):
        self._name, self._said = name, False

    def __call__(self):
        if not self._said:
            self._said = True
            warnings.warn(
                f"The plan of model '{self._name}' is not stored with it: call `tf_ckpt.apply` again on what is loaded or "
                "cloned. (`tf_ckpt.remove(model)` gives the plain model, which is stored without this warning.)",
                CheckpointWarning,
                stacklevel=4,
            )


def remove(model):
    """Returns the plain model that `model` was made from by `apply`, or `model` itself.

    Args:
        model: A `keras.Model`.

    Returns:
        A model with the same layers and variables, that keeps all activations.

    Raises:
        TypeError: If `model` is not a Keras model.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"`model` must be a `keras.Model`. Received: model={model!r} of type {type(model).__name__}")
    return _plans[model][1] if model in _plans else model


def plan_of(model):
    """Returns the `Plan` that `model` executes, or None if it is a plain model."""
    if model not in _plans:
        return None
    made = _plans[model][0]
    return made if not made.segments or keras_graph.executes(model) else None


def _graph_of(model):
    if not isinstance(model, keras.Model):
        hint = " For a single layer use `tf_ckpt.Recompute`." if isinstance(model, keras.Layer) else ""
        raise TypeError(f"`model` must be a `keras.Model`.{hint} Received: model={model!r} of type {type(model).__name__}")
    level = keras_graph.read(model)
    if level is None:
        what = (
            "is not built yet: call it on data or give it a `keras.Input`"
            if isinstance(model, keras.Sequential)
            else (
                "is no graph of layers, since its `call` is Python code. Wrap its large parts where they are made:\n\n"
                "    self.block = tf_ckpt.Recompute(Block(...))  # instead of Block(...)"
            )
        )
        raise CheckpointError(f"Model '{model.name}' {what}.\nReceived: model of class {type(model).__name__}")
    return level


def _difference(have, want):
    pairs = itertools.zip_longest(have, want, fillvalue="nothing")
    number, (mine, theirs) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    return f"The plan was made for another model: its call {number} is '{theirs}', the model's is '{mine}'."


class _Piece:
    """Nodes that run together: one segment, or one plain node."""

    def __init__(self, nodes, recompute):
        self.nodes, self.recompute = nodes, recompute
        self.memo = inspection.Memo()
        self.name = nodes[0].name if len(nodes) == 1 else f"{nodes[0].name}..{nodes[-1].name}"
        self.takes, self.makes = (), ()

    def __call__(self, operation_fn, values):
        if not self.recompute:
            for node in self.nodes:
                node.call(operation_fn, values)
            return

        def segment(*tensors):
            inside = dict(zip(self.takes, tensors, strict=True))
            for node in self.nodes:
                node.call(operation_fn, inside)
            return [inside[x] for x in self.makes]

        made = run(segment, [values[x] for x in self.takes], {}, self.name, self.memo)
        values.update(zip(self.makes, made, strict=True))


class _Inside:
    """Stands for a nested model in a node: the copy of it that executes its part of the plan."""

    def __init__(self, node, model):
        self._node, self._model = node, model
        self.name, self.inputs, self.outputs = node.name, node.inputs, node.outputs

    def call(self, operation_fn, values):
        self._node.call(lambda operation: operation_fn(self._model), values)


def _executing(level, stages, ranges, prefix, first, on_config=None):
    """Returns a copy of the level's model that runs the recomputed `ranges` of stages. `first` is its first stage."""
    pieces, position, starts = [], first, dict(ranges)
    stop = None
    for node in level.nodes:
        start, end = stages.inside.get(prefix + node.name, (position, position + 1))
        position = end
        if stop is not None and end <= stop:
            pieces[-1].append(node)
        elif start in starts and end <= starts[start]:
            stop = starts[start]
            pieces.append([node])
        else:
            stop = None
            if node.inner is not None and any(start <= s < end for s, _ in ranges):
                node = _Inside(node, _executing(node.inner, stages, ranges, f"{prefix}{node.name}/", start))
            pieces.append(_Piece([node], False))
            continue
        if stop == end:
            pieces[-1] = _Piece(pieces[-1], True)
            stop = None
    _connect(pieces, level.outputs)

    def execute(inputs, operation_fn):
        values = dict(zip(level.inputs, inputs, strict=True))
        for piece in pieces:
            piece(operation_fn, values)
        return [values[x] for x in level.outputs]

    return keras_graph.with_executor(remove(level.model), execute, on_config)


def _connect(pieces, outputs):
    """Notes what each piece takes and makes, leaving out what nobody reads."""
    read = set(outputs)
    for piece in reversed(pieces):
        made = [x for node in piece.nodes for x in node.outputs]
        taken = dict.fromkeys(x for node in piece.nodes for x in node.inputs)
        inside = set(made)
        piece.makes = tuple(x for x in made if x in read)
        piece.takes = tuple(x for x in taken if x not in inside)
        read.update(piece.takes)
