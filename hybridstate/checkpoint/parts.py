"""What a reader of folders or of the Hub hands over, and what reading from the Hub costs."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hybridstate.checkpoint.header import TensorEntry


class Reader(Protocol):
    """Gets the stored bytes of tensors, in as few pieces as the source allows."""

    def fetch(self, wanted: Mapping[str, TensorEntry]) -> dict[str, bytes]:
        """Stored bytes of each tensor."""
        ...


@dataclass(frozen=True, slots=True)
class Read:
    """One line of what a cold read asks for.

    Attributes:
        part: what it is.
        requests: how many, redirects and repetitions not counted.
        nbytes: bytes of their bodies.
    """

    part: str
    requests: int
    nbytes: int


class Origin(Protocol):
    """Where a Hub model comes from."""

    @property
    def repo(self) -> str:
        """`org/name`."""
        ...

    @property
    def revision(self) -> str | None:
        """Branch, tag or commit that was asked for, None for the default branch."""
        ...

    @property
    def commit(self) -> str:
        """The sha it stands for; everything was read at it."""
        ...

    @property
    def requests(self) -> int:
        """Requests made so far, redirects and repetitions included."""
        ...

    @property
    def received(self) -> int:
        """Bytes received so far."""
        ...

    def cost(self, wanted: Mapping[str, TensorEntry]) -> tuple[Read, ...]:
        """What reading these tensors asks for where nothing is cached."""
        ...


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything about a checkpoint but its tensors.

    Attributes:
        path: folder, or for a Hub model the place of its cached parts.
        name: how to call it in output.
        config: parsed `config.json`.
        entries: tensor name -> place, over the shards whose headers were read.
        names: names of all tensors.
        files: the shards whose headers were read.
        size: bytes of the whole checkpoint.
        header_bytes: bytes of the headers.
        index_digest: sha256 of the index, or of the header of a single file.
        reader: gets tensor bytes.
        notes, warnings: one line each.
        origin: where a Hub model comes from.
    """

    path: Path
    name: str
    config: dict[str, Any]
    entries: Mapping[str, TensorEntry]
    names: frozenset[str]
    files: tuple[Path, ...]
    size: int
    header_bytes: int
    index_digest: str
    reader: Reader
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    origin: Origin | None = None
