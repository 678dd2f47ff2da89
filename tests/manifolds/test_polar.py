"""Fixed-rank matrices by polar factorisation: numbers computed elsewhere, the laws, the group."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import jvp, vjp
from torch.testing import assert_close

from quotient_nets.manifolds import InvariantFixedRank, PolarFixedRank, QuotientManifold
from tests.cases import DISTANCES, FIXED_RANK_OPERATIONS, Operation
from tests.strategies import orthogonal, ranks

DATA = Path(__file__).parents[1] / "data"
CASES = json.loads((DATA / "manopt_3factors.json").read_text())["cases"]
GEODESICS = json.loads((DATA / "exact_geodesics.json").read_text())["polar"]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])

ROUNDING = 1e-10
ILL = 1e-10  # condition 1e4: inputs rounded to float64 do not have an exactly horizontal direction
OPERATIONS = [op for op in FIXED_RANK_OPERATIONS if op.method != "ehess2rhess"]


def point(n: int, m: int, r: int, condition: float, batch: tuple[int, ...] = ()) -> Tensor:
    s = torch.logspace(0, -1, r, base=condition, dtype=torch.float64)
    p = orthogonal(*batch, r, r)
    return PolarFixedRank(n, m).pack_point(orthogonal(*batch, n, r), (p * s) @ p.mT, orthogonal(*batch, m, r))


@st.composite
def points(draw: st.DrawFn, condition: float = 1e4) -> tuple[PolarFixedRank, Tensor]:
    n, m, r = draw(ranks())
    torch.manual_seed(draw(st.integers(0, 2**32 - 1)))
    base = condition ** draw(st.floats(0, 1))
    return PolarFixedRank(n, m), point(n, m, r, base, draw(st.sampled_from([(), (3,)])))


def tangent(m: PolarFixedRank, x: Tensor) -> Tensor:
    """Random ambient vector, of the size of ``B`` in its part."""
    u, b, v = (torch.randn_like(t) for t in m.unpack_tensor(x))
    core = m.unpack_tensor(x)[1]
    return m.pack_point(u, core @ b @ core / torch.linalg.matrix_norm(core, ord=2, keepdim=True), v)


def size(m: PolarFixedRank, x: Tensor, u: Tensor) -> Tensor:
    return m.norm(x, u).clamp_min(1.0)


def assert_near(m: PolarFixedRank, x: Tensor, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert bool((m.norm(x, actual - expected) <= tolerance * size(m, x, expected)).all())


class Setup:
    """A case as tensors of ours."""

    def __init__(self, case: dict[str, Any]):
        self.manifold = PolarFixedRank(case["n"], case["m"])
        self.inputs, self.exact, self.manopt, self.r = case["inputs"], case["exact"], case["manopt"], case["r"]
        self.x = self.stack([self.inputs[key] for key in "UBV"])
        names = ("Z", "W", "eta", "egrad", "ehess_eta")
        self.z, self.w, self.eta, self.egrad, self.ehess = (self.stack(self.inputs[key]) for key in names)
        self.tolerance = ILL if case["name"].startswith("cond1e4") else 1e-12

    def stack(self, parts: list[Any]) -> Tensor:
        return torch.cat([torch.tensor(part, dtype=torch.float64).reshape(-1, self.r) for part in parts])

    def matrix(self, numbers: Any) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float64).reshape(self.manifold.n, -1)

    def assert_relative(self, actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
        bound = (tolerance or self.tolerance) * float(expected.norm())
        assert_close(actual, expected, rtol=0, atol=bound)


@each_case
def test_agrees_with_numbers_computed_elsewhere(case: dict[str, Any]) -> None:
    s = Setup(case)
    m = s.manifold
    z, w = m.proju(s.x, s.z), m.proju(s.x, s.w)
    s.assert_relative(z, s.stack(s.exact["proj"]))
    scale = float(m.norm(s.x, z) * m.norm(s.x, w))
    assert float(m.inner(s.x, z, w)) == pytest.approx(s.exact["inner_proj"], rel=0, abs=s.tolerance * scale)
    assert float(m.norm(s.x, z)) == pytest.approx(s.exact["norm_proj"], rel=s.tolerance)
    s.assert_relative(m.egrad2rgrad(s.x, s.egrad), s.stack(s.exact["rgrad"]))
    rhess = m.ehess2rhess(s.x, s.egrad, s.ehess, s.eta)
    # At condition 1e4 the direction, rounded, is horizontal to 1e-12 only, and B^-1 multiplies that by 1e4.
    s.assert_relative(rhess, s.stack(s.exact["rhess"]), 1e-8 if s.tolerance == ILL else 1e-11)
    assert float(m.inner(s.x, rhess, s.eta)) == pytest.approx(s.exact["rhess_quad"], rel=1e-10)
    assert m.dimension(s.r) == s.manopt["dim"]


@each_case
def test_agrees_with_manopt(case: dict[str, Any]) -> None:
    s = Setup(case)
    loose = 1e-7 if s.tolerance == ILL else 1e-10  # its Sylvester equation squares the condition
    s.assert_relative(s.manifold.proju(s.x, s.z), s.stack(s.manopt["proj"]), loose)
    s.assert_relative(s.manifold.egrad2rgrad(s.x, s.egrad), s.stack(s.manopt["rgrad"]), loose)


@pytest.mark.parametrize("case", GEODESICS, ids=lambda case: case["name"])
def test_geodesic_agrees_with_ninety_digits(case: dict[str, Any]) -> None:
    s = Setup(next(other for other in CASES if other["name"] == case["name"]))
    for t, expected in zip(case["t"], case["X"], strict=True):
        s.assert_relative(s.manifold.product(s.manifold.expmap(s.x, t * s.eta)), s.matrix(expected))


@pytest.mark.parametrize(("n", "m", "r"), [(5, 4, 2), (4, 3, 1), (3, 3, 3)])
def test_geodesic_is_that_of_the_three_manifolds(n: int, m: int, r: int) -> None:
    """Dense matrix exponentials: Edelman's for the Stiefel manifold, the affine-invariant one for ``B``."""
    manifold, x = PolarFixedRank(n, m), point(n, m, r, 5.0)
    u = manifold.proju(x, torch.randn_like(x))
    parts = [(p.numpy(), d.numpy()) for p, d in zip(*map(manifold.unpack_tensor, (x, u)), strict=True)]
    expected = []
    for i, (p, d) in enumerate(parts):
        if i == 1:
            expected.append(scipy.linalg.expm(d @ np.linalg.inv(p)) @ p)
            continue
        a, eye = p.T @ d, np.eye(r)
        block = scipy.linalg.expm(np.block([[a, -d.T @ d], [eye, a]]))
        expected.append(np.hstack([p, d]) @ block[:, :r] @ scipy.linalg.expm(-a))
    assert_close(manifold.expmap(x, u), torch.from_numpy(np.vstack(expected)), rtol=1e-11, atol=1e-12)


@given(points())
def test_projection_is_orthogonal_on_horizontal_vectors(case: tuple[PolarFixedRank, Tensor]) -> None:
    m, x = case
    u, v = tangent(m, x), tangent(m, x)
    once = m.proju(x, u)
    assert_near(m, x, m.proju(x, once), once, ROUNDING)
    assert_near(m, x, m.proju(x, 2 * u - 3 * v), 2 * once - 3 * m.proju(x, v), ROUNDING)
    difference = m.inner(x, once, v) - m.inner(x, u, m.proju(x, v))
    assert bool((difference.abs() <= ROUNDING * size(m, x, u) * size(m, x, v)).all())
    vertical = m.infinitesimal_action(x, torch.randn(*x.shape[:-2], x.shape[-1], x.shape[-1]).double())
    assert_near(m, x, m.proju(x, vertical), 0 * x, ROUNDING * float(size(m, x, vertical).max()))
    assert m.check_vector_on_tangent(x, once)


@given(points(condition=1e2))  # the default inverts a Gram matrix of condition cond(B)^2
def test_projection_of_a_tangent_vector_is_the_generic_one(case: tuple[PolarFixedRank, Tensor]) -> None:
    m, x = case
    # Vectors tangent to the three manifolds: horizontal ones and vertical ones.
    vertical = m.infinitesimal_action(x, torch.randn(*x.shape[:-2], x.shape[-1], x.shape[-1]).double())
    u = m.proju(x, tangent(m, x)) + vertical
    assert_near(m, x, m.proju(x, u), QuotientManifold.proju(m, x, u), 1e-8)


@given(points())
def test_projection_has_the_rank_of_the_dimension(case: tuple[PolarFixedRank, Tensor]) -> None:
    m, x = case
    x = x.reshape(-1, *x.shape[-2:])[0]
    basis = torch.eye(x.numel(), dtype=x.dtype).reshape(-1, *x.shape)
    trace = m.proju(x, basis).reshape(x.numel(), -1).trace()
    assert float(trace) == pytest.approx(m.dimension(x.shape[-1]), abs=1e-6)


@given(points())
def test_gradient_represents_the_derivative(case: tuple[PolarFixedRank, Tensor]) -> None:
    m, x = case
    u, e = m.proju(x, tangent(m, x)), torch.randn_like(x)
    gradient, change = m.egrad2rgrad(x, e), (e * u).sum((-2, -1))
    assert bool(((m.inner(x, gradient, u) - change).abs() <= 1e-9 * size(m, x, gradient) * size(m, x, u)).all())


@given(points())
def test_weights_between_singular_vectors(case: tuple[PolarFixedRank, Tensor]) -> None:
    """The metric of the matrices, and the invariant metric as its bounds."""
    m, x = case
    u = m.proju(x, tangent(m, x))
    f, z = m.frame(x), m.to_ambient(x, u)
    i, j = f.spectrum.unsqueeze(-1), f.spectrum.unsqueeze(-2)
    core = f.g.mT @ z @ f.h
    up, vp = z @ f.h - f.g @ core, z.mT @ f.g - f.h @ core.mT
    symmetric, skew = (core + core.mT) / 2, (core - core.mT) / 2
    square = (2 * symmetric**2 / (i**2 + j**2) + 2 * skew**2 / (i + j) ** 2).sum((-2, -1))
    square = square + ((up / j) ** 2).sum((-2, -1)) + ((vp / j) ** 2).sum((-2, -1))
    assert_close(m.inner(x, u), square, rtol=1e-7, atol=1e-9)  # the reference divides by s twice
    pair = InvariantFixedRank(m.n, m.m)
    y = pair.from_frame(f.g, f.spectrum, f.h)
    least = pair.inner(y, pair.from_ambient(y, z))
    assert bool((least <= m.inner(x, u) * (1 + 1e-9)).all())
    assert bool((m.inner(x, u) <= 2 * least * (1 + 1e-9)).all())


@given(points(condition=1e2), st.sampled_from(OPERATIONS + DISTANCES))
def test_operations_commute_with_rotations_of_either_kind(case: tuple[PolarFixedRank, Tensor], op: Operation) -> None:
    m, x = case
    if op in DISTANCES and x.shape[-1] > 1:
        return  # tests of the logarithm
    r, batch = x.shape[-1], x.shape[:-2]
    a, b = m.random_element(*batch, r), m.random_element(*batch, r)
    b = b * torch.cat([-torch.ones(1, dtype=b.dtype), torch.ones(r - 1, dtype=b.dtype)])
    y = m.expmap(x, 0.3 * m.proju(x, tangent(m, x)))
    u = 0.3 * m.proju(x, tangent(m, x))
    given_ = {"x": x, "y": y, "u": u, "v": tangent(m, x), "e": torch.randn_like(x)}
    moved = {"x": m.action(x, a), "y": m.action(y, b)}
    for role in "uv":
        moved[role] = jvp(lambda p: m.action(p, a), (x,), (given_[role],))[1]
    moved["e"] = vjp(lambda p: m.action(p, a.mT), moved["x"])[1](given_["e"])[0]
    actual, expected = op(m, moved), op(m, given_)
    if op.gives:
        back = b.mT if op.gives == "w" else a.mT
        actual = m.action(actual, back)
    scale = max(1.0, float(expected.abs().max()))
    assert_close(actual, expected, rtol=0, atol=1e-9 * scale)


@given(points(condition=1e2))
def test_paths_stay_on_the_manifold_and_have_their_order(case: tuple[PolarFixedRank, Tensor]) -> None:
    m, x = case
    u = m.proju(x, tangent(m, x))
    u = u / m.norm(x, u, keepdim=True).clamp_min(1e-300)
    one = torch.ones((), dtype=x.dtype)
    y, w = jvp(lambda t: m.expmap(x, t * u), (0.7 * one,), (one,))
    assert_close(m.norm(y, w), m.norm(x, u), rtol=1e-9, atol=1e-9)
    assert_near(m, y, m.proju(y, w), w, 1e-9)
    assert_close(m.expmap(x, u, radius=1.1), m.expmap(x, u), rtol=0, atol=1e-12)
    for path in (m.expmap, m.retr, m.second_order):
        assert m.check_point_on_manifold(path(x, u), atol=1e-11, rtol=0, explain=True) == (True, None)
        assert_close(path(x, 0 * u), x, rtol=0, atol=0)
    errors = [m.norm(x, m.second_order(x, t * u) - m.expmap(x, t * u)).norm() for t in (1e-2, 2e-2)]
    assert errors[1] < 1e-13 or float(torch.log2(errors[1] / errors[0])) == pytest.approx(3, abs=0.2)


@pytest.mark.parametrize(("n", "m", "r"), [(5, 4, 2), (4, 3, 1), (3, 3, 3)])
def test_transport_and_ambient_matrices(n: int, m: int, r: int) -> None:
    manifold, x, y = PolarFixedRank(n, m), point(n, m, r, 10.0, (3,)), point(n, m, r, 10.0, (3,))
    u = manifold.proju(x, torch.randn_like(x))
    z = manifold.to_ambient(x, u)
    assert_close(z, jvp(manifold.product, (x,), (u,))[1], rtol=0, atol=1e-12)
    assert_close(manifold.from_ambient(x, z), u, rtol=0, atol=1e-11)
    f = manifold.frame(y)
    left, right = f.g @ f.g.mT, f.h @ f.h.mT
    projected = left @ z + z @ right - left @ z @ right
    moved = manifold.transp(x, y, u)
    assert_close(manifold.to_ambient(y, moved), projected, rtol=0, atol=1e-11)
    assert_close(manifold.proju(y, moved), moved, rtol=0, atol=1e-11)
    target = manifold.orthographic(x, 0.2 * u)
    assert manifold.check_point_on_manifold(target)
    assert_close(manifold.inverse_orthographic(x, target), 0.2 * u, rtol=0, atol=1e-11)
    best = manifold.best_rank_r(z, r)
    assert manifold.check_point_on_manifold(best)
    svds = [scipy.linalg.svd(a.numpy(), full_matrices=False) for a in z]
    expected = np.stack([p[:, :r] * s[:r] @ qt[:r] for p, s, qt in svds])
    assert_close(manifold.product(best), torch.from_numpy(expected), rtol=0, atol=1e-12)


def test_float32_agrees_with_float64_at_condition_1000() -> None:
    m, x = PolarFixedRank(64, 48), point(64, 48, 8, 1e3, (20,)).float()
    u = m.proju(x.double(), tangent(m, x.double()) / 10).float()
    for method in (m.proju, m.retr, m.expmap, m.egrad2rgrad):
        actual, expected = method(x, u).double(), method(x.double(), u.double())
        base = 0 * expected if method in (m.proju, m.egrad2rgrad) else x.double()
        error = m.norm(x.double(), actual - expected)
        assert bool((error <= 1e-4 * m.norm(x.double(), expected - base).clamp_min(0.1)).all()), method.__name__


def test_checks_say_what_is_wrong() -> None:
    m, x = PolarFixedRank(4, 3), point(4, 3, 2, 3.0)
    u, b, v = m.unpack_tensor(x)
    wrong = {
        "orthonormal columns of U": m.pack_point(2 * u, b, v),
        "orthonormal columns of V": m.pack_point(u, b, v + 0.1),
        "symmetric B": m.pack_point(u, b + torch.tensor([[0.0, 0.1], [0.0, 0.0]]), v),
        "rank deficient": m.pack_point(u, torch.diag(torch.tensor([1.0, 0.0])).double(), v),
        "NaN or Inf": x * torch.nan,
    }
    assert m.check_point_on_manifold(x, explain=True) == (True, None)
    for reason, bad in wrong.items():
        ok, why = m.check_point_on_manifold(bad, explain=True)
        assert not ok
        assert reason in why
    with pytest.raises(ValueError, match=r"must have shape \(\.\.\., 4 \+ r \+ 3, r\)"):
        m.random(7, 2)
    with pytest.raises(ValueError, match="expected factors of shapes"):
        m.pack_point(u, v, b)
