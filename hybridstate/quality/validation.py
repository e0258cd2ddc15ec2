"""What the gates did on real text, against what the weights said: the whole of `analyze --validate`.

Sequences of a pass have one length, so nothing is padded and every position counts. Log-decays are averaged in float64
as the model computes them; no sequence of them is kept, except those of three units for the picture of their traces.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from hybridstate.errors import NumericError, UsageError
from hybridstate.horizons.effective import (
    PERCENTILES,
    DomainDecay,
    band,
    domain_decays,
    effective,
    pooled,
    units_at,
)
from hybridstate.horizons.gate_input import (
    OBJECTIVES,
    GateInputChoice,
    Objective,
    choose_gate_input,
)
from hybridstate.horizons.observed import (
    Agreement,
    LayerAgreement,
    agreement,
    layer_agreements,
    observed_horizons,
    state_magnitude,
)
from hybridstate.horizons.static import static_horizons
from hybridstate.trajectories.documents import Documents
from hybridstate.trajectories.model import (
    LoadedModel,
    prefill,
    recurrent_states,
    reference_decode,
    reference_prefill,
    swap,
)
from hybridstate.trajectories.prefixes import Prefixes, SelectedPrefixes, select_prefixes
from hybridstate.trajectories.prompts import domain_stretches

F64 = NDArray[np.float64]
Progress = Callable[[str, int, int], None]

BATCH_TOKENS: Final = {"cpu": 4096, "cuda": 32_768}
"""Tokens of one pass; a longer prefix runs alone."""

DOMAIN_SEQUENCES: Final = {"cpu": 2, "cuda": 8}
DOMAIN_TOKENS: Final = 1024
TRACE_TOKENS: Final = 256
UNITS_IN_JSON: Final = 20_000
"""Models with more units keep their values in the CSV files alone."""


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


# -- everything together ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ValidationOptions:
    """What `analyze --validate` runs.

    Attributes:
        prefixes: which to select.
        objective: which choice of a_s a plan may take.
        domain_sequences, domain_tokens: of the pass over the shipped domains.
        chunk: tokens of one forward call, None for a whole prefix at once.
    """

    prefixes: Prefixes
    objective: Objective = "rank"
    domain_sequences: int = DOMAIN_SEQUENCES["cuda"]
    domain_tokens: int = DOMAIN_TOKENS
    chunk: int | None = None

    def check(self) -> None:
        """Refuse what cannot run.

        Raises:
            UsageError: naming the option.
        """
        self.prefixes.check()
        if self.objective not in OBJECTIVES:
            raise UsageError(
                f"--gate-objective takes {' or '.join(OBJECTIVES)}, found {self.objective!r}"
            )


def domain_sequences(device: str) -> int:
    """Sequences of each domain that a device takes in a few seconds."""
    return DOMAIN_SEQUENCES[device]


@dataclass(frozen=True, slots=True, eq=False)
class Validation:
    """Static horizons against observed ones, a_s chosen from them, decay structure and the intervention.

    Attributes:
        record: facts of the run: model digests, device, dtype, text and selection of prefixes.
        whole: agreement on all prefixes at the static a_s.
        layers: the same layer by layer.
        choices: a_s by objective, chosen on the prefixes at even places.
        objective: which choice a plan may take.
        held_out: agreement on the prefixes at odd places: at the static a_s and at every choice.
        decay: structure on the shipped domains.
        static, observed: horizons per layer, `[H]` or `[H, K]` and `[P, ...]`.
        intervention: result of `quality.intervention.probe`, where it ran.
    """

    record: dict[str, Any]
    whole: Agreement
    layers: tuple[LayerAgreement, ...]
    choices: tuple[GateInputChoice, ...]
    objective: Objective
    held_out: tuple[Agreement, ...]
    decay: DecayStructure
    static: tuple[F64, ...]
    observed: tuple[F64, ...]
    intervention: dict[str, Any] | None = None

    def with_intervention(self, found: dict[str, Any]) -> "Validation":
        """The same with the result of the intervention."""
        return replace(self, intervention=found)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader of the tables must not miss."""
        found = []
        for choice in self.choices:
            if choice.flat:
                found.append(
                    f"the {choice.objective} objective is flat over the grid of gate inputs: it decides "
                    "nothing about a_s"
                )
            elif choice.at_border:
                found.append(
                    f"the {choice.objective} objective is best at the end of the grid "
                    f"({choice.gate_input:g}): a better gate input may lie outside"
                )
        short = self.record["prefix_selection"]["fallbacks"]
        if short:
            found.append(
                f"{short} prefixes are shorter than their tier: the text has no longer ones"
            )
        return tuple(found)

    def to_json(self, *, all_units: bool = False) -> dict[str, Any]:
        """The recorded form; with more than 20,000 units their values only if asked for."""
        units = sum(layer.size for layer in self.static)
        return {
            **self.record,
            **self.whole.to_json(),
            "layers": [layer.to_json() for layer in self.layers],
            "gate_input_objective": self.objective,
            "gate_input_choices": {choice.objective: choice.to_json() for choice in self.choices},
            "held_out": [agreed.to_json() for agreed in self.held_out],
            "decay": {
                "text": "shipped prompts, teacher-forced",
                "domains": [domain.to_json() for domain in self.decay.domains],
            },
            "units": self._units() if all_units or units <= UNITS_IN_JSON else None,
            "intervention": self.intervention,
        }

    def _units(self) -> dict[str, Any]:
        """One number per unit, pooled over layers in their order; null is infinite."""
        shapes = [layer.shape for layer in self.static]
        observed = np.median(pooled(self.observed), axis=0)
        return {
            "layers": [
                {"index": layer.index, "shape": list(shape)}
                for layer, shape in zip(self.layers, shapes, strict=True)
            ],
            "static_horizon": _numbers(np.concatenate([layer.ravel() for layer in self.static])),
            "observed_horizon_median": _numbers(observed),
            "effective_decay": {
                domain: _numbers(factors) for domain, factors in self.decay.factors.items()
            },
            "effective_decay_p10": _numbers(self.decay.low),
            "effective_decay_p90": _numbers(self.decay.high),
            "traces": [
                {"percentile": percentile, "unit": unit, "decay": _numbers(trace)}
                for percentile, unit, trace in zip(
                    PERCENTILES, self.decay.followed, self.decay.traces, strict=True
                )
            ],
        }


def _numbers(values: F64) -> list[float | None]:
    """Seven digits each, None where infinite."""
    return [float(f"{value:.7g}") if np.isfinite(value) else None for value in values.tolist()]


def validate(
    loaded: LoadedModel,
    documents: Documents,
    options: ValidationOptions,
    *,
    w_max: Sequence[int],
    gate_input: float,
    gate_input_source: str,
    epsilon: float,
    progress: Progress | None = None,
) -> Validation:
    """Select prefixes, run them, compare, choose a_s on one half and report on the other.

    Args:
        gate_input, gate_input_source: a_s of the static horizons that are compared on all prefixes.
        epsilon: share still present at a horizon.

    Raises:
        SourceError, UsageError: see `select_prefixes`.
        NumericError: see `observe` and `observed_horizons`.
    """
    options.check()
    spec = loaded.spec
    decay = [loaded.checkpoint.decay(layer) for layer in spec.layers]

    def static_at(a_s: float) -> tuple[F64, ...]:
        return tuple(
            static_horizons(
                parameters,
                gate=spec.gate,
                lower_bound=spec.lower_bound,
                gate_input=a_s,
                epsilon=epsilon,
            )
            for parameters in decay
        )

    selected = select_prefixes(loaded.encode, documents, options.prefixes, progress=progress)
    seen = observe(
        loaded, [prefix.tokens for prefix in selected.items], chunk=options.chunk, progress=progress
    )
    observed = tuple(observed_horizons(mean, epsilon) for mean in seen.mean_log_decay)
    static = static_at(gate_input)
    choosing, reporting = range(0, len(selected.items), 2), range(1, len(selected.items), 2)
    choices = tuple(
        choose_gate_input(static_at, [layer[choosing] for layer in observed], objective)
        for objective in OBJECTIVES
    )
    candidates = [(gate_input, gate_input_source)]
    candidates += [(c.gate_input, f"measured: {c.objective}") for c in choices if not c.flat]
    return Validation(
        record=_record(loaded, documents, options, selected, epsilon),
        whole=agreement(
            static,
            observed,
            seen.magnitudes,
            w_max=w_max,
            gate_input=gate_input,
            gate_input_source=gate_input_source,
        ),
        layers=layer_agreements(
            static, observed, seen.magnitudes, [layer.index for layer in spec.layers]
        ),
        choices=choices,
        objective=options.objective,
        held_out=tuple(
            agreement(
                static_at(a_s),
                observed,
                seen.magnitudes,
                w_max=w_max,
                gate_input=a_s,
                gate_input_source=source,
                prefixes=reporting,
            )
            for a_s, source in candidates
            if len(reporting)
        ),
        decay=decay_structure(
            loaded,
            sequences=options.domain_sequences,
            tokens=options.domain_tokens,
            progress=progress,
        ),
        static=static,
        observed=observed,
    )


def _record(
    loaded: LoadedModel,
    documents: Documents,
    options: ValidationOptions,
    selected: SelectedPrefixes,
    epsilon: float,
) -> dict[str, Any]:
    wanted = options.prefixes
    return {
        "model_digests": loaded.checkpoint.digests(),
        "device": str(loaded.device),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "unit": loaded.spec.unit,
        "epsilon": epsilon,
        "source": documents.name,
        "text": {
            "name": documents.name,
            "format": documents.format,
            "sha256": documents.digest,
            "documents": len(documents.items),
        },
        "tokens": sum(len(prefix.tokens) for prefix in selected.items),
        "prefix_selection": {
            "per_tier": wanted.per_tier,
            "chars_per_token": wanted.chars_per_token,
            "candidates": wanted.candidates,
            **selected.to_json(),
        },
    }
