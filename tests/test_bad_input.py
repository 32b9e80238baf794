"""Wrong arguments: each raises a `TypeError` or `ValueError` that quotes it, and the model is as it was."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_ckpt
from tf_ckpt import CheckpointError, Plan, Recompute, apply, plan, plan_of, recompute, remove
from tf_ckpt.callbacks import MemoryLogger
from tf_ckpt.strategies import Range

L = keras.layers


@pytest.fixture(autouse=True)
def fresh_keras():
    """In place of conftest's: the one model below serves all tests."""


def build():
    inputs = keras.Input((8,), name="x")
    x = inputs
    for number in range(4):
        x = L.Dense(8, activation="gelu", name=f"d{number}")(x)
    x = L.BatchNormalization(name="norm")(x)
    return keras.Model(inputs, L.Dense(2, name="head")(x), name="plain")


MODEL = build()
APPLIED = apply(MODEL, "full")
OTHER = keras.Sequential([keras.Input((8,)), L.Dense(8, activation="gelu", name="d0"), L.Dense(2, name="end")])
FIXED = keras.Sequential([keras.Input((8,), batch_size=5), L.Dense(2)])
X = tf.ones((2, 8))


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


T, V, C = TypeError, ValueError, CheckpointError
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
    "strategy: nothing of it": (lambda: apply(MODEL, False), T, "Received: strategy=False of type bool"),
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
    # MemoryLogger
    "update_freq: zero": (lambda: MemoryLogger(0), V, "Received: update_freq=0"),
    "update_freq: negative": (lambda: MemoryLogger(update_freq=-3), V, "Received: update_freq=-3"),
    "update_freq: fraction": (lambda: MemoryLogger(1.5), (T, V), r"Received: update_freq=1\.5"),
    "update_freq: flag": (lambda: MemoryLogger(True), (T, V), "Received: update_freq=True"),
    "update_freq: nothing": (lambda: MemoryLogger(None), (T, V), "Received: update_freq=None"),
    "update_freq: text": (lambda: MemoryLogger("epochs"), V, "Received: update_freq='epochs'"),
    "update_freq: list": (lambda: MemoryLogger(["epoch"]), (T, V), r"Received: update_freq=\['epoch'\]"),
    "reset: number": (lambda: MemoryLogger(reset=1), (T, V), "Received: reset=1"),
    "reset: text": (lambda: MemoryLogger(reset="no"), (T, V), "Received: reset='no'"),
    "verbose: number": (lambda: MemoryLogger(verbose=2), V, "Received: verbose=2"),
    "verbose: text": (lambda: MemoryLogger(verbose="yes"), (T, V), "Received: verbose='yes'"),
    "verbose: nothing": (lambda: MemoryLogger(verbose=None), (T, V), "Received: verbose=None"),
    "MemoryLogger: unknown argument": (lambda: MemoryLogger(frequency=3), T, "'frequency'"),
}


APPLIED(X)


def state(model):
    attributes = {name: id(value) for name, value in model.__dict__.items()}
    return attributes, [id(v) for v in model.variables], [id(x) for x in model.layers], plan_of(model), remove(model)


@pytest.mark.parametrize("what", WRONG)
def test_wrong_argument(what):
    wrong, error, message = WRONG[what]
    models = (MODEL, APPLIED, OTHER)
    before = [state(model) for model in models]
    values = [v.numpy() for v in MODEL.variables]
    outputs = APPLIED(X).numpy()
    with pytest.raises(error) as raised:
        wrong()
    assert re.search(message, str(raised.value)), str(raised.value)
    assert [state(model) for model in models] == before
    for v, value in zip(MODEL.variables, values, strict=True):
        np.testing.assert_array_equal(v.numpy(), value)
    np.testing.assert_array_equal(APPLIED(X), outputs)


def test_our_errors_are_value_errors():
    assert issubclass(CheckpointError, ValueError)
    assert issubclass(tf_ckpt.CheckpointWarning, UserWarning)


def test_a_strategy_that_fails_passes_its_error_on():
    def strategy(chain):
        raise KeyError("mine")

    before = state(MODEL)
    with pytest.raises(KeyError, match="mine"):
        apply(MODEL, strategy)
    assert state(MODEL) == before


def test_a_predicate_that_fails_passes_its_error_on():
    with pytest.raises(AttributeError, match="kernel_size"):
        apply(MODEL, "selective", layers=lambda layer: layer.kernel_size == 3)


def test_a_segment_of_what_must_stay_plain():
    inputs = keras.Input((4,), dtype="int32")
    x = L.Dense(8, activation="gelu", name="d")(L.Embedding(9, 8, name="table")(inputs))
    model = keras.Model(inputs, L.Dense(2)(x))
    with pytest.raises(CheckpointError, match=r"without embeddings.*Received: segment \(0, 2\) of 3 calls"):
        apply(model, returns([(0, 2)]))
    with pytest.raises(CheckpointError, match=r"embeddings.*Received: layers=\['table'\]"):
        apply(model, "selective", layers=["table"])


def test_a_segment_across_the_edge_of_a_nested_model():
    inside, outer = keras.Input((8,)), keras.Input((8,))
    nested = keras.Model(inside, L.Dense(8)(L.Dense(8)(inside)))
    model = keras.Model(outer, nested(L.Dense(8)(outer)))
    with pytest.raises(CheckpointError, match=r"within one nested model or holding all of it.*segment \(0, 2\) of 3 calls"):
        apply(model, returns([(0, 2)]))
