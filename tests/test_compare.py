"""`compare` trains in turns and leaves everything as it was; what runs out of memory is a row."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import Counter, numbers

import tf_ckpt
from tf_ckpt import CheckpointError, snapshot
from tf_ckpt.compare import compare

L = keras.layers
MIB = 2**20


def net(width=16, depth=3):
    inputs = x = keras.Input((width,))
    for number in range(depth):
        x = L.Dense(width, activation="gelu", name=f"dense{number}")(x)
        x = L.Dropout(0.3)(L.BatchNormalization()(x))
    x = Counter(name="counter")(x)
    return keras.Model(inputs, L.Dense(2, name="head")(x))


def data(rows=48, width=16):
    return np.asarray(numbers(rows, width)), np.asarray(numbers(rows, 2))


def trained(**compiled):
    model = net()
    model.compile("adam", "mse", metrics=["mae"], **compiled)
    x, y = data()
    model.fit(x, y, batch_size=16, verbose=0, shuffle=False)
    return model, x, y


def everything(model):
    """All that a user could see change: each variable, by name, and what the model is compiled with."""
    values = {
        f"{i} {v.path}": [part.tobytes() for part in parts]
        for (i, v), parts in zip(
            enumerate(snapshot.state_variables(model)), snapshot.read(snapshot.state_variables(model)), strict=True
        )
    }
    names = ("optimizer", "loss", "train_function", "compiled", "jit_compile", "_compile_metrics", "_loss_tracker", "history")
    return values, [id(getattr(model, name, None)) for name in names], np.random.get_state()[1].tobytes()  # noqa: NPY002


def run(script, **environment):
    """Runs a script in a process of its own and returns what its last line says."""
    paths = [str(Path(__file__).parent), str(Path(tf_ckpt.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_rows_are_equal_to_plain_and_nothing_changes():
    model, x, y = trained()
    before = everything(model)
    plan = tf_ckpt.plan(model, "full", batch_size=16)
    strategies = [plan, ("selective", {"target": 0.6}), lambda chain: [(0, 3)]]
    found = compare(model, x, y, strategies, 2, batch_size=16, verbose=0)
    assert everything(model) == before
    assert [row.strategy for row in found.rows] == ["plain", "full", "selective (target=0.6)", "<lambda>"]
    assert found.batch_size == 16
    assert (found.steps, found.jit_compile, found.isolated, found.note) == (2, False, False, "")
    plain = found.rows[0]
    assert (plain.overhead, plain.predicted_overhead) == (0.0, 0.0)
    for row in found.rows:
        assert row.status == "trained"
        assert row.equal is True, row.strategy
        assert len(row.losses) == 4
        assert row.losses == plain.losses
        assert row.loss == row.losses[-1]
        assert row.step_time_ms > 0
        assert row.peak_mib > row.baseline_mib > 0
    # The losses are those of `fit`, from the very state that the model has.
    values = snapshot.read(snapshot.state_variables(model))
    history = model.fit(x[:16], y[:16], batch_size=16, verbose=0, shuffle=False)
    assert history.history["loss"] == [plain.losses[0]]
    snapshot.write(snapshot.state_variables(model), values)
    # And processes of their own train the same.
    apart = compare(model, x, y, [plan], 1, batch_size=16, isolate=True, verbose=0)
    assert apart.isolated
    assert [row.losses for row in apart.rows] == [plain.losses[:3]] * 2
    assert [row.equal for row in apart.rows] == [True, True]
    assert json.loads(json.dumps(found.to_dict()))["rows"][1]["strategy"] == "full"
    assert "selective (target=0.6)" in str(found)


def test_peaks_are_those_of_the_step():
    inputs = x = keras.Input((256,))
    for _ in range(8):
        x = L.Dense(256, activation="gelu")(x)
    model = keras.Model(inputs, L.Dense(1)(x))
    values = np.ones((2048, 256), "float32"), np.ones((2048, 1), "float32")
    found = compare(model, *values, ["sqrt"], 2, batch_size=2048, loss="mse", optimizer="sgd", verbose=0)
    plain, ours = found.rows
    for row in found.rows:
        assert 0.8 < (row.peak_mib - row.baseline_mib) / (row.predicted_peak_mib - 2) < 1.3
    assert ours.peak_mib - ours.baseline_mib < 0.6 * (plain.peak_mib - plain.baseline_mib)
    assert not model.compiled


def test_an_exception_in_training_leaves_everything_as_it_was():
    model, x, _ = trained()
    before = everything(model)
    with pytest.raises(CheckpointError, match=r"cannot take these data.*y of shape \(16, 5, 7\)"):
        compare(model, x, np.zeros((len(x), 5, 7), "float32"), ["sqrt"], 2, batch_size=16, verbose=0)
    assert everything(model) == before

    def fails(y, predicted):
        return tf.debugging.check_numerics(keras.ops.mean(predicted) * np.nan, "mine")

    with pytest.raises(tf.errors.InvalidArgumentError, match="mine"):
        compare(model, x, data()[1], ["sqrt"], 2, batch_size=16, loss=fails, verbose=0)
    assert everything(model) == before

    def strategy(chain):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        compare(model, *data(), [strategy], 2, verbose=0)
    assert everything(model) == before


def test_an_applied_model_a_dataset_and_named_inputs():
    a, b = keras.Input((8,), name="a"), keras.Input((8,), name="b")
    x = L.Dense(8, activation="gelu")(L.Add()([L.Dense(8)(a), L.Dense(8)(b)]))
    model = tf_ckpt.apply(keras.Model({"a": a, "b": b}, {"p": L.Dense(1, name="p")(x), "q": L.Dense(3, name="q")(x)}), "full")
    model.compile("sgd", {"p": "mse", "q": keras.losses.SparseCategoricalCrossentropy(from_logits=True)})
    elements = {"a": np.ones((12, 8), "float32"), "b": np.asarray(numbers(12, 8))}
    targets = {"p": np.ones((12, 1), "float32"), "q": np.arange(12) % 3}
    dataset = tf.data.Dataset.from_tensor_slices((elements, targets)).batch(8)
    found = compare(model, dataset, strategies=["full"], steps=1, verbose=0)
    assert found.batch_size == 8  # the last batch is smaller, and left out
    assert [row.equal for row in found.rows] == [True, True]
    with_arrays = compare(model, elements, targets, ["full"], 1, batch_size=8, verbose=0)
    assert with_arrays.rows[0].losses == found.rows[0].losses


@pytest.mark.slow
def test_running_out_of_memory_is_a_row_and_restores_the_rest():
    found = run(
        """
        import json, keras, numpy as np, tf_ckpt
        from tf_ckpt import snapshot
        keras.utils.set_random_seed(1)
        inputs = x = keras.Input((256,))
        for _ in range(12):
            x = keras.layers.Dropout(0.1)(keras.layers.Dense(256, activation="gelu")(x))
        model = keras.Model(inputs, keras.layers.Dense(1)(x))
        model.compile("adam", "mse")
        x, y = np.ones((2048, 256), "float32"), np.ones((2048, 1), "float32")
        model.fit(x[:8], y[:8], verbose=0)
        variables = snapshot.state_variables(model)
        before = snapshot.digest(variables)
        found = tf_ckpt.compare(model, x, y, ["sqrt"], 1, batch_size=2048, isolate=False, verbose=0)
        same = before == snapshot.digest(variables)
        model.fit(x[:8], y[:8], verbose=0)
        print(json.dumps([same, str(found), found.to_dict()]))
        """,
        TF_CPU_BFC_MEM_LIMIT_IN_MB="72",
    )
    same, text, found = found
    assert same
    plain, ours = found["rows"]
    assert plain["status"] == "out of memory"
    assert (plain["peak_mib"], plain["loss"], plain["equal"]) == (None, None, None)
    assert ours["status"] == "trained"
    assert ours["peak_mib"] <= 72
    assert ours["equal"] is None  # there is nothing to compare with
    assert "out of memory" in text


@pytest.mark.slow
def test_running_out_of_memory_under_xla_happens_elsewhere():
    inputs = x = keras.Input((256,))
    for _ in range(8):
        x = L.Dropout(0.1)(L.Dense(256, activation="gelu")(x))
    model = keras.Model(inputs, L.Dense(1)(x))
    model.compile("sgd", "mse", jit_compile=True)
    x, y = np.ones((2048, 256), "float32"), np.ones((2048, 1), "float32")
    before = snapshot.digest(model.variables)
    found = compare(model, x, y, [], 1, batch_size=2048, memory="60MiB", verbose=0)
    assert (found.isolated, found.jit_compile) == (True, True)
    assert [row.status for row in found.rows] == ["out of memory"]
    assert snapshot.digest(model.variables) == before


@pytest.mark.slow
def test_two_replicas():
    found = run(
        """
        import json, keras, numpy as np, tensorflow as tf, tf_ckpt
        from tf_ckpt import snapshot
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        keras.utils.set_random_seed(1)
        with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
            inputs = x = keras.Input((16,))
            for _ in range(3):
                x = keras.layers.BatchNormalization(synchronized=True)(keras.layers.Dense(256, activation="gelu")(x))
            model = keras.Model(inputs, keras.layers.Dense(1)(x))
            model.compile("adam", "mse")
        x, y = np.random.normal(size=(4096, 16)).astype("float32"), np.ones((4096, 1), "float32")
        model.fit(x[:16], y[:16], batch_size=16, verbose=0)
        before = snapshot.digest(snapshot.state_variables(model))
        found = []
        for isolate in (False, True):  # in a process of its own it has as many devices
            found.append(tf_ckpt.compare(model, x, y, ["full"], 1, batch_size=4096, isolate=isolate, verbose=0).to_dict())
            assert before == snapshot.digest(snapshot.state_variables(model)), isolate
        print(json.dumps(found))
        """
    )
    here, apart = (x["rows"] for x in found)
    assert [x["isolated"] for x in found] == [False, True]
    for row in (*here, *apart):
        assert row["status"] == "trained"
        assert row["losses"] == here[0]["losses"]
        assert row["equal"] is True
        # Of one device: of both it would be twice as much.
        assert 0.7 < row["peak_mib"] / row["predicted_peak_mib"] < 1.4, row
    assert apart[1]["peak_mib"] < 0.8 * apart[0]["peak_mib"]


def fit_losses(model, x, y, size):
    """The losses of single batches in a `fit`."""
    found = []

    class Alone(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.model.reset_metrics()

        def on_train_batch_end(self, batch, logs=None):
            found.append(logs["loss"])

    model.fit(x, y, batch_size=size, shuffle=False, verbose=0, callbacks=[Alone()])
    return tuple(found)


class Holds(L.Layer):
    """Variables that Keras' `variables` do not have: a container that it does not track, TensorFlow's own, a metric."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.raw = tf.Variable(1.0)
        self.metric = keras.metrics.Sum()
        self.inside = {"rnn": (L.GRU(4, stateful=True, return_sequences=True),)}

    def build(self, shape):
        self.inside["rnn"][0].build(shape)

    def call(self, x):
        self.raw.assign_add(1.0)
        self.metric.update_state(keras.ops.mean(x))
        return self.inside["rnn"][0](x) * self.raw


def stateful(kind):
    inputs = x = keras.Input(batch_shape=(8, 3, 4))
    x = L.Dense(4, activation="gelu")(x)
    if kind == "both ways":
        x = L.Bidirectional(L.LSTM(4, stateful=True, return_sequences=True))(x)
    elif kind == "nested":
        inner = keras.Input(batch_shape=(8, 3, 4))
        cells = L.StackedRNNCells([L.LSTMCell(4), L.GRUCell(4)])
        x = keras.Model(inner, L.RNN(cells, stateful=True, return_sequences=True)(inner))(x)
    else:
        x = Holds()(x)
    model = keras.Model(inputs, L.Dense(1)(L.Dense(4, activation="gelu")(x)))
    model.compile("sgd", "mse")
    return model


@pytest.mark.filterwarnings("ignore:'holds' runs plain in every plan")
@pytest.mark.parametrize("kind", ["both ways", "nested", "held"])
def test_state_beside_the_variables_is_put_back_and_not_shared(kind):
    model = stateful(kind)
    x, y = np.asarray(numbers(32, 3, 4)), np.ones((32, 3, 1), "float32")
    model.fit(x[:8], y[:8], batch_size=8, verbose=0)
    before = snapshot.digest(variables := snapshot.state_variables(model))
    assert {id(v) for v in model.variables} < {id(v) for v in variables}
    found = compare(model, x, y, ["none", "none"], 1, verbose=0)  # in batches of 8, which the model states
    assert found.batch_size == 8
    assert snapshot.digest(snapshot.state_variables(model)) == before
    assert [row.equal for row in found.rows] == [True] * 3
    assert found.rows[0].losses == fit_losses(model, x[:24], y[:24], 8)
    with pytest.raises(CheckpointError, match=r"takes batches of 8 only.*batch_size=16"):
        compare(model, x, y, ["none"], 1, batch_size=16, verbose=0)


@pytest.mark.slow
def test_states_travel_to_processes_of_their_own():
    model = stateful("both ways")
    x, y = np.asarray(numbers(32, 3, 4)), np.ones((32, 3, 1), "float32")
    model.fit(x[:8], y[:8], batch_size=8, verbose=0)
    found = compare(model, x, y, [], 1, verbose=0, memory=64 * MIB + 5)
    assert found.memory_bytes == 64 * MIB
    assert "a simulated device of 64 MiB" in str(found)
    assert found.rows[0].losses == fit_losses(model, x[:24], y[:24], 8)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_turn_is_not_the_end_of_training(scaled):
    optimizer = keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.9)
    optimizer = keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer
    model = net(depth=1)
    model.compile(optimizer, "mse")
    x, y = data()
    optimizer.build(model.trainable_variables)  # so that it is the model's own that trains
    L.Dense(1)
    counted = L.Dense(1).name  # dense_1
    found = compare(model, x, y, [], 1, batch_size=16, verbose=0)
    assert "finalize_variable_values" not in vars(optimizer)
    assert found.rows[0].losses == fit_losses(model, x, y, 16)
    assert (counted, L.Dense(1).name) == ("dense_1", "dense_2")  # names go on as if nothing was made


@pytest.mark.slow
def test_a_step_that_raises_in_a_process_of_its_own_is_not_called_a_model_that_cannot_be_loaded():
    model = keras.Sequential([keras.Input((16,)), L.Dense(8, activation="gelu"), L.Dense(4)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=True)
    with pytest.raises(
        CheckpointError, match=r"A step of model .* in a process of its own, raised InvalidArgumentError.*[^.]\.$"
    ):
        compare(model, data()[0], np.full(48, 9), [], 1, isolate=True, verbose=0)


def test_batches_of_a_pydataset():
    x, y = data()

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, number):
            return x[16 * number :][:16], y[16 * number :][:16]

    model = net(depth=1)
    model.compile("sgd", "mse")
    found = compare(model, Batches(), strategies=[], steps=1, verbose=0)
    assert found.rows[0].losses == compare(model, x[:32], y[:32], [], 1, batch_size=16, verbose=0).rows[0].losses


def texts(made):
    """The boxes of all texts in a figure that are not empty."""
    import matplotlib.text

    renderer = made.canvas.get_renderer()
    made.draw(renderer)
    found = [t for t in made.findobj(matplotlib.text.Text) if t.get_text().strip() and t.get_visible()]
    return {t.get_text(): t.get_window_extent(renderer) for t in found}


def test_the_plot_has_units_and_no_text_on_another(tmp_path):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from tf_ckpt.comparison import Comparison, Row
    from tf_ckpt.comparison_plot import figure

    rows = [
        Row("plain", "out of memory", 900.0, 0.0),
        Row("sqrt", "trained", 300.0, 0.3, 310.0, 40.0, 120.0, None, 1.0),
        Row("selective (target=0.3, $x$)", "trained", 500.0, 0.1, 480.0, 40.0, 110.0, None, 1.0),
        Row("recursive", "trained", 200.0, 0.6, None, None, 210.0, None, 1.0),
    ]
    found = Comparison(tuple(rows), 8, 3, False, False)
    made = figure(found)
    FigureCanvasAgg(made)
    boxes = texts(made)
    assert "Time of a step (ms, median)" in boxes
    assert "Peak memory (MiB)" in boxes
    assert "plain: out of memory, 900 MiB predicted" in boxes
    names = list(boxes)
    for number, name in enumerate(names):
        for other in names[number + 1 :]:
            assert not boxes[name].overlaps(boxes[other]), (name, other)
    found.plot(tmp_path / "compare.png")
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(CheckpointError, match="matplotlib draws"):
        found.plot(tmp_path / "compare.doc")
    assert "out of memory" in str(found)
    assert "no statistics" in str(found)
