"""What a recomputed function does that a re-run could not repeat exactly, found by watching its operations.

Watched in each trace, and in eager mode in the first call for each kind of argument. What is found:

- operations with state that no snapshot covers (raw `tf.Variable` writes, iterators): `CheckpointError`;
- random numbers of `tf.random.*`, gradients through captured tensors, sparse gradients (`Embedding`), weights that are
  read but get no gradient: recompute would change the training, so the function runs plain, with one warning.
"""

import contextlib
import warnings
import weakref

import tensorflow as tf

from tf_ckpt import graph as keras_graph
from tf_ckpt import tf_internals
from tf_ckpt.errors import CheckpointError, CheckpointWarning

_RANDOM = frozenset(
    "RandomUniform RandomUniformInt RandomStandardNormal ParameterizedTruncatedNormal TruncatedNormal RandomShuffle "
    "Multinomial RandomGamma RandomPoisson RandomPoissonV2 SampleDistortedBoundingBox SampleDistortedBoundingBoxV2 "
    "RngReadAndSkip RngSkip StatefulStandardNormal StatefulStandardNormalV2 StatefulTruncatedNormal StatefulUniform "
    "StatefulUniformInt StatefulUniformFullInt StatefulRandomBinomial".split()
)
_OTHER_STATE = ("IteratorGetNext", "OptionalFromValue", "QueueDequeue", "ReaderRead", "LookupTableInsert", "LookupTableImport")
_GATHERS = frozenset({"GatherV2", "Gather", "ResourceGather"})
_TRANSPARENT = frozenset({"Identity", "Cast", "ReadVariableOp"})


class RunPlain(Exception):
    """The function must run without recompute; the message is the reason."""


class RunAgain(Exception):
    """The forward run created variables, so that it read no real values: run it once more."""


class Memo:
    """What is known about one function, by kind of arguments."""

    def __init__(self):
        self._known, self._plain, self._warned = set(), set(), False

    def plain(self, signature):
        """Returns True if the function is known to need to run plain."""
        return signature in self._plain

    def set_plain(self, signature, reason, name):
        """Remembers that the function runs plain, and warns once."""
        self._plain.add(signature)
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"'{name}' is not recomputed and saves no memory: {reason} Training is right.",
                CheckpointWarning,
                stacklevel=4,
            )

    @contextlib.contextmanager
    def watch(self, signature):
        """Watches the operations of a forward run, unless this kind of call is known to be good."""
        if tf.executing_eagerly() and signature in self._known:
            yield None
            return
        watched = Watched()
        with tf_internals.watch_operations(watched.on_operation):
            yield watched
        self._known.add(signature)


_memos = weakref.WeakKeyDictionary()


def memo_of(fn):
    """Returns the memo of `fn`, which lives as long as `fn`."""
    try:
        return _memos.setdefault(fn, Memo())
    except TypeError:  # not hashable, or takes no weak reference
        return Memo()


def signature(leaves):
    """Returns what distinguishes one kind of call from another."""
    kinds = (x.dtype if tf.is_tensor(x) else x if isinstance(x, (bool, str)) else type(x) for x in leaves)
    return (tf.executing_eagerly(), keras_graph.current_training(), *kinds)


class Watched:
    """The operations of one forward run as a graph of tensor numbers."""

    def __init__(self):
        self._operations = []
        self._found = None
        self._made = set()
        self._outside = {}

    def on_operation(self, op_type, inputs, outputs, graph):
        """Notes one operation."""
        if op_type in _RANDOM:
            # Not raised here: Keras would wrap it in an error of the layer's call.
            self._found = self._found or RunPlain(
                f"it draws random numbers with TensorFlow's {op_type}, which cannot be drawn again. "
                "Use `keras.random` with a `keras.random.SeedGenerator`."
            )
        if op_type.startswith(_OTHER_STATE) or _writes(op_type):
            self._found = CheckpointError(
                f"A recomputed function must not run TensorFlow's {op_type}: it would run twice. Keep state in Keras "
                "variables (`self.add_weight(trainable=False)`), or leave this layer out of recompute. Received: "
                f"{getattr(inputs[0], 'name', inputs[0]) if not tf.executing_eagerly() else op_type}"
            )
        numbers = []
        for tensor in inputs:
            numbers.append(tensor._id)
            if tensor._id not in self._made and (tensor.dtype.is_floating or tensor.dtype.is_complex):
                self._outside.setdefault(tensor._id, tensor)
        # A gradient also flows through lists of tensors, which loops use.
        made = [(x._id, x.dtype.is_floating or x.dtype.is_complex or x.dtype == tf.variant) for x in outputs]
        self._made.update(number for number, _ in made)
        self._operations.append((op_type, numbers, made))

    def captured(self, passed):
        """Returns the float tensors that come from outside and are not among `passed`."""
        known = {x._id for x in passed}
        return [tensor for number, tensor in self._outside.items() if number not in known]

    def judge(self, weights, outputs):
        """Raises what was found, and `RunPlain` if the gradient of a weight would differ from the plain function's.

        Args:
            weights: Dict from the number of a resource handle to the Keras variable.
            outputs: List of the float outputs, losses included.
        """
        if self._found is not None:
            raise self._found
        reach = {number: {number} for number in weights}  # tensor number -> handles with a gradient path to it
        direct = set(weights)
        for op_type, inputs, made in self._operations:
            if op_type in _GATHERS and inputs[0] in direct:
                names = ", ".join(weights[h].path for h in reach[inputs[0]])
                raise RunPlain(f"the gradient of '{names}' is sparse, and recompute would make it as large as the table.")
            through = set().union(*(reach.get(number, ()) for number in inputs))
            if not through or not tf_internals.has_gradient(op_type):
                continue
            for number, carries in made:
                if carries:
                    reach[number] = reach.get(number, set()) | through
                    if op_type in _TRANSPARENT and inputs[0] in direct:
                        direct.add(number)
        connected = set().union(*(reach.get(x._id, ()) for x in outputs))
        for handle, variable in weights.items():
            if handle not in connected:
                raise RunPlain(f"the weight '{variable.path}' is read in it but gets no gradient from it.")


def _writes(op_type):
    return (
        (op_type.startswith("Assign") and op_type.endswith("VariableOp"))
        or op_type.startswith(("ResourceScatter", "ResourceApply", "ResourceSparseApply", "ResourceStridedSliceAssign"))
    )
