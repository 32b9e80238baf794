"""Saved and loaded: an applied model comes back as one, and goes on as if it had never been away."""

import json
import subprocess
import sys
import textwrap
import zipfile

import keras
import numpy as np
import pytest
import saving_models
from helpers import thirds
from saving_models import MAKERS, assert_equal, compiled, data, train, with_seeds_of

import tf_ckpt
from tf_ckpt.saving import Applied

L = keras.layers


def saved(model, path):
    model.save(path)
    return keras.models.load_model(path)


SLOW_MAKERS = {saving_models.nested, saving_models.scaled}


@pytest.mark.parametrize(
    "make",
    [pytest.param(make, marks=[pytest.mark.slow] if make in SLOW_MAKERS else []) for make in MAKERS],
    ids=[make.__name__ for make in MAKERS],
)
def test_a_loaded_model_trains_on_bit_for_bit(make, tmp_path):
    model = compiled(tf_ckpt.apply(make(), thirds))
    plan = tf_ckpt.plan_of(model)
    assert plan.segments
    train(model)
    loaded = saved(model, tmp_path / "model.keras")
    again = with_seeds_of(saved(loaded, tmp_path / "again.keras"), model)
    want = train(model)
    for each in (loaded, again):
        assert type(each) is type(model)
        assert tf_ckpt.plan_of(each).ranges() == plan.ranges()
        assert make is saving_models.scaled or tf_ckpt.plan_of(each) == plan  # its constructor does not name all layers
        assert tf_ckpt.plan_of(tf_ckpt.remove(each)) is None
        assert int(each.optimizer.iterations) == 3
    assert_equal(train(again), want)


def test_an_applied_model_inside_a_plain_one(tmp_path):
    model = compiled(saving_models.inside_a_plain_one())
    plan = tf_ckpt.plan_of(model.get_layer("planned"))
    train(model)
    loaded = with_seeds_of(saved(model, tmp_path / "model.keras"), model)
    assert tf_ckpt.plan_of(loaded) is None
    assert tf_ckpt.plan_of(loaded.get_layer("planned")) == plan
    assert_equal(train(loaded), train(model))


def test_a_loaded_model_recomputes(tmp_path):
    runs = []

    class Told(L.Layer):
        def call(self, x):
            runs.append(tf_ckpt.is_recomputing())
            return keras.ops.tanh(x)

    inputs = keras.Input((8,))
    x = L.Dense(8)(Told(name="second")(L.Dense(8)(Told(name="first")(inputs))))
    model = tf_ckpt.apply(keras.Model(inputs, x), thirds)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", custom_objects={"Told": Told})
    counts = []
    for each in (model, loaded):
        each.compile("sgd", "mse", jit_compile=False)
        del runs[:]
        each.train_on_batch(data()[0], data()[0])
        counts.append((runs.count(False), runs.count(True)))
    assert counts[0] == counts[1]
    assert counts[1][1] >= 1


def test_what_the_file_holds(tmp_path):
    model = tf_ckpt.apply(saving_models.functional(), "full")
    tf_ckpt.remove(model).save(tmp_path / "plain.keras")
    compiled(model).save(tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as file:
        record = json.loads(file.read("config.json"))
    with zipfile.ZipFile(tmp_path / "plain.keras") as file:
        plain = json.loads(file.read("config.json"))
    assert record["registered_name"] == "tf_ckpt>Applied"
    assert record["compile_config"]["loss"] == "mse"
    assert record["config"]["model"] | {"compile_config": {}} == plain | {"compile_config": {}}
    assert record["config"]["plan"]["format"] == "tf_ckpt.Plan"
    uncompiled = keras.models.load_model(tmp_path / "model.keras", compile=False)
    assert not uncompiled.compiled
    assert tf_ckpt.plan_of(uncompiled) == tf_ckpt.plan_of(model)
    # Nothing to recompute, nothing of ours in the file.
    nothing = saved(tf_ckpt.apply(model, "none"), tmp_path / "nothing.keras")
    assert tf_ckpt.plan_of(nothing) is None


def record():
    return keras.saving.serialize_keras_object(tf_ckpt.apply(saving_models.functional(), "full"))["config"]


def test_files_that_do_not_fit():
    def error(config):
        with pytest.raises(tf_ckpt.CheckpointError) as found:
            Applied.from_config(config)
        return str(found.value)

    assert tf_ckpt.plan_of(Applied.from_config(record())).segments
    config = record()
    config["model"]["config"]["layers"][1]["config"]["name"] = "other"
    text = error(config)
    assert "its call 0 is 'b0_dense', the model's is 'other'. The plan was saved with the model" in text
    assert "`model.load_weights(path)`" in text
    for change, says in (
        (
            {"layers": "x"},
            "'layers' must be a list of the names of calls. Received: config['plan'] of a saved model, which has",
        ),
        ({"version": 7}, "Received: config['plan'] of a saved model, which holds version=7"),
    ):
        config = record()
        config["plan"] |= change
        assert says in error(config)
    assert "which holds a NoneType" in error({"model": record()["model"]})


FRESH = """
    import sys
    import keras, numpy as np, tensorflow as tf
    sys.path[:0] = {paths!r}
    if {blocked!r}:
        sys.modules["tf_ckpt"] = None  # as if it were not installed
    else:
        import tf_ckpt, saving_models
        tf.config.experimental.enable_op_determinism()
    model = keras.models.load_model({path!r})
    logs, values = saving_models.train(model)
    np.savez({out!r}, *values, losses=logs["loss"])
"""


def fresh(path, blocked=False):
    """Loads and trains in a process of its own; returns its end and what it found."""
    out = str(path) + ".npz"
    text = textwrap.dedent(FRESH).format(paths=[p for p in sys.path if p], blocked=blocked, path=str(path), out=out)
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=240), out


@pytest.mark.slow
def test_another_process(tmp_path):
    model = compiled(tf_ckpt.apply(saving_models.scaled(), "full"))
    model.save(tmp_path / "model.keras")
    done, out = fresh(tmp_path / "model.keras")
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    logs, values = train(model)
    with np.load(out) as found:
        assert found["losses"].tolist() == logs["loss"]
        for number, value in enumerate(values):
            np.testing.assert_array_equal(found[f"arr_{number}"], value)


def test_another_process_without_tf_ckpt(tmp_path):
    tf_ckpt.apply(saving_models.functional(), "full").save(tmp_path / "model.keras")
    done, _ = fresh(tmp_path / "model.keras", blocked=True)
    assert done.returncode
    assert "'Applied'" in done.stderr
    assert "tf_ckpt.saving" in done.stderr
