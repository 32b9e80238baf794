"""The moments of a step on paper: which there are, in which order, and what is there at each. Sums: see test_chain.py."""

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
