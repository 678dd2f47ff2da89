r"""Batched algebra of a pair of tall factors: the frame, Gram matrices.

A pair :math:`G \in \mathbb{R}^{n \times r}`, :math:`H \in \mathbb{R}^{m \times r}` of full rank stands for
:math:`X = G H^\top = g \operatorname{diag}(s) h^\top`, a thin singular value decomposition. The orthonormal
factors ``g``, ``h``, the spectrum ``s`` and the small matrices that lead to them are the :class:`Frame`. Every
metric of :mod:`quotient_nets.manifolds` is elementwise in it, and :math:`G^\top G\,H^\top H`, whose condition
number is the square of that of ``X``, is never formed.

Imports: torch. Knows nothing of manifolds or networks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

CORRECTIONS = 2  # derivatives of a solution with respect to the point that are exact
CHUNK = 16  # factors cast to float64 at a time: casting a whole stack costs more than the algebra


def gram(a: Tensor, b: Tensor) -> Tensor:
    r"""Inner products of columns, :math:`a^\top b`: ``(..., n, r)`` twice -> ``(..., r, r)``."""
    if a.shape[-1] == b.shape[-1] == 1:
        return (a * b).sum(dim=-2, keepdim=True)
    return a.mT @ b


def times(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Matrix product; scaling where ``b`` is a scalar ``(..., 1, 1)`` or the diagonal ``(..., 1, r)``."""
    if b.shape[-2] == 1:
        return torch.mul(a, b, out=out)
    return torch.matmul(a, b, out=out)


def times_transposed(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    r"""Matrix product :math:`a b^\top`, for ``b`` as in :func:`times`."""
    return times(a, transposed(b), out=out)


def transposed(b: Tensor) -> Tensor:
    """Transpose of a square matrix; one that is a row of scales is diagonal."""
    return b if b.shape[-2] == 1 else b.mT


def add_product(y: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0, *, out: Tensor | None = None) -> Tensor:
    """``y + alpha a b``, in one pass where there is one batch axis; ``out`` may be ``y``."""
    if y.dim() == a.dim() == b.dim() == 3 and b.shape[-2] > 1:
        return torch.baddbmm(y, a, b, alpha=alpha, out=out)
    if b.shape[-2] == 1 and alpha == 1.0:
        return torch.addcmul(y, a, b, out=out)
    return torch.add(y, times(a, b), alpha=alpha, out=out)


def at_least_single(x: Tensor) -> Tensor:
    """``x``, in float32 if it is in half precision.

    Raises:
        TypeError: ``x`` holds no real floating point numbers.
    """
    if not x.is_floating_point():
        raise TypeError(f"expected a tensor of real floating point numbers, got {x.dtype}. Convert it: `x.double()`.")
    return x.float() if x.dtype.itemsize < 4 else x


def column_signs(q: Tensor, turn: Tensor | None = None) -> Tensor:
    """Signs ``(..., 1, r)`` that make the products of the columns with one fixed generic vector positive.

    Columns of ``q @ turn``, if there is a turn.
    """
    products = gram(generic_vector(q.shape[-2], q), q)
    if turn is not None:
        products = products.to(turn.dtype) @ turn
    return torch.where(products < 0, -1.0, 1.0).to(products.dtype)


def is_finite(x: Tensor) -> Tensor:
    """Which matrices have neither NaN nor Inf, ``(..., 1, 1)``; in one pass, where ``isfinite`` takes three."""
    return (x * 0).sum(dim=(-2, -1), keepdim=True) == 0


def generic_vector(rows: int, like: Tensor) -> Tensor:
    """One fixed vector ``(rows, 1)`` that is special for no input, in the dtype and on the device of ``like``."""
    multiples = torch.arange(1, rows + 1, dtype=torch.float64, device=like.device) * 0.6180339887
    return (torch.frac(multiples) - 0.5).to(like.dtype).unsqueeze(-1)


def random_orthogonal(*shape: int, generator: torch.Generator | None = None, **options: Any) -> Tensor:
    """Uniform orthogonal matrices of either determinant, on the device of the generator; options as ``torch.randn``."""
    if generator is not None:
        options = {"device": generator.device, "generator": generator} | options
    q, r = torch.linalg.qr(torch.randn(*shape, **options))
    # The sign of R's diagonal makes Q uniform on O(r); LAPACK's own choice fixes the determinant.
    return q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)


class Frame(NamedTuple):
    r"""Singular value decomposition of :math:`G H^\top` together with the way to it from ``(G, H)``.

    Attributes:
        g: Orthonormal basis of the columns of ``G``, ``(..., n, r)``.
        h: Orthonormal basis of the columns of ``H``, ``(..., m, r)``.
        spectrum: Singular values of :math:`G H^\top`, descending, ``(..., r)``.
        pull_g: ``G @ pull_g = g``; ``(..., r, r)``, or ``(..., 1, r)`` where it is diagonal.
        pull_h: ``H @ pull_h = h``.
        push_g: ``g @ push_g = G``.
        push_h: ``h @ push_h = H``.

    The balanced representative is ``(g s^{1/2}, h s^{1/2})``.
    """

    g: Tensor
    h: Tensor
    spectrum: Tensor
    pull_g: Tensor
    pull_h: Tensor
    push_g: Tensor
    push_h: Tensor


def frame(g: Tensor, h: Tensor) -> Frame:
    r"""Frame of a pair of factors, computed in float64 and returned in the dtype of ``g``.

    In float64 a thin QR of both factors and one SVD of the small :math:`R_G R_H^\top`; in float32 their Gram matrices,
    which then lose nothing. The signs of the columns, which a decomposition leaves open, are those that make the
    product with a fixed generic vector positive, so the frame is a function of :math:`G H^\top` alone as long as no
    singular value is repeated.

    Args:
        g: Left factor, ``(..., n, r)`` with ``r <= n``.
        h: Right factor, ``(..., m, r)`` with ``r <= m`` and the same batch shape.

    Returns:
        The frame, detached from autograd. An element that holds NaN or Inf, or is numerically rank deficient,
        :math:`s_r \le 10 \max(\epsilon, \max(n, m)\, \epsilon_{64})\, |G| |H|`, gives NaN for that element only.

    Cost: :math:`O((n + m) r^2 + r^3)`.
    """
    g, h = g.detach(), h.detach()
    batch = torch.broadcast_shapes(g.shape[:-2], h.shape[:-2])
    g, h = g.expand(*batch, *g.shape[-2:]), h.expand(*batch, *h.shape[-2:])
    if g.shape[-1] == 1:
        return _scalar_frame(g, h)
    if g.dtype == torch.float64:
        return _frame(g, h)
    if not batch:
        return _single_frame(g, h)
    pairs = zip(g.flatten(0, -3).split(CHUNK), h.flatten(0, -3).split(CHUNK), strict=True)
    chunks = [_single_frame(*pair) for pair in pairs]
    return Frame(*(torch.cat(parts).unflatten(0, batch) for parts in zip(*chunks, strict=True)))


def balanced_frame(g: Tensor, h: Tensor) -> Frame:
    r"""Frame of a pair that is already balanced with the frame's own signs, as ``canonicalize`` returns it.

    Then :math:`G^\top G = H^\top H = \operatorname{diag}(s)`, and pulling and pushing are scalings of columns.

    Cost: two passes over the factors.
    """
    g, h = g.detach(), h.detach()
    root = torch.linalg.vector_norm(g, dim=-2, keepdim=True)
    root = (root * torch.linalg.vector_norm(h, dim=-2, keepdim=True)).sqrt()
    inverse = 1 / root
    return Frame(g * inverse, h * inverse, root.square().squeeze(-2), inverse, inverse, root, root)


def _frame(g: Tensor, h: Tensor) -> Frame:
    """Frame by orthogonal transformations only, which do not lose digits to ``cond(G)``."""
    (qg, rg), (qh, rh) = (torch.linalg.qr(factor) for factor in (g, h))
    core = rg @ rh.mT
    # LAPACK's decomposition refuses a whole batch for one NaN; the element gets its NaN back below.
    finite = is_finite(core)
    u, s, vt = torch.linalg.svd(torch.where(finite, core, 0.0), full_matrices=False)
    v = vt.mT
    norms = torch.linalg.matrix_norm(rg, keepdim=True) * torch.linalg.matrix_norm(rh, keepdim=True)
    valid = _validity(finite, s, norms, rank_floor(max(g.shape[-2], h.shape[-2]), g.dtype))
    # Triangular solves, not products with 1/s: their error grows with cond(G), not with cond(G) cond(X).
    pull_g = torch.linalg.solve_triangular(rg, u, upper=True)
    sign = column_signs(g, pull_g) * valid
    u, v, pull_g = u * sign, v * sign, pull_g * sign
    pull_h = torch.linalg.solve_triangular(rh, v, upper=True)
    return Frame(qg @ u, qh @ v, s * valid.squeeze(-1), pull_g, pull_h, u.mT @ rg, v.mT @ rh)


def _single_frame(g: Tensor, h: Tensor) -> Frame:
    r"""Frame of factors in float32 by the Cholesky factor of one Gram matrix and the eigenvectors of another.

    With :math:`G^\top G = L L^\top` and :math:`L^\top H^\top H L = U s^2 U^\top` the frame is
    :math:`g = G L^{-\top} U`, :math:`h = H L U s^{-1}`. In float64 this changes the factors by
    :math:`\epsilon_{64}` times a condition of at most :math:`1 / (10 \epsilon_{32})`: less than storing them did.
    """
    dtype, floor = g.dtype, rank_floor(max(g.shape[-2], h.shape[-2]), g.dtype)
    g, h = g.double(), h.double()
    square_g, square_h = gram(g, g), gram(h, h)
    finite = is_finite(square_g) & is_finite(square_h)
    norms = torch.linalg.vector_norm(g, dim=(-2, -1), keepdim=True)
    norms = norms * torch.linalg.vector_norm(h, dim=(-2, -1), keepdim=True)
    eye = torch.eye(g.shape[-1], dtype=g.dtype, device=g.device)
    lower, failed = torch.linalg.cholesky_ex(torch.where(finite, square_g, eye))
    finite = finite & (failed == 0).unsqueeze(-1).unsqueeze(-1)
    core = torch.where(finite, lower.mT @ square_h @ lower, eye)
    values, u = torch.linalg.eigh(core)
    s, u = values.flip(-1).clamp_min(0.0).sqrt(), u.flip(-1)
    valid = _validity(finite, s, norms, floor)
    pull_g = torch.linalg.solve_triangular(lower.mT, u, upper=True)
    sign = column_signs(g, pull_g) * valid
    u, pull_g, s = u * sign, pull_g * sign, s * valid.squeeze(-1)
    push_g = (lower @ u).mT
    pull_h, push_h = push_g.mT / s.unsqueeze(-2), pull_g.mT * s.unsqueeze(-1)
    return Frame(*(part.to(dtype) for part in (g @ pull_g, h @ pull_h, s, pull_g, pull_h, push_g, push_h)))


def rank_floor(rows: int, dtype: torch.dtype) -> float:
    """Least singular value, in units of the whole matrix, that neither storage nor float64 algebra makes up."""
    return 10 * max(torch.finfo(dtype).eps, rows * torch.finfo(torch.float64).eps)


def _validity(finite: Tensor, s: Tensor, norms: Tensor, floor: float) -> Tensor:
    """One for an element of full rank, ``(..., 1, 1)``; NaN otherwise.

    Below the floor the last columns would be rounding noise: no number is better than a plausible one.
    """
    full = finite & (s.narrow(-1, -1, 1).unsqueeze(-1) > floor * norms)
    return torch.where(full, 1.0, math.nan).to(s.dtype)


def _scalar_frame(g: Tensor, h: Tensor) -> Frame:
    """Frame of columns, ``r = 1``: norms instead of decompositions."""
    sign = column_signs(g)
    norms = (torch.linalg.vector_norm(t, dim=-2, keepdim=True) for t in (g, h))
    # The inverse of an infinite length would be 0, a number.
    norm_g, norm_h = (sign * torch.where(norm < math.inf, norm, math.nan) for norm in norms)
    spectrum = (norm_g * norm_h).squeeze(-2)
    return Frame(g / norm_g, h / norm_h, spectrum, 1 / norm_g, 1 / norm_h, norm_g, norm_h)


def truncated_svd(matrix: Tensor, r: int) -> tuple[Tensor, Tensor, Tensor]:
    r"""Best approximation :math:`g \operatorname{diag}(s) h^\top` of rank ``r`` (Eckart and Young), in float64.

    Singular values descend; the signs are those of :func:`frame`.

    Raises:
        ValueError: ``r`` is not between 1 and the smaller side; the matrix has a lower rank, NaN or Inf.
        TypeError: The matrix does not hold real floating point numbers.
    """
    matrix = at_least_single(matrix)
    if not (isinstance(r, int) and 1 <= r <= min(matrix.shape[-2:])):
        raise ValueError(f"expected a rank 1 <= r <= {min(matrix.shape[-2:])}, got r={r!r}")
    if not bool(matrix.isfinite().all()):
        raise ValueError("expected a finite matrix, got NaN or Inf")
    u, s, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    floor = rank_floor(max(matrix.shape[-2:]), matrix.dtype) * torch.linalg.vector_norm(s, dim=-1)
    g, s, h = u.narrow(-1, 0, r), s.narrow(-1, 0, r), vt.narrow(-2, 0, r).mT
    if not bool((s.select(-1, -1) > floor).all()):
        raise ValueError(
            f"expected a matrix of rank r={r} at least; it is numerically rank deficient. Use a smaller r."
        )
    sign = column_signs(g)
    return g * sign, s, h * sign


def solve(a: Tensor, b: Tensor) -> Tensor:
    """Solution ``z`` of ``a z = b`` for square ``a``; NaN or Inf where ``a`` is singular, without a check.

    ``torch.linalg.solve`` differentiated forwards twice loses half of the second derivative (torch 2.13).
    """
    return lu_solve(lu_factor(a), b)


def lu_factor(a: Tensor) -> tuple[Tensor, Tensor]:
    """Factorisation of square matrices for :func:`lu_solve`, without a check."""
    lu, pivots, _ = torch.linalg.lu_factor_ex(a)
    return lu, pivots


def lu_solve(factored: tuple[Tensor, Tensor], b: Tensor) -> Tensor:
    """Solution of :func:`solve` for a matrix that is already factored."""
    return torch.linalg.lu_solve(*factored, b)


def solve_right(b: Tensor, a: Tensor) -> Tensor:
    """Solution ``z`` of ``z a = b``; see :func:`solve`."""
    return solve(a.mT, b.mT).mT


def matrix_exp(a: Tensor) -> Tensor:
    """Matrix exponential, accurate to rounding for matrices of norm up to 2.

    ``torch.matrix_exp`` of one matrix alone is off by 2e-11 at norm 0.03 in float64 (torch 2.13), so it gets two.
    """
    if math.prod(a.shape[:-2]) == 1:
        return torch.matrix_exp(torch.stack([a, a])).select(0, 0)
    return torch.matrix_exp(a)


def is_transformed() -> bool:
    """Whether values are unknown here: inside a transform of ``torch.func``, or where a graph is compiled."""
    return torch.compiler.is_compiling() or peek_interpreter_stack() is not None


def is_differentiated(*tensors: Tensor) -> bool:
    """Whether derivatives with respect to one of the tensors may be asked for, backwards or forwards."""
    # What a transform of torch.func differentiates cannot be seen from the tensor: a batch hides it.
    return peek_interpreter_stack() is not None or any(
        (t.requires_grad and torch.is_grad_enabled()) or forward_ad.unpack_dual(t).tangent is not None for t in tensors
    )


def inverse_action(y: Tensor, defect: Tensor | None) -> Tensor:
    r""":math:`y S^{-1}` for :math:`S = I - \text{defect}`, with the defect zero up to rounding.

    Two terms of the Neumann series: they change no digit of the value and make its first two derivatives with
    respect to the defect exact, which autograd through a decomposition is not at repeated singular values.
    """
    if defect is None:
        return y
    once = times(y, defect)
    return y + once + times(once, defect)


def gram_action(y: Tensor, defect: Tensor | None) -> Tensor:
    r""":math:`y S` for :math:`S = I - \text{defect}`, the inverse of :func:`inverse_action`."""
    return y if defect is None else y - times(y, defect)


def solve_by_correction(operator: Callable[[Tensor], Tensor], scale: Tensor, rhs: Tensor, corrections: int) -> Tensor:
    """Solve ``operator(z) = rhs`` for an operator equal, up to rounding, to multiplication by ``scale``.

    Each correction makes one more derivative of the solution exact; the value is that of ``rhs / scale``.
    """
    z = (rhs / scale).detach() if corrections else rhs / scale
    for _ in range(corrections):
        z = z + (rhs - operator(z)) / scale
    return z
