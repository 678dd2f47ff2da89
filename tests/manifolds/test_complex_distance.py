"""Complex matrices of rank one: geodesics, logarithms and distances."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import jvp
from torch.testing import assert_close

from quotient_nets import ComplexRankOne, InvariantFixedRank
from quotient_nets.manifolds.base import QuotientManifold
from tests.strategies import (
    COMPLEX_ELEMENTS,
    COMPLEX_SIZES,
    as_numpy,
    assert_near,
    complex_element,
    complex_points,
    unit_vector,
)

Case = tuple[ComplexRankOne, Tensor]
each_size = pytest.mark.parametrize(("n", "m"), COMPLEX_SIZES)


@given(complex_points())
def test_geodesics(case: Case) -> None:
    m, x = case
    u, time = unit_vector(m, x), torch.full((), 0.7, dtype=x.dtype)
    y, w = jvp(lambda t: m.expmap(x, t * u), (time,), (torch.ones_like(time),))
    assert_near(m, y, m.proju(y, w), w)
    assert_close(m.norm(y, w), torch.ones_like(m.norm(x, u)))
    assert_near(m, x, m.expmap(y, 0.3 * w), m.expmap(x, u))
    near, far = (m.norm(x, m.second_order(x, t * u) - m.expmap(x, t * u)).norm() for t in (5e-3, 1e-2))
    if max(m.n, m.m) > 1:  # a phase and a growth alone may cancel
        assert float((far / near).log2()) == pytest.approx(3, abs=0.1)


@each_size
def test_closed_forms_agree_with_the_defaults(n: int, m: int) -> None:
    manifold = ComplexRankOne(n, m)
    x, y, v = torch.randn(3, 2, n + m, 2, dtype=torch.float64)
    u = unit_vector(manifold, x)
    assert_near(manifold, x, manifold.expmap(x, u), QuotientManifold.expmap(manifold, x, u), 1e-8)
    assert_near(manifold, y, manifold.transp(x, y, v), QuotientManifold.transp(manifold, x, y, v), 1e-10)


@given(complex_points(), st.floats(1e-6, 0.999), COMPLEX_ELEMENTS)
def test_logarithm_inverts_the_exponential_below_the_injectivity_radius(case: Case, share: float, a: Tensor) -> None:
    m, x = case
    u = share * m.injectivity_radius(x)[..., None, None] * unit_vector(m, x)
    y = m.action(m.expmap(x, u), a)
    assert_near(m, x, m.logmap(x, y), u, 1e-9)
    assert_close(m.dist(x, y), m.norm(x, u), rtol=1e-8, atol=1e-12)
    assert float(m.dist(y, m.action(y, a)).max()) < 1e-13  # measured 1e-15


@given(complex_points())
def test_exponential_inverts_the_logarithm_everywhere(case: Case) -> None:
    m, x = case
    y, z = torch.randn_like(x), torch.randn_like(x)
    u = m.logmap(x, y)
    assert_close(m.product(m.expmap(x, u)), m.product(y), rtol=0, atol=1e-11)
    assert_near(m, x, m.proju(x, u), u)
    assert_close(m.dist(x, y), m.norm(x, u))
    assert_close(m.dist2(x, y), m.dist(x, y).square())
    assert_close(m.dist(x, y), m.dist(y, x), rtol=1e-12, atol=1e-12)
    assert bool((m.dist(x, z) <= m.dist(x, y) + m.dist(y, z) + 1e-12).all())


@pytest.mark.parametrize("rho", [0.0, 1e-6, 0.3, 0.99, 1 - 1e-9])
@pytest.mark.parametrize("turned", [0.0, 1e-7, 1.0, 3.0, math.pi - 1e-6])
def test_distance_is_the_least_over_all_phases(rho: float, turned: float) -> None:
    m = ComplexRankOne(3, 2)
    x, y = torch.randn(2, 5, 2, dtype=torch.float64)
    (g, h), (p, q) = as_numpy(m, x), as_numpy(m, y)
    g, h = g / np.linalg.norm(g), h / np.linalg.norm(h)
    p, q = p - g * np.vdot(g, p), q - h * np.vdot(h, q)
    p = rho * g + math.sqrt(1 - rho**2) * p / np.linalg.norm(p)
    q = np.exp(1j * turned) * 0.7 * h + math.sqrt(1 - 0.49) * q / np.linalg.norm(q)

    def square(phase: float) -> float:
        cosines = (np.vdot(a, np.exp(1j * phase) * b).real for a, b in ((g, p), (h, q)))
        return sum(np.arccos(np.clip(c, -1, 1)) ** 2 for c in cosines)

    start = min(np.linspace(-np.pi, np.pi, 721), key=square)
    best = minimize_scalar(square, bounds=(start - 0.01, start + 0.01), method="bounded", options={"xatol": 1e-10})
    packed = (m.pack_point(torch.tensor(a), torch.tensor(b)) for a, b in ((g, h), (p, q)))
    assert_close(float(m.dist2(*packed)), best.fun, rtol=1e-9, atol=1e-9)


@given(complex_points())
def test_real_vectors_are_the_real_manifold(case: Case) -> None:
    m, x = case
    real = InvariantFixedRank(m.n, m.m)
    y = torch.randn_like(x)
    r, s, v = x[..., :1], y[..., :1], torch.randn_like(x)[..., :1]
    # where the two vectors ask for different signs, the shortest way leads through complex ones
    signs = ((a * b).sum((-2, -1), keepdim=True).sign() for a, b in zip(*map(real.unpack_tensor, (r, s)), strict=True))
    s = real.pack_point(*(t * sign for t, sign in zip(real.unpack_tensor(s), signs, strict=True)))

    def embedded(t: Tensor) -> Tensor:
        return torch.cat([t, torch.zeros_like(t)], dim=-1)

    for method, arguments in {"dist": (r, s), "logmap": (r, s), "proju": (r, v), "transp": (r, s, v)}.items():
        ours, theirs = getattr(m, method)(*map(embedded, arguments)), getattr(real, method)(*arguments)
        assert_close(ours, theirs if method == "dist" else embedded(theirs), rtol=1e-9, atol=1e-9)


def test_numbers_have_the_metric_of_the_logarithm() -> None:
    m = ComplexRankOne(1, 1)
    x, y = torch.randn(2, 50, 2, 2, dtype=torch.float64)
    (g, h), (p, q) = as_numpy(m, x), as_numpy(m, y)
    np.testing.assert_allclose(m.dist(x, y), abs(np.log(p * q.conj() / (g * h.conj())))[:, 0] / 2**0.5, rtol=1e-12)


@pytest.mark.parametrize(("n", "length"), [(1, math.pi / math.sqrt(2)), (2, 2.0288)])
def test_geodesics_longer_than_the_injectivity_radius(n: int, length: float) -> None:
    m, x = ComplexRankOne(n, 1), torch.zeros(n + 1, 2, dtype=torch.float64)
    x[0, 0] = x[-1, 0] = 1
    u = torch.zeros_like(x)
    if n == 1:
        u[0, 1], u[-1, 1] = math.sqrt(0.5), -math.sqrt(0.5)  # once around the circle of phases
    else:
        u[1, 0] = 1  # conjugate points at tan(t) = -t
    assert_close(m.dist(x, m.expmap(x, 0.999 * length * u)), torch.tensor(0.999 * length, dtype=torch.float64))
    assert float(m.dist(x, m.expmap(x, 1.03 * length * u))) < 1.0299 * length
    assert 0.979 * length < float(m.injectivity_radius(x)) <= length + 1e-12


@each_size
@pytest.mark.parametrize("phase", [0.0, 2.0])
def test_two_derivatives_where_the_distance_is_zero(n: int, m: int, phase: float) -> None:
    manifold, x = ComplexRankOne(n, m), torch.randn(n + m, 2, dtype=torch.float64)
    inputs = [t.requires_grad_() for t in (x.clone(), manifold.action(x, complex_element(2.0, phase)))]
    for function in (manifold.logmap, manifold.dist2):
        assert gradcheck(function, inputs)
        assert gradgradcheck(function, inputs)
    (gradient,) = torch.autograd.grad(manifold.dist(x, inputs[0]), inputs[0])
    assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=0)


def test_pairwise_distances() -> None:
    m, x, y = ComplexRankOne(4, 3), torch.randn(3, 7, 2), torch.randn(5, 7, 2)
    assert_close(m.pairwise_dist(x, y), torch.stack([torch.stack([m.dist(a, b) for b in y]) for a in x]))


def test_logarithm_is_nan_only_where_it_is_not_unique() -> None:
    m = ComplexRankOne(2, 2)
    one, other = torch.eye(2, dtype=torch.complex128)
    mixed = 0.6 * one + 0.8 * other
    pairs = {
        "both orthogonal": (other, other, False),
        "opposite phases": (mixed, -mixed, False),
        "one orthogonal": (other, -mixed, True),
        "opposite phases, one of them weak": (0.1 * one + other, -one, True),
        "antipode of one": (-one, one, False),
    }
    x = m.pack_point(one, one)
    for name, (p, q, unique) in pairs.items():
        y = m.pack_point(p, q)
        u = m.logmap(x, y)
        assert bool(u.isfinite().all()) == unique, name
        assert float(m.dist(x, y)) == pytest.approx(float(m.dist(y, x))), name
        if unique:
            assert_close(m.product(m.expmap(x, u)), m.product(y))
