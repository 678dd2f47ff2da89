r"""Batches of ordinary differential equations, each element with steps of its own.

The method of order 8 of Dormand and Prince with the coefficients and the error estimate of SciPy's ``DOP853``.
Imports: numpy, scipy, torch. Knows no manifold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.integrate import DOP853
from torch import Tensor

FIRST_STEP = 1.0  # short geodesics need no other; a step too long costs one
SHRINK, GROW, SAFETY = 0.2, 6.0, 0.9
LEAST_STEP = 1e-8  # a solution that needs less is about to end
MAX_STEPS = 400  # an element that is not at time 1 by then is at a singularity
STAGES = int(DOP853.n_stages)


def integrate(rate: Callable[[Tensor], Tensor], y: Tensor, *, tolerance: float) -> Tensor:
    r"""Solution at time 1 of :math:`\dot y = f(y)` from ``y`` at time 0.

    Args:
        rate: The right side ``f``, ``(batch, k, ...) -> (batch, k, ...)``, element by element.
        y: Initial values, in float64.
        tolerance: Bound on the error of one step, relative to the larger of 1 and the size of an entry.

    Returns:
        Final values; NaN for an element whose solution ends before time 1: its steps fall below 1e-8 or exceed 400.
        Differentiable; steps are chosen by values only.

    Cost: 12 evaluations of ``f`` for each step of the element that needs most.
    """
    column = (-1,) + (1,) * (y.dim() - 1)
    time = y.new_zeros(len(y))
    step = torch.full_like(time, FIRST_STEP)
    stages = [_Weights.of(row, y) for row in DOP853.A[1:STAGES]]
    last, *errors = (_Weights.of(row, y) for row in (DOP853.B, DOP853.E5, DOP853.E3))
    first, running = rate(y), torch.ones_like(time, dtype=torch.bool)
    for _ in range(MAX_STEPS):
        step = torch.where(running, torch.minimum(step, 1 - time), 0.0)
        slopes = [first]
        for weights in stages:
            slopes.append(rate(y + weights.combine(slopes, step)))
        ahead = y + last.combine(slopes, step)
        slopes.append(rate(ahead))
        error = _error(y, ahead, slopes, errors, step, tolerance)
        accepted = (error <= 1) & running
        time = torch.where(accepted, time + step, time)
        # The last step is exactly what is missing: rounding must not leave a rest of 1e-17.
        finished = accepted & (time >= 1 - 1e-15)
        choose = accepted.reshape(column)
        y, first = torch.where(choose, ahead, y), torch.where(choose, slopes[-1], first)
        factor = (SAFETY * error.clamp_min(1e-30) ** (-1 / 8)).clamp(SHRINK, GROW).nan_to_num(SHRINK)
        step = torch.where(running, step * factor, step)
        running = running & ~finished & (step > LEAST_STEP)
        if not bool(running.any()):
            break
    return torch.where((time >= 1 - 1e-15).reshape(column), y, math.nan)


class _Weights(NamedTuple):
    """A row of the tableau without its zeros; on the device once, not once for each stage."""

    stages: list[int]
    values: Tensor

    @classmethod
    def of(cls, row: ArrayLike, like: Tensor) -> _Weights:
        weights = {i: float(weight) for i, weight in enumerate(np.asarray(row)) if weight}
        return cls(list(weights), torch.tensor(list(weights.values()), dtype=like.dtype).to(like.device).unsqueeze(-1))

    def combine(self, slopes: list[Tensor], step: Tensor) -> Tensor:
        """``step`` times the weighted sum of the slopes."""
        # One contraction: under forward derivatives a product with a python number takes five times one without
        # (torch 2.13).
        return torch.einsum("kb...,kb->b...", torch.stack([slopes[i] for i in self.stages]), self.values * step)


def _error(
    y: Tensor, ahead: Tensor, slopes: list[Tensor], weights: Sequence[_Weights], step: Tensor, tolerance: float
) -> Tensor:
    """Estimated error of a step in units of what is allowed, for each element; infinite where there is none."""
    # Detached, not under `no_grad`, which leaves forward derivatives in place.
    y, ahead, *slopes = (t.detach() for t in (y, ahead, *slopes))
    scale = tolerance * torch.maximum(y.abs(), ahead.abs()).clamp_min(1.0)
    fifth, third = ((e.combine(slopes, step) / scale).flatten(1).square().mean(-1) for e in weights)
    size = fifth + 0.01 * third
    return torch.where(size > 0, fifth / torch.where(size > 0, size, 1.0).sqrt(), size).nan_to_num(math.inf)
