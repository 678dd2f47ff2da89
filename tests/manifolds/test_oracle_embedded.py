"""The embedded metric against Manopt's ``fixedrankembeddedfactory`` and 90-digit numbers, by tangent matrices."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quotient_nets.manifolds import EmbeddedFixedRank

DATA = Path(__file__).parents[1] / "data"
CASES = json.loads((DATA / "manopt_fixedrankembedded.json").read_text())["cases"]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
DIGITS = 1e-12  # relative: the references are rounded to float64
ILL = 1e-10  # condition 1e4: the frame of a matrix given by rounded factors


class Setup:
    """A case as matrices, and its point as a pair of factors that is not balanced."""

    def __init__(self, case: dict[str, Any]):
        self.n, self.m, self.r = case["n"], case["m"], case["r"]
        self.manifold = EmbeddedFixedRank(self.n, self.m)
        self.inputs, self.exact, self.manopt = case["inputs"], case["exact"], case["manopt"]
        self.tolerance = ILL if case["name"].startswith("cond1e4") else DIGITS
        self.u, self.s, self.v = self.frame("")
        self.x = self.point(self.u, self.s, self.v)
        self.e = self.tangent(list(self.inputs["E"].values()))
        self.t = self.inputs["retr_t"]

    def frame(self, suffix: str) -> tuple[Tensor, Tensor, Tensor]:
        u, s, v = (self.inputs[f"{name}{suffix}"] for name in ("U", "s", "V"))
        return self.matrix(u, self.n), torch.tensor(s, dtype=torch.float64).flatten(), self.matrix(v, self.m)

    def point(self, u: Tensor, s: Tensor, v: Tensor) -> Tensor:
        element = self.manifold.random_element(self.r, condition=3.0)
        return self.manifold.action(self.manifold.from_frame(u, s, v), element)

    @staticmethod
    def matrix(numbers: Any, rows: int) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float64).reshape(rows, -1)

    def tangent(self, parts: list[Any], frame: tuple[Tensor, Tensor, Tensor] | None = None) -> Tensor:
        """Tangent matrix of ``(Up, M, Vp)``."""
        u, _, v = frame or (self.u, self.s, self.v)
        up, core, vp = (self.matrix(p, rows) for p, rows in zip(parts, (self.n, self.r, self.m), strict=True))
        return u @ core @ v.mT + up @ v.mT + u @ vp.mT

    def assert_relative(self, actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
        torch.testing.assert_close(
            actual, expected, rtol=0, atol=(tolerance or self.tolerance) * float(expected.norm())
        )


@each_case
def test_projection_and_inner_product(case: dict[str, Any]) -> None:
    s = Setup(case)
    m, z = s.manifold, s.matrix(s.inputs["Z"], s.n)
    u, e = m.from_ambient(s.x, z), m.from_ambient(s.x, s.e)
    for reference in (s.exact, s.manopt):
        s.assert_relative(m.to_ambient(s.x, u), s.tangent(reference["proj"]))
        scale = float(m.norm(s.x, u) * m.norm(s.x, e))
        assert float(m.inner(s.x, u, e)) == pytest.approx(reference["inner"], rel=0, abs=s.tolerance * scale)


@each_case
def test_gradient_and_hessian(case: dict[str, Any]) -> None:
    s = Setup(case)
    m = s.manifold
    weights, target = (s.matrix(s.inputs[key], s.n) for key in ("weights", "target"))

    def cost(x: Tensor) -> Tensor:
        return 0.5 * (weights * (m.product(x) - target).square()).sum()

    u = m.from_ambient(s.x, s.e)
    egrad, ehess = torch.func.jvp(torch.func.grad(cost), (s.x,), (u,))
    for reference in (s.exact, s.manopt):
        s.assert_relative(m.to_ambient(s.x, m.egrad2rgrad(s.x, egrad)), s.tangent(reference["rgrad"]))
        # The curvature term divides by the least singular value.
        hessian = m.to_ambient(s.x, m.ehess2rhess(s.x, egrad, ehess, u))
        s.assert_relative(hessian, s.tangent(reference["rhess"]), 1e-9 if s.tolerance == ILL else 1e-11)


@each_case
def test_transport(case: dict[str, Any]) -> None:
    s = Setup(case)
    m, there = s.manifold, s.frame("2")
    y = s.point(*there)
    moved = m.to_ambient(y, m.transp(s.x, y, m.from_ambient(s.x, s.e)))
    for reference in (s.exact, s.manopt):
        s.assert_relative(moved, s.tangent(reference["transp"], there))


@each_case
def test_retractions(case: dict[str, Any]) -> None:
    s = Setup(case)
    m, step = s.manifold, s.t * s.e
    for reference in (s.exact, s.manopt):
        nearest = m.best_rank_r(m.product(s.x) + step, s.r)
        s.assert_relative(m.product(nearest), s.matrix(reference["retr_X"], s.n))
    # Manopt's own is off by terms of order four: only the 90 digits count.
    y = m.orthographic(s.x, m.from_ambient(s.x, step))
    s.assert_relative(m.product(y), s.matrix(s.exact["retr_ortho_X"], s.n))
    s.assert_relative(m.to_ambient(s.x, m.inverse_orthographic(s.x, y)), step)
