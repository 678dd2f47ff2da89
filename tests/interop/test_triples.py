"""One matrix in our notation and in pymanopt's."""

from typing import Any

import geoopt
import numpy as np
import pymanopt.manifolds
import pytest
import torch
from pymanopt.manifolds import FixedRankEmbedded
from torch.func import jvp

from quotient_nets import InvariantFixedRank, PSDFixedRank
from quotient_nets.interop import as_pymanopt, from_svd_tangent, from_svd_triple, to_svd_tangent, to_svd_triple

SHAPES = [(6, 5, 2), (5, 6, 3), (4, 3, 3), (4, 4, 4), (5, 3, 1)]
each_shape = pytest.mark.parametrize(("n", "m", "r"), SHAPES)
ROUNDING = 1e-10


def embed(theirs: FixedRankEmbedded, triple: Any, tangent: Any) -> np.ndarray:
    left, core, right = theirs.embedding(triple, tangent)
    return left @ core @ right.T


def product(manifold: InvariantFixedRank, x: np.ndarray) -> np.ndarray:
    return manifold.product(torch.from_numpy(x)).numpy()


def push(manifold: InvariantFixedRank, x: np.ndarray, u: np.ndarray) -> np.ndarray:
    return jvp(manifold.product, (torch.from_numpy(x),), (torch.from_numpy(u),))[1].numpy()


@each_shape
def test_points_there_and_back(n: int, m: int, r: int) -> None:
    manifold = InvariantFixedRank(n, m)
    x = as_pymanopt(manifold, n + m, r).random_point()
    u, s, vt = triple = to_svd_triple(manifold, x)
    np.testing.assert_allclose(u * s @ vt, product(manifold, x), atol=ROUNDING)
    np.testing.assert_allclose(u.T @ u, np.eye(r), atol=ROUNDING)
    np.testing.assert_allclose(vt @ vt.T, np.eye(r), atol=ROUNDING)
    np.testing.assert_allclose(s, np.linalg.svd(product(manifold, x))[1][:r], rtol=ROUNDING)
    back = from_svd_triple(manifold, triple)
    np.testing.assert_allclose(product(manifold, back), product(manifold, x), atol=ROUNDING)
    np.testing.assert_allclose(back[:n].T @ back[:n], np.diag(s), atol=ROUNDING)
    np.testing.assert_allclose(back[n:].T @ back[n:], np.diag(s), atol=ROUNDING)


@each_shape
def test_tangent_vectors_there_and_back(n: int, m: int, r: int) -> None:
    manifold, theirs = InvariantFixedRank(n, m), FixedRankEmbedded(n, m, r)
    adapted = as_pymanopt(manifold, n + m, r)
    x = adapted.random_point()
    u, triple = adapted.random_tangent_vector(x), to_svd_triple(manifold, x)
    tangent = to_svd_tangent(manifold, x, triple, u)
    matrix = push(manifold, x, u)
    assert type(tangent) is type(theirs.zero_vector(triple))
    np.testing.assert_allclose(embed(theirs, triple, tangent), matrix, atol=ROUNDING)
    np.testing.assert_allclose(tangent.Up.T @ triple[0], np.zeros((r, r)), atol=ROUNDING)
    np.testing.assert_allclose(triple[2] @ tangent.Vp, np.zeros((r, r)), atol=ROUNDING)
    np.testing.assert_allclose(theirs.norm(triple, tangent), np.linalg.norm(matrix), rtol=ROUNDING)
    np.testing.assert_allclose(from_svd_tangent(manifold, x, triple, tangent), u, atol=ROUNDING)


@each_shape
def test_invariant_metric_in_their_coordinates(n: int, m: int, r: int) -> None:
    adapted = as_pymanopt(InvariantFixedRank(n, m), n + m, r)
    x = adapted.random_point()
    u, (left, s, right) = adapted.random_tangent_vector(x), to_svd_triple(adapted.manifold, x)
    up, core, vp = to_svd_tangent(adapted.manifold, x, (left, s, right), u)
    weighted = [(up / s) ** 2, core**2 / (s[:, None] ** 2 + s**2), (vp / s) ** 2]
    assert sum(part.sum() for part in weighted) == pytest.approx(1.0, rel=ROUNDING)


@each_shape
def test_lift_of_their_tangent_vector(n: int, m: int, r: int) -> None:
    manifold, theirs = InvariantFixedRank(n, m), FixedRankEmbedded(n, m, r)
    triple = theirs.random_point()
    tangent = theirs.random_tangent_vector(triple)
    a = np.linalg.qr(np.random.default_rng(0).normal(size=(r, r)))[0] * 2.0
    x = manifold.action(torch.tensor(from_svd_triple(manifold, triple)), torch.tensor(a)).numpy()
    u = from_svd_tangent(manifold, x, triple, tangent)
    np.testing.assert_allclose(push(manifold, x, u), embed(theirs, triple, tangent), atol=ROUNDING)
    np.testing.assert_allclose(as_pymanopt(manifold, n + m, r).projection(x, u), u, atol=ROUNDING)


def test_another_matrix_is_refused() -> None:
    adapted = as_pymanopt(InvariantFixedRank(4, 3), 7, 2)
    x, y = adapted.random_point(), adapted.random_point()
    u, triple = adapted.random_tangent_vector(x), to_svd_triple(adapted.manifold, y)
    with pytest.raises(ValueError, match="got another matrix"):
        to_svd_tangent(adapted.manifold, x, triple, u)
    left, s, right = to_svd_triple(adapted.manifold, x)
    with pytest.raises(ValueError, match="got another matrix"):
        from_svd_tangent(adapted.manifold, x, (left, 2 * s, right), (left, np.eye(2), right.T))


@pytest.mark.parametrize("manifold", [PSDFixedRank(5), geoopt.EuclideanStiefel()])
def test_other_points_are_refused(manifold: geoopt.Manifold) -> None:
    with pytest.raises(TypeError, match=r"pairs of factors \(G, H\), got"):
        to_svd_triple(manifold, np.ones((5, 2)))


@pytest.mark.parametrize(("n", "r"), [(6, 1), (6, 2), (4, 4)])
def test_semidefinite_matrices_are_the_same_arrays(n: int, r: int) -> None:
    ours, theirs = as_pymanopt(PSDFixedRank(n), n, r), pymanopt.manifolds.PSDFixedRank(n, r)
    x, y = ours.random_point(), ours.random_point()
    u, noise = ours.random_tangent_vector(x), np.random.default_rng(0).normal(size=(n, r))
    calls = {
        "inner_product": (x, u, noise),
        "norm": (x, noise),
        "projection": (x, noise),
        "euclidean_to_riemannian_gradient": (x, u),
        "euclidean_to_riemannian_hessian": (x, u, noise, u),
        "retraction": (x, u),
        "exp": (x, u),
        "log": (x, y),
        "dist": (x, y),
    }
    assert ours.dim == theirs.dim
    for name, arguments in calls.items():
        expected = getattr(theirs, name)(*arguments)
        np.testing.assert_allclose(getattr(ours, name)(*arguments), expected, rtol=1e-9, atol=1e-9, err_msg=name)


def test_what_is_no_triple_and_no_point_is_refused() -> None:
    m = InvariantFixedRank(4, 3)
    u, s, vt = to_svd_triple(m, np.random.default_rng(0).normal(size=(7, 2)))
    with pytest.raises(ValueError, match="expected positive singular values"):
        from_svd_triple(m, (u, -s, vt))
    with pytest.raises(ValueError, match="rank deficient"):
        to_svd_triple(m, np.zeros((7, 2)))
    with pytest.raises(ValueError, match=r"expected one point.*got the shape \(2, 7, 2\)"):
        to_svd_triple(m, np.zeros((2, 7, 2)))
