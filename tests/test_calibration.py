"""`calibrate` and plans in seconds: tables by hand against seconds by hand; what is measured is only asked to be sane."""

import dataclasses
import itertools
import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import numbers
from helpers import compare

import tf_ckpt
from tf_ckpt import Calibration, CheckpointError, Plan, costs, graph
from tf_ckpt.flops import Work
from tf_ckpt.stages import Stages

L = keras.layers
BATCH = 8
# A FLOP takes a nanosecond and a byte a picosecond, 100 ns at least.
EVEN = Calibration(
    device="by hand",
    dtype="float32",
    matmul=((100, 1e-7), (1e9, 1.0)),
    convolution=((100, 1e-7), (1e9, 1.0)),
    memory=((1e5, 1e-7), (1e12, 1.0)),
)
DEAR_CONVOLUTIONS = dataclasses.replace(EVEN, convolution=((100, 1e-4), (1e9, 1000.0)))
DEAR_MATMULS = dataclasses.replace(EVEN, matmul=((100, 1e-4), (1e9, 1000.0)))


def net():
    """Blocks of two kinds that keep alike: a depthwise convolution, and a matmul of 16 times its FLOPs."""
    inputs = x = keras.Input((8, 8, 16))
    for k in range(6):
        if k % 2:
            x = L.Dense(64, activation="tanh", name=f"dense{k}")(x)
            x = L.Dense(16, name=f"narrow{k}")(x)
        else:
            x = L.DepthwiseConv2D(1, depth_multiplier=4, activation="tanh", name=f"convolution{k}")(x)
            x = L.Conv2D(16, 1, name=f"narrow{k}")(x)
        x = L.LayerNormalization(name=f"norm{k}")(x)
    return keras.Model(inputs, L.Dense(2)(L.GlobalAveragePooling2D()(x)))


def chain_of(model, device=None):
    return Stages(graph.read(model)).chain(BATCH, device)


def cost_of(layer, *shapes):
    inputs = [keras.Input(shape) for shape in shapes]
    return costs.node_cost(graph.read(keras.Model(inputs, layer(*inputs))).nodes[-1], BATCH, {})


# --- the table --------------------------------------------------------------------------------------------------------


def test_seconds_by_hand():
    table = Calibration("x", "float32", [(1e3, 1e-3), (1e7, 1e-1)], [(1e3, 2.0), (1e5, 8.0)], [(10, 1e-5), (1e3, 1e-4)])
    assert table.seconds("matmul", 1e3, 10) == pytest.approx(1e-3)
    assert table.seconds("matmul", 1e5, 10) == pytest.approx(1e-2)  # half way, in logarithms
    assert table.seconds("matmul", 1e7, 10) == pytest.approx(1e-1)
    assert table.seconds("matmul", 3e7, 10) == pytest.approx(3e-1)  # in proportion
    assert table.seconds("convolution", 1e4, 10) == pytest.approx(4.0)
    assert table.seconds("memory", 1e9, 1e2) == pytest.approx(math.sqrt(1e-5 * 1e-4))  # whatever it computes
    for size in (0, 1, 999):
        assert table.seconds("matmul", size, 0) == pytest.approx(1e-3)  # its launch
    assert table.seconds("matmul", 1e3, 1e6) == pytest.approx(1e-1)  # its bytes take longer than its FLOPs


def test_no_more_work_takes_less():
    rng = np.random.default_rng(0)
    for _ in range(20):
        sizes, rows = np.cumsum(rng.uniform(1, 1e6, 6)), rng.uniform(1e-6, 1e-2, (3, 6))  # noise
        table = Calibration("x", "float32", *([*zip(sizes, row, strict=True)] for row in rows))
        points = np.sort(10 ** rng.uniform(-1, 9, 200))
        for kind in ("matmul", "convolution", "memory"):
            found = [table.seconds(kind, x, x) for x in points]
            assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(found))
            assert 0 < found[0] < found[-1] < math.inf


def test_a_single_size_is_a_table():
    table = dataclasses.replace(EVEN, matmul=[(100, 1e-7)])
    assert (table.seconds("matmul", 1, 1), table.seconds("matmul", 200, 1)) == pytest.approx((1e-7, 2e-7))


def test_unknown_kinds():
    with pytest.raises(CheckpointError, match=r"one of \('matmul', 'convolution', 'memory'\). Received: kind='fft'"):
        EVEN.seconds("fft", 1, 1)


@pytest.mark.parametrize(
    "rows",
    [
        *[(), None, "x", 3, {"a": 1}, [1, 2], [(1, 2, 3)], [(0, 1)], [(1, -1)], [(1, True)], [(1, "2")], [(1, math.nan)]],
        *[[(1, math.inf)], [(2, 1), (1, 2)], [(1, 1), (1, 2)]],
    ],
    ids=repr,
)
def test_tables_that_are_none(rows):
    with pytest.raises(CheckpointError, match=r"`memory` must be pairs \(bytes, seconds\) .*sizes rising.* Received: memory="):
        dataclasses.replace(EVEN, memory=rows)


def test_summary(capsys):
    EVEN.summary()
    assert "Calibration of by hand, float32" in capsys.readouterr().out
    said = []
    EVEN.summary(said.append)
    assert len(said[0].splitlines()) == 7
    assert said[0].splitlines()[2].split() == ["matmul", "1,000.000", "MFLOPs", "1,000,000.0", "us", "1.0", "GFLOP/s"]


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_file_gives_the_same_table(tmp_path):
    EVEN.save(tmp_path / "device.json")
    again = Calibration.load(str(tmp_path / "device.json"))
    assert (again, hash(again)) == (EVEN, hash(EVEN))
    assert again != DEAR_MATMULS
    content = json.loads((tmp_path / "device.json").read_text())
    assert (content["format"], content["version"]) == ("tf_ckpt.Calibration", 1)


@pytest.mark.parametrize(("key", "value"), [("device", 3), ("dtype", None), ("matmul", [[1]]), ("memory", [])])
def test_files_with_a_wrong_value(tmp_path, key, value):
    EVEN.save(tmp_path / "x.json")
    content = json.loads((tmp_path / "x.json").read_text())
    (tmp_path / "x.json").write_text(json.dumps({**content, key: value}))
    with pytest.raises(CheckpointError, match=rf"{key}.* must be .*Received: .*path='.*x.json'"):
        Calibration.load(tmp_path / "x.json")


@pytest.mark.parametrize("path", [3, None, b"x", [EVEN]])
def test_paths_of_a_wrong_type(path):
    for act in (EVEN.save, Calibration.load):
        with pytest.raises(TypeError, match=r"`path` must be .*Received: path="):
            act(path)


# --- `device=` --------------------------------------------------------------------------------------------------------


def test_a_plan_that_is_made_takes_no_device():
    model = net()
    plan = tf_ckpt.plan(model, "sqrt", device=EVEN)
    with pytest.raises(CheckpointError, match=r"`device` says how a plan is made.*Received: a `Plan` of 'sqrt', device="):
        tf_ckpt.apply(model, plan, device=EVEN)
    assert tf_ckpt.plan_of(tf_ckpt.apply(model, plan)) == plan


# --- what operations do -----------------------------------------------------------------------------------------------


def test_the_work_of_a_matmul():
    c = cost_of(L.Dense(32), (16,))
    x, y, kernel, bias = (4 * n for n in (BATCH * 16, BATCH * 32, 16 * 32, 32))
    product = Work("matmul", 2 * BATCH * 16 * 32, x + kernel + y)
    assert c.work == (product, Work("memory", BATCH * 32, y + bias + y))
    assert c.pruned_work == ()
    gradients = (Work("matmul", product.flops, y + kernel + x), Work("matmul", product.flops, y + x + kernel))
    assert sorted(c.backward_work) == sorted([Work("memory", BATCH * 32, y + bias), *gradients])


def test_the_work_of_a_convolution():
    c = cost_of(L.Conv2D(32, 3, padding="same", use_bias=False), (8, 8, 16))
    x, y, kernel = (4 * n for n in (BATCH * 64 * 16, BATCH * 64 * 32, 9 * 16 * 32))
    assert c.work == (Work("convolution", 2 * BATCH * 64 * 9 * 16 * 32, x + kernel + y),)
    assert {work.kind for work in c.backward_work} == {"convolution"}


def test_the_work_of_a_loop_counts_its_turns():
    c = cost_of(L.LSTM(32, return_sequences=True), (10, 16))
    products = [work for work in c.work if work.kind == "matmul"]
    assert {work.times for work in products} == {10}
    assert sum(work.times * work.flops for work in products) == 10 * 2 * BATCH * (16 + 32) * 4 * 32


@pytest.mark.parametrize(
    ("layer", "shapes"),
    [
        (L.Dense(32, activation="gelu"), [(16,)]),
        (L.Conv2D(8, 3, activation="gelu"), [(8, 8, 4)]),
        (L.DepthwiseConv2D(3), [(8, 8, 4)]),
        (L.BatchNormalization(), [(8, 8, 32)]),
        (L.MultiHeadAttention(2, 8), [(20, 16), (20, 16)]),
        (L.LSTM(32), [(6, 16)]),
        (L.MaxPooling2D(), [(8, 8, 4)]),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_the_work_has_the_flops_that_are_counted(layer, shapes):
    c = cost_of(layer, *shapes)
    pairs = [(c.work, c.flops), (c.pruned_work, c.pruned_flops), (c.backward_work, c.backward_flops)]
    pairs += [(c.part.work, c.part.flops)] if c.part else []
    for work, flops in pairs:
        assert sum(x.times * x.flops for x in work) == pytest.approx(flops, rel=0.01)  # shapes and constants apart


def test_a_layer_without_a_trace_moves_its_outputs():
    inputs = keras.Input((16,))
    node = graph.read(keras.Model(inputs, L.Dense(32)(inputs))).nodes[-1]
    made = 4 * BATCH * 32
    assert costs.by_size(node, BATCH).work == (Work("memory", made, 2 * made),)


# --- plans ------------------------------------------------------------------------------------------------------------


def test_a_chain_in_nanoseconds_by_hand():
    model = net()
    chain = chain_of(model, EVEN)
    assert (chain.unit, chain.counted.unit) == ("nanoseconds", "FLOPs")
    k = chain.names.index("narrow1")  # 8 x 8 x 64 to 8 x 8 x 16
    moved = 4e-3 * BATCH * 64 * (16 + 16) + 4e-3 * 16  # of the bias: a picosecond a byte
    assert chain.flops[k] == pytest.approx(2 * BATCH * 64 * 64 * 16 + moved, rel=1e-3)
    same = [field.name for field in dataclasses.fields(chain) if "flops" not in field.name]
    for name in set(same) - {"unit", "counted"}:
        assert np.array_equal(getattr(chain, name), getattr(chain.counted, name)), name


def test_costs_know_no_device():
    """The layers remember their costs: none of it may be of another device, nor of none."""
    model = net()
    for device in (None, EVEN, DEAR_MATMULS, EVEN, None):
        again, fresh = chain_of(model, device), chain_of(net(), device)
        for name in ("flops", "pruned_flops", "backward_flops", "part_flops"):
            np.testing.assert_array_equal(getattr(again, name), getattr(fresh, name))
    assert chain_of(model).unit == "FLOPs"
    assert chain_of(model).counted is None


@pytest.mark.parametrize(
    ("strategy", "options"), [pytest.param("budget", {"memory": 0.7}, marks=pytest.mark.slow), ("selective", {"target": 0.7})]
)
def test_what_is_dear_is_not_run_again(strategy, options):
    model = net()
    options |= {"batch_size": BATCH}
    convolutions, matmuls = (
        tf_ckpt.plan(model, strategy, device=device, **options) for device in (DEAR_CONVOLUTIONS, DEAR_MATMULS)
    )
    counted = tf_ckpt.plan(model, strategy, **options)
    assert convolutions.segments != counted.segments  # where FLOPs lead to what is dear
    assert convolutions.segments != matmuls.segments
    for device, cheap, dear in (
        (DEAR_CONVOLUTIONS, convolutions, matmuls),
        (DEAR_MATMULS, matmuls, convolutions),
    ):
        chain = chain_of(model, device)
        assert chain.added_flops(cheap.ranges()) < 0.5 * chain.added_flops(dear.ranges())
        assert cheap.overhead == pytest.approx(chain.added_flops(cheap.ranges()) / chain.step_flops)
        assert chain.added_flops(cheap.ranges()) <= chain.added_flops(counted.ranges())
        applied = tf_ckpt.apply(model, strategy, device=device, **options)
        assert tf_ckpt.plan_of(applied) == cheap
        compare(model, applied, [numbers(BATCH, 8, 8, 16)], "graph", steps=1)


@pytest.mark.parametrize("strategy", ["sqrt", "full", "recursive", "none", lambda chain: [(0, 2)]])
def test_each_strategy_takes_a_device(strategy):
    model = net()
    timed, counted = (tf_ckpt.plan(model, strategy, device=device, batch_size=BATCH) for device in (EVEN, None))
    assert (timed.unit, counted.unit) == ("seconds", "FLOPs")
    chain = chain_of(model, EVEN)
    assert timed.overhead == pytest.approx(chain.added_flops(timed.ranges()) / chain.step_flops)
    assert timed.plain_activation_bytes == counted.plain_activation_bytes


def test_a_budget_that_nothing_fits_is_priced_in_seconds():
    with pytest.raises(CheckpointError, match=r"No plan fits.* at [0-9.]+ % more predicted seconds, .* Give more"):
        tf_ckpt.plan(net(), "budget", memory=1000, device=EVEN)


def test_plans_say_their_unit(tmp_path):
    model = net()
    EVEN.save(tmp_path / "device.json")
    timed = tf_ckpt.plan(model, lambda chain: [(1, 3)], device=tmp_path / "device.json", batch_size=BATCH)
    counted = tf_ckpt.plan(model, lambda chain: [(1, 3)], batch_size=BATCH)
    assert timed.segments == counted.segments
    assert timed != counted
    ours, theirs = timed.segments[0], counted.segments[0]
    assert (ours.rerun_flops, theirs.rerun_seconds) == (theirs.rerun_flops, 0.0)
    assert ours.rerun_seconds == pytest.approx(1e-9 * chain_of(model, EVEN).rerun_flops(1, 3))
    said = []
    for plan in (timed, counted):
        plan.summary(said.append)
        plan.save(tmp_path / "plan.json")
        assert dataclasses.astuple(Plan.load(tmp_path / "plan.json")) == dataclasses.astuple(plan)
        plan.plot(tmp_path / "plan.png")
    assert "plain step's predicted seconds." in said[0]
    assert " ms " in said[0]
    assert f"{1e3 * ours.rerun_seconds:,.1f}" in said[0]
    assert "plain step's FLOPs." in said[1]
    assert "GFLOPs" in said[1]


# --- measured ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_present_device(tmp_path, dtype):
    tf.random.set_seed(1)
    want = tf.random.uniform((3,)), tf.random.uniform((3,))
    tf.random.set_seed(1)
    have = [tf.random.uniform((3,))]
    found = tf_ckpt.calibrate(tmp_path / "device.json", seconds=0.3, dtype=dtype)
    assert (found, found.dtype) == (Calibration.load(tmp_path / "device.json"), dtype)
    assert found.device[:4] in ("CPU:", "GPU:")
    for kind in ("matmul", "convolution", "memory"):
        assert 2 <= len(getattr(found, kind)) <= 6
        for size in (1.0, 1e6, 1e12):
            assert 0 < found.seconds(kind, size, size) < math.inf
    have.append(tf.random.uniform((3,)))
    np.testing.assert_array_equal(have, want)  # nothing was drawn from the user's generator
    model = net()
    plan = tf_ckpt.plan(model, "budget", memory=0.7, batch_size=BATCH, device=found)
    assert plan.segments
    assert 0 < plan.overhead < 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"path": "/no/such/folder/x.json"}, CheckpointError, "folder does not exist. Received: path='/no/such/folder/x.json'"),
        ({"path": "/"}, CheckpointError, "it is a folder. Received: path='/'"),
        ({"dtype": np.float32}, TypeError, "`dtype` must be a string. Received: dtype=<class 'numpy.float32'>"),
    ],
)
def test_what_cannot_end_well_is_refused_before_the_time_is_spent(monkeypatch, arguments, error, message):
    monkeypatch.setattr("tf_ckpt.measuring._table", None)
    with pytest.raises(error, match=message):
        tf_ckpt.calibrate(**arguments)
