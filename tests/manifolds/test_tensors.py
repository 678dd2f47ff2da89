"""Batches lead, broadcast and come back; nothing of the caller's is changed."""

from itertools import product

import geoopt
import pytest
import torch
from torch.testing import assert_close

from quotient_nets.manifolds import (
    AdaptiveEuclidean,
    ComplexRankOne,
    EmbeddedFixedRank,
    InvariantFixedRank,
    PolarFixedRank,
    PreconditionedFixedRank,
)
from tests.cases import Operation, draw, each_operation

MANIFOLDS = [
    (InvariantFixedRank(4, 3), (7, 2)),
    (PreconditionedFixedRank(4, 3), (7, 1)),
    (EmbeddedFixedRank(4, 3), (7, 1)),
    (PolarFixedRank(4, 3), (8, 1)),
    (ComplexRankOne(4, 3), (7, 2)),
    (AdaptiveEuclidean(), (5,)),
    (AdaptiveEuclidean(2), (3, 2)),
]
over_manifolds = pytest.mark.parametrize(("manifold", "shape"), MANIFOLDS, ids=lambda p: str(p))


@each_operation
@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.float32, 1e-4), (torch.float64, 1e-11)], ids=["float32", "float64"]
)
def test_broadcasting_equals_a_loop(
    manifold: geoopt.Manifold, shape: tuple[int, ...], op: Operation, dtype: torch.dtype, rounding: float
) -> None:
    for first, second in product([(2, 1), (3,), ()], repeat=2):
        roles = draw(manifold, first, shape, dtype)
        other = draw(manifold, second, shape, dtype)
        roles |= {role: other[role] for role in op.takes[1:]}
        whole = op(manifold, roles)
        batch = torch.broadcast_shapes(first, second)
        wide = {role: a.expand(*batch, *shape).reshape(-1, *shape) for role, a in roles.items()}
        rows = [op(manifold, {role: a[i] for role, a in wide.items()}) for i in range(len(wide["x"]))]
        expected = torch.stack(rows).reshape(batch + rows[0].shape)
        # Of two independent points some have no logarithm in the preconditioned metric.
        assert_close(whole, expected, rtol=rounding, atol=rounding, equal_nan=True)


@each_operation
def test_arguments_are_left_alone_and_may_have_any_strides(
    manifold: geoopt.Manifold, shape: tuple[int, ...], op: Operation
) -> None:
    roles = draw(manifold, (2, 3), shape)
    strided = {role: a.transpose(0, 1).contiguous().transpose(0, 1) for role, a in roles.items()}
    before = {role: a.clone() for role, a in strided.items()}
    actual = op(manifold, strided)
    assert all(torch.equal(strided[role], before[role]) for role in before)
    assert_close(actual, op(manifold, roles), rtol=1e-12, atol=1e-12)


@each_operation
def test_empty_batches_stay_empty(manifold: geoopt.Manifold, shape: tuple[int, ...], op: Operation) -> None:
    full, empty = op(manifold, draw(manifold, (1,), shape)), op(manifold, draw(manifold, (0,), shape))
    assert empty.shape == (0, *full.shape[1:])


@over_manifolds
@pytest.mark.parametrize("batch", [(), (3,), (2, 4)])
def test_keepdim_keeps_an_axis_for_each_axis_of_a_point(
    manifold: geoopt.Manifold, shape: tuple[int, ...], batch: tuple[int, ...]
) -> None:
    roles = draw(manifold, batch, shape)
    x, y, u, v = (roles[role] for role in "xyuv")
    ones = (1,) * len(shape)
    calls = [(manifold.inner, (x, u, v)), (manifold.inner, (x, u)), (manifold.norm, (x, u))]
    if not isinstance(manifold, InvariantFixedRank):
        # That of rank 2 is solved for, far slower.
        calls += [(manifold.dist, (x, y)), (manifold.dist2, (x, y))]
    for method, arguments in calls:
        kept, dropped = method(*arguments, keepdim=True), method(*arguments)
        assert kept.shape == (*batch, *ones)
        assert dropped.shape == batch
        assert torch.equal(kept.reshape(batch), dropped)


def test_adaptive_optimizers_see_one_scale_for_each_point() -> None:
    m = InvariantFixedRank(4, 3)
    roles = draw(m, (2, 4), (7, 2))
    components = m.component_inner(roles["x"], roles["u"])
    assert components.shape == (2, 4, 1, 1)
    assert torch.equal(components, m.inner(roles["x"], roles["u"], keepdim=True))


def test_adaptive_metric_gives_its_summands() -> None:
    m = AdaptiveEuclidean(2)
    roles = draw(m, (4,), (3, 2))
    x, u = roles["x"], roles["u"]
    components = m.component_inner(x, u)
    assert components.shape == x.shape
    assert_close(components.sum((-2, -1)), m.inner(x, u))


@over_manifolds
@pytest.mark.parametrize("strided", [False, True])
def test_projection_on_the_manifold_changes_no_bit(
    manifold: geoopt.Manifold, shape: tuple[int, ...], strided: bool
) -> None:
    x = draw(manifold, (2, 3), shape)["x"]
    x = x.transpose(0, 1) if strided else x
    before = x.clone()
    projected = manifold.projx(x)
    assert torch.equal(projected, before)
    assert projected.is_contiguous()
    assert torch.equal(x, before)
