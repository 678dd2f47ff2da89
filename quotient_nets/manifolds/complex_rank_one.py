r"""Pairs of complex vectors up to a complex number: complex matrices of rank one.

A point is a pair of nonzero :math:`G \in \mathbb{C}^n` and :math:`H \in \mathbb{C}^m`. The group of nonzero complex
numbers acts by :math:`(G a^{-1}, H \bar a)` and leaves :math:`G H^*` unchanged. The query and the key weights of two
channels that a rotary position embedding turns together are such a pair.

Storage is real, so that geoopt's optimizers accept it: the vectors are stacked into one tensor ``(..., n + m, 2)``
whose last axis is (re, im). A group element :math:`a = \alpha + i \beta` is the matrix
:math:`\begin{pmatrix} \alpha & \beta \\ -\beta & \alpha \end{pmatrix}`, which multiplies rows (re, im) from the right;
of any other real ``2 x 2`` matrix its complex-linear part counts.

Imports: geoopt, torch, :mod:`quotient_nets.linalg`. Knows nothing of networks.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import override

from quotient_nets.linalg import at_least_single
from quotient_nets.manifolds.base import QuotientManifold, root
from quotient_nets.manifolds.complex_rows import (
    complex_matrix,
    conjugate,
    dot,
    number,
    outer,
    real_dot,
    real_rows,
    reference_phase,
    times,
    turn,
)
from quotient_nets.manifolds.complex_tangent import ComplexTangentSpace, length
from quotient_nets.tangent_space import Checked


class ComplexRankOne(QuotientManifold):
    r"""Complex ``n x m`` matrices of rank one, :math:`G H^*`, with the metric that the group leaves unchanged.

    .. math:: \langle u, v \rangle_{(G, H)} = \operatorname{Re} u_G^* v_G / |G|^2 + \operatorname{Re} u_H^* v_H / |H|^2

    Horizontal vectors have :math:`G^* u_G / |G|^2` conjugate to :math:`H^* u_H / |H|^2`. The manifold is a line times
    the compact homogeneous space :math:`(S^{2n-1} \times S^{2m-1}) / \mathrm{U}(1)`, so it is complete, and everything
    is in closed form up to one monotone equation for a phase.

    All methods are differentiable twice in all arguments; NaN for an element with a zero vector only.

    Args:
        n: Complex entries of ``G``.
        m: Complex entries of ``H``.

    Raises:
        ValueError: ``n`` or ``m`` is not a positive integer.
    """

    def __init__(self, n: int, m: int):
        super().__init__()
        if not (isinstance(n, int) and isinstance(m, int) and n > 0 and m > 0):
            raise ValueError(f"expected positive integers n (entries of G) and m (entries of H), got n={n!r}, m={m!r}")
        self.n, self.m = n, m

    @property
    def name(self) -> str:
        """Class and sizes, for messages."""
        return f"ComplexRankOne({self.n}, {self.m})"

    @override
    def _numbers(self) -> tuple[Any, ...]:
        return self.n, self.m

    def dimension(self, r: int = 2) -> int:
        """Real dimension of the manifold, ``2 (n + m - 1)``; ``r``, the last axis of a point, is always 2."""
        return 2 * (self.n + self.m - 1)

    def pack_point(self, g: Tensor, h: Tensor) -> Tensor:
        """Real point ``(..., n + m, 2)`` from vectors, complex ``(..., n)``, ``(..., m)`` or real with a last axis 2.

        Raises:
            ValueError: The vectors do not have these shapes.
        """
        real = [real_rows(t) for t in (g, h)]
        if any(t.shape[-2:] != (size, 2) for t, size in zip(real, (self.n, self.m), strict=True)):
            raise ValueError(
                f"expected complex vectors of shapes (..., {self.n}) and (..., {self.m}), or real ones with a last "
                f"axis (re, im); got {g.dtype} {tuple(g.shape)} and {h.dtype} {tuple(h.shape)}."
            )
        batch = torch.broadcast_shapes(*(t.shape[:-2] for t in real))
        return torch.cat([t.expand(*batch, *t.shape[-2:]) for t in real], dim=-2)

    def unpack_tensor(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors ``(G, H)`` of a point as real views, ``(..., n, 2)`` and ``(..., m, 2)``."""
        g, h = x.split([self.n, self.m], dim=-2)
        return g, h

    @override
    def product(self, x: Tensor) -> Tensor:
        """The matrix :math:`G H^*`, real ``(..., n, m, 2)``; ``torch.view_as_complex`` makes it complex."""
        return outer(*self.unpack_tensor(x))

    @override
    def action(self, x: Tensor, a: Tensor) -> Tensor:
        r"""Representative :math:`(G a^{-1}, H \bar a)`; NaN or Inf where ``a`` is zero."""
        g, h = self.unpack_tensor(at_least_single(x))
        bar = conjugate(number(a.to(g.dtype)))
        return self.pack_point(times(g, bar / real_dot(bar, bar)), times(h, bar)).to(x.dtype)

    @override
    def infinitesimal_action(self, x: Tensor, xi: Tensor) -> Tensor:
        r"""Vertical vector :math:`(-G \xi, H \bar\xi)`."""
        g, h = self.unpack_tensor(x)
        z = number(xi)
        return self.pack_point(-times(g, z), times(h, conjugate(z)))

    def random_element(
        self,
        *size: int,
        spread: float = 10.0,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """Random group elements ``(*size, 2)`` for a batch shape and, last, 2.

        Uniform in the phase and in the logarithm of the modulus, between ``spread**-0.5`` and ``spread**0.5``.
        """
        device = None if generator is None else generator.device
        turns, power = torch.rand(2, *size[:-1], 1, 1, generator=generator, dtype=dtype, device=device).unbind()
        angle = 2 * math.pi * turns
        return complex_matrix(torch.cat([angle.cos(), angle.sin()], dim=-1) * spread ** (power - 0.5))

    def canonicalize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The representative with ``|G| = |H|``, one for each orbit, and the group element that leads to it; detached.

        The phase makes the product of ``G`` with a fixed generic real vector positive; unique where that is not 0.
        """
        g, h = self.unpack_tensor(at_least_single(x.detach()))
        a = complex_matrix(reference_phase(g) * (length(g).sqrt() / length(h).sqrt()))
        return self.action(self.pack_point(g, h), a).to(x.dtype), a.to(x.dtype)

    @override
    def at(self, x: Tensor) -> ComplexTangentSpace:
        """Tangent space at ``x``, constant under autograd, in orthonormal coordinates."""
        return ComplexTangentSpace(x.detach(), self.n)

    @override
    def inner(self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        c, d = (ComplexTangentSpace(x, self.n).coordinates(t) for t in (u, u if v is None else v))
        return (c * d).sum(dim=(-2, -1), keepdim=keepdim).to(x.dtype)

    @override
    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        r"""Horizontal part :math:`(u_G - G z, u_H + H \bar z)` of an ambient vector.

        .. math:: z = \tfrac12 \left(G^* u_G / |G|^2 - \overline{H^* u_H} / |H|^2\right)
        """
        space = ComplexTangentSpace(x, self.n)
        return space.vector(space.project(space.coordinates(u))).to(x.dtype)

    @override
    def egrad2rgrad(self, x: Tensor, u: Tensor) -> Tensor:
        r"""Horizontal part of :math:`(|G|^2 e_G, |H|^2 e_H)`, for the Euclidean gradient ``u = (e_G, e_H)``."""
        space = ComplexTangentSpace(x, self.n)
        return space.vector(space.gradient(space.pull_gradient(u))).to(x.dtype)

    def ehess2rhess(self, x: Tensor, egrad: Tensor, ehess: Tensor, u: Tensor) -> Tensor:
        r"""Riemannian Hessian of an invariant function along the horizontal vector ``u``.

        Horizontal part of the covariant derivative of :math:`|G|^2 e_G`, with real products :math:`\langle,\rangle`,
        and likewise for ``H``. ``egrad`` is the Euclidean gradient :math:`e`, ``ehess`` its derivative along ``u``.

        .. math:: |G|^2 \dot e_G + \langle G, u_G \rangle e_G - \langle G, e_G \rangle u_G + \langle u_G, e_G \rangle G
        """
        space = ComplexTangentSpace(x, self.n)
        derivatives = (space.pull_gradient(e) for e in (egrad, ehess))
        return space.vector(space.hessian(space.coordinates(u), *derivatives)).to(x.dtype)

    def second_order(self, x: Tensor, u: Tensor) -> Tensor:
        """Second-order retraction: the Taylor polynomial of the geodesic."""
        return self._follow(x, u, "second_order")

    @override
    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        r"""Exact geodesic at time 1.

        With :math:`u_G = c G + w`, ``c`` real, ``w`` real-orthogonal to ``G``, :math:`\omega = |w| / |G|`,
        :math:`G(t) = e^{ct} (\cos(\omega t)\, G + \sin(\omega t) / \omega\; w)`; likewise for ``H``.
        """
        return self._follow(x, u, "expmap")

    def _follow(self, x: Tensor, u: Tensor, path: str) -> Tensor:
        space = ComplexTangentSpace(x, self.n)
        return space.move(space.coordinates(u), path).to(x.dtype)

    @override
    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        r"""Shortest horizontal vector from ``x`` to the orbit of ``y``.

        With unit vectors ``g, h`` and ``p, q`` of the points and the phase of
        :func:`quotient_nets.manifolds.phase.align`: half of the growth of :math:`\log |G| |H|` along both vectors, and
        the logarithms from ``g`` to :math:`e^{i\varphi} p` and from ``h`` to :math:`e^{i\varphi} q` on the spheres. NaN
        where several are equally short: where :math:`g^* p = h^* q = 0`, and where :math:`\overline{g^* p}\, h^* q < 0`
        and the best phase is neither that of ``g`` nor that of ``h`` alone.
        """
        near, far = (ComplexTangentSpace(t, self.n) for t in torch.broadcast_tensors(x, y))
        c, unique = near.log(far)
        return torch.where(unique, near.vector(c), math.nan).to(x.dtype)

    @override
    def dist(self, x: Tensor, y: Tensor, *, keepdim: bool = False) -> Tensor:
        """Geodesic distance; 0, with derivative 0, below ten times the rounding of a unit vector."""
        square = self.dist2(at_least_single(x), at_least_single(y), keepdim=keepdim)
        unresolved = square <= (10 * torch.finfo(square.dtype).eps) ** 2
        return root(torch.where(unresolved, 0.0, square)).to(x.dtype)

    @override
    def dist2(self, x: Tensor, y: Tensor, *, keepdim: bool = False) -> Tensor:
        r"""Squared distance :math:`\tfrac12 \log(|P| |Q| / |G| |H|)^2 + \min_\varphi F(\varphi)`."""
        near, far = (ComplexTangentSpace(t, self.n) for t in torch.broadcast_tensors(x, y))
        return near.log(far)[0].square().sum((-2, -1), keepdim=keepdim).to(x.dtype)

    def pairwise_dist(self, x: Tensor, y: Tensor) -> Tensor:
        """Distances of all pairs: ``(..., p, n + m, 2)`` and ``(..., q, n + m, 2)`` -> ``(..., p, q)``."""
        return self.dist(x.unsqueeze(-3), y.unsqueeze(-4))

    @override
    def transp(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        r"""Horizontal lift at ``y`` of the projected tangent matrix :math:`v_G H^* + G v_H^*`.

        Independent of the representatives. Not an isometry. Cost: :math:`O(n + m)`; the matrix is not formed.
        """
        (g, h), (vg, vh) = (self.unpack_tensor(at_least_single(t)) for t in (x, v))
        space = ComplexTangentSpace(y, self.n)
        p, q = space.split(space.unit)
        right = times(vg, dot(h, q)) + times(g, dot(vh, q))
        left = times(h, dot(vg, p)) + times(vh, dot(g, p))
        return space.vector(space.lift(right, left)).to(v.dtype)

    def to_ambient(self, x: Tensor, u: Tensor) -> Tensor:
        """Tangent matrix :math:`u_G H^* + G u_H^*`, real ``(..., n, m, 2)``."""
        (g, h), (ug, uh) = (self.unpack_tensor(t) for t in (x, u))
        return outer(ug, h) + outer(g, uh)

    def from_ambient(self, x: Tensor, matrix: Tensor) -> Tensor:
        """Horizontal lift of the projection on the tangent space of a matrix, complex or real ``(..., n, m, 2)``."""
        re, im = at_least_single(real_rows(matrix)).unbind(-1)
        space = ComplexTangentSpace(x, self.n)
        p, q = space.split(space.unit)
        return space.vector(space.lift(re @ q + turn(im @ q), re.mT @ p - turn(im.mT @ p))).to(x.dtype)

    def best_rank_one(self, matrix: Tensor) -> Tensor:
        """Nearest point to a matrix, complex or real ``(..., n, m, 2)``, in the Frobenius norm; canonical, detached.

        Raises:
            ValueError: The matrix has another shape, or one of a batch is zero or not finite.
        """
        real = at_least_single(real_rows(matrix.detach()))
        if real.shape[-3:] != (self.n, self.m, 2):
            got = f"{matrix.dtype} {tuple(matrix.shape)}"
            raise ValueError(f"expected a matrix (..., {self.n}, {self.m}), complex or real with (re, im); got {got}.")
        if not bool((real.isfinite().all((-3, -2, -1)) & (real != 0).any((-3, -2, -1))).all()):
            raise ValueError("expected finite matrices that are not zero. The zero matrix has rank 0.")
        u, s, vh = torch.linalg.svd(torch.view_as_complex(real.contiguous()), full_matrices=False)
        largest = s.narrow(-1, 0, 1).sqrt()
        x = self.pack_point(u.select(-1, 0) * largest, vh.select(-2, 0).conj() * largest)
        return self.canonicalize(x)[0].to(real_rows(matrix).dtype)

    def injectivity_radius(self, x: Tensor) -> Tensor:
        r"""Lower bound: shorter geodesics are the only shortest ones; :math:`\pi \sqrt{2/5}`, the same at all points.

        By O'Neill the curvature is at most 5/2, so conjugate points are at least this far; the shortest geodesic loop
        has length :math:`\sqrt2 \pi`; Klingenberg's lemma gives the least of the first and half of the second. For
        ``n = m = 1`` :math:`\pi / \sqrt2` is exact; otherwise the radius is at most 2.0288, where :math:`\tan t = -t`.
        """
        radius = math.pi / math.sqrt(2) if self.n == self.m == 1 else math.pi * math.sqrt(2 / 5)
        valid = self.at(x).lengths.isfinite().all((-2, -1))
        return torch.where(valid, torch.full_like(valid, radius, dtype=x.dtype), math.nan)

    @override
    def _check_shape(self, shape: tuple[int, ...], name: str) -> tuple[bool, str | None]:
        ok, reason = cast("Checked", super()._check_shape(cast("Any", shape), name))
        if ok and tuple(shape[-2:]) != (self.n + self.m, 2):
            return False, (
                f"`{name}` must have shape (..., {self.n + self.m}, 2): n={self.n} entries of G above m={self.m} of H, "
                f"each (re, im); got {tuple(shape)}. Build it with `pack_point(G, H)`."
            )
        return ok, reason

    @override
    def _check_point_on_manifold(self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5) -> tuple[bool, str | None]:
        if not bool(x.isfinite().all()):
            return False, "expected finite vectors, got NaN or Inf. Remove these entries before packing."
        zero = self.injectivity_radius(x.double()).isnan()
        where = f" at batch indices {zero.nonzero().tolist()}" if zero.dim() else ""
        reason = f"expected nonzero vectors G and H; one is zero{where}. Leave such pairs out."
        return (False, reason) if bool(zero.any()) else (True, None)
