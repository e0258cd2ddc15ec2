"""The stages of a calibration between prompts and validation: record, score, select (DAMP Algorithm 1).

Trajectories are recorded batch by batch into a store. Scores read one layer at a time; the fitting split
gives the risk, the tuning split the objective J, and halves of all prompts tell how stable the choice is.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch

from hybridstate.checkpoint import EMBEDDED, Checkpoint
from hybridstate.provenance import sha256_json
from hybridstate.quant.arms import Arm, plain_arm
from hybridstate.quant.formats import FORMATS
from hybridstate.quant.risk import (
    F64,
    I16,
    Place,
    SplitAgreement,
    local_error,
    objective,
    protect,
    protect_random,
    risk,
    split_agreement,
    weighted,
)
from hybridstate.trajectories.model import LoadedModel
from hybridstate.trajectories.prompts import Prompt
from hybridstate.trajectories.protocol import ALGORITHM_VERSION, DOMAINS, SPLITS, Protocol
from hybridstate.trajectories.record import record
from hybridstate.trajectories.store import TrajectoryStore

Progress = Callable[[str, int, int], None]

LOW: Final = FORMATS["int8-step"]
BASELINES: Final = ("fp32", "fp16", "bf16", "int8-step")


def temperature_of(protocol: Protocol, checkpoint: Checkpoint) -> float:
    """As given; else 1.0 for an embedded model, which would loop when greedy, and greedy for others."""
    if protocol.temperature is not None:
        return protocol.temperature
    return 1.0 if checkpoint.name in EMBEDDED else 0.0


def fingerprint(
    loaded: LoadedModel, prompts: tuple[Prompt, ...], protocol: Protocol, seed: int
) -> str:
    """sha256 of everything that recorded trajectories depend on."""
    return sha256_json(
        {
            "algorithm_version": ALGORITHM_VERSION,
            "model": loaded.checkpoint.digests(),
            "prompts": [p.digest for p in prompts],
            "protocol": protocol.to_json(),
            "temperature": temperature_of(protocol, loaded.checkpoint),
            "seed": seed,
            "dtype": str(loaded.dtype),
            "device": loaded.device.type,
        }
    )


def batches(prompts: tuple[Prompt, ...], protocol: Protocol) -> list[tuple[Prompt, ...]]:
    """The fixed assignment of prompts to batches."""
    return [
        prompts[start : start + protocol.batch] for start in range(0, len(prompts), protocol.batch)
    ]


@contextmanager
def trajectory_store(output: Path | None, run: str, layers: int) -> Iterator[TrajectoryStore]:
    """Where trajectories live: a hidden sibling of the output folder, or a temporary folder.

    Removed on success. After an error or an interruption it stays if a batch is finished, and the same
    command resumes from it.
    """
    if output is None:
        with TemporaryDirectory(prefix="hybridstate-") as folder:
            store = TrajectoryStore.open(Path(folder), run, layers)
            try:
                yield store
            finally:
                store.close()
        return
    output = output.absolute()  # "." has no name to put a sibling beside
    store = TrajectoryStore.open(output.with_name(f".{output.name}.trajectories"), run, layers)
    try:
        yield store
    except BaseException:
        if not store.has(0):
            store.remove()
        raise
    else:
        store.remove()
    finally:
        store.close()


def record_batches(
    loaded: LoadedModel,
    prompts: tuple[Prompt, ...],
    protocol: Protocol,
    store: TrajectoryStore,
    *,
    seed: int,
    progress: Progress | None = None,
) -> torch.Tensor:
    """Record every batch that the store lacks; all generated tokens `[S, N]`."""
    groups = batches(prompts, protocol)
    total = len(groups) * protocol.new_tokens
    for number, group in enumerate(groups):
        if store.has(number):
            continue
        before = number * protocol.new_tokens

        def advance(stage: str, done: int, _total: int, before: int = before) -> None:
            if progress is not None:
                progress(stage, before + done, total)

        recording = record(
            loaded,
            group,
            protocol,
            temperature=temperature_of(protocol, loaded.checkpoint),
            seed=seed,
            first=number * protocol.batch,
            progress=advance,
        )
        store.write(number, recording)
    return store.read_all(len(groups), "generated", 0)


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """What a calibration decides, lists over the linear layers.

    Attributes:
        risk: `[H, K]` float64, C_u on the fitting split, per value head.
        protected: `[H, k_hi]`, shared by the value heads of a key head.
        random: as many channels, drawn.
        agreement: how two halves of the prompts agree.
        objective: J on the tuning split by arm, summed over layers and heads.
        arms: the storage arms to validate, FP32 first.
        effective_decay: median over units of exp(mean log-decay), all layers and sequences.
    """

    risk: tuple[F64, ...]
    protected: tuple[I16, ...]
    random: tuple[I16, ...]
    agreement: SplitAgreement
    objective: dict[str, float]
    arms: tuple[Arm, ...]
    effective_decay: float


def score(
    loaded: LoadedModel,
    prompts: tuple[Prompt, ...],
    protocol: Protocol,
    store: TrajectoryStore,
    *,
    k_hi: int,
    seed: int,
    progress: Progress | None = None,
) -> Scores:
    """Risk, selection and objective of every layer, one layer in memory at a time."""
    spec = loaded.spec
    count = len(batches(prompts, protocol))
    halves = _halves(prompts)
    risks: list[F64] = []
    pairs: list[tuple[F64, F64]] = []
    protected: list[I16] = []
    random: list[I16] = []
    totals: dict[str, float] = {}
    decays: list[torch.Tensor] = []
    for layer in spec.layers:
        anchors = store.read_all(count, f"anchors.{layer.ordinal}", 1)  # [A, S, H, K, V]
        weights = store.read_all(count, f"weights.{layer.ordinal}", 1)
        decays.append(store.read_all(count, f"mean_log_decay.{layer.ordinal}", 0).flatten())
        products = np.stack(
            [weighted(local_error(s, LOW), w) for s, w in zip(anchors, weights, strict=True)], 1
        )  # [S, A, H, K]
        risks.append(_risk_of(products, prompts, protocol, _rows(prompts, "fit")))
        pairs.append(
            (
                _risk_of(products, prompts, protocol, halves[0]),
                _risk_of(products, prompts, protocol, halves[1]),
            )
        )
        protected.append(protect(risks[-1], k_hi, layer.key_heads))
        shape = (layer.value_heads, layer.key_dim)
        random.append(protect_random(shape, k_hi, layer.key_heads, (seed, layer.ordinal)))
        tune = _rows(prompts, "tune")
        states, kept = anchors[:, tune].flatten(0, 1), weights[:, tune].flatten(0, 1)
        where = [
            p for row in range(anchors.shape[0]) for p in _places(prompts, protocol, tune, row)
        ]
        for arm in _arms((protected[-1],), (random[-1],)):
            value = objective(states, kept, where, arm, 0)
            totals[arm.name] = totals.get(arm.name, 0.0) + value
        if progress is not None:
            progress("score", layer.ordinal + 1, len(spec.layers))
    return Scores(
        risk=tuple(risks),
        protected=tuple(protected),
        random=tuple(random),
        agreement=split_agreement(pairs, k_hi, tuple(layer.key_heads for layer in spec.layers)),
        objective=totals,
        arms=_arms(tuple(protected), tuple(random)),
        effective_decay=float(torch.cat(decays).exp().median()),
    )


def _arms(protected: tuple[I16, ...], random: tuple[I16, ...]) -> tuple[Arm, ...]:
    def channels(chosen: tuple[I16, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(torch.from_numpy(c.astype(np.int64)) for c in chosen)

    return (
        *(plain_arm(name) for name in BASELINES),
        Arm("damp", LOW, channels(protected)),
        Arm("damp-random", LOW, channels(random)),
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
    checkpoint: Checkpoint, protocol: Protocol, domains: int = len(DOMAINS)
) -> dict[str, Any]:
    """What a run would do, from the config alone."""
    prompts = len(SPLITS) * protocol.prompts_per_split * domains
    layers = checkpoint.spec.layers
    state = sum(4 * x.value_heads * x.key_dim * x.value_dim for x in layers)
    return {
        "prompts": prompts,
        "prefill_tokens": prompts * protocol.input_tokens,
        "generated_tokens": prompts * protocol.new_tokens,
        "decode_steps": -(-prompts // protocol.batch) * protocol.new_tokens,
        "validation_sequences": prompts // len(SPLITS),
        "validation_formats": len(BASELINES) + 2,
        "state_bytes_per_sequence": state,
        "trajectory_bytes": state * prompts * len(protocol.positions()),
        "temperature": temperature_of(protocol, checkpoint),
    }
