r"""Matrices of rank one, :math:`s\,u v^\top` with unit ``u``, ``v``: a half-line times two spheres, up to a sign.

What needs a solver at higher rank is in closed form here. Under the invariant metric and that of the polar
factorisation the half-line is a flat factor; under the embedded and the preconditioned metric it is the radius of a
cone, which is unrolled into a plane.

Imports: torch, :mod:`quotient_nets.linalg`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quotient_nets.linalg import at_least_single, gram

Pair = tuple[Tensor, Tensor]

# Squares below which a series is used: its next term is below one rounding unit.
SMALL = 1e-4  # of a sine or a ratio
SMALL_ANGLE = 1e-2


def sphere_log(g: Tensor, q: Tensor) -> Tensor:
    """Shortest tangent vector from the unit vector ``g`` to ``q``, ``(..., n, 1)``; NaN at the antipode.

    Derivatives of all orders exist at ``q = g``.
    """
    cosine = gram(g, q)
    across = q - g * cosine
    square = gram(across, across)
    near = (square < SMALL) & (cosine > 0)
    series = 1 + square * (1 / 6 + square * (3 / 40 + square * 15 / 336))
    sine = torch.where(near, 1.0, square).sqrt()
    factor = torch.where(near, series, torch.atan2(sine, torch.where(near, 1.0, cosine)) / sine)
    return across * factor


def sphere_logs(g: Tensor, h: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Shortest tangent vectors from ``g`` to ``p`` and ``h`` to ``q``, for the better sign of ``(p, q)``."""
    # The sign is chosen before anything is differentiated: with the other one a point is its own antipode.
    angles = _angle(g.detach(), p.detach()) + _angle(h.detach(), q.detach())
    sign = torch.where(angles > math.pi, -1.0, 1.0).to(g.dtype)
    return sphere_log(g, sign * p), sphere_log(h, sign * q)


def unit_columns(left: Tensor, right: Tensor) -> tuple[Pair, Tensor]:
    """Unit vectors and singular value of the matrix ``left right^T`` of rank one."""
    norms = (torch.linalg.vector_norm(t, dim=-2, keepdim=True) for t in (left, right))
    # The zero matrix has distances to others in some metrics, and is no matrix of rank one.
    lengths = [torch.where(norm > 0, norm, math.nan) for norm in norms]
    return (left / lengths[0], right / lengths[1]), lengths[0] * lengths[1]


def rank_one_coordinates(start: Pair, end: Pair) -> tuple[Pair, Tensor, Tensor, Pair]:
    """Two matrices of rank one, given by factors, as unit vectors and singular values.

    Returns:
        The unit vectors of the first, both singular values, and the ways to the unit vectors of the second.
    """
    (g, h), s = unit_columns(*map(at_least_single, start))
    (p, q), t = unit_columns(*map(at_least_single, end))
    return (g, h), s, t, sphere_logs(g, h, p, q)


def sum_of_squares(vectors: Sequence[Tensor]) -> Tensor:
    """Squared length of several columns together, ``(..., 1, 1)``."""
    left, right = vectors
    return gram(left, left) + gram(right, right)


def _angle(g: Tensor, q: Tensor) -> Tensor:
    cosine = gram(g, q)
    return torch.atan2(torch.linalg.vector_norm(q - g * cosine, dim=-2, keepdim=True), cosine)


@dataclass(frozen=True)
class Cylinder:
    r"""The surface of :math:`(\log s, \theta)` with the metric :math:`w\, d(\log s)^2 + d\theta^2`.

    Attributes:
        weight: :math:`w`.
    """

    weight: float
    complete: ClassVar = True

    def reach(self, s: Tensor) -> Tensor:
        """Length below which no geodesic from ``s`` ends: infinite."""
        return torch.full_like(s, math.inf)

    def injectivity(self, s: Tensor, spheres: int) -> Tensor:
        """Length below which geodesics from ``s`` are the only shortest ones.

        The antipode of a single sphere is at distance pi; on two spheres the common sign of both vectors halves the
        closed geodesic of length ``2 sqrt(2) pi``.
        """
        return torch.full_like(s, [math.inf, math.pi, math.pi / math.sqrt(2)][spheres])

    def log(self, s: Tensor, end: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:
        """Velocity of ``s``, and the factor of the angle in the velocity of the matrix, from ``s`` to ``end``.

        Args:
            s: Singular value at the start.
            end: Singular value at the end.
            square: Squared angle.
        """
        return s * (end / s).log(), s + torch.zeros_like(square)

    def dist2(self, s: Tensor, end: Tensor, square: Tensor) -> Tensor:
        """Squared distance, for the arguments of :meth:`log`."""
        return self.weight * (end / s).log().square() + square


@dataclass(frozen=True)
class Cone:
    r"""The surface with radius ``s`` and angle :math:`\kappa \theta`, and lengths divided by :math:`\kappa`.

    Attributes:
        speed: :math:`\kappa`.
    """

    speed: float
    complete: ClassVar = False

    def reach(self, s: Tensor) -> Tensor:
        """Length below which no geodesic from ``s`` meets the apex."""
        return s / self.speed

    def injectivity(self, s: Tensor, spheres: int) -> Tensor:
        """As :meth:`Cylinder.injectivity`: up to the apex, for a turn by half of a closed geodesic is farther."""
        return s / self.speed

    def log(self, s: Tensor, end: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:
        r"""As :meth:`Cylinder.log`; NaN from :math:`\kappa \theta = \pi` on.

        The shortest way then leads through the apex, which is no point.
        """
        square = self.speed**2 * square
        reached = torch.where(square < math.pi**2, 1.0, math.nan).to(s.dtype)
        cosine, sinc = cos_and_sinc(square)
        return reached * (end * cosine - s), reached * end * sinc

    def dist2(self, s: Tensor, end: Tensor, square: Tensor) -> Tensor:
        """Squared distance: the infimum of squared lengths, also where no way is the shortest."""
        square = self.speed**2 * square
        # With 1 - cos = 2 sin^2 of half the angle nothing cancels for neighbours.
        half = cos_and_sinc(square / 4)[1]
        around = (end - s).square() + s * end * square * half.square()
        return torch.where(square < math.pi**2, around, (end + s).square()) / self.speed**2

    def exponential(self, g: Tensor, h: Tensor, bg: Tensor, bh: Tensor, s: Tensor) -> list[tuple[Tensor, Tensor]]:
        r"""Geodesic from :math:`s\,g h^\top` with velocity :math:`b_G h^\top + g b_H^\top`.

        In the unrolled plane the geodesic is a straight line; the radius at its end is shared evenly by the factors.

        Returns:
            For each side ``(m1, m2)``: the factor is displaced by ``b + g m1 + b m2`` in units where ``g`` stands for
            ``g s``. NaN where the line meets the apex.
        """
        # Lengths are 1 in value; what depends on the point through them makes derivatives exact.
        length_g, length_h = gram(g, g), gram(h, h)
        left, right = gram(g, bg) / length_g, gram(h, bh) / length_h
        across_g, across_h = bg - g * left, bh - h * right
        square_g, square_h = gram(across_g, across_g) * length_h, gram(across_h, across_h) * length_g
        unit = (length_g * length_h).sqrt()
        s, left, right = s * unit, left * unit, right * unit
        forward = s + left + right
        square = self.speed**2 * (square_g + square_h)
        radius = forward.square() + square
        # At the apex there is no direction; a line that passes it by no more than rounding meets it.
        rounding = 100 * torch.finfo(s.dtype).eps * (left + right)
        radius = torch.where((square > rounding.square()) | (forward > 0), radius, math.nan)
        rate = _atan_ratio(square, forward)  # of the angle, over the length of the velocity across
        root = (radius / s.square()) ** 0.25  # of the ratio of the radii
        result: list[tuple[Tensor, Tensor]] = []
        for core, across in ((left, square_g), (right, square_h)):
            cosine, sinc = cos_and_sinc(rate.square() * across)
            # g cos + (b - g core) sin / |.| in place of g
            m2 = root * s * rate * sinc
            m1 = s * (root * cosine - 1) - core * m2
            result.append((m1 / unit, m2 - 1))
        return result


def cos_and_sinc(square: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine of ``a`` and ``sin(a) / a`` as smooth functions of ``a**2``."""
    near = square < SMALL_ANGLE
    angle = torch.where(near, 1.0, square).sqrt()
    # Series: the root has no derivative at zero.
    cosine = 1 - square / 2 * (1 - square / 12 * (1 - square / 30 * (1 - square / 56 * (1 - square / 90))))
    sinc = 1 - square / 6 * (1 - square / 20 * (1 - square / 42 * (1 - square / 72 * (1 - square / 110))))
    return torch.where(near, cosine, angle.cos()), torch.where(near, sinc, angle.sin() / angle)


def _atan_ratio(square: Tensor, x: Tensor) -> Tensor:
    """``atan2(y, x) / y`` as a smooth function of ``y**2``, for positive ``x`` where ``y`` vanishes."""
    near = (square < SMALL * x.square()) & (x > 0)
    z = square / torch.where(near, x, 1.0).square()
    series = (1 + z * (-1 / 3 + z * (1 / 5 - z / 7))) / torch.where(near, x, 1.0)
    y = torch.where(near | (square == 0), 1.0, square).sqrt()
    return torch.where(near, series, torch.atan2(y, x) / y)
