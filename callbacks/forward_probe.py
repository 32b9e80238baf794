"""The time of the forward of what a model recomputes, alone: where a profile of the steps cannot tell it."""

import time

import tensorflow as tf

from tf_ckpt import graph as keras_graph
from tf_ckpt import memory, replay
from tf_ckpt.errors import CheckpointError, first_line, quoted

_REPEATS = 3


def seconds(model, inputs):
    """Returns the least seconds of one forward run of all that `model` recomputes, and of starting it. Changes nothing.

    The second is that of a graph with the same inputs and nothing to do, and 0 for a model that runs eagerly, whose steps
    start each operation, too. What lies inside of other segments is run as often as the backward pass would run it again.

    Args:
        model: A compiled model.
        inputs: What it is called with: one batch.

    Raises:
        CheckpointError: If the model cannot be called with `inputs`.
    """
    calls = []

    def note(fn, args, kwargs):
        leaves = tf.nest.flatten((args, kwargs), expand_composites=True)
        places = [i for i, leaf in enumerate(leaves) if tf.is_tensor(leaf) and not isinstance(leaf, tf.Variable)]
        calls.append((fn, (args, kwargs), leaves, places, keras_graph.Surroundings()))

    with keras_graph.no_side_effects(model), replay.watching_calls(note):
        _call(model, inputs, inputs)
    if not calls:
        return 0.0, 0.0

    def forward(tensors):
        taken, results = iter(tensors), []
        for fn, structure, leaves, places, surroundings in calls:
            given = list(leaves)
            for place in places:
                given[place] = next(taken)
            args, kwargs = tf.nest.pack_sequence_as(structure, given, expand_composites=True)
            with surroundings.entered():
                results.append(tf.nest.flatten(fn(*args, **kwargs), expand_composites=True))
        return [x for flat in results for x in flat if tf.is_tensor(x)]

    tensors = [leaves[place] for _, _, leaves, places, _ in calls for place in places]
    with replay.disabled(), keras_graph.no_side_effects(model):
        if model.run_eagerly:
            return _least(forward, tensors), 0.0
        graphs = (tf.function(fn, jit_compile=bool(model.jit_compile), autograph=False) for fn in (forward, _nothing))
        seconds, start = (_least(graph, tensors) for graph in graphs)
        return seconds, start


def check(model, inputs):
    """Refuses inputs that `model` cannot be called with. In a graph that is traced, not run, so that it takes no memory.

    Args:
        model: A compiled model.
        inputs: See `seconds`.
    """
    with keras_graph.no_side_effects(model), replay.disabled():
        if model.run_eagerly:
            _call(model, inputs, inputs)
        else:
            graph = tf.function(lambda tensors: _call(model, tensors, inputs), autograph=False)
            try:
                graph.get_concrete_function(tf.nest.map_structure(tf.convert_to_tensor, inputs))
            except (TypeError, ValueError) as error:  # what is no tensor
                raise error if isinstance(error, CheckpointError) else _refused(inputs, error) from error


def _call(model, tensors, inputs):
    try:
        return model(tensors, training=True)
    except (TypeError, ValueError, tf.errors.OpError) as error:
        raise _refused(inputs, error) from error


def _refused(inputs, error):
    return CheckpointError(
        "`probe_data` must be inputs of one batch, as for a call of the model, which answers these with: "
        f"{first_line(error)}. Received: probe_data={quoted(tf.nest.map_structure(_describe, inputs))}"
    )


def _nothing(tensors):
    return [tf.identity(x) for x in tensors]


def _least(run, tensors):
    times = []
    for _ in range(1 + _REPEATS):  # the first traces
        memory.synchronize()
        begun = time.perf_counter()
        run(tensors)
        memory.synchronize()
        times.append(time.perf_counter() - begun)
    return min(times[1:])


def _describe(value):
    return f"{tuple(value.shape)} {value.dtype}" if hasattr(value, "shape") else repr(value)
