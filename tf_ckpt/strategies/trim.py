"""Leaves out the segments of a tree without which the peak is no higher, or not above a bound."""

import itertools

from tf_ckpt.strategies import simulate
from tf_ckpt.strategies.full import pieces
from tf_ckpt.strategies.tree import Range


def within(chain, tree, memory):
    """Returns a tree without the outermost segments that a peak of `memory` bytes does not need, the dearest tried first."""
    order = sorted(range(len(tree)), key=lambda i: -chain.added_flops(tree[i : i + 1]))
    kept = dict(enumerate(tree))
    for i in order:
        rest = tuple(r for k, r in kept.items() if k != i)
        if chain.peak(rest) <= memory:
            del kept[i]
    return tuple(kept.values())


def without_useless(chain, tree):
    """Returns a tree whose every segment lowers the peak; what was inside of one that is left out takes its place.

    Args:
        chain: A `Chain`.
        tree: A tree of `Range`s.

    Returns:
        A tree of `Range`s.
    """
    return _trimmed(chain, 0, len(chain), tree, 0.0, simulate.peak(chain, tree))


def _trimmed(chain, start, stop, tree, outer, peak):
    """Trims one run, beside `outer` bytes, and then the runs inside it."""
    changed = True
    while changed:  # without one, another may have become useless
        changed = False
        for r in sorted(tree, key=lambda r: chain.flops[r.start : r.stop].sum(), reverse=True):  # the dearest first
            rest = tuple(x for s in tree for x in (s.inside if s == r else (s,)))
            if outer + simulate.most(chain, start, stop, rest) <= peak:
                tree, changed = rest, True
    if not any(r.inside for r in tree):
        return tree
    moments, at, found = simulate.run(chain, start, stop, tree), 0, []
    moments = moments[stop - start :]  # behind the forward run
    k = stop
    for r in reversed(tree):
        if r.part:
            found.append(r)
            continue
        at += k - r.stop + (start == 0 and k == stop == len(chain))  # plain stages, and the loss
        own = simulate.run(chain, r.start, r.stop, r.inside)
        beside = outer + moments[at].bytes - own[0].bytes
        found.append(Range(r.start, r.stop, _trimmed(chain, r.start, r.stop, r.inside, beside, peak)))
        at, k = at + len(own), r.start
    return tuple(found[::-1])


_IDLE_PRICE = 1.25  # of the peak, so as not to run again what no gradient reaches


def without_idle(chain, tree, most=None):
    """Returns a tree whose segments do not begin with stages that no gradient reaches: frozen ones, before trainable ones.

    They keep nothing, so that a segment of nothing else frees nothing, and one that begins with some runs them again just to
    take less along.

    Args:
        chain: A `Chain`.
        tree: A tree of `Range`s.
        most: Bytes that the peak must not exceed. Defaults to a quarter more than the tree's.

    Returns:
        A tree of `Range`s.
    """
    if chain.idle is None or not chain.idle.any():
        return tree
    tree = tuple(r for r in tree if not chain.all_idle(r.start, r.stop))
    most = _IDLE_PRICE * chain.peak(tree) if most is None else most
    for r in tree:
        shorter = _busy(chain, r)
        rest = tuple(sorted((*(x for x in tree if x is not r), *shorter), key=lambda x: (x.start, x.stop)))
        if shorter != (r,) and chain.peak(rest) <= most:
            tree = rest
    return tree


def _busy(chain, r):
    """Returns what is left of a `Range` without idle stages at its begin: a tuple of none, one, or more where that is split."""
    first = next(itertools.chain((k for k in range(r.start, r.stop) if not chain.all_idle(k, k + 1)), [r.stop]))
    if first == r.start or r.part:
        return (r,) if first == r.start else ()
    if first == r.stop:
        return ()
    inside = tuple(x for inner in r.inside for x in _busy(chain, inner))
    if chain.allowed(first, r.stop):
        return inside if [(x.start, x.stop) for x in inside] == [(first, r.stop)] else (Range(first, r.stop, inside),)
    return (r,) if r.inside else tuple(Range(*x) for x in pieces(chain, range(first, r.stop)))
