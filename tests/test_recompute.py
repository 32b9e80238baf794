"""`tf_ckpt.recompute` on functions: any call signature, and every trap of a bare `tf.recompute_grad`."""

import collections
import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import MODES, in_mode

import tf_ckpt

X = np.random.default_rng(0).normal(size=(4, 6)).astype("float32")
Pair = collections.namedtuple("Pair", "first second")


def gradients(function, arguments, mode, by=()):
    """Returns the outputs' loss and the gradients by the float arguments and the variables `by`."""

    def run(*arguments):
        floats = [x for x in tf.nest.flatten(arguments) if tf.is_tensor(x) and x.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(floats)
            outputs = function(*arguments)
            tensors = [y for y in tf.nest.flatten(outputs) if tf.is_tensor(y) and y.dtype.is_floating]
            loss = sum(tf.reduce_sum(tf.square(y) + y) for y in tensors)
        return [loss, *tape.gradient(loss, [*floats, *by])]

    return in_mode(run, mode)(*arguments)


def assert_alike(function, arguments, mode, by=()):
    want = gradients(function, arguments, mode, by)
    have = gradients(tf_ckpt.recompute(function), arguments, mode, by)
    for w, h in zip(want, have, strict=True):
        assert (w is None) == (h is None)
        if w is not None:
            np.testing.assert_allclose(h, w, rtol=1e-5, atol=1e-7)  # three terms, in another order


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: tf.tanh(x) * y,
        lambda x, y: (tf.tanh(x), [y * y, {"k": x + y}]),
        lambda x, y: Pair(tf.sin(x), second=tf.exp(y)),
        lambda x, y: (x, tf.tanh(y)),  # returns its input
        lambda x, y: (tf.tanh(x),) * 2,  # the same tensor twice
        lambda x, y: (tf.argmax(x, -1), tf.tanh(x), None, "text", 3, x > 0),
        lambda x, y: tf.stop_gradient(y) * x,
    ],
    ids=["tensor", "nested", "namedtuple", "input", "twice", "others", "stopped"],
)
def test_structures(function, mode):
    if mode == "xla":
        inner = function
        function = lambda x, y: [v for v in tf.nest.flatten(inner(x, y)) if tf.is_tensor(v)]  # noqa: E731
    assert_alike(function, [tf.constant(X), tf.constant(X[::-1])], mode)


@pytest.mark.parametrize("mode", MODES)
def test_other_arguments(mode):
    index, flags, text = tf.constant([2, 0]), tf.constant(X > 0), "abc"

    def function(x, index, flags, nothing, *, scale, names):
        assert nothing is None
        assert names == {"n": [text]}
        return tf.gather(tf.where(flags, x, 2 * x), index) * scale

    def call(f):
        return lambda x: f(x, index, flags, None, scale=2.0, names={"n": [text]})

    want = gradients(call(function), [tf.constant(X)], mode)
    have = gradients(call(tf_ckpt.recompute(function)), [tf.constant(X)], mode)
    np.testing.assert_array_equal(have[1], want[1])


def test_string_ragged_sparse_and_complex_tensors():
    words = tf.constant(["a", "b"])
    assert_alike(lambda x, w: x * tf.cast(tf.strings.length(w)[0], tf.float32), [tf.constant(X), words], "graph")
    ragged = tf.RaggedTensor.from_row_lengths(tf.constant(X[0]), [2, 0, 4])
    with tf.GradientTape() as tape:
        tape.watch(ragged.flat_values)
        y = tf_ckpt.recompute(lambda r: r * r)(ragged)
        loss = tf.reduce_sum(y.flat_values)
    assert isinstance(y, tf.RaggedTensor)
    np.testing.assert_array_equal(tape.gradient(loss, ragged.flat_values), 2 * X[0])
    z = tf.complex(X, X[::-1])
    for mode in ("eager", "graph"):
        run = in_mode(lambda z: _complex_gradient(tf_ckpt.recompute(lambda z: z * z), z), mode)
        np.testing.assert_array_equal(run(z), _complex_gradient(lambda z: z * z, z))


def _complex_gradient(function, z):
    with tf.GradientTape() as tape:
        tape.watch(z)
        loss = tf.reduce_sum(tf.math.real(function(z)))
    return tape.gradient(loss, z)


@pytest.mark.parametrize("mode", MODES)
def test_forward_runs_once_and_again_in_the_backward_pass(mode):
    runs = []

    def function(x):
        runs.append(tf_ckpt.is_recomputing())
        return tf.tanh(x)

    gradients(tf_ckpt.recompute(function), [tf.constant(X)], mode)
    assert runs == [False, True]
    del runs[:]
    in_mode(tf_ckpt.recompute(function), mode)(tf.constant(X))
    assert runs == [False]


@pytest.mark.parametrize("mode", MODES)
def test_state_moves_once_without_a_backward_pass(mode):
    norm, dropout = keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, seed=1)
    norm.build((None, 6))
    state = [*norm.non_trainable_variables, dropout.seed_generator.state]
    start = [v.numpy() for v in state]
    results = []
    for wrap in (lambda f: f, tf_ckpt.recompute):
        for v, value in zip(state, start, strict=True):
            v.assign(value)
        with tf.GradientTape():
            in_mode(wrap(lambda x: norm(dropout(x, training=True), training=True)), mode)(tf.constant(X))
        results.append([v.numpy() for v in state])
    for want, have in zip(*results, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-6)
    assert (results[0][-1] != start[-1]).any()


def test_same_as_the_mask_of_the_forward_run():
    dropout = keras.layers.Dropout(0.5)
    for mode in MODES:
        x = tf.ones((50, 50))
        run = in_mode(lambda x: _with_gradient(tf_ckpt.recompute(lambda x: dropout(x, training=True)), x), mode)
        y, gradient = run(x)
        np.testing.assert_array_equal(y, gradient)


def _with_gradient(function, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
        loss = tf.reduce_sum(y)
    return y, tape.gradient(loss, x)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("kind", ["keras", "raw"])
def test_weights_changed_between_forward_and_backward(mode, kind):
    """The plain gradient is that of the forward's weights; a re-run with the new ones would be silently wrong."""
    weight = keras.Variable(np.eye(6, dtype="float32")) if kind == "keras" else tf.Variable(tf.eye(6))
    raw = weight.value if kind == "keras" else weight

    def run(function):
        raw.assign(tf.eye(6))
        with tf.GradientTape() as tape:
            y = function(tf.constant(X))
            loss = tf.reduce_sum(y)
        raw.assign(tf.zeros((6, 6)))
        return tape.gradient(loss, raw)

    def function(x):
        return tf.tanh(tf.tanh(x @ tf.convert_to_tensor(weight)) @ tf.convert_to_tensor(weight))

    want = in_mode(lambda: run(function), mode)()
    if kind == "raw":
        with pytest.raises(tf_ckpt.CheckpointError, match="changed between"):
            in_mode(lambda: run(tf_ckpt.recompute(function)), mode)()
    else:
        np.testing.assert_array_equal(in_mode(lambda: run(tf_ckpt.recompute(function)), mode)(), want)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_captured_tensor_keeps_its_gradient(mode):
    def run(wrap):
        x, s = tf.constant(X), tf.constant(2.0)
        with tf.GradientTape() as tape:
            tape.watch([x, s])
            y = wrap(lambda x: tf.tanh(x * s))(x)
        return tape.gradient(y, [x, s])

    want = in_mode(lambda: run(lambda f: f), mode)()
    with pytest.warns(tf_ckpt.CheckpointWarning, match="Pass the tensor as an argument"):
        have = in_mode(lambda: run(tf_ckpt.recompute), mode)()
    for w, h in zip(want, have, strict=True):
        np.testing.assert_array_equal(h, w)


def test_captured_tensor_under_a_tape_outside_of_the_function():
    @tf.function
    def inner(x, s):
        return tf_ckpt.recompute(lambda x: tf.tanh(x * s))(x)

    x, s = tf.constant(X), tf.constant(2.0)
    with tf.GradientTape() as tape, pytest.warns(tf_ckpt.CheckpointWarning, match="captures a tensor"):
        tape.watch([x, s])
        loss = tf.reduce_sum(inner(x, s))
    assert tape.gradient(loss, s) is not None


def test_gradient_outside_of_the_function_that_ran_forward():
    dense, dropout = keras.layers.Dense(6), keras.layers.Dropout(0.5, seed=3)
    dense.build((None, 6))
    start = dropout.seed_generator.state.numpy()

    def outside(function):
        dropout.seed_generator.state.assign(start)
        call = tf.function(lambda x: function(x))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(call(tf.constant(X))))
        return tape.gradient(loss, [dense.kernel.value, dense.bias.value])

    def function(x):
        return tf.tanh(dropout(dense(x), training=True))

    for want, have in zip(outside(function), outside(tf_ckpt.recompute(function)), strict=True):
        np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("backward", ["function", "pfor"])
def test_eager_forward_run_and_a_backward_pass_in_a_graph(backward):
    dense, dropout = keras.layers.Dense(6), keras.layers.Dropout(0.5, seed=3)
    dense.build((None, 6))
    start = dropout.seed_generator.state.numpy()

    def outside(function):
        dropout.seed_generator.state.assign(start)
        x = tf.constant(X)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = tf.square(function(x))
        if backward == "pfor":  # vectorises the backward pass
            return [tape.jacobian(y, x)]
        return tf.function(lambda: tape.gradient(y, [x, dense.kernel.value, dense.bias.value]))()

    def function(x):
        return tf.tanh(dropout(dense(x), training=True))

    for want, have in zip(outside(function), outside(tf_ckpt.recompute(function)), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_unconnected_stays_none(mode):
    dense, dead = keras.layers.Dense(6), keras.layers.Dense(6)
    dense.build((None, 6))
    dead.build((None, 6))

    def function(x, z):
        return tf.tanh(dense(x)) + tf.stop_gradient(z)

    run = lambda: gradients(tf_ckpt.recompute(function), [tf.constant(X), tf.constant(X)], mode)  # noqa: E731
    assert run()[2] is None

    def reads(x):
        return tf.tanh(dense(x)) + tf.stop_gradient(dead(x))

    by = [v.value for v in (*dense.trainable_variables, *dead.trainable_variables)]
    want = gradients(reads, [tf.constant(X)], mode, by)
    with pytest.warns(tf_ckpt.CheckpointWarning, match="gets no gradient"):
        have = gradients(tf_ckpt.recompute(reads), [tf.constant(X)], mode, by)
    assert [x is None for x in have] == [x is None for x in want]
    assert have[-1] is None


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_sparse_gradient_stays_sparse(mode):
    table = keras.layers.Embedding(50, 6)
    table.build()
    ids = tf.constant([[1, 2, 3]])

    def run(wrap):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(wrap(lambda i: tf.tanh(table(i)))(ids)))
        gradient = tape.gradient(loss, table.embeddings.value)
        assert isinstance(gradient, tf.IndexedSlices)
        return gradient.values

    want = in_mode(lambda: run(lambda f: f), mode)()
    with pytest.warns(tf_ckpt.CheckpointWarning, match="sparse"):
        have = in_mode(lambda: run(tf_ckpt.recompute), mode)()
    np.testing.assert_array_equal(have, want)


def test_sparse_upstream_gradient():
    @tf.function
    def run(wrap):
        x = tf.constant(X)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.gather(wrap(lambda x: tf.tanh(x) * x)(x), [0, 0, 1]) ** 2)
        return tape.gradient(loss, x)

    np.testing.assert_allclose(run(tf_ckpt.recompute), run(lambda f: f), rtol=1e-6)


@dataclasses.dataclass
class Opaque:
    value: object


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_tensor_that_leaves_by_a_side_door(mode):
    def run(wrap):
        x, box = tf.constant(X), []
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = wrap(lambda x: (tf.tanh(x), box.append(tf.sin(x)))[0])(x)
            loss = tf.reduce_sum(y) + tf.reduce_sum(box[-1])
        return tape.gradient(loss, x)

    want = in_mode(lambda: run(lambda f: f), mode)()
    if mode == "graph":
        with pytest.raises(tf_ckpt.CheckpointError, match="Return it"):
            in_mode(lambda: run(tf_ckpt.recompute), mode)()
        return
    with pytest.warns(tf_ckpt.CheckpointWarning, match="Return it"):
        np.testing.assert_array_equal(run(tf_ckpt.recompute), want)
    with pytest.warns(tf_ckpt.CheckpointWarning, match="Return it"), tf.GradientTape() as tape:
        x = tf.constant(X)
        tape.watch(x)
        loss = tf.reduce_sum(tf_ckpt.recompute(lambda x: Opaque(tf.tanh(x)))(x).value)
    assert tape.gradient(loss, x) is not None


_generator = tf.random.Generator.from_seed(1)
_counter = tf.Variable(0.0)
_hidden = tf.function(lambda x: tf.nn.dropout(x, 0.5))


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * tf.random.uniform((4, 6)),
        lambda x: x * _generator.normal((4, 6)),
        lambda x: x * _counter.assign_add(1.0),
        lambda x: _hidden(x) * x,
    ],
    ids=["random", "generator", "counter", "hidden"],
)
def test_what_cannot_be_repeated_raises(function, mode):
    with pytest.raises(tf_ckpt.CheckpointError, match="cannot be recomputed exactly"):
        gradients(tf_ckpt.recompute(function), [tf.constant(X)], mode)


def test_second_order_names_the_way_out():
    x = tf.constant(X)
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = tf_ckpt.recompute(lambda x: x**3, name="cube")(x)
        with pytest.raises(NotImplementedError, match=r"(?s)cube.*tf_ckpt\.disabled"):
            inner.gradient(y, x)
    with tf_ckpt.disabled(), tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = tf_ckpt.recompute(lambda x: x**3)(x)
        slope = inner.gradient(y, x)
    np.testing.assert_allclose(outer.gradient(slope, x), 6 * X, rtol=1e-5)


@pytest.mark.parametrize("kind", ["while", "cond", "map"])
def test_inside_control_flow(kind):
    dense = keras.layers.Dense(6)
    dense.build((None, 6))

    def run(wrap):
        f = wrap(lambda h: tf.tanh(dense(h)))
        x = tf.constant(X)
        with tf.GradientTape() as tape:
            if kind == "while":
                y = tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, f(h)), (0, x), maximum_iterations=3)[1]
            elif kind == "cond":
                y = tf.cond(tf.reduce_sum(x) > -1e9, lambda: f(x), lambda: x)
            else:
                y = tf.map_fn(lambda row: f(row[None])[0], x)
            loss = tf.reduce_sum(tf.square(y))
        return tape.gradient(loss, dense.kernel.value)

    want = tf.function(lambda: run(lambda f: f), autograph=False)()
    with pytest.warns(tf_ckpt.CheckpointWarning, match="tf.while_loop"):
        have = tf.function(lambda: run(tf_ckpt.recompute), autograph=False)()
    np.testing.assert_array_equal(have, want)


def test_control_flow_inside():
    dropout, dense = keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(6)
    dense.build((None, 6))
    start = dropout.seed_generator.state.numpy()

    def function(x):
        return tf.cond(tf.reduce_sum(x) > -1e9, lambda: dropout(dense(x), training=True), lambda: x)

    def run(wrap):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(wrap(function)(tf.constant(X)))
        return tape.gradient(loss, dense.kernel.value)

    want = tf.function(lambda: run(lambda f: f), autograph=False)()
    state = dropout.seed_generator.state.numpy()
    dropout.seed_generator.state.assign(start)
    with pytest.warns(tf_ckpt.CheckpointWarning, match="inside a loop or branch"):
        have = tf.function(lambda: run(tf_ckpt.recompute), autograph=False)()
    np.testing.assert_array_equal(have, want)
    np.testing.assert_array_equal(dropout.seed_generator.state, state)


@pytest.mark.parametrize("mode", MODES)
def test_nested_recompute(mode):
    dropout, norm = keras.layers.Dropout(0.3, seed=1), keras.layers.BatchNormalization()
    norm.build((None, 6))
    start = [v.numpy() for v in (dropout.seed_generator.state, *norm.variables)]

    def inner(x):
        return tf.tanh(norm(dropout(x, training=True), training=True))

    def nested(inner):
        return lambda x: inner(inner(x) * 2.0) + x

    def run(function):
        for v, value in zip((dropout.seed_generator.state, *norm.variables), start, strict=True):
            v.assign(value)
        result = gradients(function, [tf.constant(X)], mode, [v.value for v in norm.trainable_variables])
        return [*result, *norm.non_trainable_variables, dropout.seed_generator.state]

    want = [np.array(x) for x in run(nested(inner))]
    have = run(tf_ckpt.recompute(nested(tf_ckpt.recompute(inner))))
    for w, h in zip(want, have, strict=True):
        np.testing.assert_allclose(h, w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_nan_and_empty_batches(mode):
    assert_alike(tf.tanh, [tf.zeros((0, 6))], mode)
    result = gradients(tf_ckpt.recompute(lambda x: x * np.nan), [tf.constant(X)], mode)
    assert np.isnan(result[1]).all()


def test_variables_are_made_in_the_first_call():
    dense = keras.layers.Dense(6)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf_ckpt.recompute(lambda x: dense(x))(tf.constant(X)))
    gradient = tape.gradient(loss, dense.kernel.value)
    np.testing.assert_allclose(gradient, np.tile(X.sum(0)[:, None], 6), rtol=1e-5)


def test_stateless_call_differentiates_by_the_tensors_passed():
    dense = tf_ckpt.Recompute(keras.layers.Dense(6, activation="tanh"))
    dense(tf.constant(X))
    weights = [tf.identity(v.value) for v in dense.trainable_variables]
    results = []
    for layer in (dense, dense.layer):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            y, _ = layer.stateless_call(weights, [], tf.constant(X))
            loss = tf.reduce_sum(y)
        results.append(tape.gradient(loss, weights))
    for have, want in zip(*results, strict=True):
        np.testing.assert_array_equal(have, want)


def test_signature_and_name():
    def named(x):
        """Doc."""

    assert tf_ckpt.recompute(named).__name__ == "named"
    assert tf_ckpt.recompute(named).__doc__ == "Doc."
