"""Trains models that nobody here wrote, plain and by each strategy: are they equal to the bit, and what do they save?

    python benchmarks/zoo.py --results zoo.jsonl
    python benchmarks/zoo.py --results zoo.jsonl --models ResNet50 ViT --table docs/zoo.md

Every model of `keras.applications`, and every backbone of KerasHub if that is installed; none with downloaded weights. Each
model is measured in a process of its own, and appended to the results as it is done: a command that was stopped goes on
where it was. Losses and gradients of two optimizer steps and all variables after them are compared. Where they differ, both
models are trained once more: a plain model that differs from itself says nothing. Peaks are those of further trainings, which
keep no gradients. The exit status is 1 if one differs.
"""

import os
import sys

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"  # read by TensorFlow at import: the CPU counts as a GPU does

import argparse
import json
import pathlib
import subprocess
import time
import warnings

import keras
import tensorflow as tf

import tf_ckpt
from tf_ckpt import tf_internals

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
import zoo

MIB = 2**20
# With several threads between operations, sums of three gradients start with whichever comes first, also in plain models.
tf.config.threading.set_inter_op_parallelism_threads(1)


def measure(entry, strategies, mode, same_sums=False):
    """Trains a model plain and by each strategy.

    Returns:
        A dict for one line of the results.
    """
    if same_sums:
        tf_internals.switch_memory_optimizer_off()
    keras.utils.set_random_seed(7)
    model = entry.build()
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    data = entry.data(model)
    started = time.perf_counter()
    plain = zoo.train(entry, model, variables, data, mode)
    peak = zoo.train(entry, model, variables, data, mode, record=False).peak
    found = {
        "model": entry.name,
        "kind": entry.kind,
        "mode": mode,
        "batch": entry.batch,
        "same_sums": same_sums,
        "inputs": str(keras.tree.map_structure(lambda x: tuple(x.shape[1:]), data)),
        "parameters": model.count_params(),
        "plain_peak": peak,
        "losses": [float(plain.values[f"loss of step {i}"]) for i in range(zoo.STEPS)],
        "seconds": {"plain": time.perf_counter() - started},
        "strategies": {},
    }
    for strategy in strategies:
        started = time.perf_counter()
        try:
            found["strategies"][strategy] = one(entry, model, variables, data, mode, strategy, plain)
        except Exception as error:
            found["strategies"][strategy] = {"error": f"{type(error).__name__}: {error}"[:1500]}
        found["seconds"][strategy] = time.perf_counter() - started
    return found


def one(entry, model, variables, data, mode, strategy, plain):
    """Trains a model by a strategy, and compares."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        applied, share = zoo.apply(model, strategy, entry.batch)
        plan = tf_ckpt.plan_of(applied)
        ours = zoo.train(entry, applied, variables, data, mode)
        peak = zoo.train(entry, applied, variables, data, mode, record=False).peak
    compared = zoo.difference(plain.values, ours.values)
    found = {
        "peak": peak,
        "compared": compared.count,
        "largest": compared.largest,
        "differ": len(compared.names),
        "nearest_to_loss": compared.names[-5:],
        "nodes": len(plan.layers),
        "segments": len(plan.segments),
        "overhead": plan.overhead,
        "untraced": plan.untraced,
        "unknown": plan.unknown,
        "predicted": plan.activation_bytes,
        "predicted_plain": plan.plain_activation_bytes,
        "budget_share": share,
        "warnings": sorted({str(w.message)[:500] for w in caught if issubclass(w.category, UserWarning)}),
    }
    if compared.names:
        again = zoo.train(entry, model, variables, data, mode)
        found["plain_from_itself"] = zoo.difference(plain.values, again.values).largest
        again = zoo.train(entry, applied, variables, data, mode)
        found["ours_from_itself"] = zoo.difference(ours.values, again.values).largest
    return found


def read(path):
    """Returns the results in a file, the last of each model, mode and kind of sums."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if line.strip()]
    return {(x["model"], x["mode"], x["same_sums"]): x for x in found}


def summary(results):
    """Returns the size of the matrix and what went wrong, as lines."""
    single = [(x, s, r) for x in results for s, r in x["strategies"].items()]
    done = [(x, s, r) for x, s, r in single if "error" not in r]
    lines = [
        f"{len(results)} models, {len({s for _, s, _ in single})} strategies, modes: "
        f"{', '.join(sorted({x['mode'] for x in results}))}; {len(done)} trainings compared with plain ones, "
        f"{sum(r['compared'] for *_, r in done):,} comparisons of arrays, largest difference "
        f"{max((r['largest'] for *_, r in done), default=0.0):.3g}"
    ]
    for x, s, r in single:
        where = f"{x['model']} with {s!r} ({x['mode']})"
        if "error" in r:
            lines.append(f"Failed: {where}: {r['error']}")
        elif r["differ"]:
            itself = f"plain from itself {r['plain_from_itself']:.3g}, checkpointed from itself {r['ours_from_itself']:.3g}"
            lines.append(f"Differs: {where}: {r['largest']:.3g} in {r['differ']} arrays; {itself}")
    lines += [f"Failed: {x['model']}: {x['error']}" for x in results if "error" in x]
    untraced = {(x["model"], name) for x, _, r in done for name in r["untraced"]}
    lines += [f"Not traced: {name!r} of {model}" for model, name in sorted(untraced)]
    return lines


def table(results):
    """Returns the page for `docs/`, as Markdown."""
    heads = ["model", "calls", "batch", "plain MiB", *(f'"{s}" MiB' for s in zoo.STRATEGIES), "FLOPs, as above"]
    lines = []
    for kind in dict.fromkeys(x["kind"] for x in results):
        lines += ["", f"## {kind}", "", f"| {' | '.join(heads)} |", "| --- |" + " ---: |" * (len(heads) - 1)]
        for x in (x for x in results if x["kind"] == kind and x["strategies"]):
            nodes = max((r.get("nodes", 0) for r in x["strategies"].values()), default=0)
            cells = [x["model"], str(nodes), str(x["batch"]), f"{x['plain_peak'] / MIB:,.1f}"]
            rows = [x["strategies"].get(s, {}) for s in zoo.STRATEGIES]
            cells += [f"{r['peak'] / MIB:,.1f}" if r.get("peak") else "-" for r in rows]
            cells.append(" ".join(f"{100 * r['overhead']:.0f}" if "overhead" in r else "-" for r in rows) + " %")
            lines.append(f"| {' | '.join(cells)} |")
    return lines


_HEAD = """# The zoo

Written by `python benchmarks/zoo.py --table docs/zoo.md`. Do not edit.

Models that nobody here wrote, with fresh weights: the smallest input that each takes, backbones of KerasHub in small
configurations. Each is trained for two optimizer steps in graph mode, plain and by each strategy; the losses, every gradient
of both steps and every variable afterwards are compared.

Peaks are the CPU allocator's: the most that the second step holds above what is held between steps, with one
thread between operations. FLOPs that are run again are predicted, as a share of the plain step's, in the order of the
strategies. "budget" is asked for half of the way from the least that is feasible to the plain model's peak, or what is
feasible nearest to that."""


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    entries = zoo.entries()
    parser.add_argument("--models", nargs="+", choices=entries, default=list(entries), metavar="NAME", help="which models")
    parser.add_argument("--strategies", nargs="+", choices=zoo.STRATEGIES, default=list(zoo.STRATEGIES), metavar="NAME")
    parser.add_argument("--mode", choices=("graph", "eager"), default="graph", help="how steps run")
    parser.add_argument("--same-sums", action="store_true", help="train without TensorFlow's memory optimiser")
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("zoo.jsonl"), help="where results are kept")
    parser.add_argument("--table", type=pathlib.Path, default=None, help="where the page of all results is written")
    parser.add_argument("--time-limit", type=float, default=3600, help="seconds for a model")
    parser.add_argument("--run", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        print(json.dumps(measure(entries[arguments.run], arguments.strategies, arguments.mode, arguments.same_sums)))
        return 0
    for name in arguments.models:
        if (name, arguments.mode, arguments.same_sums) not in read(arguments.results):
            print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
            found = in_own_process(name, arguments)
            with arguments.results.open("a") as file:
                file.write(json.dumps(found) + "\n")
    results = list(read(arguments.results).values())
    lines = summary(results)
    print("\n".join(lines))
    if arguments.table:
        shown = [x for x in results if x["mode"] == "graph" and not x["same_sums"]]
        arguments.table.write_text("\n".join([_HEAD, "", *lines[:1], *table(shown)]) + "\n")
    return 1 if any(line.startswith(("Differs", "Failed", "Not traced")) for line in lines) else 0


def in_own_process(name, arguments):
    """Returns what a model's process found, or why it failed."""
    command = [sys.executable, *sys.argv, "--run", name]
    failed = {"model": name, "kind": zoo.entries()[name].kind, "mode": arguments.mode, "same_sums": arguments.same_sums}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=arguments.time_limit)
    except subprocess.TimeoutExpired:
        return {**failed, "strategies": {}, "error": f"not done in {arguments.time_limit:.0f} s"}
    if done.returncode:
        return {**failed, "strategies": {}, "error": f"exit status {done.returncode}: {done.stderr[-1500:]}"}
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
