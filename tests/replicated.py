"""Programs for test_distribution.py, in a process of their own: `python tests/replicated.py MODE NAME ...`.

On two logical devices, or as one worker of a cluster if `TF_CONFIG` says so. Warnings are errors.
"""

import contextlib
import faulthandler
import functools
import os
import sys
import warnings

os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "true")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import AddsLoss
from helpers import assert_same, compare, step

import tf_ckpt
from tf_ckpt import mirrors

L = keras.layers
PROGRAMS = {}
context = tf.distribute.get_replica_context


def program(function):
    PROGRAMS[function.__name__] = function
    return function


@functools.cache
def two_devices():
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)


@functools.cache  # in eager mode two of them would take each other's messages for their own
def mirrored():
    two_devices()
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def values(variables):
    """Returns the value of each variable on each replica of this process."""
    raw = [v if isinstance(v, tf.Variable) else v.value for v in variables]
    return [part.numpy() for v in raw for part in tf.distribute.get_strategy().experimental_local_results(v)]


def assert_equal(plain, ours, name):
    assert len(plain) == len(ours), name
    for i, (p, o) in enumerate(zip(plain, ours, strict=True)):
        np.testing.assert_array_equal(o, p, err_msg=f"{name}: {i}")


class Runs(L.Layer):
    """Passes its input on, and counts how it is run: False for each forward run, True for each re-run."""

    seen = []

    def call(self, x):
        self.seen.append(tf_ckpt.is_recomputing())
        return tf.identity(x)


class Exchanges:
    """What replicas tell each other, as it reaches the strategy."""

    def __init__(self, strategy):
        self._told, kind = [], type(strategy.extended)
        original = kind.batch_reduce_to  # wrapped once more by each object, which does no harm

        def batch_reduce_to(extended, reduce_op, pairs, *args, **kwargs):
            self._told.append((str(reduce_op), len(pairs)))
            return original(extended, reduce_op, pairs, *args, **kwargs)

        kind.batch_reduce_to = batch_reduce_to

    @contextlib.contextmanager
    def telling(self):
        """Gives a list of what is told in the scope, in order."""
        self._told = []
        yield self._told


# --- functions --------------------------------------------------------------------------------------------------------


class Cases:
    """Functions of a tensor and `wrap`, which recomputes a function or leaves it as it is."""

    def __init__(self):
        rows = np.linspace(-1, 1, 12).reshape(3, 4).astype("float32")
        self.w, self.v = keras.Variable(rows, name="w"), keras.Variable(rows[::-1], name="v")
        self.norm = L.BatchNormalization(synchronized=True)
        self.norm.build((None, 4))
        self.raw = tf.Variable(tf.ones(4), aggregation=tf.VariableAggregation.MEAN)

    def product(self, x):
        return tf.tanh(tf.matmul(x, self.w))

    def synchronized_norm_in_nested_segments(self, x, wrap):
        inner = wrap(lambda x: self.norm(self.product(x), training=True))
        return wrap(lambda x: tf.sin(wrap(lambda x: self.norm(x, training=True))(inner(x))))(x)

    def a_weight_that_reaches_the_loss_through_other_replicas_alone(self, x, wrap):
        def function(x):
            total, mean = context().all_reduce("SUM", self.product(0 * x + 1)), context().all_reduce("MEAN", [x, tf.sin(x)])
            return total * x[:, :1] + mean[0][:, :1] * mean[1][:, :1]

        return wrap(function)(x)

    def all_gather(self, x, wrap):
        def function(x):
            h = self.product(x)
            return tf.matmul(tf.sin(h), context().all_gather(h, axis=0), transpose_b=True)

        return wrap(function)(x)

    def merge_call(self, x, wrap):
        def function(x):
            h = self.product(x)
            total, same, three = context().merge_call(
                lambda strategy, h, s: (strategy.reduce("SUM", h, axis=None), s, 3.0), args=(h, tf.sin(h))
            )
            return total * h + same * three  # gradients flow through what comes back as it was passed

        return wrap(lambda x: wrap(function)(tf.sin(x)))(x)

    def sparse_sum(self, x, wrap):
        def function(x):
            rows = tf.IndexedSlices(self.product(x), tf.constant([0, 1, 0]), tf.constant([3, 4]))
            return tf.convert_to_tensor(context().all_reduce("SUM", rows)) * self.product(x)

        return wrap(function)(x)

    def an_input_without_gradient(self, x, wrap):  # found in the first run, which begins again
        return wrap(lambda x, z: self.norm(self.product(x), training=True) + tf.stop_gradient(z))(x, tf.matmul(x, self.v))

    def captures_what_gradients_flow_through(self, x, wrap):
        outside = tf.matmul(x, self.v)
        return wrap(lambda x: self.norm(self.product(x), training=True) * outside)(x)

    def an_inner_segment_captures_what_replicas_told(self, x, wrap):
        def function(x):
            told = context().all_reduce("SUM", self.product(x))
            return wrap(lambda z: tf.sin(z) * told)(tf.matmul(x, self.v))

        return wrap(function)(x)

    def a_collective_of_its_own(self, x, wrap):
        def function(x):
            number = context().replica_id_in_sync_group
            same = tf.raw_ops.CollectiveReduceV2(
                input=tf.stop_gradient(x),
                group_size=1,
                group_key=100 + number,
                instance_key=7,
                ordering_token=[],
                merge_op="Add",
                final_op="Id",
            )
            return self.product(same + x)

        return wrap(function)(x)


# How often each runs in a step, forward and again, on both replicas, segments inside counted too; and what it warns of.
EXPECTED = {
    "synchronized_norm_in_nested_segments": ((10, 6), None),
    "a_weight_that_reaches_the_loss_through_other_replicas_alone": ((2, 2), None),
    "all_gather": ((2, 2), None),
    "merge_call": ((6, 4), None),
    "sparse_sum": ((2, 2), None),
    "an_input_without_gradient": ((4, 2), None),
    "captures_what_gradients_flow_through": ((4, 0), "captures a tensor"),
    "an_inner_segment_captures_what_replicas_told": (None, "captures a tensor"),
    "a_collective_of_its_own": ((4, 0), "talks to other replicas by TensorFlow's CollectiveReduceV2"),
}


@program
def exchanges(mode):
    strategy = mirrored()
    with strategy.scope():
        cases = Cases()
    variables = [cases.w, cases.v, cases.norm.gamma, cases.norm.beta]
    state = [cases.norm.moving_mean, cases.norm.moving_variance]
    counted = Exchanges(strategy)

    def trained(name, wrap):
        function = getattr(cases, name)
        cases.norm.moving_mean.assign(tf.zeros(4))
        cases.norm.moving_variance.assign(tf.ones(4))

        def one(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = function(x, wrap)
                loss = tf.reduce_sum(tf.square(y) * tf.cast(1 + tf.range(tf.shape(y)[1]), y.dtype))
            gradients = tape.gradient(loss, [x, *(v.value for v in variables)])
            return [loss, *(tf.convert_to_tensor(g) for g in gradients if g is not None)]

        def step():
            rows = tf.reshape(tf.range(9.0), (3, 3)) / 10
            x = strategy.experimental_distribute_values_from_function(lambda c: rows * (1 + c.replica_id_in_sync_group))
            return strategy.run(one, args=(x,))

        step = step if mode == "eager" else tf.function(step, autograph=False)
        step()
        results = step()
        with strategy.scope():
            return [part.numpy() for x in results for part in strategy.experimental_local_results(x)] + values(state)

    for name, (runs, warns) in EXPECTED.items():
        seen = []

        def wrap(function, name=name, seen=seen):
            def counting(*args):
                seen.append(tf_ckpt.is_recomputing())
                return function(*args)

            return tf_ckpt.recompute(counting, name=name)

        with counted.telling() as plain_tells:
            plain = trained(name, lambda function: function)
        with counted.telling() as tells, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours = trained(name, wrap)
        assert_equal(plain, ours, f"{name}, {mode}")
        assert tells == plain_tells, (name, mode, tells, plain_tells)
        found = (seen.count(False), seen.count(True))
        assert runs is None or found == tuple(n * (2 if mode == "eager" else 1) for n in runs), (name, mode, found)
        messages = [str(w.message) for w in caught]
        assert all(warns in m for m in messages) and messages if warns else not messages, (name, mode, messages)


@program
def apart(mode):
    """What is told in a re-run passes through no `IdentityN`: see `tf_internals.take_gradients_apart`."""
    strategy = mirrored()
    with strategy.scope():
        w = keras.Variable(np.ones((4, 4), "float32"))

    def one(x, tell):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.sin(tf_ckpt.recompute(lambda x: tf.sin(tell(tf.matmul(x, w))))(x)))
        return tape.gradient(loss, w.value)

    for tell in (lambda h: context().all_reduce("SUM", h), lambda h: context().all_gather(h, axis=0)):
        made = operations(lambda x, tell=tell: strategy.run(one, args=(x, tell)), tf.ones((3, 4)))
        again = [op for op in made if "tf_ckpt_recompute" in op.name]
        assert "Sin" in {op.type for op in again}
        found = [op for op in again if op.type == "IdentityN" and "ReadVariableOp" not in {y.op.type for y in op.inputs}]
        assert found == [], tell


# --- models -----------------------------------------------------------------------------------------------------------


def centred(x):
    """An activation for which replicas ask each other in the middle of a layer's call."""
    mean = tf.reduce_mean(x, axis=0)
    if context() is not None:  # Keras builds models outside of replicas
        mean = context().all_reduce("MEAN", mean)
    return keras.ops.gelu(2.0 * tf.tanh(x - mean))


def parts(chain):
    """A strategy that recomputes parts inside of layers: activations here."""
    return [tf_ckpt.strategies.Range(i, i + 1, (), True) for i, name in enumerate(chain.part_names) if name]


def model_of(wrap=lambda layer: layer, depth=1):
    """A model with all that a replica has of its own, and what it shares; names do not depend on what was made before."""
    inputs = x = keras.Input((8,), name="in")
    for i in range(depth):
        x = L.Dense(16, activation="gelu", kernel_regularizer=keras.regularizers.L2(1e-3), name=f"dense{i}")(x)
        x = wrap(L.BatchNormalization(synchronized=True, name=f"synchronized{i}"))(x)
        x = L.Dropout(0.3, seed=i, name=f"dropout{i}")(Runs(name=f"runs{i}")(x))
        x = wrap(L.BatchNormalization(name=f"own{i}"))(L.Dense(16, activation=centred, name=f"second{i}")(x))
    return keras.Model(inputs, L.Dense(1, name="out")(AddsLoss(name="adds")(x)), name="net")


def data(count=14):
    numbers = np.random.default_rng(0)
    return numbers.normal(size=(count, 8)).astype("float32"), numbers.normal(size=(count, 1)).astype("float32")


def fitted(strategy, make, **arguments):
    """Returns losses, and all variables on each replica, of a new model after some steps; the last batch is smaller."""
    with strategy.scope():
        keras.utils.set_random_seed(3)
        model = make()
        model.compile(keras.optimizers.Adam(0.01, name="adam"), "mse", jit_compile=False, **arguments)
        Runs.seen.clear()
        history = model.fit(*data(), batch_size=6, shuffle=False, verbose=0)
        return [np.array(history.history["loss"]), *values([*model.variables, *model.optimizer.variables])]


def compare_fits(mode, again, **ways):
    """Compares `fit` of models with that of the plain one, and how often `Runs` runs again in each replica and step."""
    strategy, seen = mirrored(), Runs.seen
    told = Exchanges(strategy)
    arguments, steps = ({"run_eagerly": True}, 3) if mode == "eager" else ({}, 1)
    with told.telling() as plain_tells:
        plain = fitted(strategy, model_of, **arguments)
    forward = seen.count(False)
    assert forward > 0
    for name, make in ways.items():
        with told.telling() as tells:
            assert_equal(plain, fitted(strategy, make, **arguments), f"{name}, {mode}")
        assert tells == plain_tells, (name, mode, tells, plain_tells)
        assert seen.count(False) == forward, (name, mode, seen)
        assert seen.count(True) == 2 * again * steps, (name, mode, seen)


@program
def fit(mode):
    compare_fits(mode, 1, full=lambda: tf_ckpt.apply(model_of(), "full", batch_size=3))


@program
def fit_parts(mode):
    compare_fits(
        mode,
        0,
        parts=lambda: tf_ckpt.apply(model_of(), parts, batch_size=3),
        wrapped=lambda: model_of(tf_ckpt.Recompute),
    )


@program
def plans(mode):
    strategy = mirrored()
    # What is planned in the scope is what is planned outside of it.
    with strategy.scope():
        model = model_of()
        inside = tf_ckpt.plan(model, "full", batch_size=4)
    assert inside == tf_ckpt.plan(model, "full", batch_size=4)
    with strategy.scope():
        model.compile("sgd", "mse")
    found = tf_ckpt.max_batch_size(model, 20_000, "full", verify=False)  # of each replica
    share = found.plan.batch_size
    assert found.batch_size == 2 * share > 2
    # Between the batches that are traced peaks are bounds, so that one sample more may still fit.
    peaks = [tf_ckpt.plan(model, "full", batch_size=size).peak_bytes for size in (share, share + 2)]
    assert peaks[0] <= 20_000 < peaks[1], peaks
    with pytest.raises(tf_ckpt.CheckpointError, match=r"at least 2, one sample for each of the 2 replicas.*most=1"):
        tf_ckpt.max_batch_size(model, "1MiB", most=1)


# --- devices ----------------------------------------------------------------------------------------------------------


def short(device):
    """Returns `"CPU:1"` of a device's full name, or an empty string where none is asked for."""
    return device.rpartition("device:")[2]


class On(L.Layer):
    """A block of a model that is split over devices."""

    def __init__(self, device, **kwargs):
        super().__init__(**kwargs)
        self.device, self.dense, self.norm = device, L.Dense(8, activation="gelu"), L.BatchNormalization()

    def build(self, shape):
        with tf.device(self.device):
            self.dense.build(shape)
            self.norm.build(shape)

    def call(self, x, training=None):
        with tf.device(self.device):
            return self.norm(self.dense(x), training=training)


def operations(step, *inputs):
    return tf.function(step, autograph=False).get_concrete_function(*inputs).graph.get_operations()


@program
def devices(mode):
    two_devices()
    x = tf.constant(np.random.default_rng(0).normal(size=(4, 8)).astype("float32"))

    # A `tf.device` around the call.
    seen, dense = [], [L.Dense(8, activation="gelu", name=f"dense{i}") for i in range(3)]
    with tf.device("CPU:1"):
        for layer in dense:
            layer.build((4, 8))

    def block(x):
        seen.append((tf_ckpt.is_recomputing(), short(tf.zeros([]).device)))
        for layer in dense:
            x = layer(x)
        return x

    def split(wrap):
        def call(x):
            with tf.device("CPU:1"):
                y = wrap(block)(tf.sin(x))
            return tf.reduce_sum(tf.square(y))

        return call

    weights = [v for layer in dense for v in layer.weights]
    for mode in ("eager", "graph"):
        plain = step(split(lambda function: function), weights, [], [x], mode, steps=1)
        seen.clear()
        assert_same(plain, step(split(tf_ckpt.recompute), weights, [], [x], mode, steps=1), mode)
        assert seen == [(False, "CPU:1"), (True, "CPU:1")], seen

    # Layers with a `tf.device` inside.
    inputs = y = keras.Input((8,))
    for i in range(4):
        y = On(f"CPU:{i // 2}", name=f"on{i}")(y)
    plain = keras.Model(inputs, y, name="net")
    ours = tf_ckpt.apply(plain, lambda chain: [(i, i + 1) for i in range(4)], batch_size=4)
    for mode in ("eager", "graph"):
        compare(plain, ours, [x], mode)

    def train(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(ours(x, training=True)))
        return tape.gradient(loss, [v.value for v in ours.trainable_variables])

    found = operations(train, x)
    again = [short(op.device) for op in found if op.type == "Rsqrt" and "tf_ckpt_recompute" in op.name]
    assert again == ["CPU:1"] * 2 + ["CPU:0"] * 2, again
    # What a segment is given and gives back does not visit the other device on its way, nor does what it waits for.
    passing = [op for op in found if "IdentityN" in op.name or (op.type == "Reshape" and "gradient_tape" not in op.name)]
    lost = [op.name for op in passing if not op.device and any(y.device for y in op.inputs)]
    assert passing
    assert not lost, lost

    # The backward pass of a replica waits for none of another's.
    strategy = mirrored()
    with strategy.scope():
        inputs = y = keras.Input((8,))
        for _ in range(3):
            y = L.Dense(8, activation="gelu")(y)
        model = tf_ckpt.apply(keras.Model(inputs, y), "full", batch_size=4)

    def one(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x, training=True)))
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    second = []

    def replicated(x):
        second.extend(strategy.experimental_local_results(g)[1] for g in strategy.run(one, args=(x,)))
        return tf.zeros([])

    tf.function(replicated, autograph=False).get_concrete_function(x)
    needed, queue = {}, [y.op for y in second]
    while queue:
        op = queue.pop()
        if op.name not in needed:
            needed[op.name] = short(op.device)
            queue += [y.op for y in op.inputs]
            queue += op.control_inputs
    assert "CPU:1" in needed.values()
    assert "CPU:0" not in needed.values(), [name for name, device in needed.items() if device == "CPU:0"]


# --- workers ----------------------------------------------------------------------------------------------------------


def looped(strategy, make, mode, steps=2):
    """As `fitted`, in a loop of one's own: Keras' `fit` fails with several workers (keras#20585)."""
    with strategy.scope():
        keras.utils.set_random_seed(3)
        model, optimizer = make(), keras.optimizers.Adam(0.01, name="adam")
        optimizer.build(model.trainable_variables)

    def one(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x, training=True) - y)) / 6 + sum(model.losses) / 2
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    def step(x, y):
        return strategy.reduce("SUM", strategy.run(one, args=(x, y)), axis=None)

    step = step if mode == "eager" else tf.function(step, autograph=False)
    mine, losses = strategy.cluster_resolver.task_id, []
    for number in range(steps):
        rows = slice(6 * number + 3 * mine, 6 * number + 3 * mine + 3)
        losses.append(step(*(tf.constant(a[rows]) for a in data())).numpy())
    with strategy.scope():
        return [np.array(losses), *values([*model.variables, *optimizer.variables])]


@program
def worker(mode):
    implementation = tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=implementation, timeout_seconds=60)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    assert strategy.num_replicas_in_sync == 2
    told = Exchanges(strategy)
    with told.telling() as plain_tells:
        plain = looped(strategy, model_of, mode)
    with told.telling() as tells:
        ours = looped(strategy, lambda: tf_ckpt.apply(model_of(), "full", batch_size=3), mode)
    assert True in Runs.seen
    assert_equal(plain, ours, mode)
    assert plain_tells
    assert tells == plain_tells
    with strategy.scope():
        model = model_of()
    with pytest.raises(tf_ckpt.CheckpointError, match=f"under {type(strategy).__name__}"):  # of `max_batch_size`, `compare`
        mirrors.devices_of(model)
    print("losses", plain[0].tolist())


if __name__ == "__main__":
    faulthandler.dump_traceback_later(280, exit=True)  # says where it hangs
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="__array__ implementation doesn't accept a copy", category=DeprecationWarning)
    # `AddN` of three terms starts with whichever buffer it may reuse: see conftest.py.
    tf.config.threading.set_inter_op_parallelism_threads(1)
    keras.utils.set_random_seed(7)
    for name in sys.argv[2:]:
        PROGRAMS[name](sys.argv[1])
