"""Counts the FLOPs of one training step, plain and checkpointed, on the graphs after TensorFlow's own optimisation.

    python benchmarks/flops.py
    python benchmarks/flops.py --models densenet121 transformer-1024 --strategies budget-0.5 budget-0.25 selective-0.35

No clock: the figures are the same on every machine. "predicted" is what the plan says before anything has run, "bytes" the
plan's activation bytes as a share of the plain model's. The exit status is 1 if a ratio is above its bound: for "sqrt" 1.34,
one forward run more; for half of the activation bytes ("budget-0.5") 1.10, 1.05 on the Transformer; for a quarter 1.22; for
a "selective" plan that frees more than 60 % at 1,024 tokens 1.08. So it is if no plan comes down to a share.
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

import tf_ckpt

BOUNDS = {"sqrt": 1.34, "budget-0.5": 1.10, "budget-0.25": 1.22}
OWN_BOUNDS = {("transformer", "budget-0.5"): 1.05, ("transformer-1024", "selective-0.35"): 1.08}


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
    for heading in ("bytes", "GFLOPs", "products", "ratio", "predicted", "bound"):
        table.add_column(heading, justify="right")
    missed = []
    for name in arguments.models:
        plain, plain_products, _ = count(name, PLAIN)
        table.add_row(name, PLAIN, "1.00", f"{plain / 1e9:,.2f}", str(plain_products), "1.000", "1.000", "")
        for strategy in arguments.strategies:
            bound = OWN_BOUNDS.get((name, strategy), BOUNDS.get(strategy))
            try:
                flops, number, plan = count(name, strategy)
            except tf_ckpt.CheckpointError as error:
                missed.append(f"{name} with {strategy!r}: {error}")
                continue
            ratio = flops / plain
            if bound is not None and ratio > bound:
                missed.append(f"{name} with {strategy!r}: {ratio:.3f} > {bound}")
            share = plan.activation_bytes / plan.plain_activation_bytes
            figures = (f"{share:.2f}", f"{flops / 1e9:,.2f}", str(number), f"{ratio:.3f}", f"{1 + plan.overhead:.3f}")
            table.add_row("", strategy, *figures, "" if bound is None else f"<= {bound}")
    console = Console(width=120)
    console.print(table)
    for line in missed:
        console.print(f"Bound missed: {line}", markup=False)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
