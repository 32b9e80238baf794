"""What changes from call to call of one recomputed function, and what a function does that recompute must notice."""

import threading
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import numbers
from helpers import ROUNDING, compare

import tf_ckpt

L = keras.layers
MODES = ("eager", "graph")


def in_mode(function, mode):
    return function if mode == "eager" else tf.function(function, autograph=False)


def values(tensors):
    return [None if t is None else tf.convert_to_tensor(t).numpy() for t in tensors]


def assert_equal(have, want):
    assert len(have) == len(want)
    for h, w in zip(have, want, strict=True):
        assert (h is None) == (w is None)
        if w is not None:
            np.testing.assert_array_equal(h, w)


class Gate(L.Layer):
    """Lets gradients through or not, as its owner says."""

    detach = True

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return tf.tanh((tf.stop_gradient(x) if self.detach else x) * self.scale)


@pytest.mark.parametrize("mode", MODES)
def test_fit_in_two_stages(mode):
    """First the head is trained, then everything: an input that had no gradient has one later."""

    def train(strategy):
        keras.utils.set_random_seed(0)
        gate = Gate()
        inputs = keras.Input((8,))
        x = L.Dense(8, activation="tanh", name="first")(inputs)
        x = L.Dense(8, activation="tanh")(gate(x))
        model = tf_ckpt.apply(keras.Model(inputs, L.Dense(2)(x)), strategy)
        kernel, found = model.get_layer("first").kernel, []
        for gate.detach in (True, False, True):
            model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=mode == "eager", jit_compile=False)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Gradients do not exist")  # Keras' own, of the plain model too
                history = model.fit(numbers(8, 8), numbers(8, 2), epochs=2, verbose=0, shuffle=False)
            found += [kernel.numpy(), np.array(history.history["loss"])]
        return found

    want = train("none")
    assert not np.array_equal(want[0], want[2])
    assert_equal(train(lambda chain: [(1, 3)]), want)


@pytest.mark.parametrize("mode", MODES)
def test_the_same_function_with_other_keywords(mode):
    def function(x, ref=None, gate=None):
        return tf.tanh(x) * (tf.sigmoid(gate) if ref is None else tf.stop_gradient(ref))

    def gradients(f):
        x, g, found = numbers(4), numbers(4) * 2, []
        for name in ("ref", "gate", "ref"):
            with tf.GradientTape() as tape:
                tape.watch([x, g])
                loss = tf.reduce_sum(f(x, **{name: g}))
            found += tape.gradient(loss, [x, g])
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        want, have = ([x if x is None else x.numpy() for x in gradients(f)] for f in (function, tf_ckpt.recompute(function)))
        assert want[1] is None
        assert_equal(have, want)
    if mode == "graph":
        recomputed = tf_ckpt.recompute(function)

        @tf.function(autograph=False)
        def step():
            return [x for x in gradients(recomputed) if x is not None]

        assert_equal(values(step()), [x for x in want if x is not None])


def test_a_branch_that_is_drawn_anew_in_each_eager_step():
    class StochasticDepth(L.Layer):
        def __init__(self):
            super().__init__()
            self.seed = keras.random.SeedGenerator(2)

        def call(self, x, branch, training=None):
            if training and keras.random.uniform((), seed=self.seed) < 0.5:
                return x * 2.0
            return x + tf.tanh(branch)

    def train(wrap):
        layer, found = wrap(StochasticDepth()), []
        x, branch = tf.Variable(numbers(4)), tf.Variable(numbers(4) * 3)
        for _ in range(12):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(x * 1.0, branch * 1.0, training=True) ** 2)
            found += tape.gradient(loss, [x, branch])
        return values(found)

    want = train(lambda layer: layer)
    missing = [x is None for x in want[1::2]]
    assert True in missing
    assert False in missing[missing.index(True) :]
    assert_equal(train(tf_ckpt.Recompute), want)


class Force(L.Layer):
    """Returns an energy and what it changes by: a gradient taken inside a layer."""

    def __init__(self, unconnected="none"):
        super().__init__()
        self.unconnected, self.first, self.second = unconnected, L.Dense(8, activation="tanh"), L.Dense(1)

    def build(self, shape):
        self.first.build(shape)
        self.second.build((*shape[:-1], 8))

    def call(self, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            energy = self.second(self.first(x))
        return tf.concat([energy, -tape.gradient(energy, x, unconnected_gradients=self.unconnected)], -1)


@pytest.mark.parametrize("mode", [*MODES, "xla"])
@pytest.mark.parametrize("unconnected", ["none", "zero"])
def test_a_tape_inside(unconnected, mode):
    inputs = keras.Input((3,))
    force = Force(unconnected)
    first = L.Dense(3)
    model = keras.Model(inputs, L.Dense(2)(force(first(inputs))))
    wrapped = keras.Sequential([inputs, first, tf_ckpt.Recompute(force), model.layers[-1]])
    with pytest.warns(tf_ckpt.CheckpointWarning, match="takes a gradient inside"):
        # In a graph, the names of operations alone decide in which order TensorFlow's optimisers add up: the plain model
        # inside a `tf.name_scope` differs as much.
        compare(model, wrapped, [numbers(4, 3)], mode, rounding=ROUNDING if mode == "graph" else 0.0)


def test_apply_knows_of_a_tape_inside():
    inputs = x = keras.Input((8,))
    for _ in range(2):
        x = L.Dense(8, activation="gelu")(L.Dense(8, activation="gelu")(x))
    model = keras.Model(inputs, L.Dense(2)(Force()(x)))
    with pytest.warns(tf_ckpt.CheckpointWarning, match="'force.*' runs plain in every plan: it takes a gradient inside"):
        applied = tf_ckpt.apply(model, "full")
    segments = tf_ckpt.plan_of(applied).segments
    assert segments
    assert not any(name.startswith("force") for segment in segments for name in segment.layers)
    compare(model, applied, [numbers(4, 8)], "graph")


@pytest.mark.parametrize("own_build", [True, False])
def test_recompute_decorates_the_call_of_a_layer(own_build):
    def train(decorate):
        keras.utils.set_random_seed(0)

        class Block(L.Layer):
            def __init__(self):
                super().__init__()
                self.dropout, self.dense = L.Dropout(0.5, seed=1), L.Dense(4, activation="tanh")

            if own_build:

                def build(self, shape):
                    self.dense.build(shape)

            @decorate
            def call(self, x, training=False):
                return self.dropout(self.dense(x), training=training)

        model = keras.Sequential([Block(), Block(), L.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
        history = model.fit(numbers(8, 4), numbers(8, 1), epochs=2, verbose=0, shuffle=False)
        return [np.array(history.history["loss"]), *(x.numpy() for x in model.variables)]

    assert_equal(train(tf_ckpt.recompute), train(lambda f: f))


@pytest.mark.parametrize("mode", MODES)
def test_one_decorator_for_two_instances(mode):
    class Branch(L.Layer):
        def __init__(self, detach):
            super().__init__()
            self.detach = detach

        @tf_ckpt.recompute
        def call(self, x):
            return tf.tanh(tf.stop_gradient(x) if self.detach else x)

    def step():
        x = tf.constant([0.5, -1.0])
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            stopped, through = Branch(True)(x) * x, Branch(False)(x) * x
        return tape.gradient(stopped, x), tape.gradient(through, x)

    x = np.array([0.5, -1.0], "float32")
    have = values(in_mode(step, mode)())
    np.testing.assert_allclose(have, [np.tanh(x), np.tanh(x) + x * (1 - np.tanh(x) ** 2)], rtol=1e-5)


def test_attributes_are_set_through_the_wrapper():
    dropout = L.Dropout(0.5, seed=1)
    wrapper = tf_ckpt.Recompute(dropout)
    wrapper.rate = 0.0
    assert dropout.rate == 0.0
    np.testing.assert_array_equal(wrapper(tf.ones((1, 8)), training=True), np.ones((1, 8)))
    wrapper.note = "the wrapper's own"
    assert not hasattr(dropout, "note")
    wrapper.trainable = False
    assert not dropout.trainable


def test_what_ran_plain_is_tried_again_in_a_new_graph():
    layer = Gate()
    block = tf_ckpt.recompute(lambda x: tf.tanh(dense(x) if not layer.detach else tf.stop_gradient(dense(x))))
    dense, runs = L.Dense(4), []
    dense.build((2, 4))

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(block(x) + x)
        return tape.gradient(loss, x)

    with pytest.warns(tf_ckpt.CheckpointWarning, match="gets no gradient from it"):
        tf.function(step, autograph=False)(numbers(2, 4))
    layer.detach = False
    dense.call = lambda inputs, call=dense.call: (runs.append(tf_ckpt.is_recomputing()), call(inputs))[1]
    tf.function(step, autograph=False)(numbers(2, 4))
    assert runs == [False, True]


def test_disabled_reaches_the_replicas_of_a_strategy():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    seen = []
    function = tf_ckpt.recompute(lambda x: (seen.append(threading.current_thread()), tf.tanh(x))[1])

    def step():
        x = tf.constant([0.5])
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = function(x)
            slope = inner.gradient(y, x)
        return outer.gradient(slope, x)

    with tf_ckpt.disabled():
        second = strategy.run(step)
    assert seen[0] is not threading.current_thread()
    np.testing.assert_allclose(second, -2 * np.tanh(0.5) * (1 - np.tanh(0.5) ** 2), rtol=1e-5)
    with pytest.raises(NotImplementedError):
        strategy.run(step)


def test_a_function_that_is_given_a_symbolic_tensor_says_that_it_saves_nothing():
    inputs = keras.Input((4,))
    block = tf_ckpt.recompute(lambda x: L.Dense(4)(L.Dense(4, activation="gelu")(x)), name="block")
    with pytest.warns(tf_ckpt.CheckpointWarning, match=r"'block' is not recomputed .* Use `tf_ckpt.Recompute"):
        model = keras.Model(inputs, block(inputs))
    assert len(model.layers) == 3


class Block(L.Layer):
    """Reads its argument again after the attention, which takes the mask off it."""

    def __init__(self):
        super().__init__()
        self.attention, self.norm, self.supports_masking = L.MultiHeadAttention(2, 4), L.LayerNormalization(), True

    def build(self, shape):
        self.attention.build(shape, shape)
        self.norm.build(shape)

    def call(self, x):
        return self.norm(x + self.attention(x, x))


@pytest.mark.parametrize("mode", MODES)
def test_a_mask_that_attention_takes_off_its_input(mode):
    block, inputs = Block(), keras.Input((6, 8))
    model = keras.Model(inputs, L.Dense(2)(block(L.Masking()(inputs))))
    again = keras.Model(inputs, model.layers[-1](tf_ckpt.Recompute(block)(model.layers[1](inputs))))
    values = numbers(4, 6, 8) * np.array([1, 1, 1, 1, 0, 0], "float32")[:, None]
    compare(model, again, [values], mode, rounding=ROUNDING)
