"""`Comparison`: what `compare` found, as plain data, a table and a plot."""

import dataclasses

from tf_ckpt.memory import MIB
from tf_ckpt.trainee import OUT_OF_MEMORY


@dataclasses.dataclass(frozen=True)
class Row:
    """What one contestant of a comparison took. None where it was not measured.

    Attributes:
        strategy: `"plain"`, or what the strategy is called.
        status: `"trained"` or `"out of memory"`.
        predicted_peak_mib: The plan's `peak_bytes`, in MiB (2**20 bytes): weights, optimizer slots, activations, gradients.
        predicted_overhead: The plan's `overhead`: FLOPs of all re-runs, as a share of the plain step's.
        peak_mib: The most that the fullest device held within a step, in MiB: the allocator's own peak, so that whatever else
            this process holds there is in it; an equal share of it where logical devices of a CPU share one.
        baseline_mib: What it held before the step, in MiB: the least of all steps.
        step_time_ms: Median wall-clock time of a step, in ms.
        overhead: What its step took longer than the plain one of the same round, as a share of it: the median of all rounds.
        loss: Loss of the last step.
        losses: Losses of all steps, the first two included.
        equal: Whether all losses, and all weights, state and optimizer slots in the end, are the plain model's to the bit.
    """

    strategy: str
    status: str
    predicted_peak_mib: float
    predicted_overhead: float
    peak_mib: float | None = None
    baseline_mib: float | None = None
    step_time_ms: float | None = None
    overhead: float | None = None
    loss: float | None = None
    losses: tuple = ()
    equal: bool | None = None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `tf_ckpt.compare` found. `print(comparison)` shows the table.

    Attributes:
        rows: Tuple of `Row`, the plain model first.
        batch_size: Samples in a step, over all replicas.
        steps: Steps that were measured.
        jit_compile: Whether XLA compiled them.
        isolated: Whether each contestant had a process of its own.
        note: Why no memory was measured, or "".
        memory_bytes: Memory of the simulated device, or None if there was none.
    """

    rows: tuple
    batch_size: int
    steps: int
    jit_compile: bool
    isolated: bool
    note: str = ""
    memory_bytes: int | None = None

    def to_dict(self):
        """Returns everything as dicts, lists, texts and numbers, as JSON takes them."""
        return dataclasses.asdict(self)

    def table(self):
        """Returns a `rich.table.Table`: a row for each contestant, predictions beside measurements."""
        from rich.table import Table
        from rich.text import Text

        mode = "XLA" if self.jit_compile else "no XLA"
        where = "" if self.memory_bytes is None else f", a simulated device of {self.memory_bytes / MIB:,.0f} MiB"
        title = f"Batch size {self.batch_size}, {self.steps} steps in turns, {mode}{where}"
        made = Table(title=title, caption=self.note or None)
        made.add_column("Strategy", overflow="fold")
        for head in (
            "Peak MiB\npredicted",
            "Peak MiB\nmeasured",
            "Step ms\nmedian",
            "Overhead\npredicted",
            "Overhead\nmeasured",
        ):
            made.add_column(head, justify="right")
        made.add_column("Loss", justify="right")
        made.add_column("Equal\nto plain")
        for row in self.rows:
            measured = "no statistics" if row.peak_mib is None else f"{row.peak_mib:,.1f}"
            out = row.status == OUT_OF_MEMORY
            made.add_row(
                Text(row.strategy),
                f"{row.predicted_peak_mib:,.1f}",
                row.status if out else measured,
                _shown(row.step_time_ms, "{:,.1f}"),
                f"{100 * row.predicted_overhead:.1f} %",
                _shown(None if row.overhead is None else 100 * row.overhead, "{:.1f} %"),
                _shown(row.loss, "{:.6g}"),
                {True: "yes", False: "no", None: "-"}[row.equal],
            )
        return made

    def __str__(self):
        from rich.console import Console

        console = Console(width=110, color_system=None, force_jupyter=False, highlight=False)
        with console.capture() as captured:
            console.print(self.table())
        return captured.get().rstrip("\n")

    def plot(self, path):
        """Draws peak memory against step time, predicted and measured, into a file.

        Needs matplotlib: `pip install "tf_ckpt[plot]"`.

        Args:
            path: String or path-like. The extension says the format, `.png` by default.

        Raises:
            ImportError: If matplotlib is missing.
            TypeError: If `path` is not a string or path-like.
            CheckpointError: If matplotlib does not know the format.
        """
        from tf_ckpt.comparison_plot import draw

        draw(self, path)


def _shown(value, form):
    return "-" if value is None else form.format(value)
