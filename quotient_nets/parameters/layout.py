r"""A flat vector of parameters, and its entries in the order of blocks.

The flat vector holds the parameters in their stored layout, one after the other, as
``torch.nn.utils.parameters_to_vector`` does. Geometry wants the same numbers as one batched point for each block and
one vector for the rest. Going from one to the other is a permutation; it is carried out by strided copies, each entry
read and written once, and is its own kind of derivative.

Knows parameter names, shapes and views, no module class and no manifold.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from quotient_nets.parameters.views import Pair, View
from quotient_nets.tangent_space import copy_all


@dataclass(frozen=True)
class Entry:
    """A parameter in the flat vector: ``flat[offset : offset + size].view(shape)``."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    offset: int

    @property
    def size(self) -> int:
        """Number of entries."""
        return self.shape.numel()

    def read(self, flat: Tensor) -> Tensor:
        """The parameter inside ``flat``, as a view ``(..., *shape)``."""
        return flat.narrow(-1, self.offset, self.size).view((*flat.shape[:-1], *self.shape))


@dataclass(frozen=True)
class Heads:
    """A run of heads of one pair."""

    pair: Pair
    first: int
    count: int

    @property
    def numbers(self) -> range:
        """Numbers of the heads."""
        return range(self.first, self.first + self.count)


@dataclass(frozen=True)
class Component:
    """Shape of one block, ``(heads, n + m, rank)``, and which heads it stacks."""

    heads: tuple[Heads, ...]
    n: int
    m: int
    rank: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads, rows, rank."""
        return sum(run.count for run in self.heads), self.n + self.m, self.rank


class Layout:
    """Permutation between stored order and block order.

    Args:
        entries: Parameters in stored order.
        components: Blocks.
        loose: Heads whose entries belong to the rest although their parameters also hold heads of blocks.

    Raises:
        ValueError: The views of a parameter that has entries in a block do not cover it exactly.
    """

    def __init__(self, entries: Sequence[Entry], components: Sequence[Component], loose: Sequence[Heads]):
        self.entries = {entry.name: entry for entry in entries}
        self.size = sum(entry.size for entry in entries)
        self.components = tuple(components)
        self.loose = tuple(loose)
        inside = [(view, run) for c in components for run in c.heads for view in run.pair.views]
        viewed = {view.parameter for view, _ in inside}
        self.whole = tuple(entry for entry in entries if entry.name not in viewed)
        taken = {(view, head) for view, run in inside for head in run.numbers}
        self._loose_views = tuple(_untaken(loose, viewed, taken))
        self._check_cover(inside)
        self.rest_size = self.size - sum(math.prod(component.shape) for component in components)

    def _check_cover(self, inside: Sequence[tuple[View, Heads]]) -> None:
        covered: dict[str, int] = {}
        for view, run in [*inside, *self._loose_views]:
            entry = self.entries[view.parameter]
            count = entry.size // (view.heads * view.parts) * run.count
            covered[view.parameter] = covered.get(view.parameter, 0) + count
        for name, count in covered.items():
            if count != self.entries[name].size:
                raise ValueError(
                    f"expected the views of {name} to cover its {self.entries[name].size} entries once, they cover "
                    f"{count}. The architecture's declaration misses or repeats a part."
                )

    def read(self, flat: Tensor, view: View) -> Tensor:
        """A view of one of the parameters inside ``flat``, ``(..., head, group, row, rank)``; shares its memory."""
        return view.strided(self.entries[view.parameter].read(flat))

    def matching(self, parameters: Mapping[str, Tensor]) -> list[Tensor]:
        """Parameters in stored order, looked up by name.

        Raises:
            ValueError: A parameter is missing or has another shape.
        """
        found = []
        for entry in self.entries.values():
            tensor = parameters.get(entry.name)
            if tensor is None or tensor.shape != entry.shape:
                got = "no such parameter" if tensor is None else f"shape {tuple(tensor.shape)}"
                raise ValueError(
                    f"expected parameter {entry.name} of shape {tuple(entry.shape)}, got {got}. Build the manifold "
                    "from a model of this architecture with `parameter_manifold(model)`."
                )
            found.append(tensor)
        return found

    def store(self, flat: Tensor, parameters: Iterable[Tensor | None]) -> Tensor:
        """Write the parameters, in stored order, into ``flat``; zeros where there is none."""
        pairs = [(entry.read(flat), t) for entry, t in zip(self.entries.values(), parameters, strict=True)]
        for target in (target for target, tensor in pairs if tensor is None):
            target.zero_()
        copy_all([(target, tensor) for target, tensor in pairs if tensor is not None])
        return flat

    def gather(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Blocks ``(..., heads, n + m, rank)`` and, last, the rest ``(..., size)``, as copies; differentiable."""
        return _Gather.apply(flat, self)  # pyright: ignore[reportReturnType]

    def scatter(self, parts: Sequence[Tensor]) -> Tensor:
        """Inverse of :meth:`gather`; differentiable."""
        return _Scatter.apply(self, *parts)  # pyright: ignore[reportReturnType]

    def parts(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Views of a vector that is already in block order."""
        sizes = [math.prod(component.shape) for component in self.components]
        split = flat.split([*sizes, self.rest_size], dim=-1)
        blocks = zip(split[:-1], self.components, strict=True)
        return *(block.unflatten(-1, component.shape) for block, component in blocks), split[-1]

    def empty_parts(self, like: Tensor, lead: Sequence[int]) -> tuple[Tensor, ...]:
        """Uninitialised blocks and rest."""
        shapes = [*(component.shape for component in self.components), (self.rest_size,)]
        return tuple(like.new_empty(*lead, *shape) for shape in shapes)

    def copy(self, flat: Tensor, parts: Sequence[Tensor], *, gather: bool) -> None:
        """Copy all entries between a flat vector and the parts; ``gather`` says in which direction."""
        pairs = self._aligned(flat, parts)
        copy_all([(part, stored) if gather else (stored, part) for stored, part in pairs])

    def _aligned(self, flat: Tensor, parts: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of ``flat`` and of the parts that hold the same entries."""

        def stored_view(view: View, run: Heads) -> Tensor:
            return self.read(flat, view).narrow(-4, run.first, run.count)

        for component, part in zip(self.components, parts, strict=False):
            head = 0
            for run in component.heads:
                rows, row = part.narrow(-3, head, run.count), 0
                for view in run.pair.views:
                    stored = stored_view(view, run)
                    count = stored.shape[-3] * stored.shape[-2]
                    yield stored, rows.narrow(-2, row, count).unflatten(-2, stored.shape[-3:-1])
                    row += count
                head += run.count
        rest, at = parts[-1], 0
        for entry in self.whole:
            yield flat.narrow(-1, entry.offset, entry.size), rest.narrow(-1, at, entry.size)
            at += entry.size
        for view, run in self._loose_views:
            stored = stored_view(view, run)
            count = math.prod(stored.shape[-4:])
            yield stored, rest.narrow(-1, at, count).unflatten(-1, stored.shape[-4:])
            at += count


def _untaken(loose: Sequence[Heads], viewed: set[str], taken: set[tuple[View, int]]) -> Iterator[tuple[View, Heads]]:
    """Loose views of parameters that have entries in blocks, head by head, each once; tied ones are taken already."""
    seen = set(taken)
    for run in loose:
        for view in run.pair.views:
            if view.parameter not in viewed:
                continue
            for head in run.numbers:
                if (view, head) not in seen:
                    seen.add((view, head))
                    yield view, Heads(run.pair, head, 1)


class _Gather(torch.autograd.Function):
    """Stored order to block order; linear, so that it is its own tangent, and its adjoint is its inverse."""

    @staticmethod
    @override
    def forward(flat: Tensor, layout: Layout) -> tuple[Tensor, ...]:
        parts = layout.empty_parts(flat, flat.shape[:-1])
        layout.copy(flat.contiguous(), parts, gather=True)
        return parts

    @staticmethod
    @override
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.layout = inputs[1]

    @staticmethod
    @override
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        return _Scatter.apply(ctx.layout, *slopes), None

    @staticmethod
    @override
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Any:
        return _Gather.apply(tangent, ctx.layout)

    @staticmethod
    @override
    def vmap(info: Any, in_dims: Any, flat: Tensor, layout: Layout) -> Any:
        parts = _Gather.apply(flat.movedim(in_dims[0], 0), layout)
        return parts, (0,) * (len(layout.components) + 1)


class _Scatter(torch.autograd.Function):
    """Block order to stored order, the inverse of :class:`_Gather`."""

    @staticmethod
    @override
    def forward(layout: Layout, *parts: Tensor) -> Tensor:
        flat = parts[-1].new_empty(*parts[-1].shape[:-1], layout.size)
        layout.copy(flat, parts, gather=False)
        return flat

    @staticmethod
    @override
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.layout = inputs[0]

    @staticmethod
    @override
    def backward(ctx: Any, slope: Tensor) -> Any:
        return None, *_Gather.apply(slope, ctx.layout)

    @staticmethod
    @override
    def jvp(ctx: Any, _: None, *tangents: Tensor) -> Any:
        return _Scatter.apply(ctx.layout, *tangents)

    @staticmethod
    @override
    def vmap(info: Any, in_dims: Any, layout: Layout, *parts: Tensor) -> Any:
        moved = [
            part.expand(info.batch_size, *part.shape) if dim is None else part.movedim(dim, 0)
            for part, dim in zip(parts, in_dims[1:], strict=True)
        ]
        return _Scatter.apply(layout, *moved), 0
