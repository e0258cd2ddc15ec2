"""Slots, requests and cutoffs in a budget: identities, minimality, and the sizes of other rooms."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridstate.errors import PlanMismatch, UsageError
from hybridstate.kernels.layout import PackedLayout
from hybridstate.plan.accounting import account, default_k_hi, packed_head_bytes
from hybridstate.plan.capacity import (
    CACHED_PER_REQUEST,
    RESERVATIONS,
    Arm,
    Capacity,
    State,
    capacity,
    parse_bytes,
    staging,
    unit_bytes,
    usable_slots,
)
from hybridstate.plan.placement import BALANCES, Balance, place
from hybridstate.plan.select import select
from hybridstate.plan.widths import padded_width, slot_width, smallest_cutoff
from hybridstate.quant.risk import default_k_hi as calibrated_k_hi
from tests.plan.geometry import SPECS
from tests.synthetic import FITS, synthetic_horizons

GIB = 2**30


def planned(
    model: str, *, tp: int = 8, balance: Balance = "storage", budget: int = GIB, requests: int = 32
) -> Capacity:
    horizons = synthetic_horizons(model)
    selections = [select(horizons, w) for w in FITS[model].retained]
    return capacity(
        SPECS[model],
        horizons,
        selections,
        tp=tp,
        balance=balance,
        budget=budget,
        requests=requests,
    )


@pytest.mark.parametrize(
    ("budget", "slots"), [(0, 0), (-5, 0), (99, 0), (100, 0), (199, 0), (200, 1), (1050, 9)]
)
def test_slot_zero_is_not_usable_and_small_pools_have_none(budget: int, slots: int) -> None:
    assert usable_slots(budget, 100) == slots


def test_states_are_those_of_the_placement_and_the_codec() -> None:
    found = planned("kimi_linear", balance="off")
    assert [s.name for s in found.states] == [
        "dense",
        *(f"W_max {w}" for w in (16, 64, 128, 512)),
        "int8-checkpoint",
        *(f"W_max {w} + int8" for w in (16, 64, 128, 512)),
        "live, packed",
    ]
    for state, placement in zip(found.checkpoints[:4], found.placements, strict=True):
        assert state.temporal_bytes == placement.slot_units * 128 * 4
        assert state.rank == placement.bottleneck
    for state, placement in zip(found.checkpoints[5:], found.placements, strict=True):
        assert state.temporal_bytes == placement.slot_units * (128 + 4)


def test_models_without_a_delta_rule_have_no_packed_live_state() -> None:
    spec = SPECS["qwen3_next"]
    spec = replace(spec, family=replace(spec.family, analysis_only=True))
    found = capacity(spec, [], [], tp=8, budget=GIB)
    assert found.packed is None
    assert found.lives == (found.dense,)
    assert {arm["live"] for arm in found.to_json()["arms"]} == {"dense"}


def test_units_of_a_head_carry_one_scale_per_key_channel() -> None:
    assert unit_bytes(SPECS["qwen3_next"], "fp32") == 128 * 128 * 4
    assert unit_bytes(SPECS["qwen3_next"], "int8-checkpoint") == 128 * (128 + 4)


@pytest.mark.parametrize("k_hi", [0, 16, 32, 128])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(128, 128), (96, 192), (64, 80)])
def test_packed_bytes_are_those_of_the_kernels_layout(
    key_dim: int, value_dim: int, k_hi: int
) -> None:
    k_hi = min(k_hi, key_dim)
    layout = PackedLayout(key_dim, value_dim, k_hi)
    assert packed_head_bytes(key_dim, value_dim, k_hi) == layout.head_bytes


@pytest.mark.parametrize("key_dim", [8, 16, 32, 64, 96, 128, 192, 256, 320])
def test_default_of_protected_channels_is_the_calibrations(key_dim: int) -> None:
    assert default_k_hi(key_dim) == calibrated_k_hi(key_dim)


def test_one_rank_has_the_bytes_of_the_accounting() -> None:
    for model in FITS:
        found = planned(model, tp=1, balance="off")
        for state, w_max in zip(found.checkpoints, FITS[model].retained, strict=False):
            expected = account(SPECS[model], select(synthetic_horizons(model), w_max))
            assert state.full_bytes == expected.ragged_bytes
            assert found.dense.full_bytes == expected.dense_bytes


@given(
    live=st.integers(1, 50),
    cached=st.integers(1, 50),
    extra=st.integers(0, 60),
    budget=st.integers(0, 5000),
    requests=st.integers(1, 20),
    number=st.integers(0, 2),
)
def test_native_compressed_and_staging_never_exceed_the_budget(
    live: int, cached: int, extra: int, budget: int, requests: int, number: int
) -> None:
    """The matched-memory identity, and one slot or request more would break it."""
    plan = RESERVATIONS[number]
    arm = Arm(State("l", None, "fp32", live, 0), State("c", 64, "fp32", cached, 0), extra)

    def bytes_of(requests: int, slots: int) -> int:
        return (requests * plan.held + 1) * live + (slots + 1) * cached + extra

    slots = arm.cached_slots(budget, requests, plan)
    assert slots == 0 or bytes_of(requests, slots) <= budget
    assert bytes_of(requests, slots + 1) > budget
    most = arm.requests(budget, plan)
    assert most == 0 or bytes_of(most, CACHED_PER_REQUEST * most) <= budget
    assert bytes_of(most + 1, CACHED_PER_REQUEST * (most + 1)) > budget


def test_one_pool_serves_running_requests_and_cached_prefixes() -> None:
    arm = Arm(State("l", None, "fp32", 10, 0), None, 0)
    overlap = RESERVATIONS[0]
    assert arm.requests(1010, overlap) == 100 // 5
    assert arm.cached_slots(1010, 20, overlap) == 100 - 60
    assert arm.cached_slots(1010, 50, overlap) == 0


def test_engines_reserve_five_four_or_three_and_hold_two_fewer() -> None:
    assert [(r.sized, r.held) for r in RESERVATIONS] == [(5, 3), (4, 2), (3, 1)]
    assert {r.sized - r.held for r in RESERVATIONS} == {CACHED_PER_REQUEST}


def test_staging_holds_a_packed_slot_and_dense_scratch_where_a_suffix_is_replayed() -> None:
    dense = State("dense", None, "fp32", 90, 10)
    assert staging(dense, State("W_max 64", 64, "fp32", 20, 10)) == 130
    assert staging(dense, State("int8-checkpoint", None, "int8-checkpoint", 25, 10)) == 35


@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("model", ["kimi_linear", "qwen3_next"])
def test_slot_width_is_that_of_the_placement(model: str, balance: Balance) -> None:
    spec, horizons = SPECS[model], synthetic_horizons(model)
    width = slot_width(spec, horizons, 8, balance)
    for w_max in (4, 16, 100, 512, 100_000):
        found = place(spec, select(horizons, w_max), tp=8, mode=balance)
        assert width(w_max) == found.slot_units


def test_padded_slot_is_as_wide_as_the_fullest_layer_everywhere() -> None:
    spec, horizons = SPECS["kimi_linear"], synthetic_horizons("kimi_linear")
    whole = account(spec, select(horizons, 16)).temporal_padded_bytes
    assert padded_width(spec, horizons, 1)(16) * 512 == whole
    assert padded_width(spec, horizons, 8)(16) * 512 * 8 > whole


@pytest.mark.parametrize("balance", ["off", "storage"])
def test_wanted_cutoff_is_the_smallest_that_fits(balance: Balance) -> None:
    spec, horizons = SPECS["kimi_linear"], synthetic_horizons("kimi_linear")
    budget, requests = GIB, 50
    found = planned("kimi_linear", balance=balance, budget=budget, requests=requests)
    width = slot_width(spec, horizons, 8, balance)
    for wanted in found.wanted:
        for cutoff, stored in ((wanted.fp32, "fp32"), (wanted.int8, "int8-checkpoint")):
            unit = unit_bytes(spec, stored)  # type: ignore[arg-type]

            def fits(w_max: int, unit: int = unit, plan: object = wanted.plan) -> bool:
                state = State("", w_max, "fp32", width(w_max) * unit, found.dense.conv_bytes)
                arm = Arm(found.dense, state, staging(found.dense, state))
                return arm.requests(budget, plan) >= requests  # type: ignore[arg-type]

            assert cutoff is not None
            assert fits(cutoff)
            assert cutoff == 4 or not fits(cutoff - 1)
    overlap, _, none = found.wanted
    assert (overlap.fp32 or 0) >= (overlap.int8 or 0) >= (none.int8 or 0)


def test_no_cutoff_helps_where_live_states_alone_do_not_fit() -> None:
    found = planned("kimi_linear", budget=GIB // 8, requests=50)
    assert [(w.dense, w.fp32, w.int8) for w in found.wanted] == [(False, None, None)] * 3
    assert all(
        arm.cached_slots(GIB // 8, 50, RESERVATIONS[0]) == 0 for arm in found.arms(found.dense)
    )


def test_capacity_grows_with_the_cutoff_and_with_int8() -> None:
    for model in FITS:
        found = planned(model)
        cutoffs = len(found.placements)
        slots = [s.slots(8 * GIB) for s in found.checkpoints]
        for part in (slots[:cutoffs], slots[cutoffs + 1 :]):
            assert all(a < b for a, b in pairwise(part))
        assert all(a < b for a, b in zip(slots[:cutoffs], slots[cutoffs + 1 :], strict=True))


def test_bisection_finds_the_edge_or_says_there_is_none() -> None:
    assert smallest_cutoff(lambda w: w >= 37) == 37
    assert smallest_cutoff(lambda w: True) == 4
    assert smallest_cutoff(lambda w: False) is None


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * GIB),
        ("8 gib", 8 * GIB),
        ("1.5GiB", 3 * GIB // 2),
        ("500MB", 500_000_000),
        ("64KiB", 65536),
        ("4096", 4096),
        ("10B", 10),
        ("2TiB", 2 * 1024 * GIB),
        (".5GiB", GIB // 2),
        ("1e3", 1000),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_sizes_are_read_in_binary_and_decimal_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    [
        *("", "GiB", "8 GiBs", "-1GiB", "0", "nan", "inf", "1e400", "8Gi", "1e30GiB"),
        *("1_000MiB", "\uff18GiB", "+8GiB", "8,5GiB", ".", "0.2", "1e-9GiB"),
    ],
)
def test_text_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="a size such as 8GiB"):
        parse_bytes(text)


def test_state_without_bytes_has_slots_and_does_not_stop_the_count() -> None:
    spec = SPECS["kimi_linear"]
    bare = replace(spec, layers=tuple(replace(layer, conv_width=1) for layer in spec.layers))
    horizons = [np.ones((32, 128)) for _ in spec.layers]
    found = capacity(bare, horizons, [select(horizons, 16)], tp=8, budget=GIB, requests=4)
    assert found.checkpoints[0].full_bytes == 0
    assert found.checkpoints[0].slots(GIB) == GIB - 1
    assert found.to_json()["states"][1]["ratio_full"] is None
    assert all(wanted.fp32 == 4 for wanted in found.wanted)


def test_budget_below_one_usable_dense_slot_is_warned_of() -> None:
    bare = planned("kimi_linear")
    (warning,) = replace(bare, budget=2 * bare.dense.full_bytes - 1).warnings
    assert f"{bare.dense.full_bytes:,} bytes" in warning
    assert not replace(bare, budget=2 * bare.dense.full_bytes).warnings
    assert not replace(bare, budget=None).warnings


def test_impossible_requests_are_refused() -> None:
    spec = SPECS["qwen3_next"]
    horizons = [np.ones(32) for _ in spec.layers]
    for budget, requests, mentions in (
        (0, None, "--budget must be positive"),
        (GIB, 0, "--concurrency must be at least 1"),
        (None, 4, "--concurrency needs the memory"),
    ):
        with pytest.raises(UsageError, match=mentions):
            capacity(spec, horizons, [], budget=budget, requests=requests)
    with pytest.raises(PlanMismatch, match="does not divide"):
        capacity(spec, horizons, [], tp=3)
