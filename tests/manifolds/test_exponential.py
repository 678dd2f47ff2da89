"""The series of the exact exponential, its adjoint, and paths with their gradients: against autograd and matrix_exp."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from quotient_nets import AdaptiveEuclidean, InvariantFixedRank
from quotient_nets.manifolds import exponential
from quotient_nets.manifolds.exponential import bessel_weights, velocity_exponential, velocity_exponential_vjp
from quotient_nets.tangent_space import TangentSpace
from tests.strategies import Case, fixed_rank

ROUNDING = 1e-11
RADII = [1e-8, 0.1, 0.5, 2.0, 4.0]
MANIFOLD = InvariantFixedRank(6, 5)


def taylor_degree(radius: float, tolerance: float) -> int:
    """Degree of a Taylor polynomial for the same skew-symmetric matrix."""
    theta = math.sqrt(2) * radius
    return next(d for d in range(1, 99) if theta ** (d + 1) / math.factorial(d + 1) <= tolerance * min(theta, 1.0))


def space_and_steps(radius: float, r: int, batch: tuple[int, ...], dtype: torch.dtype) -> tuple[TangentSpace, Tensor]:
    x = MANIFOLD.canonicalize(torch.randn(*batch, 11, r, dtype=dtype))[0]
    space = MANIFOLD.at(x, balanced=True)
    return space, radius * space.random(torch.Generator().manual_seed(r))


@given(fixed_rank(), st.sampled_from([1.0, 3.0, 100.0]))
def test_series_equals_matrix_exponential(case: Case, radius: float) -> None:
    m, x, u = case.manifold, case.x, case.step()  # |u| <= 1
    case.assert_equal(m.expmap(x, u, radius=radius), m.expmap(x, u), ROUNDING)


@pytest.mark.parametrize("radius", [0.0, 1e-300, 5.0, 1e3, math.inf, math.nan])
def test_any_radius_is_served(radius: float) -> None:
    space, c = space_and_steps(min(radius, 2.0) if radius == radius else 2.0, 2, (3,), torch.float32)
    assert_close(space.move(c, "expmap", radius), space.move(c, "expmap"))
    y, gradient = space.follow(c, "expmap", radius)
    assert_close(y, space.move(c, "expmap"))
    assert gradient(c + 1).isfinite().all()
    assert_close(gradient(c + 1), gradient(c + 1))  # as often as one likes


@pytest.mark.parametrize("length", [2.0, 4.0, 5.0, 10.0])
def test_contracting_steps_keep_their_digits(length: float) -> None:
    space, c = space_and_steps(length, 3, (2,), torch.float32)
    g = space.x[..., :6, :1] / torch.linalg.vector_norm(space.x[..., :6, :1], dim=-2, keepdim=True)
    c = torch.zeros_like(c)
    c[..., :6, :1] = -length * g
    wide = MANIFOLD.at(space.x.double(), balanced=True)
    exact = wide.move(c.double(), "expmap")
    assert float((space.move(c, "expmap", length) - exact).norm() / exact.norm()) < 2e-6


@pytest.mark.parametrize("radius", RADII)
def test_weights_are_those_of_the_exponential_of_an_imaginary_number(radius: float) -> None:
    weights = bessel_weights(radius, 1e-16)
    theta = math.sqrt(2) * radius
    for angle in (0.0, 0.3, 1.0, 2.5):
        odd = sum((-1) ** (k // 2) * w * math.cos(k * angle) for k, w in enumerate(weights, 1) if k % 2)
        assert math.isclose(odd, math.sin(theta * math.cos(angle)), rel_tol=1e-12, abs_tol=1e-16)


@pytest.mark.parametrize(
    ("radius", "series", "taylor", "products"), [(0.1, 5, 6, 15), (0.5, 8, 9, 22), (2.0, 13, 17, 34)]
)
def test_costs_that_the_documentation_names(
    monkeypatch: pytest.MonkeyPatch, radius: float, series: int, taylor: int, products: int
) -> None:
    tolerance = torch.finfo(torch.float32).eps / 2
    assert len(bessel_weights(radius, tolerance)) == series
    assert taylor_degree(radius, tolerance) == taylor
    counted = []
    for name in ("times", "add_product"):
        function = getattr(exponential, name)
        monkeypatch.setattr(
            exponential, name, lambda *args, f=function, **kwargs: counted.append(f) or f(*args, **kwargs)
        )
    a = torch.randn(2, 3, 3)
    exponential.velocity_exponential(a, a.mT, a.mT @ a, radius)
    assert len(counted) == products


@pytest.mark.parametrize("r", [1, 3])
@pytest.mark.parametrize("radius", RADII)
def test_series_is_exact_to_its_radius(radius: float, r: int) -> None:
    space, c = space_and_steps(radius, r, (4,), torch.float64)
    rounding = 1e-13 * radius + 1e-14  # of the step and of the point
    assert_close(space.move(c, "expmap", radius), space.move(c, "expmap"), rtol=0, atol=rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("radius", [0.1, 1.0])
def test_a_step_much_shorter_than_the_radius_keeps_its_digits(radius: float, dtype: torch.dtype) -> None:
    size = 1e-7
    a = size * torch.randn(2, 3, 3, dtype=dtype)
    b = a.mT @ a + size**2 * torch.eye(3, dtype=dtype)
    m1, m2 = velocity_exponential(a, a.mT, b, radius)
    # By Taylor to second order; the third is size**3.
    eps = torch.finfo(dtype).eps
    assert_close(m1 / size, -b / size / 2, rtol=0, atol=10 * eps + 100 * size**2)
    assert_close(m2 / size, (a + a.mT) / size / 2, rtol=0, atol=10 * eps + 10 * size)


@pytest.mark.parametrize("radius", [*RADII, None])
@pytest.mark.parametrize("shape", [(1, 1), (3, 3), (2, 4, 4), (2, 3, 2, 2)])
def test_adjoint_is_that_of_autograd(radius: float | None, shape: tuple[int, ...]) -> None:
    size = min(radius or 1.0, 1.0) / shape[-1] / 2
    a, a_star, b = (size * torch.randn(shape, dtype=torch.float64) for _ in range(3))
    b = size * (b @ b.mT)
    inputs = [t.requires_grad_() for t in (a, a_star, b)]
    outputs = velocity_exponential(*inputs, radius)
    bars = torch.randn(2, *shape, dtype=torch.float64)
    expected = torch.autograd.grad(outputs, inputs, tuple(bars))
    m1, m2, pullback = velocity_exponential_vjp(*(t.detach() for t in inputs), radius)
    assert_close((m1, m2), tuple(outputs))
    assert_close(pullback(*bars), expected, rtol=1e-12, atol=1e-13 / size)


@pytest.mark.parametrize("path", ["expmap", "second_order", "retr"])
@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize(("r", "batch"), [(1, (7,)), (3, (7,)), (3, ()), (2, (2, 3)), (5, (2,))])
def test_following_a_path_is_moving_and_differentiating(
    path: str, balanced: bool, r: int, batch: tuple[int, ...]
) -> None:
    x = torch.randn(*batch, 11, r, dtype=torch.float64)
    space = MANIFOLD.at(MANIFOLD.canonicalize(x)[0] if balanced else x, balanced=balanced)
    c = 0.7 * space.random(torch.Generator().manual_seed(r))
    slope = torch.randn_like(x)
    for radius in (0.7, None):
        y, gradient = space.follow(c, path, radius)
        expected, differentiate = TangentSpace.follow(space, c, path, radius)
        e = differentiate(slope)
        tolerance = {"rtol": 1e-11, "atol": 1e-11 * float(e.abs().max())}
        assert_close(y, expected, **tolerance)
        found = gradient(slope)
        assert_close(found, e, **tolerance)
        assert_close(found, space.project(found), **tolerance)
        out, out_gradient = torch.empty_like(x), torch.empty_like(x)
        _, gradient = space.follow(c, path, radius, out=out)
        assert gradient(slope, out=out_gradient) is out_gradient
        assert_close((out, out_gradient), (y, e), **tolerance)


@pytest.mark.parametrize("path", ["expmap", "retr"])
def test_following_a_path_of_the_adaptive_metric(path: str) -> None:
    x = torch.randn(3, 5, dtype=torch.float64)
    x[0, 0] = 0
    space = AdaptiveEuclidean().at(x)
    c, slope = space.project(torch.randn_like(x)), torch.randn_like(x)
    y, gradient = space.follow(c, path)
    expected, differentiate = TangentSpace.follow(space, c, path)
    assert_close((y, gradient(slope)), (expected, differentiate(slope)))


@pytest.mark.parametrize("path", ["expmap", "second_order", "retr"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_points_in_half_precision_are_followed_in_float32(path: str, dtype: torch.dtype) -> None:
    x = torch.randn(11, 2).to(dtype)
    space = MANIFOLD.at(x)
    c = 0.1 * space.random().float()
    for out in (torch.full_like(x, torch.nan), torch.full(x.shape, torch.nan)):
        y, gradient = space.follow(c, path, 0.1, out=out)
        assert y is out
        assert_close(y.float(), space.move(c, path, 0.1).float(), rtol=1e-2, atol=1e-2)
        e = gradient(torch.randn(x.shape), out=torch.full_like(out, torch.nan))
        assert e.isfinite().all()


def test_compiles_with_a_radius() -> None:
    x = torch.randn(2, 11, 3)
    u = 0.1 * MANIFOLD.proju(x, torch.randn_like(x))
    compiled = torch.compile(lambda x, u: MANIFOLD.expmap(x, u, radius=3.0), fullgraph=True, backend="eager")
    assert_close(compiled(x, u), MANIFOLD.expmap(x, u, radius=3.0))


def test_a_path_that_does_not_exist_is_refused_by_name() -> None:
    space, c = space_and_steps(0.1, 2, (1,), torch.float64)
    for method in (space.follow, space.move):
        with pytest.raises(ValueError, match="'shortcut'"):
            method(c, "shortcut")
