"""The zoo: models that nobody here wrote train as plain to the bit, by each strategy.

`make test` takes a few small models; `make test-all` each of `keras.applications`, and of KerasHub where it is
installed.
`benchmarks/zoo.py` measures the same, and peaks, for `docs/zoo.md`.
"""

import warnings

import keras
import pytest
import zoo

import tf_ckpt

ENTRIES = zoo.entries()
# What CI runs: a chain, and (with KerasHub) text and images. The rest takes hours.
IN_CI = {("MobileNet", "sqrt")}
IN_CI |= {("BertBackbone", "sqrt"), ("QwenMoeBackbone", "selective"), ("ViTDetBackbone", "recursive")}
EAGER = ("MobileNet", "GPT2Backbone", "ViTDetBackbone")  # the same operations, one by one: a few will do
SLOW = pytest.mark.slow


def pairs():
    for name in ENTRIES:
        for strategy in zoo.STRATEGIES:
            yield pytest.param(name, strategy, marks=[] if (name, strategy) in IN_CI else [SLOW])


def check(name, strategy, mode):
    entry = ENTRIES[name]
    model = entry.build()
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    data = entry.data(model)
    with warnings.catch_warnings():
        # A backbone in one layer has nothing between its ends: that it trains as it was is then the right answer.
        warnings.filterwarnings("ignore", message="Nothing in model", category=tf_ckpt.CheckpointWarning)
        applied, _ = zoo.apply(model, strategy, entry.batch)
    plan = tf_ckpt.plan_of(applied)
    assert not plan.untraced, plan.untraced
    want, have = (zoo.train(entry, m, variables, data, mode) for m in (model, applied))
    found = zoo.difference(want.values, have.values)
    assert found.count >= zoo.STEPS + len(variables)
    assert not found.names, f"{len(found.names)} of {found.count} differ, by {found.largest:.3g} at most: {found.names[-3:]}"


@pytest.mark.parametrize(("name", "strategy"), list(pairs()))
def test_a_model_trains_as_plain(name, strategy):
    check(name, strategy, "graph")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", zoo.STRATEGIES)
@pytest.mark.parametrize("name", [name for name in EAGER if name in ENTRIES])
def test_a_model_trains_as_plain_in_eager_mode(name, strategy):
    check(name, strategy, "eager")


def test_differences_are_found():
    entry = zoo.Entry("tiny", "tests", tiny, 4)
    model = entry.build()
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    data = entry.data(model)
    want = zoo.train(entry, model, variables, data, "graph")
    same = zoo.difference(want.values, zoo.train(entry, model, variables, data, "graph").values)
    assert (same.largest, same.names) == (0.0, [])
    variables[0].assign(variables[0] * (1 + 2**-22))
    other = zoo.difference(want.values, zoo.train(entry, model, variables, data, "graph").values)
    assert 0 < other.largest < 1e-4
    assert any(name.startswith("gradient") for name in other.names)
    assert other.names[-1].startswith("value")
    lost = {**want.values, "loss of step 0": None}
    assert zoo.difference(want.values, lost).largest == float("inf")


def tiny():
    inputs = keras.Input((8,))
    return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.BatchNormalization()(keras.layers.Dense(8)(inputs))))
