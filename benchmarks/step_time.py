"""Times training steps, plain and checkpointed, by the CPU time of the process.

    python benchmarks/step_time.py
    python benchmarks/step_time.py --models resnet50 --strategies sqrt selective full --rounds 9 --jit-compile

All models of a row live in one process, have the same weights and data, and take turns: a machine that is shared, or
slows down when it is warm, slows all of them. The ratio is the median over rounds of a strategy's time to plain's in the
same round, with the least and the most beside it. Kernels run on one thread, as idle threads spin and count as CPU time.
Environment: with TF_CPU_ALLOCATOR_USE_BFC=true memory is not returned to the system, which makes plain steps cheaper.
"""

import os
import sys

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import gc
import statistics
import time

import keras
import tensorflow as tf
from _models import MODELS, PLAIN, option_parser, positive
from rich.console import Console
from rich.table import Table

WARM_UP = 2  # the first step traces, the second may still plan memory


class Contestant:
    """A model that takes its turns."""

    def __init__(self, workload, strategy, jit_compile, weights=None):
        self.model, self.plan = workload.compiled(strategy, jit_compile)
        if weights is not None:
            self.model.set_weights(weights)
        self.seconds = []

    def warm_up(self, batch):
        for _ in range(WARM_UP):
            self.model.train_on_batch(*batch)

    def turn(self, batch, steps):
        begun = time.process_time()
        for _ in range(steps):
            self.model.train_on_batch(*batch)  # waits for the step: it returns the loss as a number
        self.seconds.append((time.process_time() - begun) / steps)


def compete(name, arguments):
    """Returns the contestants of one model, plain first, with their CPU seconds a step for each round."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    gc.collect()
    workload = MODELS[name]
    plain = Contestant(workload, PLAIN, arguments.jit_compile)
    weights, batch = plain.model.get_weights(), workload.batch(plain.model)
    contestants = {PLAIN: plain}
    for strategy in arguments.strategies:
        contestants[strategy] = Contestant(workload, strategy, arguments.jit_compile, weights)
    for contestant in contestants.values():
        contestant.warm_up(batch)
    order = list(contestants.values())
    for _ in range(arguments.rounds):
        for contestant in order:
            contestant.turn(batch, arguments.steps)
        order = [*order[1:], order[0]]  # nobody always runs first
    return contestants


def main():
    parser = option_parser(__doc__.partition("\n")[0], models=("transformer", "resnet50"), strategies=("sqrt",))
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="turns of each model")
    parser.add_argument("--steps", type=positive, default=1, metavar="N", help="steps in a turn")
    parser.add_argument("--jit-compile", action="store_true", help="compile with XLA")
    parser.add_argument("--threads", type=positive, default=1, metavar="N", help="threads of a kernel")
    arguments = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(arguments.threads)
    mode = "XLA" if arguments.jit_compile else "graph mode"
    bfc = os.environ.get("TF_CPU_ALLOCATOR_USE_BFC", "").lower() in ("1", "true")
    table = Table(title=f"CPU time of a training step, {mode}, {'BFC' if bfc else 'default'} allocator")
    for heading in ("model", "strategy"):
        table.add_column(heading, no_wrap=True)
    for heading in ("CPU s a step", "ratio", "least", "most", "predicted"):
        table.add_column(heading, justify="right")
    for name in arguments.models:
        contestants = compete(name, arguments)
        plain = contestants[PLAIN].seconds
        for strategy, contestant in contestants.items():
            ratios = [mine / theirs for mine, theirs in zip(contestant.seconds, plain, strict=True)]
            figures = (statistics.median(ratios), min(ratios), max(ratios), 1 + contestant.plan.overhead)
            table.add_row(
                name if strategy == PLAIN else "",
                strategy,
                f"{statistics.median(contestant.seconds):.2f}",
                *(f"{x:.2f}" for x in figures),
            )
    console = Console(width=120)
    console.print(table)
    load = f"{os.getloadavg()[0]:.1f} processes on {os.cpu_count()} cores" if hasattr(os, "getloadavg") else "unknown"
    console.print(
        f"Load of the machine at the end: {load}, this one included. On a machine that others use, ratios that are closer "
        "than `least` and `most` are the same; `python benchmarks/flops.py` has the figures without noise."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
