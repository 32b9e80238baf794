"""`Plan`: made of chains by hand, compared, printed, written, read and drawn."""

import copy
import dataclasses
import json
import os
import pathlib
import pickle
import re
import sys

import keras
import matplotlib.pyplot
import numpy as np
import pytest
from test_chain import line, make, tensor

import tf_ckpt
from tf_ckpt import CheckpointError, Plan, Segment
from tf_ckpt.plan import allocated
from tf_ckpt.plan_plot import Steps, figure
from tf_ckpt.strategies.simulate import timeline
from tf_ckpt.strategies.tree import Range, depth, tree_of, walk

MIB = 2**20
NAMES = ("embed", "norm", "dense", "add", "attention", "norm:1", "inner/dense", "inner/relu", "pool", "head")
PARTS = ("", "", "activation", "", "attention", "", "activation", "", "", "")
TREE = (Range(0, 2), Range(2, 3, (), True), Range(3, 8, (Range(4, 5, (), True), Range(5, 8, (Range(6, 7, (), True),)))))
CURVE = [(np.int64(90 * MIB), np.float64(0.3)), (100 * MIB, 0.125), (150 * MIB, 0)]


@pytest.fixture(autouse=True)
def fresh_keras():
    """In place of conftest's: there is no Keras here to clean up."""


def chain_of(names=NAMES, **arrays):
    n, parts = len(names), np.array([bool(p) for p in PARTS])
    internal = MIB * np.arange(4.0, 4 + n)
    given = {
        "names": names,
        "part_names": PARTS,
        "internal": internal,
        "part_internal": np.where(parts, internal / 4, internal),
        "part_flops": np.where(parts, 1e9, 0),
        "weights": np.full(n, MIB),
        "flops": np.full(n, 4e9),
        "pruned_flops": np.full(n, 2e9),
        "backward_flops": np.full(n, 8e9),
        "backward_extra": np.full(n, MIB / 2),
    }
    return line(n, 3 * MIB, **{**given, **arrays})


@pytest.fixture
def plan():
    return Plan.of(chain_of(), TREE, "budget", weight_bytes=30 * MIB, optimizer_bytes=60 * MIB, curve=CURVE)


def random_tree(rng, start, stop, parts=(), top=True):
    """A tree of ranges of `[start, stop)`. Inner segments are smaller than what they are inside of."""
    made, k = [], start
    while k < stop:
        end = int(rng.integers(k + 1, stop + 1))
        if rng.random() < 0.6 and (top or (k, end) != (start, stop)):
            made.append(Range(k, end, random_tree(rng, k, end, parts, False)))
        elif k in parts and rng.random() < 0.5:
            end = k + 1
            made.append(Range(k, end, (), True))
        k = end
    return tuple(made)


# --- what a plan says -------------------------------------------------------------------------------------------------


def test_segments_are_a_tree_and_ranges_give_it_back(plan):
    assert plan.layers == NAMES
    assert [s.layers for s in plan.segments] == [("embed", "norm"), ("dense",), NAMES[3:8]]
    assert [s.part for s in plan.segments] == ["", "activation", ""]
    attention, rest = plan.segments[2].inside
    assert (attention.layers, attention.part, attention.inside) == (("attention",), "attention", ())
    assert (rest.layers, rest.part) == (NAMES[5:8], "")
    assert [(s.layers, s.part) for s in rest.inside] == [(("inner/dense",), "activation")]
    assert plan.ranges() == TREE
    assert all(isinstance(r, Range) for r in walk(plan.ranges()))


def test_ranges_are_pairs_lists_or_trees_in_any_order():
    chain = make(6)
    pairs = Plan.of(chain, [(4, 6), [0, np.int64(2)]], "x")
    assert pairs.ranges() == (Range(0, 2), Range(4, 6))
    assert pairs == Plan.of(chain, np.array([[4, 6], [0, 2]]), "x") == Plan.of(chain, iter([(0, 2), Range(4, 6)]), "x")


def test_random_trees_come_back():
    rng = np.random.default_rng(1)
    trees = [random_tree(rng, 0, len(NAMES), [2, 4, 6]) for _ in range(100)]
    assert max(map(depth, trees)) > 3
    assert any(r.part for tree in trees for r in walk(tree))
    for tree in trees:
        assert Plan.of(chain_of(), tree, "x").ranges() == tree


def test_figures_are_those_of_the_chain(plan):
    chain = chain_of()
    assert plan.activation_bytes == int(allocated(chain, chain.peak(TREE))) == max(plan.moments)
    assert plan.plain_activation_bytes == int(allocated(chain, chain.peak([]))) == max(plan.plain_moments)
    assert plan.activation_bytes < plan.plain_activation_bytes
    assert plan.peak_bytes == 90 * MIB + plan.activation_bytes
    assert plan.plain_peak_bytes == 90 * MIB + plan.plain_activation_bytes
    assert plan.overhead == pytest.approx(chain.added_flops(TREE) / chain.step_flops)
    nested = [*plan.segments, *plan.segments[2].inside, *plan.segments[2].inside[1].inside]
    assert plan.overhead == pytest.approx(sum(s.rerun_flops for s in nested) / chain.step_flops)
    for moments, tree in ((plan.moments, TREE), (plan.plain_moments, ())):
        lost = allocated(chain, chain.peak(tree)) / chain.peak(tree)
        assert 1.03 <= lost <= 1.18
        assert moments == tuple(int(lost * m.bytes) for m in timeline(chain, tree))
    assert plan.curve == ((90 * MIB, 0.3), (100 * MIB, 0.125), (150 * MIB, 0.0))
    assert plan.batch_size == chain.batch_size


def test_weights_default_to_the_trainable_ones():
    plan = Plan.of(chain_of(), [], "none")
    assert (plan.weight_bytes, plan.optimizer_bytes) == (len(NAMES) * MIB, 0)
    assert plan.peak_bytes == plan.plain_peak_bytes == plan.activation_bytes + len(NAMES) * MIB
    assert Plan.of(chain_of(), [], "none", weight_bytes=0).weight_bytes == 0
    assert (plan.segments, plan.overhead, plan.curve, plan.ranges()) == ((), 0.0, (), ())


def test_a_chain_without_flops_has_no_overhead():
    assert Plan.of(make(3), [(0, 2)], "x").overhead == 0.0


def test_figures_of_outermost_segments_are_the_chains_own():
    rng = np.random.default_rng(2)
    for _ in range(50):
        n = int(rng.integers(2, 9))
        links = []
        for k in range(n):
            readers = sorted({k + 1, *rng.integers(k + 1, n + 1, 2).tolist()})
            kept = [s for s in [k, *readers] if s < n and rng.random() < 0.5]
            links.append(tensor(k, *readers, size=int(rng.integers(1, 9)), kept_by=kept))
        chain = make(n, links, internal=rng.integers(0, 9, n), flops=rng.integers(0, 9, n))
        for r in (tree := random_tree(rng, 0, n)):
            segment = Plan.of(chain, [r], "x").segments[0]
            assert segment.keeps_bytes == chain.boundary(r.stop)[r.start]
            assert (tree, segment.frees_bytes) == (tree, chain.frees(r.start, r.stop))
            assert segment.rerun_flops == chain.rerun_flops(r.start, r.stop)


def test_figures_of_inner_segments_are_those_within_the_outer_one():
    # Stage 1's output is read within the segment [0, 4) and after it, stage 2's within, stage 3's after it only.
    links = [tensor(0, 1, size=1, kept_by=[]), tensor(1, 2, 5, size=10), tensor(2, 3, size=100), tensor(3, 5, size=1000)]
    chain = make(6, links, internal=[10**4, 10**5, 10**6, 10**7, 0, 0])
    outer = Plan.of(chain, [Range(0, 4, (Range(1, 3),))], "x").segments[0]
    assert outer.keeps_bytes == 10 + 1000
    assert outer.frees_bytes == 11110000 + 100
    inner = outer.inside[0]
    assert inner.keeps_bytes == 100  # nothing from stage 3 on reads stage 1's output in the re-run
    assert inner.frees_bytes == 1100000 + 10 - 1  # what stage 1 takes would not have been kept
    alone = Plan.of(chain, [(1, 3)], "x").segments[0]
    assert alone.keeps_bytes == 110
    assert alone.frees_bytes == 1100000 - 1


def test_figures_of_parts(plan):
    assert (plan.segments[1].keeps_bytes, plan.segments[1].frees_bytes) == (1.5 * MIB, 4.5 * MIB)
    assert plan.segments[1].rerun_flops == 1e9


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([(0, 99)], r"Received: segment \(0, 99\) of 10 calls$"),
        ([(-1, 2)], r"Received: segment \(-1, 2\) of 10 calls"),
        ([(3, 1)], r"segment \(3, 1\)"),
        ([(2, 2)], r"segment \(2, 2\)"),
        ([(0, 2), (1, 3)], r"segment \(1, 3\)"),
        ([(0, 2), (0, 2)], r"segment \(0, 2\)"),
        ([(8, 10)], r"segment \(8, 10\)"),  # fixed
        ([(5, 7)], r"segment \(5, 7\)"),  # half of a nested model
        ([Range(0, 3, (Range(2, 4),))], r"segment \(2, 4\) of 10 calls inside segment \(0, 3\)$"),
        ([Range(1, 3, (Range(0, 2),))], r"segment \(0, 2\) of 10 calls inside segment \(1, 3\)"),
        ([Range(0, 4, (Range(0, 2), Range(1, 3)))], r"segment \(1, 3\) of 10 calls inside segment \(0, 4\)"),
        ([Range(0, 4, (Range(0, 3, (Range(3, 4),)),))], r"segment \(3, 4\) of 10 calls inside segment \(0, 3\)"),
        ([Range(0, 8, (Range(5, 7),))], r"segment \(5, 7\)"),
        ([Range(3, 4, (), True)], r"Received: part \(3, 4\) of 10 calls$"),  # it has none
        ([Range(2, 4, (), True)], r"part \(2, 4\)"),
        ([Range(4, 4, (), True)], r"part \(4, 4\)"),
        ([Range(12, 13, (), True)], r"part \(12, 13\)"),
        ([Range(-8, -7, (), True)], r"part \(-8, -7\)"),
        ([Range(2, 3, (Range(2, 3),), True)], r"part \(2, 3\)"),
        ([Range(2, 3, (), True), Range(2, 3)], r"\(2, 3\)"),
        ([Range(0, 2, (Range(2, 3, (), True),))], r"part \(2, 3\) of 10 calls inside segment \(0, 2\)"),
        ([(2,)], r"pairs \(start, stop\).*Received: ranges=\[\(2,\)\]"),
        ([("dense", "add")], r"pairs \(start, stop\).*Received: ranges=\[\('dense', 'add'\)\]"),
        (3, r"pairs \(start, stop\).*Received: ranges=3"),
    ],
)
def test_ranges_that_are_no_segments(ranges, message):
    with pytest.raises(CheckpointError, match=message):
        Plan.of(chain_of(fixed=[9], ranges=[(6, 8)]), ranges, "x")


# --- equal ------------------------------------------------------------------------------------------------------------


def test_plans_are_equal_if_they_recompute_the_same_in_the_same_way():
    plan, other = Plan.of(chain_of(), TREE, "budget", curve=CURVE), Plan.of(chain_of(internal=np.ones(10)), TREE, "mine")
    assert plan.activation_bytes != other.activation_bytes
    assert plan == other
    assert hash(plan) == hash(other)
    different = [
        Plan.of(chain_of(), tree, "budget")
        for tree in ((), TREE[:2], TREE[1:], [Range(2, 3)], [Range(2, 3, (), True)], [(3, 8)], [Range(3, 8, (Range(5, 8),))])
    ]
    different += [plan, Plan.of(chain_of(names=tuple("abcdefghij")), TREE, "budget")]
    assert len(set(different)) == len(different)
    assert plan != TREE


def test_plans_are_frozen_copied_and_pickled(plan):
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.strategy = "other"
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.segments[0].part = "attention"
    for again in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert dataclasses.astuple(again) == dataclasses.astuple(plan)
    assert dataclasses.replace(plan, weight_bytes=0).peak_bytes == plan.peak_bytes - 30 * MIB
    assert "moments" not in repr(plan)


# --- summary ----------------------------------------------------------------------------------------------------------


def summary(plan):
    texts = []
    plan.summary(print_fn=texts.append)
    (text,) = texts
    return text


def rows(text):
    lines = [re.split("[│┃|]", line)[1:-1] for line in text.splitlines() if re.match("[│┃|]", line)]
    return [[cell.rstrip() for cell in line] for line in lines]


def test_summary_is_a_table_of_segments(plan):
    text = summary(plan)
    head, units, *lines = rows(text)
    assert [f"{a} {b}".split() for a, b in zip(head, units, strict=True)] == [
        [],
        ["Segment"],
        ["Calls"],
        ["Keeps", "MiB"],
        ["Frees", "MiB"],
        ["Re-runs", "GFLOPs"],
    ]
    assert [(line[0].strip(), line[1][1:]) for line in lines] == [
        ("1", "embed ... norm"),
        ("2", "dense (activation)"),
        ("3", "add ... inner/relu"),
        ("", "  attention (attention)"),
        ("", "  norm:1 ... inner/relu"),
        ("", "    inner/dense (activation)"),
    ]
    assert [line[2].strip() for line in lines] == ["2", "1", "5", "1", "3", "1"]
    segments = [*plan.segments, *plan.segments[2].inside, *plan.segments[2].inside[1].inside]
    assert [[float(x) for x in line[3:]] for line in lines] == [
        [round(s.keeps_bytes / MIB, 1), round(s.frees_bytes / MIB, 1), round(s.rerun_flops / 1e9, 1)] for s in segments
    ]


def test_summary_closes_with_before_and_after(plan):
    plain, planned = plan.plain_activation_bytes / MIB, plan.activation_bytes / MIB
    assert summary(plan).splitlines()[0] == "Plan: 'budget', batch size 1"
    assert summary(plan).splitlines()[-3:] == [
        f"Activations and gradients: {plain:.1f} MiB plain, {planned:.1f} MiB planned.",
        f"With 30.0 MiB of weights, 60.0 MiB of optimizer slots: {plain + 90:.1f} MiB plain, {planned + 90:.1f} MiB planned.",
        f"Re-runs: {100 * plan.overhead:.1f} % of the plain step's FLOPs.",
    ]


def test_summary_prints_by_default(plan, capsys):
    plan.summary()
    assert "dense (activation)" in capsys.readouterr().out
    summary(plan)
    assert capsys.readouterr().out == ""


def test_summary_takes_names_as_they_are(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    names = ("[red]a[/]", ":smile:", "x[0]:1")
    text = summary(Plan.of(make(3, names=names), [(0, 1), (1, 2), (2, 3)], "[bold]"))
    assert all(name in text for name in (*names, "'[bold]'"))
    assert "\x1b" not in text


def test_summary_of_long_names_keeps_its_columns():
    names = ("a/" * 80 + "start", "b/" * 80 + "end")
    text = summary(Plan.of(make(2, names=names), [Range(0, 2, (Range(0, 2),))], "x"))
    assert len({len(line) for line in text.splitlines() if line.startswith("│")}) == 1
    assert all(len(line) <= 100 for line in text.splitlines())
    inner = [line[1] for line in rows(text)[2:]]
    assert "".join(cell.strip() for cell in inner).replace(" ", "") == 2 * "...".join(names)
    half = len(inner) // 2
    assert not any(cell.startswith("   ") for cell in inner[:half])
    assert all(cell.startswith("   ") for cell in inner[half + 1 :])


def test_summary_of_a_plain_model():
    text = summary(Plan.of(make(3), [], "none"))
    assert "Nothing is recomputed." in text
    assert "Re-runs: 0.0 %" in text


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [str, pathlib.Path])
def test_a_plan_comes_back_from_its_file_with_all_figures(plan, tmp_path, kind):
    path = kind(tmp_path / "plan.json")
    plan.save(path)
    again = Plan.load(path)
    assert again == plan
    assert dataclasses.astuple(again) == dataclasses.astuple(plan)
    assert type(again) is Plan
    assert type(again.segments[2].inside[0]) is Segment
    assert again.ranges() == TREE
    assert hash(again) == hash(plan)
    assert summary(again) == summary(plan)
    assert os.listdir(tmp_path) == ["plan.json"]


def test_random_plans_come_back(tmp_path):
    rng = np.random.default_rng(3)
    for _ in range(30):
        plan = Plan.of(chain_of(internal=rng.integers(0, 10**9, 10)), random_tree(rng, 0, 10, [2, 4, 6]), "mine")
        plan.save(tmp_path / "plan.json")  # over the last one
        assert dataclasses.astuple(Plan.load(tmp_path / "plan.json")) == dataclasses.astuple(plan)


def test_any_name_comes_back(tmp_path):
    names = ("é/層", '"quoted"\n', "\ud800", " ")
    plan = Plan.of(make(4, names=names), [(1, 3)], "στ")
    plan.save(tmp_path / "plan.json")
    assert dataclasses.astuple(Plan.load(tmp_path / "plan.json")) == dataclasses.astuple(plan)


def test_a_plan_from_a_file_applies_to_the_same_architecture(tmp_path):
    def model():
        inputs = keras.Input((8,))
        x = inputs
        for k in range(6):
            x = keras.layers.Dense(8, activation="gelu", name=f"d{k}")(x)
        return keras.Model(inputs, x)

    plan = tf_ckpt.plan(model(), lambda chain: [(0, 2), Range(2, 5, (Range(3, 5),))])
    plan.save(tmp_path / "plan.json")
    applied = tf_ckpt.apply(model(), Plan.load(tmp_path / "plan.json"))
    assert tf_ckpt.plan_of(applied) == plan


def test_the_file_names_layers(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    assert (content["format"], content["version"]) == ("tf_ckpt.Plan", 1)
    assert content["layers"] == list(NAMES)
    assert content["segments"][2]["inside"][0]["layers"] == ["attention"]
    assert content["segments"][2]["inside"][0]["part"] == "attention"


def test_what_cannot_be_written_leaves_the_old_file(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    before = (tmp_path / "plan.json").read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        dataclasses.replace(plan, overhead=float("nan")).save(tmp_path / "plan.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        plan.save(tmp_path / "folder")
    assert (tmp_path / "plan.json").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["folder", "plan.json"]


def test_a_link_stays_a_link(plan, tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "plan.json")
    plan.save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("path", [None, 3, b"plan.json", ["plan.json"], os])
def test_paths_that_are_none(plan, path):
    for act in (plan.save, Plan.load, plan.plot):
        with pytest.raises(TypeError, match=r"`path` must be a string or path-like. Received: path=.* of type "):
            act(path)


FIELDS = [field.name for field in dataclasses.fields(Plan)]
SEGMENT_FIELDS = [field.name for field in dataclasses.fields(Segment)]


def changed(plan, tmp_path, change):
    plan.save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    change(content)
    (tmp_path / "plan.json").write_text(json.dumps(content))
    return tmp_path / "plan.json"


@pytest.mark.parametrize("key", [key for key in FIELDS if key not in ("unit", "untraced", "open_sized")])
def test_a_file_without_a_key(plan, tmp_path, key):
    path = changed(plan, tmp_path, lambda content: content.pop(key))
    with pytest.raises(CheckpointError, match=rf"A plan needs '{key}': .*Received: path=.*, which has \['"):
        Plan.load(path)


@pytest.mark.parametrize("key", [key for key in SEGMENT_FIELDS if key != "rerun_seconds"])
def test_a_file_with_a_segment_without_a_key(plan, tmp_path, key):
    path = changed(plan, tmp_path, lambda content: content["segments"][2]["inside"][1].pop(key))
    with pytest.raises(CheckpointError, match=rf"A plan needs '{key}'"):
        Plan.load(path)


def test_a_file_from_before_plans_in_seconds(plan, tmp_path):
    path = changed(
        plan,
        tmp_path,
        lambda content: [
            *(content.pop(key) for key in ("unit", "untraced", "open_sized")),
            content["segments"][0].pop("rerun_seconds"),
        ],
    )
    assert dataclasses.astuple(Plan.load(path)) == dataclasses.astuple(plan)


@pytest.mark.parametrize("wrong", [None, True, -1, {"a": 1}, [[]], [-1], float("nan"), 10**400], ids=str)
@pytest.mark.parametrize("key", FIELDS)
def test_a_file_with_a_wrong_value(plan, tmp_path, key, wrong):
    if isinstance(wrong, int) and wrong == 10**400 and key.endswith("bytes"):
        wrong = 0.5
    if isinstance(wrong, int) and wrong == 10**400 and key == "batch_size":
        wrong = "1"
    path = changed(plan, tmp_path, lambda content: content.update({key: wrong}))
    with pytest.raises(CheckpointError, match=rf"'{key}' must be .*Received: path=.*, which has {key}="):
        Plan.load(path)


def put(key, value, *place):
    def change(content):
        for step in place:
            content = content[step]
        content[key] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("layers", ["a", "b", "a"]), r"'layers' must be names of calls, each once.*layers='a'"),
        (put("layers", []), r"'layers' must be"),
        (put("layers", ["nothing"], "segments", 0), r"'segments' must be runs .*\['nothing'\]"),
        (put("layers", ["norm", "embed"], "segments", 0), r"'segments' must be runs .*\['norm', 'embed'\]"),
        (put("layers", ["embed", "add"], "segments", 0), r"\['embed', 'add'\]"),
        (put("layers", ["embed", "norm", "dense"], "segments", 0), r"apart from each other.*\['dense'\]"),
        (put("layers", ["pool"], "segments", 2, "inside", 0), r"'inside' must be runs .*\['pool'\]"),
        (put("part", "attention", "segments", 0), r"'part' must be that of a single call.*part='attention'"),
        (put("part", "activation", "segments", 2, "inside", 1), r"'part' must be"),
        (put("part", 1, "segments", 1), r"'part' must be .*part=1"),
        (put("frees_bytes", 0.5, "segments", 1), r"'frees_bytes' must be a whole number. .*frees_bytes=0.5"),
        (put("keeps_bytes", -1, "segments", 1), r"'keeps_bytes' must be .*keeps_bytes=-1"),
        (put("rerun_flops", "1", "segments", 1), r"'rerun_flops' must be .*rerun_flops='1'"),
        (put("rerun_seconds", -1, "segments", 1), r"'rerun_seconds' must be .*rerun_seconds=-1"),
        (put("untraced", [1]), r"'untraced' must be a list of the names of calls. Received: .*untraced=\[1\]"),
        (put("unit", "ms"), r"'unit' must be 'FLOPs' or 'seconds'. Received: .*unit='ms'"),
        (put("inside", None, "segments", 1), r"'inside' must be a list of segments.*inside=None"),
        (put(1, 5, "segments"), r"'segments' must be .*segments=5"),
        (put("curve", [[1, 2, 3]]), r"'curve' must be a list of pairs"),
        (put("curve", [[1, "0"]]), r"'curve' must be"),
        (put("moments", [0.5]), r"'moments' must be a list of bytes"),
        (
            lambda content: content["segments"][0].update(inside=[dict(content["segments"][0])]),
            r"'inside' must be smaller segments",
        ),
        (put("batch_size", 0), r"'batch_size' must be a whole number, 1 or more.*batch_size=0"),
    ],
)
def test_a_file_that_contradicts_itself(plan, tmp_path, change, message):
    with pytest.raises(CheckpointError, match=message):
        Plan.load(changed(plan, tmp_path, change))


def test_negative_freed_bytes_come_back(tmp_path):
    links = [tensor(0, 1, size=50, kept_by=[]), tensor(1, 2, size=10)]
    plan = Plan.of(make(3, links, internal=[0, 30, 0]), [(1, 2)], "x")
    assert plan.segments[0].frees_bytes == -20
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").segments[0].frees_bytes == -20


@pytest.mark.parametrize("part", ["nonsense", "attention"])
def test_a_file_with_a_part_that_the_layer_has_not(tmp_path, part):
    inputs = keras.Input((8,))
    hidden = keras.layers.Dense(8, activation="gelu", name="hidden")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(2, name="head")(hidden))
    made = tf_ckpt.plan(model, lambda chain: [Range(0, 1, (), True)])
    nested = tf_ckpt.plan(model, lambda chain: [Range(0, 2, (Range(0, 1, (), True),))])
    for plan, place in ((made, ("segments", 0)), (nested, ("segments", 0, "inside", 0))):
        assert tf_ckpt.apply(model, Plan.load(changed(plan, tmp_path, lambda content: None))) is not model
        wrong = Plan.load(changed(plan, tmp_path, put("part", part, *place)))
        with pytest.raises(CheckpointError, match=rf"layer 'hidden' has one part .* 'activation'\. Received: part='{part}'"):
            tf_ckpt.apply(model, wrong)


# --- plots ------------------------------------------------------------------------------------------------------------


def test_steps_are_the_moments_of_the_timeline():
    rng = np.random.default_rng(4)
    for _ in range(100):
        tree = random_tree(rng, 0, len(NAMES), [2, 4, 6])
        steps, moments = Steps(len(NAMES), tree), timeline(chain_of(), tree)
        assert steps.moments == [(m.phase, m.stage) for m in moments]
        assert steps.moments[steps.loss] == ("backward", len(NAMES))
        plain = timeline(chain_of(), ())
        assert [steps.moments[i] for i in steps.plain()] == [(m.phase, m.stage) for m in plain]


def test_segments_are_marked_where_they_run_and_run_again():
    steps = Steps(6, [(1, 3), Range(3, 6, (Range(4, 6),)), (0, 1, (), True)])
    # 0-5 forward, 6 loss, 7-9 re-run of 3-5, 10-11 re-run of 4-5, 12-13 their backward passes, 14 that of 3,
    # 15-16 re-run of 1-2, 17-18 their backward passes, 19 that of 0, 20 the end.
    assert len(steps.moments) == 21
    assert sorted(steps.segments) == [
        (0, 2, (1, 3), (15, 17), 19),
        (0, 3, (3, 6), (7, 10), 15),
        (1, None, (8, 10), (10, 12), 14),
    ]
    assert steps.parts == [(0, 19)]


def test_steps_number_segments_like_the_summary():
    steps = Steps(len(NAMES), TREE)
    assert sorted(number for _, number, *_ in steps.segments if number) == [1, 3]


def axes_of(made):
    return {axes.get_ylabel() or "segments": axes for axes in made.get_axes()}


def test_the_figure_shows_memory_and_trade_off(plan):
    axes = axes_of(figure(plan))
    assert set(axes) == {"Memory (MiB)", "segments", "Overhead (% of the plain step's FLOPs)"}
    memory, curve = axes["Memory (MiB)"], axes["Overhead (% of the plain step's FLOPs)"]
    lines = {line.get_label().split(":")[0]: line for line in memory.get_lines()}
    for name, moments in (("plain", plan.plain_moments), ("planned", plan.moments)):
        np.testing.assert_allclose(lines[name].get_ydata(), [90 + x / MIB for x in moments])
    assert lines["plain"].get_linestyle() != lines["planned"].get_linestyle()
    assert f"planned: at most {plan.peak_bytes / MIB:,.1f} MiB" == lines["planned"].get_label()
    assert max(lines["plain"].get_xdata()) == max(lines["planned"].get_xdata())
    assert memory.get_ylim()[0] == 0
    assert axes["segments"].get_xlabel().startswith("Moments: the forward runs (10)")
    assert [t.get_text() for t in axes["segments"].get_yticklabels()] == ["segments", "nested, level 2", "parts of calls"]
    assert curve.get_xlabel() == "Peak memory (MiB)"
    points = {line.get_label().split(":")[0]: line.get_xydata().tolist() for line in curve.get_lines()}
    assert points["least overhead found for each peak"] == [[90, 30], [100, 12.5], [150, 0]]
    assert points["this plan"] == [[plan.peak_bytes / MIB, 100 * plan.overhead]]
    assert points["plain"] == [[plan.plain_peak_bytes / MIB, 0]]


def test_the_figure_without_curve_or_segments():
    axes = axes_of(figure(Plan.of(chain_of(), [], "none", weight_bytes=0)))
    assert set(axes) == {"Memory (MiB)"}
    assert axes["Memory (MiB)"].get_xlabel().startswith("Moments")
    only_parts = axes_of(figure(Plan.of(chain_of(), [Range(2, 3, (), True)], "x")))
    assert [t.get_text() for t in only_parts["segments"].get_yticklabels()] == ["parts of calls"]


def nested(start, stop, levels):
    if not levels:
        return ()
    middle = (start + stop) // 2
    return tuple(Range(a, b, nested(a, b, levels - 1)) for a, b in ((start, middle), (middle, stop)))


def texts(made):
    """All texts of a figure that are drawn, with their boxes in pixels."""
    renderer = made.canvas.get_renderer()
    beyond = set()  # labels of ticks that are not drawn, as they are outside of the axis
    for axis in (axis for axes in made.get_axes() for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        beyond |= {tick.label1 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high}
    found = [t for t in made.findobj(matplotlib.text.Text) if t.get_visible() and t.get_text().strip() and t not in beyond]
    return [(t.get_text(), t.get_window_extent(renderer)) for t in found]


@pytest.mark.parametrize("tree", [TREE, (), [(k, k + 1) for k in range(10)]], ids=["tree", "none", "singles"])
@pytest.mark.parametrize("curve", [CURVE, []], ids=["curve", "no curve"])
def test_nothing_in_the_figure_overlaps(tree, curve):
    check_texts(Plan.of(chain_of(), tree, "x", curve=curve))


def test_nothing_overlaps_in_the_figure_of_many_segments_and_levels():
    chain = line(1024, MIB)
    for tree in (nested(0, 1024, 10), [(k, k + 3) for k in range(0, 1020, 3)]):
        check_texts(Plan.of(chain, tree, "recursive", weight_bytes=50 * MIB))


def check_texts(plan):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    made = figure(plan)
    FigureCanvasAgg(made).draw()
    found = texts(made)
    assert len(found) > 8
    width, height = made.bbox.width, made.bbox.height
    for number, (text, box) in enumerate(found):
        assert (text, box.x0 >= 0, box.y0 >= 0, box.x1 <= width, box.y1 <= height) == (text, True, True, True, True)
        for other, beside in found[:number]:
            assert (text, other, box.overlaps(beside)) == (text, other, False)


@pytest.mark.parametrize(
    ("name", "start"),
    [("plan.png", b"\x89PNG"), ("plan", b"\x89PNG"), ("plan.svg", b"<?xml"), ("plan.PDF", b"%PDF")],
)
def test_plot_writes_a_file(plan, tmp_path, name, start):
    plan.plot(tmp_path / name)
    plan.plot(str(tmp_path / name))
    assert (tmp_path / name).read_bytes().startswith(start)
    assert os.listdir(tmp_path) == [name]


def test_plots_of_a_loaded_plan_and_of_odd_names(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    Plan.load(tmp_path / "plan.json").plot(tmp_path / "again.png")
    plan.plot(tmp_path / "first.png")
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "first.png").read_bytes()
    Plan.of(make(1, names=["$\\frac$"]), [(0, 1)], "$\\frac$").plot(tmp_path / "odd.png")
    assert (tmp_path / "odd.png").stat().st_size > 10000


def test_plots_leave_matplotlib_as_it_was(plan, tmp_path):
    before, figures = matplotlib.rcParams.copy(), matplotlib.pyplot.get_fignums()
    plan.plot(tmp_path / "plan.png")
    assert matplotlib.rcParams.copy() == before
    assert matplotlib.pyplot.get_fignums() == figures


def test_plot_says_which_files_it_draws(plan, tmp_path):
    with pytest.raises(CheckpointError, match=r"draws .*pdf.*png.* files. Received: path='.*plan\.json'"):
        plan.plot(tmp_path / "plan.json")
    assert os.listdir(tmp_path) == []


def test_plot_needs_matplotlib(plan, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "tf_ckpt\[plot\]"'):
        plan.plot(tmp_path / "plan.png")


@pytest.mark.parametrize("key", ["moments", "plain_moments"])
def test_plot_needs_the_moments(plan, tmp_path, key):
    with pytest.raises(CheckpointError, match=r"bytes at each moment .* Received: a plan with \d+ `moments` and \d+ `plain_m"):
        dataclasses.replace(plan, **{key: ()}).plot(tmp_path / "plan.png")


def test_tree_of_a_plan_is_a_tree_of_the_chain(plan):
    assert chain_of().peak(plan.ranges()) == chain_of().peak(tree_of(TREE))


@pytest.mark.parametrize("length", [None, 12])
def test_open_dimensions_are_told(length):
    inputs = keras.Input((length, 4))
    model = keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(keras.layers.Dense(4, name="each")(inputs)))
    plan, lines = tf_ckpt.plan(model, "full", batch_size=2), []
    plan.summary(print_fn=lines.append)
    assert plan.open_sized == (("each",) if length is None else ())
    assert ("count as 64 each" in "".join(lines)) == (length is None)
