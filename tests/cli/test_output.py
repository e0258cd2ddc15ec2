"""What a command prints: result on stdout, the rest on stderr, one JSON document, never an ellipsis."""

import errno
import json
import os
from typing import Any

import pytest
import typer

from hybridstate.cli.output import SCHEMA, Output, command, counted, interval
from hybridstate.errors import PlanMismatch


def document(capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


def talk(out: Output) -> None:
    out.note("a note")
    out.warn("a warning")
    out.text("a line")
    out.table("numbers", ("name", "count", "ratio"), [("x", 1_234_567, 2.5), ("y", None, 0.125)])
    out.result({"answer": 42})


def test_one_thing_is_not_counted_as_several() -> None:
    assert [counted(n, "slot") for n in (0, 1, 2000)] == ["0 slots", "1 slot", "2,000 slots"]


def test_an_interval_without_a_width_is_none() -> None:
    assert interval(None, str) == ""
    assert interval((1.0, 1.0), str) == "no spread"
    assert interval((-0.001, 0.5), "{:+.2f}".format) == "0.00 to +0.50"


def test_human_mode_keeps_result_and_remarks_apart(capsys: pytest.CaptureFixture[str]) -> None:
    with command("demo") as out:
        talk(out)
    captured = capsys.readouterr()
    assert captured.err.splitlines() == ["a note", "warning: a warning"]
    lines = [line.rstrip() for line in captured.out.splitlines()]
    assert lines == [
        "a line",
        "",
        "numbers",
        "name       count   ratio",
        "────────────────────────",
        "x      1,234,567     2.5",
        "y              -   0.125",
    ]


def test_quiet_mode_drops_notes_but_not_warnings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with command("demo", quiet=True) as out:
        talk(out)
    captured = capsys.readouterr()
    assert captured.err == "warning: a warning\n"
    assert "1,234,567" in captured.out


def test_json_mode_prints_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    with command("demo", model="m", json=True) as out:
        talk(out)
    found, _ = document(capsys)
    assert found.pop("timing")["seconds"] >= 0
    assert found == {
        "schema": SCHEMA,
        "ok": True,
        "command": "demo",
        "model": "m",
        "result": {"answer": 42},
        "warnings": ["a warning"],
    }


@pytest.mark.parametrize("json_mode", [False, True])
def test_error_leaves_no_part_of_the_result(
    json_mode: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        with command("demo", json=json_mode) as out:
            talk(out)
            raise PlanMismatch("does not fit", hint="try another", layer=3)

    with pytest.raises(typer.Exit) as stop:
        fail()
    assert stop.value.exit_code == 6
    if json_mode:
        found, err = document(capsys)
        assert found["ok"] is False
        assert found["result"] is None
        assert found["error"] == {
            "code": "plan-mismatch",
            "message": "does not fit",
            "hint": "try another",
            "context": {"layer": 3},
        }
    else:
        captured = capsys.readouterr()
        assert captured.out == ""
        err = captured.err
    assert err.splitlines()[-2:] == ["error: does not fit", "hint: try another"]
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "code", "name"),
    [(ZeroDivisionError("oops"), 1, "bug"), (KeyboardInterrupt(), 130, "interrupted")],
)
def test_bug_and_interrupt_have_their_codes(
    error: BaseException, code: int, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        with command("demo", json=True):
            raise error

    with pytest.raises(typer.Exit) as stop:
        fail()
    assert stop.value.exit_code == code
    found, _ = document(capsys)
    assert found["error"]["code"] == name


def test_result_that_is_not_json_is_a_bug_and_still_one_document(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        with command("demo", json=True) as out:
            out.result({"x": float("nan")})

    with pytest.raises(typer.Exit) as stop:
        fail()
    assert stop.value.exit_code == 1
    found, _ = document(capsys)
    assert found["error"]["code"] == "bug"


def test_debug_variable_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYBRIDSTATE_DEBUG", "1")

    def fail() -> None:
        with command("demo"):
            raise PlanMismatch("no")

    with pytest.raises(typer.Exit):
        fail()
    assert "Traceback" in capsys.readouterr().err


def test_control_characters_are_shown_not_sent(capsys: pytest.CaptureFixture[str]) -> None:
    with command("demo") as out:
        out.warn("evil \x1b[31mname\x07")
        out.table("t\x1b", ("c",), [("a\x1b[0m\nb",)])
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    assert "\\x1b[31mname\\x07" in captured.err
    assert "\\x1b[0m b" in captured.out


def test_square_brackets_are_text_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    with command("demo") as out:
        out.warn("A_log[0, 0, 3, 0] [red]x[/red]")
        out.table("t", ("[b]c[/b]", "d"), [("[bold]cell[/bold]", "[/]")])
    captured = capsys.readouterr()
    assert "A_log[0, 0, 3, 0] [red]x[/red]" in captured.err
    assert "[bold]cell[/bold]" in captured.out
    assert "[b]c[/b]" in captured.out


@pytest.mark.parametrize("columns", ["20", "60"])
def test_narrow_terminal_gets_records_with_every_digit(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    with command("demo") as out:
        out.table(
            "a title longer than twenty columns",
            ("first", "second", "third", "fourth"),
            [(123456789012, 9876543210, 1e15, "some text here")] * 2,
        )
    lines = capsys.readouterr().out.splitlines()
    text = "\n".join(lines)
    assert "…" not in text
    assert text.count("123,456,789,012") == 2
    if columns == "20":
        assert lines.count("  first   123,456,789,012") == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.123456, "0.1235"), (999.94, "999.9"), (999.96, "1,000"), (6940.4, "6,940"),
        (9999.7, "10,000"), (-1234.5, "-1,234"), (239_054.0, "239,054"), (5e9, "5e+09"),
    ],
)  # fmt: skip
def test_numbers_have_four_digits_or_all_before_the_point(
    capsys: pytest.CaptureFixture[str], value: float, text: str
) -> None:
    with command("demo") as out:
        out.table("numbers", ("value",), [(value,)])
        out.result({})
    assert capsys.readouterr().out.split()[-1] == text


def test_progress_off_a_terminal_is_a_line_every_ten_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = 0.0
    out = Output("demo", clock=lambda: now)
    for step in range(36):
        now = float(step)
        out.progress("calibrating", step, 35)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "calibrating: 10/35 (28 %), 10 s",
        "calibrating: 20/35 (57 %), 20 s",
        "calibrating: 30/35 (85 %), 30 s",
    ]


def test_quiet_mode_shows_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    now = iter(range(0, 1000, 100))
    out = Output("demo", quiet=True, clock=lambda: float(next(now)))
    for step in range(4):
        out.progress("stage", step, 4)
    assert capsys.readouterr().err == ""


def test_short_stages_print_no_progress_line(capsys: pytest.CaptureFixture[str]) -> None:
    out = Output("demo", clock=lambda: 0.0)
    for stage in ("a", "b"):
        out.progress(stage, 0, 1)
        out.progress(stage, 1, 1)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, 2), (errno.EACCES, 3)])
def test_what_the_system_refuses_is_no_bug(
    capsys: pytest.CaptureFixture[str], number: int, code: int
) -> None:
    with pytest.raises(typer.Exit) as stop, command("demo", json=True):
        raise OSError(number, os.strerror(number), "some/file")
    assert stop.value.exit_code == code
    found, _ = document(capsys)
    assert found["error"]["message"] == f"some/file: {os.strerror(number)}"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 2 TB"),
    ],
)
def test_memory_that_is_not_there_is_no_bug(
    capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    with pytest.raises(typer.Exit) as stop, command("demo", json=True):
        raise error
    assert stop.value.exit_code == 7
    assert document(capsys)[0]["error"]["message"].startswith("not enough memory: ")


def test_bug_of_many_lines_is_told_in_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), command("demo", json=True):
        raise RuntimeError("first\nsecond")
    found, err = document(capsys)
    assert found["error"]["message"] == "RuntimeError: first second"
    assert err.splitlines()[0] == "error: RuntimeError: first second"
