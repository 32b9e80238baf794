"""Ways to feed and to train an applied model: each as the plain model, to the bit."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import numbers

import tf_ckpt
from tf_ckpt import snapshot

L = keras.layers


def network():
    inputs = keras.Input((6,))
    x = inputs
    for _ in range(4):
        x = L.Dense(8, activation="gelu")(x)
        x = L.Dropout(0.2)(L.BatchNormalization()(x))
    # Nothing but its update reads the gradient of a `gamma` here, so that the learning rate is moved into it.
    return keras.Model(inputs, L.Dense(3)(x))


def sequences():
    """A model of sequences of any length."""
    inputs = keras.Input((None, 4))
    x = inputs
    for _ in range(3):
        x = L.Add()([x, L.Dropout(0.2)(L.Dense(4, activation="gelu")(L.LayerNormalization()(x)))])
    return keras.Model(inputs, L.Dense(2)(x))


def same(have, want):
    for a, b in zip(have, want, strict=True):
        np.testing.assert_array_equal(a, b)


# --- what `fit` is fed with ---------------------------------------------------------------------------------------------

X, Y = numbers(11, 6), np.arange(11) % 3


def batches(size=4):
    while True:
        for start in range(0, len(X), size):
            yield X[start : start + size], Y[start : start + size]


FEEDS = {
    "ragged_last_batch": lambda: {"x": X, "y": Y, "batch_size": 4},
    "batches_of_one": lambda: {"x": X, "y": Y, "batch_size": 1},
    "tf_data": lambda: {"x": tf.data.Dataset.from_tensor_slices((X, Y)).batch(4).repeat(), "steps_per_epoch": 4},
    "generator": lambda: {"x": batches(), "steps_per_epoch": 4},
    "class_weight": lambda: {"x": X, "y": Y, "batch_size": 4, "class_weight": {0: 1.0, 1: 0.5, 2: 3.0}},
    "sample_weight": lambda: {"x": X, "y": Y, "batch_size": 4, "sample_weight": np.linspace(0, 1, 11)},
}


def trained(model, feed, optimizer="sgd", **arguments):
    """Returns losses and all variables after two epochs; the model is as before afterwards."""
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False, **arguments)
    with snapshot.kept(model.variables):
        history = model.fit(**feed, epochs=2, shuffle=False, verbose=0)
        return [history.history["loss"], *(v.numpy() for v in [*model.variables, *model.optimizer.variables])]


IN_CI = ("ragged_last_batch", "sample_weight")  # the others feed the same step


@pytest.mark.parametrize(
    "feed", [pytest.param(f, marks=[] if name in IN_CI else [pytest.mark.slow]) for name, f in FEEDS.items()], ids=FEEDS
)
def test_what_fit_is_fed_with(feed):
    model = network()
    applied = tf_ckpt.apply(model, "full")
    want = trained(model, feed())
    assert len(set(want[0])) == 2  # it learns
    same(trained(applied, feed()), want)


@pytest.mark.parametrize("eager", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["graph", "eager"])
def test_steps_that_overflow_in_float16(eager):
    keras.config.set_dtype_policy("mixed_float16")
    model = network()
    applied = tf_ckpt.apply(model, "full")
    # 2**40 is more than float16 holds: the first steps are skipped, and the scale is halved each time.
    runs = [
        trained(
            m,
            FEEDS["ragged_last_batch"](),
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**40),
            run_eagerly=eager,
        )
        for m in (model, applied)
    ]
    same(runs[1], runs[0])
    assert any(np.any(v == np.float32(2.0**34)) for v in runs[0][1:] if np.ndim(v) == 0)  # six steps


# --- loops of one's own -------------------------------------------------------------------------------------------------


def losses(model, x):
    y = model(x, training=True)
    return tf.reduce_mean(y**2), tf.reduce_mean(tf.abs(y))


def both_ways(function):
    return pytest.mark.parametrize("wrap", [lambda f: f, tf.function(autograph=False)], ids=["eager", "graph"])(function)


@both_ways
@pytest.mark.parametrize("batch", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)])
def test_two_losses_and_a_persistent_tape(wrap, batch):
    model = network()
    applied = tf_ckpt.apply(model, "full")

    def gradients(m):
        @wrap
        def step(x):
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(x)
                first, second = losses(m, x)
            sources = [x, *(v.value for v in m.trainable_variables)]
            return [first, second, *tape.gradient(first, sources), *tape.gradient(second, sources)]

        with snapshot.kept(m.variables):
            return [x.numpy() for x in step(tf.constant(X[:batch]))] + [v.numpy() for v in m.variables]

    same(gradients(applied), gradients(model))


@both_ways
def test_two_models_trained_against_each_other(wrap):
    def trained_pair(make):
        keras.utils.set_random_seed(3)
        judge = keras.Sequential([keras.Input((3,)), L.Dense(8, activation="gelu"), L.Dense(1)])
        generator, critic = make(network()), make(judge)
        optimizers = [keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1)]
        for optimizer, m in zip(optimizers, (generator, critic), strict=True):
            optimizer.build(m.trainable_variables)

        @wrap
        def step(x, real):
            with tf.GradientTape(persistent=True) as tape:
                made = generator(x, training=True)
                fooled = tf.reduce_mean(critic(made, training=True))
                told = fooled - tf.reduce_mean(critic(real, training=True))
                fooled = -fooled
            for optimizer, m, loss in zip(optimizers, (generator, critic), (fooled, told), strict=True):
                optimizer.apply(tape.gradient(loss, [v.value for v in m.trainable_variables]), m.trainable_variables)
            return told

        found = [step(tf.constant(X), tf.constant(numbers(11, 3))).numpy() for _ in range(3)]
        return [found, *(v.numpy() for m in (generator, critic) for v in m.variables)]

    same(trained_pair(lambda m: tf_ckpt.apply(m, "full")), trained_pair(lambda m: m))


def test_other_lengths_trace_no_more_than_the_plain_model():
    counts = []
    for make in (lambda m: m, lambda m: tf_ckpt.apply(m, "full")):
        keras.utils.set_random_seed(3)
        model = make(sequences())

        @tf.function(autograph=False, reduce_retracing=True)
        def step(x, model=model):
            with tf.GradientTape() as tape:
                loss = losses(model, x)[0]
            return [loss, *tape.gradient(loss, [v.value for v in model.trainable_variables])]

        found = [[x.numpy() for x in step(tf.constant(numbers(2, length, 4)))] for length in (3, 5, 8, 13)]
        counts.append((found, step.experimental_get_tracing_count()))
    assert counts[0][1] == counts[1][1] == 2
    for have, want in zip(counts[1][0], counts[0][0], strict=True):
        same(have, want)


def only_disabled(function, model, applied, name):
    """Checks that an applied model names a segment and the way out, and is as the plain model there."""
    with pytest.raises(NotImplementedError, match=rf"(?s){name}.*tf_ckpt\.disabled"):
        function(applied)
    with tf_ckpt.disabled():
        same(function(applied), function(model))


@both_ways
def test_a_gradient_penalty(wrap):
    model = network()
    applied = tf_ckpt.apply(model, "full")

    def gradients(m):
        @wrap
        def step(x):
            with tf.GradientTape() as tape:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    loss = losses(m, x)[0]
                penalty = tf.reduce_mean(inner.gradient(loss, x) ** 2)
            return [penalty, *tape.gradient(penalty, [v.value for v in m.trainable_variables], unconnected_gradients="zero")]

        with snapshot.kept(m.variables):
            return [x.numpy() for x in step(tf.constant(X))]

    only_disabled(gradients, model, applied, "batch_normalization")


@both_ways
@pytest.mark.parametrize("under", ["accumulator", "tape"])
def test_forward_mode(wrap, under):
    model = network()
    applied = tf_ckpt.apply(model, "full")

    def derivative(m):
        @wrap
        def step(x):
            with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
                if under == "tape":
                    with tf.GradientTape() as tape:
                        tape.watch(x)
                        loss = losses(m, x)[0]
                    return accumulator.jvp(tape.gradient(loss, x))
                return accumulator.jvp(losses(m, x)[0])

        with snapshot.kept(m.variables):
            return [step(tf.constant(X)).numpy()]

    only_disabled(derivative, model, applied, "'dense'")
