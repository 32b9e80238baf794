"""`tf_ckpt.Recompute` as a layer: it takes the place of the layer that it wraps."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import AddsLoss, Counter, NoTrainingArgument, numbers, tokens
from helpers import MODES, assert_same, in_mode, step

import tf_ckpt

L = keras.layers
R = tf_ckpt.Recompute


class Block(L.Layer):
    """A composite layer with a `Recompute` inside its `call`."""

    def __init__(self, wrap, **kwargs):
        super().__init__(**kwargs)
        self.norm = L.LayerNormalization()
        self.attention = wrap(L.MultiHeadAttention(2, 4, dropout=0.2, seed=1))
        self.feed = wrap(keras.Sequential([L.Dense(16, activation="gelu"), L.Dropout(0.3, seed=2), L.Dense(8)]))

    def call(self, x, allowed=None):
        y = self.norm(x)
        x = x + self.attention(y, y, attention_mask=allowed)
        return x + self.feed(x)


@pytest.mark.parametrize("mode", MODES)
def test_inside_a_subclassed_layer(mode):
    x, mask = numbers(3, 5, 8), tf.constant(np.tri(5, dtype=bool)[None])
    plain, ours = Block(lambda layer: layer), Block(R)
    plain(x)
    ours(x)
    for v, source in zip(ours.variables, plain.variables, strict=True):
        v.assign(source)
    results = []
    for block in (plain, ours):

        def call(x, block=block):
            return tf.reduce_mean(tf.square(block(x, allowed=mask, training=True)))

        result = step(call, block.trainable_variables, block.non_trainable_variables, [x], mode)
        results.append(dict(enumerate(result.values())))
    assert_same(*results, mode, rounding=2e-6)


def test_takes_the_place_of_its_layer():
    inner = L.MultiHeadAttention(2, 4, name="attention")
    layer = R(inner)
    assert isinstance(layer, R)
    assert isinstance(layer, keras.layers.Wrapper)
    assert layer.layer is inner
    assert layer.name == "attention"
    assert layer.num_heads == 2
    assert R(layer).layer is inner
    y, scores = layer(numbers(3, 5, 8), numbers(3, 7, 8), return_attention_scores=True)
    assert y.shape == (3, 5, 8)
    assert scores.shape == (3, 2, 5, 7)
    assert [id(v) for v in layer.variables] == [id(v) for v in inner.variables]
    layer.trainable = False
    assert not inner.trainable
    assert layer.trainable_variables == []
    with pytest.raises(AttributeError, match="nonsense"):
        _ = layer.nonsense


def test_output_spec_and_masks():
    inputs = keras.Input((None,), dtype="int32")
    x = L.Embedding(20, 8, mask_zero=True)(inputs)
    x = R(L.LSTM(4, return_sequences=True))(x)
    assert x.shape == (None, None, 4)
    x = R(L.Dense(5))(x)
    assert x.shape == (None, None, 5)
    model = keras.Model(inputs, x)
    y = model(tokens())
    np.testing.assert_array_equal(y._keras_mask, tokens() != 0)
    layer = R(L.Conv2D(4, 3, strides=2))
    assert layer.compute_output_shape((None, 9, 9, 3)) == (None, 4, 4, 4)


def test_config_round_trip():
    for inner in (
        L.Dense(4, activation="gelu"),
        Counter(),
        L.Bidirectional(L.GRU(3)),
        L.SpectralNormalization(L.Dense(3)),
    ):
        layer = R(inner, trainable=False)
        copy = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
        assert isinstance(copy, R)
        assert type(copy.layer) is type(inner)
        assert not copy.trainable
        assert copy.get_config() == layer.get_config()


def _model(wrap):
    inputs = keras.Input((6, 8))
    x = wrap(L.Bidirectional(L.LSTM(4, return_sequences=True)))(inputs)
    x = wrap(L.MultiHeadAttention(2, 4))(x, x)
    x = wrap(L.TimeDistributed(L.Dense(8)))(x)
    x = wrap(L.SpectralNormalization(L.Dense(8)))(x)
    x = wrap(keras.Sequential([L.Dense(8), L.BatchNormalization()]))(x)
    return keras.Model(inputs, wrap(L.Dense(3))(L.Flatten()(x)))


@pytest.mark.parametrize("ending", [".weights.h5", ".keras"])
def test_weight_files_interchange(tmp_path, ending):
    plain, ours = _model(lambda layer: layer), _model(R)
    x = numbers(2, 6, 8)
    assert np.abs(plain(x) - ours(x)).max() > 1e-3
    for source, target in ((plain, ours), (ours, plain)):
        source.set_weights([w + np.random.default_rng(1).normal(size=w.shape) for w in source.get_weights()])
        path = str(tmp_path / f"file{ending}")
        if ending == ".keras":
            source.save(path)
            loaded = keras.models.load_model(path)
            assert [type(a).__name__ for a in loaded.layers] == [type(a).__name__ for a in source.layers]
            np.testing.assert_array_equal(loaded(x), source(x))
            target.load_weights(path)
        else:
            source.save_weights(path)
            target.load_weights(path)
        np.testing.assert_allclose(target(x), source(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_alone_in_a_tape_counts_runs(mode):
    runs = []

    class Counting(NoTrainingArgument):
        def call(self, x):
            runs.append(tf_ckpt.is_recomputing())
            return super().call(x)

    layer = R(Counting())
    layer(numbers(4, 6))
    del runs[:]

    def run(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(layer(x, training=True) ** 2)
        return tape.gradient(loss, [v.value for v in layer.trainable_variables])

    in_mode(run, mode)(numbers(4, 6))
    assert runs == [False, True]
    del runs[:]
    in_mode(lambda x: layer(x), mode)(numbers(4, 6))
    assert runs == [False]


def test_losses_are_the_layers_own():
    layer = R(AddsLoss())
    with tf.GradientTape() as tape:
        layer(numbers(4, 6))
        (loss,) = layer.losses
    assert layer.layer.losses[0] is loss
    gradient = tape.gradient(loss, layer.kernel.value)
    assert np.abs(gradient).max() > 0
    layer(numbers(4, 6))
    assert len(layer.losses) == 1


def test_stateful_recurrent_layer():
    plain, inner = L.LSTM(4, stateful=True, seed=1), L.LSTM(4, stateful=True, seed=1)
    ours = R(inner)
    x = numbers(2, 5, 3)
    plain(x)
    ours(x)
    inner.set_weights(plain.get_weights())
    plain.reset_state()
    ours.reset_state()
    for _ in range(2):
        with tf.GradientTape(persistent=True) as tape:
            want, have = tf.reduce_sum(plain(x)), tf.reduce_sum(ours(x))
        np.testing.assert_array_equal(have, want)
        pairs = zip(plain.trainable_variables, inner.trainable_variables, strict=True)
        for a, b in pairs:
            np.testing.assert_array_equal(tape.gradient(want, a.value), tape.gradient(have, b.value))
    for a, b in zip(plain.non_trainable_variables, inner.non_trainable_variables, strict=True):
        np.testing.assert_array_equal(a, b)


def test_call_that_is_a_tf_function_runs_plain():
    class Compiled(L.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(shape[-1], 3))

        @tf.function
        def call(self, x):
            return tf.tanh(x @ self.kernel)

    layer, x = R(Compiled()), numbers(4, 6)
    layer.layer(x)
    with tf.GradientTape() as tape, pytest.warns(tf_ckpt.CheckpointWarning, match="tf.function"):
        loss = tf.reduce_sum(layer(x))
    assert tape.gradient(loss, layer.kernel.value) is not None
