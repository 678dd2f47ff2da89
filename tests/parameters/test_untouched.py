"""The user's model is bit for bit as it was after every call, also where an exception passes through."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quotient_nets import model_sharpness, parameter_manifold
from tests.models import WIDTH, encoder_layer, generic, tokens


class Busy(nn.Module):
    """Batch norm, dropout, a counter that the forward pass writes to, a cache it puts in another buffer's place."""

    def __init__(self):
        super().__init__()
        self.encoder = encoder_layer(dropout=0.5)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(WIDTH, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("last", torch.zeros(2, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.norm(self.encoder(x).mean(dim=1))
        self.last = h.detach()
        return self.frozen(self.head(self.dropout(h)))


def busy() -> Busy:
    model = generic(Busy())
    model.norm.running_mean.normal_()
    model.norm.running_var.uniform_(0.5, 2)
    model.train()
    model.encoder.eval()
    model.encoder.dropout1.train()
    model.head.weight.grad = torch.randn_like(model.head.weight)
    model.head.register_forward_hook(lambda *_: None)
    model.register_forward_pre_hook(lambda *_: None)
    model.encoder.linear1.register_full_backward_hook(lambda *_: None)
    return model


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything of a model that a careless caller changes."""
    state: dict[str, Any] = {"random": torch.get_rng_state().clone(), "grad mode": torch.is_grad_enabled()}
    for name, p in model.named_parameters():
        state |= {f"{name}": p.detach().clone(), f"{name} object": id(p), f"{name} memory": p.data_ptr()}
        state |= {f"{name} trains": p.requires_grad, f"{name} version": p._version, f"{name} class": type(p)}
        state[f"{name} grad"] = None if p.grad is None else p.grad.clone()
    for name, buffer in model.named_buffers():
        state |= {f"buffer {name}": buffer.clone(), f"buffer {name} object": id(buffer)}
    for name, module in model.named_modules():
        hooks = {key: tuple(value) for key, value in vars(module).items() if key.endswith("_hooks") and value}
        state |= {f"mode {name}": module.training, f"hooks {name}": hooks, f"names {name}": list(vars(module))}
    return state


def assert_unchanged(model: nn.Module, before: dict[str, Any]) -> None:
    after = snapshot(model)
    assert after.keys() == before.keys()
    for name, value in before.items():
        same = torch.equal(after[name], value) if isinstance(value, Tensor) else after[name] == value
        assert same, f"{name} has changed"


def loss(model: Any, batch: Tensor) -> Tensor:
    torch.rand(1)  # a loss may draw numbers, as long as its value does not depend on them
    return model(batch).square().mean()


X = torch.linspace(-1, 2, 2 * 3 * WIDTH, dtype=torch.float64).view(2, 3, WIDTH)

CALLS: dict[str, Callable[[nn.Module], Any]] = {
    "parameter_manifold": parameter_manifold,
    "frozen parameters too": lambda model: parameter_manifold(model, frozen=True),
    "pack": lambda model: parameter_manifold(model).pack(model).zero_(),
    "check": lambda model: parameter_manifold(model).check(model, X),
    "sharpness": lambda model: model_sharpness(model, loss, [X, 2 * X], rho=0.1, steps=3, restarts=2),
    "sharpness on plain paths": lambda model: model_sharpness(
        model, loss, [X], rho=[0.1, 0.2], steps=2, path="second_order", translations=False, check=False
    ),
    "sharpness with submodules": lambda model: model_sharpness(
        model, lambda m, b: m.head(m.encoder(b)).square().mean(), [X], rho=0.1, steps=2
    ),
    "sharpness at another point": lambda model: model_sharpness(
        model, loss, [X], rho=0.1, steps=2, x=2 * parameter_manifold(model).pack(model)
    ),
    "sharpness of frozen parameters": lambda model: model_sharpness(
        model, loss, [X], rho=0.1, steps=2, space=parameter_manifold(model, frozen=True)
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_model_is_as_it_was(call: Callable[[nn.Module], Any]) -> None:
    model = busy()
    before = snapshot(model)
    call(model)
    assert_unchanged(model, before)


def test_call_at_a_point_keeps_parameters_buffers_and_modes() -> None:
    """It runs in the model's own mode, so dropout draws; the rest stays."""
    model = busy().eval()
    space = parameter_manifold(model)
    x = space.pack(model)
    before = snapshot(model)
    space.call(model, x, X)
    assert_unchanged(model, before)


class Failure(Exception):
    pass


@pytest.mark.parametrize("after", [0, 1, 2, 3, 6, 9, 14])
@pytest.mark.parametrize("kind", [Failure, KeyboardInterrupt, RuntimeError])
def test_model_is_as_it_was_after_an_exception_inside_the_loss(after: int, kind: type[BaseException]) -> None:
    model = busy()
    before = snapshot(model)
    calls = 0

    def failing(m: Any, batch: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        value = loss(m, batch)
        if calls > after:
            raise kind("in the loss")
        return value

    with pytest.raises(kind, match="in the loss"):
        model_sharpness(model, failing, [X], rho=0.1, steps=12)
    assert calls > after
    assert_unchanged(model, before)


def test_model_is_as_it_was_after_an_exception_inside_its_forward_pass() -> None:
    model = busy()
    armed = False

    def hook(*_: Any) -> None:
        if armed:
            raise Failure("in the model")

    model.head.register_forward_hook(hook)
    space = parameter_manifold(model)
    before = snapshot(model)
    armed = True
    for call in (
        lambda: model_sharpness(model, loss, [X], rho=0.1),
        lambda: space.check(model, X),
        lambda: space.call(model, space.pack(model), X),
    ):
        torch.set_rng_state(before["random"])
        with pytest.raises(Failure):
            call()
    torch.set_rng_state(before["random"])
    assert_unchanged(model, before)


def test_model_is_as_it_was_after_an_exception_in_progress_and_in_the_batches() -> None:
    model = busy()
    before = snapshot(model)

    def progress(done: int, total: int) -> None:
        if done > 1:
            raise Failure("while reporting")

    def batches():
        yield X
        raise Failure("while loading")

    with pytest.raises(Failure, match="reporting"):
        model_sharpness(model, loss, [X], rho=0.1, progress=progress)
    assert_unchanged(model, before)
    with pytest.raises(Failure, match="loading"):
        model_sharpness(model, loss, batches(), rho=0.1, steps=1)
    assert_unchanged(model, before)


def test_model_is_as_it_was_after_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    from quotient_nets.architectures import registry
    from quotient_nets.architectures.torch_attention import multihead_attention

    def swapped(prefix: str, module: nn.Module):
        a, b = multihead_attention(prefix, module)
        return (
            type(a)(prefix, "query_key", a.g, b.g),
            type(b)(prefix, "value_output", a.h, b.h),
        )

    monkeypatch.setitem(registry._DECLARATIONS, "MultiheadAttention", swapped)
    model = busy()
    before = snapshot(model)
    with pytest.raises(ValueError, match="layout does not fit"):
        model_sharpness(model, loss, [X], rho=0.1)
    assert_unchanged(model, before)


def test_evaluation_mode_is_on_inside() -> None:
    model = busy()
    modes = set()

    def watching(m: Any, batch: Tensor) -> Tensor:
        modes.update((m.training, m.norm.training, m.encoder.dropout1.training))
        return loss(m, batch)

    model_sharpness(model, watching, [X], rho=0.1, steps=1)
    assert modes == {False}
    assert model.training


def test_works_where_gradients_are_switched_off() -> None:
    model = busy()
    expected = model_sharpness(model, loss, [X], rho=0.1, steps=2).value
    with torch.no_grad():
        assert model_sharpness(model, loss, [X], rho=0.1, steps=2).value == expected
        assert not torch.is_grad_enabled()


def test_batches_are_left_alone() -> None:
    batch = tokens()
    before = batch.clone()
    model_sharpness(busy(), loss, [batch], rho=0.1, steps=2)
    assert torch.equal(batch, before)
    assert not batch.requires_grad
