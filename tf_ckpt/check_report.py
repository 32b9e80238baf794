"""What `tf_ckpt.check` found: `CheckReport` and its `Difference`s, as plain data and as text."""

import dataclasses

import numpy as np

FOLLOWS = "follows from what differs between forward run and re-run"
_SHOWN = 6
_MANY = {"output": "outputs", "loss": "loss", "gradient": "gradients", "state": "variables after the step"}


@dataclasses.dataclass(frozen=True)
class Gap:
    """How far two arrays are apart.

    Attributes:
        largest: The largest difference of two elements; infinite where one of them is not finite.
        share: The same as a share of the largest element.
        count: How many elements differ.
        size: How many there are.
    """

    largest: float
    share: float
    count: int
    size: int


@dataclasses.dataclass(frozen=True)
class Difference:
    """One thing that is not the same with recompute.

    Attributes:
        mode: `"eager"`, `"graph"` or `"xla"`.
        kind: What differs. Between a forward run and its re-run: `"value"`, `"shape"`, `"dtype"`, `"calls"` (other layers are
            called) or `"write"` (something else is written to a variable). From the plain model: `"output"`, `"loss"`,
            `"gradient"` or `"state"` (a variable after the step). Or `"error"`.
        layer: Name of the layer that it comes from, `outer/inner` inside others; of a function where it is in no layer; or "".
        segment: Name of the recomputed segment, `first..last`, or "".
        what: What differs, in words.
        cause: The likely cause and what to do about it.
        largest: By how much, at most; None where that is no number.
        share: The same as a share of the largest value.
        count: How many elements differ.
        size: Of how many.
    """

    mode: str
    kind: str
    layer: str
    segment: str
    what: str
    cause: str
    largest: float | None = None
    share: float | None = None
    count: int | None = None
    size: int | None = None

    def __str__(self):
        where = f"layer '{self.layer}'" if self.layer else ""
        if self.segment and self.segment != self.layer:
            where += (", in " if where else "") + f"segment '{self.segment}'"
        text = f"{where}: {self.what}" if where else self.what
        if self.largest is not None:
            share = f" ({self.share:.2g} of the largest value)" if np.isfinite(self.share) else ""
            text += f" by up to {self.largest:.4g}{share}, in {self.count:,} of {self.size:,} elements"
        return f"[{self.mode}] {text}."


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """What `tf_ckpt.check` found. `print(report)` shows it.

    Attributes:
        model: Name of the model or layer.
        modes: Tuple of the modes that were checked.
        batch_size: Samples in the batch.
        loss: What was differentiated: `"compiled"`, `"given"`, `"compute_loss"` of the model's class, or `"squares"`: the mean
            squares of the outputs, where there were no targets or no loss.
        differences: Tuple of `Difference`, the first layer that differs first; empty for an exact model.
        segments: Tuple of the names of the segments whose forward run and re-run were compared, in the order of the model.
        not_rerun: Tuple of the names of recomputed segments that no gradient reached, so that they were not run again.
        plain: Dict from the name of each layer or segment that runs plain, though it is in no segment by the plan's choice, to
            the reason.
        unplanned: Tuple of the names of calls that the plan leaves plain for no other reason.
        compared: How many arrays were compared: the inputs and results of layers in both runs, outputs, gradients, variables.
        largest_share: The largest difference that was found, as a share of the largest value: 0.0 for an exact model.
        notes: Tuple of texts: what is no difference, but worth to know.
    """

    model: str
    modes: tuple
    batch_size: int
    loss: str
    differences: tuple
    segments: tuple
    not_rerun: tuple
    plain: dict
    unplanned: tuple
    compared: int
    largest_share: float
    notes: tuple = ()

    @property
    def exact(self):
        """Whether nothing differs."""
        return not self.differences

    @property
    def first(self):
        """The first `Difference`, or None."""
        return self.differences[0] if self.differences else None

    def to_dict(self):
        """Returns everything as dicts, lists, texts and numbers, as JSON takes them; numbers that are not finite are texts."""
        return _plain({**dataclasses.asdict(self), "exact": self.exact})

    def _consequences(self):
        lines = []
        for mode in self.modes:
            kinds = [each.kind for each in self.differences if each.mode == mode and each.cause == FOLLOWS]
            counts = [f"{kinds.count(kind)} {_MANY[kind]}" for kind in dict.fromkeys(kinds)]
            if counts:
                lines.append(f"  [{mode}] from the plain model then differ: {', '.join(counts)}.")
        return ["", *lines] if lines else []

    def __str__(self):
        modes = " and ".join(self.modes)
        much = f"{self.compared:,} values compared in {len(self.segments)} segments, batch of {self.batch_size}, {modes}"
        if self.exact:
            lines = [f"'{self.model}' trains with recompute as without: {much}."]
        else:
            lines = [f"'{self.model}' does not train with recompute as it does without ({much}).", ""]
            lines += ["First difference:", f"  {self.first}", f"  Likely cause: {self.first.cause}"]
            others = [each for each in self.differences[1:] if each.cause != FOLLOWS]
            if others:
                lines += ["", "Then:"]
            said = {self.first.cause}
            for each in others[:_SHOWN]:
                lines.append(f"  {each}")
                if each.cause not in said:
                    lines.append(f"    Likely cause: {each.cause}")
                    said.add(each.cause)
            if len(others) > _SHOWN:
                lines.append(f"  ... and {len(others) - _SHOWN} more in `report.differences`.")
            lines += self._consequences()
        if self.plain:
            lines += ["", "Runs plain:", *(f"  '{name}': {reason}." for name, reason in self.plain.items())]
        if self.unplanned:
            lines += ["", f"Left plain by the plan: {_listed(self.unplanned)}."]
        if self.not_rerun:
            lines += ["", f"Not run again, since no gradient reaches it: {_listed(self.not_rerun)}."]
        if self.notes:
            lines += ["", *(f"Note: {note}" for note in self.notes)]
        return "\n".join(lines)


def _listed(names):
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return ", ".join(f"'{name}'" for name in names[:12]) + more


def _plain(value):
    if isinstance(value, dict):
        return {key: _plain(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value


def gap(a, b, floor=0.0):
    """Returns the `Gap` between two arrays of the same shape and dtype, or None if they are equal.

    What is not a number equals itself.

    Args:
        a: NumPy array.
        b: NumPy array.
        floor: Number; the largest element counts as this at least.
    """
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype.kind in "OSU" or a.dtype == bool:
        different = np.asarray(a != b)
        count = int(different.sum())
        return Gap(1.0, 1.0, count, a.size) if count else None
    with np.errstate(invalid="ignore", over="ignore"):
        unequal = (a != b) & ~((a != a) & (b != b))
        count = int(unequal.sum())
        if not count:
            return None
        wide = {"c": np.complex128, "i": object, "u": object}.get(a.dtype.kind, np.float64)  # int64 holds more than float64
        distance = np.abs(a[unequal].astype(wide) - b[unequal].astype(wide))
        distance = distance.astype(np.float64)
        largest = float(np.max(np.where(np.isnan(distance), np.inf, distance)))
        values = np.abs(a.astype(np.complex128 if wide is np.complex128 else np.float64))
        top = max(float(np.max(np.where(np.isfinite(values), values, 0.0))), floor)
    return Gap(largest, largest / top if top else float("inf"), count, a.size)
