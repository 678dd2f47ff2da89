r"""Tangent space of a parameter manifold: the product of the blocks' tangent spaces and that of the rest.

Coordinates are one flat vector in block order, in which the metric is the sum over components; the geometry of a step
is then a few products for each block, and one permutation where a point leaves for the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor
from typing_extensions import override

from quotient_nets.parameters.layout import Layout
from quotient_nets.tangent_space import PathGradient, TangentSpace

MODEL_PATHS = ("exact", "second_order")
Step = tuple[Tensor, str, float | None]


class ParameterTangentSpace(TangentSpace):
    """Vectors at a flat point ``(..., N)``; coordinates are ``(..., N)`` in block order.

    Args:
        x: The point.
        layout: Permutation to block order.
        spaces: Tangent spaces of the blocks and, last, of the rest.
        curved: For each of them, whether the paths of the sharpness paper take its geodesic; the others move straight.
        weights: Factor of each component in the squared norm.
        held: For each component, a mask with 0 on rows that do not move, or None.
    """

    ndim = 1

    def __init__(
        self,
        x: Tensor,
        layout: Layout,
        spaces: Sequence[TangentSpace],
        curved: Sequence[bool],
        weights: Sequence[float],
        held: Sequence[Tensor | None],
    ):
        self.x, self.layout = x, layout
        self.batch = x.shape[:-1]
        self.spaces, self.curved, self.held = tuple(spaces), tuple(curved), tuple(held)
        self.scales = tuple(weight**0.5 for weight in weights)
        self.orthonormal = all(space.orthonormal for space in spaces)

    def _join(self, parts: Sequence[Tensor]) -> Tensor:
        flat = [part.flatten(-3) for part in parts[:-1]]  # heads, rows, rank
        return torch.cat([*flat, parts[-1]], dim=-1)

    def _hold(self, part: Tensor, mask: Tensor | None) -> Tensor:
        return part if mask is None else part * mask

    @override
    def coordinates(self, u: Tensor) -> Tensor:
        parts = zip(self.spaces, self.layout.gather(u), self.scales, strict=True)
        return self._join([_scaled(space.coordinates(part), scale) for space, part, scale in parts])

    @override
    def vector(self, c: Tensor) -> Tensor:
        parts = zip(self.spaces, self.layout.parts(c), self.scales, strict=True)
        return self.layout.scatter([space.vector(_scaled(part, 1 / scale)) for space, part, scale in parts])

    @override
    def pull_gradient(self, e: Tensor) -> Tensor:
        parts = zip(self.spaces, self.layout.gather(e), self.scales, strict=True)
        return self._join([_scaled(space.pull_gradient(part), 1 / scale) for space, part, scale in parts])

    @override
    def inner(self, c: Tensor, d: Tensor) -> Tensor:
        if self.orthonormal:
            return super().inner(c, d)
        pairs = zip(self.spaces, self.layout.parts(c), self.layout.parts(d), strict=True)
        *blocks, rest = [space.inner(left, right) for space, left, right in pairs]
        return sum((block.flatten(-3).sum(-1, keepdim=True) for block in blocks), start=rest)

    @override
    def project(self, c: Tensor) -> Tensor:
        parts = zip(self.spaces, self.layout.parts(c), self.held, strict=True)
        return self._join([self._hold(space.project(part), mask) for space, part, mask in parts])

    @override
    def gradient(self, e: Tensor) -> Tensor:
        parts = zip(self.spaces, self.layout.parts(e), self.held, strict=True)
        return self._join([self._hold(space.gradient(part), mask) for space, part, mask in parts])

    @override
    def move(self, c: Tensor, path: str, radius: float | None = None) -> Tensor:
        return self.layout.scatter([space.move(*step) for space, step in self._steps(c, path, radius)])

    @override
    def follow(
        self, c: Tensor, path: str, radius: float | None = None, out: Tensor | None = None
    ) -> tuple[Tensor, PathGradient]:
        work = self.layout.parts(self._workspace)
        steps = zip(self._steps(c, path, radius), work, strict=True)
        gradients = [space.follow(*step, out=target)[1] for (space, step), target in steps]

        def gradient(slope: Tensor, out: Tensor | None = None) -> Tensor:
            self.layout.copy(slope.contiguous(), work, gather=True)
            e = torch.empty_like(c) if out is None else out
            targets = zip(self.layout.parts(e), gradients, work, self.scales, self.held, strict=True)
            for target, own, part, scale, mask in targets:
                own(part, out=target)
                if scale != 1:
                    target.div_(scale)
                if mask is not None:
                    target.mul_(mask)
            return e

        y = torch.empty_like(c) if out is None else out
        self.layout.copy(y, work, gather=False)
        return y, gradient

    @cached_property
    def _workspace(self) -> Tensor:
        """Block order's scratch, written and read within one call: a fresh one costs more than what is done in it."""
        return torch.empty_like(self.x)

    def _steps(self, c: Tensor, path: str, radius: float | None) -> Iterator[tuple[TangentSpace, Step]]:
        """Every component with the velocity, the path and the bound that are its own."""
        for space, part, scale, curved in zip(self.spaces, self.layout.parts(c), self.scales, self.curved, strict=True):
            own = path
            if path in MODEL_PATHS:
                own = ("expmap" if path == "exact" else path) if curved else "retr"
            yield space, (_scaled(part, 1 / scale), own, None if radius is None else radius / scale)

    @override
    def origin(self) -> Tensor:
        return torch.zeros_like(self.x)

    @override
    def certificates(self, c: Tensor) -> dict[str, Tensor]:
        figures = super().certificates(c)
        found: dict[str, list[Tensor]] = {}
        for space, part in zip(self.spaces, self.layout.parts(c), strict=True):
            for name, value in space.certificates(part).items():
                found.setdefault(name, []).append(value.reshape(*self.batch, -1))
        worst = {"condition_number": torch.amax, "spectral_gap": torch.amin, "zero_weights": torch.sum}
        return figures | {
            name: reduce(torch.cat(found[name], dim=-1), dim=-1) for name, reduce in worst.items() if name in found
        }


def _scaled(part: Tensor, scale: float) -> Tensor:
    return part if scale == 1 else part * scale
