"""Compile for sm_90, without a GPU, what the package launches: every plain Triton kernel, by its own caller.

Triton's interpreter runs kernels as Python and takes what its compiler refuses: a name of two types, more shared
memory than a processor has, a grid beyond the limits. Here the interpreter is off, a stand-in for the driver names
Hopper and a launch ends where its kernel is compiled; outputs are never written, and inputs lie on the CPU. The types,
strides and constants are those of the callers, for models in float32 and bfloat16, and for small states. The
assembler, half of the time, runs on request. Gluon kernels are compiled by `compile_offline` and `ring_offline`.

`python -m tests.kernels.compile_launches [--all] [--assemble] [--workers N] [NAME...]`: one line per group of launches,
exit code 1 where a launch fails, a kernel of the package is in none of them, or one that models use lacks a data type.
"""

import argparse
import importlib
import os
import pkgutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from multiprocessing import get_context
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver, jit

import hybridstate.kernels
from hybridstate.kernels import attention, experts, norms, prefill, prefill_inputs, router, storage
from hybridstate.kernels.dispatch import brief
from hybridstate.kernels.fusion import StepFusion, draw_fusion
from hybridstate.kernels.layout import DenseLayout, PackedLayout
from hybridstate.kernels.multi_token import run_tokens
from hybridstate.kernels.packed_rows import KeptRows, gather_packed, scatter_packed
from hybridstate.kernels.ring_reference import Ring
from hybridstate.kernels.ring_update import ring_flush, ring_step
from hybridstate.kernels.update import dense_step, packed_step
from tests.kernels import small_launches
from tests.kernels import transfer_cases as transfer
from tests.kernels.exchanges import fused_exchanges

SHARED: Final = 232_448
"""Bytes of shared memory that a block may have on Hopper."""
GRID: Final = (2**31 - 1, 65_535, 65_535)
"""Most programs along each axis of a grid."""
MODEL_TYPES: Final = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Hopper:
    """What Triton asks its driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind


@dataclass
class Launches:
    """What was launched: names of the kernels that compiled, and one line for each fault."""

    compiled: set[str]
    faults: list[str]


@contextmanager
def compiling(*, assemble: bool = False) -> Iterator[Launches]:
    """Compile launches instead of running them, as far as PTX; a fault does not end the code that launches."""
    if triton.knobs.runtime.interpret:
        raise RuntimeError("unset TRITON_INTERPRET: kernels were decorated for the interpreter")
    driver.set_active(Hopper())  # type: ignore[arg-type]
    found = Launches(set(), [])
    original, backend = jit.JITFunction.run, CUDABackend.make_cubin
    if not assemble:
        CUDABackend.make_cubin = lambda *_: b""  # type: ignore[method-assign]

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        name = self.fn.__name__
        try:
            built = original(self, *args, grid=grid, warmup=True, **options)
        except Exception as error:
            found.faults.append(f"{name}: {brief(error)}")
            return
        if places := fused_exchanges(built.asm["ptx"]):
            where = ", ".join(sorted(places))
            found.faults.append(f"{name}: the lanes of a warp differ in a sum, {where}")
        shared, size = built.metadata.shared, tuple(grid)
        if shared > SHARED:
            found.faults.append(f"{name}: {shared} bytes of shared memory, at most {SHARED}")
        elif any(n > most for n, most in zip(size, GRID, strict=False)) or prod(size) < 1:
            found.faults.append(f"{name}: a grid of {size}, at most {GRID}")
        else:
            found.compiled.add(name)

    jit.JITFunction.run = run  # type: ignore[method-assign]
    try:
        yield found
    finally:
        jit.JITFunction.run = original  # type: ignore[method-assign]
        CUDABackend.make_cubin = backend  # type: ignore[method-assign]


def kernels_of_the_package() -> set[str]:
    """Names of the plain kernels that something launches, by looking into every module; helpers are part of theirs."""
    found = set()
    for info in pkgutil.iter_modules(hybridstate.kernels.__path__):
        module = importlib.import_module(f"hybridstate.kernels.{info.name}")
        for value in vars(module).values():
            if type(value) is jit.JITFunction and value.fn.__module__ == module.__name__:
                found.add(value.fn.__name__)
    return {name for name in found if name.endswith("_kernel")}


# -- launches as the package makes them ------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """A model: width, linear heads of keys and values, attention, experts."""

    width: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    per_channel: bool
    inner: int
    expert_inner: int = 0
    experts: int = 0
    latent: bool = False

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def units(self) -> int:
        return self.heads * (self.key_dim if self.per_channel else 1)


QWEN = Sizes(2048, 16, 32, 128, 128, False, 512, 512, 256)
KIMI = Sizes(2304, 32, 32, 128, 128, True, 9216, 1024, 256, latent=True)
TINY_GDN = Sizes(256, 1, 2, 128, 128, False, 512)
TINY_KDA = Sizes(256, 2, 2, 128, 128, True, 512)
MODELS: Final = {"qwen": QWEN, "kimi": KIMI, "tiny-gdn": TINY_GDN, "tiny-kda": TINY_KDA}
LENGTHS: Final = (1, 2, 33, 4096)
BATCHES: Final = (1, 256)


def joined(rows: int, m: Sizes, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Columns of one product for all projections: convolved channels, gate, raw decays, raw strengths."""
    widths = [m.channels, m.heads * m.value_dim, m.units, m.heads]
    padded = -(-sum(widths) // 8) * 8
    return torch.empty(rows, padded, dtype=dtype)[:, : sum(widths)].split(widths, 1)


def fusion_of(m: Sizes) -> StepFusion:
    """Gates of the model's kind, derived in the kernels."""
    shape = (m.heads, m.key_dim) if m.per_channel else (m.heads,)
    return StepFusion(
        torch.zeros(m.heads), torch.zeros(shape), -5.0 if m.per_channel else None, beta_scale=1.0
    )


def operands(x: Tensor, m: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v by head."""
    keys = m.key_heads * m.key_dim
    q, k, v = x.split([keys, keys, m.heads * m.value_dim], 1)
    return (
        q.unflatten(1, (m.key_heads, -1)),
        k.unflatten(1, (m.key_heads, -1)),
        v.unflatten(1, (m.heads, -1)),
    )


def prompt_inputs(m: Sizes, dtype: torch.dtype) -> None:
    """A prompt between its projection and the recurrence."""
    for tokens in LENGTHS:
        mixed, _, decay, strength = joined(tokens, m, dtype)
        taps = torch.empty(m.channels, 4, dtype=dtype)
        for window in (dtype, torch.float32):
            held = torch.empty(m.channels, 3, dtype=window)
            prefill_inputs.convolve(mixed, held, taps, None)
        prefill_inputs.convolve(mixed, held, taps, torch.empty(m.channels, dtype=dtype))
        prefill_inputs.gates(decay, strength, fusion_of(m))
        count = torch.zeros(1, dtype=torch.int64)
        prefill_inputs.convolve(mixed, held, taps, None, count)
        prefill_inputs.gates(decay, strength, fusion_of(m), count)


def prompt_recurrence(m: Sizes, dtype: torch.dtype) -> None:
    """A prompt through the recurrence, from a state and from none."""
    for tokens in LENGTHS:
        q, k, v = (x[None] for x in operands(torch.empty(tokens, m.channels, dtype=dtype), m))
        gate = (m.heads, m.key_dim) if m.per_channel else (m.heads,)
        g, beta = torch.empty(1, tokens, *gate), torch.empty(1, tokens, m.heads)
        state = torch.empty(1, m.heads, m.key_dim, m.value_dim)
        for before in (None, state):
            prefill.prefill(q, k, v, g, beta, before)


def step_norms(m: Sizes, dtype: torch.dtype) -> None:
    """Norms, convolution and gated products of a step and of a prompt."""
    weight, head = torch.empty(m.width, dtype=dtype), torch.empty(m.value_dim, dtype=dtype)
    taps = torch.empty(m.channels, 4, dtype=dtype)
    for rows in (*BATCHES, 33):
        x = torch.empty(rows, 1, m.width, dtype=dtype)
        for centred in (False, True):
            norms.rms_norm(x, weight, 1e-6, zero_centred=centred)
        mixed, gate, _, _ = joined(rows, m, dtype)
        o = torch.empty(rows, m.heads, m.value_dim, dtype=dtype)
        for activation in ("silu", "sigmoid"):
            gates = gate.unflatten(1, (m.heads, -1))
            norms.rms_norm(o, head, 1e-6, gate=gates, activation=activation)
        slots = torch.zeros(rows, dtype=torch.int64)
        pool = torch.empty(300, m.channels, 3, dtype=dtype)
        norms.conv_step(mixed, pool, taps, None, slots)
        norms.conv_step(
            mixed, torch.empty(rows, m.channels, 4, dtype=dtype), taps, taps[:, 0].contiguous()
        )
        both = torch.empty(rows, 2 * m.inner, dtype=dtype)
        norms.gated(both[:, m.inner :], both[:, : m.inner], "silu")


def mixtures(m: Sizes, dtype: torch.dtype) -> None:
    """Router and experts of a step."""
    gate_up = torch.empty(m.experts, 2 * m.expert_inner, m.width, dtype=dtype)
    down = torch.empty(m.experts, m.width, m.expert_inner, dtype=dtype)
    for rows in (*BATCHES, 1024):  # short prompts too
        x = torch.empty(rows, m.width, dtype=dtype)
        bias = torch.empty(m.experts) if m.per_channel else None
        logits = torch.empty(rows, m.experts, dtype=dtype if bias is None else torch.float32)
        weights, chosen = router.route(logits, 8, bias=bias, factor=2.5)
        shared = torch.empty(rows, m.width, dtype=dtype)
        experts.experts_step(x, gate_up, down, chosen, weights)
        gate = None if bias is not None else torch.empty(rows, 8, dtype=dtype)[:, 1]
        experts.experts_step(x, gate_up, down, chosen, weights, shared, gate)


def step_attention(m: Sizes, dtype: torch.dtype) -> None:
    """Attention of a step over lines and over a masked cache, new keys and values."""
    for rows, length, masked in ((1, 96, False), (1, 8200, True), (256, 1024, False)):
        places = torch.zeros(rows, dtype=torch.int64)
        seen = torch.zeros(rows, length, dtype=torch.bool)
        if m.latent:
            q = torch.empty(rows, 32, 576, dtype=dtype)
            keys: Tensor = torch.empty(rows, 1, length, 576, dtype=dtype)
            values, width, new = None, 512, torch.empty(rows, 1, 64, dtype=dtype)
            attention.append_step(new, keys, places, places, first=512)
        else:
            q = torch.empty(rows, 16, 256, dtype=dtype)
            keys = torch.empty(rows, 2, length, 256, dtype=dtype)
            values, width, new = torch.empty_like(keys), 0, torch.empty(rows, 2, 256, dtype=dtype)
            attention.append_step(new, keys, places, places)
        if masked:
            attention.attention_step(q, keys, values, seen, 0.1, width)
            continue
        attention.attention_step(q, keys, values, None, 0.1, width, lines=places, lengths=places)


def updates(m: Sizes, dtype: torch.dtype) -> None:
    """Decode steps, rings and several tokens by the plain kernels, on packed and dense states."""
    packed = PackedLayout(m.key_dim, m.value_dim, 16, order="natural")
    fragment = PackedLayout(m.key_dim, m.value_dim, 16, order="fragment")
    dense = DenseLayout(m.key_dim, m.value_dim)
    derived = draw_fusion(m.heads, m.key_dim, m.per_channel, torch.Generator())
    plain = fusion_of(m)
    scale = torch.empty(m.heads, m.value_dim)
    slots = torch.zeros(3, dtype=torch.int64)
    mixed, _, decay, strength = joined(3, m, dtype)
    vectors = operands(mixed, m)
    raw = decay.unflatten(1, (m.heads, m.key_dim)) if m.per_channel else decay
    given = (*vectors, raw, strength)
    for fusion, layout in ((derived, packed), (plain, packed), (plain, fragment)):
        pool = torch.empty(4, m.heads, layout.head_bytes, dtype=torch.uint8)
        options: dict[str, Any] = {"layout": layout, "fusion": fusion, "backend": "triton"}
        packed_step(*given, pool, slots, value_scale=scale, **options)
    for fusion, kind in (
        (derived, torch.float32),
        (plain, torch.float32),
        (derived, torch.float16),
        (plain, torch.bfloat16),
    ):
        options = {"fusion": fusion, "backend": "triton"}
        options["layout"] = DenseLayout(m.key_dim, m.value_dim, kind)
        pool = torch.empty(4, m.heads, m.key_dim, m.value_dim, dtype=kind)
        dense_step(*given, pool, slots, value_scale=None, **options)
    pool = torch.empty(4, m.heads, packed.head_bytes, dtype=torch.uint8)
    ring = Ring.empty(4, m.key_heads, m.heads, packed, 8, per_channel=m.per_channel)
    options = {"layout": packed, "backend": "triton"}
    ring_step(
        *vectors, raw, strength, pool, ring, slots, value_scale=scale, fusion=plain, **options
    )
    ring_flush(pool, ring, slots, **options)
    for tokens in (1, 64):
        some = tuple(x[:1, None].expand(3, tokens, *x.shape[1:]) for x in (*vectors, raw, strength))
        run_tokens(*some, pool, slots, value_scale=scale, **options)
        states = torch.empty(4, m.heads, m.key_dim, m.value_dim)
        run_tokens(*some, states, slots, layout=dense, backend="triton")


def moves() -> None:
    """Slots between pools, checkpoints and caches."""
    square, odd = PackedLayout(128, 128, 16), PackedLayout(24, 40, 16)
    for layout in (square, odd, PackedLayout(128, 128, 16, order="natural")):
        with suppress(AssertionError):  # nothing was computed
            transfer.check_pack(layout, "cpu")
        with suppress(AssertionError):
            transfer.check_packed_checkpoint(layout, "cpu", per_channel=False)
        state = torch.empty(2, layout.head_bytes, dtype=torch.uint8)
        kept = KeptRows.from_mask(torch.ones(2, layout.key_dim, dtype=torch.bool), layout)
        rows = kept.buffers(1, layout)
        gather_packed(state, kept, rows, layout, backend="triton")
        scatter_packed(rows, kept, state, layout, backend="triton")
    for codec, scale in transfer.FORMS:
        with suppress(AssertionError):
            transfer.check_rows(codec, scale, "cpu", per_channel=codec == "fp32")
    for shape, dtype in (((3, 2, 8, 20), torch.float32), ((3, 2, 21), torch.uint8)):
        with suppress(AssertionError):
            transfer.check_copy("cpu", shape, dtype)


def storing() -> None:
    """Formats of a calibration, all arms at once."""
    heads, key_dim, value_dim = 2, 128, 128
    arms = torch.arange(3, dtype=torch.int32)
    tables = storage.StorageTables(
        arms,
        torch.zeros(3, heads, key_dim, dtype=torch.uint8),
        torch.zeros(3, heads, value_dim, dtype=torch.int32),
        torch.ones(3, heads, value_dim),
    )
    state = torch.empty(6, heads, key_dim, value_dim)
    storage.store_in_place(state, tables, arms, 2, torch.zeros(6, dtype=torch.int32), arms)


Part = Callable[[Sizes, torch.dtype], None]
BOTH: Final = tuple(MODEL_TYPES)
USUAL: Final[tuple[tuple[Part, str, tuple[str, ...]], ...]] = (
    (prompt_recurrence, "kimi", BOTH),
    (step_attention, "kimi", ("bf16",)),
    (updates, "kimi", BOTH),
    (prompt_recurrence, "qwen", BOTH),
    (mixtures, "kimi", BOTH),
    (step_attention, "qwen", BOTH),
    (prompt_inputs, "kimi", BOTH),
    (prompt_inputs, "qwen", BOTH),
    (step_norms, "qwen", BOTH),
)
"""Launches of models that between them meet every kernel, longest first."""
OTHERS: Final[tuple[tuple[Part, str, tuple[str, ...]], ...]] = (
    (step_attention, "kimi", ("fp32",)),
    (prompt_recurrence, "tiny-kda", BOTH),
    (prompt_recurrence, "tiny-gdn", BOTH),
    (updates, "qwen", BOTH),
    (mixtures, "qwen", BOTH),
    (prompt_inputs, "tiny-kda", BOTH),
    (prompt_inputs, "tiny-gdn", BOTH),
    (step_norms, "kimi", BOTH),
    (step_norms, "tiny-kda", BOTH),
    (step_norms, "tiny-gdn", BOTH),
)
"""The same kernels with other constants."""


def groups(*, every: bool = True) -> dict[str, tuple[str | None, Callable[[], None]]]:
    """Launches by name, with the data type of the model; all of them, or those that meet every kernel."""
    return {
        **{
            f"{part.__name__} {model} {kind}": (
                kind,
                partial(part, MODELS[model], MODEL_TYPES[kind]),
            )
            for part, model, kinds in (*USUAL, *(OTHERS if every else ()))
            for kind in kinds
        },
        "moves": (None, moves),
        "storing": (None, storing),
        "small steps": (None, small_launches.steps),
        "small rings": (None, small_launches.rings),
    }


# -- faults that must be found ---------------------------------------------------------------------


@triton.jit
def planted_type_kernel(x, out, COUNT: tl.constexpr):
    """Two shapes under one name: the interpreter does not mind."""
    old = tl.load(x + tl.arange(0, COUNT)[:, None] + tl.arange(0, 16)[None, :])
    if tl.program_id(0) == 0:
        old = tl.load(x + tl.arange(0, 16)[None, :])
    tl.store(out + tl.arange(0, 16)[None, :], old)


@triton.jit
def planted_memory_kernel(x, out, N, SIDE: tl.constexpr):
    """More tiles on their way than shared memory holds."""
    at = tl.arange(0, SIDE)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    total = tl.zeros([SIDE, SIDE], tl.float32)
    for n in range(N):
        tile = x + n * 2 * SIDE * SIDE + at
        total = tl.dot(tl.load(tile), tl.load(tile + SIDE * SIDE), total)
    tl.store(out + at, total)


@triton.jit
def planted_sum_kernel(x, out):
    """One product in every lane."""
    lane = tl.arange(0, 32)
    tl.store(out, tl.sum(tl.load(x + lane) * tl.load(x + 32 + lane), 0))


def planted() -> None:
    """One fault of each kind."""
    x = torch.empty(1024, 1024, dtype=torch.bfloat16)
    planted_type_kernel[(1,)](x, x, 32)
    planted_memory_kernel[(1,)](x, x, 64, 128, num_stages=8)
    planted_type_kernel[(1, 70_000)](x, x, 1)
    planted_sum_kernel[(1,)](torch.empty(64), torch.empty(1))


PLANT: Final = "planted faults"
PLANTED: Final = (
    "planted_type_kernel: CompilationError",
    "bytes of shared memory",
    "a grid of",
    "the lanes of a warp differ",
)


# -- running -------------------------------------------------------------------------------------


def compiled(name: str, *, assemble: bool) -> tuple[str, Launches, float]:
    """One group of launches, and its processor seconds."""
    torch.set_num_threads(1)
    began = time.process_time()
    with compiling(assemble=assemble) as found:
        try:
            (planted if name == PLANT else groups()[name][1])()
        except Exception as error:  # a caller that fails by itself is a fault as well
            found.faults.append(f"{name}: {brief(error)}")
    return name, found, time.process_time() - began


def missing(met: dict[str | None, set[str]]) -> list[str]:
    """Kernels of the package without a launch, and those of models without one for a data type."""
    named = {key: value for key, value in met.items() if key is not None}
    lines = [
        f"{name}: no launch compiles it"
        for name in kernels_of_the_package() - set().union(*met.values())
    ]
    for kind, kernels in named.items():
        lines += [
            f"{x}: no launch of a model in {kind}" for x in set().union(*named.values()) - kernels
        ]
    return sorted(lines)


def say(*lines: str) -> None:
    """Lines at once, so that a run that is cut short has said what it did."""
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


def main(names: list[str], *, every: bool, assemble: bool, workers: int) -> int:
    """Groups whose names contain one of `names` (any, if none), and the planted faults."""
    known = groups(every=every)
    chosen = [*(x for x in known if not names or any(n in x for n in names)), PLANT]
    met: dict[str | None, set[str]] = {None: set()} | {kind: set() for kind in MODEL_TYPES}
    problems = []
    with TemporaryDirectory() as folder, ProcessPoolExecutor(workers, get_context("fork")) as pool:
        if not assemble:  # what is not whole belongs into no cache
            os.environ["TRITON_CACHE_DIR"] = folder
        run = partial(compiled, assemble=assemble)
        for name, found, took in pool.map(run, chosen):
            say(f"{name:32s} {took:5.1f} s  {', '.join(sorted(found.compiled))}")
            if name == PLANT:
                pairs = zip(PLANTED, found.faults, strict=False)
                right = len(found.faults) == len(PLANTED) and all(a in b for a, b in pairs)
                problems += [] if right else [f"planted faults: {found.faults}"]
                continue
            met[known[name][0]] |= found.compiled
            problems += [f"{name}: {fault}" for fault in dict.fromkeys(found.faults)]
    problems += [] if names else missing(met)
    say(*problems, f"Triton {triton.__version__}: {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="the other models too")
    parser.add_argument("--assemble", action="store_true", help="as far as machine code")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    sys.exit(main(given.names, every=given.all, assemble=given.assemble, workers=given.workers))
