"""Compile for sm_90, without a GPU, what the package launches: every plain Triton kernel, by its own caller.

Triton's interpreter runs kernels as Python and takes what its compiler refuses: a name of two types, more shared
memory than a processor has, a grid beyond the limits. Here the interpreter is off and `hopper` stands in for the
driver. The types, strides and constants are those of the callers: `package_launches` for models in float32 and
bfloat16, `small_launches` for small states. The assembler, half of the time, runs on request. Gluon kernels are
compiled by `compile_offline` and `ring_offline`.

`python -m tests.kernels.compile_launches [--all] [--assemble] [--workers N] [NAME...]`: one line per group of launches,
exit code 1 where a launch fails, a kernel of the package is in none of them, or one that models use lacks a data type.
"""

import argparse
import importlib
import os
import pkgutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from tempfile import TemporaryDirectory
from typing import Final

import torch
import triton
import triton.language as tl
from triton.runtime import jit

import hybridstate.kernels
from hybridstate.kernels.dispatch import brief
from tests.kernels import small_launches
from tests.kernels.hopper import Launches, compiling
from tests.kernels.package_launches import (
    MODELS,
    Sizes,
    mixtures,
    moves,
    prompt_inputs,
    prompt_recurrence,
    step_attention,
    step_norms,
    storing,
    updates,
)

MODEL_TYPES: Final = {"bf16": torch.bfloat16, "fp32": torch.float32}


def kernels_of_the_package() -> set[str]:
    """Names of the plain kernels that something launches, by looking into every module; helpers are part of theirs."""
    found = set()
    for info in pkgutil.iter_modules(hybridstate.kernels.__path__):
        module = importlib.import_module(f"hybridstate.kernels.{info.name}")
        for value in vars(module).values():
            if type(value) is jit.JITFunction and value.fn.__module__ == module.__name__:
                found.add(value.fn.__name__)
    return {name for name in found if name.endswith("_kernel")}


# -- groups of launches ----------------------------------------------------------------------------

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
