"""Attention that has no declaration: named once, left in the rest, refused when asked."""

import warnings

import pytest
import torch
import transformers
from torch import Tensor, nn

from quotient_nets import model_sharpness, parameter_manifold
from quotient_nets.architectures import declares, known_classes, registry
from quotient_nets.architectures.declare import Heads, separate_projections
from tests.models import SMALL, TEXT, WIDTH, generic, tokens


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=19, n_positions=8, n_embd=WIDTH, n_layer=2, n_head=2)
    return generic(transformers.GPT2LMHeadModel(config))


def llama() -> nn.Module:
    config = transformers.LlamaConfig(**TEXT, num_key_value_heads=1)
    return generic(transformers.LlamaForCausalLM(config))


each_unknown = pytest.mark.parametrize(
    ("build", "name", "first"),
    [(gpt2, "GPT2Attention", "transformer.h.0.attn"), (llama, "LlamaAttention", "model.layers.0.self_attn")],
)


@each_unknown
def test_unknown_class_is_named_in_one_warning(build, name: str, first: str) -> None:
    model = build()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        space = parameter_manifold(model)
    assert [name in str(w.message) for w in caught] == [True]
    assert caught[0].filename == __file__
    assert space.blocks == ()
    assert any(name in note for note in space.notes)
    assert space.layout.rest_size == sum(p.numel() for p in model.parameters())


@each_unknown
def test_strict_refuses_it(build, name: str, first: str) -> None:
    with pytest.raises(ValueError, match=name):
        parameter_manifold(build(), strict=True)


@each_unknown
def test_sharpness_still_runs(build, name: str, first: str) -> None:
    model, batch = build(), torch.randint(3, 19, (2, 5))
    with pytest.warns(UserWarning, match=name):
        result = model_sharpness(model, lambda m, b: m(b, labels=b).loss, [batch], rho=0.1, steps=3)
    assert result.value > 0
    assert any(name in note for note in result.settings["notes"])


def test_known_attention_beside_an_unknown_one_keeps_its_blocks() -> None:
    both = nn.ModuleDict({"known": nn.MultiheadAttention(WIDTH, 2), "unknown": gpt2()})
    with pytest.warns(UserWarning, match="GPT2Attention"):
        space = parameter_manifold(both)
    assert [block.kind for block in space.blocks] == ["query_key", "value_output"]


def test_known_models_do_not_warn() -> None:
    parameter_manifold(transformers.ViTModel(transformers.ViTConfig(**SMALL, image_size=8, patch_size=4)))


def test_subclass_of_a_known_class_is_known() -> None:
    class Mine(nn.MultiheadAttention):
        pass

    assert len(parameter_manifold(Mine(WIDTH, 2), strict=True).blocks) == 2


class HomemadeAttention(nn.Module):
    """One head, written by a user."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = [f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)]
        return self.o(nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


def test_users_can_declare_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_DECLARATIONS", dict(registry._DECLARATIONS))
    model = generic(HomemadeAttention())
    with pytest.warns(UserWarning, match="HomemadeAttention"):
        parameter_manifold(model)

    @declares("HomemadeAttention")
    def homemade(prefix: str, module: nn.Module):
        return separate_projections(prefix, module, Heads(2, WIDTH // 2), query="q", key="k", value="v", output="o")

    assert "HomemadeAttention" in known_classes()
    report = parameter_manifold(model).check(model, tokens())
    assert report.change < 1e-12
    assert not report.unverified


class ViTSelfAttention(nn.Module):
    """Layout of transformers 4, which the installed version has left behind."""

    def __init__(self):
        super().__init__()
        self.num_attention_heads, self.attention_head_size = 2, WIDTH // 2
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        heads = [f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.query, self.key, self.value)]
        return nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


class ViTAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = ViTSelfAttention()
        self.output = nn.ModuleDict({"dense": nn.Linear(WIDTH, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        return self.output["dense"](self.attention(x))


def test_vit_of_transformers_4_is_known() -> None:
    model = generic(ViTAttention())
    space = parameter_manifold(model, strict=True)
    report = space.check(model, tokens())
    assert len(space.translations()) == 2
    assert report.change < 1e-12
    assert not report.unverified


def test_relative_positions_of_transformers_4_leave_queries_and_keys_alone() -> None:
    model = transformers.BertModel(transformers.BertConfig(**TEXT))
    for layer in model.encoder.layer:
        layer.attention.self.position_embedding_type = "relative_key"
    assert [block.kind for block in parameter_manifold(model).blocks] == ["value_output"]
