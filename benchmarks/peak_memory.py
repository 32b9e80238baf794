"""Measures the peak memory of training through `fit`, plain and checkpointed, with the allocator's own statistics.

    python benchmarks/peak_memory.py
    python benchmarks/peak_memory.py --models transformer --strategies sqrt --jit-compile

Each run is a fresh process. Its peak is the most that a step holds above what is held between steps (weights, data),
the first step apart, which traces. "predicted" is what the plan says before anything has run: activations and weight
gradients. The exit status is 1 if a bound is missed; bounds are for graph mode.

Losses are compared to the bit. In large models TensorFlow's memory optimiser makes sums of three or more gradients near the
peak that it expects add up as they happen to be ready; the peak is another one with recompute, so it picks other sums.
Where losses differ, both models are trained again without that optimiser ("same sums"), and are to be equal then. Peaks are
those of the runs with it, as users have.
"""

import os
import sys

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"  # read by TensorFlow at import: the CPU counts as a GPU does

import argparse
import functools
import json
import subprocess

import keras
import tensorflow as tf
from _models import MODELS, PLAIN, option_parser, positive, report
from rich.table import Table

from tf_ckpt import tf_internals

MIB = 2**20


class StepMemory(keras.callbacks.Callback):
    """Reads the allocator around each step but the first."""

    def __init__(self):
        super().__init__()
        self.baselines, self.peaks, self.losses = [], [], []

    def on_train_batch_begin(self, batch, logs=None):
        tf.test.experimental.sync_devices()
        tf.config.experimental.reset_memory_stats(device())
        self._baseline = tf.config.experimental.get_memory_info(device())["current"]

    def on_train_batch_end(self, batch, logs=None):
        tf.test.experimental.sync_devices()
        self.losses.append(float(logs["loss"]))
        if batch:
            self.baselines.append(self._baseline)
            self.peaks.append(tf.config.experimental.get_memory_info(device())["peak"])


def device():
    return "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"


def train(arguments):
    """One run, in a process of its own."""
    name, strategy = arguments.run
    tf.config.threading.set_inter_op_parallelism_threads(arguments.inter_op_threads)
    if arguments.same_sums:
        tf_internals.switch_memory_optimizer_off()
    if not arguments.jit_compile:  # Keras does not compile with XLA where determinism is asked for
        tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(0)
    model, plan = MODELS[name].compiled(strategy, arguments.jit_compile)
    memory = StepMemory()
    model.fit(MODELS[name].dataset(model, arguments.steps), shuffle=False, verbose=0, callbacks=[memory])
    return {
        "peak": max(memory.peaks) - min(memory.baselines),
        "predicted": plan.activation_bytes,
        "losses": memory.losses,
    }


@functools.cache
def run(name, strategy, same_sums=False):
    """Makes a run in a fresh process and returns what it found, or None if it failed."""
    command = [sys.executable, *sys.argv, "--run", name, strategy, *(["--same-sums"] if same_sums else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{name}, {strategy}: exit status {done.returncode}\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def equality(name, strategy, jit_compile):
    """Returns whether a strategy's losses are those of the plain model: "yes", "same sums" or "no"."""
    # XLA orders operations itself, and fuses otherwise where there is recompute: its losses may round otherwise.
    for same_sums in (False,) if jit_compile else (False, True):
        plain, ours = run(name, PLAIN, same_sums), run(name, strategy, same_sums)
        if plain and ours and plain["losses"] == ours["losses"]:
            return "same sums" if same_sums else "yes"
    return "no"


def main():
    parser = option_parser(__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=positive, default=3, metavar="N", help="steps in a run, at least 2")
    parser.add_argument("--jit-compile", action="store_true", help="compile with XLA")
    parser.add_argument(
        "--inter-op-threads",
        type=int,
        choices=range(65),
        default=0,
        metavar="N",
        help="operations that may run in parallel; 0 stands for as many as there are cores",
    )
    parser.add_argument("--same-sums", action="store_true", help="train without TensorFlow's memory optimiser only")
    parser.add_argument("--run", nargs=2, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error(f"argument --steps: the first step is left out, so 2 is the least. Received: {arguments.steps}")
    if arguments.run:
        print(json.dumps(train(arguments)))
        return 0
    mode = "XLA" if arguments.jit_compile else "graph mode"
    table = Table(title=f"Peak above the baseline, after the first step, {mode}")
    for heading in ("model", "strategy"):
        table.add_column(heading, no_wrap=True)
    loss = f"mean loss, {arguments.steps} steps"
    for heading in ("peak MiB", "peak MB", "ratio", "bound", "predicted MiB", loss, "losses equal"):
        table.add_column(heading, justify="right")
    missed = []
    for name in arguments.models:
        plain = run(name, PLAIN, arguments.same_sums)
        for strategy in (PLAIN, *arguments.strategies):
            result = run(name, strategy, arguments.same_sums)
            if result is None or plain is None:
                missed.append(f"{name} with {strategy!r}: the run failed")
                continue
            ratio, equal = result["peak"] / plain["peak"], equality(name, strategy, arguments.jit_compile)
            bound = None if arguments.jit_compile else MODELS[name].bounds.get(strategy)
            if bound is not None and ratio > bound:
                missed.append(f"{name} with {strategy!r}: ratio {ratio:.3f} > {bound}")
            if equal == "no" and not arguments.jit_compile:
                missed.append(f"{name} with {strategy!r}: losses differ, {result['losses']} and plain's {plain['losses']}")
            table.add_row(
                name if strategy == PLAIN else "",
                strategy,
                f"{result['peak'] / MIB:,.1f}",
                f"{result['peak'] / 1e6:,.1f}",
                f"{ratio:.3f}",
                "" if bound is None else f"<= {bound}",
                f"{result['predicted'] / MIB:,.1f}",
                f"{result['losses'][-1]:.7f}",
                equal,
            )
    return report(table, missed, 120)


if __name__ == "__main__":
    sys.exit(main())
