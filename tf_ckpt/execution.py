"""A model that runs by a plan: its nodes in pieces, plain or recomputed, segments within segments."""

import collections
import contextlib
import warnings

from tf_ckpt import graph as keras_graph
from tf_ckpt import inspection
from tf_ckpt.errors import CheckpointWarning
from tf_ckpt.replay import reach, run


def executing(level, stages, tree, reminder=None):
    """Returns a copy of a level's model that runs by a plan.

    Args:
        level: The model's `graph.Level`.
        stages: Its `Stages`.
        tree: Tuple of `Range`s of stages.
        reminder: See `graph.with_executor`. Its `unfrozen()` is called too, when weights are trainable that no plan had to
            reckon with, since they were frozen, and what they make is in no segment.
    """
    planned = {k for r in tree for k in range(r.start, r.stop)}
    idle = [node for k, (node, none) in enumerate(zip(stages.nodes, stages.idle(), strict=True)) if none and k not in planned]
    frozen = [v for node in idle for v in getattr(node.operation, "variables", ())]

    variables = level.model.variables

    def around():
        if reminder is not None and any(v.trainable for v in frozen):
            reminder.unfrozen()
        return keras_graph.frozen_unwatched(variables)

    return _Builder(stages).model(level, tree, "", 0, reminder, around)


class _Plain:
    """A node that runs as it is."""

    def __init__(self, node):
        self.nodes = [node]
        self.takes, self.makes = node.inputs, node.outputs

    def __call__(self, operation_fn, values):
        self.nodes[0].call(operation_fn, values)

    def connect(self, read, outputs):
        pass


class _Part(_Plain):
    """A node whose inner part alone is recomputed."""

    def __init__(self, node):
        super().__init__(node)
        self.name, self.attribute = keras_graph.inner_part(node.operation)
        self.memo = inspection.Memo()

    def __call__(self, operation_fn, values):
        node = self.nodes[0]

        def recomputed(function):
            def call(*args, **kwargs):
                order = keras_graph.part_order(node.operation, args)

                def reordered(*taken, **kwargs):
                    return function(*(taken[order.index(i)] for i in range(len(taken))), **kwargs)

                return run(reordered, [args[i] for i in order], kwargs, f"{node.name}.{self.name}", self.memo, logits=False)

            return call

        with keras_graph.part_replaced(node.operation, self.attribute, recomputed):
            node.call(operation_fn, values)


class _Segment:
    """Pieces that are recomputed as one."""

    def __init__(self, pieces):
        self.pieces, self.nodes = pieces, [node for piece in pieces for node in piece.nodes]
        first, last = self.nodes[0].name, self.nodes[-1].name
        self.name = first if len(self.nodes) == 1 else f"{first}..{last}"
        self.memo = inspection.Memo()
        self.takes, self.makes, self.shared, self.logits = (), (), (), False

    def connect(self, read, outputs):
        """Notes what the segment takes and makes, leaving out what is not among the tensors `read` by others."""
        made = [x for node in self.nodes for x in node.outputs]
        taken = dict.fromkeys(x for node in self.nodes for x in node.inputs)
        taken_by = collections.Counter(x for node in self.nodes for x in set(node.inputs))
        self.shared = {x for x in made if taken_by[x] + (x in read) > 1}
        self.makes = tuple(x for x in made if x in read)
        self.takes = tuple(x for x in taken if x not in set(made))
        self.logits = any(x in outputs for x in self.makes)
        _connect(self.pieces, self.makes)

    def __call__(self, operation_fn, values):
        def segment(*tensors):
            inside = dict(zip(self.takes, tensors, strict=True))
            for piece in self.pieces:
                for x in piece.takes:
                    if x in self.shared:
                        reach(inside[x])
                piece(operation_fn, inside)
            return [inside[x] for x in self.makes]

        made = run(segment, [values[x] for x in self.takes], {}, self.name, self.memo, self.logits)
        values.update(zip(self.makes, made, strict=True))


class _Inside:
    """Stands for a nested model in a node: the copy of it that executes its part of the plan."""

    def __init__(self, node, model):
        self._node, self._model, self._said = node, model, False
        self._graph = keras_graph.functional_of(node.operation)
        self.name, self.inputs, self.outputs = node.name, node.inputs, node.outputs

    def call(self, operation_fn, values):
        if keras_graph.functional_of(self._node.operation) is self._graph:
            self._node.call(lambda operation: operation_fn(self._model), values)
            return
        if not self._said:
            self._said = True
            warnings.warn(
                f"The layers of model '{self.name}', inside a model with a plan, were changed, so that the plan no longer "
                f"applies to them: '{self.name}' runs plain. Call `tf_ckpt.apply` again.",
                CheckpointWarning,
                stacklevel=2,
            )
        self._node.call(operation_fn, values)


class _Builder:
    def __init__(self, stages):
        self.stages = stages

    def model(self, level, tree, prefix, first, reminder=None, around=contextlib.nullcontext):
        """Returns a copy of the level's model that runs `tree` in a scope of `around()`. `first` is its first stage."""
        pieces = self.pieces(level.nodes, tree, prefix, first)
        _connect(pieces, level.outputs)

        def execute(inputs, operation_fn):
            values = dict(zip(level.inputs, inputs, strict=True))
            with around():
                for piece in pieces:
                    piece(operation_fn, values)
            return [values[x] for x in level.outputs]

        return keras_graph.with_executor(level.model, execute, reminder)

    def pieces(self, nodes, tree, prefix, first):
        """Returns the pieces that run `nodes`, the first of which is the stage `first`, by the ranges of `tree`."""
        groups, start = [], first  # [range or None, nodes, first stage]
        for node in nodes:
            _, stop = self.stages.inside.get(prefix + node.name, (start, start + 1))
            home = next((r for r in tree if not r.part and r.start <= start and stop <= r.stop and start < stop), None)
            if home is not None and groups and groups[-1][0] is home:
                groups[-1][1].append(node)
            else:
                groups.append([home, [node], start])
            start = stop
        made = []
        for home, members, begin in groups:
            if home is None:
                made.append(self._alone(members[0], tree, prefix, begin))
            else:
                made.append(_Segment(self.pieces(members, home.inside, prefix, begin)))
        return made

    def _alone(self, node, tree, prefix, start):
        if node.inner is None:
            return _Part(node) if any(r.part and r.start == start for r in tree) else _Plain(node)
        start, stop = self.stages.inside[prefix + node.name]
        inside = tuple(r for r in tree if start <= r.start < stop)
        return _Plain(_Inside(node, self.model(node.inner, inside, f"{prefix}{node.name}/", start)) if inside else node)


def _connect(pieces, outputs):
    """Tells each piece, last to first, which tensors are read after it."""
    read = set(outputs)
    for piece in reversed(pieces):
        piece.connect(read, outputs)
        read.update(piece.takes)
