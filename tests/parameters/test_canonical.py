"""One point for each orbit: the canonical one."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from quotient_nets import ParameterManifold, parameter_manifold
from quotient_nets.demo import load_digits_vit
from tests.models import CASES, WIDTH, Attention, ModelCase, Stack, bert, generic, tokens

# At condition 1e4 the moved factors hold their product to 1e-16 * 1e4; singular vectors lose one or two digits more.
ONE_POINT = {1.0: 1e-11, 1e2: 1e-9, 1e4: 1e-7}

each_model = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("condition", ONE_POINT)
@pytest.mark.parametrize("translations", [True, False])
@each_model
def test_one_point_for_each_orbit(case: ModelCase, condition: float, translations: bool) -> None:
    model = case.build()
    space = parameter_manifold(model)
    x = space.pack(model)
    y = space.random_action(x, condition=condition, translations=translations)
    moved, still = (space.canonicalize(p, translations=translations) for p in (y, x))
    assert apart(moved, still) < ONE_POINT[condition]
    assert apart(y, x) > 0.1


@each_model
def test_canonical_point_is_canonical(case: ModelCase) -> None:
    model = case.build()
    space = parameter_manifold(model)
    x = space.pack(model)
    for translations in (True, False):
        y = space.canonicalize(x, translations=translations)
        assert apart(space.canonicalize(y, translations=translations), y) < 1e-12
        assert y.dtype is x.dtype
        assert apart(y, x) > 1e-2


@each_model
def test_blocks_of_the_canonical_point_are_balanced(case: ModelCase) -> None:
    model = case.build()
    space = parameter_manifold(model)
    blocks = space.layout.gather(space.canonicalize(space.pack(model)))
    for block, point in zip(space.blocks, blocks, strict=False):
        g, h = block.manifold.unpack_tensor(point)
        spectrum = torch.linalg.svdvals(g @ h.mT)[..., : block.shape[2]]
        for gram in (g.mT @ g, h.mT @ h):
            assert_close(gram, spectrum.diag_embed(), rtol=0, atol=1e-12 * float(spectrum.max()))


def shifted(space: ParameterManifold, x: Tensor) -> list[Tensor]:
    return [shift.bias.strided(space.unpack(x)[shift.bias.parameter]) for _, shift in space.translations()]


@each_model
def test_shifted_biases_are_exactly_zero(case: ModelCase) -> None:
    model = case.build()
    space = parameter_manifold(model)
    x = space.pack(model)
    assert all(bool((bias != 0).all()) for bias in shifted(space, x))
    biases = shifted(space, space.canonicalize(x))
    assert len(biases) == case.translations
    assert not any(bool(bias.any()) for bias in biases)
    assert all(bool((bias != 0).any()) for bias in shifted(space, space.canonicalize(x, translations=False)))


def test_value_bias_is_folded_into_the_output_bias() -> None:
    model = generic(Attention())
    attention = model.attention
    space = parameter_manifold(model)
    y = space.unpack(space.canonicalize(space.pack(model)))
    value_bias = attention.in_proj_bias[2 * WIDTH :]
    folded = attention.out_proj.bias + attention.out_proj.weight @ value_bias
    assert_close(y["attention.out_proj.bias"], folded.detach(), rtol=1e-14, atol=1e-14)
    kept = space.unpack(space.canonicalize(space.pack(model), translations=False))
    assert torch.equal(kept["attention.out_proj.bias"], attention.out_proj.bias)


def test_rest_stays_bit_for_bit() -> None:
    model = bert()
    space = parameter_manifold(model)
    y = space.unpack(space.canonicalize(space.pack(model)))
    for name, tensor in y.items():
        inside = "attention" in name and "LayerNorm" not in name
        assert torch.equal(tensor, model.get_parameter(name)) != inside


@each_model
def test_section_keeps_the_zero_biases_along_paths(case: ModelCase) -> None:
    model = case.build()
    space = parameter_manifold(model)
    y = space.canonicalize(space.pack(model))
    section = space.section()
    u = section.proju(y, torch.randn_like(y))
    u = u / space.norm(y, u)
    assert_close(section.proju(y, u), u, rtol=0, atol=1e-12)
    for path in (section.exact, section.second_order, section.expmap, section.retr):
        z = path(y, u)
        assert float((z - y).norm()) > 1e-5
        assert not any(bool(bias.any()) for bias in shifted(space, z))
    if case.translations:
        free = space.exact(y, space.proju(y, torch.randn_like(y)))
        assert any(bool(bias.any()) for bias in shifted(space, free))


@pytest.mark.parametrize("balanced", [True, False])
def test_section_keeps_the_zero_biases_in_the_prepared_space(balanced: bool) -> None:
    model = generic(Stack())
    space = parameter_manifold(model)
    y = space.canonicalize(space.pack(model))
    tangent = space.section().at(y, balanced=balanced)
    generator = torch.Generator().manual_seed(0)
    random, gradient = tangent.random(generator), tangent.gradient(torch.randn_like(y))
    for c in (random, gradient, tangent.project(torch.randn_like(y))):
        for path in ("exact", "second_order", "expmap", "retr"):
            assert not any(bool(bias.any()) for bias in shifted(space, tangent.move(c, path)))


def test_section_holds_nothing_else() -> None:
    model = generic(Stack())
    space = parameter_manifold(model)
    y = space.canonicalize(space.pack(model))
    u = torch.randn_like(y)
    moved = (space.section().proju(y, u) != 0).sum()
    # Two layers, a key and a value bias each; those are zero, and all other entries of a vector stay
    assert int(moved) == y.numel() - 2 * 2 * WIDTH


def test_section_leaves_the_manifold_as_it_was() -> None:
    space = parameter_manifold(generic(Stack()))
    section = space.section()
    assert section.holds_translations
    assert not space.holds_translations
    assert section.layout is space.layout


def test_batches_of_points() -> None:
    model = generic(Stack())
    space = parameter_manifold(model)
    x = torch.stack([space.pack(model), space.pack(generic(Stack()))])
    y = space.canonicalize(x)
    for i in range(2):
        assert_close(y[i], space.canonicalize(x[i]), rtol=1e-12, atol=1e-12)
    moved = space.random_action(x, condition=5.0)
    assert apart(space.canonicalize(moved), y) < 1e-10
    batch = tokens()
    for i in range(2):
        assert_close(space.call(model, moved[i], batch), space.call(model, x[i], batch), rtol=1e-12, atol=1e-12)


def test_argument_is_left_alone_and_result_is_detached() -> None:
    model = generic(Stack())
    space = parameter_manifold(model)
    x = space.pack(model).requires_grad_()
    before = x.detach().clone()
    for y in (space.canonicalize(x), space.random_action(x)):
        assert not y.requires_grad
        assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert torch.equal(x, before)


def test_float32_models_are_balanced_in_float64() -> None:
    model = load_digits_vit()
    space = parameter_manifold(model)
    x = space.pack(model)
    y = space.canonicalize(space.random_action(x.double(), condition=1e4)).float()
    # Only what is left of a float64 point at condition 1e4, then one rounding to float32
    assert apart(y, space.canonicalize(x)) < 1e-5


# -- random group elements -------------------------------------------------------------------------------------------


def test_same_generator_gives_the_same_element() -> None:
    model = generic(Stack())
    space = parameter_manifold(model)
    x = space.pack(model)
    state = torch.get_rng_state()
    once = space.random_action(x, generator=torch.Generator().manual_seed(3))
    assert torch.equal(once, space.random_action(x, generator=torch.Generator().manual_seed(3)))
    assert not torch.equal(once, space.random_action(x, generator=torch.Generator().manual_seed(4)))
    assert torch.equal(space.random_action(x), space.random_action(x))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", ["query_key", "value_output"])
def test_only_the_named_kinds_move(kind: str) -> None:
    model = generic(Stack())
    space = parameter_manifold(model)
    x = space.pack(model)
    parts = zip(space.layout.gather(x), space.layout.gather(space.random_action(x, kinds=[kind])), strict=True)
    same = [torch.equal(a, b) for a, b in parts]
    # Value biases are shifted against the output bias, which is in the rest
    assert same == [kind != "query_key", kind != "value_output", kind == "query_key"]
    assert torch.equal(space.random_action(x, kinds=[]), x)


def test_without_translations_only_the_group_acts() -> None:
    model = generic(Stack())
    space = parameter_manifold(model)
    x = space.pack(model)
    y = space.random_action(x, translations=False)
    for block, a, b in zip(space.blocks, space.layout.gather(x), space.layout.gather(y), strict=False):
        assert_close(block.manifold.product(b), block.manifold.product(a), rtol=0, atol=1e-12)
    assert torch.equal(space.layout.gather(y)[-1], space.layout.gather(x)[-1])


@pytest.mark.parametrize("condition", [1.0, 10.0, 1e3])
def test_elements_have_the_condition_that_was_asked_for(condition: float) -> None:
    model = generic(Stack())
    space = parameter_manifold(model)
    x = space.pack(model)
    y = space.random_action(x, condition=condition, translations=False)
    before, after = (space.layout.gather(p)[0][:, :9] for p in (x, y))
    a = torch.linalg.lstsq(before, after).solution
    assert_close(torch.linalg.cond(a), torch.full((4,), condition).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("condition", [0.5, 0.0, float("nan")])
def test_conditions_below_one_are_refused(condition: float) -> None:
    space = parameter_manifold(generic(Stack()))
    with pytest.raises(ValueError, match="condition number of at least 1, got"):
        space.random_action(torch.ones(space.layout.size), condition=condition)
