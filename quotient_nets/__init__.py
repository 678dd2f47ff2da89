"""Differential geometry of neural-network parameter spaces, for geoopt."""

from importlib.metadata import version

from quotient_nets.architectures import parameter_manifold
from quotient_nets.manifolds import (
    AdaptiveEuclidean,
    ComplexRankOne,
    EmbeddedFixedRank,
    InvariantFixedRank,
    PolarFixedRank,
    PreconditionedFixedRank,
    PSDFixedRank,
    QuotientManifold,
)
from quotient_nets.parameters import ParameterManifold
from quotient_nets.sharpness import ModelSharpness, Sharpness, worst_case_sharpness
from quotient_nets.sharpness.model import model_sharpness

__version__ = version("quotient-nets")

__all__ = [
    "AdaptiveEuclidean",
    "ComplexRankOne",
    "EmbeddedFixedRank",
    "InvariantFixedRank",
    "ModelSharpness",
    "PSDFixedRank",
    "ParameterManifold",
    "PolarFixedRank",
    "PreconditionedFixedRank",
    "QuotientManifold",
    "Sharpness",
    "model_sharpness",
    "parameter_manifold",
    "worst_case_sharpness",
]
