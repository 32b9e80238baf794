"""Times planning on a deep model, beside the trace of its training step, and says what merging stages costs.

    python benchmarks/planning_time.py
    python benchmarks/planning_time.py --calls 2000 --limits 60 120 240

The model is a residual network of about `--calls` calls of layers with random widths, so that few of them are alike. "costs"
is the trace of each kind of call; "table" the dynamic program of "budget" alone; then each strategy as a user calls it, costs
known. A chain with more than 120 units is merged before the dynamic program: the second table shows the overhead that
"budget" finds at half of the memory, and the seconds it takes, for several limits. All in process CPU time. The exit
status is 1 if costs and the slowest strategy together take 10 s for each 1,000 calls or more, or the table 3 s.
"""

import os
import sys

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import argparse
import time

import keras
import numpy as np
import tensorflow as tf
from _models import positive, report
from rich.console import Console
from rich.table import Table

import tf_ckpt
from tf_ckpt import graph
from tf_ckpt.stages import Stages
from tf_ckpt.strategies.budget import LIMIT, budget, frontier

BATCH = 32
ALL, TABLE = 10.0, 3.0  # seconds for each 1,000 calls; seconds
L = keras.layers
sys.setrecursionlimit(100_000)  # Keras walks a model's layers by recursion


def residual(calls):
    """Returns a residual network with about that many calls: seven in a block, each block with inner widths of its own."""
    numbers = np.random.default_rng(0)
    inputs = keras.Input((16, 16, 8))
    x = L.Conv2D(16, 3, padding="same")(inputs)
    for _ in range(max((calls - 3) // 7, 1)):
        y = L.ReLU()(L.BatchNormalization()(x))
        y = L.Conv2D(int(numbers.integers(8, 33)), 3, padding="same", use_bias=False)(y)
        y = L.ReLU()(L.BatchNormalization()(y))
        x = L.Add()([x, L.Conv2D(16, 3, padding="same", use_bias=False)(y)])
    return keras.Model(inputs, L.Dense(10)(L.GlobalAveragePooling2D()(x)))


def seconds(function):
    """Returns what a function returns, and the process CPU seconds that it took."""
    begun = time.process_time()
    result = function()
    return result, time.process_time() - begun


def traced(model):
    """Traces loss and gradients, as the first batch of `fit` does."""

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True)))
        return tape.gradient(loss, model.trainable_variables)

    return step.get_concrete_function(tf.TensorSpec((BATCH, 16, 16, 8)))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--calls", type=positive, default=1000, metavar="N", help="calls of layers, about")
    parser.add_argument("--limits", type=positive, nargs="*", default=[30, 60, LIMIT, 240], metavar="N", help="units")
    arguments = parser.parse_args()
    model = residual(arguments.calls)
    chain, costs = seconds(lambda: Stages(graph.read(model)).chain(BATCH))
    table, missed = Table(title=f"{len(chain):,} calls"), []
    table.add_column("what")
    table.add_column("CPU seconds", justify="right")
    table.add_row("costs", f"{costs:.2f}")
    _, own = seconds(lambda: frontier(chain))
    table.add_row("table", f"{own:.2f}")
    if own > TABLE:
        missed.append(f"the dynamic program took {own:.2f} s, bound {TABLE:.0f} s")
    slowest = 0.0
    for strategy, options in (("sqrt", {}), ("selective", {}), ("full", {}), ("recursive", {}), ("budget", {"memory": 0.5})):
        _, took = seconds(lambda s=strategy, o=options: tf_ckpt.apply(model, s, batch_size=BATCH, **o))
        slowest = max(slowest, took)
        table.add_row(f"apply(model, {strategy!r})", f"{took:.2f}")
    bound = ALL * max(len(chain) / 1000, 1)
    if costs + slowest > bound:
        missed.append(f"costs and the slowest strategy took {costs + slowest:.2f} s, bound {bound:.1f} s")
    _, trace = seconds(lambda: traced(model))
    table.add_row("trace of the plain forward and backward pass", f"{trace:.2f}")
    merged = Table(title="Overhead at half of the plain peak, by units")
    for heading in ("units at most", "overhead", "CPU seconds"):
        merged.add_column(heading, justify="right")
    memory = chain.peak(()) / 2
    for limit in arguments.limits:
        tree, took = seconds(lambda n=limit: budget(chain, memory, limit=n))
        shown = "none fits" if tree is None else f"{chain.added_flops(tree) / chain.step_flops:.2%}"
        merged.add_row(str(limit), shown, f"{took:.2f}")
    Console(width=100).print(merged)
    return report(table, missed, 100)


if __name__ == "__main__":
    sys.exit(main())
