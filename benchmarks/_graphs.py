"""The graphs that TensorFlow executes, after all of its own optimisation, and what is counted in them.

Counted, not timed: the optimised graph says without noise which operations of a re-run are left once TensorFlow has
pruned what the backward pass does not need.
"""

import tensorflow as tf
from tensorflow.python.eager import context  # noqa: TID251 - there is no public way to these graphs

from tf_ckpt.flops import is_product, operation_flops

# The optimiser joins a product with what follows it. The product itself is the same, and named after its parts.
_FUSED = {
    "_FusedMatMul": "MatMul",
    "_FusedConv2D": "Conv2D",
    "_FusedDepthwiseConv2dNative": "DepthwiseConv2dNative",
}
_FUSED_ATTRIBUTES = ("fused_ops", "num_args", "num_host_args", "TArgs", "epsilon", "leakyrelu_alpha", "filter_format")
_CALLS = ("PartitionedCall", "StatefulPartitionedCall", "While", "StatelessWhile", "If", "StatelessIf", "XlaLaunch")


def executed_operations(function):
    """Calls `function` and returns the operations that it ran as graphs, as TensorFlow's optimiser left them.

    Args:
        function: Callable without arguments, such as a `fit` of one step.

    Returns:
        A list of `tf.Operation`.

    Raises:
        RuntimeError: If a graph calls functions that were not inlined, so that operations are missing.
    """
    eager = context.context()
    eager.enable_run_metadata()
    eager.export_run_metadata()  # of what ran before
    try:
        function()
        executed = eager.export_run_metadata()
    finally:
        eager.disable_run_metadata()
    graphs = [graph.post_optimization_graph for graph in executed.function_graphs]
    # What runs around the step, one eager operation each, comes as graphs too.
    graphs = [graph for graph in graphs if any(is_product(_FUSED.get(node.op, node.op)) for node in graph.node)]
    return [op for graph in graphs for op in _imported(graph).get_operations()]


def _imported(definition):
    for node in definition.node:
        if node.op in _CALLS:
            raise RuntimeError(f"Operations inside of a function call cannot be counted. Received: {node.op} {node.name!r}")
        if node.op in _FUSED:
            node.op = _FUSED[node.op]
            controls = [x for x in node.input if x.startswith("^")]
            node.input[:] = [*node.input[:2], *controls]
            for name in _FUSED_ATTRIBUTES:
                node.attr.pop(name, None)
    graph = tf.Graph()
    with graph.as_default():
        tf.graph_util.import_graph_def(definition, name="")
    return graph


def products(operations):
    """Returns those operations that multiply matrices or convolve."""
    return [op for op in operations if is_product(op.type)]


def total_flops(operations):
    """Returns the FLOPs of operations.

    Raises:
        RuntimeError: If a product has an open dimension: its FLOPs would be too few.
    """
    for op in products(operations):
        if not all(x.shape.is_fully_defined() for x in (*op.inputs, *op.outputs)):
            raise RuntimeError(f"A product's FLOPs need all dimensions. Received: {op.type} {op.name!r}")
    return sum(operation_flops(op) for op in operations)
