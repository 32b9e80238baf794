"""What the examples share: the options, one fresh process for each run, and the table.

Each run is a process of its own. Neither finds memory, traces or random state that the other left, and a device that is
full takes nothing else down with it.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import keras
import tensorflow as tf
from rich.console import Console
from rich.table import Table

import tf_ckpt
from tf_ckpt import tf_internals

PLAIN, CHECKPOINTED = "plain", "checkpointed"
OUT_OF_MEMORY = "out of memory"


def positive(text):
    """The type of an option that counts something."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a positive whole number. Received: {text!r}")
    return value


def option_parser(description, limit_mib, batch_size, steps):
    """The options that all examples have. `limit_mib` is one at which, with the defaults, only the plain run fails."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--batch-size", type=positive, default=batch_size, metavar="N", help="samples in a step")
    parser.add_argument("--steps", type=positive, default=steps, metavar="N", help="steps in an epoch")
    parser.add_argument("--epochs", type=positive, default=1, metavar="N", help="epochs to train")
    parser.add_argument(
        "--strategy", choices=("sqrt", "selective", "full", "none"), default="sqrt", help="of the checkpointed run"
    )
    parser.add_argument("--jit-compile", action="store_true", help="compile both runs with XLA")
    parser.add_argument("--seed", type=positive, default=1, metavar="N", help="of weights, batches and dropout")
    parser.add_argument(
        "--memory-limit-mib",
        type=positive,
        default=None,
        metavar="N",
        help=f"simulate a device of N MiB (on the CPU, GPUs are hidden): with the defaults and N={limit_mib} the plain "
        "model is out of memory and the checkpointed one trains",
    )
    parser.add_argument("--run", choices=(PLAIN, CHECKPOINTED), default=None, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, default=None, help=argparse.SUPPRESS)
    return parser


def main(arguments, make_model, make_dataset):
    """Runs the example: here the comparison, and in the processes that it starts one run each.

    Args:
        arguments: Parsed options.
        make_model: `(arguments, strategy) -> compiled model`; `strategy` is None for the plain run.
        make_dataset: `arguments -> tf.data.Dataset` of endless batches, the same in every process.

    Returns:
        The exit status of the process.
    """
    if arguments.run is None:
        return compare(arguments)
    arguments.result.write_text(json.dumps(train(arguments, make_model, make_dataset)))
    return 0


class Steps(keras.callbacks.Callback):
    """The loss that `fit` shows at each step, and each step's seconds."""

    def __init__(self):
        super().__init__()
        self.losses, self.seconds = [], []

    def on_train_batch_begin(self, batch, logs=None):
        self._begun = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.seconds.append(time.perf_counter() - self._begun)
        self.losses.append(logs["loss"])


def train(arguments, make_model, make_dataset):
    """One run: same seeds, same batches, with or without recompute."""
    # Two runs of the very same plain model may differ in the last bits: TensorFlow adds gradients of three terms up in
    # the order in which operations that run in parallel let go of them. So: one at a time, each still on all cores.
    tf.config.threading.set_inter_op_parallelism_threads(1)
    # To compare to the bit: it sums gradients in another order near the peak that it expects, which recompute moves.
    tf_internals.switch_memory_optimizer_off()
    if not arguments.jit_compile:
        tf.config.experimental.enable_op_determinism()  # with it, Keras refuses to compile with XLA
    keras.utils.set_random_seed(arguments.seed)
    model = make_model(arguments, arguments.strategy if arguments.run == CHECKPOINTED else None)
    memory, steps = tf_ckpt.callbacks.MemoryLogger(), Steps()
    if arguments.run == PLAIN:  # on purpose
        warnings.filterwarnings("ignore", message="MemoryLogger: nothing is checkpointed")
    try:
        model.fit(
            make_dataset(arguments),
            steps_per_epoch=arguments.steps,
            epochs=arguments.epochs,
            shuffle=False,
            verbose=1 if sys.stdout.isatty() else 2,
            callbacks=[memory, steps],
        )
    except tf.errors.ResourceExhaustedError:
        return {"status": OUT_OF_MEMORY}
    digest = hashlib.sha256()
    for variable in model.variables + model.optimizer.variables:
        digest.update(keras.ops.convert_to_numpy(variable).tobytes())
    return {
        "status": "trained",
        "memory": memory.report(),
        "losses": steps.losses,
        # The first step traces the model.
        "seconds": statistics.median(steps.seconds[1:] or steps.seconds),
        "variables": digest.hexdigest(),
    }


def compare(arguments):
    """Starts both runs one after the other and prints what they took."""
    console = Console()
    results = {}
    for name in (PLAIN, CHECKPOINTED):
        with_strategy = f", strategy {arguments.strategy!r}" if name == CHECKPOINTED else ""
        console.print(f"Training {name}{with_strategy}: {arguments.epochs} x {arguments.steps} steps ...")
        results[name] = run_apart(arguments, name)
    console.print(table_of(arguments, results))
    for line in verdicts(arguments, results):
        console.print(line)
    # Under a limit it is expected of the plain model that it does not fit.
    wanted = [CHECKPOINTED] if arguments.memory_limit_mib else [PLAIN, CHECKPOINTED]
    return int(any(results[name]["status"] != "trained" for name in wanted))


def run_apart(arguments, name):
    """One run in a fresh process."""
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, "TF_CPU_ALLOCATOR_USE_BFC": "true"}
    if arguments.memory_limit_mib:
        environment["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(arguments.memory_limit_mib)
        environment["CUDA_VISIBLE_DEVICES"] = "-1"
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, *sys.argv, "--run", name, "--result", str(result)]
        done = subprocess.run(command, env=environment)
        if result.exists():
            return json.loads(result.read_text())
    # XLA on the CPU does not survive a full device: it ends the process instead of raising an error.
    return {"status": f"failed, exit status {done.returncode}"}


def table_of(arguments, results):
    """Memory, time and loss of both runs."""
    n_steps = arguments.steps * arguments.epochs
    limit = f" on a device of {arguments.memory_limit_mib:,} MiB" if arguments.memory_limit_mib else ""
    table = Table(title=f"{n_steps} steps of {arguments.batch_size} samples{limit}")
    table.add_column("run", no_wrap=True)
    headings = ("peak MiB", "baseline MiB", "peak above it MiB", "seconds a step", f"loss after {n_steps} steps")
    for heading in headings:
        table.add_column(heading, justify="right")
    rows = {name: figures(result) for name, result in results.items()}
    for name, row in rows.items():
        shown = [f"{x:,.{digits}f}" for x, digits in zip(row, (1, 1, 1, 2, 6), strict=True)] if row else [""] * 5
        table.add_row(name, *(shown if row else [results[name]["status"], *shown[1:]]))
    if all(rows.values()):
        ratios = [f"{b / a:.2f}" for a, b in zip(rows[PLAIN][:4], rows[CHECKPOINTED][:4], strict=True)]
        table.add_row("ratio", *ratios, "")
    return table


def figures(result):
    """The table's row, or None for a run that did not train. An unknown memory is not a number."""
    if result["status"] != "trained":
        return None
    report = result["memory"]
    peak, baseline = (
        float("nan") if report[key] is None else report[key] for key in ("peak_memory_mib", "baseline_memory_mib")
    )
    return [peak, baseline, peak - baseline, result["seconds"], result["losses"][-1]]


def verdicts(arguments, results):
    """What the two runs say together."""
    if any(result["status"] != "trained" for result in results.values()):
        return
    plain, checkpointed = results[PLAIN], results[CHECKPOINTED]
    apart = [abs(a - b) for a, b in zip(plain["losses"], checkpointed["losses"], strict=True)]
    largest = f" The largest difference is {max(apart):.1e}." if any(apart) else ""
    yield f"Losses bit-equal at {apart.count(0)} of {len(apart)} steps.{largest}"
    equal = plain["variables"] == checkpointed["variables"]
    yield f"Weights, states and optimizer bit-equal after the last step: {'yes' if equal else 'no'}."
    report = checkpointed["memory"]
    if report["predicted_recompute_overhead"] is not None:
        yield f"Recompute, as the plan predicts it: {report['predicted_recompute_overhead']:.1%} of the step's FLOPs."
    if report["recompute_overhead"] is not None:
        yield f"Measured: {report['recompute_overhead']:.1%} of the step, by {report['recompute_overhead_source']}."
    if plain["memory"]["includes_first_step"]:
        yield "The peaks include tracing: only the first step was run."
