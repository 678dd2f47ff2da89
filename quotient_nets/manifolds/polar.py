r"""Matrices of rank ``r`` by their polar factorisation, up to a rotation.

A point is a triple of :math:`U \in \mathbb{R}^{n \times r}` and :math:`V \in \mathbb{R}^{m \times r}` with orthonormal
columns and a symmetric positive definite :math:`B`, stacked by rows into one tensor ``(..., n + r + m, r)``. The group
O(r) acts by :math:`(U a^\top, a B a^\top, V a^\top)` and leaves :math:`U B V^\top` unchanged.

Imports: geoopt, torch, :mod:`quotient_nets.linalg`. Knows nothing of networks.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import override

from quotient_nets.linalg import (
    Frame,
    at_least_single,
    column_signs,
    gram,
    is_differentiated,
    is_finite,
    random_orthogonal,
    solve,
    times,
)
from quotient_nets.manifolds.factor_tangent import Terms, sym
from quotient_nets.manifolds.matrices import FixedRankMatrices
from quotient_nets.manifolds.paths import invariant_chords
from quotient_nets.manifolds.polar_tangent import PolarTangentSpace, skew
from quotient_nets.manifolds.procrustes import alignment
from quotient_nets.manifolds.rank_one import Cylinder
from quotient_nets.tangent_space import Checked


class PolarFixedRank(FixedRankMatrices):
    r"""Fixed-rank matrices :math:`U B V^\top` as a quotient of Stiefel, positive definite and Stiefel manifold.

    .. math:: \langle u, v \rangle_{(U, B, V)} = \operatorname{tr}(u_U^\top v_U)
              + \operatorname{tr}(B^{-1} u_B^\top B^{-1} v_B) + \operatorname{tr}(u_V^\top v_V)

    Manopt's ``fixedrankfactory_3factors``. Complete. Invariant under :math:`X \mapsto c X`. With the singular vectors
    ``U``, ``V`` of the matrix, a tangent :math:`U M V^\top + U_p V^\top + U V_p^\top` has squared norm
    :math:`\sum 2 \operatorname{sym}(M)_{ij}^2 / (s_i^2 + s_j^2) + \sum 2 \operatorname{skew}(M)_{ij}^2 / (s_i + s_j)^2
    + \sum (|U_{p,j}|^2 + |V_{p,j}|^2) / s_j^2`, between once and twice that of :class:`InvariantFixedRank`.

    - Horizontal vectors: :math:`\operatorname{skew}(U^\top u_U) + \operatorname{skew}(V^\top u_V) + u_B B^{-1} - B^{-1}
      u_B = 0`, for vectors tangent to the three manifolds. ``proju`` takes any ambient vector to the nearest.
    - Gradient: the horizontal part of the three gradients, :math:`B \operatorname{sym}(e_B) B` for ``B``.
    - ``expmap`` is in closed form: geodesics of the three manifolds with a horizontal velocity.
    - ``retr`` and ``second_order`` are one retraction of second order: the polar factors of :math:`U + u_U` and
      :math:`V + u_V`, and :math:`B + u_B + \tfrac12 u_B B^{-1} u_B`.

    All methods but ``orthographic`` are differentiable twice in all arguments, also at repeated singular values.

    Args:
        n: Rows of ``U``.
        m: Rows of ``V``. The rank is that of the point: ``1 <= r <= min(n, m)``.

    Raises:
        ValueError: ``n`` or ``m`` is not a positive integer.

    Source: Meyer, Bonnabel and Sepulchre (2011); Mishra, Meyer, Bonnabel and Sepulchre (2014).
    """

    rank_one = Cylinder(1.0)
    chords = staticmethod(invariant_chords)

    def pack_point(self, u: Tensor, b: Tensor, v: Tensor) -> Tensor:
        """Point from its factors: ``(..., n, r)``, ``(..., r, r)``, ``(..., m, r)`` -> ``(..., n + r + m, r)``.

        Raises:
            ValueError: The factors do not have these shapes.
        """
        r = u.shape[-1] if u.dim() else 0
        if any(t.dim() < 2 for t in (u, b, v)) or [u.shape[-2:], b.shape[-2:], v.shape[-2:]] != [
            (self.n, r),
            (r, r),
            (self.m, r),
        ]:
            raise ValueError(
                f"expected factors of shapes (..., {self.n}, r), (..., r, r) and (..., {self.m}, r), got "
                f"{tuple(u.shape)}, {tuple(b.shape)} and {tuple(v.shape)}"
            )
        batch = torch.broadcast_shapes(*(t.shape[:-2] for t in (u, b, v)))
        return torch.cat([t.expand(*batch, *t.shape[-2:]) for t in (u, b, v)], dim=-2)

    def unpack_tensor(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Factors ``(U, B, V)`` of a point, as views."""
        self._refuse_shape(x)
        u, b, v = x.split([self.n, x.shape[-1], self.m], dim=-2)
        return u, b, v

    @override
    def action(self, x: Tensor, a: Tensor) -> Tensor:
        """Representative :math:`(U a^T, a B a^T, V a^T)` for orthogonal ``a``."""
        u, b, v = self.unpack_tensor(x)
        a = a.to(x.dtype)
        return self.pack_point(u @ a.mT, a @ b @ a.mT, v @ a.mT)

    @override
    def infinitesimal_action(self, x: Tensor, xi: Tensor) -> Tensor:
        r"""Vertical vector :math:`(U \omega^\top, \omega B + B \omega^\top, V \omega^\top)`.

        :math:`\omega` is the skew-symmetric part of ``xi``.
        """
        u, b, v = self.unpack_tensor(x)
        omega = skew(xi)
        return self.pack_point(u @ omega.mT, omega @ b - b @ omega, v @ omega.mT)

    @override
    def frame(self, x: Tensor) -> Frame:
        x = at_least_single(x.detach())
        u, b, v = self.unpack_tensor(x)
        square = sym(b.double())
        finite = is_finite(x)
        square = torch.where(finite, square, 0.0)
        if x.shape[-1] == 1:
            s, p = square.squeeze(-1), torch.ones_like(square)
        else:
            values, vectors = torch.linalg.eigh(square)
            s, p = values.flip(-1), vectors.flip(-1)
        floor = 10 * max(self.n, self.m) * torch.finfo(s.dtype).eps
        full = finite & (s.narrow(-1, -1, 1).unsqueeze(-1) > floor * torch.linalg.matrix_norm(square, keepdim=True))
        # As for pairs of factors: no number for an element that is no point.
        valid = torch.where(full, 1.0, math.nan).to(s.dtype)
        p = (p * column_signs(u, p) * valid).to(x.dtype)
        return Frame(times(u, p), times(v, p), (s * valid.squeeze(-1)).to(x.dtype), p, p, p.mT, p.mT)

    @override
    def from_frame(self, g: Tensor, s: Tensor, h: Tensor) -> Tensor:
        return torch.cat([g, torch.diag_embed(s), h], dim=-2)

    def canonicalize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The singular value decomposition as representative, and the group element that leads to it; detached.

        Singular values are in descending order and signs are fixed. Unique where no singular value is repeated.
        """
        f = self.frame(x)
        return self.from_frame(f.g, f.spectrum, f.h).to(x.dtype), f.push_g.to(x.dtype)

    @override
    def at(self, x: Tensor, *, balanced: bool = False) -> PolarTangentSpace:
        if not balanced:
            return PolarTangentSpace(x.detach(), self.n, self.frame(x))
        u, b, v = self.unpack_tensor(x.detach())
        eye = torch.eye(b.shape[-1], dtype=b.dtype, device=b.device)
        return PolarTangentSpace(x.detach(), self.n, Frame(u, v, b.diagonal(dim1=-2, dim2=-1), eye, eye, eye, eye))

    @override
    def _at(self, x: Tensor) -> PolarTangentSpace:
        return PolarTangentSpace(x, self.n, self.frame(x), differentiable=is_differentiated(x))

    @override
    def point_factors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        u, b, v = self.unpack_tensor(x)
        return times(u, b), v

    @override
    def tangent_factors(self, x: Tensor, u: Tensor) -> Terms:
        (left, b, right), (du, db, dv) = self.unpack_tensor(x), self.unpack_tensor(u)
        return [(times(du, b) + times(left, db), right), (times(left, b), dv)]

    @override
    def retr(self, x: Tensor, u: Tensor) -> Tensor:
        """The retraction :meth:`second_order`: a straight line would leave the manifold."""
        return self.second_order(x, u)

    @override
    def orthographic(self, x: Tensor, u: Tensor) -> Tensor:
        space = self.at(x)
        right, left = (t.double() for t in space.products([self.point_factors(x), *self.tangent_factors(x, u)]))
        core = gram(space.g.double(), right)
        finite = (right.isfinite().all((-2, -1)) & left.isfinite().all((-2, -1)))[..., None, None]
        (p, r), (q, t) = (torch.linalg.qr(torch.where(finite, f, 0.0)) for f in (right, left))
        middle = torch.where(finite, r @ solve(core, t.mT), 0.0)
        w, s, zt = torch.linalg.svd(middle.nan_to_num())
        g, h = p @ w, q @ zt.mT
        old, _, other = (part.double() for part in self.unpack_tensor(x))
        turn = alignment(gram(g, old) + gram(h, other))[0].detach()
        b = turn.mT @ (s.unsqueeze(-1) * turn)
        y = self.pack_point(g @ turn, b, h @ turn)
        return torch.where(finite, y, math.nan).to(x.dtype)

    @override
    def _draw(self, shape: tuple[int, ...], *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        """Uniform ``U`` and ``V``; ``B`` with logarithms of eigenvalues that are normal, of deviation 1/2."""
        batch, r = shape[:-2], shape[-1]
        options["dtype"] = torch.float64
        u, v, q = (random_orthogonal(*batch, rows, r, **options) for rows in (self.n, self.m, r))
        s = (torch.randn(*batch, r, **options) / 2).exp()
        return self.pack_point(u, (q * s.unsqueeze(-2)) @ q.mT, v).to(dtype or torch.get_default_dtype())

    def random_element(
        self, *size: int, generator: torch.Generator | None = None, dtype: torch.dtype = torch.float64
    ) -> Tensor:
        """Uniform orthogonal matrices ``(*size, r)`` of either determinant; ``size`` is the batch and, last, ``r``."""
        return random_orthogonal(*size, size[-1], generator=generator, dtype=dtype)

    @override
    def _check_shape(self, shape: tuple[int, ...], name: str) -> tuple[bool, str | None]:
        ok, reason = cast("Checked", super()._check_shape(cast("Any", shape), name))
        if ok and (not 1 <= shape[-1] <= min(self.n, self.m) or shape[-2] != self.n + shape[-1] + self.m):
            return False, (
                f"`{name}` must have shape (..., {self.n} + r + {self.m}, r) with 1 <= r <= {min(self.n, self.m)}: "
                f"n={self.n} rows of U above r rows of B above m={self.m} rows of V; got {tuple(shape)}. "
                "Build it with `pack_point(U, B, V)`."
            )
        return ok, reason

    @override
    def _check_point_on_manifold(self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5) -> tuple[bool, str | None]:
        ok, reason = super()._check_point_on_manifold(x, atol=atol, rtol=rtol)
        if not ok:
            return ok, reason
        u, b, v = (part.double() for part in self.unpack_tensor(x))
        eye = torch.eye(b.shape[-1], dtype=b.dtype, device=b.device)
        for factor, name in ((u, "U"), (v, "V")):
            error = (gram(factor, factor) - eye).abs().max()
            if float(error) > atol + rtol:
                return False, f"expected orthonormal columns of {name}, got {name}^T {name} off by {float(error):.2g}"
        error, size = (b - b.mT).abs().max(), b.abs().max()
        if float(error) > atol + rtol * float(size):
            return False, f"expected a symmetric B, got B - B^T of up to {float(error):.2g}"
        return True, None
