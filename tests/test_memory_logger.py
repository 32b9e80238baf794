"""`MemoryLogger` puts the memory of training into the logs of `fit`, and never breaks it."""

import copy
import csv
import json
import math
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_ckpt
from tf_ckpt import memory
from tf_ckpt.callbacks import readings
from tf_ckpt.memory import MIB, Usage

MemoryLogger, memory_logger = tf_ckpt.callbacks.MemoryLogger, tf_ckpt.callbacks.memory_logger
BATCH = 256
KEYS = {"peak_memory_mib", "baseline_memory_mib"}
# Most of these models are plain ones; `test_logger_advice.py` is about what is said then.
pytestmark = pytest.mark.filterwarnings("ignore:MemoryLogger. nothing is checkpointed")


def make_model(units=1024, **compile_arguments):
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(units, "tanh"), keras.layers.Dense(units, "tanh"), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", **compile_arguments)
    return model


def data(batches=3, batch=BATCH):
    return np.ones((batches * batch, 8), "float32"), np.ones((batches * batch, 1), "float32")


def fit(model, logger, batches=3, **arguments):
    x, y = data(batches)
    arguments = {"batch_size": BATCH, "verbose": 0, "callbacks": [logger], **arguments}
    return model.fit(x, y, **arguments).history


class Record(keras.callbacks.Callback):
    """What a callback that comes after the logger finds in the logs."""

    def __init__(self):
        super().__init__()
        self.batches, self.epochs = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(dict(logs))

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(dict(logs))


@pytest.fixture
def drive(monkeypatch):
    """Runs a logger over scripted memory, without a model's training.

    Each epoch is a list of batches, each batch `{device: (baseline MiB, peak MiB)}`. Returns the history.
    """
    now = {}
    monkeypatch.setattr(memory, "synchronize", lambda: None)
    monkeypatch.setattr(memory, "reset_peak", lambda name: None)
    monkeypatch.setattr(memory, "current_bytes", lambda name: now[name][0] * MIB)
    monkeypatch.setattr(memory, "peak_bytes", lambda name: now[name][1] * MIB)

    def run(logger, epochs, validation=()):
        names = tuple(next(batch for epoch in epochs for batch in epoch))
        monkeypatch.setattr(memory, "devices", lambda: names)
        now.update(dict.fromkeys(names, (0, 0)))
        record = Record()
        callbacks = keras.callbacks.CallbackList([logger, record], add_history=True, model=make_model(1))
        callbacks.on_train_begin()
        for number, batches in enumerate(epochs):
            callbacks.on_epoch_begin(number)
            for i, batch in enumerate(batches):
                now.update(batch)
                callbacks.on_train_batch_begin(i)
                callbacks.on_train_batch_end(i, {"loss": 1.0})
            if number < len(validation):
                callbacks.on_test_begin()
                for i, batch in enumerate(validation[number]):
                    now.update(batch)
                    callbacks.on_test_batch_begin(i)
                    callbacks.on_test_batch_end(i, {"loss": 1.0})
                callbacks.on_test_end({"loss": 1.0})
            callbacks.on_epoch_end(number, {"loss": 1.0})
        callbacks.on_train_end()
        return record

    return run


def one(*batches):
    return [{"GPU:0": batch} for batch in batches]


def test_history_csv_and_progress_bar_have_it(tmp_path, capsys):
    logger, path = MemoryLogger(), tmp_path / "log.csv"
    history = fit(make_model(), logger, epochs=2, verbose=2, callbacks=[logger, keras.callbacks.CSVLogger(path)])
    assert {"loss", "recompute_overhead", "step_time_ms"} | KEYS == set(history)
    assert all(len(values) == 2 and all(isinstance(x, float) for x in values) for values in history.values())
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["peak_memory_mib"]) for row in rows] == history["peak_memory_mib"]
    assert [float(row["baseline_memory_mib"]) for row in rows] == history["baseline_memory_mib"]
    shown = capsys.readouterr().out
    assert shown.count(" - peak_memory_mib: ") == 2
    assert f" - peak_memory_mib: {history['peak_memory_mib'][0]:.4f}" in shown


def test_figures_hold_what_the_model_needs():
    model = make_model()
    history = fit(model, MemoryLogger(), epochs=2)
    held = sum(int(np.prod(x.shape)) * 4 for x in model.variables + model.optimizer.variables)
    activations = 2 * BATCH * 1024 * 4
    for peak, baseline in zip(history["peak_memory_mib"], history["baseline_memory_mib"], strict=True):
        assert baseline * MIB >= held
        assert (peak - baseline) * MIB >= activations
        # What other tests in this process have left is in both.
        assert (peak - baseline) * MIB < 8 * (held + activations)


def test_peak_grows_with_the_batch_and_comes_down_again():
    model, logger = make_model(), MemoryLogger()
    small = fit(model, logger)["peak_memory_mib"][0]
    large = fit(model, logger, batches=24, batch_size=8 * BATCH)["peak_memory_mib"][0]
    again = fit(model, logger)["peak_memory_mib"][0]
    assert large - small >= 7 * 2 * BATCH * 1024 * 4 / MIB
    assert again < large


def test_first_batch_is_told_apart(drive):
    logger = MemoryLogger()
    record = drive(logger, [one((10, 90), (12, 40), (11, 50)), one((9, 45))])
    assert [logs["peak_memory_mib"] for logs in record.epochs] == [50.0, 45.0]
    assert [logs["baseline_memory_mib"] for logs in record.epochs] == [11.0, 9.0]
    report = logger.report()
    assert report["first_step_peak_memory_mib"] == 90.0
    assert (report["peak_memory_mib"], report["baseline_memory_mib"]) == (50.0, 9.0)
    assert report["includes_first_step"] is False
    assert report["batches"] == 4


def test_epoch_of_the_first_batch_only_is_marked(drive):
    logger = MemoryLogger()
    record = drive(logger, [one((10, 90)), one((11, 50))])
    assert [logs["peak_memory_mib"] for logs in record.epochs] == [90.0, 50.0]
    report = logger.report()
    assert [epoch["includes_first_step"] for epoch in report["epochs"]] == [True, False]
    assert report["peak_memory_mib"] == 50.0
    assert report["includes_first_step"] is False


def test_fit_of_one_batch_reports_it_marked():
    logger = MemoryLogger()
    history = fit(make_model(), logger, batches=1)
    report = logger.report()
    assert history["peak_memory_mib"] == [report["peak_memory_mib"]] == [report["first_step_peak_memory_mib"]]
    assert report["includes_first_step"] is True


def test_epoch_without_a_batch_keeps_the_columns(drive):
    record = drive(MemoryLogger(), [one((10, 90), (11, 50)), []])
    assert set(record.epochs[0]) == set(record.epochs[1])
    assert math.isnan(record.epochs[1]["peak_memory_mib"])


def test_several_gpus(drive):
    logger = MemoryLogger()
    first = {"GPU:0": (5, 70), "GPU:1": (5, 80)}
    record = drive(logger, [[first, {"GPU:0": (5, 40), "GPU:1": (3, 60)}], [{"GPU:0": (5, 41), "GPU:1": (3, 31)}]])
    memories = [{k: v for k, v in logs.items() if "memory" in k} for logs in record.epochs]
    assert memories == [
        {
            "peak_memory_mib": 60.0,
            "baseline_memory_mib": 3.0,
            "peak_memory_mib_gpu_0": 40.0,
            "peak_memory_mib_gpu_1": 60.0,
        },
        {
            "peak_memory_mib": 41.0,
            "baseline_memory_mib": 5.0,
            "peak_memory_mib_gpu_0": 41.0,
            "peak_memory_mib_gpu_1": 31.0,
        },
    ]
    report = logger.report()
    assert report["per_device"]["GPU:0"]["peak_memory_mib"] == 41.0
    assert report["per_device"]["GPU:1"]["first_step_peak_memory_mib"] == 80.0
    assert json.loads(json.dumps(report)) == report


def test_validation_is_apart_and_hides_nothing(drive):
    logger = MemoryLogger()
    record = drive(logger, [one((1, 90), (2, 20)), one((2, 30))], [one((1, 80), (1, 50)), one((1, 25))])
    assert [logs["peak_memory_mib"] for logs in record.epochs] == [20.0, 30.0]
    assert [logs["val_peak_memory_mib"] for logs in record.epochs] == [50.0, 25.0]
    assert logger.report()["val_peak_memory_mib"] == 50.0


def test_validation_in_fit():
    model, logger = make_model(), MemoryLogger()
    x, y = data(8)
    history = fit(model, logger, epochs=4, validation_data=(x, y), validation_batch_size=8 * BATCH, validation_freq=2)
    assert len(history["peak_memory_mib"]) == 4
    assert len(history["val_peak_memory_mib"]) == len(history["val_loss"]) == 2
    # A validation batch holds eight times as many rows: its peak must not be taken for training's.
    alone = fit(make_model(), MemoryLogger(), epochs=2)["peak_memory_mib"][-1]
    assert history["peak_memory_mib"][-1] < alone + 8 * BATCH * 1024 * 4 / MIB


def test_evaluate_alone():
    model, logger = make_model(), MemoryLogger()
    model.evaluate(*data(), batch_size=BATCH, verbose=0, callbacks=[logger])
    report = logger.report()
    assert report["val_peak_memory_mib"] > 0
    assert report["peak_memory_mib"] is None
    assert report["batches"] == 0


@pytest.mark.parametrize(("update_freq", "written"), [("batch", [0, 1, 1, 1, 1, 1, 1]), (3, [0, 0, 1, 0, 0, 1, 0])])
def test_batch_logs(update_freq, written):
    logger, record = MemoryLogger(update_freq=update_freq), Record()
    history = fit(make_model(), logger, batches=7, callbacks=[logger, record])
    assert [int("peak_memory_mib" in logs) for logs in record.batches] == written
    assert max(logs.get("peak_memory_mib", 0) for logs in record.batches) <= history["peak_memory_mib"][0]
    assert record.epochs[0]["peak_memory_mib"] == history["peak_memory_mib"][0]


def test_batch_logs_have_the_peak_since_they_were_written(drive):
    record = drive(MemoryLogger(update_freq=2), [one((1, 90), (1, 20), (1, 60), (1, 10), (1, 5), (1, 7))])
    assert [logs.get("peak_memory_mib") for logs in record.batches] == [None, 20.0, None, 60.0, None, 7.0]


def test_epoch_logs_leave_batches_alone():
    logger, record = MemoryLogger(), Record()
    fit(make_model(), logger, callbacks=[logger, record])
    assert not any(KEYS & set(logs) for logs in record.batches)


def test_steps_per_execution():
    logger = MemoryLogger()
    history = fit(make_model(steps_per_execution=2), logger, batches=6, epochs=2)
    assert logger.report()["batches"] == 6
    assert all(peak > 0 for peak in history["peak_memory_mib"])


def test_run_eagerly_and_a_dataset_of_unknown_length():
    x, y = data()
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).filter(lambda a, b: True).batch(BATCH)
    logger = MemoryLogger()
    with pytest.warns(UserWarning, match="ran out of data"):
        history = make_model(run_eagerly=True).fit(dataset, epochs=2, shuffle=False, verbose=0, callbacks=[logger]).history
    assert logger.report()["batches"] == 6
    assert all(peak > 0 for peak in history["peak_memory_mib"])


def test_without_reset_it_never_resets(monkeypatch):
    monkeypatch.setattr(memory, "reset_peak", None)
    logger = MemoryLogger(reset=False)
    before = max(memory.peak_bytes(name) for name in memory.devices())
    history = fit(make_model(), logger, epochs=2, validation_split=0.3)
    assert all(peak * MIB >= before for peak in history["peak_memory_mib"])
    assert "val_peak_memory_mib" not in history
    report = logger.report()
    assert report["includes_first_step"] is True
    assert all(epoch["includes_first_step"] for epoch in report["epochs"])
    assert report["first_step_peak_memory_mib"] is None


def test_each_fit_is_a_new_run():
    model, logger = make_model(), MemoryLogger()
    fit(model, logger, epochs=3)
    fit(model, logger)
    assert logger.report()["batches"] == 3
    assert len(logger.report()["epochs"]) == 1


def test_a_fit_that_failed_does_not_spoil_the_next():
    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise RuntimeError("stop here")

    model, logger = make_model(), MemoryLogger()
    with pytest.raises(RuntimeError, match="stop here"):
        fit(model, logger, callbacks=[logger, Fail()])
    assert fit(model, logger)["peak_memory_mib"][0] > 0
    assert logger.report()["batches"] == 3


def test_predictions_are_the_plans():
    model = tf_ckpt.apply(make_model(), strategy="full", batch_size=BATCH)
    model.compile("sgd", "mse")
    plan, logger = tf_ckpt.plan_of(model), MemoryLogger()
    history = fit(model, logger)
    report = logger.report()
    assert report["predicted_recompute_overhead"] == pytest.approx(plan.overhead / (1 + plan.overhead))
    assert report["predicted_recompute_overhead_unit"] == "FLOPs"
    assert report["predicted_peak_memory_mib"] * MIB == plan.peak_bytes
    assert report["predicted_plain_peak_memory_mib"] * MIB == plan.plain_peak_bytes
    assert report["predicted_batch_size"] == report["batch_size"] == BATCH
    # A fit of three steps is not profiled, and a prediction is no measurement.
    assert math.isnan(history["recompute_overhead"][0])
    assert report["recompute_overhead_source"] == "unknown"
    assert "profile_batches" in report["recompute_overhead_note"]


def test_a_plain_model_has_no_overhead_and_no_prediction():
    logger = MemoryLogger()
    assert fit(make_model(), logger, epochs=2)["recompute_overhead"] == [0.0, 0.0]
    report = logger.report()
    assert report["recompute_overhead_source"] == "nothing is recomputed"
    assert report["predicted_recompute_overhead"] is None


def test_overhead_of_recompute_inside_layers_is_not_called_zero():
    class Holder(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.held = tf_ckpt.Recompute(keras.layers.Dense(4))

        def call(self, x):
            return self.held(x)

    model = keras.Sequential([keras.Input((8,)), Holder(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    assert math.isnan(fit(model, MemoryLogger())["recompute_overhead"][0])


def test_a_device_that_cannot_reset_is_named(monkeypatch):
    def refuse(name):
        raise memory.CheckpointError(f"Cannot reset the peak memory. Received: device={name!r}")

    monkeypatch.setattr(memory, "reset_peak", refuse)
    monkeypatch.setattr(memory_logger, "_warned", False)
    with pytest.warns(tf_ckpt.errors.CheckpointWarning, match=r"reset=False"):
        history = fit(make_model(), MemoryLogger())
    assert not KEYS & set(history)


def test_without_statistics_it_warns_once_and_trains():
    script = """
import json, warnings
import keras, numpy as np
from tf_ckpt.callbacks import MemoryLogger
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
logger = MemoryLogger(update_freq="batch", verbose=1)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        x, y = np.ones((4, 2)), np.ones((4, 1))
        history = model.fit(x, y, validation_data=(x, y), verbose=0, callbacks=[logger, MemoryLogger()]).history
said = [str(x.message) for x in caught if "logs no memory" in str(x.message)]
print(json.dumps([said, sorted(history), logger.report()]))
"""
    # oneDNN's own CPU allocator has statistics.
    environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0", "CUDA_VISIBLE_DEVICES": "-1"}
    environment.pop("TF_CPU_ALLOCATOR_USE_BFC")
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said, keys, report = json.loads(done.stdout.splitlines()[-1])
    assert len(said) == 1
    assert "TF_CPU_ALLOCATOR_USE_BFC=true" in said[0]
    assert keys == ["loss", "recompute_overhead", "step_time_ms", "val_loss"]
    assert report["devices"] == []
    assert report["peak_memory_mib"] is None
    assert report["batches"] == 1


def test_nothing_is_printed_unless_verbose(capsys):
    fit(make_model(), MemoryLogger())
    assert capsys.readouterr().out == ""
    logger = MemoryLogger(verbose=1)
    fit(make_model(), logger)
    shown = capsys.readouterr().out
    assert memory.devices()[0] in shown
    assert f"{logger.report()['peak_memory_mib']:,.1f}" in shown


def test_it_can_be_copied():
    # Tuners copy the callbacks for each trial.
    logger = copy.deepcopy(MemoryLogger(update_freq=2))
    assert logger.update_freq == 2
    assert fit(make_model(), logger)["peak_memory_mib"][0] > 0


def test_report_before_a_fit():
    report = MemoryLogger().report()
    assert report["peak_memory_mib"] is None
    assert report["epochs"] == []


def test_it_is_not_dispatched_to_a_thread():
    assert MemoryLogger.async_safe is False


def test_worst_takes_both_figures_from_one_device():
    usage = {"GPU:0": Usage(4 * MIB, 5 * MIB), "GPU:1": Usage(1 * MIB, 6 * MIB)}
    assert readings.worst(usage, ["GPU:0", "GPU:1"]) == (6.0, 1.0)
    assert readings.worst(usage, ["GPU:2"]) == (None, None)
