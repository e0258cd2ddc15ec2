"""What the weights alone say about a checkpoint: the result of `hybridstate analyze`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hybridstate.checkpoint import Checkpoint, Origin
from hybridstate.families import ModelSpec, sign_warning
from hybridstate.plan.accounting import Accounting, account
from hybridstate.plan.capacity import Capacity
from hybridstate.plan.retention import retention_map
from hybridstate.plan.select import Selection, select

SCHEMA: Final = "hybridstate.analysis/1"
"""Version of the JSON form."""

_QUANTILES: Final = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}


@dataclass(frozen=True, slots=True)
class Source:
    """Where the numbers come from, and how little of it was read.

    Attributes:
        name, path: the model.
        digests: of config, index and decay tensors.
        stored_dtypes: decay tensor (`A_log`, `dt_bias`) -> dtypes on disk.
        tensors: decay tensors read.
        tensor_bytes: their bytes, all that was read of the data.
        header_bytes: bytes of the safetensors headers.
        checkpoint_bytes: size of all shards.
        files: number of shards.
        notes: how MODEL was resolved, where that needs saying.
        hub: repository, commit and traffic of a Hub model.
    """

    name: str
    path: Path
    digests: dict[str, str]
    stored_dtypes: dict[str, tuple[str, ...]]
    tensors: int
    tensor_bytes: int
    header_bytes: int
    checkpoint_bytes: int
    files: int
    notes: tuple[str, ...] = ()
    hub: Origin | None = None

    def to_json(self) -> dict[str, Any]:
        """Facts for the JSON document."""
        return {
            "name": self.name,
            "path": str(self.path),
            "digests": self.digests,
            "stored_dtypes": {name: list(dtypes) for name, dtypes in self.stored_dtypes.items()},
            "read": {
                "tensors": self.tensors,
                "tensor_bytes": self.tensor_bytes,
                "header_bytes": self.header_bytes,
                "checkpoint_bytes": self.checkpoint_bytes,
                "files": self.files,
            },
            "hub": None
            if self.hub is None
            else {
                "repo": self.hub.repo,
                "revision": self.hub.revision,
                "commit": self.hub.commit,
                "requests": self.hub.requests,
                "bytes_received": self.hub.received,
            },
        }


@dataclass(frozen=True, slots=True, eq=False)
class Cutoff:
    """One cutoff: what is kept and what it takes."""

    selection: Selection
    accounting: Accounting

    def to_json(self) -> dict[str, Any]:
        """Counts, replay window, bytes and ratios."""
        selection = self.selection
        return {
            "w_max": selection.w_max,
            "units": sum(selection.units),
            "retained": sum(selection.counts),
            "fraction": selection.fraction,
            "counts": list(selection.counts),
            "w_replay": selection.w_replay,
            "near_cutoff": selection.near_cutoff,
            "mask_digest": selection.mask_digest,
            **self.accounting.to_json(),
        }


@dataclass(frozen=True, slots=True, eq=False)
class Analysis:
    """Static horizons of a checkpoint and the selections they lead to.

    Attributes:
        source: the model and what was read of it.
        spec: family, gate and geometry.
        gate_input: a_s, and `gate_input_source`: `paper`, `measured`, `default` (nobody published one) or `given`.
        epsilon: share still present at the horizon.
        horizons: per linear layer, tokens, `[H]` or `[H, K]`.
        cutoffs: ascending.
        capacity: bytes per rank, placement, and with a budget its slots.
        warnings: oddities of the checkpoint and of the numbers.
    """

    source: Source
    spec: ModelSpec
    gate_input: float
    gate_input_source: str
    epsilon: float
    horizons: tuple[NDArray[np.float64], ...]
    cutoffs: tuple[Cutoff, ...]
    capacity: Capacity
    warnings: tuple[str, ...]

    @property
    def quantiles(self) -> dict[str, float | int | None]:
        """Horizon quantiles over all units, in tokens; None where infinite."""
        return horizon_quantiles(np.concatenate([h.reshape(-1) for h in self.horizons]))

    def to_json(self) -> dict[str, Any]:
        """The JSON form: counts and quantiles per layer, not one number per unit."""
        spec = self.spec
        first = spec.layers[0]
        return {
            "schema": SCHEMA,
            "model": {
                **self.source.to_json(),
                "family": spec.name,
                "kind": spec.family.kind,
                "unit": spec.unit,
                "gate": spec.gate,
                "lower_bound": spec.lower_bound,
                "num_layers": spec.num_layers,
                "linear_layers": [layer.index for layer in spec.layers],
                "key_heads": first.key_heads,
                "value_heads": first.value_heads,
                "key_dim": first.key_dim,
                "value_dim": first.value_dim,
                "conv_width": first.conv_width,
            },
            "horizons": {
                "epsilon": self.epsilon,
                "gate_input": self.gate_input,
                "a_s_source": self.gate_input_source,
                "tokens": self.quantiles,
            },
            "cutoffs": [
                cutoff.to_json() | {"retention": retention_map(spec, cutoff.selection).to_json()}
                for cutoff in self.cutoffs
            ],
            "capacity": self.capacity.to_json(),
            "layers": [
                {
                    "index": layer.index,
                    "ordinal": layer.ordinal,
                    "units": spec.units(layer),
                    "horizon_tokens": horizon_quantiles(self.horizons[layer.ordinal]),
                    "retained": {
                        str(c.selection.w_max): c.selection.counts[layer.ordinal]
                        for c in self.cutoffs
                    },
                }
                for layer in spec.layers
            ],
        }


def cutoffs_at(
    spec: ModelSpec, horizons: Sequence[NDArray[np.float64]], w_max: Sequence[int]
) -> tuple[Cutoff, ...]:
    """Selection and accounting at every cutoff, ascending, duplicates dropped."""
    selections = [select(horizons, cutoff) for cutoff in sorted(set(w_max))]
    return tuple(Cutoff(selection, account(spec, selection)) for selection in selections)


def source_of(checkpoint: Checkpoint) -> Source:
    """What was read of a checkpoint; call it after the horizons."""
    family = checkpoint.spec.family
    names = [checkpoint.decay_tensors(layer) for layer in checkpoint.spec.layers]
    dtypes = {
        suffix: tuple(sorted({checkpoint.entries[pair[number]].dtype for pair in names}))
        for number, suffix in enumerate((family.a_log, family.dt_bias))
    }
    return Source(
        name=checkpoint.name,
        path=checkpoint.path,
        digests=checkpoint.digests(),
        stored_dtypes=dtypes,
        tensors=2 * len(names),
        tensor_bytes=checkpoint.bytes_read,
        header_bytes=checkpoint.header_bytes,
        checkpoint_bytes=checkpoint.size,
        files=len(checkpoint.files),
        notes=checkpoint.notes,
        hub=checkpoint.origin,
    )


def model_warnings(checkpoint: Checkpoint, *, gate_input_source: str) -> tuple[str, ...]:
    """What is odd about the model or rests on a default; call it after the horizons."""
    spec = checkpoint.spec
    found = [
        spec.default_gate_input_warning if gate_input_source == "default" else None,
        sign_warning([checkpoint.decay(layer).a_log for layer in spec.layers]),
    ]
    return (*checkpoint.warnings, *spec.warnings, *(w for w in found if w is not None))


def near_cutoff_warnings(cutoffs: Sequence[Cutoff]) -> tuple[str, ...]:
    """One line per cutoff at which rounding decides about a unit."""
    return tuple(
        f"W_max {c.selection.w_max}: {c.selection.near_cutoff} units lie within a relative 1e-6 of "
        "the cutoff, where another rounding of the stored values would decide otherwise"
        for c in cutoffs
        if c.selection.near_cutoff
    )


def horizon_quantiles(horizons: NDArray[np.float64]) -> dict[str, float | int | None]:
    """Quantiles that are values of the data (no interpolation towards infinity), and counts."""
    levels = list(_QUANTILES.values())
    values = np.quantile(horizons.reshape(-1), levels, method="inverted_cdf")
    named = {
        name: float(value) if np.isfinite(value) else None
        for name, value in zip(_QUANTILES, values, strict=True)
    }
    return named | {
        "units": int(horizons.size),
        "infinite": int(np.isinf(horizons).sum()),
        "zero": int((horizons == 0).sum()),
    }
