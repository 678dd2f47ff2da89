"""Command line: ``quotient-nets sharpness`` and ``quotient-nets inspect``."""

from __future__ import annotations

import hashlib
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
from rich.text import Text

from quotient_nets.architectures import parameter_manifold
from quotient_nets.checkpoints import Task, example_inputs, load_model, load_task
from quotient_nets.demo import load_digits_split, load_digits_vit
from quotient_nets.manifolds import FixedRank
from quotient_nets.report import print_inspection, print_sharpness, progress_bar, reporter
from quotient_nets.sharpness.orbit import OrbitRow, orbit_sharpness

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
FIGURES = (".png", ".pdf", ".svg")
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
        Console(stderr=True).print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
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
    if resume:
        _check_resume(out)
    _check_files(out, plot, resume=resume, overwrite=overwrite)
    _check_options(limit, batch_size, draws)
    task = _task(model, data, limit, batch_size)
    steps = (20 if model is None else 10) if steps is None else steps
    draws = (5 if model is None else 1) if draws is None else draws
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
        "fingerprint": _fingerprint(task),
    }
    done = _read_rows(out, settings) if resume and out is not None and out.exists() else []
    rows, started = [], time.monotonic()
    stderr = Console(stderr=True)
    with progress_bar(stderr) if stderr.is_terminal else nullcontext() as bar:
        report = None if bar is None else reporter(bar)
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
            if out is not None and len(rows) > len(done):  # before that, the file holds more than this
                _write_json(out, settings, rows)
    if plot is not None:
        from quotient_nets.figures import orbit_figure, save_figure

        save_figure(orbit_figure(rows, f"{task.name}: one function, many parameter vectors (ρ = {rho:g})"), plot)
    if as_json:
        print(json.dumps(_content(settings, rows), indent=1))
    else:
        print_sharpness(settings, rows, time.monotonic() - started)


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
    else:
        print_inspection(content, str(space.rest.name))


def _check_files(out: Path | None, plot: Path | None, *, resume: bool, overwrite: bool) -> None:
    """Refuse output files before anything is measured.

    Raises:
        FileExistsError: A file exists that is neither to be replaced nor resumed.
        FileNotFoundError: The folder of a file does not exist.
        IsADirectoryError: A file is a folder.
        ValueError: The ending of the figure is not one that can be drawn.
    """
    if plot is not None and (plot.suffix not in FIGURES or plot == out):
        raise ValueError(f"expected --plot to end in one of {', '.join(FIGURES)} and to differ from --out, got {plot}")
    for path in (out, plot):
        if path is not None and path.is_dir():
            raise IsADirectoryError(f"{path} is a folder; name a file")
        if path is not None and path.exists() and not overwrite and not (resume and path == out):
            raise FileExistsError(
                f"{path} exists; pass --overwrite to replace it" + (", or --resume" if path == out else "")
            )
        if path is not None and not path.resolve().parent.is_dir():
            raise FileNotFoundError(f"the folder of {path} does not exist")


def _check_resume(out: Path | None) -> None:
    if out is None:
        raise ValueError("--resume continues the run that wrote --out; name that file with --out")


def _check_options(limit: int, batch_size: int, draws: int | None) -> None:
    if min(limit, batch_size) < 1 or (draws is not None and draws < 1):
        raise ValueError(f"expected positive --limit, --batch-size and --draws, got {limit}, {batch_size}, {draws}")


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


def _content(settings: dict[str, Any], rows: Sequence[OrbitRow]) -> dict[str, Any]:
    return {"settings": settings, "rows": [row.to_dict() for row in rows]}


def _write_json(path: Path, settings: dict[str, Any], rows: Sequence[OrbitRow]) -> None:
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(json.dumps(_content(settings, rows), indent=1) + "\n")
    draft.replace(path)


def _read_rows(path: Path, settings: dict[str, Any]) -> list[OrbitRow]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        before, rows = content["settings"], [OrbitRow(**row) for row in content["rows"]]
        other = {name for name, value in settings.items() if before.get(name) != value}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is no result of `quotient-nets sharpness --out`; use --overwrite ({error})"
        ) from error
    if other:
        raise ValueError(f"{path} was written with other settings ({', '.join(sorted(other))}); use --overwrite")
    return rows


def _fingerprint(task: Task) -> str:
    """Of the model's parameters and of all batches, so that a run is resumed on nothing else."""
    digest = hashlib.sha256()
    for tensor in [*task.model.parameters(), *(t for batch in task.batches for t in batch.values())]:
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
