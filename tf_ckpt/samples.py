"""Batches to train on: cut from a user's data, repeated to any size, or made up from what a model takes."""

import collections.abc

import keras
import numpy as np
import tensorflow as tf

from tf_ckpt import graph as keras_graph
from tf_ckpt.errors import CheckpointError, quoted

_DEFAULT_BATCH = 32


def batches_of(x, y, batch_size, count):
    """Returns up to `count` batches of a user's data, all of the same size.

    Args:
        x: An array or nested arrays with samples along the first axis, or a `tf.data.Dataset` or `keras.utils.PyDataset` of
            batches.
        y: The same for the targets; None if there are none, or `x` is a dataset.
        batch_size: Integer; None for 32, or for all samples if they are fewer. With a dataset it must be None.
        count: Integer.

    Returns:
        A list of tuples of NumPy arrays, nested as they were.
    """
    if isinstance(x, (tf.data.Dataset, keras.utils.PyDataset)):
        if y is not None or batch_size is not None:
            raise CheckpointError("A dataset has targets and a batch size of its own. Received: `y` or `batch_size` beside it")
        if isinstance(x, tf.data.Dataset):
            elements = x.take(count)
        else:
            elements = (x[number] for number in range(count if x.num_batches is None else min(count, x.num_batches)))
        found = [element if isinstance(element, tuple) else (element,) for element in elements]
        batches = [keras.tree.map_structure(_array, batch) for batch in found]
        if not batches:
            raise CheckpointError(f"There is no batch in the dataset. Received: x={quoted(x)}")
        return [b for b in batches if size_of(b) == size_of(batches[0])]  # the last one may be smaller
    if x is None or callable(x) or isinstance(x, collections.abc.Iterator):
        raise TypeError(
            "`x` must be arrays, or a `tf.data.Dataset` or `keras.utils.PyDataset` of batches. "
            f"Received: x={quoted(x)} of type {type(x).__name__}"
        )
    for name, value in (("x", x), ("y", y)):
        if value is not None and any(np.ndim(leaf) == 0 for leaf in keras.tree.flatten(value) if not hasattr(leaf, "shape")):
            raise TypeError(
                f"`{name}` must be arrays: `numpy.asarray` makes one of lists of numbers. Received: {name}={quoted(value)}"
            )
    data = keras.tree.map_structure(_array, (x,) if y is None else (x, y))
    total = size_of(data)
    size = batch_size or min(total, _DEFAULT_BATCH)
    if size > total:
        raise CheckpointError(f"There are only {total} samples. Received: batch_size={batch_size!r}")
    starts = [number * size for number in range(min(count, total // size))]
    return [keras.tree.map_structure(lambda a, at=at: a[at : at + size], data) for at in starts]


def stated_batch(model):
    """Returns the one batch size that a model takes by its inputs, over all replicas, or None if it takes any."""
    stated = {x.shape[0] for x in model.inputs if len(x.shape)} - {None}
    return min(stated) * model.distribute_strategy.num_replicas_in_sync if stated else None


def repeated(data, batch_size):
    """Returns nested arrays with their samples repeated, or cut off, so that there are `batch_size`."""
    rows = np.arange(batch_size) % size_of(data)
    return keras.tree.map_structure(lambda a: a[rows], data)


def size_of(data):
    """Returns how many samples nested arrays hold.

    Raises:
        CheckpointError: If that is not the same for all of them, or none.
    """
    sizes = {a.shape[0] if a.ndim else None for a in keras.tree.flatten(data)}
    if len(sizes) != 1 or not next(iter(sizes)):
        shapes = [a.shape for a in keras.tree.flatten(data)]
        raise CheckpointError(
            "Data must hold the same number of samples, at least one, along the first axis. "
            f"Received: shapes {', '.join(map(str, shapes[:8]))}{', ...' if len(shapes) > 8 else ''}"
        )
    return sizes.pop()


def made_up(model, loss, seed=0):
    """Returns one sample of inputs and targets that a model can train on: random floats, and zeros for integers.

    Args:
        model: A Functional or Sequential model.
        loss: What it is compiled with. Losses with "sparse" in their names take class numbers, others what the model
            returns; without a loss there are no targets.
        seed: Integer.
    """
    random, functional = np.random.default_rng(seed), keras_graph.functional_of(model)
    x = keras.tree.map_structure(lambda spec: _sample(spec.shape, spec.dtype, random, "x"), functional.input)
    if loss is None:
        return (x,)
    numbers = iter(range(len(functional.outputs)))

    def target(spec):
        kind, number = loss, next(numbers)
        if isinstance(loss, dict):
            kind = loss.get(functional.output_names[number])
        elif isinstance(loss, (list, tuple)):
            kind = loss[number]
        name = kind if isinstance(kind, str) else getattr(kind, "__name__", type(kind).__name__)
        if "sparse" in name.lower():
            return _sample(spec.shape[:-1] or (None,), "int32", random, "y")
        return _sample(spec.shape, "float32", random, "y")

    return x, keras.tree.map_structure(target, functional.output)


def _sample(shape, dtype, random, name):
    if None in shape[1:]:
        raise CheckpointError(
            f"The model takes any size along some axis: give `x` and `y`, of one sample or more, to say which. "
            f"Received: {name}=None for a tensor of shape {tuple(shape)}"
        )
    if keras.backend.is_float_dtype(dtype):
        return random.uniform(size=(1, *shape[1:])).astype(tf.as_dtype(dtype).as_numpy_dtype)
    return np.zeros((1, *shape[1:]), tf.as_dtype(dtype).as_numpy_dtype)


def _array(value):
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        raise TypeError(f"Data must be dense arrays. Received: a {type(value).__name__}")
    return value.numpy() if hasattr(value, "numpy") else np.asarray(value)
