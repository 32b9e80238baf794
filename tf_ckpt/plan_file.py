"""Plans as JSON files: what `Plan.save` writes and `Plan.load` reads."""

import dataclasses

from tf_ckpt import json_file
from tf_ckpt.errors import CheckpointError
from tf_ckpt.plan import Plan, Segment

VERSION = 1


def write(plan, path):
    """Writes a plan to a file, as a whole or not at all.

    Args:
        plan: A `Plan`.
        path: String or path-like.
    """
    json_file.write(path, to_json(plan))


def to_json(plan):
    """Returns a plan as JSON can say it: what a plan file holds."""
    return json_file.plain({"format": "tf_ckpt.Plan", "version": VERSION, **dataclasses.asdict(plan)})


def read(path):
    """Reads the plan in a file.

    Args:
        path: String or path-like.

    Returns:
        A `Plan`.

    Raises:
        CheckpointError: If the file holds no plan that this version reads.
    """
    content = json_file.read(path, "Plan", VERSION, "tf_ckpt.plan")
    return _Reader(f"path={json_file.checked_path(path)!r}").plan(content)


def from_json(content, where):
    """Returns the plan that `to_json` put into something larger than a plan file.

    Args:
        content: What was read there, of whatever type.
        where: String that says where, for errors: `name=value`.

    Returns:
        A `Plan`.

    Raises:
        CheckpointError: If it is no plan that this version reads.
    """
    return _Reader(where).plan(json_file.checked(content, "Plan", VERSION, "tf_ckpt.plan", where))


class _Reader:
    """Makes a `Plan` of what a file holds, and checks each value.

    Files from before plans in seconds have no `unit` and no `rerun_seconds`: they are in FLOPs. Those from before
    `untraced` and `open_sized` do not tell which calls could not be traced or have open dimensions.
    """

    def __init__(self, where):
        self.where = where

    def _take(self, content, key, fits, what):
        if key not in content:
            raise CheckpointError(f"A plan needs {key!r}: {what}. Received: {self.where}, which has {sorted(content)}")
        self._need(fits(content[key]), key, content[key], what)
        return content[key]

    def _need(self, fits, key, value, what):
        if not fits:
            text = repr(value)
            shown = text if len(text) < 200 else text[:200] + "..."
            raise CheckpointError(f"{key!r} must be {what}. Received: {self.where}, which has {key}={shown}")

    def plan(self, content):
        layers = self._names(content)
        if len(set(layers)) != len(layers):
            twice = next(name for i, name in enumerate(layers) if name in layers[:i])
            self._need(False, "layers", twice, "names of calls, each once")
        position = {name: i for i, name in enumerate(layers)}
        segments = self._segments(content, "segments", position, 0, len(layers))
        sizes = ("activation_bytes", "plain_activation_bytes", "weight_bytes", "optimizer_bytes")
        pairs = self._take(content, "curve", _pairs, "a list of pairs [bytes, overhead]")
        return Plan(
            strategy=self._take(content, "strategy", lambda x: isinstance(x, str), "the name of a strategy"),
            layers=layers,
            segments=segments,
            batch_size=self._take(content, "batch_size", lambda x: _whole(x) and x > 0, "a whole number, 1 or more"),
            overhead=float(self._take(content, "overhead", _number, "a number, 0 or more")),
            moments=tuple(self._take(content, "moments", _sizes, "a list of bytes")),
            plain_moments=tuple(self._take(content, "plain_moments", _sizes, "a list of bytes")),
            curve=tuple((size, float(overhead)) for size, overhead in pairs),
            unknown=tuple(self._take(content, "unknown", _texts, "a list of operation types")),
            untraced=tuple(self._take({"untraced": [], **content}, "untraced", _texts, "a list of the names of calls")),
            open_sized=tuple(self._take({"open_sized": [], **content}, "open_sized", _texts, "a list of the names of calls")),
            unit=self._take({"unit": "FLOPs", **content}, "unit", lambda x: x in ("FLOPs", "seconds"), "'FLOPs' or 'seconds'"),
            **{key: self._take(content, key, _size, "a whole number, 0 or more") for key in sizes},
        )

    def _names(self, content):
        def names(value):
            return isinstance(value, list) and bool(value) and all(isinstance(name, str) for name in value)

        return tuple(self._take(content, "layers", names, "a list of the names of calls"))

    def _segments(self, content, key, position, start, stop):
        """Returns the segments in a list, which must lie in `[start, stop)`, in order and apart."""
        made = []
        for item in self._take(content, key, lambda x: isinstance(x, list), "a list of segments"):
            self._need(isinstance(item, dict), key, item, "a list of segments, each an object")
            names = self._names(item)
            first = position.get(names[0], stop)
            run = all(position.get(name) == first + i for i, name in enumerate(names))
            part = self._take(item, "part", lambda x: isinstance(x, str), "'' or the name of a part of a layer")
            self._need(
                run and start <= first and first + len(names) <= stop,
                key,
                list(names),
                "runs of the plan's calls, in order and apart from each other, within the segment that they are inside of",
            )
            inside = self._segments(item, "inside", position, first, first + len(names))
            twice = any(len(s.layers) == len(names) and not s.part for s in inside)
            self._need(not twice, "inside", list(names), "smaller segments than the one that they are inside of")
            self._need(not part or (len(names) == 1 and not inside), "part", part, "that of a single call, with nothing inside")
            made.append(
                Segment(
                    layers=names,
                    inside=inside,
                    part=part,
                    keeps_bytes=self._take(item, "keeps_bytes", _size, "a whole number, 0 or more"),
                    frees_bytes=self._take(item, "frees_bytes", _whole, "a whole number"),
                    rerun_flops=float(self._take(item, "rerun_flops", _number, "a number, 0 or more")),
                    rerun_seconds=float(
                        self._take({"rerun_seconds": 0, **item}, "rerun_seconds", _number, "a number, 0 or more")
                    ),
                )
            )
            start = first + len(names)
        return tuple(made)


def _whole(value):
    return isinstance(value, int) and not isinstance(value, bool)


def _size(value):
    return _whole(value) and value >= 0


def _number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e300  # not NaN either


def _texts(value):
    return isinstance(value, list) and all(isinstance(x, str) for x in value)


def _sizes(value):
    return isinstance(value, list) and all(_size(x) for x in value)


def _pairs(value):
    return isinstance(value, list) and all(isinstance(x, list) and len(x) == 2 and _size(x[0]) and _number(x[1]) for x in value)
