"""Heads and packed units over tensor-parallel ranks (DASC 4.3 and B.1): integers, deterministic.

Heads of one layer move in bundles: the B value heads that share a key head (B = 1 for KDA). Every
rank computes the same number of bundles of every layer. Three modes:

    off       bundles in contiguous blocks, each rank stores what it computes
    storage   the same compute layout; packed units move until every rank stores q or q + 1
    hybrid    bundles permuted by a greedy pass and a swap search, then storage as above

Packed units are numbered by linear layer, then by rank and the rank's heads in ascending order, then
by key channel. A *unit* is one value head (GDN) or one key channel of a head (KDA).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from hybridstate.checkpoint import Checkpoint
from hybridstate.errors import PlanMismatch, UsageError
from hybridstate.families import ModelSpec
from hybridstate.plan.select import Selection

Integers = NDArray[np.int64]
Balance = Literal["off", "storage", "hybrid"]

BALANCES: Final[tuple[Balance, ...]] = get_args(Balance)
_FLOATING: Final = ("F64", "F32", "F16", "BF16")
_FP8: Final = ("F8_E4M3", "F8_E5M2")
_FP8_BLOCK: Final = 128


@dataclass(frozen=True, eq=False)
class Placement:
    """Who computes which bundle and who stores which packed unit.

    Attributes:
        mode: `off`, `storage` or `hybrid`.
        tp: ranks, P.
        head_owner: rank that computes each bundle, `[L, bundles]`.
        contiguous_units: retained units per rank before any permutation.
        compute_units: retained units per rank, n_r, after the permutation if there was one.
        stored_units: packed units per rank; equal to `compute_units` with `off`.
        storage_owner, storage_slot: rank and place of every packed unit; empty with `off`.
        transfers: units that rank r computes and rank s stores, `[P, P]` with a zero diagonal.
        swaps: swaps that the search applied.
    """

    mode: Balance
    tp: int
    head_owner: NDArray[np.int16]
    contiguous_units: tuple[int, ...]
    compute_units: tuple[int, ...]
    stored_units: tuple[int, ...]
    storage_owner: NDArray[np.int32]
    storage_slot: NDArray[np.int32]
    transfers: Integers
    swaps: int

    @cached_property
    def slot_units(self) -> int:
        """Units that a checkpoint slot has room for on every rank: the largest rank's."""
        return max(self.stored_units)

    @cached_property
    def bottleneck(self) -> int:
        """The rank that stores most, the first of them."""
        return self.stored_units.index(self.slot_units)

    @cached_property
    def remote_units(self) -> int:
        """M_remote: units that cross ranks at every store and load."""
        return int(self.transfers.sum())

    def to_json(self) -> dict[str, Any]:
        """Counts per rank and the transfer splits; the maps themselves are arrays of a plan."""
        return {
            "mode": self.mode,
            "tp": self.tp,
            "contiguous_units": list(self.contiguous_units),
            "rank_units": list(self.compute_units),
            "stored_units": list(self.stored_units),
            "slot_units": self.slot_units,
            "bottleneck_rank": self.bottleneck,
            "remote_units": self.remote_units,
            "transfers": self.transfers.tolist(),
            "swaps": self.swaps,
        }


def place(spec: ModelSpec, selection: Selection, *, tp: int, mode: Balance) -> Placement:
    """Assign bundles and packed units of a selection to ranks.

    Raises:
        UsageError: no such mode, or fewer than one rank.
        PlanMismatch: the ranks do not divide the bundles, or units differ in size between layers.
    """
    check_tp(spec, tp)
    if mode not in BALANCES:
        raise UsageError(f"--balance takes {', '.join(BALANCES)}, found {mode!r}", found=mode)
    if len({spec.unit_values(layer) for layer in spec.layers}) > 1:
        raise PlanMismatch("units of different size in different layers cannot share one slot")
    costs = bundle_costs(spec, selection)
    contiguous = contiguous_owner(costs.shape, tp)
    before = rank_loads(costs, contiguous, tp)
    owner, swaps = permute_bundles(costs, tp) if mode == "hybrid" else (contiguous, 0)
    loads = rank_loads(costs, owner, tp)
    if mode == "off":
        nothing = np.empty(0, np.int32)
        stored, storage_owner, slot = loads, nothing, nothing
        transfers = np.zeros((tp, tp), np.int64)
    else:
        source = packed_sources(costs, owner)
        stored = storage_targets(loads)
        storage_owner, slot, transfers = balance_storage(source, loads, stored)
    return Placement(
        mode=mode,
        tp=tp,
        head_owner=owner.astype(np.int16),
        contiguous_units=tuple(before.tolist()),
        compute_units=tuple(loads.tolist()),
        stored_units=tuple(stored.tolist()),
        storage_owner=storage_owner,
        storage_slot=slot,
        transfers=transfers,
        swaps=swaps,
    )


def check_tp(spec: ModelSpec, tp: int) -> None:
    """Refuse ranks that cannot share the heads evenly.

    Raises:
        UsageError: fewer than one rank.
        PlanMismatch: the ranks do not divide the bundles of a layer.
    """
    if tp < 1:
        raise UsageError(f"--tp must be at least 1, found {tp}", found=tp, expected=1)
    for layer in spec.layers:
        if layer.key_heads % tp:
            possible = [n for n in range(1, layer.key_heads + 1) if layer.key_heads % n == 0]
            unit = "heads" if layer.bundle == 1 else f"bundles of {layer.bundle} value heads"
            raise PlanMismatch(
                f"--tp {tp} does not divide the {layer.key_heads} {unit} of block {layer.index}",
                hint=f"take one of {', '.join(map(str, possible))}",
                layer=layer.index,
                found=tp,
                expected=possible,
            )


def permutation_refusal(checkpoint: Checkpoint) -> str | None:
    """Why `hybrid` cannot move the heads of this checkpoint, or None if it can.

    A head moves with all its rows and columns. That is exact for floating-point tensors, and for
    FP8 in blocks of 128 when a head covers whole blocks; packed 4-bit formats and scales of other
    granularity are left where they are. Only linear-attention tensors count, not the experts.
    """
    layers = {layer.prefix: layer for layer in checkpoint.spec.layers}
    prefixes = tuple(layers)
    suspects = (
        name
        for name, entry in checkpoint.entries.items()
        if entry.dtype not in _FLOATING and name.startswith(prefixes)
    )
    for name in sorted(suspects):
        layer = next(layer for prefix, layer in layers.items() if name.startswith(prefix))
        dtype = checkpoint.entries[name].dtype
        aligned = layer.key_dim % _FP8_BLOCK == 0 and layer.value_dim % _FP8_BLOCK == 0
        if dtype in _FP8 and aligned and _block_scaled(checkpoint, name):
            continue
        return f"{name} is stored as {dtype}, and moving heads needs unquantised linear weights"
    return None


def check_permutable(checkpoint: Checkpoint) -> None:
    """Raise `PlanMismatch` with the reason where `hybrid` is impossible."""
    reason = permutation_refusal(checkpoint)
    if reason is not None:
        raise PlanMismatch(
            f"--balance hybrid: {reason}",
            hint="take --balance storage: as many slots, with more units sent between ranks",
        )


def _block_scaled(checkpoint: Checkpoint, name: str) -> bool:
    """Whether an FP8 matrix has one scale per 128 x 128 block."""
    shape = checkpoint.entries[name].shape
    scale = checkpoint.entries.get(f"{name}_scale_inv") or checkpoint.entries.get(f"{name}_scale")
    blocks = tuple(-(-size // _FP8_BLOCK) for size in shape)
    return len(shape) == 2 and scale is not None and scale.shape == blocks


def bundle_costs(spec: ModelSpec, selection: Selection) -> Integers:
    """Retained units of each bundle, `C[l, b]`, `[L, bundles]`.

    Raises:
        PlanMismatch: layers with different numbers of bundles.
    """
    bundles = {layer.key_heads for layer in spec.layers}
    if len(bundles) > 1:
        raise PlanMismatch(f"layers with {sorted(bundles)} key heads cannot share one head map")
    rows = [
        mask.reshape(layer.key_heads, -1).sum(axis=1, dtype=np.int64)
        for layer, mask in zip(spec.layers, selection.retained, strict=True)
    ]
    return np.stack(rows)


def contiguous_owner(shape: tuple[int, ...], tp: int) -> Integers:
    """Bundles in contiguous blocks, as engines shard them: `[L, bundles]`."""
    layers, bundles = shape
    return np.tile(np.arange(bundles) // (bundles // tp), (layers, 1))


def rank_loads(costs: Integers, owner: Integers, tp: int) -> Integers:
    """Retained units per rank, `[P]`."""
    loads = np.zeros(tp, np.int64)
    np.add.at(loads, owner, costs)
    return loads


def permute_bundles(costs: Integers, tp: int) -> tuple[Integers, int]:
    """Owners of the bundles after the greedy pass and the swap search, and the number of swaps.

    The result is locally optimal: no swap of two bundles of one layer lowers
    (largest load, sum of squared loads). Ties fall to the first candidate in scan order.
    """
    owner = _greedy(costs, tp)
    return owner, _swap(costs, owner, tp)


def _greedy(costs: Integers, tp: int) -> Integers:
    """Largest bundle of a layer first, to the rank with the least load that has room for it.

    Among ranks below their quota the smallest (L_r + C, L_r, u_r, r) wins; C is the same for all of
    them, so the key is (L_r, u_r, r).
    """
    layers, bundles = costs.shape
    quota = bundles // tp
    owner = np.empty((layers, bundles), np.int64)
    loads = [0] * tp
    for layer in range(layers):
        used = [0] * tp
        row = costs[layer].tolist()
        for bundle in sorted(range(bundles), key=lambda b: (-row[b], b)):
            rank = min((loads[r], used[r], r) for r in range(tp) if used[r] < quota)[2]
            owner[layer, bundle] = rank
            used[rank] += 1
            loads[rank] += row[bundle]
    return owner


def _swap(costs: Integers, owner: Integers, tp: int) -> int:
    """Apply the best strictly improving swap until there is none; changes `owner`."""
    if tp == 1:
        return 0
    first, second = np.triu_indices(costs.shape[1], 1)
    gain = costs[:, first] - costs[:, second]
    loads = rank_loads(costs, owner, tp)
    swaps = 0
    while True:
        found = _best_swap(gain, owner[:, first], owner[:, second], loads)
        if found is None:
            return swaps
        layer, pair = found
        one, other = int(first[pair]), int(second[pair])
        moved = int(gain[layer, pair])
        loads[owner[layer, one]] -= moved
        loads[owner[layer, other]] += moved
        owner[layer, [one, other]] = owner[layer, [other, one]]
        swaps += 1


def _best_swap(
    gain: Integers, left: Integers, right: Integers, loads: Integers
) -> tuple[int, int] | None:
    """Layer and pair of the best swap in scan order, None if no swap improves.

    Swapping moves `gain` units from the left bundle's rank to the right one's. The largest load
    afterwards is the largest of both ranks and of all the others; the sum of squares changes by
    2 d (d - L_left + L_right).
    """
    others = _largest_elsewhere(loads)
    giving, taking = loads[left], loads[right]
    change = 2 * gain * (gain - giving + taking)
    peak = np.maximum(np.maximum(giving - gain, taking + gain), others[left, right])
    now = int(loads.max())
    better = (left != right) & ((peak < now) | ((peak == now) & (change < 0)))
    candidates = np.flatnonzero(better)
    if not candidates.size:
        return None
    peaks, changes = peak.reshape(-1)[candidates], change.reshape(-1)[candidates]
    lowest = np.flatnonzero(peaks == peaks.min())
    chosen = candidates[lowest[np.argmin(changes[lowest])]]  # argmin keeps the first of equals
    layer, pair = divmod(int(chosen), gain.shape[1])
    return layer, pair


def _largest_elsewhere(loads: Integers) -> Integers:
    """Largest load of the ranks other than a and b, `[P, P]`; 0 where there is no other."""
    a, b = np.meshgrid(np.arange(len(loads)), np.arange(len(loads)), indexing="ij")
    found = np.zeros_like(a)
    for rank in np.argsort(-loads, kind="stable")[:3][::-1]:  # of three, one is neither a nor b
        found = np.where((a != rank) & (b != rank), loads[rank], found)
    return found


def packed_sources(costs: Integers, owner: Integers) -> NDArray[np.int64]:
    """Rank that computes each packed unit, in packed-unit order.

    Args:
        costs: retained units of each bundle, `[L, bundles]`.
        owner: rank of each bundle, `[L, bundles]`.
    """
    ranks = []
    for row, counts in zip(owner, costs, strict=True):
        order = np.argsort(row, kind="stable")  # ranks ascend, bundles ascend inside a rank
        ranks.append(np.repeat(row[order], counts[order]))
    return np.concatenate(ranks).astype(np.int64)


def storage_targets(loads: Integers) -> Integers:
    """Units each rank shall store: q + 1 on the m fullest ranks, q on the rest."""
    tp = len(loads)
    q, m = divmod(int(loads.sum()), tp)
    order = sorted(range(tp), key=lambda r: (-int(loads[r]), r))
    targets = np.full(tp, q, np.int64)
    targets[order[:m]] += 1
    return targets


def balance_storage(
    source: Integers, loads: Integers, targets: Integers
) -> tuple[NDArray[np.int32], NDArray[np.int32], Integers]:
    """Storage rank and slot of every packed unit, and the transfer splits.

    A rank keeps its first min(n_r, t_r) units at the slots of their local numbers. Excess units, by
    rank and then local number, fill the free slots, by rank and then slot.
    """
    tp = len(loads)
    local = np.empty(len(source), np.int64)
    for rank in range(tp):
        mine = source == rank
        local[mine] = np.arange(int(mine.sum()))
    owner, slot = source.copy(), local.copy()
    excess = np.flatnonzero(local >= targets[source])
    excess = excess[np.lexsort((local[excess], source[excess]))]
    ranks = np.repeat(np.arange(tp), np.maximum(0, targets - loads))
    places = [np.arange(n, t) for n, t in zip(loads.tolist(), targets.tolist(), strict=True)]
    owner[excess] = ranks
    slot[excess] = np.concatenate([*places, np.empty(0, np.int64)])
    transfers = np.zeros((tp, tp), np.int64)
    np.add.at(transfers, (source[excess], ranks), 1)
    return owner.astype(np.int32), slot.astype(np.int32), transfers


def packed_order(key_heads: int, value_heads: int, owner: Sequence[int]) -> list[int]:
    """Value heads of one layer in packed order: the ranks' bundles one after the other."""
    bundle = value_heads // key_heads
    order = sorted(range(key_heads), key=lambda b: (owner[b], b))
    return [b * bundle + n for b in order for n in range(bundle)]
