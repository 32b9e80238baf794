"""How much memory there is: sizes as users write them, what a device has, what weights and optimizers take."""

import math
import numbers
import os
import re

import keras
import numpy as np
import tensorflow as tf

from tf_ckpt import tf_internals
from tf_ckpt.errors import CheckpointError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_LEAST_FLOAT = 1024  # of bytes: a lesser float was meant as a share, or in percent
MARGIN = 0.08  # of a device's memory: what allocators lose between tensors, and libraries take for themselves


def memory_bytes(memory, plain):
    """Returns the bytes that `memory` stands for.

    Args:
        memory: Integer of bytes, a string such as `"6GiB"`, a share of the plain model's peak above 0 and below 1, or None
            for the device's memory less a margin.
        plain: Bytes of the plain model's peak.

    Raises:
        TypeError: If `memory` is none of these.
        CheckpointError: If it is not positive, a float that is neither a share nor bytes, or no device says how much it has.
    """
    if memory is None:
        limit = device_bytes()
        if limit is None:
            raise CheckpointError(
                'No device reports how much memory it has: say it, as bytes, "6GiB", or a share of the plain model\'s peak. '
                "Received: memory=None"
            )
        return int((1 - MARGIN) * limit)
    if isinstance(memory, str):
        found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE]\+?[0-9]{1,2})?)\s*([a-zA-Z]*)\s*", memory)
        unit = _UNITS.get(found[2].upper()) if found else None
        if unit is None:
            raise CheckpointError(f"`memory` must be a size such as '6GiB', '800 MB' or '2e9'. Received: memory={memory!r}")
        if not found[2] and 0 < float(found[1]) < 1:
            raise CheckpointError(
                f"A share of the plain model's peak is no text: write memory={float(found[1])}. Received: memory={memory!r}"
            )
        size = int(float(found[1]) * unit)
    elif isinstance(memory, numbers.Real) and not isinstance(memory, bool):
        if not math.isfinite(memory):
            raise CheckpointError(f"`memory` must be finite. Received: memory={memory!r}")
        if not isinstance(memory, numbers.Integral) and memory >= 1 and (memory < _LEAST_FLOAT or memory != int(memory)):
            raise CheckpointError(
                "`memory` is a share of the plain model's peak only below 1, and bytes are a whole number: write an integer, "
                f"or text such as '6GiB' (and for all of the plain model's peak strategy='none'). Received: memory={memory!r}"
            )
        size = int(memory * plain) if 0 < memory < 1 else int(memory)
    else:
        raise TypeError(
            "`memory` must be an integer of bytes, a string such as '6GiB', a share of the plain model's peak, or None. "
            f"Received: memory={memory!r} of type {type(memory).__name__}"
        )
    if size <= 0:
        raise CheckpointError(f"`memory` must come to a byte at least. Received: memory={memory!r}")
    return size


def device_bytes():
    """Returns the memory of the device that trains, in bytes, or None if it does not say."""
    if tf.config.list_physical_devices("GPU"):
        limits = tf_internals.gpu_limits()
        return min(limits) if limits else None
    limit = os.environ.get("TF_CPU_BFC_MEM_LIMIT_IN_MB", "")
    counts = os.environ.get("TF_CPU_ALLOCATOR_USE_BFC", "").lower() in ("true", "1")
    return int(limit) * 2**20 if counts and limit.isdecimal() else None


def variable_bytes(variables):
    """Returns the bytes of Keras variables."""
    return sum(int(np.prod(v.shape, dtype=np.int64)) * tf.as_dtype(v.dtype).size for v in variables if v.dtype != "string")


def optimizer_bytes(model, optimizer=None):
    """Returns the bytes of the slots that an optimizer will hold for a model's weights.

    Args:
        model: A `keras.Model`.
        optimizer: A `keras.optimizers.Optimizer` or its name. Defaults to the one that the model is compiled with, or else
            to Adam.
    """
    optimizer = _optimizer(model, optimizer)
    with tf.init_scope():  # a copy of it tells how many slots it makes for a weight of four numbers
        probe = type(optimizer).from_config(optimizer.get_config())
        probe.build([keras.Variable(np.zeros((2, 2), "float32"))])
    slots = sum(1 for v in probe.variables if tuple(v.shape) == (2, 2))
    return slots * variable_bytes(model.trainable_variables)


def gradients_wait(model, optimizer=None):
    """Returns whether an optimizer holds all gradients of a step before it updates the first weight.

    Most update each weight when its gradient is there, which is let go then. Replicas sum up all of them first.

    Args:
        model: A `keras.Model`.
        optimizer: As for `optimizer_bytes`.
    """
    optimizer = _optimizer(model, optimizer)
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)  # it looks for infinities first
    named = (getattr(optimizer, name, None) for name in ("global_clipnorm", "gradient_accumulation_steps"))
    replicated = getattr(model, "distribute_strategy", None) and model.distribute_strategy.num_replicas_in_sync > 1
    return (
        bool(replicated) or scales or any(named) or getattr(getattr(model, "dtype_policy", None), "name", "") == "mixed_float16"
    )


def _optimizer(model, optimizer):
    optimizer = optimizer or getattr(model, "optimizer", None) or "adam"
    if isinstance(optimizer, str):
        try:
            optimizer = keras.optimizers.get(optimizer)
        except ValueError:
            raise CheckpointError(
                f"`optimizer` must be a Keras optimizer or its name, such as 'adam'. Received: optimizer={optimizer!r}"
            ) from None
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"`optimizer` must be a Keras optimizer or its name. Received: optimizer={optimizer!r}")
    return optimizer
