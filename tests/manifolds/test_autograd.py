"""Every operation can be differentiated twice, in every argument, wherever the manifold is smooth."""

from functools import partial

import geoopt
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

from quotient_nets.manifolds import AdaptiveEuclidean, InvariantFixedRank
from tests.cases import (
    ADAPTIVE_OPERATIONS,
    FIXED_RANK_OPERATIONS,
    Operation,
    draw,
    each_operation,
    each_operation_in_closed_form,
)

SPECTRA = {"distinct": [2.0, 0.7], "repeated": [1.0, 1.0], "single": [1.3]}
MANIFOLD = InvariantFixedRank(3, 2)
PATHS = [op for op in FIXED_RANK_OPERATIONS if op.gives == "x"]


def point(spectrum: list[float]) -> Tensor:
    """Point with these singular values, not balanced."""
    s = torch.tensor(spectrum, dtype=torch.float64)
    r = len(spectrum)
    q = [torch.linalg.qr(torch.randn(rows, r, dtype=torch.float64))[0] for rows in (3, 2)]
    return MANIFOLD.action(MANIFOLD.pack_point(q[0] * s, q[1]), MANIFOLD.random_element(r, condition=3.0))


def arguments(op: Operation, spectrum: str) -> list[Tensor]:
    roles = draw(MANIFOLD, (), (5, len(SPECTRA[spectrum])))
    roles |= {"x": point(SPECTRA[spectrum]), "y": point(SPECTRA[spectrum])}
    roles |= {role: 0.3 * roles[role] for role in "uv"}
    return [roles[role].requires_grad_() for role in op.takes]


@pytest.mark.parametrize("op", FIXED_RANK_OPERATIONS, ids=lambda op: op.method)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_two_derivatives_are_right(op: Operation, spectrum: str) -> None:
    inputs = arguments(op, spectrum)
    assert gradcheck(op.function(MANIFOLD), inputs)
    assert gradgradcheck(op.function(MANIFOLD), inputs)


@pytest.mark.parametrize("op", PATHS, ids=lambda op: op.method)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_two_derivatives_are_right_at_the_zero_vector(op: Operation, spectrum: str) -> None:
    x, u = arguments(op, spectrum)
    inputs = [x, torch.zeros_like(u).requires_grad_()]
    assert gradcheck(op.function(MANIFOLD), inputs)
    assert gradgradcheck(op.function(MANIFOLD), inputs)


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_two_derivatives_of_the_taylor_recurrence_are_right(spectrum: str) -> None:
    inputs = arguments(Operation("expmap", "xu", "x"), spectrum)
    radius = 1.1 * MANIFOLD.norm(*inputs).detach().item()
    assert gradcheck(partial(MANIFOLD.expmap, radius=radius), inputs)
    assert gradgradcheck(partial(MANIFOLD.expmap, radius=radius), inputs)


@each_operation
def test_two_derivatives_are_right_on_every_manifold(
    manifold: geoopt.Manifold, shape: tuple[int, ...], op: Operation
) -> None:
    roles = draw(manifold, (2,), shape)
    inputs = [roles[role].requires_grad_() for role in op.takes]
    assert gradcheck(op.function(manifold), inputs, fast_mode=True)
    assert gradgradcheck(op.function(manifold), inputs, fast_mode=True)


@each_operation
def test_derivatives_at_the_zero_vector_are_finite(
    manifold: geoopt.Manifold, shape: tuple[int, ...], op: Operation
) -> None:
    roles = draw(manifold, (2,), shape)
    roles |= {role: torch.zeros_like(roles[role]) for role in "uvwef"}
    inputs = [roles[role].requires_grad_() for role in op.takes]
    total = op.function(manifold)(*inputs).sum()
    for gradient in torch.autograd.grad(total, inputs, materialize_grads=True):
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("op", ADAPTIVE_OPERATIONS, ids=lambda op: op.method)
def test_derivatives_at_zero_weights_are_finite(op: Operation) -> None:
    roles = draw(AdaptiveEuclidean(), (2,), (5,))
    roles["x"][:, 1:3] = roles["y"][:, 1:3] = 0
    inputs = [roles[role].requires_grad_() for role in op.takes]
    total = op.function(AdaptiveEuclidean())(*inputs).sum()
    for gradient in torch.autograd.grad(total, inputs, materialize_grads=True):
        assert bool(gradient.isfinite().all())


@each_operation
def test_forward_derivative_agrees_with_backward(
    manifold: geoopt.Manifold, shape: tuple[int, ...], op: Operation
) -> None:
    roles, along = draw(manifold, (2,), shape), draw(manifold, (2,), shape)
    function = op.function(manifold)
    inputs, directions = (tuple(of[role] for role in op.takes) for of in (roles, along))
    out, forward = torch.func.jvp(function, inputs, directions)
    weights = torch.randn_like(out)
    _, pull = torch.func.vjp(function, *inputs)
    backward = sum((p * d).sum() for p, d in zip(pull(weights), directions, strict=True))
    assert_close((weights * forward).sum(), backward, rtol=1e-10, atol=1e-10)


@each_operation_in_closed_form
def test_vmap_equals_the_batch(manifold: geoopt.Manifold, shape: tuple[int, ...], op: Operation) -> None:
    roles = draw(manifold, (4,), shape)
    inputs = [roles[role] for role in op.takes]
    function = op.function(manifold)
    assert_close(torch.vmap(function)(*inputs), function(*inputs), rtol=1e-12, atol=1e-12)


@each_operation_in_closed_form
def test_derivatives_of_each_example_by_vmap(manifold: geoopt.Manifold, shape: tuple[int, ...], op: Operation) -> None:
    roles = draw(manifold, (3,), shape)
    inputs = [roles[role] for role in op.takes]
    derivative = torch.func.grad(lambda *a: op.function(manifold)(*a).sum())
    assert_close(torch.vmap(derivative)(*inputs), derivative(*inputs), rtol=1e-10, atol=1e-10)
    of_the_batch = torch.func.grad(lambda *a: torch.vmap(op.function(manifold))(*a).sum())
    assert_close(of_the_batch(*inputs), derivative(*inputs), rtol=1e-10, atol=1e-10)


@each_operation_in_closed_form
def test_compiles_without_breaking_the_graph(manifold: geoopt.Manifold, shape: tuple[int, ...], op: Operation) -> None:
    roles = draw(manifold, (2,), shape)
    inputs = [roles[role].requires_grad_() for role in op.takes]
    torch.compiler.reset()
    compiled = torch.compile(op.function(manifold), fullgraph=True, backend="eager")
    actual, expected = compiled(*inputs), op.function(manifold)(*inputs)
    assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    totals = actual.sum(), expected.sum()
    assert_close(*(torch.autograd.grad(t, inputs, materialize_grads=True) for t in totals))


def test_works_in_a_module_called_with_other_parameters() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = geoopt.ManifoldParameter(MANIFOLD.random(5, 2), manifold=MANIFOLD)

        def forward(self, u: Tensor) -> Tensor:
            return MANIFOLD.product(MANIFOLD.expmap(self.x, u))

    net, x, u = Net(), torch.randn(4, 5, 2), torch.randn(5, 2)
    called = torch.vmap(lambda x: torch.func.functional_call(net, {"x": x}, (u,)))(x)
    assert_close(called, MANIFOLD.product(MANIFOLD.expmap(x, u)))
