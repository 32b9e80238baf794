"""Counts the FLOPs of one training step, plain and checkpointed, on the graphs after TensorFlow's own optimisation.

    python benchmarks/flops.py
    python benchmarks/flops.py --models transformer --strategies sqrt full

No clock: the figures are the same on every machine. "predicted" is what the plan says before anything has run. The exit
status is 1 if "sqrt" costs more than 1.34 times the plain step: one forward run more.
"""

import os
import sys

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import gc

import keras
from _graphs import executed_operations, products, total_flops
from _models import MODELS, PLAIN, option_parser
from rich.console import Console
from rich.table import Table

BOUNDS = {"sqrt": 1.34}


def count(name, strategy):
    """Returns the FLOPs and the number of products of one training step through `fit`, and the plan."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    gc.collect()
    model, plan = MODELS[name].compiled(strategy)
    data = MODELS[name].dataset(model, 1)
    operations = executed_operations(lambda: model.fit(data, verbose=0, shuffle=False))
    return total_flops(operations), len(products(operations)), plan


def main():
    # A batch more or less changes both sides alike: one ResNet50 is enough.
    parser = option_parser(__doc__.partition("\n")[0], models=("mlp", "transformer", "resnet50-b16"))
    arguments = parser.parse_args()
    table = Table(title="One training step, graph mode, after optimisation")
    for heading in ("model", "strategy"):
        table.add_column(heading, no_wrap=True)
    for heading in ("GFLOPs", "products", "ratio", "predicted", "bound"):
        table.add_column(heading, justify="right")
    missed = []
    for name in arguments.models:
        plain, plain_products, _ = count(name, PLAIN)
        table.add_row(name, PLAIN, f"{plain / 1e9:,.2f}", str(plain_products), "1.000", "1.000", "")
        for strategy in arguments.strategies:
            flops, number, plan = count(name, strategy)
            ratio, bound = flops / plain, BOUNDS.get(strategy)
            if bound is not None and ratio > bound:
                missed.append(f"{name} with {strategy!r}: {ratio:.3f} > {bound}")
            figures = (f"{flops / 1e9:,.2f}", str(number), f"{ratio:.3f}", f"{1 + plan.overhead:.3f}")
            table.add_row("", strategy, *figures, "" if bound is None else f"<= {bound}")
    console = Console(width=120)
    console.print(table)
    for line in missed:
        console.print(f"Bound missed: {line}", markup=False)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
