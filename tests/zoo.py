"""Models that nobody here wrote, and how they are trained plain and checkpointed to be compared.

`tests/test_zoo.py` asserts what `benchmarks/zoo.py` measures. A model runs at the smallest input that it takes, on a batch
that makes activations outweigh weights. Each training runs real optimizer steps.
"""

import collections
import dataclasses
import importlib.util
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

import tf_ckpt

STRATEGIES = ("sqrt", "selective", "full", "budget", "recursive")
STEPS = 2
_SHARES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)  # of the way between the least and the plain model's peak


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model of the zoo.

    Attributes:
        name: What it is called in tables.
        kind: What tables put together: `"keras.applications"`, or `"KerasHub text"` and the like.
        build: Makes the model, without weights from elsewhere.
        batch: Samples in a step.
        length: What stands for open dimensions behind the first.
        shapes: Dict of shapes, the batch apart, of inputs of a name whose open dimensions are not `length`.
        vocabulary: Integer inputs are below that.
        classes: Whether the model's one output are logits, and the loss is one of classes; else squares of all outputs.
    """

    name: str
    kind: str
    build: Callable
    batch: int = 32
    length: int = 32
    shapes: dict = dataclasses.field(default_factory=dict)
    vocabulary: int = 64
    classes: bool = False

    def data(self, model):
        """Returns one batch: what the model is called with, a structure of tensors."""
        numbers = np.random.default_rng(0)

        def one(spec):
            known = self.shapes.get(spec.name)
            shape = (self.batch, *(known or (self.length if n is None else n for n in spec.shape[1:])))
            if "mask" in spec.name and keras.backend.standardize_dtype(spec.dtype) in ("int32", "bool") and len(shape) == 2:
                values = np.arange(shape[1]) < numbers.integers(shape[1] // 2, shape[1] + 1, (self.batch, 1))  # padding
            elif keras.backend.is_float_dtype(spec.dtype):
                values = numbers.normal(size=shape)
            else:
                values = numbers.integers(0, 2 if "segment" in spec.name else self.vocabulary, shape)
            return tf.cast(tf.constant(values), spec.dtype)

        return keras.tree.map_structure(one, model.input)

    def loss(self, outputs):
        """Returns the loss of a batch. Every float output has a part in it."""
        if self.classes:
            labels = np.random.default_rng(1).integers(0, outputs.shape[-1], self.batch)
            return keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels, outputs)
        outputs = [x for x in keras.tree.flatten(outputs) if x is not None and x.dtype.is_floating]
        # Random targets: a normalised output is as far from a constant one whatever the weights are.
        pairs = [(tf.cast(x, tf.float32), tf.random.stateless_normal(tf.shape(x), (1, i))) for i, x in enumerate(outputs)]
        return sum(tf.reduce_mean(tf.square(x - target)) for x, target in pairs)


@dataclasses.dataclass(frozen=True)
class Training:
    """What some steps came to.

    Attributes:
        values: Dict of arrays and None: the loss and, if recorded, each gradient of each step, then every variable.
        peak: Bytes of the last step above what is held between steps, or None where the allocator does not count.
    """

    values: dict
    peak: int | None


def train(entry, model, variables, data, mode="graph", steps=STEPS, record=True):
    """Trains a model for some steps, and puts all variables back.

    Args:
        entry: Its `Entry`.
        model: The model.
        variables: The plain model's: trainable ones and others, all of which are reported.
        data: What `entry.data` returned.
        mode: `"graph"` or `"eager"`.
        steps: How many steps.
        record: Whether to keep each step's gradients, in variables of their own: the peak is then not that of training.

    Returns:
        A `Training`.
    """
    trainable = [v for v in variables if v.trainable]
    before = [v.numpy() for v in variables]
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(trainable)
    gradients = [tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False) for v in trainable] if record else []
    missing = set()

    def step():
        with tf.GradientTape() as tape:
            loss = entry.loss(model(data, training=True))
            for extra in model.losses:
                loss += tf.cast(extra, loss.dtype)
        found = tape.gradient(loss, [v.value for v in trainable])
        for number, (place, gradient) in enumerate(zip(gradients, found, strict=False)):
            if gradient is None:
                missing.add(number)
            else:
                place.assign(tf.convert_to_tensor(gradient))
        optimizer.apply_gradients([(g, v) for g, v in zip(found, trainable, strict=True) if g is not None])
        return loss

    run = tf.function(step, autograph=False) if mode == "graph" else step
    values, peak = {}, None
    try:
        for number in range(steps):
            base = _reset_memory()
            values[f"loss of step {number}"] = run().numpy()
            peak = None if base is None else tf.config.experimental.get_memory_info("CPU:0")["peak"] - base
            for i, (v, place) in enumerate(zip(trainable, gradients, strict=False)):
                values[f"gradient of {v.path} ({i}), step {number}"] = None if i in missing else place.numpy()
        values |= {f"value of {v.path} ({i})": v.numpy() for i, v in enumerate(variables)}
        return Training(values, peak)
    finally:
        for v, value in zip(variables, before, strict=True):
            v.assign(value)


def _reset_memory():
    tf.test.experimental.sync_devices()
    try:
        tf.config.experimental.reset_memory_stats("CPU:0")
        return tf.config.experimental.get_memory_info("CPU:0")["current"]
    except ValueError:  # TF_CPU_ALLOCATOR_USE_BFC was not set in time
        return None


Difference = collections.namedtuple("Difference", ("count", "largest", "names"))


def difference(plain, ours):
    """Compares two `Training.values`.

    Returns:
        How many arrays were compared; the largest difference as a share of its array's largest value, or of a twentieth of the
        largest of all (some gradients, as that of a scale between two normalisations, are nothing but rounding), infinity
        where one has no value or no number; and the names of the arrays that differ.
    """
    assert plain.keys() == ours.keys()
    floats = [np.abs(x).max(initial=0) for n, x in plain.items() if x is not None and n.startswith("gradient")]
    floor = max([0.05 * float(np.nanmax([0.0, *floats])), np.finfo("float32").tiny])
    largest, names = 0.0, []
    for name, want in plain.items():
        have = ours[name]
        if want is None and have is None:
            continue
        if want is not None and have is not None and want.dtype == have.dtype and np.array_equal(want, have):
            continue
        names.append(name)
        share = np.inf
        if want is not None and have is not None and want.shape == have.shape:
            a, b = np.asarray(want, "float64"), np.asarray(have, "float64")
            share = float(np.abs(a - b).max() / max(np.abs(a).max(), floor))
        largest = max(largest, share if np.isfinite(share) else np.inf)
    return Difference(len(plain), largest, names)


def apply(model, strategy, batch):
    """Applies a strategy; `"budget"` gets half of the way from the least feasible memory to the plain model's peak.

    Returns:
        The applied model, and the share of the way that the budget took, or None.
    """
    model.compile(keras.optimizers.SGD(0.01))  # it has no slots, which count in a budget
    if strategy != "budget":
        return tf_ckpt.apply(model, strategy, batch_size=batch), None
    curve = tf_ckpt.plan(model, "none", batch_size=batch).curve
    least, most = (min(size for size, _ in curve), max(size for size, _ in curve)) if curve else (1, 1)
    for share in _SHARES:
        try:
            return tf_ckpt.apply(model, "budget", memory=round(least + share * (most - least)), batch_size=batch), share
        except tf_ckpt.CheckpointError as error:
            if "No plan fits" not in str(error):
                raise
            refused = error
    raise refused


def application(name, size, batch=32, **options):
    """Returns the `Entry` of a model of `keras.applications`."""

    def build():
        kind = getattr(keras.applications, name)
        return kind(weights=None, input_shape=(size, size, 3), classes=10, classifier_activation=None, **options)

    return Entry(name, "keras.applications", build, batch, classes=True)


def named_application(name):
    sizes = {"Inception": 75, "Xception": 71}
    return application(name, next((n for start, n in sizes.items() if name.startswith(start)), 32))


# Every class of model there is, so that a new Keras' models are new tests.
APPLICATIONS = {
    name: named_application(name)
    for name in sorted(dir(keras.applications))
    if callable(getattr(keras.applications, name)) and not name.startswith("_")
}


def entries():
    """Returns all `Entry`s by name; those of KerasHub only where it is installed."""
    if importlib.util.find_spec("keras_hub") is None:
        return dict(APPLICATIONS)
    from zoo_hub_image import IMAGE
    from zoo_hub_mixed import MIXED
    from zoo_hub_text import TEXT

    return {**APPLICATIONS, **TEXT, **IMAGE, **MIXED}
