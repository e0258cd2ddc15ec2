"""`scripts/emitted_check.py`: modules one by one or side by side, the file after each, the deadline, the exit code."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import emitted_check
import pytest

FINE = "print('packing   ok')"
WRONG = "import sys; print('triton 0.3 FAILED'); sys.exit(1)"
Run = Callable[..., tuple[int, dict[str, Any], list[str]]]


@pytest.fixture
def checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """The script over other modules: exit code, results by title, lines."""

    def run(modules: Iterator[tuple[str, str]], *arguments: str) -> Any:
        out = tmp_path / "emitted.json"
        monkeypatch.setattr(emitted_check, "sources", lambda: modules)
        monkeypatch.setattr("sys.argv", ["emitted_check.py", str(out), "--device=cpu", *arguments])
        code = emitted_check.main()
        found = json.loads(out.read_text())["modules"] if out.exists() else {}
        return code, found, capsys.readouterr().out.splitlines()

    return run


def waiting(seen: Path) -> str:
    """A module that ends once another has made `seen`, or fails after a minute."""
    return f"""
import pathlib, sys, time
end = time.monotonic() + 60
while not pathlib.Path({str(seen)!r}).exists():
    if time.monotonic() > end:
        sys.exit(1)
    time.sleep(0.01)
print('packing   ok')
"""


def test_side_by_side_the_file_keeps_the_order_of_the_list(checked: Run, tmp_path: Path) -> None:
    """The first ends behind the third, which finds the second in the file; no seconds of a shared device."""
    seen, out = tmp_path / "seen", tmp_path / "emitted.json"
    third = f"""
import json, pathlib
print(*json.loads(pathlib.Path({str(out)!r}).read_text())["modules"])
pathlib.Path({str(seen)!r}).touch()
"""
    modules = {"first": waiting(seen), "second": FINE, "third": third}
    code, found, lines = checked(iter(modules.items()), "--workers", "2")
    assert code == 0
    assert lines[-1] == "3 of 3 modules ok"
    assert [line.split()[-1] for line in lines[:-1]] in (
        ["second", "third", "first"],
        ["second", "first", "third"],  # both at once
    )
    assert list(found) == ["first", "second", "third"]
    assert found["third"] == {"ok": True, "output": ["second"]}
    assert not any("seconds" in each for each in found.values())


def test_one_at_a_time_by_default_with_its_seconds(checked: Run, tmp_path: Path) -> None:
    running = tmp_path / "running"
    alone = f"import pathlib; x = pathlib.Path({str(running)!r}); x.mkdir(); {FINE}; x.rmdir()"
    code, found, lines = checked((name, alone) for name in "abc")
    assert code == 0
    assert lines == ["ok     a", "ok     b", "ok     c", "3 of 3 modules ok"]
    assert all(each["seconds"] >= 0 for each in found.values())


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_module_that_fails_costs_the_exit_code_but_not_the_others(
    checked: Run, workers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose check fails, and one that does not come to an end."""
    plain = emitted_check.run

    def run(text: str, device: str) -> dict[str, Any]:
        if text == "endless":
            raise subprocess.TimeoutExpired("python", 300)
        return plain(text, device)

    monkeypatch.setattr(emitted_check, "run", run)
    modules = {"wrong": WRONG, "late": "endless", "fine": FINE}
    code, found, lines = checked(iter(modules.items()), "--workers", workers)
    assert code == 1
    assert lines[-1] == "1 of 3 modules ok"
    assert lines[lines.index("FAILED wrong") + 1] == "       triton 0.3 FAILED"
    assert "timed out after 300" in lines[lines.index("FAILED late") + 1]
    assert [each["ok"] for each in found.values()] == [False, False, True]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_none_starts_behind_the_deadline_and_those_that_run_end(
    checked: Run, workers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(emitted_check.time, "perf_counter", lambda: clock[0])

    def modules() -> Iterator[tuple[str, str]]:
        yield "in time", FINE
        clock[0] = 60.0
        yield "at the end", FINE
        clock[0] = 60.1
        yield "too late", WRONG

    code, found, lines = checked(modules(), "--deadline", "60", "--workers", workers)
    assert code == 0
    assert list(found) == ["in time", "at the end"]
    assert "deadline: the rest was not run" in lines
    assert lines[-1] == "2 of 2 modules ok"
    assert checked(iter({"late": FINE}.items()), "--deadline", "-1")[0] == 1


def test_fewer_workers_than_one_are_refused(
    checked: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        checked(iter(()), "--workers", "0")
    assert "--workers must be at least 1" in capsys.readouterr().err
