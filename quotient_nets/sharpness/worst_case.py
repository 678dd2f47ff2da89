r"""Worst-case sharpness on any ``geoopt.Manifold``.

.. math:: S(x) = \max_{|u|_x \le \rho} L(\gamma_u(1)) - L(x)

over tangent vectors ``u`` at ``x``, with :math:`\gamma_u` the path that leaves ``x`` with velocity ``u``. The manifold
is the notion of sharpness: ``geoopt.Euclidean`` gives the classical one, ``AdaptiveEuclidean`` the adaptive one, a
quotient manifold the geodesic one. Knows ``geoopt.Manifold``, no concrete manifold and no network.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec

import geoopt
import torch
from torch import Tensor

from quotient_nets.linalg import at_least_single
from quotient_nets.sharpness.ascent import (
    AscentState,
    Evaluate,
    Workspace,
    ascent_step,
    checkpoints,
    evaluate_along,
    start,
)
from quotient_nets.sharpness.result import Sharpness
from quotient_nets.tangent_space import EmbeddedTangentSpace, TangentSpace, check_point, tangent_space

CONVERGED_GAIN = 0.01  # relative gain over the last quarter of the steps below which a search has converged


def worst_case_sharpness(
    loss: Callable[[Tensor], Tensor],
    manifold: geoopt.Manifold,
    x: Tensor,
    *,
    rho: float,
    steps: int = 20,
    restarts: int = 1,
    path: str = "expmap",
    generator: torch.Generator | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Sharpness:
    r"""Largest increase of ``loss`` on the geodesic ball of radius ``rho`` around ``x``.

    Args:
        loss: Maps points ``(*batch, *point)`` to losses ``(*batch)``, element by element, differentiably.
        manifold: Any geoopt manifold. ``geoopt.Euclidean(ndim)`` needs the ``ndim`` of your points.
        x: Points, ``(*batch, *point)``; each is ascended on its own. Points in half precision are measured, and handed
            to ``loss``, in float32.
        rho: Radius, in units of the manifold's norm.
        steps: Forward and backward passes of each start.
        restarts: Number of starts. The first is at zero, the others at random vectors of norm ``rho``.
        path: Method of the manifold that maps tangent vectors to points: ``"expmap"``, ``"retr"``, ...
        generator: Source of the random starts; a fixed seed by default. Never the global one.
        progress: Called with the number of passes done and their total.

    Returns:
        Value, direction and certificates. The value is a lower bound of the true maximum.

    Raises:
        ValueError: ``rho``, ``steps`` or ``restarts`` is not positive; ``x`` is not on the manifold; ``loss`` returns
            another shape, does not depend on its argument, or is NaN or infinite at a point of the ball; the path does
            not start with the velocity it is given, so that its ball would not be a ball.

    Cost: ``restarts * steps`` forward and backward passes and one forward pass each; geometry is a few products with
    ``x``.
    Source: da Silva et al. (arXiv 2505.05409); Croce and Hein (2020) for the ascent.
    """
    check_settings(rho, steps, restarts)
    x = at_least_single(x.detach())  # in half precision a small step is lost in the rounding of the point
    ok, reason = check_point(manifold, x)
    if not ok:
        raise ValueError(f"`x` is not a point of {type(manifold).__name__}: {reason}")
    space = tangent_space(manifold, x)
    if isinstance(space, EmbeddedTangentSpace):
        space.check_path(path, float(rho))
    evaluate = differentiable_loss(loss, space.batch, manifold)
    return ascend(
        evaluate, space, rho=rho, steps=steps, restarts=restarts, path=path, generator=generator, progress=progress
    )


def check_settings(rho: float, steps: int, restarts: int) -> None:
    """Refuse a radius or a number of steps that no measurement can have.

    Raises:
        ValueError: Names the setting.
    """
    if isinstance(rho, bool) or not isinstance(rho, (int, float)) or not (rho > 0 and math.isfinite(rho)):
        raise ValueError(f"expected a radius rho > 0, got {rho!r}")
    for name, number in {"steps": steps, "restarts": restarts}.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"expected a positive integer {name}, got {number!r}")


def differentiable_loss(loss: Callable[[Tensor], Tensor], batch: torch.Size, manifold: geoopt.Manifold) -> Evaluate:
    """``loss`` with its gradient and its shape checked."""

    def evaluate(y: Tensor, differentiate: bool) -> tuple[Tensor, Tensor | None]:
        with torch.enable_grad():
            y = y.detach().requires_grad_(differentiate)
            value = loss(y)
            if not isinstance(value, Tensor) or value.shape != batch:
                got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(
                    f"expected `loss` to return one value for each point, shape {tuple(batch)}, got {got}. The last "
                    f"ndim={manifold.ndim} axes of a point belong to the manifold; for vectors on flat space take "
                    "`geoopt.Euclidean(1)`."
                )
            if not differentiate:
                return value.detach(), None
            slope = torch.autograd.grad(value.sum(), y, allow_unused=True)[0] if value.requires_grad else None
            if slope is None:
                raise ValueError("expected `loss` to depend differentiably on its argument; it does not (detached?)")
        return value.detach(), slope

    return evaluate


Settings = ParamSpec("Settings")
Search = Callable[Concatenate[Evaluate, TangentSpace, Settings], Sharpness]


def _autocast_for_the_loss_only(search: Search[Settings]) -> Search[Settings]:
    """The caller's autocast is for the loss; rounded tangent vectors would leave the ball."""

    @wraps(search)
    def outside(evaluate: Evaluate, space: TangentSpace, *args: Settings.args, **kwargs: Settings.kwargs) -> Sharpness:
        kind = space.x.device.type
        if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
            return search(evaluate, space, *args, **kwargs)
        inside = torch.autocast(kind, dtype=torch.get_autocast_dtype(kind))(evaluate)
        with torch.autocast(kind, enabled=False):
            return search(inside, space, *args, **kwargs)

    return outside


@_autocast_for_the_loss_only
@torch.no_grad()
def ascend(
    evaluate: Evaluate,
    space: TangentSpace,
    *,
    rho: float,
    steps: int,
    restarts: int = 1,
    path: str,
    generator: torch.Generator | None = None,
    progress: Callable[[int, int], None] | None = None,
    reuse_points: bool = False,
) -> Sharpness:
    """Sharpness by APGD in a prepared tangent space; arguments as for :func:`worst_case_sharpness`.

    With ``reuse_points`` every point that ``evaluate`` sees is written over the last one.

    Raises:
        ValueError: The loss is NaN or infinite at a point of the ball.
    """
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    base, slope = evaluate(space.x, True)
    if not bool(base.isfinite().all()):
        raise ValueError(f"expected a finite loss at `x`, got {base.tolist()}. Check the inputs and the weights.")
    assert slope is not None
    base = base.reshape(space.batch + (1,) * space.ndim)
    # At zero the path is the identity to first order: no derivative of the path, which is NaN there on some manifolds.
    gradient = space.gradient(space.pull_gradient(slope))
    if not bool(space.norm(gradient).isfinite().all()):
        raise ValueError(
            "expected a finite gradient at `x`, got NaN or Inf. Check the loss for roots and logarithms of 0."
        )
    best: tuple[AscentState, Tensor] | None = None
    for restart in range(restarts):
        report = None if progress is None else _offset(progress, restart * steps, restarts * steps)
        found = _run(
            evaluate,
            space,
            base,
            gradient,
            rho,
            steps,
            path,
            restart > 0,
            generator,
            report,
            Workspace(reuse_points=reuse_points),
        )
        best = found if best is None else _better(best, found)
    assert best is not None
    state, history = best
    if bool(state.invalid.any()):
        raise ValueError(
            "expected a finite loss in the whole ball; it or its gradient was NaN or infinite at a point that the "
            "ascent reached. "
            f"Use a smaller radius than rho={rho}, or a wider dtype."
        )
    value = state.best_value - base
    late = history[(3 * steps) // 4].reshape(value.shape)
    first_order = rho * space.norm(gradient) / value
    certificates = space.certificates(state.best) | {
        "relative_norm": (space.norm(state.best) / rho).reshape(space.batch),
        "rejected_steps": state.rejected.reshape(space.batch),
    }
    return Sharpness(
        value=value.reshape(space.batch),
        base_loss=base.reshape(space.batch),
        max_loss=state.best_value.reshape(space.batch),
        direction=space.vector(state.best),
        history=history,
        converged=(value - late <= CONVERGED_GAIN * value).reshape(space.batch),
        first_order_share=first_order.reshape(space.batch),
        certificates=certificates,
        rho=float(rho),
        steps=steps,
        path=path,
    )


def _run(
    evaluate: Evaluate,
    space: TangentSpace,
    base: Tensor,
    gradient: Tensor,
    rho: float,
    steps: int,
    path: str,
    from_random: bool,
    generator: torch.Generator,
    progress: Callable[[int, int], None] | None,
    workspace: Workspace,
) -> tuple[AscentState, Tensor]:
    """One start of the ascent: its last state, and the best increase after each step."""
    c, value = space.origin(), base
    if from_random:
        sphere = rho * space.random(generator)
        value, slope, exists = evaluate_along(space, evaluate, sphere, path, rho)
        c, value = torch.where(exists, sphere, 0.0), torch.where(exists, value, base)
        gradient = torch.where(exists, slope, gradient)
    stationary = space.norm(gradient) == 0
    if bool(stationary.any()):
        gradient = torch.where(stationary, space.random(generator), gradient)
    state = start(space, value, gradient, c, rho)
    history = [(state.best_value - base).reshape(space.batch)]
    intervals = checkpoints(steps)
    for k in range(1, steps + 1):
        state = ascent_step(
            space,
            evaluate,
            state,
            path=path,
            rho=rho,
            first=k == 1,
            last=k == steps,
            interval=intervals.get(k),
            workspace=workspace,
        )
        history.append((state.best_value - base).reshape(space.batch))
        if progress is not None:
            progress(k, steps)
    return state, torch.stack(history)


def _better(a: tuple[AscentState, Tensor], b: tuple[AscentState, Tensor]) -> tuple[AscentState, Tensor]:
    """The better of two starts, point by point; counts and errors of both are kept."""
    second = b[0].best_value > a[0].best_value
    state = AscentState(
        **{
            name: torch.where(second, getattr(b[0], name), old)
            for name, old in vars(a[0]).items()
            if name not in ("rejected", "invalid")
        },
        rejected=a[0].rejected + b[0].rejected,
        invalid=a[0].invalid | b[0].invalid,
    )
    return state, torch.where(second.reshape(a[1].shape[1:]), b[1], a[1])


def _offset(progress: Callable[[int, int], None], done: int, total: int) -> Callable[[int, int], None]:
    return lambda step, _: progress(done + step, total)
