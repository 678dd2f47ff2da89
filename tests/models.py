"""Small real transformers with generic weights, and what is known of the symmetries of each.

Every bias differs from zero and every gain from one, so that a symmetry that is not exact moves the output.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)

WIDTH, HEADS, RANK = 8, 2, 4
SMALL: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 10,
}
TEXT: dict[str, Any] = SMALL | {"vocab_size": 19, "max_position_embeddings": 16}
IMAGE: dict[str, Any] = SMALL | {"image_size": 8, "patch_size": 4}


@torch.no_grad()
def generic(model: Model) -> Model:
    """``model`` in float64 and evaluation mode with random weights, biases and gains, all of order one."""
    for module in model.double().modules():
        for name, p in module.named_parameters(recurse=False):
            if isinstance(module, nn.LayerNorm) and name == "weight":
                p.copy_(1 + 0.3 * torch.randn_like(p))
            else:
                p.copy_(torch.randn_like(p) / (p[0].numel() ** 0.5 if p.dim() > 1 else 2))
    return model.eval()


class Attention(nn.Module):
    """One ``nn.MultiheadAttention``; its queries, keys and values differ."""

    def __init__(self, **options: Any):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, **options)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.attention(query, key, value, need_weights=False)[0]


class Stack(nn.Module):
    """Two pre-norm layers of ``nn.TransformerEncoderLayer`` and a readout: the smallest real network here."""

    def __init__(self, layers: int = 2, **options: Any):
        super().__init__()
        self.layers = nn.ModuleList(encoder_layer(norm_first=True, **options) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        for layer in self.layers:
            tokens = layer(tokens)
        return self.head(tokens.mean(dim=1))


class TiedLM(nn.Module):
    """Language model whose readout is the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.encoder = encoder_layer()
        self.readout = nn.Linear(WIDTH, 7, bias=False)
        self.readout.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.readout(self.encoder(self.embedding(ids)))


class MLP(nn.Sequential):
    """No attention."""

    def __init__(self):
        super().__init__(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def encoder_layer(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 10, batch_first=True, **options)


def decoder_layer(**options: Any) -> nn.TransformerDecoderLayer:
    return nn.TransformerDecoderLayer(WIDTH, HEADS, 10, batch_first=True, **options)


def tokens(length: int = 5, width: int = WIDTH) -> Tensor:
    return torch.randn(2, length, width, dtype=torch.float64)


def ids(**more: Any) -> dict[str, Any]:
    return {"input_ids": torch.randint(3, 19, (2, 6)), "attention_mask": torch.ones(2, 6, dtype=torch.long)} | more


def pixels(**more: Any) -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 8, 8, dtype=torch.float64)} | more


def bert(**options: Any) -> transformers.BertModel:
    return generic(transformers.BertModel(transformers.BertConfig(**TEXT, **options)))


def _crossing(**more: Any) -> dict[str, Any]:
    return ids(encoder_hidden_states=tokens(4), use_cache=False, **more)


@dataclass(frozen=True)
class ModelCase:
    """A model, inputs for it, and what its parameter manifold should be.

    Attributes:
        name: For the test's id.
        build: The model, in float64.
        inputs: Keyword arguments of its forward pass.
        heads: Heads of each kind in all layers together.
        translations: Exact shifts of bias rows, one for each layer and kind that has one.
        blocks: Batched blocks; one for each kind and shape.
        options: Of ``parameter_manifold``.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Mapping[str, Any]]
    heads: int
    translations: int
    blocks: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)


def _attention(name: str, translations: int, *, widths: tuple[int, int] = (WIDTH, WIDTH), **options: Any) -> ModelCase:
    def inputs() -> Mapping[str, Any]:
        return {"query": tokens(), "key": tokens(5, widths[0]), "value": tokens(5, widths[1])}

    return ModelCase(name, lambda: generic(Attention(**options)), inputs, HEADS, translations)


def _hugging_face(
    name: str, inputs: Callable[[], Mapping[str, Any]], translations: int, config: Mapping[str, Any], **known: Any
) -> ModelCase:
    def build() -> nn.Module:
        model = getattr(transformers, name)
        return generic(model(model.config_class(**config)))

    label = known.pop("label", name)
    return ModelCase(label, build, inputs, **{"heads": 2 * HEADS, "translations": translations} | known)


SEPARATE = {"kdim": 5, "vdim": 7, "widths": (5, 7), "batch_first": True}

TORCH_CASES = [
    _attention("packed", 2),
    _attention("batch_first", 2, batch_first=True),
    _attention("separate", 2, **SEPARATE),
    _attention("no_bias", 0, bias=False),
    _attention("separate_no_bias", 0, **SEPARATE, bias=False),
    # One more key and value in every sequence, which the biases of the projections do not reach
    _attention("bias_kv", 0, add_bias_kv=True),
    _attention("bias_kv_no_bias", 0, add_bias_kv=True, bias=False),
    _attention("separate_bias_kv", 0, **SEPARATE, add_bias_kv=True),
    _attention("zero_attn", 0, add_zero_attn=True),
    ModelCase("encoder_post_norm", lambda: generic(encoder_layer()), lambda: {"src": tokens()}, HEADS, 2),
    ModelCase("encoder_pre_norm", lambda: generic(encoder_layer(norm_first=True)), lambda: {"src": tokens()}, HEADS, 2),
    ModelCase("encoder_no_bias", lambda: generic(encoder_layer(bias=False)), lambda: {"src": tokens()}, HEADS, 0),
    ModelCase(
        "decoder", lambda: generic(decoder_layer()), lambda: {"tgt": tokens(), "memory": tokens(3)}, 2 * HEADS, 4
    ),
    ModelCase(
        "transformer",
        lambda: generic(nn.Transformer(WIDTH, HEADS, 2, 1, 10, batch_first=True)),
        lambda: {"src": tokens(), "tgt": tokens(3)},
        4 * HEADS,
        8,
    ),
    ModelCase("stack", lambda: generic(Stack()), lambda: {"tokens": tokens()}, 2 * HEADS, 4),
]

HUGGING_FACE_CASES = [
    _hugging_face("BertModel", ids, 4, TEXT),
    _hugging_face("BertForMaskedLM", ids, 4, TEXT),
    _hugging_face(
        "BertModel",
        _crossing,
        8,
        TEXT | {"is_decoder": True, "add_cross_attention": True},
        label="BertDecoder",
        heads=4 * HEADS,
    ),
    _hugging_face("RobertaModel", ids, 4, TEXT | {"pad_token_id": 1}),
    _hugging_face("XLMRobertaModel", ids, 4, TEXT | {"pad_token_id": 1}),
    _hugging_face("CamembertModel", ids, 4, TEXT | {"pad_token_id": 1}),
    _hugging_face("ElectraModel", ids, 4, TEXT | {"embedding_size": 5}),
    _hugging_face("ViTModel", pixels, 4, IMAGE),
    # Value shifts need a value bias; key shifts a key bias
    _hugging_face("ViTModel", pixels, 0, IMAGE | {"qkv_bias": False}, label="ViTNoBias"),
    _hugging_face("DeiTModel", pixels, 4, IMAGE),
    _hugging_face("Dinov2Model", pixels, 4, IMAGE | {"mlp_ratio": 1}),
    _hugging_face(
        "ViTMAEForPreTraining",
        lambda: pixels(noise=torch.rand(2, 4, dtype=torch.float64)),
        6,
        IMAGE
        | {
            "decoder_hidden_size": 12,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 3,
            "decoder_intermediate_size": 6,
            "mask_ratio": 0.5,
        },
        heads=2 * HEADS + 3,
        blocks=4,
    ),
    _hugging_face("ViTMSNModel", pixels, 4, IMAGE),
]

CASES = TORCH_CASES + HUGGING_FACE_CASES
