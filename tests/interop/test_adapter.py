"""The adapter's methods are the manifold's, and what is missing is said."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import geoopt
import numpy as np
import pytest
import torch

from quotient_nets import InvariantFixedRank, PSDFixedRank
from quotient_nets.interop import AdaptedManifold, as_pymanopt, pymanopt_problem
from quotient_nets.manifolds import ComplexRankOne

ORACLE = json.loads((Path(__file__).parents[1] / "data" / "manopt_2factors.json").read_text())["cases"]


class WithoutHessian(InvariantFixedRank):
    """Has a path of second order only, from which the adapter makes a Hessian."""

    def __getattribute__(self, name: str) -> Any:
        if name == "ehess2rhess":
            raise AttributeError(name)
        return super().__getattribute__(name)


def pair(n: int, m: int, r: int) -> AdaptedManifold:
    return as_pymanopt(InvariantFixedRank(n, m), n + m, r)


@pytest.mark.parametrize(
    ("manifold", "size", "dimension"),
    [
        (InvariantFixedRank(5, 4), (9, 2), 14),
        (InvariantFixedRank(5, 4), (9, 1), 8),
        (PSDFixedRank(5), (5, 2), 9),
        (ComplexRankOne(4, 3), (7, 2), 12),
        (geoopt.EuclideanStiefel(), (5, 2), 7),
        (geoopt.SymmetricPositiveDefinite(), (3, 3), 6),
        (geoopt.Euclidean(), (3,), 3),
    ],
)
def test_methods_are_those_of_the_manifold(manifold: Any, size: tuple[int, ...], dimension: int) -> None:
    adapted = as_pymanopt(manifold, *size)
    x, y = adapted.random_point(), adapted.random_point()
    u, v = adapted.random_tangent_vector(x), adapted.random_tangent_vector(x)
    noise = np.random.default_rng(0).normal(size=size)
    a, b, c, d, e = map(torch.tensor, (x, y, u, v, noise))
    expected = {
        "inner_product": (manifold.inner(a, c, d).sum(), (x, u, v)),
        "projection": (manifold.proju(a, e), (x, noise)),
        "to_tangent_space": (c, (x, u)),
        "euclidean_to_riemannian_gradient": (manifold.egrad2rgrad(a, e.clone()), (x, noise)),
        "retraction": (manifold.retr(a, c), (x, u)),
        "exp": (manifold.expmap(a, c), (x, u)),
        "transport": (manifold.transp(a, b, c), (x, y, u)),
        "norm": (torch.tensor(1.0), (x, u)),
        "zero_vector": (torch.zeros(size), (x,)),
    }
    if size[-1] == 1 or isinstance(manifold, PSDFixedRank | ComplexRankOne | geoopt.SymmetricPositiveDefinite):
        expected["log"] = (manifold.logmap(a, b), (x, y))
        expected["dist"] = (manifold.dist(a, b), (x, y))
        expected["pair_mean"] = (manifold.expmap(a, manifold.logmap(a, b) / 2), (x, y))
    for name, (value, arguments) in expected.items():
        actual = getattr(adapted, name)(*arguments)
        np.testing.assert_allclose(actual, value, rtol=1e-10, atol=1e-11, err_msg=name)
    assert adapted.dim == dimension
    assert adapted.typical_dist == pytest.approx(dimension**0.5)


def test_random_draws_follow_numpy_and_leave_torch_alone() -> None:
    adapted, state = pair(4, 3, 2), torch.get_rng_state()
    draws = []
    for seed in (1, 1, 2):
        np.random.seed(seed)  # noqa: NPY002
        x = adapted.random_point()
        draws.append(np.stack([x, adapted.random_tangent_vector(x)]))
    np.testing.assert_array_equal(draws[0], draws[1])
    assert (draws[0] != draws[2]).all()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("manifold", [InvariantFixedRank(5, 4), PSDFixedRank(9)])
def test_taylor_slopes(manifold: Any) -> None:
    adapted = as_pymanopt(manifold, 9, 2, retraction="second_order")
    weights = torch.randn(manifold.product(torch.zeros(9, 2)).shape, dtype=torch.float64)
    problem = pymanopt_problem(lambda x: (weights * manifold.product(x).square()).sum(), adapted)
    x = adapted.random_point()
    u = adapted.random_tangent_vector(x)
    slope = adapted.inner_product(x, problem.riemannian_gradient(x), u)
    bend = adapted.inner_product(x, problem.riemannian_hessian(x, u), u)
    steps = np.array([1e-2, 1e-3])
    rise = np.array([problem.cost(adapted.retraction(x, t * u)) - problem.cost(x) for t in steps])
    for order, rest in ((2, rise - steps * slope), (3, rise - steps * slope - steps**2 * bend / 2)):
        assert np.log10(abs(rest[0] / rest[1])) == pytest.approx(order, abs=0.05)


@pytest.mark.parametrize("case", ORACLE, ids=lambda case: case["name"])
@pytest.mark.parametrize("manifold", [InvariantFixedRank, WithoutHessian])
def test_hessian_has_the_reference_numbers(manifold: type[InvariantFixedRank], case: dict[str, Any]) -> None:
    n, m, r = (case[key] for key in "nmr")
    adapted = as_pymanopt(manifold(n, m), n + m, r)
    keys = ("egrad", "ehess_eta", "eta")
    parts = [[case["inputs"][k] for k in "GH"], *(case["inputs"][k] for k in keys), case["exact"]["rhess"]]
    x, e, de, u, expected = (
        np.concatenate([np.reshape(p, (-1, case["r"])) for p in both]).astype(float) for both in parts
    )
    error = adapted.euclidean_to_riemannian_hessian(x, e, de, u) - expected
    assert adapted.norm(x, error) <= 1e-9 * (1 + adapted.norm(x, expected))


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    adapted = as_pymanopt(geoopt.EuclideanStiefel(), 4, 2)
    x, y = adapted.random_point(), adapted.random_point()
    with pytest.raises(NotImplementedError, match="EuclideanStiefel has no `logmap`"):
        adapted.log(x, y)
    with pytest.raises(NotImplementedError, match="EuclideanStiefel has no `dist`"):
        adapted.dist(x, y)
    sphere = as_pymanopt(geoopt.Sphere(), 3)
    x = sphere.random_point()
    with pytest.raises(NotImplementedError, match=r"ehess2rhess.*Sphere has neither.*ConjugateGradient"):
        sphere.euclidean_to_riemannian_hessian(x, x, x, x)
    with pytest.raises(NotImplementedError, match="Lorentz has no `random` here"):
        as_pymanopt(geoopt.Lorentz().double(), 3).random_point()
    monkeypatch.setattr(geoopt.Sphere, "random", geoopt.Manifold.random)
    with pytest.raises(NotImplementedError, match="to find its dimension; Sphere has none"):
        as_pymanopt(geoopt.Sphere(), 3)


@pytest.mark.parametrize(
    ("manifold", "size", "options", "message"),
    [
        (InvariantFixedRank(4, 3), (8, 2), {}, r"got \(8, 2\): `x` must have shape \(\.\.\., 7, r\)"),
        (InvariantFixedRank(4, 3), (7, 4), {}, r"1 <= r <= 3"),
        (InvariantFixedRank(4, 3), (7, 2), {"retraction": "cayley"}, r"InvariantFixedRank\.cayley does not exist"),
        (geoopt.PoincareBall(), (3,), {}, r"float64.*float32.*manifold\.double\(\)"),
        (geoopt.UpperHalf().double(), (2, 2), {}, r"real points"),
    ],
)
def test_what_is_refused(manifold: Any, size: tuple[int, ...], options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_pymanopt(manifold, *size, **options)


def test_arrays_of_another_shape_are_refused() -> None:
    adapted = pair(4, 3, 2)
    with pytest.raises(ValueError, match=r"expected an array of shape \(7, 2\).*got \(7, 1\)"):
        adapted.norm(adapted.random_point(), np.ones((7, 1)))


def test_arguments_are_copied() -> None:
    adapted = as_pymanopt(geoopt.Lorentz().double(), 3)  # its egrad2rgrad writes into its argument
    x, e = np.array([2**0.5, 1.0, 0.0]), np.arange(1.0, 4.0)
    reverse = adapted.euclidean_to_riemannian_gradient(x, e[::-1].copy()[::-1])  # a negative stride
    np.testing.assert_array_equal(adapted.euclidean_to_riemannian_gradient(x, e), reverse)
    np.testing.assert_array_equal(e, [1, 2, 3])


def test_without_pymanopt_the_extra_is_named() -> None:
    code = "import sys; sys.modules['pymanopt'] = None; import quotient_nets.interop"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "ImportError: quotient_nets.interop needs pymanopt" in run.stderr
    assert "quotient-nets[interop]" in run.stderr
