r"""Nonlinear least squares for a batch of small problems: the method of Levenberg and Marquardt.

Imports: torch. Knows no manifold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

DENSE = 4096  # unknowns up to which the Jacobian is formed; beyond, conjugate gradients
FIRST_DAMPING, LEAST_DAMPING, MOST_DAMPING = 1e-2, 1e-14, 1e3  # at the last an element is given up
PROGRESS, PATIENCE = 0.01, 6  # ... and after so many steps in a row that gain less
STEP = 3e-5  # of central differences: their error is then some 1e-9 where the residual is exact to 1e-13
CG_ITERATIONS, CG_TOLERANCE = 60, 1e-3

Residual = Callable[[Tensor], Tensor]
"""A function ``(..., batch, unknowns) -> (..., batch, equations)``, element by element, over any leading axes."""


Derivative = Callable[[Residual, Tensor], Tensor]
"""The Jacobian of a residual: ``(batch, equations, unknowns)``."""


class Solution(NamedTuple):
    """Where the method stopped: unknowns ``(batch, unknowns)``, and the norm of the residual there, ``(batch,)``."""

    z: Tensor
    residual: Tensor


def differences(residual: Residual, z: Tensor) -> Tensor:
    """Derivative at ``z`` by central differences in all directions at once.

    For what is integrated in many small operations: forward differentiation takes eight times as long there.
    """
    basis = STEP * torch.eye(z.shape[-1], dtype=z.dtype, device=z.device)
    moved = z + torch.stack([basis, -basis]).unsqueeze(2)
    ahead, behind = residual(moved).unbind()
    return ((ahead - behind) / (2 * STEP)).permute(1, 2, 0)


def jacobian(residual: Residual, z: Tensor) -> Tensor:
    """Derivative at ``z`` by forward differentiation in all directions at once."""
    basis = _directions(z).contiguous()
    return torch.func.jvp(residual, (z.expand_as(basis).contiguous(),), (basis,))[1].permute(1, 2, 0)


def mapped_jacobian(residual: Residual, z: Tensor) -> Tensor:
    """As :func:`jacobian` by ``torch.vmap``: computes the value once, but knows no loop whose end depends on it."""
    return torch.vmap(lambda e: torch.func.jvp(residual, (z,), (e,))[1])(_directions(z)).permute(1, 2, 0)


def _directions(z: Tensor) -> Tensor:
    return torch.eye(z.shape[-1], dtype=z.dtype, device=z.device).unsqueeze(1).expand(-1, *z.shape)


def levenberg_marquardt(
    residual: Residual,
    z: Tensor,
    *,
    iterations: int,
    tolerance: float = 0.0,
    derivative: Derivative = jacobian,
    select: Callable[[Tensor], Residual] | None = None,
) -> Solution:
    """Least squares from ``z`` on, with one damping for each element of the batch.

    Args:
        residual: The function whose square is to be least. A step to where it is NaN is refused.
        z: First guess, ``(batch, unknowns)``; one where the residual is NaN stays.
        iterations: How many steps to try at most. An element that gains less than 1 % six times in a row is given up.
        tolerance: Norm of the residual at which an element is done.
        derivative: How the Jacobian is computed.
        select: From indices of elements to the residual of these alone, so that those that are done cost nothing.

    Cost: up to 4096 unknowns one Jacobian for each step that gained, and one solution of the normal equations for each
    step, else up to 60 products with the Jacobian and its transpose.
    """
    f = residual(z)
    norm = torch.linalg.vector_norm(f, dim=-1)
    damping = torch.full_like(norm, FIRST_DAMPING)
    stalled = torch.zeros_like(norm, dtype=torch.long)
    everything = torch.arange(len(z), device=z.device)
    step = _DenseStep(derivative, z, f) if z.shape[-1] <= DENSE else _iterative_step
    for _ in range(iterations):
        index = ((norm > tolerance) & (damping < MOST_DAMPING) & (stalled < PATIENCE)).nonzero().squeeze(-1)
        if not len(index):
            break
        part = residual
        if select is None:
            index = everything
        else:
            part = select(index)
        old, size, damp = z[index], norm[index], damping[index]
        # In proportion to the residual, damping spoils no quadratic convergence.
        ahead = old + step(part, index, old, f[index], damp * size.clamp_max(1.0))
        f_ahead = part(ahead)
        size_ahead = torch.linalg.vector_norm(f_ahead, dim=-1)
        better = size_ahead < size
        gained = size_ahead < (1 - PROGRESS) * size
        moved = index[better]
        z, f = z.index_copy(0, moved, ahead[better]), f.index_copy(0, moved, f_ahead[better])
        norm = norm.index_copy(0, moved, size_ahead[better])
        damp = torch.where(better, damp / 5, damp * 4).clamp(LEAST_DAMPING, MOST_DAMPING)
        damping = damping.index_copy(0, index, damp)
        stalled = stalled.index_copy(0, index, torch.where(gained, 0, stalled[index] + 1))
        if isinstance(step, _DenseStep):
            step.outdated[moved] = True
    return Solution(z, norm)


class _DenseStep:
    """Damped steps by the normal equations; an element that did not move keeps its Jacobian."""

    def __init__(self, derivative: Derivative, z: Tensor, f: Tensor):
        self.derivative = derivative
        self.jacobians = f.new_zeros(*f.shape, z.shape[-1])
        self.outdated = torch.ones(len(z), dtype=torch.bool, device=z.device)

    def __call__(self, residual: Residual, index: Tensor, z: Tensor, f: Tensor, damping: Tensor) -> Tensor:
        if bool(self.outdated[index].any()):
            self.jacobians = self.jacobians.index_copy(0, index, self.derivative(residual, z).nan_to_num())
            self.outdated[index] = False
        j = self.jacobians[index]
        eye = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device)
        normal = j.mT @ j + damping[:, None, None] * eye
        return -torch.linalg.solve_ex(normal, j.mT @ f.unsqueeze(-1))[0].squeeze(-1)


def _iterative_step(residual: Residual, index: Tensor, z: Tensor, f: Tensor, damping: Tensor) -> Tensor:
    """The same step by conjugate gradients, to three digits."""
    pull = torch.func.vjp(residual, z)[1]
    step, rest = torch.zeros_like(z), -pull(f)[0]
    direction, square = rest, rest.square().sum(-1, keepdim=True)
    target = CG_TOLERANCE**2 * square
    for _ in range(CG_ITERATIONS):
        if bool((square <= target).all()):
            break
        image = pull(torch.func.jvp(residual, (z,), (direction,))[1])[0] + damping.unsqueeze(-1) * direction
        length = square / (direction * image).sum(-1, keepdim=True).clamp_min(1e-300)
        step, rest = step + length * direction, rest - length * image
        before, square = square, rest.square().sum(-1, keepdim=True)
        direction = rest + square / before.clamp_min(1e-300) * direction
    return step.nan_to_num()
