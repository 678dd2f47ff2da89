"""Results of a sharpness measurement, with the figures by which a reader can judge them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
            small that sharpness is a gradient norm, near 0 where curvature decides; NaN where the value is 0.
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


@dataclass(frozen=True)
class BatchSharpness:
    """Sharpness of a model on one batch; see :class:`Sharpness`.

    Attributes:
        value: Largest increase of the batch's loss.
        base_loss: Loss at the model's parameters.
        max_loss: Largest loss that was found.
        size: Number of examples, the weight of the batch in the mean.
        converged: Whether the last quarter of the steps added less than 1 %.
        first_order_share: Share of the first-order term.
        history: Best increase after each step.
        certificates: Figures on the quality of the numbers.
    """

    value: float
    base_loss: float
    max_loss: float
    size: int
    converged: bool
    first_order_share: float
    history: tuple[float, ...]
    certificates: dict[str, float]


@dataclass(frozen=True)
class ModelSharpness:
    """Sharpness of a model: the mean over batches, weighted by their sizes.

    Attributes:
        rho: Radius of the ball.
        batches: Results for each batch.
        settings: Path, steps, restarts, seed, blocks and their weights, what was left out, fingerprint of the data.
    """

    rho: float
    batches: tuple[BatchSharpness, ...]
    settings: dict[str, Any]

    def _mean(self, figure: Callable[[BatchSharpness], float]) -> float:
        total = sum(batch.size for batch in self.batches)
        return sum(batch.size * figure(batch) for batch in self.batches) / total

    @property
    def value(self) -> float:
        """Mean of the batches' values."""
        return self._mean(lambda batch: batch.value)

    @property
    def standard_error(self) -> float:
        """Standard error of the mean over batches; NaN for a single batch."""
        if len(self.batches) < 2:
            return float("nan")
        total = sum(batch.size for batch in self.batches)
        spread = sum((batch.size / total) ** 2 * (batch.value - self.value) ** 2 for batch in self.batches)
        return (spread * len(self.batches) / (len(self.batches) - 1)) ** 0.5

    @property
    def base_loss(self) -> float:
        """Mean loss at the model's parameters."""
        return self._mean(lambda batch: batch.base_loss)

    @property
    def max_loss(self) -> float:
        """Mean of the largest losses."""
        return self._mean(lambda batch: batch.max_loss)

    @property
    def first_order_share(self) -> float:
        """Mean share of the first-order term: the regime that ``rho`` is in."""
        return self._mean(lambda batch: batch.first_order_share)

    @property
    def converged(self) -> bool:
        """Whether the search converged on every batch."""
        return all(batch.converged for batch in self.batches)

    @property
    def certificates(self) -> dict[str, float]:
        """Worst figure over batches: the largest, for the spectral gap and the relative norm the smallest."""
        smallest = ("spectral_gap", "relative_norm")
        names = self.batches[0].certificates
        return {
            name: (min if name in smallest else max)(batch.certificates[name] for batch in self.batches)
            for name in names
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the fields, and the means."""
        means = ("value", "standard_error", "base_loss", "max_loss", "first_order_share", "converged")
        return {name: getattr(self, name) for name in means} | {"certificates": self.certificates} | asdict(self)

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write the result as JSON.

        Raises:
            FileExistsError: ``path`` exists and ``overwrite`` is not set.
        """
        path = Path(path)
        if path.exists() and not overwrite:
            raise FileExistsError(f"{path} exists; pass `overwrite=True` to replace it")
        path.write_text(json.dumps(_finite(self.to_dict()), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> ModelSharpness:
        """Read a result that :meth:`save` has written."""
        data = json.loads(Path(path).read_text())
        batches = tuple(BatchSharpness(**_numbers(batch)) for batch in data["batches"])
        return cls(rho=data["rho"], batches=batches, settings=data["settings"])


def _finite(value: Any) -> Any:
    """Plain data with None for NaN and infinite numbers, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(batch: dict[str, Any]) -> dict[str, Any]:
    """Fields of a :class:`BatchSharpness` from JSON: tuples for lists, NaN for None."""
    nan = float("nan")
    fields = {name: nan if value is None else value for name, value in batch.items()}
    fields["certificates"] = {name: nan if value is None else value for name, value in batch["certificates"].items()}
    fields["history"] = tuple(nan if value is None else value for value in batch["history"])
    return fields
