"""Quotient manifolds of transformer symmetries, as ``geoopt.Manifold`` subclasses."""

from quotient_nets.manifolds.adaptive import AdaptiveEuclidean
from quotient_nets.manifolds.base import QuotientManifold
from quotient_nets.manifolds.complex_rank_one import ComplexRankOne
from quotient_nets.manifolds.fixed_rank import (
    EmbeddedFixedRank,
    FixedRank,
    InvariantFixedRank,
    PreconditionedFixedRank,
)
from quotient_nets.manifolds.matrices import FixedRankMatrices
from quotient_nets.manifolds.polar import PolarFixedRank
from quotient_nets.manifolds.psd import PSDFixedRank

__all__ = [
    "AdaptiveEuclidean",
    "ComplexRankOne",
    "EmbeddedFixedRank",
    "FixedRank",
    "FixedRankMatrices",
    "InvariantFixedRank",
    "PSDFixedRank",
    "PolarFixedRank",
    "PreconditionedFixedRank",
    "QuotientManifold",
]
