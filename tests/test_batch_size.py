"""`max_batch_size` is exact to one sample on a simulated device, and says so where it only predicts."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import keras
import numpy as np
import pytest
from cases import numbers
from test_compare import everything

import tf_ckpt
from tf_ckpt import CheckpointError, batch_size, costs, graph, max_batch_size
from tf_ckpt.stages import Stages

L = keras.layers
MIB = 2**20

# In a process that `fit`s, on a device of some MiB: for each of (plan, batch size) a fork of its own, so that no trial finds
# what another left. They run at the same time: TensorFlow waits ten seconds for memory before it gives up.
FIT = """
    import json, os, sys
    import keras, numpy as np, tensorflow as tf, tf_ckpt
    children, replicas = [], int(sys.argv[3])
    for plan, batch in json.loads(sys.argv[2]):
        children.append(os.fork())
        if children[-1]:
            continue
        status = 1
        try:
            tf.config.threading.set_inter_op_parallelism_threads(1)
            strategy = tf.distribute.get_strategy()
            if replicas > 1:
                cpu = tf.config.list_physical_devices("CPU")[0]
                tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
                strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
            with strategy.scope():
                model = keras.models.load_model(sys.argv[1])
                if plan:
                    optimizer, model = model.optimizer, tf_ckpt.apply(model, tf_ckpt.Plan.load(plan))
                    model.compile(optimizer, "mse")
            x, y = tf.zeros((batch, *model.input_shape[1:])), tf.zeros((batch, *model.output_shape[1:]))
            if replicas > 1:  # a strategy deals the samples of a batch out
                data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)
            else:
                data = tf.data.Dataset.from_tensors((x, y))
            model.fit(data.repeat(3), shuffle=False, verbose=0)
            status = 0
        except tf.errors.ResourceExhaustedError:
            status = 3
        finally:
            os._exit(status)
    print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""


def net(width=256, depth=6, length=64):
    inputs = x = keras.Input((length, width))
    for _ in range(depth):
        x = L.LayerNormalization()(L.Dense(width, activation="gelu")(x))
    return keras.Model(inputs, L.Dense(2)(x), name="net")


@pytest.mark.slow
def test_the_largest_batch_trains_and_one_more_runs_out_of_memory(tmp_path, capsys):
    """To one sample, in the trials and in another process's `fit`, with one operation at a time in both.

    A sample takes 5 MiB here, and 10 in the plain model. The peaks of equal runs differ by up to 0.8 MiB, since the allocator
    gives away pieces of up to twice the size, and which one a tensor gets depends on what came before. So with small samples
    the last one is a matter of chance: of 0.16 MiB (`length=4`) in 12 MiB, also with one operation at a time, plain 57
    trained in two of three trials and 59 in all, in `fit` 59 in one of two; checkpointed 148 trained in `fit`, 140 in no trial.
    """
    model = net(length=256)
    model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False)
    before = everything(model)
    found = max_batch_size(model, memory="48MiB", strategy="full")  # plans alike for all batch sizes
    assert everything(model) == before
    assert found.verified
    assert found.memory_bytes == 48 * MIB
    assert found.batch_size > found.plain_batch_size > 1
    told = capsys.readouterr().out
    for row in found.rows:
        tried = {trial.batch_size: trial.status for trial in row.trials}
        assert tried[row.batch_size] == "trained"
        assert tried[row.batch_size + 1] == "out of memory"
        assert row.peak_mib <= 48
        assert row.plan.batch_size == row.batch_size
        assert f"batch size {row.batch_size}: trained" in told
    model.save(tmp_path / "model.keras")
    found.plan.save(tmp_path / "plan.json")
    assert fits(tmp_path, 48, found.plain_batch_size, found.batch_size) == [True, False, True, False]


def fits(folder, memory, plain, ours, replicas=1):
    """Returns whether the model and plan in a folder train on these batch sizes, and on one sample more for each replica."""
    plan = str(folder / "plan.json")
    runs = [("", plain), ("", plain + replicas), (plan, ours), (plan, ours + replicas)]
    done = script(FIT, folder / "model.keras", json.dumps(runs), replicas, TF_CPU_BFC_MEM_LIMIT_IN_MB=str(memory))
    statuses = json.loads(done.splitlines()[-1])
    assert set(statuses) <= {0, 3}, statuses
    return [status == 0 for status in statuses]


def script(text, *arguments, **environment):
    """Runs a script in a process of its own and returns what it prints."""
    paths = [str(Path(tf_ckpt.__file__).parent.parent), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment}
    command = [sys.executable, "-c", textwrap.dedent(text), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_two_replicas(tmp_path):
    """Two logical devices of 24 MiB each. A sample more for each takes as much as two do on one device."""
    printed = script(
        """
        import json, sys
        import keras, tensorflow as tf, tf_ckpt
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        from test_batch_size import net  # which sets the devices up
        keras.utils.set_random_seed(1)
        with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
            model = net(depth=3, length=256)
            model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False)
        found = tf_ckpt.max_batch_size(model, memory="24MiB", strategy="full")
        model.save(sys.argv[1] + "/model.keras")
        found.plan.save(sys.argv[1] + "/plan.json")
        print(json.dumps([found.to_dict(), [row.plan.batch_size for row in found.rows]]))
        """,
        tmp_path,
    )
    print(printed)
    found, planned = json.loads(printed.splitlines()[-1])
    assert found["batch_size"] > found["plain_batch_size"] > 2
    assert found["memory_bytes"] == 24 * MIB
    for row, share in zip(found["rows"], planned, strict=True):
        tried = {trial["batch_size"]: trial["status"] for trial in row["trials"]}
        assert row["batch_size"] == 2 * share
        assert tried[row["batch_size"]] == "trained"
        assert tried[row["batch_size"] + 2] == "out of memory"
        assert row["peak_mib"] <= 24
    assert fits(tmp_path, 48, found["plain_batch_size"], found["batch_size"], 2) == [True, False, True, False]


def test_predictions_say_what_they_are():
    model = net()
    before = everything(model)
    found = max_batch_size(model, "12MiB", "recursive", optimizer="sgd", verify=False)
    assert everything(model) == before
    assert not found.verified
    assert "predicted only, not verified" in str(found)
    assert all(row.trials == () and row.peak_mib is None for row in found.rows)
    for row, strategy in zip(found.rows, ("none", "recursive"), strict=True):
        assert row.batch_size == row.predicted_batch_size
        fits = tf_ckpt.plan(model, strategy, batch_size=row.batch_size, optimizer="sgd").peak_bytes
        more = tf_ckpt.plan(model, strategy, batch_size=row.batch_size + 2, optimizer="sgd").peak_bytes
        assert fits <= 12 * MIB < more, strategy
    content = json.loads(json.dumps(found.to_dict()))
    assert content["batch_size"] == found.batch_size
    assert content["plain_batch_size"] == found.plain_batch_size


def test_budget_fits_the_memory_and_trains_more_than_plain():
    found = max_batch_size(net(depth=4), "10MiB", "budget", optimizer="sgd", verify=False)
    assert found.batch_size > found.plain_batch_size
    assert found.plan.strategy == "budget"
    assert found.plan.peak_bytes <= 10 * MIB


def test_not_even_one_sample_fits():
    found = max_batch_size(net(), 64 * 1024, verify=False)
    assert (found.batch_size, found.plain_batch_size, found.plan) == (0, 0, None)
    assert "Largest batch" in str(found)


def test_no_more_than_most():
    found = max_batch_size(net(depth=2), "1GiB", most=8, verify=False)
    assert (found.batch_size, found.plain_batch_size) == (8, 8)
    assert "8 or more" in str(found)


def test_open_sizes_are_taken_from_data():
    inputs = keras.Input((None, 8))
    model = keras.Model(inputs, L.Dense(1)(L.Dense(8, activation="gelu")(inputs)))
    with pytest.raises(CheckpointError, match=r"give `x` and `y`.*\(None, None, 8\)"):
        max_batch_size(model, "1MiB", verify=False)
    x, y = np.asarray(numbers(1, 5, 8)), np.asarray(numbers(1, 5, 1))
    assert max_batch_size(model, "1MiB", x=x, y=y, verify=False).batch_size > 0


def test_costs_between_two_batch_sizes_give_the_chain_of_one():
    stages = Stages(graph.read(net(depth=2)))
    traced, between = stages.chain(8), stages.chain(8, between=(2, 32))
    assert between.peak([]) == pytest.approx(traced.peak([]), rel=0.02)
    assert between.batch_size == 8
    with pytest.raises(ValueError, match="from `low` to `high`"):
        stages.chain(64, between=(2, 32))
    assert costs.MIB == MIB


def test_wrong_data_start_no_process(monkeypatch):
    monkeypatch.setattr(batch_size, "Package", None)
    x, y = np.asarray(numbers(2, 64, 8)), np.asarray(numbers(2, 9, 64))
    with pytest.raises(CheckpointError, match=r"cannot take these data: .*[^.]\. Received: x of shape \(2, 64, 8\) and y of"):
        max_batch_size(net(8, 2), "8MiB", x=x, y=y, verbose=0)


def test_a_simulated_device_has_whole_mib(monkeypatch):
    def stop(model, arguments):
        raise KeyboardInterrupt

    asked = []
    monkeypatch.setattr(batch_size, "Package", stop)
    monkeypatch.setattr(batch_size._Prediction, "largest", lambda self, limit: asked.append(limit) or 1)
    with pytest.raises(KeyboardInterrupt):
        max_batch_size(net(8, 2), 64 * MIB + 7, verbose=0)
    assert asked == [64 * MIB] * 2
    assert max_batch_size(net(8, 2), 64 * MIB + 7, verify=False).memory_bytes == 64 * MIB + 7
