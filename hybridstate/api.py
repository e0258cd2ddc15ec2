"""The verbs, each as the list of its stages. No mathematics, no printing: read this file first."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hybridstate.defaults import EPSILON, W_MAX

if TYPE_CHECKING:
    from hybridstate.plan.analysis import Analysis


def analyze(
    model: str | Path,
    *,
    w_max: Sequence[int] = W_MAX,
    gate_input: float | None = None,
    epsilon: float = EPSILON,
    lower_bound: float | None = None,
) -> "Analysis":
    """Retention horizons from the weights alone, and what each cutoff keeps and saves.

    Reads config, headers and the decay tensors; imports neither torch nor transformers.

    Args:
        model: folder or embedded name.
        w_max: cutoffs in tokens.
        gate_input: representative gate input a_s, None for the published value of the gate.
        epsilon: share still present at the horizon.
        lower_bound: l of the safe gate, for configs that do not state it.

    Raises:
        SourceError, UnsupportedModel, NumericError, UsageError: see `hybridstate.errors`.
    """
    from hybridstate.checkpoint import open_checkpoint
    from hybridstate.horizons.static import static_horizons
    from hybridstate.plan.analysis import Analysis, cutoffs_at, near_cutoff_warnings, source_of

    checkpoint = open_checkpoint(model, lower_bound=lower_bound)
    spec = checkpoint.spec
    a_s = spec.default_gate_input if gate_input is None else gate_input
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
    return Analysis(
        source=source_of(checkpoint),
        spec=spec,
        gate_input=a_s,
        gate_input_source="published" if gate_input is None else "given",
        epsilon=epsilon,
        horizons=horizons,
        cutoffs=cutoffs,
        warnings=checkpoint.warnings + near_cutoff_warnings(cutoffs),
    )
