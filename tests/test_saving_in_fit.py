"""Callbacks that save and resume, and graphs that are exported."""

import keras
import numpy as np
import pytest
import saving_models
import tensorflow as tf
from helpers import thirds
from saving_models import assert_equal, compiled, data, train

import tf_ckpt

L = keras.layers


@pytest.fixture
def no_dropout(monkeypatch):
    monkeypatch.setattr(saving_models, "rate", 0.0)


class Stop(keras.callbacks.Callback):
    """Ends the process, as it were, in an epoch."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise KeyboardInterrupt


def pair(make):
    """Returns two applied models of the same weights, each with an optimizer of its own."""
    models = [compiled(tf_ckpt.apply(make(), thirds)) for _ in range(2)]
    for v, source in zip(models[1].variables, models[0].variables, strict=True):
        v.assign(source)
    return models


@pytest.mark.usefixtures("no_dropout")
def test_backup_and_restore(tmp_path):
    make = saving_models.scaled
    model, whole = pair(make)
    want = train(whole, epochs=2)
    with pytest.raises(KeyboardInterrupt):
        train(model, epochs=2, callbacks=[keras.callbacks.BackupAndRestore(tmp_path), Stop(1)])
    resumed = compiled(tf_ckpt.apply(make(), thirds))
    logs, values = train(resumed, epochs=2, callbacks=[keras.callbacks.BackupAndRestore(tmp_path)])
    assert resumed.history.epoch == [1]
    assert_equal((logs, values), ({name: x[1:] for name, x in want[0].items()}, want[1]))


@pytest.mark.usefixtures("no_dropout")
@pytest.mark.parametrize("ending", [".keras", pytest.param(".weights.h5", marks=pytest.mark.slow)])
def test_model_checkpoint(ending, tmp_path):
    make = saving_models.functional
    model, whole = pair(make)
    want = train(whole, epochs=2)
    path = str(tmp_path / ("{epoch}" + ending))
    only = ending != ".keras"
    train(model, epochs=1, callbacks=[keras.callbacks.ModelCheckpoint(path, save_weights_only=only)])
    path = path.format(epoch=1)
    if only:
        resumed = compiled(tf_ckpt.apply(make(), thirds))
        resumed.load_weights(path)
    else:
        resumed = keras.models.load_model(path)
    assert tf_ckpt.plan_of(resumed) == tf_ckpt.plan_of(model)
    logs, values = train(resumed, epochs=2, initial_epoch=1)
    assert_equal((logs, values), ({name: x[1:] for name, x in want[0].items()}, want[1]))


EXPORTED = [saving_models.sequential, saving_models.nested, saving_models.inside_a_plain_one]


@pytest.mark.parametrize("make", EXPORTED, ids=lambda make: make.__name__)
def test_exported_graphs_have_no_gradients_of_ours(make, tmp_path):
    model = make()
    if make is not saving_models.inside_a_plain_one:
        model = tf_ckpt.apply(model, thirds)
    want = model.predict_on_batch(data()[0])
    model.export(tmp_path / "keras", verbose=False)
    model.export(tmp_path / "named", format="tf_saved_model", verbose=False)
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", lambda x: model(x, training=True), [tf.TensorSpec((None, 8))])
    archive.write_out(tmp_path / "training", verbose=False)
    for name in ("keras", "named", "training"):
        loaded = tf.saved_model.load(str(tmp_path / name))
        assert not _recomputes(tmp_path / name)
        have = loaded.serve(tf.constant(data()[0]))
        if name != "training":
            np.testing.assert_allclose(have, want, rtol=1e-6, atol=1e-6)
    # And the model itself goes on as before.
    function = tf.function(lambda x: model(x, training=True), autograph=False)
    assert "CustomGradient" in str(function.get_concrete_function(tf.TensorSpec((4, 8))).graph.as_graph_def())


def _recomputes(path):
    from tensorflow.core.protobuf import saved_model_pb2  # noqa: TID251

    text = str(saved_model_pb2.SavedModel.FromString((path / "saved_model.pb").read_bytes()))
    return "CustomGradient" in text or "_gradient_op_type" in text or "tf_ckpt" in text
