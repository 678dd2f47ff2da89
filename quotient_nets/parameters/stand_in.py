r"""A model at other parameters, without touching the model.

Imports torch; knows modules only by their public interface.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


class StandIn:
    """Callable stand-in for ``model`` with other parameter values.

    Calling it, calling one of its submodules, or calling one of its methods runs the model's code at the given
    parameters. Buffers are copies: what a forward pass writes into them is lost. Other attributes are those of the model.

    Args:
        model: The model, which stays as it is.
        parameters: Values by name, as in ``named_parameters()``; parameters that are not named keep the model's value.
        buffers: Values of buffers by name; copies of the model's by default.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None = None):
        if buffers is None:
            buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        self._model, self._parameters, self._buffers = model, dict(parameters), dict(buffers)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass."""
        return functional_call(self._model, (self._parameters, self._buffers), args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """Submodules and methods of the model at these parameters; other attributes as they are."""
        value = getattr(self._model, name)
        if isinstance(value, nn.Module):
            return StandIn(value, _below(name, self._parameters), _below(name, self._buffers))
        if name in self._parameters or name in self._buffers:
            return (self._parameters | self._buffers)[name]
        if callable(value) and getattr(value, "__self__", None) is self._model:
            method = _Method(self._model, name)
            parameters = {f"model.{key}": tensor for key, tensor in self._parameters.items()}
            buffers = {f"model.{key}": tensor for key, tensor in self._buffers.items()}
            return StandIn(method, parameters, buffers)
        return value


class _Method(nn.Module):
    """A method of a model as the forward pass of a module, so that it can be called at other parameters."""

    def __init__(self, model: nn.Module, name: str):
        super().__init__()
        self.model, self.name = model, name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.model, self.name)(*args, **kwargs)


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = f"{prefix}."
    return {name[len(start) :]: tensor for name, tensor in tensors.items() if name.startswith(start)}


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
