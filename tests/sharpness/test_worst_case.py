"""Laws of worst-case sharpness on the manifolds of this package."""

import math
from collections.abc import Callable

import geoopt
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from typing_extensions import override

from quotient_nets import AdaptiveEuclidean, InvariantFixedRank, Sharpness, worst_case_sharpness

N, M, R = 6, 5, 3
MANIFOLD = InvariantFixedRank(N, M)
PATHS = ["expmap", "second_order", "retr"]


def fit(size: int, *, dtype: torch.dtype = torch.float64, noise: float = 0.1) -> tuple[Tensor, Callable]:
    """Points, and a loss of the product that is small but not stationary there."""
    x = torch.randn(size, N + M, R, dtype=torch.float64)
    target = MANIFOLD.product(x) + noise * torch.randn(size, N, M, dtype=torch.float64)
    x, target = x.to(dtype), target.to(dtype)
    return x, lambda y: (MANIFOLD.product(y) - target).square().mean((-2, -1))


def increase(x: Tensor, loss: Callable, result: Sharpness) -> Tensor:
    """The increase along the direction that was found."""
    return loss(getattr(MANIFOLD, result.path)(x, result.direction)) - loss(x)


# -- what the value is -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rho", [1e-3, 0.1, 1.0])
def test_the_direction_is_tangent_in_the_ball_and_attains_the_value(path: str, rho: float) -> None:
    x, loss = fit(4)
    result = worst_case_sharpness(loss, MANIFOLD, x, rho=rho, path=path)
    u = result.direction
    assert u.shape == x.shape
    assert bool((MANIFOLD.norm(x, u) <= rho * (1 + 1e-12)).all())
    assert_close(MANIFOLD.norm(x, u) / rho, result.certificates["relative_norm"])
    assert_close(MANIFOLD.proju(x, u), u, rtol=0, atol=1e-12)
    assert bool((result.certificates["horizontality_residual"] < 1e-12).all())
    assert_close(increase(x, loss, result), result.value, rtol=1e-9, atol=1e-14)
    assert_close(result.base_loss, loss(x))
    assert_close(result.max_loss - result.base_loss, result.value)
    assert (result.rho, result.steps, result.path) == (rho, 20, path)


@pytest.mark.parametrize("path", PATHS)
def test_no_random_vector_of_the_ball_does_better(path: str) -> None:
    x, loss = fit(3)
    result = worst_case_sharpness(loss, MANIFOLD, x, rho=0.5, path=path)
    u = MANIFOLD.proju(x, torch.randn(2000, *x.shape, dtype=torch.float64))
    u = 0.5 * u / MANIFOLD.norm(x, u, keepdim=True)
    values = loss(getattr(MANIFOLD, path)(x, u)) - loss(x)
    assert bool((values <= result.value).all())


def test_history_never_falls_and_ends_at_the_value() -> None:
    x, loss = fit(5)
    result = worst_case_sharpness(loss, MANIFOLD, x, rho=0.3, steps=30)
    assert result.history.shape == (31, 5)
    assert bool((result.history[0] == 0).all())
    assert bool((result.history.diff(dim=0) >= 0).all())
    assert_close(result.history[-1], result.value)
    assert bool((result.value >= 0).all())


def test_more_radius_and_more_steps_never_lower_the_value_by_much() -> None:
    x, loss = fit(5)
    values = torch.stack([worst_case_sharpness(loss, MANIFOLD, x, rho=rho).value for rho in (0.1, 0.2, 0.4, 0.8)])
    assert bool((values.diff(dim=0) > 0).all())


@pytest.mark.parametrize("path", PATHS)
def test_small_balls_measure_the_gradient_norm(path: str) -> None:
    x, loss = fit(4)
    gradient = MANIFOLD.egrad2rgrad(x, torch.func.grad(lambda y: loss(y).sum())(x))
    result = worst_case_sharpness(loss, MANIFOLD, x, rho=1e-6, path=path)
    assert_close(result.value, 1e-6 * MANIFOLD.norm(x, gradient), rtol=1e-4, atol=0)
    assert_close(result.first_order_share, torch.ones(4, dtype=torch.float64), rtol=1e-4, atol=0)


def test_the_first_order_share_vanishes_at_a_minimum() -> None:
    x, loss = fit(4, noise=1e-4)
    shares = [worst_case_sharpness(loss, MANIFOLD, x, rho=rho).first_order_share for rho in (1e-6, 1e-3, 0.3)]
    assert bool((shares[0] > shares[1]).all())
    assert bool((shares[1] > shares[2]).all())
    assert bool((shares[2] < 1e-2).all())


def test_converged_says_whether_the_last_quarter_still_gained() -> None:
    x, loss = fit(8)
    for steps in (1, 2, 3, 20, 100):
        result = worst_case_sharpness(loss, MANIFOLD, x, rho=0.5, steps=steps)
        gain = result.value - result.history[3 * steps // 4]
        assert torch.equal(result.converged, gain <= 0.01 * result.value)
    assert bool(result.converged.all())
    assert not bool(worst_case_sharpness(loss, MANIFOLD, x, rho=0.5, steps=1).converged.any())


def test_certificates_know_the_spectrum() -> None:
    x, loss = fit(4)
    figures = worst_case_sharpness(loss, MANIFOLD, x, rho=0.1).certificates
    s = torch.linalg.svdvals(MANIFOLD.product(x))[..., :R]
    assert_close(figures["condition_number"], s[..., 0] / s[..., -1])
    assert_close(figures["spectral_gap"], (1 - s[..., 1:] / s[..., :-1]).amin(-1))
    assert bool((figures["rejected_steps"] == 0).all())


# -- invariance ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rho", [0.01, 0.3])
def test_the_value_does_not_depend_on_the_representative(rho: float, path: str) -> None:
    x, loss = fit(6)
    y = MANIFOLD.action(x, MANIFOLD.random_element(6, R, condition=1e4))
    at_x, at_y = (worst_case_sharpness(loss, MANIFOLD, point, rho=rho, restarts=2, path=path) for point in (x, y))
    assert_close(at_y.value, at_x.value, rtol=1e-8, atol=0)


@pytest.mark.parametrize("path", PATHS)
def test_the_value_does_not_depend_on_the_representative_in_float32(path: str) -> None:
    x, loss = fit(6, dtype=torch.float32)
    # Rounding the factors moves their product by eps times the condition number: 1e-3 at 1e4, whatever the geometry.
    y = MANIFOLD.action(x.double(), MANIFOLD.random_element(6, R, condition=1e3)).float()
    x = MANIFOLD.canonicalize(y.double())[0].float()
    at_x, at_y = (worst_case_sharpness(loss, MANIFOLD, point, rho=0.3, path=path) for point in (x, y))
    assert at_y.value.dtype == torch.float32
    assert_close(at_y.value, at_x.value, rtol=1e-3, atol=0)


def test_the_value_of_float32_is_that_of_float64() -> None:
    x, loss = fit(6)
    x32, loss32 = x.float(), lambda y: loss(y.double()).float()
    exact, rounded = (worst_case_sharpness(f, MANIFOLD, p, rho=0.3).value for f, p in ((loss, x), (loss32, x32)))
    assert_close(rounded.double(), exact, rtol=1e-3, atol=0)


def test_the_adaptive_value_does_not_depend_on_the_scale_of_coordinates() -> None:
    manifold = AdaptiveEuclidean()
    x, scale = torch.randn(3, 5, dtype=torch.float64), 10 ** torch.randn(5, dtype=torch.float64)
    c = torch.randn(5, dtype=torch.float64)
    plain, scaled = (
        worst_case_sharpness(lambda y, s=s: (c * y / s).tanh().sum(-1), manifold, x * s, rho=0.5, path=path).value
        for path in ("retr",)
        for s in (torch.ones_like(scale), scale)
    )
    assert_close(scaled, plain, rtol=1e-9, atol=0)


# -- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_a_batch_is_a_loop(path: str) -> None:
    x, loss = fit(6)
    scale = torch.logspace(-3, 3, 6, dtype=torch.float64)  # step sizes part ways
    x = (x * scale[:, None, None] ** 0.5).reshape(2, 3, N + M, R)

    def batched(y: Tensor) -> Tensor:
        return (scale.reshape(2, 3) * loss(y.flatten(0, 1)).reshape(2, 3)).log1p()

    together = worst_case_sharpness(batched, MANIFOLD, x, rho=0.4, path=path)
    assert together.value.shape == (2, 3)
    for i in range(2):
        for j in range(3):

            def alone(y: Tensor, i: int = i, j: int = j) -> Tensor:
                return batched(x.index_put((torch.tensor(i), torch.tensor(j)), y))[i, j]

            single = worst_case_sharpness(alone, MANIFOLD, x[i, j], rho=0.4, path=path)
            assert_close(single.value, together.value[i, j], rtol=1e-9, atol=0)
            assert_close(single.history, together.history[:, i, j], rtol=1e-9, atol=1e-12)
            assert_close(single.converged, together.converged[i, j])
            for name, figure in single.certificates.items():
                assert_close(figure, together.certificates[name][i, j], rtol=1e-6, atol=1e-9)


def test_an_empty_batch_has_no_values() -> None:
    x = torch.randn(0, N + M, R, dtype=torch.float64)
    result = worst_case_sharpness(lambda y: y.sum((-2, -1)), MANIFOLD, x, rho=0.1)
    assert result.value.shape == (0,)


# -- starts ----------------------------------------------------------------------------------------------------------

FLAT = geoopt.Euclidean(1)


def test_a_saddle_is_left_in_a_seeded_direction() -> None:
    x = torch.zeros(2, dtype=torch.float64)
    result = worst_case_sharpness(lambda y: y[0].square() - y[1].square(), FLAT, x, rho=0.5)
    assert_close(result.value, torch.tensor(0.25, dtype=torch.float64), rtol=1e-2, atol=0)
    assert float(result.first_order_share) == 0


def test_a_minimum_of_the_product_is_left_too() -> None:
    x, loss = fit(3, noise=0.0)
    result = worst_case_sharpness(loss, MANIFOLD, x, rho=0.5, steps=100)
    assert bool((result.value > 0).all())
    assert bool(result.converged.all())


def test_a_maximum_has_no_sharpness() -> None:
    x = torch.zeros(3, dtype=torch.float64)
    result = worst_case_sharpness(lambda y: -y.square().sum(), FLAT, x, rho=0.5)
    assert float(result.value) == 0
    assert math.isnan(float(result.first_order_share))
    assert bool(result.converged)
    assert_close(result.direction, torch.zeros_like(x))


def test_some_elements_of_a_batch_may_be_stationary() -> None:
    x = torch.tensor([[0.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    curvature = torch.tensor([1.0, 2.0], dtype=torch.float64)
    result = worst_case_sharpness(lambda y: y.square() @ curvature, FLAT, x, rho=0.5, steps=50)
    assert_close(result.value[0], torch.tensor(0.5, dtype=torch.float64), rtol=1e-2, atol=0)
    assert_close(result.value[1], torch.tensor(1.25, dtype=torch.float64))  # along the gradient, where it stays


def test_restarts_never_lower_the_value() -> None:
    manifold = AdaptiveEuclidean()
    x = torch.randn(20, 6, dtype=torch.float64)

    def rugged(y: Tensor) -> Tensor:
        return (3 * y).sin().sum(-1) + (7 * y).cos().prod(-1)

    values = torch.stack(
        [worst_case_sharpness(rugged, manifold, x, rho=2.0, restarts=n, path="retr").value for n in (1, 2, 4, 8)]
    )
    assert bool((values.diff(dim=0) >= 0).all())
    assert bool((values[-1] > values[0]).any())


def test_restarts_keep_what_belongs_together() -> None:
    x, loss = fit(5)
    result = worst_case_sharpness(loss, MANIFOLD, x, rho=1.0, restarts=4)
    assert_close(increase(x, loss, result), result.value, rtol=1e-9, atol=0)
    assert_close(result.history[-1], result.value)
    assert bool((result.history.diff(dim=0) >= 0).all())


def test_randomness_comes_from_the_generator_alone() -> None:
    x, loss = fit(4, noise=0.0)  # stationary, so that the start is random
    before = torch.get_rng_state()
    values = [
        worst_case_sharpness(
            loss, MANIFOLD, x, rho=1.0, steps=3, restarts=2, generator=torch.Generator().manual_seed(seed)
        ).value
        for seed in (1, 1, 2)
    ]
    default = [worst_case_sharpness(loss, MANIFOLD, x, rho=1.0, steps=3, restarts=2).value for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])
    assert torch.equal(default[0], default[1])


def test_progress_counts_the_passes() -> None:
    x, loss = fit(2)
    seen, passes = [], {"forward": 0, "backward": 0}

    def counted(y: Tensor) -> Tensor:
        passes["forward"] += 1
        if y.requires_grad:
            y.register_hook(lambda _: passes.__setitem__("backward", passes["backward"] + 1))
        return loss(y)

    worst_case_sharpness(
        counted, MANIFOLD, x, rho=0.1, steps=7, restarts=3, progress=lambda done, total: seen.append((done, total))
    )
    assert seen == [(k, 21) for k in range(1, 22)]
    # One pass at x, one at each random start, one for each step, of which the last of a start needs no gradient.
    assert passes == {"forward": 1 + 2 + 21, "backward": 1 + 2 + 3 * 6}


# -- paths that leave the domain -------------------------------------------------------------------------------------


class HalfLine(geoopt.Euclidean):
    """Positive numbers with the flat metric, whose geodesics end at zero."""

    @override
    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        y = x + u
        return torch.where(y > 0, y, torch.nan)


def test_steps_out_of_the_domain_are_rejected_and_counted() -> None:
    x = torch.tensor([[1.0], [0.01], [5.0]], dtype=torch.float64)  # at distance 1, .01 and 5 of the end
    result = worst_case_sharpness(lambda y: -y.squeeze(-1), HalfLine(1), x, rho=2.0, steps=40)
    rejected = result.certificates["rejected_steps"]
    assert bool((rejected[:2] > 0).all())
    assert float(rejected[2]) == 0
    end = torch.tensor([1.0, 0.01, 2.0], dtype=torch.float64)
    assert bool((result.value < end * (1 + 1e-12)).all())
    assert bool((result.value > 0.9 * end).all())
    assert bool(result.value.isfinite().all())


def test_a_random_start_out_of_the_domain_falls_back_on_the_centre() -> None:
    x = torch.tensor([1e-3], dtype=torch.float64)
    result = worst_case_sharpness(lambda y: y.squeeze(-1), HalfLine(1), x, rho=1.0, restarts=6)
    assert_close(result.value, torch.tensor(1.0, dtype=torch.float64))


def test_large_numbers_are_no_end_of_the_domain() -> None:
    x = torch.tensor([1e20, 1.0])  # finite, although its square is not in float32
    result = worst_case_sharpness(lambda y: (y / x).sum(), AdaptiveEuclidean(), x, rho=0.1, path="retr")
    assert float(result.certificates["rejected_steps"]) == 0
    assert float(result.value) == pytest.approx(0.1 * math.sqrt(2), rel=1e-5)


# -- weights that are exactly zero -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["expmap", "retr"])
def test_zero_weights_stay_and_are_counted(path: str) -> None:
    x = torch.tensor([[1.0, 0.0, -2.0, 0.0], [1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    c = torch.tensor([1.0, 100.0, 1.0, -100.0], dtype=torch.float64)
    result = worst_case_sharpness(lambda y: y @ c, AdaptiveEuclidean(), x, rho=0.1, path=path, restarts=2)
    assert result.certificates["zero_weights"].tolist() == [2, 0]
    assert bool((result.direction[0, [1, 3]] == 0).all())
    assert bool((result.direction[1] != 0).all())
    if path == "retr":
        assert_close(result.value, 0.1 * (x * c).norm(dim=-1))


def test_a_point_of_zeros_has_no_sharpness() -> None:
    result = worst_case_sharpness(
        lambda y: y.sum(), AdaptiveEuclidean(), torch.zeros(3, dtype=torch.float64), rho=0.1, restarts=2
    )
    assert float(result.value) == 0
    assert int(result.certificates["zero_weights"]) == 3
    assert bool((result.direction == 0).all())


@pytest.mark.parametrize("zero", [0.0, 1e-6])
def test_one_zero_weight_changes_little(zero: float) -> None:
    """In the code of Andriushchenko et al. it switches the projection off."""
    x, c = torch.randn(30, dtype=torch.float64), torch.randn(30, dtype=torch.float64)
    x[7] = zero
    result = worst_case_sharpness(lambda y: (y @ c).square(), AdaptiveEuclidean(), x, rho=0.5, path="retr")
    slope, size = float((x @ c).abs()), float((x * c).norm())
    assert float(result.value) == pytest.approx((slope + 0.5 * size) ** 2 - slope**2, rel=1e-3)


# -- callers ---------------------------------------------------------------------------------------------------------


def test_the_caller_may_have_switched_gradients_off() -> None:
    x, loss = fit(3)
    expected = worst_case_sharpness(loss, MANIFOLD, x, rho=0.3).value
    with torch.no_grad():
        assert torch.equal(worst_case_sharpness(loss, MANIFOLD, x, rho=0.3).value, expected)
    tracked = x.clone().requires_grad_()
    result = worst_case_sharpness(loss, MANIFOLD, tracked, rho=0.3)
    assert torch.equal(result.value, expected)
    assert tracked.grad is None
    assert not any(t.requires_grad for t in (result.value, result.direction, result.history))


def test_the_point_stays_as_it_is() -> None:
    x, loss = fit(3)
    before = x.clone()
    worst_case_sharpness(loss, MANIFOLD, x, rho=1.0)
    assert torch.equal(x, before)


def test_parameters_of_the_loss_get_no_gradient() -> None:
    c = torch.randn(N + M, R, dtype=torch.float64, requires_grad=True)
    worst_case_sharpness(lambda y: (c * y).sum((-2, -1)), MANIFOLD, torch.randn(2, N + M, R).double(), rho=0.1)
    assert c.grad is None


# -- closed forms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rho", [0.03, 0.3, 2.0])
def test_scalars_move_exponentially(rho: float) -> None:
    r"""For ``n = m = r = 1`` the quotient is a half line, :math:`\beta(u) = \beta e^{\pm \sqrt 2 |u|}`: grid search."""
    manifold = InvariantFixedRank(1, 1)
    x = torch.randn(50, 2, 1, dtype=torch.float64)
    target = torch.randn(50, dtype=torch.float64)

    def of_product(beta: Tensor) -> Tensor:
        return (beta - target).square()

    def loss(y: Tensor) -> Tensor:
        return of_product(manifold.product(y).flatten())

    t = torch.linspace(-rho, rho, 2001, dtype=torch.float64)[:, None]
    beta = manifold.product(x).flatten()
    maximum = of_product(beta * (math.sqrt(2) * t).exp()).amax(0) - of_product(beta)
    # Both ends of the interval can be local maxima: several starts find the higher one.
    result = worst_case_sharpness(loss, manifold, x, rho=rho, restarts=12)
    assert bool((result.value <= maximum * (1 + 1e-9)).all())
    assert bool((result.value >= maximum * (1 - 1e-9)).all())


@pytest.mark.parametrize("rho", [0.01, 0.1, 0.5])
def test_diagonal_network_against_grid_search(rho: float) -> None:
    r"""Regression with :math:`\beta_i = u_i v_i`, appendix D of the paper: one radius for all coordinates together."""
    product = geoopt.ProductManifold((InvariantFixedRank(1, 1), (2, 2, 1)))
    data, y = torch.randn(8, 2, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    x = torch.tensor([1.3, -0.4, 0.2, 1.7], dtype=torch.float64)

    def of_weights(beta: Tensor) -> Tensor:
        return (beta @ data.mT - y).square().mean(-1)

    def loss(point: Tensor) -> Tensor:
        return of_weights(InvariantFixedRank(1, 1).product(product.take_submanifold_value(point, 0)).flatten(-3))

    angle = torch.linspace(0, 2 * math.pi, 2001, dtype=torch.float64)
    t = (
        rho
        * torch.linspace(0, 1, 201, dtype=torch.float64)[:, None, None]
        * torch.stack([angle.cos(), angle.sin()], -1)
    )
    beta = torch.tensor([1.3 * -0.4, 0.2 * 1.7], dtype=torch.float64)
    maximum = (of_weights(beta * (math.sqrt(2) * t).exp()) - of_weights(beta)).max()
    result = worst_case_sharpness(loss, product, x, rho=rho)
    assert float(result.value) == pytest.approx(float(maximum), rel=1e-3)
