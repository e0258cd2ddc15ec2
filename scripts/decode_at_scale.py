"""Decode steps of full-size models with SYNTHETIC weights: time by format, batch and component.

    scripts/decode_at_scale.py MODEL --json FILE [--batch N ...] [--state FORMAT ...] [--requantise-every L ...]
                               [--deadline SECONDS]

Prints every row as it is measured and writes the JSON after each; a part that fails is printed and the rest goes on.
The largest batch comes first. From the deadline on nothing more begins: what was measured is a whole result, and the
last seconds before it are for taking steps apart.
"""

import argparse
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from hybridstate.bench import decode_dummy
from hybridstate.bench.decode import Options
from hybridstate.bench.timing import device_record
from hybridstate.errors import HybridStateError
from hybridstate.provenance import environment, readable_json
from hybridstate.trajectories.dummy import dummy_model
from hybridstate.trajectories.prompts import heldout_text

TAKING_APART = 20.0
"""Seconds before the deadline in which no row begins: time for the components of FP32 and the packed state."""


def main() -> int:
    """Measure what the deadline allows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--state", action="append")
    parser.add_argument("--requantise-every", type=int, action="append", metavar="L")
    parser.add_argument("--input-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--deadline", type=float, default=140.0)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    start = time.monotonic()
    place = str(given.json)
    arguments = [given.json.name if each == place else each for each in sys.argv[1:]]
    kept: dict[str, Any] = {"model": given.model, "synthetic": True, "rows": [], "savings": []}

    def say(text: str) -> None:
        print(f"{time.monotonic() - start:6.1f}s {text}", flush=True)

    def save() -> None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        document = {
            "schema": "hybridstate.output/1",
            "command": "scripts/decode_at_scale.py",
            "arguments": arguments,
            "model": given.model,
            "provenance": kept.get("provenance"),
            "result": {name: value for name, value in kept.items() if name != "provenance"},
        }
        given.json.write_bytes(readable_json(document))

    shown: list[int] = []

    def report(row: dict[str, Any]) -> None:
        kept["rows"].append(row)
        save()
        say(line(row))

    def progress(stage: str, done: int, total: int) -> None:
        say(f"{stage} {done}/{total}")
        if stage == "components":
            save()
            for number, row in enumerate(kept["rows"]):
                if row["components"] and number not in shown:
                    shown.append(number)
                    say(line(row))

    def failed(state: str, batch: int, error: Exception) -> None:
        traceback.print_exception(error)
        kept.setdefault("failed", []).append([state, batch, str(error)])
        save()
        say(f"{state} B={batch} FAILED: {error}")

    def go_on(stage: str) -> bool:
        until = given.deadline - (TAKING_APART if stage == "decoding" else 0.0)
        found: bool = time.monotonic() - start < until
        if not found:
            say(f"deadline: no more {stage}")
        return found

    loaded = dummy_model(given.model, device=given.device)
    hardware = device_record(loaded.device)
    kept["provenance"] = environment(device=hardware["name"], hardware=hardware)
    say(f"built {loaded.checkpoint.name}")
    options = Options(
        input_tokens=given.input_tokens,
        output_tokens=given.output_tokens,
        requantise_every=tuple(given.requantise_every or ()),
    ).given(given.state or ("fp32", "damp", "bf16", "fp16"), given.batch or (256, 64, 16, 4, 1))
    try:
        result = decode_dummy.run_dummy_decode(
            loaded,
            options,
            heldout_text(),
            progress=progress,
            report=report,
            failed=failed,
            go_on=go_on,
        )
        kept.update(result.to_json())
    except (HybridStateError, RuntimeError) as error:
        traceback.print_exc()
        kept.setdefault("failed", []).append(str(error))
    kept["savings"] = decode_dummy.savings(loaded, kept["rows"])
    kept["seconds"] = time.monotonic() - start
    if loaded.device.type == "cuda":
        kept["device_bytes"] = torch.cuda.max_memory_allocated()
    save()
    for saving in kept["savings"]:
        say(json.dumps(saving))
    return 1 if "failed" in kept else 0


def line(row: dict[str, Any]) -> str:
    """One row as text: step, what the bytes ask for, components in milliseconds with their launches."""
    step = 1e3 * row["tpot_s"]["median"]
    alone = row["isolated_update"]
    text = f"{row['state']:5} B={row['batch']:4} {row['mode']} {step:7.2f} ms"
    if row["bytes_s"]:
        text += f", bytes {1e3 * row['bytes_s']:.2f}"
    if row["experts_used"]:
        text += f", experts {row['experts_used']['per_layer_mean']:.1f} a layer"
    if alone:
        text += f", update alone {1e6 * alone['per_layer_s']['median']:.1f} µs x {alone['layers']}"
    if row["eager_because"]:
        text += f", eager: {row['eager_because']}"
    check = {k: v for k, v in row["check"].items() if k != "limits"}
    text += f"\n         check {json.dumps(check)}"
    text += f"\n         replaced {json.dumps(row['replaced_modules'])}"
    for name, part in (row["components"] or {}).items():
        text += f"\n         {1e3 * part['s']:8.3f} ms {part['launches']:5} {name}"
    for entry in row["longest"]:
        took = f"{1e3 * entry['s']:8.3f} ms {entry['launches']:5}"
        text += f"\n           {took} [{entry['component']}] {entry['kernel']}"
    return text


if __name__ == "__main__":
    sys.exit(main())
