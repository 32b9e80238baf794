"""The process that `tf_ckpt.child` starts: loads a model, then trains a step for each line that it reads."""

import importlib
import json
import os
import pickle
import sys

import keras
import tensorflow as tf

from tf_ckpt import snapshot
from tf_ckpt.child import MARK
from tf_ckpt.memory import MIB
from tf_ckpt.trainee import OUT_OF_MEMORY, Outcome, Trainee


def main(folder, task):
    """Answers each line of stdin, a JSON list of a command and its arguments, with a line of JSON."""
    answers, sys.stdout = sys.stdout, sys.stderr  # layers may print

    def say(**answer):
        answers.write(MARK + json.dumps(answer) + "\n")
        answers.flush()

    try:
        trainee = load(folder, task)
        say(status="ready")
        for line in sys.stdin:
            command, *arguments = json.loads(line)
            if command == "digest":
                say(digest=snapshot.digest(snapshot.state_variables(trainee.model)))
                continue
            outcome = trainee.turn(*arguments)
            say(outcome=outcome)
            if outcome.status == OUT_OF_MEMORY:
                break
    except tf.errors.ResourceExhaustedError:
        say(outcome=Outcome(OUT_OF_MEMORY))
    except Exception as error:
        say(error=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}")
    # After a step that ran out of memory under XLA, tidying up would free buffers twice.
    sys.stderr.flush()
    os._exit(0)


def load(folder, task):
    """Returns the `Trainee` that a `child.Package` holds."""
    with open(os.path.join(folder, task), "rb") as file:
        task = pickle.load(file)
    with open(os.path.join(folder, "content.pickle"), "rb") as file:
        content = pickle.load(file)
    intra, inter = content["threads"]
    tf.config.threading.set_intra_op_parallelism_threads(intra)
    tf.config.threading.set_inter_op_parallelism_threads(inter)
    if task["memory"] is not None:
        limit = [tf.config.LogicalDeviceConfiguration(memory_limit=int(task["memory"] // MIB))]
        for gpu in tf.config.list_physical_devices("GPU"):
            tf.config.set_logical_device_configuration(gpu, limit)
    keras.utils.set_random_seed(0)  # of what draws without a seed of its own
    objects = {}
    for module, name in content["classes"]:
        kind = importlib.import_module(module)
        for part in name.split("."):
            kind = getattr(kind, part)
        objects[kind.__name__] = kind
    with keras.saving.custom_object_scope(objects):
        # Lambdas are let in: the file is the parent's own, and it runs them anyway.
        model = keras.models.load_model(os.path.join(folder, "model.keras"), compile=False, safe_mode=False)
        optimizer = keras.saving.deserialize_keras_object(content["optimizer"])
    optimizer.build(model.trainable_variables)
    snapshot.write(model.variables, content["state"])
    snapshot.write(optimizer.variables, content["slots"])
    return Trainee(model, task["plan"], {**content["arguments"], "optimizer": optimizer}, task["batches"])


if __name__ == "__main__":
    main(*sys.argv[1:])
