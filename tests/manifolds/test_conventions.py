"""geoopt's conventions: names of arguments, random points, equality, copies."""

import copy
import inspect
import pickle

import geoopt
import pytest
import torch
from torch.testing import assert_close

from quotient_nets.manifolds import (
    AdaptiveEuclidean,
    ComplexRankOne,
    InvariantFixedRank,
    PolarFixedRank,
    QuotientManifold,
)
from tests.cases import FIXED_RANK

MANIFOLDS = [
    *((kind(4, 3), (7, 2)) for kind in FIXED_RANK),
    (PolarFixedRank(4, 3), (9, 2)),
    (ComplexRankOne(4, 3), (7, 2)),
    (AdaptiveEuclidean(), (5,)),
]
over_manifolds = pytest.mark.parametrize(("manifold", "shape"), MANIFOLDS, ids=[m.name for m, _ in MANIFOLDS])
SIGNATURES = {
    "retr": "x u",
    "expmap": "x u",
    "logmap": "x y",
    "transp": "x y v",
    "retr_transp": "x u v",
    "inner": "x u v *keepdim",
    "norm": "x u *keepdim",
    "dist": "x y *keepdim",
    "component_inner": "x u v",
    "proju": "x u",
    "egrad2rgrad": "x u",
    "projx": "x",
    "random": "*size dtype device",
    "origin": "*size dtype device seed",
}


@over_manifolds
@pytest.mark.parametrize("method", SIGNATURES)
def test_arguments_have_the_names_by_which_geoopt_passes_them(
    manifold: geoopt.Manifold, shape: tuple[int, ...], method: str
) -> None:
    parameters = inspect.signature(getattr(manifold, method)).parameters
    names = [name.strip("*") for name in SIGNATURES[method].split()]
    assert list(parameters)[: len(names)] == names
    for name in list(parameters)[len(names) :]:
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY


@over_manifolds
def test_is_an_irreversible_manifold_with_a_name(manifold: geoopt.Manifold, shape: tuple[int, ...]) -> None:
    assert manifold.ndim == len(shape)
    assert manifold.reversible is False
    assert type(manifold).__name__ in manifold.name
    assert repr(manifold) == f"{manifold.name} manifold"
    assert (manifold.dtype, manifold.device) == (None, None)
    assert not manifold.state_dict()


@over_manifolds
def test_random_point_from_sizes_or_a_shape(manifold: geoopt.Manifold, shape: tuple[int, ...]) -> None:
    torch.manual_seed(5)
    first = manifold.random(3, *shape, dtype=torch.float64)
    torch.manual_seed(5)
    second = manifold.random((3, *shape), dtype=torch.float64)
    assert torch.equal(first, second)
    assert isinstance(first, geoopt.ManifoldTensor)
    assert first.manifold is manifold
    assert (first.shape, first.dtype) == ((3, *shape), torch.float64)
    assert manifold.check_point_on_manifold(first)


@over_manifolds
def test_origin_is_the_same_every_time_and_draws_nothing(manifold: geoopt.Manifold, shape: tuple[int, ...]) -> None:
    state = torch.get_rng_state()
    first, second = manifold.origin(3, *shape), manifold.origin((3, *shape), dtype=torch.float64)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, manifold.origin(3, *shape))
    assert first.manifold is manifold
    assert second.dtype == torch.float64
    assert manifold.check_point_on_manifold(first)


def test_origin_has_a_seed() -> None:
    m = InvariantFixedRank(4, 3)
    assert torch.equal(m.origin(7, 2), m.origin(7, 2, seed=42))
    assert torch.equal(m.origin(7, 2), m.origin(7, 2, seed=None))
    assert not torch.equal(m.origin(7, 2), m.origin(7, 2, seed=1))


@over_manifolds
def test_copies_equal_the_original(manifold: geoopt.Manifold, shape: tuple[int, ...]) -> None:
    x, u = manifold.random(*shape, dtype=torch.float64), torch.randn(*shape, dtype=torch.float64)
    for other in (copy.copy(manifold), copy.deepcopy(manifold), pickle.loads(pickle.dumps(manifold))):
        assert other == manifold
        assert hash(other) == hash(manifold)
        assert_close(other.proju(x, u), manifold.proju(x, u), rtol=0, atol=0)


def test_other_numbers_make_another_manifold() -> None:
    different = {
        InvariantFixedRank(4, 3),
        InvariantFixedRank(3, 4),
        InvariantFixedRank(4, 4),
        ComplexRankOne(4, 3),
        ComplexRankOne(3, 4),
        AdaptiveEuclidean(),
        AdaptiveEuclidean(2),
    }
    assert len(different) == 7
    assert InvariantFixedRank(4, 3) != geoopt.Euclidean(2)
    assert InvariantFixedRank(4, 3) != (4, 3)
    assert AdaptiveEuclidean() != geoopt.Euclidean(1)


@over_manifolds
def test_parameter_accepts_an_equal_manifold(manifold: geoopt.Manifold, shape: tuple[int, ...]) -> None:
    x = manifold.random(*shape)
    p = geoopt.ManifoldParameter(x, manifold=copy.deepcopy(manifold))
    moved = pickle.loads(pickle.dumps(p))
    assert moved.manifold == manifold
    assert torch.equal(moved, p)


@over_manifolds
def test_tensor_of_the_manifold_has_its_methods(manifold: geoopt.Manifold, shape: tuple[int, ...]) -> None:
    x, u = manifold.random(*shape), 0.01 * torch.randn(shape)
    assert_close(x.retr(u), manifold.retr(x, u))
    assert_close(x.expmap(u), manifold.expmap(x, u))
    assert_close(x.proju(u), manifold.proju(x, u))
    assert_close(x.inner(u), manifold.inner(x, u))


@pytest.mark.parametrize("sizes", [(0, 3), (3, -1), (2.0, 3), ("4", 3)])
def test_sizes_of_factors_are_positive_integers(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"expected positive integers n .* got n="):
        InvariantFixedRank(*sizes)


@pytest.mark.parametrize("ndim", [0, -1, 1.5])
def test_adaptive_metric_needs_axes(ndim: int) -> None:
    with pytest.raises(ValueError, match="expected a positive number of point axes, got ndim="):
        AdaptiveEuclidean(ndim)


def test_a_quotient_needs_its_five_methods() -> None:
    assert QuotientManifold.__abstractmethods__ >= {
        "action",
        "infinitesimal_action",
        "product",
        "inner",
        "egrad2rgrad",
    }
    with pytest.raises(TypeError, match="abstract"):
        QuotientManifold()
