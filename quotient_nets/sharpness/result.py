"""Results of a sharpness measurement, with the figures by which a reader can judge them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Sharpness:
    """Worst-case sharpness of a batch of points; every tensor without another note has the shape of the batch.

    Attributes:
        value: Largest increase of the loss that was found in the ball: ``max_loss - base_loss``, at least 0. A lower
            bound of the true maximum.
        base_loss: Loss at the point itself.
        max_loss: Largest loss that was found.
        direction: Tangent vector that leads there, shape of the point.
        history: Best increase after each step of the best start, ``(steps + 1, *batch)``.
        converged: Whether the last quarter of the steps added less than 1 % of the value.
        first_order_share: ``rho`` times the Riemannian gradient norm, over the value: near 1 where the ball is so
            small that sharpness is a gradient norm, near 0 where curvature decides.
        certificates: Figures on the quality of the numbers: relative vertical part of the direction
            (``horizontality_residual``), its norm over the radius (``relative_norm``), ``rejected_steps``, and what
            the manifold adds (``condition_number``, ``spectral_gap``, ``zero_weights``).
        rho: Radius of the ball.
        steps: Steps of each start.
        path: Path from tangent vectors to points.
    """

    value: Tensor
    base_loss: Tensor
    max_loss: Tensor
    direction: Tensor
    history: Tensor
    converged: Tensor
    first_order_share: Tensor
    certificates: dict[str, Tensor]
    rho: float
    steps: int
    path: str
