"""Positive semidefinite matrices of fixed rank: reference numbers, pymanopt, laws and the ends of the theory."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pymanopt
import pytest
import torch
from geoopt import ManifoldParameter
from geoopt.optim import RiemannianAdam
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import jvp
from torch.testing import assert_close

from quotient_nets import PSDFixedRank
from quotient_nets.manifolds.base import QuotientManifold
from tests.strategies import BATCHES, orthogonal

CASES = json.loads((Path(__file__).parents[1] / "data" / "manopt_symfixedrankYY.json").read_text())["cases"]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
ROUNDING = 1e-9
SHAPES = [(1, 1), (5, 1), (5, 2), (4, 3), (3, 3)]
each_shape = pytest.mark.parametrize(("n", "r"), SHAPES)


def matrix(numbers: Any, n: int, r: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64).reshape(n, r)


def assert_relative(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert_close(actual, expected, rtol=0, atol=tolerance * float(expected.norm()))


def point(n: int, r: int, condition: float, batch: tuple[int, ...] = (), dtype: torch.dtype = torch.float64) -> Tensor:
    s = torch.logspace(0, -1, r, base=condition, dtype=torch.float64)
    return (orthogonal(*batch, n, r) * s @ orthogonal(*batch, r, r)).to(dtype)


@st.composite
def points(draw: st.DrawFn) -> tuple[PSDFixedRank, Tensor]:
    n, r = draw(st.sampled_from(SHAPES))
    batch, condition = draw(BATCHES), 10 ** draw(st.floats(0, 4))
    torch.manual_seed(draw(st.integers(0, 2**32 - 1)))
    return PSDFixedRank(n), point(n, r, condition, batch)


# -- numbers computed elsewhere ----------------------------------------------------------------------------------------


@each_case
def test_reference_numbers(case: dict[str, Any]) -> None:
    n, r = case["n"], case["r"]
    m = PSDFixedRank(n)
    inputs = {key: matrix(value, n, -1) for key, value in case["inputs"].items() if key != "exp_t"}
    x, y, exact = inputs["Y"], inputs["Y2"], case["exact"]
    u = m.proju(x, inputs["Z"])
    assert_relative(u, matrix(exact["proj"], n, r), 1e-12)
    assert_relative(m.logmap(x, y), matrix(exact["log"], n, r), 1e-10)
    assert_close(float(m.dist(x, y)), exact["dist"], rtol=1e-12, atol=0)
    assert_close(float(m.dist2(x, y)), case["exact_bures_wasserstein_sq"], rtol=1e-12, atol=0)
    assert_relative(m.expmap(x, case["inputs"]["exp_t"] * u), matrix(exact["exp"], n, r), 1e-12)
    hessian = m.ehess2rhess(x, inputs["egrad"], inputs["ehess_at_projZ"], u)
    assert_relative(hessian, matrix(exact["rhess"], n, r), 1e-10)


@pytest.mark.parametrize(("n", "r"), [(6, 1), (6, 2), (6, 4), (4, 4)])
def test_agrees_with_pymanopt(n: int, r: int) -> None:
    ours, theirs = PSDFixedRank(n), pymanopt.manifolds.PSDFixedRank(n, r)
    x, y, u = torch.randn(3, n, r, dtype=torch.float64)
    xn, yn, un = x.numpy(), y.numpy(), u.numpy()
    v = ours.proju(x, u)
    pairs = {
        "projection": (v, theirs.projection(xn, un)),
        "inner": (ours.inner(x, u), theirs.inner_product(xn, un, un)),
        "log": (ours.logmap(x, y), theirs.log(xn, yn)),
        "dist": (ours.dist(x, y), theirs.dist(xn, yn)),
        "exp": (ours.expmap(x, v), theirs.exp(xn, v.numpy())),
        "gradient": (ours.egrad2rgrad(x, v), theirs.euclidean_to_riemannian_gradient(xn, v.numpy())),
        "dimension": (torch.tensor(ours.dimension(r)), theirs.dim),
    }
    for name, (actual, expected) in pairs.items():
        np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-11, err_msg=name)


# -- laws --------------------------------------------------------------------------------------------------------------


@given(points())
def test_projection_is_the_generic_one(case: tuple[PSDFixedRank, Tensor]) -> None:
    m, x = case
    u = torch.randn_like(x)
    v = m.proju(x, u)
    assert_close(m.proju(x, v), v, rtol=0, atol=ROUNDING)
    assert_close(x.mT @ v, v.mT @ x, rtol=0, atol=ROUNDING)
    assert_close(m.to_ambient(x, v), m.to_ambient(x, u), rtol=0, atol=ROUNDING)


@each_shape
def test_closed_forms_agree_with_the_defaults(n: int, r: int) -> None:
    m = PSDFixedRank(n)
    x, y = point(n, r, 3.0, (2,)), point(n, r, 3.0, (2,))
    u = m.proju(x, torch.randn_like(x))
    assert_close(m.proju(x, 2 * u + x), QuotientManifold.proju(m, x, 2 * u + x))
    assert_close(m.expmap(x, 0.1 * u), QuotientManifold.expmap(m, x, 0.1 * u))
    assert_close(m.transp(x, y, u), QuotientManifold.transp(m, x, y, u))


@given(points(), st.booleans())
def test_operations_do_not_depend_on_the_representative(case: tuple[PSDFixedRank, Tensor], flip: bool) -> None:
    m, x = case
    batch, r = x.shape[:-2], x.shape[-1]
    a = m.random_element(*batch, r)
    a = a * torch.where(torch.arange(r) == 0, -1.0 if flip else 1.0, 1.0).to(a.dtype)  # either determinant
    b = m.random_element(*batch, r)
    u, y = torch.randn_like(x), torch.randn_like(x)
    xa, yb, ua = m.action(x, a), m.action(y, b), u @ a.mT
    v, va = m.proju(x, u), m.proju(xa, ua)
    assert_close(va, v @ a.mT, rtol=0, atol=ROUNDING)
    assert_close(m.inner(xa, ua), m.inner(x, u))
    assert_close(m.dist(xa, yb), m.dist(x, y), rtol=1e-9, atol=ROUNDING)
    assert_close(m.transp(xa, yb, va), m.transp(x, y, v) @ b.mT, rtol=0, atol=1e-7)


@each_shape
def test_canonical_point_is_one_for_each_orbit(n: int, r: int) -> None:
    m, x = PSDFixedRank(n), point(n, r, 10.0, (3,))
    a = m.random_element(3, r)
    assert_close(m.canonicalize(m.action(x, a))[0], m.canonicalize(x)[0])


@given(points())
def test_canonical_point_is_of_the_orbit(case: tuple[PSDFixedRank, Tensor]) -> None:
    m, x = case
    y, a = m.canonicalize(x)
    assert_close(m.action(x, a), y, rtol=0, atol=ROUNDING)
    assert_close(a @ a.mT, torch.eye(x.shape[-1], dtype=x.dtype).expand_as(a), rtol=0, atol=ROUNDING)
    assert_close(y.mT @ y, torch.diag_embed((y.mT @ y).diagonal(dim1=-2, dim2=-1)), rtol=0, atol=ROUNDING)


@given(points())
def test_tangent_matrices_there_and_back(case: tuple[PSDFixedRank, Tensor]) -> None:
    m, x = case
    u = m.proju(x, torch.randn_like(x))
    assert_close(m.from_ambient(x, m.to_ambient(x, u)), u, rtol=0, atol=1e-7)
    assert_close(m.to_ambient(x, u), jvp(m.product, (x,), (u,))[1])


@each_shape
def test_lift_is_the_orthogonal_projection_on_tangent_matrices(n: int, r: int) -> None:
    m, x = PSDFixedRank(n), point(n, r, 10.0)
    z = torch.randn(n, n, dtype=torch.float64)
    z = z + z.mT
    basis, _ = torch.linalg.qr(x)
    p = basis @ basis.mT
    assert_close(m.to_ambient(x, m.from_ambient(x, z)), p @ z + z @ p - p @ z @ p)


@each_shape
def test_metric_in_the_eigenbasis(n: int, r: int) -> None:
    m, x = PSDFixedRank(n), point(n, r, 10.0)
    values, u = torch.linalg.eigh(m.product(x))
    values, u = values[-r:], u[:, -r:]
    z = torch.randn(n, n, dtype=torch.float64)
    z = z + z.mT
    core = u.mT @ z @ u
    across = z @ u - u @ core
    expected = (core.square() / (2 * (values[:, None] + values))).sum() + (across.square() / values).sum()
    assert_close(m.inner(x, m.from_ambient(x, z)), expected)


@given(points(), st.floats(0.01, 0.9))
def test_logarithm_inverts_the_exponential_below_the_injectivity_radius(
    case: tuple[PSDFixedRank, Tensor], share: float
) -> None:
    m, x = case
    u = m.proju(x, torch.randn_like(x))
    u = u * (share * m.injectivity_radius(x)[..., None, None] / m.norm(x, u, keepdim=True).clamp_min(1e-300))
    y = m.action(m.expmap(x, u), m.random_element(*x.shape[:-2], x.shape[-1]))
    assert_close(m.logmap(x, y), u, rtol=1e-6, atol=1e-9)
    assert_close(m.dist(x, y), m.norm(x, u), rtol=1e-6, atol=1e-9)
    assert_close(m.dist(y, x), m.dist(x, y), rtol=1e-9, atol=1e-9)


def test_the_injectivity_radius_is_sharp() -> None:
    m, x = PSDFixedRank(5), point(5, 2, 3.0)
    left, s, right = torch.linalg.svd(x, full_matrices=False)
    u = -1.05 * s[-1] * left[:, -1:] @ right[-1:]  # through the rank-deficient matrices
    assert_close(m.injectivity_radius(x), s[-1])
    assert float(m.dist(x, m.retr(x, u))) < 0.99 * float(m.norm(x, u))


@pytest.mark.parametrize("r", [2, 5])
def test_geodesic_ends_where_the_rank_drops(r: int) -> None:
    m, x = PSDFixedRank(5), point(5, r, 3.0, (3,))
    left, s, right = torch.linalg.svd(x, full_matrices=False)
    radial = -s[:, -1, None, None] * left[..., -1:] @ right[:, -1:]
    lengths = torch.tensor([0.99, 1.05, 0.5]).double()[:, None, None]
    u = lengths * radial
    y = m.expmap(x, u, check=False)
    assert y.isnan().all(dim=(-2, -1)).tolist() == [False, True, False]
    assert_close(y[::2], (x + u)[::2], rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"the rank drops on the way.*batch indices \[\[1\]\]"):
        m.expmap(x, u)
    # A component out of the columns of Y keeps the rank; there is none at full rank.
    away = torch.randn_like(x)
    away = 1e-3 * (away - left @ (left.mT @ away))
    assert bool(m.expmap(x, u + away, check=False).isfinite().all()) == (r < 5)


def test_distance_is_zero_on_an_orbit_with_a_finite_derivative() -> None:
    m, x = PSDFixedRank(5), point(5, 3, 10.0)
    y = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(m.dist(x, y), y)
    assert float(m.dist(x, m.action(x, m.random_element(3)))) < 1e-13
    assert float(gradient.norm()) <= 1 + 1e-9  # a subgradient, whatever the rounding
    (gradient,) = torch.autograd.grad(m.dist2(m.action(x, m.random_element(3)), y), y)
    assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-12)


@pytest.mark.parametrize("spectrum", [[1.0, 1.0, 1.0], [3.0, 1.0, 0.5]])
@pytest.mark.parametrize("method", ["proju", "logmap", "dist2", "transp", "from_ambient"])
def test_derivatives_at_repeated_eigenvalues(method: str, spectrum: list[float]) -> None:
    m = PSDFixedRank(5)
    x = orthogonal(5, 3) * torch.tensor(spectrum, dtype=torch.float64)
    # y^T x is symmetric with the same repetition
    y = x + 0.3 * x if method in ("logmap", "dist2") else point(5, 3, 2.0)
    arguments = {
        "transp": (x, y, torch.randn_like(x)),
        "from_ambient": (x, torch.randn(5, 5, dtype=torch.float64)),
    }.get(method, (x, y))
    arguments = tuple(t.requires_grad_() for t in arguments)
    assert torch.autograd.gradcheck(getattr(m, method), arguments)
    assert torch.autograd.gradgradcheck(getattr(m, method), arguments)


def test_float32_is_float64_at_condition_1e3() -> None:
    m = PSDFixedRank(40)
    x, y, u = point(40, 6, 1e3), point(40, 6, 10.0), torch.randn(40, 6, dtype=torch.float64)
    for method, arguments in {"proju": (x, u), "dist": (x, y), "logmap": (x, y), "transp": (x, y, u)}.items():
        single = getattr(m, method)(*(t.float() for t in arguments))
        assert single.dtype == torch.float32
        assert_relative(single.double(), getattr(m, method)(*arguments), 1e-4)


# -- use and misuse ----------------------------------------------------------------------------------------------------


def test_adam_finds_the_nearest_matrix_of_the_rank() -> None:
    m, target = PSDFixedRank(6), point(6, 6, 4.0)
    target = target @ target.mT
    best = m.best_rank_r(target, 2)
    optimum = (m.product(best) - target).square().sum()
    x = ManifoldParameter(m.origin(6, 2, dtype=torch.float64), manifold=m)
    optimizer = RiemannianAdam([x], lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1500)
    for _ in range(1500):
        optimizer.zero_grad()
        loss = (m.product(x) - target).square().sum()
        loss.backward()
        optimizer.step()
        scheduler.step()
    assert_close(loss.detach(), optimum, rtol=1e-6, atol=0)


def test_pairwise_distances() -> None:
    m, x, y = PSDFixedRank(4), torch.randn(3, 4, 2), torch.randn(5, 4, 2)
    expected = torch.stack([torch.stack([m.dist(a, b) for b in y]) for a in x])
    assert_close(m.pairwise_dist(x, y), expected)


@pytest.mark.parametrize("entry", [0.0, torch.nan, torch.inf])
def test_an_invalid_element_is_reported_and_gives_nan_for_itself_only(entry: float) -> None:
    m, x = PSDFixedRank(4), torch.randn(3, 4, 2, dtype=torch.float64)
    x[1, :, 1] = entry
    ok, reason = m.check_point_on_manifold(x, explain=True)
    assert not ok
    assert reason is not None
    assert ("[[1]]" if entry == 0 else "finite") in reason
    u = torch.randn_like(x)
    for result in (m.proju(x, u), m.transp(x[[0, 0, 2]], x, u)):
        assert result.flatten(1).isfinite().all(1).tolist() == [True, False, True]


def test_logarithm_is_nan_where_it_is_not_unique() -> None:
    m = PSDFixedRank(4)
    x, y = torch.eye(4, dtype=torch.float64).split(2, dim=-1)
    assert m.logmap(x, y).isnan().all()
    assert_close(m.dist(x, y), torch.tensor(2.0, dtype=torch.float64))


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="positive integer"):
        PSDFixedRank(0)
    m = PSDFixedRank(3)
    ok, reason = m.check_point_on_manifold(torch.randn(4, 2), explain=True)
    assert not ok
    assert "(4, 2)" in str(reason)
    with pytest.raises(ValueError, match="1 <= r <= 3"):
        m.best_rank_r(torch.eye(3), 4)
    with pytest.raises(ValueError, match="positive eigenvalues"):
        m.best_rank_r(-torch.eye(3), 1)
