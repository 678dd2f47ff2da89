r"""Adaptive worst-case sharpness as tml-epfl/sharpness-vs-generalization measures it, written anew.

The search of Andriushchenko et al. (2023), `eval_APGD_sharpness` with `adaptive=True` and `m_apgd_l2`, in the order of
its steps and with its peculiarities, which are the point of the comparison:

- the step follows ``gradient |w|``, scaled by the plain norm of the gradient, not the steepest ``gradient w^2``;
- momentum mixes with an earlier iterate and does not extrapolate;
- after a reduction of the step size the model returns to the best weights, the perturbation does not;
- the projection is the Euclidean one on the ellipsoid, by bisection;
- every iteration takes two forward passes and one backward pass.

Weights are one flat vector. A weight that is exactly zero makes every norm NaN there; here as in the original.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MOMENTUM = 0.75
MIN_UPDATE_RATIO = 0.75
TOLERANCE = 1e-5  # of the projection's norm


@dataclass(frozen=True)
class EpflSharpness:
    """Largest increase found, its perturbation, and what it cost."""

    value: float
    delta: Tensor
    forwards: int
    backwards: int


def checkpoints(iterations: int) -> list[int]:
    """Iterations at which the step size is reconsidered: 5, 9, 12, 15, 16, 18, 19, 20 of 20."""
    shares = [0.0, 0.22]
    while shares[-1] < 1:
        shares.append(shares[-1] + max(shares[-1] - shares[-2] - 0.03, 0.06))
    return sorted({math.ceil(share * iterations) for share in shares[1:] if share <= 1})


def project(delta: Tensor, weights: Tensor, rho: float) -> Tensor:
    r"""Nearest point of the ellipsoid :math:`|\delta / |w|\,|_2 \le \rho`."""

    def norm(multiplier: float) -> float:
        return float((shrunk(multiplier) / weights).norm())

    def shrunk(multiplier: float) -> Tensor:
        return delta / (1 + 2 * multiplier / weights.square())

    if not norm(0.0) > rho:  # NaN is not, and so escapes
        return delta
    low, high, multiplier = 0.0, 10.0, 0.1
    while norm(high) > rho:
        high *= 2
    for _ in range(200):
        size = norm(multiplier)
        if abs(size - rho) <= TOLERANCE:
            break
        low, high = (multiplier, high) if size > rho else (low, multiplier)
        multiplier = (low + high) / 2
    return shrunk(multiplier)


def epfl_adaptive_sharpness(
    loss: Callable[[Tensor], Tensor], weights: Tensor, rho: float, iterations: int = 20, *, mix_with_last: bool = False
) -> EpflSharpness:
    """Largest increase of ``loss`` with ``|delta / |weights||_2 <= rho``, from a zero start.

    Args:
        loss: Of all weights.
        weights: Centre of the ball.
        rho: Its radius.
        iterations: Each of two forward passes and one backward pass.
        mix_with_last: Momentum mixes with the last iterate, or with the one before it. The original can be read both
            ways; neither search is the stronger one at every radius.
    """
    weights = weights.detach()
    calls = {"forward": 1, "backward": 0}
    with torch.no_grad():
        base = float(loss(weights))
    at = list(checkpoints(iterations))
    step, step_before, last = 2 * rho, 2 * rho, 0
    delta = before = best = torch.zeros_like(weights)
    model = weights  # where the next gradient is taken
    best_value = best_before = base
    improvements = 0
    for iteration in range(1, iterations + 1):
        point = model.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(point), point)
        z = project(delta + step * gradient * weights.abs() / gradient.norm(), weights, rho)
        share = MOMENTUM if iteration > 1 else 1.0
        delta, before = share * z + (1 - share) * (delta if mix_with_last else before), delta
        model = weights + delta
        with torch.no_grad():
            value = float(loss(model))
        calls["forward"] += 2
        calls["backward"] += 1
        if value > best_value:
            best, best_value = delta, value
            improvements += 1
        if iteration in at:
            few = improvements < MIN_UPDATE_RATIO * (iteration - last)
            stuck = step == step_before and best_value == best_before
            step_before, best_before = step, best_value
            if few or stuck:
                step /= 2
                model = weights + best
            last, improvements = iteration, 0
    return EpflSharpness(best_value - base, best, calls["forward"], calls["backward"])
