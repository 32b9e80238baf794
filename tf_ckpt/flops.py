"""FLOPs of TensorFlow operations in a graph, from static shapes.

A multiply and an add count as two. What is no product counts one FLOP for each element that it makes, or that it takes
where it sums up; a few operations that do more than one thing count as their parts. What functions have inside counts: the
body of a loop for each of its turns, the dearest branch of a condition.
"""

import math
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_ckpt import functions


class Work(NamedTuple):
    """What one operation does, for a `Calibration` to price.

    Attributes:
        kind: `"matmul"`, `"convolution"`, or `"memory"` for what reads and writes more than it computes.
        flops: FLOPs of one run.
        bytes: Bytes that one run reads and writes.
        times: How often it runs: the turns of the loop that it is in.
    """

    kind: str
    flops: float
    bytes: int
    times: int = 1


def _names(text):
    return frozenset(text.split())


_NONE = _names(
    """
    Placeholder PlaceholderWithDefault Const Identity IdentityN Reshape ExpandDims Squeeze Shape ShapeN Size Rank NoOp
    ReadVariableOp VarHandleOp VarIsInitializedOp VariableShape StopGradient PreventGradient BroadcastGradientArgs
    BroadcastArgs AssignVariableOp StridedSlice Pack Unpack Slice Split SplitV Assert EnsureShape CheckNumerics
    InvertPermutation ConcatOffset EmptyTensorList TensorListReserve TensorListPushBack TensorListPopBack
    TensorListGetItem TensorListSetItem TensorListElementShape TensorListLength TensorListResize OptionalFromValue
    OptionalNone OptionalGetValue OptionalHasValue StatelessRandomGetAlg StatelessRandomGetKeyCounter
    StatelessRandomGetKeyCounterAlg
    """
)
# One FLOP for each element that they make: functions of single elements, copies and moves, random numbers.
_MAKE = _names(
    """
    Abs Acos Acosh Add AddN AddV2 Angle ApproximateEqual Asin Asinh Atan Atan2 Atanh BesselI0e BesselI1e BiasAdd BitwiseAnd
    BitwiseOr BitwiseXor BroadcastTo Cast Ceil ClipByValue Complex ComplexAbs Conj Cos Cosh Digamma Div DivNoNan Elu
    EluGrad Equal Erf Erfc Erfinv Exp Expm1 Fill Floor FloorDiv FloorMod Greater GreaterEqual Igamma Igammac Imag Inv
    InvGrad Invert IsFinite IsInf IsNan LeakyRelu LeakyReluGrad LeftShift Less LessEqual Lgamma LinSpace Log Log1p
    LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod Mul MulNoNan Ndtri Neg NextAfter NotEqual OnesLike Polygamma Pow
    QuantizeAndDequantizeV4 Range Real RealDiv Reciprocal ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad RightShift Rint
    Round Rsqrt RsqrtGrad Select SelectV2 Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh Softplus SoftplusGrad Softsign
    SoftsignGrad Sqrt SqrtGrad Square SquaredDifference Sub Tan Tanh TanhGrad TruncateDiv TruncateMod Xdivy Xlog1py Xlogy
    ZerosLike Zeta
    BatchToSpace BatchToSpaceND Bitcast Concat ConcatV2 DepthToSpace DiagPart Diag DynamicStitch Empty Gather GatherNd GatherV2
    MatrixBandPart MatrixDiagPartV2 MatrixDiagPartV3 MatrixDiagV2 MatrixDiagV3 MatrixSetDiagV3 MirrorPad MirrorPadGrad OneHot
    Pad PadV2 ParallelDynamicStitch ResourceGather ResourceGatherNd ResizeNearestNeighbor ReverseSequence ReverseV2 Roll
    ScatterNd SpaceToBatch SpaceToBatchND SpaceToDepth StridedSliceGrad TensorListConcatV2 TensorListStack
    TensorScatterAdd TensorScatterUpdate Tile Transpose ConjugateTranspose Unique UniqueV2 Where ExtractImagePatches
    ExtractVolumePatches
    Bucketize Multinomial RandomShuffle RandomStandardNormal RandomUniform RandomUniformInt StatelessMultinomial
    StatelessRandomNormalV2 StatelessRandomUniformFullIntV2 StatelessRandomUniformIntV2 StatelessRandomUniformV2
    StatelessTruncatedNormalV2 TruncatedNormal
    """
)
# FLOPs for each element of the first input: what sums up.
_TAKE = {
    **dict.fromkeys(_names("All Any ArgMax ArgMin BiasAddGrad Bincount DenseBincount Cumprod Cumsum Max Mean Min Prod Sum"), 1),
    **dict.fromkeys(_names("SegmentMax SegmentMean SegmentMin SegmentProd SegmentSum SegmentSumV2"), 1),
    **dict.fromkeys(_names("UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum"), 1),
    **dict.fromkeys(["ResizeNearestNeighborGrad", "TensorListFromTensor", "TensorListSplit", "InTopKV2"], 1),
    **dict.fromkeys(["L2Loss", "EuclideanNorm", "CumulativeLogsumexp"], 2),
    **dict.fromkeys(["Softmax", "LogSoftmax"], 5),  # the greatest, less it, exp, sum, divided by it
    **dict.fromkeys(["SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"], 7),  # and both results
    **dict.fromkeys(["ResizeBilinearGrad", "ScaleAndTranslateGrad"], 8),
    "ResizeBicubicGrad": 32,
    # Forward: sum; less the mean, squared, summed; normalised (2), scaled, shifted. Backward: normalised again (2), the
    # sums for offset (1) and scale (2), the rest (4). Both take what is normalised, or its gradient, first.
    **dict.fromkeys(["FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3", "_FusedBatchNormEx"], 8),
    **dict.fromkeys(["FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3", "_FusedBatchNormGradEx"], 9),
}
_TAPS = {"ResizeBilinear": 8, "ScaleAndTranslate": 8, "ResizeBicubic": 32, "CropAndResize": 8}  # for each element made


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


def _sparse_matmul(op):
    return 2 * (op.inputs[0].shape[0] or 1) * (op.outputs[0].shape[-1] or 1)


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
    terms = ellipsis * int(np.prod(list(sizes.values()), dtype=np.int64))
    return 2 * terms if len(left) > 1 else terms  # one operand is summed up or moved


def _cudnn_rnn(op):
    x, weights = op.inputs[0], op.inputs[3]  # each weight is used once for each step and sample
    return 2 * (x.shape[0] or 1) * (x.shape[1] or 1) * _elements(weights)


def _cudnn_rnn_gradient(op):
    return 2 * _cudnn_rnn(op)


_PRODUCTS = {
    "MatMul": _matmul,
    "BatchMatMul": _batch_matmul,
    "BatchMatMulV2": _batch_matmul,
    "BatchMatMulV3": _batch_matmul,
    "SparseTensorDenseMatMul": _sparse_matmul,
    "Einsum": _einsum,
    "Conv": _convolution,
    "Conv2D": _convolution,
    "Conv3D": _convolution,
    "Conv2DBackpropInput": _convolution_to_input,
    "Conv3DBackpropInputV2": _convolution_to_input,
    "Conv2DBackpropFilter": _convolution_to_filter,
    "Conv3DBackpropFilterV2": _convolution_to_filter,
    "DepthwiseConv2dNative": _depthwise,
    "DepthwiseConv2dNativeBackpropInput": _depthwise_to_input,
    "DepthwiseConv2dNativeBackpropFilter": _depthwise_to_filter,
    "CudnnRNNV2": _cudnn_rnn,
    "CudnnRNNV3": _cudnn_rnn,
    "CudnnRNNBackpropV2": _cudnn_rnn_gradient,
    "CudnnRNNBackpropV3": _cudnn_rnn_gradient,
}


def _window(op):
    return int(np.prod(op.get_attr("ksize"), dtype=np.int64))


def _pooling(op):
    return _window(op) * _elements(op.outputs[0])


def _pooling_gradient(op):
    return _window(op) * _elements(op.inputs[-1])  # the gradient comes last


def _argmax_pooling_gradient(op):
    return _elements(op.inputs[1])


def _dilation(op):
    return 2 * _elements(op.outputs[0]) * (op.inputs[1].shape[0] or 1) * (op.inputs[1].shape[1] or 1)


def _dilation_gradient(op):
    return 2 * _elements(op.inputs[2]) * (op.inputs[1].shape[0] or 1) * (op.inputs[1].shape[1] or 1)


def _local_response(op):
    return 2 * (2 * op.get_attr("depth_radius") + 1) * _elements(op.outputs[0])


def _sort(op):
    length = (op.inputs[0].shape[-1] if op.inputs[0].shape.rank else 1) or 1
    return _elements(op.inputs[0]) * max(1, math.ceil(math.log2(length)))


def _fourier(op):
    # 5 n log2(n) of the usual algorithm, half of it where one side is real.
    whole = op.outputs[0]
    if op.type.startswith("RFFT"):
        whole = op.inputs[0]
    rank = int(op.type[-2]) if op.type.endswith("D") else 1
    points = int(np.prod([n or 1 for n in whole.shape[-rank:]], dtype=np.int64))
    return (2.5 if "RFFT" in op.type else 5) * _elements(whole) * math.log2(max(points, 1))


def _cubic(factor):
    def count(op):
        rows, columns = (n or 1 for n in op.inputs[0].shape[-2:])
        return round(factor * _elements(op.inputs[0]) * min(rows, columns))

    return count


def _solve(factor):
    def count(op):
        n = op.inputs[0].shape[-1] or 1
        return round(factor * _elements(op.inputs[0]) * n + (2 if factor else 1) * _elements(op.inputs[1]) * n)

    return count


_OTHERS = {
    **dict.fromkeys(["MaxPool", "MaxPool3D", "AvgPool", "AvgPool3D", "MaxPoolWithArgmax"], _pooling),
    **dict.fromkeys(["MaxPoolGrad", "MaxPool3DGrad", "AvgPoolGrad", "AvgPool3DGrad"], _pooling_gradient),
    **dict.fromkeys(["MaxPoolGradGrad", "MaxPool3DGradGrad"], _pooling_gradient),
    "MaxPoolGradWithArgmax": _argmax_pooling_gradient,
    "Dilation2D": _dilation,
    **dict.fromkeys(["Dilation2DBackpropInput", "Dilation2DBackpropFilter"], _dilation_gradient),
    **dict.fromkeys(["LRN", "LRNGrad"], _local_response),
    **dict.fromkeys(["TopK", "TopKV2", "UniqueWithCounts", "UniqueWithCountsV2"], _sort),
    **dict.fromkeys(["FFT", "FFT2D", "FFT3D", "IFFT", "IFFT2D", "IFFT3D", "RFFT", "RFFT2D", "RFFT3D"], _fourier),
    **dict.fromkeys(["IRFFT", "IRFFT2D", "IRFFT3D"], _fourier),
    "Cholesky": _cubic(1 / 3),
    "MatrixInverse": _cubic(2),
    "MatrixDeterminant": _cubic(2 / 3),
    "LogMatrixDeterminant": _cubic(2 / 3),
    "Qr": _cubic(2),
    "Svd": _cubic(20),
    "SelfAdjointEigV2": _cubic(9),
    "MatrixSolve": _solve(2 / 3),
    "MatrixTriangularSolve": _solve(0),
}


def operation_flops(op):
    """Returns the FLOPs of one `tf.Operation`.

    Args:
        op: The operation. Open dimensions count as 1, and so do the turns of a loop that its graph does not tell.

    Returns:
        A number; 0 for operations that compute nothing.
    """
    if op.type in _NONE:
        return 0
    graphs = functions.graphs(op)
    if graphs:
        once = max(sum(operation_flops(x) for x in functions.needed(graph)) for graph in graphs)
        return once * _turns(op)
    if op.type in _PRODUCTS:
        return _PRODUCTS[op.type](op)
    if op.type in _OTHERS:
        return _OTHERS[op.type](op)
    if op.type in _TAKE:
        return _TAKE[op.type] * _elements(op.inputs[0])
    return _TAPS.get(op.type, 1) * sum(_elements(x) for x in op.outputs)


# No FLOPs, but bytes that are copied.
_MOVES = _names("Pack Slice Split SplitV StridedSlice Unpack TensorListGetItem TensorListSetItem")
# These read no more of their inputs than they make.
_READS_PART = _names("Gather GatherNd GatherV2 ResourceGather ResourceGatherNd Slice StridedSlice TensorListGetItem")
_FACTORS = _names("Cholesky LogMatrixDeterminant MatrixDeterminant MatrixInverse MatrixSolve MatrixTriangularSolve")
_FACTORS |= _names("Qr SelfAdjointEigV2 Svd")  # many FLOPs for each byte, as in a matmul
_FOLDED = 16  # elements: up to these, it is shapes and constants, which graph optimisers fold or the host computes beside


def operation_work(op):
    """Returns what one `tf.Operation` does, as a list of `Work`: none for aliases, several for what calls functions.

    Args:
        op: The operation. Open dimensions and turns count as in `operation_flops`.
    """
    graphs = functions.graphs(op)
    if graphs:
        dearest = max(graphs, key=lambda graph: sum(operation_flops(x) for x in functions.needed(graph)))
        inside = [work for x in functions.needed(dearest) for work in operation_work(x)]
        return [work._replace(times=work.times * _turns(op)) for work in inside]
    if op.type in _NONE and op.type not in _MOVES:
        return []
    made, taken = list(op.outputs), list({x.ref(): x for x in op.inputs}.values())
    if max((_elements(x) for x in [*made, *taken]), default=0) <= _FOLDED:
        return []
    size = sum(_bytes(x) for x in made)
    size = 2 * size if op.type in _READS_PART else size + sum(_bytes(x) for x in taken)
    return [Work(_kind(op), operation_flops(op), size)]


def _kind(op):
    if op.type in _FACTORS or (op.type in _PRODUCTS and "Conv" not in op.type and len(op.inputs) > 1):
        return "matmul"
    return "convolution" if op.type in _PRODUCTS and "Conv" in op.type else "memory"


def _bytes(tensor):
    return 0 if tensor.dtype in (tf.variant, tf.resource, tf.string) else _elements(tensor) * tensor.dtype.size


def _turns(op):
    found = functions.turns(op)
    return 1 if found is None else found


def unknown_types(operations):
    """Returns the types of operations whose FLOPs are a guess: one for each element that they make.

    Args:
        operations: List of `tf.Operation`.

    Returns:
        A set of strings; a loop is in it if its graph does not tell how often it runs.
    """
    found = set()
    for op in operations:
        graphs = functions.graphs(op)
        for graph in graphs:
            found |= unknown_types(functions.needed(graph))
        if functions.turns(op) is None or not (graphs or _is_known(op.type)):
            found.add(op.type)
    return found


def _is_known(op_type):
    return any(op_type in table for table in (_NONE, _MAKE, _TAKE, _TAPS, _PRODUCTS, _OTHERS))


def is_product(op_type):
    """Returns True for the operation types that are counted as products of matrices or convolutions."""
    return op_type in _PRODUCTS
