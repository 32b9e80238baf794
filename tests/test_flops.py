"""FLOPs: of single operations against figures worked out by hand, and of whole steps in the graphs that TensorFlow runs."""

import collections
import pathlib
import re
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_ckpt
from tf_ckpt.flops import is_product, operation_flops
from tf_ckpt.strategies import Range

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "benchmarks"))
from _graphs import executed_operations, products, total_flops
from _models import transformer

L = keras.layers
BATCH = 8


def flops_of(op_type, function, *shapes, gradient=False):
    """Returns the FLOPs of all operations of a type that a function of tensors, or its gradient, makes."""
    with tf.Graph().as_default() as graph:
        inputs = [tf.compat.v1.placeholder("float32", shape) for shape in shapes]
        outputs = function(*inputs)
        if gradient:
            tf.gradients(outputs, inputs)
    found = [operation_flops(op) for op in graph.get_operations() if op.type == op_type]
    assert found, sorted({op.type for op in graph.get_operations()})
    return sum(found)


@pytest.mark.parametrize(
    ("function", "left", "right"),
    [
        (tf.matmul, (2, 3), (3, 5)),
        (lambda a, b: tf.matmul(a, b, transpose_a=True), (3, 2), (3, 5)),
        (lambda a, b: tf.matmul(a, b, transpose_b=True), (2, 3), (5, 3)),
    ],
)
def test_matmul(function, left, right):
    assert flops_of("MatMul", function, left, right) == 2 * (2 * 3 * 5)
    assert flops_of("MatMul", function, left, right, gradient=True) == 3 * 2 * (2 * 3 * 5)


@pytest.mark.parametrize(
    ("function", "left", "right"),
    [
        (tf.matmul, (7, 4, 2, 3), (7, 4, 3, 5)),
        (tf.matmul, (7, 4, 2, 3), (3, 5)),
        (lambda a, b: tf.matmul(a, b, adjoint_a=True), (7, 4, 3, 2), (7, 4, 3, 5)),
        (lambda a, b: tf.matmul(a, b, adjoint_b=True), (7, 4, 2, 3), (7, 4, 5, 3)),
    ],
)
def test_batch_matmul(function, left, right):
    assert flops_of("BatchMatMulV2", function, left, right) == 7 * 4 * 2 * (2 * 3 * 5)


@pytest.mark.parametrize(
    ("equation", "left", "right", "multiplied"),
    [
        ("ab,bc->ac", (2, 3), (3, 5), 2 * 3 * 5),
        ("btd,dhk->bthk", (2, 7, 6), (6, 3, 4), 2 * 7 * 6 * 3 * 4),
        ("bthk,bshk->bhts", (2, 7, 3, 4), (2, 9, 3, 4), 2 * 7 * 9 * 3 * 4),
        ("...d,de->...e", (2, 7, 6), (6, 5), 2 * 7 * 6 * 5),
        ("b...d,de->b...e", (2, 7, 8, 6), (6, 5), 2 * 7 * 8 * 6 * 5),
    ],
)
def test_einsum(equation, left, right, multiplied):
    assert flops_of("Einsum", lambda a, b: tf.einsum(equation, a, b), left, right) == 2 * multiplied


@pytest.mark.parametrize(
    ("strides", "padding", "groups", "positions"),
    [(1, "SAME", 1, 8 * 8), (2, "SAME", 1, 4 * 4), (1, "VALID", 1, 6 * 6), (2, "VALID", 2, 3 * 3), (1, "SAME", 4, 8 * 8)],
)
def test_convolution(strides, padding, groups, positions):
    def convolve(x, kernel):
        return tf.nn.conv2d(x, kernel, strides, padding)

    shapes = (2, 8, 8, 4), (3, 3, 4 // groups, 12)
    expected = 2 * (2 * positions * 12) * (3 * 3 * 4 // groups)
    for op_type in ("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter"):
        assert flops_of(op_type, convolve, *shapes, gradient=True) == expected, op_type


def test_convolution_in_three_dimensions():
    def convolve(x, kernel):
        return tf.nn.conv3d(x, kernel, [1, 2, 2, 2, 1], "SAME")

    expected = 2 * (2 * 4 * 4 * 4 * 5) * (3 * 3 * 3 * 6)
    for op_type in ("Conv3D", "Conv3DBackpropInputV2", "Conv3DBackpropFilterV2"):
        assert flops_of(op_type, convolve, (2, 8, 8, 8, 6), (3, 3, 3, 6, 5), gradient=True) == expected, op_type


@pytest.mark.parametrize(("strides", "positions"), [(1, 8 * 8), (2, 4 * 4)])
def test_depthwise_convolution(strides, positions):
    def convolve(x, kernel):
        return tf.nn.depthwise_conv2d(x, kernel, [1, strides, strides, 1], "SAME")

    name = "DepthwiseConv2dNative"
    expected = 2 * (2 * positions * 4 * 3) * (3 * 3)  # 3 outputs for each of 4 channels, each from one channel
    for op_type in (name, f"{name}BackpropInput", f"{name}BackpropFilter"):
        assert flops_of(op_type, convolve, (2, 8, 8, 4), (3, 3, 4, 3), gradient=True) == expected, op_type


def test_what_is_no_product_counts_its_elements():
    assert flops_of("Tanh", tf.tanh, (2, 3, 4)) == 2 * 3 * 4
    assert flops_of("Reshape", lambda x: tf.reshape(x, (6, 4)), (2, 3, 4)) == 0
    assert flops_of("MatMul", tf.matmul, (None, 3), (3, 5)) == 2 * 3 * 5  # an open dimension counts as one
    assert is_product("MatMul")
    assert not is_product("AddV2")


def small_transformer():
    return transformer(blocks=4, width=32, heads=2, inner=128, length=64, dropout=0.1, classes=10)


def small_resnet():
    inputs = keras.Input((32, 32, 3))
    x = L.Conv2D(16, 3, padding="same")(inputs)
    for strides, filters in ((1, 16), (1, 16), (2, 32), (1, 32)):
        y = L.ReLU()(L.BatchNormalization()(x))
        y = L.Conv2D(filters, 3, strides, padding="same")(y)
        y = L.ReLU()(L.BatchNormalization()(y))
        y = L.Conv2D(filters, 3, padding="same")(y)
        x = L.Add()([x if strides == 1 else L.Conv2D(filters, 1, strides)(x), y])
    x = L.GlobalAveragePooling2D()(L.ReLU()(L.BatchNormalization()(x)))
    return keras.Model(inputs, L.Dense(10)(x))


@pytest.fixture(scope="module", params=[small_transformer, small_resnet])
def executed(request):
    """The operations that plain and checkpointed model run in `fit`, `evaluate` and `predict`, and the plan."""
    keras.utils.set_random_seed(7)
    plain = request.param()
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(BATCH, *plain.input_shape[1:])).astype("float32")
    y = numbers.integers(0, 10, (BATCH, *plain.output_shape[1:-1]))
    batches = tf.data.Dataset.from_tensors((x, y))
    found = {}
    for name, model in (("plain", plain), ("sqrt", tf_ckpt.apply(plain, "sqrt", batch_size=BATCH))):
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        found[name, "fit"] = executed_operations(lambda model=model: model.fit(batches, verbose=0, shuffle=False))
        found[name, "evaluate"] = executed_operations(lambda model=model: model.evaluate(batches, verbose=0))
        found[name, "predict"] = executed_operations(lambda model=model: model.predict(batches, verbose=0))
    return found, tf_ckpt.plan_of(model)


def test_a_step_costs_at_most_one_more_forward_run(executed):
    operations, plan = executed
    assert len(plan.segments) > 1
    ratio = total_flops(operations["sqrt", "fit"]) / total_flops(operations["plain", "fit"])
    assert 1 < ratio <= 1.34


def test_each_segment_runs_twice_and_the_rest_once(executed):
    operations, plan = executed
    runs, segments = {"forward": collections.Counter(), "again": collections.Counter()}, set()
    for op in products(operations["sqrt", "fit"]):
        mark = re.search(r"tf_ckpt_recompute/([^/]+)/", op.name)
        if "gradient_tape/" not in op.name:
            # What is run again is called as it is in the forward run, but for the numbers behind repeated names.
            name = re.sub(r"(_\d+)+(?=/|$)", "", op.name.replace(mark[0], "") if mark else op.name)
            runs["again" if mark else "forward"][name] += 1
            segments.update(mark.groups() if mark else ())
    assert runs["again"] <= runs["forward"]  # less often, where the backward pass does not need the last product
    again = runs["again"].total()
    assert 1 < len(segments) <= len(plan.segments)
    assert again > 0
    assert len(products(operations["sqrt", "fit"])) == len(products(operations["plain", "fit"])) + again


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_inference_runs_nothing_again(executed, method):
    operations, _ = executed
    plain, ours = (collections.Counter(op.type for op in products(operations[name, method])) for name in ("plain", "sqrt"))
    assert plain.total() > 0
    assert ours == plain


def test_an_activation_at_the_end_of_a_rerun_is_run_once_more_and_not_twice():
    """The segment's own re-run makes the activation for nobody: the part inside does, in a re-run of its own."""
    inputs = keras.Input((8,))
    x = L.Dense(16, activation="gelu")(L.Dense(8)(inputs))
    model = keras.Model(inputs, L.Dense(2)(x))
    counts = []
    for tree in ((), (Range(0, 2),), (Range(0, 2, (Range(1, 2, (), True),)),)):
        applied = tf_ckpt.apply(model, lambda chain, tree=tree: tree)
        applied.compile("sgd", "mse", jit_compile=False)
        done = executed_operations(lambda applied=applied: applied.fit(np.ones((4, 8)), np.ones((4, 2)), verbose=0))
        counts.append(sum(op.type in ("Erf", "Erfc") for op in done))
    assert counts == [1, 2, 2]
