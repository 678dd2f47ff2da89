"""The command line, as a person would use it."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import transformers

from quotient_nets.cli import main
from quotient_nets.sharpness.orbit import MEASURES

SHORT = ["--draws", "1", "--steps", "2", "--limit", "32", "--batch-size", "32"]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["quotient-nets", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


def test_prints_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(monkeypatch, "sharpness", *SHORT, "--plot", tmp_path / "figure.png") == 0
    printed = " ".join(capsys.readouterr().out.split())
    for word in ("attention, 1", "attention, 10000", "norm gains, 10", "does not divide out norm gains", *MEASURES):
        assert word in printed
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_json_is_the_file_and_a_broken_run_resumes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "result.json"
    assert run(monkeypatch, "sharpness", *SHORT, "--json", "--out", out) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(out.read_text())
    assert {row["symmetry"] for row in printed["rows"]} == {"original", "attention", "norm gains"}
    original = printed["rows"][0]["values"]["geodesic, exact"]
    for row in printed["rows"]:
        if row["symmetry"] == "attention":
            assert abs(row["values"]["geodesic, exact"] / original - 1) < 1e-3

    marked = dict(printed, rows=printed["rows"][:2])
    marked["rows"][1]["values"] = dict.fromkeys(MEASURES, 42.0)  # a row that is kept, not measured again
    out.write_text(json.dumps(marked))
    assert run(monkeypatch, "sharpness", *SHORT, "--json", "--out", out, "--resume") == 0
    resumed = json.loads(out.read_text())
    assert resumed["rows"][1]["values"] == dict.fromkeys(MEASURES, 42.0)
    assert resumed["rows"][2:] == printed["rows"][2:]

    assert run(monkeypatch, "sharpness", *SHORT, "--rho", "0.2", "--out", out, "--resume") == 1
    assert "other settings (rho)" in capsys.readouterr().err
    assert run(monkeypatch, "sharpness", *SHORT, "--out", out) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert json.loads(out.read_text()) == resumed


def test_a_model_directory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = transformers.ViTConfig(
        image_size=8, patch_size=4, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    config.num_labels = 2
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    pixels = np.random.default_rng(0).normal(size=(8, 3, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "data.npz", images=pixels, labels=np.arange(8) % 2)
    assert run(monkeypatch, "inspect", tmp_path / "vit", "--json") == 0
    content = json.loads(capsys.readouterr().out)
    assert content["check"]["change"] < 1e-12
    assert [block["group"] for block in content["blocks"]] == ["GL(8)", "GL(8)"]
    assert content["dimensions_removed"] == 2 * 2 * 64 + 2 * 2 * 8
    data = tmp_path / "data.npz"
    assert run(monkeypatch, "sharpness", tmp_path / "vit", "--data", data, "--steps", "2", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 6  # the original, four conditions, norm gains


def test_inspect_prints_the_blocks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "inspect") == 0
    printed = capsys.readouterr().out
    for word in ("query_key", "value_output", "GL(16)", "self-check in torch.float64"):
        assert word in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sharpness", "--rho", "0"], "rho > 0"),
        (["sharpness", "--rho", "nan"], "rho > 0"),
        (["sharpness", "--draws", "0"], "--draws"),
        (["sharpness", "--steps", "-1"], "steps"),
        (["sharpness", "no-such-directory"], "needs --data"),
        (["sharpness", "no-such-directory", "--data", "x.tsv"], "is no file"),
        (["sharpness", "--data", "x.tsv"], "belongs to a model directory"),
        (["sharpness", "--out", "no-such-folder/result.json"], "folder"),
        (["inspect", "no-such-directory"], "does not exist"),
    ],
)
def test_bad_input_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(monkeypatch, *arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "error:" in captured.err
    assert message in captured.err
    assert "Traceback" not in captured.err
