"""Cost of single operations of the fixed-rank geometry at the sizes of ViT-B attention, float32.

Factors are taken a few at a time: above some 32 MB every fresh tensor is paged in anew, which costs more than the
algebra and is the allocator's doing. Never asserts a time; `pytest -m benchmark tests/benchmarks`.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from pymanopt.manifolds import FixedRankEmbedded
from torch import Tensor

from quotient_nets.manifolds import InvariantFixedRank
from quotient_nets.manifolds.invariant_tangent import InvariantTangentSpace
from tests.benchmarks.timing import side_by_side, table

ROWS, RANK = 768, 64
PAIRS, CHUNK = 72, 12  # 144 factors, 24 at a time: tensors of 4.7 MB
MANIFOLD = InvariantFixedRank(ROWS, ROWS)
LENGTHS = [0.01, 0.1, 0.5, 2.0]


def points(count: int = CHUNK) -> Tensor:
    """Balanced points, with the spectrum of a product of Gaussian factors."""
    x = torch.randn(count, 2 * ROWS, RANK) / ROWS**0.5
    return MANIFOLD.canonicalize(x)[0]


def vectors(space: InvariantTangentSpace, length: float) -> Tensor:
    return length * space.random(torch.Generator().manual_seed(0))


def forward_and_backward(path: Callable[[Tensor], Tensor], u: Tensor, slope: Tensor) -> None:
    u = u.detach().requires_grad_()
    torch.autograd.grad(path(u), u, slope)


def follow_and_return(space: InvariantTangentSpace, path: str, c: Tensor, slope: Tensor, radius: float) -> None:
    space.follow(c, path, radius)[1](slope)


def chunks(run: Callable[[], object]) -> None:
    for _ in range(PAIRS // CHUNK):
        run()


def test_exact_exponential_against_second_order(report: Callable[[str], None]) -> None:
    x = points()
    space = MANIFOLD.at(x, balanced=True)
    slope = torch.randn_like(x)
    rows = {}
    for length in LENGTHS:
        c = vectors(space, length)
        runs = {}
        for path in ("expmap", "second_order"):
            move = partial(space.move, path=path, radius=length)
            runs[f"{path} f"] = partial(chunks, partial(move, c))
            runs[f"{path} f+b"] = partial(chunks, partial(forward_and_backward, move, c, slope))
            runs[f"{path} ascent"] = partial(chunks, partial(follow_and_return, space, path, c, slope, length))
        times = side_by_side(runs, repeats=7)
        rows[f"length {length:g}"] = {
            "second f s": times["second_order f"],
            "exact/second f": times["expmap f"] / times["second_order f"],
            "second f+b s": times["second_order f+b"],
            "exact/second f+b": times["expmap f+b"] / times["second_order f+b"],
            "second ascent s": times["second_order ascent"],
            "exact/second ascent": times["expmap ascent"] / times["second_order ascent"],
            "goal": "<= 2.5" if length > 0.5 else "<= 2",
        }
    report(table(f"(a) in the tangent space, {2 * PAIRS} factors {ROWS}x{RANK}", rows))


def test_public_exponential_against_second_order(report: Callable[[str], None]) -> None:
    x = MANIFOLD.action(points(), MANIFOLD.random_element(CHUNK, RANK, condition=10).float())
    slope = torch.randn_like(x)
    rows = {}
    for length in LENGTHS:
        u = MANIFOLD.at(x).vector(vectors(MANIFOLD.at(x), length))
        paths = {
            "expmap(radius)": partial(MANIFOLD.expmap, x, radius=length),
            "expmap": partial(MANIFOLD.expmap, x),
            "second_order": partial(MANIFOLD.second_order, x),
        }
        runs = {"frame": partial(MANIFOLD.frame, x)}
        for name, path in paths.items():
            runs[f"{name} f"] = partial(path, u)
            runs[f"{name} f+b"] = partial(forward_and_backward, path, u, slope)
        times = side_by_side(runs, repeats=3)
        rows[f"length {length:g}"] = {
            "frame/second f": times["frame"] / times["second_order f"],
            **{
                f"{name}/second {way}": times[f"{name} {way}"] / times[f"second_order {way}"]
                for way in ("f", "f+b")
                for name in ("expmap(radius)", "expmap")
            },
        }
    report(table(f"(a') raw points, public methods, {2 * CHUNK} factors", rows))


def test_operations_against_bare_products(report: Callable[[str], None]) -> None:
    x = points()
    space = MANIFOLD.at(x, balanced=True)
    c, d = vectors(space, 0.1), vectors(space, 0.1).flip(0)
    g, h = space.g, space.h
    small = torch.randn(CHUNK, RANK, RANK)
    cg, ch = (part.contiguous() for part in MANIFOLD.unpack_tensor(c))

    def products(count: int) -> Callable[[], None]:
        """As many products ``(r x n)(n x r)`` as ``(n x r)(r x r)``, ``count`` of both together for each factor."""

        def run() -> None:
            for _ in range(count // 2):
                g.mT @ cg, g @ small, h.mT @ ch, h @ small

        return run

    def copy() -> None:
        torch.cat([cg, ch], dim=-2)

    operations = {
        "inner": (lambda: space.inner(c, d), 0),
        "norm": (lambda: space.norm(c), 0),
        "project": (lambda: space.project(c), 2),
        "gradient": (lambda: space.gradient(c), 2),
        "vector": (lambda: space.vector(c), 0),
        "pull_gradient": (lambda: space.pull_gradient(c), 0),
        "second_order": (lambda: space.move(c, "second_order", 0.1), 4),
        "expmap .1": (lambda: space.move(c, "expmap", 0.1), 4),
    }
    runs = {name: partial(chunks, run) for name, (run, _) in operations.items()}
    runs |= {f"{count} products": partial(chunks, products(count)) for count in (2, 4)}
    runs |= {"dot": partial(chunks, lambda: torch.dot(c.flatten(), d.flatten())), "copy": partial(chunks, copy)}
    times = side_by_side(runs)
    rows = {}
    for name, (_, count) in operations.items():
        bare = times[f"{count} products"] if count else times["dot"] if name in ("inner", "norm") else times["copy"]
        against = f"{count} products a factor" if count else "dot" if name in ("inner", "norm") else "cat"
        rows[name] = {"s": times[name], "bare s": bare, "ratio": times[name] / bare, "bare is": against}
    report(table(f"(c) at a balanced point, {PAIRS} pairs {ROWS}x{RANK}", rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rank_one_against_a_loop_over_pymanopt(report: Callable[[str], None], dtype: torch.dtype) -> None:
    count, rows = 4096, 64
    ours, theirs = InvariantFixedRank(rows, rows), FixedRankEmbedded(rows, rows, 1)
    x = torch.randn(count, 2 * rows, 1, dtype=dtype)
    u, v = torch.randn_like(x), torch.randn_like(x)
    factors = [ours.unpack_tensor(t) for t in (x, u, v)]
    frame = ours.frame(x.double())
    loop = range(0, count, 16)  # every 16th element; its time is multiplied
    points = [(frame.g[i].numpy(), frame.spectrum[i].numpy(), frame.h[i].mT.numpy()) for i in loop]
    dense = [
        [(g[i] @ x_h[i].mT + x_g[i] @ h[i].mT).double().numpy() for i in loop]
        for (x_g, x_h), (g, h) in ((factors[0], factors[1]), (factors[0], factors[2]))
    ]
    tangent = [[theirs.projection(p, a) for p, a in zip(points, each, strict=True)] for each in dense]

    def inner() -> None:
        for p, a, b in zip(points, *tangent, strict=True):
            theirs.inner_product(p, a, b)

    def projection() -> None:
        for p, a in zip(points, dense[0], strict=True):
            theirs.projection(p, a)

    space = ours.at(x)
    c, d = space.coordinates(u), space.coordinates(v)
    times = side_by_side(
        {
            "inner, theirs": inner,
            "projection, theirs": projection,
            "inner": lambda: ours.inner(x, u, v),
            "projection": lambda: ours.proju(x, u),
            "inner in the tangent space": lambda: space.inner(c, d),
            "projection in the tangent space": lambda: space.project(c),
        }
    )
    ratios = {
        name: {"ms": 1e3 * times[name], "pymanopt/ours": 16 * times[f"{name.split(' ')[0]}, theirs"] / times[name]}
        for name in times
        if "theirs" not in name
    }
    assert np.isfinite([ratio["ms"] for ratio in ratios.values()]).all()
    report(table(f"(d) rank 1, {count} pairs {rows}x1, {dtype}", ratios))
