"""Device memory, as TensorFlow's allocators count it.

One small interface over `tf.config.experimental.get_memory_info` and `reset_memory_stats`, the same for every GPU and
for a CPU that counts. A CPU counts for certain when `TF_CPU_ALLOCATOR_USE_BFC=true` is in the environment before
TensorFlow is imported: it then has the allocator that GPUs have (and `TF_CPU_BFC_MEM_LIMIT_IN_MB=<n>` makes it a device
of n MiB). Without it, it counts only where TensorFlow switches oneDNN on by itself, with an allocator that rounds
differently.

The memory of the process (RSS) is no substitute and is never used: it does not shrink when tensors are freed.
"""

import re
from typing import NamedTuple

import tensorflow as tf

from tf_ckpt import tf_internals
from tf_ckpt.errors import CheckpointError

MIB = 2**20
_NO_STATISTICS = (ValueError, RuntimeError, tf.errors.OpError)


def devices():
    """The devices whose memory can be measured: every GPU of this process, or the CPU where there is no GPU.

    A CPU beside a GPU is left out: what trains on the GPU is not held there. Asking initialises TensorFlow's devices,
    so settings such as memory growth must come first.

    Returns:
        A tuple of device names, such as `("GPU:0", "GPU:1")` or `("CPU:0",)`; empty without statistics (see `hint`).
    """
    return tuple(name for name in _candidates() if available(name))


def available(device=None):
    """Whether allocator statistics exist for `device`, or with `None` for any device that `devices` would name."""
    if device is None:
        return bool(devices())
    try:
        tf.config.experimental.get_memory_info(device)
    except _NO_STATISTICS:
        return False
    return True


def hint():
    """Why `devices` is empty and how to change that, as a sentence for a warning or an error."""
    names = ", ".join(_candidates())
    if "GPU" in names:
        return f"The allocator of {names} keeps no statistics, so device memory cannot be measured."
    return (
        f"The allocator of {names} keeps no statistics, so device memory cannot be measured. To turn them on, set "
        "`TF_CPU_ALLOCATOR_USE_BFC=true` in the environment before TensorFlow is imported."
    )


def current_bytes(device):
    """Bytes that `device` holds now."""
    return _info(device)["current"]


def peak_bytes(device):
    """The most bytes that `device` held at once, since the process began or since the last `reset_peak`."""
    return _info(device)["peak"]


def reset_peak(device):
    """Sets the peak of `device` to what it holds now. This is global: every reader of the peak sees it."""
    try:
        tf.config.experimental.reset_memory_stats(device)
    except _NO_STATISTICS as error:
        raise CheckpointError(f"Cannot reset the peak memory: {error}. Received: device={device!r}") from error


def synchronize():
    """Waits for everything that was launched on every device. A GPU's step otherwise "ends" before its kernels do."""
    wait = getattr(tf.test.experimental, "sync_devices", None)
    if wait is not None and tf.executing_eagerly():
        wait()


def key(device):
    """The name of `device` as it is written into a log's key: `"gpu_0"` for `"GPU:0"`."""
    return re.sub(r"\W+", "_", device.rpartition("device:")[2]).lower()


class Usage(NamedTuple):
    """One device's memory over a stretch of work, in bytes: held at its beginning, and the most held within it."""

    baseline: int
    peak: int


def merge(first, second):
    """Joins two readings (`{device: Usage}`) to one over both stretches: the least baseline, the highest peak.

    The least, because the gradients of one step may still be held when the next begins.
    """
    merged = dict(first)
    for device, usage in second.items():
        other = merged.get(device, usage)
        merged[device] = Usage(min(usage.baseline, other.baseline), max(usage.peak, other.peak))
    return merged


class PeakMeter:
    """Measures a repeated stretch of work, such as a training step, on several devices at once.

    A peak that somebody else resets within the stretch is not lost: it is read before.

    Args:
        names: Device names, such as `devices()`. With none, nothing is read and every reading is empty.
        reset: Whether `begin` resets the peaks. Without, `end` reads the peak of the whole process so far.

    Example:

    ```python
    meter = PeakMeter(devices())
    meter.begin()
    model.train_on_batch(x, y)
    print(meter.end()["CPU:0"].peak / MIB)
    ```
    """

    def __init__(self, names, reset=True):
        self.names = tuple(names)
        self.reset = reset
        self._baselines, self._before = {}, {}

    def begin(self):
        """Starts a stretch. A stretch that was begun before and not ended is forgotten."""
        self._baselines, self._before = {}, {}
        if self.names:
            tf_internals.tell_before_reset(self)
            synchronize()
        for name in self.names:
            if self.reset:
                reset_peak(name)
            self._baselines[name] = current_bytes(name)

    def end(self):
        """Ends the stretch.

        Returns:
            `{device: Usage}`, empty when no stretch was begun.
        """
        baselines, self._baselines = self._baselines, {}
        if baselines:
            synchronize()
        return {name: Usage(baseline, max(peak_bytes(name), self._before.get(name, 0))) for name, baseline in baselines.items()}

    def before_reset(self):
        """Keeps the peaks of an open stretch, which are about to be reset."""
        for name in self._baselines:
            self._before[name] = max(peak_bytes(name), self._before.get(name, 0))


def _candidates():
    """The devices that training uses: GPUs, or else the CPU. In a cluster names carry the job, and stay whole."""
    found = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")[:1]
    return [device.name.removeprefix("/device:") for device in found]


def _info(device):
    try:
        return tf.config.experimental.get_memory_info(device)
    except _NO_STATISTICS as error:
        raise CheckpointError(f"Cannot read the memory: {error}. {hint()} Received: device={device!r}") from error
