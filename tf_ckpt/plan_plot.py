"""The figure of a plan: the memory of a step, plain and planned, and what other budgets would cost."""

import os

from tf_ckpt.errors import CheckpointError
from tf_ckpt.json_file import checked_path
from tf_ckpt.plan import unit_text
from tf_ckpt.strategies.tree import depth, tree_of, walk

MIB = 2**20
_LEVELS = 8  # rows of segments that the figure shows
_FIRST, _AGAIN, _BACK = "0.85", "0.35", "white"  # greys: a first run, a re-run, a backward pass


def draw(plan, path):
    """Draws a plan into a file: see `Plan.plot`."""
    save(path, lambda: figure(plan))


def save(path, make):
    """Draws the figure that `make` returns into a file, if matplotlib knows its format."""
    path = checked_path(path)
    made = make()
    made.savefig(path, format=picture_kind(path))


def picture_kind(path):
    """Returns the picture format that the extension of a path says, `"png"` without one, if matplotlib knows it."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ImportError('Plots are drawn with matplotlib: pip install "tf_ckpt[plot]"') from error

    kind = os.path.splitext(path)[1][1:].lower() or "png"
    known = FigureCanvasBase.get_supported_filetypes()
    if kind not in known:
        raise CheckpointError(f"matplotlib draws {', '.join(sorted(known))} files. Received: path={path!r}")
    return kind


def figure(plan):
    """Returns the `matplotlib.figure.Figure` of a plan. It belongs to no window, and pyplot does not know it.

    Args:
        plan: A `Plan`.

    Raises:
        ImportError: If matplotlib is missing.
        CheckpointError: If the plan has no `moments`.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('`Plan.plot` draws with matplotlib: pip install "tf_ckpt[plot]"') from error

    steps = Steps(len(plan.layers), plan.ranges())
    if len(plan.moments) != len(steps.moments) or len(plan.plain_moments) != 2 * len(plan.layers) + 2:
        raise CheckpointError(
            "Only a plan with the bytes at each moment of a step can be drawn: one that `tf_ckpt.plan` or `Plan.of` made. "
            f"Received: a plan with {len(plan.moments)} `moments` and {len(plan.plain_moments)} `plain_moments`, where "
            f"{len(steps.moments)} and {2 * len(plan.layers) + 2} are due"
        )
    tree = plan.ranges()
    rows = min(depth(tree), _LEVELS) + any(r.part for r in walk(tree))
    made = Figure(figsize=(12.5 if plan.curve else 8.5, 4.8 + 0.25 * rows), dpi=120, layout="constrained")
    title = f"Plan '{plan.strategy}', batch size {plan.batch_size}"
    made.suptitle(title, parse_math=False, fontsize="large")
    halves = made.subfigures(1, 2 if plan.curve else 1, squeeze=False, width_ratios=[8, 5] if plan.curve else [1])[0]
    # A legend beside the axes hides nothing.
    legend = {"loc": "outside lower center", "fontsize": "small", "frameon": False}
    grid = halves[0].add_gridspec(2 if rows else 1, 1, height_ratios=[16, 1.2 * rows] if rows else [1])
    memory = halves[0].add_subplot(grid[0])
    _memory(memory, plan, steps)
    handles, lowest = memory.get_legend_handles_labels()[0], memory
    if rows:
        lowest = halves[0].add_subplot(grid[1], sharex=memory)
        handles += _strip(lowest, steps, tree)
        memory.tick_params(labelbottom=False)
    _moments_axis(lowest, steps)
    halves[0].legend(handles=handles, ncols=3, **legend)
    if plan.curve:
        axes = halves[1].add_subplot()
        _curve(axes, plan)
        halves[1].legend(handles=axes.get_legend_handles_labels()[0], **legend)
    return made


class Steps:
    """The moments of a step in the order in which `simulate.timeline` goes through them.

    Attributes:
        moments: List of pairs (phase, stage).
        segments: List of tuples (level, number, first run, re-run, end): for each segment its level in the tree, its number
            among the outermost ones (None for inner ones), and pairs and positions in `moments`. The backward pass lies
            between the re-run and the end.
        parts: List of pairs (position of the run, position of the backward pass): parts that are recomputed.
        loss: Position of the loss.
    """

    def __init__(self, count, tree):
        self.count = count
        self.moments = [("forward", stage) for stage in range(count)]
        self.segments, self.parts = [], []
        self.loss = count
        self.moments.append(("backward", count))
        self._backward(tree_of(tree), 0, count, 0, 0)
        self.moments.append(("end", -1))

    def _backward(self, tree, start, stop, run, level):
        """Adds the backward pass of stages `[start, stop)`, whose own run began at the moment `run`."""
        home = {k: (number, r) for number, r in enumerate(tree, 1) for k in range(r.start, r.stop)}
        stage = stop - 1
        while stage >= start:
            number, r = home.get(stage, (None, None))
            if r is None or r.part:
                if r is not None:
                    self.parts.append((run + stage - start, len(self.moments)))
                self.moments.append(("backward", stage))
                stage -= 1
                continue
            again = len(self.moments)
            self.moments += [("re-run", k) for k in range(r.start, r.stop)]
            place = len(self.segments)
            self.segments.append(None)
            self._backward(r.inside, r.start, r.stop, again, level + 1)
            first = (run + r.start - start, run + r.stop - start)
            rerun = (again, again + r.stop - r.start)
            self.segments[place] = (level, None if level else number, first, rerun, len(self.moments))
            stage = r.start - 1

    def plain(self):
        """Returns the positions at which the moments of the plain step are drawn: each at the same stage's moment here."""
        backward = {stage: i for i, (phase, stage) in enumerate(self.moments) if phase == "backward"}
        return [*range(self.count), *(backward[stage] for stage in range(self.count, -1, -1)), len(self.moments) - 1]


def _memory(axes, plan, steps):
    fixed = plan.weight_bytes + plan.optimizer_bytes
    for values, places, name, style in (
        (plan.plain_moments, steps.plain(), "plain", {"color": "0.5", "linestyle": "--", "linewidth": 2.2}),
        (plan.moments, range(len(plan.moments)), "planned", {"color": "black", "linestyle": "-", "linewidth": 1.2}),
    ):
        heights = [(fixed + value) / MIB for value in values]
        marks = {"marker": ".", "markersize": 5} if len(plan.moments) < 40 else {}
        axes.plot(list(places), heights, label=f"{name}: at most {max(heights):,.1f} MiB", **style, **marks)
    if fixed:
        axes.axhspan(
            0, fixed / MIB, facecolor="white", edgecolor="0.7", hatch="///", linewidth=0, label="weights and optimizer slots"
        )
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set_ylabel("Memory (MiB)")
    axes.set_title("Memory over one training step", fontsize="medium")
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.axvline(steps.loss, color="0.6", linestyle=":", linewidth=1)


def _strip(axes, steps, tree):
    """Draws the segments below the curves: a row for each level of the tree, and one for parts. Returns legend handles."""
    from matplotlib.patches import Patch

    levels = min(depth(tree), _LEVELS)
    names = {}
    bars = {kind: [[] for _ in range(levels)] for kind in (_FIRST, _AGAIN, _BACK)}
    for level, number, first, rerun, end in steps.segments:
        if level < levels:
            bars[_FIRST][level].append((first[0] - 0.5, first[1] - first[0]))
            bars[_AGAIN][level].append((rerun[0] - 0.5, rerun[1] - rerun[0]))
            bars[_BACK][level].append((rerun[1] - 0.5, end - rerun[1]))
        if number is not None:
            names[number] = [(first[0] + first[1] - 1) / 2, first[1] - first[0]], [(rerun[1] + end - 1) / 2, end - rerun[1]]
    for color, rows in bars.items():
        for level, row in enumerate(rows):
            narrow = 1000 * min((width for _, width in row), default=1) / len(steps.moments)  # about as many pixels
            axes.broken_barh(row, (level + 0.1, 0.8), facecolor=color, edgecolor="black", linewidth=min(0.5, narrow / 8))
    widest = len(steps.moments) / 75  # the width of a digit or two
    for number, places in names.items():
        for middle, width in places:
            if width > widest * len(str(number)):
                axes.text(middle, 0.5, str(number), ha="center", va="center", fontsize="x-small")
    labels = ["segments", *(f"nested, level {level + 1}" for level in range(1, levels))][:levels]
    if levels < depth(tree):
        labels[-1] += " (of " + str(depth(tree)) + ")"
    if steps.parts:
        for run, back in steps.parts:
            axes.plot([run, back], [levels + 0.5] * 2, color="black", marker="|", markersize=7, linestyle="none")
        labels.append("parts of calls")
    count = len(labels)
    axes.set_ylim(count, 0)
    axes.set_yticks([row + 0.5 for row in range(count)], labels, fontsize="small")
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    kinds = ((_FIRST, "runs, keeps only what others read"), (_AGAIN, "runs again"), (_BACK, "backward pass"))
    axes.axvline(steps.loss, color="0.6", linestyle=":", linewidth=1)
    return [Patch(facecolor=c, edgecolor="black", linewidth=0.5, label=t) for c, t in kinds] if levels else []


def _moments_axis(axes, steps):
    last = len(steps.moments) - 1
    axes.set_xlim(-0.5, last + 0.5)
    axes.set_xticks([0, steps.loss, last], ["start", "loss", "end"])
    axes.set_xlabel(
        f"Moments: the forward runs ({steps.count}), the loss, the backward passes and re-runs (not to scale in time)"
    )


def _curve(axes, plan):
    points = sorted(plan.curve)
    axes.step(
        [size / MIB for size, _ in points],
        [100 * overhead for _, overhead in points],
        where="post",
        color="0.45",
        marker="." if len(points) < 60 else "",
        label="least overhead found for each peak",
    )
    chosen, plain = (plan.peak_bytes / MIB, 100 * plan.overhead), plan.plain_peak_bytes / MIB
    axes.plot(plain, 0, "s", markerfacecolor="white", markeredgecolor="black", label=f"plain: {plain:,.1f} MiB, 0 %")
    label = f"this plan: {chosen[0]:,.1f} MiB, {chosen[1]:.1f} %"
    axes.plot(*chosen, "D", color="black", markersize=8, label=label)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.06)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_xlabel("Peak memory (MiB)")
    axes.set_ylabel(f"Overhead (% of the plain step's {unit_text(plan.unit)})")
    axes.set_title("What less memory costs", fontsize="medium")
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
