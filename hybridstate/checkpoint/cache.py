"""What was read of Hub models, kept so that a second run needs no request.

`<root>/<org>--<name>/refs/<revision>` holds the commit a branch or tag pointed to when it was last
asked for; `<root>/<org>--<name>/<commit>/` holds the file list, config, index, headers and the byte
ranges that were read. Every file starts with a line that gives the digest and length of the rest,
so a damaged one is noticed. Nothing in it is needed: it can be deleted at any time.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

from hybridstate.errors import SourceError, UsageError
from hybridstate.provenance import sha256_bytes, write_file

_MARK: Final = b"hybridstate-cache/1"


def default_root() -> Path:
    """`$XDG_CACHE_HOME/hybridstate`, or `~/.cache/hybridstate`.

    Raises:
        SourceError: there is no home folder.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    if given and Path(given).is_absolute():
        return Path(given) / "hybridstate"
    try:
        return Path.home() / ".cache" / "hybridstate"
    except RuntimeError as error:
        raise SourceError(
            f"no folder for the cache: {error}", hint="give --cache-dir DIR"
        ) from error


@dataclass
class Cache:
    """The cached parts of one repository.

    Attributes:
        root: folder of all repositories.
        repo: `org/name`.
        refused: why nothing could be written, None while all is well.
        damaged: a cached file that did not match its digest, None if there was none.
    """

    root: Path
    repo: str
    refused: str | None = None
    damaged: Path | None = None

    @property
    def folder(self) -> Path:
        """Folder of this repository."""
        return self.root / self.repo.replace("/", "--")

    def commit(self, revision: str | None) -> str | None:
        """Commit that a revision pointed to when it was last asked for."""
        data = self._read(self._ref(revision))
        return None if data is None else data.decode("ascii", "replace")

    def remember(self, revision: str | None, commit: str) -> None:
        """Note the commit of a revision."""
        self._write(self._ref(revision), commit.encode())

    def read(self, commit: str, part: str) -> bytes | None:
        """A cached part of a commit, None if there is none or it is damaged."""
        return self._read(self.folder / commit / part)

    def write(self, commit: str, part: str, data: bytes) -> None:
        """Keep a part; a folder that cannot be written is noted in `refused`."""
        self._write(self.folder / commit / part, data)

    def _ref(self, revision: str | None) -> Path:
        # the ending keeps "." and ".." from being folders
        name = "default" if revision is None else quote(revision, safe="") + ".revision"
        return self.folder / "refs" / name

    def _read(self, path: Path) -> bytes | None:
        try:
            data = path.read_bytes()
        except OSError:
            return None
        line, _, rest = data.partition(b"\n")
        if line != _first_line(rest):
            self.damaged = path
            return None
        return rest

    def _write(self, path: Path, data: bytes) -> None:
        if self.refused is not None:
            return
        try:
            write_file(path, _first_line(data) + b"\n" + data)
        except UsageError as error:
            self.refused = error.message


def _first_line(data: bytes) -> bytes:
    return b"%s %s %d" % (_MARK, sha256_bytes(data).encode(), len(data))
