"""The page of wrong uses, tried: each raises its error with its message, and the models are as they were."""

import re
import shutil

import numpy as np
import pytest
from wrong_uses import APPLIED, FOLDER, MODEL, MODELS, PYTHON, PYTHON_APPLIED, WRONG, X, in_a_tape

import tf_ckpt
from tf_ckpt import CheckpointError, apply, plan_of, remove


@pytest.fixture(autouse=True)
def fresh_keras():
    """In place of conftest's: the models of the page serve all tests."""


@pytest.fixture(scope="module", autouse=True)
def no_files_left():
    yield
    shutil.rmtree(FOLDER, ignore_errors=True)


def state(model):
    held = [{name: id(value) for name, value in vars(layer).items()} for layer in (model, *model._flatten_layers())]
    return held, [id(v) for v in model.variables], [id(x) for x in model.layers], plan_of(model), remove(model)


BEFORE = [state(model) for model in MODELS]
VALUES = {id(v): (v, v.numpy()) for model in MODELS for v in model.variables}
OUTPUTS = [model(X).numpy() for model in (APPLIED, PYTHON)]
GRADIENTS = [in_a_tape(model, X).numpy() for model in (APPLIED, PYTHON_APPLIED)]


@pytest.mark.parametrize("what", WRONG)
def test_wrong_use(what):
    wrong, error, message = WRONG[what]
    with pytest.raises(error) as raised:
        wrong()
    assert re.search(message, str(raised.value)), str(raised.value)
    assert "NOT AS IT SHOULD BE" not in str(raised.value)
    assert [state(model) for model in MODELS] == BEFORE
    for v, value in VALUES.values():
        np.testing.assert_array_equal(v.numpy(), value)


def test_after_all_of_them_the_models_compute_what_they_did():
    for model, output in zip((APPLIED, PYTHON), OUTPUTS, strict=True):
        np.testing.assert_array_equal(model(X), output)
    for model, gradient in zip((APPLIED, PYTHON_APPLIED), GRADIENTS, strict=True):
        np.testing.assert_array_equal(in_a_tape(model, X), gradient)


def test_the_page_is_long_enough():
    assert len(WRONG) >= 60


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
