"""What a result was made from and with: digests, canonical JSON, versions; whole output folders.

Everything that hybridstate writes goes through `fresh_folder` or `write_file`, so a failed or
interrupted run leaves nothing half-written.
"""

import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from hybridstate import __version__
from hybridstate.errors import PlanMismatch, SourceError, UsageError

PACKAGES: Final = (
    "torch",
    "triton",
    "transformers",
    "numpy",
    "scipy",
    "safetensors",
    "huggingface_hub",
    "fla-core",
    "flash-linear-attention",
)
"""Distributions whose versions can change a result; fla changes the kernels transformers picks."""

_CHUNK_BYTES: Final = 1 << 20
_PLAIN: Final = r"(?:-?\d[\d.eE+-]*|true|false|null)"
_NUMBERS: Final = re.compile(rf"\[\n\s*({_PLAIN}(?:,\n\s*{_PLAIN})*)\n\s*\]")
"""Such a list as `json.dumps` breaks it: a string cannot look like it, because its line breaks are escaped."""


def canonical_json(value: Any) -> bytes:
    """Sorted keys, no spaces, UTF-8, no NaN or infinity: equal values give equal bytes."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()


def readable_json(value: Any) -> bytes:
    """JSON to read and to compare line by line: one key a line, a list of plain numbers on one line; UTF-8.

    Raises:
        ValueError: NaN or infinity.
    """
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    return f"{_NUMBERS.sub(_on_one_line, text)}\n".encode()


def _on_one_line(match: re.Match[str]) -> str:
    return f"[{' '.join(match[1].split())}]"


def sha256_bytes(data: bytes) -> str:
    """Hex digest of bytes."""
    return hashlib.sha256(data).hexdigest()


def sha256_json(value: Any) -> str:
    """Hex digest of the canonical JSON of a value."""
    return sha256_bytes(canonical_json(value))


def sha256_file(path: Path) -> str:
    """Hex digest of a file, read in pieces.

    Raises:
        SourceError: the file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}", file=str(path)) from error
    return digest.hexdigest()


def check_digests(
    file: Path, recorded: Mapping[str, Any], digests: Mapping[str, str], *, hint: str
) -> None:
    """Refuse a recording of another checkpoint.

    Args:
        recorded: digests of the parts of the checkpoint that `file` was measured on.
        digests: those of the checkpoint in hand.

    Raises:
        PlanMismatch: one differs.
    """
    for part, digest in digests.items():
        if recorded.get(part) != digest:
            raise PlanMismatch(
                f"{file} was measured on another checkpoint: {part} digest "
                f"{str(recorded.get(part, '-'))[:12]}, this one has {digest[:12]}",
                hint=hint,
                file=str(file),
                digest=part,
                found=recorded.get(part),
                expected=digest,
            )


def environment(**device: Any) -> dict[str, Any]:
    """Versions of everything that can change a result; imports none of it.

    Args:
        **device: fields that only the caller knows (`device`, `cuda`, `driver`, `kernels`).
    """
    versions = {name.replace("-", "_"): _version(name) for name in PACKAGES}
    return {
        "hybridstate": __version__,
        **_git(Path(__file__).resolve().parent.parent),
        "python": platform.python_version(),
        "platform": f"{sys.platform}-{platform.machine()}",
        **versions,
        **device,
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _git(root: Path) -> dict[str, Any]:
    """Commit of the checkout that this package runs from.

    Where git cannot tell, `HYBRIDSTATE_COMMIT` names it; else it is unknown.
    """
    unknown = {"commit": os.environ.get("HYBRIDSTATE_COMMIT") or None, "modified": None}
    if not (root / ".git").exists():
        return unknown

    def run(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        commit = run("rev-parse", "HEAD")
        modified = bool(run("status", "--porcelain", "--untracked-files=no", "--", "hybridstate"))
    except (OSError, subprocess.SubprocessError):
        return unknown
    return {"commit": commit, "modified": modified}


def check_output_folder(path: Path, *, force: bool = False, replaces: Sequence[str] = ()) -> None:
    """Refuse an output folder that would be mixed with what is there; call before any work.

    Args:
        force: allow a folder that is not empty.
        replaces: files by which a folder of the same kind is known; `force` then replaces such a
            folder as a whole, and no other.

    Raises:
        UsageError: the path is a file, or a folder that is not empty (unless `force`), or it
            cannot be written.
    """
    try:
        if path.suffix == ".json" and not path.exists():
            raise UsageError(
                f"output {path} would be a folder, and its name is that of a file",
                hint="name a folder; --json prints the result as one document",
                file=str(path),
            )
        if (path.exists() or path.is_symlink()) and not path.is_dir():
            what = "a file" if path.exists() else "a link to nothing"
            raise UsageError(f"output {path} is {what}, a folder is expected", file=str(path))
        check_writable(path)
        if not path.is_dir() or not any(path.iterdir()):
            return
    except OSError as error:
        raise _cannot_write(path, error) from error
    if not force:
        what = "it" if replaces else "files of the same name"
        raise UsageError(
            f"output folder {path} is not empty",
            hint=f"choose another folder, or replace {what} with --force",
            file=str(path),
        )
    if replaces and not any((path / name).exists() for name in replaces):
        raise UsageError(
            f"output folder {path} holds no {' or '.join(replaces)}, so --force does not replace it",
            hint="choose another folder, or remove this one yourself",
            file=str(path),
            expected=list(replaces),
        )


def check_writable(path: Path) -> None:
    """Refuse a place where nothing can be made, by making something there; call before any work.

    Raises:
        UsageError: the nearest existing folder above `path` is a file or cannot be written.
        OSError: it fails, as with a name that is too long, or a folder above cannot be entered.
    """
    nearest = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    if not nearest.is_dir() and nearest != path.absolute():
        raise UsageError(f"cannot write {path}: {nearest} is a file", file=str(path))
    folder = nearest if nearest.is_dir() else nearest.parent  # a file is replaced by a sibling
    if not os.access(folder, os.W_OK):
        why = "read-only file system or missing permission"
        raise UsageError(
            f"cannot write {path}: {folder} refuses it ({why})",
            hint="choose another place with -o",
            file=str(path),
        )
    trial = folder / f".{path.name}.partial-{secrets.token_hex(4)}"  # root may, and fails
    trial.touch(exist_ok=False)
    trial.unlink()


def check_apart(path: Path, *inputs: str | Path | None) -> None:
    """Refuse to replace a folder that holds what the result is made from.

    Raises:
        UsageError: an input is `path` or lies in it.
    """
    target = path.resolve()
    for given in inputs:
        if given is None or not Path(given).expanduser().exists():
            continue
        place = Path(given).expanduser().resolve()
        if target == place or target in place.parents:
            raise UsageError(
                f"output folder {path} would replace {given}, which is read",
                hint="choose another folder",
                file=str(path),
            )


def _cannot_write(path: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot write {path}: {error.strerror or error}", file=str(path))


@contextmanager
def fresh_folder(
    path: Path, *, force: bool = False, replaces: Sequence[str] = ()
) -> Iterator[Path]:
    """Yield a temporary sibling that becomes `path` when the block ends without an exception.

    With `force`, files of the same name are replaced one by one and others stay; with `replaces`
    as well, the old folder goes as a whole (see `check_output_folder`).

    Raises:
        UsageError: see `check_output_folder`; or the disk is full or refuses.
    """
    check_output_folder(path, force=force, replaces=replaces)
    path = (
        path.resolve()
    )  # "." has no name to put a sibling beside, a link may lead to another disk
    partial = _partial_folder(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
    except OSError as error:
        raise _cannot_write(path, error) from error
    try:
        yield partial
        if not force and path.is_dir() and any(item != partial for item in path.iterdir()):
            raise UsageError(
                f"output folder {path} was filled by another process meanwhile",
                hint="choose another folder",
                file=str(path),
            )
        if not path.is_dir():
            partial.replace(path)
        elif not replaces or not any(path.iterdir()):
            _merge(partial, path)
        elif partial.parent == path:
            _empty(path, keep=partial)
            _merge(partial, path)
        else:
            old = path.with_name(f".{path.name}.old-{os.getpid()}")
            path.replace(old)
            try:
                partial.replace(path)
            except OSError:
                old.replace(path)
                raise
            shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        if _ours(error, path, partial):
            raise _cannot_write(path, error) from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _partial_folder(path: Path) -> Path:
    """Beside `path`, or in it where it is a mount point or its parent cannot be written."""
    name = f".{path.name}.partial-{secrets.token_hex(4)}"  # a killed run's may still be there
    if path.is_dir() and (path.is_mount() or not os.access(path.parent, os.W_OK)):
        return path / name
    return path.with_name(name)


def _ours(error: OSError, path: Path, partial: Path) -> bool:
    """Whether an error comes from writing the output: a failed `write` names no file."""
    if error.filename is None:
        return error.errno is not None
    places = [Path(os.fsdecode(name)) for name in (error.filename, error.filename2) if name]
    return any(f in (place, *place.parents) for f in (path, partial) for place in places)


def _empty(folder: Path, *, keep: Path) -> None:
    for item in folder.iterdir():
        if item.is_dir() and not item.is_symlink() and item != keep:
            shutil.rmtree(item)
        elif item != keep:
            item.unlink()


def _merge(source: Path, target: Path) -> None:
    for item in sorted(source.iterdir()):
        destination = target / item.name
        if item.is_dir() and destination.is_dir():
            _merge(item, destination)
        else:
            item.replace(destination)


def write_file(path: Path, data: bytes) -> None:
    """Write a file through a temporary sibling.

    Raises:
        UsageError: the folder cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
