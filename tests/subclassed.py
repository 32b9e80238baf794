"""Models whose `call` is Python code, one for each place where such code keeps its layers. Each maker returns
(model, inputs, `layers=`, names of what is recomputed)."""

import collections

import keras
import tensorflow as tf
from cases import AddsLoss, numbers, tokens

import tf_ckpt

L = keras.layers
Pick = tf_ckpt.strategies.Pick
runs = []  # (name, whether it is a re-run) of each call of a block
Pair = collections.namedtuple("Pair", "left right")


@keras.saving.register_keras_serializable("tests")
class Block(L.Layer):
    """Dropout, statistics, a loss of its own, and `training` by name."""

    def __init__(self, width=8, loss=0.0, **kwargs):
        super().__init__(**kwargs)
        self.width, self.loss = width, loss
        self.dense, self.norm = L.Dense(width, activation="gelu"), L.BatchNormalization()
        self.drop, self.supports_masking = L.Dropout(0.3, seed=3), True

    def build(self, shape):
        self.dense.build(shape)
        self.norm.build((*shape[:-1], self.width))

    def call(self, x, training=None):
        runs.append((self.name, tf_ckpt.is_recomputing()))
        y = self.norm(self.dense(x), training=training)
        if self.loss:
            self.add_loss(self.loss * tf.reduce_mean(tf.square(y)))
        return x + self.drop(y, training=training)

    def get_config(self):
        return {**super().get_config(), "width": self.width, "loss": self.loss}


class Model(keras.Model):
    def get_config(self):
        return {"name": self.name}


@keras.saving.register_keras_serializable("tests")
class Held(Model):
    """In attributes, lists, tuples, dicts and a named tuple."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.stem = L.Dense(8)
        self.blocks = [Block(), Block(loss=0.1), Block()]
        self.heads = {"first": (Block(), [Block()]), "last": L.Dense(2)}
        self.pair = Pair(Block(), L.Dense(8))

    def call(self, x, training=None):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, training=training)
        x = self.pair.right(self.pair.left(x))
        return self.heads["last"](self.heads["first"][0](self.heads["first"][1][0](x)))


def held():
    return Held(), [numbers(4, 8)], [Block], ["blocks/0", "blocks/1", "blocks/2", "heads/first/0", "heads/first/1/0", "pair/0"]


@keras.saving.register_keras_serializable("tests")
class Encoder(L.Layer):
    def __init__(self, count=3, **kwargs):
        super().__init__(**kwargs)
        self.steps = [Block() for _ in range(count)]
        self.named = {"after": Block()}
        self.inner = None if count == 1 else Encoder(1)

    def call(self, x):  # `training` from its caller
        for block in self.steps:
            x = block(x)
        x = self.named["after"](x)
        return x if self.inner is None else self.inner(x)


@keras.saving.register_keras_serializable("tests")
class Deep(Model):
    """Layers inside layers, and inside Functional and Sequential models, one of which is not built before the first call."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.encoder = Encoder()
        self.stack = keras.Sequential([Block(name="one"), L.Dense(8, activation="tanh"), Block(name="two")])
        inputs = keras.Input((8,))
        inside = keras.Sequential([keras.Input((8,)), Block(name="three")], name="inside")
        self.graph = keras.Model(inputs, inside(Block(name="four")(L.Dense(8, activation="tanh")(inputs))))
        self.last = L.Dense(2)

    def call(self, x):
        return self.last(self.graph(self.stack(self.encoder(x))))


def deep():
    names = ["encoder/steps/0", "encoder/steps/2", "encoder/named/after", "encoder/inner/steps/0", "stack/two", "graph/four"]
    layers = [
        Pick("encoder/steps/*")[::2],
        "encoder/named/after",
        "encoder/inner/s*",
        "two",
        "graph/four",
        "graph/inside/three",
    ]
    return Deep(), [numbers(4, 8)], layers, [*names, "graph/inside/three"]


@keras.saving.register_keras_serializable("tests")
class Around(L.Layer):
    def __init__(self, inner, **kwargs):
        super().__init__(**kwargs)
        self.inner, self.norm = inner, L.LayerNormalization()

    def call(self, x):
        return self.norm(self.inner(x))


@keras.saving.register_keras_serializable("tests")
class Shared(Model):
    """A block that is called twice, under two names, and once more inside of a recomputed layer that shares it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.block = self.alias = Block(loss=0.2)
        self.around = Around(self.block)
        self.dense = AddsLoss()
        self.beside = Around(self.dense)

    def call(self, x, training=None):
        x = self.alias(self.block(x, training=training), training=training)
        return self.dense(self.beside(self.around(x)))


def shared():
    return Shared(), [numbers(4, 8)], [Block, "around", "dense"], ["block", "around", "dense"]


@keras.saving.register_keras_serializable("tests")
class Masked(Model):
    """Masks, implicit and by name; an embedding and a `Recompute`, which look after themselves."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table, self.rnn = L.Embedding(20, 8, mask_zero=True), L.LSTM(8, return_sequences=True)
        self.attention, self.norm = L.MultiHeadAttention(2, 4, dropout=0.2, seed=1), L.LayerNormalization()
        self.wrapped, self.pool = tf_ckpt.Recompute(Block()), L.GlobalAveragePooling1D()

    def call(self, ids, mask=None, training=None):
        x = self.table(ids)
        x = self.norm(self.attention(x, x, use_causal_mask=True, training=training))
        x = self.wrapped(self.rnn(x, mask=self.table.compute_mask(ids)))
        return self.pool(x)


def masked():
    layers = [L.Embedding, "wrapped", "attention", "rnn", "norm", "pool"]
    return Masked(), [tokens()], layers, ["rnn", "attention", "norm", "pool"]


@keras.saving.register_keras_serializable("tests")
class Looped(Model):
    """Finds its layers by `layers` and `get_layer`, and notes one in an attribute."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        for k in range(3):
            setattr(self, f"step{k}", Block(name=f"block{k}"))
        self.last = L.Dense(2, name="last")

    def call(self, x):
        for layer in self.layers[:2]:
            self.latest = layer
            x = self.latest(x)
        return self.get_layer("last")(self.get_layer("block2")(x))


def looped():
    return Looped(), [numbers(4, 8)], ["step*"], ["step0", "step1", "step2"]


@keras.saving.register_keras_serializable("tests")
class Made(Model):
    """Makes its layers when it is built, and weights of its own."""

    def build(self, shape):
        self.blocks, self.last = [Block(), Block()], L.Dense(2)
        for block in self.blocks:
            block.build(shape)
        self.last.build(shape)
        self.scale = self.add_weight(shape=(8,), initializer="ones", name="scale")

    def call(self, x):
        for block in self.blocks:
            x = block(x * self.scale)
        return self.last(x)


def made():
    return Made(), [numbers(4, 8)], [Block], ["blocks/0", "blocks/1"]


MAKERS = [held, deep, shared, masked, looped, made]
