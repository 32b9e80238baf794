"""Of two products from one upstream gradient, the one that leads nowhere runs first in a segment's backward pass."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L

import tf_ckpt
from tf_ckpt.ordering import branches, in_order, reordered, siblings
from tf_ckpt.strategies.tree import Range
from tf_ckpt.tf_internals import run_after


def graph_of(function, *shapes):
    """Traces a function, and returns its graph and the operations of its backward pass."""
    at = []

    @tf.function(autograph=False)
    def step(*inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            y = function(*inputs)
        at.append(len(tf.compat.v1.get_default_graph().get_operations()))
        return tape.gradient(y, inputs)

    traced = step.get_concrete_function(*(tf.TensorSpec(shape) for shape in shapes))
    return traced, traced.graph.get_operations()[at[0] :]


@pytest.mark.parametrize(
    ("function", "shapes", "types"),
    [
        (tf.matmul, [(3, 4), (4, 5)], ("MatMul", "MatMul")),
        (tf.matmul, [(2, 3, 4), (2, 4, 5)], ("BatchMatMulV2", "BatchMatMulV2")),
        (
            lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"),
            [(1, 8, 8, 3), (3, 3, 3, 4)],
            ("Conv2DBackpropInput", "Conv2DBackpropFilter"),
        ),
    ],
    ids=["matmul", "batched", "convolution"],
)
def test_products_of_one_gradient_are_siblings(function, shapes, types):
    _, operations = graph_of(function, *shapes)
    assert [(a.type, b.type) for a, b in siblings(operations)] == [types]


def test_operations_reordered_as_they_then_run():
    _, operations = graph_of(lambda x, w: tf.nn.relu(tf.matmul(x, w)), (3, 4), (4, 5))
    ((first, second),) = siblings(operations)
    again = reordered(operations)
    assert sorted(op.name for op in again) == sorted(op.name for op in operations)
    assert operations.index(first) < operations.index(second)
    assert again.index(second) < again.index(first)
    for op in again:
        assert all(again.index(x.op) < again.index(op) for x in op.inputs if x.op in again)


def test_products_in_a_row_are_no_siblings():
    # The second derivative's products need one another: an edge would be a circle.
    _, operations = graph_of(lambda x: tf.matmul(tf.matmul(x, tf.ones((4, 4))), tf.ones((4, 4))), (3, 4))
    products = [op for op in operations if op.type == "MatMul"]
    assert len(products) == 2
    assert siblings(operations) == []


def test_what_a_control_edge_or_a_stateful_operation_orders_is_left_alone():
    def products(between):
        with tf.Graph().as_default() as graph:
            g, x, w = (tf.compat.v1.placeholder("float32", (4, 4)) for _ in range(3))
            first = tf.matmul(g, w, transpose_b=True)
            with tf.control_dependencies(between(first)):
                tf.matmul(x, g, transpose_a=True)
            return siblings(graph.get_operations())

    assert len(products(lambda first: [])) == 1
    assert products(lambda first: [first]) == []
    assert products(lambda first: [tf.identity(first)]) == []
    assert products(lambda first: [tf.raw_ops.Assert(condition=True, data=[first])]) == []
    # Without an edge yet: a function adds one, from it to a stateful operation behind, when it is done.
    assert products(lambda first: [tf.raw_ops.Assert(condition=True, data=[first])][:0]) == []


def test_the_first_waits_and_values_stay():
    traced, operations = graph_of(tf.matmul, (3, 4), (4, 5))
    x, w = (np.random.default_rng(0).normal(size=s).astype("float32") for s in ((3, 4), (4, 5)))
    before = [y.numpy() for y in traced(tf.constant(x), tf.constant(w))]
    ((first, second),) = siblings(operations)
    in_order(operations)
    assert second in first.control_inputs
    assert first not in second.control_inputs
    again, _ = graph_of(tf.matmul, (3, 4), (4, 5))
    for a, b in zip(before, again(tf.constant(x), tf.constant(w)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_run_after_is_an_edge():
    with tf.Graph().as_default():
        a, b = tf.constant(1.0), tf.constant(2.0)
        run_after(b.op, a.op)
        assert list(b.op.control_inputs) == [a.op]


def model(recomputed):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8,))
    block = keras.Sequential([L.Dense(8, activation="gelu"), L.Dense(8), L.Dropout(0.5, seed=1)], name="block")
    made = keras.Model(inputs, L.Dense(1)((tf_ckpt.Recompute(block) if recomputed else block)(inputs)))
    made.compile("sgd", "mse", jit_compile=False)
    return made


def test_a_segment_s_products_wait_and_the_plain_model_s_do_not():
    x, y = np.random.default_rng(0).normal(size=(2, 16, 8)).astype("float32"), np.zeros((16, 1), "float32")
    waiting = {}
    for recomputed in (False, True):
        made = model(recomputed)

        @tf.function
        def step(made=made):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(made(x[0], training=True) ** 2)
            return tape.gradient(loss, [v.value for v in made.trainable_variables])

        operations = step.get_concrete_function().graph.get_operations()
        products = [op for op in operations if op.type == "MatMul"]
        waiting[recomputed] = sum(any(c.type == "MatMul" for c in op.control_inputs) for op in products)
    assert waiting == {False: 0, True: 2}  # one for each Dense layer of the block
    plain, ours = model(False), model(True)
    for made in (plain, ours):
        made.fit(x[0], y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    for a, b in zip(plain.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


# --- branches ---------------------------------------------------------------------------------------------------------


def residual(units=8):
    """A block whose two ends have a convolution and a normalisation each, as the first of each size in ResNet."""
    inputs = keras.Input((12, 12, 4))
    x = L.Conv2D(units, 3, padding="same", activation="relu")(inputs)
    ends = [L.BatchNormalization()(L.Conv2D(units, 1)(x)) for _ in range(2)]
    x = L.Conv2D(units, 3)(L.ReLU()(L.Add()(ends)))
    return keras.Model(inputs, L.GlobalAveragePooling2D()(x))


def backward_of(model, tree):
    """Returns the operations of a step's graph, checkpointed by ranges."""
    model = tf_ckpt.apply(model, lambda chain: tree)

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x, training=True)))
        return tape.gradient(loss, model.trainable_variables)

    return step.get_concrete_function(tf.TensorSpec((2, 12, 12, 4))).graph


def reached(op):
    found, queue = set(), [op]
    while queue:
        at = queue.pop()
        if at.name not in found:
            found.add(at.name)
            queue += [*(x.op for x in at.inputs), *at.control_inputs]
    return found


@pytest.mark.parametrize("tree", [[(0, 8)], [Range(0, 9, (Range(0, 7),))]], ids=["one level", "two levels"])
def test_one_normalisation_of_a_residual_block_runs_backward_after_the_other(tree):
    operations = backward_of(residual(), tree).get_operations()
    # The gradients of both, each the sum of three, on which the convolutions' products work.
    sums = [op for op in operations if op.type == "AddN" and len(op.inputs) == 3 and op.outputs[0].shape.rank == 4]
    assert len(sums) == 2
    late = [op for op in operations if any(before in sums for before in op.control_inputs)]
    assert late
    (first,) = {before.name for op in late for before in op.control_inputs if before in sums}
    (second,) = (op for op in sums if op.name != first)
    assert first in reached(second)


def test_branches_are_pairs_without_a_circle():
    with tf.Graph().as_default() as graph:
        g, x, y, w = (tf.compat.v1.placeholder("float32", (4, 4)) for _ in range(4))

        def branch(g, x):
            return tf.matmul(g * x + tf.square(g), w)

        left, right = branch(g, x), branch(g, y)
    operations = graph.get_operations()[4:]
    pairs = branches(operations)
    assert len(pairs) == 2
    for op, before in pairs:
        assert before.name in reached(left.op)
        assert op.name in reached(right.op)
    # Where the first needs the second, an edge would close a circle.
    with tf.Graph().as_default() as graph:
        g, x, w = (tf.compat.v1.placeholder("float32", (4, 4)) for _ in range(3))
        entry = g * x
        right = tf.matmul(tf.square(g) * g, w)
        tf.matmul(entry + x * right + entry * x, w)
    for op, before in branches(graph.get_operations()[3:]):
        assert op.name not in reached(before)


def test_what_lies_between_and_is_no_part_of_the_backward_pass_counts():
    with tf.Graph().as_default() as graph:
        g, x, w = (tf.compat.v1.placeholder("float32", (4, 4)) for _ in range(3))
        early, late = g * x, tf.square(g)  # the entries of two branches
        between = tf.exp(tf.stop_gradient(late) + late)  # a re-run that waits for the one
        tf.matmul(early + early * early + tf.matmul(between, w) * early, w)
        tf.matmul(late + late * late, w)
    hidden = {between.op.name, *(x.op.name for x in between.op.inputs)}
    operations = [op for op in graph.get_operations()[3:] if op.name not in hidden]
    assert all(op.name not in reached(before) for op, before in branches(operations))
    assert branches(operations) == branches(graph.get_operations()[3:]) == []


def test_what_a_function_will_order_counts():
    def pairs(show):
        with tf.Graph().as_default() as graph:
            g, x, w = (tf.compat.v1.placeholder("float32", (4, 4)) for _ in range(3))
            early, late = g * x, tf.square(g)
            show(late)
            shown = show(x + w)  # a function runs it after the one above, if both have effects
            tf.matmul(early + early * early + shown * early, w)
            tf.matmul(late + late * late, w)
        return branches(graph.get_operations()[3:])

    assert len(pairs(tf.identity)) == 1
    assert pairs(lambda x: tf.raw_ops.Print(input=x, data=[x])) == []


def test_ordered_branches_give_the_same_gradients():
    model = residual()
    x = np.random.default_rng(0).normal(size=(4, 12, 12, 4)).astype("float32")

    def gradients(model):
        @tf.function(autograph=False)
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x, training=True)))
            return [loss, *tape.gradient(loss, model.trainable_variables)]

        return [y.numpy() for y in step(x)]

    plain = gradients(model)
    for tree in ([(0, 8)], [Range(0, 9, (Range(0, 7),))]):
        for a, b in zip(gradients(tf_ckpt.apply(model, lambda chain, tree=tree: tree)), plain, strict=True):
            np.testing.assert_array_equal(a, b)
