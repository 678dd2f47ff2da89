"""The Python of the README runs as it stands."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=["geoopt", "hugging-face"])
def test_block_runs_and_prints_what_it_says(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block, str(README), "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    if "ManifoldParameter" in block:
        assert float(re.search(r"tensor\(([^,]+),", printed).group(1)) < 1e-3  # the unseen entries are recovered
    else:
        value, converged = printed.split()[:2]
        assert float(value) > 0
        assert converged in ("True", "False")
