"""The arms of `bench restore`: a selection per cutoff, its bytes, its random counterparts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridstate.defaults import RANDOM_MASK_SEEDS
from hybridstate.errors import PlanMismatch
from hybridstate.horizons.static import static_horizons
from hybridstate.plan.accounting import Accounting, account
from hybridstate.plan.compare import verify_against
from hybridstate.plan.select import Selection, random_selection, select
from hybridstate.plan.store import Plan
from hybridstate.quality.arms import Arm
from hybridstate.runtime.restore import Units
from hybridstate.trajectories.model import LoadedModel


def selections_at(
    loaded: LoadedModel, w_max: Sequence[int], gate_input: float | None = None
) -> list[Selection]:
    """Selections by static horizon at these cutoffs, by default with the gate input that `analyze` takes."""
    spec = loaded.spec
    horizons = [
        static_horizons(
            loaded.checkpoint.decay(layer),
            gate=spec.gate,
            lower_bound=spec.lower_bound,
            gate_input=spec.default_gate_input if gate_input is None else gate_input,
        )
        for layer in spec.layers
    ]
    return [select(horizons, cutoff) for cutoff in w_max]


def planned_selection(plan: Plan, loaded: LoadedModel) -> Selection:
    """The selection of a plan, in the order of the loaded checkpoint.

    Raises:
        PlanMismatch: the plan is for another checkpoint, or selects nothing.
    """
    order, chosen = verify_against(plan, loaded.checkpoint), plan.document.selection
    if chosen is None:
        raise PlanMismatch(
            "the plan selects no units (it was exported without --w-max)",
            hint="export it with --w-max N, or leave --plan out and give --w-max here",
        )

    def arrays(name: str) -> list[NDArray[Any]]:
        found = [plan.unit_array(layer.index, name, order) for layer in loaded.spec.layers]
        return [array for array in found if array is not None]

    return Selection(
        chosen.w_max,
        tuple(array.astype(np.bool_) for array in arrays("retained")),
        tuple(array.astype(np.int32) for array in arrays("replay_window")),
        chosen.w_replay,
        chosen.near_cutoff,
        chosen.seed,
    )


@dataclass(frozen=True, slots=True)
class Cutoff:
    """A selection with its bytes and its random counterparts."""

    selection: Selection
    accounting: Accounting
    random: tuple[Selection, ...]


def make_arms(
    loaded: LoadedModel, selections: Sequence[Selection], seeds: int
) -> tuple[list[Arm], list[Cutoff]]:
    """Dense, recompute, then NR, WR and random masks of each selection."""
    spec, device = loaded.spec, loaded.device
    cutoffs = [
        Cutoff(
            selection,
            account(spec, selection),
            tuple(random_selection(selection, seed) for seed in RANDOM_MASK_SEEDS[:seeds]),
        )
        for selection in selections
    ]
    dense_bytes = cutoffs[0].accounting.dense_bytes
    arms = [
        Arm("dense", "dense", Units.every(spec, device), dense_bytes),
        Arm("recompute", "recompute", None, 0),
    ]
    for cutoff in cutoffs:
        selection, w_max = cutoff.selection, cutoff.selection.w_max
        units = Units.of(selection.retained, device)
        size = cutoff.accounting.ragged_bytes
        arms.append(Arm(f"nr-{w_max}", "nr", units, size, w_max))
        arms.append(Arm(f"wr-{w_max}", "wr", units, size, w_max, selection.w_replay))
        arms += [
            Arm(
                f"random-{w_max}-{seed}",
                "nr",
                Units.of(random.retained, device),
                size,
                w_max,
                seed=seed,
            )
            for seed, random in zip(RANDOM_MASK_SEEDS, cutoff.random, strict=False)
        ]
    return arms, cutoffs
