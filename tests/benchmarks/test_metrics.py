"""Cost of every metric: against the bare matrix products, and against a loop over pymanopt.

Factors are taken a few at a time, below the size from which the allocator pages every fresh tensor in anew. Never
asserts a time; ``pytest -m benchmark --benchmark-enable -s tests/benchmarks/test_metrics.py``.
"""

from collections.abc import Callable

import numpy as np
import pymanopt.manifolds
import pytest
import torch
from torch import Tensor

from quotient_nets.interop import from_svd_tangent, to_svd_tangent, to_svd_triple
from quotient_nets.linalg import add_product, gram
from quotient_nets.manifolds import (
    EmbeddedFixedRank,
    FixedRankMatrices,
    InvariantFixedRank,
    PolarFixedRank,
    PreconditionedFixedRank,
    PSDFixedRank,
)
from tests.benchmarks.timing import side_by_side, table

METRICS: list[type[FixedRankMatrices]] = [
    InvariantFixedRank,
    PreconditionedFixedRank,
    EmbeddedFixedRank,
    PolarFixedRank,
]
SIZES = {"64": (768, 64, 12, 1), "1": (64, 1, 4096, 16)}
"""For a rank: rows of both factors, rank, pairs, and how many of these to one that goes through pymanopt."""
both_types = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def point(manifold: FixedRankMatrices, count: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Canonical points with the spectrum of a product of Gaussian factors."""
    g, h = (torch.randn(count, rows, rank, dtype=torch.float64) / rows**0.5 for rows in (manifold.n, manifold.m))
    pair = InvariantFixedRank(manifold.n, manifold.m)
    f = pair.frame(pair.pack_point(g, h))
    return manifold.from_frame(f.g, f.spectrum, f.h).to(dtype)


def products(g: Tensor, count: int) -> Callable[[], None]:
    """``count`` products ``(r x n)(n x r)``, or ``(n x r)(r x r)`` added to a factor, for each of the two factors."""
    small = torch.randn(len(g), g.shape[-1], g.shape[-1], dtype=g.dtype)

    def run() -> None:
        for i in range(2 * count):
            gram(g, g) if i % 2 else add_product(g, g, small)

    return run


def over(function: Callable[..., object], *columns: list) -> Callable[[], None]:
    """Call a function of pymanopt for one row after the other."""

    def run() -> None:
        for row in zip(*columns, strict=True):
            function(*row)

    return run


def embedded_in_pymanopt(size: int, rank: int, count: int, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    """Operations of pymanopt's ``FixedRankEmbedded``, and of ``PSDFixedRank`` where that has none, pair by pair."""
    m = EmbeddedFixedRank(size, size)
    theirs = pymanopt.manifolds.FixedRankEmbedded(size, size, rank)
    x, y = point(m, count, rank, dtype), point(m, count, rank, dtype)
    u = m.proju(x, 0.1 * torch.randn_like(x))
    starts, ends, vectors = (list(t.double().numpy()) for t in (x, y, u))
    triples, others = ([to_svd_triple(m, each) for each in points] for points in (starts, ends))
    tangents = [to_svd_tangent(m, *row) for row in zip(starts, triples, vectors, strict=True)]
    back = from_svd_tangent(m, starts[0], triples[0], tangents[0])
    np.testing.assert_allclose(back, vectors[0], rtol=0, atol=1e-5)  # the same vectors on both sides
    dense = list(np.random.default_rng(0).normal(size=(count, size, size)))
    psd = pymanopt.manifolds.PSDFixedRank(size, rank)
    arrays = [[array[:size] for array in points] for points in (starts, ends)]
    return {
        "inner": over(theirs.inner_product, triples, tangents, tangents),
        "projection": over(theirs.projection, triples, dense),
        "gradient": over(theirs.euclidean_to_riemannian_gradient, triples, triples),
        "retraction": over(theirs.retraction, triples, tangents),
        "transport": over(theirs.transport, triples, others, tangents),
        "PSD log": over(psd.log, *arrays),
        "PSD dist": over(psd.dist, *arrays),
    }


def costs(
    metric: type[FixedRankMatrices], rank: str, dtype: torch.dtype, references: dict[str, Callable[[], None]]
) -> str:
    """Table of one metric: operations at raw and at prepared points, against bare products and against references."""
    size, r, count, every = SIZES[rank]
    m = metric(size, size)
    x, y = point(m, count, r, dtype), point(m, count, r, dtype)
    space = m.at(x, balanced=True)
    c, e = space.random() * 0.1 * m.exponential_radius(x).clamp_max(1.0)[:, None, None], space.random()
    u, v = space.vector(c), torch.randn_like(x)
    terms = m.tangent_factors(y, v)
    # On a raw point, at a prepared one, how many products one factor needs, and what pymanopt has for it.
    rows: dict[str, tuple[Callable[[], object], Callable[[], object] | None, int, str]] = {
        "inner": (lambda: m.inner(x, u, v), lambda: space.inner(c, e), 1 if space.orthonormal else 3, "inner"),
        "proju": (lambda: m.proju(x, v), lambda: space.project(e), 2, "projection"),
        "egrad2rgrad": (lambda: m.egrad2rgrad(x, v), lambda: space.gradient(e), 2, "gradient"),
        "retr": (lambda: m.retr(x, u), lambda: space.move(c, "retr"), 1, "retraction"),
        "second_order": (lambda: m.second_order(x, u), lambda: space.move(c, "second_order"), 4, "retraction"),
        "transp": (lambda: m.transp(y, x, v), lambda: space.lift(*space.products(terms)), 6, "transport"),
        "ehess2rhess": (lambda: m.ehess2rhess(x, v, v, u), lambda: space.hessian(e, e, c), 8, ""),
        "expmap": (
            lambda: m.expmap(x, u, radius=0.1, check=False),
            lambda: space.move(c, "expmap", 0.1),
            4,
            "retraction",
        ),
    }
    if r == 1:
        rows["logmap"] = (lambda: m.logmap(x, y, check=False), None, 4, "PSD log")
        rows["dist"] = (lambda: m.dist(x, y), None, 2, "PSD dist")
    runs = {f"raw {name}": raw for name, (raw, _, _, _) in rows.items()}
    runs |= {f"prepared {name}": prepared for name, (_, prepared, _, _) in rows.items() if prepared}
    bare = sorted({number for _, _, number, _ in rows.values()})
    runs |= {f"bare {number}": products(space.g.contiguous(), number) for number in bare}
    times = side_by_side(runs | references, repeats=3)
    result: dict[str, dict[str, float | str]] = {}
    for name, (_, prepared, number, reference) in rows.items():
        raw, unit = times[f"raw {name}"], times[f"bare {number}"]
        result[name] = {"raw ms": 1e3 * raw, "products": str(number), "raw/bare": raw / unit}
        if prepared:
            result[name]["prepared/bare"] = times[f"prepared {name}"] / unit
        if reference:
            result[name] |= {"pymanopt/raw": every * times[reference] / raw, "its": reference}
    return table(f"{m.name}, {count} pairs of rank {r}, {dtype}", result)


@both_types
@pytest.mark.parametrize("rank", SIZES)
def test_operations_against_bare_products_and_pymanopt(
    report: Callable[[str], None], rank: str, dtype: torch.dtype
) -> None:
    size, r, count, every = SIZES[rank]
    references = embedded_in_pymanopt(size, r, count // every, dtype)
    for metric in METRICS:
        report(costs(metric, rank, dtype, references))


@both_types
def test_semidefinite_matrices_against_a_loop_over_pymanopt(report: Callable[[str], None], dtype: torch.dtype) -> None:
    for count, size, rank in ((32, 768, 64), (4096, 64, 1)):
        ours, theirs = PSDFixedRank(size), pymanopt.manifolds.PSDFixedRank(size, rank)
        x, y = (torch.randn(count, size, rank, dtype=dtype) for _ in range(2))
        u = ours.proju(x, torch.randn_like(x))
        xs, ys, us = ([t[i].double().numpy() for i in range(count)] for t in (x, y, u))
        pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "proju": (lambda m=ours, x=x, u=u: m.proju(x, u), over(theirs.projection, xs, us)),
            "retr": (lambda m=ours, x=x, u=u: m.retr(x, u), over(theirs.retraction, xs, us)),
            "expmap": (lambda m=ours, x=x, u=u: m.expmap(x, 0.1 * u), over(theirs.exp, xs, us)),
            "logmap": (lambda m=ours, x=x, y=y: m.logmap(x, y), over(theirs.log, xs, ys)),
            "dist": (lambda m=ours, x=x, y=y: m.dist(x, y), over(theirs.dist, xs, ys)),
        }
        runs = {f"{name}, ours": run for name, (run, _) in pairs.items()}
        runs |= {f"{name}, theirs": run for name, (_, run) in pairs.items()}
        times = side_by_side(runs, repeats=3)
        rows = {
            name: {
                "ms": 1e3 * times[f"{name}, ours"],
                "pymanopt/ours": times[f"{name}, theirs"] / times[f"{name}, ours"],
            }
            for name in pairs
        }
        report(table(f"PSDFixedRank, {count} factors {size}x{rank}, {dtype}", rows))
