"""What `MemoryLogger` warns of, once, and when it keeps quiet."""

import warnings

import keras
import numpy as np
import pytest

import tf_ckpt
from tf_ckpt.callbacks import MemoryLogger, advice
from tf_ckpt.errors import CheckpointWarning


def mlp(layers, width, optimizer="sgd"):
    inputs = x = keras.Input((width,))
    for _ in range(layers):
        x = keras.layers.Dense(width, "gelu")(x)
    return keras.Model(inputs, x), optimizer


def said(model, optimizer, batch, width, logger=None, steps=3, fits=1):
    model.compile(optimizer, "mse", jit_compile=False)
    x = np.ones((steps * batch, width), "float32")
    logger = logger or MemoryLogger()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(fits):
            model.fit(x, x, batch_size=batch, verbose=0, callbacks=[logger])
    return [str(w.message) for w in caught if issubclass(w.category, CheckpointWarning)]


def test_nothing_is_checkpointed_is_said_once():
    model, optimizer = mlp(2, 8)
    (text,) = said(model, optimizer, 4, 8, fits=3)
    assert "nothing is checkpointed" in text
    assert model.name in text
    # Somebody who asked for a plain model knows.
    assert said(tf_ckpt.apply(model, "none"), optimizer, 4, 8) == []


def test_code_that_may_recompute_is_not_called_plain():
    class Own(keras.layers.Layer):
        def call(self, x):
            return tf_ckpt.recompute(lambda y: keras.ops.tanh(y * 2) * y)(x)

    inputs = keras.Input((8,))
    model = keras.Model(inputs, keras.layers.Dense(8)(Own()(keras.layers.Dense(8)(inputs))))
    assert advice.recomputes(model, None) is None
    assert said(model, "sgd", 4, 8) == []


def test_a_plan_that_is_not_executed_any_more():
    model = keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(8, "gelu") for _ in range(6))])
    model = tf_ckpt.apply(model, "full", batch_size=4)
    assert tf_ckpt.plan_of(model).segments
    with pytest.warns(tf_ckpt.CheckpointWarning, match="were changed"):
        model.add(keras.layers.Dense(8))
    (text,) = said(model, "sgd", 4, 8)
    assert "not executed any more" in text


def test_weights_that_fill_the_memory():
    model, optimizer = mlp(4, 1536, "adam")  # 36 MiB of weights, 72 of slots; 16 rows of activations
    model = tf_ckpt.apply(model, "none", batch_size=16)
    (text,) = said(model, optimizer, 16, 1536)
    assert "weights rather than activations" in text
    assert text.count("%") == 4


def test_a_peak_that_the_plan_did_not_lower():
    model, optimizer = mlp(16, 128)
    model = tf_ckpt.apply(model, "sqrt", batch_size=3072)
    assert said(model, optimizer, 3072, 128) == []
    with tf_ckpt.disabled():
        logger = MemoryLogger(profile_batches=1)
        (text,) = said(model, optimizer, 3072, 128, logger)
    plan = tf_ckpt.plan_of(model)
    assert "the peak is about that of the plain model" in text
    assert "Nothing that ran carried the name of a re-run" in text
    assert f"{plan.activation_bytes / 2**20:,.0f}" in text


def test_a_plan_for_another_batch_size_is_not_compared():
    model, optimizer = mlp(16, 128)
    model = tf_ckpt.apply(model, "sqrt", batch_size=1024)
    assert said(model, optimizer, 3072, 128) == []


@pytest.mark.parametrize("kind", ["arrays", "dataset"])
def test_batch_size_of_the_fit(kind):
    import tensorflow as tf

    model = tf_ckpt.apply(mlp(2, 8)[0], "none")
    model.compile("sgd", "mse")
    x, logger = np.ones((12, 8), "float32"), MemoryLogger()
    if kind == "arrays":
        model.fit(x, x, batch_size=3, verbose=0, callbacks=[logger])
    else:
        batches = tf.data.Dataset.from_tensor_slices((x, x)).batch(3, drop_remainder=True)
        model.fit(batches, shuffle=False, verbose=0, callbacks=[logger])
    assert logger.report()["batch_size"] == 3
