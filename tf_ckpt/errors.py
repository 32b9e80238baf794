"""The errors and warnings of tf_ckpt: one family, so that a caller can catch it."""


class CheckpointError(ValueError):
    """Something cannot be checkpointed exactly, or was asked for wrongly."""


class CheckpointWarning(UserWarning):
    """Training is right, but something runs plain or saves less than was asked for."""


def quoted(value):
    """Returns a value as an error quotes it: in full, unless that would hide the error."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 120 else f"{text[:117]}... of type {type(value).__name__}"


def first_line(error):
    """Returns the first line of an error's message, which Keras and TensorFlow follow up with pages, without a full stop."""
    lines = str(error).strip().splitlines() or ["without a message"]
    return (lines[0] if len(lines[0]) <= 300 else lines[0][:297] + "...").rstrip(". ")
