"""Saved, cloned, copied and exported: an applied model stays one, and its file says so.

Keras writes a model as its class and config. The class of an applied model is the user's own, which knows of no plan, so
what Keras wrote is put inside an object of a class of ours, together with the plan. Weights and what the model was compiled
with stay where Keras puts them: weight files are those of the plain model.
"""

import dataclasses
import re
import warnings

import keras

from tf_ckpt import graph as keras_graph
from tf_ckpt import plan_file, python_models
from tf_ckpt.errors import CheckpointError, CheckpointWarning
from tf_ckpt.stages import Stages
from tf_ckpt.transform import apply, plan_of


@keras.saving.register_keras_serializable(package="tf_ckpt", name="Applied")
class Applied:
    """Stands for an applied model in files. It is never made: `from_config` returns a model of the user's class."""

    @classmethod
    def from_config(cls, config):
        """Makes the plain model and applies the plan.

        Args:
            config: Dict with the serialized plain `"model"` and the `"plan"`, as in a plan file.

        Returns:
            A model of the class that was saved.

        Raises:
            CheckpointError: If the plan cannot be read, or does not fit the model.
        """
        made = plan_file.from_json(config.get("plan"), "config['plan'] of a saved model")
        model = keras.saving.deserialize_keras_object(config.get("model"))
        try:
            return apply(model, _named_as_in(model, made))
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} The plan was saved with the model, which is not made as it was then. Its weights alone can be "
                "loaded into a model that is: `model.load_weights(path)`."
            ) from error

    def get_config(self):  # Keras registers no class without
        raise NotImplementedError


def _named_as_in(model, made):
    """Returns a plan with the names of a model that is made anew.

    Layers without a name get another number each time their model's constructor makes them, and in older Keras so do some
    operations. Recompute is exact by any plan; where more than numbers differ, the model is another, and `apply` says so.
    """
    present = _names_in(model, made)
    if present == made.layers:
        return made
    if not present or len(present) != len(made.layers):  # a layer that holds chosen ones may bear another number
        opened = python_models.opened_by([_stem(name) for name in made.layers])
        present = _names_in(model, made, lambda name: opened(_stem(name)))
    if len(present) != len(made.layers):
        return made
    alike = zip(present, made.layers, strict=True)
    names = {theirs: mine if _stem(mine) == _stem(theirs) else theirs for mine, theirs in alike}

    def renamed(segment):
        inside = tuple(renamed(s) for s in segment.inside)
        return dataclasses.replace(segment, layers=tuple(names[name] for name in segment.layers), inside=inside)

    return dataclasses.replace(made, layers=tuple(names.values()), segments=tuple(renamed(s) for s in made.segments))


def _names_in(model, made, opened=None):
    """Returns the names that a plan of `model` would have instead of those in `made`."""
    if keras_graph.runs_python(model):
        return python_models.names_in(model, opened or python_models.opened_by(made.layers))
    level = keras_graph.read(model)
    return () if level is None else tuple(Stages(level).names)


def _stem(name):
    """Returns a call's name without what Keras numbers layers and operations by."""
    return re.sub(r"(_\d+)?(:\d+)?(/|$)", r"\3", name)


def _planned(model):
    """Returns the plan that `model` executes, or None if there is nothing to keep."""
    made = plan_of(model) if isinstance(model, keras.Model) else None
    return made if made is not None and made.segments else None


def _serialized(model, record):
    """Turns what Keras wrote of an applied model into an `Applied`."""
    made = _planned(model)
    if made is None:
        return
    if _names_in(model, made) != made.layers:
        warnings.warn(
            f"Model '{model.name}' is stored without its plan, since layers inside it were changed or renamed after "
            "`tf_ckpt.apply`: call it again, before you save or on what is loaded.",
            CheckpointWarning,
            stacklevel=2,
        )
        return
    plain, outside = dict(record), {}
    if "compile_config" in plain:  # Keras compiles what `from_config` returns, or is told not to, out here
        outside["compile_config"] = plain.pop("compile_config")
    if plain["module"] == "__main__":
        plain["module"] = None  # as Keras does outside: the next program has another `__main__`
    record.clear()
    record.update(
        module=Applied.__module__,
        class_name=Applied.__name__,
        config={"model": plain, "plan": plan_file.to_json(made)},
        registered_name=keras.saving.get_registered_name(Applied),
        **outside,
    )


def _cloned(model, clone):
    """Returns the clone of a model with the model's plan."""
    made = None if clone is model else _planned(model)
    if made is None or not isinstance(clone, keras.Model) or _planned(clone) is not None:
        return clone
    try:
        return apply(clone, _named_as_in(clone, made))
    except CheckpointError as error:
        warnings.warn(
            f"The clone of model '{model.name}' is plain, since the model's plan does not fit it: {error} Call "
            "`tf_ckpt.apply` on the clone.",
            CheckpointWarning,
            stacklevel=4,
        )
        return clone


keras_graph.on_serialize(_serialized)
keras_graph.on_clone(_cloned)
