"""Logarithm and distance where no closed form is known: found by a solver, certified by where the geodesic ends."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

from quotient_nets.manifolds import (
    EmbeddedFixedRank,
    FixedRankMatrices,
    InvariantFixedRank,
    PolarFixedRank,
    PreconditionedFixedRank,
)
from quotient_nets.manifolds.least_squares import levenberg_marquardt
from quotient_nets.manifolds.logarithm import Core, CorePair
from tests.strategies import orthogonal

METRICS: list[type[FixedRankMatrices]] = [
    InvariantFixedRank,
    PreconditionedFixedRank,
    EmbeddedFixedRank,
    PolarFixedRank,
]
over_metrics = pytest.mark.parametrize("metric", METRICS)
N, M = 5, 4


def point(m: FixedRankMatrices, spectrum: list[float], batch: tuple[int, ...] = ()) -> Tensor:
    """Point with these singular values, in a representative of its own."""
    s = torch.tensor(spectrum, dtype=torch.float64).expand(*batch, len(spectrum))
    x = m.from_frame(orthogonal(*batch, m.n, s.shape[-1]), s, orthogonal(*batch, m.m, s.shape[-1]))
    return m.action(x, element(m, x))


def element(m: FixedRankMatrices, x: Tensor) -> Tensor:
    """Group elements of negative determinant; of condition 100 where the group has such."""
    options = {} if isinstance(m, PolarFixedRank) else {"condition": 100.0}
    a = m.random_element(*x.shape[:-2], x.shape[-1], **options)
    return a * torch.where(torch.linalg.det(a) > 0, -1.0, 1.0)[..., None, None] ** torch.eye(1, x.shape[-1]).to(a)


def step(m: FixedRankMatrices, x: Tensor, length: float) -> Tensor:
    """Tangent vector of this length, as a share of where the manifold may end."""
    space = m.at(x)
    reach = m.exponential_radius(x).clamp_max(1.0)[..., None, None]
    return space.vector(space.random(torch.Generator().manual_seed(1)) * length * reach)


@over_metrics
@pytest.mark.parametrize("spectrum", [[2.0, 0.8], [1.0, 1.0], [2.0, 1.0, 0.7]], ids=str)
def test_logarithm_returns_the_step_at_every_representative(
    metric: type[FixedRankMatrices], spectrum: list[float]
) -> None:
    m = metric(N, M)
    x = point(m, spectrum, (2,))
    u = step(m, x, 0.2)
    y = m.expmap(x, u)
    y = m.action(y, element(m, y))
    v = m.logmap(x, y)
    assert float(m.norm(x, v - u).max()) <= 1e-9
    assert_close(m.dist(x, y), m.norm(x, u), rtol=1e-9, atol=0)
    assert_close(m.dist(y, x), m.dist(x, y), rtol=1e-9, atol=0)
    assert_close(m.dist2(x, y, keepdim=True).flatten(), m.norm(x, u).square(), rtol=1e-9, atol=0)


@over_metrics
def test_a_point_is_its_own_logarithm_zero_with_a_finite_derivative(metric: type[FixedRankMatrices]) -> None:
    m = metric(N, M)
    x = point(m, [2.0, 0.8])
    y = m.action(x, element(m, x)).requires_grad_()
    distance = m.dist(x, y)
    (gradient,) = torch.autograd.grad(distance, y)
    assert float(distance.detach()) <= 1e-10
    assert bool(gradient.isfinite().all())
    assert_close(m.logmap(x, x), 0 * x, rtol=0, atol=1e-12)
    report = m.logmap_report(x, y.detach())
    assert bool(report.converged)
    assert bool(report.confirmed)
    assert float(report.residual) <= 1e-12
    assert float(report.length) <= 1e-10


@pytest.mark.parametrize("metric", [InvariantFixedRank, PolarFixedRank])
def test_far_points_are_reached(metric: type[FixedRankMatrices]) -> None:
    """Independent points: there is no step to compare with, but an end point and a triangle."""
    m = metric(N, M)
    x, y, z = (point(m, [1.5, 0.8], (3,)) for _ in range(3))
    reports = [m.logmap_report(a, b) for a, b in ((x, y), (y, z), (x, z))]
    assert all(bool(r.converged.all()) for r in reports)
    first = reports[0]
    ends = m.product(m.expmap(x, first.vector))
    error = torch.linalg.matrix_norm(ends - m.product(y)) / torch.linalg.matrix_norm(m.product(y))
    assert bool((error <= 1e-8).all())
    assert_close(first.length, m.norm(x, first.vector), rtol=1e-10, atol=0)
    xy, yz, xz = (r.length for r in reports)
    assert bool((xz <= xy + yz).all())


def test_far_points_of_the_embedded_metric_are_reached_where_singular_values_differ_much() -> None:
    """Geodesics that pass the matrices of lower rank closely: stiff equations, and bad guesses go astray."""
    m = EmbeddedFixedRank(6, 5)
    x, y = torch.randn(2, 4, 11, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).unbind()
    y = y * torch.tensor([1.0, 1.0, 4.0, 4.0]).double()[:, None, None]
    report = m.logmap_report(x, y)
    assert bool(report.converged.all())
    ends = m.product(m.expmap(x, report.vector))
    assert_close(ends, m.product(y), rtol=1e-8, atol=1e-8)
    chord = torch.linalg.matrix_norm(m.product(x) - m.product(y))
    assert bool((chord <= report.length).all())
    assert bool((report.length <= 1.2 * chord).all())


@pytest.mark.parametrize("metric", METRICS[:3])  # the polar metric takes the paths of the invariant one
@pytest.mark.parametrize("spectrum", [[2.0, 0.8], [2.0, 1.0, 0.7]], ids=str)
def test_short_paths_have_the_start_and_the_length_of_the_geodesic(
    metric: type[FixedRankMatrices], spectrum: list[float]
) -> None:
    m = metric(N, M)
    x = point(m, spectrum, (4,))
    u = step(m, x, 0.9)
    y = m.expmap(x, u)
    pair = CorePair(m.at(x), m.at(y))
    core = Core(m, pair.points)
    c, length = core.short_start(torch.zeros(4, len(spectrum), len(spectrum), dtype=torch.float64))
    found = core.shoot(c)
    scale = pair.scale.flatten() ** core.source.degree
    assert_close(scale * found.length, m.norm(x, u), rtol=1e-8, atol=0)
    assert_close(length, found.length, rtol=0.03, atol=0)
    error = core.source.norm(c - found.c).flatten()
    assert bool((error <= 0.1 * found.length).all())


@over_metrics
def test_the_core_does_not_know_the_size_of_the_matrices(metric: type[FixedRankMatrices]) -> None:
    small, large = metric(4, 4), metric(40, 30)
    x = point(small, [2.0, 0.8])
    y = small.expmap(x, step(small, x, 0.2))
    left, right = orthogonal(40, 4), orthogonal(30, 4)

    def embedded(p: Tensor) -> Tensor:
        f = small.frame(p)
        return large.from_frame(left @ f.g, f.spectrum, right @ f.h)

    assert_close(large.dist(embedded(x), embedded(y)), small.dist(x, y), rtol=1e-9, atol=0)


@pytest.mark.parametrize("size", [(6, 3), (3, 6)])
def test_the_embedded_metric_is_flat_at_full_rank(size: tuple[int, int]) -> None:
    m = EmbeddedFixedRank(*size)
    x, y = torch.randn(2, 4, 9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()
    report = m.logmap_report(x, y)
    assert bool(report.confirmed.all())
    assert_close(report.vector, m.inverse_orthographic(x, y), rtol=1e-9, atol=1e-9)
    assert_close(report.length, torch.linalg.matrix_norm(m.product(x) - m.product(y)), rtol=1e-9, atol=0)


def test_distances_of_all_pairs() -> None:
    m = InvariantFixedRank(N, M)
    x, y = point(m, [2.0, 0.8], (2,)), point(m, [1.0, 0.9], (3,))
    distances = m.pairwise_dist(x, y)
    assert distances.shape == (2, 3)
    assert_close(distances[1, 2], m.dist(x[1], y[2]), rtol=1e-8, atol=0)


def test_a_pair_that_the_solver_gives_up_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quotient_nets.manifolds.logarithm.ITERATIONS", 1)
    m = InvariantFixedRank(N, M)
    x = point(m, [2.0, 1.0], (2,))
    y = torch.stack([x[0], point(m, [0.3, 0.2])])
    with pytest.raises(ValueError, match=r"the solver did not converge.*logmap_report.*batch indices \[\[1\]\]"):
        m.logmap(x, y)
    v = m.logmap(x, y, check=False)
    assert v.isnan().all(dim=(-2, -1)).tolist() == [False, True]
    assert m.dist(x, y, check=False).isnan().tolist() == [False, True]
    assert m.logmap_report(x, y).converged.tolist() == [True, False]


@over_metrics
def test_what_is_no_point_spoils_its_own_pair_only(metric: type[FixedRankMatrices]) -> None:
    m = metric(N, M)
    x = point(m, [2.0, 0.8], (3,))
    y = m.expmap(x, step(m, x, 0.2))
    expected = m.logmap(x, y)
    spoiled = y.clone()
    spoiled[1, 0, 0] = torch.nan
    actual = m.logmap(x, spoiled)  # the check is about pairs of points
    assert actual.isfinite().all(dim=(-2, -1)).tolist() == [True, False, True]
    assert_close(actual[::2], expected[::2], rtol=0, atol=1e-10)
    assert m.logmap_report(x, spoiled).converged.tolist() == [True, False, True]


def test_dtype_comes_back() -> None:
    m = InvariantFixedRank(N, M)
    x = point(m, [2.0, 0.8])
    y = m.expmap(x, step(m, x, 0.8))
    single = m.logmap(x.float(), y.float())
    assert single.dtype == torch.float32
    assert float(m.norm(x, single.double() - m.logmap(x, y))) <= 1e-4
    assert m.dist(x.float(), y.float()).dtype == torch.float32


@over_metrics
@pytest.mark.parametrize("spectrum", [[2.0, 0.7], [1.0, 1.0]], ids=str)
@pytest.mark.parametrize("length", [0.0, 0.2])
def test_two_derivatives_are_right(metric: type[FixedRankMatrices], spectrum: list[float], length: float) -> None:
    m = metric(5, 2)  # the left factors leave room outside the span of both points, the right ones do not
    x = point(m, spectrum)
    y = m.expmap(x, step(m, x, length))
    y = m.action(y, element(m, y))
    inputs = [t.detach().requires_grad_() for t in (x, y)]
    if metric is PolarFixedRank:  # a perturbation off the manifold changes what the solver sees as its frame
        directions = [m.proju(t, torch.randn_like(t)).detach() for t in (x, y)]
        inputs = [torch.zeros((), dtype=torch.float64, requires_grad=True)]
        logarithm = lambda t: m.logmap(*(m.retr(p, t * d) for p, d in zip((x, y), directions, strict=True)))  # noqa: E731
    else:
        logarithm = m.logmap
    assert gradcheck(logarithm, inputs, atol=1e-5, fast_mode=True)
    if metric is InvariantFixedRank:  # the others take minutes
        assert gradgradcheck(logarithm, inputs, atol=1e-4, fast_mode=True)


@over_metrics
def test_gradient_of_the_squared_distance_is_the_logarithm(metric: type[FixedRankMatrices]) -> None:
    m = metric(N, M)
    x = point(m, [2.0, 0.8])
    y = m.expmap(x, step(m, x, 0.2)).detach()
    w = x.clone().requires_grad_()
    (e,) = torch.autograd.grad(m.dist2(w, y), w)
    assert_close(m.egrad2rgrad(x, e), -2 * m.logmap(x, y), rtol=0, atol=1e-8)


def test_least_squares_by_conjugate_gradients_is_that_by_factorisation(monkeypatch: pytest.MonkeyPatch) -> None:
    m = InvariantFixedRank(N, M)
    x = point(m, [2.0, 0.8], (2,))
    y = m.expmap(x, step(m, x, 0.8))
    expected = m.logmap_report(x, y)
    monkeypatch.setattr("quotient_nets.manifolds.least_squares.DENSE", 0)
    monkeypatch.setattr("quotient_nets.manifolds.logarithm.DENSE", 0)
    actual = m.logmap_report(x, y)
    assert bool(actual.converged.all())
    assert_close(actual.vector, expected.vector, rtol=0, atol=1e-7)


def test_least_squares_finds_a_minimum_that_is_not_zero() -> None:
    def residual(z: Tensor) -> Tensor:
        return torch.stack([z[..., 0] - 1, z[..., 0] + 1, z[..., 1].exp() - 2], dim=-1)

    z, norm = levenberg_marquardt(residual, torch.zeros(3, 2, dtype=torch.float64), iterations=40)
    expected = torch.tensor([0.0, 2.0]).double()
    assert_close(z, torch.stack([expected[0], expected[1].log()]).expand(3, 2), rtol=0, atol=1e-7)
    assert_close(norm, torch.full((3,), 2.0).double().sqrt())


@pytest.mark.slow
def test_a_hundred_pairs_at_distance_three() -> None:
    m = InvariantFixedRank(8, 6)
    x = torch.randn(100, 14, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    space = m.at(x)
    y = m.expmap(x, space.vector(3 * space.random(torch.Generator().manual_seed(1))))
    report = m.logmap_report(x, y)
    ends = m.product(m.expmap(x, report.vector))
    errors = torch.linalg.matrix_norm(ends - m.product(y))
    assert int(((errors <= 1e-8) & (report.length <= 3 * (1 + 1e-6))).sum()) >= 99
