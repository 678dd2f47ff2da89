r"""Ascent of a function on a ball of tangent vectors: APGD in a Riemannian metric.

The function is :math:`c \mapsto L(\gamma_c(1)) - L(x)`, where :math:`\gamma_c` leaves ``x`` with velocity ``c``. One
forward and one backward pass per step; the metric is that of the tangent space at ``x``, so directions are steepest and
the projection on the ball is a scaling. A whole batch of points is ascended at once, each with its own step size.

Source: Croce and Hein (2020), with the corrections listed in ``docs/concepts/sharpness.md``. Knows tangent spaces only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quotient_nets.tangent_space import TangentSpace

MOMENTUM = 0.75
MIN_IMPROVING_SHARE = 0.75  # of the steps between two checkpoints; fewer halve the step size

Evaluate = Callable[[Tensor, bool], tuple[Tensor, Tensor | None]]
"""Loss at a batch of points, and its Euclidean gradient there if the flag asks for one."""


@dataclass(frozen=True)
class AscentState:
    """What one step hands to the next; scalars for each point have shape ``(*batch, 1, ..., 1)``.

    Attributes:
        c: Iterate, in coordinates of the tangent space.
        previous: Iterate before it.
        value: Loss at ``c``.
        gradient: Riemannian gradient at ``c``.
        best: Best iterate so far.
        best_value: Loss there.
        best_gradient: Gradient there.
        step: Step size.
        improvements: Steps since the last checkpoint that increased the loss.
        checkpoint_step: Step size at the last checkpoint.
        checkpoint_value: Best loss at the last checkpoint.
        rejected: Steps that left the domain of the path.
        invalid: Whether the loss or its gradient was NaN or infinite at a valid point.
    """

    c: Tensor
    previous: Tensor
    value: Tensor
    gradient: Tensor
    best: Tensor
    best_value: Tensor
    best_gradient: Tensor
    step: Tensor
    improvements: Tensor
    checkpoint_step: Tensor
    checkpoint_value: Tensor
    rejected: Tensor
    invalid: Tensor


def checkpoints(steps: int) -> dict[int, int]:
    """Steps after which the step size is reconsidered, each with the number of steps since the one before."""
    found, at = {}, 0
    interval, least, shrink = (max(int(share * steps), 1) for share in (0.22, 0.06, 0.03))
    while at + interval <= steps:
        at += interval
        found[at] = interval
        interval = max(interval - shrink, least)
    return found


def to_ball(space: TangentSpace, c: Tensor, rho: float) -> Tensor:
    """Nearest vector of norm at most ``rho``."""
    return c * _shrink(space.norm(c), rho)


def _shrink(norm: Tensor, rho: float) -> Tensor:
    return torch.where(norm > rho, rho / norm, 1.0)


def choose(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``torch.where`` that copies nothing where one bool on the host decides for the whole tensor.

    Vectors of a single point are as long as a model; reading the bool costs nothing on the CPU, and on a device the
    copy is cheaper than the wait.
    """
    if condition.numel() == 1 and condition.device.type == "cpu":
        return a if bool(condition) else b
    return torch.where(condition, a, b)


class Workspace:
    """Vectors that no state holds any more, to be written again.

    A fresh vector as long as a model is paged in by the operating system, which costs more than the arithmetic that
    fills it.

    Args:
        reuse_points: Write every point over the last; only for losses that keep none.
    """

    def __init__(self, *, reuse_points: bool = False):
        self._vectors: list[Tensor] = []
        self._point: Tensor | None = None
        self._reuse_points = reuse_points

    def vector(self, like: Tensor, held: Iterable[Tensor]) -> Tensor:
        """An uninitialised vector that is none of those ``held``."""
        taken = set(map(id, held))
        for vector in self._vectors:
            if id(vector) not in taken:
                return vector
        self._vectors.append(torch.empty_like(like))
        return self._vectors[-1]

    def point(self, like: Tensor) -> Tensor:
        """An uninitialised point."""
        if self._point is None or not self._reuse_points:
            self._point = torch.empty_like(like)
        return self._point


def evaluate_along(
    space: TangentSpace,
    evaluate: Evaluate,
    c: Tensor,
    path: str,
    rho: float,
    *,
    differentiate: bool = True,
    point: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss at the end of the path, its Riemannian gradient as a function of ``c``, and whether the end point exists.

    The point and the gradient are written into ``point`` and ``out`` if these are given.
    """
    if differentiate:
        y, gradient = space.follow(c, path, rho, out=point)
    else:
        y, gradient = space.move(c, path, rho), None
    # A sum sees every NaN and Inf in one pass that allocates nothing.
    exists = y.unsqueeze(-1).flatten(len(space.batch)).sum(-1).isfinite()
    exists = exists.reshape(exists.shape + (1,) * (y.dim() - exists.dim()))
    value, slope = evaluate(choose(exists, y, space.x), differentiate)
    ones = (1,) * space.ndim
    value, reached = value.reshape(space.batch + ones), exists.reshape(space.batch + ones)
    zero = torch.zeros_like(value)
    if slope is None or gradient is None:
        return value, zero, reached
    e = gradient(choose(exists, slope, zero.reshape(exists.shape)).expand_as(y), out=out)
    return value, choose(reached, e, zero.expand_as(e)), reached


def start(space: TangentSpace, value: Tensor, gradient: Tensor, c: Tensor, rho: float) -> AscentState:
    """State before the first step."""
    step = torch.full_like(value, 2 * rho)
    count = torch.zeros_like(value)
    return AscentState(
        c, c, value, gradient, c, value, gradient, step, count, step, value, count, value.isfinite().logical_not()
    )


def ascent_step(
    space: TangentSpace,
    evaluate: Evaluate,
    state: AscentState,
    *,
    path: str,
    rho: float,
    first: bool = False,
    last: bool = False,
    interval: int | None = None,
    workspace: Workspace | None = None,
) -> AscentState:
    """One step of APGD, without a wait for a device.

    Args:
        space: Tangent space of the ball's centre.
        evaluate: The loss.
        state: State before the step.
        path: Path from tangent vectors to points.
        rho: Radius of the ball.
        first: No momentum yet.
        last: The gradient at the new iterate is not needed.
        interval: Steps since the last checkpoint if this step ends at one.
        workspace: Of this run; no two runs share one.
    """
    work = Workspace() if workspace is None else workspace
    held = (state.c, state.previous, state.gradient, state.best, state.best_gradient)
    norm = space.norm(state.gradient)
    stride = state.step / torch.where(norm > 0, norm, 1.0)
    c = torch.addcmul(state.c, state.gradient, stride, out=work.vector(state.c, held))
    shrink = _shrink(space.norm(c), rho)
    if first:
        c.mul_(shrink)
    else:
        # c + share (target - c) + (1 - share) (c - previous), in one pass less than it has terms
        c.mul_(MOMENTUM * shrink).add_(state.c, alpha=2 * (1 - MOMENTUM)).sub_(state.previous, alpha=1 - MOMENTUM)
        c.mul_(_shrink(space.norm(c), rho))
    value, gradient, exists = evaluate_along(
        space,
        evaluate,
        c,
        path,
        rho,
        differentiate=not last,
        point=work.point(space.x),
        out=work.vector(state.c, (*held, c)),
    )
    better = exists & (value > state.best_value)
    if last:
        gradient = state.gradient
    state = replace(
        state,
        c=choose(exists, c, state.c),
        previous=state.c,
        value=torch.where(exists, value, state.value),
        gradient=choose(exists, gradient, state.gradient),
        best=choose(better, c, state.best),
        best_value=torch.where(better, value, state.best_value),
        best_gradient=choose(better, gradient, state.best_gradient),
        step=torch.where(exists, state.step, state.step / 2),
        improvements=state.improvements + (exists & (value > state.value)),
        rejected=state.rejected + exists.logical_not(),
        invalid=state.invalid | (exists & value.isfinite().logical_not()) | norm.isfinite().logical_not(),
    )
    return state if interval is None else _reconsider(state, interval)


def _reconsider(state: AscentState, interval: int) -> AscentState:
    """Halve the step size and return to the best iterate where the last interval brought too little."""
    few = state.improvements < MIN_IMPROVING_SHARE * interval
    stuck = (state.step == state.checkpoint_step) & (state.best_value == state.checkpoint_value)
    halve = few | stuck
    return replace(
        state,
        step=torch.where(halve, state.step / 2, state.step),
        c=choose(halve, state.best, state.c),
        previous=choose(halve, state.best, state.previous),
        value=torch.where(halve, state.best_value, state.value),
        gradient=choose(halve, state.best_gradient, state.gradient),
        improvements=torch.zeros_like(state.improvements),
        checkpoint_step=state.step,
        checkpoint_value=state.best_value,
    )
