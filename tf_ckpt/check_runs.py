"""Runs of forward and backward for `check`: the plain model and the recomputed one, each from the very same state."""

import contextlib
import random
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf_ckpt import graph as keras_graph
from tf_ckpt import inspection, replay, snapshot, tf_internals
from tf_ckpt.observing import Observer
from tf_ckpt.python_state import PythonState

PLAIN, OURS = "plain", "recomputed"
_SEED = 1  # of TensorFlow's own random operations, so that layers that use them draw the same in all runs


class Results(NamedTuple):
    """What one run gave.

    Attributes:
        values: Dict from `(kind, name)` to an array, None for no gradient, or a pair of arrays for a sparse one.
        python: What layers keep in Python afterwards: see `PythonState.values`.
    """

    values: dict
    python: dict


class Subject:
    """A model with and without recompute, a batch, and the state from which each run starts.

    Args:
        plain: The plain model, or the one whose layers recompute.
        ours: The same with recompute. Under `disabled()` both are plain.
        batch: Tuple (x, y, sample_weight) of arrays; y and sample_weight may be None.
        loss: `"squares"`, or else `compute_loss` is called.
        optimizer: The one that scales the loss, or None.
        inputs: Whether float inputs are differentiated by, too.
        draws: Whether TensorFlow's own random operations are drawn from.
    """

    def __init__(self, plain, ours, batch, loss, optimizer, inputs, draws):
        self.models = {PLAIN: plain, OURS: ours}
        self.batch, self.loss, self.optimizer, self.inputs, self.draws = batch, loss, optimizer, inputs, draws
        self.variables = state_of(plain)
        self.start = snapshot.read(self.variables)
        self.python = {name: PythonState(keras_graph.holders(model)) for name, model in self.models.items()}
        self._random = random.getstate(), np.random.get_state()  # noqa: NPY002
        self.weights = list(plain.trainable_variables)
        self.known = frozenset(id(x) for x in keras_graph.holders(plain))

    def fresh(self):
        """Puts everything back to where each run starts."""
        snapshot.write(self.variables, self.start)
        for state in self.python.values():
            state.restore()
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])  # noqa: NPY002
        if self.draws:
            tf.random.set_seed(_SEED)

    def step(self, which, batch):
        """Returns outputs, loss, and gradients by weights and inputs."""
        x, y, weight = batch
        model = self.models[which]
        floats = [v for v in tf.nest.flatten(x) if self.inputs and v.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(floats)
            outputs = keras_graph.training_call(model)(x)
            loss = self._loss(model, x, y, outputs, weight)
            scaled = loss if self.optimizer is None else self.optimizer.scale_loss(loss)
        sources = [keras_graph.raw_variable(v) for v in self.weights]
        return outputs, loss, tape.gradient(scaled, [*sources, *floats])

    def _loss(self, model, x, y, outputs, weight):
        if self.loss != "squares":
            return keras_graph.loss_of(model, x, y, outputs, weight)
        floats = [v for v in tf.nest.flatten(outputs) if v.dtype.is_floating]
        # Not plain squares, whose gradient is 0 where an output is.
        parts = [tf.reduce_mean(tf.square(tf.cast(v, tf.float32) - 0.3)) for v in floats]
        return tf.add_n([*parts, *(tf.reduce_sum(tf.cast(v, tf.float32)) for v in model.losses), tf.zeros([])])

    def names(self):
        """Returns what the gradients are called, those of the inputs last."""
        count = len(keras.tree.flatten(self.batch[0])) if self.inputs else 0
        return [v.path for v in self.weights] + [f"input {i}" for i in range(count)]


def tensors(data):
    """Returns nested arrays as tensors; None stays None."""
    return keras.tree.map_structure(lambda x: None if x is None else tf.convert_to_tensor(x), data)


def state_of(model):
    """Returns all variables that a run may change: see `snapshot.state_variables`."""
    shared = tf_internals.global_generator()
    return [*snapshot.state_variables(model), *([] if shared is None else [shared.state])]


class Run:
    """Forward and backward in one mode, as often as it is called.

    Args:
        subject: A `Subject`.
        which: `"plain"` or `"recomputed"`.
        mode: `"eager"`, `"graph"` or `"xla"`.
        values: Whether to note what layers take and return in forward runs and re-runs.
    """

    def __init__(self, subject, which, mode, values=False):
        self.subject, self.which, self.mode, self.values = subject, which, mode, values
        self.observer, self.seen = None, ()
        self._step = self._body
        if mode != "eager":
            self._step = tf.function(self._body, autograph=False, jit_compile=mode == "xla")

    def __call__(self):
        """Runs once from the subject's state, and returns the `Results`."""
        subject = self.subject
        subject.fresh()
        batch = tensors(subject.batch)
        with _unoptimized(self.values and self.mode == "graph"):
            outputs, loss, gradients, self.seen = self._step(batch)
        values = {("output", str(i)): x.numpy() for i, x in enumerate(tf.nest.flatten(outputs, expand_composites=True))}
        values["loss", ""] = loss.numpy()
        values |= {("gradient", name): _array(x) for name, x in zip(subject.names(), gradients, strict=False)}
        for number, (variable, parts) in enumerate(zip(subject.variables, snapshot.read(subject.variables), strict=True)):
            values["state", f"{getattr(variable, 'path', variable.name)}#{number}"] = parts[0]
        return Results(values, subject.python[self.which].values())

    def differences(self, allowed):
        """Returns the first `observing.Pair` in each segment that differs between forward run and re-run."""
        return self.observer.first_differences(self._tensors, [x.numpy() for x in self.seen], allowed)

    def trace(self):
        """Returns the `observing.Trace` of all layers, of a plain run with values."""
        return self.observer.trace(self._tensors, [x.numpy() for x in self.seen])

    def _body(self, batch):
        self.observer = observer = Observer(self.values, self.subject.known)
        whole = observer.whole("model") if self.values and self.which == PLAIN else contextlib.nullcontext()
        with self._scope(), replay.observed(observer), observer.watching(), whole:
            outputs, loss, gradients = self.subject.step(self.which, batch)
        self._tensors = observer.tensors() if not tf.executing_eagerly() else []  # `tf.config.run_functions_eagerly`
        return outputs, loss, gradients, self._tensors

    def _scope(self):
        return replay.disabled() if self.which == PLAIN else contextlib.nullcontext()


@contextlib.contextmanager
def _unoptimized(active):
    """A scope in which graphs run as they were made: what is noted in both runs is then rounded alike."""
    before = tf.config.optimizer.get_experimental_options().get("disable_meta_optimizer", False)
    if active:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        if active:
            tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": before})


def _array(gradient):
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.indices.numpy(), gradient.values.numpy()
    return None if gradient is None else gradient.numpy()


def warmed_up(model, args, kwargs, graph):
    """Calls a model once, plain and without side effects on variables, so that all layers are built.

    Args:
        model: A `keras.Model` or layer.
        args: What it is called with, as arrays.
        kwargs: The same by name.
        graph: Whether to trace the call only.

    Returns:
        Whether TensorFlow's own random operations were drawn from.
    """
    draws = []

    def on_operation(op_type, inputs, outputs, graph):
        draws.append(op_type in inspection.RANDOM)

    def call():
        with replay.disabled(), keras_graph.no_side_effects(model), tf_internals.watch_operations(on_operation):
            keras_graph.training_call(model)(*tensors(args), **tensors(kwargs))

    before = keras_graph.uninitialized_variables()
    if graph:
        tf.function(call, autograph=False).get_concrete_function()
    else:
        call()
    if keras_graph.uninitialized_variables() != before:
        keras_graph.initialize_variables()
    return any(draws)
