r"""Tangent space of fixed-rank matrices under the invariant metric, in orthonormal frames.

With :math:`G = g P_G`, :math:`H = h P_H` and orthonormal ``g``, ``h``, a vector :math:`u = (u_G, u_H)` has coordinates
:math:`c = (u_G P_G^{-1}, u_H P_H^{-1})`, and the metric is the Frobenius product of coordinates. The frame is a
constant under autograd; what its factors lose of their orthonormality when the point varies, the *defect*, is zero in
value and carries the derivatives.

Imports: torch, :mod:`quotient_nets.linalg`, :mod:`quotient_nets.tangent_space`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from quotient_nets.linalg import (
    Frame,
    gram,
    inverse_action,
    solve_by_correction,
    times,
    times_transposed,
    velocity_exponential,
)
from quotient_nets.tangent_space import TangentSpace

CORRECTIONS = 2  # derivatives of the projection with respect to the point that are exact


class InvariantTangentSpace(TangentSpace):
    """Vectors at a pair of factors; coordinates have the shape of the point, ``(..., n + m, r)``.

    Args:
        x: The point.
        n: Rows of ``G``.
        frame: Its frame.
        differentiable: Carry derivatives with respect to ``x``; loops at one point do without.
    """

    ndim = 2
    orthonormal = True

    def __init__(self, x: Tensor, n: int, frame: Frame, *, differentiable: bool = False):
        self.x, self.n, self.frame = x, n, frame
        self.batch = x.shape[:-2]
        s = frame.spectrum
        self.ratio = s.unsqueeze(-1) / s.unsqueeze(-2)
        self.g, self.h = frame.g, frame.h
        self.defect_g = self.defect_h = None
        if differentiable:
            xg, xh = self._split(x)
            self.g, self.defect_g = _carry(xg, frame.g, frame.pull_g)
            self.h, self.defect_h = _carry(xh, frame.h, frame.pull_h)

    def _split(self, y: Tensor) -> tuple[Tensor, Tensor]:
        g, h = y.to(self.g.dtype).split([self.n, y.shape[-2] - self.n], dim=-2)
        return g, h

    @override
    def coordinates(self, u: Tensor) -> Tensor:
        ug, uh = self._split(u)
        return _stack(times(ug, self.frame.pull_g), times(uh, self.frame.pull_h))

    @override
    def vector(self, c: Tensor) -> Tensor:
        cg, ch = self._split(c)
        return _stack(times(cg, self.frame.push_g), times(ch, self.frame.push_h))

    @override
    def pull_gradient(self, e: Tensor) -> Tensor:
        eg, eh = self._split(e)
        return _stack(times_transposed(eg, self.frame.push_g), times_transposed(eh, self.frame.push_h))

    @override
    def inner(self, c: Tensor, d: Tensor) -> Tensor:
        if self.defect_g is not None:
            cg, ch = self._split(c)
            c = _stack(inverse_action(cg, self.defect_g), inverse_action(ch, self.defect_h))
        return super().inner(c, d)

    @override
    def project(self, c: Tensor) -> Tensor:
        cg, ch = self._split(c)
        t, scale = self.ratio, 1 + self.ratio.square()
        # z is the transpose of zeta: the vertical part of c is (-g zeta, h s zeta^T s^{-1})
        k = inverse_action(gram(self.h, ch), self.defect_h)
        rhs = t * k - inverse_action(gram(self.g, cg), self.defect_g).mT
        exact = self.defect_g is None
        z = rhs / scale if exact else solve_by_correction(self._vertical_gram, scale, rhs, CORRECTIONS)
        return _stack(cg + times(self.g, z.mT), ch - times(self.h, t * z))

    def _vertical_gram(self, z: Tensor) -> Tensor:
        """Left side of the equation that a vertical part obeys; ``(1 + t^2) z`` where both defects vanish."""
        assert self.defect_g is not None
        assert self.defect_h is not None
        left = inverse_action((z - times(z, self.defect_g)).mT, self.defect_g).mT
        tz = self.ratio * z
        right = inverse_action(tz - times(self.defect_h, tz), self.defect_h)
        return left + self.ratio * right

    @override
    def gradient(self, e: Tensor) -> Tensor:
        if self.defect_g is not None and self.defect_h is not None:
            eg, eh = self._split(e)
            e = _stack(eg - times(eg, self.defect_g), eh - times(eh, self.defect_h))
        return self.project(e)

    @override
    def move(self, c: Tensor, path: str, radius: float | None = None) -> Tensor:
        if path == "retr":
            return self.x + self.vector(c)
        cg, ch = self._split(c)
        xg, xh = self._split(self.x)
        step_g = _step(path, self.g, cg, self.defect_g, self.frame.push_g, radius)
        step_h = _step(path, self.h, ch, self.defect_h, self.frame.push_h, radius)
        return _stack(xg + step_g, xh + step_h)

    def lift(self, g: Tensor, h: Tensor, vg: Tensor, vh: Tensor) -> Tensor:
        r"""Coordinates of the horizontal lift of the projected tangent :math:`v_G H^\top + G v_H^\top`.

        Args:
            g: Left factor of the point where ``v`` is a tangent vector; likewise ``h``.
            h: Right factor.
            vg: Rows of ``v`` that belong to ``G``.
            vh: Rows of ``v`` that belong to ``H``.
        """
        g, h, vg, vh = (t.to(self.g.dtype) for t in (g, h, vg, vh))
        right = times(vg, gram(h, self.h)) + times(g, gram(vh, self.h))
        left = times(vh, gram(g, self.g)) + times(h, gram(vg, self.g))
        right = inverse_action(right, self.defect_h)
        left = inverse_action(left, self.defect_g)
        core = inverse_action(gram(self.g, right).mT, self.defect_g).mT
        s = self.frame.spectrum.unsqueeze(-2)
        share = self.ratio / (s * (1 + self.ratio.square()))  # s_i / (s_i^2 + s_j^2)
        cg = times(self.g, core * share.mT) + (right - times(self.g, core)) / s
        ch = times(self.h, (core * share).mT) + (left - times(self.h, core.mT)) / s
        return self.project(_stack(cg, ch))

    @override
    def certificates(self, c: Tensor) -> dict[str, Tensor]:
        s = self.frame.spectrum
        gap = -(s.diff(dim=-1) / s[..., :-1]).amax(-1) if s.shape[-1] > 1 else torch.ones_like(s[..., 0])
        return super().certificates(c) | {"condition_number": s[..., 0] / s[..., -1], "spectral_gap": gap}


def _stack(g: Tensor, h: Tensor) -> Tensor:
    return torch.cat([g, h], dim=-2)


def _carry(factor: Tensor, basis: Tensor, pull: Tensor) -> tuple[Tensor, Tensor]:
    """The orthonormal basis with the derivatives of ``factor @ pull``, and its defect ``I - basis^T basis``."""
    moving = times(factor, pull)
    basis = basis + (moving - moving.detach())
    eye = torch.eye(basis.shape[-1], dtype=basis.dtype, device=basis.device)
    return basis, eye - gram(basis, basis)


def _step(path: str, g: Tensor, c: Tensor, defect: Tensor | None, push: Tensor, radius: float | None) -> Tensor:
    """Displacement of one factor: ``(c + g m1 + c m2) push`` with the coefficients of the path.

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
        m1, m2 = velocity_exponential(a, a_star, b, radius)
    elif path == "second_order":
        m1, m2 = -b / 2, (a + a_star) / 2
    else:
        raise ValueError(f"expected a path 'retr', 'second_order' or 'expmap', got {path!r}")
    return times(c, push) + times(g, times(m1, push)) + times(c, times(m2, push))
