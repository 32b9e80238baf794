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
    return segments if keep_useless else [s for s in segments if frees(chain, s) > 0]


def frees(chain, segment):
    """Returns the bytes that are not kept when `segment` alone is recomputed; negative if more is kept."""
    start, stop = segment
    freed = float(chain.internal[start:stop].sum())
    for t in chain.tensors:
        inside = start <= t.producer < stop
        outer = any(not start <= s < stop for s in t.inner)
        if inside and t.needed and not outer:
            freed += t.size
        elif not inside and t.producer >= 0 and not t.needed and any(start <= s < stop for s, _ in t.uses):
            freed -= t.size  # an argument that nobody would have kept
    return freed
