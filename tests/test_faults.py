"""Faults that users met, each with the right value."""

import threading
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import numbers
from helpers import compare

import tf_ckpt
from tf_ckpt.strategies import Range

L = keras.layers
MODES = ("eager", "graph")


def every_layer(chain):
    return [(k, k + 1) for k in range(len(chain)) if chain.allowed(k, k + 1)]


@pytest.mark.parametrize("mode", MODES)
def test_a_constant_that_two_segments_share(mode):
    """A graph keeps one `Const` for an eager tensor, so that both segments read the one which the first made."""
    shared = tf.constant(np.linspace(0.5, 1.5, 8, dtype="float32"))
    inputs = x = keras.Input((8,))
    for _ in range(4):
        x = L.Lambda(lambda y: y * shared)(L.Dense(8, activation="tanh")(x))
    model = keras.Model(inputs, x)
    applied = tf_ckpt.apply(model, lambda chain: [(0, 2), (2, 4), (4, 6)])
    compare(model, applied, [numbers(4, 8)], mode)


def test_fit_with_a_regularizer_that_two_layers_share():
    losses = []
    for strategy in ("none", lambda chain: [(0, 2), (2, 4)]):
        keras.utils.set_random_seed(3)
        regularizer = keras.regularizers.L1(0.01)
        inputs = x = keras.Input((8,))
        for _ in range(6):
            x = L.Dense(8, activation="gelu", activity_regularizer=regularizer)(x)
        model = tf_ckpt.apply(keras.Model(inputs, L.Dense(2)(x)), strategy)
        model.compile("sgd", "mse", jit_compile=False)
        losses.append(model.fit(numbers(16, 8), numbers(16, 2), epochs=2, verbose=0, shuffle=False).history["loss"])
    assert losses[0] == losses[1]


def test_grouped_convolution_in_a_graph():
    """On a CPU, Keras runs it in a function that XLA compiles."""
    inputs = x = keras.Input((8, 8, 4))
    for _ in range(3):
        x = L.Conv2D(4, 3, groups=2, padding="same")(x)
        x = L.LayerNormalization()(x)
    model = keras.Model(inputs, x)
    compare(model, tf_ckpt.apply(model, lambda chain: [(0, 2), (2, 4)]), [numbers(2, 8, 8, 4)], "graph", bound=1e-5)


def test_a_weight_that_an_eager_operation_reads_by_itself():
    inputs = keras.Input((6, 8))
    x = L.AdditiveAttention()([inputs, inputs])
    model = keras.Model(inputs, L.Dense(3)(L.Dense(8, activation="tanh")(x)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it would say that the part runs plain
        compare(model, tf_ckpt.apply(model, lambda chain: [(0, 2)]), [numbers(2, 6, 8)], "eager")


def test_two_threads_in_eager_mode():
    """TensorFlow stops telling all threads of operations when one of them has heard enough."""
    inputs = keras.Input((8,))
    x = L.Dense(8, activation="gelu")(inputs)
    model = keras.Model(inputs, L.Dense(3)(L.Dense(8, activation="tanh")(x)))
    applied = tf_ckpt.apply(model, lambda chain: [(0, 2)])
    x, found, errors = numbers(16, 8), [], []

    def step(net):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(net(x) ** 2)
        return [g.numpy() for g in tape.gradient(loss, [v.value for v in net.trainable_variables])]

    def work():
        try:
            found.extend(step(applied) for _ in range(10))
        except Exception as error:  # a warning, as an error
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    want = step(model)
    assert len(found) == 30
    for have in found:
        for g, w in zip(have, want, strict=True):
            np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_a_loss_goes_back_to_the_logits(kind, mode):
    """Keras hangs the logits on a softmax's result, and its losses start from them: probabilities of 0 would be cut off."""
    inputs = keras.Input((8,))
    model = keras.Model(inputs, L.Dense(3, activation=kind)(L.Dense(8, activation="tanh")(inputs)))
    for weight in model.trainable_variables:
        weight.assign(300.0 * weight)
    applied = tf_ckpt.apply(model, every_layer)
    wrapped = keras.Sequential([inputs, model.layers[1], tf_ckpt.Recompute(model.layers[2])])
    x, labels = numbers(16, 8), tf.one_hot(tf.range(16) % 3, 3)
    name = "categorical_crossentropy" if kind == "softmax" else "binary_crossentropy"
    results = []
    for net in (model, applied, wrapped):

        def step(net=net):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(keras.losses.get(name)(labels, net(x, training=True)))
            return loss, *tape.gradient(loss, [v.value for v in model.trainable_variables])

        results.append([t.numpy() for t in (step() if mode == "eager" else tf.function(step, autograph=False)())])
    assert results[0][0] > 17  # more than a probability that is cut off at 1e-7 can give, so that it is from the logits
    for other in results[1:]:
        for have, want in zip(other, results[0], strict=True):
            np.testing.assert_allclose(have, want, rtol=2e-6, atol=1e-7)


def test_a_plan_of_another_model_that_has_the_same_names():
    def net(layer):
        inputs = keras.Input((8,))
        return keras.Model(inputs, L.Dense(2, name="out")(layer(inputs)))

    made = tf_ckpt.plan(net(L.Dense(8, activation="gelu", name="middle")), lambda chain: [Range(0, 1, (), True)])
    assert made.segments[0].part == "activation"
    with pytest.raises(tf_ckpt.CheckpointError, match="no part inside 'middle'"):
        tf_ckpt.apply(net(L.LayerNormalization(name="middle")), made)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("more", [True, False])
def test_a_function_that_returns_something_else_when_it_is_run_again(more, mode):
    runs = []

    def function(x):
        runs.append(None)
        y = tf.tanh(x)
        return (y, tf.sin(x)) if (len(runs) % 2 == 0) == more else (y,)

    recomputed = tf_ckpt.recompute(function)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = sum(tf.reduce_sum(y) for y in recomputed(x))
        return tape.gradient(loss, x)

    with pytest.raises(tf_ckpt.CheckpointError, match="returned something else when it was run again"):
        (step if mode == "eager" else tf.function(step, autograph=False))(tf.constant([1.0, 2.0]))
