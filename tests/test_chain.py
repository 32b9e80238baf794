"""`Chain`, the arithmetic that strategies plan on, checked on chains made by hand and against a simulation."""

import dataclasses
import itertools

import numpy as np
import pytest

from tf_ckpt.strategies import Chain
from tf_ckpt.strategies.chain import Tensor
from tf_ckpt.strategies.tree import Range, depth, tree_of, walk


@pytest.fixture(autouse=True)
def fresh_keras():
    """In place of conftest's: there is no Keras here to clean up."""


def make(n, tensors=(), **arrays):
    """A chain of `n` stages that keep and cost nothing but what is given."""
    floats = ["internal", "flops", "pruned_flops", "backward_flops", "weights", "part_flops"]
    floats += ["forward_extra", "taped_extra", "backward_extra", "part_taped_extra", "part_backward_extra"]
    flags = ("fixed", "expensive_end", "joins_before", "joins_after")
    given = {name: np.array(arrays.get(name, np.zeros(n)), float) for name in floats}
    given |= {name: np.isin(np.arange(n), arrays.get(name, ())) for name in flags}
    given["part_internal"] = np.array(arrays.get("part_internal", given["internal"]), float)
    groups = np.array(arrays.get("groups", np.zeros(n)), int)
    names = tuple(arrays.get("names", (f"s{k}" for k in range(n))))
    return Chain(
        names=names,
        groups=groups,
        ranges=tuple(arrays.get("ranges", ())),
        part_names=tuple(arrays.get("part_names", [""] * n)),
        tensors=tuple(tensors),
        batch_size=1,
        **given,
    )


def tensor(producer, *readers, size=1, kept_by=None, n=None, **more):
    """A tensor from one stage to others; the stages `kept_by`, by default all, read it in their backward pass.

    Reader `n`, where it is given, is the loss.
    """
    inner = tuple(readers if kept_by is None else kept_by)
    needed = any(stage != n for stage in inner)
    return Tensor(size, producer, tuple((r, 1) for r in readers), needed, inner, **more)


def line(n, size=1, **arrays):
    """Stages one after the other: each needs its input in its backward pass, and the last one's output goes to the loss."""
    sizes = np.broadcast_to(size, n)
    links = [tensor(k, k + 1, size=int(sizes[k]), n=n) for k in range(n)]
    return make(n, links, **{"flops": np.ones(n), "pruned_flops": np.ones(n), "backward_flops": np.full(n, 2.0), **arrays})


# --- bytes ------------------------------------------------------------------------------------------------------------


def test_stored_counts_what_is_inside_and_what_is_needed_once():
    chain = make(
        3, [tensor(-1, 0, size=1000), tensor(0, 1, 2, size=10), tensor(1, 2, size=100, kept_by=[])], internal=[1, 2, 4]
    )
    assert [[chain.stored(i, j) for j in range(i, 4)] for i in range(4)] == [[0, 11, 13, 17], [0, 2, 6], [0, 4], [0]]
    np.testing.assert_array_equal(chain.stored(np.arange(4), 3), [17, 6, 4, 0])


def test_a_gradient_that_two_tensors_share_counts_once():
    # Stage 3 adds up what stages 0 and 2 made, and hands its gradient on to both.
    tensors = [
        tensor(0, 1, 3, size=10, passed=(3,)),
        tensor(1, 2, size=10),
        tensor(2, 3, size=10, passed=(3,)),
        tensor(3, 4, size=10),
        tensor(4, 5, size=10, n=5),
    ]
    np.testing.assert_array_equal(make(5, tensors).upstream, [0, 10, 20, 10, 10, 10])
    apart = [dataclasses.replace(t, passed=()) for t in tensors]
    np.testing.assert_array_equal(make(5, apart).upstream, [0, 10, 20, 20, 10, 10])


def test_a_re_run_that_nobody_reads_takes_only_what_is_left_of_it():
    # As the output projection before a dropout: the mask is made again, what it is put on is not.
    def chain(spared):
        tensors = [tensor(0, 1), tensor(1, 2, kept_by=[], spared=spared), tensor(2, 3, kept_by=[])]
        return make(3, tensors, flops=[4, 16, 2], pruned_flops=[3, 5, 1], internal=[1, 1, 1])

    assert chain(()).rerun_flops(0, 3) == 4 + 16 + 1
    assert chain((2,)).rerun_flops(0, 3) == 4 + 5 + 1
    assert chain((2,)).read(3) == [True, False, False]


def test_crossing_holds_a_skip_at_each_cut_up_to_its_last_reader():
    skip, link, given = tensor(0, 1, 3), tensor(1, 2), tensor(-1, 0, 3)
    chain = make(4, [skip, link, given, tensor(3, 4)])
    assert [chain.crossing(cut) for cut in range(4)] == [[], [skip], [skip, link], [skip]]
    assert chain.crossing(4) == [chain.tensors[3]]


def test_boundary_counts_each_tensor_once_however_long_its_skip():
    chain = make(4, [tensor(0, 1, 2, 3, size=10), tensor(1, 2, size=100), tensor(2, 3, size=1000), tensor(3, 4, size=1)])
    np.testing.assert_array_equal(chain.boundary(0), [0])
    np.testing.assert_array_equal(chain.boundary(2), [110, 100, 0])
    np.testing.assert_array_equal(chain.boundary(3), [1010, 1000, 1000, 0])
    np.testing.assert_array_equal(chain.boundary(4), [1, 1, 1, 1, 0])


def test_gradients_are_those_of_all_later_stages():
    np.testing.assert_array_equal(make(3, weights=[1, 10, 100]).gradients, [111, 110, 100, 0])


def test_tensor_last():
    assert tensor(2, 5, 3).last == 5
    assert tensor(2).last == 2


# --- what may be a segment --------------------------------------------------------------------------------------------


def allowed(chain):
    n = len(chain)
    return {(i, j) for i in range(-1, n + 2) for j in range(-1, n + 2) if chain.allowed(i, j)}


def all_ranges(*bounds):
    return {(i, j) for low, high in bounds for i in range(low, high) for j in range(i + 1, high + 1)}


def test_any_range_of_an_ordinary_chain_is_allowed():
    assert allowed(make(4)) == all_ranges((0, 4))


def test_no_segment_holds_a_fixed_stage():
    assert allowed(make(5, fixed=[0, 3])) == all_ranges((1, 3), (4, 5))


def test_no_segment_mixes_groups():
    assert allowed(make(5, groups=[0, 0, 1, 1, 0])) == all_ranges((0, 2), (2, 4), (4, 5))


def test_a_segment_holds_all_of_a_nested_model_or_lies_within_it():
    chain = make(6, ranges=[(1, 4)])
    assert allowed(chain) == {
        (i, j) for i, j in all_ranges((0, 6)) if (i <= 1 and j >= 4) or (i >= 1 and j <= 4) or j <= 1 or i >= 4
    }
    assert not chain.allowed(0, 2)
    assert not chain.allowed(3, 5)


def test_nested_models_in_nested_models():
    chain = make(8, ranges=[(1, 7), (2, 4), (4, 6)])
    want = {
        (i, j)
        for i, j in all_ranges((0, 8))
        if all((i <= a and b <= j) or (a <= i and j <= b) or j <= a or b <= i for a, b in chain.ranges)
    }
    assert allowed(chain) == want
    assert (2, 6) in want
    assert (3, 6) not in want


def test_starts_are_the_allowed_ones():
    chain = make(9, fixed=[4], groups=[0, 0, 0, 1, 1, 1, 1, 1, 2], ranges=[(1, 3), (5, 8)])
    for stop in range(1, 10):
        assert list(chain.starts(stop)) == [i for i in range(stop) if chain.allowed(i, stop)]


# --- cuts -------------------------------------------------------------------------------------------------------------


def uses(producer, *pairs, **more):
    return Tensor(1, producer, pairs, True, tuple(s for s, _ in pairs), **more)


@pytest.mark.parametrize(
    ("chain", "inexact"),
    [
        (make(4, [uses(0, (1, 1), (3, 1))]), []),  # two gradients: one order only
        (make(4, [uses(0, (3, 3))]), []),  # three, in one stage
        (make(4, [uses(0, (1, 1), (2, 1), (3, 1))]), []),  # three stages: summed up one by one, as in the plain model
        (make(4, [uses(0, (1, 2), (3, 1))]), [2, 3]),
        (make(4, [uses(-1, (0, 1), (2, 2))]), [1, 2]),
        (make(4, [uses(0, (1, 2), (3, 1), differentiable=False)]), []),
        (make(4, [uses(0, (1, 1))], joins_after=[0], joins_before=[1]), [1]),
        (make(4, [uses(0, (3, 1))], joins_after=[0], joins_before=[3]), [1, 2, 3]),
        (make(4, [uses(0, (1, 1), (3, 1))], joins_after=[0], joins_before=[1, 3]), []),  # of two readers none is joined
        (make(4, [uses(0, (1, 1))], joins_after=[0], joins_before=[2]), []),
        (make(4, [uses(0, (1, 1))], joins_after=[1], joins_before=[1]), []),
        (make(4, [uses(3, (4, 1))], joins_after=[3], joins_before=[0]), []),  # the loss is not ours to join
        (make(4, [uses(-1, (0, 1))], joins_before=[0]), []),
    ],
)
def test_exact_cuts(chain, inexact):
    assert list(np.flatnonzero(~chain.exact_cuts)) == inexact


def test_weights_of_more_than_two_calls_are_summed_up_in_one_order():
    chain = dataclasses.replace(make(6, [tensor(k, k + 1) for k in range(6)]), shared=((1, 2, 4),))
    assert list(np.flatnonzero(~chain.exact_cuts)) == [2, 3, 4]


# --- FLOPs ------------------------------------------------------------------------------------------------------------


def test_a_segment_that_ends_in_a_product_does_not_pay_for_it():
    # gelu, product, gelu, product: a product's backward pass reads its input only.
    links = [tensor(0, 1), tensor(1, 2), tensor(2, 3), tensor(3, 4, kept_by=[])]
    chain = make(4, links, flops=[1, 100, 1, 100], pruned_flops=[1, 0, 1, 0])
    assert chain.rerun_flops(0, 4) == 102
    assert chain.rerun_flops(0, 2) == 1
    assert chain.rerun_flops(2, 4) == 1
    assert chain.rerun_flops(1, 3) == 101
    assert chain.rerun_flops(1, 2) == 0


def test_what_only_leads_to_pruned_outputs_is_pruned_too():
    links = [tensor(0, 1), tensor(1, 2, kept_by=[]), tensor(2, 3, kept_by=[]), tensor(3, 4, kept_by=[])]
    chain = make(4, links, flops=[1, 10, 100, 1000], pruned_flops=[1, 0, 0, 0])
    assert chain.rerun_flops(0, 4) == 1  # only stage 1's backward pass reads anything: what stage 0 makes


def test_a_stage_that_keeps_something_runs_and_so_does_what_it_takes():
    links = [tensor(0, 1, kept_by=[]), tensor(1, 2, kept_by=[]), tensor(2, 3, kept_by=[])]
    chain = make(3, links, flops=[1, 10, 100], pruned_flops=[0, 0, 60])
    assert chain.rerun_flops(0, 3) == 71
    assert chain.rerun_flops(0, 2) == 0


def test_a_skip_out_of_a_segment_does_not_make_it_run():
    links = [tensor(0, 1, 3, kept_by=[3]), tensor(1, 2, kept_by=[]), tensor(2, 3, kept_by=[])]
    chain = make(4, links, flops=[1, 10, 100, 1000], pruned_flops=np.zeros(4))
    assert chain.rerun_flops(0, 3) == 0
    assert chain.rerun_flops(0, 4) == 1


def test_step_flops():
    assert make(2, flops=[1, 2], backward_flops=[10, 20]).step_flops == 33


# --- peak -------------------------------------------------------------------------------------------------------------


def simulated_peak(chain, ranges):
    """Says of each thing from when to when it is in memory, and returns the most that is there at once.

    The step is a list of events: a stage's forward run or backward pass, each within one run of a stretch: the model's own,
    or the re-run of a segment. The things are what one run of a stage made, and gradients.
    """
    n = len(chain)
    events, things = [], []  # (cut of the gradients that are there, bytes of the event itself), (first event, last, bytes)

    def run(start, stop, tree, cut):
        segments = [r for r in tree if not r.part]
        within = {k: r for r in segments for k in range(r.start, r.stop)}
        parts = {r.start for r in tree if r.part}
        ran, undone, reread = {}, {}, {}  # event of each stage's forward run, of its backward pass; last event of a segment
        for k in range(start, stop):
            ran[k] = len(events)
            extra = chain.part_taped_extra if k in parts else chain.forward_extra if k in within else chain.taped_extra
            events.append((cut, extra[k]))
        if stop == n and cut is None:
            events.append((n, sum(t.size for t in chain.tensors if t.producer >= 0 and t.last == n and t.differentiable)))
        loss, k = len(events) - 1, stop - 1
        while k >= start:
            if k in within:
                r = within[k]
                run(r.start, r.stop, r.inside, r.stop)
                reread[r] = len(events) - 1
                k = r.start
            else:
                undone[k] = len(events)
                events.append((k + 1, (chain.part_backward_extra if k in parts else chain.backward_extra)[k]))
            k -= 1
        for k in undone:
            things.append((ran[k], undone[k], (chain.part_internal if k in parts else chain.internal)[k]))
        for t in chain.tensors:
            if not start <= t.producer < stop:
                continue
            duties = [ran[t.producer], *(ran[s] for s, _ in t.uses if s in ran)]
            duties += [undone[s] for s in t.inner if s in undone]
            duties += [reread[within[s]] for s, _ in t.uses if s in within and within[s] != within.get(t.producer)]
            if n in t.inner and cut is None:
                duties.append(loss)
            things.append((ran[t.producer], max(duties), t.size))

    run(0, n, tree_of(ranges), None)
    most = float(chain.weights.sum())  # all gradients are there in the end
    for now, (cut, extra) in enumerate(events):
        total = extra + sum(size for first, last, size in things if first <= now <= last)
        if cut is not None:  # gradients of weights behind the cut, and of what crosses it
            total += chain.weights[cut:].sum()
            total += sum(t.size for t in chain.tensors if 0 <= t.producer < cut <= t.last and t.differentiable)
        most = max(most, total)
    return most


def random_chain(rng, weights, extras=False):
    """A chain of 2 to 8 stages with skips, and with `extras` what runs hold for a moment, parts and integer data."""
    n = int(rng.integers(2, 9))
    tensors = [tensor(-1, int(rng.integers(n)), size=int(rng.integers(1, 9)))]
    for k in range(n):
        readers = sorted({k + 1, *rng.integers(k + 1, n + 1, rng.integers(0, 3))})
        readers = [int(r) for r in readers]
        kept_by = [r for r in [k, *readers] if r == n or rng.random() < 0.6]
        differentiable = not extras or k == n - 1 or rng.random() < 0.8
        tensors.append(tensor(k, *readers, size=int(rng.integers(1, 9)), kept_by=kept_by, n=n, differentiable=differentiable))
    arrays = {"internal": rng.integers(0, 9, n), "weights": rng.integers(0, 9, n) if weights else np.zeros(n)}
    arrays |= {"flops": rng.integers(1, 9, n), "backward_flops": np.ones(n)}
    arrays["pruned_flops"] = arrays["flops"] * rng.integers(0, 2, n)
    if extras:
        has_part = rng.integers(0, 2, n)
        arrays |= {name: rng.integers(0, 9, n) for name in ("forward_extra", "taped_extra", "backward_extra")}
        arrays |= {
            f"part_{name}": arrays[name] + has_part * rng.integers(0, 9, n) for name in ("taped_extra", "backward_extra")
        }
        arrays["part_internal"] = arrays["internal"] - has_part * rng.integers(0, arrays["internal"] + 1)
        arrays["part_flops"] = has_part * rng.integers(1, 9, n)
        arrays["part_names"] = ["activation" if part else "" for part in has_part]
    return make(n, tensors, **arrays)


def random_segments(rng, n):
    cuts = sorted({0, n, *rng.integers(0, n + 1, 3).tolist()})
    return [pair for pair in itertools.pairwise(cuts) if rng.random() < 0.7]


def random_tree(rng, chain, start=0, stop=None):
    """Segments in segments, and parts where there are any."""
    stop = len(chain) if stop is None else stop
    cuts = sorted({start, stop, *rng.integers(start, stop + 1, 3).tolist()})
    found = []
    for a, b in itertools.pairwise(cuts):
        if b - a < stop - start and rng.random() < 0.7:
            found.append(Range(a, b, random_tree(rng, chain, a, b)))
        else:
            found += [Range(k, k + 1, (), True) for k in range(a, b) if chain.part_names[k] and rng.random() < 0.5]
    return tuple(found)


@pytest.mark.parametrize("weights", [False, True])
def test_peak_is_that_of_a_simulated_step(weights):
    rng = np.random.default_rng(0)
    for _ in range(300):
        chain = random_chain(rng, weights)
        segments = random_segments(rng, len(chain))
        assert (segments, chain.peak(segments)) == (segments, simulated_peak(chain, tree_of(segments)))


def test_peak_of_segments_in_segments_with_parts_and_transients():
    rng = np.random.default_rng(1)
    depths, parts = set(), 0
    for _ in range(600):
        chain = random_chain(rng, weights=True, extras=True)
        tree = random_tree(rng, chain)
        depths.add(depth(tree))
        parts += any(r.part for r in walk(tree))
        assert (tree, chain.peak(tree)) == (tree, simulated_peak(chain, tree))
    assert {0, 1, 2, 3} <= depths
    assert parts > 100


def test_peak_while_a_large_plain_layer_runs_backward():
    # VGG's shape: large activations first, large weights last.
    chain = make(2, internal=[10, 0], weights=[0, 10])
    assert chain.peak([]) == 20


def test_peak_of_equal_stages():
    chain = line(16, internal=np.full(16, 3.0))
    # The last output, its gradient and the loss beside all that was kept.
    assert chain.peak([]) == 16 * 3 + 15 + 3
    segments = [(0, 4), (4, 8), (8, 12)]
    # Two boundaries, the third segment's re-run (its output's gradient beside it), or three and the plain tail.
    assert chain.peak(segments) == max(2 + 4 * 3 + 4 + 1, 3 + 4 * 3 + 3 + 3)
    assert chain.peak([(0, 16)]) == 16 * 3 + 16 + 1  # everything again, beside the gradient of the output
    assert chain.peak([Range(0, 8, (Range(0, 4),)), (8, 12)]) == max(2 + 4 * 3 + 3 + 3, 1 + 4 * 3 + 4 + 1)


def test_peak_counts_what_a_run_holds_for_a_moment():
    chain = line(3, internal=[4, 0, 0], forward_extra=[0, 50, 0], taped_extra=[0, 20, 0], backward_extra=[0, 0, 10])
    assert chain.peak([]) == 4 + 1 + 1 + 20  # what stage 0 kept, both outputs, and stage 1's own need
    assert chain.peak([(1, 2)]) == 4 + 1 + 1 + 50
    assert line(3, backward_extra=[0, 0, 10]).peak([]) == 2 + 1 + 10  # both inputs, the loss's gradient


def test_a_part_keeps_less_and_costs_its_own_flops():
    chain = line(3, internal=[0, 9, 0], part_internal=[0, 2, 0], part_flops=[0, 7, 0], part_names=["", "attention", ""])
    assert chain.peak([]) == 9 + 2 + 3
    assert chain.peak([Range(1, 2, (), True)]) == 2 + 2 + 3
    assert chain.added_flops([Range(1, 2, (), True)]) == 7


def test_added_flops_counts_each_re_run():
    chain = line(8)
    assert chain.added_flops([]) == 0
    assert chain.added_flops([(0, 3), (4, 6)]) == 5
    assert chain.added_flops([Range(0, 6, (Range(0, 4, (Range(0, 2),)),))]) == 12


# --- trees ------------------------------------------------------------------------------------------------------------


def test_a_tree_is_made_from_pairs_and_sorted():
    assert tree_of([(4, 6), (0, 2)]) == (Range(0, 2), Range(4, 6))
    tree = tree_of([(0, 8, [(4, 6), (0, 2, [(0, 1)])]), (8, 9, [], True)])
    assert tree == (Range(0, 8, (Range(0, 2, (Range(0, 1),)), Range(4, 6))), Range(8, 9, (), True))
    assert [(r.start, r.stop) for r in walk(tree)] == [(0, 8), (0, 2), (0, 1), (4, 6), (8, 9)]
    assert (depth(tree), depth(tree[1:]), depth(())) == (3, 0, 0)


# --- frees ------------------------------------------------------------------------------------------------------------


def test_frees_counts_what_later_stages_do_not_need():
    chain = make(3, [tensor(0, 1), tensor(1, 2, size=10), tensor(2, 3, size=100, kept_by=[])], internal=[1000, 2000, 4000])
    assert chain.frees(0, 1) == 1000  # stage 1 keeps its input all the same
    assert chain.frees(0, 2) == 3001
    assert chain.frees(0, 3) == 7011


def test_frees_charges_an_argument_that_nobody_would_have_kept():
    chain = make(3, [tensor(0, 1, size=50, kept_by=[]), tensor(1, 2, size=10)], internal=[0, 30, 0])
    assert chain.frees(1, 2) == 30 - 50
    given = make(3, [tensor(-1, 1, size=50, kept_by=[]), tensor(1, 2, size=10)], internal=[0, 30, 0])
    assert given.frees(1, 2) == 30  # the data are there anyway
