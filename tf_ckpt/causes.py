"""Why a layer does not return the same when it is run again: what it is seen to do in one more plain run.

Watched are, while each layer's own code runs: TensorFlow's operations (random ones, writes of raw variables, Python inside
of graphs), the random state of Python and NumPy, calls of clocks and of the system's random source, and Python data that
layers and their functions hold.
"""

import contextlib
import datetime
import random
import sys

import keras
import numpy as np
import tensorflow as tf

from tf_ckpt import graph as keras_graph
from tf_ckpt import inspection, replay, tf_internals
from tf_ckpt.check_runs import tensors
from tf_ckpt.python_state import LIBRARIES, PythonState, is_users, short

UNKNOWN = (
    "not found: it is not the same when run twice on the same inputs. Look for time, files, threads, caches, or random numbers "
    "from elsewhere in its `call`, and pass what it needs as inputs, or keep it in Keras variables"
)
ROUNDING = (
    "rounding: the difference is in the last places only. Gradients of a tensor or weight with several readers are added up in "
    "another order, or a graph optimiser made other kernels. Training is as good; give `tolerance` to accept it"
)
VARIES = "two runs of the plain model from the same state differ as well"
_SEEDED = "Use `keras.random` with a `keras.random.SeedGenerator`"
_STATE = "Keep it in a Keras variable (`self.add_weight(trainable=False)`)"
_GUARD = "or, if it is for the record only, guard it by `if not tf_ckpt.is_recomputing():`"
_PYTHON_OPERATIONS = ("PyFunc", "EagerPyFunc", "PyFuncStateless")
_CLOCKS = frozenset(["time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time"])


class Evidence:
    """What layers were seen to do.

    Attributes:
        found: Dict from the `id` of a layer to a dict from kinds to texts.
    """

    def __init__(self):
        self.found = {}

    def add(self, layer, kind, text):
        self.found.setdefault(id(layer), {}).setdefault(kind, text)

    def of(self, layers):
        """Returns the texts of the first of `layers` that has any, as one, or ""."""
        for layer in layers:
            texts = self.found.get(id(layer), {})
            chosen = [text for kind, text in texts.items() if kind != _ASKS] or list(texts.values())
            if chosen:
                return "; ".join(dict.fromkeys(chosen))
        return ""


def gather(subject, which, mode):
    """Runs a model's forward pass once more, plain, and watches it.

    Args:
        subject: A `check_runs.Subject`.
        which: Which of its models.
        mode: `"eager"`, or else the call is traced only.

    Returns:
        An `Evidence`.
    """
    subject.fresh()
    watch = _Watch()
    model = subject.models[which]

    def call():
        x = tensors(subject.batch[0])
        quiet = keras_graph.no_side_effects(model)
        with replay.disabled(), quiet, watch.watching(), keras_graph.watching_calls(watch.around):
            keras_graph.training_call(model)(x)

    # A failure of its own is no news: what was seen until then is.
    with contextlib.suppress(Exception):
        if mode == "eager":
            call()
        else:
            tf.function(call, autograph=False).get_concrete_function()
    subject.fresh()
    return watch.evidence


class _Watch:
    def __init__(self):
        self.evidence = Evidence()
        self._stack, self._base = [], None

    @property
    def _present(self):
        return self._stack[-1] if self._stack else None

    @contextlib.contextmanager
    def watching(self):
        self._base = _random_states()
        with tf_internals.watch_operations(self._on_operation):
            before = sys.getprofile()
            sys.setprofile(self._on_event)
            try:
                yield
            finally:
                sys.setprofile(before)
                self._take_stock()

    def around(self, operation, call, args, kwargs):
        operation = keras_graph.original(operation)
        self._take_stock()
        own = isinstance(operation, keras.layers.Lambda) or is_users(type(operation).__module__)
        state = PythonState([operation]) if own else None
        self._stack.append(operation)
        self._base = _random_states()
        try:
            return call(*args, **kwargs)
        finally:
            self._take_stock()
            self._stack.pop()
            self._base = _random_states()
            for label, (was, now) in {} if state is None else state.changed().items():
                self.evidence.add(operation, f"python {label}", _moved(label, was, now))

    def _take_stock(self):
        """Notes whose code has drawn random numbers since the last time."""
        now = _random_states()
        if now[0] != self._base[0]:
            self.evidence.add(self._present, "numpy", f"it draws random numbers from `numpy.random`. {_SEEDED}")
        if now[1] != self._base[1]:
            self.evidence.add(self._present, "random", f"it draws random numbers with Python's `random`. {_SEEDED}")
        self._base = now

    def _on_operation(self, op_type, inputs, outputs, graph):
        reason = inspection.unrepeatable(op_type, tf_internals.calls_state(op_type, outputs))
        if reason:
            self.evidence.add(self._present, "operation", f"it {reason[0].lower()}{reason[1:]}")
        elif op_type == "Timestamp":
            self.evidence.add(self._present, "time", f"it reads the time (`tf.timestamp`). {_PASSED}")
        elif op_type in _PYTHON_OPERATIONS:
            text = "it runs Python code within TensorFlow (`tf.py_function`, `tf.numpy_function`), which may do anything"
            self.evidence.add(self._present, "python function", text)

    def _on_event(self, frame, event, function):
        if event == "call" and frame.f_code is replay.is_recomputing.__code__:
            self.evidence.add(self._present, _ASKS, "it asks `tf_ckpt.is_recomputing()`, and values must not depend on that")
        if event != "c_call":
            return
        module, name = getattr(function, "__module__", None), getattr(function, "__name__", "")
        owner = getattr(function, "__self__", None)
        if (module == "time" and name in _CLOCKS) or (
            isinstance(owner, type) and issubclass(owner, datetime.date) and name in ("now", "today", "utcnow")
        ):
            if is_users(frame.f_globals.get("__name__")):
                kind = f"{owner.__name__}.{name}" if isinstance(owner, type) else f"time.{name}"
                self.evidence.add(self._present, "time", f"it reads the time (`{kind}`). {_PASSED}")
        elif name == "urandom" and _user_behind(frame):
            text = (
                f"it draws unseeded random numbers: those of the operating system, or of a generator without a seed. {_SEEDED}"
            )
            self.evidence.add(self._present, "entropy", text)


_ASKS = "asks"  # most often for a good reason, so that all others come first
_PASSED = "Pass what depends on it as an input"


def _user_behind(frame):
    """Returns whether a user's code calls a function of Python or NumPy, rather than Keras or TensorFlow."""
    while frame is not None:
        top = str(frame.f_globals.get("__name__")).split(".")[0]
        if top != "numpy" and top in LIBRARIES:
            return False
        if is_users(top):
            return True
        frame = frame.f_back
    return False


def _random_states():
    name, keys, position, gauss, cached = np.random.get_state()  # noqa: NPY002
    return (name, keys.tobytes(), position, gauss, cached), random.getstate()


def _moved(label, was, now):
    if "generator" in (repr(was), repr(now)) or repr(was) == "a random generator":
        return f"it draws from the random generator {label}, which moves in both runs. {_SEEDED}"
    values = f"from {short(was)} to {short(now)}"
    return (
        f"it changes Python data, {label}, {values}, in both runs: a side effect, or state outside of Keras variables. "
        f"{_STATE}, {_GUARD}"
    )
