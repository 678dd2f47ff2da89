"""Which metric and which parameters: the options of ``parameter_manifold``."""

import geoopt
import pytest
import torch
from torch import nn

from quotient_nets import AdaptiveEuclidean, InvariantFixedRank, ParameterManifold, model_sharpness, parameter_manifold
from tests.models import CASES, MLP, Stack, TiedLM, bert, generic, tokens


def numbers(parameters) -> int:
    return sum(p.numel() for p in parameters)


def test_elementwise_attention_divides_nothing_out() -> None:
    model = generic(Stack())
    space = parameter_manifold(model, attention=AdaptiveEuclidean)
    x = space.pack(model)
    u = torch.randn_like(x)
    assert not any(block.quotient for block in space.blocks)
    assert [block.dimensions_removed for block in space.blocks] == [0, 0]
    assert space.translations() == []
    torch.testing.assert_close(space.inner(x, u), (u / x).square().sum(), rtol=1e-12, atol=0)
    torch.testing.assert_close(space.egrad2rgrad(x, u), u * x.square(), rtol=1e-12, atol=0)
    assert torch.equal(space.canonicalize(x), x)
    assert torch.equal(space.random_action(x), x)
    torch.testing.assert_close(space.exact(x, u), x + u, rtol=1e-12, atol=1e-12)


def test_euclidean_everywhere_is_euclidean() -> None:
    model = generic(Stack())
    space = parameter_manifold(model, attention=geoopt.Euclidean, rest=geoopt.Euclidean)
    x = space.pack(model)
    u, v = torch.randn(2, x.numel()).double()
    torch.testing.assert_close(space.inner(x, u, v), u @ v, rtol=1e-10, atol=1e-12)
    assert torch.equal(space.egrad2rgrad(x, u), u)
    torch.testing.assert_close(space.expmap(x, u), x + u, rtol=1e-14, atol=0)


def test_euclidean_rest_beside_quotients() -> None:
    model = generic(Stack())
    space = parameter_manifold(model, rest=geoopt.Euclidean)
    x = space.pack(model)
    u = torch.randn_like(x)
    *blocks, rest = space.layout.gather(u)
    only_rest = space.layout.scatter([*(torch.zeros_like(b) for b in blocks), rest])
    torch.testing.assert_close(space.norm(x, only_rest), rest.norm(), rtol=1e-12, atol=0)
    assert all(isinstance(block.manifold, InvariantFixedRank) for block in space.blocks)


def test_scope_attention_leaves_everything_else_fixed() -> None:
    model = generic(Stack())
    space = parameter_manifold(model, scope="attention")
    assert {entry.name for entry in space.entries} == {n for n, _ in model.named_parameters() if "self_attn" in n}
    assert space.layout.size == numbers(p for n, p in model.named_parameters() if "self_attn" in n)
    assert space.check(model, tokens()).change < 1e-12
    y = space.call(model, space.random_action(space.pack(model)), x := tokens())
    torch.testing.assert_close(y, model(x), rtol=1e-12, atol=1e-12)


def test_scope_attention_of_bert_includes_its_output_projection() -> None:
    names = {entry.name for entry in parameter_manifold(bert(), scope="attention").entries}
    assert "encoder.layer.1.attention.output.dense.bias" in names
    assert not any("intermediate" in name or "embeddings" in name for name in names)


def test_scope_attention_without_attention_is_refused() -> None:
    with pytest.raises(ValueError, match=r"trainable floating-point parameters, got none.*scope"):
        parameter_manifold(MLP(), scope="attention")


@pytest.mark.parametrize("weights", [{"query_key": 4.0}, {"value_output": 0.25, "rest": 9.0}])
def test_block_weights_scale_the_squared_norm(weights: dict[str, float]) -> None:
    model = generic(Stack())
    plain, weighted = parameter_manifold(model), parameter_manifold(model, block_weights=weights)
    x = plain.pack(model)
    u = torch.randn_like(x)
    kinds = [*(block.kind for block in plain.blocks), "rest"]
    parts = plain.layout.gather(u)
    expected = torch.zeros((), dtype=x.dtype)
    for i, kind in enumerate(kinds):
        alone = plain.layout.scatter([p if i == j else 0 * p for j, p in enumerate(parts)])
        expected = expected + weights.get(kind, 1.0) * plain.inner(x, alone)
    torch.testing.assert_close(weighted.inner(x, u), expected, rtol=1e-12, atol=0)


def test_block_weights_hold_for_all_blocks_of_a_kind() -> None:
    model = nn.ModuleList([nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 4)])
    space = parameter_manifold(model, block_weights={"query_key": 4.0, "value_output": 2.0})
    assert [(block.kind, block.weight) for block in space.blocks] == [
        ("query_key", 4.0),
        ("value_output", 2.0),
        ("query_key", 4.0),
        ("value_output", 2.0),
    ]


@pytest.mark.parametrize(
    "option", [{"scope": "attn"}, {"degenerate": "ignore"}, {"scope": None}], ids=lambda option: str(option)
)
def test_unknown_options_are_refused(option) -> None:
    with pytest.raises(ValueError, match=r"expected scope 'all' or 'attention' and degenerate 'raise' or 'rest', got"):
        parameter_manifold(Stack(), **option)


@pytest.mark.parametrize("weights", [{"query": 2.0}, {"query_key": -1.0}, {"rest": float("nan")}], ids=str)
def test_block_weights_that_mean_nothing_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="|".join(weights)):
        parameter_manifold(Stack(), block_weights=weights)


def test_layers_of_one_shape_share_a_block() -> None:
    space = parameter_manifold(Stack(layers=5))
    assert [block.shape[0] for block in space.blocks] == [10, 10]
    names = [space.blocks[0].head_name(i) for i in (0, 1, 2, 9)]
    assert names == [f"layers.{i}.self_attn, head {j} (query_key)" for i, j in [(0, 0), (0, 1), (1, 0), (4, 1)]]
    with pytest.raises(IndexError):
        space.blocks[0].head_name(10)


def test_layers_of_different_shape_do_not() -> None:
    model = nn.ModuleList([nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 4), nn.MultiheadAttention(8, 2)])
    shapes = [(block.kind, block.shape) for block in parameter_manifold(model).blocks]
    assert shapes == [
        ("query_key", (4, 18, 4)),
        ("value_output", (4, 17, 4)),
        ("query_key", (4, 18, 2)),
        ("value_output", (4, 17, 2)),
    ]


def test_heads_wider_than_the_model_go_to_the_rest() -> None:
    attention = nn.MultiheadAttention(16, 1, kdim=2, vdim=2)  # rank 16, keys of 3 rows
    space = parameter_manifold(attention)
    assert space.blocks == ()
    assert ["rank 16 exceeds the 3 rows" in note for note in space.notes] == [True, True, False]
    assert "no attention head" in space.notes[-1]


def test_representation_lists_blocks_and_rest() -> None:
    space = parameter_manifold(Stack())
    text = repr(space)
    assert "query_key: 4 x InvariantFixedRank(9, 9)" in text
    assert f"rest: {space.layout.rest_size} entries" in text


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_model_is_only_read(case) -> None:
    model = case.build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameter_manifold(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_manifold_holds_no_tensors() -> None:
    space = parameter_manifold(TiedLM())
    assert isinstance(space, ParameterManifold)
    assert list(space.parameters()) == []
    assert list(space.buffers()) == []


def test_sharpness_takes_a_space_of_attention_only() -> None:
    model, batch = generic(Stack()), tokens()
    space = parameter_manifold(model, scope="attention")
    result = model_sharpness(model, lambda m, b: m(b).square().mean(), [batch], rho=0.1, steps=3, space=space)
    assert 0 < result.value < model_sharpness(model, lambda m, b: m(b).square().mean(), [batch], rho=0.1, steps=3).value
