"""A model as a chain of stages: what strategies plan on.

Stage k is the k-th call of a layer, in the order in which the model runs, calls inside nested models among them. A
segment is a range `[i, j)` of stages. A cut between stages may be crossed by any number of tensors: what a recomputed
segment keeps is what it makes and is read at or after its end, so that each tensor counts once, however long its skip.
"""

import dataclasses
import functools
import types

import numpy as np

from tf_ckpt.strategies import simulate
from tf_ckpt.strategies.tree import tree_of, walk

_LISTED = ("internal", "forward_extra", "taped_extra", "backward_extra", "upstream", "gradients")
_LISTED += ("part_internal", "part_taped_extra", "part_backward_extra")


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor between stages.

    Attributes:
        size: Bytes.
        producer: The stage that makes it; -1 for an input of the model.
        uses: Pairs (stage, count): who takes it, and how many gradients that adds up; `len(chain)` is the loss.
        needed: Whether some stage's backward pass reads it.
        inner: The stages whose backward pass reads it.
        differentiable: Whether gradients flow through it.
        passed: The stages that take it whose output's gradient is handed on to it as it is.
        spared: The stages that take it, but not in a re-run whose outputs nobody reads: of a `Dropout` that makes the mask.
    """

    size: int
    producer: int
    uses: tuple
    needed: bool
    inner: tuple = ()
    differentiable: bool = True
    passed: tuple = ()
    spared: tuple = ()

    @property
    def last(self):
        """The last stage that takes it, or its producer."""
        return max((stage for stage, _ in self.uses), default=self.producer)


@dataclasses.dataclass(frozen=True, eq=False)
class Chain:
    """The stages of a model with their costs. Bytes and FLOPs are for `batch_size`.

    Where `unit` is `"nanoseconds"`, all that is called FLOPs here is what they take on a device: a strategy minimises a
    number, and need not know which.

    Attributes:
        names: Name of each stage, `outer/inner` inside nested models.
        internal: Bytes that each stage keeps from forward to backward, beside tensors between stages.
        flops: FLOPs of each stage's forward run.
        pruned_flops: FLOPs of a re-run whose outputs nobody reads.
        backward_flops: FLOPs of each stage's backward pass.
        weights: Bytes of each stage's weight gradients.
        forward_extra: Bytes that a forward run holds at its worst beside inputs and outputs, when nothing is kept.
        taped_extra: The same beside inputs, outputs and `internal`, when it is kept.
        backward_extra: Bytes that a backward pass holds at its worst beside what was kept and the outputs' gradients.
        graph_mode: Whether re-runs leave out what nobody reads, and let go of what they take when it is used up, as in a
            graph. The tables and bounds of strategies do not count on it; the peaks of their trees do.
        largest: Bytes of the largest tensor that a stage makes, between stages or inside.
        backward_last: The same where what it reads between stages is not needed afterwards. Defaults to `backward_extra`.
        backward_again: The same in the backward pass of a re-run, whose products are put in order. Defaults to
            `backward_last`.
        early: Bytes that the backward pass of a segment's last stage holds beside that, made while the re-run goes on, where
            `graph_mode` is set; None for: none.
        part_internal: `internal` if the stage's inner part (`part_names`) is recomputed; equal to it where there is none.
        part_flops: FLOPs of running that part again.
        part_taped_extra: `taped_extra` in that case.
        part_backward_extra: `backward_extra` in that case.
        part_names: What can be recomputed inside each stage, such as `"attention"`; "" for nothing.
        fixed: Stages that must not be recomputed.
        expensive_end: Stages that end with a matmul or convolution.
        joins_before: Stages that begin elementwise, so that a graph optimiser may join them with the stage before.
        joins_after: Stages that end elementwise or with a product, so that they may be joined with the stage after.
        groups: Number for each stage; a segment must not mix numbers. Stages that reach different outputs differ, so
            that an output without a loss gives no gradients, as in the plain model.
        ranges: Pairs (start, stop): nested models. A segment holds all of one, or lies within it.
        tensors: The tensors between stages.
        batch_size: Integer.
        shared: Tuples of the stages that share trainable weights, if they are more than two.
        gradients_wait: Whether all weight gradients of a step are held until the last one is there.
        unknown: Types of the operations whose FLOPs are not known, so that their outputs' elements stand for them.
        untraced: Names of the stages that could not be traced: the sizes of their outputs stand for their costs.
        open_sized: Names of the stages that make tensors with dimensions left open, the batch apart: 64 stands for each.
        unit: `"FLOPs"` or `"nanoseconds"`: not seconds, so that the numbers are far above 1, as FLOPs are.
        counted: The same chain in FLOPs, where the unit is another; else None.
        idle: Stages that no gradient reaches, since no trainable weight comes before or in them; None for: none. They keep
            nothing, and a segment of nothing else is never run again.
    """

    names: tuple
    internal: np.ndarray
    flops: np.ndarray
    pruned_flops: np.ndarray
    backward_flops: np.ndarray
    weights: np.ndarray
    forward_extra: np.ndarray
    taped_extra: np.ndarray
    backward_extra: np.ndarray
    part_internal: np.ndarray
    part_flops: np.ndarray
    part_taped_extra: np.ndarray
    part_backward_extra: np.ndarray
    part_names: tuple
    fixed: np.ndarray
    expensive_end: np.ndarray
    joins_before: np.ndarray
    joins_after: np.ndarray
    groups: np.ndarray
    ranges: tuple
    tensors: tuple
    batch_size: int
    shared: tuple = ()
    unknown: tuple = ()
    untraced: tuple = ()
    open_sized: tuple = ()
    gradients_wait: bool = True
    graph_mode: bool = False
    backward_last: np.ndarray | None = None
    backward_again: np.ndarray | None = None
    early: np.ndarray | None = None
    largest: float = 0.0
    unit: str = "FLOPs"
    counted: "Chain | None" = None
    idle: np.ndarray | None = None

    def __len__(self):
        return len(self.names)

    @functools.cached_property
    def _stored(self):
        stored = self.internal.astype(float)
        for t in self.tensors:
            if t.needed and t.producer >= 0:
                stored[t.producer] += t.size
        return np.concatenate([[0.0], np.cumsum(stored)])

    def stored(self, start, stop):
        """Bytes that the stages `[start, stop)` keep when they run plain. `start` may be an array."""
        return self._stored[stop] - self._stored[start]

    @functools.cached_property
    def _made(self):
        made = [[] for _ in self.names]
        for t in self.tensors:
            if t.producer >= 0:
                made[t.producer].append(t)
        return made

    def all_idle(self, start, stop):
        """Returns True if no gradient reaches any of the stages `[start, stop)`."""
        return self.idle is not None and bool(self.idle[start:stop].all())

    def made(self, stage):
        """The tensors that a stage makes."""
        return self._made[stage]

    @functools.cached_property
    def lists(self):
        """The costs over stages as lists of plain numbers, which a loop over stages reads faster than arrays."""
        found = types.SimpleNamespace(chain=self)
        for name in _LISTED:
            setattr(found, name, getattr(self, name).astype(float).tolist())
        last = self.backward_extra if self.backward_last is None else self.backward_last
        found.backward_last = last.astype(float).tolist()
        again = last if self.backward_again is None else self.backward_again
        found.backward_again = again.astype(float).tolist()
        found.early = [0.0] * len(self) if self.early is None or not self.graph_mode else self.early.astype(float).tolist()
        found.reads = [[] for _ in self.names]
        for t in self.tensors:
            for stage in t.inner:
                if stage < len(self) and stage != t.producer:
                    found.reads[stage].append(t)
        looking = {stage for t in self.tensors for stage in t.inner}
        found.looks = [k in looking or size > 0 for k, size in enumerate(found.internal)]
        found.tensors = [[(t, t.size, t.last) for t in made] for made in self._made]
        found.made = [sum(size for _, size, _ in made) for made in found.tensors]
        return found

    @functools.cached_property
    def _taken(self):
        taken = [[] for _ in range(len(self) + 1)]
        for t in self.tensors:
            for stage, _ in t.uses:
                taken[stage].append(t)
        return taken

    def taken(self, stage):
        """The tensors that a stage takes, or the loss."""
        return self._taken[stage]

    @functools.cached_property
    def upstream(self):
        """Bytes of the gradients of all tensors that cross each cut, over cuts 0..n; one that several share counts once."""
        found = np.zeros(len(self) + 1)
        for cut in range(len(self) + 1):
            found[cut] = sum({self._gradient(t, cut): t.size for t in self.crossing(cut) if t.differentiable}.values())
        return found

    def _gradient(self, tensor, cut):
        """Returns the tensor whose gradient a tensor's gradient still is when the backward pass has come to a cut."""
        while True:
            later = [(s, count) for s, count in tensor.uses if s >= cut]
            if len(later) != 1 or later[0][1] != 1 or later[0][0] not in tensor.passed:
                return tensor
            stage = later[0][0]
            tensor, cut = self.made(stage)[0], stage + 1

    @functools.cached_property
    def _crossing(self):
        by_stop = [[] for _ in range(len(self) + 1)]
        for t in self.tensors:
            for stop in range(t.producer + 1, min(t.last, len(self)) + 1):
                if t.producer >= 0:
                    by_stop[stop].append(t)
        return by_stop

    def crossing(self, cut):
        """The tensors made before `cut` and read at or after it, inputs of the model apart."""
        return self._crossing[cut]

    @functools.cache  # noqa: B019 - lives as long as the chain, which is short
    def boundary(self, stop):
        """Bytes that a segment `[i, stop)` keeps for later stages, as an array over i = 0..stop."""
        made = np.zeros(stop + 1)
        for t in self.crossing(stop):
            made[t.producer] += t.size
        return np.cumsum(made[::-1])[::-1]

    @functools.cached_property
    def gradients(self):
        """Bytes of weight gradients that exist while the segment that ends at i runs backward, over i = 0..n.

        If they do not wait, those of the last stage that had any are being used for the update, which takes as much again.
        """
        if self.gradients_wait:
            return np.concatenate([np.cumsum(self.weights[::-1].astype(float))[::-1], [0.0]])
        found = np.zeros(len(self) + 1)
        for k in range(len(self) - 1, -1, -1):
            found[k] = 2.0 * self.weights[k] or found[k + 1]
        return found

    @functools.cached_property
    def _earliest(self):
        # The least start of a segment that ends at each stop: behind fixed stages, in one group, in one nested model.
        low, earliest = 0, [0]
        for stop in range(1, len(self) + 1):
            if self.fixed[stop - 1]:
                low = stop
            elif stop >= 2 and self.groups[stop - 1] != self.groups[stop - 2]:
                low = max(low, stop - 1)
            inside = max((a for a, b in self.ranges if a < stop < b), default=0)
            earliest.append(max(low, inside))
        return earliest

    @functools.cached_property
    def _closes(self):
        closes = np.full(len(self) + 1, len(self))
        for a, b in self.ranges:
            closes[a + 1 : b] = np.minimum(closes[a + 1 : b], b)
        return closes

    def starts(self, stop):
        """The starts of all segments that may end at `stop`, as an array."""
        starts = np.arange(self._earliest[stop], stop)
        return starts[self._closes[starts] >= stop]

    def allowed(self, start, stop):
        """Returns True if `[start, stop)` may be recomputed as one segment."""
        return 0 <= start < stop <= len(self) and self._earliest[stop] <= start and self._closes[start] >= stop

    @functools.cached_property
    def exact_cuts(self):
        """Boolean array over cuts 0..n: False where a cut would change how something is rounded.

        The gradients of a tensor that three or more operations take are summed up in one order. A segment that holds
        some of them sums its own up first; the same holds for shared weights. And a product or elementwise operation whose
        one reader is elementwise may become one kernel with it, or share its constants, unless a cut lies between.
        """
        exact = np.ones(len(self) + 1, bool)
        for stages in self.shared:
            exact[min(stages) + 1 : max(stages) + 1] = False
        for t in self.tensors:
            stages = [stage for stage, _ in t.uses]
            if t.differentiable and sum(n for _, n in t.uses) > 2 and max(n for _, n in t.uses) > 1 and len(stages) > 1:
                exact[min(stages) + 1 : max(stages) + 1] = False
            if self._joined(t):
                exact[t.producer + 1 : t.last + 1] = False
        return exact

    def _joined(self, tensor):
        between = len(tensor.uses) == 1 and tensor.producer >= 0 and tensor.last < len(self)
        return bool(between and self.joins_after[tensor.producer] and self.joins_before[tensor.last])

    @functools.cached_property
    def exact_parts(self):
        """Boolean array over stages: whether there is an inner part that can be recomputed without a change of rounding.

        An activation ends where its layer does, so that it must not be joined with what comes next.
        """
        ends = ("activation",)
        return np.array(
            [
                bool(name) and not (name in ends and any(self._joined(t) for t in self.made(k)))
                for k, name in enumerate(self.part_names)
            ],
            bool,
        )

    @functools.cache  # noqa: B019 - as above
    def reruns(self, stop):
        """FLOPs of a re-run of `[i, stop)`, as an array over i = 0..stop, without what only makes outputs that its
        backward pass does not read."""
        flops, read = np.zeros(stop + 1), self.read(stop)
        for k in range(stop - 1, -1, -1):
            flops[k] = flops[k + 1] + (self.flops[k] if read[k] else self.pruned_flops[k])
        return flops

    @functools.cache  # noqa: B019 - as above
    def read(self, stop):
        """Whether what a stage makes is read in a re-run that ends at `stop`, as a list over stages 0..stop-1."""
        read = [False] * (len(self) + 1)
        for k in range(stop - 1, -1, -1):
            read[k] = any(
                any(s < stop for s in t.inner)
                or any(read[s] or (s < stop and self.pruned_flops[s] > 0 and s not in t.spared) for s, _ in t.uses)
                for t in self.made(k)
            )
        return read[:stop]

    def rerun_flops(self, start, stop):
        """FLOPs of a re-run of `[start, stop)`, without what only makes outputs that its backward pass does not read."""
        return float(self.reruns(stop)[start])

    def frees(self, start, stop):
        """Bytes that are not kept when `[start, stop)` alone is recomputed; negative if more is kept."""
        freed = float(self.internal[start:stop].sum())
        for k in range(start, stop):
            for t in self.made(k):
                if t.needed and all(start <= s < stop for s in t.inner):
                    freed += t.size
        # Arguments that nobody would have kept.
        unkept = {t for k in range(start, stop) for t in self._taken[k] if not t.needed and 0 <= t.producer < start}
        freed -= sum(t.size for t in unkept)
        return freed

    @property
    def step_flops(self):
        """FLOPs of a plain step, forward and backward."""
        return float(self.flops.sum() + self.backward_flops.sum())

    def peak(self, ranges):
        """Predicted bytes of activations, their gradients and weight gradients at the worst moment of a step.

        Args:
            ranges: What is recomputed: a tree of `Range`s, or a list of pairs (start, stop).
        """
        return simulate.peak(self, ranges)

    def added_flops(self, ranges):
        """FLOPs of all re-runs of a tree of `Range`s, or of a list of pairs (start, stop)."""
        return sum(
            float(self.part_flops[r.start]) if r.part else self.rerun_flops(r.start, r.stop) for r in walk(tree_of(ranges))
        )
