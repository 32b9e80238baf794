"""What a recomputed function does that a re-run could not repeat exactly, found by watching its operations.

Watched in each trace and in each eager call. What is found:

- state that no snapshot covers (raw `tf.Variable` writes, `tf.random.*`, iterators, a `tf.function` with state inside):
  `CheckpointError`. To run plain instead would come too late: the state has moved already;
- sparse gradients (`Embedding`), weights that are read but get no gradient, captured tensors that gradients flow through,
  tensors that leave other than as return values: recompute would change the gradients, so the function runs plain,
  with one warning. The forward run that was watched has left nothing behind;
- inputs that get no gradient are captured instead of passed, so that theirs stays None.
"""

import contextlib
import warnings
import weakref

import tensorflow as tf

from tf_ckpt import tf_internals
from tf_ckpt.errors import CheckpointError, CheckpointWarning
from tf_ckpt.state import is_bookkeeping

RANDOM = frozenset(
    [
        "RandomUniform",
        "RandomUniformInt",
        "RandomStandardNormal",
        "ParameterizedTruncatedNormal",
        "TruncatedNormal",
        "RandomShuffle",
        "Multinomial",
        "RandomGamma",
        "RandomPoisson",
        "RandomPoissonV2",
        "SampleDistortedBoundingBox",
        "SampleDistortedBoundingBoxV2",
        "RngReadAndSkip",
        "RngSkip",
        "StatefulStandardNormal",
        "StatefulStandardNormalV2",
        "StatefulTruncatedNormal",
        "StatefulUniform",
        "StatefulUniformInt",
        "StatefulUniformFullInt",
        "StatefulRandomBinomial",
    ]
)
_OTHER_STATE = ("IteratorGetNext", "QueueDequeue", "ReaderRead", "LookupTableInsert", "LookupTableImport")
_EXCHANGES = ("Collective", "Nccl", "Horovod")
_RAW = "a `tf.Variable`"
_GATHERS = frozenset(["GatherV2", "Gather", "ResourceGather"])
TAPE_INSIDE = "takes a gradient inside (`tf.GradientTape`), which records nothing under recompute"
_TRANSPARENT = frozenset(["Identity", "Cast", "ReadVariableOp"])


class RunPlain(Exception):
    """The function must run without recompute; the message is the reason."""


class RunAgain(Exception):
    """The forward run must be done once more: it created variables, or more is known about its inputs.

    Args:
        created: Whether it created variables, so that what it computed was made of values that they no longer have.
    """

    def __init__(self, created=False):
        super().__init__()
        self.created = created


class Memo:
    """What is known about one function, by kind of arguments."""

    def __init__(self):
        self.passive = {}
        self._plain, self._warned = weakref.WeakKeyDictionary(), False

    def plain(self, signature):
        """Returns True if the function is known to need to run plain, in the present graph or in eager mode."""
        return signature in self._plain.get(_place(), ())

    def set_plain(self, signature, reason, name):
        """Remembers that the function runs plain, and warns once."""
        self._plain.setdefault(_place(), set()).add(signature)
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"'{name}' is not recomputed and saves no memory: {reason} Training is right.",
                CheckpointWarning,
                stacklevel=4,
            )


class _Eager:
    """Stands for eager mode, where others have a graph."""


_EAGER = _Eager()


def _place():
    # A new graph is a new trace, often since something has changed: what ran plain is tried again.
    return _EAGER if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


_memos = weakref.WeakKeyDictionary()


def memo_of(fn):
    """Returns the memo of `fn`, which lives as long as `fn`."""
    try:
        return _memos.setdefault(fn, Memo())
    except TypeError:  # not hashable, or takes no weak reference
        return Memo()


def signature(leaves, training, count, names):
    """Returns what distinguishes one kind of call from another.

    Args:
        leaves: List of all arguments, flattened.
        training: Keras' `training` argument as a caller set it.
        count: The number of positional arguments.
        names: The names of the keyword arguments.
    """
    kinds = (x.dtype if tf.is_tensor(x) else x if isinstance(x, (bool, str, int, float)) else type(x) for x in leaves)
    return (tf.executing_eagerly(), training, count, tuple(sorted(names)), *kinds)


def unrepeatable(op_type, stateful=False):
    """Returns why an operation cannot be run again, or None.

    Args:
        op_type: String.
        stateful: Whether the operation calls a function that TensorFlow says has state.
    """
    if op_type in RANDOM:
        return f"draws random numbers with TensorFlow's {op_type}; use `keras.random` with a `keras.random.SeedGenerator`"
    if stateful:
        return "calls a `tf.function` that holds variables or other state, which recompute cannot see; take the decorator off"
    writes = (op_type.startswith("Assign") and op_type.endswith("VariableOp")) or op_type.startswith(
        ("ResourceScatter", "ResourceApply", "ResourceSparseApply", "ResourceStridedSliceAssign")
    )
    if writes:
        return f"writes a raw `tf.Variable` ({op_type}); use a Keras variable (`self.add_weight(trainable=False)`)"
    if op_type.startswith(_OTHER_STATE):
        return f"runs TensorFlow's {op_type}, which gives something else when it is run again"
    return None


class Watched:
    """The operations of one forward run as a graph of tensor numbers.

    Attributes:
        reads: Dict from the number of a resource handle to (handle, value read).
        tapes: How many gradient tapes were opened inside.
    """

    def __init__(self):
        self._home = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self.reads, self.tapes = {}, 0
        self._operations = []
        self._found = self._exchanged = None
        self._made = {}
        self._outside = {}
        self._links = []

    @contextlib.contextmanager
    def watching(self):
        """Watches what is run or created in this scope."""
        before = 0 if self._home is None else len(self._home.get_operations())
        with tf_internals.watch_operations(self._on_operation), tf_internals.watch_tapes(self._on_tape):
            yield
        if self._home is not None:
            # A graph's own list is complete; the calls of functions, for one, are not told to a watcher.
            links = list(self._links)
            for position, op in tf_internals.own_operations(self._home, before):
                while links and links[0][0] <= position:
                    self._operations.append(links.pop(0)[1])
                if not is_bookkeeping(op):
                    self._note(op.type, op.inputs, op.outputs)
            self._operations += [link for _, link in links]

    def _on_tape(self):
        self.tapes += 1

    def link(self, op_type, taken, made, position):
        """Notes what replicas told each other as an operation.

        Args:
            op_type: String.
            taken: List of tensors that gradients go to.
            made: List of tensors that gradients come from.
            position: Of the graph, where it began.
        """
        link = op_type, [x._id for x in taken], [(x._id, _carries_gradient(x)) for x in made]
        if self._home is None:
            self._operations.append(link)
        else:
            self._links.append((position, link))

    def blame(self, found):
        """Notes what others found that cannot be run again.

        Args:
            found: List of texts and None.
        """
        self._found = self._found or next((x for x in found if x), None)

    def _on_operation(self, op_type, inputs, outputs, graph):
        # Nothing is raised here: Keras would wrap it in an error of the layer's call.
        if tf_internals.is_elsewhere():
            return
        if self._home is None:
            self._note(op_type, inputs, outputs)
        else:
            self._found = self._found or unrepeatable(op_type, tf_internals.calls_state(op_type, outputs))

    def _note(self, op_type, inputs, outputs):
        self._found = self._found or unrepeatable(op_type, tf_internals.calls_state(op_type, outputs))
        if op_type.startswith(_EXCHANGES):
            self._exchanged = op_type
        if op_type == "ReadVariableOp":
            self.reads.setdefault(inputs[0]._id, (inputs[0], outputs[0]))
        for tensor in inputs:
            if tensor._id not in self._made and _carries_gradient(tensor):
                self._outside.setdefault(tensor._id, tensor)
        made = [(x._id, _carries_gradient(x) or x.dtype == tf.variant) for x in outputs]  # loops pass lists as variants
        eager = self._home is None
        self._made.update((x._id, weakref.ref(x) if eager else (x, op_type)) for x in outputs)
        self._operations.append((op_type, [x._id for x in inputs], made))

    def check(self, name):
        """Raises `CheckpointError` if an operation cannot be run again, `RunPlain` if it must not."""
        if self._found:
            raise CheckpointError(
                f"'{name}' cannot be recomputed exactly: it {self._found}, or leave it out of recompute. "
                f"Received: {name!r} under recompute"
            )
        if self._exchanged:
            raise RunPlain(
                f"it talks to other replicas by TensorFlow's {self._exchanged}, which must not be done again. Use `all_reduce` "
                "or `all_gather` of `tf.distribute.get_replica_context()`."
            )

    def captured(self, passed, told):
        """Returns the float tensors from outside that are not among `passed` or `told`, nor snapshots of an outer recompute.

        Args:
            passed: List of tensors.
            told: Set of numbers.
        """
        known = {x._id for x in passed} | told
        outside = ((number, x) for number, x in self._outside.items() if number not in known)
        return [x for number, x in outside if not hasattr(x, "_tf_ckpt_snapshot")]

    def escaped(self, reached, known, passed):
        """Returns the eager tensors among the numbers `reached` that are still alive, and not among `known` or `passed`.

        Args:
            reached: Collection of numbers.
            known: List of tensors.
            passed: Set of numbers.
        """
        known = {x._id for x in known} | {value._id for _, value in self.reads.values()} | passed
        alive = (self._made[number]() for number in reached if number in self._made and number not in known)
        return [x for x in alive if x is not None and _carries_gradient(x)]

    def read_backward(self, reached):
        """Returns the graph tensors made inside that the backward pass of the plain function reads.

        In the plain graph that keeps graph optimisers from joining what makes them with what takes them, in kernels that
        round otherwise (a matmul with `gelu`, say). Inputs of products are left out: nothing is joined across those.

        Args:
            reached: Collection of the numbers of tensors that gradients reach.
        """
        hidden, found = self._inside_custom_gradients(), set()
        for number, (op_type, taken, made) in enumerate(self._operations):
            if number in hidden:
                continue
            on_path = [x for x in taken if x in reached]
            if op_type in _READS_OTHERS:
                found.update(x for x in taken if any(y != x for y in on_path) or taken.count(x) > 1)
            elif op_type in _READS_INPUTS:
                found.update(on_path)
            elif op_type in _READS_OUTPUTS:
                found.update(x for x, _ in made)
        tensors = (self._made[x] for x in sorted(found) if x in reached and x in self._made)
        return [x for x, op_type in tensors if op_type != "ReadVariableOp" and _carries_gradient(x) and x.shape.rank]

    def _inside_custom_gradients(self):
        """Returns the positions of the operations inside custom gradients, whose backward pass is code of its own."""
        makers = {x: i for i, (_, _, made) in enumerate(self._operations) for x, _ in made}
        inside = set()
        for op_type, taken, _ in self._operations:
            if op_type == "IdentityN" and len(taken) > 1:  # outputs first, then inputs and variables
                stop, queue = set(taken[1:]), [taken[0]]
                while queue:
                    position = makers.get(queue.pop())
                    if position is not None and position not in inside:
                        inside.add(position)
                        queue += [x for x in self._operations[position][1] if x not in stop]
        return inside

    def tensors(self):
        """Returns all graph tensors made inside that carry gradients."""
        return [x for x, _ in self._made.values() if _carries_gradient(x)]

    def judge(self, weights, inputs, outputs):
        """Raises `RunPlain` if the gradient of a weight would differ from the plain function's.

        Args:
            weights: Dict from the number of a resource handle to the path of a trainable Keras variable, None for others.
            inputs: List of the tensors passed in.
            outputs: List of the float outputs, losses included.

        Returns:
            The numbers of the `inputs` that have no gradient path to any output, and of all tensors that gradients reach.
        """
        names = {number: weights.get(number, _RAW) for number in [*self.reads, *weights]}
        names = {number: name for number, name in names.items() if name is not None}
        sources = [*names, *(x._id for x in inputs)]
        reach = {number: {number} for number in sources}  # tensor number -> sources with a gradient path to it
        direct = set(names)
        for op_type, taken, made in self._operations:
            if op_type in _GATHERS and taken[0] in direct:
                name = next(names[h] for h in reach[taken[0]] if h in names)
                raise RunPlain(f"the gradient of '{name}' is sparse, and recompute would make it as large as the table.")
            through = set().union(*(reach.get(number, ()) for number in taken))
            if not through or not tf_internals.has_gradient(op_type):
                continue
            for number, carries in made:
                if carries:
                    reach[number] = reach.get(number, set()) | through
                    if op_type in _TRANSPARENT and taken[0] in direct:
                        direct.add(number)
        connected = set().union(*(reach.get(x._id, ()) for x in outputs))
        for handle, name in names.items():
            if handle not in connected:
                weight = name if name is _RAW else f"the weight '{name}'"
                raise RunPlain(
                    f"{weight} is read in it but gets no gradient from it, or in eager mode only through a `tf.function`, "
                    "which recompute does not see into there (grouped convolutions on the CPU are one)."
                )
        return {x._id for x in inputs} - connected, reach


class Readers:
    """Who reads the tensors of a re-run: the re-run itself, and the backward pass behind it.

    Grappler changes the order of products and sums, and joins operations in one kernel, only where nothing else reads
    what lies between. In the plain graph the forward pass reads a tensor as well as the backward pass; in a re-run
    that forward operation may lead nowhere. Then it is pruned, which saves its FLOPs, and would leave one reader.
    """

    def __init__(self):
        self._graph = tf.compat.v1.get_default_graph()
        self._begin, self._end, self._outputs = len(self._graph.get_operations()), None, ()
        self._all, self._names = _reruns.setdefault(self._graph, []), None

    def end(self, outputs):
        """Says that the re-run is done, and what it returns."""
        self._end, self._outputs = len(self._graph.get_operations()), {x._id for x in outputs}
        self._all.append((self._begin, self._end))

    def read_behind(self, tensors):
        """Returns whether an operation behind the re-run, so of its backward pass, reads what comes of `tensors` in it."""
        if self._names is None:
            self._names = {op.name for op in self._graph.get_operations()[self._begin : self._end]}
        met, queue = set(), list(tensors)
        while queue:
            for op in queue.pop().consumers():
                if op.name in met or op.type in _READS_SHAPES or is_bookkeeping(op):
                    continue
                if op.name not in self._names:
                    return True
                met.add(op.name)
                queue += op.outputs
        return False

    def backward(self):
        """Returns the operations of the backward pass, as far as it has been made, without re-runs inside of it."""
        inner = [(a, b) for a, b in self._all if a >= self._end]
        made = tf_internals.own_operations(self._graph, self._end)
        return [op for i, op in made if not any(a <= i < b for a, b in inner)]

    def lone(self):
        """Returns the tensors that have several readers in the plain graph, and one here.

        To be called when the backward pass has been made. The tensors are needed anyway: to read them costs no FLOPs.
        """
        operations = self._graph.get_operations()[self._begin : self._end]
        inside, alive, found = {x.name for x in operations}, set(), []
        for op in reversed(operations):
            for tensor in op.outputs:
                users = [x for x in tensor.consumers() if x.type not in _READS_SHAPES]
                own = [x.name for x in users if x.name in inside]
                backward, needed = len(own) < len(users), sum(x in alive for x in own)
                if backward or needed:
                    alive.add(op.name)
                plain = len(users) + (tensor._id in self._outputs)
                lone = plain > 1 and (needed == 0 if backward else needed == 1)
                if lone and len(op.inputs) and op.type != "ReadVariableOp" and _carries_gradient(tensor):
                    found.append(tensor)
        return found


_reruns = weakref.WeakKeyDictionary()  # graph -> pairs (first operation, end) of all re-runs in it
_READS_SHAPES = frozenset(["Shape", "ShapeN", "Size", "Rank", "ZerosLike"])  # zeros stand for a gradient that is not there
_READS_OTHERS = frozenset(["Mul", "RealDiv", "Div", "DivNoNan"])  # each input, for the gradients of the others
_READS_INPUTS = frozenset(
    [
        "Erf",
        "Erfc",
        "Log",
        "Log1p",
        "Square",
        "SquaredDifference",
        "Pow",
        "Maximum",
        "Minimum",
        "Softplus",
        "Softsign",
        "LeakyRelu",
        "Abs",
        "Sin",
        "Cos",
    ]
)
_READS_OUTPUTS = frozenset(
    ["Exp", "Tanh", "Sigmoid", "Sqrt", "Rsqrt", "Relu", "Relu6", "Elu", "Selu", "Softmax", "LogSoftmax", "Reciprocal", "Inv"]
)


def _carries_gradient(tensor):
    return tensor.dtype.is_floating or tensor.dtype.is_complex
