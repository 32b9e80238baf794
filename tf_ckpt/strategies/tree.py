"""What is recomputed, as a tree: a range of stages is one segment, and may hold smaller segments."""

from typing import NamedTuple


class Range(NamedTuple):
    """Stages `[start, stop)` that are recomputed as one.

    Attributes:
        start: First stage.
        stop: The stage after the last.
        inside: Sorted tuple of smaller `Range`s, recomputed once more within this one's re-run.
        part: If true, `stop` is `start + 1`, and only the stage's own inner part (the core of an attention layer, an
            activation function) is recomputed: see `Chain.part_internal`.
    """

    start: int
    stop: int
    inside: tuple = ()
    part: bool = False


def tree_of(ranges):
    """Returns pairs `(start, stop)`, longer tuples and `Range`s as a sorted tuple of `Range`s."""
    made = (Range(int(r[0]), int(r[1]), tree_of(r[2]) if len(r) > 2 else (), len(r) > 3 and bool(r[3])) for r in ranges)
    return tuple(sorted(made, key=lambda r: (r.start, r.stop)))


def walk(tree):
    """Yields each `Range` of a tree, outer ones first."""
    for r in tree:
        yield r
        yield from walk(r.inside)


def depth(tree):
    """Returns how many levels of segments a tree has, parts of stages apart."""
    return max((1 + depth(r.inside) for r in tree if not r.part), default=0)
