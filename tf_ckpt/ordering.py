"""In which order a segment's backward pass runs, where that decides what is held.

A product that makes a weight's gradient leads nowhere. An executor may leave it for long after the product beside it, which
the rest of the backward pass waits for, and what it reads stays meanwhile. So it goes first.

Where a gradient goes into two branches (the two ends of a residual block, each with its normalisation), an executor begins
both, and what each needs in between is there at once. So one goes after the other, as a plan counts it.
"""

import itertools

from tf_ckpt import tf_internals
from tf_ckpt.liveness import ALIASES

_PASSED = ALIASES | {"Transpose"}
_PRODUCTS = ("MatMul", "BatchMatMul", "Einsum", "Conv", "DepthwiseConv")


def siblings(operations):
    """Returns pairs of products that one gradient function makes from one upstream gradient: the first, and the second.

    Args:
        operations: List of the operations of a backward pass, in the order in which they were made.
    """
    found, before, since = [], None, set()
    for op in operations:
        since.add(op.name)
        if op.op_def.is_stateful:  # a function orders these later on: an edge could close a circle
            before, since = None, set()
        if not _is_product(op):
            continue
        if before is not None and _shared(before, op) and not _needs(op, before, since):
            found.append((before, op))
            before = None
        else:
            before, since = op, set()
    return found


def branches(operations, waits=()):
    """Returns pairs (operation, the one that it shall wait for) that let one branch of a gradient run after the other.

    A branch is what is made of a gradient up to the next products, if as many bytes are made more than once on the way.

    Args:
        operations: List of the operations of a backward pass, in the order in which they were made.
        waits: Such pairs that are settled already.
    """
    if not operations:
        return []
    number = {op.name: i for i, op in enumerate(operations)}
    takers, found, needs = {}, [], _Needs(operations[0], waits)
    for op in operations:
        for x in {_source(x).ref(): _source(x) for x in op.inputs}.values():
            if x.dtype.is_floating and op.type not in _PASSED:
                takers.setdefault(x.ref(), []).append(op)
    useful = _useful(operations, takers)
    for reference, entries in takers.items():
        shape, before = reference.deref().shape, None
        if len(entries) < 2 or not shape.rank:
            continue
        for way in _apart([_way(op, takers, useful) for op in entries]):
            ends = [op for op in way.values() if _feeds_product(op, takers)]
            large = sum(any(x.shape.rank and x.shape == shape for x in op.outputs) for op in way.values())
            if not ends or large < 3:
                continue
            first = [op for op in entries if op.name in way]
            if before is not None and not needs.any_of(first, before):
                found += [(op, before) for op in first]
                needs.add(found[-len(first) :])
            before = max(ends, key=lambda op: number[op.name])
    return found


class _Needs:
    """Which operations need which, among all that were made since the first of a backward pass.

    Those of a re-run inside are not operations of the backward pass, but lie between some.
    """

    def __init__(self, first, waits):
        made = first.graph.get_operations()
        made = made[next(i for i, op in enumerate(made) if op.name == first.name) :]
        self._names, self._waits = {op.name for op in made}, {}
        stateful = [op for op in made if op.op_def.is_stateful]
        # A function orders these later on, each after the one before at most: an edge must not close a circle with that.
        self.add([*waits, *((op, before) for before, op in itertools.pairwise(stateful))])

    def add(self, waits):
        for op, before in waits:
            self._waits.setdefault(op.name, []).append(before)

    def any_of(self, sources, target):
        """Whether `target` needs one of `sources`."""
        wanted, queue, seen = {op.name for op in sources}, [target], set()
        while queue:
            at = queue.pop()
            if at.name in wanted:
                return True
            if at.name in self._names and at.name not in seen:
                seen.add(at.name)
                queue += [*(x.op for x in at.inputs), *at.control_inputs, *self._waits.get(at.name, ())]
        return False


def _useful(operations, takers):
    """Returns the names of the operations that lead to a product.

    Scalars lead nowhere: what a re-run waits for is made of them, and says nothing of its values.
    """
    found = set()
    for op in reversed(operations):
        after = [y for x in op.outputs if x.shape.rank for y in takers.get(_source(x).ref(), ())]
        if not _is_product(op) and any(_is_product(y) or y.name in found for y in after):
            found.add(op.name)
    return found


def _way(op, takers, useful):
    """Returns the operations by name that lead from one to the next products, itself included."""
    found, queue = {}, [op]
    while queue:
        at = queue.pop()
        if at.name not in found and at.name in useful:
            found[at.name] = at
            queue += [y for x in at.outputs for y in takers.get(_source(x).ref(), ())]
    return found


def _apart(ways):
    """Joins those of the ways that share an operation, and returns the rest in order."""
    joined = []
    for way in ways:
        for other in [x for x in joined if x.keys() & way.keys()]:
            way = other | way
            joined.remove(other)
        joined.append(way)
    return joined


def _feeds_product(op, takers):
    return any(_is_product(y) for x in op.outputs for y in takers.get(_source(x).ref(), ()))


def _is_product(op):
    return op.type.startswith(_PRODUCTS)


def in_order(operations):
    """Makes the first of two `siblings` wait for the second, and `branches` for one another. Values do not change.

    Args:
        operations: As for `siblings`.
    """
    waits = siblings(operations)
    for op, before in [*waits, *branches(operations, waits)]:
        if before not in op.control_inputs:  # those of a segment inside are settled
            tf_internals.run_after(op, before)


def reordered(operations):
    """Returns the operations in an order in which `in_order` lets them run, the least changed."""
    waits = {id(first): second for first, second in siblings(operations)}
    own, done, found = {id(op) for op in operations}, set(), []
    for op in operations:
        queue = [op]
        while queue:
            at = queue[-1]
            wanted = [*(x.op for x in at.inputs), waits.get(id(at))]
            left = [x for x in wanted if id(x) in own and id(x) not in done]
            queue += left
            if not left:
                queue.pop()
                if id(at) not in done:
                    done.add(id(at))
                    found.append(at)
    return found


def _shared(first, second):
    own = {_source(x).ref() for x in first.inputs if x.dtype.is_floating}
    return any(_source(x).ref() in own for x in second.inputs)


def _needs(op, other, between):
    """Whether `op` needs `other`; `between` holds the names of what was made after that."""
    queue, seen = [op], set()
    while queue:
        at = queue.pop()
        for x in [*(x.op for x in at.inputs), *at.control_inputs]:
            if x.name == other.name:
                return True
            if x.name in between and x.name not in seen:
                seen.add(x.name)
                queue.append(x)
    return False


def _source(tensor):
    while tensor.op.type in _PASSED and tensor.op.inputs:
        op = tensor.op
        tensor = op.inputs[tensor.value_index if op.type == "IdentityN" else 0]
    return tensor
