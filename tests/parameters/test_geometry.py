"""The parameter manifold is the product of its blocks and the rest, as a ``geoopt.Manifold``."""

import pickle
from collections.abc import Callable, Sequence

import geoopt
import pytest
import torch
from torch import Tensor
from torch.func import jvp, vmap
from torch.testing import assert_close

from quotient_nets import AdaptiveEuclidean, InvariantFixedRank, ParameterManifold, parameter_manifold
from quotient_nets.demo import load_digits_vit
from tests.models import WIDTH, Attention, Stack, generic, tokens

WEIGHTS = {"query_key": 4.0, "value_output": 0.25, "rest": 9.0}
EXACT = 1e-12

# Two shapes of blocks of each kind; a metric beside the default; weights
SPACES: dict[str, dict] = {
    "default": {},
    "weighted": {"block_weights": WEIGHTS},
    "euclidean rest": {"rest": geoopt.Euclidean},
    "no quotient": {"attention": AdaptiveEuclidean},
}


@pytest.fixture(params=SPACES, ids=str)
def case(request: pytest.FixtureRequest) -> tuple[ParameterManifold, Tensor]:
    model = torch.nn.ModuleDict({"a": Stack(), "b": Attention(kdim=5, vdim=7)})
    space = parameter_manifold(generic(model), **SPACES[request.param])
    return space, space.pack(model)


def components(space: ParameterManifold) -> list[tuple[geoopt.Manifold, float]]:
    return [(b.manifold, b.weight) for b in space.blocks] + [(space.rest, space.rest_weight)]


def by_hand(space: ParameterManifold, operation: Callable[..., Tensor], *points: Tensor) -> Tensor:
    """The operation on every component alone."""
    parts = zip(components(space), *(space.layout.gather(p) for p in points), strict=True)
    return space.layout.scatter([operation(manifold, *part) for (manifold, _), *part in parts])


def vectors(x: Tensor, number: int) -> Sequence[Tensor]:
    return torch.randn(number, *x.shape, dtype=x.dtype).unbind()


def horizontal(space: ParameterManifold, x: Tensor, size: float = 0.5) -> Tensor:
    u = space.proju(x, torch.randn_like(x))
    return size * u / space.norm(x, u).unsqueeze(-1)


def test_metric_is_the_weighted_sum_over_components(case) -> None:
    space, x = case
    u, v = vectors(x, 2)
    expected = torch.zeros((), dtype=x.dtype)
    parts = zip(components(space), *(space.layout.gather(p) for p in (x, u, v)), strict=True)
    for (manifold, weight), point, left, right in parts:
        expected = expected + weight * manifold.inner(point, left, right).sum()
    assert_close(space.inner(x, u, v), expected, rtol=EXACT, atol=1e-10)
    assert_close(space.inner(x, u, v), space.inner(x, v, u), rtol=EXACT, atol=1e-10)
    assert_close(space.norm(x, u).square(), space.inner(x, u), rtol=EXACT, atol=0)


def test_gradient_represents_the_derivative(case) -> None:
    space, x = case
    e, u = torch.randn_like(x), horizontal(space, x)
    assert_close(space.inner(x, space.egrad2rgrad(x, e), u), e @ u, rtol=1e-10, atol=1e-11)


def test_gradient_is_that_of_every_component(case) -> None:
    space, x = case
    e = torch.randn_like(x)
    alone = space.layout.gather(by_hand(space, lambda m, p, part: m.egrad2rgrad(p, part), x, e))
    expected = [part / weight for part, (_, weight) in zip(alone, components(space), strict=True)]
    assert_close(space.egrad2rgrad(x, e), space.layout.scatter(expected), rtol=1e-10, atol=EXACT)


def test_projection_is_idempotent_self_adjoint_and_by_component(case) -> None:
    space, x = case
    u, v = vectors(x, 2)
    once = space.proju(x, u)
    assert_close(space.proju(x, once), once, rtol=0, atol=1e-11)
    assert_close(space.inner(x, once, v), space.inner(x, u, space.proju(x, v)), rtol=1e-10, atol=1e-10)
    assert_close(once, by_hand(space, lambda m, p, part: m.proju(p, part), x, u), rtol=0, atol=1e-11)


def test_projection_kills_vertical_vectors() -> None:
    model = generic(Stack())
    space = parameter_manifold(model)
    x = space.pack(model)
    *blocks, rest = space.layout.gather(x)
    vertical = [
        block.manifold.infinitesimal_action(point, torch.randn(block.shape[0], block.shape[2], block.shape[2]).double())
        for block, point in zip(space.blocks, blocks, strict=True)
    ]
    u = space.layout.scatter([*vertical, torch.zeros_like(rest)])
    assert float(space.norm(x, u)) > 1
    assert float(space.norm(x, space.proju(x, u))) < 1e-11 * float(space.norm(x, u))
    assert not space.check_vector_on_tangent(x, u)


PATHS = {
    "retr": lambda m: m.retr,
    "expmap": lambda m: m.expmap,
    # The convention of the paper: geodesics where something is divided out, straight lines elsewhere
    "exact": lambda m: m.expmap if isinstance(m, InvariantFixedRank) else m.retr,
    "second_order": lambda m: m.second_order if isinstance(m, InvariantFixedRank) else m.retr,
}


@pytest.mark.parametrize("path", PATHS)
def test_paths_are_those_of_the_components(case, path: str) -> None:
    space, x = case
    u = horizontal(space, x)
    expected = by_hand(space, lambda m, p, part: PATHS[path](m)(p, part), x, u)
    assert_close(getattr(space, path)(x, u), expected, rtol=1e-11, atol=1e-11)
    assert_close(getattr(space, path)(x, 0 * u), x, rtol=0, atol=1e-14)


@pytest.mark.parametrize("path", PATHS)
def test_prepared_space_follows_the_same_paths(case, path: str) -> None:
    space, x = case
    x = space.canonicalize(x)
    u = horizontal(space, x)
    expected = getattr(space, path)(x, u)
    for balanced in (False, True):
        tangent = space.at(x, balanced=balanced)
        c = tangent.coordinates(u)
        for radius in (None, 0.5, 0.9):
            assert_close(tangent.move(c, path, radius), expected, rtol=1e-11, atol=1e-11)
        assert_close(tangent.vector(c), u, rtol=1e-11, atol=EXACT)
        assert_close(tangent.norm(c).squeeze(-1), space.norm(x, u), rtol=1e-11, atol=0)
        e = torch.randn_like(x)
        gradient = tangent.vector(tangent.gradient(tangent.pull_gradient(e)))
        assert_close(gradient, space.egrad2rgrad(x, e), rtol=1e-9, atol=1e-11)


def test_coordinates_are_orthonormal(case) -> None:
    space, x = case
    tangent = space.at(space.canonicalize(x))
    c, d = vectors(x, 2)
    assert_close(tangent.inner(c, d), (c @ d).reshape(1), rtol=1e-11, atol=1e-11)
    assert_close(tangent.random(torch.Generator().manual_seed(0)).norm(), torch.ones(()).double(), rtol=EXACT, atol=0)
    assert not tangent.origin().any()


@pytest.mark.parametrize("path", ["expmap", "exact"])
def test_paths_leave_with_their_velocity_at_constant_speed(path: str) -> None:
    model = generic(Stack())
    space = parameter_manifold(model)
    x = space.pack(model)
    u = horizontal(space, x)
    start = jvp(lambda t: getattr(space, path)(x, t * u), (torch.zeros(()).double(),), (torch.ones(()).double(),))[1]
    assert_close(start, u, rtol=1e-10, atol=1e-11)
    if path == "expmap":
        y, velocity = jvp(lambda t: space.expmap(x, t * u), (torch.ones(()).double(),), (torch.ones(()).double(),))
        assert_close(space.norm(y, velocity), space.norm(x, u), rtol=1e-10, atol=0)


def test_geometry_does_not_depend_on_the_representative() -> None:
    model, batch = generic(Stack()), tokens()
    space = parameter_manifold(model)
    x = space.pack(model)
    y = space.random_action(x, condition=100.0, translations=False)

    def rise(x: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient norm, and outputs a step along the gradient away."""
        point = x.clone().requires_grad_()
        (e,) = torch.autograd.grad(space.call(model, point, batch).square().sum(), point)
        gradient = space.egrad2rgrad(x, e)
        norm = space.norm(x, gradient)
        return norm, space.call(model, space.exact(x, 0.3 * gradient / norm), batch)

    for here, there in zip(rise(x), rise(y), strict=True):
        assert_close(there, here, rtol=1e-9, atol=1e-9)


def test_transport_is_that_of_the_components(case) -> None:
    space, x = case
    y = space.exact(x, horizontal(space, x, 0.1))
    v = horizontal(space, x)
    expected = by_hand(space, lambda m, p, q, part: m.transp(p, q, part), x, y, v)
    moved = space.transp(x, y, v)
    assert_close(moved, expected, rtol=EXACT, atol=EXACT)
    assert space.check_vector_on_tangent(y, moved)
    z, carried = space.retr_transp(x, v, v)
    assert torch.equal(z, space.retr(x, v))
    assert_close(carried, space.transp(x, z, v), rtol=EXACT, atol=EXACT)


def test_exactly_zero_weights_stay() -> None:
    model = generic(Stack())
    with torch.no_grad():
        model.head.weight[0] = 0
    space = parameter_manifold(model)
    x = space.pack(model)
    u = space.proju(x, torch.randn_like(x))
    for vector in (u, space.egrad2rgrad(x, torch.randn_like(x))):
        assert not space.unpack(vector)["head.weight"][0].any()
        assert bool(space.unpack(vector)["head.weight"][1:].all())
    for path in PATHS:
        assert not space.unpack(getattr(space, path)(x, u))["head.weight"][0].any()
    certificates = space.at(x).certificates(space.at(x).coordinates(u))
    assert int(certificates["zero_weights"]) == WIDTH


def test_certificates_are_the_worst_of_all_blocks() -> None:
    model = generic(Stack())
    with torch.no_grad():
        model.layers[0].self_attn.in_proj_weight[0] *= 1e-4
        model.layers[0].self_attn.in_proj_bias[0] *= 1e-4
    space = parameter_manifold(model)
    x = space.canonicalize(space.pack(model))
    found = space.at(x).certificates(space.at(x).coordinates(torch.randn_like(x)))
    products = [b.manifold.product(p) for b, p in zip(space.blocks, space.layout.gather(x), strict=False)]
    spectra = torch.cat([torch.linalg.svdvals(p)[:, :4] for p in products])
    gaps = 1 - spectra[:, 1:] / spectra[:, :-1]
    assert_close(found["condition_number"], (spectra[:, 0] / spectra[:, -1]).max(), rtol=1e-8, atol=0)
    assert_close(found["spectral_gap"], gaps.min(), rtol=1e-8, atol=0)
    assert float(found["condition_number"]) > 1e3
    assert float(found["horizontality_residual"]) > 0.01
    inside = space.at(x).coordinates(space.proju(x, torch.randn_like(x)))
    assert float(space.at(x).certificates(inside)["horizontality_residual"]) < 1e-12


# -- as a manifold of geoopt -----------------------------------------------------------------------------------------


def test_batches_equal_a_loop(case) -> None:
    space, x = case
    points = torch.stack([space.random_action(x, generator=torch.Generator().manual_seed(i)) for i in range(3)])
    us = torch.stack([horizontal(space, point) for point in points])
    vs = torch.randn_like(us)
    batched = {
        "inner": space.inner(points, us, vs),
        "norm": space.norm(points, us),
        "proju": space.proju(points, vs),
        "egrad2rgrad": space.egrad2rgrad(points, vs),
        "expmap": space.expmap(points, us),
        "exact": space.exact(points, us),
        "transp": space.transp(points, points.flip(0), us),
    }
    for i, point in enumerate(points):
        one = {
            "inner": space.inner(point, us[i], vs[i]),
            "norm": space.norm(point, us[i]),
            "proju": space.proju(point, vs[i]),
            "egrad2rgrad": space.egrad2rgrad(point, vs[i]),
            "expmap": space.expmap(point, us[i]),
            "exact": space.exact(point, us[i]),
            "transp": space.transp(point, points[2 - i], us[i]),
        }
        for name, value in one.items():
            assert_close(batched[name][i], value, rtol=1e-9, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")
    assert space.inner(points, us, keepdim=True).shape == (3, 1)
    assert space.inner(points, us).shape == (3,)


def test_one_point_and_a_batch_of_vectors(case) -> None:
    space, x = case
    us = torch.stack([horizontal(space, x) for _ in range(3)])
    for name in ("proju", "egrad2rgrad", "expmap", "inner", "exact"):
        batched = getattr(space, name)(x, us)
        loop = torch.stack([getattr(space, name)(x, u) for u in us])
        assert_close(batched, loop, rtol=1e-10, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


def test_vmap_equals_a_loop() -> None:
    model = generic(Stack())
    space = parameter_manifold(model)
    x = space.canonicalize(space.pack(model))
    tangent = space.at(x, balanced=True)
    cs = torch.stack([tangent.coordinates(horizontal(space, x)) for _ in range(3)])
    moved = vmap(lambda c: tangent.move(c, "exact", 0.5))(cs)
    assert_close(moved, torch.stack([tangent.move(c, "exact", 0.5) for c in cs]), rtol=EXACT, atol=EXACT)


def test_paths_are_differentiable_in_the_vector() -> None:
    model = generic(Stack(layers=1))
    space = parameter_manifold(model)
    x = space.pack(model)
    u, v = (horizontal(space, x) for _ in range(2))
    for path in ("exact", "second_order", "expmap"):
        follow = getattr(space, path)
        slope = jvp(lambda u, follow=follow: follow(x, u), (u,), (v,))[1]
        finite = (follow(x, u + 1e-5 * v) - follow(x, u - 1e-5 * v)) / 2e-5
        assert_close(slope, finite, rtol=1e-7, atol=1e-9)


def test_checks_accept_points_and_vectors_and_explain_the_rest(case) -> None:
    space, x = case
    assert space.check_point_on_manifold(x)
    assert space.check_vector_on_tangent(x, horizontal(space, x))
    space.assert_check_point_on_manifold(x)
    bad = x.clone()
    bad[3] = torch.nan
    assert space.check_point_on_manifold(bad, explain=True) == (False, "expected finite parameters, got NaN or Inf")
    ok, reason = space.check_point_on_manifold(x[:-1], explain=True)
    assert not ok
    assert f"(..., {space.layout.size})" in reason
    assert "pack(model)" in reason
    if any(block.quotient for block in space.blocks):
        ok, reason = space.check_vector_on_tangent(x, torch.randn_like(x), explain=True)
        assert not ok
        assert "proju" in reason


def test_projx_returns_the_point_bit_for_bit(case) -> None:
    space, x = case
    assert torch.equal(space.projx(x), x)


def test_one_step_of_riemannian_sgd(case) -> None:
    space, x = case
    point = geoopt.ManifoldParameter(x.clone(), manifold=space)
    optimizer = geoopt.optim.RiemannianSGD([point], lr=1e-3)
    e = torch.randn_like(x)
    (point @ e).backward()
    optimizer.step()
    assert_close(point.detach(), space.retr(x, -1e-3 * space.egrad2rgrad(x, e)), rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize(
    "optimizer", [lambda p: geoopt.optim.RiemannianSGD(p, lr=1e-3, momentum=0.5), geoopt.optim.RiemannianAdam]
)
def test_optimizers_of_geoopt_lower_the_loss_of_a_model(optimizer) -> None:
    model, batch = generic(Stack()), tokens()
    space = parameter_manifold(model)
    point = geoopt.ManifoldParameter(space.pack(model), manifold=space)
    steps = optimizer([point])
    losses = []
    for _ in range(5):
        steps.zero_grad()
        loss = space.call(model, point, batch).square().mean()
        loss.backward()
        steps.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_manifold_can_be_pickled() -> None:
    model = generic(Stack())
    space = parameter_manifold(model)
    other = pickle.loads(pickle.dumps(space))
    x = space.pack(model)
    assert torch.equal(other.pack(model), x)
    u = torch.randn_like(x)
    assert torch.equal(other.proju(x, u), space.proju(x, u))


def test_float32_keeps_its_dtype_and_most_of_its_digits() -> None:
    model = load_digits_vit()
    space = parameter_manifold(model)
    x = space.canonicalize(space.pack(model))
    u = space.proju(x, torch.randn_like(x) * x.abs())
    u = u / space.norm(x, u)
    wide = {name: getattr(space, name)(x.double(), u.double()) for name in ("exact", "expmap", "proju", "inner")}
    for name, expected in wide.items():
        actual = getattr(space, name)(x, u)
        assert actual.dtype is torch.float32
        assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)
