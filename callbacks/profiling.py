"""Profiles of a few training steps within `fit`: when they are taken, what they cost, and what becomes of them."""

import glob
import math
import os
import shutil
import statistics
import tempfile
import time

import tensorflow as tf

from tf_ckpt import graph as keras_graph
from tf_ckpt import memory, profile_share, replay, tf_internals

STEPS = 3
BUDGET = 0.01  # the share of an epoch of 100 steps that profiles may take
# Below this share of the step in traced operations, what the others did is not known. XLA's convolutions on the CPU are such.
COVERED = 0.85
_SKIPPED = 2  # the first batch traces, the second may still plan memory
_EXPECTED = {False: 0.6, True: 3.0}  # seconds for one profile, stopped and read, before one was taken; under XLA


class StepProfiler:
    """Takes the profiles of a run.

    Args:
        steps: `"auto"` for `STEPS` within `BUDGET`, or a number of training batches.
    """

    def __init__(self, steps):
        self.steps = steps
        self.begin_run()

    def begin_run(self):
        """Forgets everything."""
        self.shares, self.problem = [], None
        self._unread, self._stopping, self._reading = [], 0.0, 0.0

    @property
    def cost(self):
        """Seconds that profiles took, beside the steps themselves."""
        return self._stopping + self._reading

    @property
    def taken(self):
        """How many profiles there are, read or not."""
        return len(self.shares) + len(self._unread)

    def before_batch(self, model, batches, times):
        """Arranges for the next batch to be profiled, if it is its turn.

        Args:
            model: The model in `fit`.
            batches: How many training batches the run has had.
            times: The run's `StepTimes`.
        """
        keras_graph.unwrap_step(model)
        wanted = self.steps
        if wanted == "auto":
            wanted = math.ceil(STEPS / (getattr(model, "steps_per_execution", 1) or 1))
        if batches >= _SKIPPED and self.taken < wanted and self._affordable(model, times):
            keras_graph.wrap_step(model, self._eager if model.run_eagerly else self._profiled)

    def _affordable(self, model, times):
        if self.steps != "auto" or model.run_eagerly:
            return True
        if not times.run:
            return False
        expected = _EXPECTED[bool(model.jit_compile)]
        stop = self._stopping / self.taken if self.taken else expected / 2
        read = self._reading / len(self.shares) if self.shares else expected / 2
        cost = self._stopping + stop + self._reading + read * (len(self._unread) + 1)
        return cost <= BUDGET * max(100 * times.recent(), times.total)

    def _eager(self, step, *args):
        # Operations of eager mode have no names, but a re-run is a call in Python, that can be timed.
        begun = time.perf_counter()
        with replay.timing_reruns() as clock:
            result = step(*args)
            memory.synchronize()
        seconds = time.perf_counter() - begun
        self.shares.append((profile_share.Share(seconds, clock.seconds, 0.0, 0), seconds))
        return result

    def _profiled(self, step, *args):
        if tf_internals.profiler_is_running():
            self.problem = "another profiler was running"
            return step(*args)
        begun = time.perf_counter()
        folder = tempfile.mkdtemp(prefix="tf_ckpt_profile_")
        try:
            try:
                tf.profiler.experimental.start(folder)
            except (tf.errors.OpError, RuntimeError, OSError) as error:
                self.problem = f"the profiler did not start: {error}"
                if tf_internals.profiler_is_running():  # TensorFlow keeps the one that did not start
                    tf.profiler.experimental.stop(save=False)
                return step(*args)
            at_step = time.perf_counter()
            try:
                result = step(*args)
                memory.synchronize()
            except BaseException:
                tf.profiler.experimental.stop(save=False)
                raise
            seconds = time.perf_counter() - at_step
            try:
                tf.profiler.experimental.stop()
            except (tf.errors.OpError, RuntimeError, OSError) as error:
                self.problem = f"the profiler wrote nothing: {error}"
                return result
            for path in glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True):
                with open(path, "rb") as file:
                    self._unread.append((file.read(), seconds))
            self._stopping += time.perf_counter() - begun - seconds
            return result
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def read(self):
        """Reads the profiles that were taken since the last call. That takes a moment: not between batches."""
        begun = time.perf_counter()
        unread, self._unread = self._unread, []
        for data, seconds in unread:
            try:
                gpus = bool(tf.config.list_logical_devices("GPU"))
                self.shares.append((profile_share.read(tf_internals.profile(data), gpus), seconds))
            except Exception as error:  # a format that is not known must not end a training
                self.problem = f"the profile could not be read: {type(error).__name__}: {error}"
        self._reading += time.perf_counter() - begun if unread else 0.0

    def result(self, eager):
        """Returns what the profiles say, as plain data.

        Args:
            eager: Whether the model runs eagerly.

        Returns:
            A dict with `recompute_overhead`, None if it is not known, `recompute_overhead_source`,
            `recompute_overhead_note`, `recompute_overhead_coverage` and `recompute_overhead_unknown`, `profiled_batches`.
        """
        found = [(share, wall) for share, wall in self.shares if share.seconds > 0]
        figures = dict.fromkeys(("recompute_overhead", "recompute_overhead_coverage", "recompute_overhead_unknown"))
        if not found:
            why = self.problem or (
                "the profile holds nothing that ran (on a GPU: kernels are seen only if CUPTI is there)"
                if self.shares
                else "no profile was taken"
                if self.steps == 0
                else f"no batch was profiled yet: the run was too short to stay within {BUDGET:.0%} of an epoch of 100 steps. "
                f"`MemoryLogger(profile_batches={STEPS})` profiles at once"
            )
            return {**figures, "recompute_overhead_source": "unknown", "recompute_overhead_note": why, "profiled_batches": 0}
        figures["recompute_overhead"] = statistics.median(share.recompute / share.seconds for share, _ in found)
        figures["recompute_overhead_coverage"] = min(1.0, statistics.median(share.seconds / wall for share, wall in found))
        figures["recompute_overhead_unknown"] = statistics.median(share.unknown / share.seconds for share, _ in found)
        source, note = "eager timing" if eager else "profile", ""
        if not any(share.recompute for share, _ in found):
            figures["recompute_overhead"] = None
            source, note = "unknown", "nothing that ran in the step carried the name of a re-run"
        elif figures["recompute_overhead_coverage"] < COVERED:
            source += " (uncertain)"
            note = f"the profiler saw only {figures['recompute_overhead_coverage']:.0%} of the step"
        if len(found) == 1:
            note += ("; " if note else "") + "from one batch"
        return {**figures, "recompute_overhead_source": source, "recompute_overhead_note": note, "profiled_batches": len(found)}

    @property
    def failed(self):
        """Whether no more can be expected of profiles, and they do not tell the share for certain."""
        wanted = STEPS if self.steps == "auto" else self.steps
        if self.shares:
            return statistics.median(share.seconds / wall for share, wall in self.shares) < COVERED  # also if it is empty
        return wanted == 0 or self.problem is not None
