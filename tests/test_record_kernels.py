"""`scripts/record_kernels.py`: provenance in front, earlier rows for what a run left out, nothing lost unasked."""

import json
from pathlib import Path
from typing import Any

import pytest
import record_kernels

DEVICE = {"name": "a GPU", "device": "cuda"}


def form(name: str, us: float | None, **more: Any) -> dict[str, Any]:
    """A timed row of `kernel_tune.py`, or what it writes after its deadline."""
    if us is None:
        return {"variant": name, "left_out": True}
    return {
        "variant": name,
        "layout": "rows",
        "batch": 1,
        "median_us": us,
        "samples_s": [us],
    } | more


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Records a run of these rows and gives the exit code; the files are in `tmp_path`."""
    monkeypatch.setattr(record_kernels, "BENCHMARKS", tmp_path)

    def run(commit: str, rows: list[dict[str, Any]], *options: str, torch: str = "2.11") -> int:
        folder = tmp_path / commit
        (folder / "tune").mkdir(parents=True, exist_ok=True)
        found = {"device": DEVICE, "seconds": 1.0, "rows": rows}
        (folder / "tune" / "kernel_tune.json").write_text(json.dumps(found))
        arguments = [str(folder), "--commit", commit, "--set", f"torch={torch}", *options]
        monkeypatch.setattr("sys.argv", ["record_kernels.py", *arguments])
        return record_kernels.main()

    return run


def kept(folder: Path) -> list[tuple[str, float | None, str | None]]:
    """Variant, time and commit of each row recorded."""
    rows = json.loads((folder / "kernels.json").read_text())["result"]["rows"]
    return [(r["variant"], r.get("median_us"), r.get("commit")) for r in rows]


def test_a_first_recording_is_written_as_it_is(record: Any, tmp_path: Path) -> None:
    assert record("first", [form("a", 1.0), form("b", None)]) == 0
    document = json.loads((tmp_path / "kernels.json").read_text())
    assert document["provenance"] == {
        "commit": "first", "modified": None, "torch": "2.11", "device": "a GPU", "hardware": DEVICE,
    }  # fmt: skip
    assert "seconds" not in document["result"]
    assert kept(tmp_path) == [("a", 1.0, None), ("b", None, None)]


def test_what_a_run_left_out_keeps_its_rows_and_nothing_else_does(
    record: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check = {"variant": "b", "layout": "rows"}
    old = [form("a, old name", 1.0), check, form("b", 2.0), form("b", 3.0, batch=8), form("c", 4.0)]
    assert record("first", old) == 0
    new = [form("a", 5.0), form("b", None), form("c", 6.0), form("d", 7.0), form("e", None)]
    assert record("second", new) == 0
    found = [
        ("a", 5.0, None),
        ("b", None, "first"),
        ("b", 2.0, "first"),
        ("b", 3.0, "first"),
        ("c", 6.0, None),
        ("d", 7.0, None),
        ("e", None, None),
    ]
    assert kept(tmp_path) == found
    assert "3 rows of earlier runs, 1 left out" in capsys.readouterr().out
    assert record("third", [*new[:4], form("e", 8.0)]) == 0  # b: still of the first run
    assert kept(tmp_path) == [*found[:-1], ("e", 8.0, None)]


@pytest.mark.parametrize(
    ("rows", "torch"),
    [
        ([form("a", 3.0)], "2.11"),  # ended before b, and does not say so
        ([form("a", 3.0), form("b", None), form("c", 4.0)], "2.12"),
    ],
)
def test_a_file_that_would_lose_rows_stays_unless_asked(
    record: Any, tmp_path: Path, rows: list[dict[str, Any]], torch: str
) -> None:
    record("first", [form("a", 1.0), form("b", 2.0)])
    before = kept(tmp_path)
    assert record("second", rows, torch=torch) == 1
    assert kept(tmp_path) == before
    assert record("third", rows, "--replace", torch=torch) == 0
    assert kept(tmp_path) == [(r["variant"], r.get("median_us"), None) for r in rows]


def test_other_files_are_written_beside_one_that_is_not(record: Any, tmp_path: Path) -> None:
    record("first", [form("a", 1.0), form("b", 2.0)])
    folder = tmp_path / "second"
    folder.mkdir()
    modules = {"device": "cuda", "modules": {"one": {"ok": True}}}
    (folder / "emitted.json").write_text(json.dumps(modules))
    update = {"command": "bench update", "provenance": {"torch": "2.11"}, "result": {"rows": [{}]}}
    (folder / "update.json").write_text(json.dumps(update))
    assert record("second", [form("a", 3.0)]) == 1
    emitted = json.loads((tmp_path / "emitted.json").read_text())
    assert emitted["provenance"]["commit"] == "second"
    assert emitted["result"] == modules
    whole = json.loads((tmp_path / "update.json").read_text())
    assert whole["provenance"] == {"torch": "2.11", "commit": "second", "modified": None}


def steps(commit: str, batches: tuple[int, ...], torch: str = "2.11") -> dict[str, Any]:
    """What `decode_at_scale.py` writes, a row of two formats a batch."""
    states = [{"batch": batch, "state": state} for batch in batches for state in ("fp32", "damp")]
    savings = [{"batch": batch} for batch in batches]
    result = {"rows": states, "savings": savings, "speedups": states}
    return {"provenance": {"commit": commit, "torch": torch}, "result": result}


def test_batches_that_a_run_of_decode_steps_did_not_reach_keep_their_rows(
    record: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "decode-a-model-synthetic.json"

    def run(commit: str, *batches: int, torch: str = "2.11") -> int:
        folder = tmp_path / commit / "decode"
        folder.mkdir(parents=True)
        (folder / name).write_text(json.dumps(steps(commit, batches, torch)))
        return int(record(commit, [form("a", 1.0)]))

    def found(part: str) -> list[tuple[int, str | None]]:
        result = json.loads((tmp_path / name).read_text())["result"]
        return [(row["batch"], row.get("commit")) for row in result[part]]

    assert run("first", 8, 4, 1) == 0
    assert run("second", 8, 4) == 0
    assert found("savings") == [(8, None), (4, None), (1, "first")]
    assert (
        found("rows") == found("speedups") == [(8, None)] * 2 + [(4, None)] * 2 + [(1, "first")] * 2
    )
    assert "2 rows of earlier runs" in capsys.readouterr().out
    assert run("third", 8) == 0
    assert found("savings") == [(8, None), (4, "second"), (1, "first")]
    assert run("fourth", 8, torch="2.12") == 1  # rows of two versions do not stand in one file
    assert found("savings") == [(8, None), (4, "second"), (1, "first")]
