"""`scripts/quality_embedded.sh` with a stand-in for Python: which GPU runs what, and what an earlier folder spares."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!/usr/bin/env bash
[ "$1" = -c ] && { echo "$COUNT"; exit; }
echo "$CUDA_VISIBLE_DEVICES $*" >> "$CALLS"
"""


def calls(folder: Path, count: int, *arguments: str, visible: str | None = None) -> list[list[str]]:
    """Words of every call of `bench quality`, the GPU first."""
    python = folder / "bin" / "python"
    python.parent.mkdir(exist_ok=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    log = folder / "calls"
    log.unlink(missing_ok=True)
    environment = {
        **{k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"},
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "COUNT": str(count),
        "CALLS": str(log),
        **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}),
    }
    found = subprocess.run(
        ["bash", str(ROOT / "scripts" / "quality_embedded.sh"), *arguments],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == (0 if count else 1), found.stderr
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


def names(found: list[list[str]]) -> list[str]:
    return [Path(call[-1]).stem for call in found]


ALL = {
    *("quality-tiny-gdn", "quality-tiny-gdn-ruler"),
    *("quality-tiny-kda", "quality-tiny-kda-ruler"),
}


@pytest.mark.parametrize(
    ("count", "visible", "gpus"),
    [(1, None, ["0"]), (2, None, ["0", "1"]), (1, "3", ["3"]), (2, "5,7", ["5", "7"])],
)
def test_runs_are_spread_over_the_visible_gpus(
    tmp_path: Path, count: int, visible: str | None, gpus: list[str]
) -> None:
    found = calls(tmp_path, count, "results", visible=visible)
    assert len(found) == 4
    assert set(names(found)) == ALL
    assert sorted({call[0] for call in found}) == gpus
    if count == 2:  # a model to a GPU
        assert len({(call[0], call[5]) for call in found}) == 2
    assert not any("--resume" in call or "--qa" in call for call in found)


def test_without_a_gpu_or_time_nothing_runs(tmp_path: Path) -> None:
    assert calls(tmp_path, 0, "results") == []
    assert calls(tmp_path, 1, "results", "10") == []


def test_an_earlier_folder_is_continued(tmp_path: Path) -> None:
    before = tmp_path / "before"
    before.mkdir()
    (before / "quality-tiny-gdn.json").write_text('{"result": {"complete": true}}')
    (before / "quality-tiny-kda.json").write_text('{"result": {"complete": false}}')
    (before / "quality-tiny-kda-ruler.partial.json").write_text("{}")
    found = calls(tmp_path, 1, "results", "400", "", "before")
    assert set(names(found)) == ALL - {"quality-tiny-gdn"}
    assert (tmp_path / "results" / "quality-tiny-gdn.json").exists()
    resumed = {Path(c[-1]).stem: c[c.index("--resume") + 1] for c in found if "--resume" in c}
    assert resumed == {
        "quality-tiny-kda": "before/quality-tiny-kda.json",
        "quality-tiny-kda-ruler": "before/quality-tiny-kda-ruler.partial.json",
    }
