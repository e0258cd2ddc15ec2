"""`bench update` layer by layer within a deadline: `update_gpu.py OUT.json [--deadline 100] [--overlap] [--warm N]`.

Layers of released models come first, largest claim first; the file is whole after each layer, in the form of a recorded
`bench update`. What the deadline leaves out is named. --warm N compiles and checks the kernels of layer N and writes
nothing, so that several processes can fill the compiler's cache before anything is timed. Inputs are synthetic.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hybridstate.bench.layers import EMBEDDED, PUBLISHED
from hybridstate.bench.update import FORMATS, GPU_BATCHES, UpdateReport, UpdateRow, run_update
from hybridstate.bench.update_ring import LENGTHS, RingRow
from hybridstate.provenance import environment

LAYERS = (*PUBLISHED, *EMBEDDED)


def main() -> int:
    """Time what fits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--deadline", type=float, default=100.0, help="seconds")
    parser.add_argument("--overlap", action="store_true", help="launches of every format overlap")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, action="append", help="repeatable; all by default")
    parser.add_argument("--format", action="append", choices=FORMATS, help="repeatable")
    parser.add_argument("--warm", type=int, metavar="N", help="compile and check layer N alone")
    options = parser.parse_args()
    start, whole = time.monotonic(), None
    took: list[float] = []
    layers = LAYERS if options.warm is None else LAYERS[options.warm : options.warm + 1]
    for layer in layers:
        began = time.monotonic()
        if took and began - start + max(took) > options.deadline:
            print(f"{layer.name}: no time left", flush=True)
            continue
        batches = tuple(options.batch or GPU_BATCHES)
        found = run_update(
            dims=(layer,),
            batches=batches if options.warm is None else batches[:1],
            formats=options.format or FORMATS,
            requantise_every=LENGTHS,
            overlap=options.overlap,
            device=options.device,
            samples=options.samples if options.warm is None else 1,
            warmup=1,
        )
        took.append(time.monotonic() - began)
        whole = found if whole is None else joined(whole, found)
        rows: list[UpdateRow | RingRow] = [*found.rows, *found.rings]
        for row in rows:
            name, time_us = f"{layer.name}, batch {row.batch}, {row.state}", 1e6 * row.step.median
            print(f"{name:54s} {time_us:9.2f} µs  {row.configuration}")
        print(f"{layer.name}: {took[-1]:.1f} s", flush=True)
        if options.warm is None:
            write(options.out, whole)
    return 0


def joined(one: UpdateReport, other: UpdateReport) -> UpdateReport:
    """Rows of both."""
    return replace(
        one,
        rows=one.rows + other.rows,
        peers=one.peers + other.peers,
        rings=one.rings + other.rings,
    )


def write(path: Path, report: UpdateReport) -> None:
    """In the form of a recorded verb."""
    document = {
        "schema": "hybridstate.output/1",
        "command": "scripts/update_gpu.py",
        "provenance": environment(device=report.device["name"], hardware=report.device),
        "result": report.to_json(),
    }
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
