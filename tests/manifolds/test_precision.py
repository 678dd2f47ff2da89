"""What precision and device cost: float32 against float64, half precision, a device without a GPU."""

import geoopt
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from quotient_nets.linalg import frame
from quotient_nets.manifolds import AdaptiveEuclidean, InvariantFixedRank
from tests.cases import FIXED_RANK_OPERATIONS, Operation, draw, each_operation
from tests.strategies import Case, adaptive, fixed_rank, orthogonal

FLOAT32 = 1e-5  # eps cond(G) = 4e-6 at balanced points with cond(X) = 1e3; measured 5e-7 at most
HALF = {torch.bfloat16: 0.1, torch.float16: 0.02}  # the results are rounded to 8 and 11 bits


def ill_conditioned(n: int, m: int, r: int, condition: float, batch: int) -> dict[str, Tensor]:
    """Arguments at balanced points of the kind, scaled so that every singular direction counts."""
    manifold = InvariantFixedRank(n, m)
    root = torch.logspace(0, -0.5, r, base=condition, dtype=torch.float64)
    frames = [manifold.pack_point(orthogonal(batch, n, r), orthogonal(batch, m, r)) for _ in range(2)]
    noise = {role: torch.randn(batch, n + m, r, dtype=torch.float64) / (n + m) for role in "uvwef"}
    return {
        "x": frames[0] * root,
        "y": frames[1] * root,
        **{role: noise[role] * root for role in "uvw"},
        **{role: noise[role] / root for role in "ef"},
    }


@pytest.mark.parametrize("op", FIXED_RANK_OPERATIONS, ids=lambda op: op.method)
@pytest.mark.parametrize("r", [1, 8])
def test_float32_agrees_with_float64_at_condition_1000(op: Operation, r: int) -> None:
    roles = {role: a.float() for role, a in ill_conditioned(64, 48, r, 1e3, 20).items()}
    m = InvariantFixedRank(64, 48)
    actual, expected = op(m, roles), op(m, {role: a.double() for role, a in roles.items()})
    assert actual.dtype == torch.float32
    if not op.gives:
        assert_close(actual.double(), expected, rtol=FLOAT32, atol=FLOAT32)
        return
    at = roles["y" if op.gives == "w" else "x"].double()
    base = roles["x"].double() if op.gives == "x" else 0.0
    error, size = m.norm(at, actual.double() - expected), m.norm(at, expected - base)
    assert bool((error <= FLOAT32 * size.clamp_min(0.1)).all())


@pytest.mark.parametrize(("n", "r"), [(768, 64), (12, 3)])
@pytest.mark.parametrize("condition", [1e2, 1e4])
def test_the_frame_in_float32_has_every_digit_of_the_stored_factors(n: int, r: int, condition: float) -> None:
    root = torch.logspace(0, -0.5, r, base=condition, dtype=torch.float64)
    gauge = orthogonal(2, r, r) * torch.logspace(-1, 1, r, dtype=torch.float64).unsqueeze(-2)
    g = (orthogonal(2, n, r) * root @ gauge.mT).float()
    h = (orthogonal(2, n, r) * root @ torch.linalg.inv(gauge)).float()
    actual, expected = frame(g, h), frame(g.double(), h.double())
    for part, wanted in zip(actual, expected, strict=True):
        assert part.dtype == torch.float32
        assert_close(part.double(), wanted, rtol=0, atol=1e-7 * wanted.abs().amax().item())
    assert_close(actual.spectrum.double(), expected.spectrum, rtol=1e-7, atol=0)


@given(adaptive(dtype=torch.float32))
def test_adaptive_metric_in_float32_agrees_with_float64(case: Case) -> None:
    m, x, u = case.manifold, case.x, case.horizontal()
    for method in (m.inner, m.norm, m.proju, m.retr, m.expmap, m.egrad2rgrad):
        assert_close(method(x, u).double(), method(x.double(), u.double()), rtol=1e-5, atol=1e-6)


@each_operation
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_is_accepted_and_returned(
    manifold: geoopt.Manifold, shape: tuple[int, ...], op: Operation, dtype: torch.dtype
) -> None:
    roles = {role: a.to(dtype) for role, a in draw(manifold, (3,), shape).items()}
    actual, expected = op(manifold, roles), op(manifold, {role: a.double() for role, a in roles.items()})
    assert actual.dtype == dtype
    scale = expected.abs().amax().item()
    assert_close(actual.double(), expected, rtol=HALF[dtype], atol=HALF[dtype] * scale)


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_reaches_points_and_group_elements(dtype: torch.dtype) -> None:
    m = InvariantFixedRank(4, 3)
    x, a = m.random(2, 7, 2, dtype=dtype), torch.tensor([[2.0, 1.0], [0.0, 1.0]]).to(dtype)
    assert m.origin(2, 7, 2, dtype=dtype).dtype == dtype
    results = [*m.canonicalize(x), m.action(x, a), m.infinitesimal_action(x, a), m.product(x), m.projx(x)]
    assert {result.dtype for result in results} == {dtype}
    expected = m.product(x.double())
    assert_close(m.product(m.action(x, a)).double(), expected, rtol=0, atol=0.2)


@given(fixed_rank(condition=10.0, gauge=2.0, dtype=torch.float32))
def test_float32_does_not_see_the_sizes_of_the_factors(case: Case) -> None:
    m, x, u = case.manifold, case.x, case.step()
    a = 1024 * torch.eye(x.shape[-1])  # then |H| = 1e6 |G|, without rounding
    for method in (m.proju, m.retr, m.expmap, m.second_order):
        actual = m.action(method(m.action(x, a), m.action(u, a)), a / 1024**2)
        case.assert_equal(actual, method(x, u), 1e-5)
    assert_close(m.norm(m.action(x, a), m.action(u, a)), m.norm(x, u), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("c", [1e-12, 1e-4, 1e4, 1e12])
def test_scale_of_a_point_does_not_matter(c: float) -> None:
    m = InvariantFixedRank(5, 4)
    x, y, u, v = torch.randn(4, 9, 3, dtype=torch.float64)
    assert_close(m.inner(c * x, c * u, c * v), m.inner(x, u, v), rtol=1e-12, atol=1e-12)
    assert_close(m.expmap(c * x, c * u), c * m.expmap(x, u), rtol=1e-10, atol=1e-12 * c)
    assert_close(m.proju(c * x, c * u), c * m.proju(x, u), rtol=1e-10, atol=1e-12 * c)
    assert_close(m.transp(x, c * y, v), m.transp(x, y, v) / c, rtol=1e-10, atol=1e-12 / c)


@pytest.mark.parametrize(
    ("dtype", "x"),
    [(torch.float32, 1e-23), (torch.float32, 1e23), (torch.float16, 1e-4), (torch.float16, 500.0)],
)
def test_adaptive_metric_takes_weights_whose_squares_do_not_exist(dtype: torch.dtype, x: float) -> None:
    m, weights = AdaptiveEuclidean(), torch.tensor([x, -1.0], dtype=dtype)
    two = torch.tensor(2.0, dtype=dtype)
    assert_close(m.norm(weights, weights).square(), two, rtol=1e-2, atol=0)
    assert_close(m.inner(weights, weights), two, rtol=1e-2, atol=0)


def test_zero_weights_are_a_component_of_their_own() -> None:
    m, zero, one = AdaptiveEuclidean(), torch.tensor([0.0, 1.0]), torch.tensor([2.0, 1.0])
    assert m.dist(zero, zero) == 0
    for x, y in [(zero, one), (one, zero), (one, -one), (zero, -one), (-one, zero)]:
        assert not bool(m.logmap(x, y).isfinite().all())
        assert not bool(m.dist(x, y).isfinite())


@given(adaptive())
def test_adaptive_logarithm_inverts_the_geodesic(case: Case) -> None:
    m, x, u = case.manifold, case.x, case.horizontal()
    y = m.expmap(x, u)
    case.assert_equal(m.logmap(x, y), u, 1e-12)
    case.assert_equal(m.expmap(x, m.logmap(x, y)), y, 1e-12)
    assert_close(m.dist(x, y), m.norm(x, u), rtol=1e-11, atol=1e-12)
    assert_close(m.dist(y, x), m.dist(x, y), rtol=1e-11, atol=1e-12)
    assert bool(((y == 0) == (x == 0)).all())
    assert_close(m.inner(y, m.transp(x, y, u)), m.inner(x, u), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("r", [1, 2])
@pytest.mark.parametrize("batch", [(), (2, 17)])
def test_tensors_stay_on_their_device(dtype: torch.dtype, r: int, batch: tuple[int, ...]) -> None:
    """Fake tensors of a GPU: an operation that mixed in a tensor of the CPU would raise."""
    m = InvariantFixedRank(4, 3)
    with FakeTensorMode():
        a = torch.empty(r, r, dtype=dtype, device="cuda")
        roles = {role: torch.empty(*batch, 7, r, dtype=dtype, device="cuda") for role in "xyuvwef"}
        x, u = roles["x"], roles["u"]
        results = {op.method: op(m, roles) for op in FIXED_RANK_OPERATIONS}
        results["expmap with radius"] = m.expmap(x, u, radius=0.1)
        results["balanced"], results["element"] = m.canonicalize(x)
        results["action"] = m.action(x, a)
        results["product"], results["projx"] = m.product(x), m.projx(x)
        space = m.at(x)
        results["space"] = space.vector(space.coordinates(u)).to(dtype)
    for name, result in results.items():
        assert result.device.type == "cuda", name
        assert result.dtype == dtype, name
        assert result.shape[: len(batch)] == batch, name
