"""Prefill of one linear layer on a GPU: the two kernels beside the torch form, checked against float64 first.

    scripts/prefill_gpu.py [--json FILE] [--tokens N ...] [--shape NAME ...] [--tune]

Prints a row as it is measured: error, milliseconds of the kernels (together and each) and of the torch form.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch

from hybridstate.bench.timing import device_record, kernel_times
from hybridstate.kernels import prefill as kernel
from hybridstate.kernels.prefill import Geometry
from hybridstate.kernels.reference import chunk_prefill

SHAPES: Final = {
    "tiny-gdn": Geometry(4, 8, 128, 128, per_channel=False),
    "tiny-kda": Geometry(4, 4, 128, 128, per_channel=True),
    "qwen3.6-35b-a3b": Geometry(16, 32, 128, 128, per_channel=False),
    "kimi-linear-48b-a3b": Geometry(32, 32, 128, 128, per_channel=True),
}
FORMS: Final = ((32, 16, 128), (32, 16, 0), (64, 16, 128), (16, 16, 128))
"""Tokens of a chunk, value columns of a program and programs that get eight warps, tried by `--tune`."""


def milliseconds(call: Any, repeats: int) -> float:
    """Median of CUDA events around each call, after one that is not counted."""
    call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return float(sorted(start.elapsed_time(end) for start, end in events)[repeats // 2])


def each(call: Any) -> dict[str, float]:
    """Milliseconds of every kernel of ours in one call."""
    found: dict[str, float] = {}
    for launched, seconds in kernel_times(call):
        if launched in ("prepare_kernel", "scan_kernel"):
            name = launched.removesuffix("_kernel")
            found[name] = found.get(name, 0.0) + 1e3 * seconds
    return {name: round(took, 4) for name, took in found.items()}


def main() -> int:
    """Measure every shape and length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokens", type=int, action="append")
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    failed = False
    for name in given.shape or SHAPES:
        geometry = SHAPES[name]
        began = time.perf_counter()
        choice = kernel.choose("cuda", torch.bfloat16, geometry)
        print(f"{name}: {choice.reason} ({time.perf_counter() - began:.1f} s)", flush=True)
        if choice.precision is None:
            failed = True
            continue
        for tokens in given.tokens or (256, 1024, 8192):
            drawn, state = kernel.draw(geometry, 1, tokens, torch.bfloat16)
            wide = [x.cuda().double() for x in (*drawn, state)]
            _, exact = chunk_prefill(*wide)
            args = [x.cuda() for x in (*drawn, state)]
            plain = milliseconds(lambda a=args: chunk_prefill(*a), 3)
            for chunk, columns, few in FORMS if given.tune else FORMS[:1]:
                kernel.CHUNK, kernel.COLUMNS, kernel.FEW = chunk, columns, few

                def call(a: Any = args, precision: Any = choice.precision) -> Any:
                    return kernel.prefill(*a, precision=precision)

                row: dict[str, Any] = {"shape": name, "tokens": tokens, "chunk": chunk}
                row |= {"columns": columns, "few": few, "torch_ms": round(plain, 3)}
                try:
                    error = float((call()[1].double() - exact).norm() / exact.norm())
                    row |= {"state_error": error, "ms": round(milliseconds(call, given.repeats), 4)}
                    row["each_ms"] = each(call)
                    failed |= not error <= kernel.STATE_ERROR
                except Exception as trouble:
                    row["problem"] = f"{type(trouble).__name__}: {str(trouble)[:200]}"
                    failed |= not given.tune
                rows.append(row)
                print(json.dumps(row), flush=True)
    if given.json:
        device = device_record(torch.device("cuda"))
        given.json.write_text(json.dumps({"device": device, "rows": rows}, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
