"""The state of a model as copies on the host: read, written back bit for bit, and compared by digest."""

import contextlib
import hashlib
import random

import numpy as np
import tensorflow as tf

from tf_ckpt import graph as keras_graph


def state_variables(model, optimizer=None):
    """Returns all that a training step may change, each variable once.

    Args:
        model: A `keras.Model`.
        optimizer: Optional `keras.optimizers.Optimizer`. Defaults to the model's own.

    Returns:
        A list of variables: weights, state, seeds, what layers hold beside these (such as the states of a stateful RNN),
        those of metrics and of the optimizer, and the seed that random operations without one share.
    """
    optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
    generator = keras_graph.global_seed_generator()
    found = [*model_variables(model), *(v for metric in model.metrics for v in metric.variables)]
    found += [*getattr(optimizer, "variables", []), *(keras_graph.held_variables(optimizer) if optimizer is not None else [])]
    found += [generator.state] if generator is not None else []
    return list({id(v): v for v in found}.values())


def model_variables(model):
    """Returns the variables of a model and those that its layers hold beside them, each once."""
    return list({id(v): v for v in (*model.variables, *keras_graph.held_variables(model))}.values())


def read(variables):
    """Returns copies of variables: for each a list of arrays, one a replica that holds a value of its own."""
    return [[part.numpy() for part in _parts(variable)] for variable in variables]


def write(variables, values):
    """Writes back what `read` returned. Each replica gets its own value, where a distributed variable holds several."""
    for variable, parts in zip(variables, values, strict=True):
        for part, value in zip(_parts(variable), parts, strict=True):
            part.assign(copied(value, part.device))


def copied(value, device="CPU:0"):
    """Returns an array as a tensor in a device's own memory, where its allocator counts it.

    On the CPU TensorFlow uses the memory of an array as it is if that happens to be aligned to 64 bytes, and a variable that
    such a tensor is assigned to goes on doing so. What a device held would then differ by chance from run to run.
    """
    with tf.device(device):
        return tf.raw_ops.DeepCopy(x=value) if "CPU" in (device or "CPU") else tf.convert_to_tensor(value)


def digest(variables):
    """Returns a text that is the same for the same values, to the bit."""
    found = hashlib.sha256()
    for parts in read(variables):
        for value in parts:
            value = np.asarray(value)  # of text it is an object, whose bytes would be an address
            data = repr(value.tolist()).encode() if value.dtype == object else np.ascontiguousarray(value).tobytes()
            found.update(repr((value.dtype, value.shape)).encode() + data)
    return found.hexdigest()


@contextlib.contextmanager
def kept(variables):
    """A scope after which variables, Python's and NumPy's random state, the shared seed and Keras' names are as before.

    Names: what Keras numbers, such as layers, goes on with the numbers that come next without what was made inside.

    The copies lie in the host's memory, so that a device that ran out of memory inside takes nothing with it.
    """
    values, generator = read(variables), keras_graph.global_seed_generator()
    counters = keras_graph.name_counters()
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        write(variables, values)
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        keras_graph.set_global_seed_generator(generator)
        keras_graph.set_name_counters(counters)


def _parts(variable):
    raw = keras_graph.raw_variable(variable)
    # The strategy of the variable: outside of its scope another one is in force, for which it is a single value.
    strategy = getattr(raw, "distribute_strategy", None) or tf.distribute.get_strategy()
    return strategy.experimental_local_results(raw)
