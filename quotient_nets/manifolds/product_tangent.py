r"""Tangent space of fixed-rank matrices under metrics of the product :math:`G H^\top`.

A vector :math:`(u_G, u_H)` changes the product by :math:`b_G h^\top + g b_H^\top` with coordinates
:math:`b_G = u_G P_H^\top`, :math:`b_H = u_H P_G^\top`. No coordinate is divided by a singular value. Horizontal
vectors have :math:`g^\top b_G = (h^\top b_H)^\top`.

Imports: torch, :mod:`quotient_nets.linalg`, :mod:`quotient_nets.tangent_space`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from quotient_nets.linalg import (
    Frame,
    gram,
    gram_action,
    inverse_action,
    lu_factor,
    lu_solve,
    solve_right,
    times,
    transposed,
)
from quotient_nets.manifolds.factor_tangent import FactorTangentSpace, assemble, stack, sym
from quotient_nets.manifolds.integrate import integrate
from quotient_nets.manifolds.rank_one import Cone
from quotient_nets.tangent_space import UNKNOWN_PATH

Pair = tuple[Tensor, Tensor]


class ProductTangentSpace(FactorTangentSpace):
    """What the preconditioned and the embedded metric share: coordinates, horizontal vectors, the way of geodesics."""

    degree = 1
    cone: Cone
    """What the metric is at rank one."""

    def __init__(self, x: Tensor, n: int, frame: Frame, *, differentiable: bool = False):
        super().__init__(x, n, frame, differentiable=differentiable)
        self.pull = transposed(frame.push_h), transposed(frame.push_g)
        self.push = transposed(frame.pull_h), transposed(frame.pull_g)
        self.s = frame.spectrum.unsqueeze(-2)

    @override
    def vertical(self, left: Tensor, right: Tensor) -> Pair:
        left, right = self._components(left, right)
        half = (right.mT - left) / 2
        return half, -half.mT

    def cores(self, cg: Tensor, ch: Tensor) -> Pair:
        """Components along the frame, ``g^T c_g`` and ``h^T c_h``."""
        return self._components(gram(self.g, cg), gram(self.h, ch))

    def _components(self, left: Tensor, right: Tensor) -> Pair:
        """Components by least squares where the frame is not exact."""
        return inverse_action(left.mT, self.defect_g).mT, inverse_action(right.mT, self.defect_h).mT

    @override
    def lift(self, right: Tensor, left: Tensor) -> Tensor:
        right = inverse_action(right, self.defect_h)
        left = inverse_action(left, self.defect_g)
        core = inverse_action(gram(self.g, right).mT, self.defect_g).mT / -2
        return assemble((right, self.g, core), (left, self.h, core.mT))

    @override
    def gradient(self, e: Tensor) -> Tensor:
        eg, eh = self.split(e)
        return self.project(stack(inverse_action(eg, self.defect_h), inverse_action(eh, self.defect_g)))

    @abstractmethod
    def taylor(self, bg: Tensor, bh: Tensor) -> tuple[Pair, Pair]:
        """Accelerations of the geodesic: ``(m1, m2)`` with ``g m1 + b_G m2`` for ``G``, and the same for ``H``."""

    @abstractmethod
    def acceleration(self, factors: Factors) -> Tensor:
        """Second derivatives of both factors along a geodesic, in the bases in which their coefficients are given."""

    @override
    def steps(self, path: str, cg: Tensor, ch: Tensor, radius: float | None) -> list[Pair]:
        if path == "second_order":
            return [(m1 / 2, m2 / 2) for m1, m2 in self.taylor(cg, ch)]
        if path == "expmap":
            return self._geodesic(cg, ch)
        raise ValueError(UNKNOWN_PATH.format(path))

    def _geodesic(self, cg: Tensor, ch: Tensor) -> list[Pair]:
        r"""Coefficients as of :meth:`taylor`, of what the geodesic has beyond its velocity.

        In the balanced gauge :math:`G = g s^{1/2}`, so :math:`G(t) = (g P + b_G Q)` with ``r x r`` matrices, and the
        equation needs no more than their Gram matrix.
        """
        if cg.shape[-1] == 1:
            return self.cone.exponential(self.g, self.h, cg, ch, self.s)
        # In units of the largest singular value nothing overflows.
        unit = self.s.narrow(-1, 0, 1)
        cg, ch, spectrum = cg / unit, ch / unit, self.s / unit
        # Both sides in one batch, (..., 2, 2r, r): the matrices are small, and half the calls is half the time.
        dtype, sides = cg.dtype, []
        for basis, c in ((self.g, cg), (self.h, ch)):
            both = torch.cat([basis.expand_as(c), c], dim=-1).double()
            sides.append(gram(both, both))
        root = spectrum.double().sqrt()
        batch = torch.broadcast_shapes(*(k.shape[:-2] for k in sides), root.shape[:-2])
        grams = torch.stack([k.expand(*batch, *k.shape[-2:]) for k in sides], dim=-3)
        grams = grams.reshape(-1, *grams.shape[-3:])
        root = root.expand(*batch, *root.shape[-2:]).reshape(-1, 1, *root.shape[-2:])
        start, slope = (torch.diag_embed(d.squeeze(-2)).expand(-1, 2, -1, -1) for d in (root, 1 / root))
        zero = torch.zeros_like(start)
        start, slope = torch.cat([start, zero], dim=-2), torch.cat([zero, slope], dim=-2)

        def rate(y: Tensor) -> Tensor:
            # Positions count from the start, so that no length gives no displacement.
            moved, velocity = y.unbind(1)
            return torch.stack([velocity, self.acceleration(Factors(grams, start + moved, velocity))], dim=1)

        first = torch.stack([torch.zeros_like(start), slope], dim=1)
        end = integrate(rate, first, tolerance=self.accuracy).select(1, 0) * root
        m1, m2 = end.reshape(*batch, *end.shape[-3:]).split(root.shape[-1], dim=-2)
        m2 = m2 - torch.eye(root.shape[-1], dtype=root.dtype, device=root.device)
        return [(unit * m1.select(-3, i).to(dtype), m2.select(-3, i).to(dtype)) for i in range(2)]


class Factors(NamedTuple):
    """Both factors on their way: bases ``[g, b]`` with Gram matrices ``gram``, coefficients ``z``, their rates ``w``.

    Shapes are ``(..., 2, 2r, 2r)`` and ``(..., 2, 2r, r)``; the axis of two holds the sides.
    """

    gram: Tensor
    z: Tensor
    w: Tensor

    def squares(self) -> tuple[Tensor, Tensor, Tensor]:
        r"""Gram matrices :math:`F^\top F`, :math:`F^\top \dot F`, :math:`\dot F^\top \dot F` of each factor ``F``."""
        kw = self.gram @ self.w
        return gram(self.z, self.gram @ self.z), gram(self.z, kw), gram(self.w, kw)


class PreconditionedTangentSpace(ProductTangentSpace):
    """The metric is the Frobenius product of coordinates."""

    orthonormal = True
    cone = Cone(math.sqrt(2))

    @override
    def inner(self, c: Tensor, d: Tensor) -> Tensor:
        if self.defect_g is not None:
            cg, ch = self.split(c)
            c = stack(gram_action(cg, self.defect_h), gram_action(ch, self.defect_g))
        return super().inner(c, d)

    @override
    def taylor(self, bg: Tensor, bh: Tensor) -> tuple[Pair, Pair]:
        def one(b: Tensor, basis: Tensor, defect: Tensor | None) -> Pair:
            along = inverse_action(2 * self._symmetric(b, basis), defect)
            return inverse_action(gram(b, b) / self.s, defect), -along

        return one(bh, self.h, self.defect_h), one(bg, self.g, self.defect_g)

    def _symmetric(self, b: Tensor, basis: Tensor) -> Tensor:
        r"""Symmetric part of :math:`s^{-1} b^\top \text{basis}`."""
        return sym(gram(b, basis) / self.s.mT)

    @override
    def acceleration(self, factors: Factors) -> Tensor:
        square, along, across = (of_the_other.flip(-3) for of_the_other in factors.squares())
        return solve_right(factors.z @ across - factors.w @ (along + along.mT), square)

    @override
    def hessian(self, e: Tensor, de: Tensor, c: Tensor) -> Tensor:
        (eg, eh), (dg, dh), (bg, bh) = map(self.split, (e, de, c))
        rg, rh = inverse_action(eg, self.defect_h), inverse_action(eh, self.defect_g)

        def one(d: Tensor, r: Tensor, b: Tensor, g: Tensor, rh: Tensor, bh: Tensor, h: Tensor) -> Tensor:
            # From the term by term derivative of e S_H^{-1} and the connection of the metric.
            change = d - times(r, self._symmetric(bh, h)) + times(b, self._symmetric(rh, h))
            return change - times(g, sym(gram(bh, rh)) / self.s)

        hess_g = inverse_action(one(dg, rg, bg, self.g, rh, bh, self.h), self.defect_h)
        hess_h = inverse_action(one(dh, rh, bh, self.h, rg, bg, self.g), self.defect_g)
        return self.project(stack(hess_g, hess_h))


class FrobeniusTangentSpace(ProductTangentSpace):
    """The metric is the Frobenius product of tangent matrices."""

    cone = Cone(1.0)

    @override
    def inner(self, c: Tensor, d: Tensor) -> Tensor:
        (cg, ch), (dg, dh) = self.split(c), self.split(d)
        mixed = (gram(self.g, cg) * gram(dh, self.h)).sum((-2, -1), keepdim=True)
        mixed = mixed + (gram(self.g, dg) * gram(ch, self.h)).sum((-2, -1), keepdim=True)
        cg, ch = gram_action(cg, self.defect_h), gram_action(ch, self.defect_g)
        return super().inner(stack(cg, ch), d) + mixed

    @override
    def total_norm(self, c: Tensor) -> Tensor:
        """Norm of the coordinates: the metric has length zero for all vertical vectors."""
        return super().inner(c, c).sqrt()

    @override
    def gradient(self, e: Tensor) -> Tensor:
        eg, eh = self.split(e)
        eg, eh = inverse_action(eg, self.defect_h), inverse_action(eh, self.defect_g)
        # The horizontal part has the mean of both cores, of which a half is taken away.
        left, right = self.cores(eg, eh)
        mean = (left + right.mT) / 4
        return assemble((eg, self.g, mean - left), (eh, self.h, mean.mT - right))

    @override
    def taylor(self, bg: Tensor, bh: Tensor) -> tuple[Pair, Pair]:
        along_g, along_h = gram(self.g, bg), gram(self.h, bh)
        left, right = self._components(along_g, along_h)
        own, other = gram(bg, bg) - gram(along_g, left), gram(bh, bh) - gram(along_h, right)
        turn = inverse_action(other / self.s, self.defect_h) - inverse_action((own / self.s.mT).mT, self.defect_g).mT
        turn = turn / 2

        def one(core: Tensor, turn: Tensor) -> Pair:
            rate = core / self.s.mT
            return core @ rate + turn, -2 * rate

        return one(left, turn), one(right, -turn.mT)

    @override
    def acceleration(self, factors: Factors) -> Tensor:
        square, along, across = factors.squares()
        factored = lu_factor(square)
        rate = lu_solve(factored, along)
        turn = lu_solve(factored, across - gram(along, rate))
        # A vertical part, which keeps the velocity horizontal; the rest of the equation takes that for granted.
        turn = (turn.flip(-3).mT - turn) / 2
        # Sums in place of `2 *`, for the reason given in `integrate`.
        return (factors.z @ rate - factors.w - factors.w) @ rate + factors.z @ turn

    @override
    def hessian(self, e: Tensor, de: Tensor, c: Tensor) -> Tensor:
        (eg, eh), (dg, dh), (bg, bh) = map(self.split, (e, de, c))
        left, right = self.cores(bg, bh)
        vh = bh - times(self.h, right)
        # What the derivative along the core adds to that of the ambient gradient E is taken away; E V_p stays.
        rg = inverse_action(dg - times(eg, right / self.s), self.defect_h)
        rh = inverse_action(dh - times(eh, left / self.s), self.defect_g)
        core = gram(self.g, rg) - inverse_action(gram(eh, vh) / self.s, self.defect_h)
        core = inverse_action(core.mT, self.defect_g).mT
        own, other = self.cores(rg, rh)
        return stack(rg - times(self.g, own - core / 2), rh - times(self.h, other - core.mT / 2))
