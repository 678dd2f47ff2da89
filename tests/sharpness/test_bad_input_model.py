"""What cannot be measured is refused with a reason, and the model is as it was."""

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

from quotient_nets import model_sharpness, parameter_manifold
from tests.models import MLP, WIDTH, Attention, Stack, generic, tokens


def mse(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@pytest.fixture
def model() -> Iterator[Stack]:
    model = generic(Stack()).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    yield model
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


CHECKS = pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])

X = torch.linspace(-1, 2, 2 * 5 * WIDTH, dtype=torch.float64).view(2, 5, WIDTH)


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rho",
    [0, 0.0, -0.1, math.nan, math.inf, True, "0.1", None, (), [0.1, -1.0], [0.1, "x"], 1j, torch.tensor(-1.0)],
    ids=str,
)
def test_radii_that_are_none(model, rho) -> None:
    with pytest.raises(ValueError, match=r"radius rho( > 0, got|, got an empty sequence)"):
        model_sharpness(model, mse, [X], rho=rho)


@pytest.mark.parametrize("name", ["steps", "restarts"])
@pytest.mark.parametrize("number", [0, -1, 2.5, True, "3", None], ids=str)
def test_numbers_of_steps_that_are_none(model, name: str, number) -> None:
    with pytest.raises(ValueError, match=rf"positive integer {name}, got {number!r}"):
        model_sharpness(model, mse, [X], rho=0.1, **{name: number})


@pytest.mark.parametrize("path", ["geodesic", "", None, "at"])
def test_paths_that_do_not_exist(model, path) -> None:
    with pytest.raises(ValueError, match=r"a path among exact, second_order, expmap, retr, got"):
        model_sharpness(model, mse, [X], rho=0.1, path=path)


# -- data ------------------------------------------------------------------------------------------------------------


def test_no_batches(model) -> None:
    exhausted = iter([X])
    next(exhausted)
    for batches in ([], exhausted, DataLoader(TensorDataset(X[:0]))):
        with pytest.raises(ValueError, match=r"at least one batch, got none.*generator can be used only once"):
            model_sharpness(model, mse, batches, rho=0.1)


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"sampler": SubsetRandomSampler(range(2))},
        {"sampler": WeightedRandomSampler([0.5, 0.5], 2)},
    ],
    ids=lambda options: str(next(iter(options.values()))).split(" ")[0],
)
def test_loaders_that_shuffle(model, options) -> None:
    loader = DataLoader(TensorDataset(X), **options)
    with pytest.raises(ValueError, match=r"fixed order; this DataLoader shuffles.*shuffle=False"):
        model_sharpness(model, lambda m, b: mse(m, b[0]), loader, rho=0.1)


@CHECKS
def test_inputs_that_are_not_finite(model, check: bool) -> None:
    bad = X.clone()
    bad[0, 0, 0] = math.nan
    with pytest.raises(ValueError, match=r"finite loss on batch 0, got nan"):
        model_sharpness(model, mse, [bad], rho=0.1, check=check)
    with pytest.raises(ValueError, match=r"finite loss on batch 1, got nan"):
        model_sharpness(model, mse, [X, bad], rho=0.1, steps=1, check=check)


@CHECKS
def test_mean_over_an_empty_batch(model, check: bool) -> None:
    with pytest.raises(ValueError, match=r"finite loss on batch 0, got nan"):
        model_sharpness(model, mse, [X[:0]], rho=0.1, check=check)


# -- losses ----------------------------------------------------------------------------------------------------------


@CHECKS
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_loss_that_is_not_finite(model, value: float, check: bool) -> None:
    with pytest.raises(ValueError, match=rf"finite loss on batch 0, got {value}\. Check the inputs"):
        model_sharpness(model, lambda m, b: mse(m, b) * 0 + value, [X], rho=0.1, check=check)


@CHECKS
@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda m, b: m(b).square().mean(dim=1), r"shape \(2,\)"),
        (lambda m, b: mse(m, b)[None], r"shape \(1,\)"),
        (lambda m, b: mse(m, b).item(), "float"),
        (lambda m, b: None, "NoneType"),
        (lambda m, b: (mse(m, b), m(b)), "tuple"),
        (lambda m, b: {"loss": mse(m, b)}, "dict"),
    ],
    ids=["vector", "vector of one", "float", "None", "tuple", "dict"],
)
def test_loss_that_is_no_scalar_tensor(model, loss, got: str, check: bool) -> None:
    with pytest.raises(ValueError, match=rf"`loss\(model, batch\)` to return a scalar tensor, got {got}"):
        model_sharpness(model, loss, [X], rho=0.1, check=check)


@CHECKS
@pytest.mark.parametrize(
    "loss",
    [
        lambda m, b: mse(m, b).detach(),
        lambda m, b: b.square().mean(),
        lambda m, b: torch.ones(()),
        lambda m, b: m(b).argmax(-1).double().mean(),
    ],
    ids=["detached", "of the batch", "constant", "accuracy"],
)
def test_loss_that_does_not_depend_on_the_parameters(model, loss, check: bool) -> None:
    with pytest.raises(ValueError, match=r"depend differentiably on the parameters of the model it is given"):
        model_sharpness(model, loss, [X], rho=0.1, check=check)


@CHECKS
def test_loss_that_calls_a_copy_of_the_model(model, check: bool) -> None:
    other = copy.deepcopy(model).eval()
    with pytest.raises(ValueError, match=r"depend differentiably on the parameters.*not a copy"):
        model_sharpness(model, lambda _, b: mse(other, b), [X], rho=0.1, check=check)


def test_loss_that_calls_the_model_by_its_own_name_is_the_same_loss(model) -> None:
    own = model_sharpness(model, lambda _, b: mse(model, b), [X], rho=0.1, steps=3)
    assert own.value == model_sharpness(model, mse, [X], rho=0.1, steps=3).value > 0


@CHECKS
def test_loss_that_draws_dropout(model, check: bool) -> None:
    def noisy(m: Any, b: Tensor) -> Tensor:
        return mse(m, functional.dropout(b, 0.5, training=True))

    with pytest.raises(ValueError, match=r"deterministic loss; two evaluations on batch 0 gave .* and .*dropout"):
        model_sharpness(model, noisy, [X], rho=0.1, check=check)


@CHECKS
def test_loss_that_shuffles_its_batch(model, check: bool) -> None:
    targets = torch.arange(2.0, dtype=torch.float64)

    def shuffling(m: Any, b: Tensor) -> Tensor:
        return (m(b[torch.randperm(2)])[:, 0] - targets).square().mean() + torch.rand(1).double().squeeze()

    with pytest.raises(ValueError, match=r"deterministic loss; .*shuffling inside `loss`"):
        model_sharpness(model, shuffling, [X], rho=0.1, check=check)


@CHECKS
def test_network_that_ignores_evaluation_mode(check: bool) -> None:
    class Restless(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Attention(batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return functional.dropout(self.attention(x, x, x), 0.5, training=True)

    with pytest.raises(ValueError, match="deterministic loss"):
        model_sharpness(generic(Restless()), mse, [X], rho=0.1, check=check)


def test_loss_that_ends_outside_its_domain(model) -> None:
    """A logarithm of something that reaches zero inside the ball."""
    base = mse(model, X).detach()
    with pytest.raises(ValueError, match=r"finite loss in the whole ball.*smaller radius than rho=3"):
        model_sharpness(model, lambda m, b: 1 - (2 - mse(m, b) / base).log(), [X], rho=3.0)


@pytest.mark.parametrize("error", [KeyError("labels"), ZeroDivisionError("by zero"), RuntimeError("a shape error")])
def test_errors_of_the_loss_pass_through(model, error: Exception) -> None:
    def failing(m: Any, b: Tensor) -> Tensor:
        raise error

    with pytest.raises(type(error)) as caught:
        model_sharpness(model, failing, [X], rho=0.1)
    assert caught.value is error


# -- points ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (3, 5)], ids=str)
def test_points_of_another_shape(model, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"one point of the parameter manifold, shape \(\d+,\)"):
        model_sharpness(model, mse, [X], rho=0.1, x=torch.ones(shape, dtype=torch.float64))


def test_batches_of_points(model) -> None:
    x = parameter_manifold(model).pack(model)
    with pytest.raises(ValueError, match=r"one point of the parameter manifold.*\(2, \d+\)"):
        model_sharpness(model, mse, [X], rho=0.1, x=torch.stack([x, x]))


def test_point_that_is_not_finite(model) -> None:
    x = parameter_manifold(model).pack(model)
    x[7] = math.nan
    with pytest.raises(ValueError, match="NaN or Inf"):
        model_sharpness(model, mse, [X], rho=0.1, x=x)


def test_weights_that_are_not_finite() -> None:
    model = generic(Stack())
    with torch.no_grad():
        model.head.weight[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"parameter head\.weight holds NaN or Inf"):
        model_sharpness(model, mse, [X], rho=0.1)


def test_space_of_another_model(model) -> None:
    with pytest.raises(ValueError, match=r"expected parameter 0\.weight .*no such parameter"):
        model_sharpness(model, mse, [X], rho=0.1, space=parameter_manifold(MLP()))


def test_space_of_another_model_at_a_point_of_it(model) -> None:
    """With a point given, nothing is packed; the names must be those of the model all the same."""
    other = generic(MLP())
    space = parameter_manifold(other)
    with pytest.raises(ValueError, match=r"0\.weight"):
        model_sharpness(model, mse, [X], rho=0.1, space=space, x=space.pack(other))


def test_model_without_parameters() -> None:
    with pytest.raises(ValueError, match="trainable floating-point parameters, got none"):
        model_sharpness(nn.ReLU(), mse, [tokens()], rho=0.1)


def test_model_on_the_meta_device() -> None:
    with pytest.raises(ValueError, match="meta device"):
        model_sharpness(Stack().to("meta"), mse, [tokens()], rho=0.1)


@pytest.mark.parametrize("batches", [torch.randn(3, 2), (torch.randn(3, 2), torch.zeros(3)), {"x": torch.randn(3, 2)}])
def test_one_batch_in_place_of_many(batches: object) -> None:
    with pytest.raises(ValueError, match=r"\[batch\]"):
        model_sharpness(nn.Linear(2, 1), lambda m, batch: m(batch).mean(), batches, rho=0.1)
