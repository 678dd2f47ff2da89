r"""Matrices of fixed rank, whatever their representation and metric: every operation by way of the tangent space.

A subclass says how a matrix :math:`X = g \operatorname{diag}(s) h^\top` is stored, which factors a point and a tangent
vector have, and which :class:`~quotient_nets.manifolds.factor_tangent.MatrixTangentSpace` holds its metric. All the
rest follows, and is written once.

Imports: geoopt, torch, :mod:`quotient_nets.linalg`. Knows nothing of networks.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from quotient_nets.linalg import Frame, is_differentiated, truncated_svd
from quotient_nets.manifolds.base import QuotientManifold, full_rank, root
from quotient_nets.manifolds.factor_tangent import MatrixTangentSpace, Terms
from quotient_nets.manifolds.logarithm import STARTS, Logarithm, logarithm
from quotient_nets.manifolds.logarithm_derivative import with_derivatives
from quotient_nets.manifolds.paths import Chords
from quotient_nets.manifolds.rank_one import Cone, Cylinder, rank_one_coordinates, sum_of_squares


class FixedRankMatrices(QuotientManifold):
    r"""``n x m`` matrices of rank ``r``; the rank is that of the point, ``1 <= r <= min(n, m)``.

    Args:
        n: Rows of the matrix.
        m: Columns of the matrix.

    Raises:
        ValueError: ``n`` or ``m`` is not a positive integer.
    """

    rank_one: Cone | Cylinder
    """What the metric is at rank one: the surface of the singular value and the angle."""
    chords: Chords
    """Lengths of short segments between pairs of factors, for first guesses of geodesics."""

    def __init__(self, n: int, m: int):
        super().__init__()
        if not (isinstance(n, int) and isinstance(m, int) and n > 0 and m > 0):
            raise ValueError(f"expected positive integers n (rows of G) and m (rows of H), got n={n!r}, m={m!r}")
        self.n, self.m = n, m

    @property
    def name(self) -> str:
        """Class and sizes, for messages."""
        return f"{type(self).__name__}({self.n}, {self.m})"

    @override
    def _numbers(self) -> tuple[Any, ...]:
        return self.n, self.m

    def dimension(self, r: int) -> int:
        """Dimension of the manifold of rank-``r`` matrices, ``(n + m - r) r``."""
        return (self.n + self.m - r) * r

    @abstractmethod
    def frame(self, x: Tensor) -> Frame:
        """Singular value decomposition of the matrix and the way to it; see :class:`quotient_nets.linalg.Frame`."""

    @abstractmethod
    def from_frame(self, g: Tensor, s: Tensor, h: Tensor) -> Tensor:
        r"""The canonical representative of :math:`g \operatorname{diag}(s) h^\top`."""

    @abstractmethod
    @override
    def at(self, x: Tensor, *, balanced: bool = False) -> MatrixTangentSpace:
        """Tangent space at ``x``, constant under autograd.

        Args:
            x: Point.
            balanced: ``x`` is as :meth:`canonicalize` returns it; the frame then needs no decomposition.
        """

    @abstractmethod
    def _at(self, x: Tensor) -> MatrixTangentSpace:
        """Tangent space at ``x`` whose operations carry derivatives with respect to ``x``, if any are asked for."""

    @abstractmethod
    def point_factors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        r"""Factors :math:`L`, :math:`R` of the matrix :math:`X = L R^\top`, ``(..., n, r)`` and ``(..., m, r)``."""

    @abstractmethod
    def tangent_factors(self, x: Tensor, u: Tensor) -> Terms:
        """The derivative of the matrix along ``u`` as a sum of products of factors."""

    @override
    def product(self, x: Tensor) -> Tensor:
        """The matrix, ``(..., n, m)``."""
        left, right = self.point_factors(x)
        return left @ right.mT

    @override
    def inner(self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        space = self._at(x)
        c = space.coordinates(u)
        inner = space.inner(c, c if v is None else space.coordinates(v)).to(x.dtype)
        return inner if keepdim else inner.squeeze((-2, -1))

    @override
    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        """Horizontal part of an ambient vector: elementwise between orthonormal frames, no Sylvester solver."""
        space = self._at(x)
        return space.project_vector(u).to(x.dtype)

    @override
    def egrad2rgrad(self, x: Tensor, u: Tensor) -> Tensor:
        space = self._at(x)
        return space.vector(space.gradient(space.pull_gradient(u))).to(x.dtype)

    def ehess2rhess(self, x: Tensor, egrad: Tensor, ehess: Tensor, u: Tensor) -> Tensor:
        """Riemannian Hessian along a horizontal vector: the covariant derivative of the gradient.

        Args:
            x: Point.
            egrad: Euclidean gradient of a function that is constant on orbits.
            ehess: Its derivative along ``u``.
            u: Horizontal vector.
        """
        space = self._at(x)
        e, de = space.pull_gradient(egrad), space.pull_gradient(ehess)
        return space.vector(space.hessian(e, de, space.coordinates(u))).to(x.dtype)

    def second_order(self, x: Tensor, u: Tensor) -> Tensor:
        """Second-order retraction: agrees with the geodesic up to terms of order three in ``u``."""
        return self._follow(x, u, "second_order")

    @override
    def expmap(self, x: Tensor, u: Tensor, *, radius: float | None = None, check: bool = True) -> Tensor:
        """Geodesic at time 1.

        Args:
            x: Point.
            u: Horizontal vector.
            radius: Upper bound on the norm of ``u``, if known; saves work for some metrics, changes no result.
            check: Raise where a geodesic leaves a manifold that is not complete; otherwise that element is NaN.

        Raises:
            ValueError: The geodesic leaves the manifold.
        """
        y = self._follow(x, u, "expmap", radius)
        if check and not self.rank_one.complete:
            reason = "its metric is not complete and the geodesic leaves it. Steps shorter than `exponential_radius(x)`"
            self._refuse_nan(y, (x,), (u,), f"expected a geodesic that stays on {self.name}; {reason} do not")
        return y

    def _follow(self, x: Tensor, u: Tensor, path: str, radius: float | None = None) -> Tensor:
        space = self._at(x)
        return space.move(space.coordinates(u), path, radius).to(x.dtype)

    def exponential_radius(self, x: Tensor) -> Tensor:
        """Norm below which every geodesic reaches time 1, ``(...)``: a bound where it is finite, else infinity."""
        return self.rank_one.reach(self.frame(x).spectrum.select(-1, -1))

    def injectivity_radius(self, x: Tensor) -> Tensor:
        r"""Norm below which geodesics from ``x`` are the only shortest ones, ``(...)``; NaN where it is not known.

        Known, and exact, at rank one and where the metric is flat. At rank one :math:`\pi / \sqrt 2` for a complete
        metric (``n, m > 1``); otherwise :meth:`exponential_radius`.
        """
        r, s = x.shape[-1], self.frame(x).spectrum.select(-1, -1)
        if r == 1:
            return self.rank_one.injectivity(s, spheres=(self.n > 1) + (self.m > 1))
        return self.rank_one.reach(s) if self.is_flat(r) else s * torch.nan

    def is_flat(self, r: int) -> bool:
        """Whether matrices of rank ``r`` are an open set of a Euclidean space with this metric."""
        return False

    @override
    def transp(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        r"""Horizontal lift at ``y`` of the tangent matrix of ``v``, projected on the tangent space at ``y``.

        Independent of all representatives. Not an isometry. Manopt projects the raw arrays of ``v`` at ``y``, which
        depends on the representatives.
        """
        space = self._at(y)
        return space.vector(space.lift(*space.products(self.tangent_factors(x, v)))).to(v.dtype)

    def to_ambient(self, x: Tensor, u: Tensor) -> Tensor:
        """Tangent matrix of ``u``: the derivative of the product along it, ``(..., n, m)``."""
        (a, b), *others = self.tangent_factors(x, u)
        return sum((left @ right.mT for left, right in others), a @ b.mT)

    def from_ambient(self, x: Tensor, matrix: Tensor) -> Tensor:
        r"""Horizontal lift of the orthogonal projection of ``matrix`` on the tangent space.

        The projection is :math:`P_U Z + Z P_V - P_U Z P_V`, whatever the metric.
        """
        space = self._at(x)
        matrix = matrix.to(space.g.dtype)
        return space.vector(space.lift(matrix @ space.h, matrix.mT @ space.g)).to(x.dtype)

    def best_rank_r(self, matrix: Tensor, r: int) -> Tensor:
        """Nearest matrix of rank ``r`` in the Frobenius norm (Eckart and Young), as a canonical point; detached.

        Raises:
            ValueError: ``r`` is not between 1 and ``min(n, m)``; the matrix has another shape, a lower rank or NaN.
        """
        if tuple(matrix.shape[-2:]) != (self.n, self.m):
            raise ValueError(f"expected a matrix of shape (..., {self.n}, {self.m}), got {tuple(matrix.shape)}")
        return self.from_frame(*truncated_svd(matrix.detach(), r)).to(matrix.dtype)

    @abstractmethod
    def orthographic(self, x: Tensor, u: Tensor) -> Tensor:
        r"""Orthographic retraction: the point whose matrix differs from :math:`X + \dot X` by a normal matrix only.

        Of second order for the embedded metric, of first order for the others. With
        :math:`K = U^\top (X + \dot X) V` the new matrix is :math:`(X + \dot X) V K^{-1} U^\top (X + \dot X)`; NaN or
        Inf where ``K`` is singular.

        Source: Absil and Malick (2012).
        """

    def inverse_orthographic(self, x: Tensor, y: Tensor) -> Tensor:
        r"""Horizontal lift of :math:`P_{T_X}(Y - X)`: the inverse of :meth:`orthographic`, in closed form.

        For nearby points a cheap stand-in for the logarithm.
        """
        space = self._at(x)
        left, right = self.point_factors(x)
        return space.vector(space.lift(*space.products([self.point_factors(y), (-left, right)]))).to(x.dtype)

    def logmap_report(
        self, x: Tensor, y: Tensor, *, starts: int = STARTS, generator: torch.Generator | None = None
    ) -> Logarithm:
        """Shortest horizontal vector found from ``x`` to the orbit of ``y``, and what certifies it; detached.

        Args:
            x: Point.
            y: Point of the same rank.
            starts: How many short paths to try as first guesses for each pair that the first leaves in doubt.
            generator: Draws the guesses; by default a fixed seed.
        """
        x, y = torch.broadcast_tensors(x, y)
        return logarithm(self, x, y, starts=starts, generator=generator)

    @override
    def logmap(self, x: Tensor, y: Tensor, *, check: bool = True) -> Tensor:
        """Shortest horizontal vector from ``x`` to the orbit of ``y``; differentiable twice.

        At rank one in closed form. Above by a solver, :meth:`logmap_report`: the shortest geodesic that it finds.

        Args:
            x: Point.
            y: Point of the same rank.
            check: Raise where there is no result; otherwise such an element is NaN.

        Raises:
            ValueError: The solver did not converge; or, at rank one, no shortest geodesic joins the points.
        """
        x, y = torch.broadcast_tensors(x, y)
        if x.shape[-1] == 1:
            v = self._rank_one_log(x, y)
            reason = "the shortest way between the matrices leads through zero, which is no matrix of rank one"
        else:
            report = self.logmap_report(x, y)
            v = torch.where(report.converged[..., None, None], report.vector, torch.nan)
            if is_differentiated(x, y):
                v = with_derivatives(self, x, y, v)
            reason = (
                "the solver did not converge, for they are too far apart, or no path joins them, as square matrices of "
                "full rank with determinants of either sign. Look at `logmap_report(x, y)`"
            )
        if check:
            self._refuse_nan(v, (x, y), (), f"expected points of {self.name} that a shortest geodesic joins; {reason}")
        return v

    def dist(self, x: Tensor, y: Tensor, *, keepdim: bool = False, check: bool = True) -> Tensor:
        """Geodesic distance; derivatives are finite where it is zero. Arguments and errors as for :meth:`dist2`."""
        return root(self.dist2(x, y, keepdim=keepdim, check=check))

    def dist2(self, x: Tensor, y: Tensor, *, keepdim: bool = False, check: bool = True) -> Tensor:
        """Squared distance: at rank one the infimum over all paths, above that of the geodesic :meth:`logmap` finds.

        Raises:
            ValueError: As :meth:`logmap`; at rank one only where a point is none.
        """
        x, y = torch.broadcast_tensors(x, y)
        if x.shape[-1] != 1:
            return self.inner(x, self.logmap(x, y, check=check), keepdim=keepdim)
        _, s, end, tangents = rank_one_coordinates(self.point_factors(x), self.point_factors(y))
        square = self.rank_one.dist2(s, end, sum_of_squares(tangents)).to(x.dtype)
        if check:
            self._refuse_nan(square, (x, y), (), f"expected points of {self.name} that a path joins")
        return square if keepdim else square.squeeze((-2, -1))

    def pairwise_dist(self, x: Tensor, y: Tensor, *, check: bool = True) -> Tensor:
        """Distances of all pairs: ``(..., p, rows, r)`` and ``(..., q, rows, r)`` -> ``(..., p, q)``."""
        return self.dist(x.unsqueeze(-3), y.unsqueeze(-4), check=check)

    def _rank_one_log(self, x: Tensor, y: Tensor) -> Tensor:
        (g, h), s, end, (tg, th) = rank_one_coordinates(self.point_factors(x), self.point_factors(y))
        radial, factor = self.rank_one.log(s, end, sum_of_squares((tg, th)))
        space = self._at(x)
        return space.vector(space.lift(*space.products([(g * radial + tg * factor, h), (g, th * factor)]))).to(x.dtype)

    @override
    def _check_point_on_manifold(self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5) -> tuple[bool, str | None]:
        if not bool(x.isfinite().all()):
            return False, "expected finite factors, got NaN or Inf"
        return full_rank(self.deficient(x), x, "factors", "G H^T")

    def deficient(self, x: Tensor) -> Tensor:
        r"""Whether :math:`s_r(X) \le 10 \max(n, m)\, \epsilon\, |L| |R|` in float64, for each element."""
        x = x.detach().double()
        # The frame of such an element is NaN, and so is that of one which is not finite itself.
        return x.isfinite().all(dim=(-2, -1)) & ~(self.frame(x).spectrum.select(-1, -1) > 0)
