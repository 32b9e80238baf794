"""Frozen layers: what lies before the first trainable weight is never run again and keeps nothing, and no gradient of a frozen
weight is computed. Counted: forward runs in eager mode, operations after TensorFlow's own optimisation in graphs."""

import collections
import pathlib
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import numbers
from helpers import compare, thirds
from tensorflow.python.eager import context  # noqa: TID251 - there is no public way to the graphs that were executed

import tf_ckpt
from tf_ckpt import CheckpointError, CheckpointWarning, memory

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "benchmarks"))
from _graphs import executed_operations, total_flops

L = keras.layers
runs = []


@keras.saving.register_keras_serializable("tests")
class Tanh(L.Layer):
    """One operation that nothing else makes, which the gradient (`TanhGrad`) needs, and which joins no other in a kernel."""

    def call(self, x):
        runs.append((self.name, tf_ckpt.is_recomputing()))
        return tf.tanh(x) + x


FROZEN = 3  # of 6


def stack(when, width=8):
    """Six times `Dense` and `Tanh`, the first three `Dense` frozen: when they are made, or `before` `apply`, or not."""
    x = inputs = keras.Input((width,))
    for k in range(6):
        x = L.Dense(width, name=f"d{k}", trainable=not (when == "made" and k < FROZEN))(x)
        x = Tanh(name=f"s{k}")(x)
    model = keras.Model(inputs, L.Dense(2, name="last")(x))
    if when == "before":
        freeze(model)
    return model


def freeze(model, trainable=False):
    for k in range(FROZEN):
        model.get_layer(f"d{k}").trainable = trainable


def training_step(model):
    weights = [v.value for v in model.trainable_variables]

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True)))
        return tape.gradient(loss, weights)

    return step


def run_again(model, x):
    """Returns the names of the layers that are run again in an eager step."""
    runs.clear()
    training_step(model)(x)
    return sorted({name for name, again in runs if again})


def operations(model, x):
    """Counts the operations of a training step's graph, by type, as TensorFlow's optimiser leaves them."""
    step, eager = tf.function(training_step(model), autograph=False), context.context()
    eager.enable_run_metadata()
    eager.export_run_metadata()  # of what ran before
    try:
        step(x)
        graphs = [graph.post_optimization_graph for graph in eager.export_run_metadata().function_graphs]
    finally:
        eager.disable_run_metadata()
    found = [collections.Counter(node.op.replace("_Fused", "") for node in graph.node) for graph in graphs]
    return max(found, key=lambda x: x.total())  # what runs around the step, one eager operation each, comes as graphs too


def one_by_one(chain):
    first = chain.names.index("d0")  # Keras 3.8 casts the input of a model in mixed precision
    return [(first + 2 * k, first + 2 * k + 2) for k in range(6)]


STRATEGIES = {
    "one by one": {"strategy": one_by_one},
    "thirds": {"strategy": thirds},
    "sqrt": {"strategy": "sqrt"},
    "full": {"strategy": "full"},
    "selective": {"strategy": "selective", "target": 0.6},
    "layers": {"layers": ["d*", "s*"]},
    "budget": {"memory": 0.8},
    "recursive": {"strategy": "recursive"},
}


QUICK = {("one by one", "after"), ("full", "made"), ("recursive", "after")}


@pytest.mark.parametrize(
    ("strategy", "when"),
    [
        pytest.param(strategy, when, marks=[] if (strategy, when) in QUICK else [pytest.mark.slow])
        for strategy in STRATEGIES
        for when in ("made", "before", "after")
    ],
)
def test_what_is_before_the_first_trainable_weight_is_not_run_again(strategy, when):
    model, x = stack(when), numbers(4, 8)
    applied = tf_ckpt.apply(model, batch_size=100_000, **STRATEGIES[strategy])
    segments = [s.layers for s in tf_ckpt.plan_of(applied).segments]
    if when == "after":
        freeze(model)
    mixed = {n for names in segments for n in names if f"d{FROZEN}" in names or f"s{FROZEN}" in names}
    again, more = run_again(applied, x), len(runs) - 6
    assert again
    assert not {"s0", "s1", "s2"} & set(again) - mixed
    if when != "after" and strategy not in ("one by one", "thirds"):  # planned for what is frozen
        assert not {"s0", "s1", "s2", "d0", "d1", "d2"} & {name for names in segments for name in names}
    plain, ours = operations(model, x), operations(applied, x)
    assert ours["Tanh"] == plain["Tanh"] + more
    # A segment inside one that is mixed keeps what its backward pass starts from, also where that turns out to lead nowhere.
    started = 2 if strategy == "recursive" and when == "after" else 0
    assert plain["TanhGrad"] <= ours["TanhGrad"] <= plain["TanhGrad"] + started
    assert plain["MatMul"] <= ours["MatMul"] <= plain["MatMul"] + more + started  # no gradient of a frozen kernel
    compare(model, applied, [x], "eager")
    compare(model, applied, [x], "graph")


def test_behind_plain_layers_that_were_frozen_after_they_were_built():
    """TensorFlow's own tape follows what Keras freezes later: neither that nor what comes behind may start a re-run."""
    model, x = stack("not"), numbers(4, 8)
    applied = tf_ckpt.apply(model, lambda chain: [(2, 4), (4, 6), (8, 10)])
    freeze(model)
    assert run_again(applied, x) == ["s4"]
    plain, ours = operations(model, x), operations(applied, x)
    assert ours["Tanh"] == plain["Tanh"] + 1
    assert ours["MatMul"] == plain["MatMul"] + 1
    for mode in ("eager", "graph"):
        compare(model, applied, [x], mode)


def test_frozen_and_unfrozen_between_compilations():
    model, x = stack("not"), numbers(4, 8)
    applied = tf_ckpt.apply(model, one_by_one)
    counts = []
    for trainable in (True, False, True):
        freeze(model, trainable)
        applied.compile("sgd", "mse", run_eagerly=True)
        runs.clear()
        applied.fit(x, numbers(4, 2), verbose=0)
        counts.append(sorted(name for name, again in runs if again))
        compare(model, applied, [x], "eager")
    assert counts == [[f"s{k}" for k in range(6)], ["s3", "s4", "s5"], [f"s{k}" for k in range(6)]]


def test_in_fit_as_a_graph():
    model, x = stack("not"), numbers(4, 8)
    applied = tf_ckpt.apply(model, one_by_one)
    found = []
    for trainable in (True, False):
        freeze(model, trainable)
        applied.compile("sgd", "mse", jit_compile=False)
        runs.clear()
        applied.fit(x, numbers(4, 2), verbose=0)
        found.append(sorted({name for name, again in runs if again}))
    assert found == [[f"s{k}" for k in range(6)], ["s3", "s4", "s5"]]


def test_a_plan_that_was_made_for_frozen_weights_says_so_when_they_are_trainable():
    model, x = stack("before"), numbers(4, 8)
    applied = tf_ckpt.apply(model, "full")
    applied(x)
    freeze(model, True)
    with pytest.warns(CheckpointWarning, match="frozen when its plan was made are trainable now.*`tf_ckpt.apply` again"):
        applied(x)
    applied(x)  # once
    compare(model, applied, [x], "eager")
    whole = tf_ckpt.apply(model, tf_ckpt.plan(stack("not"), one_by_one))
    freeze(model)
    freeze(model, True)
    whole(x)


@pytest.mark.parametrize("strategy", ["sqrt", "full", one_by_one])
def test_a_model_without_trainable_weights_is_planned_for_the_gradients_of_its_inputs(strategy):
    """So it is where its features make up another model's loss."""
    model, x = stack("before"), numbers(4, 8)
    model.trainable = False
    applied = tf_ckpt.apply(model, strategy, batch_size=100_000)
    plan, gradients = tf_ckpt.plan_of(applied), []
    assert plan.overhead > 0
    assert plan.peak_bytes < plan.plain_peak_bytes or strategy is one_by_one
    planned = {name for s in plan.segments for name in s.layers if name.startswith("s")}
    assert planned
    for each in (model, applied):
        runs.clear()
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_mean(each(x))
        gradients.append(tape.gradient(loss, x))
        assert {name for name, again in runs if again} == (planned if each is applied else set())
    np.testing.assert_array_equal(*gradients)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(applied(x))
    assert tape.gradient(loss, x) is None
    assert not [name for name, again in runs[-6:] if again]


def test_chosen_layers_that_keep_nothing():
    model = stack("before")
    with pytest.raises(CheckpointError, match=r"no trainable weight comes before them.*Received: layers=\['d0', 's1'\]"):
        tf_ckpt.apply(model, layers=["d0", "s1"])
    plan = tf_ckpt.plan(model, layers=["d0", "s1", "s2", "d3", "s3"])
    assert [s.layers for s in plan.segments] == [("d3", "s3")]


# --- a frozen base and a head


def base(width=8):
    x = inputs = keras.Input((width,), name="in")
    for k in range(4):
        x = Tanh(name=f"t{k}")(L.Dense(width, activation="gelu", name=f"b{k}")(x))
    model = keras.Model(inputs, x, name="base")
    model.trainable = False  # `keras.Model(trainable=False)` leaves the layers inside as they are
    return model


def with_head(width=8, stem=False):
    """A frozen model in a model, with a trainable head, and a trainable layer before it or not."""
    x = inputs = keras.Input((width,))
    if stem:
        x = L.Dense(width, name="stem")(x)
    x = base(width)(x)
    for k in range(4):
        x = Tanh(name=f"h{k}")(L.Dense(width, activation="gelu", name=f"d{k}")(x))
    return keras.Model(inputs, L.Dense(2, name="last")(x))


BASE = {"t0", "t1", "t2", "t3"}
WAYS = {"sqrt": {"strategy": "sqrt"}, "full": {"strategy": "full"}, "budget": {"memory": 0.5}}


@pytest.mark.parametrize("way", ["sqrt", pytest.param("full", marks=pytest.mark.slow), "budget"])
def test_a_frozen_base_under_a_head(way):
    model, x = with_head(), numbers(4, 8)
    applied = tf_ckpt.apply(model, batch_size=100_000, **WAYS[way])
    plan = tf_ckpt.plan_of(applied)
    assert plan.segments
    assert not {name for s in plan.segments for name in s.layers if name.startswith("base")}
    again, more = run_again(applied, x), len(runs) - 8
    assert again
    assert not BASE & set(again)
    plain, ours = operations(model, x), operations(applied, x)
    assert ours["Tanh"] == plain["Tanh"] + more
    assert ours["TanhGrad"] == plain["TanhGrad"] == 4
    for mode in ("eager", "graph"):
        compare(model, applied, [x], mode)


@pytest.mark.parametrize("way", ["sqrt", *(pytest.param(way, marks=pytest.mark.slow) for way in ("full", "budget"))])
def test_a_frozen_base_that_gradients_flow_through(way):
    model, x = with_head(stem=True), numbers(4, 8)
    applied = tf_ckpt.apply(model, batch_size=100_000, **WAYS[way])
    again, more = run_again(applied, x), len(runs) - 8
    assert BASE & set(again)
    plain, ours = operations(model, x), operations(applied, x)
    assert ours["Tanh"] == plain["Tanh"] + more
    for mode in ("eager", "graph"):
        compare(model, applied, [x], mode)


def test_a_frozen_base_of_a_watched_input():
    """`compare` watches its inputs: here gradients flow through a base that no plan had to reckon with."""
    model = with_head()
    applied = tf_ckpt.apply(model, lambda chain: [(0, 4), (4, 8)])
    x = numbers(4, 8)
    assert not BASE & set(run_again(applied, x))
    runs.clear()
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_mean(applied(x))
    tape.gradient(loss, x)
    assert BASE & {name for name, again in runs if again} == BASE
    compare(model, applied, [x], "eager")
    compare(model, applied, [x], "graph")


@pytest.mark.parametrize("way", ["sqrt", pytest.param("full", marks=pytest.mark.slow)])
def test_predictions_for_a_frozen_base_are_what_a_step_needs(way):
    width, batch = 64, 512
    model, x = with_head(width), numbers(batch, width)
    applied = tf_ckpt.apply(model, batch_size=batch, **WAYS[way])
    plan = tf_ckpt.plan_of(applied)
    steps = [tf.function(training_step(each), autograph=False) for each in (model, applied)]
    plain, ours = (total_flops(executed_operations(lambda step=step: step(x))) for step in steps)
    assert abs(ours / plain - 1 - plan.overhead) < 0.02
    for step, predicted in zip(steps, (plan.plain_activation_bytes, plan.activation_bytes), strict=True):
        assert 0.85 * peak_of(step, x) <= predicted <= 1.3 * peak_of(step, x)  # as for what is not frozen


def peak_of(step, x):
    """Returns the median of the peaks of a graph's runs, above what is held before."""
    peaks = []
    for _ in range(15):
        memory.reset_peak("CPU:0")
        before = memory.current_bytes("CPU:0")
        step(x)
        peaks.append(memory.peak_bytes("CPU:0") - before)
    return np.median(peaks)


# --- costs


def test_costs_of_what_no_gradient_reaches():
    frozen, trained = (tf_ckpt.plan(stack(when), one_by_one, batch_size=1000) for when in ("before", "not"))
    assert [s.rerun_flops > 0 for s in frozen.segments] == [False] * FROZEN + [True] * 3
    assert all(s.rerun_flops > 0 for s in trained.segments)
    assert [s.frees_bytes for s in frozen.segments[:FROZEN]] == [0] * FROZEN
    busy = tf_ckpt.plan(stack("before"), lambda chain: one_by_one(chain)[FROZEN:], batch_size=1000)
    assert frozen.activation_bytes == busy.activation_bytes  # segments of nothing else cost and keep nothing
    assert frozen.overhead == busy.overhead
    assert len(frozen.moments) == 2 * 13 + 2 + 12  # as the plot counts them
    mixed = tf_ckpt.plan(stack("before"), lambda chain: [(2, 8)], batch_size=1000)
    alone = tf_ckpt.plan(stack("before"), lambda chain: [(6, 8)], batch_size=1000)
    assert mixed.overhead > 2 * alone.overhead  # there they are run again, for what comes behind them


def test_a_layer_whose_costs_are_guessed_keeps_nothing_either():
    class Hidden(L.Layer):
        @tf.function
        def call(self, x):
            return tf.tanh(x)

    x = inputs = keras.Input((8,))
    x = Hidden()(L.Dense(8, name="frozen", trainable=False)(x))
    model = keras.Model(inputs, L.Dense(2)(L.Dense(8, activation="gelu")(x)))
    costs = []
    tf_ckpt.plan(model, lambda chain: costs.append(chain) or [])
    assert costs[0].internal[:2].tolist() == [0, 0]
    assert costs[0].idle.tolist() == [True, True, False, False]


def test_two_towers_one_frozen():
    """Stages that no gradient reaches lie between others; a segment of both runs again what it needs."""
    a, b = keras.Input((8,)), keras.Input((8,))
    x, y = a, b
    for k in range(3):
        x = Tanh(name=f"x{k}")(L.Dense(8, name=f"dx{k}", trainable=False)(x))
        y = Tanh(name=f"y{k}")(L.Dense(8, name=f"dy{k}")(y))
    model = keras.Model([a, b], L.Dense(2)(L.Multiply()([x, y])))
    inputs = [numbers(4, 8), numbers(4, 8)]
    for strategy in ("sqrt", "full", thirds):
        applied = tf_ckpt.apply(model, strategy, batch_size=100_000)
        compare(model, applied, inputs, "eager")
        compare(model, applied, inputs, "graph")
    for strategy in ("full", "recursive"):
        plan = tf_ckpt.plan(model, strategy, batch_size=100_000)
        assert all(not s.layers[0].startswith(("x", "dx")) for s in plan.segments)


# --- adapters


class Adapter(L.Layer):
    """A frozen product with a small trainable one beside it."""

    def __init__(self, adapted, **kwargs):
        super().__init__(**kwargs)
        self.base = L.Dense(8, trainable=False)
        self.down, self.up = (L.Dense(2), L.Dense(8)) if adapted else (None, None)

    def call(self, x):
        runs.append((self.name, tf_ckpt.is_recomputing()))
        y = self.base(x)
        return tf.tanh(y if self.down is None else y + self.up(self.down(x)))


def adapted():
    x = inputs = keras.Input((8,))
    for k in range(6):
        x = Adapter(k >= 2, name=f"a{k}")(x)
    return keras.Model(inputs, L.Dense(2, name="last")(x))


def test_adapters():
    model, x = adapted(), numbers(4, 8)
    applied = tf_ckpt.apply(model, lambda chain: [(k, k + 1) for k in range(6)])
    assert run_again(applied, x) == ["a2", "a3", "a4", "a5"]
    plain, ours = operations(model, x), operations(applied, x)
    assert ours["Tanh"] == plain["Tanh"] + 4
    # Of each segment that is run again three products, and no gradient of a frozen kernel.
    assert ours["MatMul"] == plain["MatMul"] + 4 * 3
    for mode in ("eager", "graph"):
        compare(model, applied, [x], mode)


def test_frozen_layers_behind_a_trainable_one():
    """They are run again, since gradients go through them; of their own kernels none is made."""
    model, x = stack("not"), numbers(4, 8)
    applied = tf_ckpt.apply(model, one_by_one)
    for k in range(1, 5):
        model.get_layer(f"d{k}").trainable = False
    assert len(run_again(applied, x)) == 6
    plain, ours = operations(model, x), operations(applied, x)
    assert ours["Tanh"] == plain["Tanh"] + 6
    assert ours["MatMul"] == plain["MatMul"] + 6
    for mode in ("eager", "graph"):
        compare(model, applied, [x], mode)


@pytest.mark.slow
def test_lora():
    inputs = keras.Input((8,))
    x = inputs
    for k in range(4):
        x = L.Dense(8, activation="gelu", name=f"d{k}")(x)
    model, x = keras.Model(inputs, L.Dense(2, name="last")(x)), numbers(4, 8)
    applied = tf_ckpt.apply(model, thirds)
    for layer in model.layers[1:]:
        layer.trainable = False
    for k in (2, 3):
        model.get_layer(f"d{k}").trainable = True
        model.get_layer(f"d{k}").enable_lora(2)
    assert len(applied.trainable_variables) == 6  # two of each adapter, and biases
    for mode in ("eager", "graph"):
        compare(model, applied, [x], mode)
    plain, ours = operations(model, x), operations(applied, x)
    assert ours["MatMul"] == plain["MatMul"] + 4  # two products of `d2` and `d3` each, none of what is frozen before


# --- `Recompute`, `recompute`, and models whose `call` is Python code


def chained(wrap):
    """Two frozen blocks and a trainable one, each wrapped."""
    blocks = [keras.Sequential([keras.Input((8,)), L.Dense(8), Tanh(name=f"s{k}"), L.Dense(8)]) for k in range(3)]
    wrapped = [wrap(block) for block in blocks]
    for block in blocks[:2]:
        block.trainable = False
    return blocks, wrapped


@pytest.mark.parametrize("wrap", [tf_ckpt.Recompute, tf_ckpt.recompute, lambda x: tf_ckpt.recompute(lambda y: x(y))])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_wrapped_layers_and_functions(wrap, mode):
    blocks, wrapped = chained(wrap)
    weights = [v.value for v in blocks[2].trainable_variables]

    def step(x, functions):
        with tf.GradientTape() as tape:
            for each in functions:
                x = each(x)
            loss = tf.reduce_mean(tf.square(x))
        return tape.gradient(loss, weights)

    call = step if mode == "eager" else tf.function(step, autograph=False)
    runs.clear()
    ours = call(numbers(4, 8), wrapped)
    assert [name for name, again in runs if again] == ["s2"]
    for a, b in zip(ours, call(numbers(4, 8), blocks), strict=True):
        np.testing.assert_array_equal(a, b)
    blocks[0].trainable = True  # from now on
    weights += [v.value for v in blocks[0].trainable_variables]
    call = step if mode == "eager" else tf.function(step, autograph=False)
    runs.clear()
    ours = call(numbers(4, 8), wrapped)
    assert [name for name, again in runs if again] == ["s2", "s1", "s0"]
    for a, b in zip(ours, call(numbers(4, 8), blocks), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_model_whose_call_is_python_code():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.blocks = chained(lambda x: x)[0]

        def call(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    model, x = Own(), numbers(4, 8)
    model(x)
    applied = tf_ckpt.apply(model, layers=["blocks/*"])
    assert run_again(applied, x) == ["s2"]
    model.blocks[1].trainable = True
    assert run_again(applied, x) == ["s1", "s2"]
    compare(model, applied, [x], "eager")
    model.blocks[1].trainable = False
    applied = tf_ckpt.apply(model, layers=["blocks/1", "blocks/2"])
    assert run_again(applied, x) == ["s2"]  # the plain block before is frozen


def test_nothing_is_kept_in_eager_mode():
    """TensorFlow's own tape keeps all of a layer that Keras froze after it was built; recomputed parts keep nothing."""
    model, x = stack("not", width=256), numbers(4096, 256)
    for layer in model.layers[1:-1]:
        layer.trainable = False
    applied = tf_ckpt.apply(model, lambda chain: [(0, 6), (6, 12)])
    x, size = x + 0.0, 4096 * 256 * 4
    sizes = []
    for each in (model, applied):
        with tf.GradientTape() as tape:
            begun = tf.config.experimental.get_memory_info("CPU:0")["current"]
            loss = tf.reduce_mean(each(x, training=True))
            sizes.append((tf.config.experimental.get_memory_info("CPU:0")["current"] - begun) / size)
        tape.gradient(loss, [v.value for v in each.trainable_variables])
    assert sizes[1] < 1.1  # the input of the last layer
    assert sizes[0] > 6


@pytest.mark.slow
def test_mixed_precision():
    keras.config.set_dtype_policy("mixed_float16")
    model, x = stack("before"), numbers(4, 8)
    applied = tf_ckpt.apply(model, one_by_one)
    assert run_again(applied, x) == ["s3", "s4", "s5"]
    for mode in ("eager", "graph"):
        compare(model, applied, [x], mode)


def test_a_frozen_weight_that_its_layer_assigns():
    """As SpectralNormalization does: what the re-run reads is what the forward run read."""

    class Halving(L.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(8, 8), initializer="glorot_uniform", name="kernel")

        def call(self, x):
            self.kernel.assign(self.kernel * 0.5)
            return tf.sin(tf.matmul(x, self.kernel))

    inputs = keras.Input((8,))
    model = keras.Model(inputs, L.Dense(2)(Halving(name="h")(L.Dense(8)(inputs))))
    applied = tf_ckpt.apply(model, lambda chain: [(0, 2)])
    model.get_layer("h").trainable = False
    for mode in ("eager", "graph"):
        compare(model, applied, [numbers(4, 8)], mode)
