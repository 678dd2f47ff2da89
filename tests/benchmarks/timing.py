"""Process times of alternatives, measured in turn in one run, on one thread.

What runs beside a benchmark slows all alternatives alike, so only their ratios are reported with confidence.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch


def side_by_side(alternatives: Mapping[str, Callable[[], Any]], repeats: int = 9) -> dict[str, float]:
    """Median process time of each alternative in seconds, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in alternatives}
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats + 1):
            for name, run in alternatives.items():
                began = time.process_time()
                run()
                times[name].append(time.process_time() - began)
    finally:
        gc.enable()
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}


def table(title: str, rows: Mapping[str, Mapping[str, float | str]]) -> str:
    """Rows of named figures as text."""
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    lines = [f"\n{title}  [torch {torch.__version__}, {torch.get_num_threads()} thread, process time]"]
    width = max(map(len, rows))
    widths = [max(len(name), 10) for name in columns]
    lines.append(" " * width + "".join(f"  {name:>{w}}" for name, w in zip(columns, widths, strict=True)))
    for name, row in rows.items():
        cells = [row.get(column, "") for column in columns]
        shown = [cell if isinstance(cell, str) else f"{cell:.3g}" for cell in cells]
        lines.append(f"{name:<{width}}" + "".join(f"  {cell:>{w}}" for cell, w in zip(shown, widths, strict=True)))
    return "\n".join(lines)
