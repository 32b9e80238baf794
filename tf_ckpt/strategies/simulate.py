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
    moments = _run(chain, 0, len(chain), tree_of(ranges))
    return [*(Moment(*moment) for moment in moments), Moment("end", -1, float(chain.gradients[0]))]


def run(chain, start, stop, tree):
    """Returns the moments of one run: the model's own, or the re-run of `[start, stop)`, beside nothing else.

    Args:
        chain: A `Chain`.
        start: First stage.
        stop: The stage after the last; `[0, len(chain))` is the model's own run.
        tree: The `Range`s that the run recomputes.
    """
    return [Moment(*moment) for moment in _run(chain, start, stop, tree)]


def most(chain, start, stop, tree):
    """Returns the most bytes of a run: see `run`."""
    return max(size for _, _, size in _run(chain, start, stop, tree))


def _run(chain, start, stop, tree):
    moments, whole, lists = [], (start, stop) == (0, len(chain)), chain.lists
    level = _Level(chain, start, stop, tree, moments, loss=whole)
    if whole:
        level.forward(0.0, "forward")
        # The loss keeps about as much as it takes, and its gradient is as large.
        moments.append(("backward", stop, level.held() + 2 * lists.upstream[stop]))
        level.backward(0.0, stop)
    else:
        level.again(0.0)
    return moments


def peak(chain, ranges):
    """Returns the most bytes of activations, their gradients and weight gradients that a step holds at once."""
    return max(most(chain, 0, len(chain), tree_of(ranges)), float(chain.gradients[0]))


def _only_taken(tensor, r):
    """Whether no backward pass in a segment looks for what its re-run takes, nor a re-run inside."""
    again = any(i.start <= s < i.stop for i in r.inside if not i.part for s, _ in tensor.uses)
    return not again and not any(r.start <= s < r.stop for s in tensor.inner)


class _Level:
    """The stages `[start, stop)` in one taped run: the model's forward run, or the re-run of one segment."""

    def __init__(self, chain, start, stop, ranges, moments, loss=False):
        self.lists, self.start, self.stop, self.moments, self.loss = chain.lists, start, stop, moments, loss
        self.home = {k: r for r in ranges if not r.part for k in range(r.start, r.stop)}
        self.parts = {r.start for r in ranges if r.part}
        self.internal, self.kept = {}, {}
        self.last = self.lists.backward_last if loss else self.lists.backward_again

    def _is_idle(self, r):
        return self.lists.chain.all_idle(r.start, r.stop) and not r.inside

    def _first_read(self, tensor, home):
        """Returns the first stage at which the backward pass looks for a tensor of this run in memory, or None."""
        first, homes, start, stop = None, self.home, self.start, self.stop
        for s in tensor.inner:  # plain stages, and the loss: a re-run makes nothing for that
            if ((start <= s < stop and s not in homes) or (self.loss and s == stop)) and (first is None or s < first):
                first = s
        for s, _ in tensor.uses:  # the re-run of another segment
            other = homes.get(s)
            if other is not None and other is not home and not self._is_idle(other) and (first is None or s < first):
                first = s
        return first

    def forward(self, outer, phase):
        """Runs forward beside `outer` bytes. What is kept stays in `internal` and `kept`."""
        x, live, total, homes, stop = self.lists, {}, outer, self.home, self.stop
        note, kept, internal = self.moments.append, self.kept, self.internal
        read = None if self.loss or not x.chain.graph_mode else x.chain.read(stop)
        for k in range(self.start, stop):
            home = homes.get(k)
            makes = read is None or read[k]  # what nobody reads, a graph optimiser leaves out of a re-run
            made = x.made[k] if makes else 0.0
            if home is not None:
                note((phase, k, total + made + x.forward_extra[k]))
            else:
                part = k in self.parts
                own = x.part_internal[k] if part else x.internal[k]
                note((phase, k, total + made + own + (x.part_taped_extra if part else x.taped_extra)[k]))
                internal[k] = own
                total += own
            for t, size, last in x.tensors[k] if makes else ():
                first = self._first_read(t, home)
                if first is not None:
                    kept[t] = first
                    total += size
                    continue
                if last >= stop:  # what only later runs read is theirs
                    last = max([s for s, _ in t.uses if s < stop], default=k)
                if last > k:
                    live.setdefault(last, []).append(size)
                    total += size
            for size in live.pop(k, ()):
                total -= size

    def again(self, outer, taken=0.0):
        """Runs forward again, and backward, beside `outer` bytes; `taken` of them go when the re-run has used them up.

        What the backward pass of the last stages waits for may be gradients alone, as that of `Concatenate` does: in a graph
        it comes before the re-run.
        """
        x, stop = self.lists, self.stop
        while x.chain.graph_mode and stop - 1 > self.start and not x.looks[stop - 1] and stop - 1 not in self.home:
            self.moments.append(
                ("backward", stop - 1, outer + x.upstream[stop] + x.backward_extra[stop - 1] + x.gradients[stop])
            )
            stop -= 1
        self.forward(outer + x.upstream[stop] + x.gradients[stop], "re-run")
        self.backward(outer - taken, stop)

    def _taken(self, r, release):
        """Returns the bytes of what a re-run only took: no backward pass in it looks for that, nor a re-run inside."""
        if not self.lists.chain.graph_mode:
            return 0.0
        return sum(t.size for s in range(r.start, r.stop) for t in release.get(s, ()) if _only_taken(t, r))

    def _copied(self, r):
        """Returns the bytes of what a re-run takes and others hold meanwhile, and how many of them it only takes.

        A re-run waits by data: it adds 0 to what it takes, in place where nobody else holds that.
        """
        chain = self.lists.chain
        if not chain.graph_mode:
            return 0.0, 0.0
        taken = {t for s in range(r.start, r.stop) for t in chain.taken(s)}
        held = [t for t in taken if self.kept.get(t, r.start) < r.start or (self.loss and t.producer < 0)]
        return sum(t.size for t in held), sum(t.size for t in held if _only_taken(t, r))

    def held(self):
        """Returns the bytes that are kept now."""
        return sum(self.internal.values()) + sum(t.size for t in self.kept)

    def backward(self, outer, stop):
        """Runs the stages before `stop` backward beside `outer` bytes, and forgets what has done its duty."""
        x, k, chain = self.lists, stop - 1, self.lists.chain
        total, release = self.held(), {}
        for t, first in self.kept.items():
            release.setdefault(first, []).append(t)
        for t in release.pop(len(chain), ()):
            total -= t.size
        while k >= self.start:
            r = self.home.get(k)
            first = k if r is None else r.start
            if r is None:
                # What was made in this run, and has no reader left, is let go within the backward pass.
                last = all(self.kept.get(t) == k for t in x.reads[k])
                extra = x.part_backward_extra[k] if k in self.parts else (self.last if last else x.backward_extra)[k]
                if k == stop - 1 and not self.loss and k not in self.parts:
                    extra += x.early[k]
                now = outer + total + x.upstream[k + 1] + extra + x.gradients[k + 1]
                self.moments.append(("backward", k, now))
                total -= self.internal.pop(k)
            elif self._is_idle(r):  # nothing is run there, once more or backward
                stages = [("re-run", s) for s in range(r.start, r.stop)]
                stages += [("backward", s) for s in reversed(range(r.start, r.stop))]
                self.moments += [(phase, s, outer + total) for phase, s in stages]
            else:
                copied, used = self._copied(r)
                inner = _Level(chain, r.start, r.stop, r.inside, self.moments)
                inner.again(outer + total + copied, self._taken(r, release) + used)
            for s in range(first, k + 1):
                for t in release.pop(s, ()):
                    total -= t.size
            k = first - 1
