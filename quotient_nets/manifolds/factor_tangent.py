r"""Tangent space of fixed-rank matrices given by a pair of factors, in the frames of the factors.

With :math:`G = g P_G`, :math:`H = h P_H` and orthonormal ``g``, ``h``, a vector :math:`u = (u_G, u_H)` has coordinates
:math:`c = (u_G T_G, u_H T_H)`; a metric chooses the transforms so that it is simple. The frame is a constant under
autograd; what its factors lose of their orthonormality when the point varies, the *defect*, is zero in value and
carries the derivatives.

Imports: torch, :mod:`quotient_nets.linalg`, :mod:`quotient_nets.tangent_space`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from quotient_nets.linalg import Frame, add_product, gram, is_differentiated, times, transposed
from quotient_nets.tangent_space import TangentSpace

ACCURACY = {torch.float64: 1e-13, torch.float32: 1e-9}

Terms = Sequence[tuple[Tensor, Tensor]]
r"""Pairs ``(a, b)`` of factors ``(..., n, k)`` and ``(..., m, k)`` that stand for the matrix :math:`\sum a b^\top`."""


class MatrixTangentSpace(TangentSpace):
    """Tangent space at a matrix of fixed rank, whatever represents it: tangent vectors are also tangent matrices."""

    frame: Frame
    g: Tensor
    h: Tensor
    accuracy: float = ACCURACY[torch.float64]
    """Error of one step where geodesics are integrated, relative."""
    degree: int = 0
    """How coordinates grow with the matrix: they are multiplied by ``c**degree`` when it is multiplied by ``c``."""

    @abstractmethod
    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """Rows of the left factor, of what is between, if anything, and of the right factor."""

    def products(self, terms: Terms) -> tuple[Tensor, Tensor]:
        """``Z h`` and ``Z^T g`` for the matrix ``Z`` that ``terms`` stand for, without forming it."""
        terms = [(a.to(self.g.dtype), b.to(self.g.dtype)) for a, b in terms]
        right = sum((times(a, gram(b, self.h)) for a, b in terms[1:]), times(terms[0][0], gram(terms[0][1], self.h)))
        left = sum((times(b, gram(a, self.g)) for a, b in terms[1:]), times(terms[0][1], gram(terms[0][0], self.g)))
        return right, left

    @abstractmethod
    def lift(self, right: Tensor, left: Tensor) -> Tensor:
        """Coordinates of the horizontal lift of the projected matrix ``Z`` with ``right = Z h``, ``left = Z^T g``."""

    @abstractmethod
    def project_vector(self, u: Tensor) -> Tensor:
        """Horizontal part of an ambient vector: ``vector(project(coordinates(u)))`` in fewer products."""

    @abstractmethod
    def hessian(self, e: Tensor, de: Tensor, c: Tensor) -> Tensor:
        """Riemannian Hessian along ``c``, in coordinates.

        Args:
            e: Euclidean gradient as :meth:`pull_gradient` returns it.
            de: Its derivative along ``c``, pulled in the same way.
            c: Horizontal direction.
        """

    @override
    def certificates(self, c: Tensor) -> dict[str, Tensor]:
        s = self.frame.spectrum
        first, last = s.select(-1, 0), s.select(-1, -1)
        relative = -s.diff(dim=-1) / s.narrow(-1, 0, s.shape[-1] - 1)
        gap = relative.amin(-1) if s.shape[-1] > 1 else torch.ones_like(first)
        return super().certificates(c) | {"condition_number": first / last, "spectral_gap": gap}


class FactorTangentSpace(MatrixTangentSpace):
    """Vectors at a pair of factors; coordinates have the shape of the point, ``(..., n + m, r)``.

    Args:
        x: The point.
        n: Rows of ``G``.
        frame: Its frame.
        differentiable: Carry derivatives with respect to ``x``; loops at one point do without.
    """

    ndim = 2
    pull: tuple[Tensor, Tensor]
    push: tuple[Tensor, Tensor]

    def __init__(self, x: Tensor, n: int, frame: Frame, *, differentiable: bool = False):
        self.x, self.n, self.frame = x, n, frame
        self.batch = x.shape[:-2]
        self.g, self.h = frame.g, frame.h
        self.accuracy = ACCURACY[self.g.dtype]
        self.defect_g = self.defect_h = None
        if differentiable:
            xg, xh = self.split(x)
            self.g, self.defect_g = _carry(xg, frame.g, frame.pull_g)
            self.h, self.defect_h = _carry(xh, frame.h, frame.pull_h)

    @override
    def split(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of ``G`` and of ``H``, in the dtype of the frame."""
        g, h = y.to(self.g.dtype).split([self.n, y.shape[-2] - self.n], dim=-2)
        return g, h

    @override
    def coordinates(self, u: Tensor) -> Tensor:
        return assemble(*zip(self.split(u), self.pull, strict=True))

    @override
    def vector(self, c: Tensor) -> Tensor:
        return assemble(*zip(self.split(c), self.push, strict=True))

    @override
    def pull_gradient(self, e: Tensor) -> Tensor:
        return assemble(*zip(self.split(e), map(transposed, self.push), strict=True))

    @abstractmethod
    def vertical(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        r"""Matrices ``(a, b)`` that make :math:`(c_g + g a, c_h + h b)` horizontal.

        From :math:`g^\top c_g` and :math:`h^\top c_h`.
        """

    @override
    def project(self, c: Tensor) -> Tensor:
        parts = self.split(c)
        bases = self.g, self.h
        return assemble(*zip(parts, bases, self.vertical(*map(gram, bases, parts)), strict=True))

    @override
    def project_vector(self, u: Tensor) -> Tensor:
        parts = self.split(u)
        bases = self.g, self.h
        vertical = self.vertical(*map(times, map(gram, bases, parts), self.pull))
        return assemble(*zip(parts, bases, map(times, vertical, self.push), strict=True))

    @override
    def move(self, c: Tensor, path: str, radius: float | None = None) -> Tensor:
        x, parts = self.split(self.x), self.split(c)
        if path == "retr":
            return assemble(*zip(x, parts, self.push, strict=True))
        rows = zip(x, (self.g, self.h), parts, self.push, self.steps(path, *parts, radius), strict=True)
        eye = torch.eye(c.shape[-1], dtype=self.g.dtype, device=c.device)
        return assemble(*((y, g, times(m1, push), b, times(m2 + eye, push)) for y, g, b, push, (m1, m2) in rows))

    @abstractmethod
    def steps(self, path: str, cg: Tensor, ch: Tensor, radius: float | None) -> list[tuple[Tensor, Tensor]]:
        """Where a path leads: ``(m1, m2)`` for each side, which is displaced by ``c + g m1 + c m2``.

        Raises:
            ValueError: There is no path of this name.
        """


def assemble(*sides: Sequence[Tensor]) -> Tensor:
    """Rows of one side above those of the other, each a sum of products: ``(y, a, b, ...)`` is ``y + a b + ...``.

    Without the ``y`` where the number of tensors is even. Written in place of the result, without a copy, where nothing
    is differentiated.
    """
    tensors = [t for side in sides for t in side]
    if torch.compiler.is_compiling() or is_differentiated(*tensors):
        return torch.cat([_sum_of_products(side) for side in sides], dim=-2)
    rows = [side[0].shape[-2] for side in sides]
    batch = torch.broadcast_shapes(*(t.shape[:-2] for t in tensors))
    out = tensors[0].new_empty(*batch, sum(rows), sides[0][-1].shape[-1])
    for side, target in zip(sides, out.split(rows, dim=-2), strict=True):
        _sum_of_products(side, out=target)
    return out


def _sum_of_products(terms: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    single = len(terms) % 2
    if len(terms) == 1 and out is not None:
        return out.copy_(terms[0])
    total = terms[0] if single else times(terms[0], terms[1], out=out)
    for a, b in zip(terms[2 - single :: 2], terms[3 - single :: 2], strict=True):
        total = add_product(total, a, b, out=out)
    return total


def stack(g: Tensor, h: Tensor) -> Tensor:
    """Rows of ``G`` above rows of ``H``."""
    return torch.cat([g, h], dim=-2)


def sym(a: Tensor) -> Tensor:
    """Symmetric part."""
    return (a + a.mT) / 2


def _carry(factor: Tensor, basis: Tensor, pull: Tensor) -> tuple[Tensor, Tensor]:
    """The orthonormal basis with the derivatives of ``factor @ pull``, and its defect ``I - basis^T basis``."""
    moving = times(factor, pull)
    basis = basis + (moving - moving.detach())
    eye = torch.eye(basis.shape[-1], dtype=basis.dtype, device=basis.device)
    return basis, eye - gram(basis, basis)
