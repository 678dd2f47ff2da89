"""Figures: what a study found, drawn for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from quotient_nets.sharpness.orbit import ATTENTION, MEASURES, NORM_GAINS, ORIGINAL, OrbitRow

COLOURS = {"adaptive": "#c44e52", "geodesic, second order": "#8c8cd9", "geodesic, exact": "#1f5aa6"}
MARKERS = {"adaptive": "o", "geodesic, second order": "s", "geodesic, exact": "D"}
SPREAD = {"adaptive": -0.16, "geodesic, second order": 0.0, "geodesic, exact": 0.16}


def orbit_figure(rows: Sequence[OrbitRow], title: str) -> Figure:
    """Sharpness of every representative over that of the original, on a logarithmic scale.

    Args:
        rows: From :func:`quotient_nets.sharpness.orbit.orbit_sharpness`, the original first.
        title: What was measured.
    """
    original = next(row for row in rows if row.symmetry == ORIGINAL)
    places = list(dict.fromkeys((row.symmetry, row.condition) for row in rows if row.symmetry != ORIGINAL))
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    for measure in MEASURES:
        points = [
            (
                places.index((row.symmetry, row.condition)) + SPREAD[measure],
                row.values[measure] / original.values[measure],
            )
            for row in rows
            if row.symmetry != ORIGINAL
        ]
        axes.plot(
            *zip(*points, strict=True),
            linestyle="none",
            marker=MARKERS[measure],
            markersize=6,
            alpha=0.75,
            color=COLOURS[measure],
            label=measure,
        )
    axes.axhline(1.0, color="0.5", linewidth=0.8, zorder=0)
    axes.set_yscale("log")
    axes.set_xticks(range(len(places)), [_label(*place) for place in places])
    axes.set_ylabel("sharpness, ratio to the original")
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the file's ending."""
    with matplotlib.rc_context({"savefig.dpi": 160}):
        figure.savefig(path)


def _label(symmetry: str, condition: float) -> str:
    exact = f"{condition:g}" if condition < 1e4 else f"1e{len(f'{condition:.0f}') - 1}"
    names = {ATTENTION: f"attention\ncondition {exact}", NORM_GAINS: f"norm gains\nratio {exact}"}
    return names[symmetry]
