"""`Recompute`: a Keras layer that keeps only its inputs for the backward pass."""

import inspect

import keras

from tf_ckpt.replay import run

_classes = {}


class _Inside(str):
    """The name of an attribute of the wrapped layer, where the wrapper has one of that name as well."""


@keras.saving.register_keras_serializable(package="tf_ckpt", name="Recompute")
class Recompute(keras.layers.Wrapper):
    """Wraps a layer so that its activations are recomputed in the backward pass instead of stored.

    The layer trains exactly as before: same outputs, losses, gradients and state (dropout masks, BatchNorm statistics,
    seeds, metrics) in eager mode, `tf.function` and XLA. What it keeps from forward to backward are its inputs.
    It saves memory if the layer holds several operations (a block, a sub-model, an LSTM); around a single `Dense` it saves
    next to nothing, since the input that it keeps is what `Dense` keeps anyway.

    The wrapper takes the place of the layer in every respect: same call arguments, name, variables and weight files,
    and its other attributes are read and set through it (`Recompute(attention).num_heads`, `Recompute(dropout).rate = 0.1`).

    - Masking: as the wrapped layer, implicit masks included.
    - `training`: as the wrapped layer, given or inherited.
    - State: updated once a step, by the forward run.
    - XLA: supported.
    - Gradients of gradients and forward-mode differentiation raise `NotImplementedError`; see `tf_ckpt.disabled`.

    Args:
        layer: A `keras.Layer` instance, built or not. A `Recompute` is taken for the layer that it wraps.
        name: Optional string. Defaults to the name of `layer`.
        **kwargs: Arguments of `keras.Layer`; `dtype` is that of `layer`.

    Call arguments:
        Those of `layer`.

    Raises:
        TypeError: If `layer` is not a `keras.Layer` instance, or is a `keras.Input`'s layer.

    Example:

    ```python
    inputs = keras.Input((256, 128))
    x = inputs
    for _ in range(12):
        x = tf_ckpt.Recompute(TransformerBlock(heads=4))(x)
    model = keras.Model(inputs, keras.layers.Dense(10)(x))
    ```

    Reference:
        - [Chen et al., 2016](https://arxiv.org/abs/1604.06174)
    """

    def __new__(cls, layer=None, *args, **kwargs):
        # One class for each wrapped class, because Keras reads off the class what names a layer has in weight files.
        layer = _wrapped(layer)
        return super().__new__(_class_for(cls, type(layer)), layer, *args, **kwargs)

    def __init__(self, layer, name=None, **kwargs):
        layer = _wrapped(layer)
        kwargs["dtype"] = layer.dtype_policy
        super().__init__(layer, name=name or layer.name, **kwargs)
        self.supports_masking = True  # compute_mask below says what becomes of a mask
        self._convert_input_args = layer._convert_input_args
        self._allow_non_tensor_positional_args = layer._allow_non_tensor_positional_args
        self.built = layer.built

    def call(self, *args, **kwargs):
        return run(self.layer, args, kwargs, self.name)

    def build(self, *args, **kwargs):
        if not self.layer.built:
            self.layer.build(*args, **kwargs)
        self.built = True

    # If the wrapped layer has no `build` of its own, Keras builds by a symbolic call, in which the layer builds itself.
    build._is_default = True

    def compute_output_spec(self, *args, **kwargs):
        return self.layer.compute_output_spec(*args, **kwargs)

    def compute_output_shape(self, *args, **kwargs):
        return self.layer.compute_output_shape(*args, **kwargs)

    def compute_mask(self, inputs, previous_mask=None):
        return self.layer.compute_mask(inputs, previous_mask) if self.layer.supports_masking else None

    @property
    def input_spec(self):
        return self.layer.input_spec

    @input_spec.setter
    def input_spec(self, value):
        if value is not None:
            self.layer.input_spec = value

    def get_build_config(self):
        return self.layer.get_build_config()

    def build_from_config(self, config):
        if not self.layer.built:
            self.layer.build_from_config(config)
        self.built = True

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = dict(config)
        layer = keras.saving.deserialize_keras_object(config.pop("layer"), custom_objects=custom_objects)
        config.pop("dtype", None)
        return Recompute(layer, **config)

    # Weight files: the wrapper stores what the wrapped layer would, under the same names.

    def save_own_variables(self, store):
        self.layer.save_own_variables(store)

    def load_own_variables(self, store):
        self.layer.load_own_variables(store)

    def _obj_type(self):
        return self.layer._obj_type()

    def __dir__(self):
        return [_Inside(name) for name in dir(self.layer)]

    def __getattribute__(self, name):
        if type(name) is _Inside:
            return getattr(super().__getattribute__("layer"), str(name))
        return super().__getattribute__(name)

    def __getattr__(self, name):
        layer = self.__dict__.get("layer")
        if layer is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(layer, name)

    def __setattr__(self, name, value):
        # What is read through the wrapper is set through it too: a schedule of `rate`, `return_sequences`, ...
        layer = self.__dict__.get("layer")
        ours = layer is None or name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if ours or not hasattr(layer, name):
            super().__setattr__(name, value)
        else:
            setattr(layer, name, value)


def _wrapped(layer):
    if isinstance(layer, Recompute):
        return layer.layer
    if isinstance(layer, keras.layers.InputLayer):
        raise TypeError(f"An input has nothing to recompute. Received: layer={layer!r}")
    if not isinstance(layer, keras.Layer):
        hint = " (a class: call it to make a layer)" if inspect.isclass(layer) else ""
        raise TypeError(
            "`Recompute` wraps a `keras.Layer` instance; for a function use `tf_ckpt.recompute`. "
            f"Received: layer={layer!r}{hint}"
        )
    return layer


def _class_for(base, wrapped):
    if (base, wrapped) not in _classes:
        original = wrapped.call

        def call(self, *args, **kwargs):
            return base.call(self, *args, **kwargs)

        call.__signature__ = inspect.signature(original)
        body = {
            "__module__": base.__module__,
            "__doc__": base.__doc__,
            "call": call,
            "__qualname__": wrapped.__qualname__,
        }
        if not getattr(wrapped.build, "_is_default", False):
            body["build"] = _build_like(base, wrapped)
        made = type(wrapped.__name__, (base,), body)
        register = keras.saving.register_keras_serializable(package="tf_ckpt", name="Recompute")
        register(made)
        register(Recompute)
        _classes[base, wrapped] = made
    return _classes[base, wrapped]


def _build_like(base, wrapped):
    """Makes a `build` with the parameters of the wrapped class's, off which Keras reads which shapes to pass."""
    parameters = list(inspect.signature(wrapped.build).parameters.values())[1:]
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return base.build
    takes = ", ".join(p.name if p.default is p.empty else f"{p.name}=None" for p in parameters)
    gives = ", ".join(f"{p.name}={p.name}" for p in parameters)
    space = {"base_build": base.build}
    # Keras reads the parameters through its own wrapper of `build`, which a `__signature__` does not survive.
    exec(f"def build(self, {takes}):\n    base_build(self, {gives})", space)
    return space["build"]
