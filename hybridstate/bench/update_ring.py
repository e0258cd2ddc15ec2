"""Deferred requantisation in `bench update`: the packed step that rewrites a state once in L steps, by ring length.

A row is the mean over L consecutive steps of every set of slots, so rewriting steps weigh as they will. Phases are
mixed (slots admitted together rewrite at different steps, what an engine does) or aligned (all at once, the least
that L steps can take at small batches). The ring is counted in the resident bits and in the bytes of a step. Orders
and value scales are folded into the weights, as for the format `damp`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any, Final

import torch

from hybridstate.bench.layers import UpdateDims, random_fusion, random_inputs
from hybridstate.bench.timing import Samples, measure_launches, rotation
from hybridstate.defaults import GROUP
from hybridstate.errors import NumericError
from hybridstate.kernels import ring_reference, ring_update
from hybridstate.kernels.layout import PackedLayout
from hybridstate.kernels.ring_reference import Ring

LENGTHS: Final = (4, 8, 16)
PHASES: Final = ("mixed", "aligned")
CHECKED_BATCH: Final = 4
LAUNCHES: Final = 1024
"""Most launches of one graph, L of every set of slots."""


@dataclass(frozen=True, slots=True)
class RingRow:
    """One ring length at one batch size.

    Attributes:
        every: L, steps between two rewrites of a state.
        phases: of `PHASES`.
        bits_per_value, ring_bits_per_value: resident bits of the packed state, and of its ring.
        state_bytes, ring_bytes, io_bytes: of one step, mean over L.
        pools: distinct sets of slots the launches rotate over.
        step: seconds of one step, mean over L.
        check: errors against the reference in float64 over more than L steps, a padded row and a flush among them.
    """

    dims: UpdateDims
    batch: int
    gate: str
    every: int
    phases: str
    backend: str
    configuration: str
    bits_per_value: float
    ring_bits_per_value: float
    state_bytes: int
    ring_bytes: int
    io_bytes: int
    pools: int
    step: Samples
    check: dict[str, Any]

    @property
    def state(self) -> str:
        """Name among the state formats."""
        return f"damp, every {self.every}, {self.phases}"

    def to_json(self) -> dict[str, Any]:
        """Plain values with every sample."""
        moved = self.state_bytes + self.ring_bytes + self.io_bytes
        return {
            "dims": asdict(self.dims),
            "batch": self.batch,
            "gate": self.gate,
            "state": self.state,
            "every": self.every,
            "phases": self.phases,
            "backend": self.backend,
            "configuration": self.configuration,
            "bits_per_value": self.bits_per_value,
            "ring_bits_per_value": self.ring_bits_per_value,
            "resident_bits_per_value": self.bits_per_value + self.ring_bits_per_value,
            "state_bytes": self.state_bytes,
            "ring_bytes": self.ring_bytes,
            "io_bytes": self.io_bytes,
            "pools": self.pools,
            "step_s": self.step.to_json(),
            "gb_per_s": moved / self.step.median / 1e9,
            "check": self.check,
        }


def ring_rows(
    dims: Sequence[UpdateDims],
    batches: Sequence[int],
    lengths: Sequence[int],
    gates: Sequence[str],
    overlap: bool,
    device: torch.device,
    samples: int,
    warmup: int,
    seed: int,
    report: Callable[[str, int, int], None],
) -> Iterator[RingRow]:
    """Check and time every ring length.

    Raises:
        NumericError: a step is wrong; nothing is reported then.
    """
    total, done = len(dims) * len(lengths) * len(gates) * len(batches) * len(PHASES), 0
    for layer, gate, every in product(dims, gates, lengths):
        layout = _layout(layer)
        name = ring_update.backend(device, layout).name
        overlapped = {"overlap": 2} if overlap and name == "gluon" else {}
        step, flush = ring_update.functions(name, layout)
        step = partial(step, **overlapped) if overlapped else step
        check = _checked(step, flush, layer, layout, every, gate, device)
        for batch, phases in product(batches, PHASES):
            yield _measured(
                step, name, layer, layout, batch, every, phases, gate, check,
                device, samples, warmup, seed,
            )  # fmt: skip
            done += 1
            report("deferred updates", done, total)


def step_bytes(layer: UpdateDims, batch: int, every: int) -> tuple[int, int]:
    """Bytes of states and of rings in one step, mean over L."""
    per_channel = layer.kind == "kda"
    state, ring = ring_reference.step_bytes(
        _layout(layer), layer.key_heads, layer.value_heads, every, per_channel=per_channel
    )
    return round(batch * state), round(batch * ring)


def _layout(layer: UpdateDims) -> PackedLayout:
    """Fragment order where a matrix kernel has it, natural elsewhere."""
    layout = PackedLayout(layer.key_dim, layer.value_dim, layer.protected, GROUP)
    return ring_update.ring_layout(layout)


def _checked(
    step: Callable[..., None],
    flush: Callable[..., None],
    layer: UpdateDims,
    layout: PackedLayout,
    every: int,
    gate: str,
    device: torch.device,
) -> dict[str, Any]:
    """Errors at these dimensions over L + 2 steps and a flush.

    Raises:
        NumericError: they are too large.
    """
    found = ring_update.check(
        step, flush, device, layout, per_channel=layer.kind == "kda", every=every,
        key_heads=layer.key_heads, heads=layer.value_heads, batch=CHECKED_BATCH, steps=every + 2,
        fused=gate == "fused", scaled=False,
    )  # fmt: skip
    if found["problem"] is not None:
        raise NumericError(
            f"{layer.name}, requantised every {every} steps: {found['problem']}; nothing is reported",
            hint="the ring kernel is wrong on this device; run `hybridstate doctor`",
        )
    return {k: v for k, v in found.items() if isinstance(v, float)}


def _measured(
    step: Callable[..., None], name: str, layer: UpdateDims, layout: PackedLayout, batch: int,
    every: int, phases: str, gate: str, check: dict[str, Any],
    device: torch.device, samples: int, warmup: int, seed: int,
) -> RingRow:  # fmt: skip
    """Time L steps of every set of slots."""
    heads = layer.value_heads
    sets = min(rotation(batch * heads * layout.head_bytes, device), max(2, LAUNCHES // every))
    *vectors, out = random_inputs(layer, batch, device, seed, fused=gate == "fused")
    fusion = random_fusion(layer, device, seed, fused=gate == "fused")
    generator = torch.Generator(device).manual_seed(seed)
    shape = (min(32, sets * batch), heads, layer.key_dim, layer.value_dim)
    packed = layout.pack(torch.randn(shape, generator=generator, device=device))
    pool = packed.repeat(-(-sets * batch // len(packed)), 1, 1)[: sets * batch].contiguous()
    ring = Ring.empty(
        sets * batch, layer.key_heads, heads, layout, every,
        per_channel=layer.kind == "kda", device=device,
    )  # fmt: skip
    order = torch.randperm(sets * batch, generator=generator, device=device)
    groups = [x.clone() for x in order.split(batch)]  # a kernel is compiled for their alignment
    ring.start(order, stagger=False)
    if phases == "mixed":  # every set spread evenly, whatever its slots are called
        spread = torch.arange(batch, device=device, dtype=torch.int32).remainder(every)
        for group in groups:
            ring.phases[group] = spread[:, None].expand(-1, heads).contiguous()
    launches = [
        partial(step, *vectors, pool, ring, slots, out, None, layout, fusion)
        for _ in range(every)
        for slots in groups
    ]
    seconds = measure_launches(
        launches, device=device, graph=name != "reference", warmup=warmup, repeat=samples
    )
    state_bytes, ring_bytes = step_bytes(layer, batch, every)
    return RingRow(
        dims=layer,
        batch=batch,
        gate=gate,
        every=every,
        phases=phases,
        backend=name,
        configuration=f"{name}, {layout.layout_id}, ring of {every - 1}",
        bits_per_value=layout.bits_per_value,
        ring_bits_per_value=ring.bits_per_value,
        state_bytes=state_bytes,
        ring_bytes=ring_bytes,
        io_bytes=sum(x.numel() * x.element_size() for x in (*vectors, out)) + 8 * batch,
        pools=sets,
        step=seconds,
        check=check,
    )
