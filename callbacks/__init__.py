"""Keras callbacks that measure what a plan does. Import as `tf_ckpt.callbacks`."""

from tf_ckpt.callbacks.memory_logger import MemoryLogger

__all__ = ["MemoryLogger"]
