r"""Tangent space of pairs of complex vectors under the invariant metric, in orthonormal coordinates.

A vector :math:`u = (u_G, u_H)` has coordinates :math:`(u_G / |G|, u_H / |H|)`, and the metric is their real dot
product. The total space is two lines, for the logarithms of the lengths, times two spheres.

Imports: torch, :mod:`quotient_nets.linalg`, :mod:`quotient_nets.tangent_space`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from typing_extensions import override

from quotient_nets.linalg import at_least_single
from quotient_nets.manifolds.complex_rows import conjugate, dot, real_dot, reference_phase, times
from quotient_nets.manifolds.phase import aligned_log
from quotient_nets.manifolds.rank_one import cos_and_sinc
from quotient_nets.tangent_space import UNKNOWN_PATH, TangentSpace


class ComplexTangentSpace(TangentSpace):
    """Vectors at a pair of complex vectors; coordinates have the shape of the point, ``(..., n + m, 2)``.

    Args:
        x: The point.
        n: Rows of ``G``.

    Attributes:
        unit: The two vectors divided by their lengths, stacked; NaN for a zero or infinite vector.
        lengths: Their lengths, one for each row, ``(..., n + m, 1)``.
    """

    ndim = 2
    orthonormal = True

    def __init__(self, x: Tensor, n: int):
        self.x, self.n = x, n
        self.batch = x.shape[:-2]
        x = at_least_single(x)
        lengths = [length(t).expand(*t.shape[:-1], 1) for t in self.split(x)]
        self.lengths = torch.cat(lengths, dim=-2)
        self.unit = x / self.lengths

    def split(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of ``G`` and rows of ``H``, as views."""
        g, h = y.split([self.n, y.shape[-2] - self.n], dim=-2)
        return g, h

    @override
    def coordinates(self, u: Tensor) -> Tensor:
        return u / self.lengths

    @override
    def vector(self, c: Tensor) -> Tensor:
        return c * self.lengths

    @override
    def pull_gradient(self, e: Tensor) -> Tensor:
        return e * self.lengths

    @override
    def project(self, c: Tensor) -> Tensor:
        g, h = self.split(self.unit)
        cg, ch = self.split(c)
        # Horizontal: g* c_g is the conjugate of h* c_h. Vertical: (-g z, h conj(z)).
        z = (dot(g, cg) - conjugate(dot(h, ch))) / 2
        return torch.cat([cg - times(g, z), ch + times(h, conjugate(z))], dim=-2)

    @override
    def gradient(self, e: Tensor) -> Tensor:
        return self.project(e)

    @override
    def move(self, c: Tensor, path: str, radius: float | None = None) -> Tensor:
        if path == "retr":
            return self.x + self.vector(c)
        if path not in _PATHS:
            raise ValueError(UNKNOWN_PATH.format(path))
        parts = (_PATHS[path](*pair) for pair in zip(self.split(self.unit), self.split(c), strict=True))
        return self.vector(torch.cat(list(parts), dim=-2))

    def lift(self, right: Tensor, left: Tensor) -> Tensor:
        """Coordinates of the horizontal lift of a matrix's tangent projection.

        Args:
            right: The matrix ``Z`` times the unit vector ``q`` of ``H``, ``(..., n, 2)``.
            left: Its adjoint times the unit vector ``p`` of ``G``, ``(..., m, 2)``.
        """
        p, q = self.split(self.unit)
        scale = self.lengths.narrow(-2, 0, 1) * self.lengths.narrow(-2, -1, 1)
        core = dot(p, right) / 2
        # The projection is (Zq - p core) q* + p (Z* p - q conj(core))*, and the lift horizontal as it stands.
        ug, uh = (right - times(p, core)) / scale, (left - times(q, conjugate(core))) / scale
        batch = torch.broadcast_shapes(ug.shape[:-2], uh.shape[:-2])
        return torch.cat([t.expand(*batch, *t.shape[-2:]) for t in (ug, uh)], dim=-2)

    def log(self, other: ComplexTangentSpace) -> tuple[Tensor, Tensor]:
        """Coordinates of a shortest vector to the orbit of another point, and whether it is the only one.

        See :meth:`ComplexRankOne.logmap`; the second result is ``(..., 1, 1)``.
        """
        ratio = other.lengths / self.lengths
        # One logarithm of the product: those of a long and a short vector would cancel.
        growth = (ratio.narrow(-2, 0, 1) * ratio.narrow(-2, -1, 1)).log() / 2
        ug, uh, unique = aligned_log(*self.split(self.unit), *self.split(other.unit))
        return torch.cat([ug, uh], dim=-2) + growth * self.unit, unique

    def hessian(self, c: Tensor, e: Tensor, change: Tensor) -> Tensor:
        """Riemannian Hessian along ``c``, from a gradient ``e`` and its derivative along ``c``, both by coordinates."""
        parts = []
        for g, cg, eg, dg in zip(*map(self.split, (self.unit, c, e, change)), strict=True):
            parts.append(dg + real_dot(g, cg) * eg - real_dot(g, eg) * cg + real_dot(cg, eg) * g)
        return self.project(torch.cat(parts, dim=-2))

    @override
    def random(self, generator: torch.Generator | None = None) -> Tensor:
        """Unit tangent vector, uniform; a seed means the same vector on the whole orbit."""
        device = None if generator is None else generator.device
        noise = torch.randn(self.unit.shape, generator=generator, dtype=self.unit.dtype, device=device)
        c = self.project(times(noise.to(self.x.device), reference_phase(self.split(self.unit)[0])))
        return c / self.norm(c)


def length(x: Tensor) -> Tensor:
    """Euclidean length ``(..., 1, 1)`` of a complex vector; NaN where it is zero or not finite."""
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return torch.where((norm > 0) & (norm < math.inf), norm, math.nan)


def _geodesic(g: Tensor, c: Tensor) -> Tensor:
    """The length grows exponentially, the direction moves on a great circle."""
    growth, across = _polar(g, c)
    cosine, sinc = cos_and_sinc(real_dot(across, across))
    return growth.exp() * (g * cosine + across * sinc)


def _taylor(g: Tensor, c: Tensor) -> Tensor:
    growth, across = _polar(g, c)
    square = real_dot(across, across)
    return g + c + (growth.square() - square) / 2 * g + growth * across


def _polar(g: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Component along the unit vector ``g``, ``(..., 1, 1)``, and the rest."""
    growth = real_dot(g, c)
    return growth, c - g * growth


_PATHS = {"expmap": _geodesic, "second_order": _taylor}
