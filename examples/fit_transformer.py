"""Trains a decoder-only Transformer on source code, plain and with gradient checkpointing, and compares the two.

The text is real and on every machine: the standard library's own `.py` files, character by character. Each sample has
as many whole lines as fit; the rest is padding, which is masked from the embedding to the loss.

    python examples/fit_transformer.py
    python examples/fit_transformer.py --blocks 12 --length 512 --batch-size 4
    python examples/fit_transformer.py --memory-limit-mib 560
"""

import os
import sys
import sysconfig
from pathlib import Path

os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "true")  # read by TensorFlow at import: the CPU counts its memory

import keras
import numpy as np
import tensorflow as tf
from _common import main, option_parser, positive

import tf_ckpt

CHARACTERS = 128  # ASCII; 0 never occurs in text and is the padding


@keras.saving.register_keras_serializable(package="tf_ckpt_examples")
class AddPosition(keras.layers.Layer):
    """Adds a learned vector for each position: (batch, length, width) to the same. Passes masks on."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def build(self, input_shape):
        self.positions = self.add_weight(shape=input_shape[1:], initializer="uniform", name="positions")

    def call(self, x):
        return x + self.positions


def block(x, arguments):
    """A pre-normalised block: causal attention, then a feed-forward layer four times as wide."""
    width = arguments.width
    attention = keras.layers.MultiHeadAttention(arguments.heads, width // arguments.heads, dropout=arguments.dropout)
    h = keras.layers.LayerNormalization()(x)
    h = attention(h, h, use_causal_mask=True)
    x = keras.layers.Add()([x, keras.layers.Dropout(arguments.dropout)(h)])
    h = keras.layers.LayerNormalization()(x)
    h = keras.layers.Dense(4 * width, activation="gelu")(h)
    h = keras.layers.Dense(width)(h)
    return keras.layers.Add()([x, keras.layers.Dropout(arguments.dropout)(h)])


def make_model(arguments, strategy):
    """The Transformer, checkpointed if there is a strategy."""
    inputs = keras.Input((arguments.length,), dtype="int32")
    x = keras.layers.Embedding(CHARACTERS, arguments.width, mask_zero=True)(inputs)
    x = AddPosition()(x)
    for _ in range(arguments.blocks):
        x = block(x, arguments)
    x = keras.layers.LayerNormalization()(x)
    model = keras.Model(inputs, keras.layers.Dense(CHARACTERS)(x))
    if strategy is not None:
        model = tf_ckpt.apply(model, strategy=strategy)
    model.compile(
        keras.optimizers.Adam(3e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=arguments.jit_compile,
    )
    return model


def read_samples(length):
    """The standard library as rows of `length` ASCII codes: whole lines, as many as fit, then zeros."""
    rows, row = [], b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            code = line.encode("ascii", "replace")[:length]
            if len(row) + len(code) > length:
                rows.append(row)
                row = b""
            row += code
    return np.frombuffer(b"".join(row.ljust(length, b"\0") for row in rows), "uint8").reshape(-1, length)


def make_dataset(arguments):
    """Endless batches of characters and the characters that follow, in the same order in every process."""

    def next_characters(codes):
        codes = tf.cast(codes, tf.int32)
        return codes[:, :-1], codes[:, 1:]

    samples = read_samples(arguments.length + 1)
    dataset = tf.data.Dataset.from_tensor_slices(samples).shuffle(len(samples), seed=arguments.seed).repeat()
    return dataset.batch(arguments.batch_size, drop_remainder=True).map(next_characters).prefetch(1)


def parse():
    parser = option_parser(__doc__.partition("\n")[0], limit_mib=560, batch_size=8, steps=12)
    parser.add_argument("--blocks", type=positive, default=8, metavar="N", help="Transformer blocks")
    parser.add_argument("--width", type=positive, default=256, metavar="N", help="features of a character")
    parser.add_argument("--heads", type=positive, default=4, metavar="N", help="attention heads")
    parser.add_argument("--length", type=positive, default=256, metavar="N", help="characters of a sample")
    parser.add_argument("--dropout", type=float, default=0.1, metavar="RATE", help="dropout rate, at least 0, below 1")
    arguments = parser.parse_args()
    if arguments.width % arguments.heads:
        parser.error(f"argument --width: must be a multiple of --heads. Received: {arguments.width} and {arguments.heads}")
    if not 0 <= arguments.dropout < 1:
        parser.error(f"argument --dropout: must be at least 0 and below 1. Received: {arguments.dropout}")
    return arguments


if __name__ == "__main__":
    sys.exit(main(parse(), make_model, make_dataset))
