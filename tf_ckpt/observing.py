"""What happens in the forward run and the re-run of each recomputed segment, layer by layer, and where they part.

An `Observer` is told by `replay` of each run. Within a run it notes each call of a layer: what goes in, masks and `training`
included, and what comes out. The first thing that is not alike in both runs says which layer it comes from: the one that
returned something else for the same inputs, or, where inputs differ already, the one whose code passes them on.
"""

import contextlib
import dataclasses
import itertools

import keras
import numpy as np
import tensorflow as tf

from tf_ckpt import graph as keras_graph
from tf_ckpt.check_report import gap
from tf_ckpt.layers.recompute import Recompute


@dataclasses.dataclass
class Event:
    """A layer's call, as it begins or ends, or what a segment returns or writes.

    Attributes:
        kind: `"enter"`, `"exit"`, `"result"`, `"loss"` or `"write"`.
        layer: The layer, operation or variable; None for a segment.
        owners: The layers around it, outermost first.
        leaves: List of pairs of what it is, in words, and a value: a tensor (an array in eager mode), or of Python.
    """

    kind: str
    layer: object
    owners: tuple
    leaves: list


class Trace:
    """The events of one run of a segment, or of a whole model."""

    def __init__(self, name, around):
        self.name, self.around = name, around
        self.events, self.kept = [], {}


class Pair:
    """Something in a forward run, and the same in the re-run.

    Attributes:
        trace: The forward run's `Trace`.
        event: The forward run's `Event`.
        problem: `(kind, text)` if they are known to differ, else None; then `a` and `b` are to be compared.
        what: What it is, in words.
        a: Tensor or array of the forward run.
        b: That of the re-run.
    """

    def __init__(self, trace, event, what, a=None, b=None, problem=None):
        self.trace, self.event, self.what, self.a, self.b, self.problem = trace, event, what, a, b, problem


class Observer:
    """Notes what recomputed segments do in a scope. See `replay.observed`.

    Args:
        values: Whether layers' values are noted, which takes memory; else only which segments run.
        known: The `id`s of the model's layers.
    """

    def __init__(self, values=True, known=frozenset()):
        self.values, self._known = values, known
        self.plain, self.forwards, self.reruns, self.last = {}, {}, set(), None
        self.pairs, self.compared, self.inside = [], 0, {}
        self._stack, self._traces, self._open, self._whole = [], {}, [], None
        self._home = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    @contextlib.contextmanager
    def watching(self):
        """The scope in which calls of layers are noted."""
        if not self.values:
            yield
            return
        with keras_graph.watching_calls(self._around):
            yield

    @contextlib.contextmanager
    def whole(self, name):
        """A scope that is noted like the run of a segment; gives its `Trace`."""
        self._whole = trace = Trace(name, ())
        self._open.append(trace)
        try:
            yield trace
        finally:
            self._open.pop()

    # What `replay` tells.

    @contextlib.contextmanager
    def calling(self, run, again):
        trace = Trace(run.name, tuple(self._stack))
        self._traces[run, again] = self.last = trace
        self._open.append(trace)
        try:
            yield
        finally:
            self._open.pop()

    def called(self, run, again, result, updates, losses):
        trace = self._traces[run, again]
        if self.values:
            values = [("result", x) for x in _flat(result)] + [("mask", x) for x in _masks(result)]
            trace.events.append(Event("result", None, trace.around, self._leaves(trace, values)))
            for layer, value in losses:
                trace.events.append(Event("loss", layer, trace.around, self._leaves(trace, [("added loss", value)])))
            for variable, value in self._written(run, updates):
                trace.events.append(Event("write", variable, trace.around, self._leaves(trace, [("value written", value)])))
        if not again:
            self.forwards.setdefault(run.name, len(self.forwards))
            return
        self.reruns.add(run.name)
        forward = self._traces.pop((run, False), None)
        del self._traces[run, True]
        if self.values and forward is not None:
            found = list(pairs(forward, trace, self._known))
            if self._home is None:  # what is alike can be let go of
                self.compared += sum(pair.problem is None for pair in found)
                found = [pair for pair in found if pair.problem is not None or differs(pair)]
            self.pairs.append((self.forwards[run.name], found))

    def runs_plain(self, name, reason):
        self.plain.setdefault(name, reason)

    # Layers

    def _around(self, operation, call, args, kwargs):
        operation = keras_graph.original(operation)
        if not self._open:
            self._stack.append(operation)
            try:
                return call(*args, **kwargs)
            finally:
                self._stack.pop()
        self.inside.setdefault(id(operation), (operation, tuple(self._stack)))
        values = [("input", x) for x in _flat(args)]
        values += [(f"`{name}`", x) for name in sorted(kwargs) for x in _flat(kwargs[name])]
        values += [("mask", x) for x in _masks((args, kwargs))] + [("`training`", keras_graph.current_training())]
        self._note("enter", operation, values)
        self._stack.append(operation)
        try:
            result = call(*args, **kwargs)
        finally:
            self._stack.pop()
        self._note("exit", operation, [("result", x) for x in _flat(result)])
        return result

    def _note(self, kind, operation, values):
        for trace in self._open:
            trace.events.append(Event(kind, operation, tuple(self._stack), self._leaves(trace, values)))

    def _leaves(self, trace, values):
        return [(label, self._leaf(trace, x)) for label, x in values]

    def _leaf(self, trace, value):
        if isinstance(value, (tf.Variable, keras.Variable)):
            return type(value)
        if not tf.is_tensor(value):
            known = isinstance(value, (bool, int, float, str, bytes, type(None), np.generic))
            return value if known or isinstance(value, np.ndarray) else type(value)
        if value.dtype in (tf.resource, tf.variant) or (
            self._home is not None and getattr(value, "graph", None) is not self._home
        ):
            return tf.Tensor
        if self._home is not None:
            return value
        if not hasattr(value, "numpy"):  # of a function that is traced inside
            return tf.Tensor
        if value._id not in trace.kept:
            trace.kept[value._id] = value.numpy()
        return trace.kept[value._id]

    @staticmethod
    def _written(run, updates):
        variables = {number: seen.variable for number, seen in run.record.seen.items()}
        return [(variables[number], value) for number, value in updates.items() if number in variables]

    # Afterwards

    def tensors(self):
        """Returns all graph tensors that are to be compared, each once."""
        compared = [pair for _, members in self.pairs for pair in members if pair.problem is None]
        found = {id(x): x for pair in compared for x in (pair.a, pair.b)}
        if self._whole is not None:
            found |= {id(x): x for event in self._whole.events for _, x in event.leaves if tf.is_tensor(x)}
        return list(found.values())

    def first_problems(self):
        """Returns what `first_differences` would, as far as it is known without values."""
        known = [(order, [p for p in members if p.problem is not None][:1]) for order, members in self.pairs]
        return [pair for _, members in sorted(known, key=lambda x: x[0]) for pair in members]

    def trace(self, tensors, arrays):
        """Returns the `Trace` of `whole`, with values in the place of graph tensors."""
        values = {id(x): array for x, array in zip(tensors, arrays, strict=True)}
        for event in self._whole.events:
            event.leaves = [(label, values.get(id(x), x) if tf.is_tensor(x) else x) for label, x in event.leaves]
        return self._whole

    def first_differences(self, tensors=(), arrays=(), allowed=0.0):
        """Returns the first `Pair` that differs in each re-run, with its `Gap` or None, in the order of the model.

        Args:
            tensors: What `tensors` returned.
            arrays: Their values.
            allowed: Number; differences of floats up to this share of the largest value are none.
        """
        values = {id(x): array for x, array in zip(tensors, arrays, strict=True)}
        found = []
        for _, members in sorted(self.pairs, key=lambda member: member[0]):
            for pair in members:
                if pair.problem is None and values:
                    pair.a, pair.b = values[id(pair.a)], values[id(pair.b)]
                    self.compared += 1
            first = next((pair for pair in members if pair.problem is not None or differs(pair, allowed)), None)
            if first is not None:
                found.append(first)
        return found


def path_of(operations):
    """Returns the names of nested calls as one, `outer/inner`, without those of `Recompute`s, which are their layers'."""
    return "/".join(x.name for x in operations if not isinstance(x, Recompute))


def pairs(forward, again, known=frozenset()):
    """Yields what is to be alike in two `Trace`s of the same segment, in order, up to the first call that only one has.

    Args:
        forward: The forward run's `Trace`.
        again: That of the re-run.
        known: The `id`s of the model's layers. Others are made in each call anew: that they are of the same class must do.
    """
    for mine, theirs in itertools.zip_longest(forward.events, again.events):
        event = mine or theirs
        if mine is None or theirs is None or mine.kind != theirs.kind or not _same_layer(mine.layer, theirs.layer, known):
            here, there = (_called(x) for x in (mine, theirs))
            kind = "write" if event.kind == "write" else "calls"
            yield Pair(forward, event, "", problem=(kind, f"{there} in the re-run, but {here} in the forward run"))
            return
        if [label for label, _ in mine.leaves] != [label for label, _ in theirs.leaves]:
            text = f"{len(theirs.leaves)} inputs, results or masks in the re-run, {len(mine.leaves)} in the forward run"
            yield Pair(forward, mine, "", problem=("calls", f"{_called(mine)} with {text}"))
            return
        labels = [label for label, _ in mine.leaves]
        for number, ((label, a), (_, b)) in enumerate(zip(mine.leaves, theirs.leaves, strict=True)):
            yield from _pair(forward, mine, label if labels.count(label) == 1 else f"{label} {number}", a, b)


def _same_layer(a, b, known):
    return a is b or (type(a) is type(b) and not (id(a) in known and id(b) in known))


def _pair(trace, event, what, a, b):
    arrays = [isinstance(x, (np.ndarray, np.generic)) or tf.is_tensor(x) for x in (a, b)]
    if not any(arrays):
        if type(a) is not type(b) or not (a == b or (a != a and b != b)):
            yield Pair(trace, event, what, problem=("value", f"{what} is {b!r} in the re-run, {a!r} in the forward run"))
    elif not all(arrays):
        yield Pair(trace, event, what, problem=("value", f"{what} is an array in one of the two runs only"))
    elif a.dtype != b.dtype:
        dtypes = [str(getattr(x.dtype, "name", x.dtype)) for x in (b, a)]
        yield Pair(
            trace, event, what, problem=("dtype", f"{what} is {dtypes[0]} in the re-run, {dtypes[1]} in the forward run")
        )
    elif tf.is_tensor(a) and not a.shape.is_compatible_with(b.shape):
        shapes = [tuple(x.shape) for x in (b, a)]
        yield Pair(trace, event, what, problem=("shape", f"{what} has shape {shapes[0]} in the re-run, {shapes[1]} before"))
    else:
        yield Pair(trace, event, what, a, b)


def _called(event):
    if event is None or event.kind == "result":
        return "it ends"
    if event.kind == "loss":
        return f"'{event.layer.name}' adds a loss"
    if event.kind == "write":
        return f"it writes to '{event.layer.path}'"
    return f"it calls '{event.layer.name}'" if event.kind == "enter" else f"the call of '{event.layer.name}' ends"


def _flat(values):
    return tf.nest.flatten(values, expand_composites=True)


def _masks(values):
    masks = (keras_graph.get_keras_mask(x) for x in tf.nest.flatten(values) if tf.is_tensor(x))
    return [mask for mask in masks if mask is not None]


def differs(pair, allowed=0.0):
    """Returns whether the arrays of a `Pair` differ, floats by more than a share of the largest value."""
    if pair.a.shape != pair.b.shape:
        pair.problem = "shape", f"{pair.what} has shape {pair.b.shape} in the re-run, {pair.a.shape} in the forward run"
        return True
    found = gap(pair.a, pair.b)
    return found is not None and not (found.share <= allowed and pair.a.dtype.kind not in "biuOSU")
