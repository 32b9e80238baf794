"""Which part of a training step each instruction of an XLA program belongs to, by the names in its HLO module."""

from collections import defaultdict

from tf_ckpt import tf_internals
from tf_ckpt.profile_names import FORWARD, RECOMPUTE, UNKNOWN, part_of

_NO_WORK = frozenset(["parameter", "constant", "tuple", "get-tuple-element", "bitcast"])
_HOLDERS = frozenset(["fusion", "call", "custom-call"])
_PASSED_OVER = frozenset(["tuple", "while", "conditional"])


def programs(space):
    """Reads the programs of a profile that have run.

    Args:
        space: An XSpace.

    Returns:
        A dict from program id and from module name to a dict from an instruction's name to its part of the step.
    """
    ran = set()
    for plane in space.planes:
        ids = {key for key, stat in plane.stat_metadata.items() if stat.name == "program_id"}
        if ids:
            for line in plane.lines:
                for event in line.events:
                    ran.update(s.uint64_value or s.int64_value for s in event.stats if s.metadata_id in ids)
    found = {}
    for plane in space.planes:
        if plane.name != "/host:metadata" or not ran:
            continue
        protos = {key for key, stat in plane.stat_metadata.items() if stat.name in ("Hlo Proto", "hlo_proto")}
        for entry in plane.event_metadata.values():
            for stat in entry.stats:
                if entry.id in ran and stat.metadata_id in protos:
                    module = tf_internals.hlo_module(stat.bytes_value)
                    found[entry.id] = found[module.name] = _Module(module).parts()
    return found


class _Module:
    """An HLO module as a graph. A fusion counts for its root; what has no name takes that of its users."""

    def __init__(self, module):
        self.computations = {c.id: c for c in module.computations}
        self.instructions, self.home = {}, {}
        self.users, self.caller = defaultdict(list), {}
        for computation in module.computations:
            for i in computation.instructions:
                self.instructions[i.id] = i
                self.home[i.id] = computation
                for operand in i.operand_ids:
                    self.users[operand].append(i.id)
                for called in i.called_computation_ids:
                    self.caller.setdefault(called, i.id)
        self.names = {}

    def parts(self):
        return {i.name: self._part(number, i) for number, i in self.instructions.items() if i.opcode not in _NO_WORK}

    def _part(self, number, instruction):
        name = self._own(number)
        if name:
            return part_of(name)
        names = self._above(number) or self._of_users(number, {number}) or list(map(self._own, instruction.operand_ids))
        parts = [part_of(x) for x in names if x]
        if not parts:
            return UNKNOWN
        # Computed once and used by both, it is no re-run: it belongs to the forward run.
        return FORWARD if FORWARD in parts and RECOMPUTE in parts else parts[0]

    def _own(self, number):
        if number not in self.names:
            i = self.instructions[number]
            name = i.metadata.op_name
            if not name and i.opcode in _HOLDERS:
                name = next(self._inside(i.called_computation_ids, set()), "")
            self.names[number] = name
        return self.names[number]

    def _inside(self, called, seen):
        for number in called:
            if number in seen:
                continue
            seen.add(number)
            for i in self.computations[number].instructions:
                if i.metadata.op_name and i.opcode not in ("parameter", "constant"):
                    yield i.metadata.op_name
                yield from self._inside(i.called_computation_ids, seen)

    def _above(self, number):
        """Returns the name of the nearest caller that has one: random numbers are expanded into computations without."""
        caller = self.caller.get(self.home[number].id)
        while caller is not None:
            if self.instructions[caller].metadata.op_name:
                return [self.instructions[caller].metadata.op_name]
            caller = self.caller.get(self.home[caller].id)
        return []

    def _of_users(self, number, seen):
        names, queue = [], [number]
        while queue:
            here = queue.pop()
            users = self.users[here]
            if not users and self.home[here].id in self.caller:
                users = [self.caller[self.home[here].id]]
            for user in users:
                if user in seen:
                    continue
                seen.add(user)
                if self._own(user):
                    names.append(self._own(user))
                elif self.instructions[user].opcode not in _PASSED_OVER:
                    queue.append(user)
        return names
