"""What is promised about the package as a package."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXTRAS = {"matplotlib", "peft", "pymanopt", "rich", "sklearn", "timm", "transformers", "typer"}


def test_importing_the_library_needs_no_extra() -> None:
    code = "import sys, quotient_nets; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert EXTRAS.isdisjoint(run.stdout.split())


@pytest.mark.parametrize("name", ["main", "test"])
def test_readme_has_the_command_that_ci_runs(name: str) -> None:
    run = subprocess.run([ROOT / ".ci" / "run", "--command", name], capture_output=True, text=True, check=True)
    assert "pip install -e" in run.stdout


def test_changelog_has_the_version() -> None:
    headings = [line for line in (ROOT / "docs/changelog.md").read_text().splitlines() if line[:3] == "## "]
    assert any(line.removeprefix("## ").startswith(version("quotient-nets")) for line in headings)
