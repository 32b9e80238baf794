"""The one file that touches what Keras does not document.

A new Keras breaks this file or none. What is here: the state that surrounds a layer call (`Surroundings`), the scope in
which state is read and written (`StateScope`), masks, and a Functional model read as nodes and run by pieces.
"""

import contextlib
import copy
import sys

import keras
import tensorflow as tf
from keras.src.backend import get_keras_mask, set_keras_mask
from keras.src.backend.common import global_state

__all__ = ["StateScope", "Surroundings", "get_keras_mask", "set_keras_mask"]


def in_symbolic_scope():
    """Returns True while Keras only asks for shapes."""
    return global_state.get_global_attribute("symbolic_scope") is not None


def raw_variable(variable):
    """Returns the `tf.Variable` of a Keras variable, or None while it has none."""
    return variable._value


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
        # A layer writes the `training` that it resolved back into the context: keep it as it is now.
        return copy.copy(value)

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


class StateScope(keras.StatelessScope):
    """A stateless scope that asks its owner for each variable's value and tells it of each update and loss.

    Args:
        read: Callable `variable -> tensor | None`; None means: as it is outside.
        update: Callable `(variable, value)`.
    """

    def __init__(self, read, update):
        super().__init__(collect_losses=True, initialize_variables=False)
        self._read, self._update = read, update
        self.owners = {}

    def get_current_value(self, variable):
        value = self._read(variable)
        if value is None:
            # Keras calls regularizers with what this returns, so None, its "as it is outside", will not do.
            return variable._value
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


def parent_scope_value(variable):
    """Returns what the enclosing stateless scope holds for `variable`, or None."""
    scope = global_state.get_global_attribute("stateless_scope")
    return None if scope is None else scope.get_current_value(variable)


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
    name = 'tensor' if hasattr(tensor, 'numpy') else tensor.name
    return f"{name} of shape {tuple(tensor.shape)} and dtype {tensor.dtype.name}"
