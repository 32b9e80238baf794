"""More than one device: replicas on two logical devices, two workers, and a model that is split. See replicated.py.

Each program is a process of its own, with a timeout: what replicas tell each other in different orders never ends.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import tf_ckpt

ROOT = Path(tf_ckpt.__file__).parent.parent
SECONDS = 300  # of a machine that is busy with other things


def run(mode, *programs, workers=1):
    """Runs programs of replicated.py in as many processes as there are workers. Returns what each has printed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(Path(__file__).with_name("replicated.py")), mode, *programs]
    with contextlib.ExitStack() as stack:
        addresses = [f"127.0.0.1:{port}" for port in free_ports(workers)]
        processes, outputs = [], []
        for number in range(workers):
            own = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": number}}
            outputs.append(stack.enter_context(tempfile.TemporaryFile("w+")))
            processes.append(
                subprocess.Popen(
                    command,
                    env=environment if workers == 1 else {**environment, "TF_CONFIG": json.dumps(own)},
                    stdout=outputs[-1],
                    stderr=subprocess.STDOUT,
                )
            )
            stack.callback(processes[-1].wait)
            stack.callback(processes[-1].kill)  # does nothing to one that has ended
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in processes:
                process.wait(SECONDS)
        printed = []
        for process, output in zip(processes, outputs, strict=True):
            output.seek(0)
            printed.append(output.read())
            assert process.poll() == 0, printed[-1][-4000:]
        return printed


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def test_two_devices():
    """In one process, since most of the time goes into starting it. The programs themselves say what they compare."""
    run("graph", "exchanges", "apart", "fit", "plans", "devices")


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "programs"), [("graph", ["fit_parts"]), ("eager", ["exchanges", "fit", "fit_parts"])])
def test_two_devices_otherwise(mode, programs):
    run(mode, *programs)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_two_workers(mode):
    losses = [[line for line in x.splitlines() if line.startswith("losses")] for x in run(mode, "worker", workers=2)]
    assert losses[0] == losses[1] != []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["devices", "workers"])
def test_example(kind):
    command = [sys.executable, str(ROOT / "examples" / "fit_distributed.py"), "--kind", kind]
    sizes = ["--blocks", "2", "--image-size", "8", "--batch-size", "8", "--steps", "2"]
    done = subprocess.run([*command, *sizes], capture_output=True, text=True, timeout=2 * SECONDS)
    assert done.returncode == 0, done.stderr[-4000:]
    said = " ".join(done.stdout.split())
    assert (
        f"Two {kind}: losses bit-equal at 2 of 2 steps; weights, states and optimizer bit-equal after the last one: yes."
        in said
    )
