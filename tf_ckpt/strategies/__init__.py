"""Strategies: from the costs of a model's calls to the segments that are recomputed. Pure Python and NumPy."""

from tf_ckpt.strategies.chain import Chain
from tf_ckpt.strategies.full import full
from tf_ckpt.strategies.selective import selective
from tf_ckpt.strategies.sqrt import sqrt

__all__ = ["Chain", "full", "selective", "sqrt"]
