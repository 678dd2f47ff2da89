"""Laws of the metric, its gradient and the projection on tangent vectors."""

import torch
from hypothesis import given
from torch.testing import assert_close

from quotient_nets.manifolds import EmbeddedFixedRank, FixedRank, PreconditionedFixedRank
from quotient_nets.manifolds.base import QuotientManifold
from tests.strategies import Case, fixed_rank, points

# Rounding of x alone, eps cond(G) with cond(G) <= gauge sqrt(cond(X)) = 1e3, is 2e-13 (float32: 1e-4).
ROUNDING = 1e-10
ROUNDING_32 = 2e-3


def assert_small(actual: torch.Tensor, bound: torch.Tensor | float) -> None:
    assert bool((actual.abs() <= bound).all()), f"{actual} > {bound}"


@given(points())
def test_metric_is_symmetric_and_bilinear(case: Case) -> None:
    inner, x = case.manifold.inner, case.x
    u, v, w = case.vector(), case.vector(), case.vector()
    assert_small(inner(x, u, v) - inner(x, v, u), ROUNDING)
    assert_small(inner(x, 2 * u - 3 * w, v) - 2 * inner(x, u, v) + 3 * inner(x, w, v), ROUNDING)


@given(points())
def test_metric_is_positive_and_gives_the_norm(case: Case) -> None:
    m, x, u = case.manifold, case.x, case.horizontal()
    assert bool((m.inner(x, u) >= 0).all())
    assert_close(m.norm(x, u).square(), m.inner(x, u), rtol=ROUNDING, atol=ROUNDING)
    assert_close(m.inner(x, u, u), m.inner(x, u), rtol=0, atol=0)
    assert_close(m.norm(x, 0 * u), torch.zeros(case.batch, dtype=x.dtype), rtol=0, atol=0)


@given(points())
def test_horizontal_vectors_have_the_norm_of_their_frame(case: Case) -> None:
    m, x, u = case.manifold, case.x, case.horizontal()
    size = torch.linalg.matrix_norm(m.to_ambient(x, u)) if isinstance(m, EmbeddedFixedRank) else case.size(u)
    assert_close(m.norm(x, u), size, rtol=ROUNDING, atol=ROUNDING)


@given(points())
def test_projection_is_linear_and_idempotent(case: Case) -> None:
    m, x, u, v = case.manifold, case.x, case.vector(), case.vector()
    once = m.proju(x, u)
    case.assert_equal(m.proju(x, once), once, ROUNDING)
    case.assert_equal(m.proju(x, 2 * u - 3 * v), 2 * once - 3 * m.proju(x, v), ROUNDING)


@given(points())
def test_projection_is_self_adjoint(case: Case) -> None:
    m, x, u, v = case.manifold, case.x, case.vector(), case.vector()
    assert_small(m.inner(x, m.proju(x, u), v) - m.inner(x, u, m.proju(x, v)), ROUNDING)


@given(points(dtype=torch.float32))
def test_projection_is_idempotent_and_self_adjoint_in_float32(case: Case) -> None:
    m, x, u, v = case.manifold, case.x, case.vector(), case.vector()
    once = m.proju(x, u)
    case.assert_equal(m.proju(x, once), once, ROUNDING_32)
    assert_small(m.inner(x, once, v) - m.inner(x, u, m.proju(x, v)), ROUNDING_32)


@given(fixed_rank())
def test_projection_kills_vertical_vectors(case: Case) -> None:
    r = case.x.shape[-1]
    vertical = case.manifold.infinitesimal_action(case.x, torch.randn(*case.batch, r, r).double())
    left = case.size(case.manifold.proju(case.x, vertical))
    assert_small(left, ROUNDING * case.size(vertical))


@given(fixed_rank(condition=1e2))  # the default solves with a Gram matrix of condition cond(X)^2
def test_projection_equals_the_generic_default(case: Case) -> None:
    u, m = case.vector(), case.manifold
    # Vertical vectors have no length in the embedded metric; its horizontal vectors are those of the other one.
    metric = PreconditionedFixedRank(m.n, m.m) if isinstance(m, EmbeddedFixedRank) else m
    case.assert_equal(m.proju(case.x, u), QuotientManifold.proju(metric, case.x, u), 1e-8)


@given(fixed_rank())
def test_projection_keeps_the_change_of_the_product(case: Case) -> None:
    m, x, u = case.manifold, case.x, case.vector()
    change = torch.func.jvp(m.product, (x,), (u,))[1]
    kept = torch.func.jvp(m.product, (x,), (m.proju(x, u),))[1]
    assert_close(kept, change, rtol=0, atol=ROUNDING)


@given(fixed_rank())
def test_projection_has_the_rank_of_the_dimension(case: Case) -> None:
    m: FixedRank = case.manifold
    x = case.x.reshape(-1, *case.x.shape[-2:])[0]
    basis = torch.eye(x.numel(), dtype=x.dtype).reshape(-1, *x.shape)
    trace = m.proju(x, basis).reshape(x.numel(), -1).trace()  # of an idempotent map: its rank
    assert_small(trace - m.dimension(x.shape[-1]), 1e-6)


@given(points())
def test_gradient_represents_the_derivative(case: Case) -> None:
    m, x, u, e = case.manifold, case.x, case.horizontal(), case.derivative()
    change = (e * u).flatten(len(case.batch)).sum(-1)
    assert_small(m.inner(x, m.egrad2rgrad(x, e), u) - change, ROUNDING)


@given(points(dtype=torch.float32))
def test_gradient_represents_the_derivative_in_float32(case: Case) -> None:
    m, x, u, e = case.manifold, case.x, case.horizontal(), case.derivative()
    change = (e * u).flatten(len(case.batch)).sum(-1)
    assert_small(m.inner(x, m.egrad2rgrad(x, e), u) - change, ROUNDING_32)


@given(points())
def test_gradient_is_horizontal_for_any_derivative(case: Case) -> None:
    gradient = case.manifold.egrad2rgrad(case.x, case.derivative())
    case.assert_equal(case.manifold.proju(case.x, gradient), gradient, ROUNDING)
