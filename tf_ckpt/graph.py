"""The one file that touches what Keras does not document.

A new Keras breaks this file or none. What is here: the state that surrounds a layer call (`Surroundings`), the scope in
which state is read and written (`StateScope`), masks, a Functional model read as nodes and run by pieces, and what Keras
does when it writes, clones and exports a model.
"""

import collections.abc
import contextlib
import copy
import dataclasses
import functools
import inspect
import sys
import threading
import weakref

import keras
import tensorflow as tf
from keras import tree
from keras.src.backend import compute_output_spec, get_keras_mask, set_keras_mask
from keras.src.backend.common import global_state
from keras.src.models import Functional, cloning
from keras.src.saving import serialization_lib
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.tree import register_tree_node_class
from keras.src.utils.tracking import TrackedDict, TrackedList, Tracker

from tf_ckpt import tf_internals

__all__ = ["Level", "Node", "StateScope", "Surroundings", "get_keras_mask", "read", "set_keras_mask"]


def in_symbolic_scope():
    """Returns True while Keras only asks for shapes."""
    return global_state.get_global_attribute("symbolic_scope") is not None


def raw_variable(variable):
    """Returns the `tf.Variable` of a Keras variable, or None while it has none; that of TensorFlow's own is itself."""
    return variable if isinstance(variable, tf.Variable) else variable._value


class Surroundings:
    """What a layer call sees around it: the call context (`training` and the like) and the autocast dtype.

    The backward pass runs outside of the model's call, so that a layer which takes `training` from its caller would be
    run for inference there. Taken in the forward run, entered in the re-run.
    """

    _NAMES = ("current_call_ctx", "autocast_scope")

    def __init__(self):
        self._values = {name: self._copy(global_state.get_global_attribute(name)) for name in self._NAMES}

    @staticmethod
    def _copy(value):
        # A layer writes the `training` that it resolved back into the context: keep it as it is now. And a traced graph
        # that holds this must not keep the model alive.
        value = copy.copy(value)
        if hasattr(value, "entry_layer"):
            value.entry_layer = None
        return value

    @contextlib.contextmanager
    def entered(self):
        """Puts the surroundings in place, and the present ones back at the end."""
        before = {name: global_state.get_global_attribute(name) for name in self._NAMES}
        try:
            for name, value in self._values.items():
                global_state.set_global_attribute(name, self._copy(value))
            yield
        finally:
            for name, value in before.items():
                global_state.set_global_attribute(name, value)


def frozen_unwatched(variables):
    """A scope in which no gradient tape takes notice of those of the Keras variables that are not trainable now.

    What is made of them alone is then not recorded: nothing is kept for a backward pass that leads nowhere.
    """
    return tf_internals.unwatched([v._value for v in variables if not v.trainable and v._value is not None])


class StateScope(keras.StatelessScope):
    """A stateless scope that asks its owner for each variable's value and tells it of each update and loss.

    Args:
        read: Callable `variable -> tensor | None`; None means: as it is outside.
        update: Callable `(variable, value)`.
    """

    def __init__(self, read, update):
        super().__init__(collect_losses=True, initialize_variables=False)
        self._read, self._update = read, update
        self.owners, self.updates = {}, {}

    def get_current_value(self, variable):
        value = self._read(variable)
        if value is None:
            # Keras calls regularizers with what this returns, so None, its "as it is outside", will not do. Read here: some
            # eager operations read a variable in C++ and compiled functions inside, where no watcher sees it.
            return None if variable._value is None else tf.convert_to_tensor(variable._value)
        return value

    def add_update(self, update):
        self._update(*update)

    def add_loss(self, loss):
        # Keras does not say whose loss it is, and the order in which a model adds losses up depends on the owner.
        self.owners[id(loss)] = sys._getframe(1).f_locals.get("self")
        super().add_loss(loss)

    def owned_losses(self):
        """Returns the `(layer, loss)` pairs that were made and not cleared, and forgets them in the layers."""
        pairs = [(self.owners[id(x)], x) for x in self.losses]
        for number, layer in self.owners.items():
            layer._loss_ids.discard(number)
        return pairs


def is_state_scope(scope):
    """Returns True for a scope of ours, False for a user's stateless scope or none."""
    return isinstance(scope, StateScope)


def value_outside(scope, variable):
    """Returns what the scope around `scope` holds for `variable`, or None if that is the live variable's value."""
    outer = scope.original_scope
    if not isinstance(outer, StateScope):
        return outer and outer.get_current_value(variable)
    value = outer._read(variable)
    return None if getattr(value, "_tf_ckpt_live", False) else value


@contextlib.contextmanager
def losses_kept(layers):
    """Keeps the losses that `layers` hold: a re-run that starts at such a layer would clear them."""
    before = [(layer, layer._losses[:], set(layer._loss_ids)) for layer in layers]
    try:
        yield
    finally:
        for layer, losses, numbers in before:
            layer._losses[:] = losses
            layer._loss_ids.clear()
            layer._loss_ids.update(numbers)


def uninitialized_variables():
    """Returns the number of variables that were created in a stateless scope and have no value yet."""
    return len(global_state.get_global_attribute("uninitialized_variables", [], set_to_default=False) or [])


def initialize_variables():
    """Gives a value to the variables that were created in a stateless scope."""
    from keras.src.backend.common.variables import initialize_all_variables

    initialize_all_variables()


def take_logits(tensor):
    """Returns what Keras' softmax and sigmoid hang on their result for losses to start from, and takes it off; or None."""
    logits = getattr(tensor, "_keras_logits", None)
    if logits is not None:
        del tensor._keras_logits
    return logits


def hang_logits(tensor, logits):
    """Does what Keras' softmax and sigmoid do to their result."""
    tensor._keras_logits = logits


def is_variable(value):
    """Returns True for a Keras variable."""
    return isinstance(value, keras.Variable)


def is_symbolic(value):
    """Returns True for a symbolic Keras tensor."""
    return isinstance(value, keras.KerasTensor)


def current_training():
    """Returns the `training` of the call that is under way, or None."""
    return getattr(global_state.get_global_attribute("current_call_ctx"), "training", None)


def mapped_outside():
    """Returns `(id(variable), tensor)` pairs of the float values that a caller's own stateless scope holds.

    `stateless_call` differentiates these tensors, so that recompute must pass them on as arguments.
    """
    scope = global_state.get_global_attribute("stateless_scope")
    while isinstance(scope, StateScope):
        scope = scope.original_scope
    values = {} if scope is None else scope.state_mapping
    return [(number, x) for number, x in values.items() if tf.is_tensor(x) and x.dtype.is_floating]


def describe(tensor):
    """Returns a tensor's name, if it has one, shape and dtype for a message."""
    name = "tensor" if hasattr(tensor, "numpy") else tensor.name
    return f"{name} of shape {tuple(tensor.shape)} and dtype {tensor.dtype.name}"


# --- a model as nodes ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Node:
    """One call of a layer or operation in a model.

    Attributes:
        name: The layer's name, with `:k` for its k-th call (k > 0), unique in its model.
        operation: The layer or `keras.ops` operation.
        inputs: Ids of the symbolic tensors that it takes, in order, repeated where they are.
        outputs: Ids of the symbolic tensors that it makes.
        specs: Dict from each of these ids to the symbolic tensor.
        inner: The `Level` of a nested model that can be planned inside, else None.
        arguments: Keras' own record of the call.
    """

    name: str
    operation: object
    inputs: tuple
    outputs: tuple
    specs: dict
    inner: object
    arguments: object

    def call(self, operation_fn, values):
        """Runs the node on the tensors in `values`, by id, and puts its outputs there."""
        args, kwargs = self.arguments.fill_in(values)
        values.update(zip(self.outputs, tree.flatten(operation_fn(self.operation)(*args, **kwargs)), strict=False))


@dataclasses.dataclass(eq=False)
class Level:
    """A Functional or Sequential model as its nodes, in the order in which Keras runs them."""

    model: object
    nodes: list
    inputs: tuple
    outputs: tuple


def functional_of(model):
    """Returns the Functional model that runs `model`, or None if there is none."""
    if isinstance(model, keras.Sequential):
        return model._functional
    return model if isinstance(model, Functional) else None


def read(model):
    """Reads a Functional or Sequential model, nested models included.

    Args:
        model: A built `keras.Model`.

    Returns:
        A `Level`, or None if the model is no graph of layers.
    """
    functional = functional_of(model)
    if functional is None:
        return None
    nodes, calls = [], {}
    by_depth = functional._nodes_by_depth
    for depth in sorted(by_depth, reverse=True):
        for node in by_depth[depth]:
            if not node.operation or node.is_input:
                continue
            operation = node.operation
            count = calls[operation.name] = calls.get(operation.name, -1) + 1
            specs = {id(x): x for x in (*node.input_tensors, *node.outputs)}
            nodes.append(
                Node(
                    name=operation.name if count == 0 else f"{operation.name}:{count}",
                    operation=operation,
                    inputs=tuple(id(x) for x in node.input_tensors),
                    outputs=tuple(id(x) for x in node.outputs),
                    specs=specs,
                    inner=_read_inside(node),
                    arguments=node.arguments,
                )
            )
    return Level(model, nodes, tuple(id(x) for x in functional._inputs), tuple(id(x) for x in functional._outputs))


def _read_inside(node):
    """Returns the level of a nested model, if its call does nothing but run its graph."""
    model = node.operation
    functional = functional_of(model)
    if functional is None or type(model).call not in (Functional.call, keras.Sequential.call):
        return None
    args, kwargs = node.arguments.args, node.arguments.kwargs
    if len(args) != 1 or any(isinstance(x, keras.KerasTensor) for x in tree.flatten(kwargs)):
        return None
    if model.activity_regularizer is not None or len(tree.flatten(args[0])) != len(functional._inputs):
        return None
    return read(model)


def runs_its_graph(model):
    """Returns True if the model's `call` is Keras' own, or calls it."""
    call = type(model).call
    if call in (Functional.call, keras.Sequential.call):
        return True
    try:
        return "super()" in inspect.getsource(call)
    except (OSError, TypeError):  # no source to read: give it the benefit of the doubt
        return True


def with_executor(model, run, reminder=None):
    """Makes a copy of a model that runs its graph by `run`. Layers and variables are the same objects.

    Args:
        model: A Functional or Sequential model. It is not changed.
        run: Callable `(flat inputs, operation_fn) -> flat outputs`, on real tensors; None for Keras' own way.
        reminder: Optional object that is told when the copy stops to run that way: `legacy_format()` when it is written in
            Keras' old format, which has no place for it; `changed()` when a Sequential got or lost layers, or was built again.

    Returns:
        A model of the same class.
    """
    twin = _twin(model)
    if reminder is not None:
        _remind(twin, reminder)
    if run is None:
        return twin
    if isinstance(model, keras.Sequential):
        twin.__dict__["_functional"] = with_executor(model._functional, run)
        return twin

    def run_through_graph(inputs, operation_fn=lambda operation: operation, call_fn=None):
        flat = tree.flatten(inputs)
        if call_fn is not None or any(isinstance(x, keras.KerasTensor) for x in flat):  # for shapes, or to clone
            extra = {} if call_fn is None else {"call_fn": call_fn}
            return type(twin)._run_through_graph(twin, inputs, operation_fn=operation_fn, **extra)
        return tree.pack_sequence_as(twin._outputs_struct, run(flat, operation_fn))

    twin.__dict__["_run_through_graph"] = _ours(run_through_graph)
    return twin


def _ours(function):
    """Marks a function that stands in one model's place of a method, and is not copied with the model."""
    function._tf_ckpt = True
    return function


def _remind(twin, reminder):
    """Puts methods that tell `reminder` in the place of a model's own, which they call."""
    kind = type(twin)

    @functools.wraps(kind.get_config)
    def get_config():
        if global_state.get_global_attribute("use_legacy_config", False):
            reminder.legacy_format()
        return kind.get_config(twin)

    twin.__dict__["get_config"] = _ours(get_config)
    if not isinstance(twin, keras.Sequential):
        return
    inside = []  # `add` and `pop` build

    def telling(method):
        @functools.wraps(method)
        def changing(*args, **kwargs):
            before = twin.__dict__["_functional"]
            inside.append(None)
            try:
                result = method(*args, **kwargs)
            finally:
                inside.pop()
            if twin.__dict__["_functional"] is not before and not inside:
                reminder.changed()
            return result

        return _ours(changing)

    for name in ("add", "pop", "build"):
        twin.__dict__[name] = telling(getattr(twin, name))


_BOUND = ("train_function", "test_function", "predict_function")


def _twin(model):
    """Copies a model object, not what it holds."""
    twin = type(model).__new__(type(model))
    own = {name for name, value in twin.__dict__.items() if callable(value)}  # wrappers of this object's methods
    for name, value in model.__dict__.items():
        if name not in own and not getattr(value, "_tf_ckpt", False):
            twin.__dict__[name] = None if name in _BOUND else value
    # What Keras and TensorFlow append to must not be shared: a layer added to the one would be in the other, and the
    # training function of the one would live as long as the other.
    for name, value in model.__dict__.items():
        if name == "_tracked" or name.startswith("_self_"):
            kind = next((k for k in (list, dict, set) if isinstance(value, k)), None)
            twin.__dict__[name] = value if kind is None else kind(value)
    tracker, stores = model._tracker, {}
    for key, (accepts, store) in tracker.config.items():
        stores[key] = (accepts, list(store))
        attribute = next((name for name, value in model.__dict__.items() if value is store), None)
        if attribute is not None:
            twin.__dict__[attribute] = stores[key][1]
    copied = _Tracker(stores, exclusions=tracker.exclusions)
    copied.stored_ids = {key: set(numbers) for key, numbers in tracker.stored_ids.items()}
    copied.locked, copied._lock_violation_msg = tracker.locked, tracker._lock_violation_msg
    twin.__dict__["_tracker"] = copied
    if isinstance(model.__dict__.get("_layers"), TrackedList):  # Sequential's
        twin.__dict__["_layers"] = TrackedList(list(model._layers), copied)
    twin.__dict__["_inbound_nodes"], twin.__dict__["_outbound_nodes"] = [], []
    twin.__dict__["_losses"], twin.__dict__["_loss_ids"] = [], set()
    return twin


class _Tracker(Tracker):
    """Keras' record of what a model holds: a stand-in that is set as an attribute is no other layer."""

    def is_in_store(self, store_name, value):
        return super().is_in_store(store_name, original(value))


def original(value):
    """Returns the layer that a stand-in of `StandIns` is in the place of; whatever else, as it is."""
    return _behind(value) if getattr(type(value), "_tf_ckpt_stand_in", False) else value


def is_executing(model):
    """Returns True for a copy of a model that `with_executor` or `with_stand_ins` has made run otherwise."""
    own = vars(model)
    own = vars(own["_functional"]) if own.get("_functional") is not None else own
    return hasattr(own.get("_run_through_graph"), "_tf_ckpt") or getattr(own.get("_flatten_layers"), "executes", False)


def runs_python(model):
    """Returns True for a model that is no graph of layers: its `call` is Python code."""
    return not isinstance(model, keras.Sequential) and functional_of(model) is None


@functools.cache
def _records():
    """Returns the names of the attributes in which Keras itself keeps what a layer or model is and does."""
    graph = ("_functional", "_operations", "_operations_by_depth", "_nodes", "_nodes_by_depth", "_inputs", "_outputs")
    bare = keras.Model(name="bare"), keras.layers.Layer(name="bare")
    return frozenset((*_BESIDE, *graph, "_inputs_struct", "_outputs_struct", *(name for x in bare for name in vars(x))))


def own_attributes(layer):
    """Returns the attributes that a layer's class or user has given it, Keras' own apart, as a dict, in their order."""
    known = _records()
    return {name: x for name, x in vars(layer).items() if name not in known and not name.startswith("_self_")}


def held_layers(layer):
    """Returns the layers that a layer holds and Keras tracks, as pairs (name, layer), each layer once.

    The name of a layer is that of its attribute, `name/0` or `name/key` in a list, tuple or dict; in a Functional or
    Sequential model it is the layer's own name. They are in the order in which the attributes were set.
    """
    tracked = {id(x) for x in type(layer)._flatten_layers(layer, include_self=False, recursive=False)}
    pairs = []
    if isinstance(layer, (Functional, keras.Sequential)):
        pairs += [(x.name, x) for x in layer.layers]

    def look(name, value):
        if isinstance(value, keras.Layer):
            pairs.append((name, original(value)))
        elif isinstance(value, collections.abc.Mapping):
            for key, x in value.items():
                look(f"{name}/{key}", x)
        elif isinstance(value, (list, tuple)):
            for number, x in enumerate(value):
                look(f"{name}/{number}", x)
        elif isinstance(value, (set, frozenset)):
            for x in sorted((x for x in value if isinstance(x, keras.Layer)), key=lambda x: x.name):
                look(f"{name}/{x.name}", x)

    for name, value in own_attributes(layer).items():
        look(name, value)
    found, seen, names = [], set(), {}
    for name, x in pairs:
        if id(x) in tracked and id(x) not in seen and not isinstance(x, keras.layers.InputLayer):
            seen.add(id(x))
            count = names[name] = names.get(name, -1) + 1
            found.append((name if count == 0 else f"{name}:{count}", x))
    return found


class StandIns:
    """Makes objects that stand for layers: they share all that these hold, but run otherwise or hold stand-ins.

    A stand-in has the attributes, variables, losses and state of its layer, now and later, since it has the very same
    `__dict__`; what it gives when it is asked for a layer, or for a list, tuple or dict of layers, are stand-ins again.
    Each layer has one. It counts as an instance of the layer's class.

    Args:
        calls: Dict from `id(layer)` to (layer, callable `(layer, args, kwargs)` that is called in the layer's place).
        refuse: Callable that raises the error for whoever changes a container of stand-ins.
    """

    def __init__(self, calls, refuse):
        self._calls, self._refuse, self._made, self._classes = calls, refuse, {}, {}
        self.any = bool(calls)

    def of(self, value):
        """Returns `value` with stand-ins for the layers in it that need one, or `value` itself if none does."""
        return _mapped(value, self._of_layer, lambda x: _FixedList(self._refuse, x), lambda x: _FixedDict(self._refuse, x))

    def _of_layer(self, layer):
        layer = original(layer)
        if id(layer) not in self._made:
            needed = any(id(x) in self._calls for x in layer._flatten_layers())
            # The layer as well, so that no other one gets its number.
            self._made[id(layer)] = layer, self._stand_in(layer) if needed else layer
        return self._made[id(layer)][1]

    def _stand_in(self, layer):
        kind = type(layer)
        if kind not in self._classes:
            self._classes[kind] = self._class(kind)
        made = object.__new__(self._classes[kind])
        object.__setattr__(made, "__dict__", layer.__dict__)
        object.__setattr__(made, "_tf_ckpt_original", layer)
        return made

    def _class(self, kind):
        stand_ins, calls, kept = self, self._calls, frozenset((*_BESIDE, "_layers", "_losses", "_nodes_by_depth"))

        def __getattribute__(self, name):
            value = kind.__getattribute__(self, name)
            return value if name in kept or name.startswith(("__", "_self_")) else stand_ins.of(value)

        def __setattr__(self, name, value):
            kind.__setattr__(self, name, _mapped(value, original, list, dict))

        def __call__(self, *args, **kwargs):
            layer = _behind(self)
            if id(layer) in calls:
                return calls[id(layer)][1](layer, args, kwargs)
            return kind.__call__(self, *args, **kwargs)

        def _run_through_graph(self, inputs, operation_fn=lambda operation: operation, call_fn=None):
            extra = {} if call_fn is None else {"call_fn": call_fn}
            return kind._run_through_graph(
                self, inputs, operation_fn=lambda operation: operation_fn(stand_ins.of(operation)), **extra
            )

        body = {
            "__slots__": ("_tf_ckpt_original",),  # not in the `__dict__`, which is the layer's
            "__class__": property(lambda self: kind),  # what Keras writes into files
            "__doc__": kind.__doc__,
            "__module__": kind.__module__,
            "__getattribute__": __getattribute__,
            "__setattr__": __setattr__,
            "__call__": __call__,
            "_tf_ckpt_stand_in": True,
        }
        if issubclass(kind, Functional):
            body["_run_through_graph"] = _run_through_graph
        return type(kind)(kind.__name__, (kind,), body)


def _behind(stand_in):
    return object.__getattribute__(stand_in, "_tf_ckpt_original")


def _mapped(value, of_layer, make_list, make_dict):
    """Returns what holds `of_layer(x)` for each layer x that `value` is or holds, or `value` itself if these are the same."""
    if isinstance(value, keras.Layer):
        return of_layer(value)
    if not isinstance(value, (dict, list, tuple, set, frozenset)):
        return value
    old = list(value.values() if isinstance(value, dict) else value)
    new = [_mapped(x, of_layer, make_list, make_dict) for x in old]
    if all(x is y for x, y in zip(new, old, strict=True)):
        return value
    if isinstance(value, dict):
        return make_dict(zip(value, new, strict=True))
    if isinstance(value, tuple):  # whose type may be one of TensorFlow's wrappers
        return value.__class__(*new) if hasattr(value, "_fields") else tuple(new)
    return make_list(new) if isinstance(value, list) else frozenset(new)


class _Fixed:
    """A copy of a list or dict with stand-ins in it, which refuses changes: they would be changes of the copy alone."""

    def __init__(self, refuse, values):
        super().__init__(values)
        self._refuse = refuse

    def _refusing(self, *args, **kwargs):
        self._refuse()

    append = extend = insert = remove = pop = clear = update = setdefault = popitem = _refusing
    sort = reverse = __setitem__ = __delitem__ = __iadd__ = __imul__ = __ior__ = _refusing


@register_tree_node_class
class _FixedList(_Fixed, list):
    def tree_flatten(self):
        return self, None

    @classmethod
    def tree_unflatten(cls, metadata, children):
        return list(children)


@register_tree_node_class
class _FixedDict(_Fixed, dict):
    def tree_flatten(self):
        keys = sorted(self)
        return [self[key] for key in keys], keys, keys

    @classmethod
    def tree_unflatten(cls, keys, values):
        return dict(zip(keys, values, strict=True))


def with_stand_ins(model, stand_ins):
    """Makes a copy of a model that holds stand-ins. Layers behind them and variables are the same objects.

    Args:
        model: A model whose `call` is Python code. It is not changed.
        stand_ins: `StandIns`, or None for a copy that holds the layers themselves.

    Returns:
        A model of the same class.
    """
    twin = _twin(model)
    if stand_ins is not None:

        def flatten(include_self=True, recursive=True):
            found = type(twin)._flatten_layers(twin, include_self=include_self, recursive=recursive)
            return found if include_self or recursive else [stand_ins.of(x) for x in found]  # which is `model.layers`

        @functools.wraps(type(twin).call)
        def call(*args, **kwargs):
            with frozen_unwatched(twin.variables):
                return type(twin).call(twin, *args, **kwargs)

        twin.__dict__["_flatten_layers"], twin.__dict__["call"] = _ours(flatten), _ours(call)
        flatten.executes = stand_ins.any
    for name, value in own_attributes(model).items():
        if getattr(value, "_tf_ckpt", False):
            continue
        if stand_ins is None:
            value = _mapped(value, original, TrackedList, lambda pairs: TrackedDict(dict(pairs)))
        else:
            value = stand_ins.of(value)
        if isinstance(value, (list, dict, set)) and hasattr(value, "tracker"):  # what is put in later is to be the copy's
            value = type(value)(value, twin._tracker)
        twin.__dict__[name] = value
    return twin


def plain_copy(model):
    """Returns a copy of what `with_stand_ins` made that holds the layers themselves, the same one each time."""
    kept = model.__dict__["_flatten_layers"]  # there, so that the two, which may hold each other, are let go together
    if not hasattr(kept, "plain"):
        kept.plain = with_stand_ins(model, None)
    return kept.plain


def compiled_with(model):
    """Returns the arguments that a model was compiled with, as a dict of the very objects, or None."""
    config = getattr(model, "_compile_config", None)
    return dict(config.config) if getattr(model, "compiled", False) and config is not None else None


def compile_alone(twin, **arguments):
    """Compiles a copy of a model as Keras does, whatever `compile` its class has, and leaves the model's metrics alone.

    What a `compile` of the class's own has set up, the copy has already.
    """
    twin.__dict__["_compile_metrics"] = None
    keras.Model.compile(twin, **arguments)


def global_seed_generator():
    """Returns the `SeedGenerator` that random operations without a seed share, or None while there is none."""
    return global_state.get_global_attribute("global_seed_generator")


def set_global_seed_generator(generator):
    """Puts back what `global_seed_generator` returned."""
    global_state.set_global_attribute("global_seed_generator", generator)


def name_counters():
    """Returns a copy of the numbers that Keras has given to names, or None while there are none."""
    return copy.copy(global_state.get_global_attribute("object_name_uids"))


def set_name_counters(counters):
    """Puts back what `name_counters` returned: what was made meanwhile is not counted."""
    global_state.set_global_attribute("object_name_uids", counters)


def held_variables(owner):
    """Returns all variables that a layer, metric or optimizer and all inside it hold, in whatever attribute.

    Keras' `variables` lack some that a step changes: the `states` of a stateful RNN, metrics of layers, a `tf.Variable` or
    generator of a layer's own, layers in containers that Keras does not track.

    Returns:
        A list of `keras.Variable` and `tf.Variable`, each once, in an order that depends on the names of attributes alone, so
        that a model and its copy from a file have the same.
    """
    found = {id(x): x for x in _held(owner) if isinstance(x, (keras.Variable, tf.Variable))}
    raw = {id(v._value) for v in found.values() if isinstance(v, keras.Variable)}
    return [v for number, v in found.items() if number not in raw]


def holders(owner):
    """Returns a layer, metric or optimizer and all such objects inside it, in whatever attribute, each once."""
    return [x for x in _held(owner) if isinstance(x, _HOLDERS)]


def _held(owner):
    """Yields what an object holds, itself first: see `held_variables`."""
    seen, waiting = set(), [owner]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, (keras.Variable, tf.Variable)):
            continue
        if isinstance(value, collections.abc.Mapping):
            waiting += [value[key] for key in sorted(value, key=str, reverse=True)]
        elif isinstance(value, (list, tuple)):
            waiting += reversed(value)
        elif isinstance(value, (set, frozenset)):
            waiting += sorted((x for x in value if isinstance(x, _HOLDERS)), key=lambda x: str(getattr(x, "name", "")))
        elif isinstance(value, _HOLDERS):
            own = getattr(value, "__dict__", {})
            waiting += [
                own[name] for name in sorted(own, reverse=True) if name not in _BESIDE and not name.startswith("_self_")
            ]


_HOLDERS = (KerasSaveable, keras.random.SeedGenerator, tf.Module, tf.random.Generator)
# Records of Keras (those of TensorFlow begin with "_self_"), and what was compiled, which is apart from a model's own state.
_BESIDE = (
    *("_tracker", "_obj_reference_counts_dict", "_inbound_nodes", "_outbound_nodes", "_operations", "_nodes"),
    *("optimizer", "_optimizer", "_compile_loss", "_compile_metrics", "_loss_tracker", "_compile_config", "_metrics"),
    *("train_function", "test_function", "predict_function", "history"),
)


@contextlib.contextmanager
def fit_without_end(optimizer):
    """A scope in which `fit` does not do what it does once training is over: put averages in the place of the weights."""
    own = optimizer.__dict__
    before = own.get("finalize_variable_values", own)
    own["finalize_variable_values"] = lambda variables: None
    try:
        yield
    finally:
        if before is own:
            del own["finalize_variable_values"]
        else:
            own["finalize_variable_values"] = before


def check_step(twin, batch):
    """Raises what Keras raises for a batch that a compiled model cannot take, or its loss. Nothing is run or changed.

    Args:
        twin: A compiled model that has not trained.
        batch: Tuple `(x,)`, `(x, y)` or `(x, y, sample_weight)` of arrays.
    """

    def spec(array):
        text = array.dtype.kind in "OSU"
        return keras.KerasTensor(array.shape, "string" if text else keras.backend.standardize_dtype(array.dtype))

    specs = tree.map_structure(spec, batch)
    x, y, weight = (*specs, None, None)[:3]
    predicted = compute_output_spec(twin, x, training=False)
    compute_output_spec(twin.compute_loss, x, y, predicted, sample_weight=weight)


def loss_of(model, x, y, outputs, sample_weight):
    """Returns the loss that a compiled model's training step computes, `add_loss` and regularizers included."""
    return model._compute_loss(x=x, y=y, y_pred=outputs, sample_weight=sample_weight, training=True)


def has_own_loss(model):
    """Returns whether a model's class says itself what its loss is."""
    return type(model).compute_loss is not keras.Model.compute_loss


def has_own_step(model):
    """Returns whether a model's class says itself what a training step is, or its loss."""
    kind = type(model)
    return kind.train_step is not keras.Model.train_step or kind.compute_loss is not keras.Model.compute_loss


def sublayers(layer):
    """Returns a layer and all layers inside it, or nothing for a bare operation."""
    return list(layer._flatten_layers()) if isinstance(layer, keras.Layer) else []


def trained_weights(operation):
    """Returns the weights of a layer that its model trains: `trainable_weights` hides those inside a frozen layer.

    LoRA freezes a block and then thaws what it has put into it, which the model trains and the block denies.
    """
    return [v for v in getattr(operation, "weights", ()) if v.trainable]


def plain_arguments(node):
    """Returns what a node was called with, tensors left out."""
    args, kwargs = node.arguments.args, node.arguments.kwargs
    return [repr(x) for x in tree.flatten((args, kwargs)) if not isinstance(x, keras.KerasTensor)] + sorted(kwargs)


def training_call(operation):
    """Returns the call of a layer as `fit` makes it, or the operation itself."""
    if isinstance(operation, keras.Layer) and operation._call_has_training_arg:
        return lambda *args, **kwargs: operation(*args, **{**kwargs, "training": True})
    return operation


@contextlib.contextmanager
def no_side_effects(operation):
    """A scope in which a layer can be called without a change of its state or losses."""
    updates = {}
    context = global_state.get_global_attribute("current_call_ctx")
    scope = StateScope(lambda v: updates.get(id(v)), lambda v, value: updates.__setitem__(id(v), value))
    global_state.set_global_attribute("current_call_ctx", None)
    try:
        with losses_kept(sublayers(operation)), scope:
            yield
            scope.owned_losses()
    finally:
        global_state.set_global_attribute("current_call_ctx", context)


_keras_attributes = set()


def keras_attributes():
    """Returns the names of the attributes that Keras itself gives to layers and models."""
    if not _keras_attributes:
        counters = name_counters()
        for made in (keras.layers.Layer(), keras.Model(), keras.Sequential()):
            _keras_attributes.update(vars(made))
        set_name_counters(counters)
    return _keras_attributes


@contextlib.contextmanager
def watching_calls(around):
    """Has this thread's calls of layers and operations go through `around(operation, call, args, kwargs)` in this scope.

    Args:
        around: Callable that returns `call(*args, **kwargs)`.
    """
    original, thread = keras.Operation.__call__, threading.get_ident()

    @functools.wraps(original)
    def __call__(self, *args, **kwargs):
        if threading.get_ident() != thread:
            return original(self, *args, **kwargs)
        return around(self, functools.partial(original, self), args, kwargs)

    keras.Operation.__call__ = __call__
    try:
        yield
    finally:
        keras.Operation.__call__ = original


def compiled_call(function):
    """Returns the name of a layer, `function` itself or inside it, whose `call` is a `tf.function`, or None."""
    owner = function if isinstance(function, keras.Layer) else getattr(function, "__self__", None)
    for layer in sublayers(owner):
        if hasattr(type(layer).call, "get_concrete_function") or hasattr(layer.call, "get_concrete_function"):
            return f"layer '{layer.name}'"
    return None


_CORES = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
_ACTIVATED = (
    *(keras.layers.Dense, keras.layers.EinsumDense, keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D),
    *(keras.layers.Conv1DTranspose, keras.layers.Conv2DTranspose, keras.layers.Conv3DTranspose),
    *(keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D, keras.layers.SeparableConv1D, keras.layers.SeparableConv2D),
)


def inner_part(operation):
    """Returns what can be recomputed inside a layer, and the attribute that holds its function; or two empty strings."""
    if isinstance(operation, _CORES) and callable(getattr(operation, "_compute_attention", None)):
        return "attention", "_compute_attention"
    if isinstance(operation, _ACTIVATED) and operation.activation not in (None, keras.activations.linear):
        return "activation", "activation"
    return "", ""


def part_order(operation, args):
    """Returns the order in which to pass an inner part's arguments on, as positions.

    In eager mode the gradients of a tensor with several readers are added up in an order that depends on the order in
    which its readers' results are taken: these are the ones of the plain layers.
    """
    first = []
    if isinstance(operation, _CORES) and len(args) > 2:
        first = [2, 0, 1]
        if isinstance(operation, keras.layers.MultiHeadAttention):
            scores = any(x is True for x in args[5:6]) or getattr(operation, _SCORES, False)
            scores = scores or len(args[0].shape) != 4  # several `attention_axes`, or batch axes
            first = [2, 1, 0] if operation._dropout > 0 or scores else first  # Keras' own product, of key and query
    return first + list(range(len(first), len(args)))


_part_lock = threading.RLock()
_SCORES = "_return_attention_scores"


def _as_called(operation, function):
    """Returns an attention layer's inner function, such that a re-run is asked for what the present call is asked for.

    `GroupQueryAttention`, and `MultiHeadAttention` of older Keras, tell it by an attribute whether to return scores, and
    another call of the layer may have set that since.
    """
    scores = operation.__dict__[_SCORES]

    def call(*args, **kwargs):
        # A replica may have to wait for others in here. They do not run meanwhile, and ask for the same.
        with contextlib.nullcontext() if tf_internals.in_replica_thread() else _part_lock:
            own = operation.__dict__
            before, own[_SCORES] = own[_SCORES], scores
            try:
                return function(*args, **kwargs)
            finally:
                own[_SCORES] = before

    return call


class _Parts:
    """Stands in the place of a layer's inner function while any thread has it replaced, and calls what its own thread has.

    Nothing is locked while the layer is called: a replica that waits for others in there would keep them from going on.
    """

    def __init__(self, own, attribute, function):
        self._own, self._attribute, self._function = own, attribute, function
        self._before, self._users = own.get(attribute, self), 0
        self._local = threading.local()

    def present(self):
        return (*getattr(self._local, "stack", ()), self._function)[0]

    def __call__(self, *args, **kwargs):
        return self.present()(*args, **kwargs)

    @contextlib.contextmanager
    def replaced(self, replacement):
        """A scope in which this thread calls `replacement`. The last one that is left puts the function back."""
        before = getattr(self._local, "stack", ())
        self._local.stack = (replacement, *before)
        try:
            yield
        finally:
            self._local.stack = before
            with _part_lock:
                self._users -= 1
                if self._users == 0 and self._before is self:
                    del self._own[self._attribute]
                elif self._users == 0:
                    self._own[self._attribute] = self._before

    @classmethod
    def of(cls, operation, attribute):
        """Returns what stands in the place of the function, from now until it has been used."""
        own = operation.__dict__
        with _part_lock:
            if not isinstance(own.get(attribute), cls):
                own[attribute] = cls(own, attribute, getattr(operation, attribute))
            own[attribute]._users += 1
            return own[attribute]


@contextlib.contextmanager
def part_replaced(operation, attribute, make):
    """Puts `make(function)` in the place of a layer's inner function while the layer is called, in this scope and thread.

    Args:
        operation: The layer.
        attribute: The second result of `inner_part`; with "" nothing is replaced.
        make: Callable that takes the function and returns another.
    """
    if not attribute:
        yield
        return
    parts = _Parts.of(operation, attribute)
    function = parts.present()

    def replacement(*args, **kwargs):
        asked = _as_called(operation, function) if _SCORES in operation.__dict__ else function
        return make(asked)(*args, **kwargs)

    with parts.replaced(replacement):
        yield


# --- writing, cloning, exporting ------------------------------------------------------------------------------------------


def on_serialize(callback):
    """Calls `callback(object, record)` with whatever Keras has serialized, which may change the record in place.

    Keras asks the object for its config, but writes the object's class beside it: no method of the object can say another.

    Args:
        callback: Callable that takes the object, and its class and config as a dict.
    """
    original = serialization_lib.get_build_and_compile_config  # Keras' last step before it takes the record for complete

    @functools.wraps(original)
    def get_build_and_compile_config(obj, config):
        original(obj, config)
        callback(obj, config)

    serialization_lib.get_build_and_compile_config = get_build_and_compile_config


def on_clone(callback):
    """Makes `clone_model` put `callback(model, clone)` in the place of a clone, models inside models included.

    Keras makes a clone from a model's layers, or from its class and config, and asks the model for nothing else.

    Args:
        callback: Callable that takes a layer, any kind of, and its clone, and returns a layer.
    """

    def of_model(original):
        @functools.wraps(original)
        def clone_model(model, *args, **kwargs):
            return callback(model, original(model, *args, **kwargs))

        return clone_model

    cloning._clone_sequential_model = of_model(cloning._clone_sequential_model)
    cloning._clone_functional_model = of_model(cloning._clone_functional_model)
    wrap = cloning._wrap_clone_function

    @functools.wraps(wrap)
    def wrap_clone_function(clone_function, call_function=None, recursive=False, cache=None):
        cache = {} if cache is None else cache  # Keras': a shared layer has one clone
        clone = wrap(clone_function, call_function=call_function, recursive=recursive, cache=cache)

        def cloned(layer):
            cache[id(layer)] = callback(layer, clone(layer))
            return cache[id(layer)]

        return cloned

    cloning._wrap_clone_function = wrap_clone_function


_EXPORTS = ("keras.src.export.", tf.saved_model.save.__module__)


def is_exporting():
    """Returns True while a function is traced for a file that holds graphs, such as a SavedModel."""
    frame = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_EXPORTS):
            return True
        frame = frame.f_back
    return False


# --- `fit` around a callback ----------------------------------------------------------------------------------------------


def wrap_step(model, wrapper):
    """Makes the model's next training step, and that alone, run as `wrapper(step, *arguments)`.

    Args:
        model: A model in `fit`, before a batch.
        wrapper: Callable that calls its first argument with the others, and returns the result.
    """
    original = model.__dict__.get("train_function")
    if original is None:  # a loop of the user's own
        return

    # A callback that ends the `fit` before this batch leaves the wrapper behind. It is taken off when Keras lets go of that
    # fit's callbacks, and until then (a traceback may hold them) it does nothing in another.
    around = _of_caller(_callback_list)
    asked = None if around is None else weakref.ref(around)

    def once(*args, **kwargs):
        if model.train_function is once:
            model.train_function = original
        late = asked is not None and asked() is not _of_caller(_callback_list)
        return original(*args, **kwargs) if late else wrapper(original, *args, **kwargs)

    once._tf_ckpt_once = True
    model.train_function = once
    if around is not None:
        weakref.finalize(around, _take_off, weakref.ref(model), weakref.ref(once)).atexit = False


def _take_off(model, once):
    model, once = model(), once()
    if once is not None and model is not None and model.__dict__.get("train_function") is once:
        unwrap_step(model)


def _callback_list(names):
    """Returns the `CallbackList` among the local variables of a `fit` or of one of its own methods."""
    found = (names.get("self"), names.get("callbacks"))
    return next((x for x in found if isinstance(x, keras.callbacks.CallbackList)), None)


def unwrap_step(model):
    """Takes off what `wrap_step` put on, if the step was never run."""
    step = model.__dict__.get("train_function")
    if getattr(step, "_tf_ckpt_once", False):
        model.train_function = inspect.getclosurevars(step).nonlocals["original"]


def times_traced(model):
    """Returns how often the training step was traced, or 0 where that cannot be told."""
    step = model.__dict__.get("train_function")
    if getattr(step, "_tf_ckpt_once", False):
        step = inspect.getclosurevars(step).nonlocals["original"]
    cells = [cell.cell_contents for cell in getattr(step, "__closure__", None) or ()]
    return sum(x.experimental_get_tracing_count() for x in cells if hasattr(x, "experimental_get_tracing_count"))


def _of_caller(find):
    """Returns the first result of `find(local variables)` that is not None, from this function's callers outwards."""
    frame = sys._getframe(2)
    while frame is not None:
        found = find(frame.f_locals)
        if found is not None:
            return found
        frame = frame.f_back
    return None


def callbacks_around():
    """Returns the callbacks of the `fit` that is calling one, in order; Keras does not tell them of each other."""

    around = _of_caller(_callback_list)
    return [] if around is None else list(around.callbacks)


def batch_size_around():
    """Returns the batch size of the `fit` that is calling a callback, or None if it is not known beforehand."""
    adapter = _of_caller(lambda names: getattr(names.get("epoch_iterator"), "data_adapter", None))
    size = getattr(adapter, "batch_size", None)
    return int(size) if size else None


def tensorboard_writers(callback):
    """Returns the functions that give a `keras.callbacks.TensorBoard`'s writers, for training and for validation."""
    return lambda: callback._train_writer, lambda: callback._val_writer
