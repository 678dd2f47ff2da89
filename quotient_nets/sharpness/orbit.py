"""Sharpness along an orbit: one function, written down in many ways.

The experiment that tells a sharpness of functions from a sharpness of parameters: rewrite a model by random symmetry
elements and measure again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quotient_nets.architectures import parameter_manifold
from quotient_nets.architectures.norm_gains import norm_gains, rescale_norm_gains
from quotient_nets.manifolds import AdaptiveEuclidean
from quotient_nets.parameters import ParameterManifold, at_parameters, untouched
from quotient_nets.sharpness.model import model_sharpness

ORIGINAL, ATTENTION, NORM_GAINS = "original", "attention", "norm gains"
MEASURES: dict[str, dict[str, Any]] = {
    "adaptive": {"translations": False, "check": False},
    "geodesic, second order": {"path": "second_order", "check": False},
    "geodesic, exact": {"path": "exact", "check": False},
}


@dataclass(frozen=True)
class OrbitRow:
    """One representative of a function, with its sharpness by every measure.

    Attributes:
        symmetry: ``"original"``, ``"attention"`` (GL(h) of all heads and exact bias translations) or ``"norm gains"``.
        condition: Condition number of the group elements; 1 for the original.
        draw: Number of the random element.
        logit_change: Largest change of a logit, over the largest logit of the original.
        values: Measure -> sharpness.
        converged: Measure -> whether the search converged on every batch.
    """

    symmetry: str
    condition: float
    draw: int
    logit_change: float
    values: dict[str, float]
    converged: dict[str, bool]

    @property
    def key(self) -> tuple[str, float, int]:
        """What tells the rows of one study apart."""
        return self.symmetry, self.condition, self.draw

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def orbit_points(
    model: nn.Module, space: ParameterManifold, conditions: Sequence[float], draws: int, seed: int = 0
) -> Iterator[tuple[tuple[str, float, int], Tensor]]:
    """Representatives of a model's function: itself, moved by its symmetries, and with its norm gains rescaled.

    Args:
        model: The model.
        space: Its parameter manifold.
        conditions: Condition numbers of the group elements.
        draws: Random elements for each of them.
        seed: Of the elements.

    Yields:
        Symmetry, condition and draw; and the point.
    """
    x = space.pack(model)
    yield (ORIGINAL, 1.0, 0), x
    gains = norm_gains(model)
    for condition in conditions:
        for draw in range(draws):
            generator = torch.Generator().manual_seed(1000 * seed + draw)
            yield (ATTENTION, float(condition), draw), space.random_action(x, condition=condition, generator=generator)
    for draw in range(draws) if gains else ():
        generator = torch.Generator().manual_seed(1000 * seed + draw)
        rescaled = rescale_norm_gains(space.unpack(x), gains, condition=10.0, generator=generator)
        yield (NORM_GAINS, 10.0, draw), space.pack(rescaled)


def orbit_sharpness(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    batches: Sequence[Any],
    logits: Callable[[Any, Any], Tensor],
    *,
    rho: float,
    steps: int = 20,
    conditions: Sequence[float] = (1.0, 10.0, 100.0, 1e4),
    draws: int = 5,
    seed: int = 0,
    done: Sequence[OrbitRow] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[OrbitRow]:
    """Adaptive and geodesic sharpness of every representative of a model's function.

    Args:
        model: The model, left untouched.
        loss: As for :func:`quotient_nets.model_sharpness`.
        batches: A list of batches.
        logits: ``logits(model, batch)`` -> the outputs that are compared between representatives.
        rho: Radius of all balls.
        steps: Forward and backward passes for each batch.
        conditions: Condition numbers of the group elements of attention.
        draws: Random elements for each condition, and of norm gains where the model has that symmetry.
        seed: Of the random elements.
        done: Rows of an interrupted run; they are yielded again and not measured.
        progress: Called with the number of passes done and their total.

    Yields:
        One row for each representative, the original first.

    Raises:
        ValueError: As :func:`quotient_nets.model_sharpness` does; and where the check of the symmetries fails.
    """
    space = parameter_manifold(model)
    adaptive = parameter_manifold(model, attention=AdaptiveEuclidean)
    finished = {row.key: row for row in done}
    rows = 1 + draws * (len(conditions) + bool(norm_gains(model)))
    per_row = len(MEASURES) * len(batches) * steps
    outputs: Tensor | None = None
    for number, (key, x) in enumerate(orbit_points(model, space, conditions, draws, seed)):
        with untouched(model), torch.no_grad():
            values = space.unpack(x)
            found = [at_parameters(model, values, logits, batch) for batch in batches]
        moved = torch.cat([output.double().flatten() for output in found])
        outputs = moved if outputs is None else outputs
        if key in finished:
            yield finished[key]
            continue
        results = {}
        for measure, settings in MEASURES.items():
            own: dict[str, Any] = settings | {"check": number == 0 and measure == "geodesic, exact"}
            first = number * per_row + len(results) * len(batches) * steps
            results[measure] = model_sharpness(
                model,
                loss,
                batches,
                rho=rho,
                steps=steps,
                space=adaptive if measure == "adaptive" else space,
                x=x,
                progress=None if progress is None else _shifted(progress, first, rows * per_row),
                **own,
            )
        yield OrbitRow(
            *key,
            logit_change=float((moved - outputs).abs().max() / outputs.abs().max()),
            values={measure: result.value for measure, result in results.items()},
            converged={measure: result.converged for measure, result in results.items()},
        )


def _shifted(progress: Callable[[int, int], None], first: int, total: int) -> Callable[[int, int], None]:
    return lambda step, _: progress(first + step, total)
