"""A model folder as a `Checkpoint`: config, tensor table, and single tensors read by byte range."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hybridstate.checkpoint.header import Header, TensorEntry, decode, read_bytes, read_header
from hybridstate.errors import NumericError, SourceError
from hybridstate.families import LinearLayer, ModelSpec, check_log_scale, detect
from hybridstate.families.detect import check_blocks
from hybridstate.provenance import canonical_json, sha256_bytes

EMBEDDED: Final = ("tiny-gdn", "tiny-kda")
"""Models that ship with the package, under `hybridstate/models/<name>`."""

_INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"
_LONGEST_FILE_NAME: Final = 255
_HUB_NAME: Final = re.compile(
    r"^(?:hf://)?(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?$"
)


@dataclass(frozen=True, slots=True)
class DecayParameters:
    """Decay parameters of one linear layer, as stored, widened to float64.

    Attributes:
        a_log: `[H]`, padding removed.
        dt_bias: `[H]` (GDN) or `[H, K]` (KDA, stored head-major).
        a_log_dtype, dt_bias_dtype: dtypes on disk.
        layer: 0-based block index, for messages.
    """

    a_log: NDArray[np.float64]
    dt_bias: NDArray[np.float64]
    a_log_dtype: str
    dt_bias_dtype: str
    layer: int | None = None


@dataclass
class Checkpoint:
    """A model folder. Nothing is read beyond config, index and headers until `read` or `decay`.

    Attributes:
        path: the folder.
        name: how to call it in output: the embedded name, or the folder's name.
        config: parsed `config.json`.
        entries: tensor name -> place and dtype, over all shards.
        files: the shards in name order.
        notes: facts a user should see (which source was chosen), one line each.
        warnings: oddities that do not stop the work, one line each.
        lower_bound: l of the safe gate given by the user.
        bytes_read: tensor bytes read so far.
        header_bytes: bytes of the headers.
    """

    path: Path
    name: str
    config: Mapping[str, Any]
    entries: Mapping[str, TensorEntry]
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    lower_bound: float | None = None
    bytes_read: int = 0
    header_bytes: int = 0
    _digests: dict[str, str] = field(default_factory=dict)
    _decay: dict[int, DecayParameters] = field(default_factory=dict)
    _decay_raw: dict[str, str] = field(default_factory=dict)

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Tensor name -> shape as stored."""
        return MappingProxyType({name: entry.shape for name, entry in self.entries.items()})

    @cached_property
    def spec(self) -> ModelSpec:
        """Family, gate and geometry; raises what `families.detect` raises."""
        spec = detect(self.shapes, self.config, lower_bound=self.lower_bound)
        check_blocks(spec, self.shapes)
        return spec

    def read_raw(self, name: str) -> bytes:
        """Stored bytes of one tensor.

        Raises:
            SourceError: no such tensor, or its file is truncated or unreadable.
        """
        data = read_bytes(name, self._entry(name))
        self.bytes_read += len(data)
        return data

    def read(self, name: str) -> NDArray[np.float32] | NDArray[np.float64]:
        """One tensor, float64 if stored as F64, else float32: every value exactly as stored."""
        return decode(name, self._entry(name), self.read_raw(name))

    def decay_tensors(self, layer: LinearLayer) -> tuple[str, str]:
        """Names of A_log and dt_bias of a layer."""
        family = self.spec.family
        return layer.prefix + family.a_log, layer.prefix + family.dt_bias

    def decay(self, layer: LinearLayer) -> DecayParameters:
        """Decay parameters of a layer; read once and kept.

        Raises:
            NumericError: a value is NaN or infinite.
            SourceError: the tensors cannot be read.
        """
        if layer.index not in self._decay:
            a_log_name, dt_bias_name = self.decay_tensors(layer)
            a_log = self._decay_values(a_log_name, layer.index)
            dt_bias = self._decay_values(dt_bias_name, layer.index)
            heads = a_log.reshape(-1)[: layer.value_heads]
            check_log_scale(a_log_name, heads)
            self._decay[layer.index] = DecayParameters(
                a_log=heads,
                dt_bias=dt_bias.reshape(self.spec.decay_shape(layer)),
                a_log_dtype=self.entries[a_log_name].dtype,
                dt_bias_dtype=self.entries[dt_bias_name].dtype,
                layer=layer.index,
            )
        return self._decay[layer.index]

    def _decay_values(self, name: str, layer: int) -> NDArray[np.float64]:
        entry = self._entry(name)
        data = self.read_raw(name)
        self._decay_raw[name] = sha256_bytes(data)
        values = decode(name, entry, data).astype(np.float64)
        bad = np.argwhere(~np.isfinite(values))
        if len(bad):
            index = [int(i) for i in bad[0]]
            raise NumericError(
                f"{name}{index} is {_named(values[tuple(bad[0])])} ({len(bad)} of {values.size} values "
                f"are not finite) in {entry.file.name}",
                hint="the checkpoint is damaged; fetch it again",
                file=str(entry.file),
                tensor=name,
                layer=layer,
                index=index,
            )
        return values

    def digests(self) -> dict[str, str]:
        """sha256 of `config`, `index` (file, or header of the single file) and `decay`.

        `config` covers the values without `state_plan`, so naming a plan in it changes nothing.
        `decay` covers name, dtype, shape and stored bytes of every decay tensor, in layer order.
        """
        if "decay" not in self._digests:
            digest = hashlib.sha256()
            for layer in self.spec.layers:
                self.decay(layer)
                for name in self.decay_tensors(layer):
                    entry = self.entries[name]
                    digest.update(
                        canonical_json(
                            [name, entry.dtype, list(entry.shape), self._decay_raw[name]]
                        )
                    )
            self._digests["decay"] = digest.hexdigest()
        return dict(sorted(self._digests.items()))

    def _entry(self, name: str) -> TensorEntry:
        if name not in self.entries:
            raise SourceError(f"{self.path}: no tensor named {name}", tensor=name)
        return self.entries[name]


def _named(value: float) -> str:
    return "NaN" if np.isnan(value) else f"{value:+}"


def open_checkpoint(model: str | Path, *, lower_bound: float | None = None) -> Checkpoint:
    """Open a model folder or an embedded model.

    Args:
        model: a folder, or the name of an embedded model; an existing folder wins.
        lower_bound: l of the safe gate, for configs that do not state it.

    Raises:
        SourceError: nothing there, or config, index or a shard is missing or corrupt.
    """
    path, name, notes = _resolve(str(model))
    config_bytes = _read_small(path / "config.json")
    config = _json_object(path / "config.json", config_bytes)
    headers, index_digest, warnings = _headers(path)
    entries: dict[str, TensorEntry] = {}
    for header in headers.values():
        for tensor, entry in header.entries.items():
            if tensor in entries:
                raise SourceError(
                    f"{tensor} is stored twice: in {entries[tensor].file.name} and "
                    f"{entry.file.name} of {path}",
                    tensor=tensor,
                    file=str(entry.file),
                )
            entries[tensor] = entry
    return Checkpoint(
        path=path,
        name=name,
        config=MappingProxyType(config),
        entries=MappingProxyType(entries),
        files=tuple(headers),
        notes=notes,
        warnings=warnings,
        lower_bound=lower_bound,
        header_bytes=sum(header.nbytes for header in headers.values()),
        _digests={"config": _config_digest(config), "index": index_digest},
    )


def _resolve(model: str) -> tuple[Path, str, tuple[str, ...]]:
    """Folder, display name and notes of a MODEL argument."""
    try:
        path = Path(model).expanduser()
        there = path.exists()
    except (OSError, RuntimeError) as error:  # too long; a home that does not exist
        why = getattr(error, "strerror", None) or error
        raise SourceError(f"no model at {model:.200}: {why}", model=model) from error
    if there and path.is_dir():
        folder = path.resolve()
        wins = f"{model}: using the local folder {folder}, not the embedded model of that name"
        return folder, folder.name, (wins,) if model in EMBEDDED else ()
    if there:
        raise SourceError(
            f"{model} is a file; a model is a folder with config.json and safetensors files",
            hint=f"try its folder: {path.parent}",
            file=model,
        )
    if model in EMBEDDED:
        embedded = Path(__file__).resolve().parent.parent / "models" / model
        if embedded.is_dir():
            return embedded, model, ()
        raise SourceError(
            f"the embedded model {model} is not part of this installation",
            hint="install hybridstate again, or give a model folder",
            model=model,
        )
    match = None if model.startswith((".", "/", "~")) else _HUB_NAME.match(model)
    if match is not None:
        repo, revision = match["repo"], match["revision"]
        pin = f" --revision {revision}" if revision else ""
        folder_name = repo.split("/")[1]
        raise SourceError(
            f"no folder {model}; reading models from the Hugging Face Hub is not built yet",
            hint=f"download it first: hf download {repo}{pin} --local-dir {folder_name}, "
            f"then give ./{folder_name} as MODEL",
            model=model,
        )
    raise SourceError(
        f"no model at {model}",
        hint=f"give a folder with config.json, or an embedded model: {', '.join(EMBEDDED)}",
        model=model,
    )


def _read_small(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise SourceError(f"{path} is not a regular file", file=str(path))
        return path.read_bytes()
    except FileNotFoundError as error:
        raise SourceError(
            f"{path.parent} has no {path.name}",
            hint="a model folder holds config.json and safetensors files",
            file=str(path),
        ) from error
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}", file=str(path)) from error


def _json_object(path: Path, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path} is not JSON: {error}", file=str(path)) from error
    if not isinstance(value, dict):
        raise SourceError(f"{path} is not a JSON object", file=str(path))
    return value


def _config_digest(config: Mapping[str, Any]) -> str:
    """sha256 of the sorted config without the key an exported checkpoint adds."""
    values = {key: value for key, value in config.items() if key != "state_plan"}
    return sha256_bytes(json.dumps(values, sort_keys=True).encode())


def _headers(path: Path) -> tuple[dict[Path, Header], str, tuple[str, ...]]:
    """Header of every shard, digest of the tensor table, warnings.

    `model.safetensors` wins over an index, as in transformers.
    """
    single = path / _SINGLE
    if single.exists():
        header = read_header(single)
        return {single: header}, header.digest, ()
    index_path = path / _INDEX
    if not index_path.exists():
        raise SourceError(
            f"{path} has neither {_SINGLE} nor {_INDEX}",
            hint="only safetensors checkpoints are read",
            file=str(path),
        )
    data = _read_small(index_path)
    weight_map = _json_object(index_path, data).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{index_path} has no weight_map", file=str(index_path))
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        proper = name.isprintable() and len(name) <= _LONGEST_FILE_NAME
        if not proper or Path(name).name != name or not name.endswith(".safetensors"):
            raise SourceError(
                f"{index_path}: {name!r:.120} is not the name of a safetensors file in this folder",
                file=str(index_path),
            )
        if not (path / name).exists():
            tensors = sum(1 for shard in weight_map.values() if shard == name)
            raise SourceError(
                f"shard {name} is missing from {path} (1 of {len(names)}, {tensors} tensors)",
                hint="the download is incomplete; fetch this file again",
                file=str(path / name),
            )
    headers = {path / name: read_header(path / name) for name in names}
    return headers, sha256_bytes(data), _compare(index_path, weight_map, headers)


def _compare(
    index_path: Path, weight_map: Mapping[str, Any], headers: Mapping[Path, Header]
) -> tuple[str, ...]:
    """Index against shards: a listed tensor must exist; unlisted tensors and files are warnings."""
    for tensor, shard in weight_map.items():
        if tensor not in headers[index_path.parent / str(shard)].entries:
            raise SourceError(
                f"{index_path.name} places {tensor} in {shard}, which does not hold it",
                hint="index and shards belong to different versions; fetch them again",
                file=str(index_path),
                tensor=tensor,
            )
    warnings = []
    unlisted = [t for header in headers.values() for t in header.entries if t not in weight_map]
    if unlisted:
        warnings.append(
            f"{len(unlisted)} stored tensors are not listed in {index_path.name}, such as "
            f"{unlisted[0]}"
        )
    stray = sorted(set(index_path.parent.glob("*.safetensors")) - set(headers))
    if stray:
        warnings.append(
            f"{len(stray)} safetensors files are not listed in {index_path.name} and are ignored, "
            f"such as {stray[0].name}"
        )
    return tuple(warnings)
