"""Compares a checkpointed computation with the plain one: loss, every gradient, every non-trainable variable."""

import keras
import numpy as np
import tensorflow as tf

import tf_ckpt

MODES = ("eager", "graph", "xla")
# Under XLA fusion may round otherwise. The bound is on the largest difference, as a share of the largest value, or of a
# twentieth of the largest of all: some gradients (a key's bias) are nothing but rounding.
XLA_BOUND = 2e-5
# Around single layers boundaries lie everywhere: also among three gradients that are added up, and where a graph optimiser
# joins operations of the plain graph.
ROUNDING = 2e-6


def in_mode(function, mode):
    """Returns `function` as it runs in eager mode, as a graph, or compiled by XLA."""
    if mode == "eager":
        return function
    return tf.function(function, jit_compile=mode == "xla", autograph=False)


def step(call, variables, state, inputs, mode, steps=2):
    """Runs some steps of forward and backward, and gives everything back.

    Args:
        call: Callable `inputs -> (loss, losses made inside)`.
        variables: Keras variables to differentiate by.
        state: Keras variables to report afterwards. They are put back in the end.
        inputs: Flat list of tensors; the float ones are differentiated by.
        mode: One of `MODES`.
        steps: How many.

    Returns:
        A dict of arrays and None, by name.
    """
    everything = [*variables, *state]
    before = [v.numpy() for v in everything]
    floats = [x for x in inputs if x.dtype.is_floating]

    def run(*inputs):
        floats = [x for x in inputs if x.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(floats)
            loss = call(*inputs)
        return loss, tape.gradient(loss, [*[v.value for v in variables], *floats])

    run = in_mode(run, mode)
    try:
        for _ in range(steps):
            loss, gradients = run(*inputs)
        names = [v.path for v in variables] + [f"input {i}" for i in range(len(floats))]
        result = {"loss": loss.numpy()}
        result |= {f"gradient of {n}": _array(g) for n, g in zip(names, gradients, strict=True)}
        result |= {f"value of {v.path} ({i})": v.numpy() for i, v in enumerate(state)}
        return result
    finally:
        for v, value in zip(everything, before, strict=True):
            v.assign(value)


def _array(gradient):
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.indices.numpy(), gradient.values.numpy()
    return None if gradient is None else gradient.numpy()


def assert_same(plain, ours, mode, bound=XLA_BOUND, rounding=0.0):
    """Asserts that two results of `step` are equal: to the bit or within `rounding`, under XLA within `bound`."""
    bound = bound if mode == "xla" else rounding
    assert plain.keys() == ours.keys()
    floats = [np.abs(x).max(initial=0) for x in plain.values() if isinstance(x, np.ndarray) and x.dtype.kind == "f"]
    floor = 0.05 * max(float(x) for x in floats)
    for name, want in plain.items():
        have = ours[name]
        assert (want is None) == (have is None), f"{name}: plain {_say(want)}, checkpointed {_say(have)}"
        if want is None:
            continue
        for w, h in zip(want, have, strict=True) if isinstance(want, tuple) else [(want, have)]:
            assert w.dtype == h.dtype, name
            if bound and w.dtype.kind == "f":
                w, h = w.astype("float64"), h.astype("float64")
                assert np.abs(w - h).max(initial=0) <= bound * max(np.abs(w).max(initial=0), floor), name
            else:
                np.testing.assert_array_equal(h, w, err_msg=name)


def _say(value):
    return "None" if value is None else "a value"


def model_loss(model, training=True, function=None):
    """Returns `call` for `step`: a smooth loss of all outputs of `function`, by default the model, and its inner losses."""

    def call(*inputs):
        outputs = (function or model)(list(inputs) if len(inputs) > 1 else inputs[0], training=training)
        loss = sum(tf.reduce_mean(tf.square(tf.cast(y, tf.float32) - 0.3)) for y in keras.tree.flatten(outputs))
        for extra in model.losses:
            loss += tf.cast(extra, tf.float32)
        return loss

    return call


def compare(plain, ours, inputs, mode, training=True, steps=2, bound=XLA_BOUND, rounding=0.0):
    """Asserts that two models over the same variables train alike."""
    variables, state = plain.trainable_variables, plain.non_trainable_variables
    want = step(model_loss(plain, training), variables, state, inputs, mode, steps)
    have = step(model_loss(ours, training), variables, state, inputs, mode, steps)
    assert_same(want, have, mode, bound, rounding)


def thirds(chain):
    """A strategy that recomputes all it may in three segments or more, the last one too: nothing may depend on the plan."""
    size, start, ranges = max(len(chain) // 3, 1), 0, []
    for cut in range(1, len(chain) + 1):
        if not chain.exact_cuts[cut]:
            continue
        if chain.allowed(start, cut) and (cut - start >= size or cut == len(chain) or not chain.allowed(start, cut + 1)):
            ranges.append((start, cut))
            start = cut
        elif not chain.allowed(start, cut):
            start = cut
    return ranges


def wrapped(model):
    """Returns a clone of a model in which each layer that may be is inside a `Recompute`, with the same weights."""

    def wrap(layer):
        copy = type(layer).from_config(layer.get_config())
        bare = not isinstance(layer, keras.Layer) or isinstance(layer, (keras.layers.InputLayer, keras.layers.Embedding))
        return copy if bare else tf_ckpt.Recompute(copy)

    clone = keras.models.clone_model(model, clone_function=wrap)
    for variable, source in zip(clone.variables, model.variables, strict=True):  # seeds as well
        variable.assign(source)
    return clone
