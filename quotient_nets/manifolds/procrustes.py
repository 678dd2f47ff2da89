r"""The rotation that brings one factor nearest to another: the orthogonal Procrustes problem.

Imports: torch, :mod:`quotient_nets.linalg`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quotient_nets.linalg import CORRECTIONS, gram


def alignment(product: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Orthogonal polar factor ``q`` of ``product``, with two exact derivatives, and its extreme singular values.

    For :math:`y^\top x` it is the rotation with the least :math:`|y q - x|`; unique where no singular value is 0. NaN
    where ``product`` is not finite.
    """
    a = product.detach().double()
    finite = a.isfinite().all((-2, -1), keepdim=True)
    u, s, vt = torch.linalg.svd(torch.where(finite, a, 0.0))
    q = torch.where(finite, u @ vt, math.nan).to(product.dtype)
    # q solves skew(q^T a) = 0. Newton steps on the group, zero in value, carry the derivatives.
    v, scale = vt.mT.to(product.dtype), s.unsqueeze(-1) + s.unsqueeze(-2)
    scale = torch.where(scale > 0, scale, 1.0).to(product.dtype)
    for _ in range(CORRECTIONS):
        m = gram(q, product)
        change = m - m.mT
        # Only the derivatives: the value is that of the decomposition, exact also where `s` has a zero.
        change = change - change.detach()
        omega = v @ ((v.mT @ change @ v) / scale) @ v.mT
        q = q + q @ (omega + omega @ omega / 2)
    return q, s.select(-1, -1), s.select(-1, 0)
