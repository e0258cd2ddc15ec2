"""Models on the Hugging Face Hub: pinned to a commit, read by ranges, cached, offline if wanted.

Nothing but the file list, config, index, the headers of the shards that hold linear-attention layers
and the asked-for tensors is ever requested. Reading the rest of a model is `hf download`'s business.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from hybridstate.checkpoint import index as tables
from hybridstate.checkpoint.cache import Cache, default_root
from hybridstate.checkpoint.header import (
    LENGTH_BYTES,
    Header,
    TensorEntry,
    header_length,
    parse_header,
)
from hybridstate.checkpoint.parts import Parts, Read
from hybridstate.checkpoint.transport import Transport
from hybridstate.errors import SourceError

GAP_BYTES: Final = 64 << 10
"""Tensors closer than this come in one range."""

CONNECTIONS: Final = 8
MAX_LISTING_BYTES: Final = 64 << 20

Progress = Callable[[str, int, int], None]
A = TypeVar("A")
B = TypeVar("B")

_NAME: Final = re.compile(
    r"^(?P<scheme>hf://)?(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@(?P<revision>[\w./+#-]{1,200}))?$",
    re.ASCII,
)
_COMMIT: Final = re.compile(r"^[0-9a-f]{40}$")
_TRUE: Final = ("1", "on", "yes", "true")


@dataclass(frozen=True, slots=True)
class HubName:
    """A MODEL argument that names a repository.

    Attributes:
        repo: `org/name`.
        revision: branch, tag or commit; None for the default branch.
        explicit: given with `hf://`.
    """

    repo: str
    revision: str | None
    explicit: bool

    def __str__(self) -> str:
        return self.repo + (f"@{self.revision}" if self.revision else "")

    @property
    def download(self) -> str:
        """The command that fetches the whole model, and what to do then."""
        pin = f" --revision {self.revision}" if self.revision else ""
        folder = self.repo.split("/")[1]
        return f"hf download {self.repo}{pin} --local-dir {folder}, then give ./{folder} as MODEL"


def hub_name(model: str) -> HubName | None:
    """The repository that a MODEL argument names, None if it cannot be one."""
    match = _NAME.match(model)
    if match is None or ".." in match["repo"] or "--" in match["repo"] or len(match["repo"]) > 96:
        return None
    return HubName(match["repo"], match["revision"], match["scheme"] is not None)


def offline_by_environment() -> bool:
    """Whether `HF_HUB_OFFLINE` or `TRANSFORMERS_OFFLINE` forbids requests, read as the Hub's library does."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.lower() in _TRUE


@dataclass
class HubReader:
    """The files of one commit, from the cache or else by request.

    Attributes:
        name: what was asked for.
        commit: the sha it stands for.
        cache: where parts are kept.
        transport: makes requests; None offline.
        progress: called with (stage, done, total).
    """

    name: HubName
    cache: Cache
    transport: Transport | None
    progress: Progress | None = None
    commit: str = ""
    sizes: dict[str, int] = field(default_factory=dict)
    before: list[Read] = field(default_factory=list)

    @property
    def repo(self) -> str:
        """`org/name`."""
        return self.name.repo

    @property
    def revision(self) -> str | None:
        """Branch, tag or commit that was asked for."""
        return self.name.revision

    @property
    def requests(self) -> int:
        """Requests made so far, redirects and repetitions included."""
        return 0 if self.transport is None else self.transport.requests

    @property
    def received(self) -> int:
        """Bytes received so far."""
        return 0 if self.transport is None else self.transport.received

    @property
    def place(self) -> str:
        """Repository and commit, for messages."""
        return f"{self.repo}@{self.commit[:12]}"

    def pin(self) -> tuple[frozenset[str], tuple[str, ...]]:
        """Find the commit; the names of its files, and what is worth telling."""
        revision = self.revision
        pinned = revision if revision is not None and _COMMIT.match(revision) else None
        known = pinned or self.cache.commit(revision)
        known = known if known is not None and _COMMIT.match(known) else None
        listing = None
        if known is not None and (pinned is not None or self.transport is None):
            listing = self.cache.read(known, "files.json")
        if listing is None:
            if self.transport is None:
                raise self._offline("the file list")
            listing = self.transport.listing(limit=MAX_LISTING_BYTES)
        self.commit, files = _listing(self.name, listing, pinned)
        if self.transport is not None:
            self.transport.commit = self.commit
            if pinned is None:
                self.cache.remember(revision, self.commit)
            self.cache.write(self.commit, "files.json", listing)
        self.before.append(Read("file list", 1, len(listing)))
        notes = [f"{self.repo}: commit {self.commit}"]
        if revision is None:
            notes = [f"{self.repo}: commit {self.commit} of the default branch"]
        if known is not None and known != self.commit:
            notes.append(f"{self.name} pointed to {known[:12]} at the last run")
        return files, tuple(notes)

    def small(self, file: str, limit: int) -> bytes:
        """A whole small file."""

        def get(transport: Transport) -> bytes:
            return transport.small(file, limit=limit)

        data = self._cached(file, file, get)
        self.before.append(Read(file, 1, len(data)))
        return data

    def headers(self, shards: Iterable[str]) -> dict[str, Header]:
        """Checked headers of shards: 8 bytes, then exactly the header."""
        found = dict(self._parallel("headers", self._header, list(shards)))
        nbytes = sum(header.nbytes for header in found.values())
        self.before.append(Read(f"headers of {len(found)} shards", 2 * len(found), nbytes))
        return found

    def _header(self, shard: str) -> tuple[str, Header]:
        file = Path(self.place) / shard

        def get(transport: Transport) -> bytes:
            first, size = transport.range(shard, 0, LENGTH_BYTES)
            length = header_length(file, first, size)
            raw = b""
            if length:
                raw, _ = transport.range(shard, LENGTH_BYTES, LENGTH_BYTES + length, size)
            parse_header(file, raw, size)  # a bad one is not kept
            return b"%d\n" % size + raw

        size, _, raw = self._cached(f"{shard}.header", f"the header of {shard}", get).partition(
            b"\n"
        )
        self.sizes[shard] = int(size)
        return shard, parse_header(file, raw, int(size))

    def fetch(self, wanted: Mapping[str, TensorEntry]) -> dict[str, bytes]:
        """Stored bytes of each tensor, close ones in one range."""
        found: dict[str, bytes] = {}
        for name, entry in wanted.items():
            if not entry.nbytes:
                found[name] = b""
                continue
            kept = self.cache.read(self.commit, _part(entry))
            if kept is not None and len(kept) == entry.nbytes:
                found[name] = kept
        missing = {name: entry for name, entry in wanted.items() if name not in found}
        if missing and self.transport is None:
            raise self._offline(f"tensor {next(iter(missing))}")
        for pieces in self._parallel("ranges", self._range, _ranges(missing)):
            found |= pieces
        return {name: found[name] for name in wanted}

    def _range(self, span: "_Span") -> dict[str, bytes]:
        assert self.transport is not None
        data, _ = self.transport.range(span.shard, span.start, span.end, self.sizes[span.shard])
        pieces = {}
        for name, entry in span.entries.items():
            piece = data[entry.start - span.start : entry.end - span.start]
            self.cache.write(self.commit, _part(entry), piece)
            pieces[name] = piece
        return pieces

    def cost(self, wanted: Mapping[str, TensorEntry]) -> tuple[Read, ...]:
        """What reading these tensors asks for where nothing is cached."""
        spans = _ranges(wanted)
        nbytes = sum(span.end - span.start for span in spans)
        return (*self.before, Read(f"{len(wanted)} tensors", len(spans), nbytes))

    def _cached(self, part: str, what: str, get: Callable[[Transport], bytes]) -> bytes:
        data = self.cache.read(self.commit, part)
        if data is None:
            if self.transport is None:
                raise self._offline(what)
            data = get(self.transport)
            self.cache.write(self.commit, part, data)
        return data

    def _parallel(self, stage: str, work: Callable[[A], B], items: list[A]) -> list[B]:
        """Results in the order of the items; the first failure stops the rest."""
        if len(items) < 2 or self.transport is None:
            return [work(item) for item in items]
        from concurrent.futures import ThreadPoolExecutor

        results = []
        with ThreadPoolExecutor(min(CONNECTIONS, len(items))) as pool:
            futures = [pool.submit(work, item) for item in items]
            try:
                for number, future in enumerate(futures, 1):
                    results.append(future.result())
                    if self.progress is not None:
                        self.progress(stage, number, len(items))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return results

    def _offline(self, what: str) -> SourceError:
        if self.cache.damaged is not None:
            return SourceError(
                f"cached file {self.cache.damaged} is damaged, and requests are switched off",
                hint=f"run once without --offline and HF_HUB_OFFLINE: hybridstate analyze {self.name}",
                reason="offline",
                file=str(self.cache.damaged),
            )
        return SourceError(
            f"{what} of {self.name} is not in the cache {self.cache.root}, and requests are "
            "switched off",
            hint=f"run once without --offline and HF_HUB_OFFLINE: hybridstate analyze {self.name}",
            reason="offline",
            model=str(self.name),
        )


@dataclass(frozen=True, slots=True)
class _Span:
    """One range of a shard, and the tensors in it."""

    shard: str
    start: int
    end: int
    entries: Mapping[str, TensorEntry]


def _ranges(wanted: Mapping[str, TensorEntry]) -> list[_Span]:
    """The ranges that hold the tensors, by shard and offset."""
    spans: list[_Span] = []
    for shard in sorted({entry.file.name for entry in wanted.values()}):
        inside = {
            name: entry
            for name, entry in wanted.items()
            if entry.file.name == shard and entry.nbytes
        }
        for start, end in coalesce([(e.start, e.end) for e in inside.values()], GAP_BYTES):
            members = {n: e for n, e in inside.items() if start <= e.start and e.end <= end}
            spans.append(_Span(shard, start, end, members))
    return spans


def coalesce(spans: list[tuple[int, int]], gap: int) -> Iterator[tuple[int, int]]:
    """Spans [start, end) merged where fewer than `gap` bytes lie between them, ascending."""
    merged: tuple[int, int] | None = None
    for start, end in sorted(spans):
        if merged is not None and start - merged[1] < gap:
            merged = merged[0], max(merged[1], end)
            continue
        if merged is not None:
            yield merged
        merged = start, end
    if merged is not None:
        yield merged


def _part(entry: TensorEntry) -> str:
    return f"{entry.file.name}.{entry.start}-{entry.end}"


def _listing(name: HubName, data: bytes, pinned: str | None) -> tuple[str, frozenset[str]]:
    """Commit and file names of the Hub's answer."""
    try:
        answer: Any = json.loads(data)
        commit, siblings = answer["sha"], answer["siblings"]
        files = frozenset(sibling["rfilename"] for sibling in siblings)
        good = _COMMIT.match(commit) and all(isinstance(file, str) for file in files)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _no_listing(name) from error
    if not good:
        raise _no_listing(name)
    if pinned is not None and commit != pinned:
        raise SourceError(
            f"{name.repo}: asked for commit {pinned[:12]}, the server answered with {commit[:12]}",
            hint="a cache between here and the Hub mixes versions; try again later",
            reason="changed",
        )
    return commit, files


def _no_listing(name: HubName) -> SourceError:
    return SourceError(
        f"the answer to the request for the files of {name.repo} is none of the Hub's: no commit, "
        "no file list",
        hint="check HF_ENDPOINT; a proxy may be in between",
        reason="no-listing",
    )


def read_hub(
    name: HubName,
    *,
    offline: bool = False,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> Parts:
    """Everything about a Hub model but its tensors, read at one commit.

    Args:
        offline: make no request; what is not cached is an error.
        cache_dir: instead of `$XDG_CACHE_HOME/hybridstate`.
        progress: called with (stage, done, total).

    Raises:
        SourceError: gated, missing, unreachable, offline, no ranges (`reason` in the context), or
            what `read_folder` refuses.
    """
    cache = Cache(default_root() if cache_dir is None else cache_dir, name.repo)
    still = offline or offline_by_environment()
    reader = HubReader(
        name, cache, None if still else Transport(name.repo, name.revision), progress
    )
    present, notes = reader.pin()
    place = Path(reader.place)
    _check_file(tables.CONFIG, present, reader.place)
    config = tables.parse_object(
        place / tables.CONFIG, reader.small(tables.CONFIG, tables.MAX_CONFIG_BYTES)
    )
    warnings: tuple[str, ...] = ()
    if tables.SINGLE in present:
        headers = reader.headers([tables.SINGLE])
        entries = tables.merge(headers, reader.place)
        names, digest = frozenset(entries), headers[tables.SINGLE].digest
        size = reader.sizes[tables.SINGLE]
    else:
        _check_file(tables.INDEX, present, reader.place)
        index = tables.parse_index(
            place / tables.INDEX, reader.small(tables.INDEX, tables.MAX_INDEX_BYTES)
        )
        tables.check_present(index, reader.place, present)
        headers = reader.headers(_touched(index))
        entries = tables.merge(headers, reader.place)
        warnings = tables.compare(index, headers, present)
        names, digest = frozenset(index.shard_of) | set(entries), index.digest
        known = sum(reader.sizes.values())
        size = known if len(headers) == len(index.shards) else max(known, index.total_size or 0)
    if cache.refused is not None:
        warnings += (f"nothing is kept for the next run: {cache.refused}",)
    return Parts(
        path=cache.folder / reader.commit,
        name=name.repo,
        config=config,
        entries=entries,
        names=names,
        files=tuple(place / shard for shard in headers),
        size=size,
        header_bytes=sum(header.nbytes for header in headers.values()),
        index_digest=digest,
        reader=reader,
        notes=notes,
        warnings=warnings,
        origin=reader,
    )


def _touched(index: tables.Index) -> list[str]:
    """Shards that hold a tensor of a linear-attention layer."""
    prefixes = tables.linear_prefixes(index.shard_of)
    touched = {shard for name, shard in index.shard_of.items() if name.startswith(prefixes)}
    return sorted(touched)


def _check_file(file: str, present: frozenset[str], where: str) -> None:
    if file in present:
        return
    others = sorted(name for name in present if name.endswith((".bin", ".gguf", ".pt", ".pth")))
    what = f" (it has {others[0]})" if others and file != tables.CONFIG else ""
    raise SourceError(
        f"{where} has no {file}{what}",
        hint="only safetensors checkpoints with a config.json are read",
        reason="missing-file",
        file=file,
    )
