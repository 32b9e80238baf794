"""What an operation that calls functions has inside: `If`, `While`, `PartitionedCall` and their kind.

A layer's loop (an RNN) and compiled functions (grouped convolutions on a CPU) are one operation in the graph that calls
them. Costs look inside: this file finds the graphs, says how often they run, and which results are arguments passed on.
"""

import math

import numpy as np
import tensorflow as tf

from tf_ckpt import tf_internals

_CALLS = {"PartitionedCall": "f", "StatefulPartitionedCall": "f", "XlaLaunch": "function", "RemoteCall": "f"}
_LOOPS = frozenset(["While", "StatelessWhile"])
_BRANCHES = {
    **dict.fromkeys(["If", "StatelessIf"], ("then_branch", "else_branch")),
    **dict.fromkeys(["Case", "StatelessCase"], ("branches",)),
}
_PASS = frozenset(["Identity", "IdentityN", "StopGradient", "PreventGradient"])


def is_loop(op):
    """Returns True for a `tf.while_loop`."""
    return op.type in _LOOPS


def is_whole(op):
    """Returns True for a loop or a compiled function: it runs as a whole if anything that comes out of it is read."""
    return is_loop(op) or (op.type in _CALLS and tf_internals.is_compiled(op, op.get_attr(_CALLS[op.type]).name))


def has_functions(op_type):
    """Returns True for the operation types whose work is in functions."""
    return op_type in _CALLS or op_type in _LOOPS or op_type in _BRANCHES


def graphs(op):
    """Returns the graphs that an operation may run: a loop's body, each branch; none for other operations.

    Args:
        op: A `tf.Operation`.

    Returns:
        A list of `FuncGraph`; those that the operation's graph does not know are left out.
    """
    if op.type in _CALLS:
        names = [op.get_attr(_CALLS[op.type])]
    elif op.type in _LOOPS:
        names = [op.get_attr("body")]
    elif op.type in _BRANCHES:
        names = [op.get_attr(attribute) for attribute in _BRANCHES[op.type]]
        names = names[0] if isinstance(names[0], list) else names
    else:
        return []
    found = [tf_internals.function_graph(op, x.name) for x in names]
    return [graph for graph in found if graph is not None]


def arguments(op):
    """Returns the tensors that become the arguments of the operation's functions, in their order."""
    return list(op.inputs)[1:] if op.type in _BRANCHES else list(op.inputs)


def behind(tensor):
    """Follows `Identity` and the like to the tensor that they pass on."""
    while tensor.op.type in _PASS and tensor.op.inputs:
        tensor = tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]
    return tensor


def argument_number(graph, tensor):
    """Returns which argument of a function's graph `tensor` is, or None."""
    if tensor.op.type != "Placeholder":
        return None
    return next((i for i, x in enumerate(graph.inputs) if x is tensor), None)


def passed_on(tensor):
    """Returns the input of a calling operation that its output `tensor` is, or None if it is made inside."""
    op = tensor.op
    if not has_functions(op.type):
        return None
    found = {argument_number(graph, behind(graph.outputs[tensor.value_index])) for graph in graphs(op)}
    if len(found) != 1 or None in found:
        return None
    number = found.pop()
    if is_loop(op) and number != tensor.value_index:  # arguments that change places between turns
        return None
    return arguments(op)[number]


def needed(graph):
    """Returns those operations of a function's graph that its outputs need, in order."""
    wanted, queue = set(), [x.op for x in graph.outputs]
    while queue:
        op = queue.pop()
        if id(op) not in wanted:
            wanted.add(id(op))
            queue += [x.op for x in op.inputs]
            queue += op.control_inputs
    return [op for op in graph.get_operations() if id(op) in wanted]


def turns(op):
    """Returns how often a loop's body runs, 1 for other operations, or None if the graph does not tell.

    Counters that grow by a constant up to a constant bound are understood: `maximum_iterations`, `tf.range`, the steps of
    an RNN; and the loop of a gradient, which runs as often as the loop that it belongs to.

    Args:
        op: A `tf.Operation`.
    """
    if not is_loop(op):
        return 1
    body = graphs(op)
    condition = tf_internals.function_graph(op, op.get_attr("cond").name)
    if not body or condition is None:
        return None
    limits = [_limit(op, body[0], condition, x.op) for x in _all_of(behind(condition.outputs[0]))]
    limits = [x for x in limits if x is not None]
    return min(limits) if limits else None


def _all_of(tensor):
    if tensor.op.type == "LogicalAnd":
        return [y for x in tensor.op.inputs for y in _all_of(behind(x))]
    return [tensor]


def _limit(op, body, condition, comparison):
    """Returns how often one comparison of a loop's condition lets the body run, or None."""
    if comparison.type not in ("Less", "LessEqual", "Greater", "GreaterEqual"):
        return None
    left, right = (behind(x) for x in comparison.inputs)
    if comparison.type.startswith("Greater"):  # bound > counter
        left, right = right, left
    number = argument_number(condition, left)
    if number is None:
        return None
    start, step = static(op.inputs[number]), _step(body, number)
    fixed = argument_number(condition, right)
    if fixed is None:
        stop = static(right)
    else:
        stop = static(op.inputs[fixed]) if argument_number(body, behind(body.outputs[fixed])) == fixed else None
    if start is None or stop is None or not step or step < 0:
        return None
    return max(0, math.floor((stop - start) / step) + 1 if "Equal" in comparison.type else math.ceil((stop - start) / step))


def _step(body, number):
    """Returns what a loop's body adds to an argument in each turn, or None if that is no constant."""
    made = behind(body.outputs[number])
    if made.op.type not in ("AddV2", "Add"):
        return None
    for x, y in (made.op.inputs, list(made.op.inputs)[::-1]):
        if argument_number(body, behind(x)) == number:
            return static(y)
    return None


_FOLDED = {"Maximum": np.maximum, "Minimum": np.minimum, "AddV2": np.add, "Sub": np.subtract, "Mul": np.multiply}
_REDUCED = {"Max": np.max, "Min": np.min, "Prod": np.prod, "Sum": np.sum}


def static(tensor):
    """Returns the value of an integer scalar that the graph settles, or None."""
    tensor = behind(tensor)
    value = tf.get_static_value(tensor)
    op = tensor.op
    if value is not None:
        return value if np.ndim(value) == 0 else None
    if is_loop(op):  # a counter, when the loop has ended
        body, count, start = graphs(op), turns(op), static(op.inputs[tensor.value_index])
        step = _step(body[0], tensor.value_index) if body else None
        return None if None in (count, start, step) else start + count * step
    if op.type in _FOLDED:
        values = [static(x) for x in op.inputs]
        return None if None in values else _FOLDED[op.type](*values)
    if op.type == "StridedSlice" and tensor.shape.rank == 0:  # one dimension of a shape
        shape, begin = (tf.get_static_value(x) for x in op.inputs[:2])
        return None if shape is None or begin is None or np.ndim(shape) != 1 else shape[begin[0]]
    if op.type in _REDUCED and op.inputs[0].shape.rank == 0:
        return static(op.inputs[0])
    if op.type in _REDUCED:
        value = tf.get_static_value(op.inputs[0])
        return None if value is None else _REDUCED[op.type](value)
    return None
