"""The process that `tf_ckpt.child` starts: its children load a model, and train a step for each line that they read."""

import importlib
import json
import os
import pickle
import sys
import warnings

import keras
import tensorflow as tf

from tf_ckpt import mirrors, snapshot
from tf_ckpt.child import MARK
from tf_ckpt.trainee import OUT_OF_MEMORY, Outcome, Trainee


def main(folder):
    """Forks a child for each line `["start", task]` of stdin, which then reads the lines up to `["end"]`.

    TensorFlow is imported and none of its devices is set up, so that each child has fresh ones. What is said on stdout are
    lines of JSON.
    """
    answers, sys.stdout = sys.stdout, sys.stderr  # layers may print

    def say(**answer):
        answers.write(MARK + json.dumps(answer) + "\n")
        answers.flush()

    while command := _read():
        if command[0] != "start":  # the end of a child that has ended by itself
            continue
        if not hasattr(os, "fork"):
            train(folder, command[1], say)
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of the threads that imports leave, which are idle
            child = os.fork()
        if not child:
            try:
                train(folder, command[1], say)
            finally:
                # After a step that ran out of memory under XLA, tidying up would free buffers twice.
                sys.stderr.flush()
                os._exit(0)
        status = os.waitpid(child, 0)[1]
        say(ended=os.waitstatus_to_exitcode(status))


def train(folder, task, say):
    """Trains a step for each line `["turn", number, steps]`."""
    try:
        trainee = load(folder, task)
        say(status="ready")
        while command := _read():
            if command[0] == "end":
                break
            if command[0] == "digest":
                say(digest=snapshot.digest(snapshot.state_variables(trainee.model)))
                continue
            outcome = trainee.turn(*command[1:])
            say(outcome=outcome)
            if outcome.status == OUT_OF_MEMORY:
                break
    except tf.errors.ResourceExhaustedError:
        say(outcome=Outcome(OUT_OF_MEMORY))
    except Exception as error:
        text = str(error).strip()
        say(error=f"{type(error).__name__}: {text.splitlines()[0] if text else 'without a message'}")


def _read():
    """Returns the next line of stdin, or None at its end. Byte by byte: the next one may be another process's."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return None
        line += byte
    return json.loads(line)


def load(folder, task):
    """Returns the `Trainee` that a `child.Package` holds."""
    with open(os.path.join(folder, task), "rb") as file:
        task = pickle.load(file)
    with open(os.path.join(folder, "content.pickle"), "rb") as file:
        content = pickle.load(file)
    intra, inter = content["threads"]
    tf.config.threading.set_intra_op_parallelism_threads(intra)
    tf.config.threading.set_inter_op_parallelism_threads(inter)
    mirrors.set_up(content["devices"], content["logical"], task["memory"])
    keras.utils.set_random_seed(0)  # of what draws without a seed of its own
    objects = {}
    for module, name in content["classes"]:
        kind = importlib.import_module(module)
        for part in name.split("."):
            kind = getattr(kind, part)
        objects[kind.__name__] = kind
    with keras.saving.custom_object_scope(objects), mirrors.strategy_on(content["devices"]).scope():
        # Lambdas are let in: the file is the parent's own, and it runs them anyway.
        model = keras.models.load_model(os.path.join(folder, "model.keras"), compile=False, safe_mode=False)
        optimizer = keras.saving.deserialize_keras_object(content["optimizer"])
        optimizer.build(model.trainable_variables)
    snapshot.write(snapshot.model_variables(model), content["state"])
    snapshot.write(optimizer.variables, content["slots"])
    return Trainee(model, task["plan"], {**content["arguments"], "optimizer": optimizer}, task["batches"])


if __name__ == "__main__":
    main(*sys.argv[1:])
