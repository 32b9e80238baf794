"""`fit`, `evaluate` and `predict` of checkpointed models: as the plain model, step by step."""

import keras
import numpy as np
import pytest
from cases import CASES, numbers

import tf_ckpt

L = keras.layers


def convolutional():
    inputs = keras.Input((16, 16, 3))
    x = inputs
    for filters in (8, 16):
        y = L.Conv2D(filters, 3, padding="same")(x)
        y = L.ReLU()(L.BatchNormalization()(y))
        y = L.BatchNormalization()(L.Conv2D(filters, 3, padding="same")(y))
        x = L.ReLU()(L.Add()([y, L.Conv2D(filters, 1)(x)]))
    x = L.Dropout(0.3, seed=1)(L.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, L.Dense(4)(x))


def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(20, 16, 16, 3)).astype("float32"), rng.integers(0, 4, 20)


def fit(model, optimizer=None, epochs=2, **compile_arguments):
    """Trains and gives back losses and all variables; the model is as before afterwards."""
    before = [v.numpy() for v in model.variables]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or keras.optimizers.AdamW(0.01), loss, **{"jit_compile": False, **compile_arguments})
    x, y = data()
    history = model.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, validation_split=0.2)
    after = [v.numpy() for v in model.variables]
    for v, value in zip(model.variables, before, strict=True):
        v.assign(value)
    return history.history, after


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"run_eagerly": True},
        {"jit_compile": True, "optimizer": lambda: keras.optimizers.SGD(0.1)},  # Adam makes much of a last bit
        {"steps_per_execution": 2},
        {"optimizer": lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)},
        {"optimizer": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**40)},
        pytest.param({"optimizer": lambda: keras.optimizers.Adam(0.01, use_ema=True, clipnorm=0.1)}, marks=pytest.mark.slow),
    ],
    ids=["graph", "eager", "xla", "steps_per_execution", "accumulation", "loss_scale", "ema"],
)
def test_fit_equals_plain(arguments):
    arguments = dict(arguments)
    optimizer = arguments.pop("optimizer", lambda: None)
    model = convolutional()
    want, weights = fit(model, optimizer(), **arguments)
    have, ours = fit(tf_ckpt.apply(model, "sqrt"), optimizer(), **arguments)
    if arguments.get("jit_compile"):
        for key, values in want.items():
            np.testing.assert_allclose(have[key], values, rtol=1e-4)
        return
    assert have == want
    for a, b in zip(weights, ours, strict=True):
        np.testing.assert_array_equal(a, b)


def test_predict_and_evaluate_equal_plain_and_recompute_nothing():
    model = convolutional()
    applied = tf_ckpt.apply(model, "full")
    runs = []

    class Watching(L.Layer):
        def call(self, x):
            runs.append(tf_ckpt.is_recomputing())
            return x * 1.0

    x, y = data()
    for m in (model, applied):
        m.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    np.testing.assert_array_equal(applied.predict(x, verbose=0), model.predict(x, verbose=0))
    assert applied.evaluate(x, y, verbose=0) == model.evaluate(x, y, verbose=0)
    inputs = keras.Input((8,))
    z = L.Dense(8, activation="tanh")(inputs)
    z = L.Dense(8, activation="tanh")(Watching()(z))
    watched = tf_ckpt.apply(keras.Model(inputs, L.Dense(1)(z)), lambda chain: [(0, 3)])
    watched.compile("sgd", "mse", run_eagerly=True)
    del runs[:]
    data_x = numbers(4, 8)
    watched.predict(data_x, verbose=0)
    watched.evaluate(data_x, data_x[:, :1], verbose=0)
    assert runs == [False, False]
    del runs[:]
    watched.fit(data_x, data_x[:, :1], verbose=0)
    assert runs == [False, True]


def test_custom_train_step_and_metrics():
    class Trainer(keras.Model):
        def train_step(self, data):
            logs = super().train_step(data)
            return {**logs, "extra": self.extra}

    model = CASES["convolutions"]()[0]
    trainer = Trainer(model.inputs[0], model.outputs)  # Keras 3.8 warns if a list of one meets a tensor
    trainer.extra = 3.0
    applied = tf_ckpt.apply(trainer, "full")
    assert isinstance(applied, Trainer)
    applied.compile("sgd", "mse", metrics=["mae"], jit_compile=False)
    x = numbers(4, 8, 8, 3)
    history = applied.fit(x, x[:, 0, 0, :2], verbose=0)
    assert history.history["extra"] == [3.0]
    assert history.history["mae"][0] > 0
