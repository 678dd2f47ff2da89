"""pymanopt's optimizers reach known optima on our manifolds."""

from collections.abc import Callable
from typing import Any

import geoopt
import numpy as np
import pymanopt
import pytest
import torch
from pymanopt.manifolds import Product
from pymanopt.optimizers import ConjugateGradient, SteepestDescent, TrustRegions
from torch import Tensor

from quotient_nets import EmbeddedFixedRank, InvariantFixedRank, PolarFixedRank, PreconditionedFixedRank, PSDFixedRank
from quotient_nets.interop import as_pymanopt, pymanopt_problem
from quotient_nets.manifolds import FixedRankMatrices

each_shape = pytest.mark.parametrize("shape", [(6, 5, 2), (3, 5, 3), (4, 4, 1)], ids=str)


def random_matrix(n: int, m: int) -> Tensor:
    return torch.randn(n, m, dtype=torch.float64)


def misfit(manifold: Any, target: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: (manifold.product(x) - target).square().sum() / 2


def solve(optimizer: type, problem: pymanopt.Problem, **options: Any) -> Any:
    return optimizer(verbosity=0, max_iterations=3000, max_time=60, min_gradient_norm=1e-9).run(problem, **options)


@each_shape
@pytest.mark.parametrize(
    ("optimizer", "retraction"),
    [(SteepestDescent, "retr"), (ConjugateGradient, "retr"), (TrustRegions, "retr"), (TrustRegions, "expmap")],
)
def test_low_rank_approximation(shape: tuple[int, int, int], optimizer: type, retraction: str) -> None:
    n, m, r = shape
    manifold, target = InvariantFixedRank(n, m), random_matrix(n, m)
    adapted = as_pymanopt(manifold, n + m, r, retraction=retraction)
    result = solve(optimizer, pymanopt_problem(misfit(manifold, target), adapted))
    u, s, vt = torch.linalg.svd(target, full_matrices=False)
    assert abs(result.cost - float(s[r:].square().sum()) / 2) <= 1e-12 * float(s.square().sum())
    product = manifold.product(torch.from_numpy(result.point))
    torch.testing.assert_close(product, u[:, :r] * s[:r] @ vt[:r], rtol=0, atol=1e-5)


@pytest.mark.parametrize("optimizer", [SteepestDescent, ConjugateGradient, TrustRegions])
def test_low_rank_semidefinite_approximation(optimizer: type) -> None:
    manifold, factor = PSDFixedRank(6), random_matrix(6, 4)
    target = factor @ factor.mT
    result = solve(optimizer, pymanopt_problem(misfit(manifold, target), as_pymanopt(manifold, 6, 2)))
    eigenvalues = torch.linalg.eigvalsh(target)
    assert abs(result.cost - float(eigenvalues[:-2].square().sum()) / 2) <= 1e-12 * float(eigenvalues.square().sum())


@pytest.mark.parametrize("metric", [InvariantFixedRank, PreconditionedFixedRank, EmbeddedFixedRank, PolarFixedRank])
def test_matrix_completion_has_the_optimum_of_riemannian_adam(metric: type[FixedRankMatrices]) -> None:
    torch.manual_seed(2)
    manifold, seen = metric(7, 6), torch.rand(7, 6) < 0.85
    target = random_matrix(7, 2) @ random_matrix(2, 6) + 0.05 * random_matrix(7, 6)

    def cost(x: Tensor) -> Tensor:
        return (manifold.product(x) - target)[seen].square().sum()

    start = manifold.best_rank_r(target * seen, 2).numpy()
    result = solve(TrustRegions, pymanopt_problem(cost, as_pymanopt(manifold, *start.shape)), initial_point=start)
    x = geoopt.ManifoldParameter(torch.tensor(start), manifold=manifold)
    adam = geoopt.optim.RiemannianAdam([x], lr=0.1)
    decay = torch.optim.lr_scheduler.ExponentialLR(adam, 0.985)
    for _ in range(600):
        adam.zero_grad()
        cost(x).backward()
        adam.step()
        decay.step()
    assert result.gradient_norm < 1e-9
    assert result.cost == pytest.approx(cost(x).item(), rel=1e-9)
    products = manifold.product(torch.tensor(result.point)), manifold.product(x).detach()
    torch.testing.assert_close(*products, rtol=0, atol=1e-5)


@pytest.mark.parametrize("optimizer", [ConjugateGradient, TrustRegions])
def test_product_of_two_manifolds(optimizer: type) -> None:
    low, psd, target = InvariantFixedRank(5, 5), PSDFixedRank(5), random_matrix(5, 5)
    target = target @ target.mT
    product = Product([as_pymanopt(low, 10, 1), as_pymanopt(psd, 5, 2)])
    problem = pymanopt_problem(lambda x, y: misfit(low, target - psd.product(y))(x), product)
    result = solve(optimizer, problem)
    eigenvalues = torch.linalg.eigvalsh(target)
    assert result.cost == pytest.approx(float(eigenvalues[:2].square().sum()) / 2, abs=1e-9)


def test_a_batch_is_a_product() -> None:
    manifold, targets = InvariantFixedRank(4, 3), torch.randn(3, 4, 3, dtype=torch.float64)
    adapted = as_pymanopt(manifold, 3, 7, 1)
    assert adapted.dim == 3 * manifold.dimension(1)
    result = solve(TrustRegions, pymanopt_problem(misfit(manifold, targets), adapted))
    assert result.cost == pytest.approx(float(torch.linalg.svdvals(targets)[:, 1:].square().sum()) / 2, abs=1e-10)


@pytest.mark.parametrize("optimizer", [SteepestDescent, ConjugateGradient])
def test_manifold_of_geoopt(optimizer: type) -> None:
    a = random_matrix(5, 5)
    adapted = as_pymanopt(geoopt.Sphere(), 5)
    result = solve(optimizer, pymanopt_problem(lambda x: x @ (a + a.mT) @ x, adapted))
    assert result.cost == pytest.approx(float(torch.linalg.eigvalsh(a + a.mT)[0]), rel=1e-10)


def test_problem_of_pymanopt_itself() -> None:
    manifold, target = InvariantFixedRank(4, 3), random_matrix(4, 3)
    adapted = as_pymanopt(manifold, 7, 1)
    theirs = pymanopt.Problem(adapted, pymanopt.function.pytorch(adapted)(misfit(manifold, target)))
    ours = pymanopt_problem(misfit(manifold, target), adapted)
    x = adapted.random_point()
    u = adapted.random_tangent_vector(x)
    assert ours.cost(x) == pytest.approx(float(theirs.cost(x)))
    np.testing.assert_allclose(ours.riemannian_gradient(x), theirs.riemannian_gradient(x), rtol=1e-12)
    np.testing.assert_allclose(ours.riemannian_hessian(x, u), theirs.riemannian_hessian(x, u), rtol=1e-12)


def test_constant_gradient() -> None:
    adapted = as_pymanopt(geoopt.Euclidean(1), 3)
    problem = pymanopt_problem(lambda x: x.sum(), adapted)
    x = np.ones(3)
    np.testing.assert_array_equal(problem.euclidean_gradient(x), np.ones(3))
    np.testing.assert_array_equal(problem.euclidean_hessian(x, x), np.zeros(3))


def test_step_out_of_the_domain_is_refused() -> None:
    problem = pymanopt_problem(lambda x: x.sqrt().sum(), as_pymanopt(geoopt.Euclidean(1), 3))
    assert problem.cost(-np.ones(3)) == np.inf
    with pytest.raises(ValueError, match="finite cost"):
        problem.euclidean_gradient(-np.ones(3))


@pytest.mark.parametrize("function", [lambda x: x, lambda x: x.detach().sum(), lambda x: 1.0])
def test_function_without_a_number_is_refused(function: Callable[[Tensor], Any]) -> None:
    problem = pymanopt_problem(function, as_pymanopt(geoopt.Euclidean(1), 3))
    with pytest.raises(ValueError, match="one element, computed from its arguments"):
        problem.cost(np.ones(3))
