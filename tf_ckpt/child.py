"""Training steps in a process of their own, on a device of any size: what runs out of memory there takes nothing with it.

A step that runs out of memory inside XLA frees the variables' buffers on the CPU (TensorFlow 2.21): the process must not go
on. Here it is the child's process that ends. Models travel as `.keras` files, the rest pickled, in a folder of our own.
"""

import json
import os
import pickle
import subprocess
import sys
import tempfile

import keras
import tensorflow as tf

from tf_ckpt import snapshot
from tf_ckpt.errors import CheckpointError
from tf_ckpt.graph import sublayers
from tf_ckpt.memory import MIB
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
        CheckpointError: If the model is replicated, or another process could not load it.
    """

    def __init__(self, model, arguments):
        if model.distribute_strategy.num_replicas_in_sync > 1:
            raise CheckpointError(
                "A process of its own trains on one device, but this model is replicated. Received: model "
                f"'{model.name}' under {type(model.distribute_strategy).__name__}"
            )
        plain = remove(model)
        content = {
            "classes": _classes(plain),
            "arguments": {k: v for k, v in arguments.items() if k != "optimizer"},
            "optimizer": keras.saving.serialize_keras_object(arguments["optimizer"]),
            "slots": snapshot.read(arguments["optimizer"].variables),
            "state": snapshot.read(plain.variables),
            "threads": (
                tf.config.threading.get_intra_op_parallelism_threads(),
                tf.config.threading.get_inter_op_parallelism_threads(),
            ),
        }
        try:
            content = pickle.dumps(content)
        except Exception as error:
            raise CheckpointError(_cannot(plain, f"its loss cannot be pickled ({error})")) from error
        self.name = plain.name
        self._folder = tempfile.TemporaryDirectory(prefix="tf_ckpt-")
        self._children = 0
        try:
            with open(self.path("content.pickle"), "wb") as file:
                file.write(content)
            plain.save(self.path("model.keras"))
        except BaseException as error:
            self._folder.cleanup()
            if not isinstance(error, Exception):
                raise
            raise CheckpointError(_cannot(plain, f"it cannot be saved ({error})")) from error

    def path(self, name):
        return os.path.join(self._folder.name, name)

    def start(self, plan, batches, memory=None):
        """Starts a `Child` that trains the model by a plan.

        Args:
            plan: A `Plan`.
            batches: See `trainee.Trainee`.
            memory: Bytes of the device; None for what it has.
        """
        self._children += 1
        task = f"task{self._children}.pickle"
        with open(self.path(task), "wb") as file:
            pickle.dump({"plan": plan, "batches": batches, "memory": memory}, file)
        return Child(self, task, memory)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._folder.cleanup()


class Child:
    """A process that trains, step by step; a context manager that ends it."""

    def __init__(self, package, task, memory):
        self._package = package
        self._errors = open(package.path(task + ".stderr"), "w+")  # noqa: SIM115
        command = [sys.executable, "-m", "tf_ckpt.child_main", package.path(""), task]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=_environment(memory)
        )
        self._ready = False

    def turn(self, number):
        """As `Trainee.turn`."""
        if not self._ready:
            answer = self._answer()
            if answer.get("status") != "ready":
                return self._outcome(answer)
            self._ready = True
        return self._outcome(self._ask("turn", number))

    def digest(self):
        """Returns the `snapshot.digest` of all that the child has trained."""
        return self._ask("digest")["digest"]

    def _ask(self, *words):
        try:
            self._process.stdin.write(json.dumps(words) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return {}
        return self._answer()

    def _answer(self):
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])
        return {}

    def _outcome(self, answer):
        if answer.get("outcome"):
            return Outcome(*answer["outcome"])
        if answer.get("error"):
            raise CheckpointError(_cannot(self._package, f"there it raised {answer['error']}"))
        status = self._process.wait()
        self._errors.seek(0)
        text = self._errors.read()
        # XLA and the kernel end a process that finds no memory; only XLA says why.
        if any(word in text for word in _OUT) or status == -9:
            return Outcome(OUT_OF_MEMORY)
        last = text.strip().splitlines()[-1:] or ["nothing on stderr"]
        raise CheckpointError(_cannot(self._package, f"the process ended with status {status}: {last[0]}"))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            try:
                stream.close()
            except BrokenPipeError:  # what was still to be written
                pass


def _environment(memory):
    paths = [os.getcwd() if entry == "" else entry for entry in sys.path]
    environment = {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "KERAS_BACKEND": "tensorflow",
        "TF_CPU_ALLOCATOR_USE_BFC": "true",
    }
    if not tf.config.get_visible_devices("GPU"):
        environment["CUDA_VISIBLE_DEVICES"] = "-1"
        if memory is not None:
            environment["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(int(memory // MIB))
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
    return f"Model '{model.name}' cannot be trained in a process of its own: {why}."
