"""The models that are measured, by name, and what a benchmark needs to train them.

Three kinds of work: one long chain without skips, a Transformer with dropout, and a convolutional network with
BatchNorm that keeps most of its bytes in its first layers. All are plain functional Keras, unaware of checkpointing.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console

import tf_ckpt

PLAIN = "plain"
STRATEGIES = ("sqrt", "selective", "full", "recursive", "budget-0.5", "budget-0.25", "selective-0.35")
L = keras.layers


def deep_mlp(layers=64, width=512):
    # He's initialisation: with Keras' default, signal and gradients die out over 64 layers.
    inputs = x = keras.Input((width,))
    for _ in range(layers):
        x = L.Dense(width, activation="gelu", kernel_initializer="he_normal")(x)
    return keras.Model(inputs, x, name="mlp")


def transformer(blocks=12, width=256, heads=4, inner=1024, length=256, dropout=0.1, classes=1000):
    inputs = x = keras.Input((length, width))
    for _ in range(blocks):
        y = L.LayerNormalization()(x)
        y = L.MultiHeadAttention(heads, width // heads, dropout=dropout)(y, y)
        x = L.Add()([x, L.Dropout(dropout)(y)])
        y = L.LayerNormalization()(x)
        y = L.Dense(inner, activation="gelu")(y)
        x = L.Add()([x, L.Dropout(dropout)(L.Dense(width)(y))])
    return keras.Model(inputs, L.Dense(classes)(L.LayerNormalization()(x)), name="transformer")


def resnet50(size=224):
    return keras.applications.ResNet50(weights=None, input_shape=(size, size, 3), classifier_activation=None)


def unet(size=128, width=16, depth=4):
    """Ronneberger et al. 2015, small: what each level keeps crosses all deeper ones."""
    inputs = x = keras.Input((size, size, 3))

    def block(x, filters):
        for _ in range(2):
            x = L.ReLU()(L.BatchNormalization()(L.Conv2D(filters, 3, padding="same", use_bias=False)(x)))
        return x

    skips = []
    for level in range(depth):
        skips.append(block(x, width * 2**level))
        x = L.MaxPooling2D()(skips[-1])
    x = block(x, width * 2**depth)
    for level in reversed(range(depth)):
        x = L.Conv2DTranspose(width * 2**level, 2, strides=2)(x)
        x = block(L.Concatenate()([skips[level], x]), width * 2**level)
    return keras.Model(inputs, L.Conv2D(4, 1)(x), name="unet")


def application(name, size):
    kind = getattr(keras.applications, name)
    return lambda: kind(weights=None, input_shape=(size, size, 3), classifier_activation=None)


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and its batch.

    Attributes:
        build: Makes the model.
        batch_size: Samples in a step.
        loss: A Keras loss.
        bounds: Dict from a strategy to the share of plain's peak memory that it must not exceed.
    """

    build: Callable[[], keras.Model]
    batch_size: int
    loss: Callable[[], keras.losses.Loss]
    bounds: dict = dataclasses.field(default_factory=dict)

    def compiled(self, strategy=PLAIN, jit_compile=False):
        """Returns a compiled model, checkpointed unless `strategy` is `"plain"`, and its plan."""
        model = self.build()
        plan = make_plan(model, "none" if strategy == PLAIN else strategy, self.batch_size)
        if strategy != PLAIN:
            model = tf_ckpt.apply(model, plan)
        # No momentum, no slots: what an optimizer holds between steps is the same for every strategy.
        model.compile(keras.optimizers.SGD(0.001), self.loss(), jit_compile=jit_compile)
        if model.jit_compile != jit_compile:
            raise RuntimeError(f"Keras did not do as asked. Received: jit_compile={jit_compile}")
        return model, plan

    def batch(self, model):
        """Returns one batch of random inputs and labels, the same in every process."""
        numbers = np.random.default_rng(0)
        shape = (self.batch_size, *model.output_shape[1:])
        x = numbers.normal(size=(self.batch_size, *model.input_shape[1:])).astype("float32")
        if self.loss is _classes:
            return tf.constant(x), tf.constant(numbers.integers(0, shape[-1], shape[:-1]))
        return tf.constant(x), tf.constant(numbers.normal(size=shape).astype("float32"))

    def dataset(self, model, steps):
        """Returns the same batch again and again. It is held once, outside of the steps, so no peak counts it."""
        return tf.data.Dataset.from_tensors(self.batch(model)).repeat(steps)


def make_plan(model, strategy, batch_size):
    """Returns a plan; `"budget-0.5"` is a budget and `"selective-0.35"` a target, as shares of the plain activation bytes."""
    kind, _, share = strategy.partition("-")
    if not share:
        return tf_ckpt.plan(model, strategy, batch_size=batch_size, optimizer="sgd")
    if kind == "selective":
        return tf_ckpt.plan(model, kind, target=float(share), batch_size=batch_size, optimizer="sgd")
    plain = tf_ckpt.plan(model, "none", batch_size=batch_size, optimizer="sgd")
    memory = plain.plain_peak_bytes - round((1 - float(share)) * plain.plain_activation_bytes)
    return tf_ckpt.plan(model, kind, memory=memory, batch_size=batch_size, optimizer="sgd")


def _classes():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


MODELS = {
    "mlp": Workload(deep_mlp, 4096, keras.losses.MeanSquaredError),
    "transformer": Workload(transformer, 8, _classes, {"sqrt": 0.30}),
    "resnet50": Workload(resnet50, 8, _classes),
    "resnet50-b16": Workload(resnet50, 16, _classes, {"sqrt": 0.50}),
    "transformer-1024": Workload(functools.partial(transformer, length=1024), 2, _classes),
    "densenet121": Workload(application("DenseNet121", 224), 8, _classes),
    "mobilenetv2": Workload(application("MobileNetV2", 224), 16, _classes),
    "unet": Workload(unet, 16, _classes),
}


DEFAULT = ("mlp", "transformer", "resnet50", "resnet50-b16")


def option_parser(description, models=DEFAULT, strategies=STRATEGIES):
    """Returns a parser with the options that all benchmarks have, and these defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(models), metavar="NAME", help=", ".join(MODELS))
    parser.add_argument(
        "--strategies",
        nargs="+",
        choices=STRATEGIES,
        default=list(strategies),
        metavar="NAME",
        help=f"compared with the plain model: {', '.join(STRATEGIES)}",
    )
    return parser


def positive(text):
    """The type of an option that counts something."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a positive whole number. Received: {text!r}")
    return value


def report(table, missed, width):
    """Prints a table and the bounds that were missed, and returns the exit status."""
    console = Console(width=width)
    console.print(table)
    for line in missed:
        console.print(f"Missed: {line}", markup=False)
    return 1 if missed else 0
