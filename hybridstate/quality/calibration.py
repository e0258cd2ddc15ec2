"""The result of `calibrate`: what was chosen, how it validated, and the two files that carry it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.numpy import save

from hybridstate.defaults import GROUP, REPEATED_LIMIT
from hybridstate.horizons.observed import rank_correlation
from hybridstate.provenance import environment, fresh_folder, sha256_bytes
from hybridstate.quality.decoded import TaskScores
from hybridstate.quality.divergence import Divergence, measure
from hybridstate.quality.draw import Draw
from hybridstate.quality.pictures import pictures
from hybridstate.quant.calibration import Scores, fingerprint, temperature_of
from hybridstate.quant.scaling import CANDIDATES
from hybridstate.quant.simulate import Simulation
from hybridstate.trajectories.model import LoadedModel
from hybridstate.trajectories.prompts import Prompt
from hybridstate.trajectories.protocol import Protocol
from hybridstate.trajectories.record import repeated_share

SCHEMA: Final = "hybridstate.calibration/1"
REORDERED: Final = "damp+reorder"
"""The arm whose value scaling and order are stored beside the risk."""


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """A finished calibration.

    Attributes:
        document: everything of `calibration.json` but `arrays`; the same run gives the same bytes.
        divergences: the validation over all seeds, FP32 first.
        arrays: of the first seed, `layers.{i}.risk` f32 `[H, K]` and `layers.{i}.protected` i16
            `[H, k_hi]`, i the block; where `damp+reorder` was run also its `layers.{i}.value_scale` f32
            `[H, V]`, `value_order` i16 `[H, V]` (names as in a plan) and `protected_reorder` i16
            `[H, k_hi]`, its own channels.
        warnings: for the user, one line each.
    """

    document: dict[str, Any]
    divergences: tuple[Divergence, ...]
    arrays: dict[str, np.ndarray[Any, Any]]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The document, with shape, dtype and digest of each array."""
        arrays = {
            name: {
                "dtype": str(array.dtype),
                "shape": list(array.shape),
                "sha256": sha256_bytes(np.ascontiguousarray(array).tobytes()),
            }
            for name, array in sorted(self.arrays.items())
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
            (partial / "calibration.safetensors").write_bytes(save(self.arrays))


def assemble(
    loaded: LoadedModel,
    prompts: tuple[Prompt, ...],
    protocol: Protocol,
    scores: Scores,
    generated: torch.Tensor,
    simulation: Simulation,
    k_hi: int,
    *,
    seed: int,
    source: str,
    tasks: TaskScores | None = None,
) -> Draw:
    """Put one seed's stages together; `source` says where the prompts came from."""
    layer = loaded.spec.layers[0]
    measured = measure(simulation, layer, per_channel=loaded.spec.unit == "channel")
    agreement = scores.agreement["damp"]
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
        "split_agreement": agreement.overlap,
        "split_agreement_random": agreement.random_overlap,
        "split_rank_correlation": agreement.spearman,
        "split_constant_heads": agreement.constant_heads,
        "selector_agreement": {name: asdict(found) for name, found in scores.agreement.items()},
        "objective": scores.objective,
        "key_order_gap": _key_order_gap(scores),
        "error_concentration": {
            name: {"mean_over_heads": mean, "pooled": pooled}
            for name, (mean, pooled) in scores.concentration.items()
        },
        "risk_prediction": _risk_prediction(scores, simulation),
        "value_maps": _value_maps(scores),
        "skipped": scores.skipped,
        "pictures": pictures(loaded.spec.layers, scores),
        "validation_positions": measured.updates,
        "validation_steps": [last for _, last in measured.bins],
        "step_bins": [list(ends) for ends in measured.bins],
        "prefill_chunk": measured.chunk,
        # The commit of a checkout says nothing about numbers that the versions do not.
        "versions": {k: v for k, v in versions.items() if k not in ("commit", "modified")},
    }
    return Draw(
        document=document,
        arrays=_arrays(scores, tuple(layer.index for layer in loaded.spec.layers)),
        measured=measured,
        tasks=tasks,
        warnings=_warnings(repeated, simulation, k_hi, layer.key_dim),
    )


def _arrays(scores: Scores, layers: tuple[int, ...]) -> dict[str, np.ndarray[Any, Any]]:
    """See `Calibration.arrays`; `layers` is the block index of each linear layer."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for index, risk, protected in zip(layers, scores.risk, scores.protected, strict=True):
        arrays[f"layers.{index}.risk"] = risk.astype(np.float32)
        arrays[f"layers.{index}.protected"] = protected
    for index, kept in zip(layers, scores.stored.get(REORDERED, ()), strict=False):
        assert kept.values is not None
        assert kept.protected is not None
        arrays[f"layers.{index}.value_scale"] = kept.values.scale.numpy()
        arrays[f"layers.{index}.value_order"] = kept.values.order.numpy().astype(np.int16)
        arrays[f"layers.{index}.protected_reorder"] = kept.protected
    return arrays


def _key_order_gap(scores: Scores) -> dict[str, float]:
    """J with channels shared by the value heads of a key head over J with channels of their own, less 1."""
    found = {}
    for name, shared in scores.objective.items():
        base, plus, rest = name.partition("+")
        alone = scores.objective.get(f"{base}-per-head{plus}{rest}", 0.0)
        if alone > 0:
            found[name] = shared / alone - 1.0
    return found


def _risk_prediction(scores: Scores, simulation: Simulation) -> dict[str, Any]:
    """Rank correlation of each score with the error that plain INT8 accumulated, per key channel.

    Mean over heads and layers; heads where one of the two is constant are counted and left out.
    """
    names = [arm.name for arm in simulation.arms]
    if "int8-step" not in names:
        return {}
    measured = [error[names.index("int8-step")] for error in simulation.channel_error]
    found: dict[str, Any] = {}
    for name, values in (("damp", scores.risk), ("error-only", scores.error)):
        rhos = [
            rank_correlation(a, b)
            for score, error in zip(values, measured, strict=True)
            for a, b in zip(score, error, strict=True)
        ]
        known = [rho for rho in rhos if rho is not None]
        found[name] = {
            "spearman": float(np.mean(known)) if known else None,
            "heads": len(known),
            "constant_heads": len(rhos) - len(known),
        }
    return found


def _value_maps(scores: Scores) -> dict[str, list[dict[str, Any]]]:
    """Per arm with value maps, how many heads chose each candidate."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, layers in scores.stored.items():
        chosen = [kept.candidate for kept in layers if kept.candidate is not None]
        if not chosen:
            continue
        counts = np.bincount(np.concatenate(chosen), minlength=len(CANDIDATES))
        found[name] = [
            {"power": power, "reordered": reordered, "heads": int(count)}
            for (power, reordered), count in zip(CANDIDATES, counts, strict=True)
        ]
    return found


def _warnings(repeated: float, simulation: Simulation, k_hi: int, key_dim: int) -> tuple[str, ...]:
    found = []
    if repeated > REPEATED_LIMIT:
        found.append(
            f"{100 * repeated:.0f} % of the generated 32-token stretches repeat earlier ones: "
            "the model loops, so calibrate at a higher --temperature"
        )
    if any(simulation.saturated):
        found.append(f"{sum(simulation.saturated):,} state values beyond FP16 were saturated")
    if simulation.slow is not None:
        found.append(f"formats were stored one after another, which is slow: {simulation.slow}")
    if k_hi == key_dim:
        found.append(f"all {key_dim} key channels are protected, so nothing is left to choose")
    return tuple(found)
