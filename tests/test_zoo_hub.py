"""KerasHub's tasks: planned inside their backbone, and all that they do besides training works afterwards."""

import keras
import numpy as np
import pytest

import tf_ckpt

keras_hub = pytest.importorskip("keras_hub")
models, tokenizers = keras_hub.models, keras_hub.tokenizers
TEXTS = ["a b c d", "b a", "c d a b", "d"]
WORDS = ["a", "b", "c", "d"]


def causal_lm():
    words = ["<|endoftext|>", "Ġ", *WORDS, *(f"Ġ{w}" for w in WORDS)]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = models.GPT2Tokenizer(vocabulary=vocabulary, merges=[f"Ġ {w}" for w in WORDS])
    backbone = models.GPT2Backbone(len(vocabulary), 4, 2, 16, 32, max_sequence_length=12)
    return models.GPT2CausalLM(backbone, models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=12))


def text_classifier():
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    backbone = models.BertBackbone(len(vocabulary), 4, 2, 16, 32, max_sequence_length=12)
    preprocessor = models.BertTextClassifierPreprocessor(models.BertTokenizer(vocabulary), sequence_length=12)
    return models.BertTextClassifier(backbone, 2, preprocessor)


def image_classifier():
    backbone = models.ViTBackbone((16, 16, 3), 4, 2, 2, 16, 32)
    return models.ViTImageClassifier(backbone, 2)


def data(task):
    if isinstance(task, models.CausalLM):
        return (TEXTS,)
    numbers = np.random.default_rng(0)
    x = TEXTS if isinstance(task, models.TextClassifier) else numbers.uniform(size=(4, 16, 16, 3)).astype("float32")
    return np.array(x), np.array([0, 1, 0, 1])


def losses(task, epochs=2):
    """Trains a task from its present state, which it gets back, with its own preprocessor."""
    before = [v.numpy() for v in task.variables]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    task.compile(keras.optimizers.SGD(0.1), loss, jit_compile=False)
    history = task.fit(*data(task), batch_size=2, epochs=epochs, shuffle=False, verbose=0).history["loss"]
    after = [v.numpy() for v in task.variables]
    for v, value in zip(task.variables, before, strict=True):
        v.assign(value)
    return history, after


def assert_trains_alike(task, applied):
    (want, plain), (have, ours) = losses(task), losses(applied)
    assert have == want
    for a, b in zip(plain, ours, strict=True):
        np.testing.assert_array_equal(a, b)


TASKS = [causal_lm, text_classifier, image_classifier]


@pytest.mark.parametrize("make", TASKS)
def test_a_task_fits_as_plain_with_its_preprocessor(make):
    task = make()
    applied = tf_ckpt.apply(task, "full", batch_size=512)
    assert type(applied).__name__ == type(task).__name__
    assert isinstance(applied, type(task))
    plan = tf_ckpt.plan_of(applied)
    assert any(name.startswith(f"{task.backbone.name}/") for name in plan.layers)
    # The length of texts is open, and more is taken for it than this table of positions has.
    assert all(name.endswith("position_embedding") for name in plan.untraced)
    assert applied.preprocessor is task.preprocessor
    assert applied.backbone is task.backbone
    assert_trains_alike(task, applied)


def test_a_causal_lm_generates_as_plain_after_training():
    task = causal_lm()
    applied = tf_ckpt.apply(task, "full", batch_size=512)
    for model in (task, applied):
        model.compile(sampler="greedy", jit_compile=False)
    prompt = ["a b", "c"]
    assert applied.generate(prompt, max_length=10) == task.generate(prompt, max_length=10)
    losses(applied)
    applied.compile(sampler="top_k", jit_compile=False)
    assert len(applied.generate(prompt, max_length=10)) == 2


@pytest.mark.parametrize("order", ["lora first", "plan first"])
def test_lora_trains_as_plain(order):
    task = causal_lm()
    if order == "lora first":
        task.backbone.enable_lora(2)
    applied = tf_ckpt.apply(task, "full", batch_size=512)
    if order == "plan first":
        applied.backbone.enable_lora(2)
    assert any("lora" in v.path for v in applied.trainable_variables)
    assert len(applied.trainable_variables) < len(applied.weights) / 2
    for v in applied.trainable_variables:  # zeros would give gradients to one half only
        v.assign(keras.random.normal(v.shape, seed=3))
    assert_trains_alike(task, applied)


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method:UserWarning")  # Keras, on plain models as well
def test_a_quantised_task_works_as_plain():
    task = causal_lm()
    applied = tf_ckpt.apply(task, "full", batch_size=512)
    applied.backbone.quantize("int8")  # KerasHub's own `task.quantize` fails on the tokenizer
    for model in (task, applied, tf_ckpt.apply(task, "full", batch_size=512)):
        model.compile(sampler="greedy", jit_compile=False)
        assert model.generate(["a b"], max_length=10) == task.generate(["a b"], max_length=10)
