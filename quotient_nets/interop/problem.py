"""A function of tensors as a problem of pymanopt's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pymanopt
import torch
from pymanopt.manifolds.manifold import Manifold
from torch import Tensor

from quotient_nets.interop.adapter import to_array, to_tensor


def pymanopt_problem(function: Callable[..., Tensor], manifold: Manifold) -> pymanopt.Problem:
    """Problem whose cost, gradient and Hessian-vector product are those of a torch function, by autograd.

    Args:
        function: From a point, a float64 tensor, to one number. On a product manifold, from as many tensors as it has
            factors. For a quotient, it has to be constant on orbits.
        manifold: From :func:`as_pymanopt`, or a ``Product`` of such.

    Returns:
        A problem for any optimizer of pymanopt. A Hessian-vector product costs some four evaluations, and pymanopt asks
        for the gradient again with each.

    Raises:
        ValueError: When evaluated: the function returned no number that depends on its arguments, or a gradient is
            asked for where the cost is not finite. Elsewhere a NaN counts as infinite, so that the step is refused.
    """
    as_function = pymanopt.function.numpy(manifold)  # the torch backend fails where a gradient is constant
    single = manifold.point_layout == 1
    options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}

    def evaluate(arrays: Sequence[np.ndarray]) -> tuple[list[Tensor], Tensor]:
        points = [to_tensor(array).requires_grad_() for array in arrays]
        with torch.enable_grad():
            value = function(*points)
        if not (isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad):
            raise ValueError(
                "expected `function` to return a tensor of one element, computed from its arguments by torch and not "
                f"detached; got {value!r}"
            )
        return points, value.sum()

    def unpacked(gradients: Sequence[Tensor]) -> Any:
        arrays = [to_array(gradient) for gradient in gradients]
        return arrays[0] if single else arrays

    def cost(*arrays: np.ndarray) -> float:
        value = evaluate(arrays)[1].item()
        # pymanopt's line searches accept a NaN as a decrease. It is a step out of the domain, to be made shorter.
        return math.inf if math.isnan(value) else value

    def gradient(*arrays: np.ndarray) -> Any:
        points, value = evaluate(arrays)
        if not value.isfinite():
            raise ValueError(f"expected a finite cost where the gradient is taken, got {value.item()}")
        return unpacked(torch.autograd.grad(value, points, **options))

    def hessian(*arrays: np.ndarray) -> Any:
        half = len(arrays) // 2
        points, value = evaluate(arrays[:half])
        slopes = torch.autograd.grad(value, points, create_graph=True, **options)
        pairs = zip(slopes, map(to_tensor, arrays[half:]), strict=True)
        along = [(slope * vector).sum() for slope, vector in pairs if slope.requires_grad]
        if not along:
            return unpacked([torch.zeros_like(point) for point in points])
        return unpacked(torch.autograd.grad(sum(along, torch.zeros(())), points, **options))

    return pymanopt.Problem(
        manifold,
        as_function(cost),
        euclidean_gradient=as_function(gradient),
        euclidean_hessian=as_function(hessian),
    )
