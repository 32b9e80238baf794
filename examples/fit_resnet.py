"""Trains a ResNet50 on handwritten digits, plain and with gradient checkpointing, and compares memory, time and loss.

The images are scikit-learn's digits (1,797 real scans of 8 x 8 pixels), enlarged to RGB images.

    python examples/fit_resnet.py
    python examples/fit_resnet.py --strategy selective --batch-size 16
    python examples/fit_resnet.py --memory-limit-mib 680
"""

import os
import sys

os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "true")  # read by TensorFlow at import: the CPU counts its memory

import keras
import tensorflow as tf
from _common import main, option_parser, positive
from sklearn.datasets import load_digits

import tf_ckpt


def make_model(arguments, strategy):
    """A ResNet50, checkpointed if there is a strategy."""
    size = arguments.image_size
    model = keras.applications.ResNet50(weights=None, input_shape=(size, size, 3), classes=10)
    if strategy is not None:
        model = tf_ckpt.apply(model, strategy=strategy)
    model.compile(
        keras.optimizers.SGD(0.001, momentum=0.9),
        "sparse_categorical_crossentropy",
        jit_compile=arguments.jit_compile,
    )
    return model


def make_dataset(arguments):
    """Endless batches of enlarged digits, in the same order in every process."""
    digits = load_digits()
    size = arguments.image_size

    def enlarge(images, labels):
        return tf.image.grayscale_to_rgb(tf.image.resize(images, (size, size))), labels

    # Enlarged batch by batch: the whole set would be most of the memory that is held between steps.
    dataset = tf.data.Dataset.from_tensor_slices(((digits.images[..., None] / 16).astype("float32"), digits.target))
    dataset = dataset.shuffle(len(digits.target), seed=arguments.seed).repeat()
    return dataset.batch(arguments.batch_size, drop_remainder=True).map(enlarge).prefetch(1)


def parse():
    parser = option_parser(__doc__.partition("\n")[0], limit_mib=680, batch_size=32, steps=8)
    parser.add_argument("--image-size", type=positive, default=96, metavar="N", help="pixels a side, at least 32")
    arguments = parser.parse_args()
    if arguments.image_size < 32:
        parser.error(f"argument --image-size: ResNet50 needs at least 32 pixels. Received: {arguments.image_size}")
    return arguments


if __name__ == "__main__":
    sys.exit(main(parse(), make_model, make_dataset))
