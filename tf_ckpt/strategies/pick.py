"""Layers by position: every k-th, the first, the last of those that something names."""


class Pick:
    """Layers by position, for `layers=` of the strategy `"selective"`.

    `Pick(of)[positions]` counts the layers that `of` names, in the order in which the model runs them (or, where that is
    Python code, holds them), and takes those at `positions`, as of a list. Of layers within layers that are both named the
    outer ones count. All calls of a layer are one position.

    Args:
        of: A name, `fnmatch` pattern, layer class or layer, or a list of these. Defaults to all layers of the model
            itself: a model or block inside counts as one.

    Raises:
        TypeError: If `positions` is neither an integer nor a slice of integers.

    Example:

    ```python
    Pick = tf_ckpt.strategies.Pick
    tf_ckpt.apply(model, layers=[Pick(TransformerBlock)[::2]])  # every second
    tf_ckpt.apply(model, layers=[Pick("conv*")[:6], Pick("conv*")[-2:]])  # the first six and the last two
    ```
    """

    def __init__(self, of=None):
        self.of, self._positions = of, (None, None, None)

    def __getitem__(self, positions):
        made = Pick(self.of)
        parts = (positions.start, positions.stop, positions.step) if isinstance(positions, slice) else (positions, positions)
        if not all(x is None or hasattr(x, "__index__") for x in parts) or (len(parts) == 2 and positions is None):
            raise TypeError(
                "`Pick` takes a position or a slice of positions, as a list does: `Pick(Block)[::2]`. "
                f"Received: {positions!r} of type {type(positions).__name__}"
            )
        if len(parts) == 3 and parts[2] == 0:
            raise ValueError(f"A slice's step cannot be 0: `Pick(Block)[::2]` takes every second. Received: {positions!r}")
        made._positions = parts
        return made

    def take(self, found):
        """Returns those of the list `found` that are at the positions."""
        if len(self._positions) == 3:
            return found[slice(*self._positions)]
        position = self._positions[0].__index__()
        return [found[position]] if -len(found) <= position < len(found) else []

    def __repr__(self):
        texts = ["" if x is None else str(x) for x in self._positions]
        end = texts[0] if len(texts) == 2 else ":".join(texts if texts[2] else texts[:2])
        of = "" if self.of is None else getattr(self.of, "__name__", None) or repr(self.of)
        return f"Pick({of})" if end == ":" else f"Pick({of})[{end}]"
