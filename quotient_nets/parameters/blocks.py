"""Heads of one shape, across the layers of a model, as one batched point of one manifold."""

from __future__ import annotations

from dataclasses import dataclass

import geoopt
from torch import Tensor

from quotient_nets.manifolds import FixedRank, QuotientManifold
from quotient_nets.parameters.layout import Component


@dataclass(frozen=True)
class Block:
    """Heads of one shape across layers: one batched point ``(heads, n + m, rank)`` of one manifold.

    Attributes:
        kind: ``"query_key"`` or ``"value_output"``.
        manifold: Manifold of the block; a quotient, unless the symmetry is not divided out.
        component: Which heads of which modules it stacks.
        weight: Its factor in the squared norm.
    """

    kind: str
    manifold: geoopt.Manifold
    component: Component
    weight: float = 1.0

    @property
    def quotient(self) -> bool:
        """Whether a symmetry is divided out."""
        return isinstance(self.manifold, QuotientManifold)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads, rows, rank."""
        return self.component.shape

    @property
    def dimensions_removed(self) -> int:
        """Dimension of the group, summed over heads, exact bias translations included."""
        if not self.quotient:
            return 0
        shifts = sum(run.count for run in self.component.heads if run.pair.translation is not None)
        heads, _, rank = self.shape
        return heads * rank**2 + shifts * rank

    def deficient_heads(self, part: Tensor) -> list[str]:
        """Names of the heads whose pair of factors, in ``part``, is not of full rank."""
        if not isinstance(self.manifold, FixedRank):
            return []
        deficient = self.manifold.deficient(part).reshape(-1, self.shape[0]).any(0)
        return [self.head_name(i) for i in deficient.nonzero().flatten().tolist()]

    def head_name(self, index: int) -> str:
        """Module and head number of one element of the batch.

        Raises:
            IndexError: The block has no head of this number.
        """
        for run in self.component.heads:
            if index < run.count:
                return f"{run.pair.module}, head {run.first + index} ({self.kind})"
            index -= run.count
        raise IndexError(index)
