"""Sharpness on geoopt's own manifolds, against maxima over the ball that are known in closed form or by another route.

A value is a lower bound: never above the maximum, and here within 1 % of it. The default 20 steps suffice wherever the
maximum lies on the boundary of the ball, as it does at a minimum and at a saddle. Where it lies inside, or where the
start has no component along the direction of largest curvature, more steps or restarts are needed; the tests say so.
"""

import math
from collections.abc import Callable

import geoopt
import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
import torch
from torch import Tensor

from quotient_nets import Sharpness, worst_case_sharpness

ENOUGH = 0.01  # relative shortfall
ROUNDING = 1e-9  # relative excess, of the value or of the reference
RADII = [0.03, 0.3, 1.0, 3.0]


def assert_maximum(result: Sharpness, maximum: Tensor, shortfall: float = ENOUGH) -> None:
    assert bool((result.value <= maximum * (1 + ROUNDING)).all()), f"{result.value} above the maximum {maximum}"
    assert bool((result.value >= maximum * (1 - shortfall)).all()), f"{result.value} short of {maximum}"
    assert bool((result.certificates["relative_norm"] <= 1 + ROUNDING).all())
    assert bool((result.certificates["rejected_steps"] == 0).all())


# -- flat space: the trust-region problem ----------------------------------------------------------------------------


def trust_region(hessian: np.ndarray, gradient: np.ndarray, rho: float) -> float:
    """Largest ``g.d + d.A d / 2`` with ``|d| <= rho``, by the secular equation; the hard case included."""
    curvature, basis = np.linalg.eigh(hessian)
    slope = basis.T @ gradient
    top = curvature[-1]
    if top < 0 and np.linalg.norm(slope / curvature) <= rho:
        d = -slope / curvature
        return float(slope @ d + curvature @ d**2 / 2)
    least = max(top, 0.0)
    inner = curvature < least - 1e-12
    rest = np.where(inner, slope / np.where(inner, least - curvature, 1), 0)
    if np.abs(slope[~inner]).max(initial=0) < 1e-14 and np.linalg.norm(rest) <= rho:
        return float(slope @ rest + curvature @ rest**2 / 2 + top * (rho**2 - rest @ rest) / 2)
    far = least + np.linalg.norm(slope) / rho + 1
    multiplier = scipy.optimize.brentq(
        lambda m: np.linalg.norm(slope / (m - curvature)) - rho, least + 1e-12 * max(1, least), far, xtol=1e-15
    )
    d = slope / (multiplier - curvature)
    return float(slope @ d + curvature @ d**2 / 2)


def trust_regions(hessian: Tensor, gradient: Tensor, rho: float) -> Tensor:
    """One for each element of a batch."""
    pairs = zip(hessian.numpy(), gradient.numpy(), strict=True)
    return torch.tensor([trust_region(a, g, rho) for a, g in pairs], dtype=torch.float64)


def quadratic(curvature: Tensor, slope_size: float, size: int = 4) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Hessians in random bases, gradients, and the function for points ``(size, n)``."""
    n = len(curvature)
    basis = torch.linalg.qr(torch.randn(size, n, n, dtype=torch.float64))[0]
    hessian = (basis * curvature) @ basis.mT
    slope = slope_size * torch.randn(size, n, dtype=torch.float64)
    return hessian, slope, lambda y: (slope * y).sum(-1) + torch.einsum("bi,bij,bj->b", y, hessian, y) / 2


def log_spaced(low: float, high: float, n: int) -> Tensor:
    return torch.logspace(math.log10(low), math.log10(high), n, dtype=torch.float64)


CURVATURES = {
    "convex": log_spaced(1e-2, 1e2, 12),
    "saddle": torch.linspace(-2, 2, 12, dtype=torch.float64),
    "one direction": torch.tensor([0.0] * 11 + [1.0], dtype=torch.float64),
    "linear": torch.zeros(12, dtype=torch.float64),
}


@pytest.mark.parametrize("rho", RADII)
@pytest.mark.parametrize("slope", [1e-2, 1.0])
@pytest.mark.parametrize("kind", CURVATURES)
def test_quadratic_on_flat_space_is_the_trust_region_problem(kind: str, slope: float, rho: float) -> None:
    hessian, gradient, loss = quadratic(CURVATURES[kind], slope)
    x = torch.zeros_like(gradient)
    maximum = trust_regions(hessian, gradient, rho)
    assert_maximum(worst_case_sharpness(loss, geoopt.Euclidean(1), x, rho=rho), maximum)


def test_a_maximum_inside_the_ball_needs_more_steps() -> None:
    hessian, gradient, loss = quadratic(-log_spaced(0.2, 5.0, 6), 1.0, size=8)
    x = torch.zeros_like(gradient)
    rho = 5.0
    maximum = trust_regions(hessian, gradient, rho)
    few = worst_case_sharpness(loss, geoopt.Euclidean(1), x, rho=rho)
    assert bool((few.value <= maximum * (1 + ROUNDING)).all())
    assert bool((few.value < 0.99 * maximum).any())
    assert_maximum(worst_case_sharpness(loss, geoopt.Euclidean(1), x, rho=rho, steps=100), maximum)


def test_a_start_without_a_component_along_the_largest_curvature_needs_a_restart() -> None:
    curvature = np.array([0.5, 0.2, 4.0])
    hessian, gradient = torch.tensor(np.diag(curvature)), torch.tensor([0.1, -0.2, 0.0], dtype=torch.float64)
    maximum = trust_regions(hessian[None], gradient[None], 1.0)[0]

    def loss(y: Tensor) -> Tensor:
        return gradient @ y + y @ hessian @ y / 2

    x = torch.zeros(3, dtype=torch.float64)
    blind = worst_case_sharpness(loss, geoopt.Euclidean(1), x, rho=1.0)
    assert float(blind.value) < 0.5 * float(maximum)
    assert_maximum(worst_case_sharpness(loss, geoopt.Euclidean(1), x, rho=1.0, restarts=2), maximum)


def test_matrices_are_one_point_with_two_axes() -> None:
    c = torch.randn(3, 4, dtype=torch.float64)
    x = torch.randn(5, 3, 4, dtype=torch.float64)
    result = worst_case_sharpness(lambda y: (c * y).sum((-2, -1)), geoopt.Euclidean(2), x, rho=0.7)
    assert_maximum(result, (0.7 * c.norm()).expand(5))


def test_scalars_as_points_point_to_the_axes() -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\), got \(\).*geoopt.Euclidean\(1\)"):
        worst_case_sharpness(lambda y: y.square().sum(), geoopt.Euclidean(), torch.ones(3), rho=0.1)


def test_every_coordinate_can_be_a_point() -> None:
    x = torch.tensor([-1.0, 0.5, 2.0], dtype=torch.float64)
    result = worst_case_sharpness(lambda y: y.square(), geoopt.Euclidean(), x, rho=0.5)
    assert_maximum(result, (x.abs() + 0.5).square() - x.square())


# -- sphere ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rho", RADII)
def test_linear_function_on_a_cap_of_the_sphere(rho: float) -> None:
    sphere = geoopt.Sphere()
    c = torch.randn(5, dtype=torch.float64)
    x = sphere.projx(torch.randn(4, 5, dtype=torch.float64))
    angle = torch.arccos(x @ c / c.norm())
    maximum = c.norm() * (torch.cos((angle - rho).clamp_min(0)) - torch.cos(angle))
    assert_maximum(worst_case_sharpness(lambda y: y @ c, sphere, x, rho=rho), maximum)


@pytest.mark.parametrize("rho", [0.03, 0.3, 1.0])
def test_square_on_a_cap_of_the_sphere_around_its_minimum(rho: float) -> None:
    sphere = geoopt.Sphere()
    curvature = torch.tensor([1.0, 3.0, 2.0, 0.0], dtype=torch.float64)
    x = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)  # zero gradient: the seeded start
    result = worst_case_sharpness(lambda y: curvature @ y.square(), sphere, x, rho=rho, restarts=3)
    assert_maximum(result, torch.tensor(3 * math.sin(rho) ** 2, dtype=torch.float64))


# -- hyperbolic space ------------------------------------------------------------------------------------------------

HYPERBOLIC = {
    "PoincareBall": lambda: geoopt.PoincareBall(c=0.7).double(),
    "PoincareBall, unit": lambda: geoopt.PoincareBall().double(),
    "Lorentz": lambda: geoopt.Lorentz(k=2.0).double(),
}


def hyperbolic(kind: str) -> tuple[geoopt.Manifold, Tensor, Tensor]:
    """Manifold, points, and one more point."""
    manifold = HYPERBOLIC[kind]()
    point = 0.3 * torch.randn(5, 4, dtype=torch.float64)
    point = manifold.projx(point)
    return manifold, point[1:], point[:1].expand(4, 4)


@pytest.mark.parametrize("rho", RADII)
@pytest.mark.parametrize("kind", HYPERBOLIC)
def test_distance_to_a_point_grows_by_the_radius_in_hyperbolic_space(kind: str, rho: float) -> None:
    manifold, x, p = hyperbolic(kind)
    distance = manifold.dist(p, x)
    result = worst_case_sharpness(lambda y: manifold.dist(p, y).square(), manifold, x, rho=rho)
    assert_maximum(result, (distance + rho).square() - distance.square())


@pytest.mark.parametrize("kind", HYPERBOLIC)
def test_distance_to_a_point_falls_by_the_radius_in_hyperbolic_space(kind: str) -> None:
    manifold, x, p = hyperbolic(kind)
    distance = manifold.dist(p, x)
    rho = 0.9 * float(distance.min())
    result = worst_case_sharpness(lambda y: -manifold.dist(p, y), manifold, x, rho=rho)
    assert_maximum(result, torch.full_like(distance, rho))


# -- positive definite matrices --------------------------------------------------------------------------------------


def spd_points() -> Tensor:
    return geoopt.SymmetricPositiveDefinite().random(3, 3, 3, dtype=torch.float64)


@pytest.mark.parametrize("rho", RADII)
def test_log_determinant_grows_by_the_radius_times_the_root_of_the_size(rho: float) -> None:
    x = spd_points()
    result = worst_case_sharpness(torch.logdet, geoopt.SymmetricPositiveDefinite(), x, rho=rho)
    assert_maximum(result, torch.full((3,), math.sqrt(3) * rho, dtype=torch.float64))


def largest_exponential_sum(a: np.ndarray, rho: float) -> float:
    r"""Largest :math:`\sum_i a_i e^{t_i}` with :math:`|t| \le \rho`: coarse grid of the sphere, then a local solver."""
    angles = np.stack(np.meshgrid(np.linspace(0, np.pi, 61), np.linspace(0, 2 * np.pi, 121)), -1).reshape(-1, 2)

    def at(angle: np.ndarray) -> np.ndarray:
        polar, azimuth = np.moveaxis(angle, -1, 0)
        sine = np.sin(polar)
        t = rho * np.stack([sine * np.cos(azimuth), sine * np.sin(azimuth), np.cos(polar)], -1)
        return np.exp(t) @ a

    best = angles[np.argmax(at(angles))]
    found = scipy.optimize.minimize(lambda angle: -at(angle), best, method="Nelder-Mead", options={"xatol": 1e-10})
    return -float(found.fun)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("rho", RADII)
def test_trace_against_a_fixed_matrix_under_the_affine_invariant_metric(rho: float, sign: float) -> None:
    # exp_x(u) = x^(1/2) exp(w) x^(1/2) with |w|_F = |u|_x; the maximum has w diagonal where x^(1/2) c x^(1/2) is.
    x = spd_points()
    c = torch.tensor([[1.0, 0.3, 0.0], [0.3, 0.5, -0.1], [0.0, -0.1, 0.8]], dtype=torch.float64)
    roots = np.stack([scipy.linalg.sqrtm(point) for point in x.numpy()])
    a = sign * np.linalg.eigvalsh(roots @ c.numpy() @ roots)
    maximum = torch.tensor([largest_exponential_sum(each, rho) - each.sum() for each in a], dtype=torch.float64)

    result = worst_case_sharpness(
        lambda y: sign * (c * y).sum((-2, -1)), geoopt.SymmetricPositiveDefinite(), x, rho=rho
    )
    assert_maximum(result, maximum)


# -- orthonormal columns ---------------------------------------------------------------------------------------------


def stiefel_maximum(x: Tensor, c: Tensor, rho: float) -> float:
    r"""Largest increase of ``tr(c^T y)`` over the geodesic ball, from many starts of a constrained solver.

    Geodesics by another formula than geoopt's: :math:`e^{u x^\top - x u^\top} x\, e^{-x^\top u}`.
    """
    n, p = x.shape
    rows, columns = torch.tril_indices(p, p, offset=-1)
    complement = torch.linalg.qr(x, mode="complete")[0][:, p:]
    inside = len(rows)

    def decrease(z: Tensor) -> Tensor:
        lower = torch.zeros(p, p, dtype=x.dtype).index_put((rows, columns), z[:inside] / math.sqrt(2))
        skew = lower - lower.mT
        u = x @ skew + complement @ z[inside:].reshape(n - p, p)
        y = torch.linalg.matrix_exp(u @ x.mT - x @ u.mT) @ x @ torch.linalg.matrix_exp(-skew)
        return -(c * (y - x)).sum()

    def with_slope(z: np.ndarray) -> tuple[float, np.ndarray]:
        slope, value = torch.func.grad_and_value(decrease)(torch.as_tensor(z))
        return value.item(), slope.numpy()

    random = np.random.default_rng(0)
    found = []
    for _ in range(6):
        start = random.standard_normal(inside + (n - p) * p)
        result = scipy.optimize.minimize(
            with_slope,
            rho * start / np.linalg.norm(start),
            jac=True,
            method="SLSQP",
            constraints={"type": "ineq", "fun": lambda z: rho**2 - z @ z, "jac": lambda z: -2 * z},
            options={"ftol": 1e-12, "maxiter": 200},
        )
        z = result.x * min(1.0, rho / np.linalg.norm(result.x))
        found.append(-float(decrease(torch.as_tensor(z))))
    return max(found)


@pytest.mark.parametrize("rho", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("manifold", [geoopt.EuclideanStiefel(), geoopt.EuclideanStiefelExact()])
def test_linear_function_on_orthonormal_columns(manifold: geoopt.Manifold, rho: float) -> None:
    x = manifold.projx(torch.randn(2, 4, 2, dtype=torch.float64))
    c = torch.randn(4, 2, dtype=torch.float64)
    maximum = torch.tensor([stiefel_maximum(each, c, rho) for each in x], dtype=torch.float64)
    result = worst_case_sharpness(lambda y: (c * y).sum((-2, -1)), manifold, x, rho=rho)
    assert bool((result.value <= maximum * (1 + 1e-6)).all())  # the solver's own tolerance
    assert bool((result.value >= maximum * (1 - ENOUGH)).all())


# -- products --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rho", [0.1, 1.0, 3.0])
def test_separable_function_on_a_product_shares_the_radius(rho: float) -> None:
    product = geoopt.ProductManifold((geoopt.Sphere(), 3), (geoopt.Euclidean(1), 2))
    c, b = torch.randn(3, dtype=torch.float64), torch.tensor([0.3, -0.4], dtype=torch.float64)
    unit = geoopt.Sphere().projx(torch.randn(3, dtype=torch.float64))
    x = product.pack_point(unit, torch.randn(2, dtype=torch.float64))
    angle = float(torch.arccos(unit @ c / c.norm()))

    def gain(on_sphere: float) -> float:
        turned = math.cos(max(angle - on_sphere, 0)) - math.cos(angle)
        return float(c.norm()) * turned + 0.5 * math.sqrt(max(rho**2 - on_sphere**2, 0))

    radii = np.linspace(0, rho, 100_001)
    maximum = torch.tensor(max(gain(r) for r in radii), dtype=torch.float64)

    def loss(y: Tensor) -> Tensor:
        sphere, flat = product.unpack_tensor(y)
        return sphere @ c + flat @ b

    result = worst_case_sharpness(loss, product, x, rho=rho)
    assert_maximum(result, maximum + 1e-9)


# -- paths that are no geodesics -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e6, 1e9])
def test_a_straight_line_is_no_other_path_far_from_the_origin(size: float) -> None:
    x = torch.full((3,), size, dtype=torch.float64)
    result = worst_case_sharpness(lambda y: (y / size).sum(), geoopt.Euclidean(1), x, rho=0.1 * size)
    assert_maximum(result, torch.tensor(0.1 * math.sqrt(3), dtype=torch.float64))


@pytest.mark.parametrize(
    ("manifold", "name"),
    [
        (geoopt.CanonicalStiefel(), "CanonicalStiefel.expmap"),
        (geoopt.Stiefel(), "CanonicalStiefel.expmap"),
        (geoopt.Scaled(geoopt.PoincareBall(), 2.0), "Scaled.expmap"),
    ],
)
def test_a_path_with_another_velocity_is_refused_by_name(manifold: geoopt.Manifold, name: str) -> None:
    x = torch.linalg.qr(torch.randn(4, 2))[0] / 2 if "Scaled" in name else torch.linalg.qr(torch.randn(4, 2))[0]
    axes = tuple(range(-manifold.ndim, 0))
    with pytest.raises(ValueError, match=f"{name} does not start with the velocity") as caught:
        worst_case_sharpness(lambda y: y.sum(axes), manifold, x, rho=0.1)
    assert "EuclideanStiefel" in str(caught.value)


# Not EuclideanStiefel, whose `retr` overwrites what its own derivative needs.
@pytest.mark.parametrize("kind", ["Sphere", "SymmetricPositiveDefinite", "PoincareBall"])
def test_retractions_are_paths_too(kind: str) -> None:
    manifold = getattr(geoopt, kind)().double()
    x = manifold.random(4, 4, dtype=torch.float64).detach().as_subclass(Tensor)
    axes = tuple(range(-manifold.ndim, 0))
    c = torch.randn(4, 4, dtype=torch.float64)
    by_geodesic, by_retraction = (
        worst_case_sharpness(lambda y: (c * y).sum(axes), manifold, x, rho=1e-3, path=path).value
        for path in ("expmap", "retr")
    )
    torch.testing.assert_close(by_retraction, by_geodesic, rtol=1e-2, atol=0)  # equal to first order
