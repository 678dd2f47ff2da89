r"""Shortest geodesics between matrices of fixed rank, where no closed form is known.

Both points and the geodesics between them lie in the span of their factors, so the problem is reduced to matrices of
at most ``2r`` rows and columns, the *core*, scaled to unit norm. There the initial velocity is found by least squares
on the end point, from several first guesses: the projected difference, and the starts of short paths
(:mod:`quotient_nets.manifolds.paths`) between frames turned towards each other in different ways. The shortest result
counts.

Imports: torch, :mod:`quotient_nets.linalg`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from quotient_nets.linalg import generic_vector, gram
from quotient_nets.manifolds.factor_tangent import MatrixTangentSpace
from quotient_nets.manifolds.least_squares import DENSE, differences, levenberg_marquardt
from quotient_nets.manifolds.paths import short_path, unknowns
from quotient_nets.manifolds.procrustes import alignment

if TYPE_CHECKING:
    from quotient_nets.manifolds.matrices import FixedRankMatrices

STARTS = 8  # short paths
ITERATIONS = 40  # of the search for a velocity
STAGES = ((1e-7, 1e-5), (1e-13, 1e-12))  # accuracy of geodesics, and projected error of the end point that ends a stage
LOST = 1e-3  # projected error after the first stage with which the second is not worth its cost
HALVINGS = 5  # of a first guess whose geodesic leaves the manifold
TOLERANCE = 1e-9  # of the end point, relative to the target, in the Frobenius norm
SIMILAR = 0.1  # relative difference of lengths of short paths, and of a geodesic and its short path
TRIES = 3  # of the shortest paths
SURE = 0.25  # share of the reach at rank one below which the first geodesic found is taken for the shortest
BUDGET = 2**22  # entries of all Jacobians of a batch that is solved at once: fresh memory costs as much as arithmetic


@dataclass(frozen=True)
class Logarithm:
    """Geodesics found, and what certifies them.

    Attributes:
        vector: Initial velocities, in the shape of the points; the best try where not converged.
        length: Their norms, ``(...)``.
        residual: Distance of the end point from the target in the Frobenius norm, relative to the target's norm.
        converged: Whether the residual is below 1e-9.
        confirmed: Whether the geodesic is very short, or two of the shortest paths have about its length. No proof that
            there is no shorter one.
    """

    vector: Tensor
    length: Tensor
    residual: Tensor
    converged: Tensor
    confirmed: Tensor


class _Points(NamedTuple):
    """Frames of both ends in the core; singular values ``(batch, 1, r)`` relative to ``scale``."""

    g: Tensor
    s: Tensor
    h: Tensor
    p: Tensor
    t: Tensor
    q: Tensor

    def select(self, index: Tensor) -> _Points:
        return _Points(*(part.index_select(0, index) for part in self))


class Core:
    """Two points of a small manifold with their tangent spaces, and the equation of a geodesic between them."""

    def __init__(self, manifold: FixedRankMatrices, points: _Points, accuracy: float = STAGES[-1][0]):
        self.points, self.accuracy = points, accuracy
        self.manifold = type(manifold)(points.g.shape[-2], points.h.shape[-2])
        g, s, h, p, t, q = points
        x, y = self.manifold.from_frame(g, s.squeeze(-2), h), self.manifold.from_frame(p, t.squeeze(-2), q)
        self.source, self.target = (self.manifold.at(point, balanced=True) for point in (x, y))
        self.source.accuracy = accuracy
        self.left, self.right = self.manifold.point_factors(y)

    def select(self, index: Tensor) -> Core:
        """Some of the pairs."""
        return Core(self.manifold, self.points.select(index), self.accuracy)

    def residual(self, z: Tensor) -> Tensor:
        """The projected error of the end point, in coordinates at the target: zero only if the geodesic ends there."""
        c = z.unflatten(-1, self.source.x.shape[-2:])
        end = self.manifold.point_factors(self.source.move(self.source.project(c), "expmap"))
        return self.target.lift(*self.target.products([end, (-self.left, self.right)])).flatten(-2)

    def shoot(self, c: Tensor) -> _Found:
        """Velocity that reaches the target, from a first guess."""
        z = c.flatten(-2)
        for _ in range(HALVINGS):
            lost = self.residual(z).isnan().any(-1, keepdim=True)
            if not bool(lost.any()):
                break
            z = torch.where(lost, z / 2, z)
        left = torch.arange(len(z), device=z.device)
        for accuracy, enough in STAGES:
            # Steps of less accuracy lead to the solution's neighbourhood at a fifth of the cost.
            core = Core(self.manifold, self.points.select(left), accuracy)
            solution = levenberg_marquardt(
                core.residual,
                z[left],
                iterations=ITERATIONS,
                tolerance=enough,
                derivative=differences,
                select=lambda index, core=core: core.select(index).residual,
            )
            z = z.index_copy(0, left, solution.z)
            left = left[solution.residual <= LOST]
        c = self.source.project(z.unflatten(-1, c.shape[-2:]))
        end = self.manifold.product(self.source.move(c, "expmap"))
        size = torch.linalg.matrix_norm(self.points.t)
        error = torch.linalg.matrix_norm(end - self.left @ self.right.mT) / size
        return _Found(c, self.source.norm(c).squeeze((-2, -1)), error.nan_to_num(torch.inf))

    def difference(self) -> Tensor:
        """First guess: the projected difference of the matrices."""
        x = self.manifold.point_factors(self.source.x)
        return self.source.lift(*self.source.products([(self.left, self.right), (-x[0], x[1])]))

    def short_start(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """First guess: the start of a short path, and the length of the path."""
        g, s, h, p, t, q = self.points
        turn = alignment(gram(p, g) + gram(q, h) + noise)[0]
        (dg, dh), length = short_path(self.manifold.chords, (g, s, h), (p, t, q), turn)
        root = s.sqrt()
        c = self.source.lift(*self.source.products([(dg, h * root), (g * root, dh)]))
        norm = self.source.norm(c)
        return c * (length[:, None, None] / torch.where(norm > 0, norm, 1.0)).nan_to_num(0.0), length


class _Found(NamedTuple):
    c: Tensor
    length: Tensor
    error: Tensor

    def select(self, index: Tensor) -> _Found:
        return _Found(*(part.index_select(0, index) for part in self))

    def put(self, index: Tensor, other: _Found) -> _Found:
        return _Found(*(part.index_copy(0, index, new) for part, new in zip(self, other, strict=True)))

    def better(self, other: _Found) -> _Found:
        """The shorter of two results that converged, or the one with the smaller error."""
        mine, theirs = self.error <= TOLERANCE, other.error <= TOLERANCE
        both = torch.where(other.length < self.length, mine & theirs, False)
        take = both | (theirs & ~mine) | (~mine & ~theirs & (other.error < self.error))
        return _Found(
            torch.where(take[:, None, None], other.c, self.c),
            torch.where(take, other.length, self.length),
            torch.where(take, other.error, self.error),
        )


def logarithm(
    manifold: FixedRankMatrices, x: Tensor, y: Tensor, *, starts: int, generator: torch.Generator | None = None
) -> Logarithm:
    """Shortest geodesics found from ``x`` to ``y``, detached; elements with NaN give NaN.

    Args:
        manifold: Manifold of both points.
        x: Points, ``(..., rows, r)``.
        y: Points of the same shape.
        starts: How many short paths to try for each pair that the projected difference leaves in doubt.
        generator: Draws the guesses after the first; by default a fixed seed.

    Cost: independent of the size of the matrices but for one frame of each. For each guess some ten Jacobians with
    :math:`4 r^2` directions, and a dozen with :math:`21 r^2` for a short path; above ``4096`` numbers in the short path
    (``r > 13``) only the projected difference is tried.
    """
    batch, dtype = x.shape[:-2], x.dtype
    space, other = (manifold.at(t.detach().double().reshape(-1, *t.shape[-2:])) for t in (x, y))
    pair = CorePair(space, other)
    count, (rows, r) = len(pair.scale), (pair.points.g.shape[-2] + pair.points.h.shape[-2], x.shape[-1])
    short = unknowns(rows, r)
    starts = starts if short <= DENSE else 0
    chunk = max(BUDGET // max(short**2 * starts, (rows * r) ** 2), 1)
    generator = generator or torch.Generator().manual_seed(0)
    indices = torch.arange(count, device=x.device).split(chunk)
    solved = [_solve(manifold, pair.points.select(index), starts, generator) for index in indices]
    c, _, error = (torch.cat(parts) for parts in zip(*(found for found, _ in solved), strict=True))
    core = Core(manifold, pair.points)
    right, left = core.source.products(core.manifold.tangent_factors(core.source.x, core.source.vector(c)))
    vector = space.vector(space.lift(pair.scale * (pair.left @ right), pair.scale * (pair.right @ left)))
    missing = torch.where(pair.valid, 1.0, torch.nan).to(vector.dtype)
    vector = vector * missing[:, None, None]
    length = space.norm(space.coordinates(vector)).squeeze((-2, -1))
    return Logarithm(
        vector.reshape(x.shape).to(dtype),
        length.reshape(batch).to(dtype),
        (error * missing).reshape(batch).to(dtype),
        ((error <= TOLERANCE) & pair.valid).reshape(batch),
        (torch.cat([sure for _, sure in solved]) & pair.valid).reshape(batch),
    )


class CorePair:
    """Two points in a common basis of few rows.

    Args:
        x: Tangent spaces at the first points, of one batch axis.
        y: Tangent spaces at the second points.
        extra: Columns of the bases beyond the span of both points, as far as there is room.

    Attributes:
        points: The frames of both points in these bases.
        left: Orthonormal basis of the rows of ``G``, ``(batch, n, p)``.
        right: Orthonormal basis of the rows of ``H``.
        scale: The largest singular value, ``(batch, 1, 1)``.
        valid: Which pairs are finite; the others are replaced.
    """

    def __init__(self, x: MatrixTangentSpace, y: MatrixTangentSpace, *, extra: int = 0):
        self.valid = (x.frame.spectrum.isfinite() & y.frame.spectrum.isfinite()).all(-1)
        choose = self.valid[:, None, None]
        g, h, p, q = (
            torch.where(choose, basis, torch.eye(*basis.shape[-2:], dtype=basis.dtype, device=basis.device))
            for basis in (x.frame.g, x.frame.h, y.frame.g, y.frame.h)
        )
        s, t = (torch.where(choose, f.spectrum.unsqueeze(-2), 1.0) for f in (x.frame, y.frame))
        self.scale = torch.maximum(s.narrow(-1, 0, 1), t.narrow(-1, 0, 1))
        self.left, self.right = _common_basis(g, p, extra), _common_basis(h, q, extra)
        frames = (gram(self.left, g), s / self.scale, gram(self.right, h))
        self.points = _Points(*frames, gram(self.left, p), t / self.scale, gram(self.right, q))


def _common_basis(a: Tensor, b: Tensor, extra: int) -> Tensor:
    generic = generic_vector(a.shape[-2] * extra, a).reshape(a.shape[-2], extra).expand(*a.shape[:-1], extra)
    return torch.linalg.qr(torch.cat([a, b, generic], dim=-1))[0]


def _solve(
    manifold: FixedRankMatrices, points: _Points, starts: int, generator: torch.Generator
) -> tuple[_Found, Tensor]:
    core = Core(manifold, points)
    best = core.shoot(core.difference())
    sure, r = best.error <= TOLERANCE, points.s.shape[-1]
    if manifold.is_flat(r):
        # The straight line of matrices is the only geodesic.
        return best, sure
    sure = sure & (best.length <= SURE * manifold.rank_one.injectivity(points.s, spheres=2).amin((-2, -1)))
    index = (~sure).nonzero().squeeze(-1)
    if not len(index) or not starts:
        return best, sure
    count = len(index)
    noise = torch.randn(starts, count, r, r, generator=generator, dtype=best.length.dtype).to(best.length.device)
    noise = torch.cat([torch.zeros_like(noise.narrow(0, 0, 1)), noise.narrow(0, 1, starts - 1)])
    guesses, lengths = Core(manifold, points.select(index.repeat(starts))).short_start(noise.flatten(0, 1))
    guesses, lengths = guesses.unflatten(0, (starts, count)), lengths.unflatten(0, (starts, count))
    lengths, order = lengths.nan_to_num(torch.inf).sort(dim=0)
    agree = (lengths <= (1 + SIMILAR) * lengths.narrow(0, 0, 1)).sum(0) > 1
    todo = torch.arange(count, device=index.device)
    for k in range(min(TRIES, starts)):
        where = index.index_select(0, todo)
        guess = guesses[order[k, todo], todo]
        new = Core(manifold, points.select(where)).shoot(guess)
        merged = best.select(where).better(new)
        best = best.put(where, merged)
        done = (merged.error <= TOLERANCE) & (merged.length <= (1 + SIMILAR) * lengths[0, todo])
        sure = sure.index_copy(0, where, done & agree[todo])
        todo = todo[~done]
        if not len(todo):
            break
    return best, sure
