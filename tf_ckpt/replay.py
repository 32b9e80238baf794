"""`recompute`: run a function, keep its inputs only, and run it again, exactly, in the backward pass.

Built on `tf.recompute_grad` (gradient checkpointing after Chen et al. 2016, https://arxiv.org/abs/1604.06174), which by
itself draws another dropout mask in the re-run, updates BatchNorm twice, forgets `training`, masks and losses, and
takes neither keyword arguments nor anything but float tensors. Here the function meets the same state in both runs:

1. float tensors go in as arguments of the recomputed function, everything else by closure;
2. forward and re-run read variables through a `state.Record`; what the forward writes is assigned outside, once;
3. Keras masks, the call context and the autocast dtype are carried over; losses made inside leave as outputs;
4. a scalar token is the first argument and the first output. The re-run's token depends on all upstream gradients and on
   the forward's outputs, and whatever is not an argument is tied to it, so that no graph optimiser can merge the re-run
   with the forward run, whichever outputs are used.
"""

import contextlib
import inspect
import threading
import time
import warnings

import tensorflow as tf

from tf_ckpt import graph as keras_graph
from tf_ckpt import inspection, memory, placing, replicas, tf_internals
from tf_ckpt.errors import CheckpointError, CheckpointWarning
from tf_ckpt.ordering import in_order
from tf_ckpt.state import Record, is_bookkeeping, keep, take_weight_gradients, tie, zero_after


class _Local(threading.local):
    """Where a thread is; these are the values outside of everything."""

    disabled = False
    in_forward = False  # in the forward run of a segment
    record = None  # of that forward run
    recomputing = 0  # in a re-run
    rerun = None  # the run that is being run again
    observer = None


_local = _Local()
_scopes = []  # one entry for each `disabled()` that is open in any thread
_NAME = (
    "'{}' by tf_ckpt. Second-order gradients and forward-mode differentiation cannot go through a recomputed segment: "
    "run that part of the program under `with tf_ckpt.disabled():`, or remove `Recompute`/`tf_ckpt.apply` there."
)


@contextlib.contextmanager
def _in(**values):
    """A scope in which the attributes of `_local` are these."""
    before = {name: getattr(_local, name) for name in values}
    _local.__dict__.update(values)
    try:
        yield
    finally:
        _local.__dict__.update(before)


@contextlib.contextmanager
def disabled():
    """A scope in which nothing is recomputed: every segment runs plain, with the same values.

    Example:

    ```python
    with tf_ckpt.disabled():  # a gradient penalty needs gradients of gradients
        with tf.GradientTape() as outer:
            ...
    ```
    """
    _scopes.append(None)
    try:
        with _in(disabled=True):
            yield
    finally:
        _scopes.pop()


def _is_disabled():
    # A distribution strategy calls its replicas in threads of their own while the caller's thread waits.
    return _local.disabled or (bool(_scopes) and tf_internals.in_replica_thread())


def is_recomputing():
    """Returns True inside the re-run of a recomputed function, False in every forward run.

    For authors of layers: what a layer does in Python (a print, a counter, a log) happens in both runs. What shall happen
    once a step is done in the forward run alone. Values must not depend on it: those of both runs must be the same, as
    `tf_ckpt.check` tells. State belongs into Keras variables, which need no such care.

    Returns:
        Boolean. In a graph it is the value while the call is traced.

    Example:

    ```python
    class Block(keras.layers.Layer):
        def call(self, x):
            if not tf_ckpt.is_recomputing():
                self.calls += 1  # a Python attribute: would move twice
            return self.dense(x)
    ```
    """
    return _local.recomputing > 0


class _Clock:
    """Seconds that re-runs took in eager mode."""

    def __init__(self):
        self.seconds = 0.0


_clocks = []  # of all threads: a distribution strategy calls its replicas in threads of their own


@contextlib.contextmanager
def timing_reruns():
    """A scope that adds up, in the `seconds` of what it gives, how long the re-runs of eager mode take in it.

    It waits for the devices before and after each.
    """
    clock = _Clock()
    _clocks.append(clock)
    try:
        yield clock
    finally:
        _clocks.remove(clock)


@contextlib.contextmanager
def _timed():
    if not _clocks:
        yield
        return
    memory.synchronize()
    begun = time.perf_counter()
    try:
        yield
    finally:
        memory.synchronize()
        for clock in _clocks:
            clock.seconds += time.perf_counter() - begun


_listeners = []


@contextlib.contextmanager
def watching_calls(callback):
    """Calls `callback(fn, args, kwargs)` for each call of a recomputed function in this scope, nested ones included."""
    _listeners.append(callback)
    try:
        yield
    finally:
        _listeners.remove(callback)


@contextlib.contextmanager
def observed(observer):
    """A scope in which `observer` is told of what this thread recomputes. Nothing is warned of, and nothing is remembered.

    Args:
        observer: An object with the methods `calling(run, again)`, a context manager around each call of a recomputed function,
            with whether it is a re-run; `called(run, again, result, updates, losses)` when such a call was good, with what
            the function returned, a dict from the `id` of each variable that it wrote to the value, and a list of pairs of a
            layer and a loss that it added; and `runs_plain(name, reason)`. A run has the attributes `name` and `record`.
    """
    with _in(observer=observer):
        yield


def recompute(fn, *, name=None):
    """Makes `fn` keep only its inputs for the backward pass, and run again there.

    The values, all gradients and all state are those of `fn` itself, in eager mode, `tf.function` and XLA: dropout masks,
    BatchNorm statistics, Keras masks, `training`, `add_loss` and mixed precision included.

    Args:
        fn: A function of (nested structures of) tensors, that may call Keras layers. Tensors through which gradients
            shall flow must be arguments of it, not captured.
        name: Optional string that stands in error messages. Defaults to the name of `fn`.

    Returns:
        A function with the signature of `fn`.

    Raises:
        TypeError: If `fn` is not callable, or `name` is not a string.
        CheckpointError: When the result is called and cannot be exact: `fn` captures a tensor that is differentiated,
            draws random numbers that cannot be drawn again (`tf.random.*`), or writes a raw `tf.Variable`.

    Example:

    ```python
    block = tf_ckpt.recompute(lambda x: dropout(dense(x), training=True))
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(block(x))
    ```
    """
    if not callable(fn):
        raise TypeError(f"`fn` must be callable: a function of tensors, or a layer. Received: fn={fn!r}")
    if name is not None and not isinstance(name, str):
        raise TypeError(f"`name` must be a string or None. Received: name={name!r}")
    label = name or getattr(fn, "name", None) or getattr(fn, "__name__", None) or type(fn).__name__

    def recomputed(*args, **kwargs):
        if any(keras_graph.is_symbolic(x) for x in tf.nest.flatten((args, kwargs))) and not keras_graph.in_symbolic_scope():
            warnings.warn(
                f"'{label}' is not recomputed and saves no memory: called with a `keras.Input`, its layers become part of the "
                "model one by one. Use `tf_ckpt.Recompute(layer)`, or `tf_ckpt.apply(model)`.",
                CheckpointWarning,
                stacklevel=2,
            )
        return run(fn, args, kwargs, label)

    for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
        with contextlib.suppress(AttributeError, TypeError):
            setattr(recomputed, attribute, getattr(fn, attribute))
    with contextlib.suppress(TypeError, ValueError):  # Keras reads off it whether a layer's `call` takes `training`
        recomputed.__signature__ = inspect.signature(fn)
    return tf.autograph.experimental.do_not_convert(recomputed)


def reach(tensor):
    """Tells the forward run around, if there is one, that it has come to a tensor: see `Record.reach`.

    Args:
        tensor: A tensor that several operations of the plain function read, so that one reader more joins or parts none. One
            that is neither float nor complex, or made of several, such as a sparse one, says nothing.
    """
    if _local.record is not None and isinstance(tensor, tf.Tensor) and _differentiable(tensor):
        _local.record.reach(tensor)


def _differentiable(leaf):
    return _is_tensor(leaf) and (leaf.dtype.is_floating or leaf.dtype.is_complex)


def _is_tensor(leaf):
    return tf.is_tensor(leaf) and not isinstance(leaf, tf.Variable) and not keras_graph.is_variable(leaf)


def can_run(leaves):
    """Returns False where recompute has nothing to do: it is disabled, Keras asks for shapes only, no tape records, or a graph
    is made for a file, which holds no gradients of ours.
    """
    return not (
        _is_disabled()
        or any(keras_graph.is_symbolic(x) for x in leaves)
        or keras_graph.in_symbolic_scope()
        or (not tf_internals.tape_is_active() if tf.executing_eagerly() else keras_graph.is_exporting())
    )


def run(fn, args, kwargs, name, memo=None, logits=True):
    """Calls `fn(*args, **kwargs)` under recompute.

    Args:
        fn: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        name: String for messages and operation names.
        memo: Optional `inspection.Memo` that outlives the call: what was found out about `fn` is found out once.
        logits: Whether a loss may read the results. Keras' losses go back to the logits behind a softmax or sigmoid.

    Returns:
        What `fn` returns.
    """
    for tell in _listeners:
        tell(fn, args, kwargs)
    leaves = tf.nest.flatten((args, kwargs), expand_composites=True)
    if not can_run(leaves):
        return fn(*args, **kwargs)
    observer = _local.observer
    memo = inspection.Memo() if observer is not None else memo or inspection.memo_of(fn)
    signature = inspection.signature(leaves, keras_graph.current_training(), len(args), kwargs)
    if memo.plain(signature):
        return fn(*args, **kwargs)
    tf_internals.release_graphs()
    replicas.hook()
    mark, exchanges = replicas.mark(), None
    masks = [keras_graph.get_keras_mask(x) if _is_tensor(x) else None for x in leaves]
    for _ in range(4):
        exchanges = replicas.Exchanges(name, exchanges)
        try:
            _check_place(fn)
            return _Run(fn, args, kwargs, leaves, masks, name, memo, signature, logits, exchanges)()
        except inspection.RunAgain as found:
            _restore_masks(leaves, masks)
            replicas.go_back(mark, forget=found.created)
            exchanges = None if found.created else exchanges
        except inspection.RunPlain as found:
            _restore_masks(leaves, masks)
            replicas.go_back(mark)
            if observer is None:
                memo.set_plain(signature, found, name)
            else:
                observer.runs_plain(name, str(found))
            break
    with exchanges.forward() if exchanges else contextlib.nullcontext():
        return fn(*args, **kwargs)


def _restore_masks(leaves, masks):
    """Gives inputs the masks back that they came with: Keras' attention takes the mask off the tensor that it is given."""
    for leaf, mask in zip(leaves, masks, strict=True):
        if mask is not None:
            keras_graph.set_keras_mask(leaf, mask)


def _check_place(fn):
    if tf_internals.in_control_flow():
        raise inspection.RunPlain(
            "it is called inside a `tf.while_loop` or `tf.cond`. Recompute the whole loop, or unroll it in Python."
        )
    hidden = keras_graph.compiled_call(fn)
    if hidden is not None:
        raise inspection.RunPlain(f"the `call` of {hidden} is a `tf.function`, which recompute cannot see into.")


class _Run:
    """One call of a recomputed function: its forward run, and any number of re-runs."""

    def __init__(self, fn, args, kwargs, leaves, masks, name, memo, signature, logits, exchanges):
        self.fn, self.name, self.memo, self.signature, self.logits = fn, name, memo, signature, logits
        self.structure, self.leaves, self.masks = (args, kwargs), leaves, masks
        # A tensor that comes twice is one argument: its gradients are then added up in the order of the plain function.
        first = {}
        for i, leaf in enumerate(leaves):
            if _differentiable(leaf):
                first.setdefault(id(leaf), []).append(i)
        passive = memo.passive.get(signature, ())
        self.places = [places for places in first.values() if places[0] not in passive]
        self.kept_back = [places for places in first.values() if places[0] in passive]
        lifted = keras_graph.mapped_outside()
        self.lifted = [value for _, value in lifted]
        self.record = Record({number: i for i, (number, _) in enumerate(lifted)})
        self.watched = inspection.Watched()
        self.exchanges = exchanges
        self.device = ""
        self.graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        outer = _local.rerun
        self.outer, self.readers = outer, None  # the run that is being run again around this one
        self.begun = self.graph if outer is None else outer.begun  # where the outermost forward run was
        self.place = None if self.graph is None else _Place(name)
        self.result = None
        self.reached, self.raw_reads, self.uses = (), [], []
        self.done = False
        self.observer = _local.observer

    def __call__(self):
        inputs = [self.leaves[places[0]] for places in self.places] + self.lifted
        eager = tf.executing_eagerly()

        def body(token, *inputs):
            return self._body(token, *inputs)

        body.__name__ = _NAME.format(self.name)  # it stands in TensorFlow's own error
        token = tf.zeros([])
        self.device = tf_internals.asked_device(token)
        outputs = tf.recompute_grad(body)(token, *inputs)
        if not eager:
            placing.stay(outputs)
        known = [*inputs, *self.record.values(), *(x for x in self.leaves if _is_tensor(x))]
        for tensor in self.watched.captured(known, self.exchanges.told):
            if tf_internals.is_watched(tensor) or not (eager or not tf_internals.may_be_differentiated(tensor)):
                raise inspection.RunPlain(
                    "it captures a tensor that gradients may flow through. Pass the tensor as an argument. "
                    f"Received: {keras_graph.describe(tensor)}."
                )
        # In the forward run of a segment around this one nobody asks for gradients: the re-run there makes all anew.
        seen = None if eager or _local.in_forward else self._seen(outputs)
        outputs = _join(outputs, seen, self._check_order)
        count = len(self.record.losses)
        floats = iter(outputs[: len(outputs) - count])
        with tf.name_scope("tf_ckpt_state/"):
            self.record.settle(outputs[len(outputs) - count :])
        flat = [next(floats) if kept is _FLOAT else kept for kept in self.result[1]]
        for tensor, mask in zip(flat, self.result[2], strict=True):
            if mask is not None and keras_graph.get_keras_mask(tensor) is None:
                keras_graph.set_keras_mask(tensor, mask)
        for number, behind in zip(self.result[3], floats, strict=True):
            keras_graph.hang_logits(flat[number], behind)
        if not eager:
            made = (x for x in self.watched.tensors() if x._id in self.reached and x.op.type != "ReadVariableOp")
            self.uses = [(x, _users(x)) for x in made]
        structure, self.result, self.watched, self.reached = self.result[0], None, None, None
        return tf.nest.pack_sequence_as(structure, flat, expand_composites=True)

    def _body(self, token, *inputs):
        if not self.done:
            return self._forward(inputs)
        with placing.around(self.device):
            if self.place is None:
                with _timed():
                    return self._rerun(token, inputs)
            with self.place.rerun():
                return self._rerun(token, inputs)

    def _call(self, inputs, token):
        """Calls the function with `inputs` in their places, and the rest as it came, tied to `token`."""
        leaves, passed = list(self.leaves), set()
        for places, tensor in zip(self.places, inputs, strict=False):
            if tensor is not leaves[places[0]]:
                _carry_mask(self.masks[places[0]], tensor, token)
            for place in places:
                leaves[place] = tensor
                passed.add(place)
        if self.done:
            for i, leaf in enumerate(leaves):
                if _is_tensor(leaf) and i not in passed:
                    leaves[i] = tf.identity(leaf) if token is None else tie(leaf, token)
                    _carry_mask(self.masks[i], leaves[i], token)
        args, kwargs = tf.nest.pack_sequence_as(self.structure, leaves, expand_composites=True)
        if self.observer is None:
            return self.fn(*args, **kwargs)
        with self.observer.calling(self, self.done):
            return self.fn(*args, **kwargs)

    def _forward(self, inputs):
        lifted = inputs[len(self.places) :]
        created = keras_graph.uninitialized_variables()
        watched = self.watched
        try:
            told = self.exchanges.forward(watched)
            here = _in(recomputing=0, in_forward=True, record=self.record)
            with here, watched.watching(), told, self.record.forward(lifted, inputs):
                result = self._call(inputs, None)
        finally:
            if watched.tapes:  # nor can what came of it be trusted, an error included
                raise inspection.RunPlain(f"it {inspection.TAPE_INSIDE}.") from None
            # What the run reads after such a change is out of reach outside of the loop, which raises in TensorFlow.
            if self.record.changed_inside is not None:
                raise inspection.RunPlain(
                    f"it changes the state of '{self.record.changed_inside}' inside a loop or branch."
                ) from None
        if keras_graph.uninitialized_variables() > created:
            keras_graph.initialize_variables()
            raise inspection.RunAgain(created=True)
        watched.check(self.name)
        flat = tf.nest.flatten(result, expand_composites=True)
        floats, behind = self._floats(flat)
        masks = [keras_graph.get_keras_mask(x) if tf.is_tensor(x) else None for x in flat]
        outputs = [*floats, *behind.values()] + [loss for _, loss in self.record.losses]
        passed = inputs[: len(self.places)]
        kept_back = [self.leaves[places[0]] for places in self.kept_back]
        passive, self.reached = watched.judge(self.record.weights(), [*passed, *kept_back], outputs)
        if tf.executing_eagerly():
            known = [*outputs, *inputs, *self.record.values(), *self.record.new_values()]
            for tensor in watched.escaped(self.reached, known, self.exchanges.passed):
                raise inspection.RunPlain(
                    "a tensor that it makes leaves it otherwise than as a return value, so that its gradient would be "
                    f"lost. Return it. Received: {keras_graph.describe(tensor)}."
                )
        # What was found in an earlier call is a guess: an attribute or a branch of the function may have changed since.
        both = [*zip(self.places, passed, strict=True), *zip(self.kept_back, kept_back, strict=True)]
        found = {places[0] for places, x in both if x._id in passive}
        if found != {places[0] for places in self.kept_back}:
            self.memo.passive[self.signature] = found
            raise inspection.RunAgain
        self.result = result, [_FLOAT if _differentiable(x) else x for x in flat], masks, list(behind)
        self.raw_reads = self._raw_reads()
        self.kinds = [(x.dtype, x.shape) for x in outputs]
        if self.observer is not None:
            updates = {number: value for number, (_, value) in self.record.updates.items()}
            self.observer.called(self, False, result, updates, self.record.losses)
        self.done = True
        return (tf.zeros([]), *outputs)

    def _raw_reads(self):
        """Returns (handle, value, writers so far) of each `tf.Variable` that was read and is no Keras variable."""
        known = {tf_internals.handle_number(seen.raw) for seen in self.record.seen.values()}
        reads = [pair for number, pair in self.watched.reads.items() if number not in known]
        if tf.executing_eagerly():
            return [(handle, value, None) for handle, value in reads]
        here = tf.compat.v1.get_default_graph()
        return [(h, value, tf_internals.writers(value)) for h, value in reads if value.graph is here]

    def _seen(self, outputs):
        """Returns a function that says, when the backward pass begins, what the re-run waits for in the forward run.

        That is a float scalar, 0, that depends on the forward's outputs and on what the backward pass of the plain model reads:
        see `Watched.read_backward`. Or None in a re-run around this run where nothing reads what comes of its outputs: waited
        for, it would be made just for that. XLA joins the scalar with what waits for it, so all that it depends on is held
        from forward to re-run: there it depends on the outputs alone.
        """
        tensors, outer = outputs[1:], self.outer
        if not tf_internals.in_xla():
            tensors = [*tensors, *self._read_backward()]
        if outer is None:
            zero = zero_after(tensors)
            return lambda passed_on: zero
        return lambda passed_on: zero_after(tensors) if outer.readers.read_behind(passed_on) else None

    def _read_backward(self):
        here = tf.compat.v1.get_default_graph()
        return [x for x in self.watched.read_backward(self.reached) if x.graph is here]

    def _check_order(self):
        """Raises if a tape follows the backward pass itself: that a re-run would not show it all."""
        here = self.graph is None or self.begun is tf.compat.v1.get_default_graph()
        if not (here and tf_internals.tape_is_active()):  # elsewhere TensorFlow itself makes the backward function
            return
        sources = [x for x in self.leaves if _differentiable(x)]
        sources += [tf.convert_to_tensor(seen.raw) for seen in self.record.seen.values() if seen.weight]
        if any(tf_internals.is_watched(x) for x in sources):
            raise NotImplementedError(
                f"A gradient tape records the backward pass of {_NAME.format(self.name)} If no second-order gradient is "
                "wanted, take the gradient outside of the tape's `with` block."
            )

    def _check_since(self):
        """Raises if something happened since the forward run that the re-run cannot follow."""
        for handle, value, writers in self.raw_reads:
            if tf.executing_eagerly():
                now = tf.raw_ops.ReadVariableOp(resource=handle, dtype=value.dtype)
                changed = now.shape != value.shape or not bool(tf.reduce_all((now == value) | (value != value)))
            else:
                changed = tf_internals.writers(value) != writers
            if changed:
                raise CheckpointError(
                    f"A `tf.Variable` that '{self.name}' reads was changed between its forward run and its backward pass, "
                    "which would make its gradients wrong. Use a Keras variable, or change it after the backward pass. "
                    f"Received: {keras_graph.describe(value)}"
                )
        for tensor, uses in self.uses:
            if _users(tensor) != uses:
                raise CheckpointError(
                    f"A tensor that '{self.name}' makes leaves it otherwise than as a return value, so that its gradient "
                    f"would be lost. Return it. Received: {keras_graph.describe(tensor)}"
                )

    def _rerun(self, token, inputs):
        self._check_since()
        if self.graph is None:  # an eager forward run, which nothing merges with anything, wherever its backward pass is
            token = None
        else:
            token = tf.stop_gradient(token)
            readers = self.readers = inspection.Readers()
            originals = [self.leaves[places[0]] for places in self.places] + self.lifted
            inputs = _enter(inputs, originals, token, self.place, readers)
        lifted = inputs[len(self.places) :]
        told = self.exchanges.rerun(token)
        with _in(recomputing=1, in_forward=False, record=None, rerun=self), told, self.record.rerun(lifted, token) as scope:
            result = self._call(inputs, token)
            made = scope.owned_losses()
        losses = [loss for _, loss in made]
        if self.observer is not None:
            self.observer.called(self, True, result, scope.updates, made)
        floats, behind = self._floats(tf.nest.flatten(result, expand_composites=True))
        outputs = [*floats, *behind.values(), *losses]
        kinds = [(x.dtype, x.shape) for x in outputs]
        if len(kinds) != len(self.kinds) or any(
            a != b or not x.is_compatible_with(y) for (a, x), (b, y) in zip(kinds, self.kinds, strict=True)
        ):
            raise CheckpointError(
                f"'{self.name}' returned something else when it was run again, which would make its gradients wrong: it "
                "must depend on its arguments and on Keras variables only. Received: float results of "
                f"{[(a.name, tuple(x)) for a, x in kinds]}, in the forward run {[(a.name, tuple(x)) for a, x in self.kinds]}"
            )
        if token is not None:
            readers.end(outputs)
        return (tf.zeros([]), *outputs)

    def _floats(self, flat):
        """Returns the float ones among results, and the logits behind them, by position."""
        behind = {i: keras_graph.take_logits(x) for i, x in enumerate(flat) if _differentiable(x)}
        wanted = {i: x for i, x in behind.items() if x is not None and self.logits}
        return [flat[i] for i in behind], wanted


def _users(tensor):
    """Counts the operations that read a graph tensor for the user's ends."""
    return sum(not is_bookkeeping(op) for op in tensor.consumers())


_FLOAT = object()


def _scope(name):
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in name) or "segment"


def _carry_mask(mask, target, token):
    if mask is not None:
        keras_graph.set_keras_mask(target, tie(mask, token) if tf.is_tensor(mask) else mask)


def _enter(inputs, originals, token, place, readers):
    """Ties the re-run's inputs to the token, and gives its tensors the readers back that they have in the plain graph.

    The latter is done when the gradients of all inputs are there, so when the backward pass has made its operations.
    What `tf.recompute_grad` has tied has a name that differs from the plain graph's: see `_Place`.

    Args:
        inputs: List of tensors, to which the gradients go.
        originals: What the forward run got in their places.
        token: Float scalar, 0.
        place: `_Place` of the run.
        readers: `inspection.Readers` of the re-run.

    Returns:
        The list of tensors to use.
    """

    def gradient(*upstream):
        in_order(readers.backward())
        lone = readers.lone()
        if lone:
            keep(zero_after(lone))
        return upstream

    with tf_internals.recorded(gradient, inputs) as made:
        made += [tie(x, token, place.inside(x)) for x in originals]
    return made


class _Place:
    """Where operations of a run are in the graph, by name.

    Graph optimisers sort what they may multiply or add in any order by its names, and all gradients are called
    `gradient_tape/...`. So the re-run's operations begin with the same letters as the plain ones, and so do its inputs.
    """

    def __init__(self, name):
        self._graph = tf.compat.v1.get_default_graph()
        self._scope, self._name = self._graph.get_name_scope(), _scope(name)

    def _names(self):
        # Where the backward pass is a function of its own, the plain one takes all this from "PartitionedCall".
        root = "" if tf.compat.v1.get_default_graph() is self._graph else "PartitionedCall/"
        return root, root + (f"{self._scope}/tf_ckpt_recompute/{self._name}/" if self._scope else "")

    def rerun(self):
        """Returns the name scope of the re-run's operations."""
        return tf.compat.v1.name_scope(self._names()[1] or None)

    def inside(self, tensor):
        """Returns what `tensor` of the forward run is called in the re-run, or None if it has no name."""
        if not hasattr(tensor, "op"):  # an eager one, which the graph captures
            return None
        root, prefix = self._names()
        outer = f"{self._scope}/" if self._scope else ""
        return prefix + tensor.op.name[len(outer) :] if tensor.op.name.startswith(outer) else root + tensor.op.name


def _join(outputs, seen, arrived):
    """Passes outputs on, and makes the token's gradient depend on the gradients of all of them.

    `tf.recompute_grad` waits for the gradient of its first output only. The token also waits for the forward's own
    outputs: where the upstream gradient is a constant (a loss that is a plain sum), nothing else would keep the re-run
    from being merged with the forward run. Last, it waits for the gradients of later layers' weights: see `state.noted`.

    Args:
        outputs: The token and the outputs of the recomputed function.
        seen: See `_Run._seen`; None where the gradient is not asked for, or in eager mode.
        arrived: Callable that is called before the backward pass.

    Returns:
        The list of outputs, without the token.
    """
    if len(outputs) == 1:
        return []
    eager = tf.executing_eagerly()  # there everything happens in order, and nothing is merged

    @tf.custom_gradient
    def join(token, *outputs):
        def gradient(*upstream):
            # A gather behind an output sends a sparse gradient; what is recomputed takes it dense, as the plain ops do.
            upstream = [tf.convert_to_tensor(x) for x in upstream]
            arrived()
            if eager:
                return (tf.zeros([]), *upstream)
            tf_internals.take_gradients_apart(upstream)
            placing.stay(upstream)
            token, waited = zero_after([*upstream, *take_weight_gradients()]), seen(joined)
            return (token if waited is None else token + waited, *upstream)

        return [placing.passed_on(x) for x in outputs], gradient

    joined = join(*outputs)
    if not eager:
        placing.stay(joined)
    return joined
