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
        above = (report["peak_memory_mib"] - report["baseline_memory_mib"]) * MIB
        recomputed = plan is not None and bool(plan.segments)
        if not recomputed:
            self._weights(model, above)
        elif plan.has_figures and report["batch_size"] == plan.batch_size:  # the plan's figures are those of this fit
            self._weights(model, max(above, plan.plain_activation_bytes))
            self._unchanged(plan, above, report)

    def _weights(self, model, above):
        # Not as shares of the peak: that also holds whatever else this process keeps on the device.
        optimizer = getattr(model, "optimizer", None)
        weights, gradients = _bytes(model.variables), _bytes(model.trainable_variables)
        slots = _bytes(optimizer.variables) if optimizer is not None else 0
        activations = max(above - gradients, 0)
        fixed = weights + slots + gradients
        if fixed > max(2 * activations, _WORTH_A_WORD):
            total = fixed + activations
            self._say(
                "weights",
                "weights rather than activations fill the memory, so that recompute can save little. Of the "
                f"{total / MIB:,.0f} MiB that training takes, weights are {weights / total:.0%}, optimizer slots "
                f"{slots / total:.0%}, weight gradients up to {gradients / total:.0%}, and activations about "
                f"{activations / total:.0%} without recompute. A smaller model, an optimizer with fewer slots, or mixed "
                "precision would save more.",
            )

    def _unchanged(self, plan, measured, report):
        planned, plain = plan.activation_bytes, plan.plain_activation_bytes
        if plain - planned > max(0.1 * plain, _WORTH_A_WORD / 4) and measured > plain - 0.25 * (plain - planned):
            reason = (
                "Nothing that ran carried the name of a re-run: the segments ran plain (see the warnings when they were "
                "traced, or an open `tf_ckpt.disabled()`)."
                if report["recompute_overhead_source"] == "unknown" and report["profiled_batches"]
                else "The reason is not known; warnings when the model was traced name segments that run plain."
            )
            self._say(
                "unchanged",
                f"the peak is about that of the plain model. Above what is held between batches it is {measured / MIB:,.0f} "
                f"MiB; the plan says {planned / MIB:,.0f}, and {plain / MIB:,.0f} without recompute. {reason}",
            )


def _bytes(variables):
    return sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables)
