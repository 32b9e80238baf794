"""The moments of a step on paper: which there are, in which order, and what is there at each. Sums: see test_chain.py."""

import dataclasses

import numpy as np
import pytest
from test_chain import line, make, random_chain, random_tree, tensor

from tf_ckpt.strategies import simulate
from tf_ckpt.strategies.tree import Range


@pytest.fixture(autouse=True)
def fresh_keras():
    """In place of conftest's: there is no Keras here to clean up."""


def shown(moments):
    return [(m.phase[0], m.stage, m.bytes) for m in moments]


def test_moments_of_a_plain_step():
    chain = line(3, internal=[10, 0, 0], weights=[100, 0, 300])
    assert shown(simulate.timeline(chain, ())) == [
        ("f", 0, 11),
        ("f", 1, 12),
        ("f", 2, 13),
        ("b", 3, 15),  # the loss: its input is there, and as much for itself and for its gradient
        ("b", 2, 13),  # both stages' outputs, and the last one's gradient
        ("b", 1, 312),  # its input's reader is done with the later output, whose gradient is there
        ("b", 0, 311),
        ("e", -1, 400),
    ]


def test_moments_of_segments_in_segments():
    chain = line(4, internal=[10, 10, 10, 10])
    tree = [Range(0, 3, (Range(0, 2),))]
    moments = simulate.timeline(chain, tree)
    order = [(m.phase[0], m.stage) for m in moments]
    assert order == [
        *[("f", k) for k in range(4)],
        *[("b", 4), ("b", 3)],
        *[("r", 0), ("r", 1), ("r", 2), ("b", 2)],  # the outer segment again, without what is inside
        *[("r", 0), ("r", 1), ("b", 1), ("b", 0)],  # then what is inside
        ("e", -1),
    ]
    assert [m.bytes for m in moments[6:10]] == [2, 3, 13, 12]  # beside the gradient of the segment's output
    assert max(m.bytes for m in moments) == simulate.peak(chain, tree)


def test_a_skip_is_let_go_when_its_first_reader_has_run_backward():
    # Stage 0's output goes to stages 1 and 3, and stage 3 alone needs it again.
    tensors = [tensor(0, 1, 3, size=50, kept_by=[3]), tensor(1, 2), tensor(2, 3), tensor(3, 4, kept_by=[4], n=4)]
    by_stage = {m.stage: m.bytes for m in simulate.timeline(make(4, tensors), ()) if m.phase == "backward"}
    gradient = 50  # of the skip itself, from stage 3's backward pass to stage 0's
    assert by_stage == {4: 50 + 1 + 1 + 3, 3: 50 + 2 + 1, 2: 2 - 1 + gradient + 1, 1: gradient + 1, 0: gradient}


def test_an_input_of_a_segment_is_held_for_its_re_run():
    tensors = [tensor(0, 1, size=50, kept_by=[]), tensor(1, 2, size=1), tensor(2, 3, n=3, kept_by=[3])]
    chain = make(3, tensors)
    plain, segment = (dict.fromkeys(("forward", "backward")) for _ in range(2))
    for into, tree in ((plain, ()), (segment, [(1, 2)])):
        into.update({m.phase: m.bytes for m in simulate.timeline(chain, tree) if m.stage == 2})
    assert plain == {"forward": 2, "backward": 2}  # nobody's backward pass reads what stage 0 makes
    assert segment == {"forward": 52, "backward": 52}


def test_the_model_s_inputs_are_not_counted():
    chain = make(2, [tensor(-1, 0, 1, size=1000), tensor(0, 1, kept_by=[]), tensor(1, 2, n=2, kept_by=[2])])
    assert simulate.peak(chain, ()) == 3
    assert simulate.peak(chain, [(0, 1)]) == 3


def test_weight_gradients_are_all_there_in_the_end():
    assert simulate.peak(line(3, weights=[100, 200, 300]), ()) == 600
    assert simulate.timeline(line(3, weights=[100, 200, 300]), ())[-1] == ("end", -1, 600)


def test_a_run_s_moments_are_those_within_the_step():
    rng = np.random.default_rng(0)
    compared = 0
    for _ in range(100):
        chain = random_chain(rng, weights=True, extras=True)
        tree = random_tree(rng, chain)
        whole = simulate.timeline(chain, tree)
        assert simulate.run(chain, 0, len(chain), tree) == whole[:-1]
        for r in tree:
            if not r.part and r.stop < len(chain):
                own = simulate.run(chain, r.start, r.stop, r.inside)
                at = next(i for i, m in enumerate(whole) if m.phase == "re-run" and m.stage == r.start)
                beside = whole[at].bytes - own[0].bytes
                assert beside >= 0
                moved = [m._replace(bytes=m.bytes + beside) for m in own]
                np.testing.assert_allclose([m.bytes for m in moved], [m.bytes for m in whole[at : at + len(own)]])
                assert [m[:2] for m in moved] == [m[:2] for m in whole[at : at + len(own)]]
                compared += 1
    assert compared > 50


# --- graph mode -------------------------------------------------------------------------------------------------------


def in_graph(chain, **more):
    return dataclasses.replace(chain, graph_mode=True, **more)


def order(chain, tree):
    """The moments between the loss and the end."""
    moments = simulate.timeline(chain, tree)[len(chain) + 1 : -1]
    return [f"{m.phase[0]}{m.stage}" for m in moments]


def by_phase(chain, tree, phase):
    return {m.stage: m.bytes for m in simulate.timeline(chain, tree) if m.phase == phase}


def test_a_re_run_in_a_graph_leaves_out_what_nobody_reads():
    chain = line(4, size=[1, 1, 100, 1], internal=[10, 10, 10, 10])
    cautious, precise = by_phase(chain, [(0, 3)], "re-run"), by_phase(in_graph(chain), [(0, 3)], "re-run")
    # Stage 2's output is there already, for stage 3: made again, it would have no reader. Its gradient is as large.
    assert cautious == {0: 100 + 11, 1: 100 + 22, 2: 100 + 32 + 100}
    assert precise == {0: 100 + 11, 1: 100 + 22, 2: 100 + 32}


def test_a_segment_in_a_graph_lets_go_of_what_only_its_re_run_takes():
    tensors = [tensor(0, 1, size=50, kept_by=[]), tensor(1, 2), tensor(2, 3, n=3, kept_by=[3])]
    chain = make(3, tensors, internal=[0, 7, 0])
    cautious, precise = by_phase(chain, [(1, 3)], "backward"), by_phase(in_graph(chain), [(1, 3)], "backward")
    assert cautious[1] - precise[1] == 50 == cautious[2] - precise[2]
    assert cautious[0] == precise[0]
    # A re-run inside takes it again.
    nested = [Range(0, 3, (Range(1, 3),))]
    inside = [Range(1, 3, (Range(1, 2),))]
    for tree, saved in ((nested, 50), (inside, 0)):
        assert by_phase(chain, tree, "backward")[1] - by_phase(in_graph(chain), tree, "backward")[1] == saved


def test_what_has_no_reader_left_is_let_go_within_the_backward_pass():
    chain = line(3, size=50, backward_extra=[0, 30, 0])
    last = in_graph(chain, backward_last=np.array([0.0, -20.0, 0.0]))
    assert by_phase(chain, (), "backward")[1] - by_phase(last, (), "backward")[1] == 50
    # At the start of a segment, others hold it.
    assert by_phase(chain, [(1, 3)], "backward")[1] == by_phase(last, [(1, 3)], "backward")[1]


def test_products_in_order_count_in_re_runs_alone():
    chain = in_graph(line(3, size=50, backward_extra=[0, 30, 0]), backward_last=np.array([0.0, 30.0, 0.0]))
    ordered = dataclasses.replace(chain, backward_again=np.array([0.0, -20.0, 0.0]))
    for tree, saved in (((), 0), ([(0, 3)], 50), ([(0, 1)], 0), ([(1, 3)], 0)):  # at a segment's start others hold its input
        assert by_phase(chain, tree, "backward")[1] - by_phase(ordered, tree, "backward")[1] == saved


def test_what_is_made_early_counts_in_the_last_stage_of_a_re_run_in_a_graph():
    chain = line(3, size=50)
    early = dataclasses.replace(in_graph(chain), early=np.array([3.0, 5.0, 7.0]))
    for tree, more in (((), [0, 0, 0]), ([(0, 2)], [0, 5, 0]), ([(1, 3)], [0, 0, 7]), ([(0, 1), (1, 2)], [3, 5, 0])):
        found, plain = by_phase(early, tree, "backward"), by_phase(in_graph(chain), tree, "backward")
        assert [found[k] - plain[k] for k in range(3)] == more
    inside = [Range(0, 3, (Range(0, 2),))]
    found, plain = by_phase(early, inside, "backward"), by_phase(in_graph(chain), inside, "backward")
    assert [found[k] - plain[k] for k in range(3)] == [0, 5, 7]
    cautious = dataclasses.replace(early, graph_mode=False)
    assert by_phase(cautious, [(0, 2)], "backward") == by_phase(chain, [(0, 2)], "backward")


def test_last_stages_that_read_nothing_of_the_re_run_go_backward_before_it():
    sizes = [1, 1, 1, 100, 1]
    links = [tensor(k, k + 1, size=sizes[k], kept_by=[] if k in (1, 2) else None, n=5) for k in range(5)]
    chain = in_graph(make(5, links, internal=[10, 10, 0, 0, 10], flops=np.ones(5)))  # stages 2 and 3 are like `Concatenate`
    links[1] = tensor(1, 2, size=1)
    again = ["r0", "r1", "r2", "r3"]
    assert order(chain, [(0, 4)]) == ["b4", "b3", "b2", *again, "b1", "b0"]
    cautious = dataclasses.replace(chain, graph_mode=False)
    assert order(cautious, [(0, 4)]) == ["b4", *again, "b3", "b2", "b1", "b0"]
    reading = dataclasses.replace(chain, tensors=tuple(links))
    assert order(reading, [(0, 4)]) == ["b4", "b3", *again, "b2", "b1", "b0"]
    # The large gradient of what it made is gone when the re-run begins.
    assert max(by_phase(chain, [(0, 4)], "re-run").values()) < 100 < max(by_phase(chain, [(0, 4)], "backward").values())
    # What a segment inside makes is not there before it has run again.
    nested = [Range(0, 4, (Range(1, 4),))]
    assert order(chain, nested) == ["b4", *again, "b3", "b2", "r1", "r2", "r3", "b1", "b0"]


def test_what_a_re_run_takes_is_copied_where_others_hold_it():
    # Stage 0's output goes to stages 1 and 2, and both segments run that again.
    tensors = [tensor(0, 1, 2, size=50, kept_by=[1, 2]), tensor(1, 2, kept_by=[2]), tensor(2, 3, n=3, kept_by=[3])]
    chain = make(3, tensors, internal=[0, 10, 10], flops=np.ones(3), pruned_flops=np.ones(3))
    tree = [(1, 2), (2, 3)]
    cautious, precise = by_phase(chain, tree, "backward"), by_phase(in_graph(chain), tree, "backward")
    assert [precise[k] - cautious[k] for k in (2, 1, 0)] == [50, 0, 0]  # the last one to take it adds in place
    # The model's own input is always held outside.
    tensors = [tensor(-1, 0, size=1000), tensor(0, 1, n=1, kept_by=[1])]
    first = in_graph(make(1, tensors, internal=[10]))
    assert simulate.peak(first, [(0, 1)]) == 1000 + 10 + 1  # beside what is kept inside, and its output's gradient


def test_weight_gradients_wait_or_are_used_at_once():
    chain = line(3, weights=[100, 0, 300])
    at_once = dataclasses.replace(chain, gradients_wait=False)
    np.testing.assert_array_equal(chain.gradients, [400, 300, 300, 0])
    np.testing.assert_array_equal(at_once.gradients, [200, 600, 600, 0])  # with as much again for the update
    wide = dataclasses.replace(line(4, weights=[100, 100, 100, 100]), gradients_wait=False)
    np.testing.assert_array_equal(wide.gradients, [200, 200, 200, 200, 0])
