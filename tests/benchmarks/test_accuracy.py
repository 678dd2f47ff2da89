"""How exact results are and how often a logarithm is found: the figures that the documentation refers to.

``pytest -m benchmark --benchmark-enable -s tests/benchmarks/test_accuracy.py``.
"""

import json
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quotient_nets.manifolds import (
    ComplexRankOne,
    EmbeddedFixedRank,
    FixedRankMatrices,
    InvariantFixedRank,
    PolarFixedRank,
    PreconditionedFixedRank,
)
from tests.benchmarks.timing import table
from tests.manifolds.test_oracle import DATA, FILES
from tests.manifolds.test_oracle import Setup as PairCase
from tests.manifolds.test_polar import Setup as PolarCase


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def test_projections_against_ninety_digits_and_manopt(report: Callable[[str], None]) -> None:
    files = {metric.__name__: name for metric, name in FILES.items()} | {"PolarFixedRank": "manopt_3factors.json"}
    rows: dict[str, dict[str, float | str]] = {}
    for metric, name in files.items():
        for case in json.loads((DATA / name).read_text())["cases"]:
            own = [m for m in FILES if m.__name__ == metric]
            s = PairCase({**case, "metric": own[0]}) if own else PolarCase(case)
            rows[f"{metric}, {case['name']}"] = {
                "Manopt": case["manopt_rel_err_vs_exact"]["proj"],
                "ours": relative(s.manifold.proju(s.x, s.z), s.stack(s.exact["proj"])),
            }
    report(table("Relative error of the projection, reference 90 digits; Manopt as recorded in tests/data", rows))


@pytest.mark.parametrize("starts", [0, 8])
def test_logarithms_of_a_twenty_pairs(report: Callable[[str], None], starts: int) -> None:
    rows: dict[str, dict[str, float | str]] = {}
    for metric in (InvariantFixedRank, PolarFixedRank, PreconditionedFixedRank, EmbeddedFixedRank):
        m: FixedRankMatrices = metric(8, 6)
        generator = torch.Generator().manual_seed(0)
        polar = isinstance(m, PolarFixedRank)
        x = m.origin(20, 17 if polar else 14, 3, dtype=torch.float64)
        length = (0.9 * m.exponential_radius(x)).clamp_max(3.0)
        space = m.at(x)
        y = m.expmap(x, space.vector(length[:, None, None] * space.random(generator)))
        began = time.process_time()
        found = m.logmap_report(x, y, starts=starts)
        seconds = time.process_time() - began
        as_short = found.converged & (found.length <= length * (1 + 1e-6))
        shorter = as_short & (found.length < length * (1 - 1e-6))
        rows[m.name] = {
            "median length": float(length.median()),
            "reached": str(int(found.converged.sum())),
            "no longer": str(int(as_short.sum())),
            "shorter": str(int(shorter.sum())),
            "confirmed": str(int(found.confirmed.sum())),
            "s per pair": seconds / 20,
        }
    report(table(f"Logarithms of 20 pairs (x, exp_x v), rank 3, {starts} short paths as first guesses", rows))


def test_logarithms_of_independent_points(report: Callable[[str], None]) -> None:
    """Where nobody knows whether a shortest geodesic exists: in the metrics that are not complete it need not."""
    pair = InvariantFixedRank(8, 6)
    rows: dict[str, dict[str, float | str]] = {}
    for metric in (InvariantFixedRank, PolarFixedRank, PreconditionedFixedRank, EmbeddedFixedRank):
        m: FixedRankMatrices = metric(8, 6)
        factors = torch.randn(2, 10, 14, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        x, y = (m.from_frame(f.g, f.spectrum, f.h) for f in map(pair.frame, factors))
        began = time.process_time()
        found = m.logmap_report(x, y)
        seconds = time.process_time() - began
        rows[m.name] = {
            "reached": str(int(found.converged.sum())),
            "confirmed": str(int(found.confirmed.sum())),
            "s per pair": seconds / 10,
        }
    report(table("Logarithms of 10 pairs of products of Gaussian factors, rank 2", rows))


def test_complex_matrices_of_rank_one(report: Callable[[str], None]) -> None:
    count, n, m = 2000, 64, 48
    manifold = ComplexRankOne(n, m)
    columns: dict[str, dict[str, float]] = {}
    for dtype in (torch.float64, torch.float32):
        torch.manual_seed(0)
        x, y, noise = (torch.randn(count, n + m, 2, dtype=dtype) for _ in range(3))
        modulus = 10 ** (8 * torch.rand(count, 1, 1, dtype=torch.float64) - 4)
        a = (manifold.random_element(count, 2) * modulus).to(dtype)
        u = manifold.proju(x, noise)
        u = 1.9 * u / manifold.norm(x, u)[:, None, None]
        end = manifold.expmap(x, u)
        log = manifold.logmap(x, manifold.action(end, a))
        moved, pushed = manifold.action(x, a), manifold.action(u, a)
        other = manifold.expmap(moved, pushed)
        errors = {
            "d(x, y) - d(y, x)": manifold.dist(x, y) - manifold.dist(y, x),
            "log(exp u) - u for |u| = 1.9, end moved by the group": manifold.norm(x, log - u),
            "vertical part of a logarithm": manifold.norm(x, log - manifold.proju(x, log)),
            "exponential at another representative": manifold.norm(other, other - manifold.action(end, a)),
        }
        columns[str(dtype)] = {name: float(e.abs().max()) for name, e in errors.items()}
    names = next(iter(columns.values()))
    rows = {name: {dtype: errors[name] for dtype, errors in columns.items()} for name in names}
    report(table(f"Largest error over {count} pairs, n = {n}, m = {m}, moduli 1e-4 to 1e4", rows))
