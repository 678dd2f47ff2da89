"""Complex matrices of rank one: laws, numpy's complex arithmetic, the real manifold inside, the ends of the theory."""

import numpy as np
import pytest
import torch
from geoopt import ManifoldParameter
from geoopt.optim import RiemannianAdam
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.func import jvp
from torch.testing import assert_close

from quotient_nets import ComplexRankOne
from quotient_nets.manifolds.base import QuotientManifold
from tests.cases import PSD_OPERATIONS, Operation, draw
from tests.strategies import (
    COMPLEX_ELEMENTS,
    COMPLEX_SIZES,
    as_numpy,
    assert_near,
    complex_element,
    complex_points,
    unit_vector,
)

Case = tuple[ComplexRankOne, Tensor]
each_size = pytest.mark.parametrize(("n", "m"), COMPLEX_SIZES)
ROUNDING = 1e-11  # measured 3e-12 with |a| between 1e-4 and 1e4
OPERATIONS = [*PSD_OPERATIONS, Operation("ehess2rhess", "xefu", "u"), Operation("pull_back", "xz", "u")]


class WithLifts(ComplexRankOne):
    """With lifts of tangent matrices as an operation between vectors."""

    def pull_back(self, x: Tensor, z: Tensor) -> Tensor:
        return self.from_ambient(x, self.to_ambient(x, z))


# -- representation ----------------------------------------------------------------------------------------------------


@given(complex_points(), COMPLEX_ELEMENTS, COMPLEX_ELEMENTS)
def test_group_elements_are_complex_numbers(case: Case, a: Tensor, b: Tensor) -> None:
    m, x = case
    (g, h), z = as_numpy(m, x), complex(a[0, 0], a[0, 1])
    moved = m.action(x, a)
    assert_close(m.pack_point(torch.tensor(g / z), torch.tensor(h * z.conjugate())), moved, rtol=1e-12, atol=1e-12)
    assert_close(m.action(m.action(x, b), a), m.action(x, a @ b), rtol=1e-12, atol=1e-12)
    expected = g[..., :, None] * h[..., None, :].conj()
    np.testing.assert_allclose(torch.view_as_complex(m.product(x)), expected, rtol=1e-12, atol=1e-12)
    assert_close(m.product(moved), m.product(x), rtol=1e-12, atol=1e-12)
    assert torch.equal(m.action(x, torch.eye(2)), x)
    not_linear = torch.tensor([[1.0, 0.0], [0.0, -1.0]], dtype=torch.float64)  # conjugation
    assert_close(m.action(x, a + not_linear), moved, rtol=1e-9, atol=1e-9)


@given(complex_points())
def test_vertical_vectors_are_the_derivative_of_the_action(case: Case) -> None:
    m, x = case
    a, b = torch.randn(2, dtype=torch.float64)
    xi = torch.stack([torch.stack([a, b]), torch.stack([-b, a])])
    time = torch.zeros((), dtype=x.dtype)
    path = jvp(lambda t: m.action(x, torch.matrix_exp(t * xi)), (time,), (torch.ones_like(time),))[1]
    assert_close(m.infinitesimal_action(x, xi), path, rtol=1e-12, atol=1e-12)
    assert_close(m.proju(x, path), torch.zeros_like(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda op: op.method)
@given(case=complex_points(), a=COMPLEX_ELEMENTS, b=COMPLEX_ELEMENTS, size=st.floats(0.01, 1.9))
def test_operations_commute_with_the_group(operation: Operation, case: Case, a: Tensor, b: Tensor, size: float) -> None:
    m, x = WithLifts(case[0].n, case[0].m), case[1]
    roles = {role: torch.randn_like(x) for role in "uvwefz"} | {"x": x}
    roles["y"] = m.action(m.expmap(x, size * unit_vector(m, x)), complex_element(1.0, 2.0))
    for role in "uvz":
        roles[role] = m.proju(x, roles[role])
        roles[role] = roles[role] / m.norm(x, roles[role], keepdim=True)
    dual = torch.linalg.inv(a.mT)
    moves = {role: b if role in "yw" else dual if role in "ef" else a for role in roles}
    moved = {role: m.action(t, moves[role]) for role, t in roles.items()}
    actual, expected = operation(m, moved), operation(m, roles)
    if not operation.gives:
        assert_close(actual, expected, rtol=ROUNDING, atol=ROUNDING)
        return
    role = "y" if operation.gives == "w" else "x"
    assert_near(m, roles[role], m.action(actual, torch.linalg.inv(moves[role])), expected)


@given(complex_points(), COMPLEX_ELEMENTS)
def test_canonical_point_is_one_for_each_orbit(case: Case, a: Tensor) -> None:
    m, x = case
    y, b = m.canonicalize(x)
    assert_close(m.action(x, b), y)
    assert_near(m, y, m.canonicalize(m.action(x, a))[0], y, 1e-10)
    g, h = (part.norm(dim=(-2, -1)) for part in m.unpack_tensor(y))
    assert_close(g, h)
    near, far = m.at(x), m.at(m.action(x, a))
    c, d = (space.random(torch.Generator().manual_seed(1)) for space in (near, far))
    assert_near(m, far.x, m.action(near.vector(c), a), far.vector(d), 1e-10)
    assert_close(c.square().sum((-2, -1)), m.inner(x, near.vector(c)))
    assert_close(near.vector(near.project(c)), m.proju(x, near.vector(c)))
    for path in ("retr", "expmap", "second_order"):
        assert_close(near.move(c, path), getattr(m, path)(x, near.vector(c)))
    with pytest.raises(ValueError, match="expected a path"):
        near.move(c, "shortcut")


# -- the metric and its gradient ---------------------------------------------------------------------------------------


@given(complex_points())
def test_projection_is_the_generic_one(case: Case) -> None:
    m, x = case
    u, v, e = (torch.randn_like(x) for _ in range(3))
    p = m.proju(x, u)
    assert_close(m.proju(x, p), p, rtol=0, atol=1e-12)
    assert_close(m.inner(x, p, v), m.inner(x, u, m.proju(x, v)), rtol=1e-9, atol=1e-9)
    assert_close(p, QuotientManifold.proju(m, x, u), rtol=0, atol=1e-10)
    assert_close(m.to_ambient(x, p), m.to_ambient(x, u), rtol=0, atol=1e-12)
    gradient = m.egrad2rgrad(x, e)
    assert_close(m.inner(x, gradient, p), (e * p).sum((-2, -1)), rtol=1e-9, atol=1e-9)
    assert_close(m.proju(x, gradient), gradient, rtol=1e-12, atol=1e-10)


@each_size
def test_horizontal_space_has_the_dimension_of_the_manifold(n: int, m: int) -> None:
    manifold, x = ComplexRankOne(n, m), torch.randn(n + m, 2, dtype=torch.float64)
    basis = torch.eye(2 * (n + m), dtype=torch.float64).reshape(-1, n + m, 2)
    for linear in (manifold.proju(x, basis), manifold.to_ambient(x, basis)):
        assert int(torch.linalg.matrix_rank(linear.flatten(1))) == manifold.dimension() == 2 * (n + m - 1)


@given(complex_points())
def test_lifts_and_metric_against_numpy(case: Case) -> None:
    m, x = case
    z = torch.randn(*x.shape[:-2], m.n, m.m, dtype=torch.complex128)
    (g, h), z_ = as_numpy(m, x), z.numpy()
    s = np.linalg.norm(g, axis=-1, keepdims=True)[..., None] * np.linalg.norm(h, axis=-1, keepdims=True)[..., None]
    p, q = (t[..., :, None] * t[..., None, :].conj() / np.linalg.norm(t, axis=-1)[..., None, None] ** 2 for t in (g, h))
    core = p @ z_ @ q
    across, down = z_ @ q - core, p @ z_ - core
    u = m.from_ambient(x, z)
    assert_close(m.proju(x, u), u, rtol=1e-10, atol=1e-10)
    assert_close(m.from_ambient(x, torch.view_as_real(z)), u)
    np.testing.assert_allclose(torch.view_as_complex(m.to_ambient(x, u)), core + across + down, rtol=1e-9, atol=1e-9)
    square = (abs(core) ** 2 / 2 + abs(across) ** 2 + abs(down) ** 2) / s**2
    np.testing.assert_allclose(m.inner(x, u), square.sum((-2, -1)), rtol=1e-9)


@given(complex_points())
def test_hessian_is_the_second_derivative_along_geodesics(case: Case) -> None:
    m, x = case
    target, u = m.product(torch.randn_like(x)), unit_vector(m, x)

    def value(y: Tensor) -> Tensor:
        return (m.product(y) - target).square().sum()

    egrad, ehess = jvp(torch.func.grad(value), (x,), (u,))
    t = torch.zeros(x.shape[:-2], dtype=x.dtype)

    def along(t: Tensor) -> Tensor:
        return value(m.expmap(x, t[..., None, None] * u))

    second = jvp(torch.func.grad(along), (t,), (torch.ones_like(t),))[1]
    assert_close(m.inner(x, m.ehess2rhess(x, egrad, ehess, u), u), second, rtol=1e-9, atol=1e-9)


# -- derivatives and precision -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", OPERATIONS[-2:], ids=lambda op: op.method)
def test_two_derivatives(operation: Operation) -> None:  # of the others: test_autograd.py
    m, arguments = WithLifts(2, 2), torch.randn(len(operation.takes), 4, 2, dtype=torch.float64).unbind()
    inputs = [t.clone().requires_grad_() for t in arguments]
    assert gradcheck(operation.function(m), inputs)
    assert gradgradcheck(operation.function(m), inputs)


@pytest.mark.parametrize("scale", [1.0, 1e3])  # |G| / |H| = 1e6
def test_float32_is_float64(scale: float) -> None:
    m = WithLifts(64, 48)
    roles = draw(m, (20,), (112, 2)) | {role: torch.randn(20, 112, 2, dtype=torch.float64) for role in "fz"}
    roles = {role: m.action(t, complex_element(scale if role in "ef" else 1 / scale, 0.3)) for role, t in roles.items()}
    for operation in OPERATIONS:
        single = operation(m, {role: t.float() for role, t in roles.items()})
        assert single.dtype == torch.float32
        actual, expected = single.double(), operation(m, {role: t.float().double() for role, t in roles.items()})
        if operation.gives:
            assert_near(m, roles["y" if operation.gives == "w" else "x"], actual, expected, 1e-5)
        else:
            assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_tensors_stay_on_their_device(dtype: torch.dtype) -> None:
    m = WithLifts(4, 3)
    with FakeTensorMode():
        roles = {role: torch.empty(2, 7, 2, dtype=dtype, device="cuda") for role in "xyuvwefz"}
        x, a = roles["x"], torch.empty(2, 2, dtype=dtype, device="cuda")
        results = [op(m, roles) for op in OPERATIONS]
        results += [*m.canonicalize(x), m.action(x, a), m.product(x), m.injectivity_radius(x)]
        space = m.at(x)
        results += [space.vector(space.coordinates(x)).to(dtype), m.pairwise_dist(x, x)]
    assert {(t.device.type, t.dtype) for t in results} == {("cuda", dtype)}


# -- use and misuse ----------------------------------------------------------------------------------------------------


def test_adam_finds_the_nearest_matrix() -> None:
    m = ComplexRankOne(4, 3)
    target = torch.randn(4, 3, dtype=torch.complex128)
    best = torch.view_as_complex(m.product(m.best_rank_one(target)))
    u, s, vh = np.linalg.svd(target.numpy())
    np.testing.assert_allclose(best, s[0] * np.outer(u[:, 0], vh[0]), rtol=1e-9, atol=1e-12)
    x = ManifoldParameter(m.origin(7, 2, dtype=torch.float64), manifold=m)
    optimizer = RiemannianAdam([x], lr=0.3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
    for _ in range(300):
        optimizer.zero_grad()
        loss = (m.product(x) - torch.view_as_real(target)).square().sum()
        loss.backward()
        optimizer.step()
        scheduler.step()
    assert_close(loss.item(), float((s[1:] ** 2).sum()), rtol=1e-6, atol=0)


@pytest.mark.parametrize("entry", [0.0, torch.nan, torch.inf])
def test_an_invalid_element_is_reported_and_gives_nan_for_itself_only(entry: float) -> None:
    m, x = ComplexRankOne(4, 3), torch.randn(3, 7, 2, dtype=torch.float64)
    good = x.clone()
    x[1, 4:] = entry
    ok, reason = m.check_point_on_manifold(x, explain=True)
    assert not ok
    assert ("[[1]]" if entry == 0 else "finite") in str(reason)
    u = torch.randn_like(x)
    results = [m.inner(x, u), m.proju(x, u), m.expmap(x, u), m.logmap(good, x), m.dist(x, good), m.transp(good, x, u)]
    for result in [*results, m.injectivity_radius(x), m.canonicalize(x)[0]]:
        assert result.reshape(3, -1).isfinite().all(1).tolist() == [True, False, True]


def test_bad_input_is_refused() -> None:
    m = ComplexRankOne(4, 3)
    with pytest.raises(ValueError, match="positive integers n"):
        ComplexRankOne(0, 3)
    with pytest.raises(ValueError, match=r"expected complex vectors of shapes \(\.\.\., 4\)"):
        m.pack_point(torch.randn(3, 2), torch.randn(3, 2))
    with pytest.raises(ValueError, match=r"expected a matrix \(\.\.\., 4, 3\)"):
        m.best_rank_one(torch.randn(4, 3))
    with pytest.raises(ValueError, match="not zero"):
        m.best_rank_one(torch.zeros(2, 4, 3, 2))
    ok, reason = m.check_point_on_manifold(torch.randn(7, 1), explain=True)
    assert not ok
    assert "(7, 1)" in str(reason)
