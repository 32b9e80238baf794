"""Graph optimisers must treat a re-run as they treat the plain graph, so that no gradient is rounded otherwise."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_same, model_loss, step
from keras import layers as L

import tf_ckpt
from tf_ckpt.strategies import Range


def values(*shape, seed=0):
    return tf.constant(np.random.default_rng(seed).normal(size=shape).astype("float32"))


def parts(chain):
    return [Range(k, k + 1, (), True) for k in range(len(chain)) if chain.part_names[k]]


def whole(chain):
    return [(0, len(chain) - 1)]


def nested(chain):
    return [Range(0, len(chain) - 1, (Range(0, (len(chain) - 1) // 2),))]


def attention(name, key_dim):
    inputs = x = keras.Input((6, 16))
    x = L.Dense(16)(x)
    for _ in range(2):
        x = L.LayerNormalization()(L.Add()([x, L.MultiHeadAttention(2, key_dim)(x, x)]))
    return keras.Model(inputs, L.Dense(2)(x), name=name), values(4, 6, 16)


def gates(name):
    inputs = keras.Input((32,))
    x = L.Dense(32)(inputs)
    for _ in range(3):
        gate = L.Rescaling(1 / 6)(L.ReLU(6.0)(L.Dense(32)(x) + 3.0))
        x = L.LayerNormalization()(L.Multiply()([x, gate]))
        x = L.LayerNormalization()(L.Dense(32, activation="hard_silu")(x))
    return keras.Model(inputs, L.Dense(2)(x), name=name), values(16, 32)


MODELS = {
    "key_dim_8": lambda name: attention(name, 8),
    "key_dim_32": lambda name: attention(name, 32),
    "gates": gates,
}


# Products are sorted by name, and the gradients' names begin with "gradient_tape".
@pytest.mark.parametrize("name", ["alpha", "zeta"])
@pytest.mark.parametrize("strategy", [parts, whole, nested, "sqrt"], ids=lambda x: getattr(x, "__name__", x))
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_model_is_rounded_as_plain(make, strategy, name):
    keras.utils.set_random_seed(1)
    model, x = make(name)
    ours = tf_ckpt.apply(model, strategy, batch_size=int(x.shape[0]))
    state = model.trainable_variables, model.non_trainable_variables
    want, got = (step(model_loss(m, True), *state, [x], "graph") for m in (model, ours))
    assert_same(want, got, "graph")


# What passes the gradient on from one segment to the one before must sort as the plain gradient does.
@pytest.mark.parametrize("pool", [L.GlobalMaxPooling2D, L.GlobalAveragePooling2D], ids=["max", "mean"])
@pytest.mark.parametrize("name", ["alpha", "Zeta", "zeta"])
def test_a_gradient_between_segments_is_rounded_as_plain(name, pool):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((4, 4, 8))
    x = L.BatchNormalization()(L.Conv2D(16, 1, use_bias=False)(inputs))
    x = pool(keepdims=True)(L.Activation("hard_silu")(x))
    x = L.Activation("hard_silu")(L.Conv2D(8, 1)(x))
    model = keras.Model(inputs, L.Dense(4)(L.Flatten()(x)), name=name)
    ours = tf_ckpt.apply(model, lambda chain: [(0, 3), (3, 6)], batch_size=8)
    state = model.trainable_variables, model.non_trainable_variables
    want, got = (step(model_loss(m, True), *state, [values(8, 4, 4, 8)], "graph") for m in (model, ours))
    assert_same(want, got, "graph")


FUNCTIONS = {
    "product": lambda x, z: z * (x * 0.3),
    "left": lambda x, z: (z * 0.3) * x,
    "quotient": lambda x, z: z * (x / 0.7),
    "square": lambda x, z: (x * 0.3) * (x * z),
    "sum": lambda x, z: (x + 0.3) * (z + 0.7 + x),
    "silu": lambda x, z: keras.ops.hard_silu(x * z) * 0.3,
    "sigmoid": lambda x, z: 0.3 * tf.sigmoid(x) * z,
    "chain": lambda x, z: tf.tanh(x * 0.3) * (z * 0.7) * 1.1,
}


@pytest.mark.parametrize("inside", ["", "alpha", "zeta"])
@pytest.mark.parametrize("backward", ["same", "other"])
@pytest.mark.parametrize("fn", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_function_is_rounded_as_plain(fn, backward, inside):
    x, z, w = values(32, 32), values(32, 32, seed=1), values(32, 32, seed=2)

    def gradients(fn):
        def loss(x, z):
            with tf.compat.v1.name_scope(inside or None):
                return tf.reduce_sum(tf.tanh(fn(tf.tanh(x), tf.tanh(z))) * w)

        def run(x, z):
            with tf.GradientTape() as tape:
                tape.watch([x, z])
                value = (loss if backward == "same" else tf.function(loss, autograph=False))(x, z)
            return tape.gradient(value, [x, z])

        return tf.function(run, autograph=False)(x, z)

    for want, got in zip(gradients(fn), gradients(tf_ckpt.recompute(fn)), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("axes", [(1,), (2,), (1, 2)], ids=str)
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_attention_over_other_axes_is_rounded_as_plain(mode, axes):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4, 5, 16))
    model = keras.Model(inputs, L.Dense(2)(L.MultiHeadAttention(2, 8, attention_axes=axes)(inputs, inputs)))
    ours = tf_ckpt.apply(model, parts, batch_size=2)
    state = model.trainable_variables, model.non_trainable_variables
    want, got = (step(model_loss(m, True), *state, [values(2, 4, 5, 16)], mode) for m in (model, ours))
    assert_same(want, got, mode)
