"""The share of a training step that went into re-running forward work, from a profile of the step."""

from typing import NamedTuple

from tf_ckpt import profile_events
from tf_ckpt.profile_names import RECOMPUTE, UNKNOWN


class Share(NamedTuple):
    """What a profile says about a step.

    Attributes:
        seconds: Seconds in which at least one operation ran.
        recompute: Seconds of these that were re-runs. An instant in which several operations run counts for each in equal
            parts: sums of the operations' times would count threads that wait for a core.
        unknown: Seconds of these in operations without a name.
        operations: How many ran.
    """

    seconds: float
    recompute: float
    unknown: float
    operations: int


def read(space, gpus=False):
    """Returns the `Share` of an XSpace. See `profile_events.read`."""
    events = profile_events.read(space, gpus)
    points = []
    for start, end, part in _self_times(events):
        points += [(start, 1, part), (end, -1, part)]
    points.sort(key=lambda point: point[0])
    running, total, last = {}, 0, 0
    spent, covered = {}, 0
    for time, change, part in points:
        if total and time > last:
            covered += time - last
            for name, count in running.items():
                spent[name] = spent.get(name, 0.0) + (time - last) * count / total
        last = time
        running[part] = running.get(part, 0) + change
        total += change
    return Share(1e-12 * covered, 1e-12 * spent.get(RECOMPUTE, 0.0), 1e-12 * spent.get(UNKNOWN, 0.0), len(events))


def _self_times(events):
    """Yields (start, end, part) of each event without the events that are nested in it, line by line."""
    lines = {}
    for event in events:
        lines.setdefault(event.line, []).append(event)
    for line in lines.values():
        line.sort(key=lambda event: (event.start, -event.end))
        open_events = []  # [event, up to when it is accounted for]
        for event in [*line, None]:
            while open_events and (event is None or open_events[-1][0].end <= event.start):
                done, since = open_events.pop()
                if done.end > since:
                    yield since, done.end, done.part
                if open_events:
                    open_events[-1][1] = max(open_events[-1][1], done.end)
            if event is not None:
                if open_events:
                    outer, since = open_events[-1]
                    if event.start > since:
                        yield since, event.start, outer.part
                    open_events[-1][1] = max(since, event.start)
                open_events.append([event, event.start])
