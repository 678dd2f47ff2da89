r"""Pairs of factors and the singular value decompositions that pymanopt's ``FixedRankEmbedded`` takes, and back.

A point there is ``(u, s, vt)``. A tangent vector at it is ``(Up, M, Vp)`` and stands for the matrix
:math:`u M v^\top + U_p v^\top + u V_p^\top`. No function here forms an ``n x m`` matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import geoopt
import numpy as np
from pymanopt.manifolds import FixedRankEmbedded

from quotient_nets.interop.adapter import to_array, to_tensor
from quotient_nets.tangent_space import Checked

Triple = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Thin singular value decomposition: ``u``, ``(n, r)``; ``s``, ``(r,)``; ``vt``, ``(r, m)``."""

SAME_MATRIX = 1e-6  # relative; what two notations of one matrix may differ by


def to_svd_triple(manifold: geoopt.Manifold, x: np.ndarray) -> Triple:
    """The matrix of a pair of factors as a point of ``FixedRankEmbedded``; no ``n x m`` matrix is formed.

    Args:
        manifold: Manifold whose ``unpack_tensor`` gives the factors ``(G, H)``, such as ``InvariantFixedRank``.
        x: Point, ``(n + m, r)``.

    Raises:
        TypeError: Points of the manifold are not pairs of factors.
        ValueError: ``x`` is no point: a batch, or a matrix of lower rank.
    """
    x = np.asarray(x)
    if x.ndim != 2:
        raise ValueError(
            f"expected one point, an array (n + m, r), got the shape {x.shape}. Convert a batch one by one."
        )
    factors = _factors(manifold, x)
    ok, reason = cast("Checked", manifold.check_point_on_manifold(to_tensor(x), explain=True))
    if not ok:
        raise ValueError(f"expected a point of {manifold.name}: {reason}")
    (qg, rg), (qh, rh) = map(np.linalg.qr, factors)
    u, s, vt = np.linalg.svd(rg @ rh.T)
    return qg @ u, s, vt @ qh.T


def from_svd_triple(manifold: geoopt.Manifold, triple: Triple) -> np.ndarray:
    r"""Balanced pair of factors, :math:`u s^{1/2}` and :math:`v s^{1/2}`, of a point of ``FixedRankEmbedded``.

    Raises:
        ValueError: A singular value is not positive.
    """
    u, s, vt = map(np.asarray, triple)
    if not (s > 0).all():
        raise ValueError(f"expected positive singular values in `triple`, got {s}. A smaller rank has none that are 0.")
    return _pack(manifold, u * np.sqrt(s), vt.T * np.sqrt(s))


def to_svd_tangent(manifold: geoopt.Manifold, x: np.ndarray, triple: Triple, u: np.ndarray) -> Any:
    r"""The tangent matrix :math:`u_G H^\top + G u_H^\top` as a tangent vector of ``FixedRankEmbedded`` at ``triple``.

    Args:
        manifold: As for :func:`to_svd_triple`.
        x: Point, ``(n + m, r)``.
        triple: The same matrix, from :func:`to_svd_triple` or from pymanopt.
        u: Tangent vector at ``x``; its vertical part does not count.

    Returns:
        ``(Up, M, Vp)`` of shapes ``(n, r)``, ``(r, r)``, ``(m, r)``, of pymanopt's own class. Its norm there is the
        Frobenius norm of the tangent matrix, whatever the metric of ``manifold``.

    Raises:
        TypeError: Points of the manifold are not pairs of factors.
        ValueError: ``triple`` is another matrix than ``x``.
    """
    g, h, _, _ = _in_frame(manifold, x, triple)
    ug, uh = _factors(manifold, u)
    embedded = FixedRankEmbedded(len(g), len(h), g.shape[1])
    return embedded.projection(triple, (np.hstack([ug, g]), np.eye(2 * g.shape[1]), np.hstack([h, uh])))


def from_svd_tangent(manifold: geoopt.Manifold, x: np.ndarray, triple: Triple, tangent: Sequence[Any]) -> np.ndarray:
    """Horizontal lift at ``x`` of a tangent vector ``(Up, M, Vp)`` of ``FixedRankEmbedded`` at ``triple``.

    The inverse of :func:`to_svd_tangent` on horizontal vectors. No ``n x m`` matrix is formed.

    Raises:
        TypeError: Points of the manifold are not pairs of factors.
        ValueError: ``triple`` is another matrix than ``x``.
    """
    _, _, left, right = _in_frame(manifold, x, triple)
    up, m, vp = tangent
    # Any pair of factors with this tangent matrix will do: proju removes what is vertical.
    ug = np.linalg.solve(right, (triple[0] @ m + up).T).T
    uh = np.linalg.solve(left, vp.T).T
    return to_array(manifold.proju(to_tensor(x), to_tensor(_pack(manifold, ug, uh))))


def _in_frame(manifold: geoopt.Manifold, x: np.ndarray, triple: Triple) -> tuple[np.ndarray, ...]:
    """``G``, ``H`` and the square matrices ``a``, ``b`` with ``G = u a`` and ``H = v b``.

    Raises:
        ValueError: There are none, or ``a b^T`` is not ``diag(s)``.
    """
    g, h = _factors(manifold, x)
    u, s, vt = triple
    a, b = u.T @ g, vt @ h
    size = np.linalg.norm(g), np.linalg.norm(h)
    off = (g - u @ a) / size[0], (h - vt.T @ b) / size[1], (a @ b.T - np.diag(s)) / (size[0] * size[1])
    if not sum(map(np.linalg.norm, off)) <= SAME_MATRIX:
        raise ValueError(
            "expected `triple` to be the singular value decomposition of the matrix of `x`, got another matrix. "
            "Take `to_svd_triple(manifold, x)`."
        )
    return g, h, a, b


def _factors(manifold: geoopt.Manifold, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    factors = manifold.unpack_tensor(to_tensor(x))
    if not (isinstance(factors, tuple) and len(factors) == 2):
        raise TypeError(
            f"expected a manifold whose points are pairs of factors (G, H), got {manifold.name}. A point of "
            "PSDFixedRank is pymanopt's own, the same array; a canonical one of PolarFixedRank is a singular value "
            "decomposition as it stands."
        )
    return to_array(factors[0]), to_array(factors[1])


def _pack(manifold: geoopt.Manifold, g: np.ndarray, h: np.ndarray) -> np.ndarray:
    return to_array(manifold.pack_point(to_tensor(g), to_tensor(h)))
