"""Tables of `hybridstate analyze --tp --budget --concurrency`: ranks, slots, requests."""

from typing import TYPE_CHECKING

from hybridstate.cli.output import Output, counted

if TYPE_CHECKING:
    from hybridstate.plan.analysis import Analysis
    from hybridstate.plan.capacity import Capacity, State

_GIB = 2**30
_MIB = 2**20


def capacity_tables(out: Output, analysis: "Analysis") -> None:
    """What one rank holds; silent where neither ranks nor a budget were given."""
    found = analysis.capacity
    if found.tp == 1 and found.budget is None:
        return
    if found.tp > 1:
        _ranks(out, found, [c.selection.w_max for c in analysis.cutoffs])
    _states(out, found)
    if found.budget is not None:
        _slots(out, found, found.budget)
        _requests(out, found, found.budget)
    if found.requests is not None and found.budget is not None:
        _cached(out, found, found.budget, found.requests)
        _wanted(out, found, found.requests)


def _ranks(out: Output, found: "Capacity", w_max: list[int]) -> None:
    moved = {
        "off": "each rank stores what it computes; heads in contiguous blocks",
        "storage": "heads in contiguous blocks; stored units move until ranks differ by at most one",
        "hybrid": "heads permuted (weights move with them), then stored units move",
    }[found.balance]
    out.table(
        f"{found.unit}s per rank, {found.tp} ranks, placement {found.balance}",
        ("W_max", "mean", "fullest", "at rank", "stored", "moved"),
        [
            (
                w,
                f"{sum(p.compute_units) / p.tp:,.1f}",
                max(p.compute_units),
                p.compute_units.index(max(p.compute_units)),
                p.slot_units,
                p.remote_units,
            )
            for w, p in zip(w_max, found.placements, strict=True)
        ],
        note=f"{moved}. stored: room of one slot on every rank; moved: sent between ranks at each "
        "store and load",
    )


def _states(out: Output, found: "Capacity") -> None:
    dense = found.dense
    where = "one state" if found.tp == 1 else f"one state on the fullest of {found.tp} ranks"
    out.table(
        f"bytes of {where}",
        ("format", "temporal", "full", "x temp", "x full"),
        [
            (
                _short(state),
                state.temporal_bytes,
                state.full_bytes,
                _times(dense.temporal_bytes, state.temporal_bytes),
                _times(dense.full_bytes, state.full_bytes),
            )
            for state in found.states
        ],
        note="x: dense over these bytes. A number is a cutoff W_max (ragged); full adds the BF16 convolution state of "
        f"{dense.conv_bytes:,} bytes. int8-checkpoint and + int8: stored prefixes in INT8, one FP32 "
        "scale per key channel"
        + (
            ""
            if found.packed is None
            else f". live, packed: {found.k_hi} FP16 key channels, the rest INT8 in groups of 32"
        ),
    )


def _slots(out: Output, found: "Capacity", budget: int) -> None:
    dense = found.dense.slots(budget)
    out.table(
        f"usable slots of one pool of {size(budget)} per rank",
        ("format", "slots", "ratio", "largest", "at rank"),
        [
            (
                _short(state),
                state.slots(budget),
                _times(state.slots(budget), dense),
                state.largest,
                state.rank,
            )
            for state in found.states
        ],
        note="floor(budget / bytes) - 1: allocators keep slot 0 for themselves; ratio over dense slots; "
        "largest: the tensor that takes most, and the rank that does"
        + ("" if dense else "; the budget is too small for a dense pool"),
    )


def _requests(out: Output, found: "Capacity", budget: int) -> None:
    from hybridstate.plan.capacity import RESERVATIONS

    for live in found.lives:
        out.table(
            f"requests at once in {size(budget)} per rank, live states {_live(live)}",
            ("cached as", *(plan.name for plan in RESERVATIONS)),
            [
                (
                    "live state" if arm.cached is None else _short(arm.cached),
                    *(arm.requests(budget, plan) for plan in RESERVATIONS),
                )
                for arm in found.arms(live)
            ],
            note=_RESERVED if live is found.dense else _EXPERIMENTAL,
        )


_RESERVED = (
    "engines plan 5, 4 or 3 slots per request (overlap: extra_buffer with the overlap scheduler; no "
    "overlap: without it, or lazy; no buffer: no_buffer). A running request holds 3, 2 or 1 of them, "
    "the other two are for cached prefixes and move to the compressed pool. Budget = native pool + "
    "compressed pool + staging (one compressed slot, and for a cutoff one dense slot of replay "
    "scratch); slot 0 of both pools is reserved"
)
_EXPERIMENTAL = (
    "packed live states with a cutoff or INT8 checkpoints: bytes only, no published quality for both "
    "together"
)


def _cached(out: Output, found: "Capacity", budget: int, requests: int) -> None:
    from hybridstate.plan.capacity import RESERVATIONS

    for live in found.lives:
        out.table(
            f"cached prefixes beside {counted(requests, 'request')}, live states {_live(live)}",
            ("cached as", *(plan.name for plan in RESERVATIONS)),
            [
                (
                    "live state" if arm.cached is None else _short(arm.cached),
                    *(arm.cached_slots(budget, requests, plan) for plan in RESERVATIONS),
                )
                for arm in found.arms(live)
            ],
            note="0 also where the requests themselves do not fit" if live is found.dense else None,
        )


def _wanted(out: Output, found: "Capacity", requests: int) -> None:
    from hybridstate.plan.widths import LONGEST_CUTOFF

    out.table(
        f"smallest W_max that allows {counted(requests, 'request')} at once (FP32 live states)",
        ("reserved", "dense", "FP32 stored", "INT8 stored"),
        [
            (
                f"{wanted.plan.name} {wanted.plan.sized}/{wanted.plan.held}",
                "enough" if wanted.dense else "too few",
                _cutoff(wanted.fp32),
                _cutoff(wanted.int8),
            )
            for wanted in found.wanted
        ],
        note=f"none: no cutoff of up to {LONGEST_CUTOFF:,} tokens is enough",
    )


def size(budget: int) -> str:
    """`8 GiB` or `512 MiB`, with digits only where they are needed."""
    if budget < _MIB:
        return f"{budget:,} bytes"
    value, unit = (budget / _GIB, "GiB") if budget >= _GIB else (budget / _MIB, "MiB")
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.4g} {unit}"


def _live(state: "State") -> str:
    return "FP32" if state.stored == "fp32" else "packed"


def _short(state: "State") -> str:
    """`64 + int8` for `W_max 64 + int8`."""
    return state.name.removeprefix("W_max ")


def _times(whole: int, part: int) -> str | None:
    return f"{whole / part:.2f}x" if part else None


def _cutoff(value: int | None) -> str:
    return "none" if value is None else f"{value:,}"
