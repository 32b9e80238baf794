"""Which part of a training step an operation belongs to, by its name.

`replay` puts a re-run under `<scope>/tf_ckpt_recompute/<segment>/`. The gradients of these operations are called
`gradient_tape/<the same>`, and are no overhead: the plain step has them too. A function that is inlined puts its caller's
name in front, so that a re-run inside of a backward function is `gradient_tape/.../PartitionedCall/<its own name>`.
"""

import functools
import re

FORWARD, RECOMPUTE, BACKWARD, UNKNOWN = "forward", "recompute", "backward", "unknown"
MARKER = "tf_ckpt_recompute"
_TAPE = re.compile(r"gradient_tape(_\d+)?$")
_CALL = re.compile(r"(Stateful)?PartitionedCall(_\d+)?$")


@functools.lru_cache(maxsize=2**16)
def part_of(path):
    """Returns `FORWARD` (also for losses and the optimizer), `RECOMPUTE`, `BACKWARD`, or `UNKNOWN` for no name."""
    if not path:
        return UNKNOWN
    scopes = path.split("/")
    marks = [i for i, scope in enumerate(scopes) if scope == MARKER]
    above = scopes[: marks[-1]] if marks else scopes
    tapes = [i for i, scope in enumerate(above) if _TAPE.match(scope)]
    if not tapes:
        return RECOMPUTE if marks else FORWARD
    # In a function of its own, a name of a re-run begins with a call, and so does that of its gradient: see `_Place`.
    inlined = any(_CALL.match(scope) for scope in above[tapes[-1] + 2 :])
    return RECOMPUTE if marks and inlined else BACKWARD


def is_marked(path):
    """Returns True for a re-run's operation or a gradient of one."""
    return MARKER in path
