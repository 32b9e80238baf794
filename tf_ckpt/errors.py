"""The errors and warnings of tf_ckpt: one family, so that a caller can catch it."""

import re


class CheckpointError(ValueError):
    """Something cannot be checkpointed exactly, or was asked for wrongly."""


class CheckpointWarning(UserWarning):
    """Training is right, but something runs plain or saves less than was asked for."""


def quoted(value):
    """Returns a value as an error quotes it: in full, unless that would hide the error."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 120 else f"{text[:117]}... of type {type(value).__name__}"


def first_line(error):
    """Returns what an error says, as one line without a full stop: Keras and TensorFlow go on for pages.

    Keras puts the name of the layer on the first line, and what is wrong behind it.
    """
    lines = [re.sub(r"\x1b\[\d*m", "", line).strip() for line in str(error).strip().splitlines()]
    lines = [line for line in lines if line] or ["without a message"]
    if len(lines) > 1 and lines[0].startswith("Exception encountered when calling"):
        lines = [f"{lines[0].removeprefix('Exception encountered when calling').strip().rstrip('.')}: {lines[1]}"]
    return (lines[0] if len(lines[0]) <= 300 else lines[0][:297] + "...").rstrip(". ")
