"""What each call in a model keeps for the backward pass, and what it costs to run again.

Each call is traced once, alone, forward and backward, into a scratch graph. What the backward operations read of the
forward ones is what training keeps (aliases such as `Reshape` once); the operations say the FLOPs. Layer output sizes
would miss attention scores and what `gelu` or a softmax keep. Calls alike (same class, settings and input shapes) are
traced once, so that a model of equal blocks costs one block.
"""

import dataclasses
import inspect
import json

import numpy as np
import tensorflow as tf

from tf_ckpt import graph as keras_graph
from tf_ckpt import tf_internals
from tf_ckpt.flops import operation_flops
from tf_ckpt.inspection import unrepeatable

MIB = 2**20
_ALIASES = frozenset(["Identity", "IdentityN", "Reshape", "ExpandDims", "Squeeze", "StopGradient", "PreventGradient"])
_FREE = frozenset(
    ["Placeholder", "Const", "ReadVariableOp", "VarHandleOp", "Shape", "ShapeN", "Size", "Rank", "BroadcastGradientArgs"]
)
_EXPENSIVE = ("MatMul", "BatchMatMul", "Conv", "DepthwiseConv", "Einsum")
_ELEMENTWISE = frozenset(
    [
        "Tanh",
        "Sigmoid",
        "Elu",
        "Selu",
        "Erf",
        "Erfc",
        "Softplus",
        "Softsign",
        "Exp",
        "Log",
        "Relu6",
        "Mul",
        "AddV2",
        "Add",
        "Sub",
        "RealDiv",
        "Maximum",
        "Minimum",
        "Square",
        "Pow",
        "Abs",
        "Neg",
        "Sqrt",
        "Rsqrt",
        "BiasAdd",
        "SelectV2",
        "GreaterEqual",
        "Greater",
        "Less",
        "LessEqual",
        "Cast",
    ]
)
_UNKNOWN = 64  # stands for a dimension that the model leaves open, the batch apart


@dataclasses.dataclass(frozen=True)
class NodeCost:
    """The costs of one call, in bytes and FLOPs.

    Attributes:
        internal_bytes: Kept from forward to backward, inputs and outputs apart.
        reads_inputs: For each input, whether the backward pass reads it.
        reads_outputs: For each output, whether the call's own backward pass reads it.
        input_uses: For each input, how many operations take it: as many gradients are summed up for it.
        flops: FLOPs of the forward run.
        pruned_flops: FLOPs of a re-run whose outputs nobody reads: what is left for the call's own backward pass.
        backward_flops: FLOPs of the backward pass.
        weight_bytes: Bytes of the trainable weights, hence of their gradients.
        expensive_end: Whether the call ends with a matmul or convolution.
        traced: False if the trace failed, and the figures stand for output sizes only.
        elementwise_start: Whether all that takes the inputs is elementwise, so that a graph optimiser may join it with the
            operation before.
        elementwise_end: The same of what makes the outputs.
        unrepeatable: Why the call cannot be run again exactly, or "".
    """

    internal_bytes: int
    reads_inputs: tuple
    reads_outputs: tuple
    input_uses: tuple
    flops: float
    pruned_flops: float
    backward_flops: float
    weight_bytes: int
    expensive_end: bool
    traced: bool = True
    elementwise_start: bool = False
    elementwise_end: bool = False
    unrepeatable: str = ""


def concrete_shape(spec, batch_size):
    """Returns the shape of a symbolic tensor, with `batch_size` for an open batch, as a tuple of ints."""
    shape = [_UNKNOWN if n is None else n for n in spec.shape]
    if spec.shape and spec.shape[0] is None:
        shape[0] = batch_size
    return tuple(shape)


def tensor_bytes(spec, batch_size):
    """Returns the bytes of a symbolic tensor for a batch size."""
    size = 1 if spec.dtype in ("bool", "string") else tf.as_dtype(spec.dtype).size
    return int(np.prod(concrete_shape(spec, batch_size), dtype=np.int64)) * size


def node_cost(node, batch_size, cache):
    """Returns the `NodeCost` of a `graph.Node`.

    Args:
        node: The node.
        batch_size: Integer that stands for an open batch dimension.
        cache: Dict that keeps the costs of calls alike.
    """
    key = _key(node, batch_size)
    if key is None or key not in cache:
        try:
            cost = _trace(node, batch_size)
        except Exception:  # any layer, with code of its own: its sizes must do
            cost = by_size(node, batch_size)
        if key is None:
            return cost
        cache[key] = cost
    return cache[key]


def _key(node, batch_size):
    def shapes(ids):
        return tuple((concrete_shape(node.specs[x], batch_size), str(node.specs[x].dtype)) for x in ids)

    operation = node.operation
    try:
        config = dict(operation.get_config())
        for own in ("name", "seed"):  # a seed is drawn anew for each layer
            config.pop(own, None)
        settings = json.dumps(config, sort_keys=True, default=repr)
        if " at 0x" in settings or _has_own_function(operation):
            settings = str(id(operation))
    except Exception:  # operations without a config
        settings = str(id(operation))
    trainable = tuple(v.trainable for v in getattr(operation, "weights", ()))
    repeats = tuple(node.inputs.index(x) for x in node.inputs)
    flags = json.dumps(keras_graph.plain_arguments(node), default=repr)
    return type(operation), settings, trainable, shapes(node.inputs), repeats, shapes(node.outputs), flags, batch_size


def _has_own_function(operation):
    """Returns True if a config does not tell all: it names functions, and names may be alike."""
    own = [x for x in vars(operation).values() if inspect.isfunction(x)]
    return any(not x.__module__.startswith("keras.") for x in own if hasattr(x, "__module__") and x.__name__ not in _METHODS)


_METHODS = ("build", "quantize")  # Keras' own wrappers, which bear the layer's module


def _weights(node):
    return getattr(node.operation, "trainable_weights", [])


def _weight_bytes(node):
    return sum(int(np.prod(v.shape, dtype=np.int64)) * tf.as_dtype(v.dtype).size for v in _weights(node))


def by_size(node, batch_size):
    """Returns a `NodeCost` of a node from the sizes of its outputs alone, without a trace."""
    size = sum(tensor_bytes(node.specs[x], batch_size) for x in node.outputs)
    ones, weights = [1] * len(node.inputs), _weight_bytes(node)
    return NodeCost(
        size, (True,) * len(ones), (True,) * len(node.outputs), tuple(ones), size, size, 2 * size, weights, False, False
    )


def _trace(node, batch_size):
    scratch = tf.__internal__.FuncGraph("tf_ckpt_costs")
    tf_internals.release_graphs()
    reasons = []

    def on_operation(op_type, inputs, outputs, graph):
        reasons.append(unrepeatable(op_type))

    with scratch.as_default():
        values = {}
        for x in node.inputs:
            spec = node.specs[x]
            values.setdefault(x, tf.compat.v1.placeholder(spec.dtype, concrete_shape(spec, batch_size)))
        inputs = list(values.values())
        floats = [x for x in inputs if x.dtype.is_floating]
        weights = [keras_graph.raw_variable(v) for v in _weights(node)]
        with keras_graph.no_side_effects(node.operation), tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([*floats, *weights])
            with tf_internals.watch_operations(on_operation):
                node.call(keras_graph.training_call, values)
            outputs = [tf.convert_to_tensor(values[x]) for x in node.outputs]
        split = len(scratch.get_operations())
        seeds = {y.ref(): tf.compat.v1.placeholder(y.dtype, y.shape) for y in outputs if y.dtype.is_floating}
        targets = [y for y in outputs if y.ref() in seeds]
        if targets:
            tape.gradient(targets, [*floats, *weights], output_gradients=[seeds[y.ref()] for y in targets])
    operations = scratch.get_operations()
    reason = next((r for r in reasons if r), "")
    return _account(node, operations[:split], operations[split:], inputs, outputs, reason)


def _root(tensor, stop):
    while tensor.op.type in _ALIASES and tensor.op.inputs and tensor.ref() not in stop:
        tensor = tensor.op.inputs[0]
    return tensor


def _account(node, forward, backward, inputs, outputs, reason):
    stop = {x.ref() for x in inputs}
    root_outputs = {_root(y, stop).ref(): i for i, y in reversed(list(enumerate(outputs)))}
    made = {id(op) for op in forward}
    read = {}
    for op in backward:
        for tensor in op.inputs:
            root = _root(tensor, stop)
            read[root.ref()] = root
    internal, kept_operations = 0, []
    own_outputs = [False] * len(outputs)
    for reference, tensor in read.items():
        if reference in stop or id(tensor.op) not in made or tensor.op.type in _FREE:
            continue
        if reference in root_outputs:
            own_outputs[root_outputs[reference]] = True
        else:
            internal += _bytes(tensor)
        kept_operations.append(tensor.op)
    index = {x.ref(): i for i, x in enumerate(inputs)}
    uses, takers = [0] * len(inputs), set()
    for op in forward:
        for tensor in op.inputs:
            if tensor.ref() in index and op.type not in _FREE:
                uses[index[tensor.ref()]] += 1
                takers.add(op.type)
    unique = list(dict.fromkeys(node.inputs))
    return NodeCost(
        internal_bytes=internal,
        reads_inputs=tuple(inputs[unique.index(x)].ref() in read for x in node.inputs),
        reads_outputs=tuple(own_outputs),
        input_uses=tuple(uses[unique.index(x)] for x in node.inputs),
        flops=sum(operation_flops(op) for op in forward),
        pruned_flops=sum(operation_flops(op) for op in _needed(kept_operations, made)),
        backward_flops=sum(operation_flops(op) for op in backward),
        weight_bytes=_weight_bytes(node),
        expensive_end=_ends_expensive(outputs[0].op, made),
        elementwise_start=bool(takers) and takers <= _ELEMENTWISE,
        elementwise_end=_root(outputs[0], stop).op.type in _ELEMENTWISE,
        unrepeatable=reason,
    )


def _bytes(tensor):
    return int(np.prod([_UNKNOWN if n is None else n for n in tensor.shape.as_list()], dtype=np.int64)) * tensor.dtype.size


def _needed(operations, made):
    """Returns the operations that these need, themselves included, among those made in the forward run."""
    found, queue = {}, list(operations)
    while queue:
        op = queue.pop()
        if id(op) in made and id(op) not in found:
            found[id(op)] = op
            queue += [x.op for x in op.inputs]
    return found.values()


def _ends_expensive(op, made):
    # Adding a bias and reshaping come after the product without needing it in the backward pass.
    while op.type in _ALIASES | {"BiasAdd", "AddV2", "Add", "Transpose", "Cast"} and op.inputs and id(op) in made:
        op = op.inputs[0].op
    return op.type.startswith(_EXPENSIVE)
