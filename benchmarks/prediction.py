"""Compares the peak that plans predict with the peak that is measured, and budgets with what they are kept to.

    python benchmarks/prediction.py
    python benchmarks/prediction.py --models resnet50 --strategies sqrt --budgets 8

Each run is a fresh process that trains two steps through `fit` in graph mode, then one more under TensorFlow's profiler, which
tells each request to the allocator. Two peaks above what is there between steps (weights, data) are shown: "asked for", the
sum of what is requested and not yet given back, and "in use", the chunks that the allocator has handed out for that. It
hands out chunks of up to twice the size that is asked for, and which depends on the history of the process: the same run in
another process is up to a tenth off. So predictions are compared with both: "of tensors" is the simulated step without
what an allocator loses, "predicted" what the plan says.

A kernel's workspace is no tensor, and no plan can know it. TensorFlow's own convolutions on a CPU take one of the size of the
machine's cache. So oneDNN's are used on every machine, as TensorFlow itself does where a CPU has AVX-512; with
`TF_ENABLE_ONEDNN_OPTS=0` it is seen.

With `--budgets N`, N budgets a model go from the least that is feasible to the plain model's peak. The exit status is 1 if a
prediction "of tensors" is more than 5 % off, or a budget is exceeded by more than 2 %.
"""

import os
import sys

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"  # read by TensorFlow at import: the CPU counts as a GPU does
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")  # the same

import argparse
import glob
import json
import re
import subprocess
import tempfile

import keras
import tensorflow as tf
from _models import MODELS, PLAIN, STRATEGIES, option_parser, report
from rich.table import Table

import tf_ckpt
from tf_ckpt import tf_internals
from tf_ckpt.budgets import gradients_wait
from tf_ckpt.graph import read
from tf_ckpt.stages import Stages

MIB = 2**20
DEFAULT = ("resnet50", "densenet121", "mobilenetv2", "unet", "transformer", "transformer-1024")
NEAR, ABOVE = 0.05, 0.02


def allocations(folder):
    """Returns the requests to the CPU's or GPU's allocator in a profile: (time, name, {statistic: value}), in order."""
    (path,) = glob.glob(f"{folder}/plugins/profile/*/*.xplane.pb")
    with open(path, "rb") as file:
        space = tf_internals.profile(file.read())
    found = []
    for plane in space.planes:
        names = {number: x.name for number, x in plane.event_metadata.items()}
        statistics = {number: x.name for number, x in plane.stat_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                name = names[event.metadata_id]
                if name in ("MemoryAllocation", "MemoryDeallocation"):
                    values = {statistics[s.metadata_id]: getattr(s, s.WhichOneof("value")) for s in event.stats}
                    found.append((line.timestamp_ns * 1000 + event.offset_ps, name, values))
    return sorted(found, key=lambda x: x[0])


def train(name, strategy, memory):
    """One run, in a process of its own."""
    tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(0)
    work = MODELS[name]
    if memory:
        model = work.build()
        plan = tf_ckpt.plan(model, "budget", memory=memory, batch_size=work.batch_size, optimizer="sgd")
        model = tf_ckpt.apply(model, plan)
        model.compile(keras.optimizers.SGD(0.001), work.loss(), jit_compile=False)
    else:
        model, plan = work.compiled(strategy)
    data = work.dataset(model, 1)
    for _ in range(2):
        model.fit(data, shuffle=False, verbose=0)
    device = "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"
    before = tf.config.experimental.get_memory_info(device)["current"]
    with tempfile.TemporaryDirectory() as folder:
        with tf.profiler.experimental.Profile(folder):
            model.fit(data, shuffle=False, verbose=0)
        asked = most = used = 0
        for _, kind, values in allocations(folder):
            asked += values["requested_bytes"] * (1 if kind == "MemoryAllocation" else -1)
            most, used = max(most, asked), max(used, values["bytes_allocated"] - before)
    chain = Stages(read(model)).chain(work.batch_size, gradients_wait=gradients_wait(model))
    return {
        "asked": most,
        "used": used,
        "tensors": chain.peak(plan.ranges()),
        "predicted": plan.activation_bytes,
        "overhead": plan.overhead,
        "held": plan.weight_bytes + plan.optimizer_bytes,
    }


def run(name, strategy, memory=0):
    """Makes a run in a fresh process and returns what it found, or the error's last line."""
    command = [sys.executable, __file__, "--run", name, strategy, str(memory)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    return json.loads(done.stdout.splitlines()[-1])


def least_budget(name):
    """Returns the least memory that the error of a budget that is too small names, in bytes."""
    work = MODELS[name]
    try:
        tf_ckpt.plan(work.build(), "budget", memory=1, batch_size=work.batch_size, optimizer="sgd")
    except tf_ckpt.CheckpointError as error:
        return int(float(re.search(r"is ([0-9,.]+) MiB", str(error))[1].replace(",", "")) * MIB)
    raise RuntimeError(f"one byte is enough for {name}")


def add_row(table, missed, name, label, result, memory=0):
    if isinstance(result, str):
        missed.append(f"{name} with {label}: {result}")
        return
    off = result["tensors"] / result["asked"] - 1
    if abs(off) > NEAR:
        missed.append(f"{name} with {label}: the tensors' peak is predicted {off:+.1%} off")
    above = (result["used"] + result["held"]) / memory - 1 if memory else None
    if memory and above > ABOVE:
        missed.append(f"{name} with {label}: {above:.1%} above the budget")
    table.add_row(
        name,
        label,
        f"{result['asked'] / MIB:,.1f}",
        f"{result['tensors'] / MIB:,.1f}",
        f"{off:+.1%}",
        f"{result['used'] / MIB:,.1f}",
        f"{result['predicted'] / MIB:,.1f}",
        f"{result['predicted'] / result['used'] - 1:+.1%}",
        "" if above is None else f"{above:+.1%}",
        f"{result['overhead']:.1%}",
    )


def main():
    parser = option_parser(__doc__.partition("\n")[0], DEFAULT, [x for x in STRATEGIES if x[-1].isalpha()])
    parser.add_argument("--budgets", type=int, default=0, metavar="N", help="budgets of each model")
    parser.add_argument("--run", nargs=3, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        print(json.dumps(train(*arguments.run[:2], int(arguments.run[2]))))
        return 0
    table, missed = Table(title="Peak above the baseline in MiB, graph mode, after the first steps"), []
    for heading in ("model", "strategy"):
        table.add_column(heading, no_wrap=True)
    headings = ("asked for", "of tensors", "off", "in use", "predicted", "off", "above budget", "overhead predicted")
    for heading in headings:
        table.add_column(heading, justify="right")
    for name in arguments.models:
        for strategy in (PLAIN, *arguments.strategies):
            add_row(table, missed, name, strategy, run(name, strategy))
        if arguments.budgets:
            work = MODELS[name]
            low = least_budget(name)
            high = tf_ckpt.plan(work.build(), "none", batch_size=work.batch_size, optimizer="sgd").plain_peak_bytes
            for number in range(arguments.budgets):
                memory = low + round((high - low) * number / max(arguments.budgets - 1, 1))
                add_row(table, missed, name, f"budget {memory / MIB:,.0f}", run(name, "budget", memory), memory)
    return report(table, missed, 132)


if __name__ == "__main__":
    sys.exit(main())
