"""Compile the decode kernels for sm_90 without a GPU; exit code 1 where one spills or outgrew its record.

`--update` writes registers, shared memory and instruction counts of this Triton version into the record.
"""

import json
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

from hybridstate.kernels import gluon_split, gluon_update, triton_update

RECORD = Path(__file__).parents[1] / "data" / "kernels-sm90.json"
SLACK = 1.08
"""Registers and instructions may exceed their record by this: patch releases of the compiler move them a little."""

POINTERS = {
    "q": "*bf16", "k": "*bf16", "v": "*bf16", "out": "*bf16", "g": "*fp32", "beta": "*fp32",
    "value_scale": "*fp32", "slots": "*i64", "pool": "*u8", "a_log": "*fp32",
    "dt_bias": "*fp32", "key_index": "*u8", "saturated": "*i32",
}  # fmt: skip
PLAIN: dict[str, Any] = {
    "SCALED": True, "GATE": 0, "LOWER": 0.0, "LOGIT": 0.0, "INDEXED": False, "COUNTED": False,
}  # fmt: skip
FUSED = {"GATE": 1, "LOGIT": 1.0}
GDN = {"H": 32, "HK": 16, "KDA": False} | PLAIN
KDA = {"H": 32, "HK": 32, "KDA": True} | PLAIN
MATRIX = {"K": 128, "V": 128, "HIGH": 1, "BF16": False, "W": 128, "BLOCK": 128, "OVERLAP": 0}
NATURAL = {
    "K": 128, "V": 128, "KHI": 16, "GROUP": 32, "HEAD_BYTES": 20224, "BLOCK": 0,
    "GP": 32, "HP": 16, "LP": 128,
}  # fmt: skip
DENSE = {
    "OVERLAP": 0,
    "K": 128,
    "V": 128,
    "KP": 128,
    "BV": 8,
    "TILE": 8,
    "S_TILE": 8,
    "S_ROW": 128,
    "S_COL": 1,
}

VARIANTS: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "gluon gdn 128": (GluonASTSource, gluon_update.packed_kernel, GDN | MATRIX, "*u8"),
    "gluon kda 128": (GluonASTSource, gluon_update.packed_kernel, KDA | MATRIX, "*u8"),
    "gluon gdn 128 fused, overlapped": (
        GluonASTSource, gluon_update.packed_kernel, GDN | MATRIX | FUSED | {"OVERLAP": 2}, "*u8",
    ),
    "gluon kda 128 fused": (
        GluonASTSource, gluon_update.packed_kernel, KDA | MATRIX | FUSED, "*u8",
    ),
    "gluon kda 128 safe gate, index, counter": (
        GluonASTSource, gluon_update.packed_kernel,
        KDA | MATRIX | FUSED | {"GATE": 2, "LOWER": -5.0, "INDEXED": True, "COUNTED": True}, "*u8",
    ),
    "gluon gdn 64": (GluonASTSource, gluon_update.packed_kernel, GDN | MATRIX | {"W": 64}, "*u8"),
    "gluon kda 32": (GluonASTSource, gluon_update.packed_kernel, KDA | MATRIX | {"W": 32}, "*u8"),
    "gluon gdn 96 x 192": (
        GluonASTSource, gluon_update.packed_kernel,
        GDN | MATRIX | FUSED | {"K": 96, "V": 192, "W": 64, "BLOCK": 64, "LOGIT": 2.0}, "*u8",
    ),
    "gluon kda 256 x 96": (
        GluonASTSource, gluon_update.packed_kernel,
        KDA | MATRIX | {"K": 256, "V": 96, "HIGH": 2, "W": 32, "BLOCK": 32}, "*u8",
    ),
    "gluon gdn fp16": (
        GluonASTSource, gluon_update.packed_kernel, GDN | MATRIX | {"HIGH": 8, "W": 64}, "*fp16",
    ),
    "gluon kda bf16": (
        GluonASTSource, gluon_update.packed_kernel,
        KDA | MATRIX | {"HIGH": 8, "BF16": True, "W": 64}, "*bf16",
    ),
    "gluon gdn split 32 x 8": (
        GluonASTSource, gluon_split.split_kernel, GDN | MATRIX | FUSED | {"W": 32, "WARPS": 8}, "*u8",
    ),
    "gluon kda split 32 x 8, index, counter": (
        GluonASTSource, gluon_split.split_kernel,
        KDA | MATRIX | FUSED | {"W": 32, "WARPS": 8, "INDEXED": True, "COUNTED": True}, "*u8",
    ),
    "triton gdn packed": (ASTSource, triton_update.packed_kernel, GDN | NATURAL, "*u8"),
    "triton kda packed fused": (ASTSource, triton_update.packed_kernel, KDA | NATURAL | FUSED, "*u8"),
    "triton gdn fp32": (ASTSource, triton_update.dense_kernel, GDN | DENSE, "*fp32"),
    "triton kda fp32": (ASTSource, triton_update.dense_kernel, KDA | DENSE, "*fp32"),
}  # fmt: skip
"""Product variants: source kind, kernel, constants, pointer type of the pool."""


def measured(
    source: Any, kernel: Any, constants: dict[str, Any], pool: str = "*u8"
) -> dict[str, int]:
    """Registers, stack, local and shared bytes, and instructions of one compiled kernel."""
    names = kernel.arg_names
    types = POINTERS | {"pool": pool}
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    fixed = {(names.index(n),): value for n, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in constants}
    overlapped = bool(constants.get("OVERLAP"))
    options = {
        "num_warps": constants.get("WARPS", 1),
        "enable_fp_fusion": True,
        "launch_pdl": overlapped,
    }
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
    return {
        "registers": found["REG"],
        "stack": found["STACK"],
        "local": found["LOCAL"],
        "shared": int(built.metadata.shared),
        "instructions": len(re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/\s", report[1].stdout, re.M)),
    }


def compile_one(source: Any, kernel: Any, constants: dict[str, Any], pool: str = "*u8") -> bool:
    """Compile and print; True if nothing spills."""
    found = measured(source, kernel, constants, pool)
    sys.stdout.write(f"{kernel.__name__} {found}\n")
    return found["stack"] == found["local"] == 0


def problems(found: dict[str, int], record: dict[str, int] | None) -> list[str]:
    """What is worse than allowed."""
    wrong = [f"{found[k]} bytes of {k}" for k in ("stack", "local") if found[k]]
    for key in ("registers", "shared", "instructions") if record else ():
        limit = record[key] * (1.0 if key == "shared" else SLACK)  # type: ignore[index]
        if found[key] > limit:
            wrong.append(f"{key} {found[key]}, recorded {record[key]}")  # type: ignore[index]
    return wrong


def main(update: bool) -> int:
    """Every variant against the record of this Triton version; unknown versions are only checked for spills."""
    records = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    version = ".".join(triton.__version__.split(".")[:2])
    known, found, failed = records.get(version, {}), {}, False
    for name, variant in VARIANTS.items():
        found[name] = measured(*variant)
        wrong = problems(found[name], None if update else known.get(name))
        failed |= bool(wrong)
        line = " ".join(f"{k} {v}" for k, v in found[name].items())
        sys.stdout.write(f"{name:40s} {line} {'; '.join(wrong) or 'ok'}\n")
    if update:
        records[version] = found
        RECORD.write_text(json.dumps(dict(sorted(records.items())), indent=1) + "\n")
    missing = sorted(set(known) ^ set(found)) if known and not update else []
    if missing:
        sys.stdout.write(f"record and variants differ: {', '.join(missing)}\n")
    return int(failed or bool(missing))


if __name__ == "__main__":
    sys.exit(main("--update" in sys.argv[1:]))
