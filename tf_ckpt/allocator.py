"""What an allocator loses between tensors: bytes in use for bytes that are asked for."""

from typing import NamedTuple


class _Loss(NamedTuple):
    """Shares of bytes.

    Attributes:
        of_all: Of all that is asked for.
        of_largest: Of the largest tensor, which finds no chunk of its size.
        most: The most of the latter, as a share of all.
    """

    of_all: float
    of_largest: float
    most: float


# Chunks are up to twice as large as what they hold before an allocator splits them, and which are free depends on what ran
# before. Both were set by what benchmarks/prediction.py prints: about the middle, and for budgets, that are to be kept, more.
_USUAL, _CAUTIOUS = _Loss(0.03, 0.8, 0.15), _Loss(0.04, 1.6, 0.25)


def in_use(size, largest, cautious=False):
    """Returns the bytes that an allocator has in use.

    Args:
        size: Bytes of tensors at the worst moment.
        largest: Bytes of the largest tensor.
        cautious: Whether to count on a bad day.
    """
    loss = _CAUTIOUS if cautious else _USUAL
    return (1 + loss.of_all) * size + min(loss.of_largest * largest, loss.most * size)


def room(memory, largest):
    """Returns the most bytes of tensors for which `memory` bytes are enough on a bad day: what `in_use` undoes."""
    loss = _CAUTIOUS
    return max((memory - loss.of_largest * largest) / (1 + loss.of_all), memory / (1 + loss.of_all + loss.most))
