"""What a user of `MemoryLogger` should be told: that recompute is missing, did not save, or cannot."""

import math
import warnings

import keras
import tensorflow as tf

from tf_ckpt.errors import CheckpointWarning
from tf_ckpt.graph import sublayers
from tf_ckpt.memory import MIB

# Below this the allocator's rounding, and whatever else the process holds, is as large as what a plan frees.
_WORTH_A_WORD = 64 * MIB
_ACTIVATIONS_SMALL = 1 / 3


def recomputes(model, plan):
    """Returns whether a model recomputes: True, False, or None if Python code of the user's may do so."""
    if plan is not None and plan.segments:
        return True
    layers = sublayers(model)
    if any(keras.saving.get_registered_name(type(layer)).startswith("tf_ckpt>") for layer in layers[1:]):
        return True
    own = [type(model).__module__, *(type(layer).__module__ for layer in layers[1:] if not isinstance(layer, keras.Model))]
    known = all(module.startswith("keras.") for module in own)
    return False if known and not any(isinstance(layer, keras.layers.Lambda) for layer in layers) else None


class Advice:
    """Gives each piece of advice once."""

    def __init__(self):
        self._given = set()

    def _say(self, kind, text):
        if kind not in self._given:
            self._given.add(kind)
            warnings.warn(f"MemoryLogger: {text}", CheckpointWarning, stacklevel=4)

    def at_begin(self, model, plan, changed):
        """To be called when training begins.

        Args:
            model: The model.
            plan: Its `Plan`, or None.
            changed: Whether the model had a plan that it does not execute any more.
        """
        if changed:
            self._say(
                "changed",
                f"the plan of model '{model.name}' is not executed any more, since layers were added or removed after "
                "`tf_ckpt.apply`: nothing is recomputed. Apply again.",
            )
        elif plan is None and recomputes(model, plan) is False:
            self._say(
                "nothing",
                f"nothing is checkpointed in model '{model.name}'. Fit what `tf_ckpt.apply(model)` returns; it does not "
                'change `model` itself. (`tf_ckpt.apply(model, "none")` trains plain without this warning.)',
            )

    def at_end(self, model, plan, report):
        """To be called with the report when training ends."""
        if report["peak_memory_mib"] is None or report["includes_first_step"]:
            return
        peak, held = report["peak_memory_mib"] * MIB, report["baseline_memory_mib"] * MIB
        if peak < _WORTH_A_WORD:
            return
        self._weights(model, peak, held)
        if plan is not None and plan.segments:
            self._unchanged(
                plan, peak - held, report["batch_size"], report["recompute_overhead_source"], report["profiled_steps"]
            )

    def _weights(self, model, peak, held):
        optimizer = getattr(model, "optimizer", None)
        weights = _bytes(model.variables)
        slots = _bytes(optimizer.variables) if optimizer is not None else 0
        gradients = _bytes(model.trainable_variables)
        activations = max(peak - held - gradients, 0)
        # The rest may be anything that this process holds.
        if activations < _ACTIVATIONS_SMALL * peak and weights + slots + gradients > peak / 2:
            self._say(
                "weights",
                "weights rather than activations fill the memory, so that recompute can save little. Of the peak of "
                f"{peak / MIB:,.0f} MiB, weights are {weights / peak:.0%}, optimizer slots {slots / peak:.0%}, weight "
                f"gradients up to {gradients / peak:.0%}, and at most {activations / peak:.0%} activations. A smaller model, "
                "an optimizer with fewer slots, or mixed precision would save more.",
            )

    def _unchanged(self, plan, measured, batch_size, source, ran):
        planned, plain = plan.activation_bytes, plan.plain_activation_bytes
        if batch_size != plan.batch_size or plain - planned < max(0.1 * plain, _WORTH_A_WORD / 4):
            return
        if measured > plain - 0.25 * (plain - planned):
            reason = (
                "Nothing that ran carried the name of a re-run: the segments ran plain (see the warnings when they were "
                "traced, or an open `tf_ckpt.disabled()`)."
                if source == "unknown" and ran
                else "The reason is not known; warnings when the model was traced name segments that run plain."
            )
            self._say(
                "unchanged",
                f"the peak is about that of the plain model. Above what is held between batches it is {measured / MIB:,.0f} "
                f"MiB; the plan says {planned / MIB:,.0f}, and {plain / MIB:,.0f} without recompute. {reason}",
            )


def _bytes(variables):
    return sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables)
