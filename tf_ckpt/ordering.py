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


def _shared(first, second):
    own = {_source(x).ref() for x in first.inputs if x.dtype.is_floating}
    return any(_source(x).ref() in own for x in second.inputs)


def _needs(op, other, between):
    """Whether `op` needs `other`; `between` holds the names of what was made after that."""
    queue, seen = [op], set()
    while queue:
        for x in queue.pop().inputs:
            if x.op is other or x.op.name == other.name:
                return True
            if x.op.name in between and x.op.name not in seen:
                seen.add(x.op.name)
                queue.append(x.op)
    return False


def _source(tensor):
    while tensor.op.type in ALIASES | {"Transpose"} and tensor.op.inputs:
        op = tensor.op
        tensor = op.inputs[tensor.value_index if op.type == "IdentityN" else 0]
    return tensor
