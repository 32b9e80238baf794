"""A re-run reads weights before the step's optimizer writes them, also in the graph that TensorFlow's optimiser leaves."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L
from tensorflow.python.eager import context  # noqa: TID251 - there is no public way to these graphs

import tf_ckpt

X = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")


def unordered(function):
    """Calls `function`, and returns the pairs (update, read of the same variable) in its graphs that no path connects."""
    eager = context.context()
    eager.enable_run_metadata()
    try:
        function()
        executed = eager.export_run_metadata()
    finally:
        eager.disable_run_metadata()
    found, pairs = [], 0
    for graph in (graph.post_optimization_graph for graph in executed.function_graphs):
        nodes = {node.name: node for node in graph.node}
        taken = {name: [x.lstrip("^").partition(":")[0] for x in node.input] for name, node in nodes.items()}
        reads = [name for name, node in nodes.items() if node.op == "ReadVariableOp"]
        for name, node in nodes.items():
            if node.op != "AssignSubVariableOp":  # a metric's are in no order in the plain model either
                continue
            before, queue = {name}, [name]
            while queue:
                new = [x for x in taken[queue.pop()] if x not in before]
                before.update(new)
                queue += new
            mine = [read for read in reads if taken[read][0] == taken[name][0]]
            pairs += len(mine)
            found += [(name, read) for read in mine if read not in before]
    assert pairs
    return found


def stack():
    inputs = keras.Input((6,))
    x = inputs
    for number in range(4):  # the gradient of the second kernel needs no kernel
        x = L.Dense(6, activation="gelu", name=f"in_{number}")(x)
        x = L.Dense(6, name=f"out_{number}")(x)
        x = L.Dense(6, use_bias=False, name=f"last_{number}")(x)
    return keras.Model(inputs, x)


def thirds(chain):
    return [tf_ckpt.strategies.Range(0, len(chain), ((0, 6), (6, len(chain))))]


@pytest.mark.parametrize("strategy", ["full", "sqrt", "recursive", thirds])
def test_fit_reads_before_it_writes(strategy):
    model = tf_ckpt.apply(stack(), strategy, batch_size=4096)
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    assert unordered(lambda: model.fit(X, X, batch_size=4, verbose=0)) == []


def test_gradients_from_before_a_write_that_the_forward_run_reads():
    """The read waits for the write, and the write for the gradient: the gradient must not wait for the read."""
    segment = keras.Sequential([keras.Input((6,)), L.Dense(6, use_bias=False), L.Dense(6, use_bias=False)])
    recomputed, weights = tf_ckpt.recompute(segment), [v.value for v in segment.trainable_variables]
    start = [v.numpy() for v in weights]

    def step(call, x):
        upstream = tf.sin(x)
        for v in weights:
            v.assign(tf.matmul(upstream, upstream, transpose_a=True))
        with tf.GradientTape() as tape:
            y = call(x)
        gradients = tape.gradient(y, weights, upstream)
        for v, g in zip(weights, gradients, strict=True):
            v.assign_sub(g)
        return gradients

    results = []
    for call in (segment, recomputed):
        for v, value in zip(weights, start, strict=True):
            v.assign(value)
        gradients = tf.function(lambda x, call=call: step(call, x), autograph=False)(tf.constant(X))
        results.append([x.numpy() for x in [*gradients, *weights]])
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_output_is_made_before_its_bias_changes():
    """Here the gradient of one bias needs the other output, not its own."""
    inputs = keras.Input((6,))
    x = L.Dense(6, activation="gelu")(inputs)
    model = keras.Model(inputs, L.Multiply()([L.Dense(6, name="a")(x), L.Dense(6, name="b")(x)]))
    plan = tf_ckpt.plan(model, lambda chain: [tf_ckpt.strategies.Range(0, len(chain) - 1)], batch_size=4)
    assert [len(segment.layers) for segment in plan.segments] == [3]
    model = tf_ckpt.apply(model, plan)
    model.compile(keras.optimizers.SGD(0.1), lambda y, p: keras.ops.sum(p), jit_compile=False)
    assert unordered(lambda: model.fit(X, X, batch_size=4, verbose=0)) == []
