"""`bench codecs`: packing, unpacking, checkpoint rows and slot copies, beside an in-place pass over as many bytes.

Every transfer is first compared with its torch twin, byte for byte, on the CPU and at the same head geometry; one
difference ends the bench. Then each is timed over rotated pools, one launch for all layers, and the pass `x += 1`
over as many bytes in the same run says what share of the reachable bandwidth it takes. States and masks are random
and say so.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import torch

from hybridstate.bench.codec_work import (
    KIMI_LINEAR,
    QWEN3_NEXT,
    TINY,
    StateDims,
    Transfer,
    Workload,
)
from hybridstate.bench.room import check_room, check_samples
from hybridstate.bench.timing import (
    Samples,
    device_record,
    in_place_pass,
    measure_launches,
    rotation,
)
from hybridstate.errors import MissingRequirement, NumericError, UsageError

Progress = Callable[[str, int, int], None]

MODELS: Final = {dims.name: dims for dims in (KIMI_LINEAR, QWEN3_NEXT, TINY)}
CHECK_LAYERS: Final = 2
CHECK_SLOTS: Final = 2


@dataclass(frozen=True, slots=True)
class CodecRow:
    """One transfer at one size.

    Attributes:
        nbytes: bytes read and written by one launch.
        launch, memory_pass: seconds of the launch, and of `x += 1` over as many bytes.
    """

    model: str
    slots: int
    transfer: str
    nbytes: int
    launch: Samples
    memory_pass: Samples

    @property
    def gb_per_s(self) -> float:
        """Bytes over the median time."""
        return self.nbytes / self.launch.median / 1e9

    @property
    def share(self) -> float:
        """Bandwidth as a share of the in-place pass."""
        return self.memory_pass.median / self.launch.median

    def to_json(self) -> dict[str, Any]:
        """Plain values with every sample."""
        return {
            "model": self.model,
            "slots": self.slots,
            "transfer": self.transfer,
            "bytes": self.nbytes,
            "launch_s": self.launch.to_json(),
            "gb_per_s": self.gb_per_s,
            "pass_s": self.memory_pass.to_json(),
            "pass_gb_per_s": self.nbytes / self.memory_pass.median / 1e9,
            "share_of_pass": self.share,
        }


@dataclass(frozen=True, slots=True)
class CodecReport:
    """Everything measured, and on what."""

    device: dict[str, Any]
    protocol: dict[str, Any]
    checks: tuple[dict[str, Any], ...]
    rows: tuple[CodecRow, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values with every sample."""
        return {
            "device": self.device,
            "protocol": self.protocol,
            "checks": list(self.checks),
            "rows": [row.to_json() for row in self.rows],
        }


def run_codecs(
    *,
    models: Sequence[str] | None = None,
    slots: int = 8,
    device: torch.device | str = "cpu",
    samples: int = 20,
    warmup: int = 3,
    seed: int = 0,
    progress: Progress | None = None,
    on_row: Callable[[CodecRow], None] | None = None,
) -> CodecReport:
    """Check and time every transfer.

    Args:
        models: of `MODELS`; Kimi-Linear on a GPU and a tiny size on a CPU by default.
        slots: slots moved by one launch.
        device: where to run; on a CPU the torch twins run and the report says so.
        samples, warmup: rounds of measurement and before it.
        seed: of states, masks and maps.
        progress: called with (stage, done, total).
        on_row: called with each row as it is measured.

    Raises:
        NumericError: a transfer is wrong; nothing is reported then.
        UsageError: unknown model, or counts that are not positive.
        MissingRequirement: a GPU was asked for and there is none.
    """
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    names = tuple(models or (("kimi-linear",) if on_gpu else ("tiny",)))
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        raise UsageError(f"no sizes for {unknown[0]!r}", hint=f"choose from {', '.join(MODELS)}")
    if min(slots, samples) < 1:
        raise UsageError("slots and samples must be positive")
    check_samples("--samples", samples)
    if on_gpu and not torch.cuda.is_available():
        raise MissingRequirement("no CUDA device", hint="Use --device cpu.")
    largest = max(MODELS[name].dense_bytes for name in names)
    check_room("--slots", slots, largest, "dense slots", device)
    report: Progress = progress or (lambda _stage, _done, _total: None)
    checks: list[dict[str, Any]] = []
    rows: list[CodecRow] = []
    for name in names:
        checks += check_transfers(MODELS[name], device, seed)
        for row in _measured(MODELS[name], slots, device, samples, warmup, seed, report):
            rows.append(row)
            if on_row is not None:
                on_row(row)
    protocol = {
        "inputs": "synthetic: normal states, random masks of the given share, random key orders and value scales",
        "timing": "CUDA graph replay over rotated pools" if on_gpu else "wall clock",
        "backend_note": None if on_gpu else "torch twins: says nothing about the kernels",
        "bytes": "states and checkpoints read or written once, tables and maps read once",
        "models": {name: asdict(MODELS[name]) for name in names},
        "slots": slots,
        "samples": samples,
        "warmup": warmup,
        "seed": seed,
    }
    return CodecReport(device_record(device), protocol, tuple(checks), tuple(rows))


def check_transfers(dims: StateDims, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """Every transfer at this head geometry against its twin on the CPU, byte for byte.

    Raises:
        NumericError: names the first one that differs.
    """
    small = replace(dims, layers=min(dims.layers, CHECK_LAYERS))
    cpu = torch.device("cpu")
    truth = Workload(small, CHECK_SLOTS, cpu, seed, "reference", host_states=True).transfers()
    tried = Workload(small, CHECK_SLOTS, device, seed, "auto", host_states=True).transfers()
    found = []
    for expected, transfer in zip(truth, tried, strict=True):
        compared, different = compared_bytes(expected, transfer)
        if different:
            raise NumericError(
                f"{dims.name}, {transfer.name}: {different} of {compared} bytes differ from the reference; "
                "nothing is reported",
                hint="the kernel is wrong on this device; run `hybridstate doctor`",
                transfer=transfer.name,
            )
        found.append(
            {
                "model": dims.name,
                "transfer": transfer.name,
                "compared_bytes": compared,
                "different": 0,
            }
        )
    return found


def compared_bytes(expected: Transfer, transfer: Transfer) -> tuple[int, int]:
    """Run both on results of zeros: bytes compared, and how many differ."""
    for one in (expected, transfer):
        for tensor in one.results:
            tensor.zero_()
        one.run()
    compared = different = 0
    for a, b in zip(expected.results, transfer.results, strict=True):
        left, right = (x.cpu().contiguous().flatten().view(torch.uint8) for x in (a, b))
        compared += len(left)
        different += int((left != right).sum())
    return compared, different


def _measured(
    dims: StateDims,
    slots: int,
    device: torch.device,
    samples: int,
    warmup: int,
    seed: int,
    report: Progress,
) -> "list[CodecRow]":
    """Time every transfer and the pass over as many bytes."""
    sets = rotation(slots * dims.dense_bytes, device)
    work = [Workload(dims, slots, device, seed + n, "auto") for n in range(sets)]
    columns = list(zip(*(one.transfers() for one in work), strict=True))
    rows, graph = [], device.type == "cuda"
    passes: dict[int, Samples] = {}
    for number, same in enumerate(columns):
        first: Transfer = same[0]
        launches = [one.run for one in same]
        timing: dict[str, Any] = {"device": device, "warmup": warmup, "repeat": samples}
        launch = measure_launches(launches, graph=graph, **timing)
        if first.nbytes not in passes:
            passes[first.nbytes] = in_place_pass(first.nbytes, sets, **timing)
        nbytes = sum(one.nbytes for one in same) // len(same)
        rows.append(CodecRow(dims.name, slots, first.name, nbytes, launch, passes[first.nbytes]))
        report("transfers", number + 1, len(columns))
    return rows
