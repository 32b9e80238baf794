"""Traced graphs go when the plain model's would."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_ckpt

X = np.ones((4, 8), "float32")


def build(checkpointed):
    inputs = keras.Input((8,))
    x = inputs
    for _ in range(4):
        x = keras.layers.Dropout(0.1)(keras.layers.Dense(8, activation="tanh")(x))
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    return tf_ckpt.apply(model, "full") if checkpointed else model


def graphs():
    gc.collect()
    gc.collect()
    return sum(type(x).__name__ == "FuncGraph" for x in gc.get_objects())


def kept_by_fits(checkpointed, rounds):
    build(checkpointed)
    before = graphs()
    for _ in range(rounds):
        model = build(checkpointed)
        model.compile("sgd", "mse", jit_compile=False)
        model.fit(X, X[:, :1], epochs=1, verbose=0)
    del model
    return graphs() - before


def kept_by_functions(checkpointed, rounds):
    model = build(checkpointed)
    variables = [v.value for v in model.trainable_variables]
    before = graphs()
    alive = []
    for _ in range(rounds):

        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x, training=True) ** 2)
            return tape.gradient(loss, variables)

        step(X)
        alive.append(weakref.ref(step.get_concrete_function(tf.TensorSpec(X.shape, tf.float32)).graph))
        del step
    count = graphs() - before
    assert sum(r() is not None for r in alive) <= count
    return count


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kept", "rounds"),
    [(kept_by_fits, 6), pytest.param(kept_by_fits, 20, marks=SLOW), pytest.param(kept_by_functions, 20, marks=SLOW)],
)
def test_rounds_keep_no_more_than_plain(kept, rounds):
    assert kept(True, rounds) <= kept(False, rounds)


def test_gradient_outside_of_a_function_that_is_called_again():
    model = build(True)
    call = tf.function(lambda x: model(x, training=False))
    for _ in range(2):
        gc.collect()
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(call(X))
        assert all(g is not None for g in tape.gradient(loss, [v.value for v in model.trainable_variables]))
