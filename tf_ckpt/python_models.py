"""Plans for models whose `call` is Python code: chosen layers are recomputed where the model calls them.

Such a model is no graph, so that nothing is known of the order in which its layers run, nor of costs. Its layers are known,
by the attributes that hold them. An applied model is a copy of the model object in which stand-ins (`graph.StandIns`)
take the place of the chosen layers, and of whatever holds one: they share all state with the layers, which stay as they
are, and are found wherever the model's code looks for a layer: in attributes, lists, tuples, dicts and layers inside layers.
"""

import functools
import types
import warnings

import keras

from tf_ckpt import choosing, inspection
from tf_ckpt import graph as keras_graph
from tf_ckpt.errors import CheckpointError, CheckpointWarning, quoted
from tf_ckpt.layers.recompute import Recompute
from tf_ckpt.plan import Plan, Segment
from tf_ckpt.planning import check_arguments
from tf_ckpt.replay import run
from tf_ckpt.stages import reason_to_stay_plain

TWO_LINES = (
    "    self.block = tf_ckpt.Recompute(Block(...))  # instead of Block(...)\n"
    "    self.blocks = [tf_ckpt.Recompute(Block(...)) for _ in range(12)]"
)


def layers_of(model):
    """Returns all layers inside a model by name: the attribute that holds a layer, `outer/inner` inside another layer.

    Args:
        model: A `keras.Model`.

    Returns:
        A dict from name to layer, in the order in which the model holds them. A layer that several attributes lead to
        has the shortest name. What is inside a `Recompute`, or a model with a plan of its own, is left out.
    """
    top = ("", model, [])
    seen, level = {id(model)}, [top]
    while level:
        following = []
        for name, owner, inside in level:
            for own, layer in keras_graph.held_layers(owner):
                if id(layer) not in seen:
                    seen.add(id(layer))
                    inside.append((f"{name}/{own}" if name else own, layer, []))
            following += [x for x in inside if not _is_whole(x[1])]
        level = following
    found, waiting = {}, [top]
    while waiting:
        name, layer, inside = waiting.pop()
        if name:
            found[name] = layer
        waiting += reversed(inside)
    return found


def _is_whole(layer):
    return isinstance(layer, Recompute) or keras_graph.is_executing(layer)


def names_in(model, opened):
    """Returns the names that a plan of a model has: of its layers, opened where that is needed.

    Args:
        model: A `keras.Model`.
        opened: Callable that says of a layer's name whether the plan tells of the layers inside it.
    """
    names = list(layers_of(model))
    leaves = [name for name in names if not opened(name)]
    inside = [name for name in leaves if all(opened(name[:i]) for i, c in enumerate(name) if c == "/" and name[:i] in names)]
    return tuple(inside)


def opened_by(names):
    """Returns the `opened` of `names_in` for a plan with these names."""
    outer = {name[:i] for name in names for i, c in enumerate(name) if c == "/"}
    return outer.__contains__


def make_plan(model, strategy, *, batch_size=None, optimizer=None, device=None, **options):
    """Returns the `Plan` for a model whose `call` is Python code: which of its layers are recomputed, without figures.

    Args:
        model: The model.
        strategy: See `tf_ckpt.apply`: `"selective"` with `layers`, `"none"`, or a `Plan`.
        batch_size: See `tf_ckpt.apply`.
        optimizer: None: there are no costs for it to be among.
        device: None, likewise.
        **options: `layers`, `target`, `memory` and `levels`: see `tf_ckpt.apply`.
    """
    check_arguments(strategy, batch_size, options)
    layers = options.get("layers")
    if isinstance(strategy, Plan):
        _check_fits(model, strategy)
        return strategy
    costs = {"strategy": strategy} if strategy not in ("selective", "none") or (strategy, layers) == ("selective", None) else {}
    costs |= {name: x for name, x in (("device", device), ("optimizer", optimizer)) if x is not None}
    if costs:
        given = ", ".join(f"{name}={quoted(x)}" for name, x in costs.items())
        raise CheckpointError(
            f"Model '{model.name}' is no graph of layers, since its `call` is Python code. What its layers cost is not known: "
            'say which to recompute, `tf_ckpt.apply(model, layers=[Block, "encoder/*"])`, or wrap them where they are made:'
            f"\n\n{TWO_LINES}\n\nReceived: {given}, model of class {type(model).__name__}"
        )
    held, names = layers_of(model), set()
    if layers is not None:
        wanted = choosing.outermost(_chosen(model, held, layers))
        names = {name for name in wanted if not _stays_plain(held[name])}
        for name in sorted(wanted - names):
            if names and len(keras_graph.sublayers(held[name])) > 1 and not _is_whole(held[name]):
                _warn(
                    f"'{name}' runs plain: it holds an embedding, a `Recompute`, a model with a plan of its own, or a layer "
                    "whose `call` is a `tf.function`, which are never recomputed. Choose the layers beside it."
                )
        if not names:
            raise CheckpointError(
                "None of the chosen layers can be recomputed: embeddings, `Recompute` layers, models with a plan of their own, "
                "layers whose `call` is a `tf.function`, and what holds one of these never are. "
                f"Received: layers={layers!r}"
            )
    return Plan(
        strategy=strategy,
        layers=names_in(model, opened_by(names)),
        segments=tuple(Segment((name,)) for name in held if name in names),
        batch_size=int(batch_size or 1),
        activation_bytes=0,
        plain_activation_bytes=0,
        overhead=0.0,
    )


def _chosen(model, layers, wanted):
    try:
        return choosing.chosen([choosing.Candidate(name, layer) for name, layer in layers.items()], wanted)
    except CheckpointError as error:
        if model.built:
            raise
        raise CheckpointError(
            f"{error} Model '{model.name}' is not built yet: layers that it makes when it is called first are not known. "
            "Call it on data before `tf_ckpt.apply`."
        ) from error


def _stays_plain(layer):
    return keras_graph.is_executing(layer) or bool(reason_to_stay_plain(layer))


def _check_fits(model, made):
    have = names_in(model, opened_by(made.layers))
    if have != made.layers:
        other = sorted(set(made.layers) ^ set(have)) or list(made.layers)
        hint = "" if model.built else " The model is not built yet: call it on data first."
        raise CheckpointError(
            f"The plan was made for another model: {'it' if other[0] in made.layers else 'the model'} has the layer "
            f"'{other[0]}', {'the model' if other[0] in made.layers else 'it'} has not.{hint} "
            f"Received: plan of strategy {made.strategy!r}, model of class {type(model).__name__}"
        )
    layers = layers_of(model)
    for s in made.segments:
        if len(s.layers) > 1 or s.inside or s.part or _stays_plain(layers[s.layers[0]]):
            raise CheckpointError(
                f"The plan does not fit model '{model.name}', whose `call` is Python code: a segment is one layer there, and "
                f"neither an embedding nor a `Recompute`. Received: segment {s.layers}"
            )


def executing(model, made):
    """Returns a copy of a model that recomputes the layers that a plan names, wherever its code calls them.

    Args:
        model: The plain model.
        made: Its `Plan`.
    """
    layers = layers_of(model)

    def call_of(name):
        memo = inspection.Memo()
        return lambda layer, args, kwargs: run(layer, args, kwargs, name, memo)

    calls = {id(layers[s.layers[0]]): (layers[s.layers[0]], call_of(s.layers[0])) for s in made.segments}

    def refuse():
        raise CheckpointError(
            f"The layers in lists and dicts of model '{model.name}', which has a plan, cannot be changed. Change them in "
            "what `tf_ckpt.remove(model)` returns, and call `tf_ckpt.apply` on that again."
        )

    for owner, attribute, held in _hidden(model, layers, calls):
        _warn(
            f"Attribute '{attribute}' of '{owner.name}' is a function that holds {held}: layers run plain where it calls "
            f"them, and save no memory there. Training is right. Make it a method, or wrap the layers:\n\n{TWO_LINES}"
        )
    return keras_graph.with_stand_ins(model, keras_graph.StandIns(calls, refuse))


def _warn(message):
    warnings.warn(message, CheckpointWarning, stacklevel=5)


def _hidden(model, layers, calls):
    """Yields (owner, attribute, what it holds) for functions in attributes that hold a layer, where no stand-in gets."""
    affected = {id(x) for x in [model, *layers.values()] if any(id(y) in calls for y in keras_graph.sublayers(x))}
    for owner in (model, *(x for x in layers.values() if id(x) in affected and id(x) not in calls)):
        for name, value in keras_graph.own_attributes(owner).items():
            if callable(value) and not isinstance(value, keras.Layer):
                held = next((x for x, names in _held_by(value) if _reaches(x, names, affected, calls)), None)
                if held is not None:
                    yield owner, name, f"'{held.name}'"


def _held_by(function):
    """Yields what a function holds, with the names of attributes that it uses; None for: any."""
    function = getattr(function, "python_function", function)  # behind a `tf.function`
    if isinstance(function, functools.partial):
        yield from ((x, None) for x in (*function.args, *function.keywords.values()))
        yield from _held_by(function.func) if not isinstance(function.func, keras.Layer) else [(function.func, None)]
    elif isinstance(function, types.MethodType):
        yield function.__self__, function.__code__.co_names
    elif isinstance(function, types.FunctionType):
        for cell in function.__closure__ or ():
            try:
                yield cell.cell_contents, function.__code__.co_names
            except ValueError:  # empty
                continue


def _reaches(held, names, affected, calls):
    """Whether a function that holds an object, and uses attributes of these names, may call a layer of the plan."""
    if not isinstance(held, keras.Layer) or id(held) not in affected:
        return False
    if id(held) in calls or names is None:
        return True
    own = keras_graph.own_attributes(held)
    inside = [x for name in names if name in own for x in keras.tree.flatten(own[name])]
    return any(isinstance(x, keras.Layer) and id(x) in affected for x in inside)
