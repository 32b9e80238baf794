"""Compares "budget" with the optimum of a mixed-integer program of the same problem.

    python benchmarks/optimality.py
    python benchmarks/optimality.py --models resnet50 --units 12 --seconds 300

Both plan on the same units (a model's calls, merged) with the same bytes and FLOPs; nothing is trained. The program
(`_schedule.py`, solved by scipy's HiGHS) runs units again in stretches that nest, as `tf.recompute_grad` does. Where the
solver has not finished, "optimum" is the bound that it has proven, with "at least". The two columns after the ratio have
more freedom than any `tf.recompute_grad`: in "not nested" stretches may overlap, and let go of what they take before their
backward pass; in "any", as Checkmate has it, single units may run again as well. "budget" may be below the optimum: it also
has the plans of other strategies, whose segments begin and end within units. Both count bytes as the program does: not what a
graph saves beyond, nor the copies that it makes. Budgets go from the least that "budget" can
meet to the plain model's peak. The exit status is 1 if "budget" adds more than 1.02 times a proven optimum.
"""

import os
import sys

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import argparse
import dataclasses
import time

import keras
import numpy as np
from _models import positive, report, resnet50
from _schedule import cheapest
from rich.table import Table

from tf_ckpt import graph
from tf_ckpt.stages import Stages
from tf_ckpt.strategies.budget import budget, least
from tf_ckpt.strategies.units import choose_cuts

MIB = 2**20
BOUND = 1.02
SHARES = (0.05, 0.2, 0.4, 0.6, 0.8)  # of the way from the least budget to the plain model's peak
L, applications = keras.layers, keras.applications


def unet(size=128, depth=3, filters=16):
    """Returns a U-Net with two convolutions at each of `depth + 1` sizes."""

    def block(x, filters):
        for _ in range(2):
            x = L.ReLU()(L.BatchNormalization()(L.Conv2D(filters, 3, padding="same", use_bias=False)(x)))
        return x

    inputs = x = keras.Input((size, size, 3))
    skips = []
    for level in range(depth):
        x = block(x, filters * 2**level)
        skips.append(x)
        x = L.MaxPooling2D()(x)
    x = block(x, filters * 2**depth)
    for level in reversed(range(depth)):
        x = L.Concatenate()([L.UpSampling2D()(x), skips[level]])
        x = block(x, filters * 2**level)
    return keras.Model(inputs, L.Conv2D(2, 1)(x), name="unet")


MODELS = {
    "mobilenet": lambda: applications.MobileNet(weights=None, classifier_activation=None),
    "vgg16": lambda: applications.VGG16(weights=None, classifier_activation=None),
    "vgg19": lambda: applications.VGG19(weights=None, classifier_activation=None),
    "resnet50": resnet50,
    "unet": unet,
}


def shown(solved, step_flops):
    """Returns what the solver has proven, as a share of a step's FLOPs."""
    if solved.infeasible:
        return "infeasible"
    return f"{'' if solved.proven else 'at least '}{solved.bound / step_flops:.2%}"


def compare(name, arguments, table):
    """Adds a model's rows to the table and returns what is missed."""
    keras.utils.clear_session()
    chain = Stages(graph.read(MODELS[name]())).chain(arguments.batch_size)
    chain = dataclasses.replace(chain, graph_mode=False)
    cuts, plain = choose_cuts(chain, arguments.units), chain.peak(())
    lowest = chain.peak(least(chain, limit=arguments.units))
    missed = []
    for number, share in enumerate(arguments.shares):
        memory = lowest + share * (plain - lowest)
        start = time.perf_counter()
        tree = budget(chain, memory, parts=False, limit=arguments.units)
        ours, own_time = chain.added_flops(tree), time.perf_counter() - start
        start = time.perf_counter()
        best, loose, free = (cheapest(chain, cuts, memory, x, arguments.seconds) for x in ("nested", "stretches", "any"))
        solver_time = time.perf_counter() - start
        overhead = ours / best.bound if best.bound else (1.0 if ours == 0 else np.inf)
        if best.proven and overhead > BOUND:
            missed.append(f"{name} at {memory / MIB:,.0f} MiB: {overhead:.4f} times the optimum")
        table.add_row(
            f"{name}, {len(cuts) - 1} units" if number == 0 else "",
            f"{memory / MIB:,.0f}",
            f"{memory / plain:.2f}",
            f"{ours / chain.step_flops:.2%}",
            shown(best, chain.step_flops),
            f"{overhead:.3f}",
            shown(loose, chain.step_flops),
            shown(free, chain.step_flops),
            f"{own_time:.1f}",
            f"{solver_time:.0f}",
        )
    return missed


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--units", type=positive, default=16, metavar="N", help="units that a model is merged to")
    parser.add_argument("--batch-size", type=positive, default=32, metavar="N", help="samples in a step")
    parser.add_argument("--seconds", type=positive, default=60, metavar="N", help="time limit of each solver")
    parser.add_argument(
        "--shares", nargs="+", type=float, default=SHARES, metavar="X", help="budgets, from least (0) to plain (1)"
    )
    arguments = parser.parse_args()
    table = Table(title=f'"budget" against a mixed-integer program, batch {arguments.batch_size}')
    table.add_column("model", no_wrap=True)
    headings = ("MiB", "of plain", '"budget" adds', "optimum", "ratio", "not nested", "any", "seconds", "solvers' seconds")
    for heading in headings:
        table.add_column(heading, justify="right")
    missed = []
    for name in arguments.models:
        missed += compare(name, arguments, table)
    return report(table, missed, 128)


if __name__ == "__main__":
    sys.exit(main())
