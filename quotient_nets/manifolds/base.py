r"""Quotient manifolds: points are representatives, a group moves them along their orbit.

A manifold :math:`M = \bar M / \mathcal G` is given by a total space of representatives, a group action and a metric
that the action leaves unchanged. Tangent vectors of the quotient are the *horizontal* vectors: those orthogonal to
the orbit. Transformer symmetries, low-rank factorisations and LoRA adapters are such quotients.

This base derives every operation from four methods of a subclass, slowly and correctly; a subclass overrides a
default only with a closed form. Imports: geoopt, torch, :mod:`quotient_nets.tangent_space`. Knows nothing of networks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import geoopt
import torch
from geoopt.utils import size2shape
from torch import Tensor
from typing_extensions import override

from quotient_nets.linalg import is_transformed
from quotient_nets.tangent_space import Checked, EmbeddedTangentSpace, TangentSpace, manifold_tensor

EXPMAP_STEPS = 128  # Runge-Kutta steps of the default expmap


class QuotientManifold(geoopt.Manifold):
    """Quotient of a space of matrices, ``(..., rows, r)``, by a group of ``r x r`` matrices.

    A subclass supplies :meth:`action`, :meth:`infinitesimal_action`, :meth:`product`, :meth:`inner` and
    :meth:`egrad2rgrad`. Manifolds hold Python numbers only: dtype and device are those of the point, and two manifolds
    with equal numbers are equal.
    """

    ndim = 2
    reversible = False

    @abstractmethod
    def action(self, x: Tensor, a: Tensor) -> Tensor:
        """Another representative of the same point: the left action of the group element ``a``, ``(..., r, r)``."""

    @abstractmethod
    def infinitesimal_action(self, x: Tensor, xi: Tensor) -> Tensor:
        """Vertical vector at ``x``: derivative of ``action(x, exp(t xi))`` at ``t = 0``.

        Any tensor ``(..., r, r)`` is an admissible ``xi``.
        """

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """Complete invariant of the orbit: equal for two representatives if and only if they are the same point."""

    @abstractmethod
    @override
    def inner(self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        """Metric of the total space, invariant under the action: ``(...)``, or ``(..., 1, 1)`` with ``keepdim``."""

    @abstractmethod
    @override
    def egrad2rgrad(self, x: Tensor, u: Tensor) -> Tensor:
        """Horizontal Riemannian gradient from the Euclidean gradient ``u``, which may be any ambient tensor."""

    def at(self, x: Tensor) -> TangentSpace:
        """Tangent space at ``x``, prepared once for loops that stay there."""
        return EmbeddedTangentSpace(self, x)

    @override
    def norm(self, x: Tensor, u: Tensor, *, keepdim: bool = False) -> Tensor:
        """Riemannian norm of ``u``, with gradient 0 where ``u = 0``."""
        return root(self.inner(x, u, keepdim=keepdim))

    @override
    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        r"""Horizontal part of an ambient vector: ``u`` less its projection on the orbit's tangent space.

        The Gram matrix of a basis of vertical vectors is solved by pseudo-inverse, so the images of the algebra's
        basis may be dependent. Cost: :math:`r^4` inner products.
        """
        x, u = torch.broadcast_tensors(x, u)
        r = x.shape[-1]
        basis = torch.eye(r * r, dtype=x.dtype, device=x.device).unflatten(-1, (r, r))
        lead = (r * r,) + (1,) * (x.dim() - 2)
        vertical = self.infinitesimal_action(x, basis.reshape(*lead, r, r))
        gram = torch.stack([self.inner(x, v, vertical) for v in vertical], dim=-1).movedim(0, -1)
        rhs = self.inner(x, u, vertical).movedim(0, -1)
        xi = torch.linalg.pinv(gram, hermitian=True) @ rhs[..., None]
        return u - self.infinitesimal_action(x, xi.squeeze(-1).unflatten(-1, (r, r)))

    @override
    def retr(self, x: Tensor, u: Tensor) -> Tensor:
        """First-order retraction ``x + u``."""
        return x + u

    @override
    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        r"""End point at time 1 of the geodesic that leaves ``x`` with horizontal velocity ``u``.

        Integrates Hamilton's equations of :math:`\tfrac12 \langle p, p^\sharp \rangle_x` by Runge-Kutta of order 4.
        A geodesic that starts horizontal stays horizontal and projects to the geodesic of the quotient.
        """
        x, u = torch.broadcast_tensors(x, u)
        p = torch.func.grad(lambda v: 0.5 * self.inner(x, v).sum())(u)

        def flow(x: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
            force = torch.func.grad(lambda y: 0.5 * (p * self.egrad2rgrad(y, p)).sum())(x)
            return self.egrad2rgrad(x, p), -force

        h = 1 / EXPMAP_STEPS
        for _ in range(EXPMAP_STEPS):
            k1 = flow(x, p)
            k2 = flow(x + h / 2 * k1[0], p + h / 2 * k1[1])
            k3 = flow(x + h / 2 * k2[0], p + h / 2 * k2[1])
            k4 = flow(x + h * k3[0], p + h * k3[1])
            x = x + h / 6 * (k1[0] + 2 * k2[0] + 2 * k3[0] + k4[0])
            p = p + h / 6 * (k1[1] + 2 * k2[1] + 2 * k3[1] + k4[1])
        return x

    @override
    def transp(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Horizontal lift at ``y`` of the pushed-forward ``v``, projected on the quotient's tangent space at ``y``.

        Depends on the points, not on their representatives. Least squares with the dense Jacobian of
        :meth:`product`: cost cubic in the size of a point.
        """
        x, y, v = torch.broadcast_tensors(x, y, v)

        def lift(x: Tensor, y: Tensor, v: Tensor) -> Tensor:
            pushed = torch.func.jvp(self.product, (x,), (v,))[1].flatten()
            jacobian = torch.func.jacfwd(self.product)(y).flatten(-2).flatten(0, -2)
            return (torch.linalg.pinv(jacobian) @ pushed).reshape(y.shape)

        flat = [t.reshape(-1, *t.shape[-2:]) for t in (x, y, v)]
        lifted = torch.stack([lift(*element) for element in zip(*flat, strict=True)])
        return self.proju(y, lifted.reshape(y.shape))

    @override
    def retr_transp(self, x: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """``retr`` of ``x`` along ``u``, and ``v`` transported there."""
        y = self.retr(x, u)
        return y, self.transp(x, y, v)

    @override
    def projx(self, x: Tensor) -> Tensor:
        """``x``, bit for bit: every representative is valid, and moving it would invalidate optimizer state."""
        return x.contiguous()

    @override
    def random(self, *size: Any, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Any:
        """Random representative as a ``geoopt.ManifoldTensor``; by default with independent standard normal entries."""
        shape = size2shape(*size)
        self._assert_check_shape(shape, "x")
        return manifold_tensor(self._draw(shape, dtype=dtype, device=device), self)

    @override
    def origin(
        self,
        *size: Any,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        seed: int | None = 42,
    ) -> Any:
        """The same representative for the same seed, drawn as by :meth:`random`; no global state is touched."""
        shape = size2shape(*size)
        self._assert_check_shape(shape, "x")
        generator = torch.Generator().manual_seed(42 if seed is None else seed)
        return manifold_tensor(self._draw(shape, dtype=dtype, generator=generator).to(device), self)

    def _draw(self, shape: tuple[int, ...], **options: Any) -> Tensor:
        """Random representative of this shape; options as for ``torch.randn``."""
        return torch.randn(*shape, **options)

    @override
    def _check_vector_on_tangent(
        self, x: Tensor, u: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5
    ) -> tuple[bool, str | None]:
        space = self.at(x)
        c = space.coordinates(u)
        residual = space.total_norm(c - space.project(c))
        if bool((residual <= atol + rtol * space.total_norm(c)).all()):
            return True, None
        return False, (
            f"expected horizontal vectors, orthogonal to the orbit of `x`; the vertical part of `u` has norm up to "
            f"{float(residual.nan_to_num(torch.inf).max()):.3g}, atol={atol}, rtol={rtol}. Project with `proju(x, u)`."
        )

    def _refuse_shape(self, x: Tensor) -> None:
        """Raise where ``x`` does not have the shape of a point or of an ambient vector.

        Raises:
            ValueError: The shape that was expected, and the one that came.
        """
        ok, reason = cast("Checked", self._check_shape(cast("Any", x.shape), "x"))
        if not ok:
            raise ValueError(f"{self.name}: {reason}")

    def _refuse_nan(self, result: Tensor, points: Sequence[Tensor], vectors: Sequence[Tensor], expected: str) -> None:
        """Raise where a result is NaN although what it was computed from is finite.

        Not where values are unknown, under ``torch.func`` and in compiled graphs: there NaN stands.

        Raises:
            ValueError: One of the points is none, with the reason; otherwise ``expected``, with the indices of the
                elements that are NaN.
        """
        if is_transformed():
            return
        lost = torch.logical_not(result.detach().isfinite().all(dim=(-2, -1)))
        for t in (*points, *vectors):
            lost = lost & t.isfinite().all(dim=(-2, -1))
        if not bool(lost.any()):
            return
        for x in points:
            # Elements that are not lost, some of them NaN on purpose, are not the reason.
            sound = self.origin(*x.shape[-2:], dtype=x.dtype, device=x.device)
            suspects = torch.where(lost[..., None, None], x.detach(), sound.as_subclass(Tensor))
            ok, reason = cast("Checked", self._check_point_on_manifold(suspects))
            if not ok:
                raise ValueError(f"{self.name}: {reason}")
        where = f" (batch indices {lost.nonzero().tolist()})" if lost.dim() else ""
        raise ValueError(f"{expected}{where}. `check=False` gives NaN instead.")

    def _numbers(self) -> tuple[Any, ...]:
        """The numbers that define the manifold, beside its class."""
        return ()

    def __eq__(self, other: object) -> bool:
        """Equal if of one class and with the same numbers; geoopt compares manifolds when it wraps parameters."""
        return isinstance(other, QuotientManifold) and type(other) is type(self) and self._numbers() == other._numbers()

    def __hash__(self) -> int:
        """Consistent with equality."""
        return hash((type(self), self._numbers()))


def root(square: Tensor) -> Tensor:
    """Square root of a squared length, with derivative 0 at 0."""
    positive = square > 0
    length = torch.where(positive, square, 1.0).sqrt()
    # A NaN is neither positive nor zero and must stay a NaN.
    return torch.where(positive, length, square * 0.0)


def full_rank(deficient: Tensor, x: Tensor, factors: str, product: str) -> Checked:
    """Verdict on the point ``x`` whose elements are rank deficient where ``deficient`` says so."""
    if not bool(deficient.any()):
        return True, None
    where = f" at batch indices {deficient.nonzero().tolist()}" if deficient.dim() else ""
    return False, (
        f"expected {factors} of full rank r={x.shape[-1]}; {product} is numerically rank deficient{where}. "
        "Use a smaller r; factors that are zero, as in a LoRA that was never trained, have to be trained first."
    )
