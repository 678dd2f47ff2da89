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

from quotient_nets.linalg import Frame, at_least_single, balanced_frame, frame, random_orthogonal
from quotient_nets.manifolds.base import QuotientManifold, full_rank, root
from quotient_nets.manifolds.invariant_tangent import InvariantTangentSpace
from quotient_nets.manifolds.rank_one import invariant_log
from quotient_nets.tangent_space import Checked


class FixedRank(QuotientManifold):
    r"""Pairs of factors under GL(r): what all metrics on ``(G, H) ~ (G a^{-1}, H a^T)`` share.

    Args:
        n: Rows of ``G``.
        m: Rows of ``H``. The rank is that of the point: ``1 <= r <= min(n, m)``.

    Raises:
        ValueError: ``n`` or ``m`` is not a positive integer.
    """

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
        g, h = x.split([self.n, self.m], dim=-2)
        return g, h

    @override
    def product(self, x: Tensor) -> Tensor:
        """The matrix :math:`G H^T`, ``(..., n, m)``."""
        g, h = self.unpack_tensor(x)
        return g @ h.mT

    @override
    def action(self, x: Tensor, a: Tensor) -> Tensor:
        """Representative :math:`(G a^{-1}, H a^T)`; NaN or Inf where ``a`` is singular."""
        g, h = self.unpack_tensor(at_least_single(x))  # no solver for less
        a = a.to(g.dtype)
        left = torch.linalg.solve_ex(a, g, left=False)[0]
        return self.pack_point(left, h @ a.mT).to(x.dtype)

    @override
    def infinitesimal_action(self, x: Tensor, xi: Tensor) -> Tensor:
        r"""Vertical vector :math:`(-G \xi, H \xi^\top)`."""
        g, h = self.unpack_tensor(x)
        return self.pack_point(-(g @ xi), h @ xi.mT)

    def frame(self, x: Tensor) -> Frame:
        """Singular value decomposition of :math:`G H^T` and the way to it; see :class:`quotient_nets.linalg.Frame`."""
        return frame(*self.unpack_tensor(at_least_single(x)))

    def canonicalize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        r"""The balanced representative, one for each orbit, and the group element that leads to it.

        :math:`G^\top G = H^\top H = \operatorname{diag}(s)`, singular values in descending order, signs fixed. It is
        unique where no singular value is repeated, and has the least condition number of all representatives.

        Returns:
            ``(y, a)`` with ``y = action(x, a)``, both detached.
        """
        f = self.frame(x)
        root = f.spectrum.sqrt().unsqueeze(-2)
        y = torch.cat([f.g * root, f.h * root], dim=-2)
        return y.to(x.dtype), (f.push_g / root.mT).to(x.dtype)

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

    @override
    def _check_point_on_manifold(self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5) -> tuple[bool, str | None]:
        if not bool(x.isfinite().all()):
            return False, "expected finite factors, got NaN or Inf. Remove these entries before packing."
        return full_rank(self.deficient(x), x, "factors", "G H^T")

    def deficient(self, x: Tensor) -> Tensor:
        r"""Whether :math:`s_r(G H^\top) \le 10 \max(n, m)\, \epsilon\, |G| |H|` in float64, for each element."""
        x = x.detach().double()
        # The frame of such an element is NaN, and so is that of one which is not finite itself.
        return x.isfinite().all(dim=(-2, -1)) & ~(self.frame(x).spectrum.select(-1, -1) > 0)

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
        left, right = (random_orthogonal(*size, size[-1], generator=generator, **where) for _ in range(2))
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

    Every method builds the frame of ``x``, which takes more than half of the time (``tests/benchmarks``). Loops that
    stay at one point take :meth:`at`. All methods are differentiable twice in all arguments, also at repeated singular
    values, and give NaN for a rank-deficient element only.

    Source: Mishra, Meyer, Bonnabel and Sepulchre (2014); da Silva et al. (arXiv 2505.05409).
    """

    @override
    def at(self, x: Tensor, *, balanced: bool = False) -> InvariantTangentSpace:
        """Tangent space at ``x``, constant under autograd, in orthonormal coordinates.

        Args:
            x: Point, ``(..., n + m, r)``.
            balanced: ``x`` is as :meth:`canonicalize` returns it; the frame then needs no decomposition.
        """
        f = balanced_frame(*self.unpack_tensor(x)) if balanced else self.frame(x)
        return InvariantTangentSpace(x.detach(), self.n, f)

    def _at(self, x: Tensor) -> InvariantTangentSpace:
        return InvariantTangentSpace(x, self.n, self.frame(x), differentiable=True)

    @override
    def inner(self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        space = self._at(x)
        c = space.coordinates(u)
        inner = space.inner(c, c if v is None else space.coordinates(v)).to(x.dtype)
        return inner if keepdim else inner.squeeze((-2, -1))

    @override
    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        r"""Horizontal part of an ambient vector.

        With orthonormal frames and :math:`K = h^\top c_h`, :math:`L = c_g^\top g`, the vertical part has
        :math:`\zeta^\top_{ij} = (s_i s_j K_{ij} - s_j^2 L_{ij}) / (s_i^2 + s_j^2)`: elementwise, no Sylvester solver.
        """
        space = self._at(x)
        return space.vector(space.project(space.coordinates(u))).to(x.dtype)

    @override
    def egrad2rgrad(self, x: Tensor, u: Tensor) -> Tensor:
        r"""Horizontal part of :math:`(e_G\, G^\top G,\; e_H\, H^\top H)`.

        The Euclidean gradient is ``u = (e_G, e_H)``.
        """
        space = self._at(x)
        return space.vector(space.gradient(space.pull_gradient(u))).to(x.dtype)

    def second_order(self, x: Tensor, u: Tensor) -> Tensor:
        r"""Second-order retraction: the Taylor polynomial of the geodesic, as the sharpness paper has it.

        .. math:: G + u_G + \tfrac12 \left(u_G S^{-1} (u_G^\top G + G^\top u_G) - G S^{-1} u_G^\top u_G\right),
                  \quad S = G^\top G, \text{ and likewise for } H.
        """
        return self._follow(x, u, "second_order")

    @override
    def expmap(self, x: Tensor, u: Tensor, *, radius: float | None = None) -> Tensor:
        r"""Exact geodesic, in closed form, at time 1.

        With :math:`W = u_G S^{-1} G^\top`, :math:`G(t) = e^{t (W - W^\top)} e^{t W^\top} G`, evaluated in the
        ``2r``-dimensional span of ``G`` and ``u_G``; likewise for ``H``. Accurate to 1e-7 for steps of norm up to 30 in
        float64; beyond, the growing and the decaying part of the exponential cancel.

        Args:
            x: Point.
            u: Horizontal vector.
            radius: Upper bound on the norm of ``u``, if known: a series of just the degree it needs replaces
                ``torch.matrix_exp``.
        """
        return self._follow(x, u, "expmap", radius)

    def _follow(self, x: Tensor, u: Tensor, path: str, radius: float | None = None) -> Tensor:
        space = self._at(x)
        return space.move(space.coordinates(u), path, radius).to(x.dtype)

    @override
    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        r"""Shortest horizontal vector from ``x`` to the orbit of ``y``; rank one only, in closed form.

        With :math:`X_i = s_i u_i v_i^\top`, :math:`\theta_u` the angle of ``u`` and a common sign chosen well,
        :math:`|\log|^2 = \tfrac12 \log(s_2 / s_1)^2 + \theta_u^2 + \theta_v^2`. NaN where a vector meets its antipode.

        Raises:
            NotImplementedError: The rank is above one, where no closed form is known.
        """
        ug, uh = self._log(x, y)
        g, h = self.unpack_tensor(x)
        lengths = (torch.linalg.vector_norm(t, dim=-2, keepdim=True) for t in (g, h))
        return self.pack_point(*(u * length for u, length in zip((ug, uh), lengths, strict=True))).to(x.dtype)

    @override
    def dist(self, x: Tensor, y: Tensor, *, keepdim: bool = False) -> Tensor:
        """Geodesic distance, for rank one as :meth:`logmap`; derivatives are finite where it is zero."""
        return root(self.dist2(x, y, keepdim=keepdim))

    @override
    def dist2(self, x: Tensor, y: Tensor, *, keepdim: bool = False) -> Tensor:
        """Squared distance."""
        ug, uh = (part.square().sum(dim=(-2, -1), keepdim=keepdim) for part in self._log(x, y))
        return (ug + uh).to(x.dtype)

    def _log(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if x.shape[-1] != 1 or y.shape[-1] != 1:
            raise NotImplementedError(
                f"expected points of rank 1, got rank {max(x.shape[-1], y.shape[-1])}: {type(self).__name__} has no "
                "logarithm and no distance above rank one yet. PSDFixedRank has both at every rank."
            )
        x, y = torch.broadcast_tensors(x, y)
        return invariant_log(*self.unpack_tensor(x), *self.unpack_tensor(y))

    @override
    def transp(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        r"""Horizontal lift at ``y`` of :math:`P_{T_Y}(v_G H^\top + G v_H^\top)`: independent of all representatives.

        Not an isometry. Manopt projects the raw arrays of ``v`` at ``y``, which depends on the representatives.
        """
        space = self._at(y)
        return space.vector(space.lift(*self.unpack_tensor(x), *self.unpack_tensor(v))).to(v.dtype)
