"""Goes through a training step on paper, stage by stage, and says what is held at each moment."""

from typing import NamedTuple

from tf_ckpt.strategies.tree import tree_of


class Moment(NamedTuple):
    """One stage's forward run, backward pass or update.

    Attributes:
        phase: `"forward"`, `"re-run"`, `"backward"` or `"end"`.
        stage: Number of the stage; `len(chain)` for the loss, -1 for the end.
        bytes: The most that is held meanwhile: activations, their gradients and weight gradients.
    """

    phase: str
    stage: int
    bytes: float


def timeline(chain, ranges):
    """Returns the moments of a step.

    Args:
        chain: A `Chain`.
        ranges: What is recomputed: a tree of `Range`s, or a list of pairs (start, stop).

    Returns:
        A list of `Moment`s in the order in which they come.
    """
    return [*run(chain, 0, len(chain), tree_of(ranges)), Moment("end", -1, float(chain.gradients[0]))]


def run(chain, start, stop, tree):
    """Returns the moments of one run: the model's own, or the re-run of `[start, stop)`, beside nothing else.

    Args:
        chain: A `Chain`.
        start: First stage.
        stop: The stage after the last; `[0, len(chain))` is the model's own run.
        tree: The `Range`s that the run recomputes.
    """
    moments, whole = [], (start, stop) == (0, len(chain))
    level = _Level(chain, start, stop, tree, moments, loss=whole)
    if whole:
        level.forward(0.0, "forward")
        # The loss keeps about as much as it takes, and its gradient is as large.
        moments.append(Moment("backward", stop, level.held() + 2 * chain.upstream[stop]))
    else:
        level.forward(chain.upstream[stop] + chain.gradients[stop], "re-run")
    level.backward(0.0)
    return moments


def peak(chain, ranges):
    """Returns the most bytes of activations, their gradients and weight gradients that a step holds at once."""
    return max(moment.bytes for moment in timeline(chain, ranges))


class _Level:
    """The stages `[start, stop)` in one taped run: the model's forward run, or the re-run of one segment."""

    def __init__(self, chain, start, stop, ranges, moments, loss=False):
        self.chain, self.start, self.stop, self.moments, self.loss = chain, start, stop, moments, loss
        self.home = {k: r for r in ranges if not r.part for k in range(r.start, r.stop)}
        self.parts = {r.start for r in ranges if r.part}
        self.internal, self.kept = {}, {}

    def _first_read(self, tensor):
        """Returns the first stage at which the backward pass looks for a tensor of this run in memory, or None."""
        first, homes, start, stop = None, self.home, self.start, self.stop
        for s in tensor.inner:  # plain stages, and the loss: a re-run makes nothing for that
            if (start <= s < stop and s not in homes) or (self.loss and s == stop):
                first = s if first is None or s < first else first
        home = homes.get(tensor.producer)
        for s, _ in tensor.uses:  # the re-run of another segment
            other = homes.get(s)
            if other is not None and other is not home:
                first = s if first is None or s < first else first
        return first

    def forward(self, outer, phase):
        """Runs forward beside `outer` bytes. What is kept stays in `internal` and `kept`."""
        chain, live, total = self.chain, {}, outer
        for k in range(self.start, self.stop):
            again, part = k in self.home, k in self.parts
            tensors = chain.made(k)
            made = sum([t.size for t in tensors])
            if again:
                now = chain.forward_extra[k]
            elif part:
                now = chain.part_internal[k] + chain.part_taped_extra[k]
            else:
                now = chain.internal[k] + chain.taped_extra[k]
            self.moments.append(Moment(phase, k, float(total + made + now)))
            if not again:
                self.internal[k] = float(chain.part_internal[k] if part else chain.internal[k])
                total += self.internal[k]
            for t in tensors:
                first = self._first_read(t)
                if first is not None:
                    self.kept[t] = first
                    total += t.size
                else:
                    last = max([s for s, _ in t.uses if s < self.stop], default=k)
                    if last > k:
                        live.setdefault(last, []).append(t)
                        total += t.size
            for t in live.pop(k, ()):
                total -= t.size

    def held(self):
        """Returns the bytes that are kept now."""
        return sum(self.internal.values()) + sum(t.size for t in self.kept)

    def backward(self, outer):
        """Runs backward beside `outer` bytes, and forgets what has done its duty."""
        chain, k = self.chain, self.stop - 1
        total, release = self.held(), {}
        for t, first in self.kept.items():
            release.setdefault(first, []).append(t)
        for t in release.pop(len(chain), ()):
            del self.kept[t]
            total -= t.size
        while k >= self.start:
            r = self.home.get(k)
            first = k if r is None else r.start
            if r is None:
                own = self.internal.pop(k)
                extra = chain.part_backward_extra[k] if k in self.parts else chain.backward_extra[k]
                now = outer + total + chain.upstream[k + 1] + extra + chain.gradients[k + 1]
                self.moments.append(Moment("backward", k, float(now)))
                total -= own
            else:
                inner = _Level(chain, r.start, r.stop, r.inside, self.moments)
                inner.forward(outer + total + chain.upstream[k + 1] + chain.gradients[k + 1], "re-run")
                inner.backward(outer + total)
            for s in range(first, k + 1):
                for t in release.pop(s, ()):
                    del self.kept[t]
                    total -= t.size
            k = first - 1
