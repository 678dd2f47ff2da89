"""Differential geometry of neural-network parameter spaces, for geoopt."""

from quotient_nets.manifolds import AdaptiveEuclidean, InvariantFixedRank, QuotientManifold
from quotient_nets.sharpness import Sharpness, worst_case_sharpness

__all__ = ["AdaptiveEuclidean", "InvariantFixedRank", "QuotientManifold", "Sharpness", "worst_case_sharpness"]
