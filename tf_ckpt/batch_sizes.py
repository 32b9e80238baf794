"""`BatchSizes`: what `max_batch_size` found, as plain data and a table."""

import dataclasses

from tf_ckpt.memory import MIB
from tf_ckpt.plan import Plan

NO_PLAN = "no plan fits"


@dataclasses.dataclass(frozen=True)
class Trial:
    """One batch size that was trained on.

    Attributes:
        batch_size: Integer, over all replicas.
        status: `"trained"`, `"out of memory"`, or `"no plan fits"` where the strategy finds none, and nothing is trained.
        peak_mib: The most that the device held within the last step, in MiB (2**20 bytes), or None.
    """

    batch_size: int
    status: str
    peak_mib: float | None


@dataclasses.dataclass(frozen=True)
class Largest:
    """The largest batch of one strategy.

    Attributes:
        strategy: `"plain"`, or what the strategy is called.
        batch_size: The largest over all replicas that trained, or without trials that was predicted; 0 if not one sample fits.
        predicted_batch_size: The largest that was predicted before any trial.
        predicted_peak_mib: The `peak_bytes` of the plan for `batch_size`, in MiB; None if that is 0.
        peak_mib: What was measured at `batch_size`, in MiB, or None.
        trials: Tuple of `Trial`, in the order in which they were made.
        plan: The `Plan` for `batch_size`, or for the part of it that each replica gets; None if that is 0.
    """

    strategy: str
    batch_size: int
    predicted_batch_size: int
    predicted_peak_mib: float | None
    peak_mib: float | None
    trials: tuple
    plan: Plan | None = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """What `tf_ckpt.max_batch_size` found. `print(found)` shows the table.

    Attributes:
        rows: Tuple of `Largest`, the plain model first.
        memory_bytes: Bytes that each device has.
        verified: Whether real steps proved the batch sizes. If not, they are predictions.
        most: The largest batch size that was tried.
    """

    rows: tuple
    memory_bytes: int
    verified: bool
    most: int

    @property
    def batch_size(self):
        """The largest batch of the checkpointed model."""
        return self.rows[-1].batch_size

    @property
    def plain_batch_size(self):
        """The largest batch of the plain model."""
        return self.rows[0].batch_size

    @property
    def plan(self):
        """The `Plan` for `batch_size`, which `tf_ckpt.apply` takes; None if not even one sample fits."""
        return self.rows[-1].plan

    def to_dict(self):
        """Returns everything but the plans as dicts, lists, texts and numbers, as JSON takes them."""
        bare = dataclasses.replace(self, rows=tuple(dataclasses.replace(row, plan=None) for row in self.rows))
        content = dataclasses.asdict(bare)
        for row in content["rows"]:
            del row["plan"]
        return {"batch_size": self.batch_size, "plain_batch_size": self.plain_batch_size, **content}

    def table(self):
        """Returns a `rich.table.Table`: plain and checkpointed side by side."""
        from rich.table import Table
        from rich.text import Text

        how = "verified by real steps" if self.verified else "predicted only, not verified"
        table = Table(title=f"Largest batch in {self.memory_bytes / MIB:,.1f} MiB, {how}")
        table.add_column("Strategy", overflow="fold")
        heads = ("Batch size", "x plain", "Predicted", "Peak MiB\npredicted", "Peak MiB\nmeasured", "Trials")
        for head in heads:
            table.add_column(head, justify="right")
        for row in self.rows:
            ratio = f"{row.batch_size / self.plain_batch_size:.2f}" if self.plain_batch_size else "-"
            capped = " or more" if row.batch_size == self.most else ""
            table.add_row(
                Text(row.strategy),
                f"{row.batch_size:,}{capped}",
                ratio,
                f"{row.predicted_batch_size:,}",
                "-" if row.predicted_peak_mib is None else f"{row.predicted_peak_mib:,.1f}",
                "-" if row.peak_mib is None else f"{row.peak_mib:,.1f}",
                f"{len(row.trials)}",
            )
        return table

    def __str__(self):
        from rich.console import Console

        console = Console(width=110, color_system=None, force_jupyter=False, highlight=False)
        with console.capture() as captured:
            console.print(self.table())
        return captured.get().rstrip("\n")
