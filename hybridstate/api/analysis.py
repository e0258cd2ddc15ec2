"""`analyze`, `inspect` and `analyze --validate`: what the weights say, and what the gates did on text."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hybridstate.defaults import EPSILON, W_MAX

if TYPE_CHECKING:
    from hybridstate.checkpoint.inspection import Inspection
    from hybridstate.plan.analysis import Analysis
    from hybridstate.plan.placement import Balance
    from hybridstate.quality.validation import Validation

    Progress = Callable[[str, int, int], None]


def analyze(
    model: str | Path,
    *,
    w_max: Sequence[int] = W_MAX,
    gate_input: float | None = None,
    gate_input_from: str | Path | None = None,
    epsilon: float = EPSILON,
    lower_bound: float | None = None,
    tp: int = 1,
    balance: "Balance" = "off",
    budget: int | None = None,
    concurrency: int | None = None,
    offline: bool = False,
    cache_dir: Path | None = None,
    progress: "Progress | None" = None,
) -> "Analysis":
    """Retention horizons from the weights alone, and what each cutoff keeps and saves.

    Reads config, headers and the decay tensors; imports neither torch nor transformers.

    Args:
        model: folder, Hub name (`org/name[@revision]`) or embedded name.
        w_max: cutoffs in tokens.
        gate_input: representative gate input a_s, None for the paper's value or the default of the gate.
        gate_input_from: take the a_s that a recorded `analyze --validate` of this model chose.
        epsilon: share still present at the horizon.
        lower_bound: l of the safe gate, for configs that do not state it.
        tp: tensor-parallel ranks that share the heads.
        balance: placement on them: `off`, `storage` or `hybrid`.
        budget: bytes per rank for all states, to count slots.
        concurrency: requests wanted at once in that budget.
        offline, cache_dir: see `checkpoint.open_checkpoint`.
        progress: called with (stage, done, total) while a Hub model is read.

    Raises:
        SourceError, UnsupportedModel, NumericError, UsageError: see `hybridstate.errors`.
        PlanMismatch: the ranks do not divide the heads, or `hybrid` with quantised linear weights.
    """
    from hybridstate.checkpoint import open_checkpoint
    from hybridstate.horizons.gate_input import resolve_gate_input
    from hybridstate.horizons.static import static_horizons
    from hybridstate.plan.analysis import (
        Analysis,
        cutoffs_at,
        model_warnings,
        near_cutoff_warnings,
        source_of,
    )
    from hybridstate.plan.capacity import capacity, check_request
    from hybridstate.plan.placement import check_permutable, check_tp

    check_request(budget, concurrency)
    checkpoint = open_checkpoint(
        model, lower_bound=lower_bound, offline=offline, cache_dir=cache_dir, progress=progress
    )
    spec = checkpoint.spec
    check_tp(spec, tp)
    if balance == "hybrid":
        check_permutable(checkpoint)
    a_s, a_s_source = resolve_gate_input(checkpoint, given=gate_input, measured=gate_input_from)
    horizons = tuple(
        static_horizons(
            checkpoint.decay(layer),
            gate=spec.gate,
            lower_bound=spec.lower_bound,
            gate_input=a_s,
            epsilon=epsilon,
        )
        for layer in spec.layers
    )
    cutoffs = cutoffs_at(spec, horizons, w_max)
    planned = capacity(
        spec,
        horizons,
        [cutoff.selection for cutoff in cutoffs],
        tp=tp,
        balance=balance,
        budget=budget,
        requests=concurrency,
    )
    return Analysis(
        source=source_of(checkpoint),
        spec=spec,
        gate_input=a_s,
        gate_input_source=a_s_source,
        epsilon=epsilon,
        horizons=horizons,
        cutoffs=cutoffs,
        capacity=planned,
        warnings=model_warnings(checkpoint, gate_input_source=a_s_source)
        + near_cutoff_warnings(cutoffs)
        + planned.warnings,
    )


def inspect(
    model: str | Path,
    *,
    lower_bound: float | None = None,
    offline: bool = False,
    cache_dir: Path | None = None,
    progress: "Progress | None" = None,
) -> "Inspection":
    """Which architecture a checkpoint is and how it is stored, from config and headers alone.

    Args:
        model: folder, Hub name (`org/name[@revision]`) or embedded name.
        lower_bound: l of the safe gate, for configs that do not state it.
        offline, cache_dir, progress: see `analyze`.

    Raises:
        SourceError, UnsupportedModel, NumericError, UsageError: see `hybridstate.errors`.
    """
    from hybridstate.checkpoint import open_checkpoint
    from hybridstate.checkpoint.inspection import inspect_checkpoint

    return inspect_checkpoint(
        open_checkpoint(
            model, lower_bound=lower_bound, offline=offline, cache_dir=cache_dir, progress=progress
        )
    )


def validate_horizons(
    model: str | Path,
    *,
    text: str | Path | None = None,
    tiers: Sequence[int] | None = None,
    per_tier: int | None = None,
    chars_per_token: float | None = None,
    candidates: int | None = None,
    objective: str = "rank",
    intervention: int = 0,
    w_max: Sequence[int] = W_MAX,
    gate_input: float | None = None,
    gate_input_from: str | Path | None = None,
    epsilon: float = EPSILON,
    lower_bound: float | None = None,
    chunk: int | None = None,
    device: str = "cpu",
    progress: "Progress | None" = None,
) -> "Validation":
    """Run the model on text and compare static horizons with what its gates did (DASC 3.2-3.4, A.2).

    Args:
        model: folder or embedded name.
        text: ShareGPT JSON, `messages` JSONL or plain text; by default held-out prose.
        tiers: prefix lengths in tokens, by default those that fit tokenizer and text.
        per_tier, chars_per_token, candidates: see `trajectories.prefixes.Prefixes`.
        objective: which choice of a_s a plan may take: `rank` or `median`.
        intervention: examples per depth of the cached-state intervention, 0 for none.
        w_max: cutoffs at which the decisions are compared.
        gate_input, gate_input_from, epsilon, lower_bound: see `analyze`.
        chunk: tokens of one forward call; whole prefixes by default.
        device: `auto`, `cpu` or `cuda`.
        progress: called with (stage, done, total).

    Raises:
        SourceError, UnsupportedModel, NumericError, UsageError, MissingRequirement: see
            `hybridstate.errors`.
    """
    from typing import cast

    from hybridstate.bench.room import check_room
    from hybridstate.checkpoint import require_weights
    from hybridstate.horizons.gate_input import Objective
    from hybridstate.quality.intervention import ProbeOptions, probe
    from hybridstate.quality.observation import domain_sequences
    from hybridstate.quality.validation import ValidationOptions, validate
    from hybridstate.trajectories.documents import plain_text, read_documents
    from hybridstate.trajectories.model import load_model
    from hybridstate.trajectories.prefixes import choose_prefixes
    from hybridstate.trajectories.prompts import HELDOUT, heldout_text

    require_weights(model)
    asked = ProbeOptions(examples=intervention)
    check_room("--intervention", intervention, asked.tokens, "texts of every depth")
    documents = plain_text(HELDOUT, heldout_text()) if text is None else read_documents(text)
    static = analyze(
        model,
        w_max=w_max,
        gate_input=gate_input,
        gate_input_from=gate_input_from,
        epsilon=epsilon,
        lower_bound=lower_bound,
    )
    loaded = load_model(model, device=device, lower_bound=lower_bound)
    wanted = choose_prefixes(
        loaded.vocabulary,
        device=loaded.device.type,
        given_text=text is not None,
        tiers=tiers,
        per_tier=per_tier,
        chars_per_token=chars_per_token,
        candidates=candidates,
    )
    options = ValidationOptions(
        wanted,
        cast("Objective", objective),
        domain_sequences=domain_sequences(loaded.device.type),
        chunk=chunk,
    )
    found = validate(
        loaded,
        documents,
        options,
        w_max=w_max,
        gate_input=static.gate_input,
        gate_input_source=static.gate_input_source,
        epsilon=epsilon,
        progress=progress,
    )
    if not intervention:
        return found
    asked = ProbeOptions.on(loaded.device.type, examples=intervention)
    return found.with_intervention(probe(loaded, asked, progress=progress))
