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
ROWS, RANK, CHUNK = 768, 64, 12
EVERY = 16  # of 4096 pairs every 16th goes through pymanopt; the time is multiplied
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
            g.mT @ g if i % 2 else torch.baddbmm(g, g, small)

    return run


def over(function: Callable[..., object], *columns: list) -> Callable[[], None]:
    """Call a function of pymanopt for one row after the other."""

    def run() -> None:
        for row in zip(*columns, strict=True):
            function(*row)

    return run


@both_types
@pytest.mark.parametrize("metric", METRICS)
def test_operations_against_bare_products(
    report: Callable[[str], None], metric: type[FixedRankMatrices], dtype: torch.dtype
) -> None:
    m = metric(ROWS, ROWS)
    x, y = point(m, CHUNK, RANK, dtype), point(m, CHUNK, RANK, dtype)
    space = m.at(x, balanced=True)
    length = 0.1 * m.exponential_radius(x).clamp_max(1.0)[:, None, None]
    c, e = space.random() * length, space.random()
    u, v = space.vector(c), torch.randn_like(x)
    terms = m.tangent_factors(y, v)
    g = space.g.contiguous()
    # Operation at a prepared point, the same on a raw point, and how many products one factor needs.
    rows: dict[str, tuple[Callable[[], object], Callable[[], object], int]] = {
        "project": (lambda: space.project(e), lambda: m.proju(x, v), 2),
        "gradient": (lambda: space.gradient(e), lambda: m.egrad2rgrad(x, v), 2),
        "second_order": (lambda: space.move(c, "second_order"), lambda: m.second_order(x, u), 4),
        "transport": (lambda: space.lift(*space.products(terms)), lambda: m.transp(y, x, v), 6),
        "hessian": (lambda: space.hessian(e, e, c), lambda: m.ehess2rhess(x, v, v, u), 8),
        "expmap": (lambda: space.move(c, "expmap", 0.1), lambda: m.expmap(x, u, radius=0.1, check=False), 4),
    }
    times = side_by_side(
        {f"{name}, prepared": run for name, (run, _, _) in rows.items()}
        | {f"{name}, raw": run for name, (_, run, _) in rows.items()}
        | {f"{count} products": products(g, count) for count in (2, 4, 6, 8)},
        repeats=3,
    )
    result = {
        name: {
            "bare s": (bare := times[f"{count} products"]),
            "products": str(count),
            "prepared/bare": times[f"{name}, prepared"] / bare,
            "raw/bare": times[f"{name}, raw"] / bare,
        }
        for name, (_, _, count) in rows.items()
    }
    report(table(f"{m.name}, {CHUNK} pairs of rank {RANK}, {dtype}", result))


@both_types
def test_factors_of_rank_one_against_a_loop_over_pymanopt(report: Callable[[str], None], dtype: torch.dtype) -> None:
    count, size = 4096, 64
    theirs = pymanopt.manifolds.FixedRankEmbedded(size, size, 1)
    loop = range(0, count, EVERY)
    m = EmbeddedFixedRank(size, size)
    x, y = point(m, count, 1, dtype), point(m, count, 1, dtype)
    u, v = (m.proju(x, 0.1 * torch.randn_like(x)) for _ in range(2))
    starts, ends, vectors = ([t[i].double().numpy() for i in loop] for t in (x, y, u))
    triples, others = ([to_svd_triple(m, each) for each in points] for points in (starts, ends))
    tangents = [to_svd_tangent(m, *row) for row in zip(starts, triples, vectors, strict=True)]
    dense = list(np.random.default_rng(0).normal(size=(len(loop), size, size)))
    back = from_svd_tangent(m, starts[0], triples[0], tangents[0])
    np.testing.assert_allclose(back, vectors[0], rtol=0, atol=1e-5)  # the same vectors on both sides
    references = {
        "inner": over(theirs.inner_product, triples, tangents, tangents),
        "projection": over(theirs.projection, triples, dense),
        "gradient": over(theirs.euclidean_to_riemannian_gradient, triples, triples),
        "retraction": over(theirs.retraction, triples, tangents),
        "transport": over(theirs.transport, triples, others, tangents),
    }
    psd = pymanopt.manifolds.PSDFixedRank(size, 1)
    arrays = [[a[i, :size].double().numpy() for i in loop] for a in (x, y)]
    references |= {"logarithm": over(psd.log, *arrays), "distance": over(psd.dist, *arrays)}
    for metric in METRICS:
        m = metric(size, size)
        x, y = point(m, count, 1, dtype), point(m, count, 1, dtype)
        u, v = (m.proju(x, 0.1 * torch.randn_like(x)) for _ in range(2))
        e = torch.randn_like(x)
        ours: dict[str, tuple[str, Callable[[], object]]] = {
            "inner": ("inner", lambda m=m, x=x, u=u, v=v: m.inner(x, u, v)),
            "proju": ("projection", lambda m=m, x=x, e=e: m.proju(x, e)),
            "egrad2rgrad": ("gradient", lambda m=m, x=x, e=e: m.egrad2rgrad(x, e)),
            "retr": ("retraction", lambda m=m, x=x, u=u: m.retr(x, u)),
            "second_order": ("retraction", lambda m=m, x=x, u=u: m.second_order(x, u)),
            "expmap": ("retraction", lambda m=m, x=x, u=u: m.expmap(x, u, check=False)),
            "transp": ("transport", lambda m=m, x=x, y=y, v=v: m.transp(x, y, v)),
            "logmap": ("logarithm", lambda m=m, x=x, y=y: m.logmap(x, y, check=False)),
            "dist": ("distance", lambda m=m, x=x, y=y: m.dist(x, y)),
        }
        times = side_by_side({f"{name}, ours": run for name, (_, run) in ours.items()} | references, repeats=3)
        result = {
            name: {
                "ms": 1e3 * times[f"{name}, ours"],
                "against": reference,
                "pymanopt/ours": EVERY * times[reference] / times[f"{name}, ours"],
            }
            for name, (reference, _) in ours.items()
        }
        report(
            table(f"{m.name}, {count} pairs of rank 1, {dtype}; logarithm and distance against PSDFixedRank", result)
        )


@both_types
def test_semidefinite_matrices_against_a_loop_over_pymanopt(report: Callable[[str], None], dtype: torch.dtype) -> None:
    for count, size, rank in ((32, ROWS, RANK), (4096, 64, 1)):
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
