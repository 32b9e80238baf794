"""The strategies on chains made by hand: how many segments, how balanced, and where they are cut."""

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_chain import line, make, random_chain, random_tree, simulated_peak, tensor

from tf_ckpt.strategies import full, selective, sqrt
from tf_ckpt.strategies.full import pieces
from tf_ckpt.strategies.recursive import recursive
from tf_ckpt.strategies.selective import by_cost
from tf_ckpt.strategies.tree import Range, depth, walk
from tf_ckpt.strategies.trim import without_useless


@pytest.fixture(autouse=True)
def fresh_keras():
    """In place of conftest's: there is no Keras here to clean up."""


def all_plans(n):
    """Each way to cut `n` stages and to recompute some of the ranges in between."""
    for cuts in itertools.product([False, True], repeat=n - 1):
        bounds = [0, *(k for k, cut in enumerate(cuts, 1) if cut), n]
        for chosen in itertools.product([False, True], repeat=len(bounds) - 1):
            yield list(itertools.compress(itertools.pairwise(bounds), chosen))


def unet(depth, size=1):
    """Stage k's output goes to the next stage and, over all that is between, to stage n-1-k."""
    n = 2 * depth
    readers = [{k + 1, n - 1 - k} if k < depth - 1 else {k + 1} for k in range(n)]
    tensors = [tensor(k, *sorted(r), size=size, kept_by=r - {n}) for k, r in enumerate(readers)]
    return make(n, tensors, internal=np.full(n, 4.0), flops=np.ones(n), pruned_flops=np.ones(n))


# --- sqrt -------------------------------------------------------------------------------------------------------------


def test_equal_stages_give_about_sqrt_n_segments():
    segments = sqrt(line(64))
    assert 6 <= len(segments) <= 10
    assert 0.15 * line(64).peak([]) <= line(64).peak(segments) <= 0.20 * line(64).peak([])


@pytest.mark.parametrize("internal", [0.0, 3.0])
def test_peak_grows_like_sqrt_n(internal):
    sizes = [16, 64, 256, 1024]
    chains = [line(n, internal=np.full(n, internal)) for n in sizes]
    plans = [sqrt(chain) for chain in chains]
    peaks = [chain.peak(plan) for chain, plan in zip(chains, plans, strict=True)]
    exponent = np.polyfit(np.log(sizes), np.log(peaks), 1)[0]
    assert 0.4 < exponent < 0.56
    number = np.polyfit(np.log(sizes), np.log([len(plan) for plan in plans]), 1)[0]
    assert 0.3 < number < 0.7


@pytest.mark.parametrize("n", [8, 16, 64])
def test_the_last_stages_stay_plain(n):
    stop = sqrt(line(n))[-1][1]
    assert n - np.sqrt(2 * n) - 1 <= stop < n


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_is_better_on_a_line(seed):
    rng = np.random.default_rng(seed)
    chain = line(8, size=rng.integers(1, 30, 8), internal=rng.integers(0, 30, 8))
    assert chain.peak(sqrt(chain)) <= 1.02 * min(chain.peak(plan) for plan in all_plans(8))


@pytest.mark.parametrize("seed", range(12))
def test_hardly_a_plan_is_better_with_skips(seed):
    chain = random_chain(np.random.default_rng(seed), weights=False)
    best = min(chain.peak(plan) for plan in all_plans(len(chain)) if all(chain.allowed(*s) for s in plan))
    assert chain.peak(sqrt(chain)) <= 1.25 * best


@pytest.mark.parametrize("seed", range(4))
def test_unequal_stages_are_balanced_by_bytes(seed):
    sizes = np.random.default_rng(seed).integers(1, 100, 64)
    chain = line(64, size=sizes)
    segments = sqrt(chain)
    assert chain.peak(segments) <= 0.2 * chain.peak([])
    kept = 0.0
    for start, stop in segments:  # what was kept before and what the segment needs: about the same at each moment
        kept += chain.boundary(stop)[start]
        assert kept + chain.stored(start, stop) <= 1.01 * chain.peak(segments)
    assert kept <= sizes[[stop - 1 for _, stop in segments]].sum()


def test_a_large_stage_gets_a_segment_of_few_stages():
    sizes = np.where(np.arange(32) == 15, 8, 1)
    chain = line(32, size=sizes)
    segments = sqrt(chain)
    assert chain.peak(segments) < 0.5 * chain.peak([])
    assert not any(stop == 16 for _, stop in segments)  # its output would be kept
    (large,) = [s for s in segments if s[0] <= 15 < s[1]]
    others = [stop - start for start, stop in segments if start < 15 and (start, stop) != large]
    assert large[1] - large[0] < max(others)


def test_cuts_are_where_few_bytes_cross():
    sizes = np.where(np.arange(64) % 4 == 3, 1, 20)  # a block of wide stages ends in a narrow one
    segments = sqrt(line(64, size=sizes))
    assert len(segments) >= 4
    assert all(stop % 4 == 0 for _, stop in segments[:-1])
    assert segments[-1][1] > 56  # the last one only makes the plain tail fit


def test_of_two_cuts_alike_the_one_after_a_product():
    chain = line(48, expensive_end=range(0, 48, 2))
    segments, others = sqrt(chain), sqrt(line(48))
    assert all(stop % 2 == 1 for _, stop in segments)
    assert not all(stop % 2 == 1 for _, stop in others)
    assert chain.peak(segments) == line(48).peak(others)


def test_a_cut_with_fewer_bytes_beats_one_after_a_product():
    sizes = np.where(np.arange(32) % 2, 1.0, 2.0)
    segments = sqrt(line(32, size=sizes, expensive_end=range(0, 32, 2)))
    assert all(stop % 2 == 0 for _, stop in segments)


def test_a_skip_counts_once_however_many_segments_it_passes():
    chain = unet(16)
    segments = sqrt(chain)
    assert len(segments) >= 3
    keeps = sum(chain.boundary(stop)[start] for start, stop in segments)
    made = sum(t.size for t in chain.tensors if any(start <= t.producer < stop for start, stop in segments))
    assert keeps <= made
    assert chain.peak(segments) == simulated_peak(chain, segments)
    assert chain.peak(segments) < 0.5 * chain.peak([])


def test_fixed_stages_groups_and_nested_models_are_kept_to():
    chain = line(
        40,
        internal=np.full(40, 4.0),
        fixed=[0, 17],
        groups=np.where(np.arange(40) < 30, 0, 1),
        ranges=[(3, 9), (20, 26)],
    )
    segments = sqrt(chain)
    assert len(segments) >= 4
    assert all(chain.allowed(*s) for s in segments)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(segments))


def test_exact_cuts_are_taken_if_they_cost_little_and_not_otherwise():
    free = line(64)
    little = line(64, joins_after=range(64), joins_before=range(0, 64, 2))
    assert all(little.exact_cuts[stop] for _, stop in sqrt(little))
    assert little.peak(sqrt(little)) <= 1.25 * free.peak(sqrt(free))
    only_one = line(64, joins_after=range(64), joins_before=[k for k in range(64) if k != 32])
    assert only_one.peak(sqrt(only_one)) <= free.peak(sqrt(free))  # one cut would halve the memory, no more


def test_a_segment_without_which_the_peak_is_the_same_is_not_recomputed():
    sizes = np.array([1, 1, 1, 1, 1, 1, 100, 1])
    chain = line(8, internal=sizes)
    segments = sqrt(chain)
    assert all(chain.peak([s for s in segments if s != one]) > chain.peak(segments) for one in segments)


@pytest.mark.parametrize("n", [1, 2])
def test_nothing_to_gain(n):
    assert sqrt(line(n)) == []


def test_weight_gradients_are_planned_for():
    # Late weights weigh on early segments' re-runs: those must be smaller.
    weights = np.where(np.arange(32) >= 24, 2.0, 0.0)
    heavy, light = line(32, weights=weights), line(32)
    first = [sqrt(chain)[0] for chain in (heavy, light)]
    assert heavy.peak(sqrt(heavy)) <= heavy.peak(sqrt(light))
    assert first[0][1] <= first[1][1]


@pytest.mark.parametrize("seed", range(8))
def test_hardly_a_plan_is_better_with_transients(seed):
    rng = np.random.default_rng(seed)
    extras = {name: rng.integers(0, 20, 8) for name in ("forward_extra", "taped_extra", "backward_extra")}
    sizes = {"size": rng.integers(1, 30, 8), "internal": rng.integers(0, 30, 8), "weights": rng.integers(0, 9, 8)}
    chain = line(8, **sizes, **extras)
    assert chain.peak(sqrt(chain)) <= 1.12 * min(chain.peak(plan) for plan in all_plans(8))


def test_what_comes_right_before_the_loss_is_recomputed_only_if_that_saves_much():
    assert sqrt(line(1, internal=[4.0])) == []
    assert sqrt(line(1, internal=[90.0], taped_extra=[0.0])) == []  # its re-run keeps as much
    large = line(6, internal=[1.0] * 5 + [4.0], size=[1, 1, 1, 1, 1, 40])
    assert large.peak(sqrt(large)) <= 1.25 * min(large.peak(plan) for plan in all_plans(6))


def test_a_chain_without_stages_has_nothing_to_recompute():
    chain = line(0)
    assert [len(strategy(chain)) for strategy in (sqrt, full, recursive, by_cost)] == [0, 0, 0, 0]


# --- recursive --------------------------------------------------------------------------------------------------------


def boundaries_at_once(tree):
    """The most boundaries that are held at one time: in a run, those before a segment stay while it runs again."""
    return max((number + max(boundaries_at_once(r.inside), 1) for number, r in enumerate(tree)), default=0)


@pytest.mark.parametrize("internal", [0.0, 3.0])
def test_recursive_memory_grows_like_log_n(internal):
    sizes = 2 ** np.arange(4, 11)
    chains = [line(n, internal=np.full(n, internal)) for n in sizes]
    plans = [recursive(chain) for chain in chains]
    peaks = np.array([chain.peak(plan) for chain, plan in zip(chains, plans, strict=True)])
    slope, base = np.polyfit(np.log2(sizes), peaks, 1)
    assert np.abs(base + slope * np.log2(sizes) - peaks).max() < 0.2 * peaks.mean()
    assert slope < 0.5 * (1 + internal)  # bytes for each doubling, of a stage's 1 + internal
    assert np.polyfit(np.log(sizes), np.log(peaks), 1)[0] < 0.2  # sqrt's is 0.5
    assert all(boundaries_at_once(plan) <= 2 * np.log2(n) for n, plan in zip(sizes, plans, strict=True))
    # A log of n re-runs, too: neither O(1) memory at n re-runs, nor more levels than pay.
    assert all(c.added_flops(p) / n <= np.log2(n) for c, p, n in zip(chains, plans, sizes, strict=True))


def test_more_levels_need_less_memory_and_more_flops():
    chain = line(256, internal=np.full(256, 3.0))
    plans = [recursive(chain, levels) for levels in range(1, 6)]
    assert [depth(plan) for plan in plans] == [1, 2, 3, 4, 5]
    peaks = [chain.peak(plan) for plan in plans]
    assert all(more > less for more, less in itertools.pairwise(peaks))
    reruns = [chain.added_flops(plan) / 256 for plan in plans]
    assert all(level - 1 < share < level for level, share in enumerate(reruns, 1))
    assert peaks[0] <= 1.05 * chain.peak(sqrt(chain))
    # As the theory has it: with m boundaries and l levels, C(m + l, l) stretches.
    assert peaks[1] < 2.5 * 4 * 256 ** (1 / 3)


def all_trees(start, stop):
    if start == stop:
        yield ()
        return
    for rest in all_trees(start + 1, stop):
        yield rest
    for cut in range(start + 1, stop):
        for inside, rest in itertools.product(all_trees(start, cut), all_trees(cut, stop)):
            yield (Range(start, cut, inside), *rest)


def test_more_levels_than_can_help_are_not_tried():
    chain = line(12, internal=np.full(12, 3.0))
    assert recursive(chain, 10**9) == recursive(chain, len(chain))


@pytest.mark.parametrize("seed", range(4))
def test_hardly_a_tree_is_better_than_recursive_with_any_number_of_levels(seed):
    rng = np.random.default_rng(seed)
    chain = line(7, size=rng.integers(1, 9, 7), internal=rng.integers(0, 9, 7))
    assert chain.peak(recursive(chain, 6)) <= 1.15 * min(chain.peak(tree) for tree in all_trees(0, 7))


@pytest.mark.parametrize("seed", range(20))
def test_without_useless_leaves_what_lowers_the_peak(seed):
    chain = random_chain(np.random.default_rng(seed), weights=True, extras=True)
    tree = random_tree(np.random.default_rng(seed), chain)
    left = without_useless(chain, tree)
    assert chain.peak(left) <= chain.peak(tree)
    assert chain.added_flops(left) <= chain.added_flops(tree)
    assert {r[:2] for r in walk(left)} <= {r[:2] for r in walk(tree)}
    for r in walk(left):
        assert chain.peak(without(left, r)) > chain.peak(left)


def without(tree, segment):
    kept = []
    for r in tree:
        inside = without(r.inside, segment)
        kept += inside if r == segment else [r._replace(inside=inside)]
    return tuple(kept)


def test_every_segment_of_recursive_lowers_the_peak():
    chain = line(64, size=np.random.default_rng(0).integers(1, 9, 64), internal=np.full(64, 3.0))
    plan = recursive(chain)
    assert depth(plan) > 1
    assert all(chain.peak(without(plan, r)) > chain.peak(plan) for r in walk(plan))


def test_recursive_keeps_to_what_may_be_recomputed():
    groups = np.where(np.arange(60) < 45, 0, 1)
    chain = line(60, internal=np.full(60, 4.0), fixed=[0, 27], groups=groups, ranges=[(3, 9), (30, 40), (32, 36)])
    plan = recursive(chain)
    assert depth(plan) > 1
    assert all(chain.allowed(r.start, r.stop) for r in walk(plan))
    assert chain.peak(plan) < 0.5 * chain.peak([])
    inexact = line(64, internal=np.full(64, 3.0), joins_after=range(64), joins_before=[20, 41])
    assert all(inexact.exact_cuts[r.start] and inexact.exact_cuts[r.stop] for r in walk(recursive(inexact)))
    none = line(16, internal=np.full(16, 3.0), fixed=range(16))
    assert recursive(none) == ()


def test_recursive_cuts_where_few_bytes_cross():
    sizes = np.where(np.arange(64) % 4 == 3, 1, 20)
    plan = recursive(line(64, size=sizes))
    outer = [r.stop for r in plan]
    assert len(outer) >= 2
    assert sum(stop % 4 == 0 for stop in outer) >= len(outer) - 1


@pytest.mark.parametrize("chain", [unet(16), line(40, weights=np.arange(40.0))])
def test_recursive_with_skips_and_weights(chain):
    plan = recursive(chain)
    assert chain.peak(plan) == simulated_peak(chain, plan)
    assert chain.peak(plan) <= chain.peak(sqrt(chain))


@pytest.mark.parametrize("n", [1, 2])
def test_nothing_to_gain_with_recursive(n):
    assert recursive(line(n)) == ()


@pytest.mark.parametrize("levels", [0, -3])
def test_recursive_refuses_less_than_one_level(levels):
    with pytest.raises(ValueError, match=rf"`levels` must be at least 1. Received: levels={levels}"):
        recursive(line(4), levels)


@pytest.mark.parametrize("levels", [1.5, "2", True])
def test_recursive_refuses_what_is_no_number_of_levels(levels):
    with pytest.raises(TypeError, match="Received: levels="):
        recursive(line(4), levels)


# --- full -------------------------------------------------------------------------------------------------------------


def blocks(n):
    """Residual blocks of two stages: a block's input goes to both. The first has none: data are kept anyway."""
    tensors = [tensor(k, *([k + 1, k + 2] if k % 2 else [k + 1])) for k in range(2 * n)]
    tensors[-1] = tensor(2 * n - 1, 2 * n, kept_by=[])
    return make(2 * n, [tensor(-1, 0), *tensors], internal=np.ones(2 * n))


def test_full_cuts_wherever_one_tensor_crosses():
    chain = line(5, internal=np.ones(5))
    assert full(chain) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert full(blocks(4)) == [(0, 1), (1, 2), (2, 4), (4, 6)]  # within a block two cross; the last one stays plain


def test_full_counts_differentiable_tensors_only():
    chain = line(4, internal=np.ones(4))
    ids = tensor(0, 3, differentiable=False)
    assert full(make(4, [*chain.tensors, ids], internal=np.ones(4))) == [(0, 1), (1, 2), (2, 3)]
    assert full(make(4, [*chain.tensors, tensor(0, 3)])) == []


def test_full_joins_a_stretch_that_frees_nothing_to_the_next():
    assert full(line(5)) == [(0, 2), (2, 4)]  # each keeps only its input, which is kept for it anyway
    tensors = [tensor(0, 1, kept_by=[]), tensor(1, 2), tensor(2, 3)]
    assert full(make(3, tensors)) == []


def test_full_saves_on_convolution_normalisation_activation():
    tensors = []
    for k in range(0, 18, 3):
        tensors += [tensor(k, k + 1), tensor(k + 1, k + 2, kept_by=[]), tensor(k + 2, k + 3, kept_by=[k + 2, k + 3])]
    chain = make(18, tensors)
    assert full(chain) == [(0, 2), (2, 5), (5, 8), (8, 11), (11, 14), (14, 17)]
    assert chain.peak(full(chain)) == 9 < chain.peak([]) == 14


def test_full_goes_round_what_must_stay_plain():
    chain = blocks(4)
    tensors, internal = chain.tensors, chain.internal
    assert full(make(8, tensors, internal=internal, fixed=[2])) == [(0, 1), (1, 2), (3, 4), (4, 6)]
    groups = [0, 0, 0, 1, 1, 1, 1, 1]
    assert full(make(8, tensors, internal=internal, groups=groups)) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 6)]


def test_full_of_one_stage_or_one_block():
    assert full(line(1)) == []
    assert full(make(2, [tensor(0, 1, 2, kept_by=[1]), tensor(1, 2, kept_by=[])], internal=[1, 1])) == [(0, 1)]


# --- pieces and selective ---------------------------------------------------------------------------------------------


def test_pieces_joins_what_is_adjacent_and_may_be_one_segment():
    chain = make(9, fixed=[2], groups=[0, 0, 0, 0, 0, 0, 1, 1, 1])
    assert pieces(chain, range(9)) == [(0, 2), (3, 6), (6, 9)]
    assert pieces(chain, [0, 1, 4, 7]) == [(0, 2), (4, 5), (7, 8)]
    assert pieces(chain, [2]) == []
    assert pieces(chain, []) == []


def test_pieces_respects_nested_models():
    chain = make(6, ranges=[(1, 4)])
    assert pieces(chain, range(6)) in ([(0, 1), (1, 6)], [(0, 1), (1, 4), (4, 6)])
    assert pieces(chain, [2, 3, 4]) == [(2, 4), (4, 5)]


def test_selective_takes_the_chosen_stages():
    chain = line(6)
    assert selective(chain, [True, True, False, False, True, False]) == [(0, 2), (4, 5)]
    assert selective(chain, [False] * 6) == []


# --- the package ------------------------------------------------------------------------------------------------------


def by_cost_chains():
    rng = np.random.default_rng(8)
    yield from (random_chain(rng, weights=True, extras=True) for _ in range(40))
    arrays = {"part_internal": np.full(8, 1.0), "part_names": ["attention"] * 8, "part_flops": np.full(8, 0.01)}
    yield line(8, internal=np.full(8, 4.0), weights=np.full(8, 1000.0), **arrays)


@pytest.mark.parametrize("target", [None, 0.7, 0.4, 0.05])
def test_selective_recomputes_nothing_that_saves_nothing(target):
    planned = 0
    for chain in by_cost_chains():
        plan, plain = by_cost(chain, target), chain.peak([])
        peak = max(chain.peak(plan), (target or 0.5) * plain)
        for r in plan:
            assert peak < plain
            assert chain.peak([x for x in plan if x != r]) > peak
        planned += bool(plan)
    assert planned > 5
    assert plan == ()  # the last chain's peak is that of its weight gradients


def test_selective_does_not_take_more_than_helps_if_its_target_is_out_of_reach():
    # Short stretches, each of which keeps a large argument that nobody else needs: all of them cost more than none.
    links = [tensor(k, k + 1, size=1 if k % 3 else 9, kept_by=[k + 1] if k % 3 else []) for k in range(29)]
    chain = make(30, [*links, tensor(29, 30, n=30)], internal=np.full(30, 4.0), flops=np.ones(30), pruned_flops=np.ones(30))
    plan = by_cost(chain, 0.01)
    assert chain.peak(plan) < chain.peak([])
    assert all(chain.peak([x for x in plan if x != r]) > chain.peak(plan) for r in plan)


def test_selective_takes_cuts_that_round_otherwise_only_to_reach_its_target():
    exact = line(32, internal=np.full(32, 4.0))
    chain = line(32, internal=np.full(32, 4.0), joins_after=range(12, 32), joins_before=range(12, 32))
    low, high = by_cost(chain, 0.45), by_cost(chain, 0.9)
    assert chain.peak(low) < 0.6 * chain.peak([])
    assert chain.peak(low) <= 1.1 * exact.peak(by_cost(exact, 0.45))
    assert not all(chain.exact_cuts[r.start] and chain.exact_cuts[r.stop] for r in low)
    assert high
    assert all(chain.exact_cuts[r.start] and chain.exact_cuts[r.stop] for r in high)


def test_strategies_need_numpy_only():
    package = Path(sys.modules["tf_ckpt"].__file__).parent
    script = (
        "import sys, types\n"
        "stub = types.ModuleType('tf_ckpt')\n"  # in place of the package, whose __init__ imports Keras
        f"stub.__path__ = [{str(package)!r}]\n"
        "sys.modules['tf_ckpt'] = stub\n"
        "import tf_ckpt.strategies\n"
        "import tf_ckpt.strategies.budget, tf_ckpt.strategies.recursive, tf_ckpt.strategies.selective\n"
        "loaded = {'tensorflow', 'keras', 'rich'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        "assert 'numpy' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
