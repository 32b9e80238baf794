"""The most bytes that a list of operations holds at once, when each tensor is freed after its last reader."""

import collections

import numpy as np
import tensorflow as tf

from tf_ckpt import functions

ALIASES = frozenset(["Identity", "IdentityN", "Reshape", "ExpandDims", "Squeeze", "StopGradient", "PreventGradient"])
FREE = frozenset(
    ["Placeholder", "Const", "ReadVariableOp", "VarHandleOp", "Shape", "ShapeN", "Size", "Rank", "BroadcastGradientArgs"]
)
ELEMENTWISE = frozenset(
    [
        *["Tanh", "Sigmoid", "Elu", "Selu", "Erf", "Erfc", "Softplus", "Softsign", "Exp", "Log", "Relu6", "Mul", "AddV2"],
        *["Add", "Sub", "RealDiv", "Maximum", "Minimum", "Square", "Pow", "Abs", "Neg", "Sqrt", "Rsqrt", "BiasAdd"],
        *["SelectV2", "GreaterEqual", "Greater", "Less", "LessEqual", "Cast"],
    ]
)
# These write into the buffer of an input that nobody else reads.
_IN_PLACE = ELEMENTWISE | frozenset(
    [
        *["Relu", "LeakyRelu", "Softmax", "LogSoftmax", "ReluGrad", "Relu6Grad", "LeakyReluGrad", "TanhGrad", "SigmoidGrad"],
        *["EluGrad", "SeluGrad", "SqrtGrad", "RsqrtGrad", "SoftplusGrad", "AddN", "FusedBatchNormV3", "SquaredDifference"],
    ]
)
_LISTS = frozenset(["TensorListPushBack", "TensorListSetItem", "TensorListConcatLists", "AddN", "OptionalFromValue"])
UNKNOWN = 64  # stands for a dimension that the model leaves open, the batch apart


def tensor_size(tensor):
    """Returns the bytes of a graph tensor. Open dimensions count as `UNKNOWN`; variants and handles as nothing."""
    if tensor.shape.rank is None or tensor.dtype in (tf.variant, tf.resource, tf.string):
        return 0
    return int(np.prod([UNKNOWN if n is None else n for n in tensor.shape.as_list()], dtype=np.int64)) * tensor.dtype.size


def root(tensor, stop):
    """Follows aliases to the tensor that holds the bytes; not beyond the tensors whose `ref()` is in `stop`."""
    while tensor.ref() not in stop:
        op = tensor.op
        if op.type in ALIASES and op.inputs:
            tensor = op.inputs[tensor.value_index if op.type == "IdentityN" else 0]
            continue
        source = functions.passed_on(tensor)
        if source is None:
            return _first_alike(tensor)
        tensor = source
    return tensor


def _first_alike(tensor):
    """Returns the first output of a function call that is the same tensor inside as `tensor`, which is one of them."""
    op = tensor.op
    if not functions.has_functions(op.type) or functions.is_loop(op):
        return tensor
    graphs = functions.graphs(op)
    if len(graphs) != 1:
        return tensor
    inside = [functions.behind(x) for x in graphs[0].outputs]
    return op.outputs[next(i for i, x in enumerate(inside) if x is inside[tensor.value_index])]


def key_of(tensor):
    """Returns what `buffers` calls the memory of a tensor that is no alias and no list."""
    return id(tensor.op), tensor.value_index


def buffers(tensor, stop):
    """Returns the memory that a graph tensor holds, a list of tensors (a variant) included.

    Args:
        tensor: A graph tensor.
        stop: Set of `ref()`s of tensors that do not count: others hold them.

    Returns:
        A dict from a key that is the same for the same memory to bytes.
    """
    tensor = root(tensor, stop)
    op = tensor.op
    if tensor.ref() in stop:
        return {}
    if functions.has_functions(op.type):
        return _made_inside(tensor, stop)
    if op.type == "TensorListStack" and not tensor.shape.is_fully_defined():
        return {key_of(tensor): held(op.inputs[:1], stop) or tensor_size(tensor)}
    if tensor.dtype != tf.variant:
        return {key_of(tensor): tensor_size(tensor)}
    if op.type == "TensorListFromTensor":  # copies each row
        return {key_of(tensor): tensor_size(op.inputs[0])}
    if op.type == "ZerosLike":
        return {key_of(tensor): held(op.inputs, stop)}
    if op.type in _LISTS:
        return {key: size for x in op.inputs for key, size in buffers(x, stop).items()}
    if op.type == "TensorListPopBack":
        return buffers(op.inputs[0], stop)
    return {}


def held(tensors, stop):
    """Returns the bytes that tensors hold together, each piece of memory counted once."""
    return sum({key: size for x in tensors for key, size in buffers(x, stop).items()}.values())


def _made_inside(tensor, stop):
    """`buffers` of an output of a function call or loop."""
    op, found = tensor.op, {}
    if functions.is_loop(op) and tensor.dtype != tf.variant:
        return {key_of(tensor): tensor_size(tensor)}
    for graph in functions.graphs(op):  # of several branches, the one that keeps most
        made = functions.behind(graph.outputs[tensor.value_index])
        if functions.is_loop(op):
            one = {k: v for x in _items(graph, made) for k, v in _element(op, graph, x, stop).items()}
        elif made.op.type in FREE:
            one = {}
        elif tensor.dtype == tf.variant:
            one = _outside(op, graph, made, stop)
        else:
            one = {key_of(tensor): tensor_size(tensor)}
        found = max(found, one, key=lambda x: sum(x.values()))
    return found


def _items(graph, made):
    """Returns the tensors that one turn of a loop's body puts into a list."""
    op = made.op
    if op.type == "TensorListPushBack":
        return [op.inputs[1], *_items(graph, functions.behind(op.inputs[0]))]
    if op.type == "TensorListSetItem":
        return [op.inputs[2], *_items(graph, functions.behind(op.inputs[0]))]
    if op.type == "AddN":
        return [y for x in op.inputs for y in _items(graph, functions.behind(x))]
    return []


def _element(op, graph, tensor, stop):
    """Returns the memory of all that one list of a loop has got when it ends, from what one turn puts there."""
    made, first = root(tensor, frozenset()), {}
    number = functions.argument_number(graph, made)
    if number is not None:  # what the turn before has made, or the same in each turn
        before = root(graph.outputs[number], frozenset())
        start = root(op.inputs[number], stop)
        first = {} if start.op.type in FREE - {"Placeholder"} else buffers(start, stop)
        if before is made:
            return first
        made = before if functions.argument_number(graph, before) is None else made
    elif made.op.type == "TensorListGetItem":  # a row of another list
        number = functions.argument_number(graph, functions.behind(made.op.inputs[0]))
        if number is not None and functions.behind(graph.outputs[number]) is graph.inputs[number]:
            return buffers(op.inputs[number], stop)
    turns = functions.turns(op) or 1
    return first | {key: size * turns for key, size in _outside(op, graph, made, stop).items()}


def _outside(op, graph, tensor, stop):
    """Returns the memory of a tensor inside a function, with keys and arguments as the caller has them."""
    made = root(tensor, frozenset())
    number = functions.argument_number(graph, made)
    if number is not None:
        if functions.is_loop(op):
            return {key_of(made): tensor_size(made)}
        return buffers(functions.arguments(op)[number], stop)
    if made.op.type in FREE:
        return {}
    if made.op.type == "OptionalFromValue":
        return {k: v for x in made.op.inputs for k, v in _outside(op, graph, x, stop).items()}
    return {(id(op), key): size for key, size in buffers(made, frozenset()).items()}


def _inside_peak(op):
    """Returns the most bytes that a function call or loop holds beside its inputs and outputs."""
    most = 0
    for graph in functions.graphs(op):
        if functions.is_loop(op):  # what a turn changes is let go as the turn makes the next
            pairs = zip(graph.inputs, graph.outputs, strict=False)
            changing = [x for x, y in pairs if functions.behind(y) is not x]
            stop = {x.ref() for x in graph.inputs} - {x.ref() for x in changing}
            there = held(changing, stop)
        else:
            changing, stop = [], {x.ref() for x in graph.inputs}
            there = held([x for x in graph.outputs if root(x, stop).op.type not in FREE], stop)
        most = max(most, highest(functions.needed(graph), changing, graph.outputs, stop) - there)
    return most


def _overlapping(op, freed):
    """Returns the bytes of terms that wait to be summed up while turns of a loop overlap.

    The executor begins up to `parallel_iterations` turns before an earlier one ends. In a gradient's loop, the terms of a
    weight's gradient wait for the sum, as large as the weight each, while the lists of `freed` bytes are used up.
    """
    turns, terms = functions.turns(op) or 1, 0
    for graph in functions.graphs(op):
        for x, y in zip(graph.inputs, graph.outputs, strict=False):
            made = functions.behind(y)
            adds = made.op.type in ("AddN", "AddV2") and made.dtype.is_floating
            if adds and any(functions.behind(z) is x for z in made.op.inputs):
                terms += tensor_size(made)
    overlapping = min(turns, op.get_attr("parallel_iterations"))
    return round((overlapping - 1) * terms - freed * overlapping / max(turns, 1) + freed) if terms else 0


def _reused(op, sizes, dying, live):
    """Returns those buffers among the `dying` that the outputs of `op` are written into."""
    if functions.is_loop(op):  # the place of each argument
        pairs = [(list(buffers(x, ())), tensor_size(y)) for x, y in zip(op.inputs, op.outputs, strict=True)]
        found = {key for keys, size in pairs for key in keys if key in dying and live[key] == size}
        # A gradient's list of zeros, filled row by row.
        return found | {k for x in op.inputs if x.dtype == tf.variant for k in buffers(x, ()) if k in dying and k in live}
    if op.type in _IN_PLACE and sizes:
        size = next(iter(sizes.values()))
        return set([key for key in dying if live[key] == size][:1])
    return set()


def _move_constants(operations, takes, stay):
    """Changes what products take to what they do when a graph optimiser has moved constants inwards.

    It makes `(a * c) * b` of `(a * b) * c`, as in gelu's backward pass: `a * c` has a place of its own while others read `a`.
    """
    numbers = {(id(op), 0): number for number, op in enumerate(operations) if op.type == "Mul"}
    last = {key: number for number, keys in enumerate(takes) for key in keys}
    readers = collections.Counter(key for keys in takes for key in keys)
    for number, op in enumerate(operations):
        factors = _factors(op)
        before = numbers.get(factors[0]) if len(factors) == 1 else None
        if before is None or readers[factors[0]] > 1 or factors[0] in stay or len(takes[before]) < 2:
            continue
        moved = min(takes[before], key=last.get)  # the factor that the optimiser takes is not known; this holds more
        takes[before].remove(moved)
        takes[number].append(moved)


def _factors(op):
    """Returns what `buffers` calls the factors of a product, constants apart."""
    if op.type != "Mul":
        return []
    return [key_of(x) for x in (root(x, ()) for x in op.inputs) if x.op.type != "Const"]


def highest(operations, before, results, stop):
    """Returns the most bytes that `operations`, run in order, hold at once.

    Args:
        operations: List of `tf.Operation`.
        before: Tensors that are there at the beginning and count; they are freed after their last reader.
        results: Tensors that stay to the end.
        stop: Set of `ref()`s of tensors that do not count: others hold them.
    """
    takes = [list(dict.fromkeys(key for x in op.inputs for key in buffers(x, stop))) for op in operations]
    stay = {key for x in results for key in buffers(x, stop)}
    _move_constants(operations, takes, stay)
    last = {key: number for number, keys in enumerate(takes) for key in keys}
    live = {key: size for x in before for key, size in buffers(x, stop).items()}
    total = most = sum(live.values())
    for number, op in enumerate(operations):
        sizes = {}
        if op.type not in FREE and op.type not in ALIASES:
            for x in op.outputs:
                sizes.update((key, size) for key, size in buffers(x, stop).items() if key not in live)
        dying = [key for key in takes[number] if key in live and last[key] == number and key not in stay]
        inside = _inside_peak(op) if functions.has_functions(op.type) else 0
        if functions.is_loop(op):  # its lists shrink and grow turn by turn: most is there at one of the ends
            most = max(most, total + inside)
        reused = _reused(op, sizes, dying, live)
        freed = sum(live.pop(key) for key in reused)
        dying = [key for key in dying if key not in reused]
        live.update(sizes)
        total += sum(sizes.values()) - freed
        if functions.is_loop(op):
            inside += max(0, _overlapping(op, freed))
        most = max(most, total + inside)
        for key in [*dying, *(k for k in sizes if k not in last and k not in stay)]:
            total -= live.pop(key)
    return most
