"""Short measurements of calibration on SYNTHETIC weights of published dimensions, before a whole run is paid for.

    scripts/at_scale.py MODEL [--json FILE] [--updates N] [--deadline SECONDS] [--formats LIST] [--profile]

Prints a line and writes the JSON after every part: build, prefill, a plain and a recorded generation step, one
validation step, the kernels that take longest, peak memory, and what `calibrate --dummy --profile paper` would
take by these numbers.
"""

import argparse
import json
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from hybridstate.provenance import environment
from hybridstate.quant import simulate as simulation
from hybridstate.quant.arms import Arm
from hybridstate.quant.catalogue import parse_list
from hybridstate.quant.formats import FORMATS
from hybridstate.quant.simulate import simulate
from hybridstate.trajectories import graphs
from hybridstate.trajectories import record as recording
from hybridstate.trajectories.batches import BatchWriter
from hybridstate.trajectories.dummy import dummy_model
from hybridstate.trajectories.model import LoadedModel
from hybridstate.trajectories.prompts import make_prompts, shipped_texts
from hybridstate.trajectories.protocol import PROFILES
from hybridstate.trajectories.record import Generation, batch_arrays, plain_step_ms, record
from hybridstate.trajectories.stages import peak_memory, timed


def main() -> int:
    """Run every part that the deadline allows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--updates", type=int, default=160)
    parser.add_argument("--deadline", type=float, default=240.0)
    parser.add_argument("--formats")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--length", type=int, help="prompt tokens (the paper's 1,024 by default)")
    parser.add_argument("--profile", action="store_true", help="kernels of one step of each kind")
    options = parser.parse_args()
    report = Report(options.json, time.monotonic() + options.deadline)
    report.put("synthetic", True)
    report.put("model", options.model)
    loaded = report.part("build", lambda: build(options.model, options.device))
    if loaded is None:
        return 1
    paper = PROFILES["paper"]
    length = options.length or paper.input_tokens
    protocol = replace(
        paper,
        profile="custom",
        input_tokens=length,
        new_tokens=options.updates,
        windows=(0,),
        anchors=(options.updates // 4, options.updates // 2),
        horizon=options.updates // 2,
    )
    full_length(paper.new_tokens)
    whole = make_prompts(
        loaded.encode, shipped_texts(), replace(paper, input_tokens=length), seed=0
    )
    report.part("record", lambda: recorded(loaded, whole, protocol))
    report.part(
        "plain",
        lambda: {
            "plain_step_ms": plain_step_ms(
                loaded, whole, protocol, temperature=1.0, seed=0, updates=options.updates // 2
            )
        },
    )
    held_out = tuple(p for p in whole if p.split == "validate")
    arms = arms_of(loaded, options.formats)
    report.part("validate", lambda: validated(loaded, held_out, arms, protocol))
    if options.profile:
        report.part("kernels", lambda: kernels(loaded, whole, protocol))
    report.put("peak_memory", peak_memory())
    report.put("forecast_s", forecast(report.found, paper.new_tokens))
    report.put("provenance", environment(device=options.device))
    return 0


def full_length(updates: int) -> None:
    """Caches as long as a whole run's: a step attends over all of it, whatever is filled."""

    def longer(loaded: LoadedModel, cache: Any, room: int) -> Any:
        return graphs.fixed_cache(loaded, cache, max(room, updates))

    for module in (recording, simulation):
        module.fixed_cache = longer  # type: ignore[attr-defined]


class Report:
    """Found so far; printed and written after every part."""

    def __init__(self, path: Path | None, until: float) -> None:
        self.path, self.until = path, until
        self.found: dict[str, Any] = {}

    def part(self, name: str, run: Any) -> Any:
        """Run one part unless the deadline has passed; what fails is reported and left out."""
        if time.monotonic() > self.until:
            self.put(name, "left out: deadline")
            return None
        started = time.perf_counter()
        try:
            result = run()
        except Exception as error:
            traceback.print_exc()
            self.put(name, f"failed: {type(error).__name__}: {error}")
            return None
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        elapsed = {"seconds": time.perf_counter() - started}
        self.put(name, elapsed | (result if isinstance(result, dict) else {}))
        return result

    def put(self, name: str, value: Any) -> None:
        """Keep, print, write."""
        self.found[name] = value
        print(f"{name}: {json.dumps(value)}", flush=True)
        if self.path is not None:
            self.path.write_text(json.dumps(self.found, indent=2) + "\n")


def build(model: str, device: str) -> LoadedModel:
    """The model, with a word on its size."""
    loaded = dummy_model(model, device=device)
    parameters = sum(p.numel() for p in loaded.model.parameters())
    print(f"{loaded.checkpoint.name}: {parameters / 1e9:.2f} G parameters", flush=True)
    return loaded


def recorded(loaded: LoadedModel, prompts: Any, protocol: Any) -> dict[str, Any]:
    """One batch of all prompts into a file, as `calibrate` records it."""
    with timed() as stages, TemporaryDirectory() as folder:
        path = Path(folder) / "batch-000.safetensors"
        with BatchWriter(path, batch_arrays(loaded.spec, protocol, len(prompts))) as writer:
            found = record(
                loaded, prompts, protocol, temperature=1.0, seed=0, anchors=writer.anchor
            )
            writer.finish(found.arrays())
        distinct = len(set(found.generated.flatten().tolist()))
        return stages.to_json() | {"bytes": path.stat().st_size, "distinct_tokens": distinct}


def arms_of(loaded: LoadedModel, formats: str | None) -> tuple[Arm, ...]:
    """The arms of a list, their protected channels being the first ones: cost does not depend on which."""
    found = []
    for name in parse_list(formats, loaded.spec):
        protected = None
        if name.selector is not None:
            count = 16 if name.k_hi is None else name.k_hi
            layers = loaded.spec.layers
            protected = tuple(torch.arange(count).repeat(x.value_heads, 1) for x in layers)
        high = FORMATS["fp16"]
        found.append(
            Arm(name.name, name.low, protected, high, every=name.every, feedback=name.feedback)
        )
    return tuple(found)


def validated(loaded: LoadedModel, prompts: Any, arms: Any, protocol: Any) -> dict[str, Any]:
    """Arms on random tokens, as `calibrate` validates them."""
    generator = torch.Generator().manual_seed(0)
    shape = (len(prompts), protocol.new_tokens)
    tokens = torch.randint(0, loaded.vocabulary, shape, generator=generator)
    with timed() as stages:
        outcome = simulate(loaded, prompts, tokens, arms, chunk=protocol.chunk, batch=36)
        found = stages.to_json()
    steps = protocol.new_tokens - 1
    kl = {a.name: float(outcome.kl[i].mean()) for i, a in enumerate(arms)}
    return found | {"step_ms": 1e3 * found["stages_s"]["validate"] / steps, "kl": kl}


def kernels(loaded: LoadedModel, prompts: Any, protocol: Any) -> dict[str, Any]:
    """Device time of one generation step by kernel, the twenty longest."""
    import numpy as np
    from torch.profiler import ProfilerActivity, profile

    from hybridstate.trajectories.model import prefill

    tokens = torch.from_numpy(np.stack([p.tokens for p in prompts]))
    with torch.no_grad():
        logits, cache = prefill(loaded, tokens, chunk=protocol.chunk)
    draws = np.zeros((len(prompts), 16))
    run = Generation(loaded, cache, logits, draws, temperature=1.0)
    del cache, logits
    with run.running():
        for _ in range(4):
            run.replay()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            run.replay()
            torch.cuda.synchronize()
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)
    return {
        "launches": sum(row.count for row in rows),
        "total_ms": sum(row.self_device_time_total for row in rows) / 1e3,
        "longest": [
            {"ms": row.self_device_time_total / 1e3, "count": row.count, "name": row.key[:100]}
            for row in rows[:20]
        ],
    }


def forecast(found: dict[str, Any], updates: int) -> dict[str, float] | str:
    """Seconds of the stages of a whole run by these steps, without scores and the disk."""
    try:
        record_found, validate_found = found["record"], found["validate"]
        return {
            "build": found["build"]["seconds"],
            "prefill": record_found["stages_s"]["prefill"],
            "generate": found["plain"]["plain_step_ms"] * updates / 1e3,
            "validate-prefill": validate_found["stages_s"]["validate-prefill"],
            "validate": validate_found["step_ms"] * updates / 1e3,
        }
    except (KeyError, TypeError) as error:
        return f"not all parts ran: {error!r}"


if __name__ == "__main__":
    sys.exit(main())
