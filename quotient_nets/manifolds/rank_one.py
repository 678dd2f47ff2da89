r"""Matrices of rank one, :math:`s\,u v^\top` with unit ``u``, ``v``: a half-line times two spheres, up to a sign.

The logarithm that needs a solver at higher rank is in closed form here. Imports: torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALL = 1e-4  # squared sine below which the angle is a series


def sphere_log(g: Tensor, q: Tensor) -> Tensor:
    """Shortest tangent vector from the unit vector ``g`` to ``q``, ``(..., n, 1)``; NaN at the antipode.

    Derivatives of all orders exist at ``q = g``.
    """
    cosine = (g * q).sum(dim=-2, keepdim=True)
    across = q - g * cosine
    square = across.square().sum(dim=-2, keepdim=True)
    near = (square < SMALL) & (cosine > 0)
    series = 1 + square * (1 / 6 + square * (3 / 40 + square * 15 / 336))
    sine = torch.where(near, 1.0, square).sqrt()
    factor = torch.where(near, series, torch.atan2(sine, torch.where(near, 1.0, cosine)) / sine)
    return across * factor


def invariant_log(g: Tensor, h: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    r"""Logarithm of the invariant metric from ``(g, h)`` to ``(p, q)``, relative to the lengths of ``g`` and ``h``.

    The metric of :math:`s\,u v^\top` is :math:`ds^2 / (2 s^2) + |du|^2 + |dv|^2`, a flat line times two spheres; the
    common sign of ``u`` and ``v`` is the one with the shorter way.
    """
    lengths = [torch.linalg.vector_norm(t, dim=-2, keepdim=True) for t in (g, h, p, q)]
    g, h, p, q = (t / length for t, length in zip((g, h, p, q), lengths, strict=True))
    growth = (lengths[2].log() - lengths[0].log() + lengths[3].log() - lengths[1].log()) / 2
    # The sign is chosen before anything is differentiated: with the other one a point is its own antipode.
    angles = [_angle(g.detach(), p.detach()), _angle(h.detach(), q.detach())]
    sign = torch.where(angles[0] + angles[1] > torch.pi, -1.0, 1.0).to(g.dtype)
    return g * growth + sphere_log(g, sign * p), h * growth + sphere_log(h, sign * q)


def _angle(g: Tensor, q: Tensor) -> Tensor:
    cosine = (g * q).sum(dim=-2, keepdim=True)
    return torch.atan2(torch.linalg.vector_norm(q - g * cosine, dim=-2, keepdim=True), cosine)
