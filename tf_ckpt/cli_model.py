"""What the command line is given by name: models, data, strategies."""

import importlib
import os
import re
import sys

import keras
import tensorflow as tf

from tf_ckpt.errors import CheckpointError, first_line
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
    """Returns the pair (x, y) that `module:function` returns; of a `tf.data.Dataset` or `PyDataset` (dataset, None)."""
    found = _call(text)
    if isinstance(found, (tf.data.Dataset, keras.utils.PyDataset)):
        return found, None
    if not isinstance(found, tuple) or len(found) != 2:
        raise CheckpointError(f"The function must return (x, y), or a dataset of batches. Received: {text!r}, {_short(found)}")
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
        raise CheckpointError(f"{_why_not(str(error))}. Received: {path!r}: {type(error).__name__}") from error


def _why_not(text):
    """Returns what to do about a model file that Keras does not load, from the error that it raised."""
    elsewhere = "give MODULE:FUNCTION, a function that makes the model, in place of the file"
    if "ambda" in text and ("safe_mode" in text or "unsafe" in text):
        return f"Keras does not load Lambda layers from a file, as their code could be anybody's: {elsewhere}"
    unknown = re.search(
        r"Could not (?:locate|deserialize) (?:class|function) '([^']+)'|Unknown (?:layer|object): '?([\w>.]+)", text
    )
    if unknown:
        return (
            f"The file does not hold the code of '{unknown[1] or unknown[2]}': name the module that registers it with "
            f"`keras.saving.register_keras_serializable` by --import MODULE, or {elsewhere}"
        )
    return f"Keras does not load this file as a model ({first_line(text)}); layers of its own need --import MODULE"


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
    except SystemExit as error:
        raise CheckpointError(f"The function ended the program: SystemExit({error.code!r}). Received: {text!r}") from error
    except Exception as error:
        raise CheckpointError(f"The function raised {type(error).__name__}: {error}. Received: {text!r}") from error


def _module(name):
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise CheckpointError(f"Module {name!r} cannot be imported: {type(error).__name__}: {error}") from error


def _short(value):
    text = repr(value)
    return f"{text if len(text) < 60 else text[:57] + '...'} of type {type(value).__name__}"
