"""Small models of each kind that is saved, and their training."""

import keras
import numpy as np

import tf_ckpt

L = keras.layers
rate = 0.3  # Keras' files hold no states of seeds, so that dropout starts over in what is loaded, plain or not


def block(x, name, norm=True):
    x = L.Dense(8, activation="gelu", name=f"{name}_dense")(x)
    x = L.BatchNormalization(name=f"{name}_norm")(x) if norm else x
    return L.Dropout(rate, seed=3, name=f"{name}_drop")(x)


def functional():
    x = inputs = keras.Input((8,))
    for k in range(2):
        x = L.Add(name=f"add{k}")([x, block(x, f"b{k}")])
    return keras.Model(inputs, L.Dense(2, name="last")(x), name="plainly_functional")


def sequential():
    layers = [keras.Input((8,))]
    for k in range(2):
        layers += [L.Dense(8, activation="gelu"), L.Dropout(rate, seed=k), L.BatchNormalization()]
    return keras.Sequential([*layers, L.Dense(2)], name="stack")


@keras.saving.register_keras_serializable("tests")
class Scaled(keras.Model):
    """A constructor of its own, a config of its own, and a training step that another model does not have."""

    def __init__(self, blocks, scale=0.5, **kwargs):
        x = inputs = keras.Input((8,))
        for k in range(blocks):
            x = block(x, f"s{k}")
        super().__init__(inputs, L.Dense(2)(x), **kwargs)
        self.blocks, self.scale = blocks, scale

    def get_config(self):
        return {"blocks": self.blocks, "scale": self.scale, "name": self.name}

    @classmethod
    def from_config(cls, config):
        return cls(**config)

    def train_step(self, data):
        logs = super().train_step(data)
        return {**logs, "scaled": self.scale * logs["loss"]}


def scaled():
    return Scaled(2, scale=0.25)


def inner(name="inner"):
    inputs = keras.Input((8,))
    return keras.Model(inputs, block(L.Dense(8, activation="tanh", name=f"{name}_first")(inputs), name), name=name)


def nested():
    """Models inside models, a layer and a model that are called twice, and a `Recompute`."""
    x = inputs = keras.Input((8,))
    layer, model = L.Dense(8, activation="gelu", name="twice"), inner("both")
    for k in range(2):
        x = model(L.LayerNormalization(name=f"norm{k}")(layer(x)))
    x = keras.Sequential([L.Dense(8, activation="tanh"), L.Dropout(rate, seed=1)], name="inside")(x)
    return keras.Model(inputs, L.Dense(2)(tf_ckpt.Recompute(inner("wrapped"))(x)))


def inside_a_plain_one():
    """A plain model that holds an applied one; `planned` of it is that one's plan."""
    inputs = keras.Input((8,))
    x = tf_ckpt.apply(inner("planned"), "full")(L.Dense(8, activation="relu")(inputs))
    return keras.Model(inputs, L.Dense(2)(x))


MAKERS = [functional, sequential, scaled, nested]


def data(seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(24, 8)).astype("float32"), rng.normal(size=(24, 2)).astype("float32")


def compiled(model):
    model.compile(keras.optimizers.AdamW(0.01), "mse", metrics=["mae"], jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    return model


def train(model, epochs=1, initial_epoch=0, callbacks=()):
    """Trains in three steps an epoch, and returns losses and metrics, and every variable afterwards."""
    arguments = {"batch_size": 8, "shuffle": False, "verbose": 0, "callbacks": list(callbacks)}
    history = model.fit(*data(), epochs=epochs, initial_epoch=initial_epoch, **arguments)
    return history.history, [v.numpy() for v in (*model.variables, *model.optimizer.variables)]


def with_seeds_of(model, source):
    """Gives a model the seeds' states of another, and returns it."""
    for v, w in zip(model.variables, source.variables, strict=True):
        if "seed" in v.path:
            v.assign(w)
    return model


def assert_equal(have, want):
    """Asserts that two results of `train` are equal to the bit."""
    assert have[0] == want[0]
    for h, w in zip(have[1], want[1], strict=True):
        np.testing.assert_array_equal(h, w)
