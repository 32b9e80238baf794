"""`MemoryLogger` against the allocator and TensorFlow itself, in every mode in which `fit` runs."""

import contextlib
import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
import time
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_ckpt
from tf_ckpt import tf_internals
from tf_ckpt.callbacks import MemoryLogger
from tf_ckpt.memory import MIB

BATCH = 64
MODES = {
    "graph": {"jit_compile": False},
    "eager": {"run_eagerly": True},
    "xla": {"jit_compile": True},
    "steps_per_execution": {"steps_per_execution": 4, "jit_compile": False},
}


def blocks(depth=4, width=128):
    inputs = x = keras.Input((width,))
    for _ in range(depth):
        x = keras.layers.Dense(width)(keras.layers.LayerNormalization()(keras.layers.Dense(4 * width, "gelu")(x)))
    return keras.Model(inputs, x)


def checkpointed(**compile_arguments):
    model = tf_ckpt.apply(blocks(), "sqrt", batch_size=BATCH)
    model.compile("sgd", "mse", **compile_arguments)
    return model


def data(batches, width=128):
    numbers = np.random.default_rng(0)
    return numbers.normal(size=(2, batches * BATCH, width)).astype("float32")


class Allocator(keras.callbacks.Callback):
    """Asks TensorFlow itself, at the same moments as the logger."""

    async_safe = False

    def __init__(self, reset_within=False):
        super().__init__()
        self.peaks, self.logs, self.reset_within = [], [], reset_within

    def on_train_batch_begin(self, batch, logs=None):
        tf.test.experimental.sync_devices()
        tf.config.experimental.reset_memory_stats("CPU:0")

    def on_train_batch_end(self, batch, logs=None):
        tf.test.experimental.sync_devices()
        self.peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
        self.logs.append(dict(logs))
        if self.reset_within:
            tf.config.experimental.reset_memory_stats("CPU:0")


@pytest.mark.parametrize("mode", MODES)
def test_peak_is_the_allocators_to_the_byte(mode):
    logger, allocator = MemoryLogger(update_freq="batch", profile_batches=1), Allocator()
    x, y = data(12)
    history = checkpointed(**MODES[mode]).fit(x, y, batch_size=BATCH, verbose=0, callbacks=[logger, allocator]).history
    assert len(allocator.peaks) == (3 if mode == "steps_per_execution" else 12)
    assert [logs["peak_memory_mib"] * MIB for logs in allocator.logs[1:]] == allocator.peaks[1:]
    assert history["peak_memory_mib"][0] * MIB == max(allocator.peaks[1:])
    assert logger.report()["first_step_peak_memory_mib"] * MIB == allocator.peaks[0]


def test_a_peak_that_another_callback_resets_is_not_lost():
    # The other one comes first: at the end of a batch it resets the peak before the logger reads it.
    logger, allocator = MemoryLogger(), Allocator(reset_within=True)
    x, y = data(6)
    history = checkpointed(**MODES["graph"]).fit(x, y, batch_size=BATCH, verbose=0, callbacks=[allocator, logger]).history
    assert history["peak_memory_mib"][0] * MIB == max(allocator.peaks[1:])


def test_two_loggers_agree():
    loggers = [MemoryLogger(), MemoryLogger()]
    x, y = data(6)
    checkpointed(**MODES["graph"]).fit(x, y, batch_size=BATCH, verbose=0, callbacks=loggers)
    first, second = (logger.report() for logger in loggers)
    assert first["peak_memory_mib"] == second["peak_memory_mib"]
    assert first["first_step_peak_memory_mib"] >= second["first_step_peak_memory_mib"] > 0


@pytest.mark.parametrize("mode", MODES)
def test_overhead_is_measured(mode):
    logger = MemoryLogger(profile_batches=2)
    model = checkpointed(**MODES[mode])
    x, y = data(8)
    before = set(os.listdir(tempfile.gettempdir()))
    history = model.fit(x, y, batch_size=BATCH, verbose=0, epochs=2, callbacks=[logger]).history
    left = {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("tf_ckpt_profile_")} - before
    assert not left
    report = logger.report()
    assert report["profiled_batches"] == 2
    assert report["recompute_overhead_source"].startswith("eager timing" if mode == "eager" else "profile")
    # The forward is a third of a plain step; half of all would be more than any segment can re-run.
    assert 0.02 < report["recompute_overhead"] < 0.5
    first, last = history["recompute_overhead"]
    assert last == report["recompute_overhead"]
    # Two executions of four steps are an epoch, and the first two batches are never profiled.
    assert math.isnan(first) if mode == "steps_per_execution" else first == last
    assert 0 < report["recompute_overhead_coverage"] <= 1
    assert 0 <= report["recompute_overhead_unknown"] < 0.2
    assert report["step_time_ms"] > 0
    assert json.loads(json.dumps(report)) == report
    assert not tf_internals.profiler_is_running()
    assert not getattr(model.train_function, "_tf_ckpt_once", False)


def test_more_recompute_is_a_larger_share():
    shares = {}
    for name, ranges in {"half": [(0, 5)], "all": [(0, 5), (5, 11)]}.items():
        model = tf_ckpt.apply(blocks(width=256), lambda chain, ranges=ranges: ranges, batch_size=BATCH)
        model.compile("sgd", "mse", jit_compile=False)
        logger = MemoryLogger(profile_batches=5)
        x, y = data(8, 256)
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[logger])
        shares[name] = logger.report()["recompute_overhead"]
    assert shares["half"] < shares["all"]


def test_recompute_in_layers_is_measured_without_a_plan():
    inputs = x = keras.Input((128,))
    for _ in range(3):
        x = tf_ckpt.Recompute(blocks(1))(x)
    model = keras.Model(inputs, x)
    model.compile("sgd", "mse", jit_compile=False)
    logger = MemoryLogger(profile_batches=2)
    x, y = data(6)
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[logger])
    assert logger.report()["recompute_overhead"] > 0.02
    assert logger.report()["predicted_recompute_overhead"] is None


def test_no_name_of_a_rerun_is_unknown_and_not_zero():
    with tf_ckpt.disabled():
        logger = MemoryLogger(profile_batches=1)
        x, y = data(6)
        history = checkpointed(**MODES["graph"]).fit(x, y, batch_size=BATCH, verbose=0, callbacks=[logger]).history
    report = logger.report()
    assert (report["recompute_overhead"], report["recompute_overhead_source"]) == (None, "unknown")
    assert "carried the name" in report["recompute_overhead_note"]
    assert math.isnan(history["recompute_overhead"][0])


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_forward_probe_where_nothing_is_profiled(mode):
    model, (x, y) = checkpointed(**MODES[mode]), data(8)
    logger = MemoryLogger(profile_batches=0, probe_data=x[:BATCH])
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[logger])
    report = logger.report()
    assert report["recompute_overhead_source"].startswith("forward probe")
    assert report["recompute_overhead"] > 0
    before = model.optimizer.iterations.numpy()
    with pytest.raises(ValueError, match=r"`probe_data` must be inputs of one batch.*\(64, 3\)"):
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[MemoryLogger(probe_data=x[:BATCH, :3])])
    with pytest.raises(ValueError, match=r"`probe_data` must be inputs of one batch.*'nothing'"):
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[MemoryLogger(probe_data="nothing")])
    assert model.optimizer.iterations.numpy() == before  # no batch was lost


@pytest.mark.parametrize(("start", "source"), [(0.001, "forward probe"), (0.3, "forward probe (uncertain)")])
def test_a_probe_of_little_more_than_its_start_is_uncertain(monkeypatch, start, source):
    from tf_ckpt.callbacks import forward_probe

    monkeypatch.setattr(forward_probe, "seconds", lambda model, inputs: (1.0, start))
    model, (x, y) = checkpointed(**MODES["graph"]), data(3)
    logger = MemoryLogger(profile_batches=0, probe_data=x[:BATCH])
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[logger])
    report = logger.report()
    assert report["recompute_overhead_source"] == source
    assert report["recompute_overhead_note"] == (
        "" if start < 0.1 else "30% of the probe's time went into its start, not into work"
    )


def test_a_small_probe_is_mostly_its_start():
    inputs = x = keras.Input((8,))
    for _ in range(2):
        x = keras.layers.Dense(8, activation="gelu")(x)
    model = tf_ckpt.apply(keras.Model(inputs, x), lambda chain: [(0, 2)], batch_size=2)
    model.compile("sgd", "mse", jit_compile=False)
    x, _ = data(1, 8)
    from tf_ckpt.callbacks import forward_probe

    seconds, start = forward_probe.seconds(model, x[:2])
    assert start > 0.15 * seconds


class Interrupts(keras.callbacks.Callback):
    def __init__(self, at, look=None):
        super().__init__()
        self.at, self.look, self.seen = at, look, []

    def on_train_batch_begin(self, batch, logs=None):
        if batch == self.at:
            raise KeyboardInterrupt

    def on_train_batch_end(self, batch, logs=None):
        if self.look is not None:
            self.seen.append(self.look.report())


def test_the_report_of_an_interrupted_fit_tells_the_batches_that_ran():
    logger, allocator = MemoryLogger(profile_batches=2), Allocator()
    interrupts = Interrupts(6, logger)
    model, (x, y) = checkpointed(**MODES["graph"]), data(8)
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[logger, allocator, interrupts])
    report = logger.report()
    assert (report["batches"], report["epochs"]) == (6, [])
    assert report["peak_memory_mib"] * MIB == max(allocator.peaks[1:6])
    assert report["includes_first_step"] is False
    assert report["step_time_ms"] > 0
    assert report["profiled_batches"] == 2
    assert report["recompute_overhead"] > 0
    # And within the epoch, after each batch.
    assert [seen["batches"] for seen in interrupts.seen] == [1, 2, 3, 4, 5, 6]
    for number, seen in enumerate(interrupts.seen[1:], start=2):
        assert seen["peak_memory_mib"] * MIB == max(allocator.peaks[1:number])
    assert [seen["profiled_batches"] for seen in interrupts.seen] == [0, 0, 1, 2, 2, 2]


@pytest.mark.parametrize("held", [False, True])
def test_an_interrupted_fit_leaves_no_wrapper(held):
    logger, (x, y) = MemoryLogger(profile_batches=50), data(6)
    model = checkpointed(**MODES["graph"])
    step = model.make_train_function() or model.train_function
    kept = None
    try:
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[logger, Interrupts(4)])
    except KeyboardInterrupt as error:
        kept = error if held else None  # as an interactive session does
    assert logger.report()["profiled_batches"] == 2
    assert held or model.train_function is step
    model.fit(x, y, batch_size=BATCH, verbose=0)  # without the logger, which is not to profile
    assert model.train_function is step
    assert logger.report()["profiled_batches"] == 2
    del kept


def test_forward_probe_changes_nothing():
    inputs = keras.Input((16,))
    y = keras.layers.Dropout(0.5)(keras.layers.BatchNormalization()(keras.layers.Dense(16, "gelu")(inputs)))
    model = tf_ckpt.apply(keras.Model(inputs, keras.layers.Dense(16)(y)), lambda chain: [(0, 3)], batch_size=BATCH)
    model.compile("sgd", "mse", jit_compile=False)
    x, y = data(6, 16)
    model.fit(x, y, batch_size=BATCH, verbose=0)
    before = [v.numpy() for v in model.variables]
    from tf_ckpt.callbacks import forward_probe

    forward_probe.check(model, x[:BATCH])
    assert forward_probe.seconds(model, x[:BATCH])[0] > 0
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value, err_msg=variable.path)


def test_another_profiler_is_left_alone(tmp_path):
    logger, (x, y) = MemoryLogger(profile_batches=1), data(8)
    model = checkpointed(**MODES["graph"])
    tf.profiler.experimental.start(str(tmp_path))
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[logger])
    assert tf_internals.profiler_is_running()
    tf.profiler.experimental.stop()
    report = logger.report()
    assert (report["recompute_overhead"], report["recompute_overhead_source"]) == (None, "unknown")
    assert report["recompute_overhead_note"] == "another profiler was running"
    assert report["step_time_ms"] > 0


def test_a_step_that_fails_stops_the_profiler():
    class Fails(keras.layers.Layer):
        def call(self, x):
            with tf.control_dependencies([tf.debugging.assert_less(tf.reduce_max(x), 1e6)]):
                return tf.identity(x)

    inputs = keras.Input((128,))
    model = tf_ckpt.apply(keras.Model(inputs, Fails()(blocks(4)(inputs))), "sqrt", batch_size=BATCH)
    model.compile("sgd", "mse", jit_compile=False)
    x, y = data(6)
    bad = x.copy()
    bad[2 * BATCH :] = np.nan  # from the third batch on, the first that is profiled
    logger = MemoryLogger(profile_batches=1)
    with pytest.raises(tf.errors.InvalidArgumentError):
        model.fit(bad, y, batch_size=BATCH, verbose=0, shuffle=False, callbacks=[logger])
    assert logger.report()["batches"] == 2
    assert not tf_internals.profiler_is_running()
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[logger])
    assert logger.report()["recompute_overhead"] > 0


def test_slow_steps_are_profiled_without_being_asked():
    class Slow(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            time.sleep(0.8)  # after the logger's turn, so that it counts as part of the step

    logger, (x, y) = MemoryLogger(), data(4)
    checkpointed(**MODES["graph"]).fit(x, y, batch_size=BATCH, verbose=0, callbacks=[logger, Slow()])
    report = logger.report()
    assert report["profiled_batches"] >= 1
    assert report["recompute_overhead"] > 0
    assert report["step_time_ms"] >= 800


def test_steps_of_executions_are_counted():
    # Ten steps in executions of four: the last one has two, which Keras does not say.
    logger, (x, y) = MemoryLogger(), data(10)
    checkpointed(**MODES["steps_per_execution"]).fit(x, y, batch_size=BATCH, verbose=0, callbacks=[logger])
    assert logger._steps_in_execution(4) == 4
    assert logger._steps_in_execution(8) == 2


def scalars(folder):
    """Returns the names of scalars in the event files of a folder, and how many of each."""
    found = {}
    for file in folder.glob("*tfevents*"):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            for value in event.summary.value:
                found.setdefault(value.tag, []).append(event.step)
    return found


def test_scalars_are_written_without_tensorboard(tmp_path):
    logger, (x, y) = MemoryLogger(log_dir=str(tmp_path)), data(3)
    history = checkpointed(**MODES["graph"]).fit(x, y, batch_size=BATCH, verbose=0, epochs=2, callbacks=[logger]).history
    (file,) = tmp_path.glob("*tfevents*")
    found = [value for event in tf.compat.v1.train.summary_iterator(str(file)) for value in event.summary.value]
    peaks = [value for value in found if value.tag == "epoch_peak_memory_mib"]
    assert [float(tf.make_ndarray(value.tensor)) for value in peaks] == pytest.approx(history["peak_memory_mib"])
    assert {value.metadata.plugin_data.plugin_name for value in peaks[:1]} == {"scalars"}


def test_a_log_dir_that_cannot_be_written_is_told_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    model, (x, y) = checkpointed(**MODES["graph"]), data(3)
    for path in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(ValueError, match=r"`log_dir` must be a directory that can be written to.*log_dir='.*file"):
            model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[MemoryLogger(log_dir=path)])
    assert model.optimizer.iterations.numpy() == 0


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_logger_that_wrote_event_files_can_be_pickled(tmp_path, interrupted):
    logger, (x, y) = MemoryLogger(log_dir=tmp_path), data(4)
    model = tf_ckpt.apply(blocks(), "none")
    model.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(KeyboardInterrupt) if interrupted else contextlib.nullcontext():
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[logger, *([Interrupts(3)] if interrupted else [])])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pickling the model, which a callback holds, stores the plain one
        again = pickle.loads(pickle.dumps(logger))
    assert again.report()["peak_memory_mib"] == logger.report()["peak_memory_mib"] > 0
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[again])
    assert len(list(tmp_path.glob("*tfevents*"))) == 2


@pytest.mark.parametrize("first", ["logger", "board"])
def test_scalars_reach_tensorboard(tmp_path, first):
    pytest.importorskip("tensorboard", reason="Keras' own callback needs it")
    logger = MemoryLogger(update_freq="batch", log_dir=tmp_path / "own")
    board = keras.callbacks.TensorBoard(str(tmp_path / "board"), write_graph=False, update_freq=1)
    callbacks = [logger, board] if first == "logger" else [board, logger]
    x, y = data(4)
    checkpointed(**MODES["graph"]).fit(
        x, y, batch_size=BATCH, verbose=0, epochs=2, callbacks=callbacks, validation_data=(x[:BATCH], y[:BATCH])
    )
    train, val = scalars(tmp_path / "board" / "train"), scalars(tmp_path / "board" / "validation")
    own = scalars(tmp_path / "own")
    for name in ("epoch_peak_memory_mib", "epoch_baseline_memory_mib", "epoch_step_time_ms"):
        assert train[name] == own[name] == [0, 1], name
    assert val["epoch_peak_memory_mib"] == own["epoch_val_peak_memory_mib"] == [0, 1]
    assert train["batch_peak_memory_mib"] == own["batch_peak_memory_mib"] == [2, 3, 4, 5, 6, 7, 8]


def test_two_devices_under_mirrored_strategy():
    script = """
import json
import keras, numpy as np, tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
import tf_ckpt
from tests.test_logger_in_fit import Allocator, blocks, data
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    model = tf_ckpt.apply(blocks(), "sqrt", batch_size=64)
    model.compile("sgd", "mse")
x, y = data(6)
logger, allocator = tf_ckpt.callbacks.MemoryLogger(update_freq="batch", profile_batches=2, verbose=1), Allocator()
history = model.fit(x, y, batch_size=64, epochs=2, verbose=0, callbacks=[logger, allocator]).history
pairs = [(logs["peak_memory_mib"] * 2**20, peak) for logs, peak in zip(allocator.logs[1:], allocator.peaks[1:])]
print(json.dumps([strategy.num_replicas_in_sync, pairs, history, logger.report()]))
"""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    replicas, pairs, history, report = json.loads(done.stdout.splitlines()[-1])
    assert replicas == 2
    assert len(pairs) == 11
    assert all(logged == peak for logged, peak in pairs)
    assert len(history["peak_memory_mib"]) == 2
    assert report["recompute_overhead_source"].startswith("profile")
    assert 0.02 < report["recompute_overhead"] < 0.5
    assert "share of the step in re-runs" in done.stdout
