"""Models and data from files: Hugging Face directories, text and image files.

Nothing is downloaded, no code of a checkpoint is run, and pickles are read with ``weights_only`` alone. Used by the
command line only.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
MAX_TOKENS = 32
PROBE_STRENGTH = 10.0  # inverse regularisation of the probe on a model without a classification head


@dataclass(frozen=True)
class Task:
    """A model with labelled batches: what a sharpness measurement needs.

    Attributes:
        name: For tables.
        model: The model.
        batches: Dictionaries of tensors; ``"labels"`` holds the classes.
        logits: ``logits(model, batch)`` -> ``(examples, classes)``.
        description: How logits and data came about, for reports.
    """

    name: str
    model: nn.Module
    batches: tuple[dict[str, Tensor], ...]
    logits: Callable[[Any, dict[str, Tensor]], Tensor]
    description: str

    def loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        """Mean cross entropy."""
        return cross_entropy(self.logits(model, batch), batch["labels"])


def load_model(directory: Path) -> nn.Module:
    """Model of a local Hugging Face directory, in float32 and evaluation mode.

    Args:
        directory: Holds ``config.json`` and weights, as ``save_pretrained`` writes them.

    Raises:
        ValueError: The directory lacks a file, asks for code of its own, names a class that transformers does not have,
            holds a pickle that is not safe to read, or lacks weights that the class needs.
        ImportError: transformers is not installed.
    """
    config = _read_json(directory / "config.json")
    if "auto_map" in config:
        raise ValueError(
            f"{directory} asks for code of its own (`auto_map` in config.json); remote code is never run. "
            "Use a class that transformers ships."
        )
    if not any((directory / name).is_file() for name in WEIGHT_FILES):
        raise ValueError(f"expected weights in {directory}: one of {', '.join(WEIGHT_FILES)}; found none of them")
    with _quiet_transformers() as transformers:
        names = config.get("architectures") or []
        model_class = getattr(transformers, names[0], None) if names else None
        if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
            raise ValueError(
                f"expected `architectures` in {directory / 'config.json'} to name a class of transformers "
                f"{transformers.__version__}, got {names}. Save the model with `save_pretrained`."
            )
        try:
            model, report = model_class.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False, dtype=torch.float32, output_loading_info=True
            )
        except Exception as error:
            raise ValueError(f"cannot load {directory} as {names[0]}: {error}") from error
    missing = sorted(report["missing_keys"])
    if missing and all(name.startswith("pooler.") for name in missing):
        model.pooler = None  # saved without one; the hidden states do not depend on it
    elif missing:
        raise ValueError(f"{directory} has no weights for {', '.join(missing[:5])}; they would be random numbers")
    return model.eval()


def text_task(directory: Path, data: Path, *, limit: int, batch_size: int) -> Task:
    """Task from a text model and a file with one ``label<TAB>text`` in each line.

    A model without a classification head gets a probe: logistic regression on its mean-pooled last hidden states,
    fitted once at the original parameters and then held fixed.

    Args:
        directory: Hugging Face directory with a tokenizer.
        data: UTF-8 text; labels are integers from 0; lines that start with ``#`` are skipped.
        limit: Number of lines that are used.
        batch_size: Examples in a batch.

    Raises:
        ValueError: A file is missing or has another form.
    """
    labels, texts = _read_text(data, limit)
    model = _model_for(directory, "input_ids", "an `.npz` file with `images` and `labels`")
    with _quiet_transformers() as transformers:
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            raise ValueError(f"cannot load a tokenizer from {directory}: {error}") from error
    tokens = tokenizer(texts, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
    special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    words = [token for row in tokens["input_ids"].tolist() for token in row if token not in special]
    unknown = words.count(tokenizer.unk_token_id)
    if 2 * unknown >= len(words):
        # transformers invents a tokenizer where a directory has none.
        raise ValueError(
            f"expected a tokenizer in {directory} for the words of {data}; {unknown} of {len(words)} tokens are "
            "unknown to it. Save the tokenizer beside the model with `tokenizer.save_pretrained`."
        )
    inputs = {name: tensor for name, tensor in tokens.items() if isinstance(tensor, Tensor)}
    return _task(directory, model, inputs, torch.tensor(labels), batch_size)


def image_task(directory: Path, data: Path, *, limit: int, batch_size: int) -> Task:
    """Task from an image model and a numpy archive with ``images`` and ``labels``.

    Args:
        directory: Hugging Face directory.
        data: ``.npz`` with ``images`` ``(N, channels, height, width)``, already normalised for the model, and
            ``labels`` ``(N,)``.
        limit: Number of images that are used.
        batch_size: Examples in a batch.

    Raises:
        ValueError: A file is missing or has another form.
    """
    images, labels = _read_images(data, limit)
    model = _model_for(directory, "pixel_values", "a text file with `label<TAB>text` lines")
    channels = getattr(model.config, "num_channels", images.shape[1])
    if images.shape[1] != channels:
        raise ValueError(
            f"expected images (N, {channels}, height, width) in {data}, got {tuple(images.shape)}; move the channels "
            "to the second axis"
        )
    return _task(directory, model, {"pixel_values": images}, labels, batch_size)


def _model_for(directory: Path, kind: str, data: str) -> Any:
    """The model in ``directory`` if its input is of this kind; ``data`` says what it would need otherwise.

    Raises:
        ValueError: Its input is of another kind.
    """
    model = load_model(directory)
    takes = getattr(model, "main_input_name", kind)
    if takes != kind:
        raise ValueError(f"{directory} takes {takes}, not {kind}: pass {data} as `--data`")
    return model


def load_task(directory: Path, data: Path, *, limit: int, batch_size: int) -> Task:
    """Task from a directory and a data file, by the ending of the file: ``.npz`` for images, text otherwise."""
    build = image_task if data.suffix == ".npz" else text_task
    return build(directory, data, limit=limit, batch_size=batch_size)


def example_inputs(model: nn.Module) -> dict[str, Tensor]:
    """Inputs of the right shapes for a Hugging Face model, with random entries under a fixed seed."""
    config, generator = cast("Any", model.config), torch.Generator().manual_seed(0)
    if getattr(model, "main_input_name", "") == "pixel_values":
        size = config.image_size
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        return {"pixel_values": torch.randn(2, config.num_channels, height, width, generator=generator)}
    return {"input_ids": torch.randint(0, config.vocab_size, (2, 16), generator=generator)}


def _task(directory: Path, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor, batch_size: int) -> Task:
    rows = [
        {name: tensor[i : i + batch_size] for name, tensor in inputs.items()} for i in range(0, len(labels), batch_size)
    ]
    with torch.no_grad():
        outputs = [model(**row) for row in rows]
    if hasattr(outputs[0], "logits"):
        classes = outputs[0].logits.shape[-1]
        if outputs[0].logits.dim() != 2 or int(labels.max()) >= classes:
            raise ValueError(
                f"expected one row of logits for each example and labels below their number, got logits "
                f"{tuple(outputs[0].logits.shape)} and labels up to {int(labels.max())}"
            )
        logits, description = _head_logits, f"classification head with {classes} classes"
    else:
        features = torch.cat([_pool(output, row) for output, row in zip(outputs, rows, strict=True)])
        logits, description = _probe(features, labels)
    batches = tuple(row | {"labels": labels[i * batch_size : (i + 1) * batch_size]} for i, row in enumerate(rows))
    return Task(directory.name, model, batches, logits, description)


def _head_logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(**_inputs(batch)).logits


def _probe(features: Tensor, labels: Tensor) -> tuple[Callable[[Any, dict[str, Tensor]], Tensor], str]:
    try:
        from sklearn.linear_model import LogisticRegression
    except ImportError as error:
        raise ImportError('a probe needs scikit-learn: pip install "quotient-nets[demo]"') from error
    if len(labels.unique()) < 2:
        raise ValueError("expected at least two classes to fit a probe, got one label only")
    fit = LogisticRegression(C=PROBE_STRENGTH, max_iter=1000).fit(features.numpy(), labels.numpy())
    coefficients, intercept = fit.coef_, fit.intercept_
    if len(coefficients) == 1:  # two classes: one decision value, the other class has zero
        coefficients, intercept = np.stack([0 * coefficients[0], coefficients[0]]), np.array([0.0, intercept[0]])
    weight, bias = (torch.from_numpy(array).float() for array in (coefficients, intercept))

    def logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
        pooled = _pool(model(**_inputs(batch)), batch)
        return linear(pooled, weight.to(pooled.dtype), bias.to(pooled.dtype))

    accuracy = fit.score(features.numpy(), labels.numpy())
    return logits, f"logistic probe on mean-pooled hidden states, training accuracy {accuracy:.3f}"


def _inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in batch.items() if name != "labels"}


def _pool(output: Any, batch: dict[str, Tensor]) -> Tensor:
    hidden = output.last_hidden_state
    mask = batch.get("attention_mask")
    if mask is None:
        return hidden.mean(dim=1)
    mask = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * mask).sum(dim=1) / mask.sum(dim=1)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"expected a Hugging Face directory with {path.name}; {path} does not exist")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"expected an object in {path}, got {type(content).__name__}")
    return content


def _read_text(path: Path, limit: int) -> tuple[list[int], list[str]]:
    labels, texts = [], []
    if not path.is_file():
        raise ValueError(f"expected a text file with `label<TAB>text` lines; {path} is no file")
    try:
        content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"expected UTF-8 text in {path}: {error}") from error
    for number, line in enumerate(content.split("\n"), start=1):  # splitlines breaks at characters inside a text too
        if line.startswith("#") or not line.strip():
            continue
        label, tab, text = line.partition("\t")
        if not tab or not label.strip().isdecimal() or not text.strip():
            raise ValueError(
                f"expected `label<TAB>text` with an integer label from 0 in {path}, line {number}: {line!r}"
            )
        labels.append(int(label))
        texts.append(text.strip())
    if not texts:
        raise ValueError(f"expected at least one `label<TAB>text` line in {path}, got none")
    return labels[:limit], texts[:limit]


def _read_images(path: Path, limit: int) -> tuple[Tensor, Tensor]:
    if not path.is_file():
        raise ValueError(f"expected a numpy archive with `images` and `labels`; {path} is no file")
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("it is a single array")
        with archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"cannot read {path} as a numpy archive without pickles: {error}") from error
    shapes = {name: array.shape for name, array in arrays.items()}
    images, labels = arrays.get("images"), arrays.get("labels")
    if images is None or labels is None or images.ndim != 4 or labels.shape != images.shape[:1]:
        raise ValueError(f"expected `images` (N, channels, height, width) and `labels` (N,) in {path}, got {shapes}")
    numeric = np.issubdtype(images.dtype, np.number) and np.issubdtype(labels.dtype, np.integer) and len(labels) > 0
    if not numeric or not np.isfinite(images).all() or labels.min() < 0:
        raise ValueError(
            f"expected finite images and integer labels from 0 in {path}, at least one of them; got shapes {shapes}, "
            f"dtypes {images.dtype} and {labels.dtype}"
        )
    return torch.from_numpy(images[:limit]).float(), torch.from_numpy(labels[:limit]).long()


@contextmanager
def _quiet_transformers() -> Iterator[Any]:
    """The transformers package, with its progress bars and reports off; its settings are put back.

    Raises:
        ImportError: transformers is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError('a model directory needs transformers: pip install "quotient-nets[demo]"') from error
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield transformers
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
