"""Small models, one for each thing that a careless recompute gets wrong. Each returns (model, inputs, training)."""

import keras
import numpy as np
import tensorflow as tf

L = keras.layers


def numbers(*shape):
    return tf.constant(np.random.default_rng(3).normal(size=shape).astype("float32"))


def tokens(rows=4, length=6):
    ids = np.random.default_rng(4).integers(1, 20, (rows, length))
    ids[:, length - 2 :] = 0
    ids[0, 1:] = 0
    return tf.constant(ids.astype("int32"))


@keras.saving.register_keras_serializable("tests")
class Counter(L.Layer):
    """State of each kind: a float average, an integer counter, a metric, a seed."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.metric = keras.metrics.Mean(name="mean")
        self.seed = keras.random.SeedGenerator(5)

    def build(self, shape):
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype="int64", name="count")
        self.average = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="average")
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x, training=None):
        self.count.assign_add(1)
        self.metric.update_state(x)
        if training:
            self.average.assign(0.9 * self.average + 0.1 * tf.reduce_mean(x, axis=0))
        noise = keras.random.uniform(tf.shape(x), seed=self.seed)
        return x * self.scale + self.average * tf.cast(self.count, x.dtype) + 0.1 * noise


@keras.saving.register_keras_serializable("tests")
class NoTrainingArgument(L.Layer):
    """Takes `training` from its caller without naming it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dropout, self.norm = L.Dropout(0.5, seed=1), L.BatchNormalization()

    def build(self, shape):
        self.norm.build(shape)

    def call(self, x):
        return self.norm(self.dropout(x))


@keras.saving.register_keras_serializable("tests")
class AddsLoss(L.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), name="kernel")

    def call(self, x):
        y = tf.matmul(x, self.kernel)
        self.add_loss(0.1 * tf.reduce_mean(tf.square(y)))
        return y


def _mlp(*middle, width=8, **dense):
    inputs = keras.Input((width,))
    x = inputs
    for make in middle:
        x = L.Dense(width, activation="tanh", **dense)(x)
        x = make()(x)
    return keras.Model(inputs, L.Dense(3)(x)), [numbers(4, width)], True


def dropout():
    return _mlp(lambda: L.Dropout(0.5, seed=1), lambda: L.GaussianNoise(0.3, seed=2), lambda: L.AlphaDropout(0.2, seed=3))


def batch_norm():
    return _mlp(L.BatchNormalization, L.BatchNormalization, L.BatchNormalization)


def inference_with_gradients():
    model, inputs, _ = _mlp(L.BatchNormalization, lambda: L.Dropout(0.5))
    return model, inputs, False


def implicit_mask():
    inputs = keras.Input((None,), dtype="int32")
    x = L.Embedding(20, 8, mask_zero=True)(inputs)
    x = L.Dense(8, activation="gelu")(x)
    x = L.Dropout(0.3, seed=1)(x)
    x = L.LSTM(8, return_sequences=True)(x)
    x = L.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, L.Dense(3)(x)), [tokens()], True


def bool_mask():
    inputs, mask = keras.Input((6, 8)), keras.Input((6, 6), dtype="bool")
    x = L.LayerNormalization()(inputs)
    x = L.MultiHeadAttention(2, 4, dropout=0.2, seed=1)(x, x, attention_mask=mask)
    x = L.Dense(8, activation="relu")(x)
    allowed = np.random.default_rng(5).random((4, 6, 6)) > 0.3
    return keras.Model([inputs, mask], L.Dense(2)(x)), [numbers(4, 6, 8), tf.constant(allowed)], True


def masked_attention():
    """Keras' attention takes the mask off the tensor that it is given."""
    inputs = keras.Input((6, 8))
    x = L.Masking()(inputs)
    for _ in range(2):
        x = L.LayerNormalization()(L.Add()([x, L.MultiHeadAttention(2, 4)(x, x)]))
        x = L.LayerNormalization()(L.Add()([x, L.Dense(8, activation="tanh")(x)]))
    values = numbers(4, 6, 8) * tf.cast(tokens() > 0, tf.float32)[..., None]
    return keras.Model(inputs, L.Dense(2)(x)), [values], True


def add_loss():
    return _mlp(AddsLoss, AddsLoss)


def activity_regularizer():
    return _mlp(lambda: L.ActivityRegularization(l2=0.02), lambda: L.Dense(8, activity_regularizer="l2"))


def weight_regularizer():
    return _mlp(lambda: L.Dense(8, bias_regularizer="l1"), lambda: L.Dense(8), kernel_regularizer="l2")


def mixed_float16():
    return _mixed("mixed_float16")


def mixed_bfloat16():
    return _mixed("mixed_bfloat16")


def _mixed(policy):
    keras.config.set_dtype_policy(policy)
    return _mlp(lambda: L.Dropout(0.3, seed=1), L.LayerNormalization, lambda: L.Dense(8, dtype="float32"), AddsLoss)


def frozen():
    model, inputs, training = _mlp(L.BatchNormalization, lambda: L.Dropout(0.5, seed=1), L.BatchNormalization)
    for layer in model.layers[:5]:
        layer.trainable = False
    return model, inputs, training


def shared_layer():
    inputs = keras.Input((8,))
    shared, norm = L.Dense(8, activation="tanh"), L.BatchNormalization()
    x = norm(shared(inputs))
    x = L.Dense(8, activation="relu")(x)
    x = norm(shared(x))
    return keras.Model(inputs, L.Dense(3)(x)), [numbers(4, 8)], True


def nested_model():
    inside = keras.Input((8,))
    x = L.Dropout(0.4, seed=1)(L.Dense(8, activation="tanh")(inside))
    x = L.BatchNormalization()(x)
    block = keras.Model(inside, L.Add()([x, inside]), name="block")
    tail = keras.Sequential([keras.Input((8,)), L.Dense(6, activation="gelu"), L.BatchNormalization()], name="tail")
    inputs = keras.Input((8,))
    x = block(L.Dense(8)(inputs))
    x = block(L.Dense(8, activation="relu")(x))
    return keras.Model(inputs, L.Dense(2)(tail(x))), [numbers(4, 8)], True


def several_inputs_and_outputs():
    a, b = keras.Input((8,), name="a"), keras.Input((5, 8), name="b")
    x = L.Dense(8, activation="tanh")(a)
    y = L.MultiHeadAttention(2, 4)(query=b, value=b)
    y = keras.ops.mean(L.Dense(8, activation="gelu")(y), axis=1)
    z = L.BatchNormalization()(keras.ops.concatenate([x, y], axis=-1) * 2.0)
    first, second = keras.ops.split(L.Dense(8, activation="relu")(z), 2, axis=-1)
    outputs = {"p": L.Dense(2, name="p")(first), "q": [L.Dropout(0.2, seed=1)(L.Dense(3)(second)), x]}
    return keras.Model([a, b], outputs), [numbers(4, 8), numbers(4, 5, 8)], True


def recurrent():
    inputs = keras.Input((6, 8))
    x = L.Bidirectional(L.LSTM(6, return_sequences=True, dropout=0.2, recurrent_dropout=0.2, seed=1))(inputs)
    x = L.GRU(8, dropout=0.3, seed=2)(x)
    return keras.Model(inputs, L.Dense(2)(x)), [numbers(4, 6, 8)], True


def attention():
    inputs = keras.Input((6, 8))
    x = inputs
    for seed in range(2):
        y = L.LayerNormalization()(x)
        y = L.MultiHeadAttention(2, 4, dropout=0.2, seed=seed)(y, y, use_causal_mask=True)
        x = L.Add()([x, L.Dropout(0.2, seed=seed)(y)])
        y = L.Dense(16, activation="gelu")(L.LayerNormalization()(x))
        x = x + L.Dropout(0.2, seed=seed)(L.Dense(8)(y))
    return keras.Model(inputs, L.Dense(3)(x)), [numbers(4, 6, 8)], True


def custom_state():
    return _mlp(Counter, NoTrainingArgument, Counter)


def spectral_normalization():
    """Assigns its inner layer's trainable kernel in `call`."""
    return _mlp(lambda: L.SpectralNormalization(L.Dense(8)), L.BatchNormalization)


def convolutions():
    inputs = keras.Input((8, 8, 3))
    x = L.Conv2D(4, 3, padding="same", use_bias=False)(inputs)
    x = L.ReLU()(L.BatchNormalization()(x))
    y = L.SeparableConv2D(4, 3, padding="same")(x)
    y = L.SpatialDropout2D(0.3, seed=1)(L.Activation("swish")(L.GroupNormalization(2)(y)))
    x = L.MaxPooling2D()(L.Add()([x, y]))
    return keras.Model(inputs, L.Dense(2)(L.Flatten()(x))), [numbers(4, 8, 8, 3)], True


CASES = {
    f.__name__: f
    for f in (
        dropout,
        batch_norm,
        implicit_mask,
        bool_mask,
        masked_attention,
        add_loss,
        activity_regularizer,
        weight_regularizer,
        mixed_float16,
        mixed_bfloat16,
        frozen,
        inference_with_gradients,
        shared_layer,
        nested_model,
        several_inputs_and_outputs,
        recurrent,
        attention,
        custom_state,
        spectral_normalization,
        convolutions,
    )
}
