"""Command line: ``quotient-nets sharpness`` and ``quotient-nets inspect``."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from quotient_nets.architectures import parameter_manifold
from quotient_nets.checkpoints import Task, example_inputs, load_model, load_task
from quotient_nets.demo import load_digits_split, load_digits_vit
from quotient_nets.manifolds import FixedRank
from quotient_nets.sharpness.orbit import ATTENTION, MEASURES, NORM_GAINS, ORIGINAL, OrbitRow, orbit_sharpness

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
CONDITIONS = (1.0, 10.0, 100.0, 1e4)
EMBEDDED = "embedded digits ViT"
Model = Annotated[
    Path | None,
    typer.Argument(
        help="Local Hugging Face directory. Default: a small ViT trained on scikit-learn digits.", show_default=False
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(help="Text file with `label<TAB>text` lines, or .npz with `images` (N, C, H, W) and `labels` (N,)."),
]


def main() -> None:
    """Entry point: errors a user can mend are one line on standard error, exit code 1."""
    try:
        app()
    except (ValueError, OSError, ImportError) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(1)


@app.callback()
def commands() -> None:
    """Geometry of neural-network parameter spaces."""


@app.command()
def sharpness(
    model: Model = None,
    data: Data = None,
    rho: Annotated[float, typer.Option(help="Radius of the ball, in units of the metric.")] = 0.1,
    steps: Annotated[
        int | None, typer.Option(help="Passes for each batch. Default: 20 embedded, 10 otherwise.")
    ] = None,
    draws: Annotated[
        int | None, typer.Option(help="Random elements for each condition. Default: 5 embedded, 1 otherwise.")
    ] = None,
    limit: Annotated[int, typer.Option(help="Number of examples.")] = 256,
    batch_size: Annotated[int, typer.Option(help="Examples in a batch; the maximum is taken for each batch.")] = 128,
    seed: Annotated[int, typer.Option(help="Of the random symmetry elements.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write rows and settings as JSON, after every row.")] = None,
    resume: Annotated[bool, typer.Option(help="Continue the run that wrote --out.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace existing output files.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the ratios to this file (.png, .pdf, .svg).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of the table.")] = False,
) -> None:
    """Adaptive and geodesic sharpness of a model, before and after its weights are rewritten by symmetries."""
    for path in (out, plot):
        if path is not None and path.exists() and not overwrite and not (resume and path == out):
            raise FileExistsError(
                f"{path} exists; pass --overwrite to replace it" + (", or --resume" if path == out else "")
            )
        if path is not None and not path.resolve().parent.is_dir():
            raise FileNotFoundError(f"the folder of {path} does not exist")
    if min(limit, batch_size) < 1 or (draws is not None and draws < 1):
        raise ValueError(f"expected positive --limit, --batch-size and --draws, got {limit}, {batch_size}, {draws}")
    task = _task(model, data, limit, batch_size)
    steps = steps or (20 if model is None else 10)
    draws = draws or (5 if model is None else 1)
    settings = {
        "model": task.name,
        "data": EMBEDDED if data is None else data.name,
        "logits": task.description,
        "examples": sum(len(batch["labels"]) for batch in task.batches),
        "batch_size": batch_size,
        "rho": rho,
        "steps": steps,
        "draws": draws,
        "seed": seed,
    }
    done = _read_rows(out, settings) if resume and out is not None and out.exists() else []
    rows, started = [], time.monotonic()
    stderr = Console(stderr=True)
    with _progress(stderr) if stderr.is_terminal else nullcontext() as bar:
        report = None if bar is None else _reporter(bar)
        found = orbit_sharpness(
            task.model,
            task.loss,
            task.batches,
            task.logits,
            rho=rho,
            steps=steps,
            conditions=CONDITIONS,
            draws=draws,
            seed=seed,
            done=done,
            progress=report,
        )
        for row in found:
            rows.append(row)
            if out is not None:
                _write_json(out, settings, rows)
    if plot is not None:
        from quotient_nets.figures import orbit_figure, save_figure

        save_figure(orbit_figure(rows, f"{task.name}: one function, many parameter vectors (ρ = {rho:g})"), plot)
    if as_json:
        print(json.dumps(_content(settings, rows), indent=1))
    else:
        _print_table(task, settings, rows, time.monotonic() - started)


@app.command()
def inspect(
    model: Model = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of the table.")] = False,
) -> None:
    """Blocks, groups and dimensions that are divided out of a model, and the proof that they are symmetries."""
    if model is None:
        network, inputs, name = load_digits_vit(), {"images": load_digits_split().train_images[:8]}, EMBEDDED
    else:
        network = load_model(model)
        inputs, name = example_inputs(network), model.name
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        space = parameter_manifold(network, degenerate="rest")
    x = space.pack(network)
    report = space.check(network, **inputs)
    removed = sum(block.dimensions_removed for block in space.blocks)
    blocks = []
    for block, part in zip(space.blocks, space.layout.gather(x), strict=False):
        assert isinstance(block.manifold, FixedRank)
        s = block.manifold.frame(part.double()).spectrum
        heads, _, rank = block.shape
        blocks.append(
            {
                "kind": block.kind,
                "heads": heads,
                "group": f"GL({rank})",
                "G": f"{block.component.n} x {rank}",
                "H": f"{block.component.m} x {rank}",
                "translations": sum(r.count for r in block.component.heads if r.pair.translation is not None) * rank,
                "dimensions_removed": block.dimensions_removed,
                "largest_condition": float((s[:, 0] / s[:, -1]).max()),
            }
        )
    content = {
        "model": name,
        "parameters": space.layout.size,
        "dimensions_removed": removed,
        "blocks": blocks,
        "rest": space.layout.rest_size,
        "notes": [*space.notes, *(str(warning.message) for warning in caught)],
        "check": {
            "change": report.change,
            "tolerance": report.tolerance,
            "dtype": str(report.dtype),
            "controls": dict(report.controls),
            "not_verifiable": list(report.unverified),
        },
    }
    if as_json:
        print(json.dumps(content, indent=1))
        return
    console = _wide_console()
    table = Table(title=f"{name}: {space.layout.size:,} parameters, {removed:,} dimensions divided out")
    for heading in ("block", "heads", "group", "G", "H", "translations", "removed", "largest condition"):
        table.add_column(heading, justify="left" if heading == "block" else "right")
    for block in blocks:
        *cells, condition = block.values()
        table.add_row(*(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in cells), f"{condition:.3g}")
    console.print(table)
    console.print(f"rest: {space.layout.rest_size:,} parameters, {space.rest.name} metric")
    for note in content["notes"]:
        console.print(f"note: {note}", highlight=False)
    console.print(
        f"self-check in {report.dtype}: outputs change by {report.change:.1e} of their size under random elements of "
        f"condition 10 on every head (tolerance {report.tolerance:.0e}); moving one factor only: "
        + ", ".join(f"{kind} {change:.1e}" for kind, change in report.controls.items()),
        highlight=False,
    )
    if report.unverified:
        console.print(f"not verifiable on these inputs: {', '.join(report.unverified)}", highlight=False)


def _task(model: Path | None, data: Path | None, limit: int, batch_size: int) -> Task:
    if model is not None:
        if data is None:
            raise ValueError(
                "a model directory needs --data: a text file with `label<TAB>text` lines, or an .npz of images"
            )
        return load_task(model, data, limit=limit, batch_size=batch_size)
    if data is not None:
        raise ValueError("--data belongs to a model directory; the embedded model has its own data")
    split = load_digits_split()
    images, labels = split.train_images[:limit], split.train_labels[:limit]
    batches = tuple(
        {"images": images[i : i + batch_size], "labels": labels[i : i + batch_size]}
        for i in range(0, len(labels), batch_size)
    )
    return Task(EMBEDDED, load_digits_vit(), batches, _digit_logits, "classification head with 10 classes")


def _digit_logits(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["images"])


def _progress(console: Console) -> Progress:
    columns = (TextColumn("forward and backward passes"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True)


def _reporter(bar: Progress) -> Any:
    line = bar.add_task("sharpness", total=None)
    return lambda done, total: bar.update(line, completed=done, total=total)


def _content(settings: dict[str, Any], rows: Sequence[OrbitRow]) -> dict[str, Any]:
    return {"settings": settings, "rows": [row.to_dict() for row in rows]}


def _write_json(path: Path, settings: dict[str, Any], rows: Sequence[OrbitRow]) -> None:
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(json.dumps(_content(settings, rows), indent=1) + "\n")
    draft.replace(path)


def _read_rows(path: Path, settings: dict[str, Any]) -> list[OrbitRow]:
    content = json.loads(path.read_text())
    other = {name for name, value in settings.items() if content["settings"].get(name) != value}
    if other:
        raise ValueError(f"{path} was written with other settings ({', '.join(sorted(other))}); use --overwrite")
    return [OrbitRow(**row) for row in content["rows"]]


def _print_table(task: Task, settings: dict[str, Any], rows: Sequence[OrbitRow], seconds: float) -> None:
    console = _wide_console()
    original = rows[0]
    table = Table(title=f"{task.name}: sharpness of one function, written in many ways (ρ = {settings['rho']:g})")
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
        f"median over {settings['draws']} random elements × ratio to the original, smallest to largest; logits: largest "
        f"change over the largest logit; "
        f"{settings['examples']} examples in batches of {settings['batch_size']}, {settings['steps']} steps, "
        f"{task.description}; {seconds:.0f} s. *: search not converged, the value is a lower bound. Geodesic sharpness "
        "divides out GL(h) of every head and exact bias translations. It does not divide out norm gains.",
        highlight=False,
    )


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
