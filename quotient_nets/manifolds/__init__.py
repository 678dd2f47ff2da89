"""Quotient manifolds of transformer symmetries, as ``geoopt.Manifold`` subclasses."""

from quotient_nets.manifolds.adaptive import AdaptiveEuclidean
from quotient_nets.manifolds.base import QuotientManifold
from quotient_nets.manifolds.fixed_rank import FixedRank, InvariantFixedRank
from quotient_nets.manifolds.psd import PSDFixedRank

__all__ = ["AdaptiveEuclidean", "FixedRank", "InvariantFixedRank", "PSDFixedRank", "QuotientManifold"]
