"""Where the result of a bench verb goes: one JSON file, or a folder with its figures."""

import json as jsonlib
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


def check_partial(output: Path | None, *, force: bool, resume: Path | None) -> None:
    """Refuse a place where the result so far of another run would be replaced, before any work.

    Args:
        resume: the earlier result that this run continues from, which may be that one.

    Raises:
        UsageError: there is one, without `--force`; or nothing can be written there.
    """
    from hybridstate.errors import UsageError

    if output is None:
        return
    path = partial_of(output)
    check_output(path, force=True)
    if path.exists() and not force and (resume is None or not _same_file(resume, path)):
        raise UsageError(
            f"{path} holds what another run of this output has so far",
            hint=f"go on from it with --resume {path}, choose another output, or replace it with --force",
            file=str(path),
        )


def partial_of(output: Path) -> Path:
    """Where an unfinished run keeps what it has."""
    return output.with_name(f"{output.name.removesuffix('.json')}.partial.json")


def recorder(out: Output, output: Path | None) -> Callable[[dict[str, Any]], None] | None:
    """Write the result so far beside the output, as a whole file each time; None without an output."""
    from hybridstate.provenance import write_file

    if output is None:
        return None
    path = partial_of(output)

    def record(result: dict[str, Any]) -> None:
        document = recorded(out, result, result["device"])
        write_file(path, (jsonlib.dumps(document, allow_nan=False) + "\n").encode())

    return record


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
    """Add where the numbers come from, write the document and its figures, hand over the result.

    Raises:
        UsageError: another process took the output meanwhile; the result is beside it.
    """
    from hybridstate.errors import UsageError
    from hybridstate.provenance import fresh_folder, readable_json, write_file

    document = recorded(out, result, result["device"])
    result["provenance"] = document["provenance"]
    if path is not None:
        text = readable_json(document)
        target = path if force else _free(path)
        if path.suffix == ".json":
            write_file(target, text)
        else:
            with fresh_folder(target, force=force) as folder:
                write_file(folder / f"{name}.json", text)
                if draw is not None:
                    draw(result, folder)
        if target != path:
            raise UsageError(
                f"output {path} was written by another process meanwhile, this result is in {target}",
                hint="rename it, or give each run an output of its own",
                file=str(target),
            )
        out.note(f"wrote {path}")
    out.result(result)


def _free(path: Path) -> Path:
    """The path, or where it is taken by now the first of `NAME-2`, `NAME-3` ... that is not."""
    number, target = 1, path
    while target.exists() and not (number == 1 and target.is_dir() and not any(target.iterdir())):
        number += 1
        target = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return target


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
