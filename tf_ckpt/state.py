"""The state that a recomputed function reads, writes and leaves behind.

One `Record` stands for one forward run. It remembers the value that each variable had when the run first read it, so
that the re-run, which comes after the variables have moved on, reads the same. Three kinds of variable differ:

- state that the run writes (BatchNorm statistics, seeds, counters) and integers: the re-run reads the snapshot, tied to
  the upstream gradient. Untied, graph optimisers see that forward and re-run draw the same random numbers, merge the
  two, and keep every dropout mask alive from forward to backward;
- weights: the re-run reads the live variable, so that nothing is copied, as long as nothing can have written it since;
- weights that were or may have been written since (by the layer itself, as SpectralNormalization does, or by an
  optimizer): the snapshot's value with the live variable's gradient;
- frozen weights: Keras' `trainable` is not TensorFlow's, so that a tape would watch them all the same. Unwatched, nothing
  before the first trainable weight is kept or run again, and no gradient of a frozen weight is computed anywhere.
"""

import contextlib

import tensorflow as tf

from tf_ckpt import graph as keras_graph
from tf_ckpt import placing, tf_internals


@tf.custom_gradient
def _value_of_first_gradient_to_second(value, variable_value):
    return tf.identity(value), lambda upstream: (None, upstream)


def noted(tensor):
    """Passes a weight's value on, and notes its gradient with the graph once there is one.

    What a segment makes anew is held until its weights' gradients are there. Nothing else would keep the re-run of the
    segment before from starting earlier, with all of it in memory, so its token waits for them. (Graph optimisers drop
    control dependencies.)
    """

    @tf.custom_gradient
    def identity(tensor):
        def gradient(upstream):
            _waits().append(upstream)
            return upstream

        return tf.identity(tensor), gradient

    tensor = identity(tensor)
    tensor._tf_ckpt_live = True  # segments inside read the variable themselves
    return tensor


def take_weight_gradients():
    """Returns tensors to wait for instead of the gradients that were noted in the present graph since the last time."""
    graph, waits = tf.compat.v1.get_default_graph(), _waits()
    taken = [tf_internals.behind_products(x) for x in waits if getattr(x, "graph", None) is graph]
    waits.clear()
    return taken


def _waits():
    """Returns the list of the present graph, where replicas have one each: the one must not wait for the other."""
    graph = tf.compat.v1.get_default_graph()
    waits = graph._tf_ckpt_waits = getattr(graph, "_tf_ckpt_waits", {})
    return waits.setdefault(tf_internals.replica_number(), [])


def tie(tensor, token, name=None):
    """Makes `tensor` depend on `token`, a float scalar that is 0, without changing a bit of it; `name` is its full name."""
    if token is None or tensor.dtype in (tf.string, tf.resource, tf.variant):
        return tensor
    with placing.on_device_of(tensor):
        if tensor.dtype == tf.bool:
            return tf.logical_or(tensor, tf.cast(token, tf.bool))
        token = tf.cast(token, tensor.dtype)
        if name is None:
            return tensor + token
        with tf.compat.v1.name_scope(None):
            return tf.add(tensor, token, name=name)


def _elements(tensors):
    """Returns the first elements of tensors as one vector."""
    flat, begin, end = tf.constant([-1]), tf.constant([0]), tf.constant([1])  # shared: a slice of its own makes three more
    found = []
    for x in tensors:
        with placing.on_device_of(x):  # one element is cheap to move, the tensor is not
            first = tf.raw_ops.StridedSlice(input=tf.reshape(x, flat), begin=begin, end=end, strides=end)
            found.append(tf.cast(tf.abs(first), tf.float32))
    return tf.concat(found, 0)


def zero_after(tensors):
    """Returns a float scalar that depends on all `tensors` and is 0 whatever they hold, NaN and nothing included.

    The operations are no part of the function that is recomputed: see `is_bookkeeping`.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    before = 0 if graph is None else len(graph.get_operations())
    largest = tf.reduce_max(tf.concat([_elements(tensors), [0.0]], 0))
    zero = tf.where(tf.math.is_nan(largest), 0.0, tf.minimum(largest, 0.0))
    if graph is not None:
        for op in graph.get_operations()[before:]:
            op._tf_ckpt_bookkeeping = True
        zero._tf_ckpt_snapshot = True  # nor does the function take it from outside
    return zero


def is_bookkeeping(op):
    """Returns whether a graph operation is one of `zero_after`.

    A function around a segment must not take those for its own: it would read what they read for its own backward pass, and
    so on, twice as much with each level.
    """
    return hasattr(op, "_tf_ckpt_bookkeeping")


def keep(zero):
    """Keeps graph optimisers from pruning `zero`, a scalar of `zero_after`: an assertion counts as a side effect."""
    tf.raw_ops.Assert(condition=zero <= 0.0, data=[tf.constant("tf_ckpt: not zero")])


class _Seen:
    """One variable as the forward run first saw it."""

    def __init__(self, variable, value, from_outside):
        self.variable, self.value, self.from_outside = variable, value, from_outside
        self.raw = keras_graph.raw_variable(variable)
        self.weight = tf_internals.is_weight(self.raw) and (value.dtype.is_floating or value.dtype.is_complex)
        self.frozen = self.weight and not variable.trainable
        self.weight &= not self.frozen
        self.writers = None

    def count_writers(self):
        if (self.weight or self.frozen) and not self.from_outside and not hasattr(self.value, "numpy"):
            self.writers = tf_internals.writers(self.value)

    def untouched(self):
        """Returns True if the live variable is known to hold the forward's value still."""
        if self.writers is None or self.from_outside:
            return False
        here = tf.compat.v1.get_default_graph()
        return here is self.value.graph and tf_internals.writers(self.value) == self.writers


class Record:
    """Snapshots, updates and losses of one forward run, and the scopes in which it and its re-runs happen.

    Args:
        lifted: Dict from `id(variable)` to a position in the recomputed function's arguments, for variables whose value
            is a tensor that the caller differentiates (`stateless_call`).
    """

    def __init__(self, lifted=None):
        self.lifted = lifted or {}
        self.seen = {}
        self.updates = {}
        self.losses = []
        self.changed_inside = None
        self._reached = self._zero = None
        self.surroundings = keras_graph.Surroundings()
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def _home(self):
        # A variable first met inside a loop body is read outside of it: the re-run could not reach the body's tensors.
        return contextlib.nullcontext() if self._graph is None else self._graph.as_default()

    def reach(self, *tensors):
        """Tells how far the forward run has come: what integer state, seeds above all, waits for from here on.

        Random numbers need nothing but a seed: those of the whole run would be drawn as soon as the step begins.
        """
        if tensors and self._graph is not None:
            self._reached, self._zero = tensors[0], None

    def _zero_here(self):
        if self._reached is None or tf.compat.v1.get_default_graph() is not self._graph:
            return None
        if self._zero is None:
            self._zero = tf.stop_gradient(zero_after([self._reached]))
            self._zero._tf_ckpt_snapshot = True
        return self._zero

    @contextlib.contextmanager
    def forward(self, arguments, inputs=()):
        """The scope of the forward run: reads are noted, updates and losses are held back.

        Args:
            arguments: The values of the `lifted` variables.
            inputs: Tensors that the run begins with: see `reach`.
        """
        updates = {}
        self.reach(*inputs[:1])

        def read(variable):
            if id(variable) in updates:
                return updates[id(variable)][1]
            if id(variable) in self.lifted:
                return arguments[self.lifted[id(variable)]]
            raw = keras_graph.raw_variable(variable)
            if raw is None:
                return None
            if id(variable) not in self.seen:
                outside = keras_graph.value_outside(scope, variable)
                with self._home():
                    # Also with a value from outside: it marks the variable as used, unless that is frozen.
                    value = tf.convert_to_tensor(raw) if variable.trainable else tf_internals.read_unseen(raw)
                    value._tf_ckpt_snapshot = True
                    from_outside = tf.is_tensor(outside) and not isinstance(outside, tf.Variable)
                    self.seen[id(variable)] = _Seen(variable, outside if from_outside else value, from_outside)
                    if from_outside and not self.seen[id(variable)].weight and keras_graph.is_state_scope(scope.original_scope):
                        outside._tf_ckpt_snapshot = True  # of an outer segment, so that segments inside may read it
            seen = self.seen[id(variable)]
            if seen.weight and not seen.from_outside:
                return None
            return seen.value if seen.value.dtype.is_floating else waiting(seen)

        waited = {}

        def waiting(seen):
            zero = self._zero_here()
            if zero is None:
                return seen.value
            key = id(seen), id(zero)
            if key not in waited:
                waited[key] = tie(seen.value, zero)
                waited[key]._tf_ckpt_snapshot = True
            return waited[key]

        def update(variable, value):
            read(variable)
            if self._graph is not None and getattr(value, "graph", self._graph) is not self._graph:
                self.changed_inside = variable.path
            updates[id(variable)] = variable, value

        scope = keras_graph.StateScope(read, update)
        with scope:
            yield
        self.updates = updates
        self.losses = scope.owned_losses()
        for seen in self.seen.values():
            seen.count_writers()

    @contextlib.contextmanager
    def rerun(self, arguments, token):
        """The scope of a re-run: reads give what the forward run saw, updates and losses are dropped."""
        updates, tied = {}, {}
        if token is not None:
            token = tf.stop_gradient(token)
        home = contextlib.nullcontext if tf.executing_eagerly() else tf.compat.v1.get_default_graph().as_default

        def weight(seen, value):
            with home():  # it may be first read in a function inside, such as a grouped convolution's
                return _value_of_first_gradient_to_second(value, live(seen))

        def live(seen):
            value = tf.convert_to_tensor(seen.raw)
            return value if token is None else noted(value)

        def read(variable):
            number = id(variable)
            seen = self.seen.get(number)
            if number in updates:
                value = updates[number]
                return weight(seen, value) if seen is not None and seen.weight else value
            if number in self.lifted:
                return arguments[self.lifted[number]]
            if seen is None:
                return None
            if seen.weight:
                if number not in self.updates and seen.untouched():
                    return None if token is None else live(seen)
                return weight(seen, seen.value)
            if seen.frozen and token is not None and number not in self.updates and seen.untouched():
                # Read anew, since what is made of the forward's value, such as a cast, would be kept for the re-run.
                value = tf_internals.read_unseen(seen.raw)
                value._tf_ckpt_live = True
                return value
            if number in self.updates or not seen.value.dtype.is_floating:
                if number not in tied:
                    with home():
                        tied[number] = tie(seen.value, token)
                return tied[number]
            return seen.value

        owners = [layer for layer, _ in self.losses]
        with self.surroundings.entered(), keras_graph.losses_kept(owners):
            # What is assigned may depend on what is differentiated; a variable read back never does.
            scope = keras_graph.StateScope(read, lambda v, value: updates.__setitem__(id(v), tf.stop_gradient(value)))
            scope.updates = updates
            with scope:
                yield scope
            scope.owned_losses()

    def weights(self):
        """Returns, by the number of their resource handle, the path of each Keras variable that was read.

        None stands for those that need no gradient: what is frozen or state.
        """
        read = {tf_internals.handle_number(x.raw): x for x in self.seen.values()}
        wanted = {number: x.weight and x.variable.trainable and not x.from_outside for number, x in read.items()}
        return {number: x.variable.path if wanted[number] else None for number, x in read.items() if number is not None}

    def new_values(self):
        """Returns what the forward run wrote to variables."""
        return [value for _, value in self.updates.values()]

    def values(self):
        """Returns the values of variables as the forward run read them."""
        return [seen.value for seen in self.seen.values()]

    def settle(self, losses):
        """Does outside what the forward run held back: assigns the updates, and adds the losses, once."""
        for variable, value in self.updates.values():
            variable.assign(value)
        for (layer, _), loss in zip(self.losses, losses, strict=True):
            layer.add_loss(loss)
