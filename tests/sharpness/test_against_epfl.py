"""Adaptive sharpness of a trained transformer against the search of Andriushchenko et al. (2023)."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from quotient_nets import AdaptiveEuclidean, ParameterManifold, model_sharpness, parameter_manifold
from quotient_nets.demo import DigitsViT, load_digits_split, load_digits_vit
from tests.baselines.epfl import checkpoints, epfl_adaptive_sharpness, project

STEPS = 20
IMAGES = 256


@pytest.fixture(scope="module")
def model() -> DigitsViT:
    return load_digits_vit()


@pytest.fixture(scope="module")
def batch() -> tuple[Tensor, Tensor]:
    data = load_digits_split()
    return data.train_images[:IMAGES], data.train_labels[:IMAGES]


def loss_of_parameters(
    model: nn.Module, space: ParameterManifold, batch: tuple[Tensor, Tensor]
) -> Callable[[Tensor], Tensor]:
    return lambda x: loss(lambda images: space.call(model, x, images), batch)


def loss(stand_in: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return cross_entropy(stand_in(images), labels)


@pytest.mark.parametrize("mix_with_last", [False, True])
@pytest.mark.parametrize("rho", [0.1, 0.3, 1.0])
def test_never_below_at_equal_passes(
    model: DigitsViT, batch: tuple[Tensor, Tensor], rho: float, mix_with_last: bool
) -> None:
    space = parameter_manifold(model, attention=AdaptiveEuclidean)
    x, objective = space.pack(model), loss_of_parameters(model, space, batch)
    theirs = epfl_adaptive_sharpness(objective, x, rho, STEPS, mix_with_last=mix_with_last)
    passes = []
    ours = model_sharpness(
        model,
        loss,
        [batch],
        rho=rho,
        steps=STEPS,
        space=space,
        translations=False,
        progress=lambda k, _: passes.append(k),
    )
    assert len(passes) == theirs.backwards == STEPS
    assert theirs.forwards == 2 * STEPS + 1  # ours: one for each step, and one
    print(f"rho {rho}: ours {ours.value:.5g}, theirs {theirs.value:.5g}, ratio {theirs.value / ours.value:.3f}")
    assert ours.value >= theirs.value > 0
    assert math.isclose(ours.base_loss, objective(x).item(), rel_tol=1e-5)


def test_their_schedule_is_the_published_one() -> None:
    assert checkpoints(20) == [5, 9, 12, 15, 16, 18, 19, 20]
    assert checkpoints(100) == [22, 41, 58, 70, 80, 87, 93, 99]


def test_their_projection_is_the_nearest_point_of_the_ellipsoid() -> None:
    weights = torch.tensor([2.0, 0.5], dtype=torch.float64)
    delta = torch.tensor([3.0, 1.0], dtype=torch.float64)
    angle = torch.linspace(0, 2 * math.pi, 100_001, dtype=torch.float64)
    ellipse = 0.7 * weights * torch.stack([angle.cos(), angle.sin()], dim=-1)
    nearest = ellipse[(ellipse - delta).norm(dim=-1).argmin()]
    torch.testing.assert_close(project(delta, weights, 0.7), nearest, rtol=0, atol=1e-4)
    torch.testing.assert_close(project(0.1 * delta, weights, 0.7), 0.1 * delta)
