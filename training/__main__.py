"""``python -m training -o DIR`` trains and evaluates both embedded models, one process and one GPU each."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from hybridstate.quality import tasks
from training import release

# The recipe of the released pair. `Recipe` in train.py says what each field means.
RELEASED: dict[str, dict[str, Any]] = {
    "gdn": {"steps": 4200, "tokens": 16_384},
    "kda": {"steps": 4050, "tokens": 32_768},
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m training", description=__doc__)
    parser.add_argument(
        "-o", "--out", type=Path, required=True, help="folder for models and figures"
    )
    parser.add_argument("--kind", choices=release.KINDS, help="train one model in this process")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--questions", type=int, default=512)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 6144])
    parser.add_argument("--name", help="file stem of the results, default the kind")
    parser.add_argument(
        "--check", action="store_true", help="compare the kernels with a float64 recurrence first"
    )
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="FIELD=VALUE", help="change fields of the recipe"
    )
    return parser.parse_args()


def _questions(job: tuple[str, int, int]) -> tuple[tuple[str, int], list[tasks.Question]]:
    from training import evaluate

    return (job[0], job[1]), evaluate.questions(*job)


def _versions(device: Any) -> dict[str, str]:
    import importlib.metadata

    import torch

    found = {"python": platform.python_version(), "device": str(device)}
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name(0)
    for package in ("torch", "transformers", "triton", "fla-core", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def _one(arguments: argparse.Namespace) -> None:
    from training import train

    values: dict[str, Any] = {"kind": arguments.kind, **RELEASED[arguments.kind]}
    types = {f.name: f.type for f in fields(train.Recipe)}
    casts: dict[str, Any] = {"int": int, "float": float, "str": str, "bool": lambda v: v == "True"}
    for item in arguments.set:
        key, _, value = item.partition("=")
        values[key] = casts[str(types[key])](value)
    recipe = train.Recipe(**values)
    context = multiprocessing.get_context("fork")
    jobs = [
        (task, tokens, arguments.questions) for task in tasks.TASKS for tokens in arguments.lengths
    ]
    pool = context.Pool(min(len(jobs), max(1, recipe.workers)))
    pending = pool.map_async(_questions, jobs)

    import torch

    from training import evaluate, recurrence

    device = torch.device(arguments.device)
    results: dict[str, Any] = {"model": release.NAMES[recipe.kind], "versions": _versions(device)}
    stem = arguments.name or recipe.kind
    arguments.out.mkdir(parents=True, exist_ok=True)

    def report(text: str) -> None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    if arguments.check and device.type == "cuda":
        import fla.ops.kda  # noqa: F401

        recurrence.limit_autotuning()
        results["kernel_error"] = recurrence.check(recipe.kind, device)
        report(f"kernel against float64: {results['kernel_error']}")
    run = train.train(recipe, device, arguments.out / f"{stem}.partial.safetensors", report)
    results["training"] = train.summary(recipe, run)
    release.write_release(run.model, recipe.kind, arguments.out / stem)
    (arguments.out / f"{stem}.partial.safetensors").unlink(missing_ok=True)
    results["retained"] = evaluate.retention(
        run.initial, train.decay_values(run.model), recipe.kind
    )
    sets = dict(pending.get())
    pool.close()
    small = {"windows": 4, "window": 256, "prose_count": 2} if recipe.smoke else {}
    with recurrence.installed(run.model, recipe.kind, device):
        results |= evaluate.everything(run.model, recipe.kind, sets, device, **small)
    (arguments.out / f"{stem}.json").write_text(json.dumps(results, indent=1) + "\n")
    brief = {
        k: results[k] for k in ("exact_match", "prose_bits_per_byte", "need_of_state", "retained")
    }
    report(f"{stem}: {json.dumps(brief)}")


def main() -> int:
    """Train one model here, or start one process per model and wait for both."""
    arguments = _arguments()
    if arguments.kind:
        _one(arguments)
        return 0
    running = []
    for index, kind in enumerate(release.KINDS):
        environment = dict(os.environ)
        if arguments.device == "cuda":
            import torch

            environment["CUDA_VISIBLE_DEVICES"] = str(index % max(1, torch.cuda.device_count()))
        command = [sys.executable, "-m", "training", "--kind", kind, *sys.argv[1:]]
        running.append(subprocess.Popen(command, env=environment))
    return max(process.wait() for process in running)


if __name__ == "__main__":
    raise SystemExit(main())
