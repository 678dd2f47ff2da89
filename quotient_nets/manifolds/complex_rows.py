"""Complex arithmetic on real tensors whose last axis is (re, im).

A vector is ``(..., n, 2)``, a number ``(..., 1, 2)``. Every function is differentiable, broadcasts, and works in half
precision, which torch's complex types do not.

Imports: torch, :mod:`quotient_nets.linalg`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quotient_nets.linalg import generic_vector


def turn(x: Tensor) -> Tensor:
    """``i x``."""
    return torch.stack([-x.select(-1, 1), x.select(-1, 0)], dim=-1)


def conjugate(x: Tensor) -> Tensor:
    """Complex conjugate."""
    return torch.stack([x.select(-1, 0), -x.select(-1, 1)], dim=-1)


def times(x: Tensor, c: Tensor) -> Tensor:
    """Complex product ``c x``, elementwise with broadcasting."""
    return x * c.narrow(-1, 0, 1) + turn(x) * c.narrow(-1, 1, 1)


def dot(x: Tensor, y: Tensor) -> Tensor:
    """Hermitian product :math:`x^* y`, conjugate-linear in ``x``: ``(..., n, 2)`` twice -> ``(..., 1, 2)``."""
    return torch.stack([(x * y).sum((-2, -1)), (turn(x) * y).sum((-2, -1))], dim=-1).unsqueeze(-2)


def outer(x: Tensor, y: Tensor) -> Tensor:
    """Matrix :math:`x y^*`: ``(..., n, 2)`` and ``(..., m, 2)`` -> ``(..., n, m, 2)``."""
    return torch.stack([x @ y.mT, x @ turn(y).mT], dim=-1)


def reference_phase(g: Tensor) -> Tensor:
    """Number ``z`` of modulus 1 for which the product of ``g / z`` with one fixed generic real vector is positive."""
    z = (generic_vector(g.shape[-2], g) * g).sum(-2, keepdim=True)
    modulus = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    one = torch.ones_like(modulus)
    z = torch.where(modulus == 0, torch.cat([one, 0 * one], dim=-1), z)
    return z / torch.where(modulus == 0, 1.0, modulus)


def real_dot(x: Tensor, y: Tensor) -> Tensor:
    """Real part of the Hermitian product, ``(..., 1, 1)``."""
    return (x * y).sum((-2, -1), keepdim=True)


def real_rows(x: Tensor) -> Tensor:
    """Complex tensors with a last axis (re, im); real ones as they are."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def number(a: Tensor) -> Tensor:
    """Complex-linear part of a real ``2 x 2`` matrix on rows, as a number ``(..., 1, 2)``."""
    (aa, ab), (ba, bb) = (row.unbind(-1) for row in a.unbind(-2))
    return torch.stack([(aa + bb) / 2, (ab - ba) / 2], dim=-1).unsqueeze(-2)


def complex_matrix(z: Tensor) -> Tensor:
    """Number ``(..., 1, 2)`` as the real matrix ``(..., 2, 2)`` that multiplies rows (re, im) from the right."""
    return torch.cat([z, turn(z)], dim=-2)
