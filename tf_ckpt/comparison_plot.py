"""The figure of a comparison: peak memory against step time, predicted beside measured."""

import itertools

from tf_ckpt.plan_plot import save
from tf_ckpt.trainee import OUT_OF_MEMORY

_MARKERS = "sDo^vP*X<>ph"


def draw(comparison, path):
    """Draws a comparison into a file: see `Comparison.plot`."""
    save(path, lambda: figure(comparison))


def figure(comparison):
    """Returns the `matplotlib.figure.Figure` of a `Comparison`. It belongs to no window, and pyplot does not know it.

    A contestant has a marker of its own: filled where memory was measured, hollow where it was predicted, so that it can be
    read without colours. Who ran out of memory is named in the legend only: it has no step time.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('`Comparison.plot` draws with matplotlib: pip install "tf_ckpt[plot]"') from error

    made = Figure(figsize=(7.5, 5.2 + 0.12 * len(comparison.rows)), dpi=120, layout="constrained")
    axes = made.add_subplot()
    for row, marker in zip(comparison.rows, itertools.cycle(_MARKERS)):
        shape = {"marker": marker, "markersize": 9, "linestyle": "none", "markeredgecolor": "black"}
        if row.status == OUT_OF_MEMORY:
            label = f"{row.strategy}: {row.status}, {row.predicted_peak_mib:,.0f} MiB predicted"
            axes.plot([], [], label=label, markerfacecolor="white", **shape)
            continue
        label = f"{row.strategy}: {row.step_time_ms:,.1f} ms, "
        label += "memory not measured" if row.peak_mib is None else f"{row.peak_mib:,.1f} MiB"
        peaks = [row.predicted_peak_mib] if row.peak_mib is None else [row.predicted_peak_mib, row.peak_mib]
        axes.plot([row.step_time_ms] * len(peaks), peaks, color="0.6", linewidth=1, zorder=1)
        axes.plot(row.step_time_ms, row.predicted_peak_mib, markerfacecolor="white", zorder=2, **shape)
        if row.peak_mib is None:
            axes.plot([], [], label=label, markerfacecolor="white", **shape)
        else:
            axes.plot(row.step_time_ms, row.peak_mib, markerfacecolor="0.25", label=label, zorder=3, **shape)
    times = [row.step_time_ms or 0 for row in comparison.rows]
    axes.set_xlim(0, 1.12 * max(times) or 1)
    axes.set_ylim(0, 1.12 * axes.get_ylim()[1])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,g}")
    axes.set_xlabel("Time of a step (ms, median)")
    axes.set_ylabel("Peak memory (MiB)")
    title = f"Peak memory against step time, batch size {comparison.batch_size}\nfilled: measured, hollow: predicted"
    axes.set_title(title, fontsize="medium", parse_math=False)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    legend = made.legend(
        loc="outside lower center", fontsize="small", frameon=False, ncols=1 if len(comparison.rows) < 4 else 2
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    return made
