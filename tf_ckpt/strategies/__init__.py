"""Strategies: from the costs of a model's calls to the segments that are recomputed. Pure Python and NumPy."""

from tf_ckpt.strategies.budget import budget
from tf_ckpt.strategies.chain import Chain
from tf_ckpt.strategies.full import full
from tf_ckpt.strategies.pick import Pick
from tf_ckpt.strategies.recursive import recursive
from tf_ckpt.strategies.selective import selective
from tf_ckpt.strategies.sqrt import sqrt
from tf_ckpt.strategies.tree import Range

__all__ = ["Chain", "Pick", "Range", "budget", "full", "recursive", "selective", "sqrt"]
