r"""Sharpness of a model on data.

.. math:: S = \sum_B \frac{|B|}{N} \max_{|u| \le \rho} L_B(\gamma_u(1)) - L_B(x)

over batches ``B``, at the canonical representative of the model's parameters.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from typing_extensions import Unpack

from quotient_nets.architectures import parameter_manifold
from quotient_nets.linalg import at_least_single
from quotient_nets.parameters import ParameterManifold, at_parameters, untouched
from quotient_nets.parameters.batches import leaves, map_tensors
from quotient_nets.parameters.invariance import check_invariance
from quotient_nets.parameters.tangent import MODEL_PATHS
from quotient_nets.sharpness.ascent import Evaluate
from quotient_nets.sharpness.result import BatchSharpness, ModelSharpness, Sharpness
from quotient_nets.sharpness.worst_case import ascend, check_settings

Batch = TypeVar("Batch")
WORKING = torch.float32  # models in half precision are evaluated in it
PATHS = (*MODEL_PATHS, "expmap", "retr")
SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
DETERMINISM = 1e-5  # relative difference of two evaluations at one point that float32 kernels may show


class _Settings(TypedDict, total=False):
    """Optional arguments of :func:`model_sharpness`, for its overloads."""

    steps: int
    restarts: int
    space: ParameterManifold | None
    x: Tensor | None
    path: str
    translations: bool
    check: bool
    seed: int
    progress: Callable[[int, int], None] | None


@overload
def model_sharpness(
    model: nn.Module,
    loss: Callable[[Any, Batch], Tensor],
    batches: Iterable[Batch],
    *,
    rho: float,
    **settings: Unpack[_Settings],
) -> ModelSharpness: ...
@overload
def model_sharpness(
    model: nn.Module,
    loss: Callable[[Any, Batch], Tensor],
    batches: Iterable[Batch],
    *,
    rho: Sequence[float],
    **settings: Unpack[_Settings],
) -> tuple[ModelSharpness, ...]: ...
def model_sharpness(
    model: nn.Module,
    loss: Callable[[Any, Batch], Tensor],
    batches: Iterable[Batch],
    *,
    rho: float | Sequence[float],
    steps: int = 20,
    restarts: int = 1,
    space: ParameterManifold | None = None,
    x: Tensor | None = None,
    path: str = "exact",
    translations: bool = True,
    check: bool = True,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> ModelSharpness | tuple[ModelSharpness, ...]:
    """Worst-case sharpness of a model: the mean over batches of the largest increase of each batch's loss.

    With the default ``space`` this is geodesic sharpness: GL(h) of every head's query and key and of its value and
    output is divided out, exact bias translations too, and all other parameters have the adaptive metric. With
    ``space=parameter_manifold(model, attention=AdaptiveEuclidean)`` it is adaptive sharpness.

    Args:
        model: Any module. It is evaluated in evaluation mode and left bit for bit as it was: parameters, buffers,
            modes, hooks, random state.
        loss: ``loss(model, batch)`` -> scalar, the mean over the batch. It is handed the model itself, whose parameters
            have other values for the time of the call; clone those that you keep.
        batches: Batches of any structure; each is used once, and the maximum is taken for each on its own, so their
            size is part of the definition. Sizes are read off the first axis of a batch's first tensor.
        rho: Radius of the ball, in units of the metric; a sequence gives one result for each, over the same batches.
        steps: Forward and backward passes for each batch and start.
        restarts: Number of starts; the first at zero.
        space: Parameter manifold of ``model``.
        x: Point at which to measure, from ``space``; the model's own parameters by default.
        path: ``"exact"`` (geodesic of every quotient block, straight line on the rest), ``"second_order"`` (its Taylor
            polynomial, the paper's definition), ``"expmap"`` (geodesic of the rest too) or ``"retr"`` (straight line).
        translations: Measure where exact translations have set key and value biases to zero, and hold them there.
            False is the paper's definition.
        check: Prove on the loss of the first batch that the symmetries are exact before measuring.
        seed: Of the random starts.
        progress: Called with the number of passes done and their total (0 where ``batches`` has no length).

    Returns:
        Mean, standard error, values and certificates for each batch; a tuple for a sequence of radii.

    Raises:
        ValueError: A setting is out of range; there are no batches, or a loader shuffles them; the loss is not a finite
            scalar, does not depend on the model's parameters, or differs between two evaluations at one point; a weight
            is NaN; a head is rank deficient; a symmetry that ``space`` claims changes the loss.

    Cost: for each batch and radius, ``steps`` forward and backward passes; geometry adds about 2.5 % at ViT-B sizes
    and batch 256 on a CPU, half of it elementwise work that adaptive sharpness has too (``tests/benchmarks``).
    Source: da Silva et al. (arXiv 2505.05409).
    """
    try:
        radii = (rho,) if isinstance(rho, (int, float)) else tuple(rho)
    except TypeError:
        raise ValueError(f"expected a radius rho > 0, got {rho!r}; or a sequence of radii") from None
    if not radii:
        raise ValueError("expected at least one radius rho, got an empty sequence")
    for radius in radii:
        check_settings(radius, steps, restarts)
    if path not in PATHS:
        raise ValueError(f"expected a path among {', '.join(PATHS)}, got {path!r}")
    _refuse_single(batches)
    _refuse_shuffling(batches)
    found: list[list[tuple[Sharpness, int]]] = [[] for _ in radii]
    fingerprint = hashlib.sha256()
    with untouched(model):
        space = parameter_manifold(model) if space is None else space
        point = space.pack(model) if x is None else at_least_single(space.check_point_of(model, x))
        own = space.canonicalize(point, translations=translations)
        at = space.section() if translations else space
        tangent = at.at(own, balanced=True)
        total = len(radii) * restarts * steps * _length(batches)
        done, proof = 0, None
        for index, batch in enumerate(batches):
            _fingerprint(fingerprint, batch)
            evaluate = _evaluation(model, loss, batch, space, own)
            _check_determinism(evaluate, own, index)
            if index == 0 and check and any(block.quotient for block in space.blocks):
                proof = check_invariance(space, model, loss, batch)
            for radius, results in zip(radii, found, strict=True):
                generator = torch.Generator().manual_seed(seed)
                report = None if progress is None else _shifted(progress, done, total)
                result = ascend(
                    evaluate,
                    tangent,
                    rho=float(radius),
                    steps=steps,
                    restarts=restarts,
                    path=path,
                    generator=generator,
                    progress=report,
                    reuse_points=True,
                )
                results.append((result, _size(batch)))
                done += restarts * steps
    if not found[0]:
        raise ValueError(
            "expected at least one batch, got none. A generator can be used only once: pass a list or a loader."
        )
    settings = {
        "path": path,
        "steps": steps,
        "restarts": restarts,
        "translations": translations,
        "seed": seed,
        "blocks": [f"{b.kind}: {b.shape[0]} heads, {b.manifold.name}, rank {b.shape[2]}" for b in space.blocks],
        "block_weights": [block.weight for block in space.blocks] + [space.rest_weight],
        "rest": str(space.rest.name),
        "notes": list(space.notes),
        "not_verifiable": [] if proof is None else list(proof.unverified),
        "parameters": space.layout.size,
        "data": fingerprint.hexdigest(),
    }
    results = tuple(_average(r, float(radius), settings) for r, radius in zip(found, radii, strict=True))
    return results[0] if isinstance(rho, (int, float)) else results


def _refuse_single(batches: Any) -> None:
    bare = isinstance(batches, tuple) and bool(batches) and all(isinstance(part, Tensor) for part in batches)
    if bare or isinstance(batches, (Tensor, Mapping)):
        raise ValueError(
            f"expected an iterable of batches, got a {type(batches).__name__} that looks like one batch. Pass "
            "`[batch]`; batches that are bare tensors go in a list."
        )


def _refuse_shuffling(batches: Any) -> None:
    if isinstance(batches, DataLoader) and isinstance(getattr(batches, "sampler", None), SHUFFLING):
        raise ValueError(
            "expected batches in a fixed order; this DataLoader shuffles, so another run would measure other batches. "
            "Pass `shuffle=False`, or `list(loader)`."
        )


def _evaluation(
    model: nn.Module, loss: Callable[[Any, Any], Tensor], batch: Any, space: ParameterManifold, x: Tensor
) -> Evaluate:
    half = any(entry.dtype.itemsize < WORKING.itemsize for entry in space.entries)
    # In half precision the rise of a loss is lost in the rounding of the loss.
    batch = map_tensors(_widened, batch) if half else batch
    fixed = {name: _widened(p.detach()) for name, p in model.named_parameters()} if half else {}
    buffers = {name: _widened(buffer) for name, buffer in model.named_buffers()}
    joined = torch.empty_like(x)  # written anew by every evaluation

    def evaluate(y: Tensor, differentiate: bool) -> tuple[Tensor, Tensor | None]:
        values = space.unpack(y.detach(), dtype=y.dtype if half else None)

        def value_and_slope(substituted: nn.Module) -> tuple[Tensor, Tensor | None]:
            value = loss(substituted, batch)
            if not isinstance(value, Tensor) or value.shape != ():
                got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"expected `loss(model, batch)` to return a scalar tensor, got {got}. Take the mean.")
            if not differentiate:
                return value.detach(), None
            slopes = value.requires_grad and torch.autograd.grad(value, list(values.values()), allow_unused=True)
            if not slopes or all(slope is None for slope in slopes):
                raise ValueError(
                    "expected the loss to depend differentiably on the parameters of the model it is given; it does "
                    "not. Call the first argument of `loss`, not a copy, and do not detach."
                )
            return value.detach(), space.layout.store(joined, slopes)

        # With gradients also where none is asked for: torch's fast path without them computes another function of
        # padded tokens. The backward pass runs at these parameters too: activation checkpoints call the model in it.
        with torch.enable_grad():
            for value in values.values():
                value.requires_grad_()
            copies = {name: buffer.clone() for name, buffer in buffers.items()}
            return at_parameters(model, fixed | values, value_and_slope, buffers=copies)

    return evaluate


def _widened(tensor: Tensor) -> Tensor:
    return at_least_single(tensor) if tensor.is_floating_point() else tensor


def _check_determinism(evaluate: Evaluate, x: Tensor, index: int) -> None:
    first, second = (float(evaluate(x, False)[0]) for _ in range(2))
    if not (math.isfinite(first) and math.isfinite(second)):
        raise ValueError(
            f"expected a finite loss on batch {index}, got {first}. Check the inputs, the labels and the weights."
        )
    if abs(first - second) > DETERMINISM * max(abs(first), abs(second)):
        raise ValueError(
            f"expected a deterministic loss; two evaluations on batch {index} gave {first:.8g} and {second:.8g}. "
            "Switch off dropout that ignores evaluation mode, augmentation, and shuffling inside `loss`."
        )


def _size(batch: Any) -> int:
    sizes = [leaf.shape[0] for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    return sizes[0] if sizes else 1


def _length(batches: Any) -> int:
    """Number of batches, 0 where they do not say."""
    try:
        return len(batches)
    except TypeError:
        return 0


def _fingerprint(digest: Any, batch: Any) -> None:
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor):
            digest.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(leaf).encode())


def _shifted(progress: Callable[[int, int], None], done: int, total: int) -> Callable[[int, int], None]:
    return lambda step, _: progress(done + step, total)


def _average(results: Sequence[tuple[Sharpness, int]], rho: float, settings: dict[str, Any]) -> ModelSharpness:
    batches = tuple(
        BatchSharpness(
            value=float(s.value),
            base_loss=float(s.base_loss),
            max_loss=float(s.max_loss),
            size=size,
            converged=bool(s.converged),
            first_order_share=float(s.first_order_share),
            history=tuple(float(value) for value in s.history),
            certificates={name: float(value) for name, value in s.certificates.items()},
        )
        for s, size in results
    )
    return ModelSharpness(rho=rho, batches=batches, settings=settings)
