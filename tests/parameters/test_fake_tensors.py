"""Nothing on the path of a measurement reads data back from the device, or leaves it.

Fake tensors have a shape and a device and no data: reading a number raises, and so does mixing them with the host's.
The whole of the geometry runs on fake CUDA tensors. A model's backward pass is torch's, whose engine aborts for them
where the wheel has no CUDA; one test takes it along on the meta device there.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn.functional import cross_entropy

from quotient_nets import ParameterManifold, parameter_manifold
from quotient_nets.demo import DigitsViT, load_digits_vit
from quotient_nets.parameters import at_parameters
from quotient_nets.sharpness.ascent import Evaluate, Workspace, ascent_step, start

DEVICE = "cuda"
BACKWARD_DEVICE = "cuda" if torch.backends.cuda.is_built() else "meta"
RHO = 0.1


@pytest.fixture(scope="module")
def model() -> DigitsViT:
    return load_digits_vit()


@pytest.fixture(scope="module")
def space(model: DigitsViT) -> ParameterManifold:
    return parameter_manifold(model)


@pytest.fixture(autouse=True)
def _fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


def point(space: ParameterManifold, device: str = DEVICE) -> Tensor:
    return torch.empty(space.layout.size, device=device)


def assert_there(*tensors: Tensor, device: str = DEVICE) -> None:
    assert {t.device.type for t in tensors} == {device}
    assert {t.dtype for t in tensors if t.is_floating_point()} == {torch.float32}


def test_fake_tensors_catch_what_they_are_for() -> None:
    x = torch.empty(3, device=DEVICE)
    with pytest.raises(DataDependentOutputException):
        bool(x.isfinite().all())
    with pytest.raises(RuntimeError, match="device"):
        x + torch.ones(3)


def test_pack_and_unpack(model: DigitsViT, space: ParameterManifold) -> None:
    weights = {name: torch.empty(p.shape, device=DEVICE) for name, p in model.named_parameters()}
    x = space.pack(weights, check=False)
    assert_there(x, *space.unpack(x).values())
    assert x.shape == (space.layout.size,)


def test_permutation(space: ParameterManifold) -> None:
    x = point(space)
    parts = space.layout.gather(x)
    assert_there(*parts, space.layout.scatter(parts), *space.unpack(x).values())
    assert space.layout.scatter(parts).shape == x.shape


def test_symmetries(space: ParameterManifold) -> None:
    x = point(space)
    assert_there(space.random_action(x), space.canonicalize(x), space.canonicalize(x, translations=False))


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("balanced", [True, False])
def test_tangent_space(space: ParameterManifold, balanced: bool, held: bool) -> None:
    x = point(space)
    tangent = (space.section() if held else space).at(x, balanced=balanced)
    c = tangent.coordinates(torch.empty_like(x))
    generator = torch.Generator().manual_seed(0)
    assert_there(c, tangent.vector(c), tangent.project(c), tangent.random(generator), tangent.origin())
    assert_there(tangent.gradient(tangent.pull_gradient(x)), tangent.norm(c), *tangent.certificates(c).values())
    for path in ("exact", "second_order", "expmap", "retr"):
        for radius in (None, RHO):
            assert_there(tangent.move(c, path, radius))


@pytest.mark.parametrize("method", ["retr", "expmap", "exact", "second_order", "proju", "egrad2rgrad", "inner", "norm"])
def test_methods_of_the_manifold(space: ParameterManifold, method: str) -> None:
    x = point(space)
    assert_there(getattr(space, method)(x, torch.empty_like(x)))
    if method == "retr":
        assert_there(space.transp(x, x, x))


def quadratic(y: Tensor, differentiate: bool) -> tuple[Tensor, Tensor | None]:
    return y.square().mean(), 2 * y / y.shape[-1] if differentiate else None


@pytest.mark.parametrize("path", ["exact", "second_order"])
@pytest.mark.parametrize(("last", "interval"), [(False, None), (False, 4), (True, 3)])
def test_step_of_the_ascent(space: ParameterManifold, path: str, last: bool, interval: int | None) -> None:
    assert_there(*two_steps(space, quadratic, DEVICE, path, last, interval))


@pytest.mark.parametrize(("last", "interval"), [(False, None), (False, 4), (True, 3)])
def test_step_with_a_backward_pass(
    model: DigitsViT, space: ParameterManifold, last: bool, interval: int | None
) -> None:
    images = torch.empty(4, 8, 8, device=BACKWARD_DEVICE)
    labels = torch.empty(4, dtype=torch.long, device=BACKWARD_DEVICE)

    def evaluate(y: Tensor, differentiate: bool) -> tuple[Tensor, Tensor | None]:
        y = y.detach().requires_grad_(differentiate)
        value = cross_entropy(at_parameters(model, space.unpack(y), lambda m: m(images)), labels)
        return value.detach(), torch.autograd.grad(value, y)[0] if differentiate else None

    state = two_steps(space, evaluate, BACKWARD_DEVICE, "exact", last, interval)
    assert_there(*state, device=BACKWARD_DEVICE)


def two_steps(
    space: ParameterManifold, evaluate: Evaluate, device: str, path: str, last: bool, interval: int | None
) -> tuple[Tensor, ...]:
    tangent = space.section().at(point(space, device), balanced=True)
    value, slope = evaluate(tangent.x, True)
    assert slope is not None
    gradient = tangent.gradient(tangent.pull_gradient(slope))
    state = start(tangent, value.reshape(1), gradient, tangent.origin(), RHO)
    work = Workspace(reuse_points=True)
    state = ascent_step(tangent, evaluate, state, path=path, rho=RHO, first=True, workspace=work)
    state = ascent_step(tangent, evaluate, state, path=path, rho=RHO, last=last, interval=interval, workspace=work)
    return tuple(vars(state).values())


def test_checks_read_their_answer(space: ParameterManifold) -> None:
    """Whether a point is finite and of full rank is known on the host only: one wait, at the border."""
    x = point(space)
    for check in (space.check_point_on_manifold, lambda x: space.pack(space.unpack(x))):
        with pytest.raises(DataDependentOutputException):
            check(x)
