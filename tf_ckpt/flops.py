"""FLOPs of TensorFlow operations in a graph, from static shapes.

A multiply and an add count as two. What is no product counts one FLOP for each element that it makes.
"""

import numpy as np

_NONE = frozenset(
    [
        "Placeholder",
        "Const",
        "Identity",
        "IdentityN",
        "Reshape",
        "ExpandDims",
        "Squeeze",
        "Shape",
        "ShapeN",
        "Size",
        "Rank",
        "NoOp",
        "ReadVariableOp",
        "VarHandleOp",
        "StopGradient",
        "PreventGradient",
        "BroadcastGradientArgs",
        "AssignVariableOp",
        "StridedSlice",
        "Pack",
        "Slice",
    ]
)


def _elements(tensor):
    shape = tensor.shape
    if shape.rank is None:
        return 0
    return int(np.prod([1 if n is None else n for n in shape.as_list()], dtype=np.int64))


def _matmul(op):
    inner = op.inputs[0].shape[-2 if op.get_attr("transpose_a") else -1] or 1
    return 2 * _elements(op.outputs[0]) * inner


def _batch_matmul(op):
    inner = op.inputs[0].shape[-2 if op.get_attr("adj_x") else -1] or 1
    return 2 * _elements(op.outputs[0]) * inner


def _convolution(op):
    # Each output element takes one product with each filter element of its output channel (and group).
    return 2 * _elements(op.outputs[0]) * _elements(op.inputs[1]) // max(op.inputs[1].shape[-1] or 1, 1)


def _convolution_to_input(op):
    return 2 * _elements(op.inputs[2]) * _elements(op.inputs[1]) // max(op.inputs[1].shape[-1] or 1, 1)


def _convolution_to_filter(op):
    return 2 * _elements(op.inputs[2]) * _elements(op.outputs[0]) // max(op.outputs[0].shape[-1] or 1, 1)


def _depthwise(op):
    return 2 * _elements(op.outputs[0]) * (op.inputs[1].shape[0] or 1) * (op.inputs[1].shape[1] or 1)


def _depthwise_to_input(op):
    return 2 * _elements(op.inputs[2]) * (op.inputs[1].shape[0] or 1) * (op.inputs[1].shape[1] or 1)


def _depthwise_to_filter(op):
    return 2 * _elements(op.inputs[2]) * (op.outputs[0].shape[0] or 1) * (op.outputs[0].shape[1] or 1)


def _einsum(op):
    equation = op.get_attr("equation").decode()
    left = equation.split("->")[0].split(",")
    sizes, ellipsis = {}, 1
    for labels, tensor in zip(left, op.inputs, strict=True):
        shape = [n or 1 for n in tensor.shape.as_list()]
        before, dots, after = labels.partition("...")
        if dots:
            middle = shape[len(before) : len(shape) - len(after)]
            ellipsis = max(ellipsis, int(np.prod(middle)))
            shape = shape[: len(before)] + shape[len(shape) - len(after) :]
        sizes.update(zip(before + after, shape, strict=False))
    return 2 * ellipsis * int(np.prod(list(sizes.values()), dtype=np.int64))


_PRODUCTS = {
    "MatMul": _matmul,
    "BatchMatMul": _batch_matmul,
    "BatchMatMulV2": _batch_matmul,
    "BatchMatMulV3": _batch_matmul,
    "Einsum": _einsum,
    "Conv2D": _convolution,
    "Conv3D": _convolution,
    "Conv2DBackpropInput": _convolution_to_input,
    "Conv3DBackpropInputV2": _convolution_to_input,
    "Conv2DBackpropFilter": _convolution_to_filter,
    "Conv3DBackpropFilterV2": _convolution_to_filter,
    "DepthwiseConv2dNative": _depthwise,
    "DepthwiseConv2dNativeBackpropInput": _depthwise_to_input,
    "DepthwiseConv2dNativeBackpropFilter": _depthwise_to_filter,
}


def operation_flops(op):
    """Returns the FLOPs of one `tf.Operation`.

    Args:
        op: The operation. Open dimensions count as 1.

    Returns:
        A number; 0 for operations that compute nothing.
    """
    if op.type in _NONE:
        return 0
    if op.type in _PRODUCTS:
        return _PRODUCTS[op.type](op)
    return sum(_elements(x) for x in op.outputs)


def is_product(op_type):
    """Returns True for the operation types that are counted as products of matrices or convolutions."""
    return op_type in _PRODUCTS
