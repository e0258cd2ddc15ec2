"""What `bench update` found: rows with every sample, and the packed step beside the fastest of everything else."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from hybridstate.bench.layers import UpdateDims
from hybridstate.bench.timing import Samples
from hybridstate.bench.update_ring import RingRow

LEAST_WANTED_BATCH: Final = 8
"""From here on no packed step should be slower than FP32 (smaller ones are recorded)."""


@dataclass(frozen=True, slots=True)
class UpdateRow:
    """One format at one batch size.

    Attributes:
        state_bytes: states read and written by one step.
        io_bytes: q, k, v, gates, output and slots.
        pools: distinct sets of slots the launches rotate over.
        step, memory_pass: seconds of one step, and of `x += 1` over `state_bytes`.
        check: errors against float64 at these dimensions.
        gate: "fused" from raw projections or "given".
        tried: median seconds of every configuration, by label.
    """

    dims: UpdateDims
    batch: int
    state: str
    backend: str
    configuration: str
    bits_per_value: float
    state_bytes: int
    io_bytes: int
    pools: int
    step: Samples
    memory_pass: Samples
    check: dict[str, Any]
    tried: dict[str, float]
    gate: str = "given"

    @property
    def gb_per_s(self) -> float:
        """All bytes of a step over its median time."""
        return (self.state_bytes + self.io_bytes) / self.step.median / 1e9

    @property
    def pass_gb_per_s(self) -> float:
        """The same for the in-place pass: what this device reaches on these bytes."""
        return self.state_bytes / self.memory_pass.median / 1e9

    def to_json(self) -> dict[str, Any]:
        """Plain values with every sample."""
        return {
            "dims": asdict(self.dims),
            "batch": self.batch,
            "state": self.state,
            "gate": self.gate,
            "backend": self.backend,
            "configuration": self.configuration,
            "bits_per_value": self.bits_per_value,
            "state_bytes": self.state_bytes,
            "io_bytes": self.io_bytes,
            "pools": self.pools,
            "step_s": self.step.to_json(),
            "gb_per_s": self.gb_per_s,
            "pass_s": self.memory_pass.to_json(),
            "pass_gb_per_s": self.pass_gb_per_s,
            "check": self.check,
            "tried_s": self.tried,
        }


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """Everything measured, and on what."""

    device: dict[str, Any]
    protocol: dict[str, Any]
    rows: tuple[UpdateRow, ...]
    peers: tuple[dict[str, Any], ...] = ()
    rings: tuple[RingRow, ...] = ()

    def speedups(self) -> list[dict[str, Any]]:
        """Median FP32 time over each other format's, at equal dimensions, batch and gate."""
        base = {(r.dims, r.batch, r.gate): r.step.median for r in self.rows if r.state == "fp32"}
        others: list[UpdateRow | RingRow] = [r for r in self.rows if r.state != "fp32"]
        others += self.rings
        return [
            {
                "dims": r.dims.name,
                "batch": r.batch,
                "gate": r.gate,
                "state": r.state,
                "fp32_over_this": base[r.dims, r.batch, r.gate] / r.step.median,
            }
            for r in others
            if (r.dims, r.batch, r.gate) in base
        ]

    def slower_than_fp32(self) -> list[dict[str, Any]]:
        """Packed steps at `LEAST_WANTED_BATCH` and above that take longer than the FP32 step there."""
        return [
            x
            for x in self.speedups()
            if _is_packed(x["state"])
            and x["batch"] >= LEAST_WANTED_BATCH
            and x["fp32_over_this"] < 1.0
        ]

    def fastest(self) -> list[dict[str, Any]]:
        """The packed step beside the fastest kernel, the package's or a peer's, of each width of a state.

        One entry per dimensions, batch, gate and packed format (`damp`, `damp-scaled`), and per ring length and
        phases where states are requantised later;
        by width (fp32, 16-bit) and by where the new state goes
        (in_place, out_of_place): who, seconds, and the ratio of its time to the packed step's.
        """
        packed: list[UpdateRow | RingRow] = [r for r in self.rows if _is_packed(r.state)]
        packed += self.rings
        return [
            {
                "dims": row.dims.name,
                "batch": row.batch,
                "gate": row.gate,
                "state": row.state,
                "damp_s": row.step.median,
                "fastest": fastest_rivals(row, self.rows, self.peers),
            }
            for row in packed
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain values with every sample."""
        return {
            "device": self.device,
            "protocol": self.protocol,
            "rows": [row.to_json() for row in self.rows],
            "rings": [row.to_json() for row in self.rings],
            "speedups": self.speedups(),
            "slower_than_fp32": self.slower_than_fp32(),
            "fastest": self.fastest(),
            "peers": list(self.peers),
        }


def fastest_rivals(
    row: UpdateRow | RingRow, rows: Sequence[UpdateRow], peers: Sequence[dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """By "width, place", the fastest unquantised step at the dimensions, batch and gate of a packed row."""
    found: list[tuple[str, str, float]] = [
        (f"{_width(r.state)}, in place", f"ours: {r.configuration}", r.step.median)
        for r in rows
        if (r.dims, r.batch, r.gate) == (row.dims, row.batch, row.gate) and not _is_packed(r.state)
    ]
    found += [
        (
            f"{_width(p['state'])}, {'in place' if p['in_place'] else 'out of place'}",
            f"{p['peer']}: {p['kernel']}",
            p["step_s"]["median"],
        )
        for p in peers
        if (p["dims"], p["batch"], p.get("gate")) == (row.dims.name, row.batch, row.gate)
        and "step_s" in p
    ]
    best: dict[str, dict[str, Any]] = {}
    for column, who, seconds in sorted(found, key=lambda x: x[2]):
        over = seconds / row.step.median
        best.setdefault(column, {"who": who, "seconds": seconds, "over_damp": over})
    return best


def _is_packed(state: str) -> bool:
    return state.startswith("damp")


def _width(state: str) -> str:
    return "fp32" if state == "fp32" else "16-bit"
