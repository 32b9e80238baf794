"""Real models: one training step against plain, on the same weights and seeds."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_same, step

import tf_ckpt

L = keras.layers


def transformer(blocks=12, width=32, length=16):
    inputs = keras.Input((length,), dtype="int32")
    x = L.Embedding(50, width, mask_zero=True)(inputs)
    for seed in range(blocks):
        y = L.LayerNormalization()(x)
        y = L.MultiHeadAttention(4, width // 4, dropout=0.1, seed=seed)(y, y, use_causal_mask=True)
        x = L.Add()([x, L.Dropout(0.1, seed=seed)(y)])
        y = L.Dense(4 * width, activation="gelu")(L.LayerNormalization()(x))
        x = L.Add()([x, L.Dropout(0.1, seed=seed)(L.Dense(width)(y))])
    return keras.Model(inputs, L.Dense(50)(L.LayerNormalization()(x)))


def zoo(name, size):
    return lambda: getattr(keras.applications, name)(weights=None, input_shape=(size, size, 3), classes=10)


MODELS = {
    "ResNet50": zoo("ResNet50", 32),
    "VGG16": zoo("VGG16", 32),
    "DenseNet121": zoo("DenseNet121", 32),
    "MobileNetV2": zoo("MobileNetV2", 32),
    "EfficientNetB0": zoo("EfficientNetB0", 32),
    "Transformer": transformer,
}


# `make test` leaves out what takes longest to trace; `make test-all` runs everything.
LARGE = {"DenseNet121", "EfficientNetB0", "MobileNetV2"}


@pytest.mark.parametrize("strategy", ["sqrt", pytest.param("full", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] if x in LARGE else []) for x in MODELS])
def test_one_step_equals_plain(name, strategy):
    model = MODELS[name]()
    rng = np.random.default_rng(0)
    if name == "Transformer":
        ids = rng.integers(1, 50, (2, 16))
        ids[:, 12:] = 0
        x, y = tf.constant(ids.astype("int32")), tf.constant(ids)
    else:
        x = tf.constant(rng.normal(size=(2, 32, 32, 3)).astype("float32") * 50)
        y = tf.constant(rng.integers(0, 10, 2))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=name == "Transformer")
    applied = tf_ckpt.apply(model, strategy, batch_size=4096)  # so that activations outweigh weights
    plan = tf_ckpt.plan_of(applied)
    assert plan.activation_bytes < 0.9 * plan.plain_activation_bytes

    def result(m):
        call = lambda x: loss(y, m(x, training=True))  # noqa: E731
        return step(call, model.trainable_variables, model.non_trainable_variables, [x], "graph", steps=1)

    assert_same(result(model), result(applied), "graph")
