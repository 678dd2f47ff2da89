"""A ``geoopt.Manifold`` as a manifold of pymanopt's."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, cast

import geoopt
import numpy as np
import torch
from geoopt.utils import size2shape
from pymanopt.manifolds.manifold import Manifold
from torch import Tensor
from typing_extensions import override

from quotient_nets.tangent_space import Checked

RANK = 1e-9  # of a projector's singular values, which are 0, or of the order of 1


class AdaptedManifold(Manifold):
    """A ``geoopt.Manifold`` as pymanopt takes it; made by :func:`as_pymanopt`.

    Every method takes and returns float64 arrays of shape ``size`` and copies them. Where ``size`` has batch axes,
    this is the product of the batch: squared lengths and distances are summed.

    Attributes:
        manifold: The manifold.
        size: Shape of a point.
    """

    def __init__(self, manifold: geoopt.Manifold, size: Sequence[int], retraction: str):
        self.manifold, self.size, self._retraction = manifold, tuple(size), retraction
        super().__init__(f"{manifold.name} of shape {self.size}", _dimension(manifold, self.size))

    @property
    @override
    def typical_dist(self) -> float:
        """Square root of the dimension: the largest radius that trust regions take by default."""
        return math.sqrt(self.dim)

    @override
    def inner_product(self, point: np.ndarray, tangent_vector_a: np.ndarray, tangent_vector_b: np.ndarray) -> float:
        # Stereographic broadcasts a batch against itself without keepdim.
        return float(self._ask("inner", point, tangent_vector_a, tangent_vector_b, keepdim=True).sum())

    @override
    def norm(self, point: np.ndarray, tangent_vector: np.ndarray) -> float:
        square = self.inner_product(point, tangent_vector, tangent_vector)
        return math.sqrt(0.0 if square < 0 else square)  # a NaN is not less than 0 and stays

    @override
    def dist(self, point_a: np.ndarray, point_b: np.ndarray) -> float:
        return math.sqrt(float(self._ask("dist", point_a, point_b, keepdim=True).square().sum()))

    @override
    def projection(self, point: np.ndarray, vector: np.ndarray) -> np.ndarray:
        """``proju``: the horizontal part of an ambient vector."""
        return to_array(self._ask("proju", point, vector))

    @override
    def to_tangent_space(self, point: np.ndarray, vector: np.ndarray) -> np.ndarray:
        """As :meth:`projection`."""
        return self.projection(point, vector)

    @override
    def euclidean_to_riemannian_gradient(self, point: np.ndarray, euclidean_gradient: np.ndarray) -> np.ndarray:
        return to_array(self._ask("egrad2rgrad", point, euclidean_gradient))

    @override
    def euclidean_to_riemannian_hessian(
        self,
        point: np.ndarray,
        euclidean_gradient: np.ndarray,
        euclidean_hessian: np.ndarray,
        tangent_vector: np.ndarray,
    ) -> np.ndarray:
        r"""``ehess2rhess`` of the manifold, or the same by differentiating its ``second_order``.

        With :math:`e` the Euclidean gradient, :math:`\dot e` its derivative along ``u`` and :math:`R_x` a retraction
        that agrees with the geodesic to second order, the Hessian is

        .. math:: \operatorname{egrad2rgrad}_x\!\left(\dot e + D^2 \langle e, R_x \rangle (0)[u, \cdot]\right).

        Raises:
            NotImplementedError: The manifold has neither method.
        """
        if hasattr(self.manifold, "ehess2rhess"):
            return to_array(self._ask("ehess2rhess", point, euclidean_gradient, euclidean_hessian, tangent_vector))
        if not hasattr(self.manifold, "second_order"):
            raise NotImplementedError(
                f"expected a manifold with `ehess2rhess(x, egrad, ehess, u)` or a path `second_order(x, u)`; "
                f"{type(self.manifold).__name__} has neither. Use SteepestDescent or ConjugateGradient."
            )
        x, e, de, u = map(self._tensor, (point, euclidean_gradient, euclidean_hessian, tangent_vector))
        slope = torch.func.grad(lambda v: (e * cast("Any", self.manifold).second_order(x, v)).sum())
        bend = torch.func.jvp(slope, (torch.zeros_like(u),), (u,))[1]
        return to_array(self.manifold.egrad2rgrad(x, de + bend))

    @override
    def retraction(self, point: np.ndarray, tangent_vector: np.ndarray) -> np.ndarray:
        """The path that :func:`as_pymanopt` was told to take; NaN where it leaves the manifold."""
        # A line search tries steps that are too long; their cost is then infinite, which is no reason to stop it.
        options = {"check": False} if _has_check(self.manifold, self._retraction) else {}
        return to_array(self._ask(self._retraction, point, tangent_vector, **options))

    @override
    def exp(self, point: np.ndarray, tangent_vector: np.ndarray) -> np.ndarray:
        return to_array(self._ask("expmap", point, tangent_vector))

    @override
    def log(self, point_a: np.ndarray, point_b: np.ndarray) -> np.ndarray:
        return to_array(self._ask("logmap", point_a, point_b))

    @override
    def transport(self, point_a: np.ndarray, point_b: np.ndarray, tangent_vector_a: np.ndarray) -> np.ndarray:
        return to_array(self._ask("transp", point_a, point_b, tangent_vector_a))

    @override
    def pair_mean(self, point_a: np.ndarray, point_b: np.ndarray) -> np.ndarray:
        return self.exp(point_a, self.log(point_a, point_b) / 2)

    @override
    def random_point(self) -> np.ndarray:
        """``random`` of the manifold, seeded from numpy's global state, as pymanopt's users expect."""
        seed = int(np.random.randint(2**31))  # noqa: NPY002
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return to_array(self._call("random", *self.size, dtype=torch.float64))

    @override
    def random_tangent_vector(self, point: np.ndarray) -> np.ndarray:
        """Projection of independent normal entries from numpy's global state, scaled to norm 1."""
        u = self.projection(point, np.random.standard_normal(self.size))  # noqa: NPY002
        return u / (self.norm(point, u) or 1.0)  # a tangent space of dimension 0 has only zero

    @override
    def zero_vector(self, point: np.ndarray) -> np.ndarray:
        return np.zeros(self.size)

    def _tensor(self, array: np.ndarray) -> Tensor:
        tensor = to_tensor(array)
        if tensor.shape != self.size:
            raise ValueError(f"expected an array of shape {self.size} on {self}, got {tuple(tensor.shape)}")
        return tensor

    def _ask(self, method: str, *arrays: np.ndarray, **options: Any) -> Tensor:
        return self._call(method, *map(self._tensor, arrays), **options)

    @torch.no_grad()
    def _call(self, method: str, *arguments: Any, **options: Any) -> Tensor:
        try:
            return getattr(self.manifold, method)(*arguments, **options)
        except NotImplementedError as error:
            reason = str(error) or "geoopt's default was not overridden."
            raise NotImplementedError(f"{type(self.manifold).__name__} has no `{method}` here: {reason}") from error


def _has_check(manifold: geoopt.Manifold, path: str) -> bool:
    return "check" in inspect.signature(getattr(manifold, path)).parameters


def as_pymanopt(manifold: geoopt.Manifold, *size: Any, retraction: str = "retr") -> AdaptedManifold:
    """Present a ``geoopt.Manifold`` to pymanopt.

    Args:
        manifold: Manifold of geoopt's or ours, with real points.
        size: Shape of a point, as for ``manifold.random``; for a pair of factors ``n + m, r``.
        retraction: Name of the path that pymanopt's solvers follow: ``"retr"``, ``"second_order"``, ``"expmap"``.

    Returns:
        A manifold for ``pymanopt.Problem``, for ``pymanopt.manifolds.Product`` and for :func:`pymanopt_problem`. Its
        dimension is that of ``manifold.dimension(r)`` where there is one, otherwise the rank of ``proju`` at the
        origin: as many projections as a point has entries, once.

    Raises:
        ValueError: The manifold does not take points of this shape, is not in float64, has complex points, or has no
            such path.
        NotImplementedError: The manifold has neither a dimension nor an origin.
    """
    shape = size2shape(*size)
    ok, reason = cast("Checked", manifold.check_point(torch.empty(shape), explain=True))
    if not ok:
        raise ValueError(f"expected the shape of a point of {manifold.name}, got {tuple(shape)}: {reason}")
    if manifold.dtype not in (None, torch.float64):
        raise ValueError(
            f"expected a manifold in float64, as all arrays are, got {manifold.dtype} of {manifold.name}. "
            "Call `manifold.double()` first."
        )
    if not callable(getattr(manifold, retraction, None)):
        raise ValueError(
            f"expected the name of a path of the manifold; {type(manifold).__name__}.{retraction} does not exist. "
            "Use 'retr' or 'expmap'."
        )
    return AdaptedManifold(manifold, shape, retraction)


def _dimension(manifold: geoopt.Manifold, size: tuple[int, ...]) -> int:
    if hasattr(manifold, "dimension"):
        batch = size[: len(size) - cast("int", manifold.ndim)]  # geoopt declares None
        return math.prod(batch) * cast("Any", manifold).dimension(size[-1])
    try:
        x = manifold.origin(*size, dtype=torch.float64)
    except NotImplementedError as error:
        raise NotImplementedError(
            f"expected a manifold with `dimension(r)`, `origin` or `random`, to find its dimension; "
            f"{type(manifold).__name__} has none of them."
        ) from error
    if x.is_complex():
        raise ValueError(f"expected a manifold of real points, got {manifold.name}: points are float64 arrays here.")
    basis = torch.eye(x.numel(), dtype=x.dtype).reshape(-1, *size)
    # One by one: some manifolds of geoopt do not broadcast a point against a batch of vectors.
    projector = torch.stack([manifold.proju(x, e).flatten() for e in basis])
    return int(torch.linalg.matrix_rank(projector, rtol=RANK))


def to_tensor(array: np.ndarray) -> Tensor:
    """Float64 tensor with the entries of ``array``, which it does not share."""
    # Some manifolds of geoopt write into their arguments. In C order, as torch takes no negative strides.
    return torch.from_numpy(np.array(array, dtype=np.float64, order="C"))


def to_array(tensor: Tensor) -> np.ndarray:
    """Float64 array with the entries of ``tensor``."""
    return tensor.detach().double().cpu().numpy()
