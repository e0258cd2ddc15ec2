"""What the gates did on real text, against what the weights said: the whole of `analyze --validate`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hybridstate.errors import UsageError
from hybridstate.horizons.effective import PERCENTILES, pooled
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
)
from hybridstate.horizons.static import static_horizons
from hybridstate.quality.observation import (
    DOMAIN_SEQUENCES,
    DOMAIN_TOKENS,
    DecayStructure,
    decay_structure,
    observe,
)
from hybridstate.trajectories.documents import Documents
from hybridstate.trajectories.model import LoadedModel
from hybridstate.trajectories.prefixes import Prefixes, SelectedPrefixes, select_prefixes

F64 = NDArray[np.float64]
Progress = Callable[[str, int, int], None]

UNITS_IN_JSON: Final = 20_000
"""Models with more units keep their values in the CSV files alone."""


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
