"""The least recompute whose peak fits a budget, over all trees of segments.

After the persistent dynamic program of Beaumont et al. 2019 (https://arxiv.org/abs/1911.13214, "rotor"), for stages
between which any number of tensors may cross. Let C(s, t, m) be the least FLOPs, beyond one forward and one backward
run, with which units [s, t) can be run backward, when what crosses cut s is held by others and m bytes are left. It is the
least of

    keep unit s, as it is or with its inner parts recomputed:   flops(s) + C(s+1, t, m - keeps(s))
    recompute [s, j), for each j:    reruns(s, j) + C(j, t, m - boundary(s, j)) + C(s, j, m)

each where m has room for the forward runs and backward passes themselves. `tf.recompute_grad` holds a segment's inputs until
its backward pass has run, and may be nested, so that these are exactly the trees that it can run. In a graph inputs may go
earlier, when the re-run has used them up: the table does not count on that, but its trees are tried in the simulated step,
which does, also those for up to 1.3 times the memory.

Each level of segments within segments traces what is inside once more. Where memory is all, the table goes on to dozens of
levels for a last percent of it: trees of more than 12 are left out.
"""

import bisect

import numpy as np

from tf_ckpt.strategies import recursive, simulate, trim
from tf_ckpt.strategies.full import full
from tf_ckpt.strategies.selective import by_cost
from tf_ckpt.strategies.sqrt import sqrt
from tf_ckpt.strategies.tree import Range, depth, tree_of, walk
from tf_ckpt.strategies.units import Units, choose_cuts

LIMIT = 120  # units
SLOTS = 480
DEEPEST = 12  # levels of segments; `Table` itself knows no bound
_NEAR = 8
_BEYOND = 1.3  # of the memory: the table is cautious, and trees that it thinks too large may fit when they are simulated


class Table:
    """C(s, t, m) for all s < t, with m in `slots` steps up to `most` bytes.

    Args:
        units: The `Units`.
        most: Bytes: the largest m.
        slots: How many steps.
        parts: Whether inner parts may be recomputed.
    """

    def __init__(self, units, most, slots=SLOTS, parts=True):
        self.units, self.slots, self.unit = units, slots, most / slots
        u, count = units, units.count
        self.options = (0, 1) if parts and (u.flops[1] > 0).any() else (0,)
        self.steps = np.arange(slots + 1)
        self.cost = np.full((count + 1, count + 1, slots + 2), np.inf)  # the first slot: not even 0 bytes are left
        sums = np.concatenate([np.zeros((1, count + 1)), np.cumsum(u.keeps[0], 0)])
        self.shift = np.stack([np.rint((sums[:-1] + k) / self.unit) - np.rint(sums[:-1] / self.unit) for k in u.keeps])
        self.shift = self.shift.astype(int)  # rounded so that errors do not add up over a stretch of plain units
        self.left = np.rint(u.boundary / self.unit).astype(int)
        self._fill()

    def _slots(self, size):
        return np.ceil(size / self.unit - 1e-9).astype(int)

    def _keep_need(self, o, s, t):
        u = self.units
        return self._slots(np.maximum(u.backward[o][s], u.forward[o][s] + u.beside[t]))

    def _again_need(self, s, j, t):
        return self._slots(self.units.sweep[s, j] + self.units.beside[t])

    def _at(self, s, t, shift):
        """C(s, t, m - shift) for all m, one row for each (s, t, shift)."""
        row = (s * self.cost.shape[1] + t) * self.cost.shape[2]
        return self.cost.reshape(-1).take(row[:, None] + np.maximum(self.steps[None, :] + 1 - shift[:, None], 0))

    def _fill(self):
        u, count, steps = self.units, self.units.count, self.steps[None, :]
        for length in range(1, count + 1):
            s = np.arange(count + 1 - length)
            t = s + length
            best = np.full((len(s), self.slots + 1), np.inf)
            for o in self.options:
                if length == 1:
                    rest = np.zeros(1)
                else:
                    rest = self._at(s + 1, t, self.shift[o, s, t])
                cost = np.where(steps >= self._keep_need(o, s, t)[:, None], u.flops[o][s][:, None] + rest, np.inf)
                np.minimum(best, cost, out=best)
            for d in range(1, length):
                j = s + d
                rows = np.flatnonzero(u.allowed[s, j])
                if not len(rows):
                    continue
                a, b, c = s[rows], j[rows], t[rows]
                cost = self._at(b, c, self.left[a, b, c]) + self.cost[a, b, 1:] + u.reruns[a, b][:, None]
                cost[steps < self._again_need(a, b, c)[:, None]] = np.inf
                best[rows] = np.minimum(best[rows], cost)
            self.cost[s, t, 1:] = best

    def curve(self):
        """Returns the FLOPs that are added for each m, as an array over slots."""
        return self.cost[0, self.units.count, 1:]

    def tree(self, m):
        """Returns the tree of `Range`s whose cost is `curve()[m]`."""
        return tree_of(self._tree(0, self.units.count, m))

    def _tree(self, s, t, m):
        u, found = self.units, []
        while s < t:
            want = self.cost[s, t, m + 1]
            choice = next((x for x in self._choices(s, t, m) if x[0] <= want * (1 + 1e-12) + 1e-12), None)
            kind, number = choice[1], choice[2]
            if kind == "keep":
                if number:
                    stages = range(u.cuts[s], u.cuts[s + 1])
                    found += [Range(k, k + 1, (), True) for k in stages if u.chain.exact_parts[k]]
                m -= self.shift[number, s, t] if s + 1 < t else 0
                s += 1
            else:
                found.append(Range(u.cuts[s], u.cuts[number], tuple(self._tree(s, number, m))))
                m -= self.left[s, number, t]
                s = number
        return found

    def _choices(self, s, t, m):
        u = self.units
        for o in self.options:
            if m >= self._keep_need(o, s, t):
                left = m + 1 - self.shift[o, s, t]
                rest = 0.0 if s + 1 == t else self.cost[s + 1, t, left] if left > 0 else np.inf
                yield u.flops[o][s] + rest, "keep", o
        for j in range(t - 1, s, -1):
            if u.allowed[s, j] and m >= self._again_need(s, j, t):
                left = m + 1 - self.left[s, j, t]
                rest = self.cost[j, t, left] if left > 0 else np.inf
                yield u.reruns[s, j] + rest + self.cost[s, j, m + 1], "again", j


def frontier(chain, most=None, *, parts=True, limit=LIMIT, slots=SLOTS, exact=True):
    """Returns the `Table` of a chain for budgets up to `most` bytes, by default those of the plain model."""
    units = Units(chain, choose_cuts(chain, limit, exact))
    return Table(units, most or 1.02 * chain.peak([]), slots, parts)


def budget(chain, memory, *, parts=True, limit=LIMIT, slots=SLOTS):
    """Plans the least recompute whose simulated peak is at most `memory`.

    Args:
        chain: A `Chain`.
        memory: Bytes of activations, their gradients and weight gradients.
        parts: Whether parts inside layers may be recomputed.
        limit: The most units to plan with; stages are merged where there are more.
        slots: Steps in which bytes are counted.

    Returns:
        A tree of `Range`s, or None if nothing fits.
    """
    if chain.peak([]) <= memory:
        return ()
    others = _others(chain, max(memory / chain.peak([]), 0.0), parts)
    for exact in (True, False):
        if not exact and chain.exact_cuts.all():
            break
        # What other strategies find counts too: units are merged, and the table's account is cautious.
        table = frontier(chain, _BEYOND * memory, parts=parts, limit=limit, slots=slots, exact=exact)
        found = [_within(chain, table, memory), recursive.within(chain, memory, exact)]
        found = [tree for tree in found if tree is not None and depth(tree) <= DEEPEST]
        found += [tree for tree in others if (_is_exact(chain, tree) or not exact) and chain.peak(tree) <= memory]
        if found:
            return trim.within(chain, min(found, key=chain.added_flops), memory)
    tree = least(chain, parts=parts, limit=limit, slots=slots)
    return tree if chain.peak(tree) <= memory else None


def _others(chain, target, parts):
    """Returns the trees of the other strategies; `target` is for the selective one."""
    trees = [tree_of(tree) for tree in (sqrt(chain), recursive.recursive(chain), full(chain), by_cost(chain, target))]
    return [tree for tree in trees if depth(tree) <= DEEPEST and (parts or not any(r.part for r in walk(tree)))]


def _is_exact(chain, tree):
    """Whether no boundary of a tree changes rounding."""
    return all(r.part or (chain.exact_cuts[r.start] and chain.exact_cuts[r.stop]) for r in walk(tree))


def _within(chain, table, memory):
    """Returns the cheapest tree of a table that fits when it is simulated: the table rounds, and is cautious."""
    curve = table.curve()
    # The slots at which a tree gets cheaper, dearest last.
    slots = [m for m in range(len(curve) - 1, -1, -1) if np.isfinite(curve[m]) and (m == 0 or curve[m] < curve[m - 1])]
    trees = {}

    def fits(i):
        return not is_too_deep(i) and simulate.peak(chain, trees[i]) <= memory

    def is_too_deep(i):
        trees[i] = table.tree(slots[i]) if i not in trees else trees[i]
        return depth(trees[i]) > DEEPEST

    while slots and is_too_deep(len(slots) - 1):  # dearer trees are deeper, nearly always
        del slots[bisect.bisect_left(range(len(slots)), True, key=is_too_deep) :]
    # Trees that are dearer nearly always peak lower: where there are many, the first that fits is sought by halves, and
    # then among the `_NEAR` cheaper ones next to it.
    low, high = 0, len(slots)
    while high - low > 2 * _NEAR:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    found = next((i for i in range(max(low - _NEAR, 0), len(slots)) if fits(i)), None)
    return None if found is None else trees[found]


def least(chain, *, parts=True, limit=LIMIT, slots=SLOTS):
    """Returns the tree with the least peak that is found, for the error when a budget is too small."""
    found = [(), *_others(chain, 0.0, parts)]
    for exact in (True, False):
        if not exact and chain.exact_cuts.all():
            break
        # Slots count from nothing to what fits already: the fewer bytes that is, the finer they are.
        most = _BEYOND * min(chain.peak(tree) for tree in found)
        table = frontier(chain, most, parts=parts, limit=limit, slots=slots, exact=exact)
        some = np.flatnonzero(np.isfinite(table.curve()))  # the first rounds up most, and need not be the least
        trees = [table.tree(int(m)) for m in sorted({*some[:5], *some[:: max(len(some) // 20, 1)]})]
        found += [tree for tree in trees if depth(tree) <= DEEPEST]
    return min(found, key=chain.peak)


def curve_of(chain, points=24):
    """Returns the trade-off between memory and recompute as a list of (peak bytes, added FLOPs, tree), least memory first.

    Args:
        chain: A `Chain`.
        points: About how many.
    """
    table = frontier(chain, slots=240)
    curve = table.curve()
    slots = [m for m in range(len(curve)) if np.isfinite(curve[m]) and (m == 0 or curve[m] < curve[m - 1])]
    chosen = sorted({slots[round(i)] for i in np.linspace(0, len(slots) - 1, points)}) if slots else []
    found = []
    for tree in (table.tree(m) for m in chosen):
        found.append((chain.peak(tree), chain.added_flops(tree), tree))
    found.append((chain.peak(()), 0.0, ()))
    found.sort(key=lambda x: x[:2])
    best, kept = np.inf, []
    for size, flops, tree in found:  # what costs more and saves less is no choice
        if flops < best:
            best = flops
            kept.append((size, flops, tree))
    return kept
