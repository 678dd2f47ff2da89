"""The parts a point is made of: factors, group elements, the balanced representative."""

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.testing import assert_close

from quotient_nets.manifolds import InvariantFixedRank
from tests.strategies import Case, fixed_rank, group_element, orthogonal

M = InvariantFixedRank(5, 4)
ROUNDING = 1e-10  # relative to |X| = 1, at condition 1e4 in a gauge of 10


@given(fixed_rank())
def test_representative_is_balanced_with_descending_spectrum(case: Case) -> None:
    m = case.manifold
    y, _ = m.canonicalize(case.x)
    g, h = m.unpack_tensor(y)
    s = torch.linalg.svdvals(m.product(case.x))[..., : y.shape[-1]]
    assert_close(g.mT @ g, torch.diag_embed(s), rtol=0, atol=1e-12)
    assert_close(h.mT @ h, torch.diag_embed(s), rtol=0, atol=1e-12)


@given(fixed_rank())
def test_representative_is_reached_by_the_group_element(case: Case) -> None:
    m, x = case.manifold, case.x
    y, a = m.canonicalize(x)
    assert_close(m.product(y), m.product(x), rtol=0, atol=1e-12)
    assert_close(m.action(x, a), y, rtol=0, atol=ROUNDING)


@given(fixed_rank(least=3.0))
def test_representative_stays_under_a_second_call(case: Case) -> None:
    y, _ = case.manifold.canonicalize(case.x)
    z, a = case.manifold.canonicalize(y)
    assert_close(z, y, rtol=0, atol=ROUNDING)
    assert_close(a, torch.eye(y.shape[-1]).to(a).expand_as(a), rtol=0, atol=1e-8)


@given(fixed_rank())
def test_representative_is_best_conditioned(case: Case) -> None:
    m = case.manifold
    y = m.canonicalize(case.x)[0]
    for _ in range(3):
        other = m.action(y, group_element(case.batch, y.shape[-1], 1.5))
        worst = [torch.stack([torch.linalg.cond(f) for f in m.unpack_tensor(z)]).amax(0) for z in (y, other)]
        assert bool((worst[0] <= worst[1] * (1 + 1e-9)).all())


@given(fixed_rank())
def test_frame_leads_from_the_factors_to_the_decomposition_and_back(case: Case) -> None:
    m, f = case.manifold, case.manifold.frame(case.x)
    for factor, basis, pull, push in zip(
        m.unpack_tensor(case.x), (f.g, f.h), (f.pull_g, f.pull_h), (f.push_g, f.push_h), strict=True
    ):
        assert_close(basis.mT @ basis, torch.eye(f.spectrum.shape[-1]).to(basis).expand_as(pull))
        assert_close(factor @ pull, basis, rtol=0, atol=1e-11)
        assert_close(basis @ push, factor, rtol=0, atol=1e-12)
    assert_close((f.g * f.spectrum[..., None, :]) @ f.h.mT, m.product(case.x), rtol=0, atol=1e-12)


def test_frame_of_float32_factors_is_computed_in_float64() -> None:
    x = M.action(torch.randn(20, 9, 3), group_element((20,), 3, 1e2).float())
    for single, double in zip(M.frame(x), M.frame(x.double()), strict=True):
        assert torch.equal(single, double.float())


def test_way_to_the_frame_loses_the_condition_of_a_factor_only() -> None:
    root = torch.tensor([1.0, 1e-2, 1e-4], dtype=torch.float64)  # cond(G) = 1e4, cond(X) = 1e8
    x = M.pack_point(*(orthogonal(200, rows, 3) * root @ orthogonal(3, 3) for rows in (M.n, M.m)))
    f = M.frame(x)
    for factor, pull, basis in zip(M.unpack_tensor(x), (f.pull_g, f.pull_h), (f.g, f.h), strict=True):
        assert_close(factor @ pull, basis, rtol=0, atol=1e-11)  # eps cond(G) = 2e-12


@pytest.mark.parametrize("r", [1, 3])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_frame_of_an_invalid_element_has_no_number(r: int, bad: float) -> None:
    x = torch.randn(3, 9, r)
    x[1, 0, 0] = bad
    spectrum = M.frame(x).spectrum.isfinite().all(-1)
    assert spectrum.tolist() == [True, False, True]


def test_frames_in_chunks_are_those_of_single_points() -> None:
    x = torch.randn(3, 13, 9, 2)  # 39 float32 pairs: two full chunks and a rest
    whole, single = M.frame(x), M.frame(x[2, 5])
    for part, expected in zip(whole, single, strict=True):
        assert part.dtype == torch.float32
        assert_close(part[2, 5], expected)


def test_signs_do_not_depend_on_the_representative() -> None:
    x = torch.randn(9, 3, dtype=torch.float64)
    flip = torch.tensor([[0, 1, 0], [-1, 0, 0], [0, 0, -1]], dtype=torch.float64)
    y = M.action(x, flip)
    assert_close(M.canonicalize(y)[0], M.canonicalize(x)[0], rtol=1e-12, atol=1e-12)
    assert_close(M.canonicalize(-1 * x)[0], M.canonicalize(x)[0], rtol=1e-12, atol=1e-12)
    column = x[:, :1]
    assert_close(M.canonicalize(-column)[0], M.canonicalize(column)[0], rtol=0, atol=0)


def test_packing_is_undone_by_unpacking_and_broadcasts() -> None:
    g, h = torch.randn(2, 1, 5, 3), torch.randn(4, 4, 3)
    x = M.pack_point(g, h)
    assert x.shape == (2, 4, 9, 3)
    unpacked = M.unpack_tensor(x)
    assert torch.equal(unpacked[0], g.expand(2, 4, 5, 3))
    assert torch.equal(unpacked[1], h.expand(2, 4, 4, 3))
    assert unpacked[0].data_ptr() == x.data_ptr()
    assert_close(M.product(x), g @ h.mT)


@pytest.mark.parametrize("r", [1, 2, 5])
@pytest.mark.parametrize("condition", [1.0, 10.0, 1e6])
def test_random_elements_have_their_condition_number(r: int, condition: float) -> None:
    generator = torch.Generator().manual_seed(0)
    a = M.random_element(40, r, condition=condition, generator=generator)
    assert a.shape == (40, r, r)
    s: Tensor = torch.linalg.svdvals(a)
    expected = torch.full((40,), condition if r > 1 else 1.0, dtype=torch.float64)
    assert_close(s[:, 0] / s[:, -1], expected, rtol=1e-8, atol=0)
    determinant = torch.linalg.det(a)
    assert_close(determinant.abs(), torch.ones_like(determinant), rtol=1e-6, atol=0)
    again = M.random_element(40, r, condition=condition, generator=generator.manual_seed(0))
    assert torch.equal(a, again)


@pytest.mark.parametrize("r", [1, 2, 3])
def test_random_elements_have_either_orientation(r: int) -> None:
    determinants = torch.linalg.det(M.random_element(40, r))
    assert set(determinants.sign().tolist()) == {-1.0, 1.0}


def test_random_elements_have_a_dtype() -> None:
    assert M.random_element(3, dtype=torch.float32).dtype == torch.float32
    assert M.random_element(2, 3).shape == (2, 3, 3)
