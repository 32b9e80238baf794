"""Memory as users say it, down to a model that keeps a budget; and the order in which its graph runs."""

import itertools

import keras
import pytest
import tensorflow as tf
from cases import numbers
from helpers import compare

import tf_ckpt
from tf_ckpt import CheckpointError, budgets, graph
from tf_ckpt.stages import Stages
from tf_ckpt.strategies.tree import Range, depth

L = keras.layers
MIB = 2**20


def net(depth=12, width=32):
    inputs = x = keras.Input((width,))
    for _ in range(depth):
        x = L.LayerNormalization()(L.Dense(width, activation="gelu")(x))
    return keras.Model(inputs, L.Dense(2)(x))


@pytest.mark.parametrize(
    ("memory", "size"),
    [
        (3 * MIB, 3 * MIB),
        ("6GiB", 6 * 2**30),
        (" 800 MB", 800 * 10**6),
        ("1.5kib", 1536),
        ("77", 77),
        (0.5, 500),
        (2e6, 2000000),
        ("2e9", 2 * 10**9),
        ("1.5E+3 KiB", 1500 * 2**10),
    ],
)
def test_sizes(memory, size):
    assert budgets.memory_bytes(memory, 1000) == size


def test_the_memory_of_a_simulated_device(monkeypatch):
    monkeypatch.setenv("TF_CPU_BFC_MEM_LIMIT_IN_MB", "100")
    assert budgets.memory_bytes(None, 1000) == int(0.92 * 100 * MIB)
    monkeypatch.delenv("TF_CPU_BFC_MEM_LIMIT_IN_MB")
    with pytest.raises(CheckpointError, match="No device reports"):
        tf_ckpt.plan(net(2), "budget")


@pytest.mark.parametrize(
    ("optimizer", "slots"), [("adam", 2), (keras.optimizers.SGD(0.1), 0), (keras.optimizers.SGD(0.1, momentum=0.9), 1)]
)
def test_slots_of_an_optimizer(optimizer, slots):
    model = net(3)
    weights = budgets.variable_bytes(model.trainable_variables)
    assert weights == sum(4 * int(tf.size(v)) for v in model.trainable_variables)
    assert budgets.optimizer_bytes(model, optimizer) == slots * weights
    assert tf_ckpt.plan(model, "sqrt", optimizer=optimizer).optimizer_bytes == slots * weights


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_a_budget_is_kept_on_paper_with_room_for_the_allocator(share):
    plan = tf_ckpt.plan(net(), "budget", memory=share, batch_size=1024, optimizer="sgd")
    held = plan.weight_bytes + plan.optimizer_bytes
    memory = int(share * (held + plan.plain_activation_bytes))
    chain = Stages(graph.read(net())).chain(1024, gradients_wait=False)
    size = chain.peak(plan.ranges())
    lost = 0.04 * size + min(1.6 * chain.largest, 0.25 * size)
    assert plan.activation_bytes < size + lost
    assert held + size + lost <= memory + 2
    assert plan.overhead > 0


@pytest.mark.parametrize(
    ("optimizer", "waits"),
    [
        ("sgd", False),
        ("adamw", False),
        (keras.optimizers.SGD(clipnorm=1.0), False),
        (keras.optimizers.SGD(global_clipnorm=1.0), True),
        (keras.optimizers.SGD(gradient_accumulation_steps=2), True),
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), True),
    ],
)
def test_gradients_wait_where_an_optimizer_looks_at_all_first(optimizer, waits):
    model = net(2)
    assert budgets.gradients_wait(model, optimizer) == waits
    few, many = (tf_ckpt.plan(model, "sqrt", batch_size=1, optimizer=x) for x in (optimizer, "sgd"))
    held = few.moments[-1] > many.moments[-1]
    assert held == waits


def test_less_memory_costs_no_less():
    overheads = [tf_ckpt.plan(net(), "budget", memory=m, batch_size=1024).overhead for m in (0.99, 0.8, 0.6, 0.4)]
    assert overheads == sorted(overheads)


def test_a_budget_that_nothing_fits():
    model = net()
    with pytest.raises(CheckpointError, match=r"No plan fits\. The least .* MiB of it weights .*Received: memory=1000"):
        tf_ckpt.apply(model, "budget", memory=1000)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("budget", {"memory": 0.5}), ("recursive", {}), pytest.param("recursive", {"levels": 2}, marks=pytest.mark.slow)],
)
def test_training_is_that_of_the_plain_model(strategy, options):
    model = net()
    applied = tf_ckpt.apply(model, strategy, batch_size=1024, **options)
    assert tf_ckpt.plan_of(applied).segments
    assert depth(tf_ckpt.plan_of(applied).ranges()) <= options.get("levels", 9)
    compare(model, applied, [numbers(8, 32)], "graph", steps=1)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("sqrt", {"memory": 0.5}),
        ("budget", {"memory": 0.5, "levels": 2}),
        ("full", {"target": 0.5}),
        ("budget", {"layers": ["a"]}),
    ],
)
def test_options_of_other_strategies(strategy, options):
    with pytest.raises(CheckpointError, match=r"goes with strategy=.*Received: strategy="):
        tf_ckpt.apply(net(2), strategy, **options)


# --- what waits for what ----------------------------------------------------------------------------------------------


def ancestors(operation):
    """The names of all operations that one needs. `IdentityN` is taken apart, as graph optimisers do."""
    found, seen, queue = set(), set(), list(operation.inputs)
    while queue:
        tensor = queue.pop()
        if tensor.name not in seen:
            seen.add(tensor.name)
            found.add(tensor.op.name)
            inputs = tensor.op.inputs
            queue += [inputs[tensor.value_index]] if tensor.op.type == "IdentityN" else list(inputs)
    return found


def graph_of(model):
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    return tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec((4, 8))).graph.get_operations()


def test_what_segments_wait_for():
    """Random numbers for the segment's input, and a re-run for the weight gradients of the segment behind."""
    inputs = x = keras.Input((8,))
    for k in range(3):
        x = L.Dropout(0.5, seed=k, name=f"drop{k}")(L.Dense(8, name=f"dense{k}")(x))
    model = tf_ckpt.apply(keras.Model(inputs, L.Dense(2, name="head")(x)), lambda chain: [(0, 2), (2, 4), (4, 6)])
    operations = graph_of(model)
    for first, second in itertools.pairwise(range(3)):
        drawn = [op for op in operations if op.type.startswith("StatelessRandomUniform") and f"/drop{second}" in op.name]
        drawn = [op for op in drawn if "tf_ckpt_recompute" not in op.name]
        products = [op for op in operations if op.type == "MatMul" and "gradient_tape" not in op.name]
        again = [op for op in products if f"tf_ckpt_recompute/dense{first}.." in op.name]
        made = [op.name for op in products if f"/dense{first}" in op.name and op not in again]
        assert len(drawn) == len(made) == 1
        assert made[0] in ancestors(drawn[0])
        behind = [op.name for op in operations if op.name.startswith("gradient_tape/")]
        behind = [name for name in behind if f"/tf_ckpt_recompute/dense{second}.." in name]
        weights = [name for name in behind if name.endswith("/MatMul/MatMul_1")]  # TensorFlow makes it after the input's
        assert len(again) == len(weights) == 1
        assert weights[0] in ancestors(again[0])


@keras.saving.register_keras_serializable("test_budgets")
class Kind(L.Layer):
    """Makes a tensor of its input through which no gradient flows, of a dtype, or a sparse one."""

    def __init__(self, kind, **kwargs):
        super().__init__(**kwargs)
        self.kind = kind

    def call(self, x):
        if self.kind == "sparse":
            return tf.sparse.from_dense(tf.stop_gradient(x))
        return tf.as_string(x) if self.kind == "string" else tf.cast(x > 0.0, self.kind)

    def compute_output_spec(self, x):
        sparse = self.kind == "sparse"
        return keras.KerasTensor(x.shape, x.dtype if sparse else self.kind, sparse=sparse)


@keras.saving.register_keras_serializable("test_budgets")
class Gate(L.Layer):
    def call(self, x, kind):
        if isinstance(kind, tf.SparseTensor):
            return x * tf.sparse.to_dense(kind)
        return x * tf.cast(tf.strings.length(kind) if kind.dtype == tf.string else kind, x.dtype)


@pytest.mark.parametrize("kind", ["bool", "uint8", "int64", "string", "sparse"])
def test_a_tensor_without_a_gradient_that_several_stages_read(kind):
    inputs = keras.Input((8,))
    x = L.Dense(8, name="dense0")(inputs)
    made = Kind(kind, name="kind")(x)
    for k in range(2):
        x = L.Dropout(0.5, seed=k, name=f"drop{k}")(Gate(name=f"gate{k}")(x, made))
    model = keras.Model(inputs, L.Dense(2, name="head")(x))
    applied = tf_ckpt.apply(model, lambda chain: [(0, 6)])
    compare(model, applied, [numbers(4, 8)], "graph", steps=1)


@pytest.mark.parametrize("residual", [True, False])
def test_what_random_numbers_within_a_segment_wait_for(residual):
    """A tensor that several stages read. One reader more of any other could change what is joined, hence how it is rounded."""
    inputs = x = keras.Input((8,))
    for k in range(3):
        y = L.Dropout(0.5, seed=k, name=f"drop{k}")(L.Dense(8, name=f"dense{k}")(x))
        x = L.Add(name=f"add{k}")([x, y]) if residual else y
    n = 9 if residual else 6
    model = keras.Model(inputs, L.Dense(2, name="head")(x))
    model = tf_ckpt.apply(model, lambda chain: [Range(0, n, (Range(0, n - 1, (Range(0, 1),)),))])
    operations = [op for op in graph_of(model) if "gradient_tape" not in op.name]
    for levels in range(2):  # the model's forward run; in the outer segment's re-run, the forward run of the inner one
        own = [op for op in operations if op.name.count("tf_ckpt_recompute") == levels]
        for k in (1, 2):
            drawn = [op for op in own if op.type.startswith("StatelessRandomUniform") and f"/drop{k}" in op.name]
            before = [op.name for op in own if op.type == "MatMul" and f"/dense{k - 1}_" in op.name]
            assert len(drawn) == 1
            assert any(name in ancestors(drawn[0]) for name in before) == residual
