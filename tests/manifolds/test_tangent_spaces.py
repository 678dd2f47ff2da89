"""The tangent space prepared once at a point does what the manifold's methods do, faster."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from quotient_nets.manifolds import AdaptiveEuclidean, InvariantFixedRank
from tests.strategies import Case, fixed_rank, group_element, points

ROUNDING = 1e-10


@given(points())
def test_geometry_in_coordinates_is_that_of_the_manifold(case: Case) -> None:
    m, x, space = case.manifold, case.x, case.manifold.at(case.x)
    u, v, e = case.vector(), case.vector(), case.derivative()
    c, d = space.coordinates(u), space.coordinates(v)
    assert_close(space.inner(c, d), m.inner(x, u, v, keepdim=True), rtol=ROUNDING, atol=ROUNDING)
    assert_close(space.norm(c), m.norm(x, u, keepdim=True), rtol=ROUNDING, atol=ROUNDING)
    case.assert_equal(space.vector(space.project(c)), m.proju(x, u), ROUNDING)
    gradient = space.vector(space.gradient(space.pull_gradient(e)))
    case.assert_equal(gradient, m.egrad2rgrad(x, e), ROUNDING)


@given(points())
def test_coordinates_are_orthonormal_and_determine_the_tangent_vector(case: Case) -> None:
    space, u, e = case.manifold.at(case.x), case.horizontal(), case.derivative()
    c = space.coordinates(u)
    axes = tuple(range(-space.ndim, 0))
    if space.orthonormal:
        assert_close((c * c).sum(axes, keepdim=True), space.inner(c, c))
    assert_close((c * space.pull_gradient(e)).sum(axes), (u * e).sum(axes), rtol=0, atol=ROUNDING)
    case.assert_equal(space.vector(c), u, ROUNDING)


@given(points(), st.sampled_from(["retr", "expmap", "second_order"]), st.sampled_from([None, 1.0]))
def test_paths_in_coordinates_are_those_of_the_manifold(case: Case, path: str, radius: float | None) -> None:
    if not hasattr(case.manifold, path):
        return
    space, u = case.manifold.at(case.x), case.step()
    actual = space.move(space.coordinates(u), path, radius)
    case.assert_equal(actual, getattr(case.manifold, path)(case.x, u), ROUNDING)


@given(points())
def test_random_vector_is_a_unit_tangent_vector(case: Case) -> None:
    space = case.manifold.at(case.x)
    if isinstance(case.manifold, AdaptiveEuclidean) and bool((case.x == 0).any()):
        return  # a point all of whose coordinates are zero has no tangent vectors
    c = space.random(torch.Generator().manual_seed(1))
    assert_close(space.norm(c), torch.ones_like(space.norm(c)))
    assert torch.equal(c, space.random(torch.Generator().manual_seed(1)))
    assert_close(space.project(c), c)
    assert_close(space.vector(space.origin()), torch.zeros_like(case.x))


@given(fixed_rank(least=3.0, condition=1e2, gauge=2.0))
def test_random_vector_of_a_seed_is_one_for_each_orbit(case: Case) -> None:
    m, x = case.manifold, case.x
    a = group_element(case.batch, x.shape[-1], 1e2)
    u, v = (s.vector(s.random(torch.Generator().manual_seed(1))) for s in (m.at(x), m.at(m.action(x, a))))
    case.assert_equal(m.action(v, torch.linalg.inv(a)), u, 1e-8)  # singular vectors at gaps of s_r / 3


@given(fixed_rank(least=3.0))
def test_balanced_point_needs_no_decomposition(case: Case) -> None:
    m = case.manifold
    y, _ = m.canonicalize(case.x)
    slow, fast = m.at(y), m.at(y, balanced=True)
    c, e = 0.3 * slow.random(), torch.randn_like(y)
    c = c * m.exponential_radius(y).clamp_max(1.0)[..., None, None]
    assert_close(fast.vector(c), slow.vector(c), rtol=0, atol=ROUNDING)
    assert_close(fast.pull_gradient(e), slow.pull_gradient(e), rtol=0, atol=ROUNDING)
    assert_close(fast.coordinates(slow.vector(c)), c, rtol=0, atol=ROUNDING)
    assert_close(fast.project(e), slow.project(e), rtol=0, atol=ROUNDING)
    for path in ("retr", "second_order", "expmap"):
        assert_close(fast.move(c, path, 0.3), slow.move(c, path, 0.3), rtol=0, atol=ROUNDING)


def test_space_is_constant_under_autograd() -> None:
    m = InvariantFixedRank(4, 3)
    x = torch.randn(7, 2, requires_grad=True)
    space = m.at(x)
    c = space.random().requires_grad_()
    moved = space.move(c, "expmap")
    assert torch.autograd.grad(moved.sum(), x, allow_unused=True, retain_graph=True) == (None,)
    assert bool(torch.autograd.grad(moved.sum(), c)[0].isfinite().all())


def test_certificates_tell_condition_gap_and_residual() -> None:
    m = InvariantFixedRank(4, 3)
    s = torch.tensor([[4.0, 2.0, 1.0], [4.0, 4.0, 1.0]], dtype=torch.float64).sqrt()
    x = m.pack_point(torch.eye(4, 3) * s[:, None], torch.eye(3) * s[:, None])
    space = m.at(m.action(x, m.random_element(2, 3)))
    c = space.random()
    certificates = space.certificates(c)
    assert_close(certificates["condition_number"], torch.tensor([4.0, 4.0]).double())
    assert_close(certificates["spectral_gap"], torch.tensor([0.5, 0.0]).double(), rtol=0, atol=1e-12)
    assert float(certificates["horizontality_residual"].max()) < 1e-14
    vertical = space.coordinates(m.infinitesimal_action(space.x, torch.eye(3).double()))
    residual = space.certificates(c + vertical / space.norm(vertical))["horizontality_residual"]
    assert_close(residual, torch.full((2,), math.sqrt(0.5)).double())


def test_certificates_count_weights_that_cannot_move() -> None:
    space = AdaptiveEuclidean().at(torch.tensor([[1.0, 0.0, 0.0], [1.0, 2.0, 3.0]]))
    assert space.certificates(space.random())["zero_weights"].tolist() == [2, 0]


def test_lift_pushes_forward_to_the_projected_tangent() -> None:
    m = InvariantFixedRank(5, 4)
    x, y, v = torch.randn(3, 9, 2, dtype=torch.float64)
    space = m.at(y)
    lifted = space.vector(space.lift(*space.products(m.tangent_factors(x, v))))
    matrix = torch.func.jvp(m.product, (x,), (v,))[1]
    pushed = torch.func.jvp(m.product, (y,), (lifted,))[1]
    p, q = (f @ torch.linalg.pinv(f) for f in m.unpack_tensor(y))
    assert_close(pushed, p @ matrix + matrix @ q - p @ matrix @ q, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("r", [1, 3])
def test_random_vectors_are_uniform_on_the_sphere(r: int) -> None:
    m = InvariantFixedRank(4, 3)
    space = m.at(torch.randn(7, r, dtype=torch.float64).expand(4000, 7, r))
    c = space.random(torch.Generator().manual_seed(0)).flatten(1)
    spread = torch.linalg.eigvalsh(c.mT @ c / len(c))[-m.dimension(r) :] * m.dimension(r)
    assert_close(spread, torch.ones_like(spread), rtol=0, atol=0.2)
