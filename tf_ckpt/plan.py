"""`Plan`: which calls of a model are recomputed, in which segments, and what that should cost."""

import dataclasses

from tf_ckpt.allocator import in_use
from tf_ckpt.errors import CheckpointError
from tf_ckpt.strategies.simulate import timeline
from tf_ckpt.strategies.tree import Range, tree_of

MIB = 2**20


def unit_text(unit):
    """Returns the unit of a plan or chain as text: FLOPs are counted, seconds are a prediction."""
    return "FLOPs" if unit == "FLOPs" else "predicted seconds"


@dataclasses.dataclass(frozen=True)
class Segment:
    """A stretch of a model that is recomputed as one.

    Attributes:
        layers: Names of the calls, in the order in which they run: a layer's name, `name:k` for its k-th further call,
            `outer/inner` inside a nested model.
        inside: Tuple of smaller `Segment`s, recomputed once more within the re-run of this one.
        part: `""`, or what alone is recomputed of the one call in `layers`: `"attention"` (its scores, softmax and weighted
            sum) or `"activation"` (its activation function).
        keeps_bytes: Bytes that it makes and keeps for what comes after it, within the re-run of the segment that it is
            inside of. Of a part: bytes that the call keeps inside all the same.
        frees_bytes: Bytes that would be kept too if it alone ran plain; negative if it makes others keep more than that.
        rerun_flops: FLOPs of one re-run of it, without those of what is `inside`.
        rerun_seconds: Seconds that this should take, in a plan whose `unit` is `"seconds"`; else 0.
    """

    layers: tuple
    inside: tuple = ()
    part: str = ""
    keeps_bytes: int = dataclasses.field(default=0, compare=False)
    frees_bytes: int = dataclasses.field(default=0, compare=False)
    rerun_flops: float = dataclasses.field(default=0.0, compare=False)
    rerun_seconds: float = dataclasses.field(default=0.0, compare=False)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is recomputed.

    Plans are equal if they recompute the same layers and parts, nested alike, of the same calls, priced in the same unit.

    Bytes are predictions for `batch_size` from one trace of each kind of layer. A plan for a model whose `call` is Python
    code names layers instead of calls, and has no figures: bytes and shares are 0, and `has_figures` is False.

    Attributes:
        strategy: Name of the strategy that made it.
        layers: Names of all calls of the model, in the order in which they run.
        segments: Tuple of `Segment`. What is in none runs plain.
        batch_size: The batch size that the bytes are for.
        activation_bytes: Predicted bytes of activations, their gradients and weight gradients at the worst moment of a step,
            with what the allocator loses.
        plain_activation_bytes: The same without recompute.
        overhead: Predicted FLOPs of all re-runs, as a share of the plain step's FLOPs; or predicted seconds of all re-runs, as
            a share of the plain step's predicted seconds, where `unit` says so.
        weight_bytes: Bytes of the weights.
        optimizer_bytes: Bytes of the optimizer's slots.
        peak_bytes: Weights, optimizer slots and `activation_bytes`.
        plain_peak_bytes: The same without recompute.
        moments: Bytes at each moment of the step, like `activation_bytes`: the forward runs, the loss, the backward passes
            with their re-runs, the end.
        plain_moments: The same without recompute.
        curve: Pairs `(peak_bytes, overhead)` of the plans that other budgets give; empty if they are not known.
        unknown: Types of operations whose FLOPs are not known: the elements that they make count instead.
        untraced: Names of the calls that could not be traced, so that what they keep and cost is guessed from the sizes of
            their outputs.
        open_sized: Names of the calls that make tensors with dimensions left open, the batch apart: 64 stands for each.
        unit: `"FLOPs"`, or `"seconds"` if a `Calibration` of a device priced what is run again: what the strategy had as
            little as possible of, and `overhead` and `curve` are shares of.
    """

    strategy: str = dataclasses.field(compare=False)
    layers: tuple
    segments: tuple
    batch_size: int = dataclasses.field(compare=False)
    activation_bytes: int = dataclasses.field(compare=False)
    plain_activation_bytes: int = dataclasses.field(compare=False)
    overhead: float = dataclasses.field(compare=False)
    weight_bytes: int = dataclasses.field(default=0, compare=False)
    optimizer_bytes: int = dataclasses.field(default=0, compare=False)
    moments: tuple = dataclasses.field(default=(), compare=False, repr=False)
    plain_moments: tuple = dataclasses.field(default=(), compare=False, repr=False)
    curve: tuple = dataclasses.field(default=(), compare=False, repr=False)
    unknown: tuple = dataclasses.field(default=(), compare=False, repr=False)
    untraced: tuple = dataclasses.field(default=(), compare=False, repr=False)
    open_sized: tuple = dataclasses.field(default=(), compare=False, repr=False)
    unit: str = "FLOPs"

    @classmethod
    def of(cls, chain, ranges, strategy, *, weight_bytes=None, optimizer_bytes=0, curve=()):
        """Makes the plan that recomputes `ranges` of a chain.

        Args:
            chain: A `strategies.Chain`.
            ranges: Iterable of pairs (start, stop) of stages, or of `Range`s (start, stop, inside, part).
            strategy: String, the name of what made it.
            weight_bytes: Bytes of the weights. Defaults to those of the trainable ones.
            optimizer_bytes: Bytes of the optimizer's slots.
            curve: Iterable of pairs (peak bytes, overhead), weights and optimizer slots included: what other budgets cost.

        Returns:
            A `Plan`.

        Raises:
            CheckpointError: If ranges overlap, hold what cannot be one segment, or stick out of what they are inside of.
        """
        try:
            tree = tree_of(ranges)
        except (TypeError, ValueError, IndexError) as error:
            raise CheckpointError(
                f"`ranges` must be pairs (start, stop) of stages, or `Range`s of them. Received: ranges={ranges!r}"
            ) from error
        _check(chain, tree)
        # Each moment is rounded down like the peak, so that the plot's highest point is the peak.
        moments, plain = (_allocated(chain, timeline(chain, x)) for x in (tree, ()))
        return cls(
            strategy=strategy,
            layers=tuple(chain.names),
            segments=_segments(chain, tree),
            batch_size=chain.batch_size,
            activation_bytes=max(moments),
            plain_activation_bytes=max(plain),
            overhead=chain.added_flops(tree) / chain.step_flops if chain.step_flops else 0.0,
            weight_bytes=int(chain.weights.sum() if weight_bytes is None else weight_bytes),
            optimizer_bytes=int(optimizer_bytes),
            moments=moments,
            plain_moments=plain,
            unknown=tuple(chain.unknown),
            untraced=tuple(chain.untraced),
            open_sized=tuple(chain.open_sized),
            unit="FLOPs" if chain.unit == "FLOPs" else "seconds",
            curve=tuple((int(size), float(overhead)) for size, overhead in curve),
        )

    @property
    def has_figures(self):
        """Whether bytes and FLOPs were predicted. They are not for a model whose `call` is Python code."""
        return bool(self.moments) or self.plain_activation_bytes > 0

    @property
    def peak_bytes(self):
        """Predicted bytes at the worst moment of a step: weights, optimizer slots, activations and gradients."""
        return self.weight_bytes + self.optimizer_bytes + self.activation_bytes

    @property
    def plain_peak_bytes(self):
        """The same without recompute."""
        return self.weight_bytes + self.optimizer_bytes + self.plain_activation_bytes

    def ranges(self):
        """Returns the segments as a tree of `strategies.tree.Range`: positions in `layers`."""
        position = {name: i for i, name in enumerate(self.layers)}

        def tree(segments):
            ends = ((position[s.layers[0]], position[s.layers[-1]] + 1, s) for s in segments)
            return tuple(Range(start, stop, tree(s.inside), bool(s.part)) for start, stop, s in ends)

        return tree(self.segments)

    def summary(self, print_fn=None):
        """Prints a table of the segments, and what they should save.

        Args:
            print_fn: Optional callable that takes the text. Defaults to printing it.
        """
        from rich.console import Console
        from rich.table import Table

        table = Table()
        table.add_column("", justify="right")  # the number that the plot shows
        table.add_column("Segment", overflow="fold")
        again = "Re-runs\nGFLOPs" if self.unit == "FLOPs" else "Re-runs\nms"
        for head in ("Calls", "Keeps\nMiB", "Frees\nMiB", again) if self.has_figures else ():
            table.add_column(head, justify="right")
        for number, segment in enumerate(self.segments, 1):
            _add_rows(table, segment, str(number), 0, self)
        # Names are no markup, and the text may go to a log.
        plain = {"markup": False, "highlight": False, "emoji": False, "color_system": None, "force_jupyter": False}
        console = Console(width=100 if print_fn else None, **plain)
        fixed = f"{self.weight_bytes / MIB:,.1f} MiB of weights, {self.optimizer_bytes / MIB:,.1f} MiB of optimizer slots"
        with console.capture() as captured:
            size = f", batch size {self.batch_size}" if self.has_figures else ""
            console.print(f"Plan: {self.strategy!r}{size}", soft_wrap=True)
            console.print(table if self.segments else "Nothing is recomputed.")
            lines = (
                f"Activations and gradients: {self.plain_activation_bytes / MIB:,.1f} MiB plain, "
                f"{self.activation_bytes / MIB:,.1f} MiB planned.",
                f"With {fixed}: {self.plain_peak_bytes / MIB:,.1f} MiB plain, {self.peak_bytes / MIB:,.1f} MiB planned.",
                f"Re-runs: {100 * self.overhead:.1f} % of the plain step's {unit_text(self.unit)}.",
                *([f"Counted by the size of what they make: {', '.join(self.unknown)}."] if self.unknown else []),
                *(
                    [f"Could not be traced, costs guessed from output sizes: {_listed(self.untraced)}."]
                    if self.untraced
                    else []
                ),
                *(
                    ["Dimensions that the model's inputs leave open, the batch apart, count as 64 each: state them if longer."]
                    if self.open_sized
                    else []
                ),
            )
            for line in (
                lines if self.has_figures else ("Memory and FLOPs are not predicted: the model's `call` is Python code.",)
            ):
                console.print(line, soft_wrap=True)
        (print_fn or print)(captured.get())

    def save(self, path):
        """Writes the plan to a JSON file. It names layers, so that it applies to the same architecture elsewhere.

        Args:
            path: String or path-like. A file that is there is replaced, at once and as a whole.

        Raises:
            TypeError: If `path` is not a string or path-like.

        Example:

        ```python
        tf_ckpt.plan(model, "sqrt", batch_size=64).save("plan.json")
        model = tf_ckpt.apply(model, tf_ckpt.Plan.load("plan.json"))
        ```
        """
        from tf_ckpt.plan_file import write

        write(self, path)

    @classmethod
    def load(cls, path):
        """Reads a plan that `save` wrote.

        Args:
            path: String or path-like.

        Returns:
            A `Plan`, equal to the one saved, with the same figures.

        Raises:
            TypeError: If `path` is not a string or path-like.
            CheckpointError: If the file holds no plan, or one of a version that this tf_ckpt does not know.
        """
        from tf_ckpt.plan_file import read

        return read(path)

    def plot(self, path):
        """Draws the memory of a step, plain and planned, and if it is known what other budgets would cost.

        Needs matplotlib: `pip install "tf_ckpt[plot]"`.

        Args:
            path: String or path-like. The extension says the format, `.png` by default.

        Raises:
            ImportError: If matplotlib is missing.
            TypeError: If `path` is not a string or path-like.
            CheckpointError: If matplotlib does not know the format, or the plan has no `moments`.
        """
        from tf_ckpt.plan_plot import draw

        draw(self, path)


def allocated(chain, size):
    """Returns the bytes that an allocator has in use at a peak of `size` bytes of tensors."""
    return in_use(size, chain.largest)


def _allocated(chain, moments):
    most = max(moment.bytes for moment in moments)
    factor = allocated(chain, most) / most if most else 1.0
    return tuple(int(factor * moment.bytes) for moment in moments)


def _check(chain, tree, outer=None):
    for number, r in enumerate(tree):
        if r.part:
            fits = 0 <= r.start < len(chain) and r.stop == r.start + 1 and not r.inside and chain.part_names[r.start]
        else:
            fits = chain.allowed(r.start, r.stop)
        within = outer is None or (outer.start <= r.start and r.stop <= outer.stop)
        if not fits or not within or (number and tree[number - 1].stop > r.start):
            what = "part" if r.part else "segment"
            where = f" inside segment ({outer.start}, {outer.stop})" if outer else ""
            raise CheckpointError(
                "A segment must be a range of calls without embeddings, within one nested model or holding all of it, "
                "towards the same outputs of the model, apart from other segments, and within the one that it is inside of; "
                "a part must be that of one call which has one. "
                f"Received: {what} ({r.start}, {r.stop}) of {len(chain)} calls{where}"
            )
        _check(chain, r.inside, r)


def _segments(chain, tree):
    """Returns the `Segment`s of a tree of ranges."""
    taken = [[] for _ in range(len(chain) + 1)]
    for tensor in chain.tensors:
        for stage, _ in tensor.uses:
            taken[stage].append(tensor)

    def made(r, begin, end):  # `r` runs in a run of the stages [begin, end)
        if r.part:
            keeps = chain.part_internal[r.start]
            frees = chain.internal[r.start] - keeps
        else:
            keeps = sum(
                t.size for t in chain.crossing(r.stop) if t.producer >= r.start and any(r.stop <= s < end for s, _ in t.uses)
            )
            frees = _frees(chain, taken, r, begin, end)
        if chain.all_idle(r.start, r.stop):  # as it is without recompute
            keeps = frees = 0
        alone = [r._replace(inside=())]
        return Segment(
            layers=tuple(chain.names[r.start : r.stop]),
            inside=tuple(made(inner, r.start, r.stop) for inner in r.inside),
            part=chain.part_names[r.start] if r.part else "",
            keeps_bytes=int(keeps),
            frees_bytes=int(frees),
            rerun_flops=float((chain.counted or chain).added_flops(alone)),
            rerun_seconds=1e-9 * float(chain.added_flops(alone)) if chain.unit == "nanoseconds" else 0.0,
        )

    return tuple(made(r, 0, len(chain) + 1) for r in tree)  # stage len(chain) is the loss


def _frees(chain, taken, r, begin, end):
    """Returns the bytes that a run of the stages `[begin, end)` does not keep when `r` alone is recomputed."""
    freed = float(chain.internal[r.start : r.stop].sum())
    for stage in range(r.start, r.stop):
        for t in chain.made(stage):
            readers = [s for s in t.inner if begin <= s < end]
            if readers and all(r.start <= s < r.stop for s in readers):
                freed += t.size
    arguments = dict.fromkeys(t for stage in range(r.start, r.stop) for t in taken[stage])
    for t in arguments:
        # An argument that nobody would have kept. Those from before `begin` are held by others anyway.
        if max(begin, 0) <= t.producer < r.start and not any(begin <= s < end for s in t.inner):
            freed -= t.size
    return freed


def _listed(names, most=5):
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _add_rows(table, segment, number, level, plan):
    from rich.padding import Padding
    from rich.text import Text

    name = segment.layers[0] if len(segment.layers) == 1 else f"{segment.layers[0]} ... {segment.layers[-1]}"
    if segment.part:
        name += f" ({segment.part})"
    again = segment.rerun_flops / 1e9 if plan.unit == "FLOPs" else segment.rerun_seconds * 1e3
    figures = (segment.keeps_bytes / MIB, segment.frees_bytes / MIB, again)
    indented = Padding(Text(name, overflow="fold"), (0, 0, 0, 2 * level))
    shown = (str(len(segment.layers)), *(f"{x:,.1f}" for x in figures)) if plan.has_figures else ()
    table.add_row(number, indented, *shown)
    for inner in segment.inside:
        _add_rows(table, inner, "", level + 1, plan)
