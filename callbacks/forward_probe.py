"""The time of the forward of what a model recomputes, alone: where a profile of the steps cannot tell it."""

import time

import tensorflow as tf

from tf_ckpt import graph as keras_graph
from tf_ckpt import memory, replay
from tf_ckpt.errors import CheckpointError

_REPEATS = 3


def seconds(model, inputs):
    """Returns the least seconds of one forward run of all that `model` recomputes, and changes nothing.

    What lies inside of other segments is run as often as the backward pass would run it again.

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
        try:
            model(inputs, training=True)
        except (TypeError, ValueError, tf.errors.OpError) as error:
            raise CheckpointError(
                "`probe_data` must be inputs of one batch, as for a call of the model. "
                f"Received: {tf.nest.map_structure(_describe, inputs)}, which the model answers with: {error}"
            ) from error
    if not calls:
        return 0.0

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
        run = forward
        if not model.run_eagerly:
            run = tf.function(forward, jit_compile=bool(model.jit_compile), autograph=False)
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
