"""`Calibration`: what operations cost on a device, in seconds. Data and interpolation; `measuring.py` fills it.

A roofline with a measured roof: an operation takes the time of its FLOPs, as a matmul or convolution of that many, or the
time of the bytes that it reads and writes, whichever is longer. Between the sizes that were measured, seconds are
interpolated on logarithmic scales. Below the least, they are those of the least: what launching an operation costs. Above
the largest they grow in proportion. What two operations cost may overlap on a device; that is not accounted for.
"""

import dataclasses
import functools
import itertools
import math
import numbers
import os

import numpy as np

from tf_ckpt import json_file
from tf_ckpt.errors import CheckpointError
from tf_ckpt.plan import Plan

KINDS = ("matmul", "convolution", "memory")
VERSION = 1


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What operations cost on a device. `tf_ckpt.calibrate` measures one.

    Args:
        device: String, the device's name.
        dtype: String, the dtype that was measured, such as `"float32"`.
        matmul: Pairs `(FLOPs, seconds)` of matrix products, sizes rising.
        convolution: Pairs `(FLOPs, seconds)` of convolutions.
        memory: Pairs `(bytes, seconds)` of elementwise operations, with the bytes that they read and write.

    Raises:
        CheckpointError: If a table is empty, or its numbers are not positive, finite and rising in size.

    Example:

    ```python
    calibration = tf_ckpt.calibrate("device.json")
    model = tf_ckpt.apply(model, "budget", memory="6GiB", device=calibration)  # or device="device.json"
    ```
    """

    device: str
    dtype: str
    matmul: tuple
    convolution: tuple
    memory: tuple

    def __post_init__(self):
        for kind in KINDS:
            object.__setattr__(self, kind, _rows(kind, getattr(self, kind)))

    @functools.cached_property
    def _logarithms(self):
        # A larger operation that was measured faster is noise, and a plan must not seek it.
        tables = {kind: np.array(getattr(self, kind)) for kind in KINDS}
        return {kind: (np.log(t[:, 0]), np.log(np.maximum.accumulate(t[:, 1]))) for kind, t in tables.items()}

    def seconds(self, kind, flops, size):
        """Returns the seconds that an operation should take, one run of it.

        Args:
            kind: `"matmul"`, `"convolution"` or `"memory"`, for all that is neither.
            flops: Its FLOPs. They do not count in `"memory"`.
            size: Bytes that it reads and writes.

        Raises:
            CheckpointError: If there is no such kind.
        """
        if kind not in KINDS:
            raise CheckpointError(f"`kind` must be one of {KINDS}. Received: kind={kind!r}")
        moved = self._interpolated("memory", size)
        return moved if kind == "memory" else max(moved, self._interpolated(kind, flops))

    def _interpolated(self, kind, size):
        sizes, seconds = self._logarithms[kind]
        place = math.log(max(size, 1.0))
        return math.exp(np.interp(place, sizes, seconds) + max(place - sizes[-1], 0.0))

    def summary(self, print_fn=None):
        """Prints the table.

        Args:
            print_fn: Optional callable that takes the text. Defaults to printing it.
        """
        lines = [f"Calibration of {self.device}, {self.dtype}"]
        for kind in KINDS:
            unit, work = ("MB", "GB") if kind == "memory" else ("MFLOPs", "GFLOP")
            for size, seconds in getattr(self, kind):
                figures = f"{size / 1e6:>14,.3f} {unit:<6}{1e6 * seconds:>14,.1f} us{size / seconds / 1e9:>12,.1f} {work}/s"
                lines.append(f"{kind:<12}{figures}")
        (print_fn or print)("\n".join(lines))

    def save(self, path):
        """Writes the table to a JSON file.

        Args:
            path: String or path-like. A file that is there is replaced, at once and as a whole.

        Raises:
            TypeError: If `path` is not a string or path-like.
        """
        json_file.write(path, {"format": "tf_ckpt.Calibration", "version": VERSION, **dataclasses.asdict(self)})

    @classmethod
    def load(cls, path):
        """Reads a table that `save` wrote.

        Args:
            path: String or path-like.

        Returns:
            A `Calibration`, equal to the one saved.

        Raises:
            TypeError: If `path` is not a string or path-like.
            CheckpointError: If the file holds no calibration, or one of a version that this tf_ckpt does not know.
        """
        content = json_file.read(path, "Calibration", VERSION, "tf_ckpt.calibrate")
        values, received = {}, f"Received: path={json_file.checked_path(path)!r}"
        for field in dataclasses.fields(cls):
            if field.name not in content:
                raise CheckpointError(f"A calibration needs {field.name!r}. {received}, which has {sorted(content)}")
            values[field.name] = content[field.name]
            if field.name not in KINDS and not isinstance(values[field.name], str):
                raise CheckpointError(f"{field.name!r} must be text. {received}, which has {values[field.name]!r}")
        try:
            return cls(**values)
        except CheckpointError as error:
            raise CheckpointError(f"{error}, in path={json_file.checked_path(path)!r}") from error


def _rows(kind, table):
    unit = "bytes" if kind == "memory" else "FLOPs"
    rows = table if isinstance(table, (list, tuple)) else ()
    fits = bool(rows) and all(isinstance(row, (list, tuple)) and len(row) == 2 and _sound(*row) for row in rows)
    if not fits or any(a[0] >= b[0] for a, b in itertools.pairwise(rows)):
        shown = repr(table)
        raise CheckpointError(
            f"`{kind}` must be pairs ({unit}, seconds) of positive numbers, sizes rising and at most {_MOST_WORK:g}, "
            f"seconds from {_LEAST_SECONDS:g} to {_MOST_SECONDS:g}. "
            f"Received: {kind}={shown if len(shown) < 200 else shown[:200] + '...'}"
        )
    return tuple((float(size), float(seconds)) for size, seconds in rows)


# Beyond these no operation is measured, and sums and ratios of such figures would end in infinity or NaN.
_MOST_WORK, _LEAST_SECONDS, _MOST_SECONDS = 1e18, 1e-12, 1e6


def _sound(size, seconds):
    plain = all(isinstance(x, numbers.Real) and not isinstance(x, bool) for x in (size, seconds))
    return plain and 0 < size <= _MOST_WORK and _LEAST_SECONDS <= seconds <= _MOST_SECONDS  # not NaN either


def of(device, strategy):
    """Returns the `Calibration` that `device=` of `tf_ckpt.plan` and `apply` means, or None.

    Raises:
        TypeError: If it is neither a `Calibration` nor a path.
        CheckpointError: If there is no such file, it holds none, or `strategy` is a `Plan`, which is made already.
    """
    if device is None:
        return None
    if not isinstance(device, (Calibration, str, os.PathLike)):
        raise TypeError(
            "`device` must be a `Calibration` from `tf_ckpt.calibrate`, or the path of its file. "
            f"Received: device={device!r} of type {type(device).__name__}"
        )
    if isinstance(strategy, Plan):
        raise CheckpointError(
            "`device` says how a plan is made, and this one is made: give it to `tf_ckpt.plan`. "
            f"Received: a `Plan` of {strategy.strategy!r}, device={device!r}"
        )
    if isinstance(device, Calibration):
        return device
    if not os.path.isfile(device):
        raise CheckpointError(
            "`device` must be a `Calibration`, or the path of a file that holds one: tf_ckpt.calibrate('device.json') measures "
            f"the present device and writes it. There is no such file. Received: device={device!r}"
        )
    return Calibration.load(device)
