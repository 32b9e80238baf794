"""About sqrt(n) segments, after Chen et al. 2016 (https://arxiv.org/abs/1604.06174), balanced by bytes.

Let f(j) be the least bytes kept when the forward run has reached cut j. For a bound T on the peak

    f(j) = min over i of  f(i) + boundary(i, j)   such that   f(i) + needs(i, j) <= T

where `boundary` is what segment [i, j) leaves to later stages, and `needs` the most that it holds at once: in its forward
run, its re-run, or its backward pass, gradients and transients included. A plain stage may take a segment's place. The
least T for which the end is reached is found by bisection. On equal stages this gives Chen's sqrt(n); on unequal ones no
segment outweighs the rest, and cuts lie where few bytes cross.
"""

import numpy as np

from tf_ckpt.strategies.full import ROUNDING_PRICE
from tf_ckpt.strategies.needs import Needs
from tf_ckpt.strategies.tree import tree_of
from tf_ckpt.strategies.trim import without_useless

_END_PRICE = 1.25  # of the peak: a single segment right before the loss must save more
_UNLIKE = 0.03  # two cuts are alike if their bytes differ by less


def sqrt(chain):
    """Plans about sqrt(n) segments.

    Args:
        chain: A `Chain`.

    Returns:
        A sorted list of ranges `(start, stop)` to recompute. The stages before the loss mostly stay plain: their
        backward pass comes at once, so that recompute gains little. A model is not one segment unless that saves a fifth.
    """
    needs = Needs(chain)
    exact = _plan(chain, chain.exact_cuts, needs)
    if not chain.exact_cuts.all():
        free = _plan(chain, np.ones(len(chain) + 1, bool), needs)
        if chain.peak(exact) > ROUNDING_PRICE * chain.peak(free):
            exact = free
    return [(r.start, r.stop) for r in without_useless(chain, tree_of(exact))]


def _plan(chain, cuts, needs):
    segments = _least_peak(chain, cuts, needs)
    if len(segments) == 1 and segments[0][1] == len(chain):  # all that is re-run would be needed at once
        before = cuts.copy()
        before[-1] = False
        shorter = _least_peak(chain, before, needs)
        if chain.peak(shorter) <= _END_PRICE * chain.peak(segments):
            return shorter
    return segments


def _least_peak(chain, cuts, needs):
    high = chain.peak([]) + 1.0
    best, low = [], 0.0
    for _ in range(24):
        middle = (low + high) / 2
        found = _within(chain, cuts, middle, needs)
        if found is None:
            low = middle
        else:
            best, high = found, middle
        if high - low < 0.005 * high:
            break
    return best


def _within(chain, cuts, bound, needs):
    """Returns segments whose peak is at most `bound`, or None."""
    n = len(chain)
    # Two ways to reach a cut: behind a segment, or behind a plain stage, which may not have kept what crosses the cut.
    kept, plain = np.full(n + 1, np.inf), np.full(n + 1, np.inf)
    kept[0] = 0.0
    came = np.zeros(n + 1, int)
    ready = kept.copy()  # the lesser of the two, with all there that a segment behind the cut takes
    for j in range(1, n + 1):
        before = min(kept[j - 1], plain[j - 1])
        if before + max(needs.forward[j - 1], needs.backward[j - 1]) <= bound:
            plain[j] = before + needs.keeps[j - 1]
        i = needs.starts(j)
        i = i[cuts[i]] if cuts[j] else i[:0]
        if len(i):
            leaves = chain.boundary(j)[i]
            fits = ready[i] + np.maximum(needs.again(j)[i], needs.sweep(j)[i]) <= bound
            unlike = 1.0 if chain.expensive_end[j - 1] else 1.0 + _UNLIKE
            cost = np.where(fits, ready[i] + leaves * unlike, np.inf)
            least = int(cost.argmin())
            kept[j], came[j] = cost[least], i[least]
        ready[j] = min(kept[j], plain[j] + needs.unkept[j])
    ends = np.flatnonzero((ready + needs.tail <= bound) & cuts)
    if not len(ends):
        return None
    segments, j = [], int(ends[0])  # the longest plain tail that fits re-runs least
    whole = kept[j] <= plain[j] + needs.unkept[j]
    while j:
        if whole:
            segments.append((int(came[j]), j))
            j = int(came[j])
            whole = kept[j] <= plain[j] + needs.unkept[j]
        else:
            j -= 1
            whole = kept[j] <= plain[j]
    return segments[::-1]
