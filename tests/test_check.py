"""`check`: exact models pass silently, what is wrong is named with its cause, and everything is as it was afterwards."""

import datetime
import functools
import json
import os
import random
import re
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import CASES, Counter, numbers

import tf_ckpt
from tf_ckpt import CheckpointError, check, snapshot
from tf_ckpt import graph as keras_graph

L = keras.layers
X, Y = np.asarray(numbers(4, 8)), np.asarray(numbers(4, 2))
QUICK = ("custom_state",)


def arrays(inputs):
    found = [np.asarray(x) for x in inputs]
    return found if len(found) > 1 else found[0]


@pytest.mark.parametrize("case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_exact_models_pass(case, capsys):
    model, inputs, _ = CASES[case]()
    report = check(model, arrays(inputs))
    assert report.exact, report
    assert (report.differences, report.first, report.largest_share, report.notes) == ((), None, 0.0, ())
    assert report.modes == ("eager", "graph")
    assert len(report.segments) >= 2
    assert set(report.not_rerun) <= {"masking", "cast"}  # before the first weight no gradient is asked for
    # Layers in both runs and modes, outputs, loss, gradients, and state.
    assert report.compared > 2 * (len(model.variables) + 2)
    assert "".join(capsys.readouterr()) == ""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sqrt", "full", "recursive"])
@pytest.mark.parametrize("case", ["attention", "nested_model", "convolutions"])
def test_before_and_after_apply(case, strategy):
    model, inputs, _ = CASES[case]()
    report = check(model, arrays(inputs), strategy=strategy)
    assert report.segments
    after = check(tf_ckpt.apply(model, strategy), arrays(inputs), modes="eager")
    assert sorted(after.segments) == sorted(report.segments)
    assert after.unplanned == report.unplanned


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_exact_under_xla(case):
    model, inputs, _ = CASES[case]()
    report = check(model, arrays(inputs), modes="xla")
    assert report.modes == ("xla",)
    assert report.segments


# --- layers that are wrong on purpose ------------------------------------------------------------------------------------

CALLS = []
COUNT = 0


class Wrong(L.Layer):
    """A block whose last step is a function of its own: `step(self, x)`."""

    total = 0

    def __init__(self, step, **kwargs):
        super().__init__(**kwargs)
        self.step = step
        self.dense, self.other = (L.Dense(8, activation="tanh", name=name) for name in ("dense", "other"))
        self.other.trainable = False  # most steps do not call it
        self.calls, self.log = 0, []
        self.generator = np.random.default_rng(5)
        self.python_generator = random.Random(5)
        self.raw = tf.Variable(1.0, trainable=False)

    def build(self, shape):
        self.dense.build(shape)
        self.other.build(shape)
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")

    def call(self, x):
        return self.step(self, self.dense(x))


def net(step, wrap=tf_ckpt.Recompute, **compiled):
    """A model with a wrong layer between others."""
    inputs = keras.Input((8,))
    x = L.Dense(8, activation="gelu", name="first")(inputs)
    x = wrap(Wrong(step, name="wrong"))(x)
    x = L.LayerNormalization(name="norm")(x)
    model = keras.Model(inputs, L.Dense(2, name="head")(x), name="net")
    if compiled:
        model.compile(**compiled)
    return model


def noise(self, x):
    return x + np.random.normal(size=(8,)).astype("float32")  # noqa: NPY002


def noise_of_python(self, x):
    return x * random.random()


def noise_of_a_generator(self, x):
    return x + self.generator.normal(size=(8,)).astype("float32")


def noise_of_a_python_generator(self, x):
    return x * self.python_generator.random()


def unseeded_noise(self, x):
    return x + np.random.default_rng().normal(size=(8,)).astype("float32")


def noise_of_the_system(self, x):
    return x * os.urandom(1)[0]


def noise_of_tensorflow(self, x):
    return x + tf.random.normal(tf.shape(x))


def counter(self, x):
    self.calls += 1
    return x * float(self.calls)


def log(self, x):
    self.log.append("called")
    return x * float(len(self.log))


def count_in_the_class(self, x):
    Wrong.total += 1
    return x * float(Wrong.total)


def count_in_a_global(self, x):
    global COUNT
    COUNT += 1
    return x * float(COUNT)


def list_in_a_global(self, x):
    CALLS.append(None)
    return x * float(len(CALLS))


def clock(self, x):
    return x * (time.perf_counter() % 100)


def date(self, x):
    return x * datetime.datetime.now().microsecond


def clock_of_tensorflow(self, x):
    return x * tf.cast(tf.timestamp() * 1e7 % 1e3, tf.float32)


def python_inside(self, x):
    drawn = tf.numpy_function(lambda: np.float32(os.urandom(1)[0]), [], tf.float32)
    return x * tf.ensure_shape(drawn, ())


def raw_variable(self, x):
    self.raw.assign_add(1.0)
    return x * self.raw


def asks(self, x):
    return 2.0 * x if tf_ckpt.is_recomputing() else x


def enclosed():
    calls = 0

    def step(self, x):
        nonlocal calls
        calls += 1
        return x * float(calls)

    return step


FOLLOWS = "follows from what differs between forward run and re-run"
CAUSES = {
    "noise": (noise, r"draws random numbers from `numpy\.random`\. Use `keras\.random`"),
    "noise of python": (noise_of_python, r"draws random numbers with Python's `random`"),
    "noise of a generator": (noise_of_a_generator, r"the random generator `generator` of 'wrong'"),
    "noise of a python generator": (noise_of_a_python_generator, r"the random generator `python_generator` of 'wrong'"),
    "unseeded noise": (unseeded_noise, r"unseeded random numbers"),
    "noise of the system": (noise_of_the_system, r"unseeded random numbers"),
    "noise of tensorflow": (noise_of_tensorflow, r"TensorFlow's RandomStandardNormal; use `keras\.random`"),
    "counter": (counter, r"Python data, `calls` of 'wrong', from \d to \d.*Keras variable.*is_recomputing"),
    "log": (log, r"`log` of 'wrong', from \['called'"),
    "count in the class": (count_in_the_class, r"`Wrong\.total`, from \d to \d"),
    "count in a global": (count_in_a_global, r"the global variable `COUNT`, from \d to \d"),
    "list in a global": (list_in_a_global, r"the global variable `CALLS`, from \["),
    "count around a function": (enclosed(), r"the variable `calls` around `step`, from \d to \d"),
    "clock": (clock, r"reads the time \(`time\.perf_counter`\)"),
    "date": (date, r"reads the time \(`datetime\.now`\)"),
    "clock of tensorflow": (clock_of_tensorflow, r"reads the time \(`tf\.timestamp`\)"),
    "python inside": (python_inside, r"unseeded random numbers|runs Python code within TensorFlow"),
    "raw variable": (raw_variable, r"writes a raw `tf\.Variable` \(AssignAddVariableOp\); use a Keras variable"),
    "asks": (asks, r"asks `tf_ckpt\.is_recomputing\(\)`"),
}
IN_GRAPHS_TOO = ("noise", "counter", "clock of tensorflow", "python inside", "raw variable")


@pytest.mark.parametrize(
    ("name", "mode"), [(n, m) for n in CAUSES for m in ("eager", "graph") if m == "eager" or n in IN_GRAPHS_TOO]
)
def test_causes(name, mode):
    step, cause = CAUSES[name]
    report = check(net(step), X, modes=mode, raise_error=False)
    first = report.first
    assert (first.mode, first.layer, first.segment) == (mode, "wrong", "wrong"), report
    assert re.search(cause, first.cause), first.cause
    raised = name in ("noise of tensorflow", "raw variable")
    assert first.kind == ("error" if raised else "value")
    if not raised:
        assert 0 < first.share <= report.largest_share
        assert first.largest > 0
        assert first.count == first.size == 32
        assert "layer 'wrong': result differs between forward run and re-run by up to" in str(report)
    assert {x.cause for x in report.differences[1:]} <= {FOLLOWS}  # what follows is not blamed on anything else


def test_the_error_says_it_all_and_holds_the_report():
    with pytest.raises(
        CheckpointError, match=r"(?s)\[eager\] layer 'wrong': result differs.*Likely cause: it changes"
    ) as caught:
        check(net(counter), X)
    report = caught.value.report
    assert str(report) == str(caught.value)
    assert not report.exact
    assert [x.mode for x in report.differences if x.kind == "value"] == ["eager", "graph"]
    # The gradients behind the layer are those of another function; norm and head only see its result.
    wrong = {x.what for x in report.differences if x.kind == "gradient"}
    assert len(wrong) == 4
    assert all("first" in x or "dense" in x for x in wrong)
    stored = json.loads(json.dumps(report.to_dict()))
    assert stored["exact"] is False
    assert stored["differences"][0]["layer"] == "wrong"


def test_only_in_a_graph():
    def step(self, x):
        return x if tf.executing_eagerly() else noise(self, x)

    report = check(net(step), X, raise_error=False)
    assert {x.mode for x in report.differences} == {"graph"}
    assert report.first.layer == "wrong"
    assert "numpy.random" in report.first.cause
    assert check(net(step), X, modes="eager").exact


class Outer(L.Layer):
    """Calls an inner layer, and may do something wrong before or after."""

    def __init__(self, inner, before=None, **kwargs):
        super().__init__(**kwargs)
        self.inner, self.before, self.calls = inner, before, 0
        self.last = L.Dense(8, name="last")

    def build(self, shape):
        self.inner.build(shape)
        self.last.build(shape)

    def call(self, x):
        x = self.inner(x)
        if self.before is not None:
            x = self.before(self, x)
        return self.last(x)


def test_the_innermost_layer_is_named():
    def block(step, before=None):
        return Outer(Outer(Wrong(step, name="wrong"), name="middle"), before, name="outer")

    def model(block):
        inputs = keras.Input((8,))
        return keras.Model(inputs, L.Dense(2)(tf_ckpt.Recompute(block)(L.Dense(8, activation="gelu")(inputs))))

    find = functools.partial(check, x=X, modes="eager", raise_error=False)
    first = find(model(block(noise))).first
    assert (first.layer, first.segment) == ("outer/middle/wrong", "outer")
    assert find(model(block(noise_of_tensorflow))).first.layer == "outer/middle/wrong"
    # The code between two layers belongs to the one around both.
    first = find(model(block(lambda self, x: x, noise))).first
    assert (first.layer, first.kind) == ("outer", "value")
    assert "what it passes to 'last' (input) differs" in first.what
    assert "numpy.random" in first.cause
    # Two layers in two segments: both are found, in the order of the model.
    inputs = x = keras.Input((8,))
    for number in range(2):
        x = L.Dense(8, activation="gelu")(x)
        x = tf_ckpt.Recompute(Wrong(noise, name=f"wrong{number}"))(x)
    found = find(keras.Model(inputs, L.Dense(2)(x))).differences
    assert [x.layer for x in found[:2]] == ["wrong0", "wrong1"]


def shorter(self, x):
    self.calls += 1
    return x[: 2 + self.calls % 2]


def wider(self, x):
    self.calls += 1
    return tf.cast(x, tf.float64 if self.calls % 2 else tf.float32)


def other_layers(self, x):
    self.calls += 1
    return self.dense(x) if self.calls % 2 else x


def other_layer_of_the_same_class(self, x):
    self.calls += 1
    return self.dense(x) if self.calls % 2 else self.other(x)


def writes(self, x):
    self.calls += 1
    self.count.assign(self.count + float(self.calls))
    return x


def adds_loss(self, x):
    self.calls += 1
    self.add_loss(float(self.calls) * tf.reduce_mean(x**2))
    return x


@pytest.mark.parametrize("mode", ["eager", pytest.param("graph", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("step", "kind", "what"),
    [
        (shorter, "shape", r"result has shape \(\d, 8\) in the re-run"),
        (wider, "dtype", r"result is float\d\d in the re-run, float\d\d in the forward run"),
        (other_layers, "calls", r"(it calls 'dense'|the call of 'wrong' ends) in the re-run, but"),
        (
            other_layer_of_the_same_class,
            "calls",
            r"it calls '(dense|other)' in the re-run, but it calls '(other|dense)' in the",
        ),
        (writes, "write", r"what it writes to '.*count' differs"),
        (adds_loss, "value", r"added loss differs"),
    ],
)
def test_kinds(step, kind, what, mode):
    report = check(net(step), X, modes=mode, raise_error=False)
    first = report.first
    assert (first.kind, first.layer) == (kind, "wrong"), report
    assert re.search(what, first.what), first.what
    assert "`calls` of 'wrong'" in first.cause
    gradients = [x for x in report.differences if x.kind == "gradient"]
    assert bool(gradients) == (kind in ("calls", "value"))  # what is written in the re-run is dropped; the others raise


def test_masks():
    class Masks(L.Layer):
        supports_masking = True

        def __init__(self):
            super().__init__(name="masks")
            self.calls = 0

        def call(self, x):
            return tf.identity(x)

        def compute_mask(self, inputs, previous_mask=None):
            self.calls += 1
            return tf.range(inputs.shape[1])[None] < self.calls % 3

    inputs = keras.Input((6, 8))
    x = tf_ckpt.Recompute(keras.Sequential([Masks(), L.GlobalAveragePooling1D(name="pool")], name="block"))(L.Dense(8)(inputs))
    model = keras.Model(inputs, L.Dense(2)(x))
    for mode in ("eager", "graph"):
        first = check(model, np.asarray(numbers(4, 6, 8)), modes=mode, raise_error=False).first
        assert first.segment == "block"
        assert re.search(r"what it passes to 'pool' \((mask|`mask`)\) differs", first.what), first.what


def test_gradients_alone():
    """Values are alike in both runs; what the backward pass does with them is not."""

    def step(self, x):
        self.calls += 1
        calls = float(self.calls)

        @tf.custom_gradient
        def scaled(x):
            return tf.identity(x), lambda upstream: calls * upstream

        return scaled(x)

    report = check(net(step), X, modes="eager", raise_error=False)
    assert {x.kind for x in report.differences} == {"gradient"}
    assert report.first.layer == "wrong"
    assert "`calls` of 'wrong'" in report.first.cause
    assert "the gradient of 'first/kernel' differs from the plain model's" in report.first.what


def test_a_plain_layer_that_does_not_repeat_itself():
    """No segment is to blame: the layer is in none, and two plain runs differ as well."""
    model = net(unseeded_noise, wrap=lambda layer: layer)
    for mode in ("eager", "graph"):
        report = check(model, X, strategy=lambda chain: [(0, 1)], modes=mode, raise_error=False)
        assert report.first.layer == "wrong"
        assert re.search("two runs of the plain model.* differ as well: .*unseeded", report.first.cause)
        assert report.first.kind == "output"
    # What can be drawn again, from NumPy, Python or TensorFlow, is drawn again.
    tf.random.set_seed(None)
    for step, mode in ((noise, "eager"), (noise_of_tensorflow, "eager"), (noise_of_tensorflow, "graph"), (counter, "eager")):
        assert check(net(step, wrap=lambda layer: layer), X, strategy=lambda chain: [(0, 1)], modes=mode).exact


def test_rounding_is_called_so():
    """A boundary among three gradients that meet in one tensor."""
    inputs = keras.Input((6, 8))
    x = L.Dense(8)(inputs)
    y = tf_ckpt.Recompute(L.MultiHeadAttention(2, 4))(x, x)
    x = L.LayerNormalization()(L.Add()([x, y]))
    model = keras.Model(inputs, L.Dense(2)(x))
    data = np.asarray(numbers(4, 6, 8))
    report = check(model, data, modes="eager", raise_error=False)
    assert {x.kind for x in report.differences} == {"gradient"}
    assert all(x.cause.startswith("rounding") for x in report.differences)
    assert 0 < report.largest_share < 2e-5
    assert check(model, data, modes="eager", tolerance=2e-5).exact
    with pytest.raises(CheckpointError, match="Likely cause: rounding"):
        check(model, data, modes="eager", tolerance=1e-12)


# --- what runs plain ------------------------------------------------------------------------------------------------------


def test_what_runs_plain_and_why():
    report = check(net(noise_of_tensorflow, wrap=lambda layer: layer), X, modes="eager")
    assert list(report.plain) == ["wrong"]
    assert "draws random numbers with TensorFlow's RandomStandardNormal" in report.plain["wrong"]
    assert "'wrong': it draws random numbers" in str(report)
    assert report.segments

    tokens = keras.Input((6,), dtype="int32")
    x = L.Embedding(9, 8, name="table")(tokens)
    x = L.LSTM(8, name="lstm")(L.Dense(8, activation="gelu", name="dense")(x))
    model = keras.Model(tokens, L.Dense(2, name="head")(x))
    report = check(model, np.ones((3, 6), "int32"), strategy=lambda chain: [(1, 2)], modes="eager")
    assert report.segments == ("dense",)
    assert list(report.plain) == ["table"]
    assert "embedding table is sparse" in report.plain["table"]
    assert report.unplanned == ("lstm", "head")


def test_what_is_found_in_the_run_to_run_plain():
    captured = []
    wrapped = tf_ckpt.recompute(lambda x: x * captured[0], name="scaled")

    class Own(keras.Model):
        def __init__(self):
            super().__init__(name="own")
            self.first, self.last = L.Dense(8), L.Dense(2)

        def call(self, x):
            x = self.first(x)
            captured[:] = [2.0 * x]
            return self.last(wrapped(x))

    model = Own()
    report = check(model, X)
    assert "captures a tensor that gradients may flow through" in report.plain["scaled"]
    assert report.segments == report.not_rerun == ()
    with pytest.warns(tf_ckpt.CheckpointWarning, match="'scaled' is not recomputed"), tf.GradientTape():
        model(X)  # the user is warned all the same
    assert "scaled" in check(model, X, modes="eager").plain  # and that it is known by now makes no difference


def test_functions_inside_of_layers_that_are_traced_for_their_costs():
    captured = []
    wrapped = tf_ckpt.recompute(lambda x: x * captured[0], name="scaled")

    class Captures(L.Layer):
        def call(self, x):
            captured[:] = [2.0 * x]
            return wrapped(x)

    inputs = keras.Input((8,))
    model = keras.Model(inputs, L.Dense(2)(Captures()(L.Dense(8)(inputs))))
    assert "scaled" in check(model, X, strategy=lambda chain: [(0, 1)], modes="eager").plain
    with pytest.warns(tf_ckpt.CheckpointWarning, match="'scaled' is not recomputed"), tf.GradientTape():
        model(X)


def test_segments_that_no_gradient_reaches():
    class Own(keras.Model):
        def __init__(self):
            super().__init__(name="own")
            self.used, self.unused = (tf_ckpt.Recompute(L.Dense(8, activation="gelu", name=n)) for n in ("used", "unused"))

        def call(self, x):
            self.unused(x)
            return self.used(x)

    for mode in ("eager", "graph"):
        report = check(Own(), X, modes=mode)
        assert report.segments == ("used",)
        assert report.not_rerun == ("unused",)
        assert "Not run again, since no gradient reaches it: 'unused'." in str(report)


def test_side_effects_are_noted():
    def effect(self, x):
        self.calls += 1
        if not keras_graph.in_symbolic_scope():
            self.came = 1
        return x

    def guarded(self, x):
        if not tf_ckpt.is_recomputing():
            self.calls += 1
        return x

    model = net(effect)
    report = check(model, X)
    assert not hasattr(model.get_layer("wrong").layer, "came")
    assert report.exact
    assert len(report.notes) == 1
    assert re.search(r"`calls` of 'wrong', is changed in the re-run as well \(\d after.*is_recomputing", report.notes[0])
    assert check(net(guarded), X).notes == ()


# --- everything is as it was ----------------------------------------------------------------------------------------------


def everything(model):
    variables = [*snapshot.state_variables(model), *model.optimizer.variables]
    values = [[part.tobytes() for part in parts] for parts in snapshot.read(variables)]
    names = ("optimizer", "loss", "train_function", "compiled", "_compile_metrics", "_compile_loss", "_loss_tracker", "history")
    wrong = next(x for x in model._flatten_layers() if isinstance(x, Wrong))
    held = (
        (wrong.calls, list(wrong.log), wrong.generator.bit_generator.state, wrong.python_generator.getstate()),
        (COUNT, len(CALLS), Wrong.total, [id(x) for layer in model._flatten_layers() for x in layer._losses]),
        (np.random.get_state()[1].tobytes(), np.random.get_state()[2], random.getstate()),  # noqa: NPY002
    )
    return values, [id(getattr(model, name, None)) for name in names], held, keras_graph.name_counters()


def test_nothing_is_changed():
    def step(self, x):
        CALLS.append(None)
        self.calls += 1
        self.log.append("called")
        Wrong.total += 1
        self.raw.assign_add(0.0 if tf_ckpt.is_recomputing() else 1.0)
        self.count.assign_add(1.0)
        noise_of_a_generator(self, x)
        noise_of_a_python_generator(self, x)
        noise(self, x)
        return noise_of_python(self, x) + tf.random.normal((8,))

    inputs = keras.Input((8,))
    x = L.BatchNormalization()(L.Dense(8, activation="gelu")(inputs))
    x = Counter()(L.Dropout(0.3)(x))
    model = keras.Model(inputs, L.Dense(2, activity_regularizer="l2")(Wrong(step, name="wrong")(x)))
    model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
    model.fit(np.repeat(X, 2, 0), np.repeat(Y, 2, 0), batch_size=4, verbose=0)
    wrapped = tf_ckpt.Recompute(next(x for x in model.layers if isinstance(x, Wrong)))
    recomputing = keras.Sequential([keras.Input((8,)), wrapped, L.Dense(2)])
    before, drawn = everything(model), tf.random.get_global_generator().state.numpy()
    tf.random.set_seed(3)
    want = [tf.random.normal(()).numpy() for _ in range(2)]
    tf.random.set_seed(3)
    assert tf.random.normal(()).numpy() == want[0]
    assert check(model, X, Y).exact  # the wrong layer runs plain
    assert everything(model) == before
    with pytest.raises(CheckpointError, match="'wrong' cannot be recomputed exactly"):
        check(recomputing, X, modes="eager")
    assert everything(model) == before
    assert tf.random.normal(()).numpy() == want[1]
    np.testing.assert_array_equal(tf.random.get_global_generator().state.numpy(), drawn)


@pytest.mark.slow
def test_training_goes_on_as_if_there_had_been_no_check():
    losses = []
    for checks in (False, True):
        keras.utils.set_random_seed(3)
        inputs = keras.Input((6, 8), batch_size=4)
        x = L.LSTM(8, stateful=True, return_sequences=True, dropout=0.2)(inputs)
        x = L.Dropout(0.3)(L.BatchNormalization()(x))
        model = tf_ckpt.apply(keras.Model(inputs, L.Dense(2)(x)), lambda chain: [(0, 3)])
        model.compile("adam", "mse", jit_compile=False)
        data = np.asarray(numbers(8, 6, 8)), np.asarray(numbers(8, 6, 2))
        losses.append(model.fit(*data, batch_size=4, epochs=1, verbose=0, shuffle=False).history["loss"])
        if checks:
            assert check(model, *data).batch_size == 4
        losses.append(model.fit(*data, batch_size=4, epochs=1, verbose=0, shuffle=False).history["loss"])
    assert losses[:2] == losses[2:]


# --- all kinds of models and data -----------------------------------------------------------------------------------------


def test_functions_that_are_traced_inside():
    relu = L.ReLU()

    def step(self, x):
        return tf.function(lambda x: relu(x), autograph=False)(x)

    assert check(net(step), X, modes="eager").segments
    tf.config.run_functions_eagerly(True)
    try:
        assert check(net(step), X, modes="graph").segments
        assert check(net(noise), X, modes="graph", raise_error=False).first.layer == "wrong"
    finally:
        tf.config.run_functions_eagerly(False)


def test_losses():
    def exact(self, x):
        return L.Activation("tanh")(x)  # made anew in each run

    assert check(net(exact), X, modes="eager").loss == "squares"
    assert check(net(exact), X, Y, loss="mse", modes="eager").loss == "given"
    model = net(exact, optimizer="sgd", loss="mse")
    assert check(model, X, Y, modes="eager").loss == "compiled"
    assert check(model, X, modes="eager").loss == "squares"  # no targets
    weighted = tf.data.Dataset.from_tensors((X, Y, np.ones(4, "float32")))
    assert check(model, weighted, modes="graph").loss == "compiled"
    report = check(net(exact), X, Y, modes="eager")
    assert report.loss == "squares"
    assert "`y` is not used" in report.notes[0]

    class Own(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return super().compute_loss(x, y, y_pred, sample_weight) + tf.reduce_mean(y_pred[..., :1] * self.scale)

    inputs = keras.Input((8,))
    own = Own(inputs, L.Dense(2)(L.Dense(8, activation="gelu")(inputs)))
    own.scale = own.add_weight(name="scale")
    own.compile("sgd", "mse")
    report = check(own, X, Y, modes="eager")
    assert report.loss == "compute_loss"


def test_loss_scaling_counts():
    keras.config.set_dtype_policy("mixed_float16")
    model = net(lambda self, x: x, optimizer="sgd", loss="mse")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    small = check(net(counter, optimizer="sgd", loss="mse"), X, Y, modes="eager", raise_error=False)
    scaled = [x.largest for x in small.differences if x.kind == "gradient"]
    assert max(scaled) > 100  # of the scaled loss, as `fit` takes them


def test_dict_inputs_and_datasets():
    a, b = keras.Input((8,), name="a"), keras.Input((8,), name="b")
    x = L.Dense(8, activation="gelu")(L.Add()([L.Dense(8)(a), L.Dense(8)(b)]))
    model = keras.Model({"a": a, "b": b}, {"p": L.Dense(1, name="p")(x), "q": L.Dense(3, name="q")(x)})
    model.compile("sgd", {"p": "mse", "q": keras.losses.SparseCategoricalCrossentropy(from_logits=True)})
    x = {"a": np.ones((12, 8)), "b": np.asarray(numbers(12, 8))}
    y = {"p": np.ones((12, 1), "float32"), "q": np.arange(12) % 3}
    report = check(model, x, y, modes="eager")
    assert (report.batch_size, report.loss) == (8, "compiled")
    assert check(model, x, y, batch_size=5, modes="eager").batch_size == 5
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(6)
    assert check(model, dataset, modes="eager").batch_size == 6
    assert check(model, dataset, batch_size=2, modes="eager").batch_size == 2


class Subclassed(keras.Model):
    def __init__(self, step):
        super().__init__(name="own")
        self.first = L.Dense(8, activation="gelu")
        self.block = tf_ckpt.Recompute(Wrong(step, name="wrong"))
        self.tail = tf_ckpt.recompute(self.run_tail, name="tail")
        self.dropout, self.last = L.Dropout(0.4), L.Dense(2)

    def run_tail(self, x, training):
        return tf.tanh(self.dropout(x, training=training))

    def call(self, x, training=None):
        return self.last(self.tail(self.block(self.first(x)), training=training))


def test_a_subclassed_model_is_built_and_checked():
    model = Subclassed(lambda self, x: x)
    report = check(model, X)
    assert report.segments == ("wrong", "tail")
    assert model.built
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(X, Y, verbose=0)
    assert check(model, X, Y, modes="eager").loss == "compiled"
    assert check(Subclassed(noise), X, modes="eager", raise_error=False).first.layer == "wrong"


class Python(keras.Model):
    def __init__(self, step):
        super().__init__(name="python")
        self.table, self.stem = L.Embedding(9, 8), L.Dense(8)
        self.blocks = [Wrong(lambda self, x: x, name="good"), Outer(Wrong(step, name="wrong"), name="outer")]
        self.last = L.Dense(2)

    def call(self, x):
        x = self.stem(x) + self.table(tf.cast(x[:, 0] > 0, tf.int32))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def test_chosen_layers_of_a_model_whose_call_is_python_code():
    model = Python(lambda self, x: x)
    report = check(model, X, strategy=("selective", {"layers": ["blocks/*"]}))
    assert report.segments == ("blocks/0", "blocks/1")
    assert report.unplanned == ("stem", "last")
    assert list(report.plain) == ["table"]
    applied = tf_ckpt.apply(model, layers=[Outer])
    assert check(applied, X, modes="eager").segments == ("blocks/1",)
    applied = tf_ckpt.apply(Python(counter), layers=[Outer])
    applied(X)
    before = applied.blocks[1].inner.calls
    report = check(applied, X, modes="eager", raise_error=False)
    assert (report.first.layer, report.first.segment) == ("outer/wrong", "blocks/1")
    assert "`calls` of 'wrong'" in report.first.cause
    assert applied.blocks[1].inner.calls == before


class SetsUp(L.Layer):
    """Leaves Python data behind when it is built, which it needs."""

    def build(self, shape):
        self.width = shape[-1]
        self.kernel = self.add_weight(shape=(self.width, self.width), name="kernel")

    def call(self, x):
        return tf.tanh(tf.matmul(tf.reshape(x, (-1, self.width)), self.kernel))


def test_what_is_built_stays_built():
    model = keras.Sequential([SetsUp(), tf_ckpt.Recompute(SetsUp()), L.Dense(2)])
    keras.utils.set_random_seed(3)
    state = random.getstate()
    assert check(model, X, modes="eager").exact
    assert model.layers[0].width == 8
    assert model(X).shape == (4, 2)
    assert random.getstate() != state  # of the weights: another model does not get the same
    assert keras.layers.Dense(1).name != model.layers[-1].name
    state = random.getstate()
    assert check(model, X, modes="eager").exact
    assert random.getstate() == state


def test_what_a_model_itself_keeps():
    """Its copies have attributes of their own."""

    class Own(keras.Model):
        def __init__(self):
            super().__init__(name="own")
            self.block, self.calls = tf_ckpt.Recompute(L.Dense(8, activation="gelu")), 0

        def call(self, x):
            self.calls += 1
            return self.block(x)

    model = Own()
    model(X)
    model.calls = 7
    assert check(model, X, modes="eager").notes == ()
    assert model.calls == 7


def test_an_output_that_is_not_used():
    class Two(L.Layer):
        def __init__(self):
            super().__init__(name="two")
            self.first, self.second = L.Dense(8, name="first"), L.Dense(8, name="second")

        def build(self, shape):
            self.first.build(shape)
            self.second.build(shape)

        def call(self, x):
            return self.first(x), self.second(x)

    class Own(keras.Model):
        def __init__(self):
            super().__init__(name="own")
            self.two = tf_ckpt.Recompute(Two())

        def call(self, x):
            return self.two(x)[0]

    report = check(Own(), X, modes="eager", raise_error=False)
    assert [x.what.split("/")[-1] for x in report.differences] == [
        "kernel' is zeros with recompute",
        "bias' is zeros with recompute",
    ]
    assert "of which one is not used" in report.first.cause


def test_a_function_outside_of_layers():
    runs = []

    def function(x):
        runs.append(None)
        return x * float(len(runs))

    class Own(keras.Model):
        def __init__(self):
            super().__init__(name="own")
            self.first, self.last = L.Dense(8), L.Dense(2)
            self.middle = tf_ckpt.recompute(function)

        def call(self, x):
            return self.last(self.middle(self.first(x)))

    model = Own()
    model(X)
    runs[:] = [None]
    first = check(model, X, modes="eager", raise_error=False).first
    assert (first.layer, first.segment) == ("", "function")
    assert "the variable `runs` around `function`" in first.cause
    assert runs == [None]


def test_a_layer_alone():
    layer = L.MultiHeadAttention(2, 4, dropout=0.2, name="attention")
    data = np.asarray(numbers(3, 6, 8))
    report = check(layer, {"query": data, "value": data})
    assert (report.model, report.segments) == ("attention", ("attention",))
    assert layer.built
    assert check(L.BatchNormalization(), X, modes="eager").segments
    # What is differentiated by are its inputs, too: this one has no weights, and `training` from its caller.
    report = check(L.Dropout(0.5), X)
    assert report.segments
    first = check(Wrong(noise, name="wrong"), X, modes="eager", raise_error=False).first
    assert (first.layer, first.kind) == ("wrong", "value")
    differ = check(Wrong(counter, name="wrong"), X, modes="eager", raise_error=False).differences
    assert any("input 0" in x.what for x in differ if x.kind == "gradient")


def test_eager_alone_where_a_model_asks_for_it():
    def step(self, x):
        return x if keras_graph.in_symbolic_scope() else x * float(tf.reduce_max(x).numpy())

    with pytest.raises(CheckpointError, match=r"plain model fails in graph mode: .*Received: mode 'graph' in `modes`"):
        check(net(step), X)
    assert check(net(step, loss="mse", run_eagerly=True), X, Y).modes == ("eager",)


# --- wrong arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"model": None}, TypeError, "Received: model=None of type NoneType"),
        ({"model": "net"}, TypeError, "Received: model='net'"),
        ({"x": None}, TypeError, "Received: x=None"),
        ({"x": np.ones((4, 5))}, CheckpointError, r"'net' cannot take these data.*x of shape \(4, 5\)"),
        ({"strategy": "fill"}, CheckpointError, "Did you mean 'full'"),
        ({"strategy": 3}, TypeError, "Received: strategy=3"),
        ({"strategy": ("selective", {"share": 0.3})}, TypeError, "A pair as `strategy`"),
        ({"strategy": ("full", {"target": 0.3})}, CheckpointError, "`target` goes with"),
        ({"strategy": "none"}, CheckpointError, r"Nothing in 'net' is recomputed: the plan of 'none' has no segments"),
        ({"strategy": "full", "model": L.Dense(2)}, CheckpointError, "goes with a model"),
        ({"modes": "compiled"}, CheckpointError, "Received: modes='compiled'"),
        ({"modes": []}, CheckpointError, r"Received: modes=\[\]"),
        ({"modes": 3}, TypeError, "Received: modes=3"),
        ({"batch_size": 0}, CheckpointError, "Received: batch_size=0"),
        ({"batch_size": 2.0}, TypeError, "Received: batch_size=2.0"),
        ({"batch_size": 9}, CheckpointError, "only 4 samples"),
        ({"loss": "mse"}, CheckpointError, "needs targets. Received: y=None"),
        ({"loss": "mses", "y": Y}, CheckpointError, "Received: loss='mses'"),
        ({"tolerance": "small"}, TypeError, "Received: tolerance='small'"),
        ({"tolerance": -1.0}, CheckpointError, "Received: tolerance=-1.0"),
        ({"raise_error": 1}, TypeError, "Received: raise_error=1"),
        (
            {"model": keras.Sequential([keras.Input((8,), batch_size=3), L.Dense(2)]), "batch_size": 4},
            CheckpointError,
            "batches of 3 only, by its inputs. Received: a batch of 4",
        ),
    ],
)
def test_wrong_arguments(arguments, error, match):
    arguments = {"model": net(lambda self, x: x, wrap=lambda layer: layer), "x": X, **arguments}
    with pytest.raises(error, match=match):
        check(**arguments)


def test_a_model_in_which_nothing_is_recomputed():
    class Own(keras.Model):
        def __init__(self):
            super().__init__(name="own")
            self.dense = L.Dense(2)

        def call(self, x):
            return self.dense(x)

    with pytest.raises(CheckpointError, match=r"Nothing in 'own' is recomputed: it holds no `tf_ckpt\.Recompute` layer"):
        check(Own(), X)
    model = net(noise_of_tensorflow, wrap=lambda layer: layer)
    with pytest.raises(CheckpointError, match="Nothing in 'net' is recomputed: 'wrong' runs plain: it draws random numbers"):
        check(model, X, strategy=lambda chain: [])
