"""From what the user asked for to a `Plan`: arguments checked, layers found, the strategy run."""

import collections.abc
import difflib
import fnmatch
import inspect
import numbers

import keras
import numpy as np

from tf_ckpt.errors import CheckpointError
from tf_ckpt.plan import Plan
from tf_ckpt.stages import Stages
from tf_ckpt.strategies import full, selective, sqrt

STRATEGIES = ("sqrt", "selective", "full", "none")
_DEFAULT_BATCH = 32
_STORED = (keras.layers.Dense, keras.layers.EinsumDense, keras.layers.RNN, keras.layers.Bidirectional)
_ATTENTION = (
    keras.layers.MultiHeadAttention,
    keras.layers.GroupQueryAttention,
    keras.layers.Attention,
    keras.layers.AdditiveAttention,
)


def make_plan(level, model, strategy, layers, batch_size):
    """Returns the `Plan` for a model.

    Args:
        level: The model's `graph.Level`.
        model: The model.
        strategy: See `tf_ckpt.apply`.
        layers: See `tf_ckpt.apply`.
        batch_size: See `tf_ckpt.apply`.
    """
    _check(strategy, layers, batch_size)
    if isinstance(strategy, Plan):
        return strategy
    stages = Stages(level)
    if batch_size is None:
        stated = next((x.shape[0] for x in model.inputs if len(x.shape) and x.shape[0] is not None), None)
        batch_size = stated or _DEFAULT_BATCH
    chosen = None if layers is None else _chosen(stages, layers)
    chain = stages.chain(int(batch_size))
    if callable(strategy):
        made = strategy(chain)
        return made if isinstance(made, Plan) else Plan.of(chain, _ranges(made), getattr(strategy, "__name__", "callable"))
    if strategy == "none":
        ranges = []
    elif strategy == "sqrt":
        ranges = sqrt(chain)
    elif strategy == "full":
        ranges = full(chain)
    elif chosen is not None:
        ranges = selective(chain, chosen)
        if not ranges:
            raise CheckpointError(
                "None of the chosen layers can be recomputed: embeddings and `Recompute` layers never are. "
                f"Received: layers={layers!r}"
            )
    else:
        ranges = selective(chain, [_cheap(node, cost) for node, cost in zip(stages.nodes, chain.flops, strict=True)], False)
    return Plan.of(chain, ranges, strategy)


def _check(strategy, layers, batch_size):
    if not (isinstance(strategy, (str, Plan)) or callable(strategy)):
        raise TypeError(
            f"`strategy` must be one of {STRATEGIES}, a `Plan`, or a callable. Received: strategy={strategy!r} "
            f"of type {type(strategy).__name__}"
        )
    if isinstance(strategy, str) and strategy not in STRATEGIES:
        near = difflib.get_close_matches(strategy, STRATEGIES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise CheckpointError(f"`strategy` must be one of {STRATEGIES}.{hint} Received: strategy={strategy!r}")
    if layers is not None and strategy != "selective":
        raise CheckpointError(f"`layers` goes with strategy='selective'. Received: strategy={strategy!r}, layers={layers!r}")
    if batch_size is not None and (not isinstance(batch_size, numbers.Integral) or isinstance(batch_size, bool)):
        raise TypeError(f"`batch_size` must be an integer. Received: batch_size={batch_size!r}")
    if batch_size is not None and batch_size < 1:
        raise CheckpointError(f"`batch_size` must be at least 1. Received: batch_size={batch_size!r}")


def _ranges(made):
    """Checks what a strategy of the user's own returned."""
    made = getattr(made, "tolist", lambda: made)()  # an array
    pairs = list(made) if isinstance(made, collections.abc.Iterable) and not isinstance(made, (str, dict)) else [made]
    for pair in pairs:
        numbers_of = pair if isinstance(pair, (list, tuple)) and len(pair) == 2 else [None]
        if not all(isinstance(x, numbers.Integral) and not isinstance(x, bool) for x in numbers_of):
            raise TypeError(
                f"A strategy must return a `Plan`, or a list of pairs (start, stop) of stages, as integers. Received: {made!r}"
            )
    return pairs


def _chosen(stages, layers):
    """Returns a boolean for each stage: whether `layers` names it."""
    if callable(layers) and not inspect.isclass(layers):
        operations = [node.operation for node in stages.nodes]
        chosen = np.array([isinstance(x, keras.Layer) and bool(layers(x)) for x in operations])
        return _all_of(stages, chosen, f"the predicate layers={layers!r}")
    if isinstance(layers, str) or not isinstance(layers, (list, tuple, set, frozenset)):
        raise TypeError(
            "`layers` must be a list of layer names, layer classes and patterns, or a callable `layer -> bool`. "
            f"Received: layers={layers!r} of type {type(layers).__name__}"
        )
    chosen = np.zeros(len(stages.nodes), bool)
    if not layers:
        raise CheckpointError(f"`layers` names no layer; for a plain model use strategy='none'. Received: layers={layers!r}")
    for item in layers:
        if inspect.isclass(item) and issubclass(item, keras.Layer):
            found = _matching(stages, lambda name, layer, item=item: isinstance(layer, item))
        elif isinstance(item, str):
            found = _matching(stages, lambda name, layer, item=item: fnmatch.fnmatchcase(name, item))
        elif isinstance(item, keras.Layer):
            found = _matching(stages, lambda name, layer, item=item: layer is item)
        else:
            raise TypeError(f"`layers` holds names, patterns, layer classes or layers. Received: {item!r} in layers={layers!r}")
        chosen |= _all_of(stages, found, repr(item.name if isinstance(item, keras.Layer) else item))
    return chosen


def _matching(stages, matches):
    found = np.array(
        [
            any(matches(n, node.operation) for n in (name, name.rsplit("/")[-1], node.operation.name))
            for name, node in zip(stages.names, stages.nodes, strict=True)
        ]
    )
    for name, (start, stop) in stages.inside.items():
        if any(matches(n, stages.models[name]) for n in (name, name.rsplit("/")[-1], stages.models[name].name)):
            found[start:stop] = True
    return found


def _all_of(stages, found, what):
    if found.any():
        return found
    names = sorted({node.operation.name for node in stages.nodes} | set(stages.inside))
    near = difflib.get_close_matches(what.strip("'"), names, n=3, cutoff=0.4)
    hint = f" Near matches: {', '.join(near)}." if near else f" The model has: {', '.join(names[:20])}."
    raise CheckpointError(f"No layer of the model matches {what}.{hint}")


def _cheap(node, flops):
    layer = node.operation
    if isinstance(layer, _STORED) or not isinstance(layer, keras.Layer):
        return not isinstance(layer, _STORED)
    if isinstance(layer, _ATTENTION):
        return True
    # Convolutions, and layers of one's own that hold products: their weights are matrices.
    return all(len(v.shape) < 2 for v in layer.trainable_weights)
