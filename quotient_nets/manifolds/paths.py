r"""Short paths of factor pairs between two points, as first guesses for geodesics.

A path of a few segments, ``x = x_0, x_1, ..., x_K``, whose last point may be any representative of the end, is moved
until the sum of the squared lengths of its segments is least. Its first segment says where the geodesic starts. Unlike
the equation that a geodesic must end at its target, this has few bad minima.

Imports: torch, :mod:`quotient_nets.linalg`. Knows the chords of the metrics, no manifold.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quotient_nets.linalg import gram, solve, times
from quotient_nets.manifolds.factor_tangent import sym
from quotient_nets.manifolds.least_squares import levenberg_marquardt, mapped_jacobian

SEGMENTS = 6
ITERATIONS = 12  # of the minimisation; the geodesic is found exactly afterwards

Pair = tuple[Tensor, Tensor]
Chords = Callable[[Tensor, Tensor], Tensor]
"""From the factors along paths, ``(..., K + 1, rows, r)`` each, to vectors ``(..., K, any)``, as long as the segments
are in the metric of the total space."""


def invariant_chords(g: Tensor, h: Tensor) -> Tensor:
    """Segments measured by the Gram matrix halfway."""

    def one(factor: Tensor) -> Tensor:
        change, square = _changes(factor)
        root = torch.linalg.cholesky_ex(square)[0]
        return torch.linalg.solve_triangular(root.mT, change, upper=True, left=False).flatten(-2)

    return torch.cat([one(g), one(h)], dim=-1)


def preconditioned_chords(g: Tensor, h: Tensor) -> Tensor:
    """Segments of each factor measured by the Gram matrix of the other halfway."""
    (dg, sg), (dh, sh) = _changes(g), _changes(h)
    parts = [(d @ torch.linalg.cholesky_ex(s)[0]).flatten(-2) for d, s in ((dg, sh), (dh, sg))]
    return torch.cat(parts, dim=-1)


def embedded_chords(g: Tensor, h: Tensor) -> Tensor:
    """Changes of the matrix."""
    return (g @ h.mT).diff(dim=-3).flatten(-2)


def _changes(factor: Tensor) -> tuple[Tensor, Tensor]:
    square = gram(factor, factor)
    count = square.shape[-3] - 1
    return factor.diff(dim=-3), (square.narrow(-3, 0, count) + square.narrow(-3, 1, count)) / 2


def short_path(chords: Chords, start: tuple[Tensor, ...], end: tuple[Tensor, ...], turn: Tensor) -> tuple[Pair, Tensor]:
    r"""Velocity at the start of a short path between two matrices, and its length.

    Args:
        chords: The metric.
        start: Frame ``(g, s, h)``; ``s`` is ``(batch, 1, r)``.
        end: Frame of the end.
        turn: Orthogonal matrices by which the end is turned before the two frames are joined.

    Returns:
        Velocities of :math:`g s^{1/2}` and :math:`h s^{1/2}`, and lengths ``(batch,)``.
    """
    (g, s, h), (p, t, q) = start, end
    first, last = (g * s.sqrt(), h * s.sqrt()), (p * t.sqrt(), q * t.sqrt())
    rows = g.shape[-2], h.shape[-2]
    r = g.shape[-1]
    joined = _joined(start, (p @ turn, gram(turn, t.mT * turn), q @ turn))
    shape = (SEGMENTS - 1, sum(rows), r)

    def path(z: Tensor) -> Pair:
        inner, a = z.split([shape[0] * shape[1] * r, r * r], dim=-1)
        a = a.unflatten(-1, (r, r))
        ends = last[0] @ a, solve(a, last[1].mT).mT
        between = inner.unflatten(-1, shape).split(rows, dim=-2)
        parts = zip(first, between, ends, strict=True)
        left, right = (
            torch.cat([x.expand(*z.shape[:-1], *x.shape[-2:]).unsqueeze(-3), mid, y.unsqueeze(-3)], dim=-3)
            for x, mid, y in parts
        )
        return left, right

    def residual(z: Tensor) -> Tensor:
        return chords(*path(z)).flatten(-2) * SEGMENTS**0.5

    z = torch.cat([joined.flatten(1), turn.flatten(1)], dim=-1)
    z, length = levenberg_marquardt(residual, z, iterations=ITERATIONS, derivative=mapped_jacobian)
    # The derivative at the first of three points.
    velocities = ((4 * f.select(-3, 1) - 3 * f.select(-3, 0) - f.select(-3, 2)) * (SEGMENTS / 2) for f in path(z))
    left, right = velocities
    return (left, right), length


def unknowns(rows: int, r: int) -> int:
    """How many numbers :func:`short_path` moves for factors of ``rows`` rows together."""
    return (SEGMENTS - 1) * rows * r + r * r


def _joined(start: tuple[Tensor, ...], end: tuple[Tensor, ...]) -> Tensor:
    """Points between: bases by projection of the straight line, singular values in geometric progression."""
    (g, s, h), (p, t, q) = start, end
    logs = torch.diag_embed(s.squeeze(-2).log()), _symmetric_function(t, torch.log)
    points: list[Tensor] = []
    for k in range(1, SEGMENTS):
        w = k / SEGMENTS
        size = _symmetric_function((1 - w) * logs[0] + w * logs[1], lambda x: (x / 2).exp())
        bases = (_orthonormal((1 - w) * a + w * b) for a, b in ((g, p), (h, q)))
        points.append(torch.cat([times(basis, size) for basis in bases], dim=-2))
    return torch.stack(points, dim=1)


def _symmetric_function(a: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    values, vectors = torch.linalg.eigh(sym(a))
    return (vectors * function(values).unsqueeze(-2)) @ vectors.mT


def _orthonormal(a: Tensor) -> Tensor:
    u, _, vt = torch.linalg.svd(a, full_matrices=False)
    return u @ vt
