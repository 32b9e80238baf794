"""`MemoryLogger`: memory, time and recompute of training, in the logs of `fit`."""

import math
import os
import time
import warnings

import keras

from tf_ckpt import graph as keras_graph
from tf_ckpt import memory
from tf_ckpt.callbacks import advice, forward_probe, run_table
from tf_ckpt.callbacks.profiling import COVERED, StepProfiler
from tf_ckpt.callbacks.readings import Readings, StepTimes, worst
from tf_ckpt.callbacks.scalars import Scalars
from tf_ckpt.errors import CheckpointError, CheckpointWarning

_warned = False
_NOTHING = {
    "recompute_overhead": 0.0,
    "recompute_overhead_source": "nothing is recomputed",
    "recompute_overhead_note": "",
    "recompute_overhead_coverage": None,
    "recompute_overhead_unknown": None,
    "profiled_batches": 0,
}


class MemoryLogger(keras.callbacks.Callback):
    """Writes peak memory, step time and what recompute costs into the logs of `fit`, beside the loss.

    Memory is measured around each training batch, with the statistics of TensorFlow's own allocator: on all GPUs, or
    on the CPU when `TF_CPU_ALLOCATOR_USE_BFC=true` was in the environment before TensorFlow was imported. Without
    statistics the callback warns once per process, and `fit` goes on without the memory figures.

    Each epoch's logs get, with MiB of 2**20 bytes:

    - `peak_memory_mib`: the most memory held at once within a training batch. The first batch of a fit is left out, as
      it also holds tracing, constant folding and autotuning (its own peak is in `report`). An epoch that consists of
      the first batch only logs that one, and `report` marks the epoch with `includes_first_step`.
    - `baseline_memory_mib`: what is held between batches: weights, optimizer slots and, on a CPU, input data. It is
      the least seen at the beginning of a batch. The peak above it is what activations and gradients need.
    - `peak_memory_mib_gpu_0`, ...: with several GPUs, each one's peak. The two figures above are then those of the GPU
      with the highest peak. Several logical CPUs have one allocator and one peak.
    - `val_peak_memory_mib`: the same for validation batches, in epochs that have validation.
    - `step_time_ms`: the median wall time of a training step, from batches that were not profiled, were not the first,
      and traced nothing.
    - `recompute_overhead`: the measured share of the step that went into re-running forward work, such as 0.25. It is a
      gross share: what the step would save without recompute is less where the plain step is slower for its memory (paired
      steps tell that). 0.0 for a model that recomputes nothing, NaN until and unless it is measured, and from
      then on what is known so far. `report` says in `recompute_overhead_source` where it comes from:

      - `"profile"`: TensorFlow's profiler, on up to three single batches after the second: the time in which operations
        ran that carry the name of a re-run, as a share of the time in which any ran. Good to about 3 points in graphs.
        Under XLA fusions count as what they end with, and on a CPU it only bounds the slowdown from above.
      - `"profile (uncertain)"`: the same, but less than 85 % of the step was in operations that the profiler saw, as with
        XLA's convolutions on a CPU.
      - `"eager timing"`: with `run_eagerly=True`, the time of the calls that re-run, from up to three batches.
      - `"forward probe"`: where neither is to be had or the profile is uncertain, and `probe_data` was given: the forward of
        the recomputed parts alone, timed, as a share of the shortest step. It runs all of them, where a re-run leaves out
        what the backward pass does not need, and all at once, where a step has one after the other: it may be some points
        off either way.
      - `"forward probe (uncertain)"`: the same, but more than 15 % of its time went into starting it, not into work. In small
        models it may be several times too high.
      - `"nothing is recomputed"`, or `"unknown"` with the reason in `recompute_overhead_note`.

    Callbacks run in the order of the list, and each sees what those before it wrote. History and the progress bar come
    last and always have the figures; **put `MemoryLogger` before** `CSVLogger`, `EarlyStopping` and others that shall have
    them. `keras.callbacks.TensorBoard` gets them wherever it stands.

    A batch is what `fit` calls one: with `steps_per_execution=n` it is n steps, of which the peak is the highest and the step
    time the mean. `fit` waits for the device at each batch, which slows down the training of very small models. Peaks that
    another callback resets within a batch are read before they are lost.

    It warns, once, if nothing is checkpointed in the model; if the peak is not below the plain model's as the plan says;
    and if weights rather than activations fill the memory.

    Args:
        update_freq: `"epoch"`, `"batch"` or a positive integer. With `"batch"` or n, `peak_memory_mib`,
            `baseline_memory_mib`, `step_time_ms` and, once it is known, `recompute_overhead` are also written into the logs
            of every batch or every n-th batch, as of what was run since they were last written. The first batch of a fit
            writes nothing.
        reset: Whether to reset the allocator's peak before each batch. The reset is global: with `False`, whoever else
            reads the peak is left alone, and `peak_memory_mib` is the peak of the whole process so far, with the first
            batch, validation and whatever ran before in it.
        verbose: 0, or 1 to print a table of the report when training ends.
        profile_batches: How many batches to profile in a fit, at once from the third on; 0 for none. `"auto"` takes up to
            three, as many as cost no more than 1 % of an epoch of 100 steps: short runs of fast steps are not profiled.
        log_dir: Optional directory, in which the figures are written as TensorBoard's event files.
        probe_data: Optional inputs of one batch, as for a call of the model: used if the profile fails.

    Raises:
        CheckpointError: If an argument is not one of the values above; when training begins, if `log_dir` cannot be written
            to, or the model cannot be called with `probe_data`.

    Example:

    ```python
    model = tf_ckpt.apply(model, strategy="sqrt")
    model.compile("adam", "sparse_categorical_crossentropy")
    logger = tf_ckpt.callbacks.MemoryLogger(verbose=1)
    history = model.fit(x, y, epochs=3, callbacks=[logger, keras.callbacks.CSVLogger("log.csv")])
    history.history["peak_memory_mib"]  # one value an epoch
    logger.report()["recompute_overhead_source"]  # "profile"
    ```
    """

    # Keras hands batches to a thread otherwise, and goes on to the next one before this one is measured.
    async_safe = False

    def __init__(self, update_freq="epoch", reset=True, verbose=0, *, profile_batches="auto", log_dir=None, probe_data=None):
        super().__init__()
        counted = _whole(update_freq) and update_freq > 0
        if not counted and not (isinstance(update_freq, str) and update_freq in ("epoch", "batch")):
            raise CheckpointError(
                f'`update_freq` must be "epoch", "batch" or a positive number of batches. Received: update_freq={update_freq!r}'
            )
        if not isinstance(reset, bool):
            raise CheckpointError(f"`reset` must be True or False. Received: reset={reset!r}")
        if not (isinstance(verbose, int) and verbose in (0, 1)):
            raise CheckpointError(f"`verbose` must be 0 or 1. Received: verbose={verbose!r}")
        counted = _whole(profile_batches) and profile_batches >= 0
        if not counted and not (isinstance(profile_batches, str) and profile_batches == "auto"):
            raise CheckpointError(
                '`profile_batches` must be "auto", 0 or a positive number of batches. '
                f"Received: profile_batches={profile_batches!r}"
            )
        if log_dir is not None and not isinstance(log_dir, (str, os.PathLike)):
            raise CheckpointError(f"`log_dir` must be the path of a directory, or None. Received: log_dir={log_dir!r}")
        self.update_freq = update_freq
        self.reset = reset
        self.verbose = verbose
        self.log_dir = None if log_dir is None else os.fspath(log_dir)
        self.probe_data = probe_data
        self._every = {"epoch": 0, "batch": 1}.get(update_freq, update_freq)
        self._in_fit, self._scalars = False, None
        self._advice = advice.Advice()
        self._profiler = StepProfiler(profile_batches)
        self._begin_run(names=())

    def report(self):
        """The figures of the last `fit` (or of an `evaluate` after it), as plain data.

        Within a `fit`, and after one that was interrupted, they are those of the batches that ran so far. Profiles that were
        taken are then read, which takes a moment.

        Returns:
            A dict. What was not measured or is not known is `None`.

            - `devices` (names; empty without statistics), `reset`, `batches` (training batches measured), `batch_size`;
            - `peak_memory_mib`, `baseline_memory_mib`, `first_step_peak_memory_mib`, `val_peak_memory_mib`: MiB over the
              whole run; `includes_first_step`: whether the peak could not be told apart from the first batch's;
              `per_device`: the four figures of each device;
            - `step_time_ms`;
            - `recompute_overhead`, `recompute_overhead_source`, `recompute_overhead_note`, `recompute_overhead_coverage`
              (the share of the step in operations that were seen), `recompute_overhead_unknown` (the share in operations
              without a name), `profiled_batches`: see the class;
            - the plan's `predicted_peak_memory_mib`, `predicted_held_mib` (weights and optimizer slots),
              `predicted_plain_peak_memory_mib`, `predicted_recompute_overhead` (of the step with recompute, in the unit
              `predicted_recompute_overhead_unit`), for batches of `predicted_batch_size`;
            - `epochs`: a list of dicts with the figures of each epoch that ended.
        """
        if self._in_fit:
            self._profiler.read()
            self._update_overhead()
        train, includes_first_step = self._train.of_run()
        val, _ = self._val.of_run()

        def peaks(names):
            peak, baseline = worst(train, names)
            return {
                "peak_memory_mib": peak,
                "baseline_memory_mib": baseline,
                "first_step_peak_memory_mib": worst(self._train.first, names)[0],
                "val_peak_memory_mib": worst(val, names)[0],
            }

        names = self._meter.names
        return {
            "devices": list(names),
            "reset": self.reset,
            "batches": self._train.batches,
            "batch_size": self._batch_size,
            **peaks(names),
            "includes_first_step": includes_first_step,
            "step_time_ms": self._times.of_run(),
            **self._overhead,
            **_predicted(self._plan),
            "per_device": {name: peaks([name]) for name in names},
            "epochs": [dict(epoch) for epoch in self._epochs],
        }

    def on_train_begin(self, logs=None):
        from tf_ckpt.transform import had_plan, plan_of  # here, as `tf_ckpt` imports its callbacks

        self._begin_run(_measurable(self.reset))
        if self.probe_data is not None:
            forward_probe.check(self.model, self.probe_data)
        self._close()
        self._scalars = Scalars(self, self.log_dir)
        self._in_fit = True
        self._plan = plan_of(self.model)
        self._batch_size = keras_graph.batch_size_around()
        self._recomputes = advice.recomputes(self.model, self._plan)
        self._update_overhead()
        self._advice.at_begin(self.model, self._plan, self._plan is None and had_plan(self.model))

    def on_train_batch_begin(self, batch, logs=None):
        self._taken = self._profiler.taken
        if self._recomputes is not False:
            self._profiler.before_batch(self.model, self._train.batches, self._times)
        self._traced = keras_graph.times_traced(self.model)
        self._meter.begin()
        self._begin = batch, time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        memory.synchronize()
        first, begun = self._begin
        seconds = (time.perf_counter() - begun) / self._steps_in_execution(first)
        usual = self._profiler.taken == self._taken and keras_graph.times_traced(self.model) == self._traced
        if self._train.batches and usual:
            self._times.add(seconds)
        self._train.add(self._meter.end())
        if self._every and self._train.batches % self._every == 0 and self._train.batches > 1 and logs is not None:
            self._write_batch(logs)

    def on_epoch_end(self, epoch, logs=None):
        usage, includes_first_step = self._train.end_epoch()
        val, _ = self._val.end_epoch()
        names = self._meter.names
        figures = {}
        if names:
            figures = dict(zip(("peak_memory_mib", "baseline_memory_mib"), worst(usage, names), strict=True))
        if len(names) > 1:
            figures.update({f"peak_memory_mib_{memory.key(name)}": worst(usage, [name])[0] for name in names})
        if val:
            figures["val_peak_memory_mib"] = worst(val, names)[0]
        figures["step_time_ms"] = self._times.end_epoch()
        self._profiler.read()
        self._update_overhead()
        figures["recompute_overhead"] = self._overhead["recompute_overhead"]
        self._epochs.append({"epoch": epoch, **figures, "includes_first_step": includes_first_step})
        self._scalars.write("epoch", figures, epoch)
        if logs is not None:
            # CSVLogger's columns are those of the first epoch: an epoch without a batch has the same ones.
            logs.update({name: math.nan if value is None else value for name, value in figures.items()})

    def on_train_end(self, logs=None):
        self._in_fit = False
        keras_graph.unwrap_step(self.model)
        self._profiler.read()
        self._update_overhead()
        self._close()
        report = self.report()
        self._advice.at_end(self.model, self._plan, report)
        if self.verbose:
            run_table.print_table(report)

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

    def __getstate__(self):
        # Event files are open for one process and one fit.
        return {**self.__dict__, "_scalars": None}

    def _close(self):
        scalars, self._scalars = self._scalars, None
        if scalars is not None:
            scalars.close()

    def _begin_run(self, names):
        self._meter = memory.PeakMeter(names, reset=self.reset)
        self._train = Readings(tell_first=self.reset)
        self._val = Readings(tell_first=self.reset)
        self._times = StepTimes()
        self._profiler.begin_run()
        self._epochs = []
        self._plan = self._batch_size = None
        self._recomputes = False
        self._probed = None
        self._overhead = {**_NOTHING, "recompute_overhead": None, "recompute_overhead_source": "unknown"}

    def _update_overhead(self):
        if self._recomputes is False:
            self._overhead = dict(_NOTHING)
            return
        self._overhead = self._profiler.result(self.model.run_eagerly)
        if self.probe_data is not None and self._profiler.failed and self._times.run:
            if self._probed is None:
                self._probed = forward_probe.seconds(self.model, self.probe_data)
            # The least of both: a machine that others use is slower at one moment than at another.
            seconds, dispatch = self._probed
            self._overhead["recompute_overhead"] = seconds / min(self._times.run)
            self._overhead["recompute_overhead_source"] = "forward probe"
            self._overhead["recompute_overhead_note"] = ""
            if dispatch > (1 - COVERED) * seconds:
                self._overhead["recompute_overhead_source"] += " (uncertain)"
                share = min(1.0, dispatch / seconds)
                self._overhead["recompute_overhead_note"] = (
                    f"{share:.0%} of the probe's time went into its start, not into work"
                )

    def _steps_in_execution(self, first):
        # Keras names the step that an execution would end with if there were enough data.
        steps = getattr(self.model, "steps_per_execution", 1) or 1
        total = (self.params or {}).get("steps")
        return max(1, min(steps, total - first)) if total else steps

    def _write_batch(self, logs):
        figures = {}
        if self._train.unwritten:
            pair = worst(self._train.unwritten, self._meter.names)
            figures.update(zip(("peak_memory_mib", "baseline_memory_mib"), pair, strict=True))
        figures["step_time_ms"] = self._times.unwritten()
        figures["recompute_overhead"] = self._overhead["recompute_overhead"]
        figures = {name: value for name, value in figures.items() if value is not None}
        logs.update(figures)
        self._scalars.write("batch", figures, self._train.batches)
        self._train.unwritten = {}


def _whole(value):
    return isinstance(value, int) and not isinstance(value, bool)


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


def _predicted(plan):
    """What a plan says, or None throughout; shares as of the step with recompute, as the measured one is."""
    keys = ("peak_memory_mib", "held_mib", "plain_peak_memory_mib", "recompute_overhead")
    found = dict.fromkeys((*(f"predicted_{key}" for key in (*keys, "recompute_overhead_unit", "batch_size")),))
    if plan is not None and plan.has_figures:
        held = plan.weight_bytes + plan.optimizer_bytes
        sizes = (plan.peak_bytes, held, plan.plain_peak_bytes)
        found.update({f"predicted_{key}": size / memory.MIB for key, size in zip(keys, sizes, strict=False)})
        found["predicted_recompute_overhead"] = float(plan.overhead) / (1 + float(plan.overhead))
        found["predicted_recompute_overhead_unit"] = plan.unit
        found["predicted_batch_size"] = plan.batch_size
    return found
