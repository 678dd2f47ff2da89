r"""The metric of adaptive sharpness: relative change of every weight.

No group is divided out, but the metric is invariant under rescaling of single coordinates. Sharpness over its balls,
along straight lines, is adaptive sharpness as published (Kwon et al. 2021; Andriushchenko et al. 2023).

Imports: geoopt, torch, :mod:`quotient_nets.tangent_space`.
"""

from __future__ import annotations

import geoopt
import torch
from geoopt.utils import size2shape
from torch import Tensor
from typing_extensions import override

from quotient_nets.tangent_space import PathGradient, TangentSpace, manifold_tensor, written


class AdaptiveEuclidean(geoopt.Manifold):
    r"""Vectors (or arrays) with the metric :math:`\langle u, v \rangle_x = \sum_i u_i v_i / x_i^2`.

    Coordinates that are exactly zero stay where they are: the limit of a metric that forbids them to move. Tangent
    vectors have no such components; :meth:`proju` removes them. Two signs are two components of the manifold.

    Args:
        ndim: Number of trailing axes that form one point.
    """

    name = "AdaptiveEuclidean"
    reversible = False

    def __init__(self, ndim: int = 1):
        super().__init__()
        if not isinstance(ndim, int) or ndim < 1:
            raise ValueError(f"expected a positive number of point axes, got ndim={ndim!r}")
        self.ndim = ndim

    def at(self, x: Tensor) -> AdaptiveTangentSpace:
        """Tangent space at ``x``, in coordinates ``u / |x|``."""
        return AdaptiveTangentSpace(x.detach(), self.ndim)

    @override
    def inner(self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        return self.component_inner(x, u, v).sum(dim=self._axes(), keepdim=keepdim)

    @override
    def component_inner(self, x: Tensor, u: Tensor, v: Tensor | None = None) -> Tensor:
        """The summands of the inner product, which make adaptive optimizers elementwise."""
        magnitude, zero = _nonzero(x)
        return torch.where(zero, 0.0, (u / magnitude) * ((u if v is None else v) / magnitude))

    @override
    def norm(self, x: Tensor, u: Tensor, *, keepdim: bool = False) -> Tensor:
        magnitude, zero = _nonzero(x)
        return torch.linalg.vector_norm(torch.where(zero, 0.0, u / magnitude), dim=self._axes(), keepdim=keepdim)

    @override
    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        """``u`` without the components of exactly zero coordinates."""
        return torch.where(x == 0, 0.0, u)

    @override
    def egrad2rgrad(self, x: Tensor, u: Tensor) -> Tensor:
        """``u x^2``, elementwise."""
        return u * x.square()

    @override
    def retr(self, x: Tensor, u: Tensor) -> Tensor:
        """Straight line ``x + u``: the path of adaptive sharpness."""
        return x + u

    @override
    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        """Geodesic ``x exp(u / x)``; keeps every sign."""
        magnitude, zero = _nonzero(x)
        return x * torch.exp(torch.where(zero, 0.0, u / magnitude))

    @override
    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        """``x log(y / x)``; NaN or infinite where the signs of ``x`` and ``y`` differ."""
        return x * _log_ratio(x, y)

    @override
    def dist(self, x: Tensor, y: Tensor, *, keepdim: bool = False) -> Tensor:
        """Geodesic distance; NaN or infinite where the signs differ, which no path joins."""
        return torch.linalg.vector_norm(_log_ratio(x, y), dim=self._axes(), keepdim=keepdim)

    @override
    def transp(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Parallel transport ``v y / x``, an isometry."""
        magnitude, zero = _nonzero(x)
        return torch.where(zero, 0.0, v * y / magnitude)

    @override
    def projx(self, x: Tensor) -> Tensor:
        return x.contiguous()

    @override
    def random(self, *size, dtype=None, device=None) -> geoopt.ManifoldTensor:
        """Independent standard normal coordinates."""
        shape = size2shape(*size)
        self._assert_check_shape(shape, "x")
        return manifold_tensor(torch.randn(*shape, dtype=dtype, device=device), self)

    @override
    def origin(self, *size, dtype=None, device=None, seed: int | None = 42) -> geoopt.ManifoldTensor:
        """Vector of ones."""
        shape = size2shape(*size)
        self._assert_check_shape(shape, "x")
        return manifold_tensor(torch.ones(*shape, dtype=dtype, device=device), self)

    @override
    def _check_point_on_manifold(self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5) -> tuple[bool, str | None]:
        if bool(x.isfinite().all()):
            return True, None
        return False, "expected finite coordinates, got NaN or Inf"

    @override
    def _check_vector_on_tangent(
        self, x: Tensor, u: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5
    ) -> tuple[bool, str | None]:
        if bool((((x != 0) | (u.abs() <= atol)) & u.isfinite()).all()):
            return True, None
        return (
            False,
            "expected finite vectors with no component along coordinates that are exactly zero; use `proju(x, u)`",
        )

    def _axes(self) -> tuple[int, ...]:
        return tuple(range(-self.ndim, 0))

    def __eq__(self, other: object) -> bool:
        """Equal to every other of the same ``ndim``; geoopt compares manifolds when it wraps parameters."""
        return isinstance(other, AdaptiveEuclidean) and type(other) is type(self) and self.ndim == other.ndim

    def __hash__(self) -> int:
        """Consistent with equality."""
        return hash((type(self), self.ndim))


class AdaptiveTangentSpace(TangentSpace):
    """Vectors at ``x`` in coordinates ``c = u / |x|``, orthonormal for the adaptive metric."""

    orthonormal = True

    def __init__(self, x: Tensor, ndim: int):
        self.x, self.ndim = x, ndim
        self.batch = x.shape[: x.dim() - ndim]
        self.magnitude = x.abs()

    @override
    def coordinates(self, u: Tensor) -> Tensor:
        magnitude, zero = _nonzero(self.magnitude)
        return torch.where(zero, 0.0, u / magnitude)

    @override
    def vector(self, c: Tensor) -> Tensor:
        return c * self.magnitude

    @override
    def pull_gradient(self, e: Tensor) -> Tensor:
        return e * self.magnitude

    @override
    def project(self, c: Tensor) -> Tensor:
        return torch.where(self.magnitude == 0, 0.0, c)

    @override
    def gradient(self, e: Tensor) -> Tensor:
        return e  # no component along a zero coordinate, which does not depend on c

    @override
    def move(self, c: Tensor, path: str, radius: float | None = None) -> Tensor:
        if path == "retr":
            return torch.addcmul(self.x, c, self.magnitude)
        if path == "expmap":
            return self.x * torch.exp(c * self.x.sign())
        raise ValueError(f"expected a path 'retr' or 'expmap' of AdaptiveEuclidean, got {path!r}")

    @override
    def follow(
        self, c: Tensor, path: str, radius: float | None = None, out: Tensor | None = None
    ) -> tuple[Tensor, PathGradient]:
        c = c.detach()
        y = torch.addcmul(self.x, c, self.magnitude, out=out) if path == "retr" else written(self.move(c, path), out)
        speed = self.magnitude if path == "retr" else y.abs()

        def gradient(slope: Tensor, out: Tensor | None = None) -> Tensor:
            return torch.mul(slope, speed, out=out)

        return y, gradient

    @override
    def certificates(self, c: Tensor) -> dict[str, Tensor]:
        axes = tuple(range(-self.ndim, 0))
        return super().certificates(c) | {"zero_weights": (self.magnitude == 0).sum(dim=axes)}


def _nonzero(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` with its zeros replaced by ones, and where they were: a denominator with finite derivatives."""
    zero = x == 0
    return torch.where(zero, 1.0, x), zero


def _log_ratio(x: Tensor, y: Tensor) -> Tensor:
    """``log(y / x)``, 0 where both are zero."""
    denominator, zero = _nonzero(x)
    constant = torch.where(y == 0, 1.0, torch.nan).to(y.dtype)  # where x is zero
    return torch.log(torch.where(zero, constant, y / denominator))
