"""What a model keeps in Python, outside of variables: read, compared and put back.

Seen are plain data (numbers, texts, arrays, and lists, tuples, dicts and sets of these), random generators of Python and
NumPy, and counters of `itertools`: in attributes of the layers, metrics and other objects of a user's own classes, of these
classes themselves, in variables of enclosing functions, and in globals that their functions name.
"""

import collections
import copy
import inspect
import itertools
import random
import sys
import types

import keras
import numpy as np

from tf_ckpt import graph as keras_graph

LIBRARIES = ("keras", "tensorflow", "tf_ckpt", "numpy", "absl", "ml_dtypes")
_NUMBERS = (bool, int, float, complex, str, bytes, type(None), np.generic, np.ndarray)
_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, np.random.SeedSequence)
_MOST_ITEMS, _MOST_BYTES, _DEEPEST = 10_000, 2**22, 4
_ABSENT = "(absent)"


def is_users(module):
    """Returns whether a module's name is that of a user's code, rather than of Keras, TensorFlow, Python and NumPy."""
    top = str(module).split(".")[0]
    return top not in LIBRARIES and top not in sys.stdlib_module_names


class PythonState:
    """The state that objects and their functions keep in Python, as it is now.

    Args:
        objects: Iterable of layers and other objects.
        functions: Iterable of functions.
    """

    def __init__(self, objects, functions=()):
        self._slots, self._seen, self._owners = {}, set(), []
        objects = list(objects)
        self._packages = {type(x).__module__.split(".")[0] for x in objects}
        for each in objects:
            self._object(each, 0)
        for each in functions:
            self._function(each, 0)
        self._before = self.values()

    def values(self):
        """Returns a dict from what each place is called to a copy of what is there now."""
        return {label: _copy(slot.get()) for label, slot in self._slots.items()}

    def changed(self):
        """Returns a dict from each place that is not as it was to the pair of what was there and what is."""
        now = self.values()
        return {label: (was, now[label]) for label, was in self._before.items() if not same(was, now[label])}

    def restore(self):
        """Puts everything back."""
        for label, slot in self._slots.items():
            if not same(self._before[label], _copy(slot.get())):
                slot.put(self._before[label])
        for owner, names in self._owners:
            for name in set(_plain_attributes(owner)) - names:
                del owner.__dict__[name]  # it came since

    def forget(self):
        """Has `restore` put nothing back."""
        self._slots, self._owners = {}, []

    def _label(self, label):
        """Returns what a place is called, once: layers inside of two models may have the same name."""
        count = sum(1 for known in self._slots if known == label or known.startswith(f"{label} ("))
        return f"{label} ({count + 1})" if count else label

    def _follows(self, module):
        """Returns whether what a module has is looked into: libraries are not, but that of a layer."""
        if not is_users(module):
            return False
        where = str(getattr(sys.modules.get(module), "__file__", ""))
        return str(module).split(".")[0] in self._packages or not ("site-packages" in where or "dist-packages" in where)

    def _object(self, value, depth):
        if isinstance(value, types.FunctionType):
            self._function(value, depth)
            return
        if id(value) in self._seen or depth > _DEEPEST:
            return
        self._seen.add(id(value))
        kind = type(value)
        if isinstance(value, keras.layers.Lambda):
            self._function(value.function, depth + 1)
        if not self._follows(kind.__module__) or not hasattr(value, "__dict__") or isinstance(value, (type, types.ModuleType)):
            return
        name = str(getattr(value, "name", kind.__name__))
        attributes = _plain_attributes(value)
        self._owners.append((value, set(attributes)))
        for attribute in attributes:
            self._slots[self._label(f"`{attribute}` of '{name}'")] = _Attribute(value, attribute)
        for attribute, held in list(vars(value).items()):
            if attribute not in attributes and not isinstance(held, (keras.Layer, types.FunctionType)):
                self._object(held, depth + 1)
            elif isinstance(held, types.FunctionType):
                self._function(held, depth + 1)
        for each in kind.__mro__:
            if self._follows(each.__module__):
                self._class(each, depth)

    def _class(self, kind, depth):
        if id(kind) in self._seen:
            return
        self._seen.add(id(kind))
        for name, value in list(vars(kind).items()):
            function = inspect.unwrap(getattr(value, "__func__", getattr(value, "fget", value)) or value)
            if isinstance(function, types.FunctionType):
                self._function(function, depth + 1)
            elif not name.startswith("__") and _is_plain(value):
                self._slots[self._label(f"`{kind.__name__}.{name}`")] = _OfClass(kind, name)

    def _function(self, function, depth):
        function = inspect.unwrap(function) if callable(function) else function
        if not isinstance(function, types.FunctionType) or id(function) in self._seen or depth > _DEEPEST:
            return
        self._seen.add(id(function))
        if not self._follows(function.__module__):
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # an empty cell
                continue
            if id(cell) not in self._seen:
                self._seen.add(id(cell))
                self._found(f"the variable `{name}` around `{function.__name__}`", _Cell(cell), value, depth)
        for name in sorted(_names(function.__code__)):
            place = (id(function.__globals__), name)
            if name in function.__globals__ and place not in self._seen:
                self._seen.add(place)
                value = function.__globals__[name]
                self._found(f"the global variable `{name}`", _Global(function.__globals__, name), value, depth)

    def _found(self, label, slot, value, depth):
        if _is_plain(value):
            self._slots[self._label(label)] = slot
        elif not isinstance(value, (keras.Layer, type, types.ModuleType)):
            self._object(value, depth + 1)


class _Attribute:
    def __init__(self, owner, name):
        self.owner, self.name, self.first = owner, name, owner.__dict__[name]

    def get(self):
        return self.owner.__dict__.get(self.name, _ABSENT)

    def put(self, value):
        self.owner.__dict__[self.name] = _refilled(self.first, value)


class _OfClass:
    def __init__(self, owner, name):
        self.owner, self.name, self.first = owner, name, vars(owner)[name]

    def get(self):
        return vars(self.owner).get(self.name, _ABSENT)

    def put(self, value):
        setattr(self.owner, self.name, _refilled(self.first, value))


class _Cell:
    def __init__(self, cell):
        self.cell, self.first = cell, cell.cell_contents

    def get(self):
        return self.cell.cell_contents

    def put(self, value):
        self.cell.cell_contents = _refilled(self.first, value)


class _Global:
    def __init__(self, space, name):
        self.space, self.name, self.first = space, name, space[name]

    def get(self):
        return self.space.get(self.name, _ABSENT)

    def put(self, value):
        self.space[self.name] = _refilled(self.first, value)


def _names(code):
    """Returns the global names in a function's code, functions inside it included."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant)
    return found


def _plain_attributes(value):
    hidden = keras_graph.keras_attributes() if isinstance(value, keras.Layer) else ()
    return [
        name
        for name, held in list(vars(value).items())
        if name not in hidden and not name.startswith(("_self_", "_tf_", "__", "_keras")) and _is_plain(held)
    ]


def _is_plain(value):
    return isinstance(value, (*_GENERATORS, itertools.count)) or _is_data(value, [_MOST_ITEMS])


def _is_data(value, left):
    if isinstance(value, np.ndarray):
        return value.nbytes <= _MOST_BYTES and value.dtype != object
    if isinstance(value, _NUMBERS):
        return True
    if not isinstance(value, _CONTAINERS) or isinstance(value, keras.Layer):
        return False
    left[0] -= len(value)
    items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return left[0] >= 0 and all(_is_data(x, left) for x in items)


class _State:
    """The state of a random generator, or how far a counter is."""

    def __init__(self, value):
        if isinstance(value, np.random.Generator):
            self.state = copy.deepcopy(value.bit_generator.state)
        elif isinstance(value, np.random.SeedSequence):
            self.state = value.n_children_spawned
        elif isinstance(value, np.random.RandomState):
            self.state = value.get_state()
        else:
            self.state = value.getstate() if isinstance(value, random.Random) else repr(value)

    def __repr__(self):
        return self.state if isinstance(self.state, str) else "a random generator"

    def put(self, value):
        if isinstance(value, np.random.Generator):
            value.bit_generator.state = self.state
        elif isinstance(value, np.random.RandomState):
            value.set_state(self.state)
        elif isinstance(value, random.Random):
            value.setstate(self.state)


def _copy(value):
    """Returns a copy of data in plain containers: Keras and TensorFlow put their own in the place of a layer's."""
    if isinstance(value, (*_GENERATORS, itertools.count)):
        return _State(value)
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: _copy(x) for key, x in value.items()}
    kind = next((k for k in (list, tuple, set, frozenset, collections.deque) if isinstance(value, k)), None)
    return value if kind is None or not _is_data(value, [_MOST_ITEMS]) else kind(_copy(x) for x in value)


def _refilled(first, value):
    """Returns the object that was there first, with what it held then."""
    if isinstance(value, _State):
        value.put(first)
        return first
    if isinstance(first, np.ndarray) and first.flags.writeable:
        first[...] = value
    elif isinstance(first, list):
        list.clear(first)
        list.extend(first, value)
    elif isinstance(first, dict):
        dict.clear(first)
        dict.update(first, value)
    elif isinstance(first, (set, collections.deque)):
        kind = set if isinstance(first, set) else collections.deque
        kind.clear(first)
        (set.update if kind is set else collections.deque.extend)(first, value)
    return first


def same(a, b):
    """Returns whether two copies of plain data are alike; what is not a number equals itself."""
    if isinstance(a, _State) and isinstance(b, _State):
        return same(a.state, b.state)
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple, collections.deque)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a is b or bool(a == b) or (a != a and b != b)


def short(value):
    """Returns plain data as a text of one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else f"{text[:37]}..."
