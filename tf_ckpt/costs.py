"""What each call in a model keeps for the backward pass, and what it costs to run again.

Each call is traced once, alone, forward and backward, into a scratch graph. What the backward operations read of the
forward ones is what training keeps (aliases such as `Reshape` once); the operations say the FLOPs. Layer output sizes
would miss attention scores and what `gelu` or a softmax keep. Calls alike (same class, settings and input shapes) are
traced once, so that a model of equal blocks costs one block; and each layer remembers its costs.
"""

import dataclasses
import inspect
import json
import math
import weakref

import numpy as np
import tensorflow as tf

from tf_ckpt import functions, tf_internals
from tf_ckpt import graph as keras_graph
from tf_ckpt.flops import Work, operation_flops, operation_work, unknown_types
from tf_ckpt.inspection import TAPE_INSIDE, unrepeatable
from tf_ckpt.liveness import ALIASES, ELEMENTWISE, FREE, UNKNOWN, buffers, held, highest, key_of, root, tensor_size
from tf_ckpt.ordering import reordered

MIB = 2**20
_EXPENSIVE = ("MatMul", "BatchMatMul", "Conv", "DepthwiseConv", "Einsum")


@dataclasses.dataclass(frozen=True)
class NodeCost:
    """The costs of one call, in bytes and FLOPs.

    Attributes:
        internal_bytes: Kept from forward to backward, inputs and outputs apart.
        reads_inputs: For each input, whether the backward pass reads it.
        reruns_inputs: For each input, whether a re-run reads it whose outputs nobody reads.
        reads_outputs: For each output, whether the call's own backward pass reads it.
        passes: For each input, whether its gradient is the very gradient of the one output, as it is for `Add`.
        input_uses: For each input, how many operations take it: as many gradients are summed up for it.
        flops: FLOPs of the forward run.
        pruned_flops: FLOPs of a re-run whose outputs nobody reads: what is left for the call's own backward pass.
        backward_flops: FLOPs of the backward pass.
        weight_bytes: Bytes of the trainable weights, hence of their gradients.
        expensive_end: Whether the call ends with a matmul or convolution.
        traced: False if the trace failed, and the figures stand for output sizes only.
        elementwise_start: Whether all that takes the inputs is elementwise, so that a graph optimiser may join it with the
            operation before.
        elementwise_end: The same of what makes the outputs.
        unrepeatable: Why the call cannot be run again exactly, or "".
        forward_extra: Most bytes of a forward run beside inputs and outputs, when nothing is kept.
        taped_extra: Most bytes of a forward run beside inputs, outputs and `internal_bytes`, when these are kept.
        backward_extra: Most bytes of the backward pass beside what was kept and the gradients of the outputs.
        backward_last: The same where nobody needs what it reads of the inputs and outputs afterwards, so that it is let go
            as soon as it is read.
        backward_again: The same in the backward pass of a re-run, whose products `ordering` puts in order.
        early: Bytes of the largest tensor that the backward pass makes of what was kept alone, which an executor makes before
            its turn where the gradients of the outputs are there already.
        largest: Bytes of the largest tensor that is made forward or backward.
        part: What can be recomputed inside the call: a `Part`, or None.
        unknown: Types of the operations whose FLOPs are a guess, one for each element that they make; sorted.
        work: What the forward run does, as a tuple of `flops.Work`. It names no device: a `Calibration` prices it.
        pruned_work: The same of `pruned_flops`.
        backward_work: The same of `backward_flops`.
    """

    internal_bytes: int
    reads_inputs: tuple
    reads_outputs: tuple
    input_uses: tuple
    flops: float
    pruned_flops: float
    backward_flops: float
    weight_bytes: int
    expensive_end: bool
    traced: bool = True
    elementwise_start: bool = False
    elementwise_end: bool = False
    unrepeatable: str = ""
    forward_extra: int = 0
    taped_extra: int = 0
    backward_extra: int = 0
    backward_last: int = 0
    backward_again: int = 0
    early: int = 0
    largest: int = 0
    part: object = None
    passes: tuple = ()
    reruns_inputs: tuple = ()
    unknown: tuple = ()
    work: tuple = ()
    pruned_work: tuple = ()
    backward_work: tuple = ()


@dataclasses.dataclass(frozen=True)
class Part:
    """The inner part of a layer that can be recomputed alone: the core of an attention layer, an activation.

    Attributes:
        name: `"attention"` or `"activation"`.
        internal_bytes: What the call keeps, inputs and outputs apart, when the part is recomputed.
        flops: FLOPs of the part's re-run.
        taped_extra: As in `NodeCost`, in that case.
        backward_extra: As in `NodeCost`, in that case.
        work: What the re-run does, as a tuple of `flops.Work`.
    """

    name: str
    internal_bytes: int
    flops: float
    taped_extra: int
    backward_extra: int
    work: tuple = ()


def concrete_shape(spec, batch_size):
    """Returns the shape of a symbolic tensor, with `batch_size` for an open batch, as a tuple of ints."""
    shape = [UNKNOWN if n is None else n for n in spec.shape]
    if spec.shape and spec.shape[0] is None:
        shape[0] = batch_size
    return tuple(shape)


def tensor_bytes(spec, batch_size):
    """Returns the bytes of a symbolic tensor for a batch size."""
    size = 1 if spec.dtype in ("bool", "string") else tf.as_dtype(spec.dtype).size
    return int(np.prod(concrete_shape(spec, batch_size), dtype=np.int64)) * size


_REMEMBERED = 64  # costs a layer: batch sizes, times input shapes, times inputs without a gradient
_remembered = weakref.WeakKeyDictionary()  # operation -> {key: NodeCost}, for as long as the operation lives


def node_cost(node, batch_size, cache, differentiated=None):
    """Returns the `NodeCost` of a `graph.Node`.

    Args:
        node: The node.
        batch_size: Integer that stands for an open batch dimension.
        cache: Dict that keeps the costs of calls alike.
        differentiated: For each input, whether a gradient with respect to it is asked for: not for the inputs of a model
            in `fit`, nor for what comes before the first trainable weight. None: for all of a float dtype.

    Returns:
        A `NodeCost`. Calls that get no gradient at all keep nothing and have no backward pass.
    """
    differentiated = tuple(differentiated) if differentiated is not None else (True,) * len(node.inputs)
    key, whole = _key(node, batch_size, differentiated)
    own = _of_operation(node.operation) if whole else {}
    if key not in cache and key in own:
        cache[key] = own[key]
    if key not in cache:
        cache[key] = _traced_or_by_size(node, batch_size, differentiated)
    if key not in own and len(own) >= _REMEMBERED:
        own.clear()
    own[key] = cache[key]
    return cache[key]


def _traced_or_by_size(node, batch_size, differentiated, again=True):
    before = keras_graph.uninitialized_variables()
    try:
        found = _trace(node, batch_size, differentiated)
    except Exception:  # any layer, with code of its own: its sizes must do
        found = by_size(node, batch_size)
    if keras_graph.uninitialized_variables() == before:
        return found
    # A layer that builds what is inside of it when it is first called: left without values, its variables would fail in `fit`.
    with tf.init_scope():
        keras_graph.initialize_variables()
    return _traced_or_by_size(node, batch_size, differentiated, again=False) if again else found


def node_cost_between(node, batch_size, low, high, cache, differentiated=None):
    """Returns the `NodeCost` of a node for one of many batch sizes, from the traces for two.

    Bytes and FLOPs are sums of products of sizes, so that they grow in proportion to the batch beside what does not
    depend on it. Peaks are the greatest of several such sums: between the two batch sizes they are at most what is
    returned here. A call that is not alike for both (one reads its inputs in the backward pass, the other does not) is
    traced. Take more than one for `low`: a batch of one broadcasts.

    Args:
        node: The node.
        batch_size: Integer, from `low` to `high`.
        low: The least batch size that is traced.
        high: The largest.
        cache: As in `node_cost`.
        differentiated: As in `node_cost`.

    Raises:
        ValueError: If `batch_size` is not from `low` to `high`: a line through both could then be too low.
    """
    if not low <= batch_size <= high:
        raise ValueError(f"`batch_size` must be from `low` to `high`. Received: {batch_size=}, {low=}, {high=}")
    first, second = (node_cost(node, size, cache, differentiated) for size in (low, high))
    share = (batch_size - low) / max(high - low, 1)
    found = _between(first, second, share)
    return found if found is not None else node_cost(node, batch_size, cache, differentiated)


def _between(first, second, share):
    """Returns the cost at a share of the way from one to another, or None if they differ in kind."""
    values = {}
    for field in dataclasses.fields(first):
        a, b = getattr(first, field.name), getattr(second, field.name)
        if isinstance(a, Part) and isinstance(b, Part):
            values[field.name] = _between(a, b, share)
            if values[field.name] is None:
                return None
        elif isinstance(a, (int, float)) and not isinstance(a, bool):
            values[field.name] = _number_between(a, b, share)
        elif a == b:
            values[field.name] = a
        elif field.name.endswith("work") and [(x.kind, x.times) for x in a] == [(x.kind, x.times) for x in b]:
            values[field.name] = tuple(
                x._replace(flops=_number_between(x.flops, y.flops, share), bytes=_number_between(x.bytes, y.bytes, share))
                for x, y in zip(a, b, strict=True)
            )
        else:
            return None
    return type(first)(**values)


def _number_between(a, b, share):
    value = a + (b - a) * share
    return math.ceil(value - 1e-6) if isinstance(a, int) else value


def _of_operation(operation):
    try:
        return _remembered.setdefault(operation, {})
    except TypeError:  # a class with an `__eq__` and no `__hash__`
        return {}


def _key(node, batch_size, differentiated):
    """Returns what is the same for calls alike, and whether it says all, so that costs may be kept beyond one reading."""

    def shapes(ids):
        return tuple((concrete_shape(node.specs[x], batch_size), str(node.specs[x].dtype)) for x in ids)

    operation, whole = node.operation, True
    try:
        config = dict(operation.get_config())
        for own in ("name", "seed"):  # a seed is drawn anew for each layer
            config.pop(own, None)
        settings = json.dumps(config, sort_keys=True, default=repr)
        whole = not (" at 0x" in settings or _has_own_function(operation))
    except Exception:  # operations without a config
        whole = False
    settings = settings if whole else str(id(operation))
    trainable = tuple(v.trainable for v in getattr(operation, "weights", ()))
    repeats = tuple(node.inputs.index(x) for x in node.inputs)
    flags = json.dumps(keras_graph.plain_arguments(node), default=repr)
    sizes = shapes(node.inputs), repeats, shapes(node.outputs), batch_size
    return (type(operation), settings, trainable, *sizes, flags, differentiated), whole


def _has_own_function(operation):
    """Returns True if a config does not tell all: it names functions, and names may be alike."""
    own = [x for x in vars(operation).values() if inspect.isfunction(x)]
    return any(not x.__module__.startswith("keras.") for x in own if hasattr(x, "__module__") and x.__name__ not in _METHODS)


_METHODS = ("build", "quantize")  # Keras' own wrappers, which bear the layer's module


def _weights(node):
    return keras_graph.trained_weights(node.operation)


def _weight_bytes(node):
    return sum(int(np.prod(v.shape, dtype=np.int64)) * tf.as_dtype(v.dtype).size for v in _weights(node))


def by_size(node, batch_size):
    """Returns a `NodeCost` of a node from the sizes of its outputs alone, without a trace."""
    size = sum(tensor_bytes(node.specs[x], batch_size) for x in node.outputs)
    ones, weights = [1] * len(node.inputs), _weight_bytes(node)
    once = Work("memory", size, 2 * size)  # read and written
    work = {"work": (once,), "pruned_work": (once,), "backward_work": (once, once)}
    return NodeCost(
        size, (True,) * len(ones), (True,) * len(node.outputs), tuple(ones), size, size, 2 * size, weights, False, False, **work
    )


def _trace(node, batch_size, differentiated):
    tf_internals.release_graphs()
    reasons, inside = [], []
    part_name, attribute = keras_graph.inner_part(node.operation)

    def marked(function):
        def call(*args, **kwargs):
            before = len(scratch.get_operations())
            result = function(*args, **kwargs)
            inside.append({id(op) for op in scratch.get_operations()[before:]})
            return result

        return call

    def on_operation(op_type, inputs, outputs, graph):
        reasons.append(unrepeatable(op_type, tf_internals.calls_state(op_type, outputs)))

    def on_tape():
        reasons.append(TAPE_INSIDE)

    with tf_internals.scratch_graph("tf_ckpt_costs") as scratch:
        values = {}
        for x in node.inputs:
            spec = node.specs[x]
            values.setdefault(x, tf.compat.v1.placeholder(spec.dtype, concrete_shape(spec, batch_size)))
        inputs = list(values.values())
        wanted = {x for x, w in zip(node.inputs, differentiated, strict=True) if w}
        floats = [x for number, x in values.items() if number in wanted and x.dtype.is_floating]
        weights = [keras_graph.raw_variable(v) for v in _weights(node)]
        with keras_graph.no_side_effects(node.operation), tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([*floats, *weights])
            replaced = keras_graph.part_replaced(node.operation, attribute, marked)
            with tf_internals.watch_operations(on_operation), tf_internals.watch_tapes(on_tape), replaced:
                node.call(keras_graph.training_call, values)
            outputs = [tf.convert_to_tensor(values[x]) for x in node.outputs]
        split = len(scratch.get_operations())
        seeds = {y.ref(): tf.compat.v1.placeholder(y.dtype, y.shape) for y in outputs if y.dtype.is_floating}
        targets = [y for y in outputs if y.ref() in seeds]
        results = []
        if targets and (floats or weights):
            results = tape.gradient(targets, [*floats, *weights], output_gradients=[seeds[y.ref()] for y in targets])
    operations = scratch.get_operations()
    reason = next((r for r in reasons if r), "")
    seeds = list(seeds.values())
    own = {seeds[0].ref()} if len(seeds) == len(outputs) == 1 else set()
    passed = {x.ref() for x, y in zip(floats, results, strict=False) if tf.is_tensor(y) and root(y, own).ref() in own}
    results = [x.values if isinstance(x, tf.IndexedSlices) else x for x in results if x is not None]
    account = _Account(operations[:split], operations[split:], inputs, outputs, seeds, results)
    account.passes = [x.ref() in passed for x in inputs]
    return account.cost(node, reason, part_name, inside)


class _Account:
    """What the operations of one call, forward and backward, say of its costs."""

    def __init__(self, forward, backward, inputs, outputs, seeds, results):
        self.inputs, self.outputs, self.seeds, self.results = inputs, outputs, seeds, results
        self.passes = [False] * len(inputs)
        # What no gradient needs, a graph optimiser takes out: Keras runs the first step of an RNN to see its shapes.
        self.backward = _needed([x.op for x in results], backward)
        self.stop = {x.ref() for x in inputs}
        self.roots = {root(y, self.stop).ref(): i for i, y in reversed(list(enumerate(outputs)))}
        made = {id(op) for op in forward}
        self.read, reached, compiled = {}, set(), []
        for op in self.backward:
            for tensor in op.inputs:
                found, source = root(tensor, self.stop), functions.behind(tensor)
                self.read[found.ref()] = found
                reached |= {key_of(found), *buffers(found, ())}
                if id(source.op) in made and functions.is_whole(source.op):
                    compiled.append(source.op)
        self.reads_inputs = [key_of(x) in reached for x in inputs]
        self.own_outputs, self.internal = [False] * len(outputs), []
        for reference, i in self.roots.items():
            self.own_outputs[i] = key_of(reference.deref()) in reached and reference not in self.stop
        self.kept_operations = compiled
        for reference, tensor in self.read.items():
            if reference in self.stop or id(tensor.op) not in made or tensor.op.type in FREE or not buffers(tensor, ()):
                continue
            if reference not in self.roots:
                self.internal.append(tensor)
            self.kept_operations.append(tensor.op)
        self.outside = self.stop | set(self.roots)
        self.forward = _needed([y.op for y in outputs] + self.kept_operations, forward)

    def cost(self, node, reason, part_name, inside):
        stop, outputs = self.stop, self.outputs
        uses, takers = self._takers()
        unique = list(dict.fromkeys(node.inputs))
        internal = held(self.internal, self.outside)
        untaped, taped, back, last, again = self._peaks(self.internal)
        pruned = _needed(self.kept_operations, self.forward)
        taken = {root(x, stop).ref() for op in pruned if op.type not in FREE for x in op.inputs}
        return NodeCost(
            internal_bytes=internal,
            reads_inputs=tuple(self.reads_inputs[unique.index(x)] for x in node.inputs),
            reads_outputs=tuple(self.own_outputs),
            reruns_inputs=tuple(self.inputs[unique.index(x)].ref() in taken for x in node.inputs),
            passes=tuple(self.passes[unique.index(x)] for x in node.inputs),
            input_uses=tuple(uses[unique.index(x)] for x in node.inputs),
            flops=_flops(self.forward),
            pruned_flops=_flops(pruned),
            backward_flops=_flops(self.backward),
            weight_bytes=_weight_bytes(node),
            expensive_end=_ends_expensive(outputs[0].op, {id(op) for op in self.forward}),
            elementwise_start=bool(takers) and takers <= ELEMENTWISE,
            elementwise_end=root(outputs[0], stop).op.type in ELEMENTWISE,
            unrepeatable=reason,
            forward_extra=untaped,
            taped_extra=taped,
            backward_extra=back,
            backward_last=last,
            backward_again=again,
            early=self._early(),
            largest=max(
                (tensor_size(x) for op in [*self.forward, *self.backward] if op.type not in FREE for x in op.outputs), default=0
            ),
            part=None if reason else self._part(part_name, inside, internal, back),
            unknown=tuple(sorted(unknown_types([*self.forward, *self.backward]))),
            work=_work(self.forward),
            pruned_work=_work(pruned),
            backward_work=_work(self.backward),
        )

    def _takers(self):
        index = {x.ref(): i for i, x in enumerate(self.inputs)}
        uses, takers = [0] * len(self.inputs), set()
        for op in self.forward:
            for tensor in op.inputs:
                if tensor.ref() in index and op.type not in FREE:
                    uses[index[tensor.ref()]] += 1
                    takers.add(op.type)
        return uses, takers

    def _peaks(self, kept):
        own = [y for y in self.outputs if root(y, self.stop).ref() not in self.stop]
        made, sizes = held(own, self.stop), held(kept, self.outside)
        untaped = highest(self.forward, [], own, self.stop) - made
        taped = highest(self.forward, [], [*own, *kept], self.stop) - made - sizes
        there = [*self.internal, *self.seeds]
        back = highest(self.backward, there, self.results, self.outside) - held(there, self.outside)
        read = [x for x, is_read in zip(self.inputs, self.reads_inputs, strict=True) if is_read]
        read += [y for y, is_read in zip(self.outputs, self.own_outputs, strict=True) if is_read]
        others = self.outside - {root(x, self.stop).ref() for x in read}
        before = held([*there, *read], others)
        last = min(back, highest(self.backward, [*there, *read], self.results, others) - before)
        # Where nothing is put in order, an executor may begin all at once: what is read counts to the end.
        order, again = reordered(self.backward), back
        if order != self.backward:
            again = min(back, highest(order, [*there, *read], self.results, others) - before)
        return untaped, taped, back, last, again

    def _part(self, name, inside, internal, back):
        """Returns the `Part` of the operations whose ids are in the one set in `inside`, if it frees enough."""
        own = {id(op): op for op in self.forward if any(id(op) in made for made in inside)}
        outside = [op for op in self.forward if id(op) not in own]
        leaves = {root(x, self.stop).ref() for op in outside for x in op.inputs}  # what others read of the part stays
        takes = {root(x, self.stop).ref(): root(x, self.stop) for op in own.values() for x in op.inputs}
        takes = [x for r, x in takes.items() if id(x.op) not in own and r not in self.stop and x.op.type not in FREE]
        kept = {x.ref(): x for x in self.internal if id(x.op) not in own or x.ref() in leaves}
        kept |= {x.ref(): x for x in takes if x.ref() not in self.roots}
        size = held(kept.values(), self.outside)
        if not name or len(inside) != 1 or size > 0.9 * internal:
            return None
        again = [x.op for x in self.internal if id(x.op) in own and x.ref() not in leaves]
        rerun = _needed(again, list(own.values()))
        return Part(
            name=name,
            internal_bytes=size,
            flops=_flops(rerun),
            taped_extra=self._peaks(list(kept.values()))[1],
            backward_extra=back + internal - size + self._early(),
            work=_work(rerun),
        )

    def _early(self):
        """Returns the bytes of the largest tensor that the backward pass makes of what the forward pass kept alone.

        An executor makes it as soon as it can: while the re-run of a part, or of a segment that the call is the last of, goes
        on, the gradient is there already.
        """
        late, most = {x.op for x in self.seeds}, 0
        for op in self.backward:
            if any(x.op in late for x in op.inputs):
                late.add(op)
            elif op.type not in FREE and op.type not in ALIASES:
                most = max([most, *map(tensor_size, op.outputs)])
        return most


def _flops(operations):
    return sum(operation_flops(op) for op in operations)


def _work(operations):
    return tuple(work for op in operations for work in operation_work(op))


def _needed(wanted, operations):
    """Returns those of `operations`, in their order, that the `wanted` ones need, themselves included."""
    made, found, queue = {id(op) for op in operations}, set(), list(wanted)
    while queue:
        op = queue.pop()
        if id(op) in made and id(op) not in found:
            found.add(id(op))
            queue += [x.op for x in op.inputs]
    return [op for op in operations if id(op) in found]


def _ends_expensive(op, made):
    # Adding a bias and reshaping come after the product without needing it in the backward pass.
    while op.type in ALIASES | {"BiasAdd", "AddV2", "Add", "Transpose", "Cast"} and op.inputs and id(op) in made:
        op = op.inputs[0].op
    graphs = functions.graphs(op)
    if len(graphs) == 1 and not functions.is_loop(op):
        return _ends_expensive(graphs[0].outputs[0].op, {id(x) for x in graphs[0].get_operations()})
    return op.type.startswith(_EXPENSIVE)
