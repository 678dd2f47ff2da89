r"""The parameters of a model as one point of one ``geoopt.Manifold``.

A point is a flat tensor ``(..., N)`` with the parameters in their stored layout, one after the other. Blocks of it,
the heads of all attention layers of one shape, are points of a quotient manifold; what is left has a metric of its own.

Knows layouts and manifolds, no module class. :mod:`quotient_nets.architectures` finds the blocks of a model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import geoopt
import torch
from torch import Tensor, nn
from typing_extensions import override

from quotient_nets.manifolds import FixedRank, InvariantFixedRank, QuotientManifold
from quotient_nets.parameters.invariance import InvarianceReport, check_invariance
from quotient_nets.parameters.layout import Component, Entry, Heads, Layout
from quotient_nets.parameters.stand_in import StandIn
from quotient_nets.parameters.tangent import ParameterTangentSpace
from quotient_nets.parameters.views import Pair, Translation, View
from quotient_nets.tangent_space import TangentSpace, tangent_space


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

    def head_name(self, index: int) -> str:
        """Module and head number of one element of the batch."""
        for run in self.component.heads:
            if index < run.count:
                return f"{run.pair.module}, head {run.first + index} ({self.kind})"
            index -= run.count
        raise IndexError(index)


class ParameterManifold(geoopt.Manifold):
    """Product of the quotient manifolds of a model's blocks and a metric on its other parameters.

    Built by :func:`quotient_nets.parameter_manifold`. Holds names and shapes, not the model and no tensors.

    Args:
        entries: Parameters in stored order.
        blocks: Blocks.
        rest: Manifold of vectors for all other entries.
        loose: Heads whose entries are part of the rest.
        notes: What was left out of the blocks and why, for reports.
        rest_weight: Factor of the rest in the squared norm.
    """

    ndim = 1
    reversible = False
    name = "ParameterManifold"

    def __init__(
        self,
        entries: Sequence[Entry],
        blocks: Sequence[Block],
        rest: geoopt.Manifold,
        loose: Sequence[Heads] = (),
        notes: Sequence[str] = (),
        rest_weight: float = 1.0,
    ):
        super().__init__()
        self.blocks = tuple(blocks)
        self.rest, self.rest_weight = rest, rest_weight
        self.notes = tuple(notes)
        self.layout = Layout(entries, [block.component for block in blocks], loose)
        self.holds_translations = False

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Parameters in stored order: name, shape, dtype, offset."""
        return tuple(self.layout.entries.values())

    @property
    def dtype_of_points(self) -> torch.dtype:
        """Widest dtype of the parameters, at least float32."""
        dtype = torch.float32
        for entry in self.entries:
            dtype = torch.promote_types(dtype, entry.dtype)
        return dtype

    @override
    def extra_repr(self) -> str:
        """One line for each block."""
        lines = [f"{b.kind}: {b.shape[0]} x {b.manifold!r}, rank {b.shape[2]}" for b in self.blocks]
        return "\n".join([*lines, f"rest: {self.layout.rest_size} entries, {self.rest!r}"])

    # -- models ---------------------------------------------------------------------------------------------------

    def pack(self, model: nn.Module | Mapping[str, Tensor]) -> Tensor:
        """Point of a model, or of a dict of its parameters; a copy, detached.

        Raises:
            ValueError: A parameter is missing, has another shape, or is NaN or infinite; a head of a quotient block is
                rank deficient. The message names the parameter, or the module and the head.
        """
        named = dict(model.named_parameters()) if isinstance(model, nn.Module) else model
        parts = []
        for entry in self.entries:
            tensor = named.get(entry.name)
            if tensor is None or tensor.shape != entry.shape:
                got = "no such parameter" if tensor is None else f"shape {tuple(tensor.shape)}"
                raise ValueError(
                    f"expected parameter {entry.name} of shape {tuple(entry.shape)}, got {got}. Build the manifold from "
                    "a model of this architecture with `parameter_manifold(model)`."
                )
            if not bool(tensor.isfinite().all()):
                raise ValueError(
                    f"expected finite weights, parameter {entry.name} holds NaN or Inf. Repair the checkpoint."
                )
            parts.append(tensor.detach().flatten().to(self.dtype_of_points))
        x = torch.cat(parts)
        ok, reason = self._check_point_on_manifold(x)
        if not ok:
            raise ValueError(reason)
        return x

    def unpack(self, x: Tensor, *, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Parameters by name, each in its own dtype or in ``dtype``: views of ``x`` where that is the point's."""
        self._assert_check_shape(x.shape, "x")
        pieces = x.split([entry.size for entry in self.entries], dim=-1)
        return {
            entry.name: piece.reshape(*x.shape[:-1], *entry.shape).to(dtype or entry.dtype)
            for entry, piece in zip(self.entries, pieces, strict=True)
        }

    def call(self, model: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass at ``x``; the model itself, its buffers included, stays as it is."""
        return StandIn(model, self.unpack(x))(*args, **kwargs)

    def check(self, model: nn.Module, *args: Any, **kwargs: Any) -> InvarianceReport:
        """Prove on these inputs that the groups of the blocks leave the model's output unchanged.

        Raises:
            ValueError: They do not; the message names the blocks.
        """
        return check_invariance(self, model, lambda stand_in, a, k: stand_in(*a, **k), args, kwargs)

    # -- symmetries -----------------------------------------------------------------------------------------------

    def random_action(
        self,
        x: Tensor,
        *,
        condition: float = 10.0,
        translations: bool = True,
        generator: torch.Generator | None = None,
        kinds: Iterable[str] | None = None,
    ) -> Tensor:
        """Another point of the orbit of ``x``: every head of every quotient block moved by its own group element.

        Args:
            x: Point, ``(..., N)``.
            condition: Condition number of the group elements; 1 gives orthogonal ones.
            translations: Also shift the biases whose shifts are exact, by the size of the weights beside them.
            generator: Source of the elements; a fixed seed by default.
            kinds: Kinds of the blocks that move; all by default.

        Raises:
            ValueError: ``condition`` is less than 1.
        """
        generator = torch.Generator().manual_seed(0) if generator is None else generator
        *blocks, rest = self.layout.gather(x.detach().double())
        for i, block in enumerate(self.blocks):
            if isinstance(block.manifold, FixedRank) and (kinds is None or block.kind in kinds):
                shape = blocks[i].shape
                a = block.manifold.random_element(*shape[:-2], shape[-1], condition=condition, generator=generator)
                blocks[i] = block.manifold.action(blocks[i], a.to(x.device))
        y = self.layout.scatter([*blocks, rest])
        for pair, shift in self.translations(kinds) if translations else ():
            weight = self._read(y, pair.weight_beside(shift.bias))
            noise = torch.randn(self._read(y, shift.bias).shape, generator=generator, dtype=y.dtype)
            self._shift(y, shift, noise.to(y.device) * weight.std())
        return y.to(x.dtype)

    def canonicalize(self, x: Tensor, *, translations: bool = True) -> Tensor:
        """The canonical point of the orbit of ``x``, detached.

        Exact bias translations set key and value biases to zero, the latter by folding them into the output bias, unless
        ``translations`` is False; then every quotient block is balanced, ``G^T G = H^T H = diag(s)``.
        """
        y = x.detach().double().clone()
        for _, shift in self.translations() if translations else ():
            self._shift(y, shift, -self._read(y, shift.bias))
        *blocks, rest = self.layout.gather(y)
        for i, block in enumerate(self.blocks):
            if isinstance(block.manifold, FixedRank):
                blocks[i] = block.manifold.canonicalize(blocks[i])[0]
        return self.layout.scatter([*blocks, rest]).to(x.dtype)

    def section(self) -> ParameterManifold:
        """The same manifold with the biases that :meth:`canonicalize` makes zero held at zero."""
        other = copy.copy(self)
        other.holds_translations = True
        return other

    def translations(self, kinds: Iterable[str] | None = None) -> list[tuple[Pair, Translation]]:
        """Exact bias translations of the quotient blocks, with the pairs they belong to."""
        chosen = None if kinds is None else set(kinds)
        blocks = [b for b in self.blocks if b.quotient and (chosen is None or b.kind in chosen)]
        pairs = dict.fromkeys(run.pair for block in blocks for run in block.component.heads)
        return [(pair, pair.translation) for pair in pairs if pair.translation is not None]

    def _read(self, x: Tensor, view: View) -> Tensor:
        return view.strided(self.layout.entries[view.parameter].read(x))

    def _shift(self, x: Tensor, shift: Translation, amount: Tensor) -> None:
        """Add ``amount`` to a bias inside ``x``, which is overwritten, and compensate where that is needed."""
        self._read(x, shift.bias).add_(amount)
        if shift.output is not None and shift.output_bias is not None:
            moved = (self._read(x, shift.output) * amount).sum(dim=(-4, -3, -1))
            self.layout.entries[shift.output_bias].read(x).sub_(moved)

    # -- geometry -------------------------------------------------------------------------------------------------

    def at(self, x: Tensor, *, balanced: bool = False) -> ParameterTangentSpace:
        """Tangent space at ``x``, prepared once; ``balanced`` says that ``x`` is as :meth:`canonicalize` returns it."""
        x = x.detach()
        *blocks, rest = self.layout.gather(x)
        spaces: list[TangentSpace] = []
        for block, part in zip(self.blocks, blocks, strict=True):
            quick = balanced and isinstance(block.manifold, InvariantFixedRank)
            spaces.append(block.manifold.at(part, balanced=True) if quick else tangent_space(block.manifold, part))
        spaces.append(tangent_space(self.rest, rest))
        return ParameterTangentSpace(
            x,
            self.layout,
            spaces,
            [block.quotient for block in self.blocks] + [False],
            [block.weight for block in self.blocks] + [self.rest_weight],
            [self._held_rows(block, x) for block in self.blocks] + [None],
        )

    def _held_rows(self, block: Block, x: Tensor) -> Tensor | None:
        if not (self.holds_translations and block.quotient):
            return None
        mask = torch.ones(*block.shape[:2], 1, dtype=x.dtype, device=x.device)
        head, held = 0, False
        for run in block.component.heads:
            row = 0
            for view in run.pair.views:
                count = self._read(x, view).shape[-3:-1].numel()
                if run.pair.translation is not None and view == run.pair.translation.bias:
                    mask.narrow(0, head, run.count).narrow(1, row, count).zero_()
                    held = True
                row += count
            head += run.count
        return mask if held else None

    def _move(self, x: Tensor, u: Tensor, path: str) -> Tensor:
        space = self.at(x)
        return space.move(space.coordinates(u), path)

    @override
    def retr(self, x: Tensor, u: Tensor) -> Tensor:
        """Straight line ``x + u``."""
        return x + u

    @override
    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        """Geodesic of the product: that of every block, and that of the rest."""
        return self._move(x, u, "expmap")

    def exact(self, x: Tensor, u: Tensor) -> Tensor:
        """Exact geodesic of every quotient block, straight line on everything else."""
        return self._move(x, u, "exact")

    def second_order(self, x: Tensor, u: Tensor) -> Tensor:
        """Second-order Taylor polynomial of every quotient block's geodesic, straight line on everything else."""
        return self._move(x, u, "second_order")

    @override
    def inner(self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        """Weighted sum of the inner products of all components."""
        space = self.at(x)
        c = space.coordinates(u)
        inner = space.inner(c, c if v is None else space.coordinates(v))
        return inner if keepdim else inner.squeeze(-1)

    @override
    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        """Horizontal part in every quotient block; no change of exactly zero weights under the adaptive metric."""
        space = self.at(x)
        return space.vector(space.project(space.coordinates(u)))

    @override
    def egrad2rgrad(self, x: Tensor, u: Tensor) -> Tensor:
        """Horizontal Riemannian gradient, component by component."""
        space = self.at(x)
        # The metric of coordinates is orthonormal only up to the weights, which `coordinates` has taken in.
        return space.vector(space.gradient(space.pull_gradient(u)))

    @override
    def transp(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Transport of every component."""
        manifolds = [*(block.manifold for block in self.blocks), self.rest]
        parts = zip(manifolds, *(self.layout.gather(t) for t in (x, y, v)), strict=True)
        return self.layout.scatter([manifold.transp(*part) for manifold, *part in parts])

    @override
    def projx(self, x: Tensor) -> Tensor:
        return x.contiguous()

    @override
    def _check_shape(self, shape: tuple[int, ...], name: str) -> tuple[bool, str | None]:
        ok, reason = super()._check_shape(shape, name)
        if ok and shape[-1] != self.layout.size:
            return False, (
                f"`{name}` must have shape (..., {self.layout.size}), the number of parameters; got {tuple(shape)}. "
                "Build it with `pack(model)`."
            )
        return ok, reason

    @override
    def _check_point_on_manifold(self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5) -> tuple[bool, str | None]:
        if not bool(x.isfinite().all()):
            return False, "expected finite parameters, got NaN or Inf"
        for block, part in zip(self.blocks, self.layout.gather(x.detach()), strict=False):
            if isinstance(block.manifold, FixedRank):
                deficient = (
                    block.manifold.deficient(part).reshape(-1, block.shape[0]).any(0).nonzero().flatten().tolist()
                )
                if deficient:
                    return False, (
                        f"expected heads of full rank {block.shape[2]}; rank deficient: "
                        f"{'; '.join(block.head_name(i) for i in deficient)}. Build the manifold with "
                        "`parameter_manifold(model, degenerate='rest')`, which moves exactly these heads to the rest."
                    )
        return True, None

    @override
    def _check_vector_on_tangent(
        self, x: Tensor, u: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5
    ) -> tuple[bool, str | None]:
        space = self.at(x)
        c = space.coordinates(u)
        residual = space.norm(c - space.project(c))
        if bool((residual <= atol + rtol * space.norm(c)).all()):
            return True, None
        return (
            False,
            f"expected horizontal vectors; vertical part of norm {float(residual.max()):.3g}. Use `proju(x, u)`.",
        )
