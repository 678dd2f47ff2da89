r"""pymanopt's optimizers on geoopt's manifolds and ours, and the way to pymanopt's own fixed-rank matrices.

:func:`as_pymanopt` presents a ``geoopt.Manifold`` as a ``pymanopt.manifolds.manifold.Manifold``, whose points and
tangent vectors are float64 arrays of one shape. :func:`pymanopt_problem` makes a problem of a function of tensors. The
other functions carry pairs of factors to pymanopt's ``FixedRankEmbedded`` and back: the same matrix, as ``(u, s, vt)``.

The only package that imports pymanopt; nothing imports it. Knows ``geoopt.Manifold``, no concrete manifold.
"""

try:
    import pymanopt as pymanopt
except ImportError as error:
    raise ImportError(
        "quotient_nets.interop needs pymanopt, which is not installed. Install it with the extra `interop`: "
        "pip install 'quotient-nets[interop]'"
    ) from error

from quotient_nets.interop.adapter import AdaptedManifold, as_pymanopt
from quotient_nets.interop.problem import pymanopt_problem
from quotient_nets.interop.triples import from_svd_tangent, from_svd_triple, to_svd_tangent, to_svd_triple

__all__ = [
    "AdaptedManifold",
    "as_pymanopt",
    "from_svd_tangent",
    "from_svd_triple",
    "pymanopt_problem",
    "to_svd_tangent",
    "to_svd_triple",
]
