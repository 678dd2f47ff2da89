"""Attention of Hugging Face encoders, by the names of their modules; transformers 4 and 5."""

from __future__ import annotations

from typing import Any

from torch import nn

from quotient_nets.architectures.declare import Heads, separate_projections
from quotient_nets.architectures.registry import declares
from quotient_nets.parameters import Pair


@declares("BertAttention", "RobertaAttention", "XLMRobertaAttention", "CamembertAttention", "ElectraAttention")
def bert_attention(prefix: str, module: nn.Module) -> tuple[Pair, ...]:
    """BERT: the output projection is a sibling of the module that holds query, key and value.

    Relative position embeddings of transformers 4 enter the scores through the queries, so query and key then have no
    common GL(h).
    """
    inner = module.get_submodule("self")
    relative = getattr(inner, "position_embedding_type", "absolute") != "absolute"
    return separate_projections(
        prefix,
        module,
        _heads(inner),
        query="self.query",
        key="self.key",
        value="self.value",
        output="output.dense",
        scores=not relative,
    )


@declares("ViTAttention", "DeiTAttention", "Dinov2Attention", "ViTMAEAttention", "ViTMSNAttention")
def vit_attention(prefix: str, module: nn.Module) -> tuple[Pair, ...]:
    """ViT: four projections side by side in transformers 5, two levels in transformers 4."""
    if hasattr(module, "q_proj"):
        return separate_projections(
            prefix,
            module,
            _heads(module, rank="head_dim"),
            query="q_proj",
            key="k_proj",
            value="v_proj",
            output="o_proj",
        )
    return separate_projections(
        prefix,
        module,
        _heads(module.get_submodule("attention")),
        query="attention.query",
        key="attention.key",
        value="attention.value",
        output="output.dense",
    )


def _heads(module: Any, rank: str = "attention_head_size") -> Heads:
    """Heads of a module that stores their number and, under the name ``rank``, their dimension."""
    return Heads(module.num_attention_heads, getattr(module, rank))
