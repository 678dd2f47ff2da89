"""What worst-case sharpness refuses, and what it says."""

import math
from typing import Any

import geoopt
import pytest
import torch
from torch import Tensor

from quotient_nets import AdaptiveEuclidean, InvariantFixedRank, worst_case_sharpness

MANIFOLD = InvariantFixedRank(4, 3)


def square(y: Tensor) -> Tensor:
    return y.square().sum((-2, -1))


def measure(loss: Any = square, manifold: Any = MANIFOLD, x: Tensor | None = None, **settings: Any) -> Any:
    x = torch.randn(5, 7, 2, dtype=torch.float64) if x is None else x
    return worst_case_sharpness(loss, manifold, x, **({"rho": 0.1} | settings))


@pytest.mark.parametrize("rho", [0, 0.0, -1.0, math.nan, math.inf, "1", None, True, torch.tensor(0.1)])
def test_radius(rho: Any) -> None:
    with pytest.raises(ValueError, match="expected a radius rho > 0, got"):
        measure(rho=rho)


@pytest.mark.parametrize("name", ["steps", "restarts"])
@pytest.mark.parametrize("number", [0, -3, 2.0, "5", None, True])
def test_counts(name: str, number: Any) -> None:
    with pytest.raises(ValueError, match=f"expected a positive integer {name}, got"):
        measure(**{name: number})


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda y: y.square().sum(), r"shape \(5,\), got \(\)"),
        (lambda y: y.square().sum(-1), r"shape \(5,\), got \(5, 7\)"),
        (lambda y: 1.0, r"shape \(5,\), got float"),
    ],
)
def test_shape_of_the_loss(loss: Any, got: str) -> None:
    with pytest.raises(ValueError, match=got):
        measure(loss)


@pytest.mark.parametrize(
    "loss", [lambda y: square(y.detach()), lambda y: torch.zeros(5, dtype=torch.float64), torch.no_grad()(square)]
)
def test_detached_loss(loss: Any) -> None:
    with pytest.raises(ValueError, match="depend differentiably on its argument"):
        measure(loss)


def test_loss_that_depends_on_other_tensors_only() -> None:
    other = torch.ones(5, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match="depend differentiably on its argument"):
        measure(lambda y: other * 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_loss_that_is_not_finite_at_the_point(bad: float) -> None:
    with pytest.raises(ValueError, match=r"expected a finite loss at `x`, got"):
        measure(lambda y: square(y) * bad)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_loss_that_is_not_finite_in_the_ball(bad: float) -> None:
    x = torch.ones(2, 1, dtype=torch.float64)

    def cliff(y: Tensor) -> Tensor:
        value = y.squeeze(-1)
        return torch.where(value > 1.5, bad, value)

    with pytest.raises(ValueError, match=r"finite loss in the whole ball.*smaller radius than rho=2"):
        measure(cliff, geoopt.Euclidean(1), x, rho=2.0)


def test_loss_that_is_not_finite_for_one_element_at_a_random_start() -> None:
    x = torch.tensor([0.0, 0.0], dtype=torch.float64)

    def cliff(y: Tensor) -> Tensor:
        return torch.where(y < -0.5, torch.nan, y)

    with pytest.raises(ValueError, match="finite loss in the whole ball"):
        measure(cliff, geoopt.Euclidean(), x, rho=1.0, restarts=8)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("manifold", [MANIFOLD, AdaptiveEuclidean(2)])
def test_point_that_is_not_finite(manifold: geoopt.Manifold, bad: float) -> None:
    x = torch.randn(5, 7, 2, dtype=torch.float64)
    x[3, 1, 0] = bad
    with pytest.raises(ValueError, match=f"`x` is not a point of {type(manifold).__name__}.*NaN or Inf"):
        measure(manifold=manifold, x=x)


def test_point_of_deficient_rank_names_the_element() -> None:
    x = torch.randn(5, 7, 2, dtype=torch.float64)
    x[3, :4, 1] = x[3, :4, 0]
    with pytest.raises(ValueError, match=r"full rank r=2.*batch indices \[\[3\]\].*smaller r"):
        measure(x=x)


@pytest.mark.parametrize("shape", [(7,), (6, 2), (5, 7, 4), (5, 7, 0)])
def test_point_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="`x` is not a point of InvariantFixedRank"):
        measure(x=torch.randn(*shape))


def test_point_off_the_manifold() -> None:
    with pytest.raises(ValueError, match="`x` is not a point of Sphere"):
        measure(lambda y: y.sum(-1), geoopt.Sphere(), torch.ones(3))


@pytest.mark.parametrize("manifold", [MANIFOLD, AdaptiveEuclidean(2), geoopt.Euclidean(2)])
@pytest.mark.parametrize("path", ["geodesic", "", "ndim"])
def test_path_that_does_not_exist(manifold: geoopt.Manifold, path: str) -> None:
    with pytest.raises(ValueError, match=r"expected .*path.*expmap"):
        measure(manifold=manifold, path=path)


def test_path_with_another_velocity() -> None:
    with pytest.raises(ValueError, match=r"CanonicalStiefel.expmap does not start with the velocity"):
        measure(lambda y: y.sum((-2, -1)), geoopt.CanonicalStiefel(), torch.eye(4)[:, :2])


def test_errors_come_before_any_evaluation() -> None:
    def never(y: Tensor) -> Tensor:
        raise AssertionError("the loss was evaluated")

    for settings in ({"rho": -1}, {"steps": 0}, {"restarts": 0}, {"path": "geodesic"}):
        with pytest.raises(ValueError, match="expected"):
            measure(never, geoopt.Euclidean(2), **settings)


def test_gradient_that_is_not_finite() -> None:
    x = torch.tensor([4.0, 0.0], dtype=torch.float64)  # the slope of a root is infinite at zero, and 0 * inf is NaN
    with pytest.raises(ValueError, match=r"finite (loss|gradient)"):
        measure(lambda y: y[0] + (0 * y[1].abs()).sqrt(), geoopt.Euclidean(1), x, rho=0.5)
