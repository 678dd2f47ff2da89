"""What the command line shows on a terminal: tables of results and a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from quotient_nets.sharpness.orbit import ATTENTION, MEASURES, NORM_GAINS, ORIGINAL, OrbitRow


def print_inspection(content: Mapping[str, Any], rest: str) -> None:
    """Table of the blocks of a model, and the figures of the self-check below it.

    Args:
        content: What ``inspect --json`` prints.
        rest: Name of the metric on the parameters outside blocks.
    """
    console, check = _wide_console(), content["check"]
    parameters, removed = content["parameters"], content["dimensions_removed"]
    table = Table(title=f"{content['model']}: {parameters:,} parameters, {removed:,} dimensions divided out")
    for heading in ("block", "heads", "group", "G", "H", "translations", "removed", "largest condition"):
        table.add_column(heading, justify="left" if heading == "block" else "right")
    for block in content["blocks"]:
        *cells, condition = block.values()
        table.add_row(*(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in cells), f"{condition:.3g}")
    console.print(table)
    console.print(f"rest: {content['rest']:,} parameters, {rest} metric")
    for note in content["notes"]:
        console.print(f"note: {note}", highlight=False, markup=False)
    console.print(
        f"self-check in {check['dtype']}: outputs change by {check['change']:.1e} of their size under random elements "
        f"of condition 10 on every head (tolerance {check['tolerance']:.0e}); moving one factor only: "
        + ", ".join(f"{kind} {change:.1e}" for kind, change in check["controls"].items()),
        highlight=False,
    )
    if check["not_verifiable"]:
        console.print(
            f"not verifiable on these inputs, which move too little even without the symmetry (100 tolerances are "
            f"needed): {', '.join(check['not_verifiable'])}. Trained weights or other inputs show more.",
            highlight=False,
        )


def print_sharpness(settings: Mapping[str, Any], rows: Sequence[OrbitRow], seconds: float) -> None:
    """Table of one study: every measure on every representative, and its ratio to the original.

    Args:
        settings: What was measured, as it is written to files.
        rows: The original and, after it, the other representatives.
        seconds: Duration of the run.
    """
    console = _wide_console()
    original = rows[0]
    model, rho = settings["model"], settings["rho"]
    table = Table(title=f"{model}: sharpness of one function, written in many ways (ρ = {rho:g})")
    table.add_column("rewritten by")
    for measure in MEASURES:
        table.add_column(f"{measure} × ratio", justify="right")
    table.add_column("logits", justify="right")
    for symmetry, condition in dict.fromkeys((row.symmetry, row.condition) for row in rows):
        group = [row for row in rows if (row.symmetry, row.condition) == (symmetry, condition)]
        cells = []
        for measure in MEASURES:
            values = sorted(row.values[measure] for row in group)
            star = "" if all(row.converged[measure] for row in group) else "*"
            low, high = values[0] / original.values[measure], values[-1] / original.values[measure]
            ratio = "" if symmetry == ORIGINAL else f" × {_range(low, high)}"
            cells.append(f"{values[len(values) // 2]:.4g}{star}{ratio}")
        changes = max(row.logit_change for row in group)
        table.add_row(_name(symmetry, condition), *cells, f"{changes:.1e}" if symmetry != ORIGINAL else "")
    console.print(table)
    if not any(row.symmetry == NORM_GAINS for row in rows):
        console.print("norm gains: no pre-norm layer is declared for this model, so this symmetry is not exact here")
    console.print(
        f"median over {settings['draws']} random elements × ratio to the original, smallest to largest; logits: "
        "largest change over the largest logit; "
        f"{settings['examples']} examples in batches of {settings['batch_size']}, {settings['steps']} steps, "
        f"{settings['logits']}; {seconds:.0f} s. *: search not converged, the value is a lower bound. Geodesic "
        "sharpness divides out GL(h) of every head and exact bias translations. It does not divide out norm gains.",
        highlight=False,
    )


def progress_bar(console: Console) -> Progress:
    """A bar that counts passes and is gone when they are done."""
    columns = (TextColumn("forward and backward passes"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True)


def reporter(bar: Progress) -> Callable[[int, int], None]:
    """What a measurement calls with the number of passes done and their total."""
    line = bar.add_task("sharpness", total=None)
    return lambda done, total: bar.update(line, completed=done, total=total)


def _range(low: float, high: float) -> str:
    short, long = (f"{ratio:.4f}" if ratio < 10 else f"{ratio:.0f}" for ratio in (low, high))
    return short if short == long else f"{short}–{long}"


def _name(symmetry: str, condition: float) -> str:
    if symmetry == ORIGINAL:
        return "nothing"
    return f"attention, {condition:g}" if symmetry == ATTENTION else f"norm gains, {condition:g}"


def _wide_console() -> Console:
    """A console as wide as the tables need where no terminal says how wide it is."""
    console = Console()
    return console if console.is_terminal else Console(width=120)
