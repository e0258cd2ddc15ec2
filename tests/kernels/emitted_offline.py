"""Compile the kernels of an emitted module for sm_90 without a GPU: `emitted_offline.py MODULE`."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from tests.kernels import ring_offline
from tests.kernels.compile_offline import MATRIX, NATURAL, PLAIN, POINTERS, compile_one


def load(path: Path) -> Any:
    """The module in `path`, under its own name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def rings_fit(module: Any) -> bool:
    """Step and flush of a 128 x 128 module with rings; its plain kernel is compiled too and may spill."""
    kda, every, layout = module.PER_CHANNEL, module.EVERY, module.LAYOUT
    POINTERS.update({"ring_keys": "*fp16", "ring_values": "*fp16", "phases": "*i32"})
    POINTERS["ring_gates"] = "*fp16" if kda else "*fp32"
    heads = {"H": module.HEADS, "HK": module.RING_KEY_HEADS, "KDA": kda, "EVERY": every}
    flush = heads | {"HIGH": layout.k_hi // 16}
    step = flush | {"MODE": 0, "SPAN": every} | ring_offline.GIVEN | ring_offline.MATRIX
    plain = heads | ring_offline.PLAIN | ring_offline.GIVEN | {"EP": every, "FLUSH": False}
    plain |= {"KHI": layout.k_hi, "HEAD_BYTES": layout.head_bytes}
    matrix = [
        ring_offline.fits(f"{name} L={every}", GluonASTSource, getattr(module, name), constants)
        for name, constants in {"gluon_ring_kernel": step, "flush_kernel": flush}.items()
    ]
    ring_offline.fits(f"triton_ring_kernel L={every}", ASTSource, module.triton_ring_kernel, plain)
    return all(matrix)


def main() -> int:
    """All kernels of a 128 x 128 module; exit code 1 if one spills."""
    module = load(Path(sys.argv[1]))
    if hasattr(module, "Ring"):
        return int(not rings_fit(module))
    layout = module.LAYOUT
    heads = PLAIN | {"H": module.HEADS, "HK": module.KEY_HEADS, "KDA": module.PER_CHANNEL}
    plain = heads | NATURAL | {"KHI": layout.k_hi, "HEAD_BYTES": layout.head_bytes}
    matrix = heads | MATRIX | {"HIGH": layout.k_hi // 16}
    fine = [
        compile_one(GluonASTSource, module.gluon_packed_kernel, matrix),
        compile_one(ASTSource, module.triton_packed_kernel, plain),
    ]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
