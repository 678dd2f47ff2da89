"""The ascent step by step: schedule, projection on the ball, one step by hand, no look at the data."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import geoopt
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from quotient_nets.manifolds import AdaptiveEuclidean, InvariantFixedRank
from quotient_nets.sharpness.ascent import (
    MOMENTUM,
    AscentState,
    ascent_step,
    checkpoints,
    evaluate_along,
    start,
    to_ball,
)
from quotient_nets.tangent_space import TangentSpace, tangent_space


def test_checkpoints_are_those_of_apgd() -> None:
    assert list(checkpoints(20)) == [4, 7, 9, *range(10, 21)]
    assert list(checkpoints(100)) == [22, 41, 57, 70, 80, 87, 93, 99]


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 20, 33, 100, 1000])
def test_intervals_are_those_between_checkpoints(steps: int) -> None:
    found = checkpoints(steps)
    at = list(found)
    assert at == sorted(set(at))
    assert at[0] >= 1
    assert at[-1] <= steps
    assert list(found.values()) == [b - a for a, b in zip([0, *at], at, strict=False)]


def test_to_ball_scales_in_the_metric_and_leaves_the_inside_alone() -> None:
    manifold = InvariantFixedRank(4, 3)
    x = torch.randn(3, 7, 2, dtype=torch.float64)
    space = manifold.at(x)
    c = space.random() * torch.tensor([0.5, 1.0, 40.0], dtype=torch.float64)[:, None, None]
    inside = to_ball(space, c, 2.0)
    assert_close(inside[:2], c[:2], rtol=0, atol=0)
    assert_close(inside[2], c[2] / 20, rtol=1e-12, atol=0)
    assert_close(manifold.norm(x, space.vector(inside)), torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64))
    assert_close(to_ball(space, torch.zeros_like(c), 2.0), torch.zeros_like(c), rtol=0, atol=0)


# -- by hand: a linear loss in the plane, slope (3, 4), rho 1 ----------------------------------------------------------

SLOPE = torch.tensor([3.0, 4.0], dtype=torch.float64)


def linear(y: Tensor, differentiate: bool) -> tuple[Tensor, Tensor | None]:
    return y @ SLOPE, SLOPE.expand_as(y) if differentiate else None


def first_state(rho: float = 1.0) -> tuple[TangentSpace, AscentState]:
    space = tangent_space(geoopt.Euclidean(1), torch.zeros(2, dtype=torch.float64))
    zero = torch.zeros(2, dtype=torch.float64)
    return space, start(space, torch.zeros(1, dtype=torch.float64), SLOPE, zero, rho)


def test_first_step_goes_to_the_boundary_along_the_gradient() -> None:
    space, state = first_state()
    assert float(state.step) == 2.0
    state = ascent_step(space, linear, state, path="expmap", rho=1.0, first=True)
    assert_close(state.c, SLOPE / 5)
    assert_close(state.best, SLOPE / 5)
    assert_close(state.best_value, torch.tensor([5.0], dtype=torch.float64))
    assert_close(state.previous, torch.zeros_like(SLOPE))
    assert_close(state.gradient, SLOPE)
    assert float(state.improvements) == 1


def test_later_steps_have_momentum() -> None:
    space, state = first_state(rho=10.0)
    c, before = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([0.0, 2.0], dtype=torch.float64)
    state = replace(state, c=c, previous=before, step=torch.ones(1, dtype=torch.float64))
    state = ascent_step(space, linear, state, path="expmap", rho=10.0)
    assert_close(state.c, c + MOMENTUM * SLOPE / 5 + (1 - MOMENTUM) * (c - before))
    assert_close(state.previous, c)


def test_a_vanishing_gradient_stays() -> None:
    space, state = first_state()
    state = replace(state, gradient=torch.zeros_like(SLOPE))
    state = ascent_step(space, linear, state, path="expmap", rho=1.0, first=True)
    assert_close(state.c, torch.zeros_like(SLOPE), rtol=0, atol=0)
    assert_close(state.gradient, SLOPE)


@pytest.mark.parametrize(
    ("improvements", "kept_step", "halved"),
    [(3, False, False), (2, False, True), (4, True, True)],  # of 4 steps; 3 are three quarters
)
def test_a_checkpoint_halves_the_step_and_returns_to_the_best(improvements: int, kept_step: bool, halved: bool) -> None:
    space, state = first_state()
    best = torch.tensor([0.6, 0.8], dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    state = replace(
        state,
        c=-best,
        value=0 * one,
        gradient=-SLOPE,  # leads away, so that the step neither improves nor finds a new best
        best=best,
        best_value=5 * one,
        best_gradient=SLOPE,
        improvements=improvements * one,
        checkpoint_step=(2.0 if kept_step else 4.0) * one,
        checkpoint_value=5 * one,
    )
    state = ascent_step(space, linear, state, path="expmap", rho=1.0, first=True, interval=4)
    assert float(state.step) == (1.0 if halved else 2.0)
    assert_close(state.c, best if halved else -best)
    assert_close(state.gradient, SLOPE)  # that of the best, or the new one, equal for a linear loss
    assert float(state.improvements) == 0
    assert float(state.checkpoint_value) == 5
    assert float(state.checkpoint_step) == 2


def test_a_step_out_of_the_domain_is_taken_back() -> None:
    space, state = first_state()

    def nowhere(c: Tensor, path: str, radius: float | None = None) -> Tensor:
        return c * torch.nan

    space.move = nowhere
    moved = ascent_step(space, linear, state, path="expmap", rho=1.0, first=True)
    assert_close(moved.c, state.c)
    assert_close(moved.best_value, state.best_value)
    assert float(moved.step) == 1.0
    assert float(moved.rejected) == 1
    assert not bool(moved.invalid)


def test_gradient_along_the_path_is_that_of_central_differences() -> None:
    manifold = InvariantFixedRank(4, 3)
    x = torch.randn(2, 7, 2, dtype=torch.float64)
    space = manifold.at(x)
    target = torch.randn(4, 3, dtype=torch.float64)

    def loss(y: Tensor) -> Tensor:
        return (manifold.product(y) - target).square().sum((-2, -1))

    def evaluate(y: Tensor, differentiate: bool) -> tuple[Tensor, Tensor | None]:
        with torch.enable_grad():
            y = y.detach().requires_grad_()
            value = loss(y)
            (slope,) = torch.autograd.grad(value.sum(), y)
        return value.detach(), slope

    for path in ("expmap", "second_order", "retr"):
        c, d = 0.3 * space.random(), space.project(torch.randn_like(x))
        _, gradient, exists = evaluate_along(space, evaluate, c, path, 0.5)
        h = 1e-6
        ahead, behind = (loss(space.move(c + sign * h * d, path)) for sign in (1, -1))
        assert bool(exists.all())
        assert_close(space.inner(gradient, d).flatten(), (ahead - behind) / (2 * h), rtol=1e-7, atol=1e-7)


# -- nothing waits for the data ----------------------------------------------------------------------------------------


@pytest.fixture(params=["meta", "fake cpu", "fake cuda"])
def dataless(request: pytest.FixtureRequest) -> Iterator[str]:
    """Device of tensors without data: reading one raises, and so does mixing meta or CUDA tensors with others."""
    fake: AbstractContextManager = FakeTensorMode() if "fake" in request.param else nullcontext()
    with fake:
        yield request.param.split()[-1]


@pytest.mark.parametrize("path", ["expmap", "second_order", "retr"])
@pytest.mark.parametrize("rank", [1, 2])
def test_a_step_reads_no_data_on_a_quotient(dataless: str, path: str, rank: int) -> None:
    x = torch.randn(3, 11, rank, device=dataless)
    check_dataless(InvariantFixedRank(6, 5).at(x, balanced=True), path)


@pytest.mark.parametrize("path", ["expmap", "retr"])
def test_a_step_reads_no_data_on_the_adaptive_metric(dataless: str, path: str) -> None:
    check_dataless(AdaptiveEuclidean(2).at(torch.randn(3, 11, 2, device=dataless)), path)


def check_dataless(space: TangentSpace, path: str) -> None:
    def evaluate(y: Tensor, differentiate: bool) -> tuple[Tensor, Tensor | None]:
        # By hand: torch's engine aborts for fake CUDA tensors where the wheel has no CUDA.
        return y.square().sum((-2, -1)), 2 * y if differentiate else None

    value, slope = evaluate(space.x, True)
    assert slope is not None
    gradient = space.gradient(space.pull_gradient(slope))
    state = start(space, value.reshape(3, 1, 1), gradient, space.origin(), 0.1)
    for last, interval in [(False, None), (False, 2), (True, 1)]:
        state = ascent_step(space, evaluate, state, path=path, rho=0.1, last=last, interval=interval)
    assert state.best.shape == space.x.shape
    assert state.best.device.type == space.x.device.type
    with pytest.raises(Exception, match=r"item|data-dependent|_local_scalar_dense"):
        state.best_value.sum().item()  # so that the test can fail
