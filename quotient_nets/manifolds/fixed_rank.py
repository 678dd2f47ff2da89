r"""Matrices of rank ``r`` as pairs of factors, up to a change of basis.

A point is a pair of full-rank factors :math:`G \in \mathbb{R}^{n \times r}` and :math:`H \in \mathbb{R}^{m \times r}`,
stacked by rows into one tensor ``(..., n + m, r)``. The group GL(r) acts by :math:`(G a^{-1}, H a^\top)` and leaves
:math:`G H^\top` unchanged. Query and key, or value and output weights of an attention head, and the two factors of a
LoRA update, are such pairs.

Imports: geoopt, torch, :mod:`quotient_nets.linalg`. Knows nothing of networks.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import override

from quotient_nets.linalg import (
    Frame,
    at_least_single,
    balanced_frame,
    frame,
    gram,
    is_differentiated,
    random_orthogonal,
    solve,
    solve_right,
)
from quotient_nets.manifolds.factor_tangent import FactorTangentSpace, Terms, stack
from quotient_nets.manifolds.invariant_tangent import InvariantTangentSpace
from quotient_nets.manifolds.matrices import FixedRankMatrices
from quotient_nets.manifolds.paths import embedded_chords, invariant_chords, preconditioned_chords
from quotient_nets.manifolds.product_tangent import FrobeniusTangentSpace, PreconditionedTangentSpace
from quotient_nets.manifolds.rank_one import Cylinder
from quotient_nets.tangent_space import Checked


class FixedRank(FixedRankMatrices):
    r"""Pairs of factors under GL(r): what all metrics on ``(G, H) ~ (G a^{-1}, H a^T)`` share.

    Args:
        n: Rows of ``G``.
        m: Rows of ``H``. The rank is that of the point: ``1 <= r <= min(n, m)``.

    Raises:
        ValueError: ``n`` or ``m`` is not a positive integer.
    """

    tangent_space: type[FactorTangentSpace]

    @override
    def at(self, x: Tensor, *, balanced: bool = False) -> FactorTangentSpace:
        f = balanced_frame(*self.unpack_tensor(x)) if balanced else self.frame(x)
        return self.tangent_space(x.detach(), self.n, f)

    @override
    def _at(self, x: Tensor) -> FactorTangentSpace:
        return self.tangent_space(x, self.n, self.frame(x), differentiable=is_differentiated(x))

    def pack_point(self, g: Tensor, h: Tensor) -> Tensor:
        """Point from its factors: ``(..., n, r)`` and ``(..., m, r)`` -> ``(..., n + m, r)``.

        Raises:
            ValueError: The factors do not have these shapes.
        """
        if g.dim() < 2 or h.dim() < 2 or (g.shape[-2], h.shape[-2], g.shape[-1]) != (self.n, self.m, h.shape[-1]):
            raise ValueError(
                f"expected factors of shapes (..., {self.n}, r) and (..., {self.m}, r), got {tuple(g.shape)} and "
                f"{tuple(h.shape)}. A torch Linear weight is (out, in): pass `weight.mT` where rows are inputs."
            )
        batch = torch.broadcast_shapes(g.shape[:-2], h.shape[:-2])
        return torch.cat([g.expand(*batch, *g.shape[-2:]), h.expand(*batch, *h.shape[-2:])], dim=-2)

    def unpack_tensor(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Factors ``(G, H)`` of a point, as views."""
        self._refuse_shape(x)
        g, h = x.split([self.n, self.m], dim=-2)
        return g, h

    @override
    def point_factors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.unpack_tensor(x)

    @override
    def tangent_factors(self, x: Tensor, u: Tensor) -> Terms:
        (g, h), (ug, uh) = self.unpack_tensor(x), self.unpack_tensor(u)
        return [(ug, h), (g, uh)]

    @override
    def action(self, x: Tensor, a: Tensor) -> Tensor:
        """Representative :math:`(G a^{-1}, H a^T)`; NaN or Inf where ``a`` is singular."""
        g, h = self.unpack_tensor(at_least_single(x))  # no solver for less
        a = a.to(g.dtype)
        left = solve_right(g, a)
        return self.pack_point(left, h @ a.mT).to(x.dtype)

    @override
    def infinitesimal_action(self, x: Tensor, xi: Tensor) -> Tensor:
        r"""Vertical vector :math:`(-G \xi, H \xi^\top)`."""
        g, h = self.unpack_tensor(x)
        return self.pack_point(-(g @ xi), h @ xi.mT)

    @override
    def frame(self, x: Tensor) -> Frame:
        return frame(*self.unpack_tensor(at_least_single(x)))

    @override
    def from_frame(self, g: Tensor, s: Tensor, h: Tensor) -> Tensor:
        root = s.sqrt().unsqueeze(-2)
        return torch.cat([g * root, h * root], dim=-2)

    def canonicalize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        r"""The balanced representative, one for each orbit, and the group element that leads to it.

        :math:`G^\top G = H^\top H = \operatorname{diag}(s)`, singular values in descending order, signs fixed. It is
        unique where no singular value is repeated, and has the least condition number of all representatives.

        Returns:
            ``(y, a)`` with ``y = action(x, a)``, both detached.
        """
        f = self.frame(x)
        y = self.from_frame(f.g, f.spectrum, f.h)
        return y.to(x.dtype), (f.push_g / f.spectrum.sqrt().unsqueeze(-1)).to(x.dtype)

    @override
    def orthographic(self, x: Tensor, u: Tensor) -> Tensor:
        space = self._at(x)
        moved = [self.point_factors(x), *self.tangent_factors(x, u)]
        right, left = (t.double() for t in space.products(moved))
        basis = space.g.double()
        push = gram(basis, self.unpack_tensor(x)[0].double())
        g = right @ solve(gram(basis, right), push)
        h = solve_right(left, push.mT)
        return stack(g, h).to(x.dtype)

    @override
    def _check_shape(self, shape: tuple[int, ...], name: str) -> tuple[bool, str | None]:
        ok, reason = cast("Checked", super()._check_shape(cast("Any", shape), name))
        if not ok:
            return ok, reason
        if shape[-2] != self.n + self.m or not 1 <= shape[-1] <= min(self.n, self.m):
            return False, (
                f"`{name}` must have shape (..., {self.n + self.m}, r) with 1 <= r <= {min(self.n, self.m)}: "
                f"n={self.n} rows of G above m={self.m} rows of H; got {tuple(shape)}. "
                "Build it with `pack_point(G, H)`."
            )
        return True, None

    def random_element(
        self,
        *size: int,
        condition: float = 10.0,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """Random group elements of a given condition number, with random orientation and determinant +1 or -1.

        Args:
            size: Batch shape and, last, ``r``.
            condition: Ratio of largest and smallest singular value; the others lie between in geometric progression.
            generator: Source of randomness.
            dtype: Precision; orthogonal factors are computed in it.

        Returns:
            ``(*size, r)``.

        Raises:
            ValueError: ``condition`` is less than 1.
        """
        if not condition >= 1:
            raise ValueError(f"expected a condition number of at least 1, got {condition!r}")
        where: dict[str, Any] = {"dtype": dtype, "device": None if generator is None else generator.device}
        left, right = (random_orthogonal(*size, size[-1], generator=generator, dtype=dtype) for _ in range(2))
        exponents = torch.linspace(-0.5, 0.5, size[-1], **where) if size[-1] > 1 else torch.zeros(1, **where)
        return (left * condition**exponents) @ right


class InvariantFixedRank(FixedRank):
    r"""Fixed-rank matrices with the metric invariant under all changes of the factors' bases.

    .. math:: \langle u, v \rangle_{(G, H)} = \operatorname{tr}((G^\top G)^{-1} u_G^\top v_G)
              + \operatorname{tr}((H^\top H)^{-1} u_H^\top v_H)

    The ``inv`` metric of the geodesic-sharpness paper, Manopt's ``fixedrankfactory_2factors``. Complete: geodesics
    exist for all times. Invariant under :math:`X \mapsto c X`. With :math:`X = U \operatorname{diag}(s) V^\top`, a
    tangent :math:`U M V^\top + U_p V^\top + U V_p^\top` has squared norm
    :math:`\sum M_{ij}^2 / (s_i^2 + s_j^2) + \sum (|U_{p,j}|^2 + |V_{p,j}|^2) / s_j^2`.

    - Horizontal vectors: :math:`u_G^\top G\,H^\top H = G^\top G\,H^\top u_H`.
    - Gradient: the horizontal part of :math:`(e_G\,G^\top G,\; e_H\,H^\top H)`.
    - ``expmap`` is in closed form: with :math:`W = u_G (G^\top G)^{-1} G^\top`,
      :math:`G(t) = e^{t (W - W^\top)} e^{t W^\top} G`, and likewise for ``H``, evaluated in the span of ``G`` and
      :math:`u_G`. Accurate to 1e-7 for steps of norm up to 30 in float64; beyond, the growing and the decaying part of
      the exponential cancel. With a bound ``radius`` on the norm of ``u`` a series of just the degree it needs replaces
      ``torch.matrix_exp``.
    - ``second_order`` is the Taylor polynomial of the geodesic, the path of the sharpness paper:
      :math:`G + u_G + \tfrac12 (u_G S^{-1} (u_G^\top G + G^\top u_G) - G S^{-1} u_G^\top u_G)`, :math:`S = G^\top G`.

    Every method builds the frame of ``x``, which takes more than half of the time (``tests/benchmarks``). Loops that
    stay at one point take :meth:`at`. All methods are differentiable twice in all arguments, also at repeated singular
    values, and give NaN for a rank-deficient element only.

    Source: Mishra, Meyer, Bonnabel and Sepulchre (2014); da Silva et al. (arXiv 2505.05409).
    """

    tangent_space = InvariantTangentSpace
    rank_one = Cylinder(0.5)
    chords = staticmethod(invariant_chords)


class PreconditionedFixedRank(FixedRank):
    r"""Fixed-rank matrices with the metric that preconditions each factor by the other.

    .. math:: \langle u, v \rangle_{(G, H)} = \operatorname{tr}(H^\top H\, u_G^\top v_G)
              + \operatorname{tr}(G^\top G\, u_H^\top v_H)

    The ``mix`` metric of the geodesic-sharpness paper, Manopt's ``fixedrankfactory_2factors_preconditioned``; its
    gradient :math:`(e_G (H^\top H)^{-1},\; e_H (G^\top G)^{-1})` is scaled gradient descent, the preconditioner of
    Riemannian LoRA. A tangent :math:`U M V^\top + U_p V^\top + U V_p^\top` has squared norm
    :math:`\tfrac12 |M|^2 + |U_p|^2 + |V_p|^2`: that of :class:`EmbeddedFixedRank` with ``M`` counted half.

    - Horizontal vectors: :math:`(G^\top G)^{-1} G^\top u_G = u_H^\top H (H^\top H)^{-1}`.
    - Not complete. A geodesic shorter than :math:`s_r / \sqrt 2` stays on the manifold. ``expmap`` is in closed form at
      rank one, a cone; otherwise it is integrated in the span of factor and velocity with an error of 1e-13 in each
      step (1e-9 in float32), at the cost of 12 evaluations with ``r x r`` matrices for each step.
    - At rank one no shortest geodesic joins two points at an angle of :math:`\pi / \sqrt 2` or more.

    Differentiable twice in all arguments.

    Source: Mishra, Apuroop and Sepulchre (arXiv 1211.1550); Tong, Ma and Chi (2021) for the gradient.
    """

    tangent_space = PreconditionedTangentSpace
    rank_one = PreconditionedTangentSpace.cone
    chords = staticmethod(preconditioned_chords)

    @override
    def is_flat(self, r: int) -> bool:
        return r == self.n == self.m


class EmbeddedFixedRank(FixedRank):
    r"""Fixed-rank matrices with the Frobenius metric of the matrices, in factors.

    .. math:: \langle u, v \rangle_{(G, H)} = \langle u_G H^\top + G u_H^\top,\; v_G H^\top + G v_H^\top \rangle

    Isometric to pymanopt's and Manopt's ``FixedRankEmbedded``. A tangent :math:`U M V^\top + U_p V^\top + U V_p^\top`
    has squared norm :math:`|M|^2 + |U_p|^2 + |V_p|^2`. Vertical vectors have length zero, so ``inner`` is a metric of
    horizontal vectors only: those of :class:`PreconditionedFixedRank`,
    :math:`(G^\top G)^{-1} G^\top u_G = u_H^\top H (H^\top H)^{-1}` (ROPTLIB's ``FixedRankQ2F``).

    - Gradient: :math:`((I - \tfrac12 P_G)\, e_G (H^\top H)^{-1},\; (I - \tfrac12 P_H)\, e_H (G^\top G)^{-1})`.
    - Not complete. A geodesic shorter than :math:`s_r` stays on the manifold. ``expmap`` is in closed form at rank one,
      a cone; otherwise it is integrated in the span of factor and velocity with an error of 1e-13 in each step (1e-9
      in float32). At full rank, ``r = min(n, m)``, it is the straight line of matrices.
    - :meth:`orthographic` and :meth:`second_order` are retractions of second order.

    Differentiable twice in all arguments.

    Source: Vandereycken (2013); Absil and Malick (2012).
    """

    tangent_space = FrobeniusTangentSpace
    rank_one = FrobeniusTangentSpace.cone
    chords = staticmethod(embedded_chords)

    @override
    def is_flat(self, r: int) -> bool:
        return r == min(self.n, self.m)
