"""`analyze`, `inspect` and `analyze --validate`: what the weights say, and what the gates did on text."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hybridstate.defaults import EPSILON, W_MAX

if TYPE_CHECKING:
    from hybridstate.checkpoint.inspection import Inspection
    from hybridstate.horizons.observed import HorizonValidation
    from hybridstate.plan.analysis import Analysis
    from hybridstate.plan.placement import Balance

    Progress = Callable[[str, int, int], None]


def analyze(
    model: str | Path,
    *,
    w_max: Sequence[int] = W_MAX,
    gate_input: float | None = None,
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
    a_s = spec.default_gate_input if gate_input is None else gate_input
    a_s_source = spec.default_gate_input_source if gate_input is None else "given"
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
    prefixes: int = 8,
    tokens: int = 1024,
    w_max: Sequence[int] = W_MAX,
    gate_input: float | None = None,
    epsilon: float = EPSILON,
    lower_bound: float | None = None,
    device: str = "cpu",
    progress: "Progress | None" = None,
) -> "HorizonValidation":
    """Run the model on held-out prose and compare static horizons with what its gates did.

    Args:
        model: folder or embedded name.
        prefixes, tokens: how many stretches of the held-out book, and how long.
        w_max: cutoffs at which the decisions are compared.
        gate_input, epsilon, lower_bound: see `analyze`.
        device: `auto`, `cpu` or `cuda`.
        progress: called with (stage, done, total).

    Raises:
        SourceError, UnsupportedModel, NumericError, MissingRequirement: see `hybridstate.errors`.
    """
    from hybridstate.checkpoint import require_weights
    from hybridstate.horizons.observed import observed_horizons, state_magnitude, validate
    from hybridstate.trajectories import prompts
    from hybridstate.trajectories.model import load_model
    from hybridstate.trajectories.record import observe_prefixes

    require_weights(model)
    static = analyze(
        model, w_max=w_max, gate_input=gate_input, epsilon=epsilon, lower_bound=lower_bound
    )
    loaded = load_model(model, device=device, lower_bound=lower_bound)
    text = prompts.prefixes(loaded.encode, prompts.heldout_text(), count=prefixes, tokens=tokens)
    seen = observe_prefixes(loaded, text, progress=progress)
    return validate(
        static.horizons,
        [observed_horizons(mean, epsilon) for mean in seen.mean_log_decay],
        [state_magnitude(states, loaded.spec.unit) for states in seen.states],
        indices=[layer.index for layer in loaded.spec.layers],
        w_max=w_max,
        tokens=tokens,
        source="Bleak House, held out",
        gate_input=static.gate_input,
    )
