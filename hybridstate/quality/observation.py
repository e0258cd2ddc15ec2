"""What the gates did on text: mean log-decays, norms of final states, and decay across the shipped domains.

Sequences of a pass have one length, so nothing is padded and every position counts. Log-decays are averaged in float64
as the model computes them; no sequence of them is kept, except those of three units for the picture of their traces.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from hybridstate.errors import NumericError
from hybridstate.horizons.effective import (
    DomainDecay,
    band,
    domain_decays,
    effective,
    pooled,
    units_at,
)
from hybridstate.horizons.observed import state_magnitude
from hybridstate.trajectories.model import (
    LoadedModel,
    prefill,
    recurrent_states,
    reference_decode,
    reference_prefill,
    swap,
)
from hybridstate.trajectories.prompts import domain_stretches

F64 = NDArray[np.float64]
Progress = Callable[[str, int, int], None]

BATCH_TOKENS: Final = {"cpu": 4096, "cuda": 32_768}
"""Tokens of one pass; a longer prefix runs alone."""

DOMAIN_SEQUENCES: Final = {"cpu": 2, "cuda": 8}
DOMAIN_TOKENS: Final = 1024
TRACE_TOKENS: Final = 256


@dataclass(frozen=True, slots=True)
class Observation:
    """What P sequences showed, per linear layer.

    Attributes:
        mean_log_decay: float64 `[P, H]` or `[P, H, K]`, over all positions.
        magnitudes: M_S at the last position, float64 of the same shape.
        traces: float64 `[units, T]`, log-decays of the followed units on the first sequence.
    """

    mean_log_decay: tuple[F64, ...]
    magnitudes: tuple[F64, ...]
    traces: F64


@torch.no_grad()
def observe(
    loaded: LoadedModel,
    sequences: Sequence[NDArray[np.int64]],
    *,
    chunk: int | None = None,
    follow: Sequence[tuple[int, int]] = (),
    stage: str = "prefixes",
    progress: Progress | None = None,
) -> Observation:
    """Prefill every sequence from an empty state, equal lengths together.

    Args:
        sequences: tokens `[n]` each, of any lengths from 1.
        chunk: tokens of one forward call.
        follow: units (layer ordinal, place in the layer) whose log-decays are kept.

    Raises:
        NumericError: a final state is not finite; names prefix and layer.
    """
    layers = len(loaded.spec.layers)
    sums: list[torch.Tensor | None] = [None] * layers
    following = False
    kept: dict[tuple[int, int], list[torch.Tensor]] = {unit: [] for unit in follow}

    def add(ordinal: int, g: torch.Tensor) -> None:
        """Add log-decays `[B, T, ...]` of one layer."""
        total = g.sum(1, dtype=torch.float64)
        before = sums[ordinal]
        sums[ordinal] = total if before is None else before + total
        for unit, parts in kept.items():
            if following and unit[0] == ordinal:
                parts.append(g[0].flatten(1)[:, unit[1]].to("cpu", torch.float64))

    def many(
        ordinal: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        add(ordinal, g)
        return reference_prefill(ordinal, q, k, v, g, beta, initial_state)

    def one(
        ordinal: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        add(ordinal, g[:, None])
        return reference_decode(ordinal, q, k, v, g, beta, initial_state)

    means: dict[int, list[F64]] = {}
    norms: dict[int, list[F64]] = {}
    finished = 0
    with swap(loaded, prefill=many, decode=one):
        for rows in _groups(sequences, BATCH_TOKENS[loaded.device.type]):
            sums[:] = [None] * layers
            following = rows[0] == 0
            tokens = torch.from_numpy(np.stack([sequences[row] for row in rows]))
            _, past = prefill(loaded, tokens, chunk=chunk)
            length = tokens.shape[1]
            decays = [_numpy(total) / length for total in sums]
            sizes = []
            for layer, state in zip(loaded.spec.layers, recurrent_states(past), strict=True):
                sizes.append(state_magnitude(state.float().cpu().numpy(), loaded.spec.unit))
                bad = np.argwhere(~np.isfinite(sizes[-1]))
                if len(bad):
                    raise NumericError(
                        f"prefix {rows[bad[0][0]]}, layer {layer.index}, unit "
                        f"{bad[0][1:].tolist()}: the state after {length} tokens is not finite",
                        hint="run with --device cpu, where the model runs in float32",
                        prefix=rows[bad[0][0]],
                        layer=layer.index,
                    )
            for place, row in enumerate(rows):
                means[row] = [layer[place] for layer in decays]
                norms[row] = [layer[place] for layer in sizes]
            finished += len(rows)
            if progress is not None:
                progress(stage, finished, len(sequences))

    def stacked(found: dict[int, list[F64]]) -> tuple[F64, ...]:
        return tuple(
            np.stack([found[row][ordinal] for row in range(len(sequences))])
            for ordinal in range(layers)
        )

    traces = [torch.cat(parts).numpy() for parts in kept.values()]
    return Observation(stacked(means), stacked(norms), np.array(traces))


def _numpy(total: torch.Tensor | None) -> F64:
    assert total is not None  # every linear layer runs on every token
    return np.asarray(total.cpu().numpy(), np.float64)


def _groups(sequences: Sequence[NDArray[np.int64]], tokens: int) -> list[list[int]]:
    """Rows of equal length, together at most `tokens` tokens (one row at least)."""
    by_length: dict[int, list[int]] = {}
    for row, sequence in enumerate(sequences):
        by_length.setdefault(len(sequence), []).append(row)
    groups = []
    for length, rows in by_length.items():
        size = max(1, tokens // length)
        groups += [rows[start : start + size] for start in range(0, len(rows), size)]
    return groups


# -- decay of the three domains -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DecayStructure:
    """Effective decay on the shipped texts (teacher-forced), pooled over all layers.

    Attributes:
        domains: percentiles and correlations.
        factors: a_eff per domain, `[units]`.
        low, high: 10th and 90th percentile over all sequences of a unit's a_eff, `[units]`.
        followed: places of the units at p10, p50 and p90 of a_eff over all domains.
        traces: their decay factors a on the first math sequence, `[3, TRACE_TOKENS]`.
    """

    domains: tuple[DomainDecay, ...]
    factors: Mapping[str, F64]
    low: F64
    high: F64
    followed: tuple[int, ...]
    traces: F64


def decay_structure(
    loaded: LoadedModel,
    *,
    sequences: int = DOMAIN_SEQUENCES["cuda"],
    tokens: int = DOMAIN_TOKENS,
    progress: Progress | None = None,
) -> DecayStructure:
    """Run the shipped texts of every domain and pool what their gates did.

    Raises:
        SourceError: a domain has too little text for this tokenizer.
    """
    texts = domain_stretches(loaded.encode, count=sequences, tokens=tokens)
    rows = [row for stretches in texts.values() for row in stretches]
    seen = pooled(observe(loaded, rows, stage="domains", progress=progress).mean_log_decay)
    by_domain = {
        domain: seen[place * sequences : (place + 1) * sequences]
        for place, domain in enumerate(texts)
    }
    low, high = band(seen)
    followed = units_at(effective(seen))
    first = next(iter(texts.values()))[0][:TRACE_TOKENS]
    traces = observe(loaded, [first], follow=[_place(loaded, unit) for unit in followed]).traces
    return DecayStructure(
        domain_decays(by_domain, tokens=tokens),
        {domain: effective(values) for domain, values in by_domain.items()},
        low,
        high,
        followed,
        np.asarray(np.exp(traces), np.float64),
    )


def _place(loaded: LoadedModel, unit: int) -> tuple[int, int]:
    """Layer ordinal and place in the layer of a pooled unit."""
    for layer in loaded.spec.layers:
        size = loaded.spec.units(layer)
        if unit < size:
            return layer.ordinal, unit
        unit -= size
    raise NumericError(f"no unit {unit} in this model", index=unit)


def domain_sequences(device: str) -> int:
    """Sequences of each domain that a device takes in a few seconds."""
    return DOMAIN_SEQUENCES[device]
