"""`scripts/update_gpu.py`: what comes first, what a deadline leaves, and files that are whole after each part."""

import json
from pathlib import Path

import pytest
import update_gpu

from hybridstate.bench.layers import PUBLISHED, UpdateDims
from hybridstate.bench.update import FORMATS, GPU_BATCHES


def test_large_claims_come_first_and_every_batch_of_every_layer_once() -> None:
    found = update_gpu.parts(GPU_BATCHES)
    assert [layer.name for layer, _ in found[:2]] == ["qwen3-next", "kimi-linear"]
    assert all(batches == (256, 128, 64, 8, 1) for _, batches in found[:4])
    pairs = [(layer.name, batch) for layer, batches in found for batch in batches]
    assert sorted(pairs) == sorted((x.name, b) for x in update_gpu.LAYERS for b in GPU_BATCHES)


def test_warming_processes_cover_every_format_of_every_released_layer() -> None:
    jobs = [(x.name, state) for x, share in update_gpu.WARM_JOBS for state in share]
    assert sorted(jobs) == sorted((x.name, state) for x in PUBLISHED for state in FORMATS)
    assert [share for _, share in update_gpu.WARM_JOBS].count(()) == len(PUBLISHED)


@pytest.mark.parametrize(("deadline", "timed"), [("0", [1]), ("1000", [1, 2])])
def test_the_file_is_whole_after_each_part(
    deadline: str,
    timed: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = UpdateDims("small", "gdn", 1, 2, 16, 32, k_hi=8)
    for name in ("PUBLISHED", "LAYERS"):
        monkeypatch.setattr(update_gpu, name, (small,))
    monkeypatch.setattr(update_gpu, "EMBEDDED", ())
    out = tmp_path / "update.json"
    arguments = ["--device", "cpu", "--batch", "2", "--batch", "1", "--samples", "1"]
    monkeypatch.setattr("sys.argv", ["update_gpu.py", str(out), "--deadline", deadline, *arguments])
    assert update_gpu.main() == 0
    result = json.loads(out.read_text())["result"]
    states = [(row["state"], row["batch"]) for row in result["rows"]]
    assert states == [(state, batch) for state in FORMATS for batch in timed]
    assert result["protocol"]["layers_of_equal_dimensions"]["qwen3.6-35b-a3b"] == "qwen3-next"
    assert ("batch 2: no time left" in capsys.readouterr().out) == (timed == [1])
    assert not list(tmp_path.glob("*.part"))
