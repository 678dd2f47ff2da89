"""``torch.nn.MultiheadAttention``, and with it ``nn.Transformer`` and its layers."""

from __future__ import annotations

from torch import nn

from quotient_nets.architectures.declare import (
    OUTPUT,
    WEIGHT,
    Heads,
    query_key,
    under,
    value_output,
)
from quotient_nets.architectures.registry import declares
from quotient_nets.parameters import Pair, View

PACKED_WEIGHT = "(part head rank) row"
PACKED_BIAS = "(part head rank)"
EXTRA = "1 1 (head rank)"  # bias_k and bias_v, one more key and value in every sequence


@declares("MultiheadAttention")
def multihead_attention(prefix: str, module: nn.Module) -> tuple[Pair, ...]:
    """Packed or separate input projections, with or without biases and the extra key and value.

    ``add_bias_kv`` and ``add_zero_attn`` append keys that the biases do not reach: GL(h) stays exact, shifts do not.

    Raises:
        ValueError: The module is of another class with this name.
    """
    if not isinstance(module, nn.MultiheadAttention):
        raise ValueError(
            f"expected {prefix or 'the model'} to be a torch.nn.MultiheadAttention, got another class of this name, "
            f"from {type(module).__module__}. Rename the class: its parameters then go to the rest."
        )
    heads = Heads(module.num_heads, module.head_dim)
    separate = {0: "q_proj_weight", 1: "k_proj_weight", 2: "v_proj_weight"}
    extra = {1: "bias_k", 2: "bias_v"}

    def rows(part: int) -> tuple[View, ...]:
        if module.in_proj_weight is not None:
            views = [heads.view(under(prefix, "in_proj_weight"), PACKED_WEIGHT, parts=3, part=part)]
        else:
            views = [heads.view(under(prefix, separate[part]), WEIGHT)]
        if module.in_proj_bias is not None:
            views.append(heads.view(under(prefix, "in_proj_bias"), PACKED_BIAS, parts=3, part=part))
        if part in extra and module.bias_k is not None:
            views.append(heads.view(under(prefix, extra[part]), EXTRA))
        return tuple(views)

    shift = module.bias_k is None and not module.add_zero_attn and module.in_proj_bias is not None
    output = heads.view(under(prefix, "out_proj.weight"), OUTPUT)
    output_bias = None if module.out_proj.bias is None else under(prefix, "out_proj.bias")
    return (
        query_key(prefix, rows(0), rows(1), shift=shift),
        value_output(prefix, rows(2), output, output_bias, shift=shift),
    )
