"""On which device a segment runs again, where a model is split over several by `tf.device`.

A re-run calls the function once more, so that a `tf.device` inside of it holds again. What holds no more is the one around the
call: the backward pass is made elsewhere. And what only passes a tensor on stays where the tensor is. TensorFlow would put it
on the first device, so that every boundary went there and back.

Gradients are left where TensorFlow puts those of the plain model: it optimises graphs device by device, and rounds accordingly.
"""

import contextlib

import tensorflow as tf

from tf_ckpt import tf_internals


def around(device):
    """Returns a scope that asks for a device, by name; for none if that is empty."""
    return tf.device(device) if device else contextlib.nullcontext()


def on_device_of(tensor):
    """Returns a scope that asks for the device that was asked for where a graph tensor was made, if one was."""
    return around("" if hasattr(tensor, "numpy") else tensor.device)


def passed_on(tensor):
    """Returns an identity of a tensor, on its device."""
    with on_device_of(tensor):
        return tf.identity(tensor)


def stay(passed):
    """Puts operations that ask for no device, and pass several tensors on, on the device of the first one that has one.

    Args:
        passed: List of graph tensors.
    """
    for op in {x.op.name: x.op for x in passed}.values():
        if op.type == "IdentityN" and not op.device:
            asked = [x.device for x in op.inputs if x.device]
            if asked:
                tf_internals.set_device(op, asked[0])
