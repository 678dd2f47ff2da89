"""Sharpness of a model on data: its definition, its invariance, and every kind of model and batch."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import geoopt
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from quotient_nets import (
    AdaptiveEuclidean,
    InvariantFixedRank,
    ModelSharpness,
    model_sharpness,
    parameter_manifold,
    worst_case_sharpness,
)
from quotient_nets.demo import load_digits_split, load_digits_vit
from tests.models import MLP, TEXT, Stack, TiedLM, generic, tokens


def mse(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def classify(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


@pytest.fixture
def model() -> Stack:
    return generic(Stack())


@pytest.fixture
def batches() -> list[Tensor]:
    """Of different sizes."""
    return [tokens()[:1], torch.cat([tokens(), tokens()]), tokens()]


RUN: dict[str, Any] = {"rho": 0.2, "steps": 5}


def test_activation_checkpoints_are_computed_again_at_the_same_parameters(model) -> None:
    """The backward pass calls the model once more; at its own parameters the slope would be another, in silence."""

    def checkpointed(m: Any, batch: Tensor) -> Tensor:
        return checkpoint(m, batch, use_reentrant=False).square().mean()

    batches = [tokens()]
    plain = model_sharpness(model, mse, batches, rho=0.5, steps=8)
    again = model_sharpness(model, checkpointed, batches, rho=0.5, steps=8)
    assert again.value == pytest.approx(plain.value, rel=1e-12)
    assert again.batches[0].history == pytest.approx(plain.batches[0].history, rel=1e-12)


# -- the number ------------------------------------------------------------------------------------------------------


def test_value_is_the_weighted_mean_of_the_maxima_of_batches(model, batches) -> None:
    result = model_sharpness(model, mse, batches, **RUN)
    alone = [model_sharpness(model, mse, [batch], **RUN) for batch in batches]
    assert [batch.size for batch in result.batches] == [1, 4, 2]
    assert [batch.value for batch in result.batches] == [one.value for one in alone]
    values = torch.tensor([one.value for one in alone], dtype=torch.float64)
    weights = torch.tensor([1.0, 4.0, 2.0], dtype=torch.float64) / 7
    mean = (weights * values).sum()
    assert result.value == pytest.approx(float(mean), rel=1e-14)
    error = ((weights * (values - mean)).square().sum() * 3 / 2).sqrt()
    assert result.standard_error == pytest.approx(float(error), rel=1e-12)
    assert math.isnan(alone[0].standard_error)
    with torch.no_grad():
        base = sum(weight * mse(model, batch) for weight, batch in zip(weights, batches, strict=True))
    assert result.base_loss == pytest.approx(float(base), rel=1e-9)
    assert result.max_loss == pytest.approx(result.base_loss + result.value, rel=1e-12)


def test_agrees_with_worst_case_sharpness_on_the_same_manifold(model) -> None:
    """Nothing at the level of models but packing, checking and averaging."""
    batch = tokens()
    space = parameter_manifold(model)
    for path, translations in [("exact", False), ("second_order", False), ("exact", True), ("expmap", False)]:
        x = space.canonicalize(space.pack(model), translations=translations)
        manifold = space.section() if translations else space
        expected = worst_case_sharpness(lambda x: mse_at(model, space, x, batch), manifold, x, path=path, **RUN)
        result = model_sharpness(model, mse, [batch], path=path, translations=translations, **RUN)
        assert result.value == pytest.approx(float(expected.value), rel=1e-9)
        assert_close(torch.tensor(result.batches[0].history), expected.history.float(), rtol=1e-6, atol=0)
        assert result.first_order_share == pytest.approx(float(expected.first_order_share), rel=1e-9)


def mse_at(model: nn.Module, space: Any, x: Tensor, batch: Tensor) -> Tensor:
    return space.call(model, x, batch).square().mean()


def test_maximum_is_attained_at_the_end_of_a_path_in_the_ball(model) -> None:
    batch = tokens()
    space = parameter_manifold(model)
    x = space.canonicalize(space.pack(model))
    found = worst_case_sharpness(lambda x: mse_at(model, space, x, batch), space.section(), x, path="exact", **RUN)
    assert float(space.norm(x, found.direction)) <= RUN["rho"] * (1 + 1e-12)
    end = space.exact(x, found.direction)
    rise = (mse_at(model, space, end, batch) - mse(model, batch)).detach()
    assert model_sharpness(model, mse, [batch], **RUN).value == pytest.approx(float(rise), rel=1e-8)


def test_sequence_of_radii_is_separate_calls(model, batches) -> None:
    radii = (0.05, 0.1, 0.4)
    together = model_sharpness(model, mse, batches, rho=radii, steps=4)
    assert isinstance(together, tuple)
    assert together == tuple(model_sharpness(model, mse, batches, rho=rho, steps=4) for rho in radii)
    assert model_sharpness(model, mse, batches, rho=[0.1], steps=4) == (together[1],)


def test_same_seed_gives_the_same_numbers(model, batches) -> None:
    run = RUN | {"restarts": 2}
    first = model_sharpness(model, mse, batches, **run)
    torch.rand(7)
    assert model_sharpness(model, mse, iter(batches), **run) == first
    assert model_sharpness(model, mse, batches, **run, seed=0) == first


def test_seed_is_that_of_the_random_starts(model) -> None:
    with torch.no_grad():  # then the loss has no slope at all, and one step shows in which direction it went
        model.head.weight.zero_()
        model.head.bias.zero_()
    run = {"rho": 0.1, "steps": 1, "space": parameter_manifold(model, rest=geoopt.Euclidean)}
    batch = tokens()
    one, two, three = (model_sharpness(model, mse, [batch], seed=seed, **run) for seed in (1, 2, 1))
    assert one == three
    assert one.value != two.value
    assert (one.settings["seed"], two.settings["seed"]) == (1, 2)


def test_sharpness_does_not_fall_with_the_radius(model) -> None:
    radii = [0.01, 0.03, 0.1, 0.3, 1.0]
    values = [r.value for r in model_sharpness(model, mse, [tokens()], rho=radii, steps=30)]
    assert all(b >= 0.99 * a for a, b in pairwise(values))  # 1 %: neither search is complete
    assert values[-1] > 10 * values[0] > 0


def test_more_starts_find_no_less(model) -> None:
    batch = tokens()
    one, three = (model_sharpness(model, mse, [batch], restarts=n, **RUN).value for n in (1, 3))
    assert three >= one


def test_small_balls_are_of_first_order_and_large_ones_are_not(model) -> None:
    small, large = model_sharpness(model, mse, [tokens()], rho=[1e-4, 1.0], steps=20)
    assert small.first_order_share == pytest.approx(1.0, abs=0.01)
    assert large.first_order_share < 0.9


def test_small_balls_give_the_norm_of_the_gradient(model) -> None:
    batch = tokens()
    space = parameter_manifold(model)
    x = space.pack(model).requires_grad_()
    (e,) = torch.autograd.grad(space.call(model, x, batch).square().mean(), x)
    slope = space.norm(x.detach(), space.egrad2rgrad(x.detach(), e))
    result = model_sharpness(model, mse, [batch], rho=1e-4, translations=False)
    assert result.value == pytest.approx(1e-4 * float(slope), rel=1e-2)


def test_history_and_certificates(model) -> None:
    result = model_sharpness(model, mse, [tokens(), tokens()], rho=0.2, steps=8)
    for batch in result.batches:
        assert len(batch.history) == 9
        assert batch.history[0] == 0
        assert list(batch.history) == sorted(batch.history)
        assert batch.history[-1] == pytest.approx(batch.value)
        assert batch.value == pytest.approx(batch.max_loss - batch.base_loss, rel=1e-12)
    certificates = result.certificates
    assert certificates["horizontality_residual"] < 1e-10
    assert 0.9 < certificates["relative_norm"] <= 1 + 1e-12
    assert certificates["rejected_steps"] == 0
    # The key and value biases of the canonical point are in the blocks, and no zeros of the rest
    assert certificates["zero_weights"] == 0
    assert 1 <= certificates["condition_number"] < 1e3
    assert 0 <= certificates["spectral_gap"] < 1
    assert model_sharpness(model, mse, [tokens()], rho=0.01, steps=40).converged


# -- invariance ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> tuple[Any, list[tuple[Tensor, Tensor]]]:
    split = load_digits_split()
    return load_digits_vit(), [(split.train_images[:64], split.train_labels[:64])]


@pytest.mark.parametrize("translations", [True, False])
def test_geodesic_sharpness_of_a_trained_model_is_that_of_its_function(digits, translations: bool) -> None:
    model, batches = digits
    space = parameter_manifold(model)
    x = space.pack(model)
    run = {"rho": 0.1, "steps": 8, "space": space, "translations": translations, "check": False}
    original = model_sharpness(model, classify, batches, **run).value
    for condition in (1.0, 1e2, 1e4):
        y = space.random_action(x, condition=condition, translations=translations)
        moved = model_sharpness(model, classify, batches, x=y, **run).value
        # float32 weights hold a function to about 1e-7 times the condition of their representative
        assert moved / original == pytest.approx(1.0, abs=1e-3)


def test_adaptive_sharpness_of_a_trained_model_is_that_of_its_parameters(digits) -> None:
    model, batches = digits
    space = parameter_manifold(model)
    y = space.random_action(space.pack(model), condition=1e2)
    run = {"rho": 0.1, "steps": 8, "space": parameter_manifold(model, attention=AdaptiveEuclidean)}
    original = model_sharpness(model, classify, batches, **run).value
    moved = model_sharpness(model, classify, batches, x=y, **run).value
    assert not 0.8 < moved / original < 1.25


@pytest.mark.parametrize("path", ["exact", "second_order"])
@pytest.mark.parametrize("translations", [True, False])
def test_invariance_in_float64(model, path: str, translations: bool) -> None:
    batch = tokens()
    space = parameter_manifold(model)
    run = RUN | {"path": path, "translations": translations, "space": space, "restarts": 2}
    original = model_sharpness(model, mse, [batch], **run).value
    y = space.random_action(space.pack(model), condition=1e3, translations=translations)
    # Random starts are drawn at the canonical point, so they are invariant too
    assert model_sharpness(model, mse, [batch], x=y, **run).value == pytest.approx(original, rel=1e-7)


def test_translations_matter_unless_they_are_divided_out(model) -> None:
    batch = tokens()
    space = parameter_manifold(model)
    x = space.pack(model)
    shifted = space.random_action(x, condition=1.0)
    plain = [model_sharpness(model, mse, [batch], x=y, translations=False, **RUN).value for y in (x, shifted)]
    assert abs(plain[1] / plain[0] - 1) > 1e-3
    held = [model_sharpness(model, mse, [batch], x=y, **RUN).value for y in (x, shifted)]
    assert held[1] == pytest.approx(held[0], rel=1e-9)


def test_model_of_elementwise_blocks_has_adaptive_sharpness() -> None:
    model, batch = generic(MLP()), torch.randn(5, 4, dtype=torch.float64)
    geodesic = model_sharpness(model, mse, [batch], **RUN)
    adaptive = model_sharpness(model, mse, [batch], space=parameter_manifold(model, attention=AdaptiveEuclidean), **RUN)
    assert geodesic.batches == adaptive.batches
    space = parameter_manifold(model)
    flat = worst_case_sharpness(
        lambda x: mse_at(model, space, x, batch), AdaptiveEuclidean(), space.pack(model), path="retr", **RUN
    )
    assert geodesic.value == pytest.approx(float(flat.value), rel=1e-12)


@pytest.mark.parametrize("path", ["exact", "second_order", "retr", "expmap"])
def test_pruned_weights_stay_and_are_counted(path: str) -> None:
    model, batch = generic(MLP()), torch.randn(5, 4, dtype=torch.float64)
    with torch.no_grad():
        model[0].weight[:2] = 0.0
        model[2].bias[1] = -0.0
    result = model_sharpness(model, mse, [batch], path=path, **RUN)
    assert result.certificates["zero_weights"] == 2 * 4 + 1
    assert result.value > 0

    smaller = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    smaller.load_state_dict(model.state_dict())
    smaller[0].weight.requires_grad_(False)
    # Freezing the whole layer leaves less to move: pruned weights alone are what stays
    assert model_sharpness(smaller, mse, [batch], path=path, **RUN).value < result.value

    seen: list[Tensor] = []

    def watching(m: Any, b: Tensor) -> Tensor:
        seen.append(m(b).detach())
        assert not (m.state_dict()["0.weight"][:2]).any()
        return mse(m, b)

    model_sharpness(model, watching, [batch], path=path, **RUN)
    assert len(seen) >= RUN["steps"]


def test_layer_of_zeros_has_the_sharpness_of_the_model_without_it() -> None:
    model, batch = generic(MLP()), torch.randn(5, 4, dtype=torch.float64)
    with torch.no_grad():
        model[0].weight.zero_()
    frozen = generic(MLP())
    frozen.load_state_dict(model.state_dict())
    frozen[0].weight.requires_grad_(False)
    assert model_sharpness(model, mse, [batch], **RUN).value == pytest.approx(
        model_sharpness(frozen, mse, [batch], **RUN).value, rel=1e-12
    )


# -- models, batches, losses -----------------------------------------------------------------------------------------


def structures() -> dict[str, tuple[Any, Any]]:
    x = tokens()
    labels = torch.tensor([0, 2])
    return {
        "tensor": (x, mse),
        "tuple": ((x, labels), classify),
        "list": ([x, labels], classify),
        "dict": ({"x": x, "labels": labels}, lambda m, b: classify(m, (b["x"], b["labels"]))),
        "nested": ({"inputs": (x, {"pad": None}), "labels": [labels]}, lambda m, b: mse(m, b["inputs"][0])),
        "strings beside tensors": (("a name", x, 3), lambda m, b: mse(m, b[1])),
        "encoding": (transformers.BatchEncoding({"x": x}), lambda m, b: mse(m, b["x"])),
        "encoding in a tuple": ((transformers.BatchEncoding({"x": x}),), lambda m, b: mse(m, b[0]["x"])),
        "features": (transformers.BatchFeature({"pixel_values": x}), lambda m, b: mse(m, b["pixel_values"])),
        "scalar first": ((torch.tensor(1.0), x), lambda m, b: mse(m, b[1])),
        "half": (x.bfloat16(), lambda m, b: mse(m, b.double())),
    }


@pytest.mark.parametrize("name", structures())
def test_batches_of_any_structure(model, name: str) -> None:
    batch, loss = structures()[name]
    result = model_sharpness(model, loss, [batch, batch], **RUN)
    assert result.value > 0
    assert [b.size for b in result.batches] == [2, 2]


@pytest.mark.parametrize("container", [transformers.BatchFeature, dict])
def test_floating_inputs_of_half_precision_models(container: type) -> None:
    model = generic(Stack()).bfloat16()
    batch = container({"pixel_values": tokens().bfloat16()})
    result = model_sharpness(model, lambda m, b: mse(m, b["pixel_values"]).float(), [batch], **RUN)
    assert result.value > 0


def test_fingerprint_tells_data_apart(model) -> None:
    x = tokens()

    def of(batches: list[Any]) -> str:
        return model_sharpness(model, lambda m, b: mse(m, b[0]), batches, rho=0.1, steps=1).settings["data"]

    same = of([(x, torch.tensor([True]), torch.tensor(1.5).bfloat16(), "text")])
    assert same == of([(x.clone(), torch.tensor([True]), torch.tensor(1.5).bfloat16(), "text")])
    nearly = x.clone()
    nearly[-1, -1, -1] += 1e-12
    others = [
        [(nearly, torch.tensor([True]), torch.tensor(1.5).bfloat16(), "text")],
        [(x, torch.tensor([False]), torch.tensor(1.5).bfloat16(), "text")],
        [(x, torch.tensor([True]), torch.tensor(1.5).bfloat16(), "other")],
    ]
    assert len({same, *(of(batches) for batches in others)}) == 4


def test_loaders_and_generators(model) -> None:
    data = torch.cat([tokens() for _ in range(3)])
    listed = model_sharpness(model, mse, list(data.split(4)), **RUN)
    loader = DataLoader(data, batch_size=4)
    assert model_sharpness(model, mse, loader, **RUN) == listed
    assert model_sharpness(model, mse, iter(data.split(4)), **RUN) == listed
    of_tuples = DataLoader(TensorDataset(data), batch_size=4)
    result = model_sharpness(model, lambda m, b: mse(m, b[0]), of_tuples, **RUN)
    assert result.batches == listed.batches


def test_loader_of_a_stream_has_no_length(model) -> None:
    data = torch.cat([tokens() for _ in range(2)])

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(data)

    totals: list[int] = []
    loader = DataLoader(Stream(), batch_size=2)
    result = model_sharpness(model, mse, loader, progress=lambda done, total: totals.append(total), **RUN)
    assert result.batches == model_sharpness(model, mse, list(data.split(2)), **RUN).batches
    assert set(totals) == {0}


def test_hugging_face_model_with_its_own_loss() -> None:
    config = transformers.BertConfig(**TEXT, num_labels=3)
    model = transformers.BertForSequenceClassification(config)  # in training mode, with dropout
    ids = torch.randint(3, 19, (4, 6))
    batch = transformers.BatchEncoding({"input_ids": ids, "labels": torch.tensor([0, 1, 2, 0])})
    result = model_sharpness(model, lambda m, b: m(**b).loss, [batch], rho=0.1, steps=3)
    assert result.value > 0
    assert result.batches[0].size == 4
    assert model.training


def test_tied_language_model() -> None:
    model, ids = generic(TiedLM()), torch.randint(7, (2, 4))

    def loss(m: Any, b: Tensor) -> Tensor:
        return cross_entropy(m(b).flatten(0, 1), b.flatten())

    assert model_sharpness(model, loss, [ids], **RUN).value > 0


def test_loss_may_call_parts_of_the_model(model) -> None:
    batch = tokens()

    def by_parts(m: Any, b: Tensor) -> Tensor:
        hidden = getattr(m.layers, "1")(getattr(m.layers, "0")(b))
        return m.head(hidden.mean(dim=1)).square().mean()

    assert model_sharpness(model, by_parts, [batch], **RUN).value == pytest.approx(
        model_sharpness(model, mse, [batch], **RUN).value, rel=1e-9
    )


def test_micro_batches_inside_a_loss_change_nothing(model) -> None:
    batch = torch.cat([tokens(), tokens()])

    def accumulated(m: Any, b: Tensor) -> Tensor:
        return torch.stack([mse(m, part) for part in b.split(1)]).mean()

    assert model_sharpness(model, accumulated, [batch], **RUN).value == pytest.approx(
        model_sharpness(model, mse, [batch], **RUN).value, rel=1e-9
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_models_of_other_dtypes(dtype: torch.dtype) -> None:
    wide, batch = generic(Stack()), tokens()
    narrow = generic(Stack())
    narrow.load_state_dict(wide.state_dict())
    narrow.to(dtype)
    result = model_sharpness(narrow, lambda m, b: mse(m, b).float(), [batch.to(dtype)], **RUN)
    expected = model_sharpness(wide, mse, [batch], **RUN)
    # A forward pass in half precision has 3 digits, and its gradient the same
    assert result.value == pytest.approx(expected.value, rel=1e-3 if dtype is torch.float32 else 0.2)


def test_frozen_parameters_do_not_move(model) -> None:
    batch = tokens()
    everything = model_sharpness(model, mse, [batch], **RUN)
    model.layers.requires_grad_(False)
    head = model_sharpness(model, mse, [batch], **RUN)
    assert head.settings["parameters"] == sum(p.numel() for p in model.head.parameters())
    assert 0 < head.value < everything.value
    frozen = model_sharpness(model, mse, [batch], space=parameter_manifold(model, frozen=True), **RUN)
    assert frozen.batches == everything.batches


def test_loss_that_vanishes_at_the_model(model) -> None:
    """Value and gradient are zero, as for a model that fits exactly: the search starts in a random direction."""
    batch = tokens()
    with torch.no_grad():
        targets = model(batch)
    result = model_sharpness(model, lambda m, b: (m(b) - targets).square().mean(), [batch], rho=0.1, steps=20)
    assert result.value > 1e-6
    assert result.base_loss < 1e-20


# -- options ---------------------------------------------------------------------------------------------------------


def test_point_of_another_model(model) -> None:
    batch, other = tokens(), generic(Stack())
    space = parameter_manifold(model)
    there = model_sharpness(model, mse, [batch], x=space.pack(other), **RUN)
    assert there.batches == model_sharpness(other, mse, [batch], **RUN).batches
    assert there.base_loss == pytest.approx(mse(other, batch).item(), rel=1e-9)


def test_paths(model) -> None:
    batch = tokens()
    values = {
        path: model_sharpness(model, mse, [batch], path=path, rho=1.0, steps=5).value
        for path in ("exact", "second_order", "expmap", "retr")
    }
    assert len(set(values.values())) == 4
    small = [model_sharpness(model, mse, [batch], path=path, rho=1e-4, steps=5).value for path in values]
    assert small == pytest.approx([small[0]] * 4, rel=1e-3)  # all start with the same velocity


@pytest.mark.parametrize(("radii", "restarts"), [(0.1, 1), ((0.1, 0.2), 3)])
def test_progress_counts_every_pass(model, radii, restarts: int) -> None:
    calls: list[tuple[int, int]] = []
    run = {"steps": 3, "restarts": restarts, "progress": lambda *call: calls.append(call)}
    model_sharpness(model, mse, [tokens(), tokens()], rho=radii, **run)
    total = 2 * 3 * restarts * (2 if isinstance(radii, tuple) else 1)
    assert calls == [(done, total) for done in range(1, total + 1)]


def test_one_forward_and_one_backward_pass_for_each_step(model) -> None:
    passes = []
    model.head.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    model_sharpness(model, mse, [tokens()], rho=0.1, steps=20, check=False)
    # Two to see that the loss is deterministic, one at the point itself; all in one grad mode, since torch's fast path
    # without gradients computes another function of padded tokens
    assert len(passes) == 2 + 1 + 20
    assert all(passes)


def test_settings_say_what_was_measured(model) -> None:
    space = parameter_manifold(model, block_weights={"rest": 2.0})
    result = model_sharpness(model, mse, [tokens()], space=space, translations=False, path="second_order", **RUN)
    settings = result.settings
    assert result.rho == RUN["rho"]
    assert settings["path"] == "second_order"
    assert settings["steps"] == RUN["steps"]
    assert settings["translations"] is False
    assert settings["block_weights"] == [1.0, 1.0, 2.0]
    assert settings["parameters"] == space.layout.size
    assert any("query_key: 4 heads" in block and "InvariantFixedRank" in block for block in settings["blocks"])
    assert settings["rest"] == "AdaptiveEuclidean"


def test_block_weights_change_the_ball(model) -> None:
    """Scaling the whole metric by four is halving the radius."""
    batch = tokens()
    space = parameter_manifold(model, block_weights={"query_key": 4.0, "value_output": 4.0, "rest": 4.0})
    heavy = model_sharpness(model, mse, [batch], space=space, rho=0.4, steps=5)
    plain = model_sharpness(model, mse, [batch], rho=0.2, steps=5)
    assert heavy.value == pytest.approx(plain.value, rel=1e-9)


def test_results_can_be_saved_and_loaded(model, tmp_path: Path) -> None:
    result = model_sharpness(model, mse, [tokens(), tokens()], **RUN)
    path = tmp_path / "sharpness.json"
    result.save(path)
    assert ModelSharpness.load(path) == result
    assert ModelSharpness.load(str(path)).value == result.value
    plain = json.loads(path.read_text())
    assert plain["value"] == result.value
    assert plain["settings"]["data"] == result.settings["data"]


def test_saving_replaces_a_file_only_when_asked(model, tmp_path: Path) -> None:
    result = model_sharpness(model, mse, [tokens()], rho=0.1, steps=1)
    path = tmp_path / "sharpness.json"
    path.write_text("precious")
    with pytest.raises(FileExistsError, match=r"sharpness\.json.*overwrite=True"):
        result.save(path)
    assert path.read_text() == "precious"
    result.save(path, overwrite=True)
    assert ModelSharpness.load(path) == result


def test_saved_results_are_strict_json(model, tmp_path: Path) -> None:
    """The standard error of one batch is NaN, which JSON does not have: other readers refuse the word."""
    path = tmp_path / "sharpness.json"
    model_sharpness(model, mse, [tokens()], rho=0.1, steps=1).save(path)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)


def test_default_space_divides_attention_out(model) -> None:
    result = model_sharpness(model, mse, [tokens()], rho=0.1, steps=1)
    assert [block.split(":")[0] for block in result.settings["blocks"]] == ["query_key", "value_output"]
    explicit = parameter_manifold(model, attention=InvariantFixedRank, rest=AdaptiveEuclidean)
    again = model_sharpness(model, mse, [tokens()], rho=0.1, steps=1, space=explicit)
    assert again.settings["blocks"] == result.settings["blocks"]
