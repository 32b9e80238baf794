"""On which devices a model is replicated, and how another process replicates it likewise."""

import math
import os

import tensorflow as tf

from tf_ckpt.errors import CheckpointError
from tf_ckpt.memory import MIB


def can_move(model):
    """Returns whether another process can train a model on as many devices: on one, or under a `MirroredStrategy`."""
    strategy = model.distribute_strategy
    return strategy.num_replicas_in_sync == 1 or type(strategy) is tf.distribute.MirroredStrategy


def devices_of(model):
    """Returns the devices of a model's replicas, such as `["GPU:0", "GPU:1"]`, or an empty list if it is not replicated.

    Raises:
        CheckpointError: If another process could not do that.
    """
    strategy = model.distribute_strategy
    if not can_move(model):
        raise CheckpointError(
            "A process of its own trains on one device, or under a `tf.distribute.MirroredStrategy`. Received: model "
            f"'{model.name}' under {type(strategy).__name__}"
        )
    if strategy.num_replicas_in_sync == 1:
        return []
    return [name.rpartition("device:")[2] for name in strategy.extended.worker_devices]


def sharing(model):
    """Returns how many replicas of a model share one allocator: on the CPU all do, which is one device made into several."""
    strategy = model.distribute_strategy
    replicas = strategy.num_replicas_in_sync
    return replicas if replicas > 1 and all("CPU" in name for name in strategy.extended.worker_devices) else 1


def share_of(batch_size, model):
    """Returns how many samples of a batch the replica with the most of them gets."""
    return math.ceil(batch_size / model.distribute_strategy.num_replicas_in_sync)


def logical_devices():
    """Returns for each kind of device a list of how many logical ones each of this process is made into."""
    return {
        kind: [len(tf.config.get_logical_device_configuration(x) or [None]) for x in tf.config.list_physical_devices(kind)]
        for kind in ("CPU", "GPU")
    }


def set_up(devices, logical, memory):
    """Makes a process that has not used its devices yet have those of another one.

    Args:
        devices: What `devices_of` returned there.
        logical: What `logical_devices` returned there.
        memory: Bytes of each device; None for what it has.
    """
    limit = None if memory is None else int(memory // MIB)
    if limit is not None:  # read when the device is set up; logical ones share the CPU's allocator
        os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(limit * max(1, sum("CPU" in name for name in devices)))
    for kind, counts in logical.items():
        own = limit if kind == "GPU" else None
        for device, count in zip(tf.config.list_physical_devices(kind), counts, strict=False):
            if count > 1 or own is not None:
                made = [tf.config.LogicalDeviceConfiguration(memory_limit=own) for _ in range(count)]
                tf.config.set_logical_device_configuration(device, made)


def strategy_on(devices):
    """Returns the strategy that replicates a model on devices; the one that does nothing if there are none."""
    return tf.distribute.MirroredStrategy(devices) if devices else tf.distribute.get_strategy()
