"""Rank one under the invariant metric: logarithm and distance in closed form."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from quotient_nets import InvariantFixedRank
from quotient_nets.manifolds.rank_one import sphere_log

CASES = json.loads((Path(__file__).parents[1] / "data" / "exact_geodesics.json").read_text())["rank1"]
M = InvariantFixedRank(5, 4)
MILD = st.floats(0.01, 1.4)  # below the injectivity radius: the angles add up to less than pi


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """A point and a horizontal vector of moderate length."""
    torch.manual_seed(draw(st.integers(0, 2**32 - 1)))
    batch = draw(st.sampled_from([(), (3,), (2, 2)]))
    x = torch.randn(*batch, 9, 1, dtype=torch.float64) * 10 ** draw(st.floats(-4, 4))
    u = M.proju(x, x.abs().mean() * torch.randn_like(x))
    return x, u * draw(MILD) / M.norm(x, u, keepdim=True)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_reference_distances(case: dict) -> None:
    u1, v1, u2, v2 = (torch.tensor(case[key], dtype=torch.float64).reshape(-1, 1) for key in ("u1", "v1", "u2", "v2"))
    m = InvariantFixedRank(len(u1), len(v1))
    x, y = m.pack_point(case["sigma1"] * u1, v1), m.pack_point(case["sigma2"] * u2, v2)
    assert_close(float(m.dist(x, y)), float(case["dist"]["inv"]), rtol=1e-12, atol=0)
    assert_close(float(m.norm(x, m.logmap(x, y))), float(case["dist"]["inv"]), rtol=1e-12, atol=0)
    assert_close(m.product(m.expmap(x, m.logmap(x, y))), m.product(y))


@given(pairs(), st.sampled_from([1.0, -3.0, 1e-4, -1e4]))
def test_logarithm_inverts_the_exponential(pair: tuple[Tensor, Tensor], a: float) -> None:
    x, u = pair
    y = M.action(M.expmap(x, u), torch.full((*x.shape[:-2], 1, 1), a, dtype=x.dtype))
    v = M.logmap(x, y)
    assert bool((M.norm(x, v - u) <= 1e-10).all())
    assert_close(M.dist(x, y), M.norm(x, u), rtol=1e-10, atol=1e-12)
    assert_close(M.dist(y, x), M.dist(x, y), rtol=1e-10, atol=1e-12)
    assert_close(v, M.proju(x, v), rtol=0, atol=1e-10 * float(x.abs().max()))


def test_no_way_is_shorter() -> None:
    """The logarithm is not longer than the geodesics that were drawn at random to the same point."""
    x = torch.randn(200, 9, 1, dtype=torch.float64)
    u = M.proju(x, 2 * torch.randn_like(x))
    assert bool((M.dist(x, M.expmap(x, u)) <= M.norm(x, u) * (1 + 1e-10)).all())


def test_distance_and_derivatives_on_an_orbit() -> None:
    x = torch.randn(9, 1, dtype=torch.float64)
    y = M.action(x, torch.tensor([[-7.0]], dtype=x.dtype)).requires_grad_()
    distance = M.dist(x, y)
    assert float(distance.detach()) < 1e-14
    assert torch.autograd.grad(distance, y)[0].isfinite().all()
    for method in (M.logmap, M.dist2):
        assert torch.autograd.gradcheck(method, (x.requires_grad_(), y))
        assert torch.autograd.gradgradcheck(method, (x, y))


def test_series_of_the_angle_meets_the_formula() -> None:
    g = torch.eye(3, dtype=torch.float64)[:, :1]
    for angle in (1e-9, 9e-3, 1.01e-2, 3.0):
        q = torch.tensor([[math.cos(angle)], [math.sin(angle)], [0.0]], dtype=torch.float64)
        assert_close(sphere_log(g, q), torch.tensor([[0.0], [angle], [0.0]], dtype=torch.float64), rtol=1e-13, atol=0)
    assert sphere_log(g, -g).isnan().all()


def test_diagonal_nets_are_a_flat_line() -> None:
    """``n = m = 1``: the distance is |log of the ratio of products| / sqrt 2; no path leads across zero."""
    m = InvariantFixedRank(1, 1)
    x, y = torch.rand(6, 2, 1, dtype=torch.float64) + 0.1, torch.rand(6, 2, 1, dtype=torch.float64) + 0.1
    ratio = (m.product(y) / m.product(x)).flatten()
    assert_close(m.dist(x, y), ratio.log().abs() / math.sqrt(2))
    other = y * torch.tensor([[-1.0], [1.0]])
    with pytest.raises(ValueError, match="that a path joins"):
        m.dist(x, other)
    assert m.dist(x, other, check=False).isnan().all()
