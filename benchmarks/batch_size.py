"""Finds the largest batch that trains in little memory, plain and with "sqrt", and proves both by `fit`.

    python benchmarks/batch_size.py
    python benchmarks/batch_size.py --models transformer --batch-size 2

A device is simulated (`TF_CPU_BFC_MEM_LIMIT_IN_MB`) that the plain model is predicted to train some samples on, and no more.
`tf_ckpt.max_batch_size` then searches for both models. What it found is proved in processes of their own: `fit` trains on
batches of that size, and on one sample more runs out of memory. The exit status is 1 if a proof fails, or if the checkpointed
model's batch is less than a bound times the plain one's. Operations run one at a time: otherwise a peak differs by some
percent from run to run, and so does the last sample that fits.
"""

import os
import sys

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import argparse
import dataclasses
import subprocess
import tempfile
import time

import keras
import tensorflow as tf
from _models import MODELS, PLAIN, positive, report
from rich.table import Table

import tf_ckpt

MIB = 2**20
BOUNDS = {"resnet50": 2.5, "transformer": 4.0}
FULL = 3  # exit status of a run that ran out of memory


def fit(name, plan, batch_size, steps=3):
    """Trains in this process and returns the exit status."""
    tf.config.threading.set_inter_op_parallelism_threads(1)
    workload = dataclasses.replace(MODELS[name], batch_size=batch_size)
    model = workload.build()
    if plan != PLAIN:
        model = tf_ckpt.apply(model, tf_ckpt.Plan.load(plan))
    try:
        model.compile(keras.optimizers.SGD(0.001), workload.loss(), jit_compile=False)
        model.fit(workload.dataset(model, steps), shuffle=False, verbose=0)
    except tf.errors.ResourceExhaustedError:
        return FULL
    return 0


def proved(name, row, mib, folder):
    """Returns what `fit` says to the batch size that was found, and to one more: two exit statuses."""
    plan = PLAIN
    if row.strategy != PLAIN:
        plan = os.path.join(folder, f"{name}.json")
        row.plan.save(plan)
    found = []
    for batch_size in (row.batch_size, row.batch_size + 1):
        command = [sys.executable, __file__, "--run", name, plan, str(batch_size)]
        limited = {**os.environ, "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(mib), "TF_CPP_MIN_LOG_LEVEL": "1"}
        done = subprocess.run(command, env=limited, capture_output=True, text=True)
        # Some kernels end the process when the allocator, which says so, has no memory for them.
        ended = done.returncode < 0 and "ran out of memory" in done.stderr
        found.append(FULL if ended else done.returncode)
    return found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--models", nargs="+", choices=BOUNDS, default=list(BOUNDS), metavar="NAME", help=", ".join(BOUNDS))
    parser.add_argument("--batch-size", type=positive, default=4, metavar="N", help="that the plain model is to train on")
    parser.add_argument("--run", nargs=3, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        return fit(*arguments.run[:2], int(arguments.run[2]))
    tf.config.threading.set_inter_op_parallelism_threads(1)
    table = Table(title="Largest batch in a simulated device's memory, graph mode, proved by fit")
    table.add_column("model", no_wrap=True)
    for heading in (
        "memory MiB",
        "plain",
        "sqrt",
        "ratio",
        "bound",
        "predicted",
        "trials",
        "fit trains",
        "one more",
        "minutes",
    ):
        table.add_column(heading, justify="right")
    missed = []
    for name in arguments.models:
        begun = time.perf_counter()
        workload = MODELS[name]
        model = workload.build()
        model.compile(keras.optimizers.SGD(0.001), workload.loss(), jit_compile=False)
        low, high = (
            tf_ckpt.plan(model, "none", batch_size=arguments.batch_size + more, optimizer="sgd").peak_bytes for more in (0, 1)
        )
        mib = (low + high) // 2 // MIB
        found = tf_ckpt.max_batch_size(model, memory=mib * MIB, strategy="sqrt")
        del model
        with tempfile.TemporaryDirectory() as folder:
            proofs = [proved(name, row, mib, folder) for row in found.rows]
        ratio = found.batch_size / max(found.plain_batch_size, 1)
        trains = [proof[0] == 0 for proof in proofs]
        more = {FULL: "out of memory", 0: "trains"}
        table.add_row(
            name,
            f"{mib:,}",
            f"{found.plain_batch_size}",
            f"{found.batch_size}",
            f"{ratio:.2f}",
            f">= {BOUNDS[name]}",
            " and ".join(f"{row.predicted_batch_size}" for row in found.rows),
            " and ".join(f"{len(row.trials)}" for row in found.rows),
            " and ".join("yes" if x else "no" for x in trains),
            " and ".join(more.get(proof[1], f"exit status {proof[1]}") for proof in proofs),
            f"{(time.perf_counter() - begun) / 60:.1f}",
        )
        if not all(trains):
            missed.append(f"{name}: fit does not train on what was found")
        if proofs[0][1] != FULL:  # what the ratio is measured by must be the most
            missed.append(f"{name}: the plain model trains on more than {found.plain_batch_size}")
        if ratio < BOUNDS[name]:
            missed.append(f"{name}: {ratio:.2f} x the plain model's batch is less than {BOUNDS[name]} x")
    return report(table, missed, 130)


if __name__ == "__main__":
    sys.exit(main())
