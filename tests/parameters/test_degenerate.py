"""Heads of deficient rank have no point on the quotient: named, or moved to the rest, and nothing else with them."""

import re

import geoopt
import pytest
import torch
from torch.testing import assert_close

from quotient_nets import AdaptiveEuclidean, model_sharpness, parameter_manifold
from tests.models import WIDTH, Stack, bert, generic, ids, tokens

RANK = 4
Q, K, V = (slice(i * WIDTH, (i + 1) * WIDTH) for i in range(3))


@torch.no_grad()
def zeroed(*, keys: bool = True, outputs: bool = True) -> Stack:
    """Second head of layer 1: keys zero; first head of layer 0: output columns zero, as after pruning."""
    model = generic(Stack())
    if keys:
        attention = model.layers[1].self_attn
        attention.in_proj_weight[WIDTH + RANK : WIDTH + 2 * RANK] = 0
        attention.in_proj_bias[WIDTH + RANK : WIDTH + 2 * RANK] = 0
    if outputs:
        model.layers[0].self_attn.out_proj.weight[:, :RANK] = 0
    return model


def test_zero_heads_are_named() -> None:
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn \(query_key\), heads \[1\].*degenerate='rest'"):
        parameter_manifold(zeroed(outputs=False))
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn \(value_output\), heads \[0\].*degenerate='rest'"):
        parameter_manifold(zeroed(keys=False))


def test_head_of_deficient_rank_that_is_not_zero_is_named() -> None:
    model = bert()
    with torch.no_grad():
        query = model.encoder.layer[1].attention.self.query
        query.weight[RANK] = query.weight[RANK + 1]  # two equal rows of the second head
        query.bias[RANK] = query.bias[RANK + 1]
    with pytest.raises(ValueError, match=r"encoder\.layer\.1\.attention \(query_key\), heads \[1\]"):
        parameter_manifold(model)


def test_exactly_these_heads_move_to_the_rest() -> None:
    model = zeroed()
    space = parameter_manifold(model, degenerate="rest")
    query_key, value_output = space.blocks
    assert [query_key.head_name(i) for i in range(3)] == [
        "layers.0.self_attn, head 0 (query_key)",
        "layers.0.self_attn, head 1 (query_key)",
        "layers.1.self_attn, head 0 (query_key)",
    ]
    assert [value_output.head_name(i) for i in range(3)] == [
        "layers.0.self_attn, head 1 (value_output)",
        "layers.1.self_attn, head 0 (value_output)",
        "layers.1.self_attn, head 1 (value_output)",
    ]
    assert query_key.shape[0] == value_output.shape[0] == 3
    assert space.layout.rest_size == parameter_manifold(generic(Stack())).layout.rest_size + 18 * RANK + 17 * RANK
    notes = "\n".join(space.notes)
    assert re.search(r"layers\.1\.self_attn \(query_key\): rank-deficient heads \[1\]", notes)
    assert re.search(r"layers\.0\.self_attn \(value_output\): rank-deficient heads \[0\]", notes)


def test_everything_works_without_these_heads() -> None:
    model, batch = zeroed(), tokens()
    space = parameter_manifold(model, degenerate="rest")
    x = space.pack(model)
    assert torch.equal(x, torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert space.check(model, batch).change < 1e-12
    assert space.check_point_on_manifold(x)
    for y in (space.random_action(x), space.canonicalize(x), space.canonicalize(space.random_action(x))):
        assert_close(space.call(model, y, batch), model(batch), rtol=1e-12, atol=1e-12)
    u = torch.randn_like(x)
    v = space.proju(x, u)
    assert bool(v.isfinite().all())
    assert_close(space.inner(x, space.egrad2rgrad(x, u), v), u @ v, rtol=1e-10, atol=1e-10)
    assert bool(space.exact(x, 0.1 * v / space.norm(x, v)).isfinite().all())


def test_sharpness_without_these_heads() -> None:
    model, batch = zeroed(), tokens()
    space = parameter_manifold(model, degenerate="rest")
    run = {"rho": 0.1, "steps": 4, "space": space}
    result = model_sharpness(model, lambda m, b: m(b).square().mean(), [batch], **run)
    assert result.value > 0
    assert any("rank-deficient heads [1]" in note for note in result.settings["notes"])
    moved = space.random_action(space.pack(model), condition=100.0)
    again = model_sharpness(model, lambda m, b: m(b).square().mean(), [batch], x=moved, **run)
    assert again.value == pytest.approx(result.value, rel=1e-6)


def test_elementwise_attention_takes_every_head() -> None:
    space = parameter_manifold(zeroed(), attention=AdaptiveEuclidean)
    assert [block.shape[0] for block in space.blocks] == [4, 4]
    assert bool(space.pack(zeroed()).isfinite().all())


def test_model_without_a_good_head() -> None:
    model = generic(Stack())
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.in_proj_weight.zero_()
            layer.self_attn.in_proj_bias.zero_()
    space = parameter_manifold(model, degenerate="rest")
    assert space.blocks == ()
    assert space.layout.rest_size == sum(p.numel() for p in model.parameters())
    run = {"rho": 0.1, "steps": 2, "space": space}
    assert model_sharpness(model, lambda m, b: m(b).square().mean(), [tokens()], **run).value > 0


def test_packing_another_model_checks_its_heads() -> None:
    space = parameter_manifold(generic(Stack()))
    with pytest.raises(ValueError, match=r"rank deficient: layers\.1\.self_attn, head 1 \(query_key\)\. .*degenerate="):
        space.pack(zeroed(outputs=False))
    ok, reason = space.check_point_on_manifold(torch.zeros(space.layout.size), explain=True)
    assert not ok
    assert [f"layers.{i}.self_attn, head {j} (query_key)" in reason for i in (0, 1) for j in (0, 1)] == 4 * [True]


def test_sharpness_names_the_head_of_the_point() -> None:
    model = generic(Stack())
    space = parameter_manifold(model)
    x = torch.cat([p.detach().flatten() for p in zeroed(keys=False).parameters()])
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn, head 0 \(value_output\)"):
        model_sharpness(model, lambda m, b: m(b).square().mean(), [tokens()], rho=0.1, space=space, x=x)


@pytest.mark.parametrize("degenerate", ["raise", "rest"])
def test_nearly_singular_heads_stay(degenerate: str) -> None:
    """Deficiency is a matter of rounding, not of taste: condition 1e9 is a point."""
    model = generic(Stack())
    with torch.no_grad():
        model.layers[0].self_attn.in_proj_weight[0] *= 1e-9
        model.layers[0].self_attn.in_proj_bias[0] *= 1e-9
    space = parameter_manifold(model, degenerate=degenerate)
    assert [block.shape[0] for block in space.blocks] == [4, 4]
    assert space.check(model, tokens()).change < 1e-6


def test_biases_of_heads_in_the_rest_are_held_too() -> None:
    """The section is that of the whole layer, for the shift of its value biases is."""
    model = zeroed()
    space = parameter_manifold(model, degenerate="rest", rest=geoopt.Euclidean)
    y = space.canonicalize(space.pack(model))
    held = space.section()
    u = held.proju(y, torch.randn_like(y))
    bias = space.unpack(held.exact(y, 1e-2 * u))["layers.0.self_attn.in_proj_bias"]
    assert torch.equal(bias[V], torch.zeros(WIDTH).double())
    assert torch.equal(bias[K], torch.zeros(WIDTH).double())


def test_ids_of_bert_heads_run_over_layers() -> None:
    model = bert()
    with torch.no_grad():
        model.encoder.layer[1].attention.output.dense.weight[:, RANK:] = 0
    space = parameter_manifold(model, degenerate="rest")
    assert [run.count for run in space.blocks[1].component.heads] == [2, 1]
    assert space.check(model, **ids()).change < 1e-12
