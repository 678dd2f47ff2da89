"""Numbers computed elsewhere: Manopt 8.0 and 90-digit evaluations of the defining equations.

The second derivative of the cost along the geodesic is the quadratic form of the Riemannian Hessian.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from quotient_nets.manifolds import InvariantFixedRank

DATA = Path(__file__).parents[1] / "data"
CASES = json.loads((DATA / "manopt_2factors.json").read_text())["cases"]
GEODESICS = json.loads((DATA / "exact_geodesics.json").read_text())
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])

DIGITS = 1e-12  # relative: the references are rounded to float64
ILL = 1e-10  # condition 1e4: inputs rounded to float64 do not have an exactly horizontal direction


def tolerance(case: dict[str, Any]) -> float:
    return ILL if case["name"].startswith("cond1e4") else DIGITS


class Setup:
    """A case as tensors of ours."""

    def __init__(self, case: dict[str, Any]):
        self.manifold = InvariantFixedRank(case["n"], case["m"])
        self.inputs, self.exact, self.manopt = case["inputs"], case["exact"], case["manopt"]
        self.x = self.stack([self.inputs["G"], self.inputs["H"]])
        self.z, self.w, self.eta, self.egrad = (self.stack(self.inputs[key]) for key in ("Z", "W", "eta", "egrad"))

    def stack(self, pair: list[Any]) -> Tensor:
        m = self.manifold
        return torch.cat([matrix(part, rows) for part, rows in zip(pair, (m.n, m.m), strict=True)])

    def cost(self, x: Tensor) -> Tensor:
        m = self.manifold
        weights, target = (matrix(self.inputs[key], m.n) for key in ("weights", "target"))
        return 0.5 * (weights * (m.product(x) - target).square()).sum()


def matrix(numbers: Any, rows: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64).reshape(rows, -1)


def assert_relative(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert_close(actual, expected, rtol=0, atol=tolerance * float(expected.norm()))


@each_case
def test_inner_product(case: dict[str, Any]) -> None:
    s = Setup(case)
    m = s.manifold
    proj = m.proju(s.x, s.z), m.proju(s.x, s.w)
    numbers = {
        "inner_ambient": m.inner(s.x, s.z, s.w),
        "inner_proj": m.inner(s.x, *proj),
        "norm_proj": m.norm(s.x, proj[0]),
    }
    for name, actual in numbers.items():
        scale = m.norm(s.x, s.z) * (m.norm(s.x, s.w) if "inner" in name else 1)
        bound = float(tolerance(case) * scale)
        assert actual.item() == pytest.approx(s.exact[name], rel=0, abs=bound), name


@each_case
def test_projection(case: dict[str, Any]) -> None:
    s = Setup(case)
    actual = s.manifold.proju(s.x, s.z)
    assert_relative(actual, s.stack(s.exact["proj"]), tolerance(case))
    assert_relative(actual, s.stack(s.manopt["proj"]), 1e-10)  # its Sylvester equation squares cond(X)


@each_case
def test_gradient(case: dict[str, Any]) -> None:
    s = Setup(case)
    assert_relative(torch.func.grad(s.cost)(s.x), s.egrad, DIGITS)
    actual = s.manifold.egrad2rgrad(s.x, s.egrad)
    assert_relative(actual, s.stack(s.exact["rgrad"]), DIGITS)
    assert_relative(actual, s.stack(s.manopt["rgrad"]), DIGITS)


@each_case
def test_retraction(case: dict[str, Any]) -> None:
    s = Setup(case)
    y = s.manifold.retr(s.x, s.manopt["retr_t"] * s.eta)
    assert_relative(y, s.stack(s.exact["retr_unscaled"]), DIGITS)
    for reference in (s.exact, s.manopt):  # Manopt rescales the factors: same matrix
        assert_relative(s.manifold.product(y), matrix(reference["retr_X"], s.manifold.n), DIGITS)


@each_case
@pytest.mark.parametrize("path", ["expmap", "second_order"])
def test_second_derivative_along_the_geodesic(case: dict[str, Any], path: str) -> None:
    s = Setup(case)
    follow = getattr(s.manifold, path)
    t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(s.cost(follow(s.x, t * s.eta)), t, create_graph=True)
    (second,) = torch.autograd.grad(first, t)
    for reference in (s.exact, s.manopt):
        assert second.item() == pytest.approx(reference["rhess_quad"], rel=ILL)
    assert_close(first.detach(), (s.egrad * s.eta).sum(), rtol=0, atol=float(DIGITS * s.egrad.norm()))


@each_case
def test_hessian(case: dict[str, Any]) -> None:
    """Covariant derivative of the gradient, by three directions: the form is symmetric."""
    s = Setup(case)
    rhess = s.stack(s.exact["rhess"])
    for v in (s.manifold.proju(s.x, torch.randn_like(s.x)) for _ in range(3)):
        mixed = 0.25 * (second_derivative(s, s.eta + v) - second_derivative(s, s.eta - v))
        scale = float(s.manifold.norm(s.x, v) * s.manifold.norm(s.x, rhess)) + 1.0
        assert_close(mixed, s.manifold.inner(s.x, rhess, v), rtol=0, atol=ILL * scale)


def second_derivative(s: Setup, u: Tensor) -> Tensor:
    t = torch.zeros((), dtype=torch.float64)
    along = torch.func.grad(lambda t: s.cost(s.manifold.expmap(s.x, t * u)))
    return torch.func.grad(along)(t)


@pytest.mark.parametrize("case", GEODESICS["inv"], ids=lambda case: case["name"])
def test_geodesic(case: dict[str, Any]) -> None:
    s = Setup(next(other for other in CASES if other["name"] == case["name"]))
    for t, expected in zip(case["t"], case["X"], strict=True):
        actual = s.manifold.product(s.manifold.expmap(s.x, t * s.eta))
        assert_relative(actual, matrix(expected, s.manifold.n), tolerance(case))


@pytest.mark.parametrize("case", GEODESICS["rank1"])
def test_geodesic_of_rank_one_joins_two_points_at_their_distance(case: dict[str, Any]) -> None:
    u1, v1, u2, v2 = (torch.tensor(case[k], dtype=torch.float64) for k in ("u1", "v1", "u2", "v2"))
    s1, s2 = case["sigma1"], case["sigma2"]
    m = InvariantFixedRank(len(u1), len(v1))
    x = torch.cat([u1, v1])[:, None] * s1**0.5

    def turn(p: Tensor, q: Tensor) -> Tensor:
        across = q - (p @ q) * p
        return torch.atan2(across.norm(), p @ q) * across / across.norm()

    def logarithm(sign: float) -> Tensor:
        grow = 0.5 * math.log(s2 / s1)
        factors = [grow * p + turn(p, sign * q) for p, q in ((u1, u2), (v1, v2))]
        return torch.cat(factors)[:, None] * s1**0.5

    u = min((logarithm(sign) for sign in (1.0, -1.0)), key=lambda u: m.norm(x, u))
    assert_relative(m.product(m.expmap(x, u)), s2 * torch.outer(u2, v2), DIGITS)
    assert m.norm(x, u).item() == pytest.approx(case["dist"]["inv"], rel=DIGITS)
