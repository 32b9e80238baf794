"""A model that trains one step at a time, as `fit` does, and tells what each step took."""

import collections.abc
import time
from typing import NamedTuple

import keras
import tensorflow as tf

from tf_ckpt import graph as keras_graph
from tf_ckpt import memory, snapshot
from tf_ckpt.errors import CheckpointError, first_line, quoted
from tf_ckpt.transform import apply, remove

_TEXT = "OSU"  # kinds of NumPy's dtypes
TRAINED, OUT_OF_MEMORY = "trained", "out of memory"


class Outcome(NamedTuple):
    """What one step took: see `Trainee.turn`. All but the status is None where it is not known."""

    status: str
    loss: float | None = None
    seconds: float | None = None
    baseline: int | None = None
    peak: int | None = None


class Trainee:
    """Trains the variables of a model by a plan, through `fit`. The model object itself is left alone.

    Args:
        model: A plain or applied `keras.Model`.
        plan: The `Plan` to train by; one without segments trains the plain model.
        arguments: Dict of what to compile with: see `training_arguments`.
        batches: List of tuples `(x,)`, `(x, y)` or `(x, y, sample_weight)` of arrays.
    """

    def __init__(self, model, plan, arguments, batches):
        self.model = apply(model, plan)
        self.batches = batches
        with model.distribute_strategy.scope():
            keras_graph.compile_alone(self.model, **arguments)
        self._watch = _Watch()

    def turn(self, number, steps=1):
        """Trains one step, or some, on the batch of that number, modulo their count.

        Returns:
            An `Outcome` of the last step: loss, wall-clock seconds, and of the fullest device the bytes held before the
            step and the most within it.
        """
        try:
            data = self._dataset(self.batches[number % len(self.batches)]).repeat(steps)
            # Each turn is a `fit`, but not the end of training.
            with keras_graph.fit_without_end(self.model.optimizer):
                self.model.fit(data, epochs=1, verbose=0, shuffle=False, callbacks=[self._watch])
        except tf.errors.ResourceExhaustedError:
            return Outcome(OUT_OF_MEMORY)
        return self._watch.outcome

    def _dataset(self, batch):
        batch = keras.tree.map_structure(snapshot.copied, _tuples(batch))
        if self.model.distribute_strategy.num_replicas_in_sync == 1:
            return tf.data.Dataset.from_tensors(batch)  # holds the batch once
        return tf.data.Dataset.from_tensor_slices(batch).batch(len(keras.tree.flatten(batch)[0]))


class _Watch(keras.callbacks.Callback):
    async_safe = False  # Keras goes on to the next batch before this one is measured otherwise

    def __init__(self):
        super().__init__()
        self._meter = memory.PeakMeter(memory.devices())

    def on_train_batch_begin(self, batch, logs=None):
        self._meter.begin()
        self._begun = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        memory.synchronize()
        seconds = time.perf_counter() - self._begun
        usage = max(self._meter.end().values(), key=lambda used: used.peak, default=memory.Usage(None, None))
        loss = (logs or {}).get("loss")
        self.outcome = Outcome(TRAINED, None if loss is None else float(loss), seconds, *usage)


def training_arguments(model, optimizer=None, loss=None, jit_compile=None, default_loss=None):
    """Returns what to compile a copy of a model with.

    Args:
        model: A `keras.Model`.
        optimizer: See `tf_ckpt.compare`.
        loss: See `tf_ckpt.compare`.
        jit_compile: See `tf_ckpt.compare`.
        default_loss: The loss of a model that is not compiled, or None to refuse it.

    Returns:
        A dict of arguments of `compile`. Its optimizer is the model's own once that has slots, so that no second set of
        them takes memory, or else a copy.
    """
    own = keras_graph.compiled_with(model)
    if own is None and loss is None and default_loss is None:
        raise CheckpointError(
            f"Model '{model.name}' is not compiled: compile it, or give `loss` (and `optimizer`, which is Adam otherwise). "
            "Received: loss=None"
        )
    own = own or {"loss": default_loss, "optimizer": "adam"}
    arguments = {k: own[k] for k in ("loss", "loss_weights", "run_eagerly", "jit_compile") if own.get(k) is not None}
    if not (jit_compile is None or isinstance(jit_compile, bool) or (isinstance(jit_compile, str) and jit_compile == "auto")):
        raise CheckpointError(f'`jit_compile` must be True, False, "auto" or None. Received: jit_compile={quoted(jit_compile)}')
    if loss is not None:
        check_loss(loss)
        arguments.pop("loss_weights", None)
        arguments["loss"] = loss
    if jit_compile is not None:
        arguments["jit_compile"] = jit_compile
    present = getattr(model, "optimizer", None)
    with model.distribute_strategy.scope():
        if optimizer is not None or present is None:
            made = _copy(checked_optimizer(optimizer if optimizer is not None else own["optimizer"]))
            scaled = isinstance(made, keras.optimizers.LossScaleOptimizer)
            if model.dtype_policy.name == "mixed_float16" and not scaled:  # as `compile` does, but once for all copies
                made = keras.optimizers.LossScaleOptimizer(made)
        else:
            made = present if present.built else _copy(present)
        made.build(model.trainable_variables)
    return {**arguments, "optimizer": made, "auto_scale_loss": False}


def checked_optimizer(optimizer):
    """Returns the Keras optimizer that an argument stands for."""
    try:
        found = keras.optimizers.get(optimizer)
    except (ValueError, TypeError):
        found = None
    if not isinstance(found, keras.optimizers.Optimizer):
        kind = CheckpointError if isinstance(optimizer, str) else TypeError
        raise kind(f"`optimizer` must be a Keras optimizer or its name. Received: optimizer={quoted(optimizer)}")
    return found


def check_loss(loss):
    """Refuses a loss that `compile` would not take."""
    for one in keras.tree.flatten(loss):
        try:
            known = one is None or callable(keras.losses.get(one))
        except (ValueError, TypeError):
            known = False
        if not known:
            raise CheckpointError(
                f"`loss` must be what `compile` takes, such as the name of a loss. Received: loss={quoted(loss)}"
            )


def check_data(model, batch, arguments, made_up=False):
    """Refuses data that a model or its loss cannot take, before anything is trained on it.

    Args:
        model: A plain or applied `keras.Model`.
        batch: Tuple `(x,)`, `(x, y)` or `(x, y, sample_weight)` of arrays.
        arguments: See `training_arguments`.
        made_up: Whether the data are not the user's.
    """
    if keras_graph.has_own_step(model):  # which may do anything with them
        return
    if len(batch) == 1 and any(loss is not None for loss in keras.tree.flatten(arguments.get("loss"))):
        raise CheckpointError(f"The loss {quoted(arguments['loss'])} needs targets. Received: y=None")
    for name, arrays in zip(("y", "sample_weight"), batch[1:], strict=False):
        for array in keras.tree.flatten(arrays):
            if array.dtype.kind in _TEXT:
                raise CheckpointError(f"`{name}` must hold numbers. Received: {name} of dtype {array.dtype}")
    if arguments.get("run_eagerly"):  # the model may not be made for anything else
        return
    twin = keras_graph.with_executor(remove(model), None)
    with model.distribute_strategy.scope():
        keras_graph.compile_alone(twin, **arguments)
    try:
        keras_graph.check_step(twin, batch)
    except (ValueError, TypeError, tf.errors.OpError) as error:
        shapes = " and ".join(
            f"{name} of shape {', '.join(str(a.shape) for a in keras.tree.flatten(arrays)[:4])}"
            for name, arrays in zip("xy", batch, strict=False)
        )
        hint = " (made up: give `x` and `y`)" if made_up else ""
        raise CheckpointError(
            f"The model or its loss cannot take these data: {first_line(error)}. Received: {shapes}{hint}"
        ) from error


def _copy(optimizer):
    return type(optimizer).from_config(optimizer.get_config())


def _tuples(batch):
    """Returns nested data with tuples for lists, which `tf.data` would make one tensor of."""
    if isinstance(batch, collections.abc.Mapping):
        return {key: _tuples(value) for key, value in batch.items()}
    return tuple(_tuples(x) for x in batch) if isinstance(batch, (list, tuple)) else batch
