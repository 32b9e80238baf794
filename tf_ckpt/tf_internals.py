"""Everything of TensorFlow that is used and not public, in one place.

A new TensorFlow breaks this file or none. What is here:

- whether any gradient tape is active (eager runs without one need no recompute);
- what random operations without a seed go on with;
- a gradient registry that lets traced graphs go;
- a watcher of the operations that a piece of Python runs, in eager and in graph mode, and one of the tapes it opens;
- whether a thread is a replica's, what replicas tell each other, and which operations of a graph are a replica's own;
- the device that a `tf.device` asks for;
- whether a variable may have been written since it was read, and a way to read one that no tape sees;
- the graphs of the functions that an operation calls;
- the switch of a graph optimiser that depends on the memory that a step needs;
- the formats that profiles are written in, and whether a profiler is running;
- a hook before the process-wide peaks of memory are reset.
"""

import contextlib
import functools
import threading
import weakref

import tensorflow as tf
from tensorflow.compiler.xla.service import hlo_pb2
from tensorflow.core.protobuf import rewriter_config_pb2
from tensorflow.python.client import device_lib
from tensorflow.python.eager import context, record
from tensorflow.python.eager import execute as eager_execute
from tensorflow.python.framework import function_def_to_graph, op_def_registry, ops
from tensorflow.python.ops import control_flow_util, stateful_random_ops
from tensorflow.python.profiler import profiler_v2
from tensorflow.tsl.profiler.protobuf import xplane_pb2

_CUSTOM = "CustomGradient-"
_READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarIsInitializedOp", "VariableShape"})
_PASS = frozenset({"Identity", "IdentityN", "StopGradient", "PreventGradient"})


@contextlib.contextmanager
def random_operations_kept():
    """A scope after which TensorFlow's own random operations go on as if nobody had called `tf.random.set_seed` in it.

    What the kernels of operations with a seed of their own remember is lost, as `set_seed` does it.
    """
    present = context.context()
    seed, generator = present._seed, getattr(present, "_rng", None)  # there is none before the first `set_seed`
    state = None if generator is None else generator.getstate()
    shared = stateful_random_ops.global_generator
    try:
        yield
    finally:
        present._seed = seed
        if generator is not None:
            present._rng = generator
            generator.setstate(state)
        stateful_random_ops.global_generator = shared


def global_generator():
    """Returns the `tf.random.Generator` that `tf.random.get_global_generator` returns, or None while there is none."""
    return stateful_random_ops.global_generator


def tape_is_active():
    """Returns True if a gradient tape or forward accumulator of this thread may record."""
    return record.could_possibly_record()


def is_watched(tensor):
    """Returns True if an active gradient tape follows `tensor`."""
    return bool(record.should_record_backprop([tensor]))


@contextlib.contextmanager
def recorded(gradient, inputs):
    """A scope whose operations no tape sees; what is put into the list that it gives has the gradient function `gradient`.

    Unlike `tf.custom_gradient`, it leaves no operation in the graph.

    Args:
        gradient: Callable that takes the gradients of the list, and returns those of `inputs`.
        inputs: List of tensors.
    """
    made = []
    with record.stop_recording():
        yield made
    record.record_operation("TfCkpt", made, list(inputs), gradient)


class _Apart:
    """What stands for an `IdentityN` operation that has been made one `Identity` for each of its tensors."""

    node_def, name = tf.compat.v1.NodeDef(op="IdentityN"), ""  # for watchers

    def __init__(self, inputs):
        self.inputs = list(inputs)
        self.outputs = []
        for x in inputs:
            with tf.device(x.device) if x.device else contextlib.nullcontext():  # it stays there
                self.outputs.append(tf.identity(x, name=f"{x.op.name}/IdentityN"))

    def get_attr(self, name):
        return [x.dtype.as_datatype_enum for x in self.inputs]


def take_gradients_apart(upstream):
    """Makes what passes on the gradients of segments in the present graph one `Identity` for each of them, from now on.

    The same for what replicas tell each other in and after the segment's re-run, which is tied to `upstream`.

    In graph mode a custom gradient passes everything through one `IdentityN`, so that each tensor waits for everything, until
    TensorFlow's graph optimiser takes it apart. Before that it drops the edge by which an update waits for a read of the
    variable, wherever another way leads from the read to the update: one through an `IdentityN`, which is gone later, so that
    the read may get what the update wrote. `tf.recompute_grad` passes its gradients through one, and so does an optimizer.

    Args:
        upstream: List of the gradients that a segment's backward pass starts from.
    """
    graph = tf.compat.v1.get_default_graph()
    if hasattr(graph, "_tf_ckpt_gradients_made"):
        graph._tf_ckpt_gradients_made.update(x._id for x in upstream)
        return
    made = graph._tf_ckpt_gradients_made = {x._id for x in upstream}
    original = type(graph)._create_op_internal
    reference = weakref.ref(graph)  # a graph that held itself would outlive its model

    def create(kind, inputs, *args, **kwargs):
        graph = reference()
        if kind == "IdentityN":
            where = _gradient_of(graph._gradient_override_map.get(kind))
            if "recompute_grad.<locals>" in where and "inner_recompute_grad" in where:
                with record.stop_recording():
                    apart = _Apart(inputs)
                made.update(x._id for x in apart.outputs)
                return apart
            if ("all_reduce.<locals>" in where or "all_gather.<locals>" in where) and any(_descends(x, made) for x in inputs):
                with record.stop_recording():
                    return _Apart(inputs)
        return original(graph, kind, inputs, *args, **kwargs)

    graph._create_op_internal = create


def behind_products(tensor):
    """Returns what comes just before the last elementwise products that make a graph tensor.

    A graph optimiser multiplies by the learning rate further inwards where nothing but the update reads a gradient, as that of
    `gamma` in a BatchNormalization of rows. Another reader would change how it is rounded.
    """
    while tensor.op.type == "Mul":
        tensor = max(tensor.op.inputs, key=lambda x: x._id)
    return tensor


def _descends(tensor, numbers):
    """Returns True if one of the tensors with these numbers is `tensor`, or leads to it."""
    seen, queue = {tensor._id}, [tensor]
    while queue:
        tensor = queue.pop()
        if tensor._id in numbers:
            return True
        new = [x for x in tensor.op.inputs if x._id not in seen]
        seen.update(x._id for x in new)
        queue += new
    return False


class _GradientEntries(dict):
    """TensorFlow's registry of gradient functions, with weak entries for recompute.

    In graph mode each call of a custom gradient stores its closure here for the life of the process, and the closure
    holds the graph that was traced. A graph needs its gradient functions for as long as it lives and no longer, so for
    recompute the strong reference moves to the graph itself.
    """

    def __setitem__(self, name, entry):
        function = entry.get("type")
        graph = tf.compat.v1.get_default_graph()
        if not (str(name).startswith(_CUSTOM) and _is_recompute(function) and hasattr(graph, "captures")):
            super().__setitem__(name, entry)
            return
        kept = getattr(graph, "_tf_ckpt_gradients", [])
        kept.append(function)
        graph._tf_ckpt_gradients = kept
        reference = weakref.ref(function)

        def gradient(op, *upstream):
            target = reference()
            if target is None:
                raise LookupError(f"The graph of recompute gradient {name!r} has been deleted.")
            return target(op, *upstream)

        super().__setitem__(name, {**entry, "type": gradient})
        weakref.finalize(function, self.pop, name, None)


def _closure(function, name):
    code = getattr(function, "__code__", None)
    if code is None or name not in code.co_freevars:
        return None
    try:
        return function.__closure__[code.co_freevars.index(name)].cell_contents
    except ValueError:  # an empty cell
        return None


def _is_recompute(function):
    where = _written(function)
    return "recompute_grad" in where or where.startswith("tf_ckpt.")


def _written(function):
    """Returns where the gradient function that a custom gradient's entry in the registry calls is written."""
    gradient = _closure(_closure(function, "tape_grad_fn"), "grad_fn")
    return f"{getattr(gradient, '__module__', '')}.{getattr(gradient, '__qualname__', '')}"


def _gradient_of(name):
    """Returns where the custom gradient of this name in the registry is written, or "" for one that is not there."""
    entry = ops.gradient_registry._registry.get(name) if name else None
    if not entry:
        return ""
    function = entry["type"]
    return _written(_closure(function, "reference")() if _closure(function, "reference") else function)


def release_graphs():
    """Makes recompute's entries in TensorFlow's gradient registry weak, from now on. Done once; more calls do nothing."""
    registry = ops.gradient_registry
    if not isinstance(registry._registry, _GradientEntries):
        registry._registry = _GradientEntries(registry._registry)


_watching = threading.Lock()
_watchers = []


@contextlib.contextmanager
def watch_operations(callback):
    """Calls `callback(op_type, inputs, outputs, graph)` for each operation that is run or created in this scope."""

    thread = threading.get_ident()  # replicas share their callbacks with the thread that starts them

    def on_operation(op_type, inputs, attrs, outputs, op_name=None, graph=None):
        if threading.get_ident() == thread:
            callback(op_type.decode() if isinstance(op_type, bytes) else op_type, inputs, outputs, graph)

    # TensorFlow's own `add_op_callback` switches the callbacks of eager mode off for all threads as soon as one is done.
    with _watching:
        if not _watchers:
            _watchers.append(eager_execute.execute)
            eager_execute.execute = eager_execute.execute_with_callbacks
        _watchers.append(on_operation)
    present = context.context()
    present.add_op_callback(on_operation)
    try:
        yield
    finally:
        present.remove_op_callback(on_operation)
        with _watching:
            _watchers.remove(on_operation)
            if len(_watchers) == 1:
                eager_execute.execute = _watchers.pop()


_tape_watchers = threading.local()


@contextlib.contextmanager
def watch_tapes(callback):
    """Calls `callback()` for each gradient tape or forward accumulator that this thread opens in this scope."""
    for kind, method in ((tf.GradientTape, "_push_tape"), (tf.autodiff.ForwardAccumulator, "_push_accumulator")):
        original = getattr(kind, method)
        if not hasattr(original, "_tf_ckpt_watches"):  # done once: a thread without watchers sees no difference

            def push(self, *args, _original=original, **kwargs):
                for tell in getattr(_tape_watchers, "present", ()):
                    tell()
                return _original(self, *args, **kwargs)

            push._tf_ckpt_watches = True
            setattr(kind, method, push)
    before = getattr(_tape_watchers, "present", ())
    _tape_watchers.present = (*before, callback)
    try:
        yield
    finally:
        _tape_watchers.present = before


def in_replica_thread():
    """Returns True in a thread in which a distribution strategy calls one of its replicas."""
    return type(threading.current_thread()).__name__ == "_MirroredReplicaThread"


def replica_number():
    """Returns the number of the replica whose thread this is, or None."""
    return threading.current_thread().replica_id if in_replica_thread() else None


def hook_replicas(**functions):
    """Has `function(context, original, *arguments)` called instead of a method of `tf.distribute.ReplicaContext`.

    In the threads of replicas only. Done once; more calls do nothing.

    Args:
        **functions: A function for each name of a method.
    """
    kind = tf.distribute.ReplicaContext
    for name, function in functions.items():
        original = getattr(kind, name)
        if not hasattr(original, "_tf_ckpt_replicas"):
            setattr(kind, name, _hooked(original, function))


def _hooked(original, function):
    @functools.wraps(original)
    def method(self, *args, **kwargs):
        if in_replica_thread():
            return function(self, original, *args, **kwargs)
        return original(self, *args, **kwargs)

    method._tf_ckpt_replicas = True
    return method


_elsewhere = threading.local()


@contextlib.contextmanager
def elsewhere():
    """A scope in which a replica waits for others: the operations that are made meanwhile are not its own.

    Gives the `position` at its beginning.
    """
    begin = position()
    _elsewhere.depth = getattr(_elsewhere, "depth", 0) + 1
    try:
        yield begin
    finally:
        _elsewhere.depth -= 1
        if not tf.executing_eagerly():
            ranges = _elsewhere.__dict__.setdefault("ranges", [])
            ranges.append((tf.compat.v1.get_default_graph(), begin, position()))


def is_elsewhere():
    """Returns True within the scope of `elsewhere`."""
    return getattr(_elsewhere, "depth", 0) > 0


def position():
    """Returns how many operations the present graph has, or 0 in eager mode."""
    return 0 if tf.executing_eagerly() else len(tf.compat.v1.get_default_graph().get_operations())


def own_operations(graph, begin):
    """Returns pairs (position, operation) of what a graph has from position `begin` on, without what other replicas made."""
    others = [(a, b) for where, a, b in getattr(_elsewhere, "ranges", ()) if where is graph and b > begin]
    operations = graph.get_operations()
    return [(i, operations[i]) for i in range(begin, len(operations)) if not any(a <= i < b for a, b in others)]


def asked_device(tensor):
    """Returns the name of the device that a `tf.device` around this asks for, or an empty string.

    Args:
        tensor: A tensor that was made here.
    """
    return (context.context().device_name or "") if tf.executing_eagerly() else tensor.device


def set_device(op, device):
    """Has a graph operation ask for a device, by name."""
    op._set_device(device)


def writers(read):
    """Counts the operations of a graph that may write the variable that `read` comes from.

    Args:
        read: A graph tensor, the value of a resource variable.

    Returns:
        An integer, or None if that cannot be told.
    """
    op = read.op
    while op.type in _PASS and op.inputs:
        op = op.inputs[0].op
    if op.type != "ReadVariableOp":
        return None
    count, seen, queue = 0, set(), [op.inputs[0]]
    while queue:
        handle = queue.pop()
        for user in handle.consumers():
            if user.type in _READS or id(user) in seen:
                continue
            seen.add(id(user))
            if user.type in _PASS:
                queue += [t for t in user.outputs if t.dtype == tf.resource]
            else:
                count += 1
    return count


def read_unseen(raw_variable):
    """Returns the value of a `tf.Variable` without letting any gradient tape know that it was read."""
    try:
        handle = raw_variable.handle
    except (AttributeError, ValueError):  # a distributed variable outside of a replica
        return tf.convert_to_tensor(raw_variable)
    value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=raw_variable.dtype)
    value.set_shape(raw_variable.shape)
    return value


@contextlib.contextmanager
def unwatched(variables):
    """A scope in which no gradient tape takes notice of `tf.Variable`s that are read.

    Keras' `trainable` is not TensorFlow's, which is settled when a variable is made: a tape follows what Keras froze later.
    """
    parts = [part for variable in variables for part in getattr(variable, "_values", (variable,))]  # of each replica
    watched = [part for part in parts if getattr(part, "_trainable", False)]
    for part in watched:
        part._trainable, part._tf_ckpt_unwatched = False, True
    try:
        yield
    finally:
        for part in watched:
            part._trainable, part._tf_ckpt_unwatched = True, False


def is_weight(raw_variable):
    """Returns whether a `tf.Variable` is trainable, `unwatched` or not."""
    parts = getattr(raw_variable, "_values", (raw_variable,))
    return bool(raw_variable.trainable) or any(getattr(part, "_tf_ckpt_unwatched", False) for part in parts)


def has_gradient(op_type):
    """Returns False for operations that TensorFlow knows to pass no gradient on."""
    try:
        return ops.gradient_registry.lookup(op_type) is not None and op_type != "StopGradient"
    except LookupError:
        return True  # unknown: a function call, or an operation that would raise


def handle_number(raw_variable):
    """Returns the number of a variable's resource handle as operations of the present graph see it, or None."""
    try:
        handle = raw_variable.handle
        if not tf.executing_eagerly():
            handle = tf.compat.v1.get_default_graph().capture(handle)
        return handle._id
    except (AttributeError, ValueError, TypeError):  # a distributed variable outside of a replica
        return None


# Keras makes this function anew in each call of a grouped convolution, so that its reads go through our scope.
_KERAS_CONVOLUTION = "_conv_xla"
_CALLERS = frozenset(["PartitionedCall", "StatefulPartitionedCall"])


def calls_state(op_type, outputs):
    """Returns True if an operation calls a function that holds variables, random numbers or other state.

    Args:
        op_type: The operation's type; in eager mode a function's own name, `__inference_...`.
        outputs: What it makes.
    """
    if op_type.startswith("XlaLaunch"):
        return True
    if op_type.startswith(("__inference_", "__forward_")):
        return _holds_state(op_type, context.get_function_def)
    if op_type not in _CALLERS or not outputs or hasattr(outputs[0], "numpy"):
        return False
    op = outputs[0].op
    return _holds_state(op.get_attr("f").name, lambda name: op.graph._get_function(name).cached_definition)


def _holds_state(name, definition_of):
    try:
        nodes = definition_of(name).node_def
    except Exception:  # not known here
        return True
    for node in nodes:
        known = op_def_registry.get(node.op)
        inner = [x.func.name for x in node.attr.values() if x.func.name]
        inner += [node.op] if known is None else []
        if any(_holds_state(x, definition_of) for x in inner):
            return True
        # A function that XLA compiles counts as stateful, whatever is inside.
        harmless = node.op in _CALLERS or (node.op == "ReadVariableOp" and _KERAS_CONVOLUTION in name)
        if known is not None and known.is_stateful and not harmless:
            return True
    return False


def in_control_flow():
    """Returns True while the body of a `tf.while_loop` or `tf.cond` is traced."""
    graph = tf.compat.v1.get_default_graph()
    return type(graph).__name__ in ("WhileBodyFuncGraph", "WhileCondFuncGraph", "CondBranchFuncGraph")


def may_be_differentiated(tensor):
    """Returns True if a graph tensor may depend on something that a caller differentiates by.

    A tape outside of a `tf.function` does not show while the function is traced, so whatever comes from a float argument
    of the function or from a trainable variable counts.
    """
    graph = tensor.graph
    captured = {id(x) for x in getattr(graph, "internal_captures", [])}
    seen, queue = set(), [tensor]
    while queue:
        tensor = queue.pop()
        op = tensor.op
        if id(op) in seen or not (tensor.dtype.is_floating or tensor.dtype.is_complex):
            continue
        seen.add(id(op))
        if op.type == "Placeholder" and id(tensor) not in captured:
            return True
        if op.type == "ReadVariableOp" and _is_trainable(graph, op.inputs[0]):
            return True
        if has_gradient(op.type):
            queue += list(op.inputs)
    return False


def _is_trainable(graph, handle):
    for variable in getattr(graph, "variables", []):
        with contextlib.suppress(AttributeError, ValueError):
            if graph.capture(variable.handle).name == handle.name:
                return variable.trainable
    return True


def function_graph(op, name):
    """Returns the `FuncGraph` of a function that an operation of a graph calls, or None if the graph does not know it.

    Args:
        op: A graph operation.
        name: The function's name, as the operation's attribute has it.
    """
    graph = op.graph
    while graph is not None:
        function = graph._get_function(name)
        if function is not None:
            inner = getattr(function, "graph", None)
            if inner is None:  # the graph has the definition only
                made = graph._tf_ckpt_functions = getattr(graph, "_tf_ckpt_functions", {})
                if name not in made:
                    with graph.as_default():
                        made[name] = function_def_to_graph.function_def_to_graph(function.cached_definition)
                inner = made[name]
            return inner
        graph = getattr(graph, "outer_graph", None)
    return None


def is_compiled(op, name):
    """Returns True if an operation calls a function that XLA compiles as a whole (`jit_compile=True`)."""
    try:
        if op.get_attr("_XlaMustCompile"):
            return True
    except ValueError:
        pass
    function = op.graph._get_function(name)
    definition = getattr(function, "cached_definition", None)
    return definition is not None and definition.attr["_XlaMustCompile"].b


def in_xla():
    """Returns True where a graph is made for a function that XLA compiles as a whole (`jit_compile=True`)."""
    return not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


@contextlib.contextmanager
def scratch_graph(name):
    """A scope whose operations go into a graph of their own, which it gives, outside of any distribution strategy.

    In the scope of a strategy a replicated variable cannot be differentiated by, since it stands for several.
    """
    graph = tf.__internal__.FuncGraph(name)
    with graph.as_default():
        graph._distribution_strategy_stack = []  # put back at the end of the scope
        yield graph


def run_after(op, *before):
    """Makes a graph operation wait for others of the same graph."""
    op._add_control_inputs(before)


def gpu_limits():
    """Returns the memory limit of each GPU's allocator, in bytes."""
    return [x.memory_limit for x in device_lib.list_local_devices() if x.device_type == "GPU" and x.memory_limit]


def switch_memory_optimizer_off():
    """Keeps TensorFlow from rewriting sums of three or more terms near the peak that it expects, for this process.

    It makes them add up in whatever order their terms come, and which ones it takes depends on the peak: the one thing in
    which a recomputed model differs from the plain one by design. For comparisons; TensorFlow has no public option for it.
    """
    original = context.Context.config.fget

    def config(self):
        made = original(self)
        made.graph_options.rewrite_options.memory_optimization = rewriter_config_pb2.RewriterConfig.NO_MEM_OPT
        return made

    context.Context.config = property(config)


def profile(data):
    """Returns the XSpace in the bytes of an `.xplane.pb` file."""
    return xplane_pb2.XSpace.FromString(data)


def hlo_module(data):
    """Returns the HLO module in the bytes of an `HloProto`."""
    return hlo_pb2.HloProto.FromString(data).hlo_module


def profiler_is_running():
    """Returns True between `tf.profiler.experimental.start` and `stop`."""
    return profiler_v2._profiler is not None


_before_reset = weakref.WeakSet()


def tell_before_reset(meter):
    """Has `meter.before_reset()` called before anybody resets the peaks of memory, for as long as `meter` lives."""
    original = context.Context.reset_memory_stats
    if not hasattr(original, "_tf_ckpt_tells"):  # done once

        def reset_memory_stats(self, dev):
            for each in list(_before_reset):
                each.before_reset()
            return original(self, dev)

        reset_memory_stats._tf_ckpt_tells = True
        context.Context.reset_memory_stats = reset_memory_stats
    _before_reset.add(meter)
