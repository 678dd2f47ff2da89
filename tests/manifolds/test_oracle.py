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

from quotient_nets.manifolds import (
    EmbeddedFixedRank,
    FixedRank,
    FixedRankMatrices,
    InvariantFixedRank,
    PolarFixedRank,
    PreconditionedFixedRank,
)

DATA = Path(__file__).parents[1] / "data"
FILES: dict[type[FixedRank], str] = {
    InvariantFixedRank: "manopt_2factors.json",
    PreconditionedFixedRank: "manopt_2factors_preconditioned.json",
}
CASES = [
    {**case, "metric": metric}
    for metric, name in FILES.items()
    for case in json.loads((DATA / name).read_text())["cases"]
]
GEODESICS = json.loads((DATA / "exact_geodesics.json").read_text())
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['metric'].__name__}-{case['name']}")

DIGITS = 1e-12  # relative: the references are rounded to float64
ILL = 1e-10  # condition 1e4: inputs rounded to float64 do not have an exactly horizontal direction


def tolerance(case: dict[str, Any]) -> float:
    return ILL if case["name"].startswith("cond1e4") else DIGITS


class Setup:
    """A case as tensors of ours."""

    def __init__(self, case: dict[str, Any]):
        self.manifold: FixedRank = case["metric"](case["n"], case["m"])
        self.inputs, self.exact, self.manopt = case["inputs"], case["exact"], case["manopt"]
        self.x = self.stack([self.inputs["G"], self.inputs["H"]])
        names = ("Z", "W", "eta", "egrad", "ehess_eta")
        self.z, self.w, self.eta, self.egrad, self.ehess = (self.stack(self.inputs[key]) for key in names)

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
    """Covariant derivative of the gradient, in closed form and by three directions: the form is symmetric."""
    s = Setup(case)
    rhess = s.stack(s.exact["rhess"])
    error = s.manifold.ehess2rhess(s.x, s.egrad, s.ehess, s.eta) - rhess
    assert float(s.manifold.norm(s.x, error)) <= ILL * (1 + float(s.manifold.norm(s.x, rhess)))
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
    s = Setup(next(other for other in CASES if other["name"] == case["name"]))  # the invariant metric comes first
    for t, expected in zip(case["t"], case["X"], strict=True):
        actual = s.manifold.product(s.manifold.expmap(s.x, t * s.eta))
        assert_relative(actual, matrix(expected, s.manifold.n), tolerance(case))


KINDS: dict[str, type[FixedRankMatrices]] = {
    "inv": InvariantFixedRank,
    "polar": PolarFixedRank,
    "mix": PreconditionedFixedRank,
    "embedded": EmbeddedFixedRank,
}


@pytest.mark.parametrize("case", GEODESICS["rank1"])
@pytest.mark.parametrize("kind", KINDS)
def test_distance_and_logarithm_of_rank_one(case: dict[str, Any], kind: str) -> None:
    u1, v1, u2, v2 = (torch.tensor(case[k], dtype=torch.float64)[:, None] for k in ("u1", "v1", "u2", "v2"))
    s1, s2 = (torch.tensor([case[k]], dtype=torch.float64) for k in ("sigma1", "sigma2"))
    m = KINDS[kind](len(u1), len(v1))
    x, y = m.from_frame(u1, s1, v1), m.from_frame(u2, s2, v2)
    assert float(m.dist(x, y)) == pytest.approx(case["dist"][kind], rel=DIGITS)
    if not case["dist"].get(f"{kind}_minimising_geodesic_exists", True):
        with pytest.raises(ValueError, match="the shortest way between the matrices leads through zero"):
            m.logmap(x, y)
        assert bool(m.logmap(x, y, check=False).isnan().all())
        assert float(m.dist(x, y)) == pytest.approx(float(s1 + s2) / math.sqrt(2), rel=DIGITS)
        return
    u = m.logmap(x, y)
    assert float(m.norm(x, u)) == pytest.approx(case["dist"][kind], rel=DIGITS)
    assert_relative(m.product(m.expmap(x, u)), m.product(y), DIGITS)
