"""Moves along the orbits of a model's parameters: group elements on the heads, exact translations of biases.

The formulas behind the methods of :class:`quotient_nets.parameters.ParameterManifold`, which documents them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from quotient_nets.manifolds import FixedRank
from quotient_nets.parameters.blocks import Block
from quotient_nets.parameters.layout import Layout
from quotient_nets.parameters.views import Pair, Translation


def random_action(
    layout: Layout,
    blocks: Sequence[Block],
    x: Tensor,
    *,
    condition: float,
    translations: bool,
    generator: torch.Generator | None,
    kinds: Iterable[str] | None,
) -> Tensor:
    """Another point of the orbit of ``x``, detached: every head of every quotient block moved by its own element."""
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    *parts, rest = layout.gather(x.detach().double())
    for i, block in enumerate(blocks):
        if isinstance(block.manifold, FixedRank) and (kinds is None or block.kind in kinds):
            shape = parts[i].shape
            a = block.manifold.random_element(*shape[:-2], shape[-1], condition=condition, generator=generator)
            parts[i] = block.manifold.action(parts[i], a.to(x.device))
    y = layout.scatter([*parts, rest])
    for pair, translation in translations_of(blocks, kinds) if translations else ():
        weight = layout.read(y, pair.weight_beside(translation.bias))
        noise = torch.randn(layout.read(y, translation.bias).shape, generator=generator, dtype=y.dtype)
        shift(layout, y, translation, noise.to(y.device) * weight.std())
    return y.to(x.dtype)


def canonicalize(layout: Layout, blocks: Sequence[Block], x: Tensor, *, translations: bool) -> Tensor:
    """The canonical point of the orbit of ``x``, detached."""
    y = x.detach().double().clone()
    for _, translation in translations_of(blocks) if translations else ():
        shift(layout, y, translation, -layout.read(y, translation.bias))
    *parts, rest = layout.gather(y)
    for i, block in enumerate(blocks):
        if isinstance(block.manifold, FixedRank):
            parts[i] = block.manifold.canonicalize(parts[i])[0]
    return layout.scatter([*parts, rest]).to(x.dtype)


def translations_of(blocks: Sequence[Block], kinds: Iterable[str] | None = None) -> list[tuple[Pair, Translation]]:
    """Exact bias translations of the quotient blocks, with the pairs they belong to; of some kinds, or of all."""
    chosen = None if kinds is None else set(kinds)
    moving = [b for b in blocks if b.quotient and (chosen is None or b.kind in chosen)]
    pairs = dict.fromkeys(run.pair for block in moving for run in block.component.heads)
    return [(pair, pair.translation) for pair in pairs if pair.translation is not None]


def shift(layout: Layout, x: Tensor, translation: Translation, amount: Tensor) -> None:
    """Add ``amount`` to a bias inside ``x``, which is overwritten, and compensate where that is needed."""
    layout.read(x, translation.bias).add_(amount)
    if translation.output is not None and translation.output_bias is not None:
        moved = (layout.read(x, translation.output) * amount).sum(dim=(-4, -3, -1))
        layout.entries[translation.output_bias].read(x).sub_(moved)


def held(layout: Layout, blocks: Sequence[Block], x: Tensor) -> list[Tensor | None]:
    """For each block and, last, the rest: a mask with 0 on the biases that translations make zero; None without any."""
    mask, shifted = x.new_ones(layout.size), set()
    for pair, translation in translations_of(blocks):
        layout.read(mask, translation.bias).zero_()
        shifted.add(pair)
    *parts, rest = layout.gather(mask)
    stacks = [*(block.component.heads for block in blocks), layout.loose]
    masks = [*(part.narrow(-1, 0, 1) for part in parts), rest]
    return [
        part if shifted.intersection(run.pair for run in runs) else None
        for part, runs in zip(masks, stacks, strict=True)
    ]
