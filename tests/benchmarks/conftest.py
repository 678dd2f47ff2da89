"""Benchmarks print their figures, also where pytest captures the output."""

from collections.abc import Callable

import pytest


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    def show(text: str) -> None:
        with capsys.disabled():
            print(text)

    return show
