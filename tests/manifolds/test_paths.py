"""Laws of the paths that leave a point with a given velocity, and of transport."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given
from torch import Tensor
from torch.func import jvp
from torch.testing import assert_close

from quotient_nets.manifolds import FixedRank, InvariantFixedRank
from quotient_nets.manifolds.base import QuotientManifold
from tests.strategies import Case, fixed_rank, points

ROUNDING = 1e-10
ROUNDING_32 = 2e-3
MILD = 1e2  # worst condition where a path moves the point: the frame at its end is not the frame of the case


def velocity(path: Callable[[Tensor], Tensor], t: float) -> tuple[Tensor, Tensor]:
    """Point and velocity at time ``t``."""
    one = torch.ones((), dtype=torch.float64)
    return jvp(path, (t * one,), (one,))


@given(points())
def test_a_path_of_no_length_stays(case: Case) -> None:
    m, x, zero = case.manifold, case.x, torch.zeros_like(case.x)
    for path in [m.retr, m.expmap, getattr(m, "second_order", m.retr)]:
        assert_close(path(x, zero), x, rtol=0, atol=0)


@given(points())
def test_a_path_starts_with_its_velocity(case: Case) -> None:
    m, x, u = case.manifold, case.x, case.step()
    for path in [m.retr, m.expmap, getattr(m, "second_order", m.retr)]:
        case.assert_equal(velocity(lambda t, path=path: path(x, t * u), 0.0)[1], u, ROUNDING)


def order(case: Case, path: Callable[..., Tensor]) -> float:
    """Measured order of the distance between the path and the geodesic."""
    x, u = case.x, case.step()
    near, far = (case.size(path(x, t * u) - case.manifold.expmap(x, t * u)).norm() for t in (5e-3, 1e-2))
    assume(far > 0)  # there are points without tangent vectors
    return (far / near).log2().item()


@given(points())
def test_retraction_is_of_first_order(case: Case) -> None:
    assert order(case, case.manifold.retr) == pytest.approx(2, abs=0.1)  # error t^2


@given(fixed_rank(condition=MILD))
def test_second_order_retraction_is_of_second_order(case: Case) -> None:
    assert order(case, case.manifold.second_order) == pytest.approx(3, abs=0.1)  # error t^3


@given(points(condition=MILD))
def test_geodesic_has_constant_speed_and_stays_horizontal(case: Case) -> None:
    m, x, u = case.manifold, case.x, case.step()
    y, w = velocity(lambda t: m.expmap(x, t * u), 0.7)
    assert_close(m.norm(y, w), m.norm(x, u), rtol=ROUNDING, atol=ROUNDING)
    case.assert_equal(m.proju(y, w), w, ROUNDING)


@given(points(condition=MILD))
def test_geodesic_continues_itself(case: Case) -> None:
    m, x, u = case.manifold, case.x, case.step()
    y, w = velocity(lambda t: m.expmap(x, t * u), 0.4)
    case.assert_equal(m.expmap(y, 0.6 * w), m.expmap(x, u), ROUNDING)


@given(points(dtype=torch.float32))
def test_geodesic_in_float32_is_that_in_float64(case: Case) -> None:
    m, x, u = case.manifold, case.x, case.step()
    case.assert_equal(m.expmap(x, u).double(), m.expmap(x.double(), u.double()), ROUNDING_32)


class Textbook(FixedRank):
    """The invariant metric by the book: dense inverses, everything else from the base class."""

    def inner(self, x, u, v=None, *, keepdim=False):
        v = u if v is None else v
        total = 0
        for factor, a, b in zip(*map(self.unpack_tensor, (x, u, v)), strict=True):
            gram = factor.mT @ factor
            total = total + (torch.linalg.inv(gram) * (a.mT @ b)).sum((-2, -1), keepdim=keepdim)
        return total

    def egrad2rgrad(self, x, u):
        """The total space's: enough along geodesics, whose momentum annihilates the orbit."""
        pairs = zip(self.unpack_tensor(x), self.unpack_tensor(u), strict=True)
        return self.pack_point(*(e @ (factor.mT @ factor) for factor, e in pairs))


@pytest.mark.parametrize(("n", "m", "r"), [(2, 2, 2), (3, 4, 1), (4, 3, 2), (5, 3, 3)])
def test_geodesic_solves_hamiltons_equations(n: int, m: int, r: int) -> None:
    ours, book = InvariantFixedRank(n, m), Textbook(n, m)
    x = torch.randn(4, n + m, r, dtype=torch.float64)
    u = ours.proju(x, torch.randn_like(x))
    u = 0.5 * u / ours.norm(x, u, keepdim=True)
    actual, scale = ours.expmap(x, u), x.abs().max()
    assert_close(actual, QuotientManifold.expmap(book, x, u), rtol=0, atol=1e-9 * scale)


def test_geodesic_equals_the_generic_default() -> None:
    m = InvariantFixedRank(4, 3)
    x = torch.randn(2, 7, 2, dtype=torch.float64)
    u = m.proju(x, torch.randn_like(x))
    u = 0.5 * u / m.norm(x, u, keepdim=True)
    assert_close(m.expmap(x, u), QuotientManifold.expmap(m, x, u), rtol=0, atol=1e-9)


@given(points())
def test_transport_is_linear_and_horizontal(case: Case) -> None:
    m, x, u, v = case.manifold, case.x, case.vector(), case.vector()
    y = case.elsewhere()
    moved = m.transp(x, y, u)
    case.assert_equal(m.proju(y, moved), moved, ROUNDING)
    case.assert_equal(m.transp(x, y, 2 * u - 3 * v), 2 * moved - 3 * m.transp(x, y, v), ROUNDING)


@given(points())
def test_transport_nowhere_is_the_projection(case: Case) -> None:
    u = case.vector()
    case.assert_equal(case.manifold.transp(case.x, case.x, u), case.manifold.proju(case.x, u), ROUNDING)


@given(fixed_rank(condition=MILD))
def test_transport_equals_the_generic_default(case: Case) -> None:
    m, x, v = case.manifold, case.x, case.vector()
    y = case.elsewhere()
    case.assert_equal(m.transp(x, y, v), QuotientManifold.transp(m, x, y, v), 1e-8)


@given(points())
def test_transport_after_a_step_is_both(case: Case) -> None:
    m, x, u, v = case.manifold, case.x, 0.3 * case.step(), case.vector()
    y, moved = m.retr_transp(x, u, v)
    assert_close(y, m.retr(x, u), rtol=0, atol=0)
    assert_close(moved, m.transp(x, y, v), rtol=0, atol=0)
