r"""Positive semidefinite matrices of rank ``r`` as one factor, up to rotation.

A point is a factor :math:`Y \in \mathbb{R}^{n \times r}` of full rank; the group O(r) acts by :math:`Y a^\top` and
leaves :math:`Y Y^\top` unchanged. With the Frobenius metric on ``Y`` the distance of two points is the
Bures-Wasserstein distance of the two matrices, and everything is in closed form.

Imports: geoopt, torch, :mod:`quotient_nets.linalg`. Knows nothing of networks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from typing_extensions import override

from quotient_nets.linalg import (
    CORRECTIONS,
    at_least_single,
    column_signs,
    gram,
    inverse_action,
    random_orthogonal,
    solve_by_correction,
)
from quotient_nets.manifolds.base import QuotientManifold, full_rank
from quotient_nets.manifolds.procrustes import alignment
from quotient_nets.tangent_space import Checked


class _Principal(NamedTuple):
    """``Y rotation = basis diag(s)``: a thin singular value decomposition, constant under autograd."""

    basis: Tensor
    s: Tensor
    rotation: Tensor


class PSDFixedRank(QuotientManifold):
    r"""Matrices :math:`Y Y^\top` of rank ``r`` with the metric :math:`\operatorname{tr}(u^\top v)` on the factor.

    Horizontal vectors have symmetric :math:`Y^\top u`. Geodesics are straight lines, :math:`Y + t u`, as long as the
    rank does not drop; the manifold is not complete. With :math:`Y Y^\top = U \operatorname{diag}(l) U^\top`, a
    tangent :math:`U M U^\top + U_p U^\top + U U_p^\top` has squared norm
    :math:`\sum M_{ij}^2 / (2 (l_i + l_j)) + \sum |U_{p,j}|^2 / l_j`.

    All methods are differentiable twice in all arguments, also at repeated eigenvalues, and give NaN for a
    rank-deficient element only.

    Args:
        n: Rows of ``Y``. The rank is that of the point, ``1 <= r <= n``.

    Raises:
        ValueError: ``n`` is not a positive integer.

    Source: Journee, Bach, Absil and Sepulchre (2010); Massart and Absil (2020) for logarithm and injectivity radius.
    """

    def __init__(self, n: int):
        super().__init__()
        if not (isinstance(n, int) and n > 0):
            raise ValueError(f"expected a positive integer n (rows of Y), got n={n!r}")
        self.n = n

    @property
    def name(self) -> str:
        """Class and size, for messages."""
        return f"PSDFixedRank({self.n})"

    @override
    def _numbers(self) -> tuple[Any, ...]:
        return (self.n,)

    def dimension(self, r: int) -> int:
        """Dimension of the manifold of matrices of rank ``r``, ``n r - r (r - 1) / 2``."""
        return self.n * r - r * (r - 1) // 2

    @override
    def product(self, x: Tensor) -> Tensor:
        """The matrix :math:`Y Y^T`, ``(..., n, n)``."""
        return x @ x.mT

    @override
    def action(self, x: Tensor, a: Tensor) -> Tensor:
        """Representative :math:`Y a^T`; of the same point for orthogonal ``a`` only."""
        return x @ a.to(x.dtype).mT

    @override
    def infinitesimal_action(self, x: Tensor, xi: Tensor) -> Tensor:
        r"""Vertical vector :math:`Y \operatorname{skew}(\xi)^\top`."""
        return x @ (xi.mT - xi) / 2

    def random_element(
        self, *size: int, generator: torch.Generator | None = None, dtype: torch.dtype = torch.float64
    ) -> Tensor:
        """Random orthogonal matrices of either determinant, uniform: ``(*size, r)`` for a batch shape and, last, r."""
        return random_orthogonal(*size, size[-1], generator=generator, dtype=dtype)

    def _principal(self, x: Tensor) -> _Principal:
        self._refuse_shape(x)
        x = x.detach()
        y = x.double()
        finite = y.isfinite().all((-2, -1), keepdim=True)
        # LAPACK refuses a whole batch for one NaN; the element gets its NaN back below.
        u, s, vt = torch.linalg.svd(torch.where(finite, y, 0.0), full_matrices=False)
        floor = 10 * self.n * torch.finfo(y.dtype).eps * torch.linalg.vector_norm(s, dim=-1, keepdim=True)
        full = finite.squeeze(-1) & (s.narrow(-1, -1, 1) > floor)
        s = torch.where(full, s, math.nan)
        sign = column_signs(u)
        return _Principal(*(t.to(x.dtype) for t in (u * sign, s, vt.mT.mul(sign))))

    def canonicalize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        r"""The representative with orthogonal columns, one for each orbit, and the group element that leads to it.

        Columns descend in norm; their signs are those that make the product with a fixed vector positive. Unique where
        no eigenvalue is repeated.

        Returns:
            ``(y, a)`` with ``y = action(x, a)``, both detached.
        """
        p = self._principal(at_least_single(x))
        return (p.basis * p.s.unsqueeze(-2)).to(x.dtype), p.rotation.mT.to(x.dtype)

    @override
    def inner(self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        other = u if v is None else v
        x, u, other = torch.broadcast_tensors(x, u, other)
        return (u * other).sum(dim=(-2, -1), keepdim=keepdim)

    @override
    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        r"""Horizontal part :math:`u - Y W` with :math:`Y^\top Y W + W Y^\top Y = Y^\top u - u^\top Y`, ``W`` skew.

        Elementwise in the eigenbasis of :math:`Y^\top Y`. Cost: one SVD of ``x`` and two products.
        """
        x, u = torch.broadcast_tensors(x, u)
        y, z = at_least_single(x), at_least_single(u)
        p = self._principal(y)
        y, z = y @ p.rotation, z @ p.rotation
        square = gram(y, y)
        k = gram(y, z)
        scale = p.s.square().unsqueeze(-1) + p.s.square().unsqueeze(-2)
        w = solve_by_correction(lambda w: square @ w + w @ square, scale, k - k.mT, CORRECTIONS)
        return ((z - y @ w) @ p.rotation.mT).to(u.dtype)

    @override
    def egrad2rgrad(self, x: Tensor, u: Tensor) -> Tensor:
        """Horizontal part of the Euclidean gradient."""
        return self.proju(x, u)

    def ehess2rhess(self, x: Tensor, egrad: Tensor, ehess: Tensor, u: Tensor) -> Tensor:
        """Riemannian Hessian along ``u`` from the Euclidean derivative ``ehess`` of the gradient along ``u``."""
        return self.proju(x, ehess)

    @override
    def expmap(self, x: Tensor, u: Tensor, *, check: bool = True) -> Tensor:
        """Geodesic ``Y + u``; minimising for ``|u| < injectivity_radius(x)``.

        Shorter geodesics stay on the manifold. A longer one leaves it where the rank of ``Y + t u`` drops on the way;
        that element is NaN. :meth:`retr` is the same line, unchecked and far cheaper: no decomposition of ``x``.

        Args:
            x: Point.
            u: Horizontal vector.
            check: Raise where a geodesic leaves the manifold; otherwise only NaN.

        Raises:
            ValueError: A geodesic leaves the manifold.
        """
        y = torch.where(self._loses_rank(x, u)[..., None, None], math.nan, x + u)
        if check:
            reason = "the rank drops on the way. Steps shorter than `injectivity_radius(x)` do not leave it"
            self._refuse_nan(y, (x,), (u,), f"expected a geodesic that stays on {self.name}; {reason}")
        return y

    def _loses_rank(self, x: Tensor, u: Tensor) -> Tensor:
        """Whether :math:`(Y + t u) w = 0` for some ``w`` and ``0 < t <= 1``."""
        x, u = torch.broadcast_tensors(x.detach(), u.detach())
        x, u = at_least_single(x), at_least_single(u)
        square, along, speed = (gram(*pair).double() for pair in ((x, x), (x, u), (u, u)))
        finite = (square.isfinite() & along.isfinite()).all(dim=(-2, -1), keepdim=True)
        eye = torch.eye(x.shape[-1], dtype=square.dtype, device=x.device)
        root = torch.linalg.cholesky_ex(torch.where(finite, square, eye))[0]

        def relative(a: Tensor) -> Tensor:
            half = torch.linalg.solve_triangular(root, torch.where(finite, a, 0.0), upper=False)
            return torch.linalg.solve_triangular(root, half.mT, upper=False)

        rates, vectors = torch.linalg.eigh(relative(along + along.mT).nan_to_num() / 2)
        # Along such a direction Y + t u is (1 + t rate) Y plus what leaves the columns of Y, and both must vanish.
        total = (vectors * (relative(speed) @ vectors)).sum(dim=-2)
        rest = (total - rates.square()).clamp_min(0.0)
        rounding = 100 * self.n * torch.finfo(x.dtype).eps * total
        return ((rates <= -1) & (rest <= rounding)).any(dim=-1)

    def second_order(self, x: Tensor, u: Tensor) -> Tensor:
        """``Y + u``: the geodesic itself."""
        return x + u

    @override
    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        r"""Shortest horizontal vector from ``x`` to the orbit of ``y``: :math:`Y_y Q - Y_x`.

        ``Q`` is the orthogonal polar factor of :math:`Y_y^\top Y_x`. NaN where that matrix is singular: several
        geodesics are then equally short.
        """
        x, y = self._together(x, y)
        q, least, largest = alignment(gram(y, x))
        unique = (least > 10 * self.n * torch.finfo(torch.float64).eps * largest)[..., None, None]
        return torch.where(unique, y @ q - x, math.nan)

    @override
    def dist(self, x: Tensor, y: Tensor, *, keepdim: bool = False) -> Tensor:
        """Bures-Wasserstein distance of the matrices; derivatives are finite everywhere."""
        x, y = self._together(x, y)
        return self.norm(x, y @ alignment(gram(y, x))[0] - x, keepdim=keepdim)

    @override
    def dist2(self, x: Tensor, y: Tensor, *, keepdim: bool = False) -> Tensor:
        """Squared distance, without the root's singular derivative."""
        x, y = self._together(x, y)
        return self.inner(x, y @ alignment(gram(y, x))[0] - x, keepdim=keepdim)

    def _together(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Two points in one batch."""
        self._refuse_shape(x)
        self._refuse_shape(y)
        x, y = torch.broadcast_tensors(x, y)
        return x, y

    def pairwise_dist(self, x: Tensor, y: Tensor) -> Tensor:
        """Distances of all pairs: ``(..., p, n, r)`` and ``(..., q, n, r)`` -> ``(..., p, q)``."""
        return self.dist(x.unsqueeze(-3), y.unsqueeze(-4))

    @override
    def transp(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        r"""Horizontal lift at ``y`` of the projected tangent matrix :math:`v Y^\top + Y v^\top`.

        Independent of the representatives. Not an isometry. Other libraries project the array ``v`` at ``y``, which
        depends on them.
        """
        x, y, v = torch.broadcast_tensors(x, y, v)
        at, vector = at_least_single(x), at_least_single(v)
        return self._lift(y, lambda basis: vector @ gram(at, basis) + at @ gram(vector, basis))

    def to_ambient(self, x: Tensor, u: Tensor) -> Tensor:
        r"""Tangent matrix :math:`u Y^\top + Y u^\top`, ``(..., n, n)``."""
        half = u @ x.mT
        return half + half.mT

    def from_ambient(self, x: Tensor, matrix: Tensor) -> Tensor:
        """Horizontal lift of a symmetric matrix's projection on the tangent space; the symmetric part is taken."""
        matrix = at_least_single(matrix + matrix.mT) / 2
        return self._lift(x, lambda basis: matrix @ basis)

    def _lift(self, y: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
        """Horizontal lift at ``y`` of the tangent projection of the symmetric matrix that ``multiply`` applies."""
        p = self._principal(at_least_single(y))
        s = p.s.unsqueeze(-2)
        basis = at_least_single(y) @ p.rotation / s
        defect = torch.eye(s.shape[-1], dtype=basis.dtype, device=basis.device) - gram(basis, basis)
        right = inverse_action(multiply(basis), defect)
        core = inverse_action(gram(basis, right).mT, defect)
        lifted = (right - basis @ core.mT / 2) / s
        return self.proju(y, lifted @ p.rotation.mT).to(y.dtype)

    def best_rank_r(self, matrix: Tensor, r: int) -> Tensor:
        """Nearest positive semidefinite matrix of rank ``r`` to a symmetric one, as a point; detached.

        Raises:
            ValueError: ``r`` is not between 1 and ``n``; fewer than ``r`` eigenvalues are positive.
        """
        if not 1 <= r <= self.n:
            raise ValueError(f"expected a rank 1 <= r <= {self.n}, got r={r!r}")
        matrix = matrix.detach()
        values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
        values, vectors = values.narrow(-1, -r, r).flip(-1), vectors.narrow(-1, -r, r).flip(-1)
        if not bool((values > 0).all()):
            raise ValueError(
                f"expected at least r={r} positive eigenvalues, got {(values > 0).sum(-1).min()}. Use a smaller r."
            )
        return self.canonicalize(vectors * values.sqrt().unsqueeze(-2))[0]

    def injectivity_radius(self, x: Tensor) -> Tensor:
        """Least singular value of ``Y``: shorter geodesics are the only shortest ones. Exact (Massart and Absil)."""
        return self._principal(at_least_single(x)).s.select(-1, -1)

    @override
    def _check_shape(self, shape: tuple[int, ...], name: str) -> tuple[bool, str | None]:
        ok, reason = cast("Checked", super()._check_shape(cast("Any", shape), name))
        if ok and (shape[-2] != self.n or not 1 <= shape[-1] <= self.n):
            return False, (
                f"`{name}` must have shape (..., {self.n}, r) with 1 <= r <= {self.n}; got {tuple(shape)}. "
                "Build it from a matrix with `best_rank_r(matrix, r)`."
            )
        return ok, reason

    @override
    def _check_point_on_manifold(self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5) -> tuple[bool, str | None]:
        if not bool(x.isfinite().all()):
            return False, "expected a finite factor, got NaN or Inf"
        return full_rank(~(self.injectivity_radius(x.double()) > 0), x, "a factor", "Y")
