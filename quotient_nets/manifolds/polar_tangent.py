r"""Tangent space of fixed-rank matrices given by a polar factorisation :math:`U B V^\top`, in the eigenframe of ``B``.

With :math:`B = P \operatorname{diag}(s) P^\top`, :math:`g = U P` and :math:`h = V P`, a vector :math:`(Z_U, Z_B, Z_V)`
has coordinates :math:`a = Z_U P`, :math:`\beta = s^{-1/2} P^\top Z_B P s^{-1/2}`, :math:`c = Z_V P`, stacked by rows,
and the metric is their Frobenius product. The eigenframe is a constant under autograd; what :math:`P^\top B P` loses of
its diagonal form when the point varies, the *defect*, is zero in value and carries the derivatives.

Imports: torch, :mod:`quotient_nets.linalg`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from quotient_nets.linalg import (
    CORRECTIONS,
    Frame,
    gram,
    gram_action,
    inverse_action,
    matrix_exp,
    solve_by_correction,
    times,
    times_transposed,
    transposed,
)
from quotient_nets.manifolds.exponential import velocity_exponential
from quotient_nets.manifolds.factor_tangent import MatrixTangentSpace, assemble, sym
from quotient_nets.tangent_space import UNKNOWN_PATH

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]


class PolarTangentSpace(MatrixTangentSpace):
    """Vectors at a polar factorisation; coordinates have the shape of the point, ``(..., n + r + m, r)``.

    Args:
        x: The point.
        n: Rows of ``U``.
        frame: Its frame; both transforms to the frame are ``P``.
        differentiable: Carry derivatives with respect to ``x``; loops at one point do without.
    """

    ndim = 2
    orthonormal = True

    def __init__(self, x: Tensor, n: int, frame: Frame, *, differentiable: bool = False):
        self.x, self.n, self.frame = x, n, frame
        self.batch = x.shape[:-2]
        self.g, self.h = frame.g, frame.h
        self.s = frame.spectrum.unsqueeze(-2)
        self.root = self.s.sqrt()
        self.mean = self.root.mT * self.root
        """Geometric means of the pairs of singular values."""
        self.gap = (self.s - self.s.mT) / self.mean
        self.defect: Tensor | None = None
        if differentiable:
            u, b, v = self.split(x)
            self.g, self.h = times(u, frame.pull_g), times(v, frame.pull_h)
            turned = self._whiten(sym(b))
            # Only the derivatives: the value is zero by the construction of the frame.
            self.defect = turned.detach() - turned

    @override
    def split(self, y: Tensor) -> Triple:
        r = y.shape[-1]
        u, b, v = y.to(self.s.dtype).split([self.n, r, y.shape[-2] - self.n - r], dim=-2)
        return u, b, v

    def _whiten(self, b: Tensor) -> Tensor:
        return gram(self.frame.pull_g, times(b, self.frame.pull_g)) / self.mean

    def _blacken(self, beta: Tensor) -> Tensor:
        return times_transposed(times(self.frame.pull_g, beta * self.mean), self.frame.pull_g)

    @override
    def coordinates(self, u: Tensor) -> Tensor:
        zu, zb, zv = self.split(u)
        return assemble((zu, self.frame.pull_g), (self._whiten(zb),), (zv, self.frame.pull_h))

    @override
    def vector(self, c: Tensor) -> Tensor:
        a, beta, c = self.split(c)
        return assemble((a, transposed(self.frame.pull_g)), (self._blacken(beta),), (c, transposed(self.frame.pull_h)))

    @override
    def pull_gradient(self, e: Tensor) -> Tensor:
        eu, eb, ev = self.split(e)
        beta = gram(self.frame.pull_g, times(eb, self.frame.pull_g)) * self.mean
        return assemble((eu, self.frame.pull_g), (beta,), (ev, self.frame.pull_h))

    def _divide(self, beta: Tensor) -> Tensor:
        r""":math:`E^{-1} \beta E^{-1}` for the whitened ``B``, ``E``, which is the identity in value."""
        return inverse_action(inverse_action(beta, self.defect).mT, self.defect).mT

    def _multiply(self, beta: Tensor) -> Tensor:
        r""":math:`E \beta E`."""
        return gram_action(gram_action(beta, self.defect).mT, self.defect).mT

    @override
    def inner(self, c: Tensor, d: Tensor) -> Tensor:
        if self.defect is not None:
            a, beta, b = self.split(c)
            c = torch.cat([a, self._divide(beta), b], dim=-2)
        return super().inner(c, d)

    @override
    def project_vector(self, u: Tensor) -> Tensor:
        if self.defect is not None:
            return self.vector(self.project(self.coordinates(u)))
        zu, zb, zv = self.split(u)
        pull = self.frame.pull_g
        left, right = (times(gram(basis, z), pull) for basis, z in ((self.g, zu), (self.h, zv)))
        along_u, beta, along_v = self._normal(left, self._whiten(zb), right)
        return assemble(
            (zu, self.g, times_transposed(along_u, pull)),
            (self._blacken(beta),),
            (zv, self.h, times_transposed(along_v, pull)),
        )

    def _normal(self, left: Tensor, beta: Tensor, right: Tensor) -> Triple:
        """What is added along ``g``, the middle, and what is added along ``h``, from the components along both."""
        beta = sym(beta)
        w = (beta * self.gap - skew(left) - skew(right)) / (2 + self.gap.square())
        return w - sym(left), beta - w * self.gap, w - sym(right)

    @override
    def project(self, c: Tensor) -> Tensor:
        a, beta, b = self.split(c)
        if self.defect is None:
            along_u, beta, along_v = self._normal(gram(self.g, a), beta, gram(self.h, b))
            return assemble((a, self.g, along_u), (beta,), (b, self.h, along_v))
        beta, scale = sym(beta), 2 + self.gap.square()
        # First on the tangent vectors of the total space, then on the horizontal ones.
        a, b = _tangent(self.g, a), _tangent(self.h, b)
        rhs = self._adjoint(self._divide(beta)) - skew(gram(self.g, a)) - skew(gram(self.h, b))
        w = solve_by_correction(self._vertical_gram, scale, rhs, CORRECTIONS)
        return torch.cat([a + times(self.g, w), beta - self._commutator(w), b + times(self.h, w)], dim=-2)

    def _commutator(self, w: Tensor) -> Tensor:
        """What the infinitesimal rotation ``w`` does to the whitened ``B``."""
        if self.defect is None:
            return w * self.gap
        b = self._core()
        return (times(w, b) - times(b, w)) / self.mean

    def _adjoint(self, beta: Tensor) -> Tensor:
        """Adjoint of :meth:`_commutator`, for symmetric arguments."""
        if self.defect is None:
            return beta * self.gap
        b, beta = self._core(), beta / self.mean
        return skew(times(beta, b) - times(b, beta))

    def _core(self) -> Tensor:
        r""":math:`P^\top B P` with its derivatives."""
        s = torch.diag_embed(self.frame.spectrum)
        return s if self.defect is None else s - self.defect * self.mean

    def _vertical_gram(self, w: Tensor) -> Tensor:
        """Left side of the equation that a vertical part obeys; ``(2 + gap^2) w`` in value."""
        turned = skew(times(gram(self.g, self.g) + gram(self.h, self.h), w))
        return turned + self._adjoint(self._divide(self._commutator(w)))

    @override
    def gradient(self, e: Tensor) -> Tensor:
        eu, eb, ev = self.split(e)
        return self.project(torch.cat([eu, self._multiply(sym(eb)), ev], dim=-2))

    @override
    def move(self, c: Tensor, path: str, radius: float | None = None) -> Tensor:
        a, beta, b = self.split(c)
        if path == "expmap":
            left, right = _rotation(self.g, a, radius), _rotation(self.h, b, radius)
            eye = torch.eye(beta.shape[-1], dtype=torch.float64, device=beta.device)
            growth = matrix_exp(inverse_action(beta, self.defect).double()) - eye
            growth = sym(gram_action(growth.to(beta.dtype), self.defect))
        elif path in {"retr", "second_order"}:
            left, right = _retraction(self.g, a), _retraction(self.h, b)
            growth = beta + times(inverse_action(beta, self.defect), beta) / 2
        else:
            raise ValueError(UNKNOWN_PATH.format(path))
        u, core, v = self.split(self.x)
        rows = zip((u, v), (self.g, self.h), (a, b), (self.frame.pull_g, self.frame.pull_h), (left, right), strict=True)
        first, last = (
            (y, g, times_transposed(m1, pull), step, times_transposed(m2, pull)) for y, g, step, pull, (m1, m2) in rows
        )
        return assemble(first, (core + self._blacken(growth),), last)

    @override
    def lift(self, right: Tensor, left: Tensor) -> Tensor:
        if self.defect is None:
            return self._lift(right, left)
        c = self._lift(right, left).detach()
        for _ in range(CORRECTIONS):
            # Once projected, what is missing is of first order in what the point lost of its frame.
            c = self.project(c)
            pushed = self.products(self.terms(c))
            c = c + self._lift(right - pushed[0], left - pushed[1])
        return self.project(c)

    def _lift(self, right: Tensor, left: Tensor) -> Tensor:
        core = gram(self.g, right)
        square = self.s.square()
        beta = (core + core.mT) * self.mean / (square + square.mT)
        difference, total = (core - core.mT) / (self.s + self.s.mT), beta * self.gap
        along_g, along_h = (total + difference) / 2 - core / self.s, (total - difference) / 2 - core.mT / self.s
        return assemble((right, 1 / self.s, self.g, along_g), (beta,), (left, 1 / self.s, self.h, along_h))

    def terms(self, c: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The tangent matrix of ``c`` as a sum of products of factors."""
        a, beta, b = self.split(c)
        core = self._core()
        return [(times(a, core) + times(self.g, beta * self.mean), self.h), (times(self.g, core), b)]

    @override
    def hessian(self, e: Tensor, de: Tensor, c: Tensor) -> Tensor:
        (eu, eb, ev), (du, db, dv), (a, beta, b) = map(self.split, (e, de, c))
        hess_u = du - times(a, sym(gram(self.g, eu)))
        hess_v = dv - times(b, sym(gram(self.h, ev)))
        mixed = gram_action(times(beta, sym(eb)), self.defect)
        return self.project(torch.cat([hess_u, self._multiply(sym(db)) + sym(mixed), hess_v], dim=-2))


def skew(a: Tensor) -> Tensor:
    """Skew-symmetric part."""
    return (a - a.mT) / 2


def _tangent(g: Tensor, a: Tensor) -> Tensor:
    """Projection on the tangent vectors of the Stiefel manifold."""
    return a - times(g, sym(gram(g, a)))


def _rotation(g: Tensor, a: Tensor, radius: float | None) -> Pair:
    """End ``g + g m1 + a m2`` of the geodesic of the Stiefel manifold with the Euclidean metric.

    Edelman, Arias and Smith (1998); the same matrix functions as for the invariant metric, whose geodesics have a
    velocity that is symmetric along the factor where this one is skew-symmetric.
    """
    along = gram(g, a)
    m1, m2 = velocity_exponential(along, along.mT, gram(a, a), radius)
    return m1, m2 + torch.eye(m2.shape[-1], dtype=m2.dtype, device=m2.device)


def _retraction(g: Tensor, a: Tensor) -> Pair:
    """The polar factor ``g + g m1 + a m2`` of ``g + a``."""
    along = gram(g, a)
    m = _inverse_root(along + along.mT + gram(a, a))
    return m, m + torch.eye(m.shape[-1], dtype=m.dtype, device=m.device)


def _inverse_root(n: Tensor) -> Tensor:
    r""":math:`(I + N)^{-1/2} - I` for symmetric ``N``, with two exact derivatives, also at repeated eigenvalues."""
    fixed = sym(n.detach()).double()
    finite = fixed.isfinite().all(dim=(-2, -1), keepdim=True)
    values, vectors = torch.linalg.eigh(torch.where(finite, fixed, 0.0))
    values = values + torch.where(finite.squeeze(-1), 0.0, torch.nan)
    value = times_transposed(vectors * torch.expm1(-torch.log1p(values) / 2).unsqueeze(-2), vectors).to(n.dtype)
    root, vectors = (1 + values).sqrt().to(n.dtype), vectors.to(n.dtype)
    scale = root.unsqueeze(-1) + root.unsqueeze(-2)
    eye = torch.eye(n.shape[-1], dtype=n.dtype, device=n.device)
    for _ in range(CORRECTIONS):
        # Newton's step for Y (I + N) Y = I; only its derivatives.
        y = eye + value
        error = times(y, y + times(n, y))
        error = error.detach() - error
        value = value + times_transposed(times(vectors, gram(vectors, times(error, vectors)) / scale), vectors)
    return value
