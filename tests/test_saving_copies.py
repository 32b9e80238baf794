"""Clones, copies, configs and weight files of applied models."""

import copy
import pickle

import keras
import numpy as np
import pytest
import saving_models
from helpers import thirds
from saving_models import MAKERS, assert_equal, compiled, data, train, with_seeds_of

import tf_ckpt

L = keras.layers
COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}
by_name = pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)


def applied(make=saving_models.functional, strategy=thirds):
    return tf_ckpt.apply(make(), strategy)


@by_name
def test_clones_have_the_plan_and_fresh_weights(make):
    model = compiled(applied(make))
    clone = keras.models.clone_model(model)
    plain = keras.models.clone_model(tf_ckpt.remove(model))
    assert type(clone) is type(plain)  # Keras makes a Functional of a class with a constructor of its own
    assert tf_ckpt.plan_of(clone) == tf_ckpt.plan_of(model)
    assert tf_ckpt.plan_of(plain) is None
    assert not {id(v) for v in clone.variables} & {id(v) for v in model.variables}
    if make is saving_models.nested:
        for each in (clone, plain):
            each.set_weights(model.get_weights())
        with_seeds_of(plain, clone)
        assert_equal(train(compiled(clone)), train(compiled(plain)))


@pytest.mark.parametrize("recursive", [False, True])
def test_clones_of_models_inside_models(recursive):
    planned = tf_ckpt.apply(saving_models.inner("planned"), "full")
    inputs = keras.Input((8,))
    model = keras.Model(inputs, planned(L.Dense(8)(planned(inputs))))
    clone = keras.models.clone_model(model, recursive=recursive)
    assert tf_ckpt.plan_of(clone) is None
    assert tf_ckpt.plan_of(clone.get_layer("planned")) == tf_ckpt.plan_of(planned)
    assert clone.get_layer("planned") is not planned
    assert len(clone.variables) == len(model.variables)
    stack = keras.Sequential([inputs, planned, L.Dense(2)])
    clone = keras.models.clone_model(stack, recursive=recursive)
    assert tf_ckpt.plan_of(clone.get_layer("planned")) == tf_ckpt.plan_of(planned)


def test_clones_made_by_functions_of_the_user():
    model = applied()
    plan = tf_ckpt.plan_of(model)

    def renamed(layer):
        config = layer.get_config()
        return type(layer).from_config({**config, "name": f"new_{layer.name}"})

    tensors = keras.Input((8,), batch_size=4)
    assert tf_ckpt.plan_of(keras.models.clone_model(model, input_tensors=tensors)) == plan
    same = keras.models.clone_model(model, clone_function=lambda layer: type(layer).from_config(layer.get_config()))
    assert tf_ckpt.plan_of(same) == plan
    with pytest.warns(tf_ckpt.CheckpointWarning, match="clone of model 'plainly_functional' is plain.*'b0_dense'") as told:
        clone = keras.models.clone_model(model, clone_function=renamed)
    assert [x.filename for x in told] == [__file__]
    assert tf_ckpt.plan_of(clone) is None
    assert clone(data()[0]).shape == (24, 2)


@pytest.mark.parametrize("how", COPIES)
def test_copies(how):
    model = compiled(applied(saving_models.scaled if how == "pickle" else saving_models.sequential))
    model.optimizer.iterations.assign(5)
    again = COPIES[how](model)
    assert type(again) is type(model)
    assert tf_ckpt.plan_of(again).ranges() == tf_ckpt.plan_of(model).ranges()
    assert not {id(v) for v in again.variables} & {id(v) for v in model.variables}
    assert int(again.optimizer.iterations) == 5
    for have, want in zip(again.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(have, want)


@by_name
def test_configs(make):
    model = applied(make)
    plain = tf_ckpt.remove(model)
    assert model.get_config() == plain.get_config()
    assert tf_ckpt.plan_of(type(model).from_config(model.get_config())) is None  # it says what the layers are
    again = keras.models.model_from_json(model.to_json())
    assert type(again) is type(model)
    assert tf_ckpt.plan_of(again).ranges() == tf_ckpt.plan_of(model).ranges()


@pytest.mark.parametrize("change", ["pop", "add", "add later", "build"])
def test_a_changed_sequential_says_that_it_is_plain(change, tmp_path):
    model = applied(saving_models.sequential, "full")
    plain = tf_ckpt.remove(model)
    with pytest.warns(tf_ckpt.CheckpointWarning, match="layers of model 'stack' were changed") as told:
        if change == "pop":
            assert model.pop().name == plain.layers[-1].name
        elif change == "build":
            model.build((None, 8))
        else:
            model.add(L.Dense(3), rebuild=change == "add")
    assert [x.filename for x in told] == [__file__]
    model.add(L.Dense(5))  # said once
    assert tf_ckpt.plan_of(model) is None
    assert tf_ckpt.remove(model) is model
    assert model(data()[0]).shape == (24, 5)
    assert plain(data()[0]).shape == (24, 2)
    model.save(tmp_path / "model.keras")
    assert tf_ckpt.plan_of(keras.models.load_model(tmp_path / "model.keras")) is None
    again = tf_ckpt.apply(model, "full")
    assert again(data()[0]).shape == (24, 5)
    assert tf_ckpt.remove(again) is model


def test_a_changed_model_inside_runs_plain_and_says_so(tmp_path):
    inputs = keras.Input((8,))
    inside = keras.Sequential([inputs, L.Dense(8, "gelu", name="first"), L.Dense(8, "gelu")], name="inside")
    model = keras.Model(inputs, L.Dense(2)(L.Dense(8, "gelu")(inside(inputs))), name="outside")
    changed = tf_ckpt.apply(model, "selective", layers=["first"])
    inside.add(L.Dense(8, "relu"))
    with pytest.warns(tf_ckpt.CheckpointWarning, match="layers of model 'inside'.* runs plain"):
        have = changed(data()[0])
    np.testing.assert_array_equal(have, model(data()[0]))
    changed(data()[0])  # said once
    with pytest.warns(tf_ckpt.CheckpointWarning, match="'outside' is stored without its plan"):
        changed.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(keras.models.load_model(tmp_path / "model.keras")(data()[0]), have)


@by_name
def test_weight_files_interchange(make, tmp_path):
    model, other = applied(make), applied(make)
    plain = tf_ckpt.remove(other)
    for number, (source, target) in enumerate([(model, plain), (plain, model)]):
        rng = np.random.default_rng(number)
        source.set_weights([w + rng.normal(size=w.shape).astype(w.dtype) for w in source.get_weights()])
        for ending in (".weights.h5", ".keras"):
            path = tmp_path / f"file{number}{ending}"
            if ending == ".keras":
                source.save(path)
            else:
                source.save_weights(path)
            target.set_weights([0 * w for w in target.get_weights()])
            target.load_weights(path)
            for have, want in zip(target.get_weights(), source.get_weights(), strict=True):
                np.testing.assert_array_equal(have, want)


def test_hdf5_has_no_place_for_the_plan(tmp_path):
    path = str(tmp_path / "model.h5")
    model = applied()
    with pytest.warns(tf_ckpt.CheckpointWarning, match="'plainly_functional' is not stored: an HDF5 file has no place"):
        model.save(path)
    loaded = keras.models.load_model(path)
    assert tf_ckpt.plan_of(loaded) is None
    other = applied()
    for target in (loaded, other):
        if target is other:
            target.load_weights(path, by_name=True)
        for have, want in zip(target.weights, model.weights, strict=True):
            if "seed" not in have.path:
                np.testing.assert_array_equal(have, want)
    tf_ckpt.remove(model).save(path)
    with pytest.warns(tf_ckpt.CheckpointWarning, match="'planned' is not stored"):
        saving_models.inside_a_plain_one().save(path)
