"""`apply` on models whose `call` is Python code: chosen layers are recomputed, exactly, wherever the code calls them."""

import dataclasses
import functools
import gc
import weakref

import keras
import numpy as np
import pytest
import subclassed
import tensorflow as tf
from cases import numbers
from helpers import ROUNDING, compare
from subclassed import MAKERS, Block, runs

import tf_ckpt
from tf_ckpt import CheckpointError, CheckpointWarning

L = keras.layers
Pick = tf_ckpt.strategies.Pick


def cases(*quick):
    """All makers; those that are not among the `quick` ones are left to `make test-all`."""
    return [pytest.param(x, id=x.__name__, marks=[] if x.__name__ in quick else [pytest.mark.slow]) for x in MAKERS]


def segments(model):
    plan = model if isinstance(model, tf_ckpt.Plan) else tf_ckpt.plan_of(model)
    return [name for s in plan.segments for name in s.layers]


def everything(model):
    """What must stay as it is: the attributes of a model and all its layers, and what their containers hold."""

    def said(value):
        if isinstance(value, dict):
            return id(value), [(key, said(x)) for key, x in value.items()]
        return (id(value), [said(x) for x in value]) if isinstance(value, (list, tuple, set)) else id(value)

    return [{name: said(x) for name, x in vars(layer).items()} for layer in model._flatten_layers()]


@pytest.mark.parametrize("make", MAKERS, ids=[make.__name__ for make in MAKERS])
def test_training_is_exact(make):
    exact(make, "eager")


@pytest.mark.parametrize("mode", ["graph", pytest.param("xla", marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", cases("held"))
def test_training_is_exact_in_graphs(make, mode):
    exact(make, mode)


def exact(make, mode):
    model, inputs, layers, names = make()
    model(inputs[0])
    before = everything(model)
    applied = tf_ckpt.apply(model, layers=layers)
    assert segments(applied) == names
    assert type(applied) is type(model)
    assert everything(model) == before
    assert [id(v) for v in applied.variables] == [id(v) for v in model.variables]
    assert [v.path for v in applied.trainable_variables] == [v.path for v in model.trainable_variables]
    runs.clear()
    # The block of `shared` is called three times, so that three gradients of its weights are added up.
    compare(model, applied, inputs, mode, rounding=ROUNDING if make is subclassed.shared else 0.0)
    assert tf_ckpt.remove(applied) is model
    assert len(applied.losses) == len(model.losses)


def counted(model, inputs, steps=1):
    """Counts the forward runs and re-runs of each block in eager steps."""
    runs.clear()
    for _ in range(steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(inputs, training=True)))
        tape.gradient(loss, model.trainable_variables)
    return len([x for x in runs if not x[1]]), len([x for x in runs if x[1]])


@pytest.mark.parametrize(
    ("make", "first", "again"),
    # `shared` runs its block three times, once within another recomputed layer; `masked` holds a `Recompute`.
    [("held", 6, 6), ("deep", 10, 7), ("shared", 3, 3), ("masked", 1, 1), ("looped", 3, 3), ("made", 2, 2)],
)
def test_what_is_chosen_runs_once_more_and_the_rest_does_not(make, first, again):
    model, inputs, layers, _ = getattr(subclassed, make)()
    model(inputs[0])
    applied = tf_ckpt.apply(model, layers=layers)
    assert counted(applied, inputs[0]) == (first, again)
    assert counted(model, inputs[0]) == (first, 1 if make == "masked" else 0)
    with tf_ckpt.disabled():
        assert counted(applied, inputs[0]) == (first, 0)
    assert counted(tf_ckpt.apply(applied, "none"), inputs[0]) == (first, 1 if make == "masked" else 0)


def test_less_memory():
    class Wide(subclassed.Model):
        def __init__(self):
            super().__init__()
            self.blocks = [keras.Sequential([L.Dense(256, activation="gelu") for _ in range(4)]) for _ in range(6)]

        def call(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    model, x = Wide(), numbers(2048, 256)
    model(x)
    peaks = []
    for each in (model, tf_ckpt.apply(model, layers=["blocks/*"])):
        with tf.GradientTape() as tape:
            tf.config.experimental.reset_memory_stats("CPU:0")
            begun = tf.config.experimental.get_memory_info("CPU:0")["current"]
            loss = tf.reduce_mean(each(x, training=True))
        gradients = tape.gradient(loss, each.trainable_variables)
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"] - begun)
        del gradients
    assert peaks[1] < 0.6 * peaks[0], peaks


# --- by position


@pytest.mark.parametrize(
    ("pick", "taken"),
    [
        (Pick(Block)[::2], "024"),
        (Pick(Block)[:2], "01"),
        (Pick("block*")[-1:], "4"),
        (Pick(Block)[-2], "3"),
        (Pick([Block, "other*"])[1:3], "01"),  # `other0` lies between them
        (Pick(Block), "01234"),
    ],
    ids=repr,
)
def test_positions(pick, taken):
    class Own(subclassed.Model):
        def __init__(self):
            super().__init__()
            self.stem, self.steps = L.Dense(8, name="other0"), []
            for k in range(5):
                self.steps.append(Block(name=f"block{k}"))
                if k == 0:
                    self.between = L.Dense(8, name="other1")

        def call(self, x):
            for block in self.steps:
                x = block(x)
            return x

    x = inputs = keras.Input((8,))
    x = L.Dense(8, name="other0")(x)
    for k in range(5):
        x = Block(name=f"block{k}")(x)
        x = L.Dense(8, name="other1")(x) if k == 0 else x
    model = keras.Model(inputs, L.Dense(2)(x))
    wanted = [f"block{k}" for k in taken]
    if isinstance(pick.of, list):  # in the order of calls here, and in the order of attributes there
        assert segments(tf_ckpt.plan(model, layers=[pick])) == ["block0", "other1"]
        assert segments(tf_ckpt.plan(Own(), layers=[pick])) == ["steps/0", "steps/1"]
        return
    assert segments(tf_ckpt.plan(model, layers=[pick])) == wanted
    assert segments(tf_ckpt.plan(Own(), layers=[pick])) == [f"steps/{k}" for k in taken]


def test_positions_of_the_model_itself():
    """Without `of`, blocks and models inside count as one."""
    model = subclassed.Deep()
    assert segments(tf_ckpt.plan(model, layers=[Pick()[:2]])) == ["encoder", "stack"]
    assert segments(tf_ckpt.plan(model, layers=[Pick()[-2:]])) == ["graph", "last"]
    graph = model.graph
    assert segments(tf_ckpt.plan(graph, layers=[Pick()[-1]])) == ["inside/three"]
    assert segments(tf_ckpt.plan(graph, layers=[Pick()[1], "inside"])) == ["four", "inside/three"]


def test_a_position_is_all_calls_of_a_layer():
    x = inputs = keras.Input((8,))
    first, second = L.Dense(8, activation="gelu", name="a"), L.Dense(8, activation="gelu", name="b")
    for layer in (first, second, first, second):
        x = layer(x)
    model = keras.Model(inputs, L.Dense(2)(x))
    assert segments(tf_ckpt.plan(model, layers=[Pick(L.Dense)[0]])) == ["a", "a:1"]
    assert segments(tf_ckpt.plan(model, layers=[Pick("?")[1:]])) == ["b", "b:1"]


def test_pick_says_what_it_takes():
    shown = (Pick(Block)[::2], Pick("a*")[:3], Pick()[-1], Pick([Block, "a"])[1:5:2], Pick("a"))
    assert [repr(x) for x in shown[:3]] == ["Pick(Block)[::2]", "Pick('a*')[:3]", "Pick()[-1]"]
    assert repr(shown[3]).endswith("'a'])[1:5:2]")
    assert repr(shown[4]) == "Pick('a')"


# --- the plan


def test_the_plan(tmp_path):
    model, inputs, layers, names = subclassed.deep()
    model(inputs[0])
    plan = tf_ckpt.plan(model, "selective", layers=layers)
    assert segments(plan) == names
    assert not plan.has_figures
    assert "encoder/steps/1" in plan.layers
    assert "encoder/steps" not in plan.layers
    assert "graph/inside/three" in plan.layers
    assert "last" in plan.layers
    texts = []
    plan.summary(print_fn=texts.append)
    assert "encoder/named/after" in texts[0]
    assert "not predicted: the model's `call` is Python code" in texts[0]
    assert "MiB" not in texts[0]
    plan.save(tmp_path / "plan.json")
    loaded = tf_ckpt.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert tf_ckpt.plan_of(tf_ckpt.apply(model, loaded)) == plan
    again = tf_ckpt.apply(tf_ckpt.apply(model, layers=["last"]), plan)
    assert segments(again) == names
    assert tf_ckpt.remove(again) is model
    assert tf_ckpt.remove(again.graph) is model.graph
    by_object = tf_ckpt.apply(again, layers=[again.encoder.steps[1], model.last])
    assert segments(by_object) == ["encoder/steps/1", "last"]


def test_plans_that_do_not_fit():
    model, _, layers, _ = subclassed.held()
    plan = tf_ckpt.plan(model, layers=layers)
    with pytest.raises(CheckpointError, match=r"made for another model: .* has the layer '.*', .* has not.*Received: plan"):
        tf_ckpt.apply(subclassed.Deep(), plan)
    late, inputs, layers, _ = subclassed.made()
    late(inputs[0])
    with pytest.raises(CheckpointError, match=r"has the layer 'blocks/0'.* not built yet: call it on data first"):
        tf_ckpt.apply(subclassed.Made(), tf_ckpt.plan(late, layers=layers))
    graph = keras.Sequential([keras.Input((8,)), L.Dense(8, name="stem"), L.Dense(2)])
    with pytest.raises(CheckpointError, match="has the layer"):
        tf_ckpt.apply(model, tf_ckpt.plan(graph, layers=["stem"]))
    segment = tf_ckpt.Segment(plan.layers[1:3])
    with pytest.raises(CheckpointError, match=r"a segment is one layer there.*Received: segment \('blocks/0', 'blocks/1'\)"):
        tf_ckpt.apply(model, dataclasses.replace(plan, segments=(segment,)))


def test_outer_layers_hold_inner_ones():
    model, _, _, _ = subclassed.deep()
    assert segments(tf_ckpt.plan(model, layers=[Block, "encoder"])) == [
        "encoder",
        "stack/one",
        "stack/two",
        "graph/four",
        "graph/inside/three",
    ]
    assert segments(tf_ckpt.plan(model, layers=lambda layer: isinstance(layer, keras.Sequential))) == ["stack", "graph/inside"]


def test_a_model_with_a_plan_inside_keeps_it():
    class Own(subclassed.Model):
        def __init__(self, inner):
            super().__init__()
            self.block, self.inner = Block(), inner

        def call(self, x):
            return self.inner(self.block(x))

    inputs = keras.Input((8,))
    inner = keras.Model(inputs, L.Dense(2)(Block()(L.Dense(8)(inputs))))
    model = Own(tf_ckpt.apply(inner, layers=[Block]))
    model(numbers(4, 8))
    applied = tf_ckpt.apply(model, layers=[Block])
    assert segments(applied) == ["block"]
    assert counted(applied, numbers(4, 8)) == (2, 2)
    compare(model, applied, [numbers(4, 8)], "eager")
    with pytest.raises(CheckpointError, match=r"models with a plan of their own.*Received: layers=\['inner'\]"):
        tf_ckpt.apply(model, layers=["inner"])


def test_what_holds_an_embedding_runs_plain_with_a_warning():
    class Own(subclassed.Model):
        def __init__(self):
            super().__init__()
            self.front, self.block = keras.Sequential([L.Embedding(20, 8), L.Dense(8)]), Block()

        def call(self, x):
            return self.block(self.front(x))

    model = Own()
    with pytest.warns(CheckpointWarning, match="'front' runs plain: .*embedding"):
        assert segments(tf_ckpt.apply(model, layers=["front", "block"])) == ["block"]


# --- shared state


def test_what_is_set_on_the_one_is_set_on_the_other():
    model, inputs, layers, _ = subclassed.deep()
    model(inputs[0])
    applied = tf_ckpt.apply(model, layers=layers)
    block, plain = applied.encoder.steps[0], model.encoder.steps[0]
    assert isinstance(block, Block)
    assert repr(block) == repr(plain)
    block.drop.rate = 0.9
    block.trainable = False
    applied.encoder.note = "here"
    assert plain.drop.rate == 0.9
    assert not plain.trainable
    assert model.encoder.note == "here"
    assert len(applied.trainable_variables) == len(model.trainable_variables)
    plain.trainable = True
    assert block.trainable
    applied.encoder.latest = block  # a stand-in never gets into the plain model
    assert vars(model.encoder)["latest"] is plain
    assert applied.encoder.latest is block
    assert keras.tree.flatten(applied.encoder.steps) == list(applied.encoder.steps)


def test_containers_cannot_be_changed_behind_the_plan():
    model, inputs, layers, _ = subclassed.deep()
    model(inputs[0])
    applied = tf_ckpt.apply(model, layers=layers)
    for change in (
        lambda: applied.encoder.steps.append(Block()),
        lambda: applied.encoder.steps.__setitem__(0, Block()),
        lambda: applied.encoder.named.update(other=Block()),
    ):
        with pytest.raises(CheckpointError, match=r"which has a plan, cannot be changed.*`tf_ckpt.remove\(model\)`"):
            change()


def test_a_list_of_its_own():
    """What is put into a list of the applied model that holds nothing chosen trains there."""

    class Own(subclassed.Model):
        def __init__(self):
            super().__init__()
            self.block, self.more = Block(), [L.Dense(8)]

        def call(self, x):
            x = self.block(x)
            for layer in self.more:
                x = layer(x)
            return x

    model = Own()
    applied = tf_ckpt.apply(model, layers=["block"])
    applied.more.append(L.Dense(8))
    applied(numbers(4, 8))
    assert len(model.more) == 1
    assert len(applied.trainable_variables) == 8
    assert len(tf_ckpt.remove(applied).trainable_variables) == 8  # not built when the plan was made: what is there now


def test_not_built_yet():
    x = numbers(4, 8)
    model, _, layers, names = subclassed.deep()
    applied = tf_ckpt.apply(model, layers=layers)
    assert segments(applied) == names
    applied.compile("sgd", "mse", run_eagerly=True)
    applied.fit(x, numbers(4, 2), verbose=0)
    plain = tf_ckpt.remove(applied)
    assert type(plain) is type(model)
    assert tf_ckpt.plan_of(plain) is None
    assert tf_ckpt.remove(applied) is plain
    assert [id(v) for v in plain.variables] == [id(v) for v in applied.variables]
    assert type(plain.encoder) is subclassed.Encoder
    assert counted(plain, x) == (10, 0)
    compare(plain, applied, [x], "eager")
    late = subclassed.Made()
    with pytest.raises(CheckpointError, match=r"'late' is not built yet: layers that it makes .* Call it on data"):
        tf_ckpt.apply(subclassed.Made(name="late"), layers=["blocks/0"])
    late(x)
    late = tf_ckpt.apply(late, layers=["blocks/0"])
    assert counted(late, x) == (2, 1)


def test_a_weight_of_the_model_itself_is_in_what_remove_gives():
    class Own(subclassed.Made):
        def __init__(self):
            super().__init__()
            self.first = Block()

        def call(self, x):
            return super().call(self.first(x))

    applied = tf_ckpt.apply(Own(), layers=["first"])
    applied(numbers(4, 8))
    plain = tf_ckpt.remove(applied)
    assert plain.scale is applied.scale
    assert [id(v) for v in plain.variables] == [id(v) for v in applied.variables]
    compare(plain, applied, [numbers(4, 8)], "eager")


def test_functions_in_attributes_are_out_of_reach():
    class Own(subclassed.Model):
        def __init__(self, how):
            super().__init__()
            self.block, self.other, self.scale = Block(), L.Dense(8), 2.0
            self.function = {
                "closure": lambda x: self.block(x),
                "partial": functools.partial(self.block, training=True),
                "method": self.block.call,
                "own method": self.helper,
                "graph": tf.function(self.helper),
                "harmless": lambda x: self.scale * x,
                "other layer": lambda x: self.other(x),
            }[how]

        def helper(self, x):
            return self.block(x)

        def call(self, x):
            return self.function(x)

    for how in ("closure", "partial", "method", "own method", "graph"):
        with pytest.warns(CheckpointWarning, match="(?s)'function' of 'own.*' is a function that holds .*Recompute"):
            tf_ckpt.apply(Own(how), layers=["block"])
    for how in ("harmless", "other layer"):
        tf_ckpt.apply(Own(how), layers=["block"])


def test_models_are_let_go():
    gc.collect()
    before = Block.__subclasses__()  # those of other tests, if their models are still there
    model, inputs, layers, _ = subclassed.looped()
    alive = [weakref.ref(model)]
    for _ in range(2):  # not built yet in the first
        applied = tf_ckpt.apply(model, layers=layers)
        applied.compile("sgd", "mse", jit_compile=False)
        applied.fit(inputs[0], numbers(4, 2), verbose=0)
        model = tf_ckpt.remove(applied)
        alive.append(weakref.ref(applied))
    assert set(Block.__subclasses__()) > set(before)
    del model, applied
    keras.utils.clear_session()
    for _ in range(3):
        gc.collect()
    assert [x() for x in alive] == [None] * len(alive)
    assert set(Block.__subclasses__()) <= set(before)


# --- ways to train


@keras.saving.register_keras_serializable("tests")
class Coder(keras.Model):
    """Trains by a step of its own, which never calls the model."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        inputs = keras.Input((8,))
        self.encoder = keras.Model(inputs, L.Dense(4)(Block(name="inside")(inputs)), name="encoder")
        self.decoder = keras.Sequential([L.Dense(8, activation="gelu"), Block()], name="decoder")
        self.seed = keras.random.SeedGenerator(5)
        self.mean = keras.metrics.Mean(name="mean")

    def sample(self, z):
        return z + keras.random.normal(tf.shape(z), seed=self.seed)

    def call(self, x):
        return self.decoder(self.sample(self.encoder(x)))

    def train_step(self, data):
        x = keras.utils.unpack_x_y_sample_weight(data)[0]
        with tf.GradientTape() as tape:
            made = self.decoder(self.sample(self.encoder(x, training=True)), training=True)
            loss = tf.reduce_mean(tf.square(made - x))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.mean.update_state(loss)
        return {"mean": self.mean.result()}

    def get_config(self):
        return {"name": self.name}


@pytest.mark.parametrize("eager", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["eager", "graph"])
def test_a_training_step_of_its_own(eager):
    logs, values, counts = [], [], []
    for plan in (None, ["encoder/inside", "decoder"]):
        keras.utils.set_random_seed(3)
        model = Coder()
        model(numbers(4, 8))
        model = model if plan is None else tf_ckpt.apply(model, layers=plan)
        model.compile(keras.optimizers.SGD(0.1), jit_compile=False, run_eagerly=eager)
        runs.clear()
        logs.append(model.fit(numbers(8, 8), batch_size=4, epochs=2, shuffle=False, verbose=0).history)
        counts.append(len([x for x in runs if x[1]]))
        values.append([v.numpy() for v in model.variables])
    np.testing.assert_allclose(logs[0]["mean"], logs[1]["mean"], rtol=0 if eager else 1e-6)
    assert counts == [0, 8 if eager else 2]
    for a, b in zip(*values, strict=True):  # in a graph, kernels are joined across the edges of such segments
        np.testing.assert_allclose(a, b, rtol=0 if eager else 1e-5, atol=0 if eager else 1e-7)


@pytest.mark.parametrize("mode", ["eager", pytest.param("graph", marks=pytest.mark.slow)])
def test_mixed_precision(mode):
    keras.config.set_dtype_policy("mixed_float16")
    model, inputs, layers, _ = subclassed.held()
    model(inputs[0])
    compare(model, tf_ckpt.apply(model, layers=layers), inputs, mode)


@pytest.mark.slow
def test_memory_logger():
    model, inputs, layers, _ = subclassed.held()
    model(inputs[0])
    logger = tf_ckpt.callbacks.MemoryLogger(profile_batches=0)
    applied = tf_ckpt.apply(model, layers=layers)
    applied.compile("sgd", "mse", jit_compile=False)
    applied.fit(inputs[0], numbers(4, 2), verbose=0, callbacks=[logger])
    assert logger.report()["predicted_peak_memory_mib"] is None


# --- saved


def trained(model, x, y):
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    model.fit(x, y, verbose=0)
    return [v.numpy() for v in model.variables]


@pytest.mark.parametrize("make", cases("looped", "made"))
def test_saved_and_loaded(make, tmp_path):
    model, inputs, layers, names = make()
    x = inputs[0]
    y = tf.zeros_like(model(x))
    applied = tf_ckpt.apply(model, layers=layers)
    applied.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded) is type(model)
    shown = segments(loaded)
    assert [x.rstrip("0123456789") for x in shown] == [x.rstrip("0123456789") for x in names]
    assert tf_ckpt.plan_of(tf_ckpt.remove(loaded)) is None
    for v, w in zip(loaded.variables, applied.variables, strict=True):
        assert v.shape == w.shape
        if "seed" not in v.path:  # Keras' files hold none
            np.testing.assert_array_equal(v, w)
        v.assign(w)
    for a, b in zip(trained(loaded, x, y), trained(applied, x, y), strict=True):
        np.testing.assert_array_equal(a, b)
    tf_ckpt.remove(applied).save(tmp_path / "plain.keras")
    assert tf_ckpt.plan_of(keras.models.load_model(tmp_path / "plain.keras")) is None


@pytest.mark.parametrize("make", cases("held", "shared"))
def test_weight_files_are_the_plain_models(make, tmp_path):
    model, inputs, layers, _ = make()
    model(inputs[0])
    applied = tf_ckpt.apply(model, layers=layers)
    values = [v.numpy() for v in model.variables]
    for source, target in ((model, applied), (applied, model)):
        source.save_weights(tmp_path / "all.weights.h5")
        for v in model.variables:
            v.assign(tf.zeros_like(v))
        target.load_weights(tmp_path / "all.weights.h5")
        for v, value in zip(model.variables, values, strict=True):
            if "seed" not in v.path:
                np.testing.assert_array_equal(v, value)
            v.assign(value)


def test_clones_copies_and_pickles():
    import copy
    import pickle

    model, inputs, layers, names = subclassed.deep()
    model(inputs[0])
    applied = tf_ckpt.apply(model, layers=layers)
    for each in (copy.deepcopy(applied), pickle.loads(pickle.dumps(applied)), keras.models.clone_model(applied)):
        assert type(each) is subclassed.Deep
        assert segments(each) == names
        assert each.encoder is not applied.encoder
        assert counted(each, inputs[0]) == (10, 7)
    assert tf_ckpt.plan_of(type(model).from_config(applied.get_config())) is None


def test_export(tmp_path):
    model, inputs, layers, _ = subclassed.deep()
    want = model(inputs[0])
    applied = tf_ckpt.apply(model, layers=layers)
    applied.export(tmp_path / "exported", input_signature=[tf.TensorSpec((None, 8))], verbose=False)
    loaded = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_allclose(loaded.serve(inputs[0]), want, rtol=1e-5, atol=1e-6)
    applied(inputs[0])  # as it was


def test_changed_after_apply(tmp_path):
    model, inputs, layers, _ = subclassed.held()
    model(inputs[0])
    applied = tf_ckpt.apply(model, layers=layers)
    model.blocks[0].dense._tf = None
    applied.stem.extra = None
    applied.__dict__["blocks"] = [*applied.blocks[:2]]
    with pytest.warns(CheckpointWarning, match="is stored without its plan"):
        applied.save(tmp_path / "model.keras")
