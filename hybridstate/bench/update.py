"""`bench update`: one recurrent decode step on pooled states, dense and packed, beside an in-place pass.

Each format is first checked against float64 at the very dimensions it will be timed at; a failed check ends the
bench. Dense formats are tuned at every batch over several layouts (`update_forms`), so that a speed-up is over the
best of them and not over a default. Gates come as log decays and strengths, or fused from raw projections. The pass
`x += 1` over as many bytes, in the same run, is the bandwidth a step cannot exceed. Inputs and states are random and
say so.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor

from hybridstate.bench.layers import (
    EMBEDDED,
    PUBLISHED,
    UpdateDims,
    input_dtype,
    random_fusion,
    random_inputs,
)
from hybridstate.bench.peers import peer_rows
from hybridstate.bench.room import check_room, check_samples
from hybridstate.bench.timing import (
    Samples,
    device_record,
    in_place_pass,
    measure_launches,
    rotation,
)
from hybridstate.bench.update_forms import FORMATS, Configuration, checked, configurations
from hybridstate.bench.update_report import UpdateReport, UpdateRow
from hybridstate.bench.update_ring import ring_rows
from hybridstate.errors import MissingRequirement, UsageError
from hybridstate.kernels.fusion import NO_FUSION, StepFusion
from hybridstate.kernels.layout import Layout
from hybridstate.kernels.ring_reference import LONGEST

__all__ = [
    "EMBEDDED",
    "FORMATS",
    "PUBLISHED",
    "UpdateDims",
    "UpdateReport",
    "UpdateRow",
    "run_update",
]

Progress = Callable[[str, int, int], None]

CPU_BATCHES: Final = (1, 2)
GPU_BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
GATES: Final = ("fused", "given")
TUNING_SAMPLES: Final = 5
PACK_SLOTS: Final = 32
"""Random states are packed this many at a time and repeated over the pool."""


def run_update(
    *,
    dims: Sequence[UpdateDims] = (*EMBEDDED, *PUBLISHED),
    batches: Sequence[int] | None = None,
    formats: Sequence[str] = FORMATS,
    gates: Sequence[str] | None = None,
    overlap: bool = False,
    requantise_every: Sequence[int] = (),
    ring_batches: Sequence[int] | None = None,
    peers: bool = True,
    device: torch.device | str = "cpu",
    samples: int = 30,
    warmup: int = 3,
    seed: int = 0,
    progress: Progress | None = None,
) -> UpdateReport:
    """Check and time every format at every batch and size.

    Args:
        dims: layers to run.
        batches: requests per step; None means small ones on a CPU, 1 to 256 on a GPU.
        formats: of `FORMATS`.
        overlap: every launch may read its states beside the end of the launch before, which works on other slots
            (programmatic dependent launch; all formats alike, the plain packed Triton kernel apart).
        requantise_every: also time the packed step that rewrites a state once in so many steps, 2 to 16 each
            (`update_ring`), at `ring_batches` where they are given, at `batches` otherwise.
        peers: also time the kernels of other packages that are installed.
        gates: of `GATES`; None means fused on a GPU, given on a CPU.
        device: where to run; on a CPU the reference runs and the report says so.
        samples, warmup: rounds of measurement and before it.
        seed: of inputs and states.
        progress: called with stage, done, total.

    Raises:
        NumericError: a step is wrong; nothing is reported then.
        UsageError: unknown format, or sizes that are not positive.
        MissingRequirement: a GPU was asked for and there is none.
    """
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    batches = tuple(batches or (GPU_BATCHES if on_gpu else CPU_BATCHES))
    gates = tuple(gates or (GATES[:1] if on_gpu else GATES[1:]))
    _check_arguments(formats, batches, gates, samples, requantise_every, dims, device)
    report: Progress = progress or (lambda _stage, _done, _total: None)
    rows: list[UpdateRow] = []
    total = len(dims) * len(batches) * len(formats) * len(gates)
    passes: dict[int, Samples] = {}
    for layer, gate, state in product(dims, gates, formats):
        fused = gate == "fused"
        tried = {b: configurations(layer, state, b, device, 2 * overlap) for b in batches}
        wanted = [one for found in tried.values() for one in found]
        errors = checked(wanted, layer, state, device, fused)
        for batch in batches:
            row = _measured(
                layer, state, batch, {c: errors[c] for c in tried[batch]},
                passes, device, samples, warmup, seed, fused,
            )  # fmt: skip
            rows.append(row)
            report("updates", len(rows), total)
    rings = tuple(
        ring_rows(
            dims,
            batches if ring_batches is None else ring_batches,
            requantise_every,
            gates,
            overlap,
            device,
            samples,
            warmup,
            seed,
            report,
        )
    )
    others = peer_rows(dims if peers else (), batches, gates, device, samples, warmup, seed, report)
    protocol = {
        "inputs": "synthetic: normal q, k, v and states; decay exp(-U(0, 0.2)) or random raw gates",
        "gates": list(gates),
        "overlapped_launches": overlap,
        "damp": "orders and value scales folded into the weights; damp-scaled reads a value scale",
        "input_dtype": str(input_dtype(device)).removeprefix("torch."),
        "timing": "CUDA graph replay over rotated slots" if on_gpu else "wall clock",
        "backend_note": None if on_gpu else "reference in torch: says nothing about the kernels",
        "bytes": "states read and written once, inputs read once, output written once",
        "samples": samples,
        "warmup": warmup,
        "seed": seed,
    }
    return UpdateReport(device_record(device), protocol, tuple(rows), others, rings)


def _check_arguments(
    formats: Sequence[str],
    batches: Sequence[int],
    gates: Sequence[str],
    samples: int,
    requantise_every: Sequence[int],
    dims: Sequence[UpdateDims],
    device: torch.device,
) -> None:
    wrong = [every for every in requantise_every if not 2 <= every <= LONGEST]
    if wrong:
        raise UsageError(
            f"a state is rewritten once in 2 to {LONGEST} steps, not in {wrong[0]}",
            hint=f"every step is the format damp; --requantise-every takes 2 to {LONGEST}",
        )
    if not set(gates) <= set(GATES):
        raise UsageError(f"unknown gate in {list(gates)}", hint=f"choose from {', '.join(GATES)}")
    unknown = [x for x in formats if x not in FORMATS]
    if unknown or not formats:
        raise UsageError(
            f"unknown state format {unknown[0]!r}" if unknown else "no state format given",
            hint=f"choose from {', '.join(FORMATS)}",
        )
    if min((*batches, samples)) < 1:
        raise UsageError("batch sizes and samples must be positive")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise MissingRequirement("no CUDA device", hint="Use --device cpu.")
    check_samples("--samples", samples)
    values = max(layer.value_heads * layer.key_dim * layer.value_dim for layer in dims)
    check_room("--batch", max(batches), values, "states of a byte a value", device)


def _measured(
    layer: UpdateDims,
    state: str,
    batch: int,
    errors: dict[Configuration, dict[str, Any]],
    passes: dict[int, Samples],
    device: torch.device,
    samples: int,
    warmup: int,
    seed: int,
    fused: bool,
) -> UpdateRow:
    """Time every configuration briefly, the fastest one fully, and the in-place pass once for as many bytes."""
    first = next(iter(errors))
    head_bytes = first.layout.head_bytes
    moved = 2 * batch * layer.value_heads * head_bytes
    sets = rotation(moved // 2, device)
    inputs = random_inputs(layer, batch, device, seed, fused=fused)
    fusion = random_fusion(layer, device, seed, fused=fused)
    tried: dict[str, float] = {}
    best, best_time = first, float("inf")
    if len(errors) > 1:
        for candidate in errors:
            launches = _launches(candidate, layer, batch, sets, inputs, seed, fusion)
            found = _timed(candidate, launches, device, 1, TUNING_SAMPLES)
            tried[candidate.label] = found.median
            if found.median < best_time:
                best, best_time = candidate, found.median
    launches = _launches(best, layer, batch, sets, inputs, seed, fusion)
    step = _timed(best, launches, device, warmup, samples)
    del launches  # the pools of states make room for the pass
    if moved not in passes:
        passes[moved] = in_place_pass(moved, sets, device=device, warmup=warmup, repeat=samples)
    values = layer.key_dim * layer.value_dim
    return UpdateRow(
        dims=layer,
        batch=batch,
        state=state,
        backend=best.backend,
        configuration=best.label,
        bits_per_value=8 * head_bytes / values,
        state_bytes=moved,
        io_bytes=sum(x.numel() * x.element_size() for x in inputs) + 8 * batch,
        pools=sets,
        step=step,
        memory_pass=passes[moved],
        check=errors[best],
        tried=tried,
        gate="fused" if fused else "given",
    )


def _timed(
    configuration: Configuration,
    launches: list[Callable[[], None]],
    device: torch.device,
    warmup: int,
    samples: int,
) -> Samples:
    graph = configuration.backend != "reference"  # the reference synchronises
    return measure_launches(launches, device=device, graph=graph, warmup=warmup, repeat=samples)


def _launches(
    configuration: Configuration,
    layer: UpdateDims,
    batch: int,
    sets: int,
    inputs: tuple[Tensor, ...],
    seed: int,
    fusion: StepFusion = NO_FUSION,
) -> list[Callable[[], None]]:
    """One launch per set of `batch` slots of one pool; slots are a random permutation."""
    *vectors, out = inputs
    layout, device = configuration.layout, out.device
    pool = _pool(layout, sets * batch, layer.value_heads, device, seed)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(sets * batch, generator=generator).to(device)
    scale = None
    if configuration.scaled:
        scale = (
            torch.rand(layer.value_heads, layer.value_dim, generator=generator).add(0.5).to(device)
        )
    step = configuration.step()
    # Copies, because a kernel is compiled anew for pointers of another alignment.
    return [
        partial(step, *vectors, pool, slots.clone(), out, scale, layout, fusion)
        for slots in order.split(batch)
    ]


def _pool(layout: Layout, slots: int, heads: int, device: torch.device, seed: int) -> Tensor:
    """Random states in storage order."""
    generator = torch.Generator(device).manual_seed(seed)
    count = min(slots, PACK_SLOTS)
    shape = (count, heads, layout.key_dim, layout.value_dim)
    packed = layout.pack(torch.randn(shape, generator=generator, device=device))
    pool = packed.new_empty(slots, *packed.shape[1:])
    for part in pool.split(count):
        part.copy_(packed[: len(part)])
    return pool
