"""What stretches of a chain hold at their worst, for strategies that look at each stage by itself."""

import functools

import numpy as np


class Needs:
    """The most bytes that stages and stretches of stages hold at once, beside what earlier ones keep.

    Args:
        chain: A `Chain`.

    Attributes:
        keeps: Array over stages: bytes that each keeps if it runs plain.
        forward: Array over stages: the most of a plain forward run.
        backward: Array over stages: the most of a plain backward pass, gradients included.
        unkept: Array over cuts: bytes that the stage before makes for later ones and that no backward pass reads.
        tail: Array over cuts i: the most that [i, n) holds if it runs plain, with the loss.
    """

    def __init__(self, chain):
        n = len(chain)
        self.chain, self._starts, self._rows = chain, {}, {}
        stored = chain.stored(0, np.arange(n + 1))
        made = np.array([sum(t.size for t in chain.made(k)) for k in range(n)], float)
        own = np.array([sum(t.size for t in chain.made(k) if k in t.inner) for k in range(n)], float)
        self.keeps = np.diff(stored)
        self.unkept = np.array(
            [0.0, *(sum(t.size for t in chain.made(k) if not t.needed and t.last > k) for k in range(n))], float
        )
        self.forward = made + chain.internal + chain.taped_extra
        self.backward = chain.internal + own + chain.upstream[1:] + chain.backward_extra + chain.gradients[1:]
        # What no backward pass reads is there until its last reader has run forward.
        waiting = np.zeros(n + 1)
        for t in chain.tensors:
            if t.producer >= 0 and not t.needed:
                waiting[t.producer + 1] += t.size
                waiting[min(t.last, n - 1) + 1] -= t.size
        self._swept = made + chain.forward_extra
        self._taped = stored[:-1] + np.maximum(np.cumsum(waiting)[:-1], 0.0) + self.forward
        self._back = stored[:-1] + self.backward
        self._stored = stored
        loss = stored[n] + 2 * chain.upstream[n] + sum(t.size for t in chain.crossing(n) if not t.needed)
        worst = np.maximum.accumulate(np.maximum(self._taped, self._back)[::-1])[::-1]
        self.tail = np.maximum(np.append(worst, loss), loss) - stored

    def starts(self, stop):
        """As `Chain.starts`."""
        if stop not in self._starts:
            self._starts[stop] = self.chain.starts(stop)
        return self._starts[stop]

    @functools.cached_property
    def _sweeps(self):
        n, worst, rows = len(self.chain), np.zeros(0), []
        for k in range(n):
            now = self.chain.boundary(k) + self._swept[k]
            worst = np.maximum(np.append(worst, 0.0), now)
            rows.append(worst)
        return rows

    def sweep(self, stop):
        """The most bytes of a forward run of [i, stop) that keeps nothing, as an array over i = 0..stop-1."""
        return self._sweeps[stop - 1]

    def again(self, stop):
        """The most bytes of running [i, stop) again and backward, as an array over i = 0..stop-1."""
        if stop not in self._rows:
            beside = self.chain.upstream[stop] + self.chain.gradients[stop]
            worst = np.maximum(self._taped[:stop] + beside, self._back[:stop])
            self._rows[stop] = np.maximum.accumulate(worst[::-1])[::-1] - self._stored[:stop]
        return self._rows[stop]

    @functools.cached_property
    def _lists(self):
        beside = self.chain.upstream + self.chain.gradients
        return [x.tolist() for x in (self._taped, self._back, self._stored, beside, self.tail)]

    def stretch(self, start, limit, room):
        """Returns the last cut, at most `limit`, to which `[start, stop)` runs again and backward in `room` bytes."""
        taped, back, stored, beside, tail = self._lists
        n, end, room = len(self.chain), start, room + stored[start]
        if limit == n and tail[start] <= room - stored[start]:
            return n
        most = 0.0
        for k in range(start, min(limit, n - 1)):
            most = max(most, taped[k])
            if max(most, back[k]) > room:
                break
            if most + beside[k + 1] <= room:
                end = k + 1
        return end
