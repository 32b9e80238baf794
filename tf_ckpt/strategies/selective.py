"""Recompute chosen stages only: those that are named, or those that are cheap and large.

Selective recompute after Korthikanti et al. 2022 (https://arxiv.org/abs/2205.05198).
"""

from tf_ckpt.strategies.full import pieces


def selective(chain, chosen, keep_useless=True):
    """Plans the chosen stages, joined to segments where they are adjacent.

    Args:
        chain: A `Chain`.
        chosen: Boolean for each stage.
        keep_useless: Whether a segment that frees no bytes is planned all the same.

    Returns:
        A sorted list of ranges `(start, stop)` to recompute.
    """
    segments = pieces(chain, (k for k in range(len(chain)) if chosen[k]))
    return segments if keep_useless else [s for s in segments if chain.frees(*s) > 0]
