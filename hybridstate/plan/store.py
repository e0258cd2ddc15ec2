"""Plan bundles on disk: reading, writing, the content digest. No torch.

A bundle is a folder with `plan.json` and `plan.safetensors`; an exported checkpoint holds its
bundle in `state_plan/` and names it in `config.json`. `read_plan` takes either.

The content digest is the sha256 of the canonical JSON (sorted keys, no spaces; without
`content_digest` and the provenance fields `time`, `host`, `argv`), then, for each array sorted by
name, of the line `name dtype d0,d1\\n` and the raw little-endian bytes.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from hybridstate.checkpoint.documents import parse_json, read_bytes
from hybridstate.errors import PlanMismatch, SourceError
from hybridstate.plan.check import check_arrays, check_meaning
from hybridstate.plan.placement import packed_order
from hybridstate.plan.schema import (
    ARRAYS_FILE,
    PLAN_FILE,
    SCHEMA_NAME,
    SCHEMA_VERSION,
    LayerBlock,
    PlanDocument,
    canonical,
    to_content,
)
from hybridstate.provenance import canonical_json, fresh_folder, sha256_bytes

Array = NDArray[Any]
Order = Literal["original", "exported"]

STATE_PLAN = "state_plan"
"""Key in an exported `config.json`, and the folder of its bundle."""

OUTPUT_MARKS = (PLAN_FILE, f"{STATE_PLAN}/{PLAN_FILE}")
"""Files by which a folder written by `export-plan` is known."""

_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "U8": np.dtype("u1"),
}
_OUTSIDE_DIGEST = ("time", "host", "argv")


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan in memory: the document and its arrays, both already checked.

    Arrays keep the original checkpoint's order of heads, key channels and value dims.
    """

    document: PlanDocument
    arrays: Mapping[str, Array]

    @property
    def layers(self) -> tuple[LayerBlock, ...]:
        return self.document.model.layers

    @property
    def digest(self) -> str:
        return self.document.content_digest

    def array(self, index: int, name: str) -> Array | None:
        """`layers.{index}.{name}` in the original order, or None if the plan has none."""
        return self.arrays.get(f"layers.{index}.{name}")

    def key_order(self, index: int, order: Order = "original") -> Array | None:
        """Stored row -> key channel *of the loaded checkpoint*, `[H, K]`; None without DAMP.

        In the exported checkpoint the rows already stand in stored order, so it is the identity.
        """
        stored = self.head_array(index, "key_order", order)
        if stored is None or order == "original" or not self.absorbs_keys:
            return stored
        identity = np.arange(stored.shape[1], dtype=stored.dtype)
        return np.broadcast_to(identity, stored.shape).copy()

    def head_order(self, index: int, order: Order = "original") -> Array | None:
        """Value head of the model at each place of the loaded checkpoint, `[H]`.

        None where heads stand in the model's order: always in the original checkpoint, and in an
        exported one unless its placement permutes heads.
        """
        if order == "original" or not self.absorbs_heads:
            return None
        layer = next(layer for layer in self.layers if layer.index == index)
        owner = self.arrays["placement.head_owner"][layer.ordinal].tolist()
        return np.array(packed_order(layer.key_heads, layer.value_heads, owner), np.int64)

    def value_order(self, index: int, order: Order = "original") -> Array | None:
        """Stored column -> value dim *of the loaded checkpoint*, `[H, V]`; None where values keep their order."""
        stored = self.head_array(index, "value_order", order)
        if stored is None or order == "original" or not self.absorbs_values:
            return stored
        identity = np.arange(stored.shape[1], dtype=stored.dtype)
        return np.broadcast_to(identity, stored.shape).copy()

    def value_scale(self, index: int, order: Order = "original") -> Array | None:
        """c of every stored column, `[H, V]`, heads in the loaded checkpoint's order; None for ones."""
        scale = self.head_array(index, "value_scale", order)
        stored = self.head_array(index, "value_order", order)
        if scale is None or stored is None:
            return scale
        return np.take_along_axis(scale, stored.astype(np.int64), axis=1)

    def head_array(self, index: int, name: str, order: Order = "original") -> Array | None:
        """`layers.{index}.{name}` with its heads in the loaded checkpoint's order."""
        found, heads = self.array(index, name), self.head_order(index, order)
        return found if found is None or heads is None else found[heads]

    @property
    def absorbs_keys(self) -> bool:
        """Whether the exported weights carry the key order (so the kernel gathers nothing)."""
        precision = self.document.precision
        return (
            self.document.model.exported is not None
            and precision is not None
            and precision.key_order != "per-head"
        )

    @property
    def absorbs_values(self) -> bool:
        """Whether the exported weights carry a value order."""
        precision = self.document.precision
        return (
            self.document.model.exported is not None
            and precision is not None
            and precision.value_order != "none"
        )

    @property
    def expands_keys(self) -> bool:
        """Whether the exported weights hold one key head for each value head, unlike the original's."""
        precision = self.document.precision
        return self.absorbs_keys and precision is not None and precision.key_order == "expand"

    @property
    def absorbs_heads(self) -> bool:
        """Whether the exported weights carry the head order of a `hybrid` placement."""
        placement = self.document.placement
        return (
            self.document.model.exported is not None
            and placement is not None
            and placement.mode == "hybrid"
        )

    def unit_array(self, index: int, name: str, order: Order = "original") -> Array | None:
        """`retained`, `horizon`, `replay_window` or `risk` in the loaded checkpoint's order."""
        found = self.head_array(index, name, order)
        if found is None or order == "original" or found.ndim == 1 or not self.absorbs_keys:
            return found
        stored = self.head_array(index, "key_order", order)
        assert stored is not None
        return np.take_along_axis(found, stored.astype(np.int64), axis=1)


def seal(content: dict[str, Any], arrays: Mapping[str, Array]) -> Plan:
    """Fill in `arrays` and `content_digest`, check everything, return the plan.

    Args:
        content: the JSON content without `arrays` and `content_digest`.
        arrays: every array, in any dtype of the schema.

    Raises:
        SourceError: the content breaks the schema or the arrays do not fit it.
    """
    ordered = {name: _little_endian(arrays[name]) for name in sorted(arrays)}
    blocks = [
        {
            "name": name,
            "dtype": dtype_name(array),
            "shape": list(array.shape),
            "sha256": sha256_bytes(array.tobytes()),
        }
        for name, array in ordered.items()
    ]
    document = _parse({**content, "arrays": blocks, "content_digest": "0" * 64}, "new plan")
    digest = _digest(document, ordered)
    document = document.model_copy(update={"content_digest": digest})
    check_meaning(document, ordered, "new plan")
    return Plan(document, ordered)


def content_digest(plan: Plan) -> str:
    """The digest computed afresh from the plan's content (see the module docstring)."""
    return _digest(plan.document, plan.arrays)


def write_plan(plan: Plan, path: str | Path, *, force: bool = False) -> Path:
    """Write the bundle folder, whole or not at all.

    Raises:
        UsageError: the folder exists and is not empty (with `force`: is not a bundle).
    """
    target = Path(path)
    with fresh_folder(target, force=force, replaces=OUTPUT_MARKS) as folder:
        write_files(plan, folder)
    return target


def write_files(plan: Plan, folder: Path) -> None:
    """The two files of a bundle, into an existing folder (part of a larger atomic write)."""
    from safetensors.numpy import save

    (folder / ARRAYS_FILE).write_bytes(save({k: plan.arrays[k] for k in sorted(plan.arrays)}))
    (folder / PLAN_FILE).write_bytes(canonical(plan.document))


def find_bundle(path: str | Path) -> Path:
    """The bundle folder that `path` names: itself, its `plan.json`, or an exported checkpoint.

    Raises:
        SourceError: no plan there.
    """
    given = Path(path)
    with suppress(OSError):  # a name that is too long names nothing
        if given.name == PLAN_FILE and given.is_file():
            return given.parent
        for folder in (given, given / STATE_PLAN):
            if (folder / PLAN_FILE).is_file():
                return folder
    raise SourceError(
        f"no {PLAN_FILE} in {given}",
        hint="give the folder written by `hybridstate export-plan`",
        file=str(given),
        expected=PLAN_FILE,
    )


def read_plan(path: str | Path) -> Plan:
    """Read and fully check a bundle: schema, every array's dtype, shape and sha256, its meaning.

    Raises:
        SourceError: a file is missing or corrupt, or an array was changed (it is named).
        PlanMismatch: the plan was written by a newer version.
    """
    folder = find_bundle(path)
    file = folder / PLAN_FILE
    document = _parse(_load_json(file), str(file))
    arrays = _load_arrays(folder / ARRAYS_FILE)
    check_arrays(document, arrays, str(folder / ARRAYS_FILE))
    found = _digest(document, arrays)
    if found != document.content_digest:
        raise SourceError(
            f"{file}: content digest is {found[:12]}, the file says "
            f"{document.content_digest[:12]}: it was edited",
            hint="export the plan again",
            file=str(file),
            found=found,
            expected=document.content_digest,
        )
    check_meaning(document, arrays, str(file))
    return Plan(document, arrays)


def dtype_name(array: Array) -> str:
    """The schema's name of an array's dtype.

    Raises:
        SourceError: a plan does not store this dtype.
    """
    for name, dtype in _DTYPES.items():
        if array.dtype == dtype:
            return name
    raise SourceError(f"a plan cannot store {array.dtype} arrays", expected=list(_DTYPES))


def _little_endian(array: Array) -> Array:
    return np.ascontiguousarray(array, dtype=_DTYPES[dtype_name(array)])


def _digest(document: PlanDocument, arrays: Mapping[str, Array]) -> str:
    content = to_content(document)
    del content["content_digest"]
    for key in _OUTSIDE_DIGEST:
        del content["provenance"][key]
    digest = hashlib.sha256(canonical_json(content))
    for block in sorted(document.arrays, key=lambda a: a.name):
        shape = ",".join(str(size) for size in block.shape)
        digest.update(f"{block.name} {block.dtype} {shape}\n".encode())
        digest.update(arrays[block.name].tobytes())
    return digest.hexdigest()


def _load_json(file: Path) -> dict[str, Any]:
    def refuse_constant(text: str) -> float:
        raise ValueError(f"{text} is not a number a plan may hold")

    def refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) != len(pairs):
            raise ValueError("a key occurs twice")
        return content

    try:
        content = parse_json(
            read_bytes(file), parse_constant=refuse_constant, object_pairs_hook=refuse_twice
        )
    except (OSError, ValueError) as error:
        raise SourceError(
            f"{file}: not readable as JSON: {error}", hint="export the plan again", file=str(file)
        ) from error
    if not isinstance(content, dict):
        raise SourceError(
            f"{file}: expected a JSON object, found {type(content).__name__}", file=str(file)
        )
    return content


def _parse(content: dict[str, Any], where: str) -> PlanDocument:
    if content.get("schema", SCHEMA_NAME) != SCHEMA_NAME:
        raise SourceError(
            f"{where}: schema is {content.get('schema')!r}, expected {SCHEMA_NAME!r}",
            file=where,
            found=str(content.get("schema")),
            expected=SCHEMA_NAME,
        )
    version = content.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise PlanMismatch(
            f"{where}: schema version {version}, this hybridstate reads up to {SCHEMA_VERSION}",
            hint="install a newer hybridstate, or export the plan again with this one",
            file=where,
            found=version,
            expected=SCHEMA_VERSION,
        )
    try:
        return PlanDocument.model_validate_json(json.dumps(content))
    except (ValidationError, ValueError) as error:
        raise SourceError(
            f"{where}: {_first_problem(error)}",
            hint="export the plan again",
            file=where,
        ) from error


def _first_problem(error: Exception) -> str:
    """One line for the first of a validation error's findings, with its place."""
    if not isinstance(error, ValidationError):
        return str(error)
    found = error.errors(include_url=False, include_context=False)
    place = ".".join(str(part) for part in found[0]["loc"]) or "document"
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    message = str(found[0]["msg"]).removeprefix("Value error, ")
    shown = repr(found[0].get("input"))
    value = f", found {shown}" if len(shown) <= 60 and place != "document" else ""
    return f"{place}: {message}{value}{more}"


def _load_arrays(file: Path) -> dict[str, Array]:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        raw = file.read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        if "__metadata__" in header:
            raise ValueError("it carries metadata keys, so its bytes are not reproducible")
        loaded = load(raw)
    except (OSError, ValueError, TypeError, KeyError, RecursionError, SafetensorError) as error:
        raise SourceError(
            f"{file}: not readable as safetensors: {error}",
            hint="copy the bundle again, or export it again",
            file=str(file),
        ) from error
    return {name: loaded[name] for name in sorted(loaded)}
