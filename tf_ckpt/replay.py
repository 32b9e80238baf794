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
import threading

import tensorflow as tf

from tf_ckpt import graph as keras_graph
from tf_ckpt import inspection, tf_internals
from tf_ckpt.state import Record, tie

_local = threading.local()
_NAME = (
    "'{}' by tf_ckpt. Second-order gradients and forward-mode differentiation cannot go through a recomputed segment: "
    "run that part of the program under `with tf_ckpt.disabled():`, or remove `Recompute`/`tf_ckpt.apply` there."
)


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
    before, _local.disabled = getattr(_local, "disabled", False), True
    try:
        yield
    finally:
        _local.disabled = before


def is_recomputing():
    """Returns True inside the re-run of a recomputed function, False in every forward run."""
    return getattr(_local, "recomputing", 0) > 0


@contextlib.contextmanager
def _recomputing(value):
    before, _local.recomputing = getattr(_local, "recomputing", 0), value
    try:
        yield
    finally:
        _local.recomputing = before


def recompute(fn, *, name=None):
    """Makes `fn` keep only its inputs for the backward pass, and run again there.

    The values, all gradients and all state are those of `fn` itself, in eager mode, `tf.function` and XLA: dropout masks,
    BatchNorm statistics, Keras masks, `training`, `add_loss` and mixed precision included.

    Args:
        fn: A function of (nested structures of) tensors, that may call Keras layers. Tensors through which gradients
            shall flow must be arguments of it, not captured.
        name: Optional string that stands in error messages and profiles. Defaults to the name of `fn`.

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
        return run(fn, args, kwargs, label)

    for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
        with contextlib.suppress(AttributeError, TypeError):
            setattr(recomputed, attribute, getattr(fn, attribute))
    return tf.autograph.experimental.do_not_convert(recomputed)


def _differentiable(leaf):
    return _is_tensor(leaf) and (leaf.dtype.is_floating or leaf.dtype.is_complex)


def _is_tensor(leaf):
    return tf.is_tensor(leaf) and not isinstance(leaf, tf.Variable) and not keras_graph.is_variable(leaf)


def run(fn, args, kwargs, name, memo=None):
    """Calls `fn(*args, **kwargs)` under recompute.

    Args:
        fn: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        name: String for messages and operation names.
        memo: Optional `inspection.Memo` that outlives the call: what was found out about `fn` is found out once.

    Returns:
        What `fn` returns.
    """
    leaves = tf.nest.flatten((args, kwargs), expand_composites=True)
    eager = tf.executing_eagerly()
    if (
        getattr(_local, "disabled", False)
        or any(keras_graph.is_symbolic(x) for x in leaves)
        or keras_graph.in_symbolic_scope()
        or (eager and not tf_internals.tape_is_active())
    ):
        return fn(*args, **kwargs)
    memo = memo or inspection.memo_of(fn)
    signature = inspection.signature(leaves)
    if memo.plain(signature):
        return fn(*args, **kwargs)
    tf_internals.release_graphs()
    try:
        return _Run(fn, args, kwargs, leaves, name, memo, signature)()
    except inspection.RunPlain as found:
        memo.set_plain(signature, found, name)
        return fn(*args, **kwargs)
    except inspection.RunAgain:  # variables were created: now they exist
        return run(fn, args, kwargs, name, memo)


class _Run:
    """One call of a recomputed function: its forward run, and any number of re-runs."""

    def __init__(self, fn, args, kwargs, leaves, name, memo, signature):
        self.fn, self.name, self.memo, self.signature = fn, name, memo, signature
        self.structure, self.leaves = (args, kwargs), leaves
        # A tensor that comes twice is one argument: its gradients are then added up in the order of the plain function.
        first = {}
        for i, leaf in enumerate(leaves):
            if _differentiable(leaf):
                first.setdefault(id(leaf), []).append(i)
        self.places = list(first.values())
        lifted = keras_graph.mapped_outside()
        self.lifted = [value for _, value in lifted]
        self.record = Record({number: i for i, (number, _) in enumerate(lifted)})
        self.result = None
        self.captured = []
        self.done = False

    def __call__(self):
        inputs = [self.leaves[places[0]] for places in self.places] + self.lifted

        def body(token, *inputs):
            return self._body(token, *inputs)

        body.__name__ = _NAME.format(self.name)  # it stands in TensorFlow's own error
        outputs = tf.recompute_grad(body)(tf.zeros([]), *inputs)
        for tensor in self.captured:
            if tf_internals.is_watched(tensor):
                raise inspection.RunPlain(
                    "it captures a tensor that gradients flow through. Pass the tensor as an argument. "
                    f"Received: {keras_graph.describe(tensor)}."
                )
        if not tf.executing_eagerly():
            outputs = _join(*outputs)
        else:
            outputs = outputs[1:]
        count = len(self.record.losses)
        floats = iter(outputs[: len(outputs) - count])
        with tf.name_scope("tf_ckpt_state/"):
            self.record.settle(outputs[len(outputs) - count :])
        flat = [next(floats) if kept is _FLOAT else kept for kept in self.result[1]]
        for tensor, mask in zip(flat, self.result[2], strict=True):
            if mask is not None and keras_graph.get_keras_mask(tensor) is None:
                keras_graph.set_keras_mask(tensor, mask)
        structure, self.result, self.captured = self.result[0], None, None
        return tf.nest.pack_sequence_as(structure, flat, expand_composites=True)

    def _body(self, token, *inputs):
        if not self.done:
            with tf.name_scope(f"tf_ckpt_forward/{_scope(self.name)}/"):
                return self._forward(inputs)
        with tf.name_scope(f"tf_ckpt_recompute/{_scope(self.name)}/"):
            return self._rerun(token, inputs)

    def _call(self, inputs, token):
        """Calls the function with `inputs` in their places, and the rest as it came, tied to `token`."""
        leaves = list(self.leaves)
        for places, tensor in zip(self.places, inputs, strict=False):
            _carry_mask(leaves[places[0]], tensor, token)
            for place in places:
                leaves[place] = tensor
        if token is not None:
            for i, leaf in enumerate(leaves):
                if _is_tensor(leaf) and not _differentiable(leaf):
                    leaves[i] = tie(leaf, token)
                    _carry_mask(leaf, leaves[i], token)
        args, kwargs = tf.nest.pack_sequence_as(self.structure, leaves, expand_composites=True)
        return self.fn(*args, **kwargs)

    def _forward(self, inputs):
        lifted = inputs[len(self.places) :]
        created = keras_graph.uninitialized_variables()
        with _recomputing(0), self.memo.watch(self.signature) as watched, self.record.forward(lifted):
            result = self._call(inputs, None)
        if keras_graph.uninitialized_variables() > created:
            keras_graph.initialize_variables()
            raise inspection.RunAgain
        flat = tf.nest.flatten(result, expand_composites=True)
        floats = [x for x in flat if _differentiable(x)]
        masks = [keras_graph.get_keras_mask(x) if tf.is_tensor(x) else None for x in flat]
        self.result = result, [_FLOAT if _differentiable(x) else x for x in flat], masks
        outputs = floats + [loss for _, loss in self.record.losses]
        if watched is not None:
            watched.judge(self.record.weights(), outputs)
            self.captured = watched.captured([*inputs, *self.record.values()])
        self.done = True
        return (tf.zeros([]), *outputs)

    def _rerun(self, token, inputs):
        if tf.executing_eagerly():
            token = None  # nothing merges anything there
        lifted = inputs[len(self.places) :]
        with _recomputing(1), self.record.rerun(lifted, token) as scope:
            result = self._call(inputs, token)
            losses = [loss for _, loss in scope.owned_losses()]
        floats = [x for x in tf.nest.flatten(result, expand_composites=True) if _differentiable(x)]
        return (tf.zeros([]), *floats, *losses)


_FLOAT = object()


def _scope(name):
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in name) or "segment"


def _carry_mask(source, target, token):
    mask = keras_graph.get_keras_mask(source)
    if mask is not None and target is not source:
        keras_graph.set_keras_mask(target, tie(mask, token) if tf.is_tensor(mask) else mask)


def _first(tensor):
    """Returns a float scalar that depends on `tensor` and is 0 whatever it holds, NaN and nothing included."""
    element = tf.reduce_max(tf.abs(tf.reshape(tensor, [-1])[:1]))
    element = tf.cast(element, tf.float32)
    return tf.where(tf.math.is_nan(element), 0.0, tf.minimum(tf.abs(element), 0.0))


@tf.custom_gradient
def _join(token, *outputs):
    """Passes `outputs` on, and makes the token's gradient depend on the gradients of all of them.

    `tf.recompute_grad` waits for the gradient of its first output only. It also waits for the forward's own outputs
    here: where the upstream gradient is a constant (a loss that is a plain sum), nothing else would keep the re-run from
    being merged with the forward run.
    """
    seen = [_first(tf.stop_gradient(x)) for x in outputs]

    def gradient(*upstream):
        return (tf.add_n([_first(x) for x in upstream] + seen), *upstream)

    return [tf.identity(x) for x in outputs], gradient
