"""Where the result of a bench verb goes: one JSON file, or a folder with its figures."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hybridstate.cli.output import SCHEMA, Output

OutputPath = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="PATH",
        help="A file ending in .json, or a new folder.",
        show_default=False,
    ),
]


def check_output(path: Path | None, *, force: bool, reads: Sequence[Path | None] = ()) -> None:
    """Refuse a place that cannot take the result, before any work.

    Args:
        reads: files that the result is made from; `--force` does not replace one of them.

    Raises:
        UsageError: the file exists, or the folder is not empty, without `--force`; or the file is read.
    """
    from hybridstate.errors import UsageError
    from hybridstate.provenance import check_output_folder, check_writable

    if path is None:
        return
    if path.suffix != ".json":
        check_output_folder(path, force=force)
        return
    try:
        folder, taken = path.is_dir(), path.exists() and not force
        check_writable(path)
        read = next((g for g in reads if g is not None and _same_file(g, path)), None)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", file=str(path)) from error
    if folder:
        raise UsageError(f"output {path} is a folder, a file is expected", file=str(path))
    if taken:
        raise UsageError(
            f"output {path} exists",
            hint="choose another file, or replace it with --force",
            file=str(path),
        )
    if read is not None:
        raise UsageError(
            f"output {path} would replace {read}, which is read",
            hint="choose another file",
            file=str(path),
        )


def _same_file(one: Path, other: Path) -> bool:
    """Whether both names lead to one file; what cannot be looked at is told by whoever reads it."""
    try:
        return one.samefile(other)
    except OSError:
        return False


def finish(
    out: Output,
    name: str,
    result: dict[str, Any],
    path: Path | None,
    *,
    force: bool,
    draw: Callable[[dict[str, Any], Path], None] | None = None,
) -> None:
    """Add where the numbers come from, write the document and its figures, hand over the result."""
    from hybridstate.errors import UsageError
    from hybridstate.provenance import fresh_folder, readable_json, write_file

    document = recorded(out, result, result["device"])
    result["provenance"] = document["provenance"]
    if path is not None:
        text = readable_json(document)
        if path.suffix == ".json":
            if path.exists() and not force:
                raise UsageError(
                    f"output {path} was written by another process meanwhile",
                    hint="choose another file",
                    file=str(path),
                )
            write_file(path, text)
        else:
            with fresh_folder(path, force=force) as folder:
                write_file(folder / f"{name}.json", text)
                if draw is not None:
                    draw(result, folder)
        out.note(f"wrote {path}")
    out.result(result)


def recorded(out: Output, result: dict[str, Any], hardware: dict[str, Any]) -> dict[str, Any]:
    """The document that goes into `benchmarks/`: the result, and what it was made from, with and on.

    Args:
        hardware: `bench.timing.device_record` of the device that ran.
    """
    from hybridstate.provenance import environment

    return {
        "schema": SCHEMA,
        "command": out.command,
        "arguments": _arguments(),
        "model": result.get("model", out.model),
        "provenance": environment(device=hardware["name"], hardware=hardware),
        "result": dict(result),
    }


def _arguments() -> list[str]:
    """The command line with file names instead of paths."""
    return [
        Path(argument).name if "/" in argument or "\\" in argument else argument
        for argument in sys.argv[1:]
    ]
