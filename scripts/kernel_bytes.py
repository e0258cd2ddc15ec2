"""Memory traffic of one launch of every decode kernel beside its byte model, by Nsight Compute where it is allowed.

    python scripts/kernel_bytes.py --out bytes.json        # runs itself under ncu and compares
    python scripts/kernel_bytes.py --launch                # what ncu watches: one launch of each kernel

Exit code 3 where ncu is missing or may not read the counters; never a pass then. Inputs are synthetic.
"""

import argparse
import csv
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hybridstate.bench.layers import UpdateDims

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
UNITS = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
BATCH = 256
MARGIN = 0.10
KINDS = ("gdn", "kda")
WARM_LAUNCHES = 3
"""Launches on other slots before the counted one: code is loaded, and the counted states are not in the cache."""


def cases() -> list[tuple[str, int]]:
    """Kernel and bytes of its model, in the order of launches."""
    from hybridstate.bench.layers import PUBLISHED
    from hybridstate.bench.update_ring import step_bytes
    from hybridstate.kernels.layout import PackedLayout

    found = []
    for kind in KINDS:
        layer = next(x for x in PUBLISHED if x.kind == kind)
        heads, keys = layer.value_heads, layer.key_heads
        gates = heads * (128 if kind == "kda" else 1)
        io = BATCH * 2 * (2 * keys * 128 + 2 * heads * 128 + gates + heads) + 8 * BATCH
        state = BATCH * heads * PackedLayout(128, 128, 16).head_bytes
        found.append((f"{kind}, requantised at every step", 2 * state + io))
        found.append((f"{kind}, ring of 7, appending", _first(layer, state) + io))
        assert step_bytes(layer, BATCH, 8)[0] == round(state * 1.125)
    return found


def _first(layer: UpdateDims, state: int) -> int:
    """Bytes of states and ring of a step that finds the ring empty."""
    wide = 128 if layer.kind == "kda" else 0
    entry = 2 * layer.value_heads * (128 + wide) + 2 * layer.key_heads * 128
    sums = 0 if wide else 4 * layer.value_heads
    return state + BATCH * (entry + sums + 8 * layer.value_heads)


def launch() -> None:
    """Every kernel on fresh slots; only the last launch of each is counted."""
    import torch

    from hybridstate.bench.layers import PUBLISHED, random_fusion, random_inputs
    from hybridstate.kernels import ring_update, update
    from hybridstate.kernels.layout import PackedLayout
    from hybridstate.kernels.ring_reference import Ring

    device, layout = torch.device("cuda"), PackedLayout(128, 128, 16)
    sets = WARM_LAUNCHES + 1
    for kind in KINDS:
        layer = next(x for x in PUBLISHED if x.kind == kind)
        heads = layer.value_heads
        *inputs, out = random_inputs(layer, BATCH, device, 0, fused=True)
        fusion = random_fusion(layer, device, 0, fused=True)
        some = layout.pack(torch.randn(32, heads, 128, 128, device=device))
        pool = some.repeat(-(-sets * BATCH // 32), 1, 1)[: sets * BATCH].contiguous()
        slots = [x.clone() for x in torch.randperm(sets * BATCH, device=device).split(BATCH)]
        ring = Ring.empty(
            sets * BATCH,
            layer.key_heads,
            heads,
            layout,
            8,
            per_channel=kind == "kda",
            device=device,
        )
        for step, more in (
            (update.runner("gluon", layout), (pool,)),
            (ring_update.functions("gluon", layout)[0], (pool, ring)),
        ):
            for part in slots:
                step(*inputs, *more, part, out, None, layout, fusion)
            torch.cuda.synchronize()


def counted(text: str) -> list[int]:
    """Bytes read and written by each watched launch, in order, from ncu's CSV."""
    lines = text[text.index('"ID"') :]
    by_launch: dict[int, float] = {}
    for row in csv.DictReader(io.StringIO(lines)):
        if row["Metric Name"] in METRICS:
            value = float(row["Metric Value"].replace(",", "")) * UNITS[row["Metric Unit"]]
            by_launch[int(row["ID"])] = by_launch.get(int(row["ID"]), 0.0) + value
    every = [by_launch[number] for number in sorted(by_launch)]
    return [round(x) for x in every[WARM_LAUNCHES :: WARM_LAUNCHES + 1]]


def main() -> int:
    """Watch, compare, record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launch", action="store_true", help="launch the kernels and nothing else")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.launch:
        launch()
        return 0
    tool = shutil.which("ncu")
    if tool is None:
        print("bytes: not supported here: no ncu on the PATH")
        return 3
    watch = [
        tool,
        "--csv",
        "--metrics",
        ",".join(METRICS),
        "--kernel-name",
        "regex:packed_kernel|ring_kernel",
    ]
    done = subprocess.run(
        [*watch, sys.executable, __file__, "--launch"], capture_output=True, text=True, check=False
    )
    if done.returncode or '"ID"' not in done.stdout:
        print("bytes: not supported here:", (done.stdout + done.stderr).strip()[-300:])
        return 3
    rows, failed = [], False
    for (name, model), found in zip(cases(), counted(done.stdout), strict=True):
        off = found / model - 1
        failed |= abs(off) > MARGIN
        rows.append({"kernel": name, "batch": BATCH, "counted_bytes": found, "model_bytes": model})
        print(f"{name:36s} {found / 1e6:7.1f} MB, model {model / 1e6:7.1f} MB, {100 * off:+.1f} %")
    if options.out:
        options.out.write_text(json.dumps({"rows": rows}, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
