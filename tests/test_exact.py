"""The exactness matrix: case x mode x way of checkpointing, against the plain model."""

import pytest
from cases import CASES
from helpers import MODES, ROUNDING, XLA_BOUND, assert_same, compare, model_loss, step, thirds, wrapped

import tf_ckpt

# bfloat16 keeps 8 bits: where XLA rounds between fused operations, one of them may differ.
XLA_BOUNDS = {"mixed_bfloat16": 2e-2, "mixed_float16": 3e-3}
SLOW_XLA = ("eager", "graph", pytest.param("xla", marks=pytest.mark.slow))
# Compiling takes most of the time: `make test` compiles what differs most under XLA, `make test-all` everything.
COMPILED = {"dropout", "batch_norm", "add_loss", "mixed_float16", "attention", "custom_state", "nested_model"}
PAIRS = [
    pytest.param(case, mode, marks=[pytest.mark.slow] if mode == "xla" and case not in COMPILED else [])
    for case in CASES
    for mode in MODES
]


@pytest.mark.parametrize(("case", "mode"), PAIRS)
def test_apply(case, mode):
    model, inputs, training = CASES[case]()
    applied = tf_ckpt.apply(model, thirds)
    assert len(tf_ckpt.plan_of(applied).segments) >= 2
    compare(model, applied, inputs, mode, training, bound=XLA_BOUNDS.get(case, XLA_BOUND))


# Loops take long to trace, and `test_apply` has them too.
QUICK = [pytest.param(case, marks=pytest.mark.slow) if case == "recurrent" else case for case in CASES]


@pytest.mark.parametrize("mode", SLOW_XLA)
@pytest.mark.parametrize("case", QUICK)
def test_recompute_layers(case, mode):
    model, inputs, training = CASES[case]()
    wrapping = wrapped(model)
    variables, state = wrapping.trainable_variables, wrapping.non_trainable_variables
    want = step(model_loss(model, training), model.trainable_variables, model.non_trainable_variables, inputs, mode)
    have = step(model_loss(wrapping, training), variables, state, inputs, mode)
    want, have = dict(enumerate(want.values())), dict(enumerate(have.values()))
    assert_same(want, have, mode, XLA_BOUNDS.get(case, XLA_BOUND), ROUNDING)


@pytest.mark.parametrize("mode", SLOW_XLA)
@pytest.mark.parametrize("case", [case for case in QUICK if case != "implicit_mask"])  # its embedding has a sparse gradient
def test_recompute_function(case, mode):
    model, inputs, training = CASES[case]()
    variables, state = model.trainable_variables, model.non_trainable_variables
    want = step(model_loss(model, training), variables, state, inputs, mode)
    have = step(model_loss(model, training, tf_ckpt.recompute(model)), variables, state, inputs, mode)
    assert_same(want, have, mode, XLA_BOUNDS.get(case, XLA_BOUND), ROUNDING)
