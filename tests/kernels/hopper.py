"""A stand-in for the driver of a Hopper GPU: what is launched is compiled for sm_90 and goes no further.

Outputs are never written, and inputs lie on the CPU. Shared memory and grids are held against Hopper's limits, sums
against `exchanges`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver, jit

from hybridstate.kernels.dispatch import brief
from tests.kernels.exchanges import fused_exchanges

SHARED: Final = 232_448
"""Bytes of shared memory that a block may have on Hopper."""
GRID: Final = (2**31 - 1, 65_535, 65_535)
"""Most programs along each axis of a grid."""


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
