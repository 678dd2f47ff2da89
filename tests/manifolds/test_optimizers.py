"""Stock optimizers of geoopt on our manifolds: they follow the orbit, not the representative."""

import copy
from collections.abc import Callable

import geoopt
import pytest
import torch
from geoopt import ManifoldParameter, ProductManifold, Scaled
from geoopt.optim import RiemannianAdam, RiemannianSGD
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.testing import assert_close

from quotient_nets.manifolds import AdaptiveEuclidean, InvariantFixedRank
from tests.strategies import group_element

N, M, R = 8, 6, 3
MANIFOLD = InvariantFixedRank(N, M)
OPTIMIZERS = {
    "sgd": lambda p: RiemannianSGD(p, lr=0.05),
    "adam": lambda p: RiemannianAdam(p, lr=0.05),
    "amsgrad": lambda p: RiemannianAdam(p, lr=0.05, amsgrad=True),
    "adam, stabilized": lambda p: RiemannianAdam(p, lr=0.05, stabilize=5),
}
each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
Maker = Callable[[list[Tensor]], Optimizer]


def target() -> Tensor:
    """Matrix whose best approximation of rank 3 is well separated."""
    q = [torch.linalg.qr(torch.randn(rows, M, dtype=torch.float64))[0] for rows in (N, M)]
    return q[0] * torch.tensor([2.0, 1.5, 1.0, 0.2, 0.1, 0.05]) @ q[1].mT


def start() -> Tensor:
    return torch.randn(N + M, R, dtype=torch.float64) / 2


def run(x: Tensor, loss: Callable[[Tensor], Tensor], make: Maker, steps: int, decay: bool = False) -> Tensor:
    p = ManifoldParameter(x.clone(), manifold=MANIFOLD)
    optimizer = make([p])
    schedule = CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(p).backward()
        optimizer.step()
        if decay:
            schedule.step()
    return p.detach()


def fit(goal: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: 0.5 * (MANIFOLD.product(x) - goal).square().sum()


@each_optimizer
@pytest.mark.parametrize("condition", [1.0, 1e2])
def test_trajectory_is_one_for_each_orbit(make: Maker, condition: float) -> None:
    x, loss = start(), fit(target())
    a = group_element((), R, condition)
    a[0] *= -torch.linalg.det(a).sign()  # reverses the orientation
    here, there = (run(p, loss, make, 50) for p in (x, MANIFOLD.action(x, a)))
    assert loss(here) < loss(x)
    assert_close(MANIFOLD.product(there), MANIFOLD.product(here), rtol=0, atol=1e-9)
    assert_close(MANIFOLD.action(here, a), there, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    "make",
    [lambda p: RiemannianSGD(p, lr=0.1), lambda p: RiemannianAdam(p, lr=0.1)],
    ids=["sgd", "adam"],
)
def test_fit_reaches_the_truncated_decomposition(make: Maker) -> None:
    goal = target()
    loss, (left, s, right) = fit(goal), torch.linalg.svd(goal, full_matrices=False)
    best = 0.5 * s[R:].square().sum()
    near = MANIFOLD.pack_point(left[:, :R] * s[:R], right[:R].mT)
    x = near + 0.3 * torch.randn_like(near)  # far starts wait long at saddles, in any metric
    reached = loss(run(x, loss, make, 300, decay=True))
    assert loss(x) > 5 * best
    assert reached.item() == pytest.approx(best.item(), rel=1e-6)


def with_momentum(seeded: bool, nesterov: bool = False) -> Maker:
    def make(parameters: list[Tensor]) -> Optimizer:
        optimizer = RiemannianSGD(parameters, lr=0.02, momentum=0.9, nesterov=nesterov)
        if seeded:
            for p in parameters:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        return optimizer

    return make


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_follows_the_orbit_from_a_buffer_of_zeros(nesterov: bool) -> None:
    x, loss = start(), fit(target())
    a = group_element((), R, 10.0)
    here, there = (run(p, loss, with_momentum(True, nesterov), 50) for p in (x, MANIFOLD.action(x, a)))
    assert_close(MANIFOLD.product(there), MANIFOLD.product(here), rtol=0, atol=1e-9)


def test_momentum_of_geoopt_starts_with_a_raw_derivative() -> None:
    """Known bug of geoopt 0.5.1; when this fails, the buffer of zeros is needed no longer."""
    x, loss = start(), fit(target())
    e = torch.func.grad(loss)(x)
    gradient = MANIFOLD.egrad2rgrad(x, e)
    stock, seeded = ((run(x, loss, with_momentum(s), 1) - x) / -0.02 for s in (False, True))
    assert_close(seeded, gradient)
    assert_close(stock, gradient + 0.9 * e)
    a = group_element((), R, 10.0)
    here, there = (run(p, loss, with_momentum(False), 1) for p in (x, MANIFOLD.action(x, a)))
    assert (MANIFOLD.product(there) - MANIFOLD.product(here)).norm() > 1e-2


@each_optimizer
def test_runs_in_a_product_with_other_manifolds(make: Maker) -> None:
    space = ProductManifold(
        (MANIFOLD, (N + M, R)), (geoopt.Sphere(), 4), (AdaptiveEuclidean(), 5), (MANIFOLD, (2, N + M, R))
    )
    p = ManifoldParameter(space.random(space.n_elements, dtype=torch.float64), manifold=space)
    before, goal = p.detach().clone(), target()
    signs = space.take_submanifold_value(before, 2).sign()

    def loss() -> Tensor:
        x, sphere, weights, pair = space.unpack_tensor(p)
        return 0.05 * (fit(goal)(x) + fit(goal)(pair)) + sphere[0] + weights.square().sum()

    first = loss()
    optimizer = make([p])
    for _ in range(20):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert loss() < first
    assert space.check_point_on_manifold(p)
    assert torch.equal(space.take_submanifold_value(p, 2).sign(), signs)


@each_optimizer
def test_runs_under_a_scale(make: Maker) -> None:
    scaled, x, loss = Scaled(MANIFOLD, 2.0), start(), fit(target())
    u = MANIFOLD.proju(x, torch.randn_like(x))
    assert_close(scaled.expmap(x, u), MANIFOLD.expmap(x, u / 2))
    p = ManifoldParameter(x, manifold=scaled)
    optimizer = make([p])
    for _ in range(20):
        optimizer.zero_grad()
        loss(p).backward()
        optimizer.step()
    assert loss(p) < loss(start())
    assert MANIFOLD.check_point_on_manifold(p)


@each_optimizer
def test_a_batch_of_points_is_that_many_problems(make: Maker) -> None:
    x, goal = torch.stack([start() for _ in range(3)]), target()
    together = run(x, fit(goal), make, 10)
    for one, alone in zip(together, x, strict=True):
        assert_close(one, run(alone, fit(goal), make, 10), rtol=1e-9, atol=1e-9)


def test_state_can_be_saved_and_resumed() -> None:
    loss, first = fit(target()), ManifoldParameter(start(), manifold=MANIFOLD)
    second = ManifoldParameter(first.detach().clone(), manifold=MANIFOLD)

    def steps(p: ManifoldParameter, optimizer: Optimizer, count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            loss(p).backward()
            optimizer.step()

    optimizer, resumed = (RiemannianAdam([p], lr=0.05) for p in (first, second))
    steps(first, optimizer, 5)
    with torch.no_grad():
        second.copy_(first)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(first, optimizer, 5)
    steps(second, resumed, 5)
    # the restored step count is a float32 tensor, and so are the bias corrections: 1 - 0.999^6 to 1e-5
    assert_close(second, first, rtol=1e-5, atol=1e-5)
