"""The trained digits transformer as a file: read the shipped one, write another.

Imports: torch, safetensors.
"""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import resources
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

from quotient_nets.demo.vit import DigitsViT

FILE_NAME = "digits_vit.safetensors"


def load_digits_vit(path: str | os.PathLike[str] | None = None) -> DigitsViT:
    """Load the trained digits transformer, in evaluation mode, float32 on the CPU.

    Args:
        path: A file written by :func:`save_digits_vit`; by default the one that ships.

    Returns:
        The model, trainable, with memory of its own. The global random state is left alone.
    """
    with torch.device("meta"):
        model = DigitsViT()
    model.to_empty(device="cpu")
    with _file(path) as source:
        # Copied in, for the tensors read are mapped to the file.
        model.load_state_dict(load_file(source))
    return model.eval()


def digits_vit_metadata(path: str | os.PathLike[str] | None = None) -> dict[str, str]:
    """What a file says of its weights: ``seed``, ``train_loss``, ``test_accuracy``, versions."""
    with _file(path) as source, safe_open(source, framework="pt") as file:
        return file.metadata() or {}


def save_digits_vit(
    model: DigitsViT,
    path: str | os.PathLike[str],
    metadata: Mapping[str, str],
    *,
    overwrite: bool = False,
) -> None:
    """Write the weights and their metadata as safetensors, all or nothing.

    Args:
        model: The model to write.
        path: Where to; its folder must exist.
        metadata: Stored in the header of the file.
        overwrite: Replace a file that is already there.

    Raises:
        FileExistsError: The file is there and ``overwrite`` is false.
    """
    path = Path(path)
    if path.exists() and not overwrite:
        raise FileExistsError(
            f"`path` must not exist yet; got {str(path)!r}, which does. Choose another or pass `overwrite=True`."
        )
    # Beside its target, for a rename is atomic only within one file system.
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # Not `save_file`: safetensors 0.8 makes the file readable by its owner only.
        draft.write_bytes(save(model.state_dict(), dict(metadata)))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _file(path: str | os.PathLike[str] | None) -> AbstractContextManager[Path]:
    if path is not None:
        return nullcontext(Path(path))
    return resources.as_file(resources.files("quotient_nets.demo").joinpath(FILE_NAME))
