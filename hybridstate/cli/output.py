"""Every byte that the command line prints, and every exit code it ends with.

stdout carries the result: tables, or with `--json` exactly one document, for errors too. Notes,
warnings, errors and progress go to stderr; progress is a bar on a terminal and elsewhere a line
about every ten seconds. `HYBRIDSTATE_DEBUG=1` shows the traceback of an error.
"""

import errno
import json as json_format
import os
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import typer

from hybridstate.errors import (
    HybridStateError,
    MissingRequirement,
    SourceError,
    UsageError,
    one_line,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from hybridstate.report import PageTable

SCHEMA: Final = "hybridstate.output/1"
"""Version of the JSON envelope."""

PROGRESS_LINE_SECONDS: Final = 10.0
"""Time between progress lines where stderr is not a terminal."""

_NUMBER: Final = re.compile(r"^(-|inf|-?[\d,.]+(e[+-]?\d+)?[x%]?)$")
"""Cells of a column that is aligned to the right."""

_CANNOT_WRITE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)

_REPORT_BUG: Final = "this is a bug in hybridstate; set HYBRIDSTATE_DEBUG=1 to see the traceback"


def counted(count: int, noun: str) -> str:
    """`1 slot`, `2 slots`, `1,000 slots`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def interval(bounds: Sequence[float] | None, show: Callable[[float], str]) -> str:
    """`0.80 to 0.87`; `no spread` where both ends are equal, empty where there is no interval."""
    if bounds is None:
        return ""
    low, high = bounds
    if low == high:
        return "no spread"
    return " to ".join(re.sub(r"^[-+](0(\.0+)?)$", r"\1", show(bound)) for bound in (low, high))


@dataclass(frozen=True, slots=True)
class _Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    note: str | None


@dataclass
class Output:
    """What one command says. Nothing reaches stdout before the command has succeeded.

    Attributes:
        command: name of the verb, with its group (`bench update`).
        model: the MODEL argument, None where there is none.
        json: whether stdout gets one JSON document instead of tables.
        quiet: no notes and no progress; warnings and results stay.
        clock: seconds, injected in tests.
    """

    command: str
    model: str | None = None
    json: bool = False
    quiet: bool = False
    clock: Callable[[], float] = time.monotonic
    warnings: list[str] = field(default_factory=list)
    _result: dict[str, Any] = field(default_factory=dict)
    _parts: list[_Table | str] = field(default_factory=list)
    _started: float = 0.0
    _bar: "Progress | None" = None
    _tasks: "dict[str, TaskID]" = field(default_factory=dict)
    _stage: str | None = None
    _last_line: float | None = None

    def __post_init__(self) -> None:
        self._started = self.clock()

    def result(self, result: dict[str, Any]) -> None:
        """The `result` of the JSON document."""
        self._result = result

    def table(
        self,
        title: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[object]],
        note: str | None = None,
    ) -> None:
        """A table of the human result. Cells: text, int (1,234), float (4 digits), None (-)."""
        self._parts.append(_Table(title, tuple(columns), tuple(tuple(r) for r in rows), note))

    def text(self, line: str) -> None:
        """A line of the human result."""
        self._parts.append(line)

    def page_parts(self) -> "list[PageTable | str]":
        """The human result so far as text, for a page that shows the same."""
        from hybridstate.report import PageTable

        found: list[PageTable | str] = []
        for part in self._parts:
            if isinstance(part, str):
                found.append(part)
                continue
            cells = tuple(tuple(_cell(value) for value in row) for row in part.rows)
            numeric = tuple(
                all(_NUMBER.match(row[number]) for row in cells)
                for number in range(len(part.columns))
            )
            found.append(PageTable(part.title, part.columns, cells, part.note, numeric))
        return found

    def note(self, message: str) -> None:
        """A line on stderr that is worth knowing; silent with `--quiet`."""
        if not self.quiet:
            self._say(message, style="dim")

    def warn(self, message: str) -> None:
        """A warning on stderr and in the JSON document."""
        self.warnings.append(message)
        self._say(f"warning: {message}", style="yellow")

    def progress(self, stage: str, done: int, total: int) -> None:
        """Progress callback of the API: `done` of `total` steps of a stage (total 0: unknown)."""
        if self.quiet:
            return
        if sys.stderr.isatty():
            self._advance_bar(stage, done, total)
            return
        now = self.clock()
        finished = total > 0 and done >= total
        if self._stage != stage:
            self._stage, self._last_line = stage, now
            return
        if self._last_line is None or (now - self._last_line < PROGRESS_LINE_SECONDS):
            return
        self._last_line = now
        share = f"{done}/{total} ({100 * done // total} %)" if total else f"{done}"
        elapsed = f"{now - self._started:.0f} s"
        self._say(f"{stage}: {share}, {elapsed}{', done' if finished else ''}")

    def _advance_bar(self, stage: str, done: int, total: int) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        if self._bar is None:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=_console(sys.stderr),
                transient=True,
            )
            self._bar.start()
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(stage, total=total or None)
        self._bar.update(self._tasks[stage], completed=done, total=total or None)

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            self._tasks.clear()

    def _say(self, message: str, *, style: str | None = None) -> None:
        """One line on stderr, above a running bar."""
        console = self._bar.console if self._bar is not None else _console(sys.stderr)
        with suppress(OSError):  # nobody reads stderr any more; the work goes on
            console.print(
                _printable(message), style=style, markup=False, highlight=False, soft_wrap=True
            )

    def _envelope(self, ok: bool) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "ok": ok,
            "command": self.command,
            "model": self.model,
            "result": self._result if ok else None,
            "warnings": self.warnings,
            "timing": {"seconds": round(self.clock() - self._started, 3)},
        }

    def _succeed(self) -> None:
        """Print the result; a reader that has seen enough (`| head`) is no failure."""
        self._stop_bar()
        try:
            self._print_result()
            sys.stdout.flush()
        except BrokenPipeError:
            silence_stdout()
        except OSError as error:
            silence_stdout()
            raise UsageError(
                f"cannot write the result to standard output: {error.strerror}",
                hint="the work itself is done",
            ) from error

    def _print_result(self) -> None:
        if self.json:
            _print_json(self._envelope(ok=True))
            return
        for number, part in enumerate(self._parts):
            if isinstance(part, str):
                _print_line(part)
            else:
                if number:
                    print()
                _print_table(part)

    def _fail(self, error: dict[str, Any]) -> None:
        self._stop_bar()
        if self.json:
            try:
                _print_json(self._envelope(ok=False) | {"error": error})
                sys.stdout.flush()
            except OSError:
                silence_stdout()
        self._say(f"error: {error['message']}", style="bold red")
        if error["hint"]:
            self._say(f"hint: {error['hint']}")


@contextmanager
def command(
    name: str,
    *,
    model: str | None = None,
    json: bool = False,
    quiet: bool = False,
) -> Iterator[Output]:
    """Run the body of a verb: prints its result, or its error, and ends with the right exit code.

    Raises:
        typer.Exit: with the code of the error, 1 for a bug, 130 when interrupted.
    """
    output = Output(name, model=model, json=json, quiet=quiet)
    debug = os.environ.get("HYBRIDSTATE_DEBUG", "") not in ("", "0")
    try:
        yield output
        output._succeed()
    except HybridStateError as error:
        if debug:
            traceback.print_exc()
        output._fail(error.to_json())
        raise typer.Exit(error.exit_code) from error
    except KeyboardInterrupt as error:
        output._fail(_error("interrupted", "interrupted"))
        raise typer.Exit(130) from error
    except typer.Exit:
        raise
    except OSError as error:
        if debug:
            traceback.print_exc()
        if error.errno is None:
            output._fail(_error("bug", f"{type(error).__name__}: {error}", _REPORT_BUG))
            raise typer.Exit(1) from error
        found = of_the_system(error)
        output._fail(found.to_json())
        raise typer.Exit(found.exit_code) from error
    except Exception as error:
        if debug:
            traceback.print_exc()
        if _out_of_memory(error):
            short = MissingRequirement(
                f"not enough memory: {str(error).strip() or type(error).__name__:.200}",
                hint="take a smaller batch or shorter texts, or a larger machine",
            )
            output._fail(short.to_json())
            raise typer.Exit(short.exit_code) from error
        output._fail(_error("bug", f"{type(error).__name__}: {error}", _REPORT_BUG))
        raise typer.Exit(1) from error
    finally:
        output._stop_bar()


def usage_failure(command_name: str, message: str, hint: str | None, *, json: bool) -> None:
    """Report a command line that could not be parsed, with `json` on stdout too."""
    Output(command_name, json=json)._fail(_error("usage", message, hint))


def interrupted(*, json: bool) -> None:
    """Report Ctrl-C outside a command."""
    Output("hybridstate", json=json)._fail(_error("interrupted", "interrupted"))


def silence_stdout() -> None:
    """Drop what could not be printed, so that the interpreter does not try again at its end."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _out_of_memory(error: Exception) -> bool:
    """Python's, NumPy's and torch's ways of saying it; torch has no class for it on a CPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def of_the_system(error: OSError) -> HybridStateError:
    """What the operating system refused, as the error it is for the user."""
    kind: type[HybridStateError] = UsageError if error.errno in _CANNOT_WRITE else SourceError
    what = error.strerror or type(error).__name__
    name = error.filename if isinstance(error.filename, str) else None
    if name is None:
        return kind(f"the system refused to read or write: {what}")
    return kind(f"{name}: {what}", file=name)


def _error(code: str, message: str, hint: str | None = None) -> dict[str, Any]:
    return {"code": code, "message": " ".join(message.split()), "hint": hint, "context": {}}


def _print_json(document: dict[str, Any]) -> None:
    print(json_format.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))


def _console(stream: Any, width: int | None = None) -> "Console":
    from rich.console import Console

    class Pipe(Console):
        """Leaves a closed pipe to the caller; Rich itself would end the program."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    # without a colour system Rich leaves out bold and dim as well
    plain = bool(os.environ.get("NO_COLOR"))
    return Pipe(file=stream, width=width, color_system=None if plain else "auto")


def _printable(text: str) -> str:
    """`one_line` of every line."""
    return "\n".join(map(one_line, text.split("\n")))


def _width() -> int | None:
    """Columns of the terminal; None where output is piped and any width is fine."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit():
        return shutil.get_terminal_size().columns
    return None


def _print_table(table: _Table) -> None:
    """A table where it fits, else one block of `column  value` lines per row; never an ellipsis."""
    from rich import box
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    console = _console(sys.stdout, 10_000)
    console.print(
        _printable(table.title), style="bold", markup=False, highlight=False, soft_wrap=True
    )
    cells = [[_cell(value) for value in row] for row in table.rows]
    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for number, name in enumerate(table.columns):
        numeric = all(_NUMBER.match(row[number]) for row in cells)
        grid.add_column(
            Text(_printable(name)), justify="right" if numeric else "left", no_wrap=True
        )
    for row in cells:
        grid.add_row(*map(Text, row))
    needed = Measurement.get(console, console.options, grid).maximum
    width = _width()
    if width is None or needed <= width:
        fitting = _console(sys.stdout, needed)
        with fitting.capture() as capture:
            fitting.print(grid, highlight=False)
        print("\n".join(line.rstrip() for line in capture.get().splitlines()))
    else:
        _print_records(table.columns, cells)
    if table.note:
        _print_line(table.note, style="dim")


def _print_line(text: str, style: str | None = None) -> None:
    """A line of prose: broken between words in a terminal, whole in a pipe."""
    width = _width()
    _console(sys.stdout, width or 10_000).print(
        _printable(text), style=style, markup=False, highlight=False, soft_wrap=width is None
    )


def _print_records(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    label = max(len(name) for name in columns)
    for number, row in enumerate(cells):
        if number:
            print()
        for name, value in zip(columns, row, strict=True):
            print(f"  {name:<{label}}  {value}")


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if 999.95 <= abs(value) < 1e9 else f"{value:.4g}"
    return _printable(str(value)).replace("\n", " ")
