"""Tensors inside a batch of any structure.

Torch's own tree functions take a mapping that is no ``dict``, such as the output of a Hugging Face tokenizer, for a
leaf.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor


def leaves(batch: Any) -> Iterator[Any]:
    """Everything in nested mappings, lists and tuples that is none of these."""
    if isinstance(batch, Mapping):
        for value in batch.values():
            yield from leaves(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from leaves(value)
    else:
        yield batch


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """A batch of the same structure with ``function`` applied to every tensor in it."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, MutableMapping):
        mapped = copy.copy(batch)
        for key, value in batch.items():
            mapped[key] = map_tensors(function, value)
        return mapped
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(function, value) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_tensors(function, value) for value in batch)
    return batch
