r"""The parameters of a model as one point of one ``geoopt.Manifold``.

A point is a flat tensor ``(..., N)`` with the parameters in their stored layout, one after the other. Blocks of it,
the heads of all attention layers of one shape, are points of a quotient manifold; what is left has a metric of its own.

Knows layouts and manifolds, no module class. :mod:`quotient_nets.architectures` finds the blocks of a model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import geoopt
import torch
from torch import Tensor, nn
from typing_extensions import override

from quotient_nets.manifolds import InvariantFixedRank
from quotient_nets.parameters.blocks import Block
from quotient_nets.parameters.invariance import InvarianceReport, check_invariance
from quotient_nets.parameters.layout import Entry, Heads, Layout
from quotient_nets.parameters.substitution import at_parameters
from quotient_nets.parameters.symmetry import canonicalize, held, random_action, translations_of
from quotient_nets.parameters.tangent import ParameterTangentSpace
from quotient_nets.parameters.views import Pair, Translation
from quotient_nets.tangent_space import Checked, TangentSpace, check_point, tangent_space


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

    def pack(self, model: nn.Module | Mapping[str, Tensor], *, check: bool = True) -> Tensor:
        """Point of a model, or of a dict of its parameters; a copy, detached.

        Args:
            model: The model, or its parameters by name.
            check: Refuse invalid weights. False reads nothing back from a device; an invalid head then gives NaN.

        Raises:
            ValueError: A parameter is missing, has another shape, or is NaN or infinite; a head of a quotient block is
                rank deficient. The message names the parameter, or the module and the head.
        """
        tensors = [tensor.detach() for tensor in self.layout.matching(_named(model))]
        for entry, tensor in zip(self.entries, tensors, strict=True):
            if check and not bool(tensor.isfinite().all()):
                raise ValueError(
                    f"expected finite weights, parameter {entry.name} holds NaN or Inf. Repair the checkpoint."
                )
        x = torch.empty(self.layout.size, dtype=self.dtype_of_points, device=tensors[0].device)
        self.layout.store(x, tensors)
        ok, reason = self._check_point_on_manifold(x) if check else (True, None)
        if not ok:
            raise ValueError(reason)
        return x

    def check_point_of(self, model: nn.Module, x: Tensor) -> Tensor:
        """``x``, detached, if it is one point of this manifold and the manifold belongs to ``model``.

        Raises:
            ValueError: It is not; the message says why.
        """
        self.layout.matching(_named(model))
        ok, reason = check_point(self, x)
        if not ok or x.dim() != 1:
            raise ValueError(
                f"expected one point of the parameter manifold, shape ({self.layout.size},): "
                f"{reason or f'got a batch of shape {tuple(x.shape)}'}"
            )
        return x.detach()

    def unpack(self, x: Tensor, *, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Parameters by name, each in its own dtype or in ``dtype``: views of ``x`` where that is the point's."""
        self._assert_check_shape(x.shape, "x")  # pyright: ignore[reportArgumentType]  # geoopt: Tuple[int]
        pieces = x.split([entry.size for entry in self.entries], dim=-1)
        return {
            entry.name: piece.reshape((*x.shape[:-1], *entry.shape)).to(dtype or entry.dtype)
            for entry, piece in zip(self.entries, pieces, strict=True)
        }

    def call(self, model: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass at ``x``; the model itself, its buffers included, stays as it is."""
        return at_parameters(model, self.unpack(x), _forward, *args, **kwargs)

    def check(self, model: nn.Module, *args: Any, **kwargs: Any) -> InvarianceReport:
        """Prove on these inputs that the groups of the blocks leave the model's output unchanged.

        Raises:
            ValueError: They do not; the message names the blocks.
        """
        return check_invariance(self, model, _forward, *args, **kwargs)

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
        return random_action(
            self.layout,
            self.blocks,
            x,
            condition=condition,
            translations=translations,
            generator=generator,
            kinds=kinds,
        )

    def canonicalize(self, x: Tensor, *, translations: bool = True) -> Tensor:
        """The canonical point of the orbit of ``x``, detached.

        Exact bias translations set key and value biases to zero, the latter by folding them into the output bias,
        unless ``translations`` is False; then every quotient block is balanced, ``G^T G = H^T H = diag(s)``.
        """
        return canonicalize(self.layout, self.blocks, x, translations=translations)

    def section(self) -> ParameterManifold:
        """The same manifold with the biases that :meth:`canonicalize` makes zero held at zero."""
        other = copy.copy(self)
        other.holds_translations = True
        return other

    def translations(self, kinds: Iterable[str] | None = None) -> list[tuple[Pair, Translation]]:
        """Exact bias translations of the quotient blocks, with the pairs they belong to."""
        return translations_of(self.blocks, kinds)

    # -- geometry -------------------------------------------------------------------------------------------------

    def at(self, x: Tensor, *, balanced: bool = False) -> ParameterTangentSpace:
        """Tangent space at ``x``, prepared once; ``balanced`` says that ``x`` is as :meth:`canonicalize` returns it."""
        x = x.detach()
        *blocks, rest = self.layout.gather(x)
        spaces: list[TangentSpace] = []
        for block, part in zip(self.blocks, blocks, strict=True):
            if balanced and isinstance(block.manifold, InvariantFixedRank):
                spaces.append(block.manifold.at(part, balanced=True))
            else:
                spaces.append(tangent_space(block.manifold, part))
        spaces.append(tangent_space(self.rest, rest))
        return ParameterTangentSpace(
            x,
            self.layout,
            spaces,
            [block.quotient for block in self.blocks] + [False],
            [block.weight for block in self.blocks] + [self.rest_weight],
            held(self.layout, self.blocks, x) if self.holds_translations else [None] * len(spaces),
        )

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
        ok, reason = cast("Checked", super()._check_shape(cast("Any", shape), name))
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
        parts = zip(self.blocks, self.layout.gather(x.detach()), strict=False)
        names = [name for block, part in parts for name in block.deficient_heads(part)]
        if names:
            return False, (
                f"expected heads of full rank; rank deficient: {'; '.join(names)}. Build the manifold with "
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
        worst = float(residual.max())
        return False, f"expected horizontal vectors; vertical part of norm {worst:.3g}. Use `proju(x, u)`."


def _named(model: nn.Module | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return dict(model.named_parameters()) if isinstance(model, nn.Module) else model


def _forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)
