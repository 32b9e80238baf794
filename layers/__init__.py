"""Layers that recompute: imported as `tf_ckpt.layers`."""

from tf_ckpt.layers.recompute import Recompute

__all__ = ["Recompute"]
