"""From what the user asked for to a `Plan`: arguments checked, layers found, the strategy run."""

import collections.abc
import difflib
import inspect
import math
import numbers

import numpy as np

from tf_ckpt import calibration
from tf_ckpt.allocator import in_use, room
from tf_ckpt.budgets import gradients_wait, memory_bytes, optimizer_bytes, variable_bytes
from tf_ckpt.choosing import Candidate, chosen
from tf_ckpt.errors import CheckpointError
from tf_ckpt.graph import inner_part
from tf_ckpt.plan import MIB, Plan, allocated, unit_text
from tf_ckpt.stages import Stages
from tf_ckpt.strategies import budget, full, recursive, selective, sqrt
from tf_ckpt.strategies.budget import curve_of, least
from tf_ckpt.strategies.selective import by_cost
from tf_ckpt.strategies.tree import Range, tree_of, walk
from tf_ckpt.strategies.trim import without_idle

STRATEGIES = ("sqrt", "selective", "full", "budget", "recursive", "none")
_DEFAULT_BATCH = 32
_MOST_BATCH = 2**31 - 1  # of samples, so that bytes and FLOPs of a batch can be counted in 64 bits
_GOES_WITH = {"layers": "selective", "target": "selective", "memory": "budget", "levels": "recursive"}


def make_plan(level, model, strategy, *, batch_size=None, optimizer=None, curve=False, device=None, between=None, **options):
    """Returns the `Plan` for a model.

    Args:
        level: The model's `graph.Level`.
        model: The model.
        strategy: See `tf_ckpt.apply`.
        batch_size: See `tf_ckpt.apply`.
        optimizer: See `tf_ckpt.plan`.
        curve: Whether the plan shall hold the trade-off curve.
        device: See `tf_ckpt.apply`.
        between: See `Stages.chain`.
        **options: `layers`, `target`, `memory` and `levels`: see `tf_ckpt.apply`.
    """
    check_arguments(strategy, batch_size, options)
    device = calibration.of(device, strategy)
    stages = Stages(level)
    if isinstance(strategy, Plan):
        _check_parts(strategy.segments, dict(zip(stages.names, stages.nodes, strict=True)))
        return strategy
    stated = next((x.shape[0] for x in model.inputs if len(x.shape) and x.shape[0] is not None), None)
    if batch_size is None:
        batch_size = stated or _DEFAULT_BATCH
    elif stated and int(batch_size) != stated:
        raise CheckpointError(f"The model's inputs state the batch size {stated}. Received: batch_size={batch_size!r}")
    wanted = None if options.get("layers") is None else _chosen(stages, options["layers"])
    fixed = {"weight_bytes": variable_bytes(model.weights), "optimizer_bytes": optimizer_bytes(model, optimizer)}
    chain = stages.chain(int(batch_size), device, gradients_wait(model, optimizer), between)
    if callable(strategy):
        made, name = strategy(chain), getattr(strategy, "__name__", "callable")
        if isinstance(made, Plan):
            return made
        return Plan.of(chain, _ranges(made), name, **fixed)
    ranges = _named(chain, strategy, wanted, sum(fixed.values()), options)
    if curve and len(chain) > 1:
        held = sum(fixed.values())
        fixed["curve"] = [(held + allocated(chain, size), flops / chain.step_flops) for size, flops, _ in curve_of(chain)]
    return Plan.of(chain, ranges, strategy, **fixed)


def _named(chain, strategy, wanted, held, options):
    """Returns the ranges that a strategy makes. `held` are the bytes of weights and optimizer."""
    if strategy == "none":
        return []
    if strategy == "sqrt":
        return without_idle(chain, tree_of(sqrt(chain)))
    if strategy == "full":
        return without_idle(chain, tree_of(full(chain)))
    if strategy == "recursive":
        return without_idle(chain, recursive(chain, options.get("levels")))
    if strategy == "budget":
        return _budget(chain, options.get("memory"), held)
    if wanted is None:
        return without_idle(chain, by_cost(chain, options.get("target")))
    ranges = selective(chain, wanted)
    if not ranges:
        raise CheckpointError(
            "None of the chosen layers can be recomputed: embeddings and `Recompute` layers never are. "
            f"Received: layers={options['layers']!r}"
        )
    ranges = without_idle(chain, tree_of(ranges), most=math.inf)
    if not ranges:
        raise CheckpointError(
            "The chosen layers keep nothing that recompute could free: no trainable weight comes before them or is in them. "
            f"Received: layers={options['layers']!r}"
        )
    return ranges


def _budget(chain, memory, held):
    if not chain.names:
        raise CheckpointError(
            f"The model has no layers behind its inputs: there is nothing to recompute. Received: memory={memory!r}"
        )
    most = memory_bytes(memory, held + allocated(chain, chain.peak([]))) - held
    limit = room(most, chain.largest)
    ranges = budget(chain, limit) if most > 0 else None
    if ranges is None:
        tree = least(chain)
        needed = held + in_use(chain.peak(tree), chain.largest, cautious=True)
        size = math.ceil(10 * needed / MIB) / 10  # so that what it says will do
        given = f"{(most + held) / MIB:,.1f} MiB" if most + held >= MIB else f"{most + held:,} bytes"
        added = f"{100 * chain.added_flops(tree) / max(chain.step_flops, 1):.1f} % more {unit_text(chain.unit)}"
        raise CheckpointError(
            f"No plan fits. The least that a plan was found for is {size:,.1f} MiB, {held / MIB:,.1f} MiB of it weights and "
            f"optimizer, at {added}, with what an allocator may lose. Give more memory, or a smaller batch size than "
            f"{chain.batch_size}. Received: memory={memory!r}, which is {given}"
        )
    return without_idle(chain, ranges, limit)


def default_strategy(options):
    """Returns the strategy that is meant where none is given: the one that a given option goes with, or else `"sqrt"`."""
    return next((strategy for name, strategy in _GOES_WITH.items() if options.get(name) is not None), "sqrt")


def check_arguments(strategy, batch_size, options):
    """Raises the error for arguments of `apply` that are wrong for every model.

    Args:
        strategy: See `tf_ckpt.apply`.
        batch_size: See `tf_ckpt.apply`.
        options: Dict of the other arguments.
    """
    if not (isinstance(strategy, (str, Plan)) or callable(strategy)) or inspect.isclass(strategy):
        raise TypeError(
            f"`strategy` must be one of {STRATEGIES}, a `Plan`, or a callable. Received: strategy={strategy!r} "
            f"of type {type(strategy).__name__}"
        )
    if isinstance(strategy, str) and strategy not in STRATEGIES:
        near = difflib.get_close_matches(strategy, STRATEGIES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise CheckpointError(f"`strategy` must be one of {STRATEGIES}.{hint} Received: strategy={strategy!r}")
    for name, goes_with in _GOES_WITH.items():
        if options.get(name) is not None and strategy != goes_with:
            given = f"a `Plan` of {strategy.strategy!r}" if isinstance(strategy, Plan) else f"strategy={strategy!r}"
            raise CheckpointError(f"`{name}` goes with strategy={goes_with!r}. Received: {given}, {name}={options[name]!r}")
    target, levels = options.get("target"), options.get("levels")
    if target is not None:
        if not isinstance(target, numbers.Real) or isinstance(target, bool):
            raise TypeError(f"`target` must be a number. Received: target={target!r}")
        if not 0 < target < 1:
            raise CheckpointError(
                f"`target` must be a share of the activation bytes, above 0 and below 1. Received: {target!r}"
            )
        if options.get("layers") is not None:
            raise CheckpointError(f"Give `layers` or `target`, not both. Received: target={target!r} and `layers`")
    _check_count("levels", levels)
    _check_count("batch_size", batch_size, most=_MOST_BATCH)


def _check_parts(segments, nodes):
    """Refuses a plan, from a file, with a part that a layer has not, though it has another."""
    for s in segments:
        has = inner_part(nodes[s.layers[0]].operation)[0] if s.part and s.layers[0] in nodes else ""
        if has and s.part != has:
            raise CheckpointError(
                f"The plan does not fit the model: layer '{s.layers[0]}' has one part that can be recomputed alone, {has!r}. "
                f"Received: part={s.part!r}"
            )
        _check_parts(s.inside, nodes)


def _check_count(name, value, most=None):
    if value is not None and (not isinstance(value, numbers.Integral) or isinstance(value, bool)):
        raise TypeError(f"`{name}` must be an integer. Received: {name}={value!r}")
    if value is not None and value < 1:
        raise CheckpointError(f"`{name}` must be at least 1. Received: {name}={value!r}")
    if value is not None and most is not None and value > most:
        raise CheckpointError(f"`{name}` must be at most {most:,}. Received: {name}={value!r}")


def _ranges(made):
    """Checks what a strategy of the user's own returned."""
    made = getattr(made, "tolist", lambda: made)()  # an array
    pairs = list(made) if isinstance(made, collections.abc.Iterable) and not isinstance(made, (str, dict)) else [made]
    if not all(_is_pair(x) for x in pairs):
        raise TypeError(
            "A strategy must return a `Plan`, or a list of pairs (start, stop) of stages, as integers, or of "
            f"`tf_ckpt.strategies.Range`s. Received: {made!r}"
        )
    for r in walk(tree_of(pairs)):
        twice = [x for x in r.inside if (x.start, x.stop) == (r.start, r.stop) and not x.part and not r.part]
        if twice:
            raise CheckpointError(
                f"A segment must not hold itself: it would run twice and save no more. Received: {twice[0]!r} inside of {r!r}"
            )
    return pairs


def _is_pair(value, inside=False):
    """Whether a value is a pair (start, stop) or a `Range` whose numbers are whole, and so all that is inside of it."""
    if not isinstance(value, (list, tuple)) or len(value) < 2:
        return False
    if not all(isinstance(x, numbers.Integral) and not isinstance(x, bool) for x in value[:2]):
        return False
    if len(value) == 2:
        return True
    if not (isinstance(value, Range) or inside) or len(value) > 4:
        return False
    held = isinstance(value[2], (list, tuple)) and all(_is_pair(x, inside=True) for x in value[2])
    return held and (len(value) == 3 or isinstance(value[3], (bool, np.bool_)))


def _chosen(stages, layers):
    """Returns a boolean for each stage: whether `layers` names it."""
    calls = enumerate(zip(stages.names, stages.nodes, strict=True))
    found = [((k, k), Candidate(name, node.operation)) for k, (name, node) in calls]
    found += [((start, -stop), Candidate(name, stages.models[name], True)) for name, (start, stop) in stages.inside.items()]
    names = chosen([x for _, x in sorted(found, key=lambda x: x[0])], layers)
    taken = np.array([name in names for name in stages.names])
    for name in names & set(stages.inside):
        start, stop = stages.inside[name]
        taken[start:stop] = True
    return taken
