"""Training steps in a process of their own, on a device of any size: what runs out of memory there takes nothing with it.

A step that runs out of memory on the CPU (TensorFlow 2.21) frees the variables' buffers under XLA, so that the process must
not go on, and ends the process in some kernels, oneDNN's convolutions among them. Here it is the child that ends. Models
travel as `.keras` files, the rest pickled, in a folder of our own.
"""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile

import keras
import tensorflow as tf

from tf_ckpt import snapshot
from tf_ckpt.budgets import memory_bytes
from tf_ckpt.errors import CheckpointError, first_line
from tf_ckpt.graph import sublayers
from tf_ckpt.memory import MIB
from tf_ckpt.mirrors import devices_of, logical_devices
from tf_ckpt.trainee import OUT_OF_MEMORY, Outcome
from tf_ckpt.transform import remove

MARK = "tf_ckpt:"  # begins the lines that are ours: layers may print
_OUT = ("RESOURCE_EXHAUSTED", "ResourceExhausted", "OOM", "out of memory", "Out of memory", "std::bad_alloc")


class Package:
    """A model in a folder, from which children train it; a context manager that deletes the folder.

    Args:
        model: A plain or applied `keras.Model`.
        arguments: What to compile with: see `trainee.training_arguments`.

    Raises:
        CheckpointError: If another process could not load the model, or not replicate it.
    """

    def __init__(self, model, arguments):
        devices = devices_of(model)
        plain = remove(model)
        content = {
            "classes": _classes(plain),
            "devices": devices,
            "logical": logical_devices(),
            "arguments": {k: v for k, v in arguments.items() if k != "optimizer"},
            "optimizer": keras.saving.serialize_keras_object(arguments["optimizer"]),
            "slots": snapshot.read(arguments["optimizer"].variables),
            "state": snapshot.read(snapshot.model_variables(plain)),
            "threads": (
                tf.config.threading.get_intra_op_parallelism_threads(),
                tf.config.threading.get_inter_op_parallelism_threads(),
            ),
        }
        try:
            content = pickle.dumps(content)
        except Exception as error:
            raise CheckpointError(_cannot(plain, f"its loss cannot be pickled ({first_line(error)})")) from error
        self.name = plain.name
        self._folder = tempfile.TemporaryDirectory(prefix="tf_ckpt-")
        self._tasks, self._idle = 0, []
        try:
            with open(self.path("content.pickle"), "wb") as file:
                file.write(content)
            plain.save(self.path("model.keras"))
        except BaseException as error:
            self._folder.cleanup()
            if not isinstance(error, Exception):
                raise
            raise CheckpointError(_cannot(plain, f"it cannot be saved ({first_line(error)})")) from error

    def path(self, name):
        return os.path.join(self._folder.name, name)

    def start(self, plan, batches, memory=None):
        """Starts a `Child` that trains the model by a plan.

        Args:
            plan: A `Plan`.
            batches: See `trainee.Trainee`.
            memory: Bytes of each device; None for what it has.
        """
        self._tasks += 1
        task = f"task{self._tasks}.pickle"
        with open(self.path(task), "wb") as file:
            pickle.dump({"plan": plan, "batches": batches, "memory": memory}, file)
        process = self._idle.pop() if self._idle else Process(self.path(""))
        return Child(self, process, task)

    def take_back(self, process):
        """Keeps a process for the next child, so that it need not import TensorFlow."""
        if hasattr(os, "fork"):
            self._idle.append(process)
        else:
            process.end()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self._idle:
            process.end()
        self._folder.cleanup()


class Process:
    """A process with TensorFlow imported and no device in use, which forks one child after the other."""

    def __init__(self, folder):
        handle, path = tempfile.mkstemp(".stderr", dir=folder)
        self._errors = open(path, errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tf_ckpt.child_main", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=handle,
            text=True,
            env=_environment(),
            start_new_session=True,  # a group of its own: ending it ends its children
        )
        os.close(handle)

    def say(self, *words):
        with contextlib.suppress(BrokenPipeError):  # its end is told by what it answers
            self._process.stdin.write(json.dumps(words) + "\n")
            self._process.stdin.flush()

    def answer(self):
        """Returns the next answer, a dict; its last one has the key `ended`."""
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])
        return {"ended": self._process.wait(), "all": True}

    def errors(self):
        """Returns what was written to stderr since the last call."""
        return self._errors.read()

    def end(self):
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        else:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(BrokenPipeError):  # what was still to be written
                stream.close()


class Child:
    """A process that trains, step by step; a context manager that ends it."""

    def __init__(self, package, process, task):
        self._package, self._process, self._task = package, process, task
        self._ready, self._last = False, {}

    def turn(self, number, steps=1):
        """As `Trainee.turn`."""
        if not self._ready:
            self._process.errors()
            self._process.say("start", self._task)
            if self._ask().get("status") != "ready":
                return self._outcome()
            self._ready = True
        self._ask("turn", number, steps)
        return self._outcome()

    def digest(self):
        """Returns the `snapshot.digest` of all that the child has trained."""
        return self._ask("digest")["digest"]

    def _ask(self, *words):
        if words:
            self._process.say(*words)
        self._last = self._process.answer()
        return self._last

    def _outcome(self):
        answer = self._last
        if "outcome" in answer:
            return Outcome(*answer["outcome"])
        if "error" in answer and self._ready:  # it was loaded: the data or the model's code are to blame
            raise CheckpointError(
                f"A step of model '{self._package.name}', in a process of its own, raised {answer['error'].rstrip('. ')}."
            )
        if "error" in answer:
            raise CheckpointError(_cannot(self._package, f"there it raised {answer['error']}"))
        text, status = self._process.errors(), answer["ended"]
        # XLA and some kernels end a process that finds no memory, and so does the operating system, which does not say why.
        if any(word in text for word in _OUT) or status == -signal.SIGKILL:
            return Outcome(OUT_OF_MEMORY)
        last = text.strip().splitlines()[-1:] or ["nothing on stderr"]
        raise CheckpointError(_cannot(self._package, f"the process ended with status {status}: {last[0]}"))

    def __enter__(self):
        return self

    def __exit__(self, kind, *error):
        if kind is None and not self._last.get("all"):
            if self._last and "ended" not in self._last:
                self._process.say("end")
                while "ended" not in self._ask():
                    pass
            self._package.take_back(self._process)
        else:
            self._process.end()


def simulated_bytes(memory):
    """Returns the bytes of a simulated device that has `memory`, which are whole MiB.

    Args:
        memory: Bytes as an integer, or a string such as `"6GiB"`.
    """
    if isinstance(memory, float) and 0 < memory < 1:
        raise CheckpointError(f"`memory` must be a size here, not a share. Received: memory={memory!r}")
    size = memory_bytes(memory, 0)
    if size < MIB:
        raise CheckpointError(f"A simulated device has 1 MiB of memory or more. Received: memory={memory!r}")
    return size // MIB * MIB


def check_verbose(verbose):
    if not (verbose == "auto" if isinstance(verbose, str) else isinstance(verbose, int) and verbose in (0, 1)):
        raise CheckpointError(f'`verbose` must be "auto", 0 or 1. Received: verbose={verbose!r}')


def _environment():
    paths = [os.getcwd() if entry == "" else entry for entry in sys.path]
    environment = {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "1",  # the allocator's warning is all that some kernels say before they end the process
        "PYTHONPATH": os.pathsep.join(paths),
        "KERAS_BACKEND": "tensorflow",
        "TF_CPU_ALLOCATOR_USE_BFC": "true",
    }
    if not tf.config.get_visible_devices("GPU"):
        environment["CUDA_VISIBLE_DEVICES"] = "-1"
    return environment


def _classes(model):
    """Returns pairs (module, name) of the classes in a model that are not Keras' own."""
    found = []
    for layer in sublayers(model):
        kind = type(layer)
        if kind.__module__.partition(".")[0] in ("keras", "tf_ckpt") or (kind.__module__, kind.__qualname__) in found:
            continue
        if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
            why = f"class {kind.__qualname__} is defined in {'the script' if kind.__module__ == '__main__' else 'a function'}"
            raise CheckpointError(_cannot(model, f"{why}: move it to the top level of a module that can be imported"))
        found.append((kind.__module__, kind.__qualname__))
    return found


def _cannot(model, why):
    return f"Model '{model.name}' cannot be trained in a process of its own: {why.rstrip('. ')}."
