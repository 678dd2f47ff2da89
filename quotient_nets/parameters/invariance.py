r"""Proof on the spot that the symmetries of a parameter manifold leave a model's function unchanged.

A wrong split of a fused weight has the right shapes and no other symptom: random group elements on all blocks find it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from quotient_nets.parameters.batches import map_tensors
from quotient_nets.parameters.substitution import at_parameters, untouched

if TYPE_CHECKING:
    from quotient_nets.parameters.manifold import ParameterManifold

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # some layers compute in float32 inside a float64 model
ROUNDING = 1e-9  # changes below this are never held against a symmetry
SHARE_OF_CONTROL = 0.1  # where attention hardly matters, a change this close to that of a broken symmetry is one
CONTROL = 100  # tolerances by which breaking a symmetry must move the output
CONDITION = 10.0  # of the group elements


@dataclass(frozen=True)
class InvarianceReport:
    """Figures of an invariance check; changes are relative to the largest output.

    Attributes:
        change: Change of the output when all blocks are moved along their orbits.
        controls: Kind of block -> change when only one of its two factors is moved, which must not leave the output
            alone.
        tolerance: Largest change that passes.
        dtype: Precision of the check.
        unverified: Kinds whose control did not move the output, so that the check says nothing about them.
    """

    change: float
    controls: Mapping[str, float]
    tolerance: float
    dtype: torch.dtype
    unverified: tuple[str, ...]


def check_invariance(
    space: ParameterManifold, model: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> InvarianceReport:
    """Apply random group elements of condition 10 to every block and compare outputs.

    Computed in float64, floating inputs and buffers cast; in float32 where a kernel of the model has no float64.

    Args:
        space: Parameter manifold.
        model: Its model, left untouched.
        function: ``function(model, *args, **kwargs)`` -> what must not change: tensors in any structure.
        args: Inputs, in any structure; floating tensors in them are cast.
        kwargs: Inputs by name.

    Raises:
        ValueError: The output changes; the message names the modules whose blocks change it.
        RuntimeError: The model fails on these inputs, for another reason than a kernel that lacks a precision.
    """
    try:
        return _check(space, model, function, args, kwargs, torch.float64)
    except (RuntimeError, NotImplementedError) as error:
        if not any(word in str(error) for word in ("ouble", "loat", "dtype", "implemented")):
            raise
        return _check(space, model, function, args, kwargs, torch.float32)


def _check(
    space: ParameterManifold, model: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any, dtype: torch.dtype
) -> InvarianceReport:
    tolerance = TOLERANCE[dtype]

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    args, kwargs = map_tensors(cast, args), map_tensors(cast, kwargs)
    fixed = {name: cast(p.detach()) for name, p in model.named_parameters() if name not in space.layout.entries}

    def output(x: Tensor) -> Tensor:
        buffers = {name: cast(buffer.clone()) for name, buffer in model.named_buffers()}
        values = fixed | space.unpack(x, dtype=dtype)
        outputs = tree_leaves(at_parameters(model, values, function, *args, buffers=buffers, **kwargs))
        tensors = [leaf for leaf in outputs if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if not tensors:
            raise ValueError("expected the model to return floating-point tensors; the check has nothing to compare")
        return torch.cat([tensor.detach().double().flatten() for tensor in tensors])

    with untouched(model), torch.no_grad():
        x = space.pack(model).to(dtype)
        base = output(x)

        def change(y: Tensor) -> float:
            return float((output(y) - base).abs().max())

        kinds = tuple(dict.fromkeys(block.kind for block in space.blocks if block.quotient))
        controls = {kind: change(_one_sided(space, x, kind)) for kind in kinds}
        # Of the outputs or of what a broken symmetry does to them: a loss that cancels to zero has no size of its own.
        size = max([float(base.abs().max()), 1e-12, *(value for value in controls.values() if math.isfinite(value))])
        moved = change(space.random_action(x, condition=CONDITION)) / size
        weak = moved > ROUNDING and moved > SHARE_OF_CONTROL * max(controls.values(), default=0.0) / size
        if weak or not moved <= tolerance:
            guilty = [kind for kind in kinds if not change(space.random_action(x, kinds=[kind])) <= tolerance * size]
            modules = {r.pair.module for b in space.blocks if b.kind in guilty for r in b.component.heads}
            raise ValueError(
                f"expected the symmetries of the blocks to leave the output unchanged; it changes by {moved:.2g} of "
                f"its size (tolerance {tolerance:g}, {dtype}) through {', '.join(guilty) or 'all blocks together'} of "
                f"{', '.join(sorted(modules))}. The declared layout does not fit this model. Measure with "
                "`attention=AdaptiveEuclidean`, which claims no symmetry, or report the architecture."
            )
    controls = {kind: value / size for kind, value in controls.items()}
    unverified = tuple(kind for kind, value in controls.items() if not value >= CONTROL * tolerance)
    return InvarianceReport(moved, controls, tolerance, dtype, unverified)


def _one_sided(space: ParameterManifold, x: Tensor, kind: str) -> Tensor:
    """``x`` with the left factors of one kind of blocks moved, and the right ones left behind."""
    before = space.layout.gather(x)
    after = space.layout.gather(space.random_action(x, condition=CONDITION, translations=False, kinds=[kind]))
    mixed = list(before)
    for i, block in enumerate(space.blocks):
        if block.kind == kind and block.quotient:
            left = after[i].narrow(-2, 0, block.component.n)
            right = before[i].narrow(-2, block.component.n, block.component.m)
            mixed[i] = torch.cat([left, right], dim=-2)
    return space.layout.scatter(mixed)
