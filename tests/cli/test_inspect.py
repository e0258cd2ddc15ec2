"""`inspect` says what is stored and reads no tensor."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hybridstate.cli.main import app
from tests.tiny import write_checkpoint


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def test_summary_names_family_sizes_gate_and_dtypes(tiny_gdn: Path) -> None:
    result = run(tiny_gdn)
    assert result.exit_code == 0, result.output
    text = result.stdout
    assert (
        "qwen3_5 (Gated DeltaNet), 3 of 4 layers linear, 2 key and 6 value heads of 8 x 12" in text
    )
    assert "softplus gate; gate input -0.3 (default)" in text
    assert "linear blocks 0-2" in text
    assert "2 shards" in text
    rows = {
        line.split()[0]: line.split()
        for line in text.splitlines()
        if line.startswith(("A_log", "dt_bias", "norm"))
    }
    assert rows["A_log"][:4] == ["A_log", "F32", "6", "3"]
    assert rows["dt_bias"][1] == "BF16"
    assert "0 bytes of tensors were read" in text


def test_headers_list_every_linear_tensor_with_its_bytes(tiny_kda: Path) -> None:
    result = run(tiny_kda, "--headers", "--json")
    found = json.loads(result.stdout)["result"]
    assert found["family"] == "kimi_linear"
    assert found["read"]["tensor_bytes"] == 0
    kinds = {kind["name"]: kind for kind in found["linear_tensors"]}
    assert kinds["A_log"]["shapes"] == [[1, 1, 4, 1]]
    assert kinds["f_a_proj.weight"]["follows_heads_or_channels"] is False
    assert kinds["q_proj.weight"]["follows_heads_or_channels"] is True
    assert len(found["headers"]) == sum(kind["layers"] for kind in found["linear_tensors"])
    assert sum(shard["linear_tensors"] for shard in found["shards"]) == len(found["headers"])
    for tensor in found["headers"]:
        size = (tiny_kda / tensor["file"]).stat().st_size
        assert 0 < tensor["start"] < tensor["end"] <= size
    assert "headers" not in json.loads(run(tiny_kda, "--json").stdout)["result"]


def test_tensor_data_may_be_missing_altogether(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers alone decide: even reading one byte of data would fail here."""
    folder = write_checkpoint(tmp_path / "model", "kimi_linear")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("tensor data was read")

    monkeypatch.setattr("hybridstate.checkpoint.source.Checkpoint.read_raw", refuse)
    assert run(folder).exit_code == 0


def test_a_model_that_nobody_knows_ends_with_4(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "kimi_linear")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "unheard_of"}))
    result = run(folder, "--json")
    assert result.exit_code == 4
    error = json.loads(result.stdout)["error"]
    assert "unheard_of is not known" in error["message"]
    assert "known families" in error["hint"]
    assert error["context"]["known_families"]
