"""Output folders that appear whole or not at all."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridstate.errors import UsageError


def check_output_folder(path: Path, *, force: bool, owned_by: tuple[str, ...]) -> None:
    """Refuse an output that would overwrite something.

    Args:
        path: the folder to be written.
        force: allow replacing a folder that holds one of `owned_by`.
        owned_by: file names by which a folder of ours is recognised.

    Raises:
        UsageError: `path` is a file, or a non-empty folder without `force`, or not one of ours.
    """
    if not path.exists():
        return
    if not path.is_dir():
        raise UsageError(f"{path} is a file, expected a folder to write", file=str(path))
    if not any(path.iterdir()):
        return
    if not force:
        raise UsageError(
            f"output folder {path} is not empty",
            hint="choose another -o, or add --force to replace it",
            file=str(path),
        )
    if not any((path / name).exists() for name in owned_by):
        raise UsageError(
            f"output folder {path} was not written by hybridstate, so --force does not replace it",
            hint="choose another -o, or remove the folder yourself",
            file=str(path),
            expected=list(owned_by),
        )


@contextmanager
def new_folder(path: Path, *, force: bool, owned_by: tuple[str, ...]) -> Iterator[Path]:
    """A hidden sibling to fill; on success it becomes `path` by rename, on failure it is removed.

    Raises:
        UsageError: as `check_output_folder`.
    """
    path = Path(path).absolute()
    check_output_folder(path, force=force, owned_by=owned_by)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.partial-", dir=path.parent))
    try:
        partial.chmod(0o755)
        yield partial
        if path.exists():
            replaced = Path(tempfile.mkdtemp(prefix=f".{path.name}.old-", dir=path.parent))
            path.rename(replaced / path.name)
            try:
                partial.rename(path)
            except OSError:
                (replaced / path.name).rename(path)
                raise
            finally:
                shutil.rmtree(replaced, ignore_errors=True)
        else:
            partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
