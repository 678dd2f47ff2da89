"""The declared layouts are those of the models: their groups and shifts leave every output unchanged."""

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from quotient_nets import ParameterManifold, parameter_manifold
from tests.models import CASES, ModelCase

EXACT = 1e-12  # relative to the largest output, in float64

each_model = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def output(space: ParameterManifold, model: torch.nn.Module, x: Tensor, case: ModelCase, inputs: dict) -> Tensor:
    leaves = tree_leaves(space.call(model, x, **inputs))
    return torch.cat([leaf.detach().flatten() for leaf in leaves if leaf.is_floating_point()])


@each_model
def test_symmetries_are_exact_and_breaking_them_is_not(case: ModelCase) -> None:
    model, inputs = case.build(), case.inputs()
    report = parameter_manifold(model, strict=True).check(model, **inputs)
    assert report.change < EXACT
    assert report.dtype is torch.float64
    assert report.unverified == ()
    assert set(report.controls) == {"query_key", "value_output"}
    assert min(report.controls.values()) > 1e-2


@each_model
def test_every_head_is_in_a_batched_block(case: ModelCase) -> None:
    space = parameter_manifold(case.build())
    assert len(space.blocks) == case.blocks
    for kind in ("query_key", "value_output"):
        assert sum(block.shape[0] for block in space.blocks if block.kind == kind) == case.heads
    assert space.notes == ()


@each_model
def test_exact_translations_are_found(case: ModelCase) -> None:
    space = parameter_manifold(case.build())
    assert len(space.translations()) == case.translations
    removed = sum(block.dimensions_removed for block in space.blocks)
    groups = sum(block.shape[0] * block.shape[2] ** 2 for block in space.blocks)
    # A shift has one number for each row of its bias, and all layers here are equal
    ranks = {block.shape[2] for block in space.blocks}
    assert len(ranks) == 1
    shifts = sum(shift.bias.heads * shift.bias.rank for _, shift in space.translations())
    assert removed == groups + shifts


@each_model
def test_random_action_keeps_the_output_and_moves_the_parameters(case: ModelCase) -> None:
    model, inputs = case.build(), case.inputs()
    space = parameter_manifold(model)
    x = space.pack(model)
    y = space.random_action(x, condition=10.0)
    before, after = (output(space, model, point, case, inputs) for point in (x, y))
    assert float((after - before).abs().max()) <= EXACT * float(before.abs().max())
    for block, old, new in zip(space.blocks, space.layout.gather(x), space.layout.gather(y), strict=False):
        change = (new - old).flatten(1).norm(dim=1) / old.flatten(1).norm(dim=1)
        assert bool((change > 0.05).all()), f"a head of {block.kind} did not move"


@each_model
def test_canonical_point_has_the_same_output(case: ModelCase) -> None:
    model, inputs = case.build(), case.inputs()
    space = parameter_manifold(model)
    x = space.pack(model)
    before = output(space, model, x, case, inputs)
    for translations in (True, False):
        y = space.canonicalize(x, translations=translations)
        after = output(space, model, y, case, inputs)
        assert float((after - before).abs().max()) <= EXACT * float(before.abs().max())
