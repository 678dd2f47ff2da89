"""What stands around a measurement: the caller's autocast, gradients and precision change no geometry."""

import geoopt
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from quotient_nets import (
    AdaptiveEuclidean,
    InvariantFixedRank,
    model_sharpness,
    parameter_manifold,
    worst_case_sharpness,
)
from quotient_nets.demo import load_digits_vit
from quotient_nets.sharpness.ascent import Workspace, ascent_step, start

MANIFOLD = InvariantFixedRank(4, 3)


def quadratic(y: Tensor) -> Tensor:
    return (y.float() - 0.3).square().sum((-2, -1))


@pytest.mark.parametrize("path", ["expmap", "second_order", "retr"])
def test_autocast_is_for_the_loss_only(path: str) -> None:
    x = torch.randn(7, 2)
    dtypes = set()

    def loss(y: Tensor) -> Tensor:
        dtypes.add((y @ y.mT).dtype)
        return quadratic(y)

    expected = worst_case_sharpness(quadratic, MANIFOLD, x, rho=0.3, path=path)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = worst_case_sharpness(loss, MANIFOLD, x, rho=0.3, path=path)
    assert dtypes == {torch.bfloat16}
    assert_close(found.value, expected.value)
    assert_close(found.direction, expected.direction)


def test_autocast_around_a_model() -> None:
    model, images, labels = load_digits_vit(), torch.randn(6, 8, 8), torch.arange(6)

    def loss(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(m(batch[0]).float(), batch[1])

    expected = model_sharpness(model, loss, [(images, labels)], rho=0.3, steps=5, check=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model_sharpness(model, loss, [(images, labels)], rho=0.3, steps=5, check=False)
    assert found.value == pytest.approx(expected.value, rel=0.1)  # the loss has three digits
    assert found.batches[0].certificates["relative_norm"] < 1 + 1e-6


def test_learnable_curvature_is_left_alone() -> None:
    ball = geoopt.PoincareBall(c=1.0, learnable=True)
    x = torch.tensor([0.1, 0.2])
    found = worst_case_sharpness(lambda y: (y - 0.3).square().sum(-1), ball, x, rho=0.3)
    fixed = worst_case_sharpness(lambda y: (y - 0.3).square().sum(-1), geoopt.PoincareBall(c=1.0), x, rho=0.3)
    assert_close(found.value, fixed.value)
    assert all(parameter.grad is None for parameter in ball.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("manifold", [MANIFOLD, AdaptiveEuclidean(2), geoopt.Euclidean(2)], ids=lambda m: m.name)
@pytest.mark.parametrize("rho", [1e-3, 0.3])
def test_points_in_half_precision_are_measured_in_float32(
    manifold: geoopt.Manifold, dtype: torch.dtype, rho: float
) -> None:
    x = torch.randn(7, 2).to(dtype)
    found = worst_case_sharpness(quadratic, manifold, x, rho=rho)
    expected = worst_case_sharpness(quadratic, manifold, x.float(), rho=rho)
    assert_close(found.value, expected.value, rtol=0, atol=0)
    assert found.direction.dtype == torch.float32


def test_a_half_precision_point_of_a_model_is_measured_in_float32() -> None:
    model, batch = load_digits_vit(), (torch.randn(4, 8, 8), torch.arange(4))
    space = parameter_manifold(model)
    x = space.pack(model).bfloat16()

    def loss(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(m(batch[0]), batch[1])

    found, expected = (
        model_sharpness(model, loss, [batch], rho=0.01, steps=3, space=space, x=at) for at in (x, x.float())
    )
    assert found.value == expected.value


@pytest.mark.parametrize("rho", [1e-20, 1e-30])
def test_a_tiny_radius_gives_no_nan(rho: float) -> None:
    found = worst_case_sharpness(quadratic, MANIFOLD, torch.randn(7, 2), rho=rho)
    assert float(found.value) == 0.0


def test_reused_vectors_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images, labels = load_digits_vit(), torch.randn(6, 8, 8), torch.arange(6)

    def measure() -> tuple[float, tuple[float, ...]]:
        loss = lambda m, batch: cross_entropy(m(batch[0]), batch[1])  # noqa: E731
        found = model_sharpness(model, loss, [(images, labels)], rho=1.0, steps=12, restarts=2, check=False)
        return found.value, found.batches[0].history

    reused = measure()
    monkeypatch.setattr(Workspace, "vector", lambda self, like, held: torch.full_like(like, torch.nan))
    monkeypatch.setattr(Workspace, "point", lambda self, like: torch.full_like(like, torch.nan))
    assert measure() == reused


def test_workspace_hands_out_no_vector_that_a_state_holds() -> None:
    space = MANIFOLD.at(torch.randn(7, 2))
    evaluate = lambda y, differentiate: (quadratic(y), 2 * (y - 0.3) if differentiate else None)  # noqa: E731
    value, slope = evaluate(space.x, True)
    state = start(space, value.reshape(1, 1), space.gradient(space.pull_gradient(slope)), space.origin(), 0.3)
    work = Workspace()
    for k in range(8):
        before = {name: tensor.clone() for name, tensor in vars(state).items()}
        after = ascent_step(space, evaluate, state, path="expmap", rho=0.3, first=k == 0, workspace=work)
        for name, tensor in vars(state).items():
            assert torch.equal(tensor, before[name]), name
        state = after
    assert len(work._vectors) <= 7
