"""The manifolds and operations that the laws run over: a new manifold is a line here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import geoopt
import torch
from torch import Tensor

from quotient_nets.manifolds import AdaptiveEuclidean, FixedRank, InvariantFixedRank

FIXED_RANK: list[type[FixedRank]] = [InvariantFixedRank]

# What an argument is decides how it moves under the group: ``x``, ``y`` points, ``u``, ``v`` tangent
# vectors at ``x``, ``w`` one at ``y``, ``e`` a derivative at ``x``; what is given: "x" or "y" a point on
# the orbit of that argument's end, "u" a vector at ``x``, "w" one at ``y``, "" a number.


@dataclass(frozen=True)
class Operation:
    """A method of a manifold, the roles of its arguments and of its result."""

    method: str
    takes: str
    gives: str

    def __call__(self, manifold: geoopt.Manifold, arguments: Mapping[str, Tensor]) -> Tensor:
        return self.function(manifold)(*(arguments[role] for role in self.takes))

    def function(self, manifold: geoopt.Manifold) -> Callable[..., Any]:
        return getattr(manifold, self.method)


OPERATIONS = [
    Operation("inner", "xuv", ""),
    Operation("norm", "xu", ""),
    Operation("proju", "xu", "u"),
    Operation("egrad2rgrad", "xe", "u"),
    Operation("retr", "xu", "x"),
    Operation("expmap", "xu", "x"),
    Operation("transp", "xyv", "w"),
]
FIXED_RANK_OPERATIONS = [*OPERATIONS, Operation("second_order", "xu", "x")]
ADAPTIVE_OPERATIONS = [
    *OPERATIONS,
    Operation("component_inner", "xuv", "u"),
    Operation("logmap", "xy", "u"),
    Operation("dist", "xy", ""),
]
IN_TURN = [(InvariantFixedRank(4, 3), (7, 2), op) for op in FIXED_RANK_OPERATIONS]
IN_TURN += [(AdaptiveEuclidean(), (5,), op) for op in ADAPTIVE_OPERATIONS]
each_operation = [
    (manifold, shape, op, f"{type(manifold).__name__}.{op.method}") for manifold, shape, op in IN_TURN
]


def draw(batch: tuple[int, ...], point: tuple[int, ...], dtype=torch.float64) -> dict[str, Tensor]:
    """Well-conditioned random arguments of every role; all coordinates of ``x`` and ``y`` positive."""
    arguments = {role: torch.randn(*batch, *point, dtype=dtype) for role in "xyuvwe"}
    return arguments | {role: arguments[role].abs() + 0.2 for role in "xy" if len(point) == 1}
