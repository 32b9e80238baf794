"""Several levels of segments: boundaries in O(log n), for depth beyond what one level can hold.

With m bytes, let R(l, s, m) be how far a run from cut s gets with l levels. It takes as its first segment all that l - 1
levels can run again in the same m bytes, and goes on behind it with what its boundary leaves:

    R(l, s, m) = R(l, j, m - boundary(s, j)),  j = a cheap cut at or before R(l - 1, s, m)

and R(0, s, m) is a plain stretch. On equal stages that is C(m + l, l), the binomial checkpointing of Griewank and Walther
2000 ("revolve"), which no persistent plan beats; with about as many levels as boundaries both grow like log n. The least m
that reaches the end is found by bisection.
"""

import numbers

import numpy as np

from tf_ckpt.strategies.needs import Needs
from tf_ckpt.strategies.tree import Range
from tf_ckpt.strategies.trim import without_useless

_PAYS = 0.9  # a further level re-runs everything once more, and must lower the peak to this share
_ROUNDING_PRICE = 1.25  # bitwise equality may cost this factor of the peak, not more


def recursive(chain, levels=None):
    """Plans segments within segments.

    Args:
        chain: A `Chain`.
        levels: The most levels, an integer of at least 1; 1 is much like `sqrt`. Defaults to as many as pay: each lowers
            the peak by a tenth at least.

    Returns:
        A tree of `Range`s.

    Raises:
        TypeError: If `levels` is not an integer.
        ValueError: If `levels` is less than 1.
    """
    if levels is not None and (not isinstance(levels, numbers.Integral) or isinstance(levels, bool)):
        raise TypeError(f"`levels` must be an integer of at least 1, or None. Received: levels={levels!r}")
    if levels is not None and levels < 1:
        raise ValueError(f"`levels` must be at least 1. Received: levels={levels!r}")
    needs = Needs(chain)
    exact = _plan(chain, chain.exact_cuts, needs, levels)
    if not chain.exact_cuts.all():
        free = _plan(chain, np.ones(len(chain) + 1, bool), needs, levels)
        if chain.peak(exact) > _ROUNDING_PRICE * chain.peak(free):
            exact = free
    return without_useless(chain, exact)


def within(chain, memory, exact=True):
    """Plans no more levels than it takes for a peak of at most `memory`.

    Args:
        chain: A `Chain`.
        memory: Bytes.
        exact: Whether to leave out cuts that change rounding.

    Returns:
        A tree of `Range`s, or None if none is found.
    """
    search = _Search(chain, chain.exact_cuts if exact else np.ones(len(chain) + 1, bool), Needs(chain))
    before = 0
    for level in range(1, len(chain)):
        end = search.reach(0, search.n, memory, level)[1]
        if end == search.n:
            tree = search.settled(0, search.n, memory, level)
            return tree if chain.peak(tree) <= memory else None
        if end <= before:  # one more level gets no further
            return None
        before = end
    return None


def _plan(chain, cuts, needs, levels):
    search, best, high, paid = _Search(chain, cuts, needs), (), chain.peak([]), 0
    missed = 0
    for level in range(1, len(chain) if levels is None else min(len(chain), levels + 1)):  # more than stages cannot help
        bound = _least_bound(search, level, high)
        missed = missed + 1 if bound is None else 0
        if missed == (1 if levels is None else 2):
            break
        if bound is None:
            continue
        if levels is None and bound > _PAYS ** (level - paid) * high:
            if level - paid == 2:  # neither this level nor the one before pays
                break
            continue
        tree = search.settled(0, len(chain), bound, level)
        if chain.peak(tree) < chain.peak(best):
            best = tree
        high, paid = bound, level
    return best


def _least_bound(search, level, high):
    """Returns the least bytes below `high` with which the end is reached, or None."""
    low, found = 0.0, None
    while high - low > 0.005 * high:
        middle = (low + high) / 2
        if search.reach(0, search.n, middle, level)[1] == search.n:
            found = high = middle
        else:
            low = middle
    return found


class _Search:
    """How far runs get, and which trees they take."""

    def __init__(self, chain, cuts, needs):
        self.chain, self.needs, self.n = chain, needs, len(chain)
        self.stored = chain.stored(0, np.arange(self.n + 1)).tolist()
        self.good = cuts.tolist()

    def reach(self, start, limit, room, level):
        """Returns the tree of a run from cut `start` with `room` bytes, and the cut that it gets to, at most `limit`."""
        if level == 0:
            return (), self.needs.stretch(start, limit, room)
        found, k = (), start
        tree, end = self.reach(k, limit, room, level - 1)
        best, furthest = tree, end
        while furthest < limit:
            j = self._cut(k, end)
            if j is None:  # no segment may start here: the stage stays plain
                if end == k:
                    break
                j, leaves = k + 1, self.needs.keeps[k]
            else:
                found, leaves = (*found, Range(k, j, _until(tree, j))), float(self.chain.boundary(j)[k])
            k, room = j, room - leaves
            tree, end = self.reach(k, limit, room, level - 1)
            if end == k:
                break
            if end > furthest:  # the last stretch need not be recomputed
                best, furthest = (*found, *tree), end
        return best, furthest

    def _cut(self, start, end):
        """Returns the cut in the second half before `end` that the fewest bytes cross, or None."""
        half, best, least = (self.stored[start] + self.stored[end]) / 2, None, np.inf
        for j in range(end, start, -1):
            if best is not None and self.stored[j] < half:
                break
            if self.good[j] and self.good[start] and self.chain.allowed(start, j):
                size = self.chain.boundary(j)[start] * (1.0 if self.chain.expensive_end[j - 1] else 1.03)
                if size < least:
                    best, least = j, size
        return best

    def settled(self, start, stop, room, level):
        """Returns the tree of `[start, stop)` with no more levels anywhere than `room` bytes ask for."""
        tree = ()
        for few in range(level + 1):
            tree, end = self.reach(start, stop, room, few)
            if end >= stop:
                break
        found, k = [], start
        for r in tree:
            room -= self.stored[r.start] - self.stored[k]
            found.append(Range(r.start, r.stop, self.settled(r.start, r.stop, room, few - 1)))
            room -= float(self.chain.boundary(r.stop)[r.start])
            k = r.stop
        return tuple(found)


def _until(tree, stop):
    """Returns the part of a tree before a cut; what lies around the cut stays plain."""
    found = []
    for r in tree:
        if r.stop < stop:
            found.append(r)
        elif r.start < stop:
            found += _until(r.inside, stop)
    return tuple(found)
