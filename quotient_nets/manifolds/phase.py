r"""The phase that brings one pair of complex unit vectors nearest to another.

For unit vectors, in the form of :mod:`quotient_nets.manifolds.complex_rows`, the squared distance of ``(g, h)`` and
:math:`e^{i\varphi} (p, q)` on the two spheres is

.. math:: F(\varphi) = \theta_1^2 + \theta_2^2, \quad \cos\theta_1 = \operatorname{Re} e^{i\varphi} g^* p
          = \rho_1 \cos(\varphi + \alpha), \quad \cos\theta_2 = \operatorname{Re} e^{i\varphi} h^* q
          = \rho_2 \cos(\varphi + \beta).

Imports: torch, :mod:`quotient_nets.linalg`, :mod:`quotient_nets.manifolds.complex_rows`,
:mod:`quotient_nets.manifolds.rank_one`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from quotient_nets.linalg import CORRECTIONS
from quotient_nets.manifolds.complex_rows import dot, real_dot, times, turn
from quotient_nets.manifolds.rank_one import sphere_log

BISECTIONS = 26  # an arc of at most pi shrinks to 5e-8, where Newton's method doubles the digits
NEWTON_STEPS = 4
INTERIOR = 1e-6  # two minimisers nearer than this to an end of the arc are one up to rounding


class Alignment(NamedTuple):
    r"""Where ``F`` is least; constant under autograd.

    Attributes:
        phase: Minimising :math:`e^{i\varphi}`, ``(..., 1, 2)``.
        slope: Half the second derivative of ``F`` there, ``(..., 1, 1)``.
        unique: Whether no other phase does as well, ``(..., 1, 1)``.
    """

    phase: Tensor
    slope: Tensor
    unique: Tensor


def align(g: Tensor, h: Tensor, p: Tensor, q: Tensor) -> Alignment:
    r"""Global minimiser of ``F``, to machine precision in float64, returned in the dtype of ``g``.

    Both summands grow with the distance of :math:`\varphi` from their own minimum, so the minimiser lies on the shorter
    arc between :math:`-\alpha` and :math:`-\beta`, of length :math:`d \le \pi`. At distance ``t`` from the first,

    .. math:: \tfrac12 F' = \rho_1 \chi(\theta_1) \sin t - \rho_2 \chi(\theta_2) \sin(d - t), \quad
              \chi(\theta) = \theta / \sin\theta,

    and the ratio of the two terms grows strictly with ``t``, from 0 to infinity where :math:`d < \pi`: one change of
    sign, one minimum. Bisection finds it without fail, and Newton's method refines it. The minimiser is not unique only
    where both products vanish, and where :math:`d = \pi` and it lies inside the arc.

    Cost: three passes over the vectors, then 31 evaluations of :math:`F'` on numbers.
    """
    parts = [tuple(t.detach().double() for t in pair) for pair in ((g, p), (h, q))]
    products = [dot(left, right) for left, right in parts]
    # 1 - rho^2 would lose half the digits of a small angle.
    off = [right - times(left, c) for (left, right), c in zip(parts, products, strict=True)]
    missing = torch.stack([part.square().sum((-2, -1)) for part in off], dim=-1)
    c = torch.cat(products, dim=-2)
    rho = torch.linalg.vector_norm(c, dim=-1)
    first, second = torch.atan2(c.select(-1, 1), c.select(-1, 0)).unbind(-1)
    turned = second - first
    turned = turned - 2 * math.pi * torch.round(turned / (2 * math.pi))
    arc = turned.abs()

    def derivative(t: Tensor) -> tuple[Tensor, Tensor]:
        """Half of ``F'`` and of ``F''`` at the distance ``t`` along the arc."""
        way = torch.stack([t, arc - t], dim=-1)
        across, along = rho * way.sin(), rho * way.cos()
        sine = (missing + across.square()).sqrt()
        away = sine > 0
        safe = torch.where(away, sine, 1.0)
        share = torch.where(away, across / safe, 1.0)
        theta = torch.atan2(sine, along)
        bend = share.square() + (1 - share.square()) * theta * along / safe
        left, right = (theta * share).unbind(-1)
        return left - right, bend.sum(-1)

    low, high = torch.zeros_like(arc), arc
    for _ in range(BISECTIONS):
        t = (low + high) / 2
        before = derivative(t)[0] < 0
        low, high = torch.where(before, t, low), torch.where(before, high, t)
    t = (low + high) / 2
    for _ in range(NEWTON_STEPS):
        force, bend = derivative(t)
        t = torch.minimum(torch.maximum(t - force / torch.where(bend > 0, bend, math.inf), low), high)
    bend = derivative(t)[1]
    angle = -first - torch.where(turned < 0, -t, t)
    rounding = 10 * max(g.shape[-2], h.shape[-2]) * torch.finfo(torch.float64).eps
    opposite = (math.pi - arc) * rho.amin(-1) <= rounding
    inside = torch.minimum(t, arc - t) > INTERIOR
    unique = (rho.amax(-1) > rounding) & torch.logical_not(opposite & inside)
    phase = torch.stack([angle.cos(), angle.sin()], dim=-1).unsqueeze(-2)
    # Fake tensors of a device know no indexing by None.
    slope, unique = (t.unsqueeze(-1).unsqueeze(-1) for t in (bend, unique))
    return Alignment(phase.to(g.dtype), slope.to(g.dtype), unique)


def aligned_log(g: Tensor, h: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Shortest tangent vectors from ``(g, h)`` to the nearest :math:`e^{i\varphi} (p, q)`, all of unit length.

    Two derivatives are exact: the phase solves :math:`S = \tfrac12 F' = 0`, which says that the vectors are horizontal,
    and Newton steps that are zero in value carry its derivatives.

    Returns:
        Vectors ``(..., n, 2)``, ``(..., m, 2)`` and whether they are unique, ``(..., 1, 1)``.
    """
    phase, slope, unique = align(g, h, p, q)
    slope = torch.where(slope > 0, slope, 1.0)
    for _ in range(CORRECTIONS):
        residual = _horizontality(g, times(p, phase)) + _horizontality(h, times(q, phase))
        # Only the derivatives: the value is that of the search, more exact than float32 can tell.
        change = (residual.detach() - residual) / slope
        phase = times(phase, torch.cat([change.cos(), change.sin()], dim=-1))
    return _log(g, times(p, phase)), _log(h, times(q, phase)), unique


def _horizontality(g: Tensor, p: Tensor) -> Tensor:
    return real_dot(turn(g), _log(g, p))


def _log(g: Tensor, p: Tensor) -> Tensor:
    """Logarithm on the sphere of real dimension ``2n - 1``."""
    flat = sphere_log(*(t.flatten(-2).unsqueeze(-1) for t in (g, p)))
    return flat.squeeze(-1).unflatten(-1, (-1, 2))
