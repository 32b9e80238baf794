"""Each command as a user runs it: a process, what it prints, and its exit status."""

import json
import os
import signal
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import keras
import pytest

import tf_ckpt
from tf_ckpt import cli

L = keras.layers

MODULE = """
import keras, numpy as np

@keras.saving.register_keras_serializable("cli_models")
class Own(keras.layers.Dense):
    pass

def small():
    print("this is no JSON")
    inputs = x = keras.Input((16, 32))
    for number in range(4):
        x = keras.layers.LayerNormalization()(Own(32, activation="gelu", name=f"d{number}")(x))
    return keras.Model(inputs, keras.layers.Dense(4)(x), name="small")

def data():
    return np.ones((8, 16, 32), "float32"), np.zeros((8, 16, 4), "float32")

def nothing():
    return None

def fixed():
    inputs = keras.Input(batch_shape=(6, 16))
    model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Dense(16, activation="gelu")(inputs)))
    model.compile("sgd", "mse")
    return model

def writes():
    import ctypes, os
    os.write(1, b"neither is this\\n")
    ctypes.CDLL(None).puts(b"nor this")
    return fixed()
"""

# Each command as a process, and one that fails.
GOOD = {
    "plan": "plan model.keras --import cli_models --batch-size 64 --memory 2MiB --plot plan.png --save plan.json",
    "compare": "compare cli_models:small --data cli_models:data --batch-size 4 --strategies full --steps 1 --plot c.png --json",
    "max-batch": "max-batch cli_models:small --memory 4MiB --strategy full --no-verify --save largest.json --json",
    "writes": "plan cli_models:writes --json",
    "max-batch trained": "max-batch cli_models:small --memory 8GiB --strategy none --most 2",
}
QUICK = {"missing file": ("plan missing.keras", "There is no such file. Received: 'missing.keras'")}
# More of both, of which a process takes seconds to import TensorFlow.
SLOW_GOOD = {
    "plan json": "plan cli_models:small --strategy selective --layers d* --json",
}
BAD = {
    "unknown strategy": ("max-batch cli_models:small --memory 1MiB --strategy sqr", "Did you mean 'sqrt'?"),
    "bad memory": ("plan cli_models:small --memory six", "memory='six'"),
    "infeasible": ("plan cli_models:small --memory 100KiB", "No plan fits"),
    "infeasible share": ("plan cli_models:small --memory .01", "Received: memory=0.01"),
    "no module": ("plan no_such_module:small", "No module named 'no_such_module'"),
    "no model": ("plan cli_models:nothing", "which returned None"),
}
OWN = {"own layers": ("compare model.keras", "--import MODULE")}  # which this process has imported


@pytest.fixture(autouse=True)
def fresh_keras():
    """In place of conftest's: nothing is made here."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    (folder / "cli_models.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    import cli_models

    cli_models.small().save(folder / "model.keras")
    sys.path.remove(str(folder))
    return folder


def processes(folder, good, bad):
    """Runs commands two at a time, as most of their time is TensorFlow's import, and returns how each ended."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TF_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(tf_ckpt.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])

    def run(arguments):
        command = [sys.executable, "-m", "tf_ckpt", *arguments.split()]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)

    arguments = {**good, **{name: text for name, (text, _) in bad.items()}}
    with ThreadPoolExecutor(2) as pool:
        return folder, dict(zip(arguments, pool.map(run, arguments.values()), strict=True))


@pytest.fixture(scope="module")
def runs(folder):
    return processes(folder, GOOD, QUICK)


@pytest.fixture(scope="module")
def slow_runs(folder):
    return processes(folder, SLOW_GOOD, {**BAD, **OWN})


def result(runs, name):
    done = runs[1][name]
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_plan(runs):
    text = result(runs, "plan")
    assert text.startswith("Plan: 'budget', batch size 64\n")
    plan = tf_ckpt.Plan.load(runs[0] / "plan.json")
    assert (plan.strategy, plan.batch_size) == ("budget", 64)
    assert plan.segments
    assert plan.peak_bytes <= 2 * 2**20
    assert (runs[0] / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_plan_as_json(slow_runs):
    data = json.loads(result(slow_runs, "plan json"))
    assert data["strategy"] == "selective"
    assert data["peak_bytes"] == data["weight_bytes"] + data["optimizer_bytes"] + data["activation_bytes"]
    assert data["segments"][0]["layers"][0].startswith("d")
    assert "this is no JSON" in slow_runs[1]["plan json"].stderr


def test_compare(runs):
    data = json.loads(result(runs, "compare"))
    assert [row["strategy"] for row in data["rows"]] == ["plain", "full"]
    assert data["batch_size"] == 4
    for row in data["rows"]:
        assert row["status"] == "trained"
        assert row["equal"] is True
        assert row["losses"] == data["rows"][0]["losses"]
        assert row["peak_mib"] > row["baseline_mib"]  # counted without any variable set by the user
    assert (runs[0] / "c.png").read_bytes().startswith(b"\x89PNG")


def test_max_batch(runs):
    data = json.loads(result(runs, "max-batch"))
    assert data["verified"] is False
    assert data["batch_size"] > data["plain_batch_size"] > 1
    assert tf_ckpt.Plan.load(runs[0] / "largest.json").batch_size == data["batch_size"]


def test_max_batch_trains(runs):
    text = result(runs, "max-batch trained")
    assert "verified by real steps" in text
    assert "2 or more" in text
    assert "batch size 2: trained" in runs[1]["max-batch trained"].stderr


def test_help_explains(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["plan", "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("--memory", "--strategy", "--save", "--plot", "--json", "examples:", "recursive"))
    assert all(word in text for word in ("module:function", "exit status is 2"))
    text = cli.parser().format_help()
    assert all(word in text for word in ("plan", "compare", "max-batch", "module:function", "exit status is 2"))


def test_an_error_takes_one_line(runs):
    done = runs[1]["missing file"]
    check_error(done.returncode, done.stdout, done.stderr, QUICK["missing file"][1])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BAD, *OWN])
def test_errors_take_one_line(slow_runs, name):
    done = slow_runs[1][name]
    check_error(done.returncode, done.stdout, done.stderr, {**BAD, **OWN}[name][1])


@pytest.mark.parametrize("name", [*QUICK, *BAD])
def test_errors_take_one_line_in_this_process(folder, name, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    try:
        status = cli.main({**QUICK, **BAD}[name][0].split())
    except SystemExit as error:
        status = error.code
    check_error(status, *capsys.readouterr(), {**QUICK, **BAD}[name][1])


def test_code_that_ends_the_program_is_an_error(folder, capsys, monkeypatch):
    def ends(*_, **__):
        raise SystemExit(0)

    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(tf_ckpt, "plan", ends)
    check_error(cli.main(["plan", "cli_models:small"]), *capsys.readouterr(), "ended the program: SystemExit(0)")


def test_the_result_is_printed_though_a_file_cannot_be_written(folder, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(os, "fsync", full)
    assert cli.main(["plan", "cli_models:small", "--save", "full.json", "--json"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["strategy"] == "sqrt"
    assert err.splitlines()[-1] == "tf-ckpt plan: error: [Errno 28] No space left on device: 'full.json'"
    assert not list(folder.glob("full.json*"))


def test_what_is_written_to_the_descriptor_is_not_the_result(runs):
    assert json.loads(result(runs, "writes"))["batch_size"] == 6
    assert "neither is this\nnor this" in runs[1]["writes"].stderr


def test_an_interrupt_while_tensorflow_is_imported_takes_one_line(tmp_path):
    package = tmp_path / "tensorflow"
    package.mkdir()
    package.joinpath("__init__.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT); signal.pause()")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(tf_ckpt.__file__).parent.parent)])}
    command = [sys.executable, "-m", "tf_ckpt", "plan", "x"]
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 60}
    # A shell that starts the tests in the background has them ignore interrupts.
    done = subprocess.run(command, **options, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "tf-ckpt: interrupted\n")


def check_error(status, stdout, stderr, message):
    assert status == 2
    assert stdout == ""
    lines = [line for line in stderr.splitlines() if line != "this is no JSON"]
    assert len(lines) == 1, stderr
    assert lines[0].startswith("tf-ckpt")
    assert "error: " in lines[0]
    assert message in lines[0]
