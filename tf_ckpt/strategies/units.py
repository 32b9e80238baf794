"""A chain's stages merged to units, and what the budget's dynamic program asks of them, as arrays."""

import numpy as np


def choose_cuts(chain, limit, exact=True):
    """Returns the sorted cuts between units, 0 and n among them.

    Cuts that would change rounding are left out, and those between a stage and the next that takes what the plain model
    would not keep: a segment would have to. What waits for a later stage (the end of one of two towers) is no reason
    against the cuts that it crosses meanwhile: they all keep it alike. If more than `limit` units are left, small ones are
    merged first: a plan can then not cut or keep within one.

    Args:
        chain: A `Chain`.
        limit: The most units.
        exact: Whether to leave out cuts that change rounding.
    """
    n = len(chain)
    fits = chain.exact_cuts if exact else np.ones(n + 1, bool)
    good = [c for c in range(1, n) if fits[c] and not any(_only_here(t, c) for t in chain.crossing(c))]
    if len(good) < min(n - 1, 3):
        good = [c for c in range(1, n) if fits[c]]
    cuts = sorted({0, *good, n})  # a model may have no stage at all
    ends = {x for pair in chain.ranges for x in pair}
    bytes_at = np.array([sum(t.size for t in chain.crossing(c)) for c in range(n + 1)], float)
    while len(cuts) - 1 > limit:
        merged = [chain.stored(cuts[i - 1], cuts[i + 1]) for i in range(1, len(cuts) - 1)]
        # Of small units, those go first whose cut is dear, and last those where a nested model begins or ends.
        price = [
            size * (0.5 + 0.5 * bytes_at[cuts[i]] ** -1 * bytes_at[1:].min()) * (4.0 if cuts[i] in ends else 1.0)
            if bytes_at[cuts[i]]
            else np.inf
            for i, size in enumerate(merged, 1)
        ]
        order = np.argsort(price, kind="stable")
        gone, blocked = set(), set()
        for i in order[: max(1, (len(cuts) - 1 - limit) // 2)]:
            if i not in blocked:
                gone.add(int(i) + 1)
                blocked |= {i - 1, i, i + 1}
        cuts = [c for i, c in enumerate(cuts) if i not in gone]
    return cuts


def _only_here(tensor, cut):
    """Whether a cut makes a segment keep what nobody else would: from the stage before it for the one behind it."""
    between = tensor.producer == cut - 1 and any(stage == cut for stage, _ in tensor.uses)
    return between and tensor.differentiable and not tensor.needed


class Units:
    """Arrays over units. `u` counts units, `s`, `j` and `t` count cuts between them, `o` is 1 if inner parts are recomputed.

    Attributes:
        cuts: The cuts, as stage numbers.
        keeps: Array (o, u, t): bytes that a plain unit keeps for a run that ends at t.
        forward: Array (o, u): the most bytes of a plain unit's forward run.
        backward: Array (o, u): the most bytes of its backward pass, gradients included.
        flops: Array (o, u): FLOPs that inner parts add.
        boundary: Array (s, j, t): bytes that a segment [s, j) keeps for [j, t).
        sweep: Array (s, j): the most bytes of a forward run of [s, j) that keeps nothing.
        reruns: Array (s, j): FLOPs of a re-run of [s, j).
        beside: Array (t): bytes of the gradients that are there while [.., t) is run again.
        allowed: Boolean array (s, j).
    """

    def __init__(self, chain, cuts):
        self.chain, self.cuts = chain, cuts
        count = len(cuts) - 1
        self.count = count
        place = np.searchsorted(cuts, np.arange(len(chain) + 1), side="right") - 1  # stage -> unit
        place[-1] = count
        self._of_unit(place)
        self._boundary(place)
        self._sweep()
        self.reruns = np.zeros((count + 1, count + 1))
        self.allowed = np.zeros((count + 1, count + 1), bool)
        for j in range(1, count + 1):
            self.reruns[: j + 1, j] = chain.reruns(cuts[j])[np.array(cuts[: j + 1])]
            self.allowed[:j, j] = np.isin(cuts[:j], chain.starts(cuts[j]))
        at = np.array(cuts)
        self.beside = chain.upstream[at] + chain.gradients[at]
        self.beside[-1] = 0.0  # the model's own forward run: no gradient yet

    def _of_unit(self, place):
        chain, count = self.chain, self.count
        self.keeps = np.zeros((2, count, count + 1))
        self.forward, self.backward, self.flops = np.zeros((2, count)), np.zeros((2, count)), np.zeros((2, count))
        parts = chain.exact_parts
        for o in range(2):
            internal = np.where(parts, chain.part_internal, chain.internal) if o else chain.internal
            taped = np.where(parts, chain.part_taped_extra, chain.taped_extra) if o else chain.taped_extra
            back = np.where(parts, chain.part_backward_extra, chain.backward_extra) if o else chain.backward_extra
            for u in range(count):
                start, stop = self.cuts[u], self.cuts[u + 1]
                held, live = 0.0, []
                for k in range(start, stop):
                    made = chain.made(k)
                    alive = sum(t.size for t in live if t.last >= k)
                    self.forward[o, u] = max(
                        self.forward[o, u], held + alive + sum(t.size for t in made) + internal[k] + taped[k]
                    )
                    own = sum(t.size for t in made if k in t.inner)
                    now = held + internal[k] + own + chain.upstream[k + 1] + back[k] + chain.gradients[k + 1]
                    self.backward[o, u] = max(self.backward[o, u], now)
                    held += internal[k] + sum(t.size for t in made if t.needed)
                    live += [t for t in made if not t.needed]
                    self.keeps[o, u, :] += internal[k]
                    for t in made:
                        if t.needed:  # a segment that takes it looks for it too
                            first = min(*t.inner, *(s for s, _ in t.uses), len(chain))
                            self.keeps[o, u, place[first] + 1 if first < len(chain) else count :] += t.size
                        elif len(chain) in t.inner:
                            self.keeps[o, u, count] += t.size  # until the loss
                self.flops[o, u] = (chain.part_flops * parts)[start:stop].sum() if o else 0.0
        # The loss comes while all is held that the last unit keeps, and has a gradient as large as what it reads.
        last = self.keeps[:, -1, -1] + 2 * chain.upstream[-1]
        self.backward[:, -1] = np.maximum(self.backward[:, -1], last)

    def _boundary(self, place):
        count = self.count
        self.boundary = np.zeros((count + 1, count + 1, count + 1))
        for t in self.chain.tensors:
            if t.producer < 0:
                continue
            unit, readers = place[t.producer], sorted({int(place[s]) for s, _ in t.uses})
            for first, following in zip([unit, *readers], readers, strict=False):
                if following > first:  # cuts first+1..following: the next reader is unit `following`
                    stop = following + 1 if following < count else count
                    self.boundary[: unit + 1, first + 1 : following + 1, stop:] += t.size

    def _sweep(self):
        chain, count = self.chain, self.count
        starts = np.array(self.cuts)
        worst, self.sweep = np.zeros(count + 1), np.zeros((count + 1, count + 1))
        for j in range(1, count + 1):
            for k in range(self.cuts[j - 1], self.cuts[j]):
                now = chain.boundary(k)[starts[:j]] + sum(t.size for t in chain.made(k)) + chain.forward_extra[k]
                worst[:j] = np.maximum(worst[:j], now)
            self.sweep[:, j] = worst
