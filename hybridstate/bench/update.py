"""`bench update`: one recurrent decode step on pooled states, dense and packed, beside an in-place pass.

Each format is first checked against float64 at the very dimensions it will be timed at; a failed check ends the
bench. Dense formats are tuned at every batch over several layouts, so that a speed-up is over the best of them and
not over a default. Gates come as log decays and strengths, or fused from raw projections. The pass `x += 1` over as
many bytes, in the same run, is the bandwidth a step cannot exceed. Inputs and states are random and say so.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
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
from hybridstate.bench.timing import Samples, device_record, measure_launches, rotation
from hybridstate.bench.update_report import UpdateReport, UpdateRow
from hybridstate.bench.update_ring import ring_rows
from hybridstate.defaults import GROUP
from hybridstate.errors import MissingRequirement, NumericError, UsageError
from hybridstate.kernels import update
from hybridstate.kernels.fusion import NO_FUSION, StepFusion
from hybridstate.kernels.layout import DenseLayout, Layout, PackedLayout
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
Step = Callable[..., None]

FORMATS: Final = ("fp32", "bf16", "fp16", "damp")
_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

CPU_BATCHES: Final = (1, 2)
GPU_BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
GATES: Final = ("fused", "given")
TUNING_SAMPLES: Final = 7
PACK_SLOTS: Final = 32
"""Random states are packed this many at a time and repeated over the pool."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """One implementation of one format."""

    backend: str
    layout: Layout
    columns: int | None = None
    warps: int = 1
    overlap: int = 0

    @property
    def scaled(self) -> bool:
        """Packed states carry a value scale, dense ones do not."""
        return isinstance(self.layout, PackedLayout)

    @property
    def label(self) -> str:
        """Backend, physical order, value columns and warps of a program where they were chosen."""
        chosen = "" if self.columns is None else f", {self.columns} columns, {self.warps} warps"
        return f"{self.backend}, {self.layout.layout_id}{chosen}"

    def step(self) -> Step:
        """The function that runs it, with the arguments of the launchers."""
        step = update.runner(self.backend, self.layout)  # type: ignore[arg-type]
        options: dict[str, int] = {}
        if self.columns is not None:
            options = {"columns": self.columns, "warps": self.warps}
        plain = self.backend == "triton" and isinstance(self.layout, PackedLayout)
        if self.overlap and self.backend != "reference" and not plain:
            options["overlap"] = self.overlap
        return partial(step, **options) if options else step


def run_update(
    *,
    dims: Sequence[UpdateDims] = (*EMBEDDED, *PUBLISHED),
    batches: Sequence[int] | None = None,
    formats: Sequence[str] = FORMATS,
    gates: Sequence[str] | None = None,
    overlap: bool = False,
    requantise_every: Sequence[int] = (),
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
            (`update_ring`).
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
    _check_arguments(formats, batches, gates, samples, requantise_every, device)
    report: Progress = progress or (lambda _stage, _done, _total: None)
    rows: list[UpdateRow] = []
    total = len(dims) * len(batches) * len(formats) * len(gates)
    for layer, gate, state in product(dims, gates, formats):
        fused = gate == "fused"
        checked = {
            c: _checked(c, layer, state, device, fused)
            for c in (
                replace(c, overlap=2 * overlap) for c in _configurations(layer, state, device)
            )
        }
        for batch in batches:
            row = _measured(layer, state, batch, checked, device, samples, warmup, seed, fused)
            rows.append(row)
            report("updates", len(rows), total)
    rings = tuple(
        ring_rows(
            dims, batches, requantise_every, gates, overlap, device, samples, warmup, seed, report
        )
    )
    peers = peer_rows(dims, batches, gates, device, samples, warmup, seed, report)
    protocol = {
        "inputs": "synthetic: normal q, k, v and states; decay exp(-U(0, 0.2)) or random raw gates",
        "gates": list(gates),
        "overlapped_launches": overlap,
        "input_dtype": str(input_dtype(device)).removeprefix("torch."),
        "timing": "CUDA graph replay over rotated slots" if on_gpu else "wall clock",
        "backend_note": None if on_gpu else "reference in torch: says nothing about the kernels",
        "bytes": "states read and written once, inputs read once, output written once",
        "samples": samples,
        "warmup": warmup,
        "seed": seed,
    }
    return UpdateReport(device_record(device), protocol, tuple(rows), peers, rings)


def _check_arguments(
    formats: Sequence[str],
    batches: Sequence[int],
    gates: Sequence[str],
    samples: int,
    requantise_every: Sequence[int],
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


def _configurations(layer: UpdateDims, state: str, device: torch.device) -> list[Configuration]:
    """Implementations worth timing: all that work for this format on this device."""
    key_dim, value_dim = layer.key_dim, layer.value_dim
    if state == "damp":
        packed = [PackedLayout(key_dim, value_dim, layer.protected, GROUP)]
        if device.type == "cuda" and packed[0].order == "fragment":
            packed.append(PackedLayout(key_dim, value_dim, layer.protected, GROUP, "natural"))
        return [Configuration(update.backend(device, layout), layout) for layout in packed]
    rows = DenseLayout(key_dim, value_dim, _DTYPES[state])
    if update.backend(device, rows) != "triton":
        return [Configuration("reference", rows)]
    columns = DenseLayout(key_dim, value_dim, _DTYPES[state], "columns")
    found = [
        Configuration("triton", layout, width, warps)
        for layout, width, warps in (
            (rows, 8, 1),
            (rows, 16, 1),
            (columns, 8, 1),
            (columns, 16, 1),
            (columns, 32, 1),
            (columns, 32, 4),
        )
    ]
    fragment = PackedLayout(key_dim, value_dim, 0).has_fragment_order
    if device.type == "cuda" and fragment and state != "fp32":
        sixteen = DenseLayout(key_dim, value_dim, _DTYPES[state], "fragment")
        if update.backend(device, sixteen) == "gluon":
            found.append(Configuration("gluon", sixteen))
    if value_dim % 8 == 0:
        tiles = DenseLayout(key_dim, value_dim, _DTYPES[state], "tiles", 8)
        found.append(Configuration("triton", tiles, 8, 1))
    return found


def _checked(
    configuration: Configuration,
    layer: UpdateDims,
    state: str,
    device: torch.device,
    fused: bool,
) -> dict[str, Any]:
    """Errors of one configuration at these dimensions.

    Raises:
        NumericError: they are too large.
    """
    found = update.check_step(
        "reference",
        device,
        configuration.layout,
        per_channel=layer.kind == "kda",
        key_heads=layer.key_heads,
        heads=layer.value_heads,
        batch=4,
        scaled=configuration.scaled,
        fused=fused,
        step=configuration.step(),
    )
    if found.problem is not None:
        raise NumericError(
            f"{layer.name}, {state}, {configuration.label}: {found.problem}; nothing is reported",
            hint="the update kernel is wrong on this device; run `hybridstate doctor`",
            state=state,
        )
    return {k: v for k, v in asdict(found).items() if k != "problem"}


def _measured(
    layer: UpdateDims,
    state: str,
    batch: int,
    checked: dict[Configuration, dict[str, Any]],
    device: torch.device,
    samples: int,
    warmup: int,
    seed: int,
    fused: bool,
) -> UpdateRow:
    """Time every configuration briefly, the fastest one fully, and the in-place pass."""
    first = next(iter(checked))
    head_bytes = first.layout.head_bytes
    moved = 2 * batch * layer.value_heads * head_bytes
    sets = rotation(moved // 2, device)
    inputs = random_inputs(layer, batch, device, seed, fused=fused)
    fusion = random_fusion(layer, device, seed, fused=fused)
    tried: dict[str, float] = {}
    best, best_time = first, float("inf")
    if len(checked) > 1:
        for candidate in checked:
            launches = _launches(candidate, layer, batch, sets, inputs, seed, fusion)
            found = _timed(candidate, launches, device, 1, TUNING_SAMPLES)
            tried[candidate.label] = found.median
            if found.median < best_time:
                best, best_time = candidate, found.median
    launches = _launches(best, layer, batch, sets, inputs, seed, fusion)
    step = _timed(best, launches, device, warmup, samples)
    del launches  # the pools of states make room for the pass
    memory = torch.ones(sets, moved // 8, dtype=torch.float32, device=device)
    passes = [partial(part.add_, 1.0) for part in memory]
    memory_pass = measure_launches(passes, device=device, warmup=warmup, repeat=samples)
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
        memory_pass=memory_pass,
        check=checked[best],
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
