"""The table that `MemoryLogger(verbose=1)` prints when training ends: predicted beside measured."""


def print_table(report):
    """Prints the report of a `MemoryLogger`."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{report['batches']} training batches")
    table.add_column("")
    table.add_column("measured", justify="right")
    table.add_column("predicted", justify="right")
    predicted = report["predicted_peak_memory_mib"]
    several = len(report["per_device"]) > 1
    for name, used in report["per_device"].items() or [("no statistics", report)]:
        fullest = not several or used["peak_memory_mib"] == report["peak_memory_mib"]
        table.add_row(f"peak memory, {name}", _mib(used["peak_memory_mib"]), _mib(predicted) if fullest else "")
        table.add_row("  of these held between batches", _mib(used["baseline_memory_mib"]), _mib(report["predicted_held_mib"]))
        table.add_row("  first batch", _mib(used["first_step_peak_memory_mib"]), "")
        if used["val_peak_memory_mib"] is not None:
            table.add_row("  validation", _mib(used["val_peak_memory_mib"]), "")
    if predicted is not None:
        table.add_row("peak memory without recompute", "", _mib(report["predicted_plain_peak_memory_mib"]))
    time = report["step_time_ms"]
    table.add_row("step time", "unknown" if time is None else f"{time:,.1f} ms", "")
    table.add_row(
        "share of the step in re-runs", _share(report["recompute_overhead"]), _share(report["predicted_recompute_overhead"])
    )
    notes = [f"Re-runs measured by: {report['recompute_overhead_source']}"]
    if report["recompute_overhead_coverage"] is not None:
        notes[0] += f", {report['recompute_overhead_coverage']:.0%} of the step covered"
    if report["recompute_overhead_note"]:
        notes[0] += f" ({report['recompute_overhead_note']})"
    if predicted is not None:
        size = report["batch_size"]
        notes.append(
            f"Predicted for batches of {report['predicted_batch_size']}"
            + (f"; those of the fit have {size}" if size not in (None, report["predicted_batch_size"]) else "")
            + f"; re-runs by {report['predicted_recompute_overhead_unit']}"
        )
    console = Console(markup=False, highlight=False)
    console.print(table)
    for note in notes:
        console.print(f"{note}.")


def _mib(value):
    return "-" if value is None else f"{value:,.1f} MiB"


def _share(value):
    return "unknown" if value is None else f"{value:.1%}"
