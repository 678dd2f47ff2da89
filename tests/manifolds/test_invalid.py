"""What is no point or no tangent vector: checks say why, operations give no number for that element."""

import geoopt
import pytest
import torch
from torch.testing import assert_close

from quotient_nets.manifolds import (
    AdaptiveEuclidean,
    ComplexRankOne,
    EmbeddedFixedRank,
    FixedRank,
    FixedRankMatrices,
    InvariantFixedRank,
    PolarFixedRank,
    PreconditionedFixedRank,
    PSDFixedRank,
)
from tests.cases import FIXED_RANK_OPERATIONS, Operation, draw, each_operation

USE_A_FRAME = [op for op in FIXED_RANK_OPERATIONS if op.method != "retr"]
M = InvariantFixedRank(4, 3)


@each_operation
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_an_invalid_number_spoils_its_own_element_only(
    manifold: geoopt.Manifold, shape: tuple[int, ...], op: Operation, bad: float
) -> None:
    roles = draw(manifold, (3,), shape)
    for role in op.takes:
        spoiled = {r: a.clone() for r, a in roles.items()}
        spoiled[role][1].view(-1)[-1] = bad
        actual, expected = op(manifold, spoiled), op(manifold, roles)
        assert_close(actual[::2], expected[::2], rtol=0, atol=0)
        if isinstance(manifold, FixedRankMatrices | ComplexRankOne):  # weights are independent in the adaptive metric
            assert not bool(actual[1].isfinite().all()), f"{bad} in {role!r} gave a number"


@pytest.mark.parametrize("op", USE_A_FRAME, ids=lambda op: op.method)
@pytest.mark.parametrize("how", ["zero H", "zero column", "equal columns"])
def test_a_rank_deficient_element_gives_no_number(op: Operation, how: str) -> None:
    # The tangent projection of a difference of matrices exists for a matrix of any rank.
    role = "y" if "y" in op.takes and op.method != "inverse_orthographic" else "x"
    roles = draw(M, (3,), (7, 2))
    spoiled = roles | {role: roles[role].clone()}
    if how == "zero H":
        spoiled[role][1, 4:] = 0
    else:
        spoiled[role][1, :4, 1] = 0 if how == "zero column" else spoiled[role][1, :4, 0]
    actual, expected = op(M, spoiled), op(M, roles)
    assert_close(actual[::2], expected[::2], rtol=0, atol=0)
    assert not bool(actual[1].isfinite().all())


def point() -> torch.Tensor:
    return torch.randn(3, 7, 2, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_checks_accept_points_and_horizontal_vectors(dtype: torch.dtype) -> None:
    x = M.random(3, 7, 2).to(dtype)
    u = M.proju(x, torch.randn(3, 7, 2).to(dtype))
    tolerance = 10 * torch.finfo(dtype).eps
    assert M.check_point_on_manifold(x, explain=True) == (True, None)
    M.assert_check_point_on_manifold(x)
    assert M.check_vector_on_tangent(x, u, explain=True, atol=tolerance, rtol=tolerance) == (True, None)


@pytest.mark.parametrize("shape", [(6, 2), (8, 2), (2, 6, 1), (7, 4), (7, 0), (7,), ()])
def test_checks_refuse_a_wrong_shape(shape: tuple[int, ...]) -> None:
    ok, reason = M.check_point(torch.ones(shape), explain=True)
    assert not ok
    if len(shape) >= 2:
        assert "must have shape (..., 7, r) with 1 <= r <= 3: n=4 rows of G above m=3" in reason
        assert f"got {shape}" in reason
    message = "must have shape" if len(shape) >= 2 else "requires more than 2 dim"
    for create in (lambda *s: M.assert_check_point(torch.ones(s)), M.random, M.origin):
        with pytest.raises(ValueError, match=message):
            create(*shape)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_checks_refuse_a_number_that_is_not_finite(bad: float) -> None:
    x = point()
    x[1, 5, 0] = bad
    ok, reason = M.check_point_on_manifold(x, explain=True)
    assert not ok
    assert "expected finite factors, got NaN or Inf" in reason
    assert M.deficient(x).tolist() == [False, False, False]  # another reason, and another remedy
    with pytest.raises(ValueError, match="expected finite factors"):
        M.assert_check_point_on_manifold(x)


@pytest.mark.parametrize("rows", [slice(0, 4), slice(4, 7)], ids="GH")
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_checks_refuse_a_deficient_rank(rows: slice, size: float) -> None:
    x = size * point()
    assert M.check_point_on_manifold(x)
    assert M.deficient(x).tolist() == [False, False, False]
    x[1, rows, 1] = 3 * x[1, rows, 0]
    ok, reason = M.check_point_on_manifold(x, explain=True)
    assert not ok
    assert "expected factors of full rank r=2" in reason
    assert "[[1]]" in reason
    assert "Use a smaller r" in reason
    assert M.deficient(x).tolist() == [False, True, False]
    assert not M.check_point_on_manifold(x[1])


@pytest.mark.parametrize("condition", [1e8, 1e11])
def test_checks_accept_an_ill_conditioned_point(condition: float) -> None:
    x = point()[0]
    x[:4] = torch.linalg.qr(x[:4])[0] * torch.tensor([1, 1 / condition])
    assert M.check_point_on_manifold(x)


def test_checks_refuse_a_vector_along_the_orbit() -> None:
    x = point()
    u = M.proju(x, torch.randn_like(x))
    v = u.clone()
    v[1] = v[1] + 1e-3 * M.infinitesimal_action(x[1], torch.eye(2, dtype=torch.float64))
    ok, reason = M.check_vector_on_tangent(x, v, explain=True)
    assert not ok
    assert "expected horizontal vectors" in reason
    assert "Project with `proju(x, u)`" in reason
    assert M.check_vector_on_tangent(x, v, atol=1.0)


@pytest.mark.parametrize("manifold", [M, AdaptiveEuclidean(2)], ids=["fixed rank", "adaptive"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_checks_refuse_a_vector_that_is_not_finite(manifold: geoopt.Manifold, bad: float) -> None:
    x, u = torch.ones(2, 7, 2), torch.zeros(2, 7, 2)
    x[:, ::2, 1] = 2
    assert manifold.check_vector_on_tangent(x, u)
    u[1, 3, 1] = bad
    assert not manifold.check_vector_on_tangent(x, u)


def test_checks_of_the_adaptive_metric() -> None:
    m, x = AdaptiveEuclidean(), torch.tensor([1.0, 0.0, -2.0])
    assert m.check_point_on_manifold(x)
    ok, reason = m.check_point_on_manifold(torch.tensor([1.0, torch.nan]), explain=True)
    assert (ok, reason) == (False, "expected finite coordinates, got NaN or Inf")
    assert m.check_vector_on_tangent(x, torch.tensor([5.0, 0.0, -7.0]))
    ok, reason = m.check_vector_on_tangent(x, torch.tensor([0.0, 0.1, 0.0]), explain=True)
    assert not ok
    assert "no component along coordinates that are exactly zero" in reason


@pytest.mark.parametrize(
    ("g", "h"), [((5, 2), (3, 2)), ((4, 2), (4, 2)), ((4, 2), (3, 1)), ((4,), (3, 2)), ((2, 4), (2, 3))]
)
def test_packing_refuses_factors_of_other_shapes(g: tuple[int, ...], h: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected factors of shapes \(..., 4, r\) and \(..., 3, r\)") as e:
        M.pack_point(torch.ones(g), torch.ones(h))
    assert str(g) in str(e.value)
    assert str(h) in str(e.value)


@pytest.mark.parametrize("condition", [0.5, -1.0, torch.nan])
def test_group_elements_have_a_condition_of_one_at_least(condition: float) -> None:
    with pytest.raises(ValueError, match="expected a condition number of at least 1, got"):
        M.random_element(2, condition=condition)


def test_an_unknown_path_is_refused() -> None:
    for manifold, x in [(M, point()), (AdaptiveEuclidean(), torch.ones(3))]:
        space = manifold.at(x)
        with pytest.raises(ValueError, match=r"expected a path 'retr'.* got 'shortcut'"):
            space.move(space.origin(), "shortcut")


@pytest.mark.parametrize("metric", [InvariantFixedRank, PreconditionedFixedRank, EmbeddedFixedRank])
def test_vertical_vectors_are_refused_also_where_the_metric_gives_them_no_length(metric: type[FixedRank]) -> None:
    m, x = metric(4, 3), point()
    v = m.infinitesimal_action(x, torch.randn(3, 2, 2, dtype=torch.float64))
    assert m.check_vector_on_tangent(x, m.proju(x, v))
    assert not m.check_vector_on_tangent(x, v)
    assert not m.check_vector_on_tangent(x, torch.randn_like(x))
    space = m.at(x)
    residual = space.certificates(space.coordinates(v))["horizontality_residual"]
    assert_close(residual, torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize(
    "manifold", [InvariantFixedRank(4, 3), PolarFixedRank(3, 2), PSDFixedRank(7), ComplexRankOne(4, 3)]
)
def test_integers_are_refused_by_name(manifold: geoopt.Manifold) -> None:
    x = torch.ones(7, 2, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"floating point numbers, got torch\.int64\. Convert it"):
        manifold.proju(x, x)


@pytest.mark.parametrize("manifold", [InvariantFixedRank(4, 3), PolarFixedRank(3, 2)])
def test_operations_refuse_a_wrong_shape(manifold: geoopt.Manifold) -> None:
    x = torch.ones(8, 2)
    with pytest.raises(ValueError, match=r"FixedRank\(\d, \d\): `x` must have shape .* got \(8, 2\)\. Build it with"):
        manifold.proju(x, x)


@pytest.mark.parametrize("metric", [InvariantFixedRank, PreconditionedFixedRank, EmbeddedFixedRank])
@pytest.mark.parametrize("scale", [1e-70, 1e-6, 1e6, 1e70])
def test_geodesics_do_not_depend_on_the_unit(metric: type[FixedRank], scale: float) -> None:
    m, x = metric(4, 3), point()
    u = m.proju(x, torch.randn_like(x))
    u = u * (0.5 * m.exponential_radius(x).clamp_max(1.0) / m.norm(x, u))[:, None, None]
    expected = m.product(m.expmap(x, u))
    assert_close(m.product(m.expmap(scale * x, scale * u)) / scale**2, expected, rtol=1e-12, atol=1e-13)


def test_the_element_that_is_no_point_is_named_by_its_index() -> None:
    x = point()
    y = x + 0.01 * torch.randn_like(x)
    x[2] = 0
    with pytest.raises(ValueError, match=r"rank deficient at batch indices \[\[2\]\].*have to be trained first"):
        M.dist(x, y)


@pytest.mark.parametrize("metric", [InvariantFixedRank, PreconditionedFixedRank, EmbeddedFixedRank])
def test_a_zero_factor_has_no_distance_at_rank_one(metric: type[FixedRank]) -> None:
    m = metric(4, 3)
    x, y = torch.randn(2, 2, 7, 1, dtype=torch.float64)
    y[1, 4:] = 0
    for method in (m.dist, m.logmap):
        with pytest.raises(ValueError, match=r"rank deficient at batch indices \[\[1\]\]"):
            method(x, y)
    assert m.dist(x, y, check=False).isnan().tolist() == [False, True]


def test_best_approximation_refuses_noise_and_integers() -> None:
    m = InvariantFixedRank(6, 5)
    matrix = torch.randn(6, 2) @ torch.randn(2, 5)
    assert m.best_rank_r(matrix, 2).shape == (11, 2)
    with pytest.raises(ValueError, match="rank r=3 at least"):
        m.best_rank_r(matrix, 3)
    with pytest.raises(TypeError, match=r"got torch\.int64"):
        m.best_rank_r(torch.ones(6, 5, dtype=torch.int64), 1)


def test_distances_of_semidefinite_matrices_refuse_a_wrong_shape() -> None:
    x = torch.randn(5, 2)
    with pytest.raises(ValueError, match=r"got \(5, 2\)"):
        PSDFixedRank(6).dist(x, x)
