"""What a call keeps and costs, against figures worked out by hand, and against the allocator."""

import dataclasses
import gc
import warnings
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import AddsLoss, Counter, NoTrainingArgument, numbers

import tf_ckpt
from tf_ckpt import costs, graph, memory
from tf_ckpt.stages import Stages

L = keras.layers
BATCH = 2
FLOAT = 4


def node_of(layer, *shapes, dtype="float32", **arguments):
    """Returns one call of a layer on new inputs of these shapes."""
    inputs = [keras.Input(shape, dtype=dtype) for shape in shapes]
    return graph.read(keras.Model(inputs, layer(*inputs, **arguments))).nodes[-1]


def cost(layer, *shapes, batch=BATCH, differentiated=None, **arguments):
    """Returns the cost of one call of a layer on new inputs of these shapes."""
    found = costs.node_cost(node_of(layer, *shapes, **arguments), batch, {}, differentiated)
    assert found.traced
    return found


def chain_of(model, batch=BATCH):
    return Stages(graph.read(model)).chain(batch)


# --- layers -----------------------------------------------------------------------------------------------------------


def test_dense():
    c = cost(L.Dense(5), (3,))
    product = 2 * BATCH * 3 * 5
    assert (c.internal_bytes, c.reads_inputs, c.reads_outputs) == (0, (True,), (False,))
    assert (c.flops, c.pruned_flops, c.backward_flops) == (product + BATCH * 5, 0, 2 * product + BATCH * 5)
    assert c.weight_bytes == (3 * 5 + 5) * FLOAT
    assert (c.expensive_end, c.elementwise_start, c.input_uses) == (True, False, (1,))


def test_dense_on_sequences():
    c = cost(L.Dense(5, use_bias=False), (7, 3))
    assert c.flops == 2 * BATCH * 7 * 3 * 5
    assert c.internal_bytes == 0
    assert c.expensive_end


def test_frozen_dense_needs_no_input():
    layer = L.Dense(5)
    layer.trainable = False
    c = cost(layer, (3,))
    assert (c.reads_inputs, c.weight_bytes) == ((False,), 0)
    assert c.backward_flops < 2 * BATCH * 3 * 5 + 10


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_activation_that_needs_its_output_only(activation):
    c = cost(L.Dense(5, activation=activation), (3,))
    assert (c.internal_bytes, c.reads_inputs, c.reads_outputs, c.expensive_end) == (0, (True,), (True,), False)
    assert c.pruned_flops == c.flops  # its own backward pass reads what it makes


def test_gelu_keeps_several_tensors():
    c = cost(L.Dense(5, activation="gelu"), (3,))
    one = BATCH * 5 * FLOAT
    assert 3 * one <= c.internal_bytes <= 4 * one
    assert not c.reads_outputs[0]
    assert 2 * BATCH * 3 * 5 <= c.pruned_flops < c.flops
    assert not c.expensive_end


def test_convolution():
    c = cost(L.Conv2D(4, 3, strides=2, padding="same"), (8, 8, 3))
    elements = BATCH * 4 * 4 * 4
    product = 2 * elements * 3 * 3 * 3
    assert c.flops == product + elements
    assert c.backward_flops == 2 * product + elements  # the bias' gradient is a sum
    assert (c.internal_bytes, c.reads_inputs, c.reads_outputs, c.pruned_flops) == (0, (True,), (False,), 0)
    assert c.weight_bytes == (27 * 4 + 4) * FLOAT
    assert c.expensive_end


def test_depthwise_and_transposed_convolution():
    depthwise = cost(L.DepthwiseConv2D(3, padding="same", use_bias=False), (8, 8, 6))
    assert depthwise.flops == 2 * BATCH * 8 * 8 * 6 * 9
    transposed = cost(L.Conv2DTranspose(4, 3, use_bias=False), (8, 8, 3))
    assert transposed.flops == 2 * BATCH * 8 * 8 * 3 * 9 * 4
    assert depthwise.internal_bytes == transposed.internal_bytes == 0


def test_grouped_convolution():  # on a CPU, Keras runs these in a compiled function
    c = cost(L.Conv2D(4, 3, groups=2, padding="same", use_bias=False), (8, 8, 6))
    product = 2 * BATCH * 8 * 8 * 4 * 3 * 3 * 3
    assert (c.flops, c.backward_flops) == (product, 2 * product)
    assert c.pruned_flops == product  # it runs as a whole if its backward pass reads anything that it returns
    assert (c.internal_bytes, c.reads_inputs) == (0, (True,))
    assert c.expensive_end


def test_dropout_keeps_its_mask():
    c = cost(L.Dropout(0.5), (10,))
    assert c.internal_bytes == BATCH * 10  # booleans
    assert (c.reads_inputs, c.reads_outputs, c.weight_bytes) == ((False,), (False,), 0)
    assert c.pruned_flops < c.flops


def test_batch_normalization():
    c = cost(L.BatchNormalization(), (8, 8, 3))
    elements = BATCH * 8 * 8 * 3
    assert c.internal_bytes <= 8 * 3 * FLOAT  # statistics
    assert (c.reads_inputs, c.reads_outputs) == ((True,), (False,))
    # Mean, squared difference, its mean, scaled, shifted; a handful of operations on the statistics.
    assert 5 * elements <= c.flops <= 5 * elements + 10 * 3
    assert c.weight_bytes == 2 * 3 * FLOAT
    assert c.input_uses[0] > 1


def test_layer_normalization():
    c = cost(L.LayerNormalization(), (7, 8))
    one = BATCH * 7 * 8 * FLOAT
    assert one <= c.internal_bytes <= 2 * one
    assert c.weight_bytes == 2 * 8 * FLOAT


def test_attention_counts_its_scores():
    def attention(length, **arguments):
        return cost(L.MultiHeadAttention(2, 4, **arguments), (length, 8), (length, 8))

    def quadratic(**arguments):  # the second difference leaves only what grows with the square of the length
        sizes = [attention(length, **arguments).internal_bytes for length in (10, 20, 30)]
        return (sizes[2] - 2 * sizes[1] + sizes[0]) // 200

    assert quadratic() == BATCH * 2 * FLOAT  # one matrix of scores a head
    assert quadratic(dropout=0.2) == BATCH * 2 * (2 * FLOAT + 1)  # that, the dropped one and the mask
    c = attention(10)
    projections, scores = 4 * 2 * BATCH * 10 * 8 * 8, 2 * 2 * BATCH * 2 * 10 * 10 * 4
    rest = 4 * BATCH * 10 * 8 + 5 * BATCH * 2 * 10 * 10  # biases, softmax
    assert projections + scores + rest <= c.flops <= 1.03 * (projections + scores + rest)
    assert 2 * (projections + scores) <= c.backward_flops
    assert c.internal_bytes == 4 * BATCH * 10 * 8 * FLOAT + BATCH * 2 * 10 * 10 * FLOAT  # q, k, v, what o takes; scores
    assert c.reads_inputs == (True, True)


def test_embedding_costs_no_product():
    c = cost(L.Embedding(20, 8), (6,), dtype="int32")
    assert c.weight_bytes == 20 * 8 * FLOAT
    assert c.internal_bytes <= BATCH * 6 * 8
    assert c.flops < 2 * BATCH * 6 * 8
    assert c.reads_outputs == (False,)


@pytest.mark.parametrize(
    ("layer", "shape"), [(L.Reshape((2, 5)), (10,)), (L.Flatten(), (2, 5)), (L.Identity(), (3,))], ids=type
)
def test_aliases_are_free(layer, shape):
    c = cost(layer, shape)
    assert (c.internal_bytes, c.flops, c.pruned_flops, c.backward_flops, c.weight_bytes) == (0, 0, 0, 0, 0)
    assert (c.reads_inputs, c.reads_outputs) == ((False,), (False,))


def test_adding_keeps_nothing():
    c = cost(Sum(), (4,), (4,))
    assert (c.internal_bytes, c.reads_inputs, c.reads_outputs) == (0, (False, False), (False,))
    assert c.flops == BATCH * 4
    assert c.elementwise_start


class Sum(L.Layer):
    """An `Add` that takes its inputs one by one."""

    def call(self, x, y):
        return x + y


def test_the_same_tensor_twice_is_one():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, L.Multiply()([inputs, inputs]))
    c = costs.node_cost(graph.read(model).nodes[0], BATCH, {})
    assert c.reads_inputs == (True, True)
    assert c.input_uses == (2, 2)


# --- products: FLOPs forward and backward by hand ---------------------------------------------------------------------

POINTS = BATCH * 8 * 8


@pytest.mark.parametrize(
    ("layer", "shape", "product"),
    [
        (L.Dense(5, use_bias=False), (3,), 2 * BATCH * 3 * 5),
        (L.Conv1D(4, 3, padding="same", use_bias=False), (8, 3), 2 * BATCH * 8 * 4 * 3 * 3),
        (L.Conv3D(4, 3, padding="same", use_bias=False), (4, 4, 4, 3), 2 * BATCH * 64 * 4 * 27 * 3),
        (L.Conv2DTranspose(4, 3, strides=2, padding="same", use_bias=False), (8, 8, 3), 2 * POINTS * 4 * 9 * 3),
        (L.Conv3DTranspose(4, 3, padding="same", use_bias=False), (4, 4, 4, 3), 2 * BATCH * 64 * 4 * 27 * 3),
        (L.DepthwiseConv2D(3, padding="same", depth_multiplier=2, use_bias=False), (8, 8, 6), 2 * POINTS * 6 * 2 * 9),
        (L.DepthwiseConv1D(3, padding="same", use_bias=False), (8, 6), 2 * BATCH * 8 * 6 * 3),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_products(layer, shape, product):
    c = cost(layer, shape)
    assert (c.flops, c.backward_flops, c.unknown) == (product, 2 * product, ())
    # Nothing asks for the gradient of a model's input.
    assert cost(layer, shape, differentiated=(False,)).backward_flops == product


@pytest.mark.parametrize(
    ("layer", "shape", "depthwise", "pointwise"),
    [
        (L.SeparableConv2D(4, 3, padding="same", use_bias=False), (8, 8, 3), 2 * POINTS * 3 * 9, 2 * POINTS * 3 * 4),
        (L.SeparableConv1D(4, 3, padding="same", use_bias=False), (8, 3), 2 * BATCH * 8 * 3 * 3, 2 * BATCH * 8 * 3 * 4),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_separable_convolutions(layer, shape, depthwise, pointwise):
    c = cost(layer, shape)
    assert (c.flops, c.backward_flops) == (depthwise + pointwise, 2 * (depthwise + pointwise))
    assert c.pruned_flops == depthwise
    assert c.internal_bytes == pointwise // (2 * 4) * FLOAT  # what goes from one to the other
    assert cost(layer, shape, differentiated=(False,)).backward_flops == depthwise + 2 * pointwise


def test_einsum():
    c = cost(L.EinsumDense("abc,cd->abd", (None, 5)), (7, 3))
    product, moved = 2 * BATCH * 7 * 3 * 5, BATCH * 7 * 3 + 2 * 3 * 5
    assert c.flops == product
    assert 2 * product <= c.backward_flops <= 2 * product + moved


def test_dilated_convolution():
    c = cost(L.Conv2D(4, 3, dilation_rate=2, padding="same", use_bias=False), (8, 8, 3))
    product = 2 * POINTS * 4 * 9 * 3
    moved = BATCH * 12 * 12 * 3 + POINTS * 4  # TensorFlow pads and moves it to a larger batch, and back
    assert product <= c.flops <= product + moved
    assert 2 * product <= c.backward_flops <= 2 * (product + moved)


@pytest.mark.parametrize(
    ("layer", "shape", "forward", "backward"),
    [
        (L.MaxPooling2D(2), (8, 8, 3), BATCH * 4 * 4 * 3 * 4, BATCH * 4 * 4 * 3 * 4),
        (L.AveragePooling2D(3, strides=1, padding="same"), (8, 8, 3), POINTS * 3 * 9, POINTS * 3 * 9),
        (L.Softmax(), (7, 8), 5 * BATCH * 7 * 8, 4 * BATCH * 7 * 8),
        (L.UpSampling2D(2, interpolation="bilinear"), (4, 4, 3), 8 * POINTS * 3, 8 * POINTS * 3),
        (L.ReLU(), (7, 8), BATCH * 7 * 8, BATCH * 7 * 8),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_what_is_no_product(layer, shape, forward, backward):
    c = cost(layer, shape)
    assert (c.flops, c.backward_flops, c.unknown) == (forward, backward, ())


@pytest.mark.parametrize(
    ("function", "shape", "flops"),
    [
        (lambda x: tf.signal.rfft(x), (16,), 2.5 * BATCH * 16 * 4),
        (lambda x: tf.signal.fft(tf.complex(x, x)), (16,), BATCH * 16 + 5 * BATCH * 16 * 4),
        (lambda x: tf.signal.rfft2d(x), (8, 8), 2.5 * BATCH * 64 * 6),
        (lambda x: tf.cumsum(x, 1), (9,), BATCH * 9),
        (lambda x: tf.reduce_sum(x, 1), (9,), BATCH * 9),
        (lambda x: tf.math.top_k(x, 3)[0], (9,), BATCH * 9 * 4),
        (lambda x: tf.gather(x, [1, 2, 2], axis=1), (9,), BATCH * 3),
        (lambda x: tf.nn.local_response_normalization(x, 2), (4, 4, 8), BATCH * 128 * 2 * 5),
        (lambda x: keras.ops.image.resize(x, (8, 8), interpolation="bicubic"), (4, 4, 3), 32 * POINTS * 3),
        (lambda x: keras.ops.image.resize(x, (8, 8), interpolation="nearest"), (4, 4, 3), POINTS * 3),
        (lambda x: tf.linalg.inv(x), (6, 6), 2 * BATCH * 6**3),
        (lambda x: tf.linalg.triangular_solve(x, x), (6, 6), BATCH * 6**3),
        (lambda x: tf.nn.max_pool3d(x, 2, 2, "VALID"), (4, 4, 4, 3), BATCH * 8 * 3 * 8),
        (lambda x: tf.nn.l2_loss(x)[None], (9,), 2 * BATCH * 9),
    ],
)
def test_single_operations(function, shape, flops):
    c = cost(L.Lambda(function), shape)
    assert (c.flops, c.unknown) == (flops, ())


def test_fused_batch_normalization():
    def normalized(x):
        return tf.compat.v1.nn.fused_batch_norm(x, tf.ones(3), tf.zeros(3))[0]

    c = cost(L.Lambda(normalized), (8, 8, 3))
    assert (c.flops, c.backward_flops) == (8 * POINTS * 3 + 2 * 3, 9 * POINTS * 3)  # scale and offset are filled
    assert c.internal_bytes <= 3 * 3 * FLOAT  # statistics
    assert c.reads_inputs == (True,)


@pytest.mark.parametrize(
    "layer",
    [
        *[L.BatchNormalization(), L.LayerNormalization(), L.GroupNormalization(2), L.UpSampling1D()],
        *([L.RMSNormalization()] if hasattr(L, "RMSNormalization") else []),  # from Keras 3.9 on
        *[L.GlobalAveragePooling1D(), L.GlobalMaxPooling1D(), L.ZeroPadding1D(), L.Cropping1D(), L.SpatialDropout1D(0.5)],
        *[L.GaussianNoise(0.1), L.PReLU(), L.Dense(4, activation="gelu"), L.LSTM(4), L.GRU(4), L.Bidirectional(L.SimpleRNN(4))],
        *[L.Lambda(keras.ops.cumsum), L.Lambda(keras.ops.sort), L.Lambda(keras.ops.argmax), L.Activation("mish")],
    ],
    ids=lambda x: x.name,
)
def test_common_layers_have_no_unknown_operations(layer):
    assert cost(layer, (6, 8)).unknown == ()


def test_an_unknown_operation_is_named_and_costs_its_elements():
    c = cost(L.Lambda(tf.math.special.bessel_j0), (5,))
    assert c.unknown == ("BesselJ0", "BesselJ1")  # it, and its gradient's
    assert c.flops == BATCH * 5


# --- loops ------------------------------------------------------------------------------------------------------------

STEPS, WIDTH, UNITS = 6, 8, 4
STEP = BATCH * UNITS
NUMBERS = 6 * STEPS * FLOAT  # counters and lengths that loops keep, a few each turn


@pytest.mark.parametrize(("layer", "gates", "kept"), [(L.LSTM, 4, 7), (L.GRU, 3, 6), (L.SimpleRNN, 1, 1)])
@pytest.mark.parametrize("sequences", [True, False])
def test_recurrent_layers_keep_their_steps(layer, gates, kept, sequences):
    c = cost(layer(UNITS, return_sequences=sequences), (STEPS, WIDTH))
    product = 2 * BATCH * STEPS * (WIDTH + UNITS) * gates * UNITS
    assert product <= c.flops <= product + 25 * STEPS * STEP * gates
    assert 2 * product <= c.backward_flops <= 2 * product + 60 * STEPS * STEP * gates
    # LSTM: four gates, the state, its tanh, the output before. GRU: three gates, the state, the product with it and its
    # bias for the reset gate, one less the update gate. And rows of the input, copied.
    size = (BATCH * STEPS * WIDTH + kept * STEPS * STEP) * FLOAT
    assert size <= c.internal_bytes <= size + NUMBERS
    assert (c.reads_inputs, c.reads_outputs, c.unknown) == ((False,), (False,), ())
    assert c.taped_extra < 0.25 * size + 16 * STEP * FLOAT * gates + BATCH * STEPS * WIDTH * FLOAT


def test_twice_the_steps_cost_twice():
    short, long = (cost(L.LSTM(UNITS), (n * STEPS, WIDTH)) for n in (1, 2))
    for name in ("flops", "pruned_flops", "backward_flops", "internal_bytes"):
        assert getattr(long, name) == pytest.approx(2 * getattr(short, name), rel=0.02)


def test_both_directions_cost_twice():
    one = cost(L.LSTM(UNITS, return_sequences=True), (STEPS, WIDTH))
    both = cost(L.Bidirectional(L.LSTM(UNITS, return_sequences=True)), (STEPS, WIDTH))
    assert both.internal_bytes == 2 * one.internal_bytes
    assert both.weight_bytes == 2 * one.weight_bytes
    moved = 6 * BATCH * STEPS * max(WIDTH, 2 * UNITS)  # reversed and joined
    assert 2 * one.flops <= both.flops <= 2 * one.flops + moved


def test_a_loop_that_is_unrolled_costs_the_same():
    loop, unrolled = (cost(L.LSTM(UNITS, unroll=unroll), (STEPS, WIDTH)) for unroll in (False, True))
    assert loop.flops == pytest.approx(unrolled.flops, rel=0.05)
    assert loop.internal_bytes == pytest.approx(unrolled.internal_bytes, rel=0.2)


def test_convolutional_lstm():
    c = cost(L.ConvLSTM2D(UNITS, 3, padding="same"), (STEPS, 8, 8, 3))
    product = 2 * POINTS * STEPS * 9 * (3 + UNITS) * 4 * UNITS
    assert product <= c.flops <= 1.1 * product
    step = POINTS * UNITS * FLOAT
    assert 7 * STEPS * step <= c.internal_bytes <= 12 * STEPS * step


class Loop(L.Layer):
    """Multiplies by a weight as often as it is told to."""

    def __init__(self, condition, **arguments):
        super().__init__()
        self.condition, self.arguments = condition, arguments
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        def body(i, x):
            return i + 2, tf.tanh(x * self.scale)

        return tf.while_loop(self.condition, body, (0, x), **self.arguments)[1]


@pytest.mark.parametrize(
    ("condition", "arguments", "turns"),
    [
        (lambda i, x: i < 9, {}, 5),
        (lambda i, x: i <= 8, {}, 5),
        (lambda i, x: tf.greater(9, i), {}, 5),
        (lambda i, x: tf.logical_and(i < 9, i < 100), {}, 5),
        (lambda i, x: i < 9, {"maximum_iterations": 3}, 3),
        (lambda i, x: tf.reduce_sum(x) < 9.0, {"maximum_iterations": 4}, 4),
        (lambda i, x: i < x.shape[1] * 2, {}, 3),
        (lambda i, x: i < tf.shape(x)[1], {}, 2),
    ],
)
def test_turns_of_a_loop(condition, arguments, turns):
    c = cost(Loop(condition, **arguments), (3,))
    one = BATCH * 3
    assert c.flops == turns * (2 * one + 2)  # and its two counters
    # What tanh makes is what the next turn takes. And how many turns there were.
    assert c.internal_bytes == turns * one * FLOAT + 4
    assert c.reads_inputs == (True,)
    assert c.unknown == ()


def test_a_scan_over_the_inputs_rows():
    def scanned(x):
        return keras.ops.scan(lambda carry, row: (carry + row, keras.ops.tanh(row)), keras.ops.zeros((9,)), x)[1]

    c = cost(L.Lambda(scanned), (9,), batch=7)
    assert c.unknown == ()
    assert 7 * 2 * 9 <= c.flops <= 7 * 5 * 9
    assert c.internal_bytes >= 7 * 9 * FLOAT


def test_turns_that_nobody_knows_count_once():
    c = cost(Loop(lambda i, x: tf.reduce_sum(x) < 9.0), (3,))
    assert c.unknown == ("StatelessWhile", "While")
    assert c.flops == 2 * BATCH * 3 + 2


class Branches(L.Layer):
    """Takes one way or the other; the second is the dearer."""

    def call(self, x):
        return tf.cond(tf.reduce_sum(x) > 0, lambda: x * 2.0, lambda: tf.tanh(tf.exp(tf.matmul(x, x, transpose_b=True) @ x)))


def test_the_dearest_branch_counts():
    c = cost(Branches(), (3,))
    one = BATCH * 3
    assert c.flops == 2 * 2 * BATCH * BATCH * 3 + 2 * one + one + 1  # two products, exp, tanh; the sum, the comparison
    assert c.internal_bytes == (BATCH * BATCH + one) * FLOAT + 1  # the first product, exp, and which way
    assert (c.reads_inputs, c.reads_outputs) == ((True,), (True,))


# --- parts ------------------------------------------------------------------------------------------------------------


class OwnAttention(L.MultiHeadAttention):
    """A subclass, as other libraries have them."""


@pytest.mark.parametrize("layer", [L.MultiHeadAttention, OwnAttention])
def test_the_part_of_attention_is_its_scores(layer):
    c = cost(layer(2, 4), (10, 8), (10, 8))
    projected, scores = 4 * BATCH * 10 * 8 * FLOAT, BATCH * 2 * 10 * 10 * FLOAT
    assert c.part.name == "attention"
    assert (c.internal_bytes, c.part.internal_bytes) == (projected + scores, projected)
    # Scaled, scores, softmax; not the sum of values, which is kept.
    product = 2 * BATCH * 2 * 10 * 10 * 4
    assert product + 5 * scores // FLOAT <= c.part.flops <= product + 7 * scores // FLOAT
    # Scores are there when the sum of values is not yet.
    assert c.part.taped_extra == scores - BATCH * 10 * 8 * FLOAT


def test_the_part_of_grouped_attention():
    c = cost(L.GroupQueryAttention(4, 4, 2), (10, 8), (10, 8))
    projected, scores = 4 * BATCH * 10 * 16 * FLOAT, BATCH * 4 * 10 * 10 * FLOAT  # keys and values repeated
    places = 10 * FLOAT  # of what is repeated
    assert (c.internal_bytes, c.part.internal_bytes) == (projected + scores + places, projected + places)
    assert c.part.flops < c.pruned_flops


def test_dropout_is_in_the_part():
    c = cost(L.MultiHeadAttention(2, 4, dropout=0.1), (10, 8), (10, 8))
    projected, scores = 4 * BATCH * 10 * 8, BATCH * 2 * 10 * 10
    assert c.internal_bytes == (projected + 2 * scores) * FLOAT + scores  # and the mask
    assert c.part.internal_bytes == projected * FLOAT


@pytest.mark.parametrize(
    ("layer", "shape", "elements", "before"),
    [
        (L.Dense(5, activation="gelu"), (3,), BATCH * 5, 0),
        (L.EinsumDense("abc,cd->abd", (None, 5), activation="gelu"), (7, 3), BATCH * 7 * 5, 0),
        (L.Conv2D(4, 3, padding="same", activation="gelu"), (8, 8, 3), POINTS * 4, 0),
        (L.SeparableConv2D(4, 3, padding="same", activation="gelu"), (8, 8, 3), POINTS * 4, POINTS * 3),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_the_part_of_gelu_needs_its_input_only(layer, shape, elements, before):
    c = cost(layer, shape)
    assert c.part.name == "activation"
    assert c.internal_bytes == (3 * elements + before) * FLOAT
    assert c.part.internal_bytes == (elements + before) * FLOAT
    assert c.part.flops == 4 * elements  # halved, divided, erf, one added
    assert c.part.flops < c.pruned_flops
    assert c.part.taped_extra >= c.taped_extra
    # What is made again, and the square of the input, which waits for no gradient.
    assert c.part.backward_extra == c.backward_extra + c.internal_bytes - c.part.internal_bytes + elements * FLOAT


@pytest.mark.parametrize("activation", ["silu", "softmax", "relu", "tanh", None])
def test_a_part_that_frees_nothing_is_none(activation):
    assert cost(L.Dense(5, activation=activation), (3,)).part is None
    assert cost(L.Conv2D(4, 3, activation=activation), (8, 8, 3)).part is None


class Failing(L.Dense):
    """Raises after its activation was called."""

    def call(self, inputs):
        y = super().call(inputs)
        if tf.is_tensor(y):
            raise RuntimeError("no")
        return y


@pytest.mark.parametrize(
    "layer",
    [L.Dense(5, activation="gelu"), Failing(5, activation="gelu"), L.MultiHeadAttention(2, 4), L.LSTM(4), L.Dropout(0.5)],
    ids=lambda x: type(x).__name__,
)
def test_a_trace_leaves_the_layer_as_it_was(layer):
    node = node_of(layer, *[(6, 8)] * (2 if isinstance(layer, L.MultiHeadAttention) else 1))
    before = dict(vars(layer))
    assert costs.node_cost(node, BATCH, {}).traced == (not isinstance(layer, Failing))
    after = vars(layer)
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] is not after[name]] == []


# --- what nobody differentiates by ------------------------------------------------------------------------------------


def test_without_a_gradient_to_the_input():
    c = cost(L.Dense(5, activation="tanh"), (3,), differentiated=(False,))
    assert c.backward_flops == 2 * BATCH * 3 * 5 + 2 * BATCH * 5  # of the kernel; of the bias and tanh
    assert (c.reads_inputs, c.reads_outputs, c.weight_bytes) == ((True,), (True,), 80)
    assert c.backward_extra < cost(L.Dense(5, activation="tanh"), (3,)).backward_extra


def test_what_a_product_takes_is_let_go_before_its_gradient_is_made_in_a_re_run():
    c = cost(L.Dense(5, use_bias=False), (1000,))
    kernel, inputs = 4 * 1000 * 5, 4 * BATCH * 1000
    assert (c.backward_extra, c.backward_last, c.backward_again) == (kernel + inputs, kernel + inputs, kernel)


def test_what_a_backward_pass_makes_before_its_gradient_is_there():
    elements = BATCH * 1000
    assert cost(L.Activation("gelu"), (1000,)).early == elements * FLOAT  # of its input alone
    assert cost(L.Dense(1000, use_bias=False), (1000,)).early == 0  # products with the gradient
    assert cost(L.Activation("relu"), (1000,)).early == 0


def test_whose_gradient_is_handed_on_and_what_a_mask_is_made_of():
    both = [keras.Input((6,)) for _ in range(2)]
    found = {
        "add": costs.node_cost(graph.read(keras.Model(both, L.Add()(both))).nodes[-1], BATCH, {}),
        "dropout": cost(L.Dropout(0.5), (6,)),
        "dense": cost(L.Dense(6), (6,)),
    }
    assert {name: c.passes for name, c in found.items()} == {"add": (True, True), "dropout": (False,), "dense": (False,)}
    assert found["dropout"].pruned_flops > 0
    assert found["dropout"].reruns_inputs == (False,)  # the mask alone
    assert cost(L.Dense(6, activation="gelu"), (6,)).reruns_inputs == (True,)


def test_without_any_gradient_nothing_is_kept():
    layer = L.Dense(5, activation="gelu")
    layer.trainable = False
    c = cost(layer, (3,), differentiated=(False,))
    assert (c.internal_bytes, c.reads_inputs, c.reads_outputs) == (0, (False,), (False,))
    assert (c.backward_flops, c.pruned_flops, c.backward_extra, c.part) == (0, 0, 0, None)
    assert c.flops > 2 * BATCH * 3 * 5


def test_one_of_two_inputs():
    full, first = (cost(Product(), (3,), (3,), differentiated=x) for x in (None, (True, False)))
    assert (full.reads_inputs, first.reads_inputs) == ((True, True), (False, True))
    assert (full.backward_flops, first.backward_flops) == (2 * BATCH * 3, BATCH * 3)


class Product(L.Layer):
    """A `Multiply` that takes its inputs one by one."""

    def call(self, x, y):
        return x * y


# --- models -----------------------------------------------------------------------------------------------------------


def test_nested_models_are_opened():
    inside = keras.Input((8,))
    block = keras.Model(inside, L.Dense(8, activation="tanh", name="b")(L.Dense(8, name="a")(inside)), name="block")
    inputs = keras.Input((8,))
    x = block(L.Dense(8, name="first")(inputs))
    x = L.Dense(2, name="last")(block(x))
    stages = Stages(graph.read(keras.Model(inputs, x)))
    assert stages.names == ["first", "block/a", "block/b", "block:1/a", "block:1/b", "last"]
    assert stages.ranges == [(1, 3), (3, 5)]
    chain = stages.chain(BATCH)
    dense = 2 * BATCH * 8 * 8 + BATCH * 8
    np.testing.assert_array_equal(chain.flops, [*[dense, dense, dense + 16] * 1, dense, dense + 16, 4 * 16 + 4])
    # A shared layer's gradient is there from its last call on.
    np.testing.assert_array_equal(chain.weights, [288, 0, 0, 288, 288, 72])
    assert chain.peak([]) > 0


def test_shared_layer_and_skip():
    inputs = keras.Input((8,))
    shared = L.Dense(8, name="shared")
    x = shared(inputs)
    x = L.Add(name="add")([shared(x), x])
    chain = chain_of(keras.Model(inputs, x))
    assert chain.names == ("shared", "shared:1", "add")
    first, second, last = (t for t in chain.tensors if t.producer >= 0)
    assert (first.uses, first.needed, first.inner) == (((1, 1), (2, 1)), True, (1,))
    assert (second.uses, second.needed) == (((2, 1),), False)
    assert (last.uses, last.inner) == (((3, 1),), (3,))  # the loss reads it
    assert {t.size for t in chain.tensors} == {BATCH * 8 * FLOAT}


def test_batch_size_scales_bytes():
    inputs = keras.Input((8,))
    model = keras.Model(inputs, L.Dense(3)(L.Dense(8, activation="gelu")(inputs)))
    one, many = chain_of(model, 1), chain_of(model, 10)
    np.testing.assert_array_equal(many.internal, 10 * one.internal)
    assert [t.size for t in many.tensors] == [10 * t.size for t in one.tensors]
    np.testing.assert_array_equal(many.weights, one.weights)
    fixed = keras.Input(batch_shape=(4, 8))
    assert tf_ckpt.plan(keras.Model(fixed, L.Dense(3)(fixed))).batch_size == 4
    assert tf_ckpt.plan(model).batch_size == 32


def test_mixed_precision_halves_activations():
    def kept(policy):
        inputs = keras.Input((8,))
        x = L.Dense(8, activation="tanh", dtype=policy)(inputs)
        x = L.Dense(8, activation="tanh", dtype=policy)(x)
        return chain_of(keras.Model(inputs, x))

    full, half = kept("float32"), kept("mixed_bfloat16")
    assert [t.size for t in half.tensors[-2:]] == [t.size / 2 for t in full.tensors[-2:]]
    assert half.weights.sum() == full.weights.sum()


def test_the_gradient_of_a_large_head_is_held_beside_activations():
    inputs = keras.Input((16, 16, 3))
    x = inputs
    for _ in range(4):
        x = L.Conv2D(8, 3, padding="same", activation="relu")(x)
    head = L.Dense(32)
    model = keras.Model(inputs, head(L.Flatten()(L.AveragePooling2D(2)(x))))
    activations, gradient = 4 * BATCH * 16 * 16 * 8 * FLOAT, int(np.prod(head.kernel.shape)) * FLOAT
    pooled = BATCH * 8 * 8 * 8 * FLOAT
    peak = chain_of(model).peak([])
    gradients = 2 * BATCH * 16 * 16 * 8 * FLOAT  # of what the last convolution makes and takes
    assert activations + gradient <= peak <= activations + gradient + pooled + gradients + 2**12


# --- traces leave nothing behind --------------------------------------------------------------------------------------


def stateful():
    inputs = keras.Input((6,))
    x = L.Dense(6, activity_regularizer="l2", kernel_regularizer="l2")(inputs)
    for layer in (Counter(), NoTrainingArgument(), AddsLoss(), L.BatchNormalization(), L.Dropout(0.5, seed=3)):
        x = layer(x)
    x = L.SpectralNormalization(L.Dense(6))(x)
    model = keras.Model(inputs, x)
    model(numbers(4, 6), training=True)
    return model


def test_a_trace_leaves_state_and_seeds_alone():
    model = stateful()
    before = [v.numpy() for v in model.variables]
    assert all(costs.node_cost(node, BATCH, {}).traced for node in graph.read(model).nodes)
    for v, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(v.numpy(), value, err_msg=v.path)


def test_a_trace_leaves_losses_alone():
    model = stateful()
    losses = [loss.numpy() for loss in model.losses]
    assert len(losses) == 3
    chain_of(model)
    assert [loss.numpy() for loss in model.losses] == losses


class EagerOnly(L.Layer):
    """Cannot be traced into a graph, and says its shapes itself."""

    def call(self, x):
        return tf.constant(x.numpy() * 2.0)

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


def test_what_a_layer_builds_when_it_is_first_called_gets_values():
    inputs = keras.Input((16,))
    model = keras.Model(inputs, L.Dense(16, activation=L.BatchNormalization())(inputs))
    inner = model.layers[1].activation
    assert not inner.built
    c = costs.node_cost(graph.read(model).nodes[0], BATCH, {})
    assert c.traced
    assert c.weight_bytes == FLOAT * (16 * 16 + 16 + 2 * 16)  # kernel, bias, gamma, beta
    again = keras.Model(inputs, model.layers[1](inputs))  # all is built now
    assert c == costs._trace(graph.read(again).nodes[0], BATCH, (True,))
    np.testing.assert_array_equal(inner.moving_variance, np.ones(16))
    model.compile("sgd", "mse")
    model.fit(np.ones((8, 16)), np.ones((8, 16)), verbose=0)
    assert not np.array_equal(inner.moving_mean, np.zeros(16))


def test_a_layer_that_cannot_be_traced_counts_by_its_sizes():
    c = costs.node_cost(node_of(EagerOnly(), (5,)), BATCH, {})
    assert not c.traced
    assert c.internal_bytes == BATCH * 5 * FLOAT
    assert (c.reads_inputs, c.reads_outputs, c.expensive_end) == ((True,), (True,), False)
    inputs = keras.Input((5,))
    plan = tf_ckpt.plan(keras.Model(inputs, L.Dense(2)(EagerOnly()(L.Dense(5)(inputs)))), "full")
    assert plan.plain_activation_bytes > 0


def test_what_cannot_be_repeated_is_named_and_stays_plain():
    inputs = keras.Input((5,))
    x = L.Dense(5, activation="tanh")(inputs)
    x = L.Lambda(lambda x: x + tf.random.normal(tf.shape(x)), name="noise")(x)
    model = keras.Model(inputs, L.Dense(5, activation="tanh")(L.Dense(5, activation="tanh")(x)))
    with pytest.warns(tf_ckpt.CheckpointWarning, match="'noise' runs plain in every plan: it draws random numbers"):
        chain = chain_of(model)
    assert list(chain.fixed) == [False, True, False, False]


# --- the cache --------------------------------------------------------------------------------------------------------


@pytest.fixture
def traced(monkeypatch):
    """Counts the traces: a list of the names of the nodes that were traced."""
    names, trace = [], costs._trace

    def counting(node, *arguments):
        names.append(node.name)
        return trace(node, *arguments)

    monkeypatch.setattr(costs, "_trace", counting)
    return names


def test_equal_blocks_are_traced_once(traced):
    inputs = keras.Input((6, 8))
    x = inputs
    for _ in range(5):
        y = L.MultiHeadAttention(2, 4, dropout=0.1)(x, x)
        y = L.Dense(8, activation="gelu")(L.LayerNormalization()(y))
        x = L.Add()([x, L.Dropout(0.1)(y)])
    chain = chain_of(keras.Model(inputs, x))
    assert len(chain) == 25
    assert len(traced) == 5 + 2  # the first block's attention and sum take data, to which no gradient flows
    np.testing.assert_array_equal(chain.flops[:5], chain.flops[-5:])


def test_unequal_calls_are_traced_each(traced):
    inputs = keras.Input((6, 6))
    frozen = L.Dense(6)
    frozen.trainable = False
    x = L.Dense(6)(inputs)
    for layer in (L.Dense(6, use_bias=False), L.Dense(6, activation="tanh"), L.Dense(6, dtype="bfloat16"), frozen):
        x = layer(x)
    attention = L.MultiHeadAttention(2, 4)
    x = attention(x, x)
    x = attention(x, x, use_causal_mask=True)
    x = attention(x, inputs)
    x = keras.ops.einsum("bij,bjk->bik", x, x)
    x = keras.ops.einsum("bij,bij->bij", x, x)
    chain = chain_of(keras.Model(inputs, x))
    assert len(traced) == len(chain)
    assert tuple(chain.flops[-2:]) == (2 * BATCH * 6**3, 2 * BATCH * 6**2)


def powers(n):
    def activation(x):
        for _ in range(n):
            x = tf.tanh(x)
        return x

    return activation


@pytest.mark.parametrize("layer", [L.Activation, L.Lambda])
def test_functions_of_one_name_are_not_taken_for_one(layer):
    inputs = keras.Input((8,))
    chain = chain_of(keras.Model(inputs, layer(powers(9))(layer(powers(1))(inputs))))
    assert list(chain.flops) == [BATCH * 8, 9 * BATCH * 8]


def test_costs_are_remembered_as_long_as_the_layer(traced):
    node = node_of(L.Dense(5, activation="gelu"), (3,))
    for batch in (2, 4, 2, 4):
        costs.node_cost(node, batch, {})
    assert len(traced) == 2
    node.operation.trainable = False
    costs.node_cost(node, 2, {})
    assert len(traced) == 3
    remembered, operation = len(costs._remembered), weakref.ref(node.operation)
    del node
    keras.utils.clear_session()
    gc.collect()
    assert operation() is None
    assert len(costs._remembered) < remembered


@pytest.mark.parametrize("layer", [L.Lambda(powers(1)), EagerOnly()], ids=lambda x: x.name)
def test_what_has_code_of_its_own_is_traced_anew(layer, traced):
    node = node_of(layer, (3,))
    cache = {}
    for _ in range(2):
        costs.node_cost(node, BATCH, cache)
    assert len(traced) == 1
    costs.node_cost(node, BATCH, {})
    assert len(traced) == (2 if isinstance(layer, L.Lambda) else 1)


# --- any batch size from two traces -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "shapes"),
    [
        (L.Dense(5, activation="gelu"), [(3,)]),
        (L.Conv2D(4, 3, padding="same", activation="gelu"), [(8, 8, 3)]),
        (L.BatchNormalization(), [(8, 8, 3)]),
        (L.MultiHeadAttention(2, 4, dropout=0.1), [(10, 8), (10, 8)]),
        (L.LSTM(4, return_sequences=True), [(6, 8)]),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_between_two_batch_sizes(layer, shapes):
    node = node_of(layer, *shapes)
    for batch in (4, 7, 24, 31, 32):
        exact = dataclasses.asdict(costs.node_cost(node, batch, {}))
        found = dataclasses.asdict(costs.node_cost_between(node, batch, 4, 32, {}))
        peaks = ("forward_extra", "taped_extra", "backward_extra")
        for values in (exact, found):
            values["part"] = values["part"] or {"none": 0}
        for name in peaks:
            for now, then in ((exact, found), (exact["part"], found["part"])):
                if name in now:
                    assert now.pop(name) <= then.pop(name)
        assert _close(found, exact)


def _close(found, exact):
    for name, value in exact.items():
        if isinstance(value, dict):
            assert _close(found[name], value)
        elif isinstance(value, (int, float)):
            assert found[name] == pytest.approx(value), name
        else:
            assert found[name] == value, name
    return True


def test_only_two_batch_sizes_are_traced(traced):
    node, cache = node_of(L.Dense(5, activation="gelu"), (3,)), {}
    for batch in range(4, 33):
        costs.node_cost_between(node, batch, 4, 32, cache)
    assert len(traced) == 2
    with pytest.raises(ValueError, match="batch_size=33, low=4, high=32"):
        costs.node_cost_between(node, 33, 4, 32, cache)


class OneIsSpecial(L.Layer):
    """Is another function for a batch of one."""

    def call(self, x):
        return tf.tanh(x) if x.shape[0] == 1 else x * 2.0


def test_batch_sizes_that_differ_in_kind_are_traced(traced):
    node = node_of(OneIsSpecial(), (3,))
    c = costs.node_cost_between(node, 8, 1, 32, {})
    assert len(traced) == 3
    assert (c.flops, c.reads_outputs) == (8 * 3, (False,))


# --- against the allocator --------------------------------------------------------------------------------------------


def measured_bytes(model, x):
    """The peak of one training step in graph mode, without an optimizer, above what is held before it."""
    variables = [v.value for v in model.trainable_variables]

    @tf.function(autograph=False)
    def gradients(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True)))
        return tape.gradient(loss, variables)

    gradients(x)
    peaks = []
    for _ in range(15):
        memory.reset_peak("CPU:0")
        before = memory.current_bytes("CPU:0")
        gradients(x)
        peaks.append(memory.peak_bytes("CPU:0") - before)
    return np.median(peaks)  # the order of operations, and which run at the same time, differ from step to step


def transformer(blocks=4, width=32, heads=2, length=64):
    inputs = keras.Input((length, width))
    x = inputs
    for _ in range(blocks):
        y = L.LayerNormalization()(x)
        x = L.Add()([x, L.MultiHeadAttention(heads, width // heads, dropout=0.1)(y, y, use_causal_mask=True)])
        y = L.Dense(4 * width, activation="gelu")(L.LayerNormalization()(x))
        x = L.Add()([x, L.Dropout(0.1)(L.Dense(width)(y))])
    return keras.Model(inputs, L.Dense(8)(x)), numbers(16, length, width)


def convolutional(blocks=24, width=16):
    inputs = keras.Input((16, 16, 3))
    x = inputs
    for number in range(blocks):
        x = L.ReLU()(L.BatchNormalization()(L.Conv2D(width, 3, padding="same", use_bias=False)(x)))
        if number == blocks // 2:
            x = L.MaxPooling2D()(x)
    return keras.Model(inputs, L.Dense(10)(L.GlobalAveragePooling2D()(x))), numbers(32, 16, 16, 3)


def recurrent(units=32, length=40):
    inputs = keras.Input((length, 16))
    x = L.LSTM(units, return_sequences=True)(L.GRU(units, return_sequences=True)(inputs))
    return keras.Model(inputs, L.Dense(4)(x)), numbers(64, length, 16)


@pytest.mark.parametrize("make", [transformer, convolutional, recurrent])
def test_predicted_bytes_are_those_measured(make):
    model, x = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predicted = tf_ckpt.plan(model, "none", batch_size=x.shape[0]).plain_activation_bytes
    measured = measured_bytes(model, x)
    assert 0.85 * measured <= predicted <= 1.15 * measured


class Adapted(keras.layers.Layer):
    """A block that is frozen as a whole, with a weight inside that is not, as LoRA makes it."""

    def __init__(self, width):
        super().__init__()
        self.frozen, self.adapter = keras.layers.Dense(width, activation="gelu"), keras.layers.Dense(width, activation="gelu")

    def build(self, shape):
        self.frozen.build(shape)
        self.adapter.build(shape)

    def call(self, x):
        return self.frozen(x) + self.adapter(x)


def test_what_is_trained_inside_a_frozen_layer_counts():
    inputs = x = keras.Input((16,))
    for _ in range(8):
        x = Adapted(16)(x)
    model = keras.Model(inputs, keras.layers.Dense(2)(x))
    for layer in model.layers[1:]:
        layer.trainable = False
    for layer in model.layers[1:-1]:
        layer.adapter.trainable = True
    assert len(model.trainable_weights) == 16
    assert not model.layers[1].trainable_weights
    plan = tf_ckpt.plan(model, "sqrt", batch_size=4096)
    assert plan.segments
    assert plan.activation_bytes < 0.7 * plan.plain_activation_bytes
