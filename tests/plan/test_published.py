"""The papers' capacities and maps, recomputed at full size from SYNTHETIC horizons.

`tests/synthetic.py` fits the arrays to published counts, so these tests do not confirm the papers:
they hold the product's arithmetic (placement, slots, statistics) against every printed result.
"""

from pathlib import Path

import numpy as np
import pytest

from hybridstate.plan.accounting import account
from hybridstate.plan.capacity import RESERVATIONS, Capacity, State, capacity, unit_bytes
from hybridstate.plan.placement import Balance
from hybridstate.plan.retention import RetentionMap, retention_map
from hybridstate.plan.select import Selection, select
from tests.plan.geometry import SPECS
from tests.synthetic import FITS, RANKS, synthetic_horizons

FIG4 = {
    "kimi_linear": {16: 2.64, 64: 7.06, 128: 14.72, 512: 28.24},
    "qwen3_next": {16: 1.10, 64: 1.32, 128: 1.60, 512: 2.49},
    "kimi_k3": {64: 1.61, 128: 2.01, 512: 3.48},
}


def selection(model: str, w_max: int) -> Selection:
    return select(synthetic_horizons(model), w_max)


def planned(model: str, balance: Balance) -> Capacity:
    """All published cutoffs of a model over eight ranks, in the budget of its fit."""
    selections = [selection(model, w) for w in FIG4[model]]
    return capacity(
        SPECS[model],
        synthetic_horizons(model),
        selections,
        tp=RANKS,
        balance=balance,
        budget=FITS[model].budget,
    )


def slot_ratio(found: Capacity, state: State) -> float:
    budget = found.budget
    assert budget is not None
    return state.slots(budget) / found.dense.slots(budget)


def fp32_states(found: Capacity) -> dict[int, State]:
    return {s.w_max: s for s in found.checkpoints if s.stored == "fp32" and s.w_max is not None}


@pytest.mark.parametrize("model", list(FIG4))
def test_every_capacity_of_figure_4_is_a_ratio_of_usable_slots(model: str) -> None:
    found = planned(model, "storage")
    ratios = {w: round(slot_ratio(found, s), 2) for w, s in fp32_states(found).items()}
    assert ratios == FIG4[model]


def test_without_slot_zero_two_capacities_of_figure_4_cannot_be_met() -> None:
    """No number of units per rank gives 28.24 or 2.49 as a ratio of bytes."""
    for model, ratio in (("kimi_linear", 28.24), ("qwen3_next", 2.49)):
        spec, dense = SPECS[model], planned(model, "storage").dense
        unit = unit_bytes(spec, "fp32")
        possible = {
            round(dense.full_bytes / (n * unit + dense.conv_bytes), 2) for n in range(1, 200)
        }
        assert ratio not in possible


def test_the_abstracts_largest_capacity_is_kimi_linear_at_16_without_balancing() -> None:
    found = planned("kimi_linear", "off")
    state = fp32_states(found)[16]
    assert round(slot_ratio(found, state), 2) == 2.22
    assert round(found.dense.full_bytes / state.full_bytes, 2) == 2.22
    assert found.placements[0].slot_units == 4420
    mean = sum(found.placements[0].compute_units) / RANKS
    assert found.placements[0].slot_units / mean == pytest.approx(1.20, abs=0.005)


def test_kimi_k3_without_balancing_lies_between_the_abstracts_bounds() -> None:
    found = planned("kimi_k3", "off")
    assert 1.32 < slot_ratio(found, fp32_states(found)[64]) < 1.61


def test_int8_checkpoints_and_their_composition_with_dasc() -> None:
    """8.11 is a ratio of bytes per rank; 3.88 leaves the convolution state out, 3.53 has it."""
    found = planned("kimi_linear", "storage")
    by_name = {state.name: state for state in found.checkpoints}
    dense, int8 = found.dense, by_name["int8-checkpoint"]
    composed = by_name["W_max 16 + int8"]
    assert dense.full_bytes == 5_427_200
    assert round(dense.temporal_bytes / int8.temporal_bytes, 3) == 3.879
    assert round(dense.full_bytes / int8.full_bytes, 3) == 3.533
    assert composed.temporal_bytes == 3673 * 132
    assert round(dense.full_bytes / composed.full_bytes, 2) == 8.11
    assert round(dense.full_bytes / by_name["W_max 16"].full_bytes, 3) == 2.628


def kept(model: str, w_max: int) -> RetentionMap:
    return retention_map(SPECS[model], selection(model, w_max))


def test_pairs_and_layer_means_of_figure_6() -> None:
    found = kept("kimi_linear", 16)
    assert found.pairs == {"mixed": 389, "none": 215, "all": 36, "total": 640}
    means = found.layer_means
    assert (round(means.min(), 3), round(means.max(), 3)) == (0.179, 0.558)
    assert round(float(np.median(means)), 3) == 0.360


def test_layer_of_figure_7_is_nearest_the_median() -> None:
    found = kept("kimi_linear", 16)
    nearest = found.nearest_median
    assert found.blocks[nearest] == 21  # counted from 0; a KDA layer from 1 too
    assert found.layer_means[nearest] == 0.375


def test_pairs_and_layer_means_of_figure_8() -> None:
    found = kept("kimi_k3", 64)
    assert found.pairs == {"mixed": 6512, "none": 108, "all": 4, "total": 6624}
    means = found.layer_means
    assert (round(means.min(), 3), round(means.max(), 3)) == (0.267, 0.741)


def test_padded_layout_pays_for_the_fullest_layer() -> None:
    found = account(SPECS["kimi_linear"], selection("kimi_linear", 16))
    assert found.ratio_temporal_padded == pytest.approx(1.792, abs=5e-4)
    assert found.ratio_temporal_ragged == pytest.approx(2.788, abs=5e-4)
    assert found.layout_gain == pytest.approx(1.556, abs=5e-4)


def test_eighty_gigabytes_are_five_slots_for_each_of_256_requests() -> None:
    spec = SPECS["qwen36_35b"]
    horizons = [np.ones(32) for _ in spec.layers]
    found = capacity(spec, horizons, [], budget=1)
    overlap = RESERVATIONS[0]
    assert overlap.sized == 5
    assert 256 * overlap.sized * found.dense.temporal_bytes == 80_530_636_800 == 75 * 2**30


@pytest.mark.parametrize(
    ("model", "temporal", "conv", "rank"),
    [
        ("kimi_linear", 41_943_040, 1_474_560, 5_427_200),
        ("qwen3_next", 75_497_472, 1_769_472, 9_658_368),
        ("qwen36_35b", 62_914_560, 1_474_560, 8_048_640),
        ("kimi_k3", 434_110_464, 15_261_696, 56_171_520),
    ],
)
def test_bytes_of_one_checkpoint(model: str, temporal: int, conv: int, rank: int) -> None:
    spec = SPECS[model]
    whole, share = (capacity(spec, [], [], tp=tp).dense for tp in (1, RANKS))
    assert (whole.temporal_bytes, whole.conv_bytes) == (temporal, conv)
    assert share.full_bytes == rank == (temporal + conv) // RANKS


def test_packed_live_state_of_figure_1_of_the_other_paper() -> None:
    """9.875 bits a value; a third of the bytes with the convolution state."""
    found = capacity(SPECS["kimi_linear"], [], [], tp=RANKS)
    values = found.dense.temporal_bytes // 4
    assert found.k_hi == 16
    assert found.packed is not None
    assert 8 * found.packed.temporal_bytes / values == 9.875
    assert found.dense.full_bytes / found.packed.full_bytes == pytest.approx(3.011, abs=5e-4)


@pytest.mark.parametrize("model", list(FIG4))
def test_synthetic_horizons_are_finite_positive_and_the_same_each_time(model: str) -> None:
    horizons = synthetic_horizons(model)
    assert all((np.isfinite(h) & (h > 0)).all() for h in horizons)
    synthetic_horizons.cache_clear()
    again = synthetic_horizons(model)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(horizons, again, strict=True))
    for w_max, units in FITS[model].retained.items():
        assert sum(int((h > w_max).sum()) for h in horizons) == units


def test_table_of_the_planning_page_is_what_comes_out() -> None:
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    for model, capacities in FIG4.items():
        balanced, off = planned(model, "storage"), planned(model, "off")
        dense = balanced.dense
        int8 = {s.w_max: s for s in balanced.checkpoints if s.stored == "int8-checkpoint"}
        for w_max, state in fp32_states(balanced).items():
            cells = (
                model,
                str(w_max),
                f"{capacities[w_max]:.2f}",
                f"{slot_ratio(balanced, state):.2f}",
                f"{dense.full_bytes / state.full_bytes:.3f}",
                f"{slot_ratio(off, fp32_states(off)[w_max]):.2f}",
                f"{dense.full_bytes / int8[w_max].full_bytes:.2f}",
                f"{state.full_bytes:,}",
            )
            assert f"| {' | '.join(cells)} |" in page
