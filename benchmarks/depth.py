"""How activation memory grows with depth, by strategy: like sqrt(n) with "sqrt", like log n with "recursive".

    python benchmarks/depth.py
    python benchmarks/depth.py --measured 16 32 64 128 --plot depth.png

A model of n equal layers is planned for n = 16 ... 1024. "predicted" is what the plan says before anything has run;
"measured" is the peak of a step by the allocator's own statistics, each model in a process of its own. Then Chen et al.'s
1,000-layer residual network (https://arxiv.org/abs/1604.06174: 48 GB to under 7 GB) is planned, not run.
"""

import os
import sys

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"  # read by TensorFlow at import: the CPU counts as a GPU does

import argparse
import json
import subprocess
import time

import keras
import numpy as np
import tensorflow as tf
from _models import deep_mlp, positive
from peak_memory import StepMemory
from rich.console import Console
from rich.table import Table

import tf_ckpt
from tf_ckpt import graph
from tf_ckpt.stages import Stages
from tf_ckpt.strategies import sqrt
from tf_ckpt.strategies.budget import budget
from tf_ckpt.strategies.recursive import recursive
from tf_ckpt.strategies.tree import depth, tree_of, walk

MIB, GB = 2**20, 1e9
STRATEGIES = {"sqrt": sqrt, "recursive": recursive}
WIDTH, BATCH = 16, 16384  # so narrow that weights and their gradients hardly count: activations are what grows
L = keras.layers
sys.setrecursionlimit(100_000)  # Keras walks a model's layers by recursion


def equal_layers(n):
    """Returns a model of `n` Dense layers with gelu."""
    return deep_mlp(n, WIDTH)


def residual_network(blocks=83, size=224, classes=1000):
    """Returns Chen et al.'s network: pre-activation bottleneck blocks, `blocks` at each of four sizes, three layers each."""
    inputs = keras.Input((size, size, 3))
    x = L.Conv2D(64, 7, strides=2, padding="same", use_bias=False, kernel_initializer="zeros")(inputs)
    x = L.MaxPooling2D(3, strides=2, padding="same")(x)

    def convolution(x, filters, kernel, strides=1):
        x = L.ReLU()(L.BatchNormalization()(x))
        return L.Conv2D(filters, kernel, strides, "same", use_bias=False, kernel_initializer="zeros")(x)

    for filters in (64, 128, 256, 512):
        for number in range(blocks):
            strides = 2 if number == 0 and filters > 64 else 1
            y = convolution(x, filters, 1)
            y = convolution(y, filters, 3, strides)
            y = convolution(y, 4 * filters, 1)
            x = x if number else convolution(x, 4 * filters, 1, strides)
            x = L.Add()([x, y])
    x = L.GlobalAveragePooling2D()(L.ReLU()(L.BatchNormalization()(x)))
    return keras.Model(inputs, L.Dense(classes, kernel_initializer="zeros")(x), name="residual")


def chain_of(model, batch_size):
    return Stages(graph.read(model)).chain(batch_size)


def measure(n, strategy):
    """Trains for three steps and returns the bytes that the worst one needs, in a process of its own."""
    keras.utils.set_random_seed(0)
    model = equal_layers(n)
    if strategy != "plain":
        model = tf_ckpt.apply(model, STRATEGIES[strategy], batch_size=BATCH)
    model.compile(keras.optimizers.SGD(0.001), "mse", jit_compile=False)
    data = tf.data.Dataset.from_tensors((tf.zeros((BATCH, WIDTH)), tf.ones((BATCH, WIDTH)))).repeat(3)
    memory = StepMemory()
    model.fit(data, verbose=0, shuffle=False, callbacks=[memory])
    return max(memory.peaks) - min(memory.baselines)


def measured(n, strategy):
    command = [sys.executable, __file__, "--run", str(n), strategy]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{n} layers, {strategy}: exit status {done.returncode}\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def exponent(sizes, values):
    """Returns p of the best fit c * n**p."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def log_fit(sizes, values):
    """Returns (bytes for each doubling, share of the variance that a line in log n leaves unexplained)."""
    slope, base = np.polyfit(np.log2(sizes), values, 1)
    left = np.asarray(values) - base - slope * np.log2(sizes)
    return float(slope), float((left**2).sum() / ((values - np.mean(values)) ** 2).sum())


def growth(layers, measured_layers, console):
    """Prints the table of equal layers and returns `{strategy: (layers, predicted bytes, {n: measured bytes})}`."""
    table = Table(title=f"{WIDTH}-wide Dense layers with gelu, batch {BATCH:,}: peak of a step in MiB")
    for heading in ("n", "strategy", "predicted", "measured", "ratio", "segments", "levels", "forward runs added", "seconds"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    found = {name: (layers, [], {}) for name in ("plain", *STRATEGIES)}
    for n in layers:
        chain = chain_of(equal_layers(n), BATCH)
        for name, (_, predicted, real) in found.items():
            start = time.perf_counter()
            tree = tree_of(STRATEGIES[name](chain)) if name in STRATEGIES else ()
            seconds = time.perf_counter() - start
            predicted.append(chain.peak(tree))
            if n in measured_layers:
                real[n] = measured(n, name)
            got = real.get(n)
            table.add_row(
                str(n) if name == "plain" else "",
                name,
                f"{predicted[-1] / MIB:,.1f}",
                "" if got is None else f"{got / MIB:,.1f}",
                "" if got is None else f"{got / predicted[-1]:.3f}",
                str(len(list(walk(tree)))),
                str(depth(tree)),
                f"{chain.added_flops(tree) / chain.flops.sum():.2f}",
                f"{seconds:.2f}",
            )
        keras.utils.clear_session()
    console.print(table)
    return found


def exponents(found, console):
    """Prints how memory grows with each strategy, and returns what is missed."""
    table = Table(title="Growth: peak ~ n^p, and ~ a + b log2 n")
    for heading in ("strategy", "p predicted", "p measured", "b, MiB a doubling", "unexplained by log n"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    missed = []
    for name, (layers, predicted, real) in found.items():
        power, (slope, left) = exponent(layers, predicted), log_fit(layers, np.array(predicted))
        sizes = [n for n, value in real.items() if value]
        measured_power = exponent(sizes, [real[n] for n in sizes]) if len(sizes) > 2 else None
        shown = "" if measured_power is None else f"{measured_power:.2f}"
        table.add_row(name, f"{power:.2f}", shown, f"{slope / MIB:,.2f}", f"{left:.3f}")
        low, high = {"plain": (0.95, 1.05), "sqrt": (0.4, 0.6), "recursive": (0.0, 0.3)}[name]
        if not low <= power <= high:
            missed.append(f"{name}: predicted exponent {power:.2f} is not within {low} ... {high}")
        if measured_power is not None and measured_power > high:
            missed.append(f"{name}: measured exponent {measured_power:.2f} is above {high}")
    console.print(table)
    return missed


def plot(found, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for (name, (layers, predicted, real)), color in zip(found.items(), ("tab:gray", "tab:blue", "tab:orange"), strict=True):
        power = exponent(layers, predicted)
        axes.loglog(layers, np.array(predicted) / MIB, "-o", color=color, ms=3, label=f"{name}, predicted: n^{power:.2f}")
        points = {n: value for n, value in real.items() if value}
        axes.loglog(list(points), [v / MIB for v in points.values()], "x", color=color, ms=8, label=f"{name}, measured")
    axes.set(xlabel="equal layers n", ylabel="peak of a step, MiB", title="Activation memory against depth")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def thousand_layers(blocks, console):
    """Prints what the residual network needs, plain and planned."""
    start = time.perf_counter()
    model = residual_network(blocks)
    built = time.perf_counter() - start
    chain = chain_of(model, 32)
    traced = time.perf_counter() - start - built
    weights = chain.weights.sum()
    table = Table(
        title=f"Residual network of {12 * blocks + 2:,} layers ({len(chain):,} calls), 224 x 224, batch 32",
        caption=f"{weights / GB:.1f} GB are weight gradients. Building took {built:.0f} s, tracing costs {traced:.0f} s.",
    )
    for heading in ("strategy", "peak GB", "without weight gradients", "share of plain", "added FLOPs", "levels", "seconds"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    plain = chain.peak(())
    plans = {"plain": lambda: (), "sqrt": lambda: sqrt(chain), "recursive": lambda: recursive(chain)}
    peaks = {}

    def row(name, make):
        start = time.perf_counter()
        tree = make()
        seconds = time.perf_counter() - start
        if tree is None:
            table.add_row(name, "does not fit", "", "", "", "", f"{seconds:.1f}")
            return
        tree = tree_of(tree)
        peaks[name] = chain.peak(tree)
        table.add_row(
            name,
            f"{peaks[name] / GB:,.2f}",
            f"{max(peaks[name] - weights, 0) / GB:,.2f}",
            f"{peaks[name] / plain:.3f}",
            f"{chain.added_flops(tree) / chain.step_flops:.1%}",
            str(depth(tree)),
            f"{seconds:.1f}",
        )

    for name, make in plans.items():
        row(name, make)
    # The same memory as "sqrt" for fewer re-runs, and Chen et al.'s figure.
    row("budget, as sqrt", lambda: budget(chain, peaks["sqrt"]))
    row("budget, 7 GB", lambda: budget(chain, 7 * GB))
    console.print(table)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    powers = [2**k for k in range(4, 11)]
    parser.add_argument("--layers", nargs="+", type=positive, default=powers, metavar="N", help="depths that are planned")
    parser.add_argument("--measured", nargs="*", type=positive, default=powers[:4], metavar="N", help="those that are run too")
    parser.add_argument("--blocks", type=positive, default=83, metavar="N", help="blocks a size of the residual network")
    parser.add_argument("--no-residual", action="store_true", help="leave the residual network out")
    parser.add_argument("--plot", metavar="FILE", help="draw memory against depth")
    parser.add_argument("--run", nargs=2, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        print(json.dumps(measure(int(arguments.run[0]), arguments.run[1])))
        return 0
    console = Console(width=120)
    found = growth(sorted(set(arguments.layers)), arguments.measured, console)
    missed = []
    if len(set(arguments.layers)) > 2:  # fewer do not say how memory grows
        missed = exponents(found, console)
        if arguments.plot:
            plot(found, arguments.plot)
    if not arguments.no_residual:
        thousand_layers(arguments.blocks, console)
    for line in missed:
        console.print(f"Missed: {line}", markup=False)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
