"""Building blocks of declarations: the pairs of attention layers with separate projections."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from quotient_nets.parameters import Pair, Translation, View

WEIGHT = "(head rank) row"  # a torch Linear that produces heads
BIAS = "(head rank)"
OUTPUT = "row (head rank)"  # a torch Linear that consumes heads


@dataclass(frozen=True)
class Heads:
    """Number of heads and their dimension."""

    count: int
    rank: int

    def view(self, parameter: str, stored: str, *, parts: int = 1, part: int = 0) -> View:
        """View of one parameter of these heads."""
        return View(parameter, stored, self.count, self.rank, parts=parts, part=part)


def under(prefix: str, name: str) -> str:
    """Name of something inside a module."""
    return f"{prefix}.{name}" if prefix else name


def separate_projections(
    prefix: str, module: nn.Module, heads: Heads, *, query: str, key: str, value: str, output: str, scores: bool = True
) -> tuple[Pair, ...]:
    """Pairs of an attention layer with one ``torch.nn.Linear`` for each projection.

    Args:
        prefix: Name of the attention module.
        module: The module.
        heads: Its heads.
        query: Name of the query projection below ``module``; likewise the others.
        key: Key projection.
        value: Value projection.
        output: Output projection.
        scores: Whether scores are plain products of queries and keys, so that GL(h) acts on them.
    """

    def rows(name: str) -> tuple[View, ...]:
        full, linear = under(prefix, name), module.get_submodule(name)
        bias = () if linear.bias is None else (heads.view(f"{full}.bias", BIAS),)
        return heads.view(f"{full}.weight", WEIGHT), *bias

    out = module.get_submodule(output)
    out_weight = heads.view(f"{under(prefix, output)}.weight", OUTPUT)
    out_bias = None if out.bias is None else f"{under(prefix, output)}.bias"
    pairs = (value_output(prefix, rows(value), out_weight, out_bias),)
    return (query_key(prefix, rows(query), rows(key)), *pairs) if scores else pairs


def query_key(prefix: str, query: tuple[View, ...], key: tuple[View, ...], *, shift: bool = True) -> Pair:
    """Pair of query and key rows; softmax ignores a shift of the key bias unless ``shift`` says otherwise."""
    bias = key[1] if shift and len(key) > 1 else None
    return Pair(prefix, "query_key", query, key, None if bias is None else Translation(bias))


def value_output(
    prefix: str, value: tuple[View, ...], output: View, output_bias: str | None, *, shift: bool = True
) -> Pair:
    """Pair of value rows and output columns; the output bias absorbs a shift of the value bias."""
    bias = value[1] if shift and len(value) > 1 else None
    translation = None if bias is None or output_bias is None else Translation(bias, output, output_bias)
    return Pair(prefix, "value_output", value, (output,), translation)
