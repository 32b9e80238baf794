"""What replicas tell each other inside a recomputed function: once, in the forward run.

A synchronized BatchNormalization sums its statistics over all replicas of a `tf.distribute` strategy. Were that done again in
the re-run, all replicas would have to do it in the same order among everything else that they tell each other, or none would
ever go on. So a re-run is given what the forward run was told. Its gradient is exchanged as in the plain model, once. The same
where a forward run has to begin again.

`tf_ckpt.tf_internals` calls `all_reduce`, `all_gather` and `merge_call` below in the place of TensorFlow's own in the threads
of replicas; `Exchanges` is what one forward run was told. A strategy whose one replica needs no thread tells itself nothing.
"""

import contextlib
import threading

import tensorflow as tf

from tf_ckpt import inspection, tf_internals
from tf_ckpt.errors import CheckpointError
from tf_ckpt.state import tie

_local = threading.local()  # the scopes of the present thread, from the outermost to the innermost


class Exchanges:
    """What a forward run was told by other replicas, in order.

    Args:
        name: String for messages.
        begun: Optional `Exchanges` of the same run, which had to begin again.

    Attributes:
        passed: The numbers of the tensors that it told others, which a strategy goes on to hold.
        told: The numbers of the tensors that it was told, which are neither captured nor made by it.
    """

    def __init__(self, name, begun=None):
        self.name, self.passed, self.told = name, set(), set()
        self.made = list(begun.made) if begun else []

    def forward(self, watched=None):
        """The scope of the forward run.

        Args:
            watched: `inspection.Watched` of the run, if it is watched.
        """
        return _entered(_Scope(self, None, watched, False))

    def rerun(self, token):
        """The scope of a re-run.

        Args:
            token: Float scalar, 0, that what it gets is tied to, or None.
        """
        return _entered(_Scope(self, token, None, True))


def mark():
    """Returns where all scopes are, for `go_back`: what begins now may have to begin once more."""
    return [(scope, scope.next) for scope in _scopes()]


def go_back(marked, forget=False):
    """Goes back to `mark` in all scopes.

    Args:
        marked: What `mark` returned.
        forget: Whether what was told since is not told again.
    """
    for scope, place in marked:
        scope.next = place
        if forget and not scope.again:
            del scope.exchanges.made[place:]


class _Scope:
    def __init__(self, exchanges, token, watched, again):
        self.exchanges, self.token, self.watched, self.again, self.next = exchanges, token, watched, again, 0

    def knows(self):
        return self.next < len(self.exchanges.made)

    def told(self):
        """Returns what was told at this place."""
        structure, made = self.exchanges.made[self.next]
        return structure, [tie(x, self.token) if tf.is_tensor(x) else x for x in made]

    def go_on(self, taken, made, structure):
        if not self.knows():
            self.exchanges.made.append((structure, made))
        self.exchanges.passed.update(_numbers(taken))
        self.exchanges.told.update(_numbers(made))
        self.next += 1


def _numbers(values):
    return [x._id for x in values if isinstance(x, tf.Tensor)]


def _scopes():
    return getattr(_local, "scopes", ())


@contextlib.contextmanager
def _entered(scope):
    before = _scopes()
    _local.scopes = (*before, scope)
    try:
        yield
    finally:
        _local.scopes = before


def _source():
    """Returns the innermost scope that knows already what will be told, or None."""
    for scope in reversed(_scopes()):
        if scope.knows():
            return scope
        if scope.again:
            raise CheckpointError(
                f"'{scope.exchanges.name}' exchanged more with other replicas when it was run again, which would make its "
                f"gradients wrong: it must depend on its arguments and on Keras variables only. Received: {scope.next + 1} "
                f"exchanges, in the forward run {scope.next}"
            )
    return None


def _go_on(taken, made, structure=None):
    for scope in _scopes():
        scope.go_on(taken, made, structure)


def _link(op_type, taken, made, position):
    for scope in _scopes():
        if scope.watched is not None:
            scope.watched.link(op_type, taken, made, position)


def all_reduce(context, original, reduce_op, value, options=None):
    """As `tf.distribute.ReplicaContext.all_reduce`.

    Args:
        context: The `ReplicaContext`.
        original: TensorFlow's method.
        reduce_op: See there.
        value: See there.
        options: See there.
    """
    taken = tf.nest.flatten(value)
    if not _scopes() or any(isinstance(x, tf.IndexedSlices) for x in taken):  # the latter have no gradient
        return original(context, reduce_op, value, options)
    source = _source()

    @tf.custom_gradient
    def told(*taken):
        # As TensorFlow has it: the gradient of a sum over replicas is one, of a mean likewise.
        return source.told()[1], lambda *upstream: context.all_reduce(reduce_op, upstream)

    with tf_internals.elsewhere() as begin:
        made = tf.nest.flatten(original(context, reduce_op, value, options) if source is None else told(*taken))
    _go_on(taken, made)
    _link("AllReduce", taken, made, begin)
    return tf.nest.pack_sequence_as(value, made)


def all_gather(context, original, value, axis, options=None):
    """As `tf.distribute.ReplicaContext.all_gather`, which exchanges by `merge_call`."""
    begin, before = tf_internals.position(), getattr(_local, "trusted", False)
    _local.trusted = True
    try:
        result = original(context, value, axis, options)
    finally:
        _local.trusted = before
    _link("AllGather", tf.nest.flatten(value), tf.nest.flatten(result), begin)
    return result


def merge_call(context, original, merge_fn, args=(), kwargs=None):
    """As `tf.distribute.ReplicaContext.merge_call`, through which no gradient flows."""
    kwargs = {} if kwargs is None else kwargs
    if not _scopes() or tf_internals.is_elsewhere():
        with tf_internals.elsewhere():
            return original(context, merge_fn, args, kwargs)
    taken = tf.nest.flatten((args, kwargs), expand_composites=True)
    source = _source()
    if source is not None:
        with tf_internals.elsewhere():
            structure, kept = source.told()
    else:
        found = []
        with tf_internals.elsewhere():
            result = original(context, _watched(merge_fn, found), args, kwargs)
        for scope in _scopes():
            if scope.watched is not None:
                scope.watched.blame(found)
        numbers = {id(x): i for i, x in enumerate(taken)}
        # What comes back as it was passed is no news, and gradients go on through it.
        made = tf.nest.flatten(result, expand_composites=True)
        kept = [_Passed(numbers[id(x)]) if id(x) in numbers else x for x in made]
        structure = tf.nest.map_structure(lambda x: None if isinstance(x, tf.Tensor) else x, result)
    _go_on(taken, kept, structure)
    flat = [taken[x.number] if isinstance(x, _Passed) else x for x in kept]
    return tf.nest.pack_sequence_as(structure, flat, expand_composites=True)


class _Passed:
    """Stands for an argument among results."""

    def __init__(self, number):
        self.number = number


def _watched(merge_fn, found):
    """Returns the function, such that `found` gets why it cannot be part of a recomputed one. It runs in another thread."""
    if getattr(_local, "trusted", False):
        return merge_fn

    def on_operation(op_type, inputs, outputs, graph):
        found.append(inspection.unrepeatable(op_type, tf_internals.calls_state(op_type, outputs)))

    @tf.autograph.experimental.do_not_convert
    def merge(*args, **kwargs):
        with tf_internals.watch_operations(on_operation):
            return merge_fn(*args, **kwargs)

    return merge


def hook():
    """Puts the functions above in the place of TensorFlow's methods, in the threads of replicas. Done once."""
    tf_internals.hook_replicas(all_reduce=all_reduce, all_gather=all_gather, merge_call=merge_call)
