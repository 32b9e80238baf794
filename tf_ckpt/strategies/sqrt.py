"""About sqrt(n) segments, after Chen et al. 2016 (https://arxiv.org/abs/1604.06174), balanced by bytes.

Let f(j) be the least bytes kept when the forward run has reached cut j. For a bound T on the peak

    f(j) = min over i of  f(i) + boundary(i, j)   such that   f(i) + boundary(i, j) + stored(i, j) + gradients(j) <= T

where `boundary` is what segment [i, j) leaves to later stages, `stored` what it needs while it runs backward, and
`gradients` the weight gradients of later stages. The least T for which the end is reached is found by bisection. On equal
stages this gives Chen's sqrt(n); on unequal ones no segment outweighs the rest, and cuts lie where few bytes cross.
"""

import numpy as np

_UNLIKE = 0.03  # two cuts are alike if their bytes differ by less
_ROUNDING_PRICE = 1.25  # bitwise equality may cost this factor of the peak, not more


def sqrt(chain):
    """Plans about sqrt(n) segments.

    Args:
        chain: A `Chain`.

    Returns:
        A sorted list of ranges `(start, stop)` to recompute. The stages before the loss stay plain: their backward pass
        comes at once, so that recompute would gain nothing.
    """
    exact = _least_peak(chain, chain.exact_cuts)
    if chain.exact_cuts.all():
        return exact
    free = _least_peak(chain, np.ones(len(chain) + 1, bool))
    return exact if chain.peak(exact) <= _ROUNDING_PRICE * chain.peak(free) else free


def _least_peak(chain, cuts):
    high = chain.peak([]) + 1.0
    best, low = [], 0.0
    for _ in range(24):
        middle = (low + high) / 2
        found = _within(chain, cuts, middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
        if high - low < 0.005 * high:
            break
    return _worthwhile(chain, best)


def _within(chain, cuts, bound):
    """Returns segments whose peak is at most `bound`, or None."""
    n = len(chain)
    kept = np.full(n + 1, np.inf)
    kept[0] = 0.0
    came = np.zeros(n + 1, int)
    recomputed = np.zeros(n + 1, bool)
    for j in range(1, n + 1):
        kept[j] = kept[j - 1] + chain.internal[j - 1] + chain.boundary(j)[j - 1]
        came[j] = j - 1
        if kept[j] + chain.gradients[j] > bound:
            kept[j] = np.inf
        if not cuts[j]:
            continue
        i = chain.starts(j)
        i = i[cuts[i]]
        if not len(i):
            continue
        leaves = chain.boundary(j)[i]
        fits = kept[i] + leaves + chain.stored(i, j) + chain.gradients[j] <= bound
        unlike = 1.0 if chain.expensive_end[j - 1] else 1.0 + _UNLIKE
        cost = np.where(fits, kept[i] + leaves * unlike, np.inf)
        least = int(cost.argmin())
        if cost[least] < kept[j]:
            kept[j], came[j], recomputed[j] = cost[least], i[least], True
    # In the plain tail, what its first stages keep is held beside the weight gradients of its later ones.
    stored = chain.stored(0, np.arange(n + 1))
    tails = kept - stored + np.maximum.accumulate((stored + chain.gradients)[::-1])[::-1]
    ends = np.flatnonzero((tails <= bound) & cuts)
    if not len(ends):
        return None
    segments, j = [], int(ends[0])  # the longest plain tail that fits re-runs least
    while j:
        if recomputed[j]:
            segments.append((int(came[j]), j))
        j = int(came[j])
    return segments[::-1]


def _worthwhile(chain, segments):
    """Leaves plain, first to last, each segment without which the peak is no higher."""
    peak = chain.peak(segments)
    for segment in list(segments):
        rest = [s for s in segments if s != segment]
        if chain.peak(rest) <= peak:
            segments = rest
    return segments
