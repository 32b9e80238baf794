"""Trains a convolutional network on two devices, plain and with gradient checkpointing, and compares memory, loss and weights.

Its batch normalisation is synchronized: each layer asks the other device for its statistics, in the forward pass and for their
gradients, and never for the re-run. Both ways to have two devices are started from here, on this machine alone: one process
with two logical devices under `MirroredStrategy`, and two processes on loopback under `MultiWorkerMirroredStrategy`.

    python examples/fit_distributed.py
    python examples/fit_distributed.py --kind workers --strategy full
"""

import argparse
import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "true")  # read by TensorFlow at import: the CPU counts its memory


def end_with_parent():
    """Ends this process when the one that started it ends, however that does: its end of the pipe is closed then."""
    os.read(0, 1)
    os._exit(1)


if "--run" in sys.argv:  # before the imports, which take seconds
    threading.Thread(target=end_with_parent, daemon=True).start()

import keras
import tensorflow as tf
from _common import CHECKPOINTED, PLAIN, Steps, positive
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

import tf_ckpt
from tf_ckpt import tf_internals

DEVICES, WORKERS = "devices", "workers"
MIB = 2**20


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--kind", choices=(DEVICES, WORKERS), default=None, help="one of them only (default: both)")
    parser.add_argument("--batch-size", type=positive, default=64, metavar="N", help="samples in a step, over both devices")
    parser.add_argument("--steps", type=positive, default=4, metavar="N", help="steps to train")
    parser.add_argument("--blocks", type=positive, default=6, metavar="N", help="residual blocks of the network")
    parser.add_argument("--image-size", type=positive, default=32, metavar="N", help="pixels a side")
    parser.add_argument("--strategy", choices=("sqrt", "selective", "full", "none"), default="sqrt", help="of tf_ckpt")
    parser.add_argument("--seed", type=positive, default=1, metavar="N", help="of weights and batches")
    parser.add_argument("--timeout", type=positive, default=600, metavar="N", help="seconds that one run may take")
    parser.add_argument("--run", choices=(PLAIN, CHECKPOINTED), default=None, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.batch_size % 2:
        parser.error(f"argument --batch-size: must be even, half for each device. Received: {arguments.batch_size}")
    return arguments


def make_model(arguments):
    """A residual network; checkpointed in the run of that name."""
    layers, size = keras.layers, arguments.image_size
    inputs = x = keras.Input((size, size, 1))
    x = layers.Conv2D(32, 3, padding="same")(x)
    for _ in range(arguments.blocks):
        y = layers.ReLU()(layers.BatchNormalization(synchronized=True)(layers.Conv2D(32, 3, padding="same")(x)))
        y = layers.BatchNormalization(synchronized=True)(layers.Conv2D(32, 3, padding="same")(y))
        x = layers.ReLU()(layers.Add()([x, y]))
    model = keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))
    if arguments.run == CHECKPOINTED:
        model = tf_ckpt.apply(model, arguments.strategy, batch_size=arguments.batch_size // 2)  # what one device gets
    return model


def make_dataset(arguments):
    """Endless batches of enlarged digits, in the same order in every process."""
    digits, size = load_digits(), arguments.image_size
    dataset = tf.data.Dataset.from_tensor_slices(((digits.images[..., None] / 16).astype("float32"), digits.target))
    dataset = dataset.shuffle(len(digits.target), seed=arguments.seed).repeat()
    dataset = dataset.batch(arguments.batch_size, drop_remainder=True)
    return dataset.map(lambda images, labels: (tf.image.resize(images, (size, size)), labels))


# --- one run, in processes of their own -----------------------------------------------------------------------------------


def train(arguments):
    """One run, as a process with two devices or as one of two workers. Returns what it took."""
    tf.config.threading.set_inter_op_parallelism_threads(1)  # for this and the next two lines see _common.py
    tf_internals.switch_memory_optimizer_off()
    tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(arguments.seed)
    return (train_devices if arguments.kind == DEVICES else train_workers)(arguments)


def result_of(losses, memory, variables, strategy):
    digest = hashlib.sha256()
    for variable in variables:
        for own in strategy.experimental_local_results(variable.value):  # of each device
            digest.update(own.numpy().tobytes())
    return {"losses": losses, "memory": memory, "variables": digest.hexdigest()}


def train_devices(arguments):
    """Two logical devices of this process, with `fit`."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    logger, steps = tf_ckpt.callbacks.MemoryLogger(), Steps()
    if arguments.run == PLAIN:  # on purpose
        warnings.filterwarnings("ignore", message="MemoryLogger: nothing is checkpointed")
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = make_model(arguments)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, jit_compile=False)
    dataset = make_dataset(arguments)
    model.fit(dataset, steps_per_epoch=arguments.steps, shuffle=False, verbose=2, callbacks=[logger, steps])
    report = logger.report()
    # Logical devices of a CPU have one allocator.
    memory = {"0 and 1": [report["peak_memory_mib"], report["baseline_memory_mib"]]}
    return result_of(steps.losses, memory, [*model.variables, *model.optimizer.variables], strategy)


def train_workers(arguments):
    """One device each in two processes, with a loop: Keras' `fit` fails with several workers (keras#20585)."""
    options = tf.distribute.experimental.CommunicationOptions(
        timeout_seconds=arguments.timeout, implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    with strategy.scope():
        model, optimizer = make_model(arguments), keras.optimizers.SGD(0.01, momentum=0.9)
        optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    def one(images, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True)) / arguments.batch_size
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    @tf.function(autograph=False)
    def step(images, labels):
        return strategy.reduce("SUM", strategy.run(one, args=(images, labels)), axis=None)

    number, half = strategy.cluster_resolver.task_id, arguments.batch_size // 2
    mine, device, losses, readings = slice(number * half, (number + 1) * half), "CPU:0", [], []
    for images, labels in make_dataset(arguments).take(arguments.steps):
        tf.config.experimental.reset_memory_stats(device)
        before = tf.config.experimental.get_memory_info(device)["current"]
        losses.append(float(step(images[mine], labels[mine])))
        readings.append((tf.config.experimental.get_memory_info(device)["peak"], before))
    # The first step also traces, unless there is no other.
    peak, baseline = max(readings[1:] or readings)
    memory = {f"{number}": [peak / MIB, baseline / MIB]}
    return result_of(losses, memory, [*model.variables, *optimizer.variables], strategy)


# --- the comparison -------------------------------------------------------------------------------------------------------


def run_apart(arguments, kind, name):
    """Starts the processes of one run. Returns a result for each, or the reason why there is none; leaves none running."""
    count = 1 if kind == DEVICES else 2
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
        for one in sockets:  # the workers take the ports over
            one.close()
        processes = []
        for number in range(count):
            task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": number}}
            environment = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
            environment |= {"TF_CONFIG": json.dumps(task)} if kind == WORKERS else {}
            options = ["--kind", kind, "--run", name, "--result", str(folder / f"{number}.json")]
            process = subprocess.Popen([sys.executable, *sys.argv, *options], env=environment, stdin=subprocess.PIPE)
            processes.append(process)
            stack.callback(end, process)
        deadline = time.monotonic() + arguments.timeout
        # One that fails leaves the other waiting for what it was to be told.
        while any(p.poll() is None for p in processes) and not any(p.poll() for p in processes):
            if time.monotonic() > deadline:
                return f"not done after {arguments.timeout} s"
            time.sleep(0.1)
        failed = [p.returncode for p in processes if p.returncode]
        if failed:
            return f"failed, exit status {failed[0]}"
        return [json.loads((folder / f"{number}.json").read_text()) for number in range(count)]


def end(process):
    process.stdin.close()
    process.kill()  # does nothing to one that has ended
    process.wait()


def compare(arguments):
    """Starts all runs one after the other and prints what they took. Returns the exit status, 1 also where two differ."""
    console, failed = Console(), False
    table = Table(title=f"{arguments.steps} steps of {arguments.batch_size} samples, tf_ckpt strategy {arguments.strategy!r}")
    for heading in ("two", "run"):
        table.add_column(heading, no_wrap=True)
    for heading in ("device", "peak MiB", "baseline MiB", "peak above it MiB", "loss"):
        table.add_column(heading, justify="right")
    lines = []
    for kind in [arguments.kind] if arguments.kind else [DEVICES, WORKERS]:
        results = {}
        for name in (PLAIN, CHECKPOINTED):
            console.print(f"Training {name} on two {kind} ...")
            results[name] = run_apart(arguments, kind, name)
            for row in rows_of(results[name]):
                table.add_row(kind, name, *row)
        equal, said = verdict(kind, *results.values())
        failed, lines = failed or not equal, lines + said
    console.print(table)
    for line in lines:
        console.print(line)
    return int(failed)


def rows_of(results):
    if isinstance(results, str):
        return [("", results)]
    rows = []
    for result in results:
        for device, (peak, baseline) in result["memory"].items():
            rows.append((device, f"{peak:,.1f}", f"{baseline:,.1f}", f"{peak - baseline:,.1f}", f"{result['losses'][-1]:.5f}"))
    return rows


def verdict(kind, plain, checkpointed):
    """What the two runs say together: whether they are equal, and a list of lines."""
    if isinstance(plain, str) or isinstance(checkpointed, str):
        return False, []
    pairs = list(zip(plain, checkpointed, strict=True))
    losses = [a == b for p, c in pairs for a, b in zip(p["losses"], c["losses"], strict=True)]
    equal = all(p["variables"] == c["variables"] for p, c in pairs)
    return equal and all(losses), [
        f"Two {kind}: losses bit-equal at {sum(losses) // len(pairs)} of {len(losses) // len(pairs)} steps; "
        f"weights, states and optimizer bit-equal after the last one: {'yes' if equal else 'no'}."
    ]


def main(arguments):
    if arguments.run is None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an error, so that what was started is ended
        return compare(arguments)
    if hasattr(signal, "alarm"):
        signal.alarm(arguments.timeout)  # also where TensorFlow waits and lets no thread of Python's run
    arguments.result.write_text(json.dumps(train(arguments)))
    return 0


if __name__ == "__main__":
    sys.exit(main(parse()))
