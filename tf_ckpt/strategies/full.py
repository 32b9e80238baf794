"""Every stretch between single-tensor cuts is a segment: all that can be recomputed is, once."""

import itertools


def full(chain):
    """Plans a segment between each two cuts that a single differentiable tensor crosses.

    A stretch that alone frees nothing (a convolution between its kept input and output) is joined to the next one.

    Args:
        chain: A `Chain`.

    Returns:
        A sorted list of ranges `(start, stop)` to recompute. Stretches that keep nothing, and the one before the loss,
        stay plain.
    """
    n = len(chain)
    cuts = [0, *(c for c in range(1, n) if sum(t.differentiable for t in chain.crossing(c)) == 1), n]
    segments, waiting = [], None
    for start, stop in itertools.pairwise(cuts[:-1]):
        if waiting is not None and chain.allowed(waiting, stop):
            start = waiting
        waiting = None
        if not chain.allowed(start, stop):
            segments += [s for s in pieces(chain, range(start, stop)) if chain.frees(*s) > 0]
        elif chain.frees(start, stop) > 0:
            segments.append((start, stop))
        else:
            waiting = start
    return segments


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
