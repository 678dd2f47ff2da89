r"""Derivatives of a geodesic that was found by a solver.

The initial velocity ``c`` solves :math:`F(c; x, y) = 0` for the error ``F`` of the end point. With the inverse ``K`` of
:math:`\partial F / \partial c`, held constant, steps :math:`c - K F(c; x, y)` change no digit of the solution and make
one more derivative exact each. The inverse is known from the core: what moves outside the span of both points stays
outside, and every such direction is treated alike by one ``r x r`` matrix.

Imports: torch, :mod:`quotient_nets.linalg`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quotient_nets.linalg import CORRECTIONS, gram
from quotient_nets.manifolds.factor_tangent import MatrixTangentSpace
from quotient_nets.manifolds.least_squares import jacobian
from quotient_nets.manifolds.logarithm import Core, CorePair

if TYPE_CHECKING:
    from quotient_nets.manifolds.matrices import FixedRankMatrices


def with_derivatives(manifold: FixedRankMatrices, x: Tensor, y: Tensor, vector: Tensor) -> Tensor:
    """The logarithm ``vector``, already found, as a function of both points that can be differentiated twice.

    Cost: one Jacobian in the core with :math:`4 r (r + 1)` directions, its pseudo-inverse, and two geodesics.
    """
    shape, dtype = x.shape, x.dtype
    x, y, vector = (t.double().reshape(-1, *shape[-2:]) for t in (x, y, vector))
    source, target = (manifold._at(t) for t in (x, y))
    c = source.coordinates(vector).detach()
    inverse = _InverseDerivative(manifold, source, target, c)
    left, right = manifold.point_factors(y)
    for _ in range(CORRECTIONS):
        end = manifold.point_factors(source.move(source.project(c), "expmap"))
        error = target.lift(*target.products([end, (-left, right)]))
        # Only the derivatives: the value is as good as the solver made it.
        c = c - inverse(error - error.detach())
    return source.vector(source.project(c)).reshape(shape).to(dtype)


class _InverseDerivative:
    """Inverse of the derivative of the error at the target with respect to the velocity at the source."""

    def __init__(self, manifold: FixedRankMatrices, x: MatrixTangentSpace, y: MatrixTangentSpace, c: Tensor):
        pair = CorePair(x, y, extra=1)
        self.space, self.bases, r = x, (pair.left, pair.right), x.g.shape[-1]
        core = Core(manifold, pair.points)
        g, *middle, h = x.split(c)
        scale = pair.scale.squeeze(-1) ** core.source.degree
        small = torch.cat([gram(pair.left, g), *middle, gram(pair.right, h)], dim=-2)
        j = jacobian(core.residual, small.flatten(-2) / scale)
        self.inverse = torch.linalg.pinv(j.nan_to_num())
        outside = (pair.left.shape[-1] - 1, small.shape[-2] - 1)  # the rows of the extra columns
        self.outside = [j[:, i * r : (i + 1) * r, i * r : (i + 1) * r].mT for i in outside]

    def __call__(self, error: Tensor) -> Tensor:
        g, *middle, h = self.space.split(error)
        inside = [gram(basis, part) for basis, part in zip(self.bases, (g, h), strict=True)]
        flat = torch.cat([inside[0], *middle, inside[1]], dim=-2)
        flat = (self.inverse @ flat.flatten(-2).unsqueeze(-1)).squeeze(-1).unflatten(-1, flat.shape[-2:])
        rows = [inside[0].shape[-2], *(part.shape[-2] for part in middle), inside[1].shape[-2]]
        solved, *between, solved_h = flat.split(rows, dim=-2)
        parts: list[Tensor] = []
        for basis, part, within, new, block in zip(
            self.bases, (g, h), inside, (solved, solved_h), self.outside, strict=True
        ):
            full = basis @ new
            if basis.shape[-2] > basis.shape[-1]:
                full = full + torch.linalg.solve_ex(block, part - basis @ within, left=False)[0]
            parts.append(full)
        return torch.cat([parts[0], *between, parts[1]], dim=-2)
