"""Compile the ring kernels for sm_90 without a GPU; one line each, exit code 1 if one spills to memory."""

import sys
from typing import Any

from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from hybridstate.kernels import gluon_ring, ring_triton
from tests.kernels.compile_offline import POINTERS, measured

LENGTHS = (4, 8, 16)
GIVEN = {"SCALED": True, "GATE": 0, "LOWER": 0.0, "LOGIT": 0.0}
MATRIX = {"OVERLAP": 0, "EARLY": False}
FUSED = {"SCALED": True, "GATE": 1, "LOWER": 0.0, "LOGIT": 1.0}
PLAIN = {
    "K": 128, "V": 128, "KHI": 16, "GROUP": 32, "HEAD_BYTES": 20224, "GP": 32, "HP": 16, "LP": 128,
}  # fmt: skip


def fits(label: str, source: Any, kernel: Any, constants: dict[str, Any]) -> bool:
    """Compile, print, and say whether nothing spills."""
    found = measured(source, kernel, constants)
    sys.stdout.write(f"{label:44s} {', '.join(f'{k} {v}' for k, v in found.items())}\n")
    return found["stack"] == found["local"] == 0


def main(lengths: tuple[int, ...] = LENGTHS, *, every_mode: bool = True) -> int:
    """Both gates at the published dimensions: by phase, append, rewrite, flush; the plain kernel at L = 8.

    Without `every_mode` only what the product launches: by phase, with gates given and fused, and flush.
    """
    fine = []
    POINTERS.update({"ring_keys": "*fp16", "ring_values": "*fp16", "phases": "*i32"})
    for kda in (False, True):
        POINTERS["ring_gates"] = "*fp16" if kda else "*fp32"
        heads = {"H": 32, "HK": 32 if kda else 16, "KDA": kda}
        name = "kda" if kda else "gdn"
        for every in lengths:
            flush = heads | {"HIGH": 1, "EVERY": every}
            by_phase = flush | {"MODE": 0, "SPAN": every}
            variants = {
                "phase": by_phase | GIVEN | MATRIX,
                "phase, gates fused": by_phase | FUSED | MATRIX,
            }
            if every_mode:
                early = {"OVERLAP": 2, "EARLY": True}
                variants |= {
                    "append": by_phase | GIVEN | MATRIX | {"MODE": 1},
                    "rewrite": by_phase | GIVEN | MATRIX | {"MODE": 2},
                    "phase, early, overlapped": by_phase | GIVEN | early,
                }
            for label, constants in variants.items():
                label = f"gluon {name} L={every} {label}"
                fine.append(fits(label, GluonASTSource, gluon_ring.ring_kernel, constants))
            label = f"gluon {name} L={every} flush"
            fine.append(fits(label, GluonASTSource, gluon_ring.flush_kernel, flush))
        if every_mode:
            plain = heads | PLAIN | GIVEN | {"EVERY": 8, "EP": 8, "FLUSH": False}
            fits(f"triton {name} L=8", ASTSource, ring_triton.ring_kernel, plain)  # may spill
    return 0 if all(fine) else 1


if __name__ == "__main__":
    chosen = [x for x in sys.argv[1:] if x != "--product"]
    product = "--product" in sys.argv[1:]
    sys.exit(main(tuple(int(x) for x in chosen) or LENGTHS, every_mode=not product))
