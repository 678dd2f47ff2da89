"""Hypothesis strategies: shapes and conditioning are drawn, entries come from a drawn seed.

A :class:`Case` knows how its point was built, and so measures tangent vectors and derivatives without
the code under test.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import geoopt
import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from quotient_nets.manifolds import AdaptiveEuclidean, ComplexRankOne, FixedRankMatrices, InvariantFixedRank
from tests.cases import FIXED_RANK

BATCHES = st.sampled_from([(), (1,), (3,), (2, 2)])


@dataclass(frozen=True)
class Case:
    """A point ``x`` of ``manifold`` and an orthonormal frame of its (ambient) tangent vectors."""

    manifold: geoopt.Manifold
    x: Tensor
    vector_of: Callable[[Tensor], Tensor]  # tangent vector from coordinates
    derivative_of: Callable[[Tensor], Tensor]  # derivative from coordinates: dual to `vector_of`
    coordinates: Callable[[Tensor], Tensor]  # coordinates of a tangent vector, in float64

    @property
    def batch(self) -> torch.Size:
        return self.x.shape[: self.x.dim() - self.manifold.ndim]

    def vector(self) -> Tensor:
        """Random ambient vector of norm about one."""
        return self.vector_of(self._noise())

    def horizontal(self) -> Tensor:
        """Random tangent vector of the quotient."""
        return self.manifold.proju(self.x, self.vector())

    def step(self) -> Tensor:
        """Random tangent vector whose geodesic stays on the manifold, of norm about one at most."""
        u = self.horizontal()
        if not isinstance(self.manifold, FixedRankMatrices):
            return u
        reach = 0.5 * self.manifold.exponential_radius(self.x) / self.manifold.norm(self.x, u)
        # A manifold that is a point (n = m = r with no direction) has only the zero vector.
        return u * reach.nan_to_num(0.0).clamp_max(1.0)[..., None, None]

    def derivative(self) -> Tensor:
        """Random Euclidean gradient, of norm about one against unit vectors."""
        return self.derivative_of(self._noise())

    def size(self, u: Tensor) -> Tensor:
        """Norm of the tangent vector ``u`` at ``x``, one number for each point."""
        return self.coordinates(u).flatten(len(self.batch)).norm(dim=-1)

    def elsewhere(self) -> Tensor:
        """Another point, whose frame differs from that of ``x`` by rotations: `size` holds there too."""
        if isinstance(self.manifold, AdaptiveEuclidean):
            return self.x * (1 + torch.rand_like(self.x))
        factors = self.manifold.unpack_tensor(self.x)
        rotated = (orthogonal(f.shape[-2], f.shape[-2]).to(f.dtype) @ f for f in factors)
        return self.manifold.pack_point(*rotated)

    def assert_equal(self, actual: Tensor, expected: Tensor, tolerance: float) -> None:
        """Tangent vectors or points nearby, compared in the metric at ``x``, relative to at least one."""
        error = self.size(actual - expected)
        bound = tolerance * self.size(expected).clamp_min(1.0)
        assert bool((error <= bound).all()), f"{error} > {bound}"

    def _noise(self) -> Tensor:
        noise = torch.randn(self.x.shape, dtype=torch.float64)
        return noise / noise.flatten(len(self.batch)).norm(dim=-1)[(...,) + (None,) * self.manifold.ndim]


def orthogonal(*shape: int) -> Tensor:
    """Random matrices with orthonormal columns; square ones have either orientation."""
    q, r = torch.linalg.qr(torch.randn(*shape, dtype=torch.float64))
    return q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)


def group_element(batch: tuple[int, ...], r: int, condition: float) -> Tensor:
    """Matrices with this condition number and either orientation."""
    spectrum = torch.logspace(0.5, -0.5, r, base=condition, dtype=torch.float64)
    return orthogonal(*batch, r, r) * spectrum @ orthogonal(*batch, r, r)


@st.composite
def ranks(draw: st.DrawFn) -> tuple[int, int, int]:
    """Rows ``n`` and ``m`` and rank ``r``; rank 1, full rank and square full rank are frequent."""
    n, m = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    full = min(n, m)
    kind = draw(st.sampled_from(["any", "one", "full", "square"]))
    if kind == "square":
        return full, full, full
    return n, m, {"any": draw(st.integers(1, full)), "one": 1, "full": full}[kind]


@st.composite
def fixed_rank(
    draw: st.DrawFn,
    *,
    least: float = 1.0,
    condition: float = 1e4,
    gauge: float = 10.0,
    dtype: torch.dtype = torch.float64,
) -> Case:
    """Points of condition number ``least`` to ``condition`` in representatives of one of ``gauge``."""
    n, m, r = draw(ranks())
    manifold = draw(st.sampled_from(FIXED_RANK))(n, m)
    batch = draw(BATCHES)
    base = least * (condition / least) ** draw(st.floats(0, 1))
    torch.manual_seed(draw(st.integers(0, 2**32 - 1)))
    root = torch.logspace(0, -0.5, r, base=base, dtype=torch.float64)
    a = group_element(batch, r, gauge)
    # G = Q_G push_g, H = Q_H push_h with orthonormal Q, and G H^T = Q_G diag(root^2) Q_H^T
    push_g, push_h = root[:, None] * torch.linalg.inv(a), root[:, None] * a.mT
    x = manifold.pack_point(orthogonal(*batch, n, r) @ push_g, orthogonal(*batch, m, r) @ push_h)

    inverse_g, inverse_h = torch.linalg.inv(push_g), torch.linalg.inv(push_h)
    # Coordinates are u_G push_g^-1 where the metric of a factor is its own, u_G push_h^T where it is the other's.
    own = isinstance(manifold, InvariantFixedRank)
    vector = (push_g, push_h) if own else (inverse_h.mT, inverse_g.mT)
    inverse = (inverse_g, inverse_h) if own else (push_h.mT, push_g.mT)

    def each(c: Tensor, left: Tensor, right: Tensor) -> Tensor:
        cg, ch = manifold.unpack_tensor(c.double())
        return manifold.pack_point(cg @ left, ch @ right)

    return Case(
        manifold,
        x.to(dtype),
        vector_of=lambda c: each(c, *vector).to(dtype),
        derivative_of=lambda c: each(c, *(a.mT for a in inverse)).to(dtype),
        coordinates=lambda u: each(u, *inverse),
    )


@st.composite
def adaptive(draw: st.DrawFn, *, dtype: torch.dtype = torch.float64) -> Case:
    """Weights of very different magnitudes and both signs; some are exactly zero."""
    point = draw(st.sampled_from([(1,), (4,), (3, 2)]))
    batch = draw(BATCHES)
    torch.manual_seed(draw(st.integers(0, 2**32 - 1)))
    magnitude = 10 ** (4 * torch.rand(*batch, *point, dtype=torch.float64) - 2)
    zero = torch.rand(*batch, *point) < draw(st.sampled_from([0.0, 0.2]))
    sign = torch.randn(*batch, *point, dtype=torch.float64).sign()
    return Case(
        AdaptiveEuclidean(len(point)),
        torch.where(zero, 0.0, sign * magnitude).to(dtype),
        vector_of=lambda c: (c * magnitude).to(dtype),
        derivative_of=lambda c: (c / magnitude).to(dtype),
        coordinates=lambda u: u.double() / magnitude,
    )


def points(**options: float) -> st.SearchStrategy[Case]:
    """Points of every manifold."""
    return st.one_of(fixed_rank(**options), adaptive())


def complex_element(modulus: float, phase: float) -> Tensor:
    """Group element of ``ComplexRankOne``."""
    re, im = modulus * math.cos(phase), modulus * math.sin(phase)
    return torch.tensor([[re, im], [-im, re]], dtype=torch.float64)


COMPLEX_SIZES = [(1, 1), (1, 3), (3, 1), (2, 2), (4, 3)]
COMPLEX_ELEMENTS = st.builds(
    lambda power, phase: complex_element(10**power, phase), st.floats(-4, 4), st.floats(-math.pi, math.pi)
)


@st.composite
def complex_points(draw: st.DrawFn) -> tuple[ComplexRankOne, Tensor]:
    """Manifold and a point; ``COMPLEX_ELEMENTS`` bring its lengths out of balance."""
    n, m = draw(st.sampled_from(COMPLEX_SIZES))
    batch = draw(BATCHES)
    torch.manual_seed(draw(st.integers(0, 2**32 - 1)))
    return ComplexRankOne(n, m), torch.randn(*batch, n + m, 2, dtype=torch.float64)


def unit_vector(m: ComplexRankOne, x: Tensor) -> Tensor:
    """Random horizontal unit vector."""
    u = m.proju(x, x.abs().mean((-2, -1), keepdim=True) * torch.randn_like(x))
    return u / m.norm(x, u, keepdim=True)


def as_numpy(m: ComplexRankOne, x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Factors of a point as numpy's complex vectors."""
    g, h = (torch.view_as_complex(t.contiguous()).numpy() for t in m.unpack_tensor(x))
    return g, h


def assert_near(m: ComplexRankOne, x: Tensor, actual: Tensor, expected: Tensor, tolerance: float = 1e-11) -> None:
    """Points or tangent vectors, compared in the metric at ``x``, relative to at least one."""
    error, size = m.norm(x, actual - expected), m.norm(x, expected)
    assert bool((error <= tolerance * size.clamp_min(1)).all()), error
