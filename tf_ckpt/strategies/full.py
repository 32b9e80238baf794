"""Every stretch between single-tensor cuts is a segment: the least kept without several levels."""

import itertools


def full(chain):
    """Plans a segment between each two cuts that a single differentiable tensor crosses.

    Args:
        chain: A `Chain`.

    Returns:
        A sorted list of ranges `(start, stop)` to recompute. Stretches that keep nothing, and the one before the loss,
        stay plain.
    """
    n = len(chain)
    cuts = [0, *(c for c in range(1, n) if sum(t.differentiable for t in chain.crossing(c)) == 1), n]
    segments = []
    for start, stop in itertools.pairwise(cuts[:-1]):
        if chain.allowed(start, stop):
            segments.append((start, stop))
        else:
            segments += pieces(chain, range(start, stop))
    return [s for s in segments if chain.stored(*s) > 0]


def pieces(chain, stages):
    """Splits stages, in order, into the longest ranges that may each be one segment.

    Args:
        chain: A `Chain`.
        stages: Sorted iterable of stage numbers.

    Returns:
        A sorted list of ranges `(start, stop)`.
    """
    ranges = []
    for stage in stages:
        if ranges and ranges[-1][1] == stage and chain.allowed(ranges[-1][0], stage + 1):
            ranges[-1] = (ranges[-1][0], stage + 1)
        elif chain.allowed(stage, stage + 1):
            ranges.append((stage, stage + 1))
    return ranges
