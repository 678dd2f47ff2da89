"""Gains of normalisation layers, and the weights that can absorb them.

In a pre-norm layer the output of a norm is read by linear layers only: multiplying gain and bias by ``c`` and dividing
the columns of these layers by ``c`` leaves the function unchanged. No quotient of this package divides this symmetry
out; it is here so that a study can show what it does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quotient_nets.architectures.declare import under


@dataclass(frozen=True)
class NormGain:
    """One norm and its readers, by parameter name.

    Attributes:
        scaled: Gain, and bias if there is one.
        readers: Weights ``(out, in)`` that read the norm's output, all of them.
    """

    scaled: tuple[str, ...]
    readers: tuple[str, ...]


def _torch_layer(layer: nn.Module) -> dict[str, tuple[str, ...]]:
    attention = ("self_attn.in_proj_weight",)
    return {"norm1": attention, "norm2": ("linear1.weight",)} if layer.norm_first else {}


def _vit_layer(layer: nn.Module) -> dict[str, tuple[str, ...]]:
    heads = "attention." if hasattr(layer.get_submodule("attention"), "q_proj") else "attention.attention."
    ending = "_proj.weight" if heads == "attention." else ".weight"
    names = ("q", "k", "v") if heads == "attention." else ("query", "key", "value")
    first = "mlp.fc1.weight" if hasattr(layer, "mlp") else "intermediate.dense.weight"
    return {"layernorm_before": tuple(f"{heads}{n}{ending}" for n in names), "layernorm_after": (first,)}


_READERS: dict[str, Callable[[nn.Module], dict[str, tuple[str, ...]]]] = {
    "TransformerEncoderLayer": _torch_layer,
    "ViTLayer": _vit_layer,
    "DeiTLayer": _vit_layer,
    "ViTMSNLayer": _vit_layer,
}


def norm_gains(model: nn.Module) -> tuple[NormGain, ...]:
    """Norms of known layers whose gains the following weights can absorb; none in post-norm layers."""
    return tuple(_found(model))


def _found(model: nn.Module) -> Iterator[NormGain]:
    names = {name for name, _ in model.named_parameters()}
    for prefix, layer in model.named_modules():
        for norm, readers in _READERS.get(type(layer).__name__, lambda _: {})(layer).items():
            scaled = [under(prefix, f"{norm}.{part}") for part in ("weight", "bias")]
            yield NormGain(
                tuple(name for name in scaled if name in names), tuple(under(prefix, reader) for reader in readers)
            )


def rescale_norm_gains(
    parameters: Mapping[str, Tensor],
    gains: tuple[NormGain, ...],
    *,
    condition: float = 10.0,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """The same function with every gain multiplied by a random positive vector, and its readers divided by it.

    Args:
        parameters: Parameters by name; not changed.
        gains: From :func:`norm_gains`.
        condition: Ratio between the largest and the smallest factor that can occur; factors are log-uniform.
        generator: Source of the factors; a fixed seed by default.

    Returns:
        All parameters by name, the changed ones as copies.
    """
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    changed = dict(parameters)
    for gain in gains:
        old = changed[gain.scaled[0]]
        exponent = torch.rand(old.shape, generator=generator, dtype=torch.float64) - 0.5
        factor = torch.exp(exponent * math.log(condition)).to(old.device)
        for name in gain.scaled:
            changed[name] = (changed[name].double() * factor).to(old.dtype)
        for name in gain.readers:
            changed[name] = (changed[name].double() / factor).to(old.dtype)
    return changed
