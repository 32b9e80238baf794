"""Device memory is read as TensorFlow's allocator counts it (here the CPU's: see conftest.py)."""

import os
import subprocess
import sys

import pytest
import tensorflow as tf

from tf_ckpt import memory
from tf_ckpt.errors import CheckpointError
from tf_ckpt.memory import MIB, PeakMeter, Usage

DEVICES = memory.devices()


def hold(mib):
    """A tensor of that many MiB, on the device that is measured."""
    return tf.zeros((mib, MIB // 4))


def test_devices_are_those_that_train():
    gpus = tf.config.list_logical_devices("GPU")
    assert (tuple(f"GPU:{i}" for i in range(len(gpus))) or ("CPU:0",)) == DEVICES
    assert memory.available()
    assert all(memory.available(name) for name in DEVICES)
    assert not memory.available("GPU:77")


def test_current_and_peak_follow_a_tensor():
    device = DEVICES[0]
    before = memory.current_bytes(device)
    tensor = hold(16)
    # The allocator may hand out a larger piece than was asked for, but not one of twice the size.
    assert 16 * MIB <= memory.current_bytes(device) - before < 32 * MIB
    held = memory.current_bytes(device)
    del tensor
    assert memory.current_bytes(device) <= held - 16 * MIB
    assert memory.peak_bytes(device) >= held
    memory.reset_peak(device)
    assert memory.peak_bytes(device) == memory.current_bytes(device)


@pytest.mark.parametrize("function", [memory.current_bytes, memory.peak_bytes, memory.reset_peak])
def test_unknown_device_is_quoted(function):
    with pytest.raises(CheckpointError, match=r"Received: device='GPU:77'"):
        function("GPU:77")


@pytest.mark.parametrize(
    ("device", "key"),
    [("CPU:0", "cpu_0"), ("GPU:12", "gpu_12"), ("/job:worker/replica:0/task:1/device:GPU:3", "gpu_3")],
)
def test_key(device, key):
    assert memory.key(device) == key


def test_meter_measures_what_came_and_went():
    meter = PeakMeter(DEVICES)
    meter.begin()
    hold(16)
    usage = meter.end()[DEVICES[0]]
    assert usage.peak - usage.baseline >= 16 * MIB
    assert memory.current_bytes(DEVICES[0]) < usage.peak
    meter.begin()
    assert meter.end()[DEVICES[0]].peak < usage.peak


def test_meter_without_reset_leaves_the_peak_alone(monkeypatch):
    monkeypatch.setattr(memory, "reset_peak", None)
    hold(16)
    before = memory.peak_bytes(DEVICES[0])
    meter = PeakMeter(DEVICES, reset=False)
    meter.begin()
    assert meter.end()[DEVICES[0]].peak >= before


def test_meter_that_was_not_begun_reads_nothing():
    meter = PeakMeter(DEVICES)
    assert meter.end() == {}
    meter.begin()
    assert meter.end() != {}
    assert meter.end() == {}


def test_meter_without_devices_reads_nothing(monkeypatch):
    monkeypatch.setattr(memory, "synchronize", None)
    meter = PeakMeter(())
    meter.begin()
    assert meter.end() == {}


def test_merge_keeps_the_least_baseline_and_the_highest_peak():
    first = {"GPU:0": Usage(5, 20), "GPU:1": Usage(1, 2)}
    second = {"GPU:0": Usage(4, 10), "GPU:2": Usage(3, 3)}
    assert memory.merge(first, second) == {"GPU:0": Usage(4, 20), "GPU:1": Usage(1, 2), "GPU:2": Usage(3, 3)}
    assert first == {"GPU:0": Usage(5, 20), "GPU:1": Usage(1, 2)}
    assert memory.merge({}, {}) == {}


def test_without_statistics_it_says_how_to_turn_them_on():
    script = (
        "from tf_ckpt import memory\n"
        "assert memory.devices() == () and not memory.available() and not memory.available('CPU:0')\n"
        "assert 'CPU:0' in memory.hint() and 'TF_CPU_ALLOCATOR_USE_BFC=true' in memory.hint()\n"
        "try:\n    memory.current_bytes('CPU:0')\n"
        "except ValueError as error:\n    assert memory.hint() in str(error), error\n"
        "else:\n    raise AssertionError('no error')\n"
        "memory.synchronize()\n"
    )
    # oneDNN's own CPU allocator has statistics.
    environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0", "CUDA_VISIBLE_DEVICES": "-1"}
    environment.pop("TF_CPU_ALLOCATOR_USE_BFC")
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
