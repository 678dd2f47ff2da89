"""The manifolds and operations that the laws run over: a new manifold is a line here."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import geoopt
import pytest
import torch
from torch import Tensor

from quotient_nets.manifolds import (
    AdaptiveEuclidean,
    ComplexRankOne,
    EmbeddedFixedRank,
    FixedRank,
    InvariantFixedRank,
    PolarFixedRank,
    PreconditionedFixedRank,
    PSDFixedRank,
)

FIXED_RANK: list[type[FixedRank]] = [InvariantFixedRank, PreconditionedFixedRank, EmbeddedFixedRank]

# What an argument is decides how it moves under the group: ``x``, ``y`` points, ``u``, ``v`` tangent
# vectors at ``x``, ``w`` one at ``y``, ``e``, ``f`` derivatives at ``x``. What comes out is a point "x" that moves
# as ``x`` does, a vector "u" at ``x``, a vector "w" at ``y``, or "", a number.


@dataclass(frozen=True)
class Operation:
    """A method of a manifold, the roles of its arguments and of its result."""

    method: str
    takes: str
    gives: str

    def __call__(self, manifold: geoopt.Manifold, arguments: Mapping[str, Tensor]) -> Tensor:
        return self.function(manifold)(*(arguments[role] for role in self.takes))

    def function(self, manifold: geoopt.Manifold) -> Callable[..., Any]:
        """The method, without its check at the border, which no transform of torch can follow."""
        method = getattr(manifold, self.method)
        return partial(method, check=False) if "check" in inspect.signature(method).parameters else method


OPERATIONS = [
    Operation("inner", "xuv", ""),
    Operation("norm", "xu", ""),
    Operation("proju", "xu", "u"),
    Operation("egrad2rgrad", "xe", "u"),
    Operation("retr", "xu", "x"),
    Operation("expmap", "xu", "x"),
    Operation("transp", "xyv", "w"),
]
FIXED_RANK_OPERATIONS = [
    *OPERATIONS,
    Operation("second_order", "xu", "x"),
    Operation("orthographic", "xu", "x"),
    Operation("inverse_orthographic", "xy", "u"),
    Operation("ehess2rhess", "xefu", "u"),
]
ADAPTIVE_OPERATIONS = [
    *OPERATIONS,
    Operation("component_inner", "xuv", "u"),
    Operation("logmap", "xy", "u"),
    Operation("dist", "xy", ""),
]
DISTANCES = [Operation("logmap", "xy", "u"), Operation("dist", "xy", ""), Operation("dist2", "xy", "")]
PSD_OPERATIONS = [
    *OPERATIONS,
    Operation("second_order", "xu", "x"),
    Operation("ehess2rhess", "xefu", "u"),
    *DISTANCES,
]
_TRIPLES = [(kind(4, 3), (7, r), op) for kind in FIXED_RANK for r in (2, 1) for op in FIXED_RANK_OPERATIONS]
_TRIPLES += [(kind(4, 3), (7, 1), op) for kind in FIXED_RANK for op in DISTANCES]
# An orthogonal factor is found by a decomposition there, without derivatives.
POLAR_OPERATIONS = [op for op in FIXED_RANK_OPERATIONS if op.method != "orthographic"]
_TRIPLES += [(PolarFixedRank(4, 3), (7 + r, r), op) for r in (2, 1) for op in POLAR_OPERATIONS]
_TRIPLES += [(PolarFixedRank(4, 3), (8, 1), op) for op in DISTANCES]
_TRIPLES += [(AdaptiveEuclidean(), (5,), op) for op in ADAPTIVE_OPERATIONS]
_TRIPLES += [(PSDFixedRank(5), (5, r), op) for r in (2, 1) for op in PSD_OPERATIONS]
_TRIPLES += [(ComplexRankOne(4, 3), (7, 2), op) for op in PSD_OPERATIONS]
_TRIPLES += [(ComplexRankOne(1, 1), (2, 2), op) for op in PSD_OPERATIONS]
# What integrates with steps of its own choice has no batching rule and no graph.
_SOLVED = [(kind, "expmap") for kind in (PreconditionedFixedRank, EmbeddedFixedRank)]


def _over(triples: list[tuple[geoopt.Manifold, tuple[int, ...], Operation]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("manifold", "shape", "op"),
        [pytest.param(*t, id=f"{type(t[0]).__name__}{t[1]}.{t[2].method}") for t in triples],
    )


each_operation = _over(_TRIPLES)
each_operation_in_closed_form = _over(
    [(m, shape, op) for m, shape, op in _TRIPLES if shape[-1] == 1 or (type(m), op.method) not in _SOLVED]
)


def draw(
    manifold: geoopt.Manifold,
    batch: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Random arguments of every role; ``x`` and ``y`` are joined by a geodesic."""
    arguments = {role: torch.randn(*batch, *shape, dtype=dtype) for role in "xyuvwef"}
    if isinstance(manifold, AdaptiveEuclidean):
        arguments |= {role: arguments[role].abs() + 0.2 for role in "xy"}
    if isinstance(manifold, PolarFixedRank):
        points = (manifold.random(*batch, *shape, dtype=dtype).as_subclass(Tensor).clone() for _ in "xy")
        arguments |= dict(zip("xy", points, strict=True))
        arguments |= {role: 0.5 * arguments[role] for role in "uv"}
    if isinstance(manifold, PreconditionedFixedRank | EmbeddedFixedRank):
        # Geodesics of these metrics may leave the manifold.
        x = arguments["x"]
        u = manifold.proju(x, arguments["u"])
        reach = manifold.exponential_radius(x)[..., None, None] / manifold.norm(x, u, keepdim=True)
        arguments["u"] = (0.5 * reach).clamp_max(1.0) * u
    if isinstance(manifold, FixedRank) and shape[-1] == 1:
        arguments["y"] = arguments["x"] + 0.3 * arguments["y"]  # not every pair is joined by a shortest geodesic
    return arguments
