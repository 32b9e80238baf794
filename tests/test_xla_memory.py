"""What XLA keeps from forward to backward, read off the program that it compiles: it is in the order in which it runs."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_ckpt

L = keras.layers
_SIZES = {"pred": 1, "s32": 4, "u32": 4, "s64": 8, "u64": 8, "f32": 4, "f64": 8, "f16": 2, "bf16": 2, "u8": 1, "s8": 1}
# XLA of TensorFlow 2.18 joins less in one kernel, and has more in flight within a segment: up to 1.6 is measured there.
_ALLOWED = 1.7 if tf.__version__.startswith("2.18.") else 1.3
_NO_BYTES = ("bitcast", "get-tuple-element", "tuple")  # other names of their operands' bytes


def compiled(model, loss, batch):
    """Returns the optimised program of a model's gradients, as text."""
    x = tf.random.stateless_normal((batch, *model.input_shape[1:]), (1, 2))

    @tf.function(jit_compile=True, autograph=False)
    def gradients(x):
        with tf.GradientTape() as tape:
            value = loss(model(x, training=True))
        return tape.gradient(value, [v.value for v in model.trainable_variables])

    return gradients.experimental_get_compiler_ir(x)(stage="optimized_hlo")


def peak_bytes(program):
    """Returns the most bytes of temporaries and results alive at once in a scheduled program's entry computation."""
    entry = program[program.index("\nENTRY ") :].splitlines()[2:]
    found = []
    for line in entry:
        parts = re.match(r"\s+(?:ROOT )?(%\S+) = (\(.*?\)|\S+) ([\w-]+)\((.*)", line)
        if parts:
            name, shape, kind, rest = parts.groups()
            number = sum(_bytes(*x) for x in re.findall(r"(\w+)\[([\d,]*)\]", shape))
            found.append(
                (name, 0 if kind in (*_NO_BYTES, "parameter", "constant") else number, kind, re.findall(r"%[\w.-]+", rest))
            )
    assert len(found) > 20, program[:500]
    last = {name: i for i, (name, *_) in enumerate(found)}
    for i, (name, _, kind, operands) in reversed(list(enumerate(found))):
        for operand in operands:
            if operand in last:
                last[operand] = max(last[operand], last[name] if kind in _NO_BYTES else i)
    live = np.zeros(len(found), "int64")
    for i, (name, number, *_) in enumerate(found):
        live[i : last[name] + 1] += number
    return int(live.max())


def _bytes(dtype, dimensions):
    return _SIZES.get(dtype, 0) * int(np.prod([int(x) for x in dimensions.split(",") if x], dtype="int64"))


def mlp():
    inputs = x = keras.Input((32,))
    for _ in range(16):
        x = L.Dropout(0.1)(L.Dense(32, activation="gelu")(x))
    return keras.Model(inputs, x)


def convolutions():
    inputs = x = keras.Input((16, 16, 8))
    for _ in range(12):
        x = L.ReLU()(L.BatchNormalization()(L.Conv2D(8, 3, padding="same")(x)))
    return keras.Model(inputs, x)


def attention():
    inputs = x = keras.Input((32, 16))
    for _ in range(9):
        y = L.LayerNormalization()(x)
        x = L.Add()([x, L.MultiHeadAttention(2, 8, dropout=0.1)(y, y)])
    return keras.Model(inputs, x)


LOSSES = {
    "mean": tf.reduce_mean,
    "sum": tf.reduce_sum,  # its gradient is a constant
    "classes": lambda y: tf.reduce_mean(
        keras.losses.sparse_categorical_crossentropy(tf.zeros(tf.shape(y)[:-1], "int32"), y, from_logits=True)
    ),
}


@pytest.mark.parametrize(
    ("build", "batch", "loss"),
    [(mlp, 2048, "mean"), (mlp, 2048, "sum"), (mlp, 2048, "classes"), (convolutions, 16, "sum"), (attention, 16, "mean")],
)
def test_xla_keeps_no_more_than_planned(build, batch, loss):
    model = build()
    applied = tf_ckpt.apply(model, "sqrt", batch_size=batch)
    plan = tf_ckpt.plan_of(applied)
    plain = peak_bytes(compiled(model, LOSSES[loss], batch))
    ours = peak_bytes(compiled(applied, LOSSES[loss], batch))
    assert ours / plain < _ALLOWED * plan.peak_bytes / plan.plain_peak_bytes
