"""What a result was made from and with: digests, canonical JSON, versions; whole output folders.

Everything that hybridstate writes goes through `fresh_folder` or `write_file`, so a failed or
interrupted run leaves nothing half-written.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from hybridstate import __version__
from hybridstate.errors import SourceError, UsageError

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


def canonical_json(value: Any) -> bytes:
    """Sorted keys, no spaces, UTF-8, no NaN or infinity: equal values give equal bytes."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()


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

    A copy without `.git` names it through `HYBRIDSTATE_COMMIT`; elsewhere it is unknown.
    """
    if not (root / ".git").exists():
        return {"commit": os.environ.get("HYBRIDSTATE_COMMIT") or None, "modified": None}

    def run(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        commit = run("rev-parse", "HEAD")
        modified = bool(run("status", "--porcelain", "--untracked-files=no", "--", "hybridstate"))
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "modified": None}
    return {"commit": commit, "modified": modified}


def check_output_folder(path: Path, *, force: bool = False, replaces: Sequence[str] = ()) -> None:
    """Refuse an output folder that would be mixed with what is there; call before any work.

    Args:
        force: allow a folder that is not empty.
        replaces: files by which a folder of the same kind is known; `force` then replaces such a
            folder as a whole, and no other.

    Raises:
        UsageError: the path is a file, or a folder that is not empty (unless `force`).
    """
    if path.exists() and not path.is_dir():
        raise UsageError(f"output {path} is a file, a folder is expected", file=str(path))
    if not path.is_dir() or not any(path.iterdir()):
        return
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


@contextmanager
def fresh_folder(
    path: Path, *, force: bool = False, replaces: Sequence[str] = ()
) -> Iterator[Path]:
    """Yield a temporary sibling that becomes `path` when the block ends without an exception.

    With `force`, files of the same name are replaced one by one and others stay; with `replaces`
    as well, the old folder goes as a whole (see `check_output_folder`).

    Raises:
        UsageError: see `check_output_folder`; or the parent cannot be written.
    """
    check_output_folder(path, force=force, replaces=replaces)
    path = path.absolute()  # "." has no name to put a sibling beside
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", file=str(path)) from error
    try:
        yield partial
        if not path.is_dir():
            partial.replace(path)
        elif not replaces or not any(path.iterdir()):
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
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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
        raise UsageError(f"cannot write {path}: {error.strerror}", file=str(path)) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
