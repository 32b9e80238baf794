"""What the command line is given by name: models, data, strategies."""

import importlib
import os
import sys

import keras
import tensorflow as tf

from tf_ckpt.errors import CheckpointError
from tf_ckpt.plan import Plan


def load_model(text, imports=()):
    """Returns the Keras model of a `.keras` file, or the one that `module:function` returns."""
    if "" not in sys.path and os.getcwd() not in sys.path:  # the installed script does not look here
        sys.path.insert(0, os.getcwd())
    for name in imports:
        _module(name)
    if os.path.exists(text) or text.endswith((".keras", ".h5")) or ":" not in text:
        return _saved(text)
    model = _call(text)
    if not isinstance(model, keras.Model):
        raise CheckpointError(f"The function must return a `keras.Model`. Received: {text!r}, which returned {_short(model)}")
    return model


def load_data(text):
    """Returns the pair (x, y) that `module:function` returns; of a `tf.data.Dataset` (dataset, None)."""
    found = _call(text)
    if isinstance(found, tf.data.Dataset):
        return found, None
    if not isinstance(found, tuple) or len(found) != 2:
        raise CheckpointError(f"The function must return (x, y), or a `tf.data.Dataset`. Received: {text!r}, {_short(found)}")
    return found


def load_strategy(text):
    """Returns the `Plan` of a `.json` file, or the name itself."""
    return Plan.load(text) if text.endswith(".json") else text


def _saved(path):
    if not os.path.exists(path):
        hint = "" if path.endswith(".keras") else " (a function is written module:function)"
        raise CheckpointError(f"There is no such file{hint}. Received: {path!r}")
    try:
        return keras.models.load_model(path)
    except Exception as error:
        raise CheckpointError(
            f"Keras does not load this file as a model; layers of its own need --import MODULE. Received: {path!r}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _call(text):
    name, _, attribute = text.partition(":")
    if not (name and attribute):
        raise CheckpointError(f"A function is written module:function. Received: {text!r}")
    module = _module(name)
    function = getattr(module, attribute, None)
    if not callable(function):
        own = [k for k, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        raise CheckpointError(f"Module {name!r} has no function {attribute!r}; it has: {', '.join(own) or 'none'}")
    try:
        return function()
    except Exception as error:
        raise CheckpointError(f"The function raised {type(error).__name__}: {error}. Received: {text!r}") from error


def _module(name):
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise CheckpointError(f"Module {name!r} cannot be imported: {type(error).__name__}: {error}") from error


def _short(value):
    text = repr(value)
    return f"{text if len(text) < 60 else text[:57] + '...'} of type {type(value).__name__}"
