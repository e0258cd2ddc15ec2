"""Compile the decode kernels for sm_90 without a GPU; one line each, exit code 1 if one spills to memory."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from hybridstate.kernels import gluon_update, triton_update

POINTERS = {
    "q": "*bf16", "k": "*bf16", "v": "*bf16", "out": "*bf16", "g": "*fp32", "beta": "*fp32",
    "value_scale": "*fp32", "slots": "*i64", "pool": "*u8",
}  # fmt: skip
HEADS = {"H": 32, "SCALED": True}
NATURAL = {
    "K": 128, "V": 128, "KHI": 16, "GROUP": 32, "HEAD_BYTES": 20224, "FRAGMENT": False,
    "GP": 32, "HP": 16, "LP": 128,
}  # fmt: skip
DENSE = {"K": 128, "V": 128, "KP": 128, "BV": 8, "TILE": 8, "S_TILE": 8, "S_ROW": 128, "S_COL": 1}


def compile_one(source: Any, kernel: Any, constants: dict[str, Any], pool: str = "*u8") -> bool:
    """Compile, print registers, stack and instruction count; True if nothing spills."""
    names = kernel.arg_names
    types = POINTERS | {"pool": pool}
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    fixed = {(names.index(n),): value for n, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in constants}
    options = {"num_warps": 1, "enable_fp_fusion": True}
    target = GPUTarget("cuda", 90, 32)
    built = triton.compile(
        source(kernel, signature, fixed, aligned), target=target, options=options
    )
    tools = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        report = [
            subprocess.run([tools, flag, file.name], capture_output=True, text=True, check=True)
            for flag in ("-res-usage", "-sass")
        ]
    usage = report[0].stdout + report[0].stderr
    found = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    count = len(re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/\s", report[1].stdout, re.M))
    sys.stdout.write(
        f"{kernel.__module__.rpartition('.')[2]:14s} {kernel.__name__:14s} "
        f"{'KDA' if constants['KDA'] else 'GDN'} pool {pool:5s} registers {found['REG']:3d} "
        f"stack {found['STACK']} local {found['LOCAL']} shared {built.metadata.shared} SASS {count}\n"
    )
    return found["STACK"] == found["LOCAL"] == 0


def main() -> int:
    """Every kernel with both gates at the published dimensions."""
    fine = []
    for kda in (False, True):
        heads = HEADS | {"HK": 32 if kda else 16, "KDA": kda}
        fine.append(compile_one(GluonASTSource, gluon_update.packed_kernel, heads | {"HIGH": 1}))
        fine.append(compile_one(ASTSource, triton_update.packed_kernel, heads | NATURAL))
        fine.append(compile_one(ASTSource, triton_update.dense_kernel, heads | DENSE, "*fp32"))
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
