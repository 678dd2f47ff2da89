"""What the tests of interop share."""

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _seed_numpy() -> None:
    """pymanopt draws from numpy's global state, and so do we for it."""
    np.random.seed(0)  # noqa: NPY002
