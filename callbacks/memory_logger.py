"""`MemoryLogger`: the device memory of training, in the logs of `fit`."""

import math
import warnings

import keras

from tf_ckpt import memory
from tf_ckpt.errors import CheckpointError, CheckpointWarning

_warned = False


class MemoryLogger(keras.callbacks.Callback):
    """Writes the peak device memory of training into the logs of `fit`, beside the loss.

    Memory is measured around each training batch, with the statistics of TensorFlow's own allocator: on all GPUs, or
    on the CPU when `TF_CPU_ALLOCATOR_USE_BFC=true` was in the environment before TensorFlow was imported. Without
    statistics the callback warns once per process, and `fit` goes on without the memory figures.

    Each epoch's logs get, in MiB (2**20 bytes):

    - `peak_memory_mib`: the most memory held at once within a training batch. The first batch of a fit is left out, as
      it also holds tracing, constant folding and autotuning (its own peak is in `report`). An epoch that consists of
      the first batch only logs that one, and `report` marks the epoch with `includes_first_step`.
    - `baseline_memory_mib`: what is held between batches: weights, optimizer slots and, on a CPU, input data. It is
      the least seen at the beginning of a batch. The peak above it is what activations and gradients need.
    - `peak_memory_mib_gpu_0`, ...: with several GPUs, each one's peak. The two figures above are then those of the GPU
      with the highest peak.
    - `val_peak_memory_mib`: the same for validation batches, in epochs that have validation.
    - `recompute_overhead`: the plan's predicted share of the plain training step's FLOPs (of its predicted seconds, if
      the plan was made with `device=`) that is computed again, such as 0.33: a prediction, no measurement. 0.0 for a
      plain model; not logged where it is not known.

    Callbacks run in the order of the list, and each sees what those before it wrote. History and the progress bar come
    last and always have the figures; **put `MemoryLogger` before** `CSVLogger`, `TensorBoard`, `EarlyStopping` and
    others that shall have them.

    A batch is what `fit` calls one: with `steps_per_execution=n` it is n steps. `fit` waits for the device at each
    batch, which slows down the training of very small models.

    Args:
        update_freq: `"epoch"`, `"batch"` or a positive integer. With `"batch"` or n, `peak_memory_mib` is also written
            into the logs of every batch or every n-th batch, as the peak since it was last written. The first batch of
            a fit writes nothing.
        reset: Whether to reset the allocator's peak before each batch. The reset is global: with `False`, whoever else
            reads the peak is left alone, and `peak_memory_mib` is the peak of the whole process so far, with the first
            batch, validation and whatever ran before in it.
        verbose: 0, or 1 to print a table of the report when training ends.

    Raises:
        CheckpointError: If an argument is not one of the values above.

    Example:

    ```python
    model = tf_ckpt.apply(model, strategy="sqrt")
    model.compile("adam", "sparse_categorical_crossentropy")
    logger = tf_ckpt.callbacks.MemoryLogger()
    history = model.fit(x, y, epochs=3, callbacks=[logger, keras.callbacks.CSVLogger("log.csv")])
    history.history["peak_memory_mib"]  # one value an epoch
    logger.report()["first_step_peak_memory_mib"]
    ```
    """

    # Keras hands batches to a thread otherwise, and goes on to the next one before this one is measured.
    async_safe = False

    def __init__(self, update_freq="epoch", reset=True, verbose=0):
        super().__init__()
        counted = isinstance(update_freq, int) and not isinstance(update_freq, bool) and update_freq > 0
        if not counted and update_freq not in ("epoch", "batch"):
            raise CheckpointError(
                f'`update_freq` must be "epoch", "batch" or a positive number of batches. Received: update_freq={update_freq!r}'
            )
        if not isinstance(reset, bool):
            raise CheckpointError(f"`reset` must be True or False. Received: reset={reset!r}")
        if verbose not in (0, 1):
            raise CheckpointError(f"`verbose` must be 0 or 1. Received: verbose={verbose!r}")
        self.update_freq = update_freq
        self.reset = reset
        self.verbose = verbose
        self._every = {"epoch": 0, "batch": 1}.get(update_freq, update_freq)
        self._in_fit = False
        self._begin_run(names=())

    def report(self):
        """The figures of the last `fit` (or of an `evaluate` after it), as plain data.

        Returns:
            A dict with `devices` (names; empty without statistics), `reset`, `batches` (training batches measured),
            `peak_memory_mib`, `baseline_memory_mib`, `first_step_peak_memory_mib`, `val_peak_memory_mib` (MiB over the
            whole run), `includes_first_step` (whether the peak could not be told apart from the first batch's),
            `recompute_overhead`, `per_device` (the four MiB figures of each device) and `epochs` (a list of dicts with
            each epoch's figures). What was not measured is `None`.
        """
        train, includes_first_step = self._train.of_run()
        val, _ = self._val.of_run()

        def peaks(names):
            peak, baseline = _worst(train, names)
            return {
                "peak_memory_mib": peak,
                "baseline_memory_mib": baseline,
                "first_step_peak_memory_mib": _worst(self._train.first, names)[0],
                "val_peak_memory_mib": _worst(val, names)[0],
            }

        names = self._meter.names
        return {
            "devices": list(names),
            "reset": self.reset,
            "batches": self._train.batches,
            **peaks(names),
            "includes_first_step": includes_first_step,
            "recompute_overhead": self._overhead,
            "per_device": {name: peaks([name]) for name in names},
            "epochs": [dict(epoch) for epoch in self._epochs],
        }

    def on_train_begin(self, logs=None):
        self._in_fit = True
        self._begin_run(_measurable(self.reset))
        self._overhead = _predicted_overhead(self.model)

    def on_train_batch_begin(self, batch, logs=None):
        self._meter.begin()

    def on_train_batch_end(self, batch, logs=None):
        self._train.add(self._meter.end())
        if self._every and self._train.batches % self._every == 0 and self._train.unwritten and logs is not None:
            logs["peak_memory_mib"] = _worst(self._train.unwritten, self._meter.names)[0]
            self._train.unwritten = {}

    def on_epoch_end(self, epoch, logs=None):
        usage, includes_first_step = self._train.end_epoch()
        val, _ = self._val.end_epoch()
        names = self._meter.names
        figures = dict(zip(("peak_memory_mib", "baseline_memory_mib"), _worst(usage, names), strict=True))
        if len(names) > 1:
            figures.update({f"peak_memory_mib_{memory.key(name)}": _worst(usage, [name])[0] for name in names})
        if val:
            figures["val_peak_memory_mib"] = _worst(val, names)[0]
        self._epochs.append({"epoch": epoch, **figures, "includes_first_step": includes_first_step})
        if logs is None:
            return
        if names:
            # CSVLogger's columns are those of the first epoch: an epoch without a batch has the same ones.
            logs.update({name: math.nan if value is None else value for name, value in figures.items()})
        if self._overhead is not None:
            logs["recompute_overhead"] = self._overhead

    def on_train_end(self, logs=None):
        self._in_fit = False
        if self.verbose:
            _print_table(self.report())

    def on_test_begin(self, logs=None):
        if not self._in_fit and not self._train.batches:
            self._begin_run(_measurable(self.reset))

    # Without a reset there is no peak of validation alone: it is in the process's one peak.
    def on_test_batch_begin(self, batch, logs=None):
        if self.reset:
            self._meter.begin()

    def on_test_batch_end(self, batch, logs=None):
        if self.reset:
            self._val.add(self._meter.end())

    def on_test_end(self, logs=None):
        if not self._in_fit:
            self._val.end_epoch()

    def _begin_run(self, names):
        self._meter = memory.PeakMeter(names, reset=self.reset)
        self._train = _Readings(tell_first=self.reset)
        self._val = _Readings(tell_first=self.reset)
        self._epochs = []
        self._overhead = None


class _Readings:
    """The readings of one kind of batch, joined over an epoch and over the run, the first batch apart.

    A reading is `{device: memory.Usage}`, and empty where nothing was measured.
    """

    def __init__(self, tell_first):
        self._tell_first = tell_first
        self.batches = 0
        self.first, self.unwritten = {}, {}
        self._run, self._epoch, self._epoch_first = {}, {}, {}

    def add(self, reading):
        self.batches += 1
        if self.batches == 1 and self._tell_first:
            self.first = self._epoch_first = reading
        else:
            self._epoch = memory.merge(self._epoch, reading)
            self.unwritten = memory.merge(self.unwritten, reading)

    def end_epoch(self):
        """The epoch's usage and whether a first batch is in it; begins the next epoch."""
        usage = self._or_first(self._epoch, self._epoch_first)
        self._run = memory.merge(self._run, self._epoch)
        self._epoch, self._epoch_first = {}, {}
        return usage

    def of_run(self):
        return self._or_first(self._run, self.first)

    def _or_first(self, usage, first):
        if usage:
            return usage, not self._tell_first
        return first, bool(first)


def _measurable(reset):
    """The devices to measure. Without any it says so, once a process: training is worth more than its statistics."""
    global _warned
    names, reason = memory.devices(), None
    try:
        if not names:
            reason = memory.hint()
        elif reset:
            memory.PeakMeter(names).begin()
    except CheckpointError as error:
        names, reason = (), f"{error} `MemoryLogger(reset=False)` does without."
    if reason and not _warned:
        _warned = True
        warnings.warn(f"MemoryLogger logs no memory. {reason}", CheckpointWarning, stacklevel=2)
    return names


def _predicted_overhead(model):
    """The plan's predicted share of recompute; None where it is not known."""
    from tf_ckpt.graph import sublayers
    from tf_ckpt.transform import plan_of  # here, as `tf_ckpt` imports its callbacks

    plan = plan_of(model)
    if plan is not None:
        return None if plan.overhead is None else float(plan.overhead)
    # Recompute inside layers is no plan of the model: what it costs is not known, and 0.0 would be wrong.
    inside = sublayers(model)[1:]
    if any(keras.saving.get_registered_name(type(layer)).startswith("tf_ckpt>") for layer in inside):
        return None
    return 0.0


def _worst(usage, names):
    """Peak and baseline, MiB, of that device of `names` with the highest peak; None, None where nothing was measured.

    Both of one device, so that their difference is what its activations and gradients took.
    """
    measured = [usage[name] for name in names if name in usage]
    if not measured:
        return None, None
    fullest = max(measured, key=lambda used: used.peak)
    return fullest.peak / memory.MIB, fullest.baseline / memory.MIB


def _print_table(report):
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Device memory of {report['batches']} training batches, MiB")
    table.add_column("device")
    for heading in ("baseline", "peak", "first batch", "validation"):
        table.add_column(heading, justify="right")
    for name, used in report["per_device"].items():
        keys = ("baseline_memory_mib", "peak_memory_mib", "first_step_peak_memory_mib", "val_peak_memory_mib")
        table.add_row(name, *("-" if used[key] is None else f"{used[key]:,.1f}" for key in keys))
    if not report["devices"]:
        table.add_row("no statistics", "-", "-", "-", "-")
    overhead = report["recompute_overhead"]
    table.caption = f"recompute, predicted: {'unknown' if overhead is None else f'{overhead:.1%} of the plain step'}"
    Console().print(table)
