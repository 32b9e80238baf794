"""Figures of an epoch or batch as scalars in TensorBoard's event files."""

import keras
import tensorflow as tf

from tf_ckpt import graph as keras_graph
from tf_ckpt.errors import CheckpointError, first_line

_SCALAR = tf.compat.v1.SummaryMetadata(plugin_data={"plugin_name": "scalars"}, data_class="DATA_CLASS_SCALAR")


class Scalars:
    """Writes where a callback's logs do not get by themselves.

    `keras.callbacks.TensorBoard` writes what is in the logs when its turn comes: nothing of what a callback after it in the
    list puts there. So for those that come first, this writes with their writers.

    Args:
        callback: The callback whose figures are written.
        log_dir: Optional directory for event files of our own.
    """

    def __init__(self, callback, log_dir):
        self._own = None if log_dir is None else _writer(log_dir)
        around = keras_graph.callbacks_around()
        place = next((i for i, other in enumerate(around) if other is callback), 0)
        self._boards = [
            keras_graph.tensorboard_writers(x) for x in around[:place] if isinstance(x, keras.callbacks.TensorBoard)
        ]

    def write(self, kind, figures, step):
        """Writes scalars under the names that Keras would give them.

        Args:
            kind: `"epoch"` or `"batch"`.
            figures: Dict from a key of the logs to a number.
            step: The number of the epoch, or of the batch since the run began.
        """
        known = {name: value for name, value in figures.items() if value is not None}
        if self._own is not None:
            _write(self._own, kind, known, step)
        for train, val in self._boards:
            apart = {name.removeprefix("val_"): value for name, value in known.items() if name.startswith("val_")}
            _write(train(), kind, {name: value for name, value in known.items() if not name.startswith("val_")}, step)
            if apart:
                _write(val(), kind, apart, step)

    def close(self):
        if self._own is not None:
            self._own.close()


def _writer(log_dir):
    try:
        tf.io.gfile.makedirs(log_dir)
        writer = tf.summary.create_file_writer(log_dir)
        writer.init()  # makes the file, so that one that cannot be made is told before training
    except (tf.errors.OpError, OSError) as error:
        raise CheckpointError(
            f"`log_dir` must be a directory that can be written to: {first_line(error)}. Received: log_dir={log_dir!r}"
        ) from error
    return writer


def _write(writer, kind, figures, step):
    with writer.as_default(), tf.summary.record_if(True):
        for name, value in figures.items():
            # What `tf.summary.scalar` does, which needs the package `tensorboard`.
            tf.summary.write(f"{kind}_{name}", tf.constant(value, tf.float32), step=step, metadata=_SCALAR)
    writer.flush()
