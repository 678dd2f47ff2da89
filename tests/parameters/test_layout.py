"""Stored order and block order are two orders of the same numbers: a permutation and its own derivative."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, jacrev, jvp, vjp, vmap
from torch.testing import assert_close

from quotient_nets import ParameterManifold, parameter_manifold
from quotient_nets.parameters import Component, Entry, Heads, Layout, Pair, View
from tests.models import CASES, WIDTH, Attention, Stack, generic


def small() -> ParameterManifold:
    """Some heads in blocks, some in the rest, and parameters of which only a part is in a block."""
    model = generic(Attention(kdim=2, vdim=3))
    with torch.no_grad():
        model.attention.out_proj.weight[:, :4] = 0
    model.attention.k_proj_weight.requires_grad_(False)
    return parameter_manifold(model, degenerate="rest")


def partial() -> ParameterManifold:
    model = generic(Stack(layers=2))
    with torch.no_grad():
        model.layers[1].self_attn.in_proj_weight[WIDTH : WIDTH + 4] = 0  # first head's keys
        model.layers[1].self_attn.in_proj_bias[WIDTH : WIDTH + 4] = 0
    return parameter_manifold(model, degenerate="rest")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_number_is_in_one_place(case) -> None:
    layout = parameter_manifold(case.build()).layout
    index = torch.arange(layout.size, dtype=torch.float64)
    parts = layout.gather(index)
    everywhere = torch.cat([part.flatten() for part in parts])
    assert torch.equal(everywhere.sort().values, index)
    assert torch.equal(layout.scatter(parts), index)
    assert parts[-1].shape == (layout.rest_size,)


@pytest.mark.parametrize("build", [small, partial])
def test_every_number_is_in_one_place_when_heads_are_left_out(build) -> None:
    layout = build().layout
    assert layout.loose
    index = torch.arange(layout.size, dtype=torch.float64)
    parts = layout.gather(index)
    assert torch.equal(torch.cat([part.flatten() for part in parts]).sort().values, index)
    assert torch.equal(layout.scatter(parts), index)


@pytest.mark.parametrize("lead", [(), (3,), (2, 1), (0,)], ids=str)
@pytest.mark.parametrize("build", [small, partial])
def test_batches_equal_a_loop(build, lead: tuple[int, ...]) -> None:
    layout = build().layout
    x = torch.randn(*lead, layout.size).double()
    parts = layout.gather(x)
    shapes = [component.shape for component in layout.components] + [(layout.rest_size,)]
    assert [part.shape for part in parts] == [(*lead, *shape) for shape in shapes]
    for i, one in enumerate(x.reshape(-1, layout.size)):
        for part, alone in zip(parts, layout.gather(one), strict=True):
            assert torch.equal(part.reshape(-1, *alone.shape)[i], alone)
    assert torch.equal(layout.scatter(parts), x)


def test_points_that_are_not_contiguous() -> None:
    layout = partial().layout
    x = torch.randn(layout.size, 3).double().T
    assert not x.is_contiguous()
    assert torch.equal(
        layout.scatter([part.mT.contiguous().mT for part in layout.gather(x)[:-1]] + [layout.gather(x)[-1]]), x
    )
    expanded = torch.randn(1, layout.size).double().expand(4, -1)
    assert torch.equal(layout.scatter(layout.gather(expanded)), expanded)


def test_block_order_is_the_flat_block_vector() -> None:
    layout = partial().layout
    parts = layout.gather(torch.randn(2, layout.size))
    flat = torch.cat([part.flatten(1) for part in parts], dim=-1)
    for view, part in zip(layout.parts(flat), parts, strict=True):
        assert torch.equal(view, part)
        assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_blocks_hold_the_heads_of_the_documented_layout() -> None:
    """Against slices written by hand: rows of q, k and v, columns of the output, biases as last rows."""
    model = generic(Stack(layers=2))
    space = parameter_manifold(model)
    query_key, value_output, _ = space.layout.gather(space.pack(model))
    for layer, module in enumerate(model.layers):
        attention = module.self_attn
        weights, biases = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
        for head in range(2):
            rows = slice(4 * head, 4 * head + 4)
            q, k, v = (torch.cat([w[rows].T, b[None, rows]]) for w, b in zip(weights, biases, strict=True))
            o = attention.out_proj.weight[:, rows]
            assert torch.equal(query_key[2 * layer + head], torch.cat([q, k]))
            assert torch.equal(value_output[2 * layer + head], torch.cat([v, o]))


# -- derivatives -----------------------------------------------------------------------------------------------------


def toy() -> Layout:
    """Two heads of rank 2 with 3 and 1 rows, and a bias that belongs to nothing: few enough for finite differences."""
    entries = [Entry("w", torch.Size([4, 3]), torch.float64, 0), Entry("b", torch.Size([2]), torch.float64, 12)]
    entries += [Entry("o", torch.Size([1, 4]), torch.float64, 14)]
    pair = Pair("m", "k", (View("w", "(head rank) row", 2, 2),), (View("o", "row (head rank)", 2, 2),))
    return Layout(entries, [Component((Heads(pair, 0, 1),), 3, 1, 2)], [Heads(pair, 1, 1)])


def test_derivatives_against_finite_differences() -> None:
    layout = toy()
    x = torch.randn(2, layout.size, dtype=torch.float64, requires_grad=True)
    parts = [part.detach().requires_grad_() for part in layout.gather(x)]

    def curved_gather(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.square() for part in layout.gather(x.sin()))

    def curved_scatter(*parts: Tensor) -> Tensor:
        return layout.scatter([part.sin() for part in parts]).square()

    for function, inputs in [(curved_gather, (x,)), (curved_scatter, parts)]:
        assert gradcheck(function, inputs, check_forward_ad=True)
        assert gradgradcheck(function, inputs, check_fwd_over_rev=True, check_rev_over_rev=True)


def test_each_is_the_adjoint_of_the_other() -> None:
    layout = partial().layout
    x = torch.randn(layout.size).double()
    cotangents = tuple(torch.randn_like(part) for part in layout.gather(x))
    (pulled,) = vjp(layout.gather, x)[1](cotangents)
    assert torch.equal(pulled, layout.scatter(cotangents))
    pulled = vjp(lambda *parts: layout.scatter(parts), *layout.gather(x))[1](x)
    assert all(torch.equal(a, b) for a, b in zip(pulled, layout.gather(x), strict=True))


def test_each_is_its_own_tangent() -> None:
    layout = partial().layout
    x, u = torch.randn(2, layout.size).double()
    tangents = jvp(layout.gather, (x,), (u,))[1]
    assert all(torch.equal(a, b) for a, b in zip(tangents, layout.gather(u), strict=True))
    moved = jvp(lambda *parts: layout.scatter(parts), layout.gather(x), layout.gather(u))[1]
    assert torch.equal(moved, u)


def test_batches_of_derivatives() -> None:
    """By torch.func; ``is_grads_batched`` and ``vectorize`` of older torch use a vmap that knows no custom function."""
    layout = partial().layout
    x, us = torch.randn(layout.size).double(), torch.randn(3, layout.size).double()
    tangents = vmap(lambda u: jvp(layout.gather, (x,), (u,))[1])(us)
    assert all(torch.equal(a, b) for a, b in zip(tangents, layout.gather(us), strict=True))
    pulled = vmap(lambda *parts: vjp(layout.gather, x)[1](parts)[0])(*layout.gather(us))
    assert torch.equal(pulled, us)


def test_tangents_of_some_parts_only() -> None:
    layout = partial().layout
    x, u = torch.randn(2, layout.size).double()
    parts, tangents = layout.gather(x), layout.gather(u)
    for i, tangent in enumerate(tangents):
        alone = jvp(lambda p, i=i: layout.scatter([*parts[:i], p, *parts[i + 1 :]]), (parts[i],), (tangent,))[1]
        expected = layout.scatter([t if i == j else torch.zeros_like(t) for j, t in enumerate(tangents)])
        assert torch.equal(alone, expected)


def test_gradient_of_some_parts_only() -> None:
    layout = partial().layout
    x = torch.randn(layout.size).double()
    last = len(layout.components)
    slope = grad(lambda x: layout.gather(x)[last].square().sum())(x)
    zeros = [torch.zeros(component.shape).double() for component in layout.components]
    assert torch.equal(slope, layout.scatter([*zeros, 2 * layout.gather(x)[last]]))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_vmap_equals_a_loop(axis: int) -> None:
    layout = partial().layout
    x = torch.randn(3, layout.size).double()
    moved = x.movedim(0, axis)
    batched = vmap(layout.gather, in_dims=axis)(moved)
    for i, one in enumerate(x):
        assert all(torch.equal(b[i], a) for b, a in zip(batched, layout.gather(one), strict=True))
    assert torch.equal(vmap(lambda *parts: layout.scatter(parts))(*batched), x)


def test_vmap_over_one_part_only() -> None:
    layout = partial().layout
    x = torch.randn(layout.size).double()
    *blocks, rest = layout.gather(x)
    rests = torch.randn(3, *rest.shape).double()
    batched = vmap(lambda rest: layout.scatter([*blocks, rest]))(rests)
    first = rests.new_empty(3, *blocks[0].shape).normal_()
    swapped = vmap(lambda block: layout.scatter([block, *blocks[1:], rest]))(first)
    for i in range(3):
        assert torch.equal(batched[i], layout.scatter([*blocks, rests[i]]))
        assert torch.equal(swapped[i], layout.scatter([first[i], *blocks[1:], rest]))


def test_transforms_compose() -> None:
    layout = toy()
    x = torch.randn(3, layout.size).double()

    def energy(x: Tensor) -> Tensor:
        block, rest = layout.gather(x)
        return layout.scatter([block.pow(3), rest.sin()]).sum()

    batched = vmap(jacrev(grad(energy)))(x)
    for one, hessian in zip(x, batched, strict=True):
        block, rest = layout.gather(one)
        assert_close(hessian, layout.scatter([6 * block, -rest.sin()]).diag(), rtol=1e-14, atol=0)


# -- declarations ----------------------------------------------------------------------------------------------------


def test_views_must_cover_their_parameter_once() -> None:
    entries = [Entry("w", torch.Size([4, 3]), torch.float64, 0)]
    half = Pair("m", "k", (View("w", "(head rank) row", 2, 2),), ())
    Layout(entries, [Component((Heads(half, 0, 2),), 3, 0, 2)], [])
    for runs in [(Heads(half, 0, 1),), (Heads(half, 0, 2), Heads(half, 0, 1))]:
        with pytest.raises(ValueError, match=r"views of w to cover its 12 entries once, they cover (6|18)\."):
            Layout(entries, [Component(runs, 3, 0, 2)], [])


def test_views_share_memory_with_the_parameter() -> None:
    stored = torch.randn(2, 3 * 2 * 4, 5)
    view = View("w", "(part head rank) row", heads=2, rank=4, parts=3, part=1).strided(stored)
    assert view.shape == (2, 2, 1, 5, 4)
    assert view.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr()
    assert torch.equal(view[1, 1, 0, :, 2], stored[1, 8 + 4 + 2])


def test_groups_of_query_heads_are_an_axis() -> None:
    stored = torch.randn(2 * 3 * 4, 5)
    view = View("q", "(head group rank) row", heads=2, rank=4, groups=3).strided(stored)
    assert view.shape == (2, 3, 5, 4)
    assert torch.equal(view[1, 2, :, 3], stored[1 * 12 + 2 * 4 + 3])
