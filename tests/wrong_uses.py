"""The page of wrong uses: what a user can get wrong, each with the error and what its message says (a pattern of it).

`python tests/wrong_uses.py` prints them all with the message that each gets now. `test_bad_input.py` tries them: each must
raise this error, and leave the models that it was given as they were. What must hold for every key of a file or every field
of an account is with the tests of these.
"""

import contextlib
import dataclasses
import functools
import io
import json
import math
import os
import pathlib
import re
import shutil
import sys
import tempfile
import warnings

import keras
import numpy as np
import tensorflow as tf
from subclassed import Block

import tf_ckpt
from tf_ckpt import (
    Calibration,
    CheckpointError,
    Plan,
    Recompute,
    Segment,
    apply,
    calibrate,
    cli,
    compare,
    max_batch_size,
    plan,
    plan_of,
    recompute,
    remove,
)
from tf_ckpt.callbacks import MemoryLogger
from tf_ckpt.saving import Applied
from tf_ckpt.strategies import Pick, Range

L = keras.layers
MIB = 2**20
T, V, C = TypeError, ValueError, CheckpointError


# --- models and data


def build():
    inputs = keras.Input((8,), name="x")
    x = inputs
    for number in range(4):
        x = L.Dense(8, activation="gelu", name=f"d{number}")(x)
    x = L.BatchNormalization(name="norm")(x)
    return keras.Model(inputs, L.Dense(2, name="head")(x), name="plain")


class Own(keras.Model):
    """Its `call` is Python code."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.wrapped, self.blocks, self.last = Recompute(L.Dense(8)), [Block(), Block()], L.Dense(2)

    def call(self, x):
        x = self.wrapped(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def embedded():
    inputs = keras.Input((4,), dtype="int32")
    x = L.Dense(8, activation="gelu", name="d")(L.Embedding(9, 8, name="table")(inputs))
    return keras.Model(inputs, L.Dense(2)(x), name="embedded")


def nested():
    inside, outer = keras.Input((8,)), keras.Input((8,))
    model = keras.Model(inside, L.Dense(8)(L.Dense(8)(inside)))
    return keras.Model(outer, model(L.Dense(8)(outer)), name="nested")


def frozen():
    layers = [L.Dense(8, name="a"), L.Dense(8, activation="gelu", name="b"), L.Dense(2, name="c")]
    layers[0].trainable = layers[1].trainable = False
    return keras.Sequential([keras.Input((8,)), *layers], name="frozen")


def of_a_function():
    class Mine(L.Dense):
        pass

    return keras.Sequential([keras.Input((8,)), Mine(8), L.Dense(2)])


MODEL = build()
APPLIED = apply(MODEL, "full")
OTHER = keras.Sequential([keras.Input((8,)), L.Dense(8, activation="gelu", name="d0"), L.Dense(2, name="end")])
FIXED = keras.Sequential([keras.Input((8,), batch_size=5), L.Dense(2)])
EMBEDDED, NESTED, FROZEN, LOCAL = embedded(), nested(), frozen(), of_a_function()
PYTHON = Own(name="python")
X = tf.ones((2, 8))
PYTHON(X)
PYTHON_APPLIED = apply(PYTHON, layers=[Block])
APPLIED(X)
MODELS = (MODEL, APPLIED, OTHER, EMBEDDED, NESTED, FROZEN, PYTHON, PYTHON_APPLIED)
XS, YS = np.ones((48, 8), "float32"), np.ones((48, 2), "float32")


def function(x):
    return x


def returns(what):
    def strategy(chain):
        return what

    return strategy


def in_a_tape(function, *arguments):
    with tf.GradientTape() as tape:
        tape.watch(X)
        loss = tf.reduce_sum(function(*arguments))
    return tape.gradient(loss, X)


RAW = tf.Variable(1.0, name="raw")
GENERATOR = tf.random.Generator.from_seed(1)


def draws(x):
    return x + tf.random.normal(tf.shape(x))


def writes(x):
    RAW.assign_add(1.0)
    return x * RAW


def draws_by_generator(x):
    return x + GENERATOR.normal((2, 8))


FOLDER = pathlib.Path(tempfile.mkdtemp(prefix="wrong_uses"))  # deleted by `test_bad_input.py`


def file(name, content):
    """Writes a file and returns its path."""
    path = FOLDER / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def plan_file(**changes):
    """Returns the path of a plan's file with something else in it."""
    plan_of(APPLIED).save(FOLDER / "plan.json")
    return file("changed.json", json.dumps({**json.loads((FOLDER / "plan.json").read_text()), **changes}))


ABSURD = r"`matmul` must be pairs \(FLOPs, seconds\) of positive numbers, .*Received: matmul=\[.*, in path='"


def calibration_file(rows):
    content = {"format": "tf_ckpt.Calibration", "version": 1, "device": "CPU:0", "dtype": "float32"}
    return file("w", json.dumps({**content, "convolution": [[1e6, 1.0]], "memory": [[1e6, 1.0]], "matmul": rows}))


NO_CALIBRATIONS = {
    "empty": ("", r"Not a calibration: `Calibration.load` reads the JSON .*Received: path='.*w', which holds b''"),
    "a list": ("[1]", r"has format='tf_ckpt.Calibration'. Received: path='.*w', which holds a list"),
    "of a plan": ('{"format": "tf_ckpt.Plan", "version": 1}', "which holds format='tf_ckpt.Plan'"),
    "a later version": (
        '{"format": "tf_ckpt.Calibration", "version": 7}',
        "reads calibrations of version 1. .*version=7.*calibrate",
    ),
    "nothing else": (
        '{"format": "tf_ckpt.Calibration", "version": 1}',
        r"needs 'device'. Received: path=.*has \['format', 'version'\]",
    ),
}


def compared(model=MODEL, **arguments):
    given = {"x": XS, "y": YS, "strategies": ["sqrt"], "loss": "mse", "steps": 1, "verbose": 0, **arguments}
    return lambda: compare(model, **given)


def largest(model=MODEL, **arguments):
    return lambda: max_batch_size(model, **{"memory": "8MiB", "verify": False, "verbose": 0, **arguments})


def logged(**arguments):
    return lambda: MemoryLogger(**arguments)


def fitted(callback):
    """A `fit` whose error comes before its first batch."""

    def fit():
        model = remove(APPLIED)
        model = keras.models.clone_model(model)
        model.compile("sgd", "mse")
        try:
            model.fit(XS, YS, verbose=0, callbacks=[callback()])
        finally:
            assert int(model.optimizer.iterations) == 0

    return fit


class Ended(Exception):
    """What a command wrote: an exit status other than 2, more than one line, or something on stdout, are told too."""


CLI_MODULE = """
import keras, numpy as np

def small():
    inputs = x = keras.Input((16, 32))
    for number in range(4):
        x = keras.layers.LayerNormalization()(keras.layers.Dense(32, activation="gelu", name=f"d{number}")(x))
    return keras.Model(inputs, keras.layers.Dense(4)(x), name="small")

def nothing():
    return None

def fixed():
    model = keras.Sequential([keras.Input(batch_shape=(6, 16)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    return model

def python():
    class Own(keras.Model):
        pass
    return Own(name="own")

def exits():
    raise SystemExit(5)

def raises():
    raise RuntimeError("two\\nlines")
"""


@functools.cache
def cli_folder():
    file("wrong_models.py", CLI_MODULE)
    file("broken.py", "1 / 0")
    file("exits.py", "import sys; sys.exit(3)")
    file("text.keras", "text")
    unknown = type("Unknown", (L.Dense,), {"__module__": "not_here"})
    for name, layer in (("unknown", unknown(4)), ("lambda", L.Lambda(lambda x: 2 * x, output_shape=(8,)))):
        keras.Sequential([keras.Input((8,)), layer]).save(FOLDER / f"{name}.keras")
    return FOLDER


def command(arguments):
    """Runs the command line in this process, as from a folder of the user's, and raises what it says."""

    def run():
        out, err, shown, here = io.StringIO(), io.StringIO(), warnings.showwarning, os.getcwd()
        sys.path.insert(0, str(cli_folder()))
        try:
            os.chdir(cli_folder())
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                status = cli.main(arguments.split(" ") if arguments else [])
        except SystemExit as error:
            status = error.code
        finally:
            os.chdir(here)
            sys.path.remove(str(FOLDER))
            warnings.showwarning = shown
        text = err.getvalue().rstrip("\n")
        good = (status, out.getvalue(), text.count("\n")) == (2, "", 0) and text.startswith("tf-ckpt") and "error: " in text
        raise Ended(text if good else f"NOT AS IT SHOULD BE: status {status}, {text.encode()!r}, stdout {out.getvalue()!r}")

    return run


def second_order():
    block = recompute(L.Dense(8), name="mine")
    with tf.GradientTape() as outer:
        outer.watch(X)
        with tf.GradientTape() as inner:
            inner.watch(X)
            loss = tf.reduce_sum(tf.square(block(X)))
        gradient = inner.gradient(loss, X)
    return outer.gradient(gradient, X)


def added_to_after_apply():
    model = keras.Sequential([keras.Input((8,)), L.Dense(8, activation="gelu"), L.Dense(8, activation="gelu"), L.Dense(2)])
    made = plan_of(apply(model, "full"))
    model.add(L.Dense(3, name="more"))
    return apply(model, made)


def renamed_after_save():
    record = keras.saving.serialize_keras_object(APPLIED)["config"]
    record["model"]["config"]["layers"][1]["config"]["name"] = "other"
    return Applied.from_config(record)


# --- what is wrong, the error, and a pattern of its message

WRONG = {
    # recompute
    "recompute: number": (lambda: recompute(3), T, "Received: fn=3"),
    "recompute: nothing": (lambda: recompute(None), T, "Received: fn=None"),
    "recompute: text": (lambda: recompute("layer"), T, "Received: fn='layer'"),
    "recompute: list": (lambda: recompute([function]), T, r"Received: fn=\[<function function"),
    "recompute: tensor": (lambda: recompute(X), T, "Received: fn=<tf.Tensor"),
    "recompute: name number": (lambda: recompute(function, name=3), T, "Received: name=3"),
    "recompute: name bytes": (lambda: recompute(function, name=b"n"), T, "Received: name=b'n'"),
    "recompute: name by position": (lambda: recompute(function, "n"), T, "recompute"),
    "recompute: random numbers": (lambda: in_a_tape(recompute(draws), X), C, "Received: 'draws' under recompute"),
    "recompute: variable": (lambda: in_a_tape(recompute(writes), X), C, "Received: 'writes' under recompute"),
    "recompute: generator": (
        lambda: in_a_tape(recompute(draws_by_generator, name="mine"), X),
        C,
        "Received: 'mine' under recompute",
    ),
    # Recompute
    "Recompute: nothing": (lambda: Recompute(), T, "Received: layer=None"),
    "Recompute: none": (lambda: Recompute(None), T, "Received: layer=None"),
    "Recompute: function": (lambda: Recompute(function), T, "Received: layer=<function function"),
    "Recompute: text": (lambda: Recompute("dense"), T, "Received: layer='dense'"),
    "Recompute: class": (lambda: Recompute(L.Dense), T, r"Received: layer=<class '.*Dense'> \(a class: call it"),
    "Recompute: list": (lambda: Recompute(MODEL.layers[1:3]), T, r"Received: layer=\[<Dense name=d0"),
    "Recompute: input": (lambda: Recompute(MODEL.layers[0]), T, "Received: layer=<InputLayer name=x"),
    "Recompute: tensor": (lambda: Recompute(MODEL.inputs[0]), T, "Received: layer=<KerasTensor"),
    "Recompute: variable": (lambda: Recompute(MODEL.variables[0]), T, "Received: layer=<Variable path=d0/kernel"),
    "Recompute: name number": (lambda: Recompute(L.Dense(2), name=3), V, "name=3"),
    "Recompute: name with a slash": (lambda: Recompute(L.Dense(2), name="a/b"), V, "name=a/b"),
    "Recompute: unknown argument": (lambda: Recompute(L.Dense(2), units=3), V, "'units': 3"),
    # the model
    "apply: nothing": (lambda: apply(None), T, "Received: model=None of type NoneType"),
    "apply: text": (lambda: apply("plain"), T, "Received: model='plain' of type str"),
    "apply: layer": (lambda: apply(L.Dense(2, name="d")), T, "Recompute`. Received: model=<Dense name=d"),
    "apply: class": (lambda: apply(keras.Model), T, "Received: model=<class '.*Model'> of type"),
    "apply: list": (lambda: apply([MODEL]), T, r"Received: model=\[<Functional name=plain"),
    "apply: output": (lambda: apply(MODEL.outputs[0]), T, "Received: model=<KerasTensor"),
    "apply: subclassed model": (lambda: apply(keras.Model(name="own")), C, "(?s)'own'.*strategy='sqrt', model of class Model"),
    "apply: not built": (lambda: apply(keras.Sequential([L.Dense(2)], name="seq")), C, "'seq' is not built yet"),
    "apply: empty": (lambda: apply(keras.Sequential(name="void")), C, "'void' has no layers yet"),
    "apply: input only": (lambda: apply(keras.Sequential([L.Input((3,))], name="in")), C, "'in' has no layers yet"),
    "plan: nothing": (lambda: plan(None), T, "Received: model=None of type NoneType"),
    "plan: function": (lambda: plan(function), T, "Received: model=<function function"),
    "plan: layer": (lambda: plan(Recompute(L.Dense(2, name="d"))), T, "Recompute`. Received: model=<Dense name=d"),
    "remove: nothing": (lambda: remove(None), T, "Received: model=None of type NoneType"),
    "remove: text": (lambda: remove("plain"), T, "Received: model='plain' of type str"),
    "remove: layer": (lambda: remove(MODEL.layers[1]), T, "Received: model=<Dense name=d0.* of type Dense"),
    # the strategy
    "strategy: flag": (lambda: apply(MODEL, False), T, "Received: strategy=False of type bool"),
    "strategy: number": (lambda: apply(MODEL, 4), T, "Received: strategy=4 of type int"),
    "strategy: list": (lambda: apply(MODEL, [(0, 2)]), T, r"Received: strategy=\[\(0, 2\)\] of type list"),
    "strategy: bytes": (lambda: apply(MODEL, b"sqrt"), T, "Received: strategy=b'sqrt' of type bytes"),
    "strategy: class": (lambda: apply(MODEL, L.Dense), T, r"Received: strategy=<class '.*Dense'> of type type"),
    "strategy: misspelt": (lambda: apply(MODEL, "sqr"), C, "Did you mean 'sqrt'.* Received: strategy='sqr'"),
    "strategy: in capitals": (lambda: apply(MODEL, "FULL"), C, "Received: strategy='FULL'"),
    "strategy: empty": (lambda: apply(MODEL, ""), C, "Received: strategy=''"),
    "strategy: applied model": (lambda: apply(APPLIED, "half"), C, "Received: strategy='half'"),
    "strategy: other plan": (lambda: apply(MODEL, plan(OTHER, "none")), C, "its call 1 is 'end', the model's is 'd1'"),
    "strategy: other plan, planned": (lambda: plan(MODEL, plan(OTHER, "none")), C, "its call 1 is 'end', the model's is 'd1'"),
    "strategy: of layers": (lambda: plan(MODEL, "selctive", layers=["d0"]), C, "strategy='selctive'"),
    "ranges: too far": (lambda: apply(MODEL, returns([(0, 99)])), C, r"Received: segment \(0, 99\) of 6 calls"),
    "ranges: negative": (lambda: apply(MODEL, returns([(-1, 2)])), C, r"Received: segment \(-1, 2\) of 6 calls"),
    "ranges: backwards": (lambda: apply(MODEL, returns([(3, 1)])), C, r"Received: segment \(3, 1\) of 6 calls"),
    "ranges: empty range": (lambda: apply(MODEL, returns([(2, 2)])), C, r"Received: segment \(2, 2\) of 6 calls"),
    "ranges: overlap": (lambda: apply(MODEL, returns([(0, 2), (1, 3)])), C, r"Received: segment \(1, 3\) of 6 calls"),
    "ranges: twice": (lambda: apply(MODEL, returns([(0, 2), (0, 2)])), C, r"Received: segment \(0, 2\) of 6 calls"),
    "ranges: nothing": (lambda: apply(MODEL, returns(None)), (T, V), "Received: .*None"),
    "ranges: number": (lambda: apply(MODEL, returns(7)), (T, V), "Received: .*7"),
    "ranges: name": (lambda: apply(MODEL, returns("sqrt")), (T, V), "Received: .*sqrt"),
    "ranges: names": (lambda: apply(MODEL, returns([("d0", "d1")])), (T, V), "Received: .*d0"),
    "ranges: triples": (lambda: apply(MODEL, returns([(0, 1, 2)])), (T, V), r"Received: .*\(0, 1, 2\)"),
    "ranges: fractions": (lambda: apply(MODEL, returns([(0.5, 2.7)])), (T, V), r"Received: .*\(0\.5, 2\.7\)"),
    "ranges: Range of fractions": (lambda: apply(MODEL, returns([Range(0.5, 2)])), T, r"Received: .*start=0\.5"),
    "ranges: Range of a flag": (lambda: apply(MODEL, returns([Range(True, 2)])), T, r"Received: .*start=True"),
    "ranges: fractions inside": (lambda: apply(MODEL, returns([Range(0, 3, ((0.5, 2),))])), T, r"Received: .*\(0\.5, 2\)"),
    "ranges: inside nothing": (lambda: apply(MODEL, returns([Range(0, 3, None)])), T, "Received: .*inside=None"),
    "ranges: a part's name": (lambda: apply(MODEL, returns([Range(0, 1, (), "activation")])), T, "part='activation'"),
    "ranges: itself inside": (
        lambda: apply(MODEL, returns([Range(0, 3, (Range(0, 3),))])),
        C,
        r"must not hold itself.*Received: Range\(start=0, stop=3",
    ),
    "ranges: itself further in": (lambda: apply(MODEL, returns([Range(0, 3, ((0, 2, ((0, 2),)),))])), C, "not hold itself"),
    "ranges: Plan.of": (lambda: apply(MODEL, lambda c: Plan.of(c, [(5, 9)], "x")), C, r"segment \(5, 9\) of 6 calls"),
    # the layers
    "layers: with sqrt": (lambda: apply(MODEL, "sqrt", layers=["d0"]), C, r"strategy='sqrt', layers=\['d0'\]"),
    "layers: with none": (lambda: apply(MODEL, "none", layers=["d0"]), C, r"strategy='none', layers=\['d0'\]"),
    "layers: text": (lambda: apply(MODEL, "selective", layers="d0"), T, "Received: layers='d0' of type str"),
    "layers: number": (lambda: apply(MODEL, "selective", layers=2), T, "Received: layers=2 of type int"),
    "layers: class": (lambda: apply(MODEL, "selective", layers=L.Dense), T, "Received: layers=<class '.*Dense'> of type"),
    "layers: dict": (lambda: apply(MODEL, "selective", layers={"d0": 1}), T, r"Received: layers=\{'d0': 1\} of type dict"),
    "layers: empty": (lambda: apply(MODEL, "selective", layers=[]), C, r"Received: layers=\[\]"),
    "layers: of numbers": (lambda: apply(MODEL, "selective", layers=["d0", 3]), T, r"Received: 3 in layers=\['d0', 3\]"),
    "layers: of nothing": (lambda: apply(MODEL, "selective", layers=[None]), T, r"Received: None in layers=\[None\]"),
    "layers: of other classes": (lambda: apply(MODEL, "selective", layers=[int]), T, r"Received: <class 'int'> in layers="),
    "layers: misspelt": (lambda: apply(MODEL, "selective", layers=["nrm"]), C, r"matches 'nrm'\. Near matches: norm"),
    "layers: one of two": (lambda: apply(MODEL, "selective", layers=["d0", "q*"]), C, r"matches 'q\*'"),
    "layers: of a class it has not": (lambda: apply(MODEL, "selective", layers=[L.LSTM]), C, "matches <class '.*LSTM'>"),
    "layers: of another model": (lambda: apply(MODEL, "selective", layers=[OTHER.layers[-1]]), C, "matches 'end'"),
    "layers: predicate": (lambda: apply(MODEL, "selective", layers=lambda x: False), C, "predicate layers=<function"),
    "layers: by position": (lambda: apply(MODEL, "selective", ["d0"]), T, "positional"),
    # the memory
    "memory: with a plan": (
        lambda: apply(MODEL, plan_of(APPLIED), memory="1GiB"),
        C,
        "^.{0,60}Received: a `Plan` of 'full', memory='1GiB'$",
    ),
    "memory: all as a share": (lambda: plan(MODEL, "budget", memory=1.0), C, r"only below 1,.*integer.*Received: memory=1\.0"),
    "memory: more than all": (lambda: plan(MODEL, "budget", memory=1.5), C, r"only below 1,.*Received: memory=1\.5"),
    "memory: in percent": (lambda: plan(MODEL, "budget", memory=60.0), C, r"only below 1,.*Received: memory=60\.0"),
    "memory: parts of bytes": (
        lambda: plan(MODEL, "budget", memory=2e6 + 0.5),
        C,
        r"whole number.*Received: memory=2000000\.5",
    ),
    "memory: a share as text": (lambda: plan(MODEL, "budget", memory="0.5"), C, "write memory=0.5. Received: memory='0.5'"),
    "memory: of no layers": (
        lambda: plan(keras.Model(MODEL.inputs, MODEL.inputs), "budget", memory=0.9),
        C,
        r"no layers behind its inputs.*Received: memory=0\.9",
    ),
    # the batch size
    "batch size: zero": (lambda: apply(MODEL, batch_size=0), C, "Received: batch_size=0"),
    "batch size: negative": (lambda: plan(MODEL, batch_size=-8), C, "Received: batch_size=-8"),
    "batch size: huge": (lambda: plan(MODEL, batch_size=10**19), C, "at most 2,147,483,647. Received: batch_size=10{19}"),
    "batch size: not the model's": (lambda: plan(FIXED, batch_size=9), C, "state the batch size 5. Received: batch_size=9"),
    "optimizer: unknown": (lambda: plan(MODEL, optimizer="nope"), C, "such as 'adam'. Received: optimizer='nope'"),
    "batch size: fraction": (lambda: apply(MODEL, batch_size=1.5), T, r"Received: batch_size=1\.5"),
    "batch size: whole float": (lambda: apply(MODEL, batch_size=8.0), T, r"Received: batch_size=8\.0"),
    "batch size: text": (lambda: apply(MODEL, batch_size="8"), T, "Received: batch_size='8'"),
    "batch size: flag": (lambda: apply(MODEL, batch_size=True), T, "Received: batch_size=True"),
    "batch size: array": (lambda: apply(MODEL, batch_size=np.array([8])), T, r"Received: batch_size=array\(\[8\]\)"),
    "batch size: with a plan": (lambda: apply(MODEL, plan_of(APPLIED), batch_size="8"), T, "Received: batch_size='8'"),
    # a model whose `call` is Python code
    "Python model: sqrt": (
        lambda: apply(PYTHON, "sqrt"),
        C,
        r"(?s)'python' is no graph.*Recompute\(Block.*strategy='sqrt', model of class Own",
    ),
    "Python model: no strategy": (lambda: plan(PYTHON), C, r"(?s)layers=\[Block, .*strategy='sqrt', model of class Own"),
    "Python model: selective by cost": (lambda: apply(PYTHON, "selective"), C, "(?s)cost is not known.*strategy='selective'"),
    "Python model: a target": (lambda: apply(PYTHON, target=0.5), C, "(?s)cost is not known.*strategy='selective'"),
    "Python model: a budget": (lambda: apply(PYTHON, memory="1GiB"), C, "(?s)cost is not known.*strategy='budget'"),
    "Python model: a callable": (lambda: apply(PYTHON, returns([(0, 1)])), C, "(?s)cost is not known.*strategy=<function"),
    "Python model: a device": (
        lambda: apply(PYTHON, layers=[Block], device="d.json"),
        C,
        "(?s)cost is not known.*device='d.json'",
    ),
    "Python model: an optimizer": (
        lambda: plan(PYTHON, layers=[Block], optimizer="adam"),
        C,
        "(?s)not known.*optimizer='adam'",
    ),
    "Python model: misspelt": (lambda: apply(PYTHON, layers=["block/0"]), C, r"matches 'block/0'\. Near matches: blocks/0"),
    "Python model: none such": (lambda: apply(PYTHON, layers=["zz*"]), C, r"matches 'zz\*'\. The model has: blocks/0"),
    "Python model: a class it has not": (
        lambda: apply(PYTHON, layers=[L.LSTM]),
        C,
        r"matches <class '.*LSTM'>\. The model has:",
    ),
    "Python model: a layer of another": (lambda: apply(PYTHON, layers=[MODEL.layers[1]]), C, "matches 'd0'"),
    "Python model: itself": (lambda: apply(PYTHON, layers=[PYTHON]), C, "matches 'python'"),
    "Python model: nothing matches": (lambda: apply(PYTHON, layers=lambda layer: False), C, "the predicate layers=<function"),
    "Python model: a `Recompute`": (
        lambda: apply(PYTHON, layers=["wrapped"]),
        C,
        r"`Recompute` layers.*never are\. Received: layers=\['wrapped'\]",
    ),
    "Python model: not built": (
        lambda: apply(Own(name="late"), layers=["made"]),
        C,
        "'late' is not built yet.*Call it on data",
    ),
    "Python model: a plan of another": (
        lambda: apply(PYTHON, plan_of(APPLIED)),
        C,
        "another model: the model has the layer '.*', it has not. R|another model: it has the layer",
    ),
    "Python model: its plan on another": (
        lambda: apply(MODEL, plan_of(PYTHON_APPLIED)),
        C,
        "its call 0 is 'wrapped', the model's is 'd0'",
    ),
    "Python model: a plan with segments of two": (
        lambda: apply(PYTHON, dataclasses.replace(plan_of(PYTHON_APPLIED), segments=(Segment(("blocks/0", "blocks/1")),))),
        C,
        r"a segment is one layer there.*Received: segment \('blocks/0', 'blocks/1'\)",
    ),
    "Python model: its blocks changed": (
        lambda: PYTHON_APPLIED.blocks.append(Block()),
        C,
        r"'python'.*cannot be changed.*remove\(model\)",
    ),
    "Python model: its plan drawn": (
        lambda: plan_of(PYTHON_APPLIED).plot(FOLDER / "p.png"),
        C,
        "bytes at each moment.*Received: a plan with 0",
    ),
    "Python model: compare": (compared(PYTHON), C, r"(?s)'python' is no graph.*model of class Own"),
    "Python model: max_batch_size": (largest(PYTHON), C, r"(?s)'python' is no graph.*model of class Own"),
    # positions
    "Pick: none there": (
        lambda: apply(MODEL, layers=[Pick("d*")[9:]]),
        C,
        r"Pick\('d\*'\)\[9:\] takes none of the 4 layers .*: d0, d1, d2, d3",
    ),
    "Pick: too far": (lambda: apply(MODEL, layers=[Pick(L.Dense)[7]]), C, r"Pick\(Dense\)\[7\] takes none of the 5"),
    "Pick: of nothing": (lambda: apply(MODEL, layers=[Pick("zz")[0]]), C, "No layer of the model matches 'zz'"),
    "Pick: of a number": (lambda: apply(MODEL, layers=[Pick(3)[0]]), T, r"Received: 3 in layers=\[Pick\(3\)\[0\]\]"),
    "Pick: alone": (lambda: apply(MODEL, layers=Pick("d*")[0]), T, r"Give a list: layers=\[Pick\('d\*'\)\[0\]\]"),
    "Pick: a name as position": (lambda: Pick("d*")["d0"], T, r"Pick\(Block\)\[::2\].*Received: 'd0' of type str"),
    "Pick: a fraction": (lambda: Pick("d*")[0.5], T, r"Received: 0\.5 of type float"),
    "Pick: a slice of fractions": (lambda: Pick("d*")[0.5:2], T, r"Received: slice\(0\.5, 2, None\)"),
    "Pick: nothing": (lambda: Pick("d*")[None], T, "Received: None of type NoneType"),
    "Pick: step 0": (lambda: Pick("d*")[::0], V, r"step cannot be 0.*Received: slice\(None, None, 0\)"),
    # what must stay plain, and what nothing is gained by
    "embedding: in a segment": (
        lambda: apply(EMBEDDED, returns([(0, 2)])),
        C,
        r"without embeddings.*segment \(0, 2\) of 3 calls",
    ),
    "embedding: chosen": (lambda: apply(EMBEDDED, layers=["table"]), C, r"embeddings.*Received: layers=\['table'\]"),
    "nested model: cut through": (
        lambda: apply(NESTED, returns([(0, 2)])),
        C,
        r"within one nested model or holding all .*\(0, 2\) of 3",
    ),
    "frozen: chosen": (lambda: apply(FROZEN, layers=["a", "b"]), C, r"no trainable weight comes before.*layers=\['a', 'b'\]"),
    "layers: a single layer": (
        lambda: apply(MODEL, layers=MODEL.layers[1]),
        T,
        "Received: layers=<Dense name=d0.* of type Dense",
    ),
    "layers: with a budget": (
        lambda: apply(MODEL, memory="1GiB", layers=["d0"]),
        C,
        "`memory` goes with .*strategy='selective', memory=",
    ),
    "target: with layers": (lambda: apply(MODEL, layers=["d0"], target=0.5), C, "not both. Received: target=0.5"),
    # orders of calls
    "order: more layers since the plan": (added_to_after_apply, C, "its call 3 is 'nothing', the model's is 'more'"),
    "order: another name since it was saved": (
        renamed_after_save,
        C,
        "its call 0 is 'd0', the model's is 'other'. The plan was saved with",
    ),
    "order: plan of a plan": (lambda: plan(MODEL, plan_of(APPLIED), layers=["d0"]), C, "Received: a `Plan` of 'full', layers="),
    "order: gradient of gradients": (second_order, (NotImplementedError, LookupError), "'?mine'?.* by tf_ckpt.*disabled"),
    # plans and their files
    "Plan.load: number": (lambda: Plan.load(3), T, "`path` must be a string or path-like. Received: path=3 of type int"),
    "Plan.load: no such file": (lambda: Plan.load(FOLDER / "none.json"), FileNotFoundError, "none.json"),
    "Plan.load: a folder": (lambda: Plan.load(FOLDER), (C, OSError), "wrong_uses"),
    "Plan.save: no such folder": (lambda: plan_of(APPLIED).save(FOLDER / "none" / "p.json"), (C, OSError), "none/p.json"),
    "Plan.save: nothing": (lambda: plan_of(APPLIED).save(None), T, "Received: path=None of type NoneType"),
    "Plan.plot: another format": (
        lambda: plan_of(APPLIED).plot(FOLDER / "p.doc"),
        C,
        "matplotlib draws .*Received: path='.*p.doc'",
    ),
    "Plan.of: names": (lambda: apply(MODEL, lambda chain: Plan.of(chain, ["d0"], "x")), C, r"Received: ranges=\['d0'\]"),
    "plan file: empty": (
        lambda: Plan.load(file("w", b"")),
        C,
        r"reads the JSON that `Plan.save` writes. Received: path='.*w', which holds b''",
    ),
    "plan file: an archive": (lambda: Plan.load(file("w", b"PK\x03\x04\xff\xfe")), C, "reads the JSON .* which holds b'PK"),
    "plan file: YAML": (lambda: Plan.load(file("w", b"plan: 3")), C, "reads the JSON .*which holds b'plan: 3'"),
    "plan file: brackets": (lambda: Plan.load(file("w", b"[" * 100000)), C, r"reads the JSON .*which holds b'\[\[\[.*\.\.\. "),
    "plan file: a list": (
        lambda: Plan.load(file("w", b"[1, 2]")),
        C,
        "has format='tf_ckpt.Plan'. Received: path='.*w', which holds a list",
    ),
    "plan file: null": (lambda: Plan.load(file("w", b"null")), C, "which holds a NoneType"),
    "plan file: no format": (lambda: Plan.load(file("w", b"{}")), C, "which holds format=None"),
    "plan file: another format": (
        lambda: Plan.load(file("w", b'{"format": "other", "version": 1}')),
        C,
        "which holds format='other'",
    ),
    "plan file: no version": (
        lambda: Plan.load(file("w", b'{"format": "tf_ckpt.Plan"}')),
        C,
        "reads plans of version 1. Received: .* version=None",
    ),
    "plan file: a later version": (
        lambda: Plan.load(file("w", b'{"format": "tf_ckpt.Plan", "version": 2}')),
        C,
        "reads plans of version 1. Received: .*version=2.* `tf_ckpt.plan`",
    ),
    "plan file: version as text": (
        lambda: Plan.load(file("w", b'{"format": "tf_ckpt.Plan", "version": "1"}')),
        C,
        "version='1'",
    ),
    "plan file: version as a flag": (
        lambda: Plan.load(file("w", b'{"format": "tf_ckpt.Plan", "version": true}')),
        C,
        "version=True",
    ),
    "plan file: nothing else": (
        lambda: Plan.load(file("w", b'{"format": "tf_ckpt.Plan", "version": 1}')),
        C,
        r"needs 'layers': .*which has \['format', 'version'\]",
    ),
    "plan file: a batch of 0": (
        lambda: Plan.load(plan_file(batch_size=0)),
        C,
        "'batch_size' must be a whole number, 1 or more.*batch_size=0",
    ),
    "plan file: of a calibration": (
        lambda: tf_ckpt.Calibration.load(plan_file()),
        C,
        "has format='tf_ckpt.Calibration'.*holds format='tf_ckpt.Plan'",
    ),
    # the device of a plan, and calibration
    **{
        f"{act.__name__}: device={device!r}": (
            lambda act=act, device=device: act(MODEL, device=device),
            T,
            "`device` must be a `Calibration` .*or the path .*Received: device=",
        )
        for act in (plan, apply)
        for device in (3, True, b"device.json", {"matmul": 1}, Calibration)
    },
    **{
        f"{act.__name__}: device={device!r}": (
            lambda act=act, device=device: act(MODEL, device=device),
            C,
            r"`device` must be a `Calibration`, or the path .*calibrate\('device.json'\) measures .*"
            rf"no such file. Received: device='{device}'",
        )
        for act in (plan, apply)
        for device in ("CPU:0", "GPU:0", "", ".")
    },
    "calibrate: an unknown device": (lambda: calibrate(device="TPU:0"), C, r"one of \[.*'CPU:0'.*\]. Received: device='TPU:0'"),
    "calibrate: a device too many": (lambda: calibrate(device="CPU:99"), C, "Received: device='CPU:99'"),
    "calibrate: device number": (lambda: calibrate(device=3), T, r"one of \[.*\], or None. Received: device=3"),
    "calibrate: integers": (lambda: calibrate(dtype="int32"), C, r"one of \('float32', .*Received: dtype='int32'"),
    "calibrate: dtype number": (lambda: calibrate(dtype=16), T, "`dtype` must be a string. Received: dtype=16"),
    "calibrate: no time": (lambda: calibrate(seconds=0), C, "positive and finite. Received: seconds=0"),
    "calibrate: no number": (lambda: calibrate(seconds=math.nan), C, "Received: seconds=nan"),
    "calibrate: time as text": (lambda: calibrate(seconds="1"), T, "`seconds` must be a number. Received: seconds='1'"),
    "calibrate: path number": (lambda: calibrate(path=3), T, "`path` must be .*Received: path=3"),
    "calibrate: no such folder": (
        lambda: calibrate(FOLDER / "none" / "d.json"),
        C,
        "its folder does not exist. Received: path='.*none/d.json'",
    ),
    **{
        f"calibration file: {what}, {way}": (
            lambda read=read, content=content: read(file("w", content)),
            C,
            message,
        )
        for way, read in (("loaded", Calibration.load), ("given", lambda path: plan(MODEL, device=path)))
        for what, (content, message) in NO_CALIBRATIONS.items()
    },
    **{
        f"calibration file: {what}": (lambda rows=rows: plan(MODEL, device=calibration_file(rows)), C, ABSURD)
        for what, rows in {
            "seconds without end": [[1e6, 1e299]],
            "seconds of nothing": [[1e6, 1e-299]],
            "work without end": [[1e6, 1.0], [1e299, 2.0]],
            "infinite": [[1e6, math.inf]],
            "no number": [[1e6, math.nan]],
            "work of nothing": [[0, 1.0]],
            "sizes that fall": [[1e6, 1.0], [1e3, 1.0]],
            "no rows": [],
        }.items()
    },
    "Calibration: absurd seconds": (
        lambda: Calibration("CPU", "float32", *[[(1e6, 1e299)]] * 3),
        C,
        r"at most 1e\+18, seconds from 1e-12 to 1e\+06. Received: matmul=\[\(1000000.0, 1e\+299\)\]",
    ),
    # the memory, target and levels
    **{
        f"memory: {memory!r}": (lambda memory=memory: plan(MODEL, "budget", memory=memory), error, "Received: memory=")
        for error, values in (
            (C, ("six", "6 GiX", "", "-3MB", "1e", "2e-9", "1e999", 0, -5, float("nan"), float("inf"))),
            (T, (True, [1], b"6GiB")),
        )
        for memory in values
    },
    "memory: too little": (
        lambda: apply(MODEL, memory=1000),
        C,
        r"The least that a plan was found for is .* MiB.*Received: memory=1000",
    ),
    **{
        f"target: {target!r}": (lambda target=target: plan(MODEL, target=target), (C, T), "`target` must be .*Received: ")
        for target in (0, 1, 1.5, -0.1, "half", True)
    },
    **{
        f"levels: {levels!r}": (
            lambda levels=levels: plan(MODEL, levels=levels),
            (C, T),
            "`levels` must be .*Received: levels=",
        )
        for levels in (0, 1.5, True, "two")
    },
    # compare
    "compare: misspelt": (compared(strategies=["sqr"]), C, "strategy='sqr'"),
    "compare: a name alone": (compared(strategies="sqrt"), T, "strategies='sqrt'"),
    "compare: a pair of something else": (compared(strategies=[("sqrt", 3)]), T, r"\('sqrt', 3\)"),
    "compare: a batch size for one": (compared(strategies=[("sqrt", {"batch_size": 3})]), T, "batch_size"),
    "compare: a budget that nothing fits": (compared(strategies=[("budget", {"memory": 1})]), C, "No plan fits"),
    "compare: no steps": (compared(steps=0), C, "steps=0"),
    "compare: half a step": (compared(steps=1.5), T, "steps=1.5"),
    "compare: batches larger than the data": (compared(batch_size=999), C, "only 48 samples.*batch_size=999"),
    "compare: memory in words": (compared(memory="six"), C, "memory='six'"),
    "compare: memory as a share": (compared(memory=0.5), C, "memory=0.5"),
    "compare: a simulated device in this process": (compared(memory="1GiB", isolate=False), C, "isolate=False"),
    "compare: optimizer number": (compared(optimizer=3), (T, V), "3"),
    "compare: an unknown optimizer": (compared(optimizer="bogus"), C, "optimizer='bogus'"),
    "compare: no loss": (compared(loss=None), C, "is not compiled"),
    "compare: an unknown loss": (compared(loss="bogus"), C, "loss='bogus'"),
    "compare: losses and a number": (compared(loss=["mse", 3]), C, r"loss=\['mse', 3\]"),
    "compare: jit_compile in words": (compared(jit_compile="maybe"), C, "jit_compile='maybe'"),
    "compare: isolate in words": (compared(isolate="yes"), T, "isolate='yes'"),
    "compare: less than a MiB": (compared(memory=2**20 - 1), C, "1 MiB of memory or more.*memory=1048575"),
    "compare: verbose array": (compared(verbose=np.ones(2)), C, "verbose=array"),
    "compare: verbose 7": (compared(verbose=7), C, "verbose=7"),
    "compare: an iterator": (compared(x=iter([1])), T, "`x` must be arrays"),
    "compare: a list of lists": (compared(x=[[1.0] * 8] * 48), T, r"`x` must be arrays: `numpy.asarray`.{,200}$"),
    "compare: another width": (compared(x=np.ones((48, 3))), C, r"cannot take these data.*x of shape \(32, 3\)"),
    "compare: sparse data": (compared(x=tf.sparse.from_dense(np.eye(8))), T, "dense arrays. Received: a SparseTensor"),
    "compare: no targets": (compared(y=None), C, "The loss 'mse' needs targets. Received: y=None"),
    "compare: words as targets": (
        compared(y=np.array([["a", "b"]] * 48)),
        C,
        "`y` must hold numbers. Received: y of dtype <U1",
    ),
    "compare: fewer targets": (compared(y=np.zeros((3, 2))), C, "same number of samples"),
    "compare: a class of a function": (
        compared(LOCAL, isolate=True),
        C,
        r"class of_a_function.<locals>.Mine is defined in a function",
    ),
    "compare: a layer": (compared(MODEL.layers[1]), T, "must be a `keras.Model`"),
    "compare: a batch that the model does not take": (
        compared(FIXED, batch_size=16),
        C,
        "takes batches of 5 only.*batch_size=16",
    ),
    # max_batch_size
    "max_batch_size: memory in words": (largest(memory="six"), C, "memory='six'"),
    "max_batch_size: memory as a share": (largest(memory=0.5), C, "memory=0.5"),
    "max_batch_size: no memory": (largest(memory=None), C, "in bytes or as text such as '6GiB'. Received: memory=None"),
    "max_batch_size: less than a MiB": (largest(memory=2**20 - 1, verify=True), C, "1 MiB of memory or more.*memory=1048575"),
    "max_batch_size: memory list": (largest(memory=[1]), T, r"memory=\[1\]"),
    "max_batch_size: misspelt": (largest(strategy="sqr"), C, "strategy='sqr'"),
    "max_batch_size: a plan": (largest(strategy=plan_of(APPLIED)), T, "a plan is for one batch size.{,200}$"),
    "max_batch_size: a target of another strategy": (largest(target=0.5), C, "target=0.5"),
    "max_batch_size: at most none": (largest(most=0), C, "most=0"),
    "max_batch_size: at most two and a half": (largest(most=2.5), T, "most=2.5"),
    "max_batch_size: verify number": (largest(verify=1), T, "verify=1"),
    "max_batch_size: verbose 7": (largest(verbose=7), C, "verbose=7"),
    "max_batch_size: optimizer number": (largest(optimizer=3), T, "optimizer=3"),
    "max_batch_size: an unknown loss": (largest(loss="bogus"), C, "loss='bogus'"),
    "max_batch_size: jit_compile in words": (largest(jit_compile="maybe"), C, "jit_compile='maybe'"),
    "max_batch_size: targets alone": (largest(y=np.zeros((3, 2))), C, "x=None, y=array"),
    "max_batch_size: no targets": (largest(x=np.zeros((3, 8))), C, "The loss 'mse' needs targets. Received: y=None"),
    "max_batch_size: another width": (
        largest(x=np.zeros((3, 5)), y=YS[:3]),
        C,
        r"cannot take these data: [^.]*\. Received: x of shape",
    ),
    "max_batch_size: a class of a function": (largest(LOCAL, verify=True), C, "Mine is defined in a function.*verify=False"),
    "max_batch_size: a stated batch size": (largest(FIXED), C, "no batch size"),
    "max_batch_size: number": (largest(3), T, "model=3"),
    # callbacks
    **{
        f"MemoryLogger: {name}={value!r}": (logged(**{name: value}), V, f"{name}={re.escape(repr(value))}")
        for name, values in {
            "update_freq": ("step", "epochs", 0, -3, True, 2.5, 1.5, None, ["epoch"], np.array([1, 2])),
            "reset": ("no", 1),
            "profile_batches": (-1, True, "all", 1.5, np.array([1, 2])),
            "log_dir": (3,),
            "verbose": (np.array([1, 2]), 2, "loud", "yes", None),
        }.items()
        for value in values
    },
    "MemoryLogger: unknown argument": (lambda: MemoryLogger(frequency=3), T, "'frequency'"),
    "MemoryLogger: probe data of another shape": (
        fitted(lambda: MemoryLogger(probe_data=XS[:4, :3])),
        V,
        r"`probe_data` must be inputs of one batch.*\(4, 3\)",
    ),
    "MemoryLogger: a file as folder": (
        fitted(lambda: MemoryLogger(log_dir=file("w", b""))),
        V,
        "`log_dir` must be a directory that can be written to.*log_dir='.*w'",
    ),
    # the command line
    "command: nothing": (command(""), Ended, "COMMAND"),
    "command: an unknown option": (command("plan wrong_models:small --nope"), Ended, "unrecognized arguments: --nope"),
    "command: no function": (command("plan missing"), Ended, "module:function"),
    "command: no model in a file": (command("plan text.keras"), Ended, "does not load this file as a model"),
    "command: unknown strategies": (command("compare wrong_models:small --strategies sqr"), Ended, "Did you mean 'sqrt'?"),
    "command: no plan file": (command("compare wrong_models:small --strategies none.json"), Ended, "none.json"),
    "command: a module that fails": (command("plan broken:small"), Ended, "ZeroDivisionError"),
    "command: another function": (command("plan wrong_models:smal"), Ended, "has no function 'smal'; it has: "),
    "command: no data": (command("compare wrong_models:small --data wrong_models:nothing"), Ended, r"must return \(x, y\)"),
    "command: a function that fails": (
        command("max-batch wrong_models:raises --memory 1MiB"),
        Ended,
        "RuntimeError: two lines",
    ),
    "command: no number": (command("plan wrong_models:small --batch-size none"), Ended, "Received: 'none'"),
    "command: a huge number": (
        command("plan wrong_models:small --batch-size 99999999999999999999999"),
        Ended,
        "--batch-size: must be a positive whole number, 2,147,483,647 at most. Received: '99999999999999999999999'",
    ),
    "command: a function that exits": (
        command("plan wrong_models:exits"),
        Ended,
        r"The function ended the program: SystemExit\(5\). Received: 'wrong_models:exits'",
    ),
    "command: a module that exits": (command("plan exits:small"), Ended, "Module 'exits' cannot be imported: SystemExit: 3"),
    "command: an unknown loss": (
        command("max-batch wrong_models:small --memory 8MiB --no-verify --loss bogus"),
        Ended,
        "Received: loss='bogus'",
    ),
    "command: an unknown optimizer": (
        command("plan wrong_models:small --optimizer bogus"),
        Ended,
        "Received: optimizer='bogus'",
    ),
    "command: no memory": (command("max-batch wrong_models:small"), Ended, "say it with --memory"),
    "command: no budget": (command("plan wrong_models:small --strategy budget"), Ended, "say it with --memory"),
    "command: another batch size": (
        command("compare wrong_models:fixed --batch-size 32 --strategies none"),
        Ended,
        "takes batches of 6 only",
    ),
    "command: a Lambda layer": (
        command("plan lambda.keras"),
        Ended,
        "does not load Lambda layers from a file, as their code could be anybody's: give MODULE:FUNC",
    ),
    "command: a class of nobody": (
        command("plan unknown.keras"),
        Ended,
        "does not hold the code of 'Unknown': name the module that registers it",
    ),
    "command: a Python model": (command("plan wrong_models:python"), Ended, "'own' is no graph of layers"),
    "command: an unknown picture": (command("compare no_module:small --plot c.bogus"), Ended, "matplotlib draws"),
    "command: no folder": (
        command("max-batch no_module:small --save none/p.json"),
        Ended,
        "its folder does not exist. Received: path='none/p.json'",
    ),
    "command: a folder": (command("plan no_module:small --save ."), Ended, r"it is a folder. Received: path='\.'"),
    **{
        f"command: {option} without a value": (
            command(f"plan wrong_models:small {option} "),
            Ended,
            "must not be empty. Received: ''",
        )
        for option in ("--strategy", "--optimizer", "--save", "--memory", "--plot", "--layers", "--import")
    },
}


# --- the page


def described(wrong, error):
    """Returns the message that a wrong use gets."""
    try:
        wrong()
    except error as raised:
        return str(raised)
    return "NO ERROR"


if __name__ == "__main__":
    for name, (wrong, error, _) in WRONG.items():
        print(f"{name}\n    {described(wrong, error)}\n")
    print(f"{len(WRONG)} wrong uses")
    shutil.rmtree(FOLDER)
