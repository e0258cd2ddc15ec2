"""`bench update`: one recurrent decode step on pooled states, dense and packed, beside an in-place pass.

Each format is first checked against float64 at the very dimensions it will be timed at; a failed check ends the
bench. Dense formats are tuned at every batch over several layouts, so that a speed-up is over the best of them and
not over a default. The pass `x += 1` over as many bytes, in the same run, is the bandwidth a step cannot exceed.
Inputs and states are random and say so.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from hybridstate.bench.layers import (
    EMBEDDED,
    PUBLISHED,
    UpdateDims,
    input_dtype,
    random_inputs,
)
from hybridstate.bench.peers import peer_rows
from hybridstate.bench.timing import Samples, device_record, measure_launches, rotation
from hybridstate.defaults import GROUP
from hybridstate.errors import MissingRequirement, NumericError, UsageError
from hybridstate.kernels import update
from hybridstate.kernels.layout import DenseLayout, PackedLayout

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
GPU_BATCHES: Final = (1, 4, 16, 64, 256)
TUNING_SAMPLES: Final = 7
PACK_SLOTS: Final = 32
"""Random states are packed this many at a time and repeated over the pool."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """One implementation of one format."""

    backend: str
    layout: update.Layout
    columns: int | None = None
    warps: int = 1

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
        if self.columns is None:
            return update.runner(self.backend, self.layout)  # type: ignore[arg-type]
        from hybridstate.kernels import triton_update

        return partial(triton_update.dense_step, columns=self.columns, warps=self.warps)


@dataclass(frozen=True, slots=True)
class UpdateRow:
    """One format at one batch size.

    Attributes:
        state_bytes: states read and written by one step.
        io_bytes: q, k, v, gates, output and slots.
        pools: distinct sets of slots the launches rotate over.
        step, memory_pass: seconds of one step, and of `x += 1` over `state_bytes`.
        check: errors against float64 at these dimensions.
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

    def speedups(self) -> list[dict[str, Any]]:
        """Median FP32 time over each other format's, at equal dimensions and batch."""
        base = {(r.dims, r.batch): r.step.median for r in self.rows if r.state == "fp32"}
        return [
            {
                "dims": r.dims.name,
                "batch": r.batch,
                "state": r.state,
                "fp32_over_this": base[r.dims, r.batch] / r.step.median,
            }
            for r in self.rows
            if r.state != "fp32" and (r.dims, r.batch) in base
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain values with every sample."""
        return {
            "device": self.device,
            "protocol": self.protocol,
            "rows": [row.to_json() for row in self.rows],
            "speedups": self.speedups(),
            "peers": list(self.peers),
        }


def run_update(
    *,
    dims: Sequence[UpdateDims] = (*EMBEDDED, *PUBLISHED),
    batches: Sequence[int] | None = None,
    formats: Sequence[str] = FORMATS,
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
    _check_arguments(formats, batches, samples, device)
    report: Progress = progress or (lambda _stage, _done, _total: None)
    rows: list[UpdateRow] = []
    total = len(dims) * len(batches) * len(formats)
    for layer in dims:
        for state in formats:
            checked = {
                c: _checked(c, layer, state, device) for c in _configurations(layer, state, device)
            }
            for batch in batches:
                rows.append(_measured(layer, state, batch, checked, device, samples, warmup, seed))
                report("updates", len(rows), total)
    peers = peer_rows(dims, batches, device, samples, warmup, seed, report)
    protocol = {
        "inputs": "synthetic: normal q, k, v and states, decay exp(-U(0, 0.2))",
        "input_dtype": str(input_dtype(device)).removeprefix("torch."),
        "timing": "CUDA graph replay over rotated slots" if on_gpu else "wall clock",
        "backend_note": None if on_gpu else "reference in torch: says nothing about the kernels",
        "bytes": "states read and written once, inputs read once, output written once",
        "samples": samples,
        "warmup": warmup,
        "seed": seed,
    }
    return UpdateReport(device_record(device), protocol, tuple(rows), peers)


def _check_arguments(
    formats: Sequence[str], batches: Sequence[int], samples: int, device: torch.device
) -> None:
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
    if value_dim % 8 == 0:
        tiles = DenseLayout(key_dim, value_dim, _DTYPES[state], "tiles", 8)
        found.append(Configuration("triton", tiles, 8, 1))
    return found


def _checked(
    configuration: Configuration, layer: UpdateDims, state: str, device: torch.device
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
) -> UpdateRow:
    """Time every configuration briefly, the fastest one fully, and the in-place pass."""
    first = next(iter(checked))
    head_bytes = first.layout.head_bytes
    moved = 2 * batch * layer.value_heads * head_bytes
    sets = rotation(moved // 2, device)
    inputs = random_inputs(layer, batch, device, seed)
    tried: dict[str, float] = {}
    best, best_time = first, float("inf")
    if len(checked) > 1:
        for candidate in checked:
            launches = _launches(candidate, layer, batch, sets, inputs, seed)
            found = _timed(candidate, launches, device, 1, TUNING_SAMPLES)
            tried[candidate.label] = found.median
            if found.median < best_time:
                best, best_time = candidate, found.median
    launches = _launches(best, layer, batch, sets, inputs, seed)
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
        partial(step, *vectors, pool, slots.clone(), out, scale, layout)
        for slots in order.split(batch)
    ]


def _pool(layout: update.Layout, slots: int, heads: int, device: torch.device, seed: int) -> Tensor:
    """Random states in storage order."""
    generator = torch.Generator(device).manual_seed(seed)
    count = min(slots, PACK_SLOTS)
    shape = (count, heads, layout.key_dim, layout.value_dim)
    packed = layout.pack(torch.randn(shape, generator=generator, device=device))
    pool = packed.new_empty(slots, *packed.shape[1:])
    for part in pool.split(count):
        part.copy_(packed[: len(part)])
    return pool
