"""Gradient (activation) checkpointing for Keras 3 on TensorFlow: exact, automatic and measured."""

import os

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

from tf_ckpt import callbacks, layers, strategies  # noqa: E402
from tf_ckpt.batch_size import max_batch_size  # noqa: E402
from tf_ckpt.compare import compare  # noqa: E402
from tf_ckpt.errors import CheckpointError, CheckpointWarning  # noqa: E402
from tf_ckpt.layers import Recompute  # noqa: E402
from tf_ckpt.plan import Plan, Segment  # noqa: E402
from tf_ckpt.replay import disabled, is_recomputing, recompute  # noqa: E402
from tf_ckpt.transform import apply, plan, plan_of, remove  # noqa: E402

__version__ = "0.1.0"
__all__ = [
    "CheckpointError",
    "CheckpointWarning",
    "Plan",
    "Recompute",
    "Segment",
    "apply",
    "callbacks",
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
