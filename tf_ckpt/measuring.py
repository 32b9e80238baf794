"""`calibrate`: measures what operations cost on a device, for plans in seconds instead of FLOPs."""

import itertools
import math
import numbers
import statistics
import time

import tensorflow as tf

from tf_ckpt.calibration import Calibration
from tf_ckpt.errors import CheckpointError
from tf_ckpt.json_file import check_writable

_DTYPES = ("float32", "float16", "bfloat16", "float64")
_REPEATS = 7
# Pairs of a size and how many operations of it one run has: small ones are too short to be measured alone. What the
# first of each kind costs is little more than its launch.
_MATMULS = ((16, 64), (128, 64), (512, 16), (1024, 8), (2048, 4), (4096, 2))  # n x n by n x n
_CONVOLUTIONS = (  # (batch, height and width, channels), 3 x 3
    *(((1, 4, 8), 64), ((4, 16, 32), 32), ((8, 28, 64), 8)),
    *(((16, 56, 64), 4), ((16, 56, 128), 2), ((32, 56, 256), 2)),
)
_ELEMENTWISE = ((2**8, 64), (2**14, 64), (2**18, 32), (2**21, 8), (2**23, 4), (2**25, 2))  # elements


def calibrate(path=None, *, device=None, dtype="float32", seconds=20.0):
    """Measures what operations cost on a device, so that plans can count seconds instead of FLOPs.

    A FLOP of a convolution, of a matmul and of a normalisation take very different times, and small operations cost little
    but their launch. Measured are matrix products, convolutions and elementwise products of six sizes each, as medians, in
    graphs as `fit` runs them. Do it while nothing else uses the device.

    Args:
        path: String or path-like: where to write the result as JSON. Defaults to nowhere.
        device: Name of a device, such as `"GPU:0"` or `"CPU:0"`. Defaults to the first GPU, or else the CPU.
        dtype: `"float32"`, `"float16"`, `"bfloat16"` or `"float64"`: for a model in mixed precision, the one it computes in.
        seconds: About how long it may take. Where the time is up, or memory, the larger sizes are left out.

    Returns:
        A `Calibration`, for `device=` of `tf_ckpt.plan` and `tf_ckpt.apply`.

    Raises:
        TypeError: If an argument is of the wrong type.
        CheckpointError: If there is no such device or dtype, `seconds` is not positive, or the device cannot compute so.

    Example:

    ```python
    calibration = tf_ckpt.calibrate("device.json")
    calibration.summary()
    plan = tf_ckpt.plan(model, "budget", memory="6GiB", device=calibration)  # or device="device.json", any time later
    ```
    """
    if path is not None:
        check_writable(path)  # before the time is spent
    if not isinstance(seconds, numbers.Real) or isinstance(seconds, bool):
        raise TypeError(f"`seconds` must be a number. Received: seconds={seconds!r}")
    if not (seconds > 0 and math.isfinite(seconds)):
        raise CheckpointError(f"`seconds` must be positive and finite. Received: seconds={seconds!r}")
    if not isinstance(dtype, str):
        raise TypeError(f"`dtype` must be a string. Received: dtype={dtype!r}")
    if dtype not in _DTYPES:
        raise CheckpointError(f"`dtype` must be one of {_DTYPES}. Received: dtype={dtype!r}")
    place, name = _device(device)
    kinds = (
        ("matmul", _matmul, _MATMULS),
        ("convolution", _convolution, _CONVOLUTIONS),
        ("memory", _elementwise, _ELEMENTWISE),
    )
    # In a `tf.function` that the caller may be in, nothing could be timed.
    with tf.init_scope(), tf.device(place):
        tables = {kind: _table(make, sizes, tf.as_dtype(dtype), seconds / len(kinds)) for kind, make, sizes in kinds}
    made = Calibration(device=name, dtype=dtype, **tables)
    if path is not None:
        made.save(path)
    return made


def _device(device):
    """Returns a device's name for `tf.device`, and one that says what it is."""
    names = [x.name.removeprefix("/device:") for kind in ("GPU", "CPU") for x in tf.config.list_logical_devices(kind)]
    if device is not None and not isinstance(device, str):
        raise TypeError(f"`device` must be the name of a device, one of {names}, or None. Received: device={device!r}")
    wanted = names[0] if device is None else device.removeprefix("/").removeprefix("device:").upper()
    wanted = wanted if ":" in wanted else wanted + ":0"
    if wanted not in names:
        raise CheckpointError(f"`device` must be one of {names}. Received: device={device!r}")
    kind, number = wanted.split(":")
    physical = tf.config.list_physical_devices(kind)
    details = tf.config.experimental.get_device_details(physical[int(number)]) if int(number) < len(physical) else {}
    return f"/{wanted}", wanted + (f" ({details['device_name']})" if "device_name" in details else "")


def _normal(shape, dtype, scale=1.0):
    return scale * tf.random.stateless_normal(shape, (1, 2), dtype=dtype)  # the user's own draws stay what they are


def _matmul(n, dtype):
    def run(x, weights):
        return tf.matmul(x, weights)

    return run, (_normal((n, n), dtype), _normal((n, n), dtype, n**-0.5)), 2 * n**3  # scaled so that x stays finite


def _convolution(shape, dtype):
    batch, side, channels = shape

    def run(x, kernel):
        return tf.nn.conv2d(x, kernel, strides=1, padding="SAME")

    kernel = _normal((3, 3, channels, channels), dtype, (9 * channels) ** -0.5)
    return run, (_normal((batch, side, side, channels), dtype), kernel), 2 * 9 * batch * side**2 * channels**2


def _elementwise(elements, dtype):
    def run(x, y):
        return tf.multiply(x, y)

    return run, (_normal((elements,), dtype), tf.ones((elements,), dtype)), 3 * elements * dtype.size


def _table(make, sizes, dtype, limit):
    """Returns pairs (FLOPs or bytes, seconds of one operation), for as many sizes as `limit` seconds allow, two at least."""
    start, rows = time.perf_counter(), []
    for size, count in sizes:
        if len(rows) > 1 and time.perf_counter() - start > limit / 2:  # the next is several times as dear
            break
        try:
            run, inputs, work = make(size, dtype)
            rows.append((work, _seconds(run, inputs, count, limit / 4)))
        except tf.errors.ResourceExhaustedError:
            if len(rows) > 1:
                break
            raise
        except (tf.errors.OpError, TypeError) as error:
            raise CheckpointError(f"The device cannot compute {make.__name__[1:]} in dtype={dtype.name!r}: {error}") from error
    return rows


def _seconds(run, inputs, count, limit):
    """Returns the median time of one operation among `count` that wait for each other, without the call around them."""

    def chained(number):
        def call(x, other):
            for _ in range(number):
                x = run(x, other)
            return tf.reshape(x, [-1])[0]  # to be read by the host, which so waits for the device

        return tf.function(call, autograph=False).get_concrete_function(*inputs)

    long, short, start = chained(1 + count), chained(1), time.perf_counter()
    differences = []
    for repeat in itertools.count():
        times = []
        for function in (long, short):
            before = time.perf_counter()
            function(*inputs).numpy()
            times.append(time.perf_counter() - before)
        if repeat:  # the first traces, and lets libraries choose how
            differences.append((times[0] - times[1]) / count)
            spent = time.perf_counter() - start
            if len(differences) >= _REPEATS or spent > limit:
                break
    found = statistics.median(differences)
    return found if found > 0 else times[0] / (1 + count)  # too short to tell from the call: with its share of that
