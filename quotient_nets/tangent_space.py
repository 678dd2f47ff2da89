r"""The tangent space at one point, prepared once for loops that stay there.

Geometry at a fixed point ``x`` costs a decomposition of ``x`` and then almost nothing. A :class:`TangentSpace` keeps
the decomposition and offers what an optimizer over tangent vectors needs: inner product, projection, gradient, the
path that leaves ``x`` with a given velocity. Tangent vectors are held in *coordinates* that the space chooses; for
the manifolds of this package these belong to an orthonormal frame, so that the inner product is the plain dot product.
For any other ``geoopt.Manifold`` they are the tangent vectors themselves.

Used by sharpness and by our manifolds. Knows ``geoopt.Manifold``, no concrete manifold and no network.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Protocol, cast

import geoopt
import torch
from torch import Tensor

SPEED_TOLERANCE = 1e-3  # of the measured velocity of a path at 0, relative to the tangent vector

UNKNOWN_PATH = "expected a path 'retr', 'second_order' or 'expmap', got {!r}"

Checked = tuple[bool, str | None]
"""Whether something holds, and why not. What geoopt's checks return; they declare a bool."""


class PathGradient(Protocol):
    """From the Euclidean gradient of a function at the end of a path to its Riemannian gradient at the start."""

    def __call__(self, slope: Tensor, out: Tensor | None = None) -> Tensor:
        """Gradient in coordinates, written into ``out`` if there is one."""
        ...


class TangentSpace(ABC):
    """Tangent vectors at ``x`` in coordinates; shapes are ``(*batch, *coordinate shape)``.

    Attributes:
        x: The point, ``(*batch, *point)``, detached.
        batch: Shape of the batch of points.
        ndim: Number of trailing axes that hold the coordinates of one vector.
        orthonormal: Whether the inner product is the dot product of coordinates.
    """

    x: Tensor
    batch: torch.Size
    ndim: int
    orthonormal = False

    @abstractmethod
    def coordinates(self, u: Tensor) -> Tensor:
        """Coordinates of the tangent vector ``u``."""

    @abstractmethod
    def vector(self, c: Tensor) -> Tensor:
        """Tangent vector with coordinates ``c``, as the methods of the manifold take it."""

    def inner(self, c: Tensor, d: Tensor) -> Tensor:
        """Riemannian inner product, ``(*batch, 1, ..., 1)`` with ``ndim`` ones; here for orthonormal coordinates."""
        dot = torch.linalg.vecdot(c.flatten(-self.ndim), d.flatten(-self.ndim))
        return dot.reshape(dot.shape + (1,) * self.ndim)

    @abstractmethod
    def project(self, c: Tensor) -> Tensor:
        """Orthogonal projection of arbitrary coordinates on the tangent (horizontal) space."""

    @abstractmethod
    def gradient(self, e: Tensor) -> Tensor:
        """Riemannian gradient at ``x``, from the derivatives ``e`` of a function with respect to coordinates."""

    @abstractmethod
    def move(self, c: Tensor, path: str, radius: float | None = None) -> Tensor:
        """Point that the path reaches at time 1.

        Args:
            c: Velocity at time 0, in coordinates.
            path: Name of a method of the manifold: ``"expmap"``, ``"retr"``, ``"second_order"``, ...
            radius: Upper bound on the norm of ``c``, if the caller knows one; saves work, changes no result.
        """

    def follow(
        self, c: Tensor, path: str, radius: float | None = None, out: Tensor | None = None
    ) -> tuple[Tensor, PathGradient]:
        """Point that the path reaches, and how gradients come back from it. Never in a graph of autograd.

        Args:
            c: Velocity at time 0, in coordinates.
            path: Name of the path, as for :meth:`move`.
            radius: Upper bound on the norm of ``c``.
            out: Where to write the point; saves an allocation, which for a whole model costs more than the arithmetic.

        Returns:
            ``y = move(c)`` and the map from the Euclidean gradient of a function ``f`` at ``y`` to the Riemannian
            gradient of ``f(move(c))`` as a function of ``c``, in coordinates. Here by autograd.
        """
        with torch.enable_grad():
            c = c.detach().requires_grad_()
            y = self.move(c, path, radius)

        def gradient(slope: Tensor, out: Tensor | None = None) -> Tensor:
            return written(self.gradient(torch.autograd.grad(y, c, slope.expand_as(y))[0]), out)

        return written(y.detach(), out), gradient

    def pull_gradient(self, e: Tensor) -> Tensor:
        """Derivatives with respect to coordinates, from the Euclidean gradient ``e`` of the loss at ``x``."""
        return e

    def norm(self, c: Tensor) -> Tensor:
        """Riemannian norm, ``(*batch, 1, ..., 1)``."""
        return self.inner(c, c).clamp_min(0).sqrt()

    def total_norm(self, c: Tensor) -> Tensor:
        """Norm of coordinates that need not be horizontal; differs where the metric has no length for the others."""
        return self.norm(c)

    def random(self, generator: torch.Generator | None = None) -> Tensor:
        """Unit tangent vector, in coordinates; uniform on the sphere where these are orthonormal."""
        device = None if generator is None else generator.device
        noise = torch.randn(self.origin().shape, generator=generator, dtype=self.x.dtype, device=device)
        c = self.project(noise.to(self.x.device))
        norm = self.norm(c)
        return c / torch.where(norm > 0, norm, 1.0)  # a tangent space of dimension 0 has only zero

    def origin(self) -> Tensor:
        """Coordinates of the zero vector."""
        return torch.zeros_like(self.coordinates(torch.zeros_like(self.x)))

    def certificates(self, c: Tensor) -> dict[str, Tensor]:
        """Figures by which a reader can judge a result that was found with ``c``: name -> value for each point."""
        residual = self.total_norm(c - self.project(c)) / self.total_norm(c)
        return {"horizontality_residual": residual.reshape(self.batch)}


def written(value: Tensor, out: Tensor | None) -> Tensor:
    """``value``, in ``out`` if there is one."""
    if out is None or out is value:
        return value
    copy_all([(out, value)])
    return out


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each pair into the first: on a device one launch for all, and known to fake tensors."""
    targets, sources = map(list, zip(*pairs, strict=True))
    torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]  # as torch.optim does


class EmbeddedTangentSpace(TangentSpace):
    """Tangent space of a ``geoopt.Manifold`` by the manifold's own methods; coordinates are tangent vectors."""

    def __init__(self, manifold: geoopt.Manifold, x: Tensor):
        """Prepare the tangent space of ``manifold`` at ``x``; costs nothing."""
        self.manifold = manifold
        self.x = x.detach()
        self.ndim = cast("int", manifold.ndim)  # geoopt declares None
        self.batch = x.shape[: x.dim() - self.ndim]

    def coordinates(self, u: Tensor) -> Tensor:
        """The vector itself."""
        return u

    def vector(self, c: Tensor) -> Tensor:
        """The vector itself."""
        return c

    def inner(self, c: Tensor, d: Tensor) -> Tensor:
        """``manifold.inner``, in a shape that does not depend on how the manifold reads ``keepdim``."""
        # Stereographic broadcasts a batch against itself without keepdim; UpperHalf keeps one axis of two with it.
        inner = self.manifold.inner(self.x, c, d, keepdim=True)
        batch = torch.broadcast_shapes(self.batch, *(t.shape[: t.dim() - self.ndim] for t in (c, d)))
        return inner.reshape(batch + (1,) * self.ndim)

    def project(self, c: Tensor) -> Tensor:
        """``manifold.proju``."""
        return self.manifold.proju(self.x, c)

    def gradient(self, e: Tensor) -> Tensor:
        """``manifold.egrad2rgrad``, which some manifolds of geoopt let write into its argument."""
        return self.manifold.egrad2rgrad(self.x, e.clone())

    def move(self, c: Tensor, path: str, radius: float | None = None) -> Tensor:
        """The method ``path`` of the manifold."""
        return getattr(self.manifold, path)(self.x, c)

    @torch.no_grad()
    def check_path(self, path: str, rho: float = float("inf")) -> None:
        """Refuse a path that does not leave ``x`` with the velocity it is given, or does not start at ``x``.

        The velocity is a central difference in float64 along one tangent vector per point.

        Raises:
            ValueError: The manifold has no such path, or the path starts with another velocity; a ball of tangent
                vectors is then not a ball of points.
        """
        name = f"{type(self.manifold).__name__}.{path}"
        if not callable(getattr(self.manifold, path, None)):
            raise ValueError(
                f"expected the name of a path of the manifold; {name} does not exist. Use 'expmap' or 'retr'."
            )
        x = self.x.double()
        generator = torch.Generator(device="cpu").manual_seed(0)
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)
        u = self.manifold.proju(x, self.manifold.proju(x, noise))
        u = u / torch.linalg.vector_norm(u).clamp_min(1e-300) * torch.linalg.vector_norm(x).clamp_min(1e-3)
        step, follow = 1e-5, getattr(self.manifold, path)
        velocity = (follow(x, step * u) - follow(x, -step * u)) / (2 * step)
        error = torch.linalg.vector_norm(velocity - u) / torch.linalg.vector_norm(u)
        offset = float(torch.linalg.vector_norm(follow(x, 0 * u) - x))
        if offset > SPEED_TOLERANCE * rho:  # NaN at zero is met by never asking for it
            raise ValueError(
                f"{name} does not start at `x`: it is off by {offset:.2g}, which is not small beside the radius "
                f"{rho:g}. Use a larger radius or another path."
            )
        if not bool(error <= SPEED_TOLERANCE):
            raise ValueError(
                f"{name} does not start with the velocity it is given (relative error {error:.2g}), so a ball of "
                "tangent vectors is not a ball of points. Use another path, or a manifold whose expmap is the "
                "geodesic: EuclideanStiefel in place of CanonicalStiefel, the manifold itself in place of Scaled."
            )


def tangent_space(manifold: geoopt.Manifold, x: Tensor) -> TangentSpace:
    """Tangent space of any ``geoopt.Manifold`` at ``x``: its own ``at(x)`` if it has one, else the generic one."""
    # Of the class: Scaled forwards the attributes of the manifold inside it, whose norm is not its own.
    at = getattr(type(manifold), "at", None)
    return EmbeddedTangentSpace(manifold, x) if at is None else at(manifold, x)


def check_point(manifold: geoopt.Manifold, x: Tensor) -> Checked:
    """Whether ``x`` lies on any ``geoopt.Manifold``, and the manifold's reason if it does not."""
    return cast("Checked", manifold.check_point_on_manifold(x, explain=True))


def manifold_tensor(x: Tensor, manifold: geoopt.Manifold) -> geoopt.ManifoldTensor:
    """``x`` as a tensor that knows its manifold; geoopt declares no constructor that takes one."""
    return cast("Any", geoopt.ManifoldTensor)(x, manifold=manifold)
