"""`Plan`: which calls of a model are recomputed, in which segments, and what that should cost."""

import dataclasses

from tf_ckpt.errors import CheckpointError

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Segment:
    """A stretch of a model that is recomputed as one.

    Attributes:
        layers: Names of the calls, in the order in which they run: a layer's name, `name:k` for its k-th further call,
            `outer/inner` inside a nested model.
        keeps_bytes: Bytes that it makes and keeps for later segments.
        frees_bytes: Bytes that it would keep beside these if it ran plain.
        rerun_flops: FLOPs of its re-run.
    """

    layers: tuple
    keeps_bytes: int = dataclasses.field(default=0, compare=False)
    frees_bytes: int = dataclasses.field(default=0, compare=False)
    rerun_flops: float = dataclasses.field(default=0.0, compare=False)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is recomputed. Plans are equal if they recompute the same layers of the same calls.

    Bytes are predictions for `batch_size` from one trace of each kind of layer; activations and weight gradients count,
    weights and optimizer slots do not.

    Attributes:
        strategy: Name of the strategy that made it.
        layers: Names of all calls of the model, in the order in which they run.
        segments: Tuple of `Segment`. What is in none runs plain.
        batch_size: The batch size that the bytes are for.
        activation_bytes: Predicted peak of activations and weight gradients.
        plain_activation_bytes: The same without recompute.
        overhead: Predicted FLOPs of all re-runs, as a share of the plain step's FLOPs.
    """

    strategy: str = dataclasses.field(compare=False)
    layers: tuple
    segments: tuple
    batch_size: int = dataclasses.field(compare=False)
    activation_bytes: int = dataclasses.field(compare=False)
    plain_activation_bytes: int = dataclasses.field(compare=False)
    overhead: float = dataclasses.field(compare=False)

    @classmethod
    def of(cls, chain, ranges, strategy):
        """Makes the plan that recomputes `ranges` of a chain.

        Args:
            chain: A `strategies.Chain`.
            ranges: Iterable of pairs (start, stop) of stages.
            strategy: String, the name of what made it.

        Returns:
            A `Plan`.

        Raises:
            CheckpointError: If ranges overlap, or hold what cannot be one segment.
        """
        ranges = sorted((int(start), int(stop)) for start, stop in ranges)
        for number, (start, stop) in enumerate(ranges):
            if not chain.allowed(start, stop) or (number and ranges[number - 1][1] > start):
                raise CheckpointError(
                    "A segment must be a range of calls without embeddings, within one nested model or holding all of it, "
                    "towards the same outputs of the model, and apart from other segments. "
                    f"Received: segment ({start}, {stop}) of {len(chain)} calls"
                )
        segments = tuple(
            Segment(
                layers=chain.names[start:stop],
                keeps_bytes=int(chain.boundary(stop)[start]),
                frees_bytes=int(chain.stored(start, stop)),
                rerun_flops=chain.rerun_flops(start, stop),
            )
            for start, stop in ranges
        )
        rerun = sum(s.rerun_flops for s in segments)
        return cls(
            strategy=strategy,
            layers=chain.names,
            segments=segments,
            batch_size=chain.batch_size,
            activation_bytes=int(chain.peak(ranges)),
            plain_activation_bytes=int(chain.peak([])),
            overhead=rerun / chain.step_flops if chain.step_flops else 0.0,
        )

    def ranges(self):
        """Returns the segments as pairs (start, stop) of positions in `layers`."""
        position = {name: i for i, name in enumerate(self.layers)}
        return [(position[s.layers[0]], position[s.layers[-1]] + 1) for s in self.segments]

    def summary(self, print_fn=None):
        """Prints a table of the segments, and what they should save.

        Args:
            print_fn: Optional callable that takes the text. Defaults to printing it.
        """
        from rich.console import Console
        from rich.table import Table

        table = Table(title=f"Plan: {self.strategy!r}, batch size {self.batch_size}")
        table.add_column("Segment", overflow="fold")
        for head in ("Calls", "Keeps MiB", "Frees MiB", "Re-runs GFLOPs"):
            table.add_column(head, justify="right")
        for s in self.segments:
            name = s.layers[0] if len(s.layers) == 1 else f"{s.layers[0]} ... {s.layers[-1]}"
            figures = (s.keeps_bytes / MIB, s.frees_bytes / MIB, s.rerun_flops / 1e9)
            table.add_row(name, str(len(s.layers)), *(f"{x:,.1f}" for x in figures))
        console = Console(width=100 if print_fn else None)
        with console.capture() as captured:
            console.print(table)
            console.print(
                f"Activations and gradients: {self.plain_activation_bytes / MIB:,.1f} MiB plain, "
                f"{self.activation_bytes / MIB:,.1f} MiB planned. "
                f"Re-runs: {100 * self.overhead:.1f} % of the plain step's FLOPs."
            )
        (print_fn or print)(captured.get())
