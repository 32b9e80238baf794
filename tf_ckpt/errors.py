"""The errors and warnings of tf_ckpt: one family, so that a caller can catch it."""


class CheckpointError(ValueError):
    """Something cannot be checkpointed exactly, or was asked for wrongly."""


class CheckpointWarning(UserWarning):
    """Training is right, but something runs plain or saves less than was asked for."""
