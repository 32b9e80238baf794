"""What is measured at each batch, joined over epochs and over the run."""

import array
import statistics

from tf_ckpt import memory


class Readings:
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
        """The usage of all batches so far, those of an epoch that has not ended or was interrupted too."""
        return self._or_first(memory.merge(self._run, self._epoch), self.first)

    def _or_first(self, usage, first):
        if usage:
            return usage, not self._tell_first
        return first, bool(first)


class StepTimes:
    """Seconds of training steps: of an epoch, since they were last written, and of the run."""

    def __init__(self):
        self.run = array.array("d")
        self.total = 0.0
        self._epoch = self._written = 0

    def add(self, seconds):
        self.run.append(seconds)
        self.total += seconds

    def recent(self):
        """The median of the last few, in seconds."""
        return statistics.median(self.run[-9:])

    def unwritten(self):
        """The median since the last call, in ms, or None."""
        begin, self._written = self._written, len(self.run)
        return _median_ms(self.run[begin:])

    def end_epoch(self):
        begin, self._epoch = self._epoch, len(self.run)
        return _median_ms(self.run[begin:])

    def of_run(self):
        return _median_ms(self.run)


def _median_ms(seconds):
    return 1000 * statistics.median(seconds) if seconds else None


def worst(usage, names):
    """Peak and baseline, MiB, of that device of `names` with the highest peak; None, None where nothing was measured.

    Both of one device, so that their difference is what its activations and gradients took.
    """
    measured = [usage[name] for name in names if name in usage]
    if not measured:
        return None, None
    fullest = max(measured, key=lambda used: used.peak)
    return fullest.peak / memory.MIB, fullest.baseline / memory.MIB
