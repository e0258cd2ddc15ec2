"""A model as a `Checkpoint`, from a folder or the Hub: config, tensor table, single tensors by byte range."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hybridstate.checkpoint.folder import FolderReader, read_folder
from hybridstate.checkpoint.header import TensorEntry, decode
from hybridstate.checkpoint.hub import HubName, hub_name, read_hub
from hybridstate.checkpoint.index import CONFIG, config_digest
from hybridstate.checkpoint.parts import Origin, Read, Reader
from hybridstate.errors import NumericError, SourceError, UsageError
from hybridstate.families import LinearLayer, ModelSpec, check_log_scale, detect
from hybridstate.families.detect import check_blocks
from hybridstate.families.published import published_config
from hybridstate.provenance import canonical_json, sha256_bytes

EMBEDDED: Final = ("tiny-gdn", "tiny-kda")
"""Models that ship with the package, under `hybridstate/models/<name>`."""


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
    """A model. Nothing is read beyond config, index and headers until `read` or `decay`.

    Attributes:
        path: the folder; for a Hub model the place of its cached parts.
        name: how to call it in output: the embedded or Hub name, or the folder's name.
        config: parsed `config.json`.
        entries: tensor name -> place and dtype, over the shards whose headers were read: all of a
            folder, and of a Hub model those that hold linear-attention layers.
        names: names of all tensors.
        files: the shards whose headers were read, in name order.
        notes: facts a user should see (which source was chosen), one line each.
        warnings: oddities that do not stop the work, one line each.
        lower_bound: l of the safe gate given by the user.
        bytes_read: tensor bytes read so far.
        header_bytes: bytes of the headers.
        size: bytes of the whole checkpoint.
        origin: repository and commit of a Hub model, None for a folder.
    """

    path: Path
    name: str
    config: Mapping[str, Any]
    entries: Mapping[str, TensorEntry]
    files: tuple[Path, ...]
    names: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    lower_bound: float | None = None
    bytes_read: int = 0
    header_bytes: int = 0
    size: int = 0
    origin: Origin | None = None
    _reader: Reader = field(default_factory=FolderReader)
    _ahead: dict[str, bytes] = field(default_factory=dict)
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
        unread: dict[str, tuple[int, ...]] = dict.fromkeys(self.names, ())  # only names count there
        shapes = {**unread, **self.shapes}
        spec = detect(shapes, self.config, lower_bound=self.lower_bound)
        check_blocks(spec, shapes)
        return spec

    def read_raw(self, name: str) -> bytes:
        """Stored bytes of one tensor.

        Raises:
            SourceError: no such tensor, or its file is truncated or unreadable.
        """
        entry = self._entry(name)
        data = self._ahead.get(name)
        if data is None:
            data = self._reader.fetch({name: entry})[name]
        self.bytes_read += len(data)
        return data

    def prefetch(self, names: Iterable[str]) -> None:
        """Get tensors of a Hub model together, in as few requests as possible; a folder needs none.

        Raises:
            SourceError: no such tensor, or it cannot be read.
        """
        if self.origin is not None:
            wanted = {name: self._entry(name) for name in names if name not in self._ahead}
            self._ahead |= self._reader.fetch(wanted)

    def cost(self, names: Iterable[str]) -> tuple[Read, ...]:
        """What reading these tensors of a Hub model asks for where nothing is cached."""
        if self.origin is None:
            return ()
        return self.origin.cost({name: self._entry(name) for name in names})

    def read(self, name: str) -> NDArray[np.float32] | NDArray[np.float64]:
        """One tensor, float64 if stored as F64, else float32: every value exactly as stored."""
        return decode(name, self._entry(name), self.read_raw(name))

    def decay_tensors(self, layer: LinearLayer) -> tuple[str, str]:
        """Names of A_log and dt_bias of a layer."""
        family = self.spec.family
        return layer.prefix + family.a_log, layer.prefix + family.dt_bias

    @property
    def address(self) -> str | None:
        """MODEL argument that opens a Hub model at the same commit again; None for a folder."""
        return None if self.origin is None else f"hf://{self.origin.repo}@{self.origin.commit}"

    @property
    def all_decay_tensors(self) -> tuple[str, ...]:
        """Names of A_log and dt_bias of every linear layer, in layer order."""
        return tuple(name for layer in self.spec.layers for name in self.decay_tensors(layer))

    def decay(self, layer: LinearLayer) -> DecayParameters:
        """Decay parameters of a layer; read once and kept.

        Raises:
            NumericError: a value is NaN or infinite.
            SourceError: the tensors cannot be read.
        """
        if layer.index not in self._decay:
            self.prefetch(self.all_decay_tensors)
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


def open_checkpoint(
    model: str | Path,
    *,
    lower_bound: float | None = None,
    weights: bool = False,
    offline: bool = False,
    cache_dir: Path | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Checkpoint:
    """Open a model folder, an embedded model, or a model on the Hugging Face Hub.

    Args:
        model: a folder, the name of an embedded model, or `org/name[@revision]`, with or without
            `hf://` in front; an existing folder wins unless `hf://` is given.
        lower_bound: l of the safe gate, for configs that do not state it.
        weights: all weights are needed, so a Hub name is refused: nothing is downloaded unasked.
        offline: make no request; Hub models then come from the cache.
        cache_dir: where parts of Hub models are kept, instead of `$XDG_CACHE_HOME/hybridstate`.
        progress: called with (stage, done, total) while a Hub model is read.

    Raises:
        SourceError: nothing there; or config, index or a shard is missing or corrupt; or the Hub
            does not give it.
    """
    if weights:
        require_weights(model)
    found = _resolve(str(model))
    if isinstance(found, HubName):
        parts = read_hub(found, offline=offline, cache_dir=cache_dir, progress=progress)
    else:
        parts = read_folder(*found)
    return Checkpoint(
        path=parts.path,
        name=parts.name,
        config=MappingProxyType(parts.config),
        entries=MappingProxyType(parts.entries),
        files=parts.files,
        names=parts.names,
        notes=parts.notes,
        warnings=parts.warnings,
        lower_bound=lower_bound,
        header_bytes=parts.header_bytes,
        size=parts.size,
        origin=parts.origin,
        _reader=parts.reader,
        _digests={"config": config_digest(parts.config), "index": parts.index_digest},
    )


def require_weights(model: str | Path) -> None:
    """Refuse a Hub name before any work that needs all weights; nothing is requested.

    Raises:
        SourceError: MODEL names a repository, or nothing.
    """
    found = _resolve(str(model))
    if isinstance(found, HubName):
        raise SourceError(
            f"this needs the weights of {found}, and only its decay tensors are read from the Hub",
            hint=f"download it first: {found.download}",
            reason="weights",
            model=str(model),
        )


def _resolve(model: str) -> HubName | tuple[Path, str, tuple[str, ...]]:
    """A Hub name, or folder, display name and notes of a MODEL argument."""
    if not model.strip():
        raise UsageError(
            "MODEL is empty", hint="give a folder with config.json; . is the current one"
        )
    named = None if model.startswith((".", "/", "~")) else hub_name(model)
    if named is not None and named.explicit:
        return named
    try:
        path = Path(model).expanduser()
        there = path.exists()
    except (OSError, RuntimeError) as error:  # too long; a home that does not exist
        why = getattr(error, "strerror", None) or error
        raise SourceError(f"no model at {model:.200}: {why}", model=model) from error
    if there and path.is_dir():
        folder = path.resolve()
        if model in EMBEDDED and not (folder / CONFIG).exists():
            raise SourceError(
                f"{folder} has no {CONFIG}, and its name hides the embedded model {model}",
                hint="rename the folder, or work in another one",
                file=str(folder),
            )
        other = "embedded model" if model in EMBEDDED else "Hub repository"
        wins = f"{model}: using the local folder {folder}, not the {other} of that name"
        return folder, folder.name, (wins,) if model in EMBEDDED or named is not None else ()
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
    if named is not None:
        return named
    hint = "give a folder with config.json, a Hub name such as org/name[@revision], or an "
    hint += f"embedded model: {', '.join(EMBEDDED)}"
    if (published := published_config(model)) is not None:
        hint = f"only the sizes of {published[0]} are known here, for calibrate and bench decode with --dummy; "
        hint += f"give the folder of its weights, or its Hub name org/{published[0]}"
    raise SourceError(f"no model at {model}", hint=hint, model=model)
