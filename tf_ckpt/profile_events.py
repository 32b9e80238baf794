"""The operations that ran in a profile: where, from when to when, and which part of the training step they belong to."""

import bisect
import re
from typing import NamedTuple

from tf_ckpt import profile_hlo
from tf_ckpt.profile_names import UNKNOWN, is_marked, part_of

# As TensorFlow's profiler tells an operation's name from other events: `path:Type`.
_OPERATION = re.compile(r"^([A-Za-z0-9.][A-Za-z0-9_.\\/>\-]*):([A-Z_][A-Za-z0-9_]*)$")
# They wait for what runs inside of them, which has events of its own.
_CONTAINERS = frozenset(
    {
        *("StatefulPartitionedCall", "PartitionedCall", "RemoteCall", "SymbolicGradient"),
        *("While", "StatelessWhile", "If", "StatelessIf", "Case"),
        *("XlaLaunch", "XlaLaunchV2", "_XlaLaunch", "XlaRun", "_XlaRun", "_XlaCompile", "_XlaMustCompile"),
        *("IteratorGetNext", "IteratorGetNextAsOptional"),
    }
)


class Event(NamedTuple):
    """One operation that ran, in picoseconds.

    Attributes:
        line: The thread or GPU stream.
        start: When it began.
        end: When it ended.
        part: See `profile_names`.
    """

    line: object
    start: int
    end: int
    part: str


def read(space, gpus=False):
    """Returns the `Event`s of an XSpace.

    Args:
        space: The XSpace.
        gpus: Whether the step ran on GPUs. Their kernels count then, and without any (no CUPTI) nothing does: what the CPU
            did meanwhile is to launch them.
    """
    hlo = profile_hlo.programs(space)
    kind, events = ("/device:GPU", _of_gpu) if gpus else ("/host:CPU", _of_cpu)
    return [event for plane in space.planes if plane.name.startswith(kind) for event in events(plane, hlo)]


def _of_gpu(plane, hlo):  # written from the format's description, and not tried on a GPU
    stats = {key: stat.name for key, stat in plane.stat_metadata.items()}
    for line in plane.lines:
        if line.name.startswith("Stream"):
            for event in line.events:
                values = _values(plane, event, stats, ("hlo_op", "hlo_module", "program_id", "tf_op"))
                part = _hlo_part(hlo, values) if "hlo_op" in values else part_of(str(values.get("tf_op", "")).split(":")[0])
                start = line.timestamp_ns * 1000 + event.offset_ps
                yield Event((plane.name, line.id), start, start + event.duration_ps, part)


def _of_cpu(plane, hlo):
    names = {key: _OPERATION.match(entry.name) for key, entry in plane.event_metadata.items()}
    paths = {key: m.group(1) for key, m in names.items() if m and m.group(2) not in _CONTAINERS}
    executors = {key for key, entry in plane.event_metadata.items() if entry.name.startswith("ExecutorState::Process")}
    stats = {key: stat.name for key, stat in plane.stat_metadata.items()}
    hlo_ids = {key for key, name in stats.items() if name == "hlo_op"}
    step_ids = {key for key, name in stats.items() if name == "id"}
    compiled, found, ours = [], [], set()
    for line in plane.lines:
        base, spans = line.timestamp_ns * 1000, []
        for event in line.events:
            if event.metadata_id in executors:
                number = next((s.int64_value or s.uint64_value for s in event.stats if s.metadata_id in step_ids), None)
                spans.append((base + event.offset_ps, base + event.offset_ps + event.duration_ps, number))
        spans.sort(key=lambda span: span[:2])
        starts = [span[0] for span in spans]
        for event in line.events:
            start = base + event.offset_ps
            path = paths.get(event.metadata_id)
            if path is not None:
                number = _enclosing(spans, starts, start)
                found.append((number, Event(line.id, start, start + event.duration_ps, part_of(path))))
                if is_marked(path):
                    ours.add(number)
            elif hlo_ids and any(s.metadata_id in hlo_ids for s in event.stats):
                values = _values(plane, event, stats, ("hlo_op", "hlo_module", "program_id"))
                compiled.append(Event(line.id, start, start + event.duration_ps, _hlo_part(hlo, values)))
    # `tf.data` runs its functions in executors of its own. The step's is the one with a re-run in it.
    ours.discard(None)
    return compiled + [event for number, event in found if number is None or not ours or number in ours]


def _enclosing(spans, starts, time):
    i = bisect.bisect_right(starts, time) - 1
    return spans[i][2] if i >= 0 and spans[i][1] >= time else None


def _hlo_part(hlo, values):
    module = hlo.get(values.get("program_id")) or hlo.get(values.get("hlo_module"), {})
    return module.get(str(values["hlo_op"]), UNKNOWN)


def _values(plane, event, stats, wanted):
    found = {}
    for stat in event.stats:
        name = stats[stat.metadata_id]
        if name in wanted:
            kind = stat.WhichOneof("value")
            value = getattr(stat, kind)
            found[name] = plane.stat_metadata[value].name if kind == "ref_value" else value
    return found
