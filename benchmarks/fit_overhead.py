"""Compares what `MemoryLogger` says in `fit` with the truth: its share of re-runs, and what it costs itself.

    python benchmarks/fit_overhead.py
    python benchmarks/fit_overhead.py --models transformer --rounds 9 --jit-compile

The truth is paired: the plain and the checkpointed model have the same weights and data and take turns, and the net
slowdown (checkpointed - plain) / checkpointed is the median over rounds, of the CPU time of the process, since a machine
that others use stretches wall time. The logger's figure is the share of the step spent in re-runs, from three profiled
steps of a `fit` in the same process. The exit status is 1 if they differ by more than 3 points in graph mode. Under XLA
no bound is checked: fusions differ between the two models, and what the profiler does not see is in neither part.

The logger's cost is what its methods take, in wall time: `fit` with `profile_batches="auto"`, extended to an epoch of 100 steps
of the median time. Waiting for the device is none. The exit status is 1 if it is above 1 % of that epoch.
"""

import os
import sys

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "true")

import json
import statistics
import subprocess
import time

import tensorflow as tf
from _models import MODELS, PLAIN, option_parser, positive, report
from rich.table import Table

import tf_ckpt

BOUND, COST = 0.03, 0.01
WARM_UP = 2


class TimedLogger(tf_ckpt.callbacks.MemoryLogger):
    """Measures its own methods. A profile is stopped within the step, so `fit`'s own steps do not show it."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.batch, self.epoch, self._since = [], 0.0, 0.0

    def on_train_batch_begin(self, batch, logs=None):
        begun = time.perf_counter()
        super().on_train_batch_begin(batch, logs)
        self._since = time.perf_counter() - begun

    def on_train_batch_end(self, batch, logs=None):
        begun = time.perf_counter()
        super().on_train_batch_end(batch, logs)
        self.batch.append(self._since + time.perf_counter() - begun)

    def on_epoch_end(self, epoch, logs=None):
        begun, profiles = time.perf_counter(), self._profiler.cost
        super().on_epoch_end(epoch, logs)
        self.epoch = time.perf_counter() - begun - (self._profiler.cost - profiles)

    def seconds(self, steps):
        """Seconds that an epoch of so many steps spends on this."""
        return steps * statistics.median(self.batch) + self.epoch + self._profiler.cost


def measure(name, strategy, arguments):
    """Returns the figures of one model and strategy, in a process of its own."""
    workload = MODELS[name]
    tf.config.threading.set_intra_op_parallelism_threads(arguments.threads)
    tf.config.threading.set_inter_op_parallelism_threads(arguments.threads)
    plain, _ = workload.compiled(PLAIN, arguments.jit_compile)
    ours, _ = workload.compiled(strategy, arguments.jit_compile)
    ours.set_weights(plain.get_weights())
    batch, shares, walls, steps = workload.batch(plain), [], [], []
    for model in (plain, ours):
        for _ in range(WARM_UP):
            model.train_on_batch(*batch)
    for number in range(arguments.rounds):
        spent = {}
        for model in (plain, ours) if number % 2 else (ours, plain):
            begun, wall = time.process_time(), time.perf_counter()
            model.train_on_batch(*batch)
            spent[model is ours] = time.process_time() - begun, time.perf_counter() - wall
        shares.append(1 - spent[False][0] / spent[True][0])
        walls.append(1 - spent[False][1] / spent[True][1])
        steps.append(spent[True][1])
    data = workload.dataset(ours, WARM_UP + 4)
    measured = tf_ckpt.callbacks.MemoryLogger(profile_batches=3)
    ours.fit(data, verbose=0, callbacks=[measured])
    costs = TimedLogger(log_dir=None)
    ours.fit(workload.dataset(ours, WARM_UP + 4), verbose=0, callbacks=[costs])
    found, step = measured.report(), statistics.median(steps)
    return {
        "net": statistics.median(shares),
        "spread": [min(shares), max(shares)],
        "net_wall": statistics.median(walls),
        "logged": found["recompute_overhead"],
        "source": found["recompute_overhead_source"],
        "coverage": found["recompute_overhead_coverage"],
        "predicted": found["predicted_recompute_overhead"],
        "step": step,
        "profiles": costs.report()["profiled_batches"],
        "cost": costs.seconds(100) / (100 * step),
        "cost_of_profiles": [costs._profiler._stopping, costs._profiler._reading],
        "cost_of_a_batch": statistics.median(costs.batch),
    }


def main():
    parser = option_parser(__doc__.partition("\n")[0], models=("transformer", "resnet50"), strategies=("sqrt",))
    parser.add_argument("--rounds", type=positive, default=7, metavar="N", help="turns of each model")
    parser.add_argument("--jit-compile", action="store_true", help="compile with XLA")
    parser.add_argument("--threads", type=int, choices=range(65), default=0, metavar="N", help="0: one a core")
    parser.add_argument("--run", nargs=2, default=None, help="used by the benchmark itself")
    arguments = parser.parse_args()
    if arguments.run:
        print(json.dumps(measure(*arguments.run, arguments)))
        return 0
    mode = "XLA" if arguments.jit_compile else "graph mode"
    table = Table(title=f"Share of the step in re-runs, and the logger's cost, {mode}")
    table.add_column("model", no_wrap=True)
    headings = (
        "strategy",
        "net, paired",
        "least",
        "most",
        "net, wall",
        "logged",
        "covered",
        "FLOPs",
        "s a step",
        "profiles",
        "cost",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    missed = []
    for name in arguments.models:
        for strategy in arguments.strategies:
            command = [sys.executable, *sys.argv, "--run", name, strategy]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                missed.append(f"{name} with {strategy!r}: exit status {done.returncode}\n{done.stderr[-2000:]}")
                continue
            found = json.loads(done.stdout.splitlines()[-1])
            if not arguments.jit_compile and (found["logged"] is None or abs(found["logged"] - found["net"]) > BOUND):
                missed.append(
                    f"{name} with {strategy!r}: logged {found['logged']} by {found['source']}, net {found['net']:.3f}"
                )
            if found["cost"] > COST:
                missed.append(f"{name} with {strategy!r}: the logger costs {found['cost']:.2%} of an epoch of 100 steps")
            shares = (found["net"], *found["spread"], found["net_wall"], found["logged"], found["coverage"], found["predicted"])
            table.add_row(
                *(name, strategy),
                *("-" if x is None else f"{x:.3f}" for x in shares),
                *(f"{found['step']:.2f}", str(found["profiles"]), f"{found['cost']:.2%}"),
            )
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    table.caption = f"Load at the end: {load:.1f} on {os.cpu_count()} cores, this benchmark included."
    return report(table, missed, 140)


if __name__ == "__main__":
    sys.exit(main())
