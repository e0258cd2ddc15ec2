"""A checkpoint written again with its linear-attention tensors permuted, never through a model.

Shards are streamed: header bytes, untouched tensors and gaps are copied, a permuted tensor is read
whole and written in its old place. So names, dtypes, order, shard layout and metadata stay, two
exports are byte-equal, and memory peaks at the largest permuted tensor (twice). Holes of sparse
files stay holes. Where key heads are replicated (`grow`), places shift and the header says so.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, Final

from hybridstate.checkpoint import Checkpoint, TensorEntry, open_checkpoint
from hybridstate.checkpoint.index import config_digest
from hybridstate.errors import PlanMismatch, SourceError, UnsupportedModel, UsageError
from hybridstate.plan.compare import checkpoint_digests
from hybridstate.plan.schema import PLAN_FILE, to_content
from hybridstate.plan.store import STATE_PLAN, Plan, seal, write_files
from hybridstate.weights.fold import changed
from hybridstate.weights.grow import (
    INDEX_FILE,
    Growth,
    changed_config,
    grown_header,
    growth,
    rewrite_config,
    rewrite_index,
)
from hybridstate.weights.moves import Move
from hybridstate.weights.permute import LayerOrder, layer_moves

Progress = Callable[[str, int, int], None]

_CHUNK_BYTES: Final = 1 << 22
_OTHER_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
"""Endings of files that may hold the same weights in the old order: never copied along."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What an export will do, known before the first byte is written.

    Attributes:
        moves: tensors that change, by name.
        tensors: all tensors of the checkpoint.
        shards: files to rewrite.
        side_files: files copied as they are, relative to the checkpoint.
        left_out: files not copied, since they may hold weights in the old order.
        nbytes: disk space the export takes (holes of sparse files excluded).
        growth: what replicated key heads change, None where none are.
        rounded: 16-bit projections that take in an output norm and so are rounded anew.
    """

    moves: Mapping[str, Move]
    tensors: int
    shards: tuple[Path, ...]
    side_files: tuple[Path, ...]
    left_out: tuple[Path, ...]
    nbytes: int
    growth: Growth | None = None
    rounded: int = 0


def lay_out(checkpoint: Checkpoint, orders: Sequence[LayerOrder]) -> Layout:
    """Decide for every tensor and file what happens to it; reads headers only.

    Raises:
        UnsupportedModel: a tensor cannot follow its layer's order.
        UsageError: the checkpoint is itself an export.
    """
    if STATE_PLAN in checkpoint.config:
        raise UsageError(
            f"{checkpoint.name} was itself written by export-plan",
            hint="export from the original checkpoint",
            model=checkpoint.name,
        )
    moves: dict[str, Move] = {}
    for layer, order in zip(checkpoint.spec.layers, orders, strict=True):
        for move in layer_moves(checkpoint.spec, layer, order, checkpoint.shapes):
            if not move.still:
                _refuse_shared_bytes(move, checkpoint.entries[move.name])
                moves[move.name] = move
    side: list[Path] = []
    left_out: list[Path] = []
    for file in _files(checkpoint.path):
        if file in checkpoint.files:
            continue
        (left_out if file.suffix in _OTHER_WEIGHTS else side).append(
            file.relative_to(checkpoint.path)
        )
    nbytes = sum(
        _allocated(file) for file in (*checkpoint.files, *(checkpoint.path / name for name in side))
    )
    grown = growth(checkpoint, moves)
    nbytes += 0 if grown is None else grown.added_bytes
    tensors = len(checkpoint.entries)
    rounded = sum(
        move.norm is not None and checkpoint.entries[name].dtype != "F32"
        for name, move in moves.items()
    )
    return Layout(
        moves, tensors, checkpoint.files, tuple(side), tuple(left_out), nbytes, grown, rounded
    )


def _refuse_shared_bytes(move: Move, entry: TensorEntry) -> None:
    if entry.dtype.startswith(("F4", "F6")):
        raise UnsupportedModel(
            f"{move.name}: cannot permute {entry.dtype}, its entries share bytes",
            hint="use the unquantised checkpoint, or --no-weights and let the kernel gather",
            tensor=move.name,
            found=entry.dtype,
        )


def _files(folder: Path) -> Iterator[Path]:
    """Files of a checkpoint in name order, without hidden ones (download caches, git)."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from _files(path)
        else:
            yield path


def _allocated(file: Path) -> int:
    status = file.stat()
    blocks: int | None = getattr(status, "st_blocks", None)  # absent on Windows
    return status.st_size if blocks is None else min(status.st_size, 512 * blocks)


def check_disk(layout: Layout, target: Path) -> None:
    """Refuse before the first byte if the export does not fit.

    Raises:
        UsageError: with the bytes needed and free.
    """
    parent = next(p for p in (target, *target.absolute().parents) if p.is_dir())
    free = shutil.disk_usage(parent).free
    if free < layout.nbytes:
        raise UsageError(
            f"{target} needs {layout.nbytes:,} bytes, {parent} has {free:,} free",
            hint="choose a folder on a larger disk, or --no-weights",
            file=str(target),
            found=free,
            expected=layout.nbytes,
        )


def write_checkpoint(
    checkpoint: Checkpoint,
    plan: Plan,
    layout: Layout,
    folder: Path,
    *,
    progress: Progress | None = None,
) -> Plan:
    """Fill `folder` with the permuted checkpoint and its plan; the caller makes it appear at once.

    Args:
        plan: a plan made from this checkpoint.
        folder: an existing empty folder.
        progress: called with ("write", tensors done, tensors).

    Returns:
        the plan with `model.exported` filled in, as written to `state_plan/`.

    Raises:
        SourceError: a shard shrank or cannot be read.
    """
    inside: dict[Path, list[str]] = {shard: [] for shard in layout.shards}
    for tensor, entry in checkpoint.entries.items():
        inside[entry.file].append(tensor)
    done = 0
    for shard in layout.shards:
        moves = [layout.moves[tensor] for tensor in inside[shard] if tensor in layout.moves]
        write_shard(checkpoint, shard, folder / shard.name, moves, layout.growth)
        done += len(inside[shard])
        if progress is not None:
            progress("write", done, layout.tensors)
    for name in layout.side_files:  # config.json among them: a killed export has none
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkpoint.path / name, folder / name)
    if layout.growth is not None:
        rewrite_config(folder / "config.json", layout.growth)
        if (folder / INDEX_FILE).is_file():
            rewrite_index(folder / INDEX_FILE, layout.growth, checkpoint)
    made = open_checkpoint(folder, lower_bound=checkpoint.lower_bound)
    expected = checkpoint.config
    if layout.growth is not None:
        expected = changed_config(checkpoint.config, layout.growth)
    exported = with_exported(plan, made, config_digest(expected))
    bundle = folder / STATE_PLAN
    bundle.mkdir()
    write_files(exported, bundle)
    _name_plan(folder / "config.json", exported)
    return exported


def with_exported(plan: Plan, exported: Checkpoint, config: str | None = None) -> Plan:
    """The plan with the digests of its permuted checkpoint.

    Args:
        config: digest its config must have; the original's by default.

    Raises:
        PlanMismatch: it has another one.
    """
    digests = checkpoint_digests(exported)
    if digests.config != (config or plan.document.model.original.config):
        raise PlanMismatch("the exported config differs from the original", found=digests.config)
    content = to_content(plan.document)
    content["model"]["exported"] = digests.model_dump()
    del content["arrays"], content["content_digest"]
    return seal(content, plan.arrays)


def _name_plan(config: Path, plan: Plan) -> None:
    """Append one key to `config.json` and leave every other byte of it alone."""
    reference = {
        "file": f"{STATE_PLAN}/{PLAN_FILE}",
        "schema": plan.document.schema_version,
        "digest": plan.digest,
    }
    text = config.read_text(encoding="utf-8-sig")
    before = json.loads(text)
    body = text.rstrip().removesuffix("}").rstrip()
    inner = json.dumps(reference, indent=2).replace("\n", "\n  ")
    text = f'{body}{"," if before else ""}\n  "{STATE_PLAN}": {inner}\n}}\n'
    if json.loads(text) != {**before, STATE_PLAN: reference}:
        raise SourceError(f"{config}: cannot add {STATE_PLAN} to it", file=str(config))
    config.write_text(text, encoding="utf-8")


def write_shard(
    checkpoint: Checkpoint,
    source: Path,
    target: Path,
    moves: Sequence[Move],
    grown: Growth | None = None,
) -> None:
    """One shard with some of its tensors moved, everything else byte for byte.

    Args:
        grown: what becomes larger in the checkpoint; tensors behind it in the file shift.

    Raises:
        SourceError: the shard cannot be read or shrank.
        UsageError: the target cannot be written.
    """
    by_name = {move.name: move for move in moves}
    grows = grown is not None and any(name in grown.shapes for name in by_name)
    try:
        # unbuffered: the search for holes moves the file position behind a buffer's back
        with source.open("rb", buffering=0) as reader, target.open("wb") as writer:
            if grown is not None and grows:
                _write_shifted(checkpoint, source, reader, writer, by_name, grown)
            else:
                _write_in_place(checkpoint, reader, writer, by_name)
    except OSError as error:
        if error.filename in (None, str(target)):
            raise UsageError(
                f"cannot write {target}: {error.strerror}", file=str(target)
            ) from error
        raise SourceError(f"{source}: {error.strerror}", file=str(source)) from error


def _write_in_place(
    checkpoint: Checkpoint, reader: FileIO, writer: BinaryIO, moves: Mapping[str, Move]
) -> None:
    """Header, gaps and still tensors copied, moved ones written where they were."""
    size = os.fstat(reader.fileno()).st_size
    position = 0
    for name in sorted(moves, key=lambda name: checkpoint.entries[name].start):
        entry = checkpoint.entries[name]
        _copy_range(reader, writer, position, entry.start)
        if next(_filled(reader, entry.start, entry.end), None) is not None:
            writer.seek(entry.start)
            writer.write(changed(checkpoint, moves[name]))
        position = entry.end
    _copy_range(reader, writer, position, size)
    writer.truncate(size)


def _write_shifted(
    checkpoint: Checkpoint,
    source: Path,
    reader: FileIO,
    writer: BinaryIO,
    moves: Mapping[str, Move],
    grown: Growth,
) -> None:
    """A new header, then every tensor at its new place, in the order of the old file."""
    header, starts = grown_header(reader, checkpoint, source, grown)
    writer.write(header)
    end = len(header)
    for name, start in starts.items():
        entry = checkpoint.entries[name]
        if name not in moves:
            _copy_range(reader, writer, entry.start, entry.end, start - entry.start)
            end = start + entry.end - entry.start
            continue
        data = changed(checkpoint, moves[name])
        if next(_filled(reader, entry.start, entry.end), None) is not None:
            writer.seek(start)
            writer.write(data)
        end = start + len(data)
    writer.truncate(end)


def _copy_range(reader: FileIO, writer: BinaryIO, start: int, end: int, shift: int = 0) -> None:
    """Copy bytes [start, end) to a place `shift` further on, skipping the holes of the source."""
    for first, last in _filled(reader, start, end):
        reader.seek(first)
        writer.seek(first + shift)
        left = last - first
        while left:
            piece = reader.read(min(left, _CHUNK_BYTES))
            if not piece:
                raise SourceError(f"{reader.name} shrank while it was read", file=str(reader.name))
            writer.write(piece)
            left -= len(piece)


def _filled(reader: FileIO, start: int, end: int) -> Iterator[tuple[int, int]]:
    """The parts of [start, end) that a sparse file really stores; all of it where none can tell."""
    seek_data: Any = getattr(os, "SEEK_DATA", None)
    if seek_data is None:
        if start < end:
            yield start, end
        return
    position = start
    while position < end:
        try:
            first = os.lseek(reader.fileno(), position, seek_data)
        except OSError:  # no data behind this position
            return
        if first >= end:
            return
        position = min(os.lseek(reader.fileno(), first, os.SEEK_HOLE), end)
        yield first, position
