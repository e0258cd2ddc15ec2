"""Compile every kernel for sm_90 without a GPU and print one JSON object per kernel.

Runs with whatever Triton is first on the path, so that one checkout can be compiled by several versions. Below 3.6
Gluon has no `mma_v2`; its kernels are then reported as absent, with the reason, and the plain ones must compile.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = {
    "q": "*bf16", "k": "*bf16", "v": "*bf16", "out": "*bf16", "g": "*fp32", "beta": "*fp32",
    "value_scale": "*fp32", "slots": "*i64", "pool": "*u8", "dense": "*fp32", "source": "*fp32",
    "target": "*u8", "buffer": "*u8", "order": "*u8", "rows": "*i32", "to": "*i32", "place": "*i32",
    "lengths": "*i32", "into": "*i64", "table": "*i64",
}  # fmt: skip
NATURAL = {"GP": 32, "HP": 16, "LP": 128}
DENSE_ROWS = {"TILE": 128, "S_TILE": 8, "S_ROW": 128, "S_COL": 1}
HEAD = {"KHI": 16, "HEAD_BYTES": 20224}
GEOMETRY = {"K": 128, "V": 128, "GROUP": 32}


def jobs() -> Iterator[tuple[str, str, str, dict[str, Any], int, dict[str, str]]]:
    """Name, module, kernel, constants, warps and pointer types of every kernel at the published dimensions."""
    for kda in (False, True):
        gate = "kda" if kda else "gdn"
        heads = {"H": 32, "HK": 32 if kda else 16, "KDA": kda, "SCALED": True}
        shared = heads | GEOMETRY | HEAD | {"GP": 32, "KP": 128}
        rows = {"TILE": 8, "S_TILE": 8, "S_ROW": 128, "S_COL": 1}
        for order, more in (
            ("fragment", {"PACKED": True, "BLOCK": 128}),
            ("natural", {"PACKED": True, "BLOCK": 0}),
            ("dense", {"PACKED": False, "BLOCK": 0}),
        ):
            types = {} if more["PACKED"] else {"pool": "*fp32"}
            yield (
                f"tokens-{order}-{gate}",
                "multi_token_triton",
                "tokens_kernel",
                shared | rows | more,
                4,
                types,
            )
    maps = {"H": 32, "ORDERED": True, "SCALED": True}
    for direction in ("pack", "unpack"):
        for mapped in (False, True):
            for ragged in (False, True):
                constants = (
                    maps | HEAD | GEOMETRY | DENSE_ROWS | {"BLOCK": 128} | {"RAGGED": ragged}
                )
                constants |= {"ORDERED": mapped, "SCALED": mapped}
                suffix = ("-mapped" if mapped else "") + ("-ragged" if ragged else "")
                name = f"{direction}-fragment{suffix}"
                yield name, "pack_triton", f"{direction}_fragment_kernel", constants, 4, {}
        natural = maps | HEAD | GEOMETRY | DENSE_ROWS | NATURAL | {"RAGGED": False}
        name = f"{direction}-natural-mapped"
        yield name, "pack_triton", f"{direction}_natural_kernel", natural, 4, {}
    rows = {"HK": 4096, "V": 128, "VP": 128, "BR": 16, "SCALE": "fp32"}
    for codec in ("fp32", "int8"):
        for direction in ("gather", "scatter"):
            constants = rows | {"INT8": codec == "int8"}
            extra = {"source": "*i64"}
            yield (
                f"{direction}-{codec}",
                "transfer_triton",
                f"{direction}_kernel",
                constants,
                4,
                extra,
            )
    kept = {"K": 128, "V": 128, "G": 4, "BLOCK": 128, "VP": 128, "GP": 4, "GATHER": False} | HEAD
    kinds = {
        "state": "*u8", "rows_high": "*i32", "rows_low": "*i32", "high": "*i16", "codes": "*i8",
        "scales": "*i32",
    }  # fmt: skip
    yield "packed-rows", "packed_rows_triton", "packed_rows_kernel", kept, 1, kinds
    shape = {"HK": 4096, "V": 128, "VP": 128, "BR": 16}
    yield "refresh", "transfer_triton", "refresh_kernel", shape, 4, {}
    yield (
        "copy",
        "transfer_triton",
        "copy_kernel",
        {"UNIT": 16, "BLOCK": 2048},
        4,
        {"source": "*u8"},
    )


def update_jobs() -> Iterator[tuple[str, Any]]:
    """Name and a function that compiles it, for the decode kernels of `compile_offline`.

    Where Gluon lacks `mma_v2` its kernels are absent; a stand-in for their module lets the plain ones be listed.
    """
    missing = None
    for name in ("gluon_update", "gluon_split"):
        try:
            import_module(f"hybridstate.kernels.{name}")
        except ImportError as error:
            missing = str(error).splitlines()[0].split(" (")[0]
            stand_in = ModuleType(f"hybridstate.kernels.{name}")
            stand_in.__getattr__ = lambda _name: None  # type: ignore[method-assign]
            sys.modules[stand_in.__name__] = stand_in
            setattr(import_module("hybridstate.kernels"), name, stand_in)
    from tests.kernels import compile_offline

    for name, variant in compile_offline.VARIANTS.items():
        if variant[1] is None:
            yield f"update {name}", {"absent": missing}
        else:
            yield f"update {name}", lambda variant=variant: compile_offline.measured(*variant)


def selection() -> dict[str, Any]:
    """Which kernel modules `update` can load under this Triton."""
    from hybridstate.errors import MissingRequirement
    from hybridstate.kernels.layout import PackedLayout
    from hybridstate.kernels.update import runner

    found = {}
    for kind, name in (("gluon", "gluon"), ("plain", "triton")):
        try:
            runner(name, PackedLayout(128, 128, 16))  # type: ignore[arg-type]
            found[kind] = "loads"
        except MissingRequirement:
            found[kind] = "absent"
    return found


def built(
    module: str, kernel: str, constants: dict[str, Any], warps: int, types: dict[str, str]
) -> dict[str, Any]:
    """Registers, stack, shared bytes, instruction count and 16-byte accesses of one compiled kernel."""
    function = getattr(import_module(f"hybridstate.kernels.{module}"), kernel)
    names = function.arg_names
    kinds = POINTERS | types
    for name in names:
        if name not in kinds and name.endswith(("_table", "_slots")):
            kinds[name] = "*i64"
    constants = {n: v for n, v in constants.items() if n in names}
    if "SCALE" in constants:
        constants["SCALE"] = triton.language.float32
    signature = {n: "constexpr" if n in constants else kinds.get(n, "i32") for n in names}
    fixed = {(names.index(n),): value for n, value in constants.items()}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if n not in constants and n not in ("count", "B", "T")
    }
    code = triton.compile(
        ASTSource(function, signature, fixed, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps, "enable_fp_fusion": True},
    )
    tools = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        report = [
            subprocess.run([tools, flag, file.name], capture_output=True, text=True, check=True)
            for flag in ("-res-usage", "-sass")
        ]
    usage = report[0].stdout + report[0].stderr
    sass = report[1].stdout
    found = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return {
        "registers": found["REG"],
        "stack": found["STACK"] + found["LOCAL"],
        "shared": code.metadata.shared,
        "instructions": len(re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/\s", sass, re.M)),
        "loads_128": len(re.findall(r"\bLDG\.E[.A-Z]*\.128", sass)),
        "stores_128": len(re.findall(r"\bSTG\.E[.A-Z]*\.128", sass)),
        "narrow": len(re.findall(r"\b(?:LDG|STG)\.E", sass))
        - len(re.findall(r"\b(?:LDG|STG)\.E[.A-Z]*\.128", sass)),
    }


def main() -> int:
    """One line per kernel; exit code 1 if one fails to compile or spills. `--own` leaves the decode kernels out."""
    own_only, fine = sys.argv[1:] == ["--own"], True

    def report(name: str, compile_it: Any) -> None:
        nonlocal fine
        line: dict[str, Any] = {"kernel": name, "triton": triton.__version__}
        try:
            line |= compile_it if isinstance(compile_it, dict) else compile_it()
            fine &= line.get("stack", 0) + line.get("local", 0) == 0
        except Exception as error:  # compilers raise anything
            line["failed"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[-1]}"
            fine = False
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    for name, module, kernel, constants, warps, types in jobs():
        report(name, partial(built, module, kernel, constants, warps, types))
    if not own_only:
        report("selection", selection)
        for name, compile_it in update_jobs():
            report(name, compile_it)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
