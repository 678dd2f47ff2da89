r"""A model at other parameters, for the time of one call, and as it was after it.

Imports torch; knows modules only by their public interface.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


def at_parameters(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    function: Callable[..., Any],
    *args: Any,
    buffers: Mapping[str, Tensor] | None = None,
    **kwargs: Any,
) -> Any:
    """``function(model, *args, **kwargs)`` while the parameters of ``model`` have other values.

    The function is handed the model itself, so its submodules, methods, properties and tied names all see the values,
    and derivatives flow to them. Whatever the call does to buffers is lost: they are copies. The model has its own
    tensors back when the function returns or raises.

    Activation checkpoints call the model again in the backward pass: differentiate inside ``function`` where there are
    any.

    Args:
        model: Any module.
        parameters: Values by name, as in ``named_parameters()``; parameters that are not named keep the model's value.
        function: Called once.
        args: Further arguments of the function; likewise ``kwargs``.
        buffers: Values of buffers by name; copies of the model's by default.
        kwargs: Keyword arguments of the function.
    """
    if buffers is None:
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    values = {f"model.{name}": tensor for name, tensor in {**parameters, **buffers}.items()}
    return functional_call(_Call(model, function), values, args, kwargs)


class _Call(nn.Module):
    """A function of a model as a module that holds the model."""

    def __init__(self, model: nn.Module, function: Callable[..., Any]):
        super().__init__()
        self.model = model
        self._function = (function,)  # in a tuple, since a function that is a module would become a submodule

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._function[0](self.model, *args, **kwargs)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; the modes of all modules and torch's random state are put back on the way out."""
    modes = [(module, module.training) for module in model.modules()]
    devices = {parameter.device for parameter in model.parameters()}
    with torch.random.fork_rng(devices=[d for d in devices if d.type not in ("cpu", "meta")]):
        try:
            model.eval()
            yield
        finally:
            for module, mode in modes:
                module.training = mode
