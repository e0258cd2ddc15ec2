"""Slots that fit into a memory budget, per rank: what engines reserve, what each format frees.

One state of a model takes, on the fullest of P ranks (all integers):

    dense              FP32 temporal state
    W_max              retained units of a slot, FP32 (DASC ragged; the slot is as wide as its largest rank)
    int8-checkpoint    one byte a value and one FP32 scale per (head, key channel) (DASC Eq. 8)
    live, packed       K_hi FP16 key channels, the rest INT8 in groups (DAMP)

each with the BF16 convolution state, which is never compressed. A pool of B bytes has
`floor(B / b) - 1` usable slots: allocators keep slot 0 for themselves (DASC C.1).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Decimal
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from hybridstate.errors import UsageError
from hybridstate.families import ModelSpec
from hybridstate.plan.accounting import (
    TEMPORAL_BYTES,
    conv_bytes,
    default_k_hi,
    packed_head_bytes,
    temporal_bytes,
)
from hybridstate.plan.placement import Balance, Placement, check_tp, place
from hybridstate.plan.select import Selection
from hybridstate.plan.widths import slot_width, smallest_cutoff

Format = Literal["fp32", "int8-checkpoint", "packed"]

_SIZE: Final = re.compile(
    r"(?P<number>([0-9]{1,20}(\.[0-9]{0,20})?|\.[0-9]{1,20})(e[0-9]{1,2})?) *(?P<unit>[a-z]*)",
    re.I | re.ASCII,
)

CACHED_PER_REQUEST: Final = 2
"""Slots that engines add per request for cached prefixes: the difference of sized and held."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Slots that an engine plans per running request (SGLang's `--mamba-radix-cache-strategy`).

    Attributes:
        name, strategy: short name, and what sets it.
        sized: slots per request by which the pool limits the number of requests.
        held: slots a running request occupies: its state, and buffers of the states it is tracking.
    """

    name: str
    strategy: str
    sized: int
    held: int


RESERVATIONS: Final = (
    Reservation("overlap", "extra_buffer with the overlap scheduler", sized=5, held=3),
    Reservation(
        "no overlap", "extra_buffer without overlap, or extra_buffer_lazy", sized=4, held=2
    ),
    Reservation("no buffer", "no_buffer", sized=3, held=1),
)


@dataclass(frozen=True, slots=True)
class State:
    """Bytes of one state on the rank where it takes most.

    Attributes:
        name: how tables call it.
        w_max: cutoff, None if every unit is stored.
        stored: format of the temporal state.
        temporal_bytes, conv_bytes: on that rank.
        rank: the first rank that takes as much.
    """

    name: str
    w_max: int | None
    stored: Format
    temporal_bytes: int
    conv_bytes: int
    rank: int = 0

    @property
    def full_bytes(self) -> int:
        """Temporal and convolution state."""
        return self.temporal_bytes + self.conv_bytes

    @property
    def largest(self) -> Literal["temporal", "convolution"]:
        """The tensor that takes more."""
        return "temporal" if self.temporal_bytes >= self.conv_bytes else "convolution"

    def slots(self, budget: int) -> int:
        """Usable slots of a pool of `budget` bytes per rank; 0 where it is too small for two."""
        return usable_slots(budget, self.full_bytes)


@dataclass(frozen=True, slots=True)
class Arm:
    """Live states of one format beside cached states of another, in one budget.

    With `cached` None both share one pool. Otherwise the budget holds a native pool of the held
    slots, a pool of cached states, and staging: one cached slot to pack into and, where a suffix is
    replayed, one dense slot as scratch.
    """

    live: State
    cached: State | None
    staging_bytes: int

    def cached_slots(self, budget: int, requests: int, plan: Reservation) -> int:
        """States that can be cached beside `requests` running ones; 0 if those do not fit."""
        if self.cached is None:
            return max(0, self.live.slots(budget) - requests * plan.held)
        native = (requests * plan.held + 1) * self.live.full_bytes
        return self.cached.slots(budget - native - self.staging_bytes)

    def requests(self, budget: int, plan: Reservation) -> int:
        """Requests at once if each is given its held slots and two cached states."""
        if self.cached is None:
            return self.live.slots(budget) // plan.sized
        fixed = self.live.full_bytes + self.cached.full_bytes + self.staging_bytes
        each = plan.held * self.live.full_bytes + CACHED_PER_REQUEST * self.cached.full_bytes
        return max(0, (budget - fixed) // each)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What it takes to run the wanted number of requests at once.

    Attributes:
        plan: slots per request.
        dense: whether dense checkpoints suffice.
        fp32, int8: smallest W_max that suffices with FP32 or INT8 checkpoints, None if none does.
    """

    plan: Reservation
    dense: bool
    fp32: int | None
    int8: int | None


@dataclass(frozen=True, eq=False)
class Capacity:
    """Per-rank bytes of every format, and what a budget holds.

    Attributes:
        tp, balance: ranks and placement mode.
        unit: `head` or `channel`.
        k_hi: FP16 key channels of the packed live state.
        placements: one per cutoff, ascending.
        dense, packed: the two live formats; no packed one for models without a delta rule.
        checkpoints: cached formats: each cutoff, int8-checkpoint, each cutoff with INT8.
        budget: bytes per rank, and `requests` wanted at once, None if not asked.
        wanted: per reservation, if both were given.
    """

    tp: int
    balance: Balance
    unit: str
    k_hi: int
    placements: tuple[Placement, ...]
    dense: State
    packed: State | None
    checkpoints: tuple[State, ...]
    budget: int | None = None
    requests: int | None = None
    wanted: tuple[Wanted, ...] = ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """A budget in which not even one request has a dense state."""
        if self.budget is None or self.dense.slots(self.budget):
            return ()
        return (
            f"a budget of {self.budget:,} bytes per rank holds no usable dense slot: one takes "
            f"{self.dense.full_bytes:,} bytes, and slot 0 is the allocator's own",
        )

    @property
    def states(self) -> tuple[State, ...]:
        """Every format, dense first."""
        return (self.dense, *self.checkpoints, *self.lives[1:])

    @property
    def lives(self) -> tuple[State, ...]:
        """The live formats, dense first."""
        return (self.dense,) if self.packed is None else (self.dense, self.packed)

    def arms(self, live: State) -> tuple[Arm, ...]:
        """One pool of `live` states, then beside every checkpoint format."""
        return (
            Arm(live, None, 0),
            *(Arm(live, state, staging(self.dense, state)) for state in self.checkpoints),
        )

    def to_json(self) -> dict[str, Any]:
        """Bytes as integers; `slots` and `arms` only with a budget."""
        document: dict[str, Any] = {
            "tp": self.tp,
            "balance": self.balance,
            "unit": self.unit,
            "k_hi": self.k_hi,
            "budget_bytes_per_rank": self.budget,
            "requests": self.requests,
            "states": [self._state(state) for state in self.states],
            "placements": [placement.to_json() for placement in self.placements],
        }
        if self.budget is not None:
            document["reservations"] = [
                {"name": r.name, "strategy": r.strategy, "sized": r.sized, "held": r.held}
                for r in RESERVATIONS
            ]
            document["arms"] = [self._arm(arm) for live in self.lives for arm in self.arms(live)]
        if self.wanted:
            document["smallest_w_max"] = {
                w.plan.name: {"dense": w.dense, "fp32": w.fp32, "int8": w.int8} for w in self.wanted
            }
        return document

    def _state(self, state: State) -> dict[str, Any]:
        dense = self.dense
        found: dict[str, Any] = {
            "name": state.name,
            "w_max": state.w_max,
            "stored": state.stored,
            "temporal_bytes": state.temporal_bytes,
            "conv_bytes": state.conv_bytes,
            "full_bytes": state.full_bytes,
            "ratio_temporal": ratio(dense.temporal_bytes, state.temporal_bytes),
            "ratio_full": ratio(dense.full_bytes, state.full_bytes),
            "bottleneck_rank": state.rank,
            "largest_tensor": state.largest,
        }
        if self.budget is not None:
            slots = state.slots(self.budget)
            found["usable_slots"] = slots
            found["ratio_slots"] = ratio(slots, dense.slots(self.budget))
        return found

    def _arm(self, arm: Arm) -> dict[str, Any]:
        assert self.budget is not None
        found: dict[str, Any] = {
            "live": arm.live.name,
            "cached": (arm.cached or arm.live).name,
            "pools": 1 if arm.cached is None else 2,
            "staging_bytes": arm.staging_bytes,
            "max_requests": {r.name: arm.requests(self.budget, r) for r in RESERVATIONS},
        }
        if self.requests is not None:
            found["cached_states"] = {
                r.name: arm.cached_slots(self.budget, self.requests, r) for r in RESERVATIONS
            }
        return found


def capacity(
    spec: ModelSpec,
    horizons: Sequence[NDArray[np.float64]],
    selections: Sequence[Selection],
    *,
    tp: int = 1,
    balance: Balance = "off",
    budget: int | None = None,
    requests: int | None = None,
) -> Capacity:
    """Place every selection and count what one rank holds.

    Args:
        spec: the model.
        horizons: per linear layer, for the search of a cutoff.
        selections: the cutoffs, ascending.
        tp, balance: ranks and placement mode.
        budget: bytes per rank for all states, None to leave slots out.
        requests: wanted number of requests at once; needs a budget.

    Raises:
        UsageError: no positive budget or number of requests, or requests without a budget.
        PlanMismatch: the ranks do not divide the heads.
    """
    check_request(budget, requests)
    check_tp(spec, tp)
    placements = tuple(place(spec, s, tp=tp, mode=balance) for s in selections)
    conv = conv_bytes(spec) // tp
    fp32, int8 = unit_bytes(spec, "fp32"), unit_bytes(spec, "int8-checkpoint")
    units = sum(spec.units(layer) for layer in spec.layers) // tp
    k_hi = default_k_hi(min(layer.key_dim for layer in spec.layers))
    heads = [
        layer.value_heads // tp * packed_head_bytes(layer.key_dim, layer.value_dim, k_hi)
        for layer in spec.layers
    ]
    cut = [
        (s.w_max, p.slot_units, p.bottleneck) for s, p in zip(selections, placements, strict=True)
    ]
    dense = State("dense", None, "fp32", temporal_bytes(spec) // tp, conv)
    return Capacity(
        tp=tp,
        balance=balance,
        unit=spec.unit,
        k_hi=k_hi,
        placements=placements,
        dense=dense,
        packed=State("live, packed", None, "packed", sum(heads), conv)
        if not spec.family.analysis_only
        else None,
        checkpoints=(
            *(State(f"W_max {w}", w, "fp32", n * fp32, conv, rank) for w, n, rank in cut),
            State("int8-checkpoint", None, "int8-checkpoint", units * int8, conv),
            *(
                State(f"W_max {w} + int8", w, "int8-checkpoint", n * int8, conv, rank)
                for w, n, rank in cut
            ),
        ),
        budget=budget,
        requests=requests,
        wanted=()
        if budget is None or requests is None
        else _wanted(spec, horizons, dense, tp, balance, budget, requests),
    )


def usable_slots(budget: int, slot_bytes: int) -> int:
    """`floor(budget / slot) - 1`, at least 0: slot 0 is the allocator's own.

    A state without bytes (nothing retained, no convolution) counts as one.
    """
    return max(0, budget // max(1, slot_bytes) - 1)


def unit_bytes(spec: ModelSpec, stored: Literal["fp32", "int8-checkpoint"]) -> int:
    """Bytes of one retained unit: FP32 values, or INT8 codes and an FP32 scale per key channel."""
    layer = spec.layers[0]
    values = spec.unit_values(layer)
    if stored == "fp32":
        return values * TEMPORAL_BYTES
    return values + 4 * values // layer.value_dim


def staging(dense: State, cached: State) -> int:
    """Bytes beside both pools: one slot to pack into, and dense scratch where a suffix is replayed."""
    return cached.full_bytes + (dense.full_bytes if cached.w_max is not None else 0)


def ratio(whole: int, part: int) -> float | None:
    """whole / part, None where part is 0."""
    return whole / part if part else None


def check_request(budget: int | None, requests: int | None) -> None:
    """Refuse a budget or a number of requests that is none.

    Raises:
        UsageError: not positive, or requests without the memory they must fit into.
    """
    if budget is not None and budget < 1:
        raise UsageError(f"--budget must be positive, found {budget} bytes", found=budget)
    if requests is not None and requests < 1:
        raise UsageError(f"--concurrency must be at least 1, found {requests}", found=requests)
    if requests is not None and budget is None:
        raise UsageError(
            "--concurrency needs the memory it must fit into",
            hint="add --budget, bytes per rank for all states, such as --budget 8GiB",
        )


def _wanted(
    spec: ModelSpec,
    horizons: Sequence[NDArray[np.float64]],
    dense: State,
    tp: int,
    balance: Balance,
    budget: int,
    requests: int,
) -> tuple[Wanted, ...]:
    """For every reservation, the smallest cutoff with which `requests` fit (FP32 live states)."""
    slot_units = slot_width(spec, horizons, tp, balance)

    def smallest(stored: Literal["fp32", "int8-checkpoint"], plan: Reservation) -> int | None:
        size = unit_bytes(spec, stored)

        def enough(w_max: int) -> bool:
            cached = State("", w_max, stored, slot_units(w_max) * size, dense.conv_bytes)
            return Arm(dense, cached, staging(dense, cached)).requests(budget, plan) >= requests

        return smallest_cutoff(enough)

    return tuple(
        Wanted(
            plan=plan,
            dense=Arm(dense, None, 0).requests(budget, plan) >= requests,
            fp32=smallest("fp32", plan),
            int8=smallest("int8-checkpoint", plan),
        )
        for plan in RESERVATIONS
    )


def parse_bytes(text: str) -> int:
    """Bytes of `8GiB`, `512MB`, `1.5GiB` or a plain number.

    Raises:
        UsageError: not such a size, or not positive.
    """
    units = {"": 1, "B": 1} | {
        f"{prefix}{suffix}": base ** (power + 1)
        for power, prefix in enumerate("KMGT")
        for suffix, base in (("iB", 1024), ("B", 1000))
    }
    scales = {unit.lower(): scale for unit, scale in units.items()}
    found = _SIZE.fullmatch(text.strip())
    size = 0
    if found and found["unit"].lower() in scales:
        exact = Decimal(found["number"]) * scales[found["unit"].lower()]
        size = int(exact.to_integral_value(ROUND_HALF_EVEN))
    if not 0 < size < 2**63:
        raise UsageError(f"a size such as 8GiB or 512MB is expected, found {text!r}", found=text)
    return size
