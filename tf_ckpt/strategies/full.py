"""Every stretch between single-tensor cuts is a segment: all that can be recomputed is, once."""

import itertools

ROUNDING_PRICE = 1.25  # bitwise equality may cost this factor of the peak, not more


def full(chain):
    """Plans a segment between each two cuts that a single differentiable tensor crosses.

    A stretch that alone frees nothing (a convolution between its kept input and output) is joined to the next one. Cuts
    that change rounding are left out unless that costs much memory.

    Args:
        chain: A `Chain`.

    Returns:
        A sorted list of ranges `(start, stop)` to recompute. Stretches that keep nothing, and the one before the loss,
        stay plain.
    """
    cuts = [c for c in range(1, len(chain)) if sum(t.differentiable for t in chain.crossing(c)) == 1]
    free = _between(chain, cuts)
    exact = _between(chain, [c for c in cuts if chain.exact_cuts[c]])
    return exact if chain.peak(exact) <= ROUNDING_PRICE * chain.peak(free) else free


def _between(chain, cuts):
    segments, waiting = [], None
    for start, stop in itertools.pairwise([0, *cuts]):
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
