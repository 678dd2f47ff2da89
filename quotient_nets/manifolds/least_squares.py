r"""Nonlinear least squares for a batch of small problems: the method of Levenberg and Marquardt.

Imports: torch. Knows no manifold.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

DENSE = 4096  # unknowns up to which the Jacobian is formed; beyond, conjugate gradients
FIRST_DAMPING, LEAST_DAMPING, MOST_DAMPING = 1e-2, 1e-14, 1e3  # at the last an element is given up
CG_ITERATIONS, CG_TOLERANCE = 60, 1e-3

Residual = Callable[[Tensor], Tensor]
"""A function ``(..., batch, unknowns) -> (..., batch, equations)``, element by element, over any leading axes."""


class Solution(NamedTuple):
    """Where the method stopped: unknowns ``(batch, unknowns)``, and the norm of the residual there, ``(batch,)``."""

    z: Tensor
    residual: Tensor


def jacobian(residual: Residual, z: Tensor, *, mapped: bool = False) -> Tensor:
    """Derivative at ``z`` by forward differentiation in all directions at once: ``(batch, equations, unknowns)``.

    With ``mapped`` by ``torch.vmap``, which computes the value once but knows no loop whose end depends on it.
    """
    unknowns = z.shape[-1]
    basis = torch.eye(unknowns, dtype=z.dtype, device=z.device).unsqueeze(1).expand(-1, *z.shape).contiguous()
    if mapped:
        rows = torch.vmap(lambda e: torch.func.jvp(residual, (z,), (e,))[1])(basis)
    else:
        rows = torch.func.jvp(residual, (z.expand_as(basis).contiguous(),), (basis,))[1]
    return rows.permute(1, 2, 0)


def levenberg_marquardt(
    residual: Residual, z: Tensor, *, iterations: int, tolerance: float = 0.0, mapped: bool = False
) -> Solution:
    """Least squares from ``z`` on, with one damping for each element of the batch.

    Args:
        residual: The function whose square is to be least. A step to where it is NaN is refused.
        z: First guess, ``(batch, unknowns)``.
        iterations: How many steps to try at most.
        tolerance: Norm of the residual at which an element is done.
        mapped: Whether ``residual`` may be mapped by ``torch.vmap``, which is faster.

    Cost: up to 4096 unknowns one Jacobian and one solution of the normal equations for each step, else up to 60
    products with the Jacobian and its transpose.
    """
    step = partial(_dense_step, mapped=mapped) if z.shape[-1] <= DENSE else _iterative_step
    f = residual(z)
    norm = torch.linalg.vector_norm(f, dim=-1)
    damping = torch.full_like(norm, FIRST_DAMPING)
    for _ in range(iterations):
        if bool(((norm <= tolerance) | (damping >= MOST_DAMPING)).all()):
            break
        # In proportion to the residual, damping spoils no quadratic convergence.
        ahead = z + step(residual, z, f, damping * norm.clamp_max(1.0))
        f_ahead = residual(ahead)
        norm_ahead = torch.linalg.vector_norm(f_ahead, dim=-1)
        better = norm_ahead < norm
        choose = better.unsqueeze(-1)
        z, f, norm = (
            torch.where(choose, ahead, z),
            torch.where(choose, f_ahead, f),
            torch.where(better, norm_ahead, norm),
        )
        damping = torch.where(better, damping / 5, damping * 4).clamp(LEAST_DAMPING, MOST_DAMPING)
    return Solution(z, norm)


def _dense_step(residual: Residual, z: Tensor, f: Tensor, damping: Tensor, mapped: bool) -> Tensor:
    j = jacobian(residual, z, mapped=mapped).nan_to_num()
    eye = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device)
    normal = j.mT @ j + damping[:, None, None] * eye
    return -torch.linalg.solve_ex(normal, j.mT @ f.unsqueeze(-1))[0].squeeze(-1)


def _iterative_step(residual: Residual, z: Tensor, f: Tensor, damping: Tensor) -> Tensor:
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
