"""What every test shares: reproducible randomness, one thread, no network, no window."""

import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"

import hypothesis
import pytest
import torch

torch.set_num_threads(1)


class _TorchRandom:
    """Hypothesis seeds `random` and numpy by itself, but not torch."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


_TORCH_RANDOM = _TorchRandom()  # Hypothesis keeps only a weak reference
hypothesis.register_random(_TORCH_RANDOM)
hypothesis.settings.register_profile("ci", max_examples=50, deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci")


@pytest.hookimpl(tryfirst=True)  # before pytest applies -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in tests/benchmarks is a benchmark, and so is skipped by default."""
    benchmarks = Path(__file__).parent / "benchmarks"
    for item in items:
        if benchmarks in item.path.parents:
            item.add_marker(pytest.mark.benchmark)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """A test draws the same numbers alone, in any order and in any worker."""
    torch.manual_seed(0)
