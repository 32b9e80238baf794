"""Set before TensorFlow is imported: an allocator with statistics, and the same kernels on every machine."""

import os

os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "true")
# TensorFlow's own convolutions on a CPU take a workspace of the size of the machine's cache. It uses oneDNN's by itself where
# there is AVX-512.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import gc

import keras
import pytest
import tensorflow as tf

# `AddN` of three terms starts with whichever buffer it may reuse, so that with several threads between operations the
# plain model itself rounds one way or the other.
tf.config.threading.set_inter_op_parallelism_threads(1)


def tidy():
    """Collects what is garbage. What TensorFlow and Keras keep to the end, some thousand objects a test, is set aside: each
    later collection would look through it again, which took a third of the suite's time."""
    gc.collect()
    gc.freeze()


tidy()


@pytest.fixture(autouse=True)
def fresh_keras():
    keras.utils.set_random_seed(7)
    yield
    keras.config.set_dtype_policy("float32")
    keras.utils.clear_session(free_memory=False)
    tidy()
