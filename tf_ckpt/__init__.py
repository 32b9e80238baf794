"""Gradient (activation) checkpointing for Keras 3 on TensorFlow: exact, automatic and measured."""

import os
import sys


def _is_command_line():
    """Whether this process is `tf-ckpt` or `python -m tf_ckpt`, which Python calls "-m" while it looks for the module."""
    name = os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else ""
    return name.startswith("tf-ckpt") or (name == "-m" and "tf_ckpt" in sys.orig_argv)


def _interrupted(*_):
    """Ends the command line while TensorFlow is being imported, which takes seconds, as `cli.main` ends it later."""
    os.write(_stderr, b"tf-ckpt: interrupted\n")
    os._exit(130)


_stderr, _watched = 2, False
if _is_command_line():
    import signal as _signal

    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:  # not ignored, as in the background
        _watched = True
        _signal.signal(_signal.SIGINT, _interrupted)
    # Results without TensorFlow's start-up notes; memory that is counted on a CPU, too; a GPU that is shared with the processes
    # that measure. TensorFlow reads these when it is imported, which is below.
    for _name, _value in (
        ("KERAS_BACKEND", "tensorflow"),
        ("TF_CPP_MIN_LOG_LEVEL", "3"),
        ("TF_CPU_ALLOCATOR_USE_BFC", "true"),
        ("TF_FORCE_GPU_ALLOW_GROWTH", "true"),
    ):
        os.environ.setdefault(_name, _value)
    # What TensorFlow's C++ writes before its logging is set up, no variable turns off. An error is an exception.
    _stderr, _nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(_nowhere, 2)
    try:
        import tensorflow as _  # noqa: F401
    finally:
        os.dup2(_stderr, 2)
        os.close(_stderr)
        os.close(_nowhere)
        _stderr = 2

# In a checkout that is not installed, `layers` and `callbacks` lie beside this folder, not in it.
_root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.exists(os.path.join(_root, "setup.cfg")):
    __path__.append(_root)

import keras as _keras  # noqa: E402

if _keras.backend.backend() != "tensorflow":
    raise ImportError(
        "tf_ckpt works with Keras on TensorFlow. Set KERAS_BACKEND=tensorflow before Keras is imported. "
        f"Received: KERAS_BACKEND={_keras.backend.backend()}"
    )

from tf_ckpt import callbacks, layers, saving, strategies  # noqa: E402, F401
from tf_ckpt.batch_size import max_batch_size  # noqa: E402
from tf_ckpt.calibration import Calibration  # noqa: E402
from tf_ckpt.check import check  # noqa: E402
from tf_ckpt.check_report import CheckReport, Difference  # noqa: E402
from tf_ckpt.compare import compare  # noqa: E402
from tf_ckpt.errors import CheckpointError, CheckpointWarning  # noqa: E402
from tf_ckpt.layers import Recompute  # noqa: E402
from tf_ckpt.measuring import calibrate  # noqa: E402
from tf_ckpt.plan import Plan, Segment  # noqa: E402
from tf_ckpt.replay import disabled, is_recomputing, recompute  # noqa: E402
from tf_ckpt.transform import apply, plan, plan_of, remove  # noqa: E402

if _watched:
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)

__version__ = "0.1.0"
__all__ = [
    "Calibration",
    "CheckReport",
    "CheckpointError",
    "CheckpointWarning",
    "Difference",
    "Plan",
    "Recompute",
    "Segment",
    "apply",
    "calibrate",
    "callbacks",
    "check",
    "compare",
    "disabled",
    "is_recomputing",
    "layers",
    "max_batch_size",
    "plan",
    "plan_of",
    "recompute",
    "remove",
    "strategies",
]
