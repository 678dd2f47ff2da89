"""Against pymanopt's embedded geometry of the same matrices, in coordinates of their SVD.

A tangent matrix is ``U M V^T + Up V^T + U Vp^T``. The invariant metric weighs ``M_ij`` by
``1 / (s_i^2 + s_j^2)`` and the columns of ``Up``, ``Vp`` by ``1 / s_j^2``; gradients are the inverse.
"""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from pymanopt.manifolds import FixedRankEmbedded
from torch import Tensor
from torch.func import jvp

from quotient_nets.manifolds import EmbeddedFixedRank, FixedRank, InvariantFixedRank, PreconditionedFixedRank
from tests.cases import FIXED_RANK

SHAPES = [(6, 5, 2), (5, 6, 3), (4, 3, 3), (4, 4, 4), (5, 3, 1), (1, 1, 1)]
# condition number, dtype, tolerance: eps times the condition number of a factor in an unbalanced gauge
PRECISIONS = [(3.0, torch.float64, 1e-12), (1e4, torch.float64, 1e-10), (1e2, torch.float32, 1e-4)]
each_setup = [
    pytest.param(shape, precision, id=f"{shape}-{precision[0]:g}-{str(precision[1])[6:]}")
    for shape in SHAPES
    for precision in PRECISIONS
]
pytestmark = pytest.mark.parametrize(("shape", "precision"), each_setup)


class Setup(NamedTuple):
    """The same matrix as a point of either library."""

    ours: FixedRank
    theirs: FixedRankEmbedded
    x: Tensor
    point: tuple[np.ndarray, np.ndarray, np.ndarray]
    tolerance: float

    def push(self, u: Tensor) -> np.ndarray:
        """Tangent matrix of a tangent vector."""
        return jvp(self.ours.product, (self.x.double(),), (u.double(),))[1].numpy()

    def coordinates(self, matrix: np.ndarray) -> list[np.ndarray]:
        return list(self.theirs.projection(self.point, matrix))

    def embed(self, coordinates: list[np.ndarray]) -> np.ndarray:
        left, core, right = self.theirs.embedding(self.point, type(self).tangent(self, coordinates))
        return left @ core @ right.T

    def tangent(self, coordinates: list[np.ndarray]):
        return type(self.theirs.zero_vector(self.point))(*coordinates)

    def weights(self) -> list[np.ndarray]:
        """Squared scales of ``Up``, ``M``, ``Vp``: the metric divides by them, the gradient is multiplied."""
        square = self.point[1] ** 2
        one = np.ones_like(square)[None, :]
        return {
            InvariantFixedRank: [square[None, :], square[:, None] + square[None, :], square[None, :]],
            PreconditionedFixedRank: [one, 2 * one, one],
            EmbeddedFixedRank: [one, one, one],
        }[type(self.ours)]


@pytest.fixture(params=FIXED_RANK)
def setup(
    request: pytest.FixtureRequest, shape: tuple[int, int, int], precision: tuple[float, torch.dtype, float]
) -> Setup:
    (n, m, r), (condition, dtype, tolerance) = shape, precision
    ours = request.param(n, m)
    q = [torch.linalg.qr(torch.randn(k, r, dtype=torch.float64))[0] for k in (n, m)]
    root = torch.logspace(0, -0.5, r, base=condition, dtype=torch.float64)
    balanced = ours.pack_point(*(basis * root for basis in q))
    x = ours.action(balanced, ours.random_element(r, condition=10.0)).to(dtype)
    u, s, vt = np.linalg.svd(ours.product(x.double()).numpy())
    return Setup(ours, FixedRankEmbedded(n, m, r), x, (u[:, :r], s[:r], vt[:r]), tolerance)


def assert_relative(actual: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.linalg.norm(expected))


def test_tangent_spaces_are_equal(setup: Setup) -> None:
    m, x = setup.ours, setup.x.double()
    basis = torch.eye(x.numel(), dtype=torch.float64).reshape(-1, *x.shape)
    pushed = np.stack([setup.push(u).ravel() for u in m.proju(x, basis)])
    s = np.linalg.svd(pushed, compute_uv=False)
    dimension = setup.theirs.dim
    assert dimension == m.dimension(x.shape[-1])
    assert np.sum(s > 1e-9 * s[0]) == dimension
    for matrix in pushed[:3].reshape(-1, m.n, m.m):
        assert_relative(setup.embed(setup.coordinates(matrix)), matrix, 1e-10)


def test_metric_has_its_weights_in_svd_coordinates(setup: Setup) -> None:
    m, x = setup.ours, setup.x
    lengths = [weight**0.5 for weight in setup.weights()]
    noise = [setup.coordinates(np.random.default_rng(k).normal(size=(m.n, m.m))) for k in (0, 1)]
    # unit coordinates, so that every weight counts; lifted by transporting a vector of factors
    scaled = [[c * length for c, length in zip(k, lengths, strict=True)] for k in noise]
    u, v = (lift(setup, setup.embed(c)) for c in scaled)
    expected = sum(np.sum(a * b) for a, b in zip(*noise, strict=True))
    size = np.linalg.norm(np.concatenate([np.ravel(c) for k in noise for c in k])) ** 2
    assert abs(float(m.inner(x, u, v)) - expected) <= setup.tolerance * size


def lift(setup: Setup, matrix: np.ndarray) -> Tensor:
    """Horizontal vector whose pushed-forward is ``matrix``, without the code under test but `proju`."""
    g, h = setup.ours.unpack_tensor(setup.x.double())
    dense = torch.from_numpy(matrix)
    left, right = dense @ torch.linalg.pinv(h).mT, dense.mT @ torch.linalg.pinv(g).mT
    right = right - h @ (torch.linalg.pinv(h) @ right)
    return setup.ours.proju(setup.x.double(), setup.ours.pack_point(left, right)).to(setup.x.dtype)


def test_gradient_has_the_inverse_weights(setup: Setup) -> None:
    m, x = setup.ours, setup.x
    derivative = torch.from_numpy(np.random.default_rng(0).normal(size=(m.n, m.m)))
    g, h = m.unpack_tensor(x)
    e = m.pack_point(derivative.to(x) @ h, derivative.to(x).mT @ g)
    actual = setup.coordinates(setup.push(m.egrad2rgrad(x, e)))
    for ours, theirs, weight in zip(actual, setup.coordinates(derivative.numpy()), setup.weights(), strict=True):
        scale = np.maximum(weight, weight.max() * 1e-3)  # float32 cannot hold ratios of 1e4 squared
        np.testing.assert_allclose(
            ours / scale, theirs * weight / scale, rtol=0, atol=setup.tolerance * np.linalg.norm(derivative)
        )


def test_transport_projects_on_the_tangent_space_there(setup: Setup) -> None:
    m, y = setup.ours, setup.x
    x, v = torch.randn_like(y), torch.randn_like(y)
    matrix = jvp(m.product, (x.double(),), (v.double(),))[1].numpy()
    expected = setup.embed(setup.coordinates(matrix))
    error = np.linalg.norm(setup.push(m.transp(x, y, v)) - expected)
    assert error <= setup.tolerance * max(np.linalg.norm(matrix), 1.0)
