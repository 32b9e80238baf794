"""What `layers=` chooses: layers by name, pattern, class, object, predicate and position."""

import difflib
import fnmatch
import inspect
from typing import NamedTuple

import keras

from tf_ckpt.errors import CheckpointError, quoted
from tf_ckpt.graph import original
from tf_ckpt.strategies.pick import Pick


class Candidate(NamedTuple):
    """A call or layer of a model that can be chosen.

    Attributes:
        name: Its name in the model, unique: `outer/inner` for what is inside of another.
        layer: The layer or operation.
        model: Whether it is a nested model whose calls are candidates as well.
    """

    name: str
    layer: object
    model: bool = False

    @property
    def names(self):
        """All that it can be called."""
        return self.name, self.name.rsplit("/")[-1], self.layer.name


def chosen(candidates, layers):
    """Returns the set of the candidates' names that `layers` names.

    Args:
        candidates: List of `Candidate`, in order.
        layers: See `tf_ckpt.apply`.

    Raises:
        TypeError: If `layers` or something in it is of the wrong type.
        CheckpointError: If something in it names no layer.
    """
    if callable(layers) and not inspect.isclass(layers) and not isinstance(layers, keras.Layer):
        found = [x for x in candidates if not x.model and isinstance(x.layer, keras.Layer) and bool(layers(x.layer))]
        return _names(found, candidates, f"the predicate layers={layers!r}")
    if isinstance(layers, (str, Pick)) or not isinstance(layers, (list, tuple, set, frozenset)):
        hint = f" Give a list: layers=[{quoted(layers)}]." if isinstance(layers, (str, Pick)) else ""
        raise TypeError(
            "`layers` must be a list of layer names, layer classes, patterns, layers and `tf_ckpt.strategies.Pick`s, or a "
            f"callable `layer -> bool`.{hint} Received: layers={layers!r} of type {type(layers).__name__}"
        )
    if not layers:
        raise CheckpointError(f"`layers` names no layer; for a plain model use strategy='none'. Received: layers={layers!r}")
    names = set()
    for item in layers:
        names |= _names(_matching(candidates, item, layers), candidates, _said(item))
    return names


def outermost(names):
    """Returns those of a set of names that are not inside another of them."""
    return {name for name in names if not any(name[:i] in names for i, c in enumerate(name) if c == "/")}


def _matching(candidates, item, layers):
    """Returns the candidates that one item of `layers` names."""
    if isinstance(item, Pick):
        return _picked(candidates, item, layers)
    if inspect.isclass(item) and issubclass(item, keras.Layer):
        return [x for x in candidates if isinstance(x.layer, item)]
    if isinstance(item, str):
        return [x for x in candidates if any(fnmatch.fnmatchcase(name, item) for name in x.names)]
    if isinstance(item, keras.Layer):
        return [x for x in candidates if x.layer is original(item)]
    raise TypeError(
        "`layers` holds names, patterns, layer classes, layers or `tf_ckpt.strategies.Pick`s. "
        f"Received: {item!r} in layers={layers!r}"
    )


def _picked(candidates, pick, layers):
    items = pick.of if isinstance(pick.of, (list, tuple, set, frozenset)) else ["*" if pick.of is None else pick.of]
    names = set()
    for item in items:
        names |= _names(_matching(candidates, item, layers), candidates, _said(item))
    outer = outermost(names)
    found = [x for x in candidates if x.name in outer]
    distinct = list({id(x.layer): x.layer for x in found}.values())
    taken = {id(x) for x in pick.take(distinct)}
    if not taken:
        shown = ", ".join(x.name for x in distinct[:20])
        raise CheckpointError(f"{pick!r} takes none of the {len(distinct)} layers that it counts: {shown}.")
    return [x for x in found if id(x.layer) in taken]


def _said(item):
    return repr(item.name if isinstance(item, keras.Layer) else item)


def _names(found, candidates, what):
    if found:
        return {x.name for x in found}
    names = sorted({x.name if x.model or not x.names[1].startswith(x.layer.name) else x.layer.name for x in candidates})
    near = difflib.get_close_matches(what.strip("'"), names, n=3, cutoff=0.4)
    hint = f" Near matches: {', '.join(near)}." if near else f" The model has: {', '.join(names[:20])}."
    raise CheckpointError(f"No layer of the model matches {what}.{hint}")
