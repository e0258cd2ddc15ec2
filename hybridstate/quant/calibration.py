"""The stages of a calibration between prompts and validation: record, score, select (DAMP Algorithm 1).

Trajectories are recorded batch by batch into a store. Scores read one layer at a time; the fitting split
gives the risk, the tuning split the objective J, and halves of all prompts tell how stable the choice is.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from hybridstate.checkpoint import EMBEDDED, Checkpoint
from hybridstate.provenance import sha256_json
from hybridstate.quant.arms import Arm
from hybridstate.quant.catalogue import DEFAULT, ArmName, parse_list
from hybridstate.quant.formats import FORMATS
from hybridstate.quant.risk import (
    F64,
    I16,
    Place,
    SplitAgreement,
    local_error,
    objective,
    protect,
    risk,
    split_agreement,
    weighted,
)
from hybridstate.quant.scaling import Anchors
from hybridstate.quant.selection import (
    Example,
    LayerSelection,
    Stored,
    build_arm,
    concentration,
    example_head,
    refusal,
)
from hybridstate.trajectories.graphs import uses_fixed
from hybridstate.trajectories.model import LoadedModel
from hybridstate.trajectories.prompts import Prompt
from hybridstate.trajectories.protocol import ALGORITHM_VERSION, DOMAINS, SPLITS, Protocol
from hybridstate.trajectories.record import batch_arrays, record
from hybridstate.trajectories.stages import fact, stage
from hybridstate.trajectories.store import TrajectoryStore

Progress = Callable[[str, int, int], None]

LOW: Final = FORMATS["int8-step"]


def temperature_of(protocol: Protocol, checkpoint: Checkpoint) -> float:
    """As given; else 1.0 for an embedded or synthetic model, which would loop when greedy, and greedy for others."""
    if protocol.temperature is not None:
        return protocol.temperature
    return 1.0 if checkpoint.name in EMBEDDED or not checkpoint.entries else 0.0


def run_fields(
    loaded: LoadedModel, prompts: tuple[Prompt, ...], protocol: Protocol, seed: int
) -> dict[str, Any]:
    """Everything that recorded trajectories depend on, field by field."""
    on_gpu = {"steps": "fixed tensors, FP32 kernel"} if uses_fixed(loaded) else {}
    return on_gpu | {
        "algorithm_version": ALGORITHM_VERSION,
        "model": loaded.checkpoint.digests(),
        "prompts": [p.digest for p in prompts],
        "protocol": protocol.to_json(),
        "temperature": temperature_of(protocol, loaded.checkpoint),
        "seed": seed,
        "dtype": str(loaded.dtype),
        "device": loaded.device.type,
    }


def fingerprint(
    loaded: LoadedModel, prompts: tuple[Prompt, ...], protocol: Protocol, seed: int
) -> str:
    """sha256 of `run_fields`."""
    return sha256_json(run_fields(loaded, prompts, protocol, seed))


def batches(prompts: tuple[Prompt, ...], protocol: Protocol) -> list[tuple[Prompt, ...]]:
    """The fixed assignment of prompts to batches."""
    return [
        prompts[start : start + protocol.batch] for start in range(0, len(prompts), protocol.batch)
    ]


def record_batches(
    loaded: LoadedModel,
    prompts: tuple[Prompt, ...],
    protocol: Protocol,
    store: TrajectoryStore,
    *,
    seed: int,
    only: Collection[int] | None = None,
    progress: Progress | None = None,
) -> torch.Tensor:
    """Record every batch that the store lacks, or those of `only`; the generated tokens `[S, N]`.

    A run split over processes records different `only` into stores of their own and merges them.
    """
    groups = batches(prompts, protocol)
    wanted = range(len(groups)) if only is None else sorted(only)
    total = len(groups) * protocol.new_tokens
    for number in wanted:
        group = groups[number]
        if store.has(number):
            continue
        before = number * protocol.new_tokens

        def advance(stage: str, done: int, _total: int, before: int = before) -> None:
            if progress is not None:
                progress(stage, before + done, total)

        arrays = batch_arrays(loaded.spec, protocol, len(group))
        with store.writer(number, arrays) as writer:
            recording = record(
                loaded,
                group,
                protocol,
                temperature=temperature_of(protocol, loaded.checkpoint),
                seed=seed,
                first=number * protocol.batch,
                anchors=writer.anchor,
                progress=advance,
            )
            writer.finish(recording.arrays())
        fact("recorded_bytes", store.nbytes)
    return torch.cat([store.read(number, "generated") for number in wanted])


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """What a calibration decides, lists over the linear layers.

    Attributes:
        risk: `[H, K]` float64, C_u on the fitting split, per value head.
        error: `[H, K]` float64, the mean local INT8 error there.
        protected: `[H, k_hi]`, shared by the value heads of a key head.
        agreement: how two halves of the prompts agree, by selector.
        objective: J on the tuning split by arm, summed over layers and heads; only for arms that write at
            every update and carry nothing.
        arms: the storage arms to validate, FP32 first.
        stored: what each arm stores, by name.
        skipped: arms that mean nothing for this model, and why.
        concentration: share of squared INT8 error in the 12.5 % of key channels with most of it, mean over
            heads and pooled: plain, and with the value maps of `int8-step+reorder` where that arm is run.
        effective_decay: median over units of exp(mean log-decay), all layers and sequences.
        reordered_error: `error` with the value maps of `int8-step+reorder`; empty where that arm is not run.
        examples: per layer the head of the most concentrated error, for pictures.
    """

    risk: tuple[F64, ...]
    error: tuple[F64, ...]
    protected: tuple[I16, ...]
    agreement: dict[str, SplitAgreement]
    objective: dict[str, float]
    arms: tuple[Arm, ...]
    stored: dict[str, tuple[Stored, ...]]
    skipped: dict[str, str]
    concentration: dict[str, tuple[float, float]]
    effective_decay: float
    reordered_error: tuple[F64, ...]
    examples: tuple[Example, ...]


def score(
    loaded: LoadedModel,
    prompts: tuple[Prompt, ...],
    protocol: Protocol,
    store: TrajectoryStore,
    *,
    k_hi: int,
    seed: int,
    names: tuple[ArmName, ...] | None = None,
    progress: Progress | None = None,
) -> Scores:
    """Risk, selection and objective of every layer, one layer in memory at a time."""
    spec = loaded.spec
    names = parse_list(None) if names is None else names
    per_channel = spec.unit == "channel"
    skipped = {n.name: refusal(n, spec.layers, per_channel=per_channel) for n in names}
    names = tuple(n for n in names if skipped[n.name] is None)
    halves = _halves(prompts)
    risks: list[F64] = []
    errors: list[F64] = []
    protected: list[I16] = []
    pairs: dict[str, list[tuple[F64, F64]]] = {}
    stored: dict[str, list[Stored]] = {name.name: [] for name in names}
    totals: dict[str, float] = {}
    concentrated: dict[str, list[tuple[float, float]]] = {}
    decays: list[torch.Tensor] = []
    reordered: list[F64] = []
    examples: list[Example] = []
    for layer in spec.layers:
        with stage("read"):
            recorded = _Layer.read(store, layer.ordinal, prompts, protocol, loaded.device)
        decays.append(recorded.mean_log_decay.flatten())
        by_selector = recorded.samples(per_channel=per_channel)
        fit = {name: recorded.mean(x, "fit") for name, x in by_selector.items()}
        for name, samples in by_selector.items():
            first, second = (recorded.mean_of(samples, rows) for rows in halves)
            pairs.setdefault(name, []).append((first, second))
        risks.append(fit["damp"])
        errors.append(fit["error-only"])
        examples.append(example_head(errors[-1], recorded.anchors_of("fit").states))
        protected.append(protect(risks[-1], k_hi, layer.key_heads))
        tune = recorded.anchors_of("tune")
        selection = LayerSelection(
            layer, recorded.anchors_of("fit"), tune, fit, k_hi, seed, loaded.device
        )
        for arm_name in names:
            kept = selection.stored(arm_name)
            stored[arm_name.name].append(kept)
            if arm_name.every == 1 and arm_name.feedback is None:
                arm = build_arm(arm_name, [kept], seed).to(loaded.device)
                with stage("J"):
                    value = objective(tune.states, tune.weights, tune.places, arm, 0, loaded.device)
                totals[arm_name.name] = totals.get(arm_name.name, 0.0) + value
            if arm_name.name == "int8-step+reorder" and kept.candidate is not None:
                after = selection.table("int8-step", reorder=True).error
                reordered.append(after[kept.candidate, np.arange(layer.value_heads)])
                concentrated.setdefault("reordered", []).append(concentration(reordered[-1]))
        concentrated.setdefault("plain", []).append(concentration(errors[-1]))
        if progress is not None:
            progress("score", layer.ordinal + 1, len(spec.layers))
    key_heads = tuple(layer.key_heads for layer in spec.layers)
    return Scores(
        risk=tuple(risks),
        error=tuple(errors),
        protected=tuple(protected),
        agreement={name: split_agreement(x, k_hi, key_heads) for name, x in pairs.items()},
        objective=totals,
        arms=tuple(build_arm(name, stored[name.name], seed) for name in names),
        stored={name: tuple(kept) for name, kept in stored.items()},
        skipped={name: reason for name, reason in skipped.items() if reason is not None},
        concentration={
            name: (float(np.mean([v[0] for v in x])), float(np.mean([v[1] for v in x])))
            for name, x in concentrated.items()
        },
        effective_decay=float(torch.cat(decays).exp().median()),
        reordered_error=tuple(reordered),
        examples=tuple(examples),
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    """The recorded anchors of one layer.

    Attributes:
        anchors: `[A, S, H, K, V]`.
        weights: `[A, S, H]` or `[A, S, H, K]`.
        mean_log_decay: `[S, H]` or `[S, H, K]`.
    """

    anchors: torch.Tensor
    weights: torch.Tensor
    mean_log_decay: torch.Tensor
    prompts: tuple[Prompt, ...]
    protocol: Protocol
    device: torch.device

    @classmethod
    def read(
        cls,
        store: TrajectoryStore,
        ordinal: int,
        prompts: tuple[Prompt, ...],
        protocol: Protocol,
        device: torch.device,
    ) -> "_Layer":
        count = len(batches(prompts, protocol))
        return cls(
            store.read_all(count, f"anchors.{ordinal}", 1),
            store.read_all(count, f"weights.{ordinal}", 1),
            store.read_all(count, f"mean_log_decay.{ordinal}", 0),
            prompts,
            protocol,
            device,
        )

    def samples(self, *, per_channel: bool) -> dict[str, F64]:
        """Per selector the score of every channel at every anchor, `[S, A, H, K]`."""
        errors, energies = [], []
        for states in self.anchors:
            on_device = states.to(self.device)
            errors.append(local_error(on_device, LOW).cpu())
            energies.append(on_device.square().sum(-1, dtype=torch.float64).cpu())
        found = {
            "damp": [weighted(e, w) for e, w in zip(errors, self.weights, strict=True)],
            "error-only": [e.numpy() for e in errors],
            "energy": [e.numpy() for e in energies],
        }
        if per_channel:
            found["retention-only"] = [w.to(torch.float64).numpy() for w in self.weights]
        return {name: np.stack(parts, 1) for name, parts in found.items()}

    def mean(self, samples: F64, split: str) -> F64:
        """Expectation over one split, `[H, K]`."""
        return self.mean_of(samples, _rows(self.prompts, split))

    def mean_of(self, samples: F64, rows: list[int]) -> F64:
        """Expectation over some sequences, `[H, K]`."""
        return _risk_of(samples, self.prompts, self.protocol, rows)

    def anchors_of(self, split: str) -> Anchors:
        """States, weights and places of one split."""
        rows = _rows(self.prompts, split)
        places = [
            place
            for anchor in range(self.anchors.shape[0])
            for place in _places(self.prompts, self.protocol, rows, anchor)
        ]
        return Anchors(
            self.anchors[:, rows].flatten(0, 1), self.weights[:, rows].flatten(0, 1), places
        )


def _rows(prompts: tuple[Prompt, ...], split: str) -> list[int]:
    return [row for row, prompt in enumerate(prompts) if prompt.split == split]


def _halves(prompts: tuple[Prompt, ...]) -> tuple[list[int], list[int]]:
    """Two disjoint halves with every domain in both, as even as the counts allow (DAMP C.1)."""
    halves: tuple[list[int], list[int]] = ([], [])
    for row, prompt in enumerate(prompts):
        place = SPLITS.index(prompt.split) + len(SPLITS) * prompt.number
        halves[place % 2].append(row)
    return halves


def _places(
    prompts: tuple[Prompt, ...], protocol: Protocol, rows: list[int], anchor: int
) -> list[Place]:
    window = protocol.positions()[anchor][0]
    return [Place(prompts[row].domain, row, window) for row in rows]


def _risk_of(
    products: F64, prompts: tuple[Prompt, ...], protocol: Protocol, rows: list[int]
) -> F64:
    """C over some sequences, from W e `[S, A, H, K]`."""
    anchors = range(products.shape[1])
    places = [place for a in anchors for place in _places(prompts, protocol, rows, a)]
    return risk(np.concatenate([products[rows, a] for a in anchors]), places)


def estimate(
    checkpoint: Checkpoint,
    protocol: Protocol,
    domains: int = len(DOMAINS),
    formats: int = len(DEFAULT),
) -> dict[str, Any]:
    """What a run would do, from the config alone."""
    prompts = protocol.prompts_per_domain * domains
    held_out = prompts - (len(SPLITS) - 1) * protocol.prompts_per_split * domains
    layers = checkpoint.spec.layers
    state = sum(4 * x.value_heads * x.key_dim * x.value_dim for x in layers)
    return {
        "prompts": prompts,
        "prefill_tokens": prompts * protocol.input_tokens,
        "generated_tokens": prompts * protocol.new_tokens,
        "decode_steps": -(-prompts // protocol.batch) * protocol.new_tokens,
        "validation_sequences": held_out,
        "validation_formats": formats,
        "state_bytes_per_sequence": state,
        "trajectory_bytes": state * prompts * len(protocol.positions()),
        "temperature": temperature_of(protocol, checkpoint),
    }
