r"""Where the rows of a factor lie in the stored parameters of a model.

A :class:`View` is a strided view of one parameter as ``(head, group, row, rank)``: ``rank`` is the axis on which the
symmetry group acts, ``row`` the other axis of the weight (length 1 for a bias), ``group`` the query heads that share a
key and value head. A :class:`Pair` says which views, stacked by rows, are the two factors of the heads of one attention
layer.

Knows parameter names and shapes, no module class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from einops import rearrange
from torch import Tensor

AXES = ("part", "head", "group", "row", "rank")


@dataclass(frozen=True)
class View:
    """A strided view of a stored parameter, ``(..., head, group, row, rank)``.

    Attributes:
        parameter: Name as in ``named_parameters()``.
        stored: Axes of the stored tensor in einops notation, from ``part head group row rank``; for a torch Linear that
            produces heads ``"(head rank) row"``, for the packed one of ``nn.MultiheadAttention``
            ``"(part head rank) row"``.
        heads: Length of the axis ``head``.
        rank: Length of the axis ``rank``.
        groups: Length of the axis ``group``.
        parts: Length of the axis ``part``, the tensors fused into one parameter.
        part: Index of this view on that axis.
    """

    parameter: str
    stored: str
    heads: int
    rank: int
    groups: int = 1
    parts: int = 1
    part: int = 0

    def strided(self, tensor: Tensor) -> Tensor:
        """View of ``tensor``, ``(..., *stored shape)``, that shares its memory."""
        lengths = {"head": self.heads, "rank": self.rank, "group": self.groups, "part": self.parts}
        words = self.stored.replace("(", " ").replace(")", " ").split()
        target = " ".join(axis if axis in words else "1" for axis in AXES)
        lengths = {axis: length for axis, length in lengths.items() if axis in words}
        return rearrange(tensor, f"... {self.stored} -> ... {target}", **lengths).select(-5, self.part)


@dataclass(frozen=True)
class Translation:
    """An exact shift of a bias row that leaves the function unchanged.

    Attributes:
        bias: The row.
        output: View of the other factor's weight, whose product with the shift moves ``output_bias``; None where the
            shift alone is exact, as that of key biases under softmax.
        output_bias: Name of the parameter that compensates.
    """

    bias: View
    output: View | None = None
    output_bias: str | None = None


@dataclass(frozen=True)
class Pair:
    """The two factors of the heads of one layer.

    Attributes:
        module: Name of the attention module.
        kind: ``"query_key"`` or ``"value_output"``.
        g: Views stacked by rows into the left factor.
        h: Views stacked by rows into the right factor.
        translation: Exact shift of a bias row, if there is one.
    """

    module: str
    kind: str
    g: tuple[View, ...]
    h: tuple[View, ...]
    translation: Translation | None = None

    @property
    def views(self) -> tuple[View, ...]:
        """All views, in the order of their rows."""
        return self.g + self.h

    def factors(self, parameters: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Both factors, ``(heads, n, rank)`` and ``(heads, m, rank)``, as copies."""
        g, h = (
            torch.cat([view.strided(parameters[view.parameter]).flatten(-3, -2) for view in views], dim=-2)
            for views in (self.g, self.h)
        )
        return g, h

    def renamed(self, names: Mapping[str, str]) -> Pair:
        """The same pair with other names of the parameters."""

        def view(old: View) -> View:
            return replace(old, parameter=names[old.parameter])

        shift = self.translation
        if shift is not None:
            shift = Translation(
                view(shift.bias),
                None if shift.output is None else view(shift.output),
                None if shift.output_bias is None else names[shift.output_bias],
            )
        return replace(self, g=tuple(map(view, self.g)), h=tuple(map(view, self.h)), translation=shift)

    def weight_beside(self, bias: View) -> View:
        """View of the weight whose rows ``bias`` extends."""
        return self.g[0] if bias in self.g else self.h[0]

    @property
    def heads(self) -> int:
        """Number of heads (of key and value heads, where query heads share them)."""
        return self.g[0].heads

    @property
    def rank(self) -> int:
        """Head dimension."""
        return self.g[0].rank
