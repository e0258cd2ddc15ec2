"""`bench update` in small parts within a deadline: `update_gpu.py OUT.json [--deadline 110] [--overlap] [--warm JOB]`.

Parts are batches of one layer: Qwen3-Next and Kimi-Linear at batch 256, 128, 64, 8 and 1 first, then the other released
layers, then the other batches, then the embedded layers. The file is whole after each part, in the form of a recorded
`bench update`; a part that no longer fits is named. Rings are timed from batch 8 to 512. Layers of equal dimensions are
timed once. --warm JOB (repeatable) compiles and checks one share of the kernels (`WARM_JOBS`) and times nothing, so
that several processes can fill the compiler's cache before. Inputs are synthetic.
"""

import argparse
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from hybridstate.bench.layers import EMBEDDED, PUBLISHED, UpdateDims
from hybridstate.bench.peers import peer_rows
from hybridstate.bench.update import FORMATS, GPU_BATCHES, UpdateReport, UpdateRow, run_update
from hybridstate.bench.update_forms import checked, configurations
from hybridstate.bench.update_ring import LENGTHS, RingRow, ring_rows
from hybridstate.provenance import environment, readable_json

LAYERS = (*PUBLISHED, *EMBEDDED)
EQUAL = {"qwen3.5-35b-a3b": "qwen3-next", "qwen3.6-35b-a3b": "qwen3-next"}
"""Released models whose recurrent layers have the dimensions of a timed one."""
FIRST = (256, 128, 64, 8, 1)
RING_BATCHES = (8, 64, 128, 256, 512)
RING_WARM_BATCH = 64
OVERLAPPED = ("fp32", "damp")
SHARES = (FORMATS[:1], FORMATS[1:3], FORMATS[3:], ())
"""Formats that one warming process compiles; () stands for rings and peers."""
WARM_JOBS = [(layer, share) for layer in PUBLISHED for share in SHARES]


def parts(batches: tuple[int, ...]) -> list[tuple[UpdateDims, tuple[int, ...]]]:
    """Layers with some of their batches, most wanted first."""
    first = tuple(b for b in FIRST if b in batches)
    rest = tuple(b for b in batches if b not in FIRST)
    order = [(x, first) for x in PUBLISHED]
    order += [(x, rest) for x in PUBLISHED]
    order += [(x, batches) for x in EMBEDDED]
    return [(layer, some) for layer, some in order if some]


def main() -> int:
    """Time what fits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--deadline", type=float, default=110.0, help="seconds")
    parser.add_argument("--overlap", action="store_true", help="launches of every format overlap")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, action="append", help="repeatable; all by default")
    parser.add_argument("--format", action="append", choices=FORMATS, help="repeatable")
    parser.add_argument(
        "--warm", type=int, action="append", metavar="JOB", help=f"0 to {len(WARM_JOBS) - 1}"
    )
    options = parser.parse_args()
    if options.warm is not None:
        for layer, formats in [WARM_JOBS[job] for job in options.warm if job < len(WARM_JOBS)]:
            warm(layer, formats, torch.device(options.device))
        return 0
    start, whole = time.monotonic(), None
    took: list[float] = []
    for layer, batches in parts(tuple(options.batch or GPU_BATCHES)):
        began, name = time.monotonic(), f"{layer.name}, batch {', '.join(map(str, batches))}"
        if took and began - start + took[-1] > options.deadline:
            print(f"{name}: no time left", flush=True)
            continue
        found = run_update(
            dims=(layer,),
            batches=batches,
            formats=options.format or FORMATS,
            requantise_every=() if options.overlap else LENGTHS,
            ring_batches=[b for b in batches if b in RING_BATCHES],
            peers=not options.overlap,
            overlap=options.overlap,
            device=options.device,
            samples=options.samples,
            warmup=1,
        )
        took.append(time.monotonic() - began)
        whole = found if whole is None else joined(whole, found)
        write(options.out, whole)
        rows: list[UpdateRow | RingRow] = [*found.rows, *found.rings]
        for row in rows:
            label = f"{layer.name}, batch {row.batch}, {row.state}"
            print(f"{label:54s} {1e6 * row.step.median:9.2f} us  {row.configuration}")
        print(f"{name}: {took[-1]:.1f} s", flush=True)
    return 0


def warm(layer: UpdateDims, formats: tuple[str, ...], device: torch.device) -> None:
    """Compile and check what one layer's formats run at any batch, then the same with overlapped launches."""
    for overlap, state in product((0, 2), formats):
        if not overlap or state in OVERLAPPED:
            found = [
                one
                for batch in GPU_BATCHES
                for one in configurations(layer, state, batch, device, overlap)
            ]
            checked(found, layer, state, device, fused=True)
            print(f"{layer.name}, {state}, overlap {overlap}", flush=True)
    if formats:
        return

    def told(stage: str, done: int, total: int) -> None:
        print(f"{layer.name}, {stage}, {done} of {total}", flush=True)

    few = (RING_WARM_BATCH,)
    list(ring_rows((layer,), few, LENGTHS, ("fused",), False, device, 1, 1, 0, told))
    peer_rows((layer,), few, ("fused",), device, 1, 1, 0, told)


def joined(one: UpdateReport, other: UpdateReport) -> UpdateReport:
    """Rows of both, in the order of layers, formats and batches."""
    names = [layer.name for layer in LAYERS]
    rows = sorted(
        one.rows + other.rows,
        key=lambda r: (names.index(r.dims.name), FORMATS.index(r.state), r.batch),
    )
    rings = sorted(
        one.rings + other.rings,
        key=lambda r: (names.index(r.dims.name), r.every, r.batch),
    )
    peers = sorted(
        one.peers + other.peers,
        key=lambda p: (names.index(p["dims"]), p["peer"], p["kernel"], p["state"], p["batch"]),
    )
    return replace(one, rows=tuple(rows), peers=tuple(peers), rings=tuple(rings))


def write(path: Path, report: UpdateReport) -> None:
    """In the form of a recorded verb, never half a file."""
    protocol = report.protocol | {"layers_of_equal_dimensions": EQUAL}
    document = {
        "schema": "hybridstate.output/1",
        "command": "scripts/update_gpu.py",
        "provenance": environment(device=report.device["name"], hardware=report.device),
        "result": replace(report, protocol=protocol).to_json(),
    }
    aside = path.with_name(f"{path.name}.part")
    aside.write_bytes(readable_json(document))
    aside.replace(path)


if __name__ == "__main__":
    sys.exit(main())
