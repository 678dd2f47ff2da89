r"""Tangent space of fixed-rank matrices under the invariant metric, in orthonormal frames.

With :math:`G = g P_G`, :math:`H = h P_H` and orthonormal ``g``, ``h``, a vector :math:`u = (u_G, u_H)` has coordinates
:math:`c = (u_G P_G^{-1}, u_H P_H^{-1})`, and the metric is the Frobenius product of coordinates. The frame is a
constant under autograd; what its factors lose of their orthonormality when the point varies, the *defect*, is zero in
value and carries the derivatives.

Imports: torch, :mod:`quotient_nets.linalg`, :mod:`quotient_nets.tangent_space`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from quotient_nets.linalg import (
    CORRECTIONS,
    Frame,
    add_product,
    gram,
    gram_action,
    inverse_action,
    solve_by_correction,
    times,
    times_transposed,
)
from quotient_nets.manifolds.exponential import Pullback, velocity_exponential, velocity_exponential_vjp
from quotient_nets.manifolds.factor_tangent import FactorTangentSpace, assemble, stack, sym
from quotient_nets.tangent_space import UNKNOWN_PATH, PathGradient, written


class InvariantTangentSpace(FactorTangentSpace):
    """Coordinates ``(u_G P_G^{-1}, u_H P_H^{-1})``: the metric is their Frobenius product."""

    orthonormal = True

    def __init__(self, x: Tensor, n: int, frame: Frame, *, differentiable: bool = False):
        super().__init__(x, n, frame, differentiable=differentiable)
        s = frame.spectrum
        self.ratio = s.unsqueeze(-1) / s.unsqueeze(-2)
        self.pull, self.push = (frame.pull_g, frame.pull_h), (frame.push_g, frame.push_h)

    @override
    def inner(self, c: Tensor, d: Tensor) -> Tensor:
        if self.defect_g is not None:
            cg, ch = self.split(c)
            c = stack(inverse_action(cg, self.defect_g), inverse_action(ch, self.defect_h))
        return super().inner(c, d)

    @override
    def vertical(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        left, right = inverse_action(left, self.defect_g), inverse_action(right, self.defect_h)
        # z is the transpose of zeta: the vertical part of c is (-g zeta, h s zeta^T s^{-1})
        rhs, scale = self.ratio * right - left.mT, 1 + self.ratio.square()
        exact = self.defect_g is None
        z = rhs / scale if exact else solve_by_correction(self._vertical_gram, scale, rhs, CORRECTIONS)
        return z.mT, -self.ratio * z

    def _vertical_gram(self, z: Tensor) -> Tensor:
        """Left side of the equation that a vertical part obeys; ``(1 + t^2) z`` where both defects vanish."""
        left = inverse_action(gram_action(z, self.defect_g).mT, self.defect_g).mT
        tz = self.ratio * z
        right = inverse_action(gram_action(tz.mT, self.defect_h).mT, self.defect_h)
        return left + self.ratio * right

    @override
    def gradient(self, e: Tensor) -> Tensor:
        if self.defect_g is not None:
            eg, eh = self.split(e)
            e = stack(gram_action(eg, self.defect_g), gram_action(eh, self.defect_h))
        return self.project(e)

    @override
    def steps(self, path: str, cg: Tensor, ch: Tensor, radius: float | None) -> list[tuple[Tensor, Tensor]]:
        return [_step(path, self.g, cg, self.defect_g, radius), _step(path, self.h, ch, self.defect_h, radius)]

    @override
    def follow(
        self, c: Tensor, path: str, radius: float | None = None, out: Tensor | None = None
    ) -> tuple[Tensor, PathGradient]:
        if self.defect_g is not None:
            return super().follow(c, path, radius, out)
        c = c.detach()
        if path == "retr":

            def straight(slope: Tensor, out: Tensor | None = None) -> Tensor:
                return written(self.project(self.pull_gradient(slope)), out)

            return torch.add(self.x, self.vector(c), out=out), straight
        bases, parts, pushes = (self.g, self.h), self.split(c), (self.frame.push_g, self.frame.push_h)
        # Both sides in one batch: half the calls, and the coefficients do not know the number of rows.
        a, b = _pairs(gram, bases, parts), _pairs(gram, parts, parts)
        m1, m2, pullback = _coefficients(path, a.flatten(0, -3), b.flatten(0, -3), radius)
        eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
        m1, m2 = m1.view(a.shape), m2.view(a.shape) + eye
        inner, outer = (tuple(map(times, m.unbind(), pushes)) for m in (m1, m2))
        y = self._target(c, out)
        for target, x, *terms in zip(self.split(y), self.split(self.x), bases, inner, parts, outer, strict=True):
            add_product(add_product(x, *terms[:2], out=target), *terms[2:], out=target)

        def gradient(slope: Tensor, out: Tensor | None = None) -> Tensor:
            slopes = self.split(slope)
            along, across = _pairs(gram, bases, slopes), _pairs(gram, parts, slopes)
            m1_bar, m2_bar = (
                torch.stack(tuple(map(times_transposed, bar.unbind(), pushes))).flatten(0, -3)
                for bar in (along, across)
            )
            a_bar, a_star_bar, b_bar = pullback(m1_bar, m2_bar)
            a_bar, b_bar = a_bar + a_star_bar.mT, b_bar + b_bar.mT
            # What the gradient is along the bases needs no product with them, so the horizontal projection is free.
            known = add_product(a_bar, a.flatten(0, -3), b_bar).view(a.shape)
            left, right = map(torch.add, known.unbind(), map(times_transposed, along.unbind(), outer))
            z = (self.ratio * right - left.mT) / (1 + self.ratio.square())
            a_bar = a_bar.view(a.shape) + torch.stack((z.mT, -self.ratio * z))
            e = self._target(c, out)
            rows = zip(self.split(e), slopes, outer, bases, a_bar.unbind(), parts, b_bar.view(a.shape), strict=True)
            for target, part, n, *terms in rows:
                times_transposed(part, n, out=target)
                add_product(add_product(target, *terms[:2], out=target), *terms[2:], out=target)
            return written(e, out)

        return written(y, out), gradient

    def _target(self, c: Tensor, out: Tensor | None) -> Tensor:
        """Where to write: ``out``, unless the arithmetic has another dtype."""
        dtype = self.g.dtype
        return out if out is not None and out.dtype == dtype else torch.empty_like(c, dtype=dtype)

    @override
    def lift(self, right: Tensor, left: Tensor) -> Tensor:
        right = inverse_action(right, self.defect_h)
        left = inverse_action(left, self.defect_g)
        core = inverse_action(gram(self.g, right).mT, self.defect_g).mT
        s = self.frame.spectrum.unsqueeze(-2)
        share = self.ratio / (s * (1 + self.ratio.square()))  # s_i / (s_i^2 + s_j^2)
        along = share.mT - 1 / s
        c = assemble((right, 1 / s, self.g, core * along), (left, 1 / s, self.h, core.mT * along))
        return c if self.defect_g is None else self.project(c)

    @override
    def hessian(self, e: Tensor, de: Tensor, c: Tensor) -> Tensor:
        parts = zip((self.g, self.h), (self.defect_g, self.defect_h), *map(self.split, (e, de, c)), strict=True)
        return self.project(assemble(*(_factor_hessian(*part) for part in parts)))


def _pairs(function: Callable[[Tensor, Tensor], Tensor], left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    return torch.stack(tuple(map(function, left, right)))


def _step(path: str, g: Tensor, c: Tensor, defect: Tensor | None, radius: float | None) -> tuple[Tensor, Tensor]:
    """Coefficients ``(m1, m2)`` of the displacement ``c + g m1 + c m2`` of one factor.

    Raises:
        ValueError: There is no path of this name.
    """
    a = gram(g, c)
    b = gram(c, c)
    if defect is None:
        a_star = a.mT
    else:
        a_star = inverse_action(a, defect).mT
        a, b = inverse_action(a.mT, defect).mT, inverse_action(b, defect).mT
    if path == "expmap":
        return velocity_exponential(a, a_star, b, radius)
    if path == "second_order":
        return -b / 2, (a + a_star) / 2
    raise ValueError(UNKNOWN_PATH.format(path))


def _coefficients(path: str, a: Tensor, b: Tensor, radius: float | None) -> tuple[Tensor, Tensor, Pullback]:
    """Coefficients of the path from an orthonormal factor, and the adjoint of their derivative.

    Raises:
        ValueError: There is no path of this name.
    """
    if path == "expmap":
        return velocity_exponential_vjp(a, a.mT, b, radius)
    if path != "second_order":
        raise ValueError(UNKNOWN_PATH.format(path))

    def pullback(m1_bar: Tensor, m2_bar: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return m2_bar / 2, m2_bar / 2, m1_bar / -2

    return -b / 2, (a + a.mT) / 2, pullback


def _factor_hessian(g: Tensor, defect: Tensor | None, e: Tensor, de: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """Covariant derivative along ``c`` of the gradient ``e S`` of one factor with ``S = g^T g``, for ``assemble``."""
    if defect is None:
        return de, e, sym(gram(g, c)), c, -sym(gram(g, e)), g, sym(gram(c, e))
    square = gram(g, g)
    gradient = times(e, square)
    change = times(de, square) + 2 * times(e, sym(gram(c, g)))
    connection = times(inverse_action(gradient, defect), sym(gram(g, c)))
    connection = connection + times(inverse_action(c, defect), sym(gram(g, gradient)))
    return change - connection, inverse_action(g, defect), sym(gram(c, gradient))
