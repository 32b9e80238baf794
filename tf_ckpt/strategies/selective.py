"""Recompute chosen stages only: those that are named, or those that free most bytes for their FLOPs.

Selective recompute after Korthikanti et al. 2022 (https://arxiv.org/abs/2205.05198).
"""

import numpy as np

from tf_ckpt.strategies import trim
from tf_ckpt.strategies.full import ROUNDING_PRICE, pieces
from tf_ckpt.strategies.tree import Range
from tf_ckpt.strategies.units import choose_cuts

_UNITS = 4  # the longest stretch that is considered as one segment
TARGET = 0.5
OVERHEAD = 0.05


def selective(chain, chosen):
    """Plans the chosen stages, joined to segments where they are adjacent.

    Args:
        chain: A `Chain`.
        chosen: Boolean for each stage.

    Returns:
        A sorted list of ranges `(start, stop)` to recompute.
    """
    return pieces(chain, (k for k in range(len(chain)) if chosen[k]))


def by_cost(chain, target=None):
    """Plans what frees most bytes for each FLOP that is run again first, until the target is reached.

    What is considered: short stretches (normalisation, activation and the convolution behind it, whose own result its
    backward pass does not need), and the parts inside layers: the core of attention, an activation.

    Args:
        chain: A `Chain`.
        target: Share of the plain model's activation bytes to come down to. By default half of them, or as far as 5 % of
            the step's FLOPs go.

    Returns:
        A sorted tuple of `Range`s, none of which could stay plain for nothing. If the target is out of reach, those that
        lead to the least peak; cuts that change rounding are among them only where others do not reach it.
    """
    plain = chain.peak([])
    wanted = (TARGET if target is None else target) * plain
    most = OVERHEAD * chain.step_flops if target is None else float("inf")
    taken = _best_first(chain, wanted, most, exact=True)
    if chain.peak(taken) > wanted and target is not None and not chain.exact_cuts.all():
        free = _best_first(chain, wanted, most, exact=False)
        if chain.peak(taken) > ROUNDING_PRICE * max(chain.peak(free), wanted):
            taken = free
    reached = max(wanted, chain.peak(taken))
    return trim.within(chain, taken, reached) if reached < plain else ()


def _best_first(chain, wanted, most, exact):
    """Returns the candidates to take, best first, until `wanted` bytes are reached or `most` FLOPs are added."""
    order = _disjoint(chain, _candidates(chain, exact))
    low, high = 0, len(order)  # the least prefix that reaches the target
    while low < high:
        middle = (low + high) // 2
        if chain.peak(sorted(order[:middle])) <= wanted:
            high = middle
        else:
            low = middle + 1
    affordable = int(np.searchsorted(np.cumsum([chain.added_flops([r]) for r in order[:low]]), most, side="right"))
    if chain.peak(sorted(order[:affordable])) > wanted:  # more need not be better: segments keep what they take
        some = {round(i) for i in np.linspace(0, affordable, 24)}
        affordable = min(sorted(some), key=lambda i: chain.peak(sorted(order[:i])))
    return tuple(sorted(order[:affordable]))


def _candidates(chain, exact):
    """Returns pairs (bytes freed for each FLOP, `Range`), best first."""
    found = []
    for k in range(len(chain)):
        if chain.exact_parts[k]:
            found.append((float(chain.internal[k] - chain.part_internal[k]), Range(k, k + 1, (), True)))
    cuts = choose_cuts(chain, len(chain), exact)
    for i, start in enumerate(cuts[:-1]):
        for stop in cuts[i + 1 : i + 1 + _UNITS]:
            if chain.allowed(start, stop):
                found.append((chain.frees(start, stop), Range(start, stop)))
    floor = 0.001 * chain.peak([])  # a segment has costs of its own, that FLOPs do not show
    return sorted(((-freed / (chain.added_flops([r]) + 1.0), r) for freed, r in found if freed > floor), key=lambda x: x[0])


def _disjoint(chain, candidates):
    free, order = [True] * len(chain), []
    for _, r in candidates:
        if all(free[r.start : r.stop]):
            order.append(r)
            free[r.start : r.stop] = [False] * (r.stop - r.start)
    return order
