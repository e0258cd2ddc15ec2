"""Placement over ranks: the paper's procedure word for word, its invariants, and its refusals."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridstate.checkpoint import open_checkpoint
from hybridstate.checkpoint.header import TensorEntry
from hybridstate.errors import PlanMismatch, UsageError
from hybridstate.families import ModelSpec
from hybridstate.plan.placement import (
    BALANCES,
    Balance,
    Placement,
    check_permutable,
    check_tp,
    packed_order,
    permutation_refusal,
    permute_bundles,
    place,
)
from hybridstate.plan.select import Selection, select
from tests.plan.geometry import SPECS
from tests.tiny import write_checkpoint

Loads = list[int]


def written_out(costs: list[list[int]], tp: int) -> tuple[list[list[int]], int]:
    """DASC figure 9 (a) step by step, without any shortcut."""
    layers, bundles = len(costs), len(costs[0])
    quota = bundles // tp
    loads = [0] * tp
    owner = [[-1] * bundles for _ in range(layers)]
    for l in range(layers):
        used = [0] * tp
        for b in sorted(range(bundles), key=lambda b: (-costs[l][b], b)):
            c = costs[l][b]
            key = min((loads[r] + c, loads[r], used[r], r) for r in range(tp) if used[r] < quota)
            owner[l][b] = key[3]
            used[key[3]] += 1
            loads[key[3]] += c
    swaps = 0
    while True:
        best, found = _score(loads), None
        for l in range(layers):
            for b1 in range(bundles):
                for b2 in range(b1 + 1, bundles):
                    r1, r2 = owner[l][b1], owner[l][b2]
                    if r1 == r2:
                        continue
                    tried = list(loads)
                    tried[r1] += costs[l][b2] - costs[l][b1]
                    tried[r2] += costs[l][b1] - costs[l][b2]
                    if _score(tried) < best:
                        best, found = _score(tried), (l, b1, b2, tried)
        if found is None:
            return owner, swaps
        l, b1, b2, loads = found
        owner[l][b1], owner[l][b2] = owner[l][b2], owner[l][b1]
        swaps += 1


def _score(loads: Loads) -> tuple[int, int]:
    return max(loads), sum(load * load for load in loads)


@given(
    layers=st.integers(1, 4),
    quota=st.integers(1, 3),
    tp=st.integers(1, 4),
    top=st.integers(1, 9),
    seed=st.integers(0, 2**32),
)
def test_permutation_is_the_papers_swap_by_swap(
    layers: int, quota: int, tp: int, top: int, seed: int
) -> None:
    rng = np.random.Generator(np.random.PCG64(seed))
    costs = rng.integers(0, top + 1, (layers, quota * tp))
    owner, swaps = permute_bundles(costs, tp)
    assert (owner.tolist(), swaps) == written_out(costs.tolist(), tp)
    for row in owner:
        assert np.bincount(row, minlength=tp).tolist() == [quota] * tp


def random_selection(spec: ModelSpec, seed: int, w_max: int = 64) -> Selection:
    """Horizons that differ between heads and, for KDA, within them."""
    rng = np.random.Generator(np.random.PCG64(seed))
    horizons = []
    for layer in spec.layers:
        log = 1.9 + rng.normal(0, 0.3) + rng.normal(0, 0.6, (layer.value_heads, 1))
        if spec.unit == "channel":
            log = log + rng.normal(0, 0.7, (layer.value_heads, layer.key_dim))
        horizons.append(10 ** (log if spec.unit == "channel" else log[:, 0]))
    return select(horizons, w_max)


def stored_where(spec: ModelSpec, selection: Selection, found: Placement) -> list[tuple[int, int]]:
    """Storage rank and slot of every unit, from DASC figure 9 (b) with lists alone."""
    local: list[list[int]] = [[] for _ in range(found.tp)]  # packed numbers by computing rank
    number = 0
    for layer, mask, row in zip(spec.layers, selection.retained, found.head_owner, strict=True):
        owner = [int(r) for r in row]
        per_head = mask.reshape(layer.value_heads, -1).sum(axis=1)
        for head in packed_order(layer.key_heads, layer.value_heads, owner):
            for _ in range(int(per_head[head])):
                local[owner[head // layer.bundle]].append(number)
                number += 1
    q, m = divmod(number, found.tp)
    ranks = sorted(range(found.tp), key=lambda r: (-len(local[r]), r))
    target = {r: q + (place < m) for place, r in enumerate(ranks)}
    places = [(-1, -1)] * number
    excess = []
    for r in range(found.tp):
        for slot, unit in enumerate(local[r]):
            if slot < target[r]:
                places[unit] = (r, slot)
            else:
                excess.append(unit)
    free = [(r, s) for r in range(found.tp) for s in range(len(local[r]), target[r])]
    for unit, spot in zip(excess, free, strict=True):
        places[unit] = spot
    return places


@pytest.mark.parametrize("model", ["kimi_linear", "qwen3_next"])
@pytest.mark.parametrize("mode", BALANCES[1:])
@pytest.mark.parametrize("tp", [1, 2, 8, 16])
def test_storage_map_is_the_papers_unit_by_unit(model: str, mode: Balance, tp: int) -> None:
    spec = SPECS[model]
    selection = random_selection(spec, seed=tp)
    found = place(spec, selection, tp=tp, mode=mode)
    places = list(zip(found.storage_owner.tolist(), found.storage_slot.tolist(), strict=True))
    assert places == stored_where(spec, selection, found)
    assert len(set(places)) == sum(selection.counts)
    assert sum(found.compute_units) == sum(found.stored_units) == sum(selection.counts)
    assert found.slot_units == -(-sum(selection.counts) // tp)
    moved = sum(max(0, n - t) for n, t in zip(found.compute_units, found.stored_units, strict=True))
    assert found.remote_units == moved
    balance = np.array(found.compute_units) - found.transfers.sum(1) + found.transfers.sum(0)
    assert tuple(balance.tolist()) == found.stored_units


def test_off_stores_what_it_computes_in_contiguous_blocks() -> None:
    spec = SPECS["qwen3_next"]
    selection = random_selection(spec, seed=3)
    found = place(spec, selection, tp=8, mode="off")
    assert found.head_owner[0].tolist() == [b // 2 for b in range(16)]
    counts = [
        sum(int(mask[4 * r : 4 * r + 4].sum()) for mask in selection.retained) for r in range(8)
    ]
    assert found.compute_units == found.stored_units == found.contiguous_units == tuple(counts)
    assert found.slot_units == max(counts) == counts[found.bottleneck]
    assert found.remote_units == found.storage_owner.size == 0


def test_permutation_leaves_less_to_send_than_contiguous_blocks() -> None:
    spec = SPECS["kimi_linear"]
    selection = random_selection(spec, seed=1)
    storage, hybrid = (place(spec, selection, tp=8, mode=m) for m in BALANCES[1:])
    assert hybrid.remote_units < storage.remote_units / 10
    assert max(hybrid.compute_units) - min(hybrid.compute_units) <= 1
    assert hybrid.slot_units == storage.slot_units < max(hybrid.contiguous_units)


def test_equal_costs_keep_ascending_order() -> None:
    owner, swaps = permute_bundles(np.full((2, 8), 5), 4)
    assert swaps == 0
    assert owner.tolist() == [[0, 1, 2, 3] * 2] * 2


def test_nothing_retained_is_placed_too() -> None:
    spec = SPECS["kimi_linear"]
    empty = select([np.zeros((32, 128)) for _ in spec.layers], 16)
    for mode in BALANCES:
        found = place(spec, empty, tp=8, mode=mode)
        assert (found.slot_units, found.remote_units, found.storage_owner.size) == (0, 0, 0)


def test_two_runs_agree_to_the_byte() -> None:
    spec = SPECS["kimi_linear"]
    first, second = (place(spec, random_selection(spec, 9), tp=4, mode="hybrid") for _ in range(2))
    for name in ("head_owner", "storage_owner", "storage_slot"):
        assert getattr(first, name).tobytes() == getattr(second, name).tobytes()


def test_kimi_k3_over_eight_ranks_takes_seconds() -> None:
    spec = SPECS["kimi_k3"]
    selection = random_selection(spec, seed=0)
    start = time.process_time()
    found = place(spec, selection, tp=8, mode="hybrid")
    assert time.process_time() - start < 10
    assert found.storage_owner.shape == (sum(selection.counts),)


@pytest.mark.parametrize(
    ("model", "tp", "possible"), [("qwen3_next", 32, 16), ("kimi_linear", 3, 32)]
)
def test_ranks_that_do_not_divide_the_bundles_are_refused(
    model: str, tp: int, possible: int
) -> None:
    with pytest.raises(PlanMismatch, match=f"--tp {tp} does not divide") as caught:
        check_tp(SPECS[model], tp)
    assert caught.value.exit_code == 6
    assert caught.value.context["expected"][-1] == possible
    check_tp(SPECS[model], possible)


def test_no_rank_and_unknown_mode_are_refused() -> None:
    spec = SPECS["qwen3_next"]
    with pytest.raises(UsageError, match="at least 1"):
        check_tp(spec, 0)
    with pytest.raises(UsageError, match="off, storage, hybrid"):
        place(spec, random_selection(spec, 0), tp=1, mode="best")  # type: ignore[arg-type]


def test_heads_of_quantised_linear_weights_do_not_move(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("kimi_linear"))
    assert permutation_refusal(checkpoint) is None
    check_permutable(checkpoint)
    name = next(n for n in checkpoint.entries if n.endswith("q_proj.weight"))
    entries = dict(checkpoint.entries)
    entries[name] = _stored_as(entries[name], "U8")
    checkpoint.entries = entries
    with pytest.raises(PlanMismatch, match=f"{name} is stored as U8") as caught:
        check_permutable(checkpoint)
    assert caught.value.exit_code == 6
    assert "--balance storage" in str(caught.value.hint)


def test_quantised_experts_do_not_hold_heads_back(tiny_kda: Path) -> None:
    """Kimi-K3: MXFP4 experts beside BF16 linear-attention weights."""
    checkpoint = open_checkpoint(tiny_kda)
    some = next(iter(checkpoint.entries.values()))
    expert = "model.layers.0.block_sparse_moe.experts.0.w1.weight_packed"
    checkpoint.entries = {**checkpoint.entries, expert: _stored_as(some, "U8")}
    assert permutation_refusal(checkpoint) is None


def test_block_scaled_fp8_moves_only_with_whole_blocks(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "model", "kimi_linear"))
    name = next(n for n in checkpoint.entries if n.endswith("q_proj.weight"))
    entry = _stored_as(checkpoint.entries[name], "F8_E4M3")
    scale = _stored_as(entry, "F32", tuple(-(-size // 128) for size in entry.shape))
    checkpoint.entries = {**checkpoint.entries, name: entry, f"{name}_scale_inv": scale}
    assert "stored as F8_E4M3" in str(permutation_refusal(checkpoint))  # heads of 32, blocks of 128
    spec = checkpoint.spec
    wide = tuple(replace(layer, key_dim=128, value_dim=128) for layer in spec.layers)
    checkpoint.spec = replace(spec, layers=wide)
    assert permutation_refusal(checkpoint) is None


def _stored_as(entry: TensorEntry, dtype: str, shape: tuple[int, ...] | None = None) -> TensorEntry:
    return replace(entry, dtype=dtype, shape=entry.shape if shape is None else shape)
