"""Run emitted kernel modules on their own, as an engine would vendor them: `python scripts/emitted_check.py OUT.json`.

Exports plans of both embedded models (with synthetic, random calibrations: which channels are protected says nothing
here) and of two full-size geometries, at K_hi 0, 16 and 32, with and without key orders per head, value orders and
value scales, and at K_hi 16 with states written at every 8th update. Every module is copied to an empty folder and
run with `python -I packed_update.py --check` there, so it finds no hybridstate. One line per module; the JSON file is
written again after each.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from hybridstate import api  # noqa: E402
from hybridstate.checkpoint import open_checkpoint  # noqa: E402
from hybridstate.kernels.emit import MODULE_FILE, StepSpec, emit  # noqa: E402
from hybridstate.kernels.layout import PackedLayout  # noqa: E402
from tests.plan.calibrated import write_calibration  # noqa: E402

K_HI = (0, 16, 32)
EXPORTS: dict[str, dict[str, Any]] = {
    "exported weights": {},
    "bundle, key index": {"weights": False},
    "exported weights, value scale": {"value_order": "common"},
    "bundle, per-head keys, values": {
        "weights": False,
        "key_order": "per-head",
        "value_order": "fold",
    },
}
FULL_SIZE = {
    "Qwen3.6-35B-A3B geometry": (16, 32, False),
    "Kimi-Linear-48B-A3B geometry": (32, 32, True),
}


def sources() -> Iterator[tuple[str, str]]:
    """Title and text of every module."""
    for title, (key_heads, heads, per_channel) in FULL_SIZE.items():
        for k_hi in K_HI:
            rng = np.random.default_rng(k_hi)
            layout = PackedLayout(128, 128, k_hi)
            index = {0: [rng.permutation(128).tolist() for _ in range(heads)]}
            scale = {0: np.exp(rng.normal(0, 0.5, (heads, 128))).tolist()}
            plain = StepSpec(layout, key_heads, heads, per_channel=per_channel, model=title)
            yield f"{title}, K_hi {k_hi}", emit(plain)
            tables = replace(plain, key_index=index, value_scale=scale)
            yield f"{title}, K_hi {k_hi}, key index, value scale", emit(tables)
            if k_hi == 16:
                yield f"{title}, K_hi {k_hi}, every 8th update", emit(replace(plain, every=8))
    for name in ("tiny-gdn", "tiny-kda"):
        model = open_checkpoint(name).path
        for k_hi in K_HI:
            with tempfile.TemporaryDirectory() as folder:
                place = Path(folder)
                calibration = write_calibration(place / "cal", model, k_hi=k_hi, values=True)
                for number, (title, options) in enumerate(EXPORTS.items()):
                    made = api.export_plan(
                        name, out=place / f"out{number}", calibration=calibration,
                        kernels=place / f"kernels{number}", **options,
                    )  # fmt: skip
                    assert made.kernels is not None
                    yield f"{name}, K_hi {k_hi}, {title}", made.kernels.read_text()


def run(text: str, device: str) -> dict[str, Any]:
    """Exit code, seconds and output of a module alone in a folder."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / MODULE_FILE).write_text(text)
        done = subprocess.run(
            [sys.executable, "-I", MODULE_FILE, "--check", "--device", device],
            cwd=folder, capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
    lines = [line.rstrip() for line in (done.stdout + done.stderr).splitlines()]
    seconds = round(time.perf_counter() - start, 1)
    return {"ok": done.returncode == 0, "seconds": seconds, "output": lines[-24:]}


def main() -> int:
    """Run all modules; exit code 1 if one fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="JSON file of results")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu", "auto"))
    parser.add_argument("--deadline", type=float, default=540, help="stop after so many seconds")
    arguments = parser.parse_args()
    begin, results = time.perf_counter(), {}
    for title, text in sources():
        if time.perf_counter() - begin > arguments.deadline:
            print("deadline: the rest was not run", flush=True)
            break
        try:
            results[title] = run(text, arguments.device)
        except Exception as error:  # one module must not cost the others
            results[title] = {"ok": False, "output": [f"{type(error).__name__}: {error}"]}
        found = results[title]
        print(f"{'ok' if found['ok'] else 'FAILED':7s}{title}", flush=True)
        if not found["ok"]:
            print("\n".join(f"       {line}" for line in found["output"]), flush=True)
        document = {"device": arguments.device, "calibrations": "synthetic", "modules": results}
        arguments.out.write_text(json.dumps(document, indent=2) + "\n")
    print(f"{sum(r['ok'] for r in results.values())} of {len(results)} modules ok", flush=True)
    return int(not results or not all(found["ok"] for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
