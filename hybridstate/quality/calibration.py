"""The result of `calibrate`: what was chosen, how it validated, and the two files that carry it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.numpy import save

from hybridstate.defaults import GROUP
from hybridstate.provenance import environment, fresh_folder, sha256_bytes
from hybridstate.quality.divergence import Divergence, divergences
from hybridstate.quant.calibration import Scores, fingerprint, temperature_of
from hybridstate.quant.simulate import Simulation
from hybridstate.trajectories.model import LoadedModel
from hybridstate.trajectories.prompts import Prompt
from hybridstate.trajectories.protocol import Protocol
from hybridstate.trajectories.record import repeated_share

SCHEMA: Final = "hybridstate.calibration/1"
REPEATED_LIMIT: Final = 0.5
"""Share of repeated 32-grams above which trajectories say little about real use."""


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """A finished calibration.

    Attributes:
        document: everything of `calibration.json` but `arrays`; the same run gives the same bytes.
        divergences: the validation, FP32 first.
        scores: risk and selection per layer.
        warnings: for the user, one line each.
    """

    document: dict[str, Any]
    divergences: tuple[Divergence, ...]
    scores: Scores
    layers: tuple[int, ...]
    """Block index of each linear layer."""
    warnings: tuple[str, ...]

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """`layers.{i}.risk` f32 `[H, K]` and `layers.{i}.protected` i16 `[H, k_hi]`, i the block."""
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        for index, risk, protected in zip(
            self.layers, self.scores.risk, self.scores.protected, strict=True
        ):
            arrays[f"layers.{index}.risk"] = risk.astype(np.float32)
            arrays[f"layers.{index}.protected"] = protected
        return arrays

    def to_json(self) -> dict[str, Any]:
        """The document, with shape, dtype and digest of each array."""
        arrays = {
            name: {
                "dtype": str(array.dtype),
                "shape": list(array.shape),
                "sha256": sha256_bytes(np.ascontiguousarray(array).tobytes()),
            }
            for name, array in sorted(self.arrays().items())
        }
        return self.document | {"arrays": arrays}

    def write(self, folder: Path, *, force: bool = False) -> None:
        """Write both files; the folder appears whole or not at all.

        Raises:
            UsageError: the folder is not empty or cannot be written.
        """
        with fresh_folder(folder, force=force) as partial:
            text = json.dumps(self.to_json(), indent=2, sort_keys=True, allow_nan=False)
            (partial / "calibration.json").write_text(text + "\n", encoding="utf-8")
            (partial / "calibration.safetensors").write_bytes(save(self.arrays()))


def assemble(
    loaded: LoadedModel,
    prompts: tuple[Prompt, ...],
    protocol: Protocol,
    scores: Scores,
    generated: torch.Tensor,
    simulation: Simulation,
    *,
    k_hi: int,
    seed: int,
    source: str,
) -> Calibration:
    """Put the stages' results together; `source` says where the prompts came from."""
    layer = loaded.spec.layers[0]
    rows = divergences(simulation, key_dim=layer.key_dim, value_dim=layer.value_dim)
    repeated = repeated_share(generated)
    versions = environment(device=loaded.device.type, threads=torch.get_num_threads())
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "fingerprint": fingerprint(loaded, prompts, protocol, seed),
        "model": {
            "name": loaded.checkpoint.name,
            "family": loaded.spec.family.name,
            "kind": loaded.spec.family.kind,
            "digests": loaded.checkpoint.digests(),
        },
        "protocol": protocol.to_json()
        | {
            "temperature": temperature_of(protocol, loaded.checkpoint),
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "prompt_source": source,
        },
        "seed": seed,
        "k_hi": k_hi,
        "group": GROUP,
        "low_format": "int8-step",
        "high_format": "fp16",
        "selector": "damp",
        "key_order": "shared",
        "prompts": [prompt.to_json() for prompt in prompts],
        "prompt_digests": {prompt.name: prompt.digest for prompt in prompts},
        "repeated_32gram_share": repeated,
        "effective_decay_median": scores.effective_decay,
        "split_agreement": scores.agreement.overlap,
        "split_agreement_random": scores.agreement.random_overlap,
        "split_rank_correlation": scores.agreement.spearman,
        "split_constant_heads": scores.agreement.constant_heads,
        "objective": scores.objective,
        "validation": [row.to_json() for row in rows],
        "validation_sequences": simulation.kl.shape[1],
        "validation_positions": simulation.kl.shape[2],
        "validation_steps": list(simulation.steps),
        # The commit of a checkout says nothing about numbers that the versions do not.
        "versions": {k: v for k, v in versions.items() if k not in ("commit", "modified")},
    }
    return Calibration(
        document=document,
        divergences=rows,
        scores=scores,
        layers=tuple(layer.index for layer in loaded.spec.layers),
        warnings=_warnings(repeated, simulation, k_hi, layer.key_dim),
    )


def _warnings(repeated: float, simulation: Simulation, k_hi: int, key_dim: int) -> tuple[str, ...]:
    found = []
    if repeated > REPEATED_LIMIT:
        found.append(
            f"{100 * repeated:.0f} % of the generated 32-token stretches repeat earlier ones: "
            "the model loops, so calibrate at a higher --temperature"
        )
    if any(simulation.saturated):
        found.append(f"{sum(simulation.saturated):,} state values beyond FP16 were saturated")
    if k_hi == key_dim:
        found.append(f"all {key_dim} key channels are protected, so nothing is left to choose")
    return tuple(found)
