"""Closed forms against each other, where the geometry ends, and how the metrics relate."""

import math

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.func import jvp
from torch.testing import assert_close

from quotient_nets.manifolds import (
    EmbeddedFixedRank,
    FixedRank,
    FixedRankMatrices,
    InvariantFixedRank,
    PolarFixedRank,
    PreconditionedFixedRank,
    QuotientManifold,
)
from tests.cases import FIXED_RANK
from tests.strategies import Case, fixed_rank, orthogonal

SHAPES = [(5, 4, 2), (4, 3, 1), (3, 5, 3), (3, 3, 3)]
over_shapes = pytest.mark.parametrize(("n", "m", "r"), SHAPES)
over_metrics = pytest.mark.parametrize("metric", FIXED_RANK)
INCOMPLETE = [PreconditionedFixedRank, EmbeddedFixedRank]


def point(manifold: FixedRank, spectrum: list[float], batch: tuple[int, ...] = (), condition: float = 3.0) -> Tensor:
    """Point with these singular values, not balanced."""
    s = torch.tensor(spectrum, dtype=torch.float64)
    g, h = (orthogonal(*batch, rows, len(s)) for rows in (manifold.n, manifold.m))
    a = manifold.random_element(*batch, len(s), condition=condition)
    return manifold.action(manifold.pack_point(g * s, h), a)


def step(manifold: FixedRank, x: Tensor, share: float) -> Tensor:
    u = manifold.proju(x, torch.randn_like(x))
    length = share * manifold.exponential_radius(x).clamp_max(1.0)[..., None, None]
    return u * length / manifold.norm(x, u, keepdim=True)


@over_shapes
@over_metrics
def test_geodesic_has_no_acceleration(metric: type[FixedRank], n: int, m: int, r: int) -> None:
    """Of the embedded metric in the ambient space; of the others by Hamilton's equations."""
    manifold = metric(n, m)
    x = point(manifold, [2.0, 1.0, 0.7][:r], (3,))
    u = step(manifold, x, 0.8)
    if metric is not EmbeddedFixedRank:
        actual, expected = (
            manifold.product(y) for y in (manifold.expmap(x, u), QuotientManifold.expmap(manifold, x, u))
        )
        assert_close(actual, expected, rtol=0, atol=1e-9)
        return
    time = torch.tensor(0.7, dtype=torch.float64)
    one = torch.ones_like(time)

    def velocity(t: Tensor) -> Tensor:
        return jvp(lambda t: manifold.product(manifold.expmap(x, t * u, check=False)), (t,), (one,))[1]

    acceleration = jvp(velocity, (time,), (one,))[1]
    y = manifold.expmap(x, 0.7 * u)
    tangential = manifold.to_ambient(y, manifold.from_ambient(y, acceleration))
    assert float(tangential.abs().max()) <= 1e-10


@pytest.mark.parametrize(("metric", "n", "m", "r"), [(EmbeddedFixedRank, 3, 5, 3), (PreconditionedFixedRank, 3, 3, 3)])
def test_geodesics_are_straight_where_the_metric_is_flat(metric: type[FixedRank], n: int, m: int, r: int) -> None:
    manifold = metric(n, m)
    x = point(manifold, [2.0, 1.0, 0.7], (4,))
    u = step(manifold, x, 0.9)
    straight = manifold.product(x) + manifold.to_ambient(x, u)
    assert_close(manifold.product(manifold.expmap(x, u)), straight, rtol=0, atol=1e-11)
    assert manifold.is_flat(r)
    assert_close(manifold.injectivity_radius(x), manifold.exponential_radius(x))
    assert bool(manifold.injectivity_radius(point(manifold, [2.0, 1.0])).isnan())


def test_commuting_matrices_are_joined_by_powers() -> None:
    m, p = InvariantFixedRank(5, 4), PolarFixedRank(5, 4)
    g, h = orthogonal(5, 2), orthogonal(4, 2)
    s, t = torch.tensor([2.0, 0.5]).double(), torch.tensor([0.7, 1.5]).double()
    x, y = m.from_frame(g, s, h), m.from_frame(g, t, h)
    u = m.logmap(x, m.action(y, m.random_element(2)))
    square = (t / s).log().square().sum()
    assert_close(m.inner(x, u), square / 2, rtol=1e-10, atol=0)
    for time in (0.3, 1.0):
        expected = (g * (s * (t / s) ** time)) @ h.mT
        assert_close(m.product(m.expmap(x, time * u)), expected, rtol=0, atol=1e-11)
    assert_close(p.dist2(p.from_frame(g, s, h), p.from_frame(g, t, h)), square, rtol=1e-10, atol=0)


@over_metrics
def test_orders_of_gradient_hessian_and_retractions(metric: type[FixedRank]) -> None:
    manifold = metric(5, 4)
    x = point(manifold, [2.0, 1.0])
    u = step(manifold, x, 0.5)
    target = torch.randn(5, 4, dtype=torch.float64)

    def cost(y: Tensor) -> Tensor:
        return (manifold.product(y) - target).square().sum() + manifold.product(y).sin().sum()

    egrad, ehess = jvp(torch.func.grad(cost), (x,), (u,))
    slope = manifold.inner(x, manifold.egrad2rgrad(x, egrad), u)
    curvature = manifold.inner(x, manifold.ehess2rhess(x, egrad, ehess, u), u)

    def order(error) -> float:
        far, near = (float(error(t)) for t in (2e-2, 1e-2))
        return math.log2(abs(far) / abs(near))

    along = {t: cost(manifold.expmap(x, t * u)) - cost(x) for t in (1e-2, 2e-2)}
    assert order(lambda t: along[t] - t * slope) == pytest.approx(2, abs=0.2)
    assert order(lambda t: along[t] - t * slope - t**2 / 2 * curvature) == pytest.approx(3, abs=0.3)

    def distance(path):
        return lambda t: (manifold.product(path(x, t * u)) - manifold.product(manifold.expmap(x, t * u))).norm()

    assert order(distance(manifold.retr)) == pytest.approx(2, abs=0.2)
    assert order(distance(manifold.second_order)) == pytest.approx(3, abs=0.2)
    expected = 3 if metric is EmbeddedFixedRank else 2
    assert order(distance(manifold.orthographic)) == pytest.approx(expected, abs=0.2)


@given(fixed_rank(condition=1e2))
def test_orthographic_retraction_has_its_inverse(case: Case) -> None:
    m, x, u = case.manifold, case.x, 0.5 * case.step()
    y = m.orthographic(x, u)
    normal = m.product(y) - m.product(x) - m.to_ambient(x, u)
    assert float(m.to_ambient(x, m.from_ambient(x, normal)).abs().max()) <= 1e-10
    case.assert_equal(m.inverse_orthographic(x, y), u, 1e-9)
    assert_close(m.orthographic(x, 0 * u), x, rtol=1e-9, atol=1e-9)


@given(fixed_rank())
def test_metrics_bound_each_other(case: Case) -> None:
    sizes = case.manifold.n, case.manifold.m
    z = case.manifold.to_ambient(case.x, case.horizontal())
    square: dict[type[FixedRankMatrices], Tensor] = {}
    for metric in (*FIXED_RANK, PolarFixedRank):
        m = metric(*sizes)
        f = case.manifold.frame(case.x)
        y = m.from_frame(f.g, f.spectrum, f.h)
        square[metric] = m.inner(y, m.from_ambient(y, z)) * (1 + torch.zeros(case.batch, dtype=z.dtype))
    mix, embedded = square[PreconditionedFixedRank], square[EmbeddedFixedRank]
    assert_close(embedded, z.square().sum((-2, -1)), rtol=1e-9, atol=1e-12)
    slack = 1 + 1e-9
    assert bool((embedded / 2 <= mix * slack).all())
    assert bool((mix <= embedded * slack).all())
    assert bool((square[InvariantFixedRank] <= square[PolarFixedRank] * slack).all())
    assert bool((square[PolarFixedRank] <= 2 * square[InvariantFixedRank] * slack).all())


@over_metrics
def test_gradient_in_factors(metric: type[FixedRank]) -> None:
    """The preconditioned one is scaled gradient descent, and PEFT's preconditioner without damping."""
    m = metric(5, 4)
    x, e = point(m, [2.0, 0.3], (3,)), torch.randn(3, 5, 4, dtype=torch.float64)
    g, h = m.unpack_tensor(x)
    eg, eh, sg, sh = e @ h, e.mT @ g, g.mT @ g, h.mT @ h
    eye = torch.eye(5, dtype=torch.float64), torch.eye(4, dtype=torch.float64)
    projectors = [f @ torch.linalg.pinv(f) for f in (g, h)]
    halves = [i - p / 2 for i, p in zip(eye, projectors, strict=True)]
    expected = {
        InvariantFixedRank: (eg @ sg, eh @ sh),
        PreconditionedFixedRank: (eg @ torch.linalg.inv(sh), eh @ torch.linalg.inv(sg)),
        EmbeddedFixedRank: (halves[0] @ eg @ torch.linalg.inv(sh), halves[1] @ eh @ torch.linalg.inv(sg)),
    }[metric]
    assert_close(m.egrad2rgrad(x, m.pack_point(eg, eh)), m.pack_point(*expected), rtol=1e-9, atol=1e-9)


def test_vertical_vectors_have_no_length_in_the_embedded_metric() -> None:
    m = EmbeddedFixedRank(5, 4)
    x = point(m, [2.0, 0.3], (3,))
    vertical = m.infinitesimal_action(x, torch.randn(3, 2, 2, dtype=torch.float64))
    assert float(m.norm(x, vertical).max()) <= 1e-6  # root of a rounding error
    assert float(m.inner(x, vertical, torch.randn_like(x)).abs().max()) <= 1e-12


def test_products_of_two_numbers() -> None:
    """``n = m = r = 1``, as in a diagonal linear net: one number with three metrics."""
    x, u = torch.rand(2, 6, 2, 1, dtype=torch.float64) + 0.2
    change = (x[:, 1] * u[:, 0] + x[:, 0] * u[:, 1]).flatten()
    number = x.prod(dim=1).flatten()
    expected = {
        InvariantFixedRank: change**2 / (2 * number**2),
        PreconditionedFixedRank: change**2 / 2,
        EmbeddedFixedRank: change**2,
    }
    for metric, square in expected.items():
        m = metric(1, 1)
        assert_close(m.inner(x, m.proju(x, u)), square, rtol=1e-12, atol=1e-14)
        y = m.action(1.7 * x, torch.full((6, 1, 1), -3.0).double())
        log = torch.tensor(1.7**2).log()
        distance = log / math.sqrt(2) if metric is InvariantFixedRank else (1.7**2 - 1) * number * m.rank_one.speed**-1
        assert_close(m.dist(x, y), torch.as_tensor(distance).double().expand(6), rtol=1e-6, atol=0)


@pytest.mark.parametrize("metric", INCOMPLETE)
@pytest.mark.parametrize(("n", "m", "r"), [(3, 3, 1), (2, 2, 2)])
def test_a_geodesic_that_leaves_the_manifold_is_refused(metric: type[FixedRank], n: int, m: int, r: int) -> None:
    manifold = metric(n, m)
    x = point(manifold, [2.0, 0.5][-r:], (3,))
    f = manifold.frame(x)
    last = f.g[..., -1:] @ f.h[..., -1:].mT
    lengths = torch.tensor([0.3, 0.6, 0.45], dtype=torch.float64)[:, None, None]
    u = manifold.from_ambient(x, -lengths * last)
    assert_close(manifold.exponential_radius(x), torch.full((3,), 0.5 / manifold.rank_one.speed).double())
    assert_close(manifold.norm(x, u), (lengths / manifold.rank_one.speed).flatten())
    with pytest.raises(ValueError, match=r"expected a geodesic that stays on .*batch indices \[\[1\]\].*check=False"):
        manifold.expmap(x, u)
    y = manifold.expmap(x, u, check=False)
    assert y.isnan().all(dim=(-2, -1)).tolist() == [False, True, False]
    kept = manifold.product(y)[::2]
    assert_close(kept, (manifold.product(x) - lengths * last)[::2], rtol=0, atol=1e-10)


def test_injectivity_radii_of_rank_one() -> None:
    for metric in (InvariantFixedRank, PolarFixedRank):
        for sizes, radius in (((3, 2), math.pi / math.sqrt(2)), ((3, 1), math.pi), ((1, 1), math.inf)):
            m = metric(*sizes)
            rows = sum(sizes) + (metric is PolarFixedRank)
            assert float(m.injectivity_radius(m.random(rows, 1))) == pytest.approx(radius)
    for metric in INCOMPLETE:
        m = metric(3, 2)
        x = point(m, [0.7])
        assert float(m.injectivity_radius(x)) == pytest.approx(0.7 / m.rank_one.speed)
    # Just below the radius the logarithm returns, just above it is shorter.
    m = InvariantFixedRank(3, 2)
    x = point(m, [1.0])
    f = m.frame(x)
    across = [q - b * (b * q).sum() for b, q in ((f.g, torch.randn(3, 1).double()), (f.h, torch.randn(2, 1).double()))]
    across = [a / a.norm() / math.sqrt(2) for a in across]
    u = m.from_ambient(x, across[0] @ f.h.mT + f.g @ across[1].mT)
    for length, same in ((0.99, True), (1.01, False)):
        v = length * math.pi / math.sqrt(2) * u
        back = m.logmap(x, m.expmap(x, v))
        assert bool(torch.allclose(back, v, atol=1e-8)) is same


@over_metrics
@pytest.mark.parametrize("least", [1e-4, 1e-8])
def test_small_singular_values_keep_their_digits(metric: type[FixedRank], least: float) -> None:
    m = metric(6, 5)
    x = point(m, [1.0, 0.5, least], (3,), condition=10.0)
    u = m.proju(x, m.from_ambient(x, torch.randn(3, 6, 5, dtype=torch.float64)))
    # The point is not balanced: rounding of a factor, whose condition is that of the matrix.
    assert float((m.norm(x, m.proju(x, u) - u) / m.norm(x, u)).max()) <= max(1e-11, 1e-15 / least)
    assert_close(m.from_ambient(x, m.to_ambient(x, u)), u, rtol=1e-6, atol=1e-9)
    v = 0.5 * m.exponential_radius(x).clamp_max(1.0)[:, None, None] * u / m.norm(x, u, keepdim=True)
    y = m.expmap(x, v)
    assert bool(y.isfinite().all())
    assert m.check_point_on_manifold(y)


@pytest.mark.parametrize("metric", [*FIXED_RANK])
def test_a_freshly_initialised_adapter_is_no_point(metric: type[FixedRank]) -> None:
    m = metric(6, 5)
    x = point(m, [1.0, 0.5], (2,))
    x[1, 6:] = 0
    ok, reason = m.check_point_on_manifold(x, explain=True)
    assert not ok
    assert "G H^T is numerically rank deficient at batch indices [[1]]" in reason
    u = torch.randn_like(x)
    for method in (m.proju, m.egrad2rgrad, m.norm, m.second_order):
        result = method(x, u).flatten(1) if method != m.norm else method(x, u)[:, None]
        assert result.isfinite().all(dim=1).tolist() == [True, False]
