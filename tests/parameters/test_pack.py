"""Packing a model and unpacking a point: bit for bit, each number once, in the order in which torch stores them."""

import math

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.testing import assert_close

from quotient_nets import ParameterManifold, parameter_manifold
from quotient_nets.demo import load_digits_vit
from tests.models import CASES, MLP, TEXT, WIDTH, Attention, Stack, TiedLM, encoder_layer, generic, tokens

trainable = [case for case in CASES if "MAE" not in case.name]  # its position embeddings are frozen


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype is expected.dtype
    assert actual.shape == expected.shape
    # Bytes, for -0.0 == 0.0
    assert torch.equal(*(t.detach().contiguous().flatten().view(torch.uint8) for t in (actual, expected)))


@pytest.mark.parametrize("case", trainable, ids=lambda case: case.name)
def test_pack_is_parameters_to_vector(case) -> None:
    model = case.build()
    assert_same_bits(parameter_manifold(model).pack(model), parameters_to_vector(model.parameters()).detach())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_pack_and_unpack_round_trip(case) -> None:
    model = case.build()
    space = parameter_manifold(model)
    x = space.pack(model)
    unpacked = space.unpack(x)
    assert set(unpacked) == {name for name, p in model.named_parameters() if p.requires_grad}
    for name, tensor in unpacked.items():
        assert_same_bits(tensor, model.get_parameter(name))
    assert_same_bits(space.pack(unpacked), x)


HALF = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_round_trip_keeps_every_dtype(dtype: torch.dtype) -> None:
    model = generic(Stack()).to(dtype)
    space = parameter_manifold(model)
    x = space.pack(model)
    assert x.dtype is torch.promote_types(dtype, torch.float32)
    for name, tensor in space.unpack(x).items():
        assert_same_bits(tensor, model.get_parameter(name))


@pytest.mark.parametrize(
    ("dtypes", "widest"),
    [
        ((torch.float16, torch.bfloat16), torch.float32),
        ((torch.bfloat16, torch.float32), torch.float32),
        ((torch.float16, torch.float64), torch.float64),
    ],
    ids=str,
)
def test_round_trip_of_mixed_dtypes(dtypes: tuple[torch.dtype, ...], widest: torch.dtype) -> None:
    model = generic(Stack())
    model.layers.to(dtypes[0])
    model.head.to(dtypes[1])
    space = parameter_manifold(model)
    x = space.pack(model)
    assert space.dtype_of_points is x.dtype is widest
    for name, tensor in space.unpack(x).items():
        assert_same_bits(tensor, model.get_parameter(name))


def test_negative_zeros_and_tiny_numbers_survive() -> None:
    model = MLP()
    special = torch.tensor([-0.0, 0.0, 1e-45, -3e-39, 3e38, 1.0])
    with torch.no_grad():
        model[0].bias.copy_(special)
    space = parameter_manifold(model)
    assert_same_bits(space.unpack(space.pack(model))["0.bias"], special)


def test_unpack_in_another_dtype() -> None:
    model = MLP()
    space = parameter_manifold(model)
    assert {t.dtype for t in space.unpack(space.pack(model), dtype=torch.float64).values()} == {torch.float64}


def test_pack_is_a_copy_and_unpack_a_view() -> None:
    model = generic(Stack())
    space = parameter_manifold(model)
    x = space.pack(model)
    assert not x.requires_grad
    x.zero_()
    assert bool(model.head.weight.abs().sum() > 0)
    space.unpack(x)["head.weight"].fill_(3.0)
    assert int((x == 3.0).sum()) == model.head.weight.numel()


@pytest.mark.parametrize("lead", [(3,), (2, 2), (0,)], ids=str)
def test_batches_of_points(lead: tuple[int, ...]) -> None:
    model = generic(Stack())
    space = parameter_manifold(model)
    x = torch.randn(*lead, space.layout.size).double()
    unpacked = space.unpack(x)
    assert unpacked["head.weight"].shape == (*lead, 3, WIDTH)
    for index in range(math.prod(lead)):
        one = space.unpack(x.reshape(-1, space.layout.size)[index])
        for name, tensor in one.items():
            assert torch.equal(unpacked[name].reshape(-1, *tensor.shape)[index], tensor)


def test_unpack_carries_derivatives() -> None:
    model = generic(Stack())
    space = parameter_manifold(model)
    x, batch = space.pack(model).requires_grad_(), tokens()
    (slope,) = torch.autograd.grad(space.call(model, x, batch).square().sum(), x)
    model(batch).square().sum().backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert_close(slope, expected, rtol=1e-12, atol=1e-12)


def test_call_is_the_forward_pass_at_a_point() -> None:
    model, batch = generic(Stack()), tokens()
    space = parameter_manifold(model)
    x = space.pack(model)
    with torch.no_grad():  # on both sides, for torch then takes its fast path
        assert torch.equal(space.call(model, x, batch), model(batch))
        other = generic(Stack())
        assert torch.equal(space.call(model, space.pack(other), tokens=batch), other(batch))


# -- which parameters ------------------------------------------------------------------------------------------------


def names(space: ParameterManifold) -> set[str]:
    return {entry.name for entry in space.entries}


def test_frozen_parameters_stay_out() -> None:
    model = generic(Stack())
    model.head.requires_grad_(False)
    space = parameter_manifold(model)
    assert names(space) == {name for name, _ in model.named_parameters() if not name.startswith("head")}
    assert space.layout.size == sum(p.numel() for p in model.parameters() if p.requires_grad)
    x = space.random_action(space.pack(model))
    batch = tokens()
    assert_close(space.call(model, x, batch), model(batch), rtol=1e-12, atol=1e-12)


def test_frozen_parameters_come_in_when_asked() -> None:
    model = generic(Stack()).requires_grad_(False)
    with pytest.raises(ValueError, match=r"trainable floating-point parameters, got none.*frozen=True"):
        parameter_manifold(model)
    space = parameter_manifold(model, frozen=True)
    assert_same_bits(space.pack(model), parameters_to_vector(model.parameters()))
    assert not any(p.requires_grad for p in model.parameters())
    assert space.check(model, tokens()).change < 1e-12


@pytest.mark.parametrize(
    ("frozen", "left", "note"),
    [
        ("out_proj.weight", ["query_key"], "value_output"),
        ("k_proj_weight", ["value_output"], "query_key"),
        ("in_proj_bias", [], "query_key"),
    ],
)
def test_pair_with_a_frozen_member_goes_to_the_rest(frozen: str, left: list[str], note: str) -> None:
    model = generic(Attention(kdim=5, vdim=7))
    model.get_parameter(f"attention.{frozen}").requires_grad_(False)
    space = parameter_manifold(model)
    assert [block.kind for block in space.blocks] == left
    assert any(f"attention ({note}): attention.{frozen} does not vary" in line for line in space.notes)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == space.layout.size
    inputs = (tokens(), tokens(5, 5), tokens(5, 7))
    assert space.check(model, *inputs).change < 1e-12
    x = space.pack(model)
    assert_same_bits(space.layout.scatter(space.layout.gather(x)), x)


def test_part_of_a_packed_weight_goes_to_the_rest() -> None:
    model = generic(Attention())
    model.attention.out_proj.weight.requires_grad_(False)
    space = parameter_manifold(model)
    (block,) = space.blocks
    assert block.kind == "query_key"
    x = space.pack(model)
    *_, rest = space.layout.gather(x)
    values = torch.cat(
        [model.attention.in_proj_weight[2 * WIDTH :].flatten(), model.attention.in_proj_bias[2 * WIDTH :]]
    )
    both = torch.cat([values, model.attention.out_proj.bias])
    assert torch.equal(rest.sort().values, both.sort().values)
    assert space.check(model, tokens(), tokens(), tokens()).change < 1e-12


def test_frozen_output_bias_leaves_the_group_and_takes_the_shift() -> None:
    """A value bias can move only where an output bias may compensate."""
    model = generic(Attention())
    model.attention.out_proj.bias.requires_grad_(False)
    space = parameter_manifold(model)
    inputs = (tokens(), tokens(), tokens())
    assert {block.kind for block in space.blocks} == {"query_key", "value_output"}
    assert space.check(model, *inputs).change < 1e-12
    y = space.canonicalize(space.pack(model))
    assert_close(space.call(model, y, *inputs), model(*inputs), rtol=1e-12, atol=1e-12)


def test_parameters_that_are_not_floating_stay_out() -> None:
    model = MLP()
    model.register_parameter("codes", nn.Parameter(torch.arange(4), requires_grad=False))
    assert "codes" not in names(parameter_manifold(model, frozen=True))


@pytest.mark.parametrize("lead", [(), (2,)], ids=str)
def test_scalar_parameters_are_parameters(lead: tuple[int, ...]) -> None:
    """As the ``logit_scale`` of CLIP."""
    model = MLP()
    model.register_parameter("scale", nn.Parameter(torch.tensor(2.6)))
    space = parameter_manifold(model)
    x = space.pack(model).expand(*lead, -1) if lead else space.pack(model)
    assert_close(space.unpack(x)["scale"], torch.full(lead, 2.6), rtol=0, atol=0)


# -- tied weights and shared modules ---------------------------------------------------------------------------------


def test_tied_embedding_and_readout_are_there_once() -> None:
    model, batch = generic(TiedLM()), torch.randint(7, (2, 4))
    space = parameter_manifold(model)
    assert "embedding.weight" in names(space)
    assert "readout.weight" not in names(space)
    assert space.layout.size == sum(p.numel() for p in model.parameters())
    x = space.pack(model)
    other = generic(TiedLM())
    assert_close(space.call(model, space.pack(other), batch), other(batch), rtol=1e-12, atol=1e-12)
    assert_close(space.call(model, space.random_action(x), batch), model(batch), rtol=1e-11, atol=1e-12)


def test_tied_language_model_of_hugging_face() -> None:
    model = generic(transformers.BertForMaskedLM(transformers.BertConfig(**TEXT)))
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    space = parameter_manifold(model)
    assert sum("word_embeddings" in name or "decoder" in name for name in names(space)) == 1
    other = generic(transformers.BertForMaskedLM(transformers.BertConfig(**TEXT)))
    ids = torch.randint(3, 19, (2, 6))
    assert_close(space.call(model, space.pack(other), ids).logits, other(ids).logits, rtol=1e-12, atol=1e-12)


def test_layers_tied_to_each_other_are_one_block() -> None:
    model = generic(Stack())
    for name, p in list(model.layers[0].named_parameters()):
        module, _, leaf = name.rpartition(".")
        setattr(model.layers[1].get_submodule(module), leaf, p)
    space = parameter_manifold(model)
    assert [block.shape[0] for block in space.blocks] == [2, 2]
    assert space.check(model, tokens()).change < 1e-12


@pytest.mark.parametrize(("tied", "to"), [("v_proj_weight", "k_proj_weight"), ("q_proj_weight", "k_proj_weight")])
def test_projections_tied_to_each_other_go_to_the_rest(tied: str, to: str) -> None:
    model = generic(Attention(kdim=6, vdim=6) if tied[0] == "v" else Attention(kdim=WIDTH, vdim=6))
    setattr(model.attention, tied, getattr(model.attention, to))
    space = parameter_manifold(model)
    assert any("tied" in note for note in space.notes)
    assert space.layout.size == sum(p.numel() for p in model.parameters())
    widths = {"v": (6, 6), "q": (WIDTH, 6)}[tied[0]]
    report = space.check(model, tokens(), *(tokens(5, width) for width in widths))
    assert report.change < 1e-12
    x = space.pack(model)
    assert_same_bits(space.layout.scatter(space.layout.gather(x)), x)


def test_module_under_two_names_is_refused() -> None:
    layer = encoder_layer()
    model = nn.ModuleDict({"first": layer, "second": layer})
    with pytest.raises(ValueError, match=r"`first` and `second` are the same module.*functional_call"):
        parameter_manifold(model)


def test_module_without_parameters_may_have_two_names() -> None:
    relu = nn.ReLU()
    parameter_manifold(nn.Sequential(nn.Linear(3, 3), relu, nn.Linear(3, 3), relu))


def test_module_called_twice_under_one_name_is_fine() -> None:
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = encoder_layer()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x))

    model = generic(Recurrent())
    assert parameter_manifold(model).check(model, tokens()).change < 1e-12


# -- bad input -------------------------------------------------------------------------------------------------------


def test_meta_device_is_refused() -> None:
    with torch.device("meta"):
        model = Stack()
    with pytest.raises(ValueError, match=r"loaded parameters; layers\.0\.\S+ is on the meta device.*Load the weights"):
        parameter_manifold(model)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["head.bias", "layers.1.self_attn.in_proj_weight"])
def test_weights_that_are_not_finite_are_named(bad: float, name: str) -> None:
    model = generic(Stack())
    space = parameter_manifold(model)
    with torch.no_grad():
        model.get_parameter(name).view(-1)[-1] = bad
    with pytest.raises(ValueError, match=rf"parameter {name} holds NaN or Inf"):
        space.pack(model)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["head.bias", "layers.1.self_attn.in_proj_weight"])
def test_weights_that_are_not_finite_are_named_from_the_start(bad: float, name: str) -> None:
    """A NaN is no matter of rank: whoever builds the manifold first must not read that the head is deficient."""
    model = generic(Stack())
    with torch.no_grad():
        model.get_parameter(name).view(-1)[-1] = bad
    with pytest.raises(ValueError, match=rf"{name} holds NaN or Inf"):
        parameter_manifold(model, degenerate="rest").pack(model)


def test_other_architecture_is_refused() -> None:
    space = parameter_manifold(Stack())
    with pytest.raises(
        ValueError, match=r"layers\.0\.self_attn\.in_proj_weight .*no such parameter.*parameter_manifold"
    ):
        space.pack(MLP())
    with pytest.raises(ValueError, match=r"head\.weight of shape \(3, 8\), got shape \(4, 8\)"):
        space.pack(dict(Stack().named_parameters()) | {"head.weight": torch.ones(4, WIDTH)})


@pytest.mark.parametrize("shape", [(), (1,), (3, 7)], ids=str)
def test_points_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    space = parameter_manifold(Stack())
    with pytest.raises(ValueError, match=r"shape|ndim|dim"):
        space.unpack(torch.ones(shape))
    assert not space.check_point(torch.ones(shape))


def test_digits_transformer_is_two_blocks() -> None:
    model = load_digits_vit()
    space = parameter_manifold(model)
    assert [(block.kind, block.shape) for block in space.blocks] == [
        ("query_key", (12, 130, 16)),
        ("value_output", (12, 129, 16)),
    ]
    assert_same_bits(space.pack(model), parameters_to_vector(model.parameters()))
