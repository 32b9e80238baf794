"""The cheapest schedule as a mixed-integer program, after Checkmate (Jain et al. 2020, arXiv 1910.02653).

The backward passes of units b = N-1 ... 0 are stages of the schedule. Before each, any units may be run again from what was
held or has just been made, and anything may be held for later. With `o` for what a unit makes for others and `a` for what
it keeps inside:

    F[b,i], I[b,i]   unit i runs before the backward pass of b, in full or only for what it keeps inside
    S[b,i], A[b,i]   o_i and a_i are held since before
    H[b,i,j]         o_j is there while i runs, for something later

With `"stretches"`, units run again as `tf.recompute_grad` does it: before the backward pass of a unit whose inside is not
there, a stretch [s, b] runs, from what crosses its start. What is held meanwhile is free, also where segments would not nest:
a tensor inside of a stretch may be held, a stretch may begin within one that ran before and end outside of it, and what a
stretch takes may go before its backward pass has come. With `"nested"` none of that is allowed, as `tf.recompute_grad` has
it: that is the problem that `budget` solves.

Bytes are those of `tf_ckpt.strategies.units`, so that each tree that the dynamic program knows is a solution.
"""

from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from tf_ckpt.strategies.units import Units


class Solved(NamedTuple):
    """What the solver found.

    Attributes:
        flops: FLOPs that the best schedule found adds; inf for none.
        bound: FLOPs that no schedule is below.
        proven: Whether no better schedule exists, to within the solver's gap.
        infeasible: Whether no schedule exists.
    """

    flops: float
    bound: float
    proven: bool
    infeasible: bool


class _Program:
    def __init__(self):
        self.cost, self.binary, self.low = [], [], []
        self.rows, self.columns, self.values, self.high = [], [], [], []

    def variable(self, cost=0.0, binary=True, low=0.0):
        self.cost.append(cost)
        self.binary.append(binary)
        self.low.append(low)
        return len(self.cost) - 1

    def at_most(self, terms, bound):
        """Adds `sum of factor * variable <= bound`."""
        row = len(self.high)
        for factor, variable in terms:
            self.rows.append(row)
            self.columns.append(variable)
            self.values.append(factor)
        self.high.append(bound)

    def solve(self, seconds, gap):
        shape = (len(self.high), len(self.cost))
        matrix = coo_array((self.values, (self.rows, self.columns)), shape=shape).tocsr()
        return milp(
            np.array(self.cost),
            integrality=np.array(self.binary, int),
            bounds=Bounds(np.array(self.low), np.ones(shape[1])),
            constraints=LinearConstraint(matrix, -np.inf, np.array(self.high)),
            options={"time_limit": seconds, "mip_rel_gap": gap},
        )


class _Sizes:
    """What the program asks of units, in bytes and FLOPs."""

    def __init__(self, chain, cuts):
        units, n = Units(chain, cuts), len(cuts) - 1
        place = np.searchsorted(cuts, np.arange(len(chain) + 1), side="right") - 1
        place[-1] = n
        self.n, self.out, self.inside = n, np.zeros(n), np.zeros(n)
        self.takes = [set() for _ in range(n + 1)]  # units whose outputs a unit takes, the loss last
        self.reads = [set() for _ in range(n + 1)]  # those that its backward pass reads
        for t in chain.tensors:
            if t.producer < 0:
                continue
            unit = place[t.producer]
            later = {int(place[s]) for s, _ in t.uses} - {unit}
            if later:
                self.out[unit] += t.size
            elif t.needed:
                self.inside[unit] += t.size
            for reader in later:
                self.takes[reader].add(int(unit))
            for reader in {int(place[s]) for s in t.inner} & later:
                self.reads[reader].add(int(unit))
        self.inside += np.add.reduceat(chain.internal, cuts[:-1])
        self.untaped = np.array([units.sweep[u, u + 1] for u in range(n)])
        self.taped = np.maximum(units.forward[0] - self.untaped, 0.0)
        self.backward = units.backward[0]
        self.beside = chain.upstream[np.array(cuts)] + chain.gradients[np.array(cuts)]
        self.loss = 2 * chain.upstream[-1] + sum(t.size for t in chain.crossing(len(chain)) if place[t.producer] == n - 1)
        self.full = np.add.reduceat(chain.flops, cuts[:-1])
        self.inner = np.array([chain.rerun_flops(cuts[u], cuts[u + 1]) for u in range(n)])
        self.reruns = units.reruns
        self.own = [False] * n  # whether a unit's backward pass reads what the unit makes for others
        for t in chain.tensors:
            if t.producer >= 0 and t.last >= cuts[place[t.producer] + 1]:
                self.own[place[t.producer]] |= any(place[s] == place[t.producer] for s in t.inner)


def cheapest(chain, cuts, memory, kind, seconds=60.0, gap=0.002):
    """Returns the `Solved` of the cheapest schedule in `memory` bytes.

    Args:
        chain: A `Chain`.
        cuts: Cuts between units, 0 and n among them.
        memory: Bytes of activations, their gradients and weight gradients.
        kind: `"nested"`, `"stretches"` or `"any"`: how units may run again.
        seconds: The most that the solver may take.
        gap: The relative gap at which it may stop.
    """
    z, program, contiguous = _Sizes(chain, cuts), _Program(), kind != "any"
    n, scale = z.n, memory  # sizes as shares of the memory: the solver's tolerances are absolute
    out, inside = z.out / scale, z.inside / scale
    held = {(b, i): program.variable() for b in range(n) for i in range(b + 1)}  # S
    kept = {(b, i): program.variable() for b in range(n) for i in range(b + 1)}  # A
    price = max(z.full.sum(), 1.0)
    if contiguous:
        (run, starts), part = _stretches(program, z, held, price), {}
        if kind == "nested":
            _nest(program, z, starts, held, kept)
    else:
        run = {(b, i): program.variable(z.full[i] / price) for b in range(n) for i in range(b + 1)}  # F
        part = {(b, i): program.variable(z.inner[i] / price) for b in range(n) for i in range(b + 1)}  # I
    for b in range(n):
        for i in range(b + 1):
            runs = [again[b, i] for again in (run, part) if again]
            for j in () if contiguous else z.takes[i]:
                for again in runs:
                    program.at_most([(1, again), (-1, run[b, j]), (-1, held[b, j])], 0)
            if i < b:
                program.at_most([(1, held[b - 1, i]), (-1, held[b, i]), (-1, run[b, i])], 0)
                program.at_most([(1, kept[b - 1, i]), (-1, kept[b, i]), *((-1, again) for again in runs)], 0)
        made = [(-1, again[b, b]) for again in (run, part) if again]
        if z.inside[b] or contiguous:
            program.at_most([(-1, kept[b, b]), *made], -1)
        if z.own[b]:
            program.at_most([(-1, held[b, b]), *made], -1)
        for j in z.reads[b]:
            program.at_most([(-1, held[b, j]), (-1, run[b, j])], -1)
        _memory_of_reruns(program, z, b, scale, held, kept, run, part)
        room = memory - z.backward[b] - sum(z.out[j] for j in z.reads[b])
        others = [(out[j], held[b - 1, j]) for j in range(b) if j not in z.reads[b]]
        program.at_most([*others, *((inside[j], kept[b - 1, j]) for j in range(b))], room / scale)
    last = n - 1
    for i in range(n):  # the model's own forward run
        needed = [j for j in range(i) if any(j in z.takes[k] for k in range(i, n + 1))]
        terms = [(out[j], held[last, j]) for j in range(i) if j not in needed]
        terms += [(inside[j], kept[last, j]) for j in range(i)] + [(z.taped[i] / scale, kept[last, i])]
        program.at_most(terms, (memory - z.untaped[i] - sum(z.out[j] for j in needed)) / scale)
    looks = [j for j in range(last) if j in z.takes[n]]
    terms = [(out[j], held[last, j]) for j in range(last) if j not in looks] + [(inside[j], kept[last, j]) for j in range(n)]
    program.at_most(terms, (memory - z.loss - sum(z.out[j] for j in looks)) / scale)
    found = program.solve(seconds, gap)
    bound = found.mip_dual_bound if found.mip_dual_bound is not None else 0.0
    flops = found.fun * price if found.x is not None else np.inf
    return Solved(flops, max(bound, 0.0) * price, found.status == 0, found.status == 2)


def _stretches(program, z, held, price):
    """Adds the stretches [s, b] that may run again, and returns variables for the units in them, and for their starts."""
    run, found = {}, {}
    for b in range(z.n):
        starts = {s: program.variable(z.reruns[s, b + 1] / price) for s in range(b + 1)}
        for s, start in starts.items():
            found[b, s] = start
            for j in set().union(*z.takes[s : b + 1]):
                if j < s:
                    program.at_most([(1, start), (-1, held[b, j])], 0)
        for i in range(b + 1):
            run[b, i] = program.variable(binary=False)
            terms = [(1, starts[s]) for s in range(i + 1)]
            program.at_most([*terms, (-1, run[b, i])], 0)
            program.at_most([*((-1, x) for _, x in terms), (1, run[b, i])], 0)
    return run, found


def _nest(program, z, starts, held, kept):
    """Demands of stretches that each lies within another or apart, holds what it takes, and finds nothing of its inside."""
    for (b, s), start in starts.items():
        for j in set().union(*z.takes[s : b + 1]):
            if j < s:
                for c in range(s - 1, b):
                    program.at_most([(1, start), (-1, held[c, j])], 0)
        for c in range(s, b):  # stretches that run later and end inside
            for r in range(s):
                program.at_most([(1, start), (1, starts[c, r])], 1)
        for i in range(s, b + 1):
            program.at_most([(1, start), (1, kept[b, i])], 1)
            if not any(i in z.takes[k] for k in range(b + 1, z.n + 1)):  # else it crosses the end, and is held
                program.at_most([(1, start), (1, held[b, i])], 1)


def _memory_of_reruns(program, z, b, scale, held, kept, run, part):
    """Adds what is there while each unit runs again before the backward pass of `b`."""
    for i in range(b + 1):
        terms = []
        for j in range(i):
            there = program.variable(binary=False, low=1.0 if j in z.reads[b] else 0.0)  # H
            program.at_most([(1, held[b - 1, j]), (-1, there)], 0)
            for k in range(i, b + 1):
                if j in z.takes[k]:
                    for again in (run, part):
                        if again:
                            program.at_most([(1, again[b, k]), (-1, there)], 0)
            terms += [(z.out[j] / scale, there), (z.inside[j] / scale, kept[b - 1, j])]
        for j in range(i, b + 1):
            terms += [(z.out[j] / scale, held[b, j]), (z.inside[j] / scale, kept[b, j])]
        runs = [again[b, i] for again in (run, part) if again]
        terms += [(z.untaped[i] / scale, again) for again in runs]
        if i == b:
            terms += [(z.taped[i] / scale, again) for again in runs]
        else:
            taped = program.variable(binary=False)
            for again in runs:
                program.at_most([(1, again), (1, kept[b - 1, i]), (-1, kept[b, i]), (-1, taped)], 1)
            terms.append((z.taped[i] / scale, taped))
        program.at_most(terms, 1 - z.beside[b + 1] / scale)
