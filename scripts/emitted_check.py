"""Run emitted kernel modules on their own, as an engine would vendor them: `python scripts/emitted_check.py OUT.json`.

Exports plans of both embedded models (with synthetic, random calibrations: which channels are protected says nothing
here) and of two full-size geometries, at K_hi 0, 16 and 32, with and without key orders per head, value orders and
value scales, and at K_hi 16 with states written at every 8th update. Every module is copied to an empty folder and
run with `python -I packed_update.py --check` there, so it finds no hybridstate. One line per module as it finishes; the
JSON file is written again after each, in the order above whatever finishes first. With `--workers N` so many processes
share the device side by side: a module then takes longer than by itself, and no seconds are recorded.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
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


@dataclass
class Results:
    """What was found so far, by title, in a JSON file that is whole after each module; any thread may add to it."""

    path: Path
    device: str
    shared: bool
    """Modules run side by side, so seconds are left out."""
    found: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    """In the order of the list: `None` marks the place of a module that still runs."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, title: str) -> None:
        """Keep the next place in the file for a module."""
        with self._lock:
            self.found[title] = None

    def add(self, title: str, found: dict[str, Any]) -> None:
        """Say what a module's run gave, and write the file again."""
        if self.shared:
            found.pop("seconds", None)
        with self._lock:
            self.found[title] = found
            print(f"{'ok' if found['ok'] else 'FAILED':7s}{title}", flush=True)
            if not found["ok"]:
                print("\n".join(f"       {line}" for line in found["output"]), flush=True)
            document = {"device": self.device, "calibrations": "synthetic", "modules": self.done()}
            self.path.write_text(json.dumps(document, indent=2) + "\n")

    def done(self) -> dict[str, dict[str, Any]]:
        """Those that finished, in the order of the list."""
        return {title: found for title, found in self.found.items() if found is not None}


def run_all(results: Results, workers: int, deadline: float) -> None:
    """Run the modules, `workers` at a time; none starts later than `deadline` seconds from now."""
    begin, room = time.perf_counter(), threading.Semaphore(workers)

    def one(title: str, text: str) -> None:
        try:
            try:
                found = run(text, results.device)
            except Exception as error:  # one module must not cost the others
                found = {"ok": False, "output": [f"{type(error).__name__}: {error}"]}
            results.add(title, found)
        finally:
            room.release()

    running: list[Future[None]] = []
    with ThreadPoolExecutor(workers) as pool:
        room.acquire()  # before a module is made: one worker is alone with the machine, and none queues
        for title, text in sources():
            if time.perf_counter() - begin > deadline:
                print("deadline: the rest was not run", flush=True)
                break
            results.start(title)
            running.append(pool.submit(one, title, text))
            room.acquire()
    for each in running:
        each.result()  # a file that cannot be written is no module's failure


def main() -> int:
    """Run all modules; exit code 1 if one fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="JSON file of results")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu", "auto"))
    parser.add_argument(
        "--deadline", type=float, default=540, help="start none after so many seconds"
    )
    parser.add_argument(
        "--workers", type=int, default=1, help="modules at a time; times with 1 only"
    )
    arguments = parser.parse_args()
    if arguments.workers < 1:
        parser.error("--workers must be at least 1")
    results = Results(arguments.out, arguments.device, shared=arguments.workers > 1)
    run_all(results, arguments.workers, arguments.deadline)
    done = results.done()
    print(f"{sum(r['ok'] for r in done.values())} of {len(done)} modules ok", flush=True)
    return int(not done or not all(found["ok"] for found in done.values()))


if __name__ == "__main__":
    sys.exit(main())
