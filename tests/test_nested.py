"""Segments within segments, and parts inside layers: exact, and run as often as the plan says."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import CASES, numbers, tokens
from helpers import compare, thirds

import tf_ckpt
from tf_ckpt.strategies import Range

L = keras.layers


def halves(chain):
    """A strategy that recomputes thirds of the model, each half of them again, and so on, and every part inside a layer."""

    def split(start, stop):
        cuts = [c for c in range(start + 1, stop) if chain.exact_cuts[c] and chain.allowed(start, c) and chain.allowed(c, stop)]
        if not cuts:
            return tuple(Range(k, k + 1, (), True) for k in range(start, stop) if chain.exact_parts[k])
        cut = min(cuts, key=lambda c: abs(c - (start + stop) / 2))
        return Range(start, cut, split(start, cut)), Range(cut, stop, split(cut, stop))

    return [Range(start, stop, split(start, stop)) for start, stop in thirds(chain)]


def parts(chain):
    """A strategy that recomputes nothing but the parts inside layers."""
    return [Range(k, k + 1, (), True) for k in range(len(chain)) if chain.exact_parts[k]]


# In eager mode everything happens in order: `make test` runs what differs most there, `make test-all` everything.
ORDERED = {"dropout", "attention", "nested_model", "custom_state"}


def marks(case, mode):
    return [pytest.mark.slow] if mode == "eager" and case not in ORDERED else []


PAIRS = [pytest.param(case, mode, marks=marks(case, mode)) for case in CASES for mode in ("eager", "graph")]
SLOW_XLA = ("eager", "graph", pytest.param("xla", marks=pytest.mark.slow))


@pytest.mark.parametrize(("case", "mode"), PAIRS)
def test_segments_within_segments(case, mode):
    model, inputs, training = CASES[case]()
    compare(model, tf_ckpt.apply(model, halves), inputs, mode, training)


@pytest.mark.parametrize("mode", SLOW_XLA)
def test_levels_under_dropout(mode):
    inputs = x = keras.Input((8,))
    for k in range(8):
        x = L.Dropout(0.4, seed=k)(L.BatchNormalization()(L.Dense(8)(x)))
    model = keras.Model(inputs, L.Dense(2)(x))
    applied = tf_ckpt.apply(model, halves)
    compare(model, applied, [numbers(16, 8)], mode)


def attention_net(layer, mask_zero=True):
    inputs = keras.Input((6,), dtype="int32")
    x = L.Embedding(20, 8, mask_zero=mask_zero)(inputs)
    for _ in range(2):
        y = layer(L.LayerNormalization()(x))
        x = L.Add()([x, L.Dropout(0.2, seed=1)(y)])
    return keras.Model(inputs, L.Dense(3)(x)), [tokens()]


class Subclass(L.MultiHeadAttention):
    """An attention layer of the user's own."""

    def call(self, query, value, key=None, **arguments):
        return 2.0 * super().call(query, value, key, **arguments)


def multi_head():
    layer = L.MultiHeadAttention(2, 4, dropout=0.3, seed=2)
    return attention_net(lambda x: layer(x, x, use_causal_mask=True))


def grouped_query():
    layer = L.GroupQueryAttention(4, 4, 2, dropout=0.3, seed=2)
    return attention_net(lambda x: layer(x, x), mask_zero=False)


def subclass():
    return attention_net(lambda x: Subclass(2, 4, dropout=0.3, seed=2)(x, x))


def activations():
    inputs = x = keras.Input((8, 8, 3))
    x = L.Conv2D(4, 3, activation="gelu")(x)
    x = L.DepthwiseConv2D(3, activation="silu")(x)
    x = L.SeparableConv2D(4, 3, activation="gelu")(x)
    x = L.Flatten()(x)
    x = L.Dense(8, activation="gelu")(x)
    x = L.Dense(8, activation=keras.activations.mish)(x)
    return keras.Model(inputs, L.Dense(2)(x)), [numbers(4, 8, 8, 3)]


@pytest.mark.parametrize("mode", SLOW_XLA)
@pytest.mark.parametrize("make", [multi_head, grouped_query, subclass, activations])
def test_parts_inside_layers(make, mode):
    model, inputs = make()
    before = {layer.name: set(vars(layer)) for layer in model.layers}
    applied = tf_ckpt.apply(model, parts)
    assert any(s.part for s in tf_ckpt.plan_of(applied).segments)
    compare(model, applied, inputs, mode)
    assert {layer.name: set(vars(layer)) for layer in model.layers} == before


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize(("kind", "arguments"), [(L.MultiHeadAttention, (2, 4)), (L.GroupQueryAttention, (4, 4, 2))])
def test_the_same_attention_with_scores_and_without(kind, arguments, mode):
    layer, inputs = kind(*arguments), keras.Input((6, 8))
    y = L.LayerNormalization()(inputs)
    x = L.Add()([inputs, layer(y, y)])
    y = L.LayerNormalization()(x)
    y = keras.tree.flatten(layer(y, y, return_attention_scores=True))[0]  # Keras 3.8's grouped one shows no scores
    model = keras.Model(inputs, L.Dense(3)(L.Add()([x, y])))
    applied = tf_ckpt.apply(model, parts)
    assert (layer.name,) in [s.layers for s in tf_ckpt.plan_of(applied).segments if s.part]
    compare(model, applied, [numbers(4, 6, 8)], mode)


def deep():
    inputs = keras.Input((8,))
    x = inputs
    for number in range(8):
        x = L.LayerNormalization()(L.Dense(8, activation="gelu", name=f"dense_{number}")(x))
    return keras.Model(inputs, x)


def test_the_gradient_of_a_function_that_was_called_under_the_tape():
    """TensorFlow makes the function's backward pass, with the segments inside, while the tape still records."""
    model, x = deep(), tf.constant(np.random.default_rng(0).normal(size=(4, 8)).astype("float32"))
    weights = [v.value for v in model.trainable_variables]

    def gradients(model):
        call = tf.function(lambda x: tf.reduce_sum(tf.sin(model(x, training=True))), autograph=False)
        with tf.GradientTape() as tape:
            loss = call(x)
        return [loss, *tape.gradient(loss, weights)]

    want = gradients(model)
    with warnings.catch_warnings():  # the segments inside, which take weights from the other function, run plain, and say so
        warnings.simplefilter("ignore", tf_ckpt.CheckpointWarning)
        have = gradients(tf_ckpt.apply(model, halves))
    for a, b in zip(want, have, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)  # two functions, each optimised by itself


def test_grouped_convolutions_in_segments_within_segments():
    """On a CPU, Keras puts them into a function of their own: what such a function makes is out of reach behind it."""
    inputs = keras.Input((6, 6, 4))
    x = inputs
    for number in range(4):
        x = L.Activation("gelu")(L.Conv2D(4, 3, padding="same", groups=2, name=f"conv_{number}")(x))
    model = keras.Model(inputs, L.Conv2D(1, 6)(x))
    data, weights = np.random.default_rng(0).normal(size=(4, 6, 6, 4)).astype("float32"), model.get_weights()
    trained = []
    for contestant in (model, tf_ckpt.apply(model, lambda chain: [Range(0, 8, (Range(0, 4), Range(4, 8)))])):
        model.set_weights(weights)
        contestant.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        with warnings.catch_warnings():  # the segments inside run plain, and say so
            warnings.simplefilter("ignore", tf_ckpt.CheckpointWarning)
            contestant.fit(data, np.ones((4, 1, 1, 1)), epochs=2, verbose=0)
        trained.append(model.get_weights())
    for a, b in zip(*trained, strict=True):
        np.testing.assert_array_equal(a, b)


def test_operations_grow_with_levels_and_not_with_their_power():
    inputs = x = keras.Input((4,))
    for _ in range(9):
        x = L.Dense(4, activation="gelu")(x)
    model, counts, tree = keras.Model(inputs, x), [], ()
    for stop in (4, 5, 6, 7, 8):
        tree = (Range(0, stop, tree),)
        applied = tf_ckpt.apply(model, lambda chain, tree=tree: tree)

        @tf.function(autograph=False)
        def step(x, applied=applied):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(applied(x, training=True))
            return tape.gradient(loss, [v.value for v in applied.trainable_variables])

        graph = step.get_concrete_function(tf.TensorSpec((2, 4))).graph
        counts.append(len(graph.get_operations()))
    added = np.diff(counts)
    assert added[-1] < 2 * added[0], counts  # each level runs one more layer again than the level before
