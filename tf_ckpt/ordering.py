"""In which order a segment's backward products run, where that decides what is held.

A product that makes a weight's gradient leads nowhere. An executor may leave it for long after the product beside it, which
the rest of the backward pass waits for, and what it reads stays meanwhile. So it goes first.
"""

from tf_ckpt import tf_internals
from tf_ckpt.liveness import ALIASES

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
        if not op.type.startswith(_PRODUCTS):
            continue
        if before is not None and _shared(before, op) and not _needs(op, before, since):
            found.append((before, op))
            before = None
        else:
            before, since = op, set()
    return found


def in_order(operations):
    """Makes the first of two `siblings` wait for the second. Values do not change.

    Args:
        operations: As for `siblings`.
    """
    for first, second in siblings(operations):
        tf_internals.run_after(first, second)


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
    while tensor.op.type in ALIASES | {"Transpose"} and tensor.op.inputs:
        op = tensor.op
        tensor = op.inputs[tensor.value_index if op.type == "IdentityN" else 0]
    return tensor
