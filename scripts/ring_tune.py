"""Deferred requantisation on a GPU: check every kernel against its twin, then time them and measure their drift.

    python scripts/ring_tune.py --out DIR --deadline 95

Checks run first, one process for each gate and ring length, which also compile; a kernel whose check fails is not
timed. Times are CUDA-graph replays over slots rotated above four times the L2 cache, beside the kernel that
requantises at every step, an in-place pass over as many bytes as that one moves, and a sum over as many bytes as the
packed states have. Inputs and states are random (synthetic). `ring.json` is rewritten after every line.
"""

import argparse
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ring_setup import (
    BATCHES,
    HEADS,
    KEY_HEADS,
    LAYOUT,
    LENGTHS,
    VARIANTS,
    Report,
    Right,
    Step,
    baseline,
    draw,
    new_ring,
    random_pool,
)
from ring_times import time_all

from hybridstate.kernels import ring_update
from hybridstate.kernels.layout import PackedLayout
from hybridstate.kernels.reference import recurrent_step
from hybridstate.kernels.ring_reference import Ring, ring_state
from hybridstate.kernels.update import Name

# Checks


def worker(kind: str, every: int, variant: str, out: Path) -> None:
    """Compile and check all modes for one gate and ring length; writes a JSON row.

    Length 0: the plain Triton kernel; length 1: the kernel that requantises at every step, compiled only.
    """
    if every == 1:
        inputs = draw(kind, 8, "cuda", 0)
        scale = torch.ones(HEADS, 128, device="cuda")
        slots = torch.arange(8, device="cuda")
        baseline(inputs, random_pool(8), slots, torch.empty_like(inputs[2]), scale)
        torch.cuda.synchronize()
        return
    layout = LAYOUT if every else PackedLayout(128, 128, 16, order="natural")
    name: Name = "gluon" if every else "triton"
    every = every or 8
    found: dict[str, Any] = {"kind": kind, "every": every, "backend": name, "variant": variant}
    try:
        step, flush = ring_update.functions(name, layout)
        if name == "gluon":
            step = partial(step, **VARIANTS[variant])
        result = ring_update.check(
            step, flush, "cuda", layout, per_channel=kind == "kda", every=every,
            steps=every + 3, batch=3, key_heads=KEY_HEADS[kind], heads=HEADS,
        )  # fmt: skip
        found |= result
        if every == 8 and not variant and result["problem"] is None:
            fused = ring_update.check(
                step, flush, "cuda", layout, per_channel=kind == "kda", every=every, steps=10,
                batch=2, key_heads=KEY_HEADS[kind], heads=HEADS, fused=True,
            )  # fmt: skip
            found["fused"] = fused
            if fused["problem"]:
                found["problem"] = f"gates fused: {fused['problem']}"
        if name == "gluon" and not variant and found["problem"] is None:
            found["problem"] = modes_differ(kind, every, step) or nan_spreads(kind, every, step)
    except Exception as error:  # compilers raise anything; the line says what
        found["problem"] = f"{type(error).__name__}: {str(error)[-600:]}"
    out.write_text(json.dumps(found))


def modes_differ(kind: str, every: int, step: Step) -> str | None:
    """Whether appending L - 1 times and then rewriting differs from following the phases by more than rounding."""
    batch = 8
    pool = random_pool(batch)
    scale = torch.rand(HEADS, 128, device="cuda") + 0.5
    slots = torch.randperm(batch, device="cuda")
    pools, rings, outs = [pool, pool.clone()], [new_ring(kind, batch, every) for _ in range(2)], []
    for turn in range(every):
        inputs = draw(kind, batch, "cuda", turn)
        modes = ("phase", "rewrite" if turn == every - 1 else "append")
        outs = [torch.empty_like(inputs[2]) for _ in modes]
        for mode, p, ring, out in zip(modes, pools, rings, outs, strict=True):
            step(*inputs, p, ring, slots, out, scale, LAYOUT, mode=mode)
        error = float((outs[0] - outs[1]).double().norm() / outs[0].double().norm())
        if not error < 1e-3:
            return f"outputs of the modes differ by {error:.1e} at step {turn}"
    first, second = (LAYOUT.unpack(x).double() for x in pools)
    error = float((first - second).norm() / first.norm())
    return None if error < 1e-3 else f"states of the modes differ by {error:.1e}"


def nan_spreads(kind: str, every: int, step: Step) -> str | None:
    """Whether a NaN in one value column leaves its slot and head, or is requantised into numbers."""
    pool, ring, slots = random_pool(4), new_ring(kind, 4, every), torch.arange(4, device="cuda")
    scale = torch.ones(HEADS, 128, device="cuda")
    for turn in range(every + 1):
        inputs = draw(kind, 4, "cuda", turn)
        if turn == 0:
            inputs[2][1, 5, 40] = float("nan")
        out = torch.empty_like(inputs[2])
        step(*inputs, pool, ring, slots, out, scale, LAYOUT)
    bad = ~torch.isfinite(LAYOUT.unpack(pool))
    if not bool(bad[1, 5, 16:, 32:64].all()) or int(bad[1, 5, :16].sum()) != 16:
        return "a NaN was stored as a number"
    if int(bad.sum()) != 112 * 32 + 16:
        return "a NaN left its group"
    wrong = (~torch.isfinite(out)).nonzero().tolist()
    return (
        None if wrong == [[1, 5, x] for x in range(32, 64)] else f"outputs not finite: {wrong[:4]}"
    )


def run_checks(out: Path, report: Report) -> Right:
    """All checks side by side, every variant at L = 8, the first and the last at the other lengths."""
    jobs = [(kind, every, "") for kind in KEY_HEADS for every in (0, 1)]
    for kind in KEY_HEADS:
        for every in LENGTHS:
            some = list(VARIANTS) if every == 8 else ["", ", early, overlapped"]
            jobs += [(kind, every, variant) for variant in some]
    order = {job: number for number, job in enumerate(jobs)}
    files = {job: out / f"check-{number}.json" for job, number in order.items()}
    processes = {
        job: subprocess.Popen(
            [sys.executable, __file__, "--worker", job[0], str(job[1]), job[2], "--out", str(path)]
        )
        for job, path in files.items()
    }
    right: Right = set()
    for job, process in processes.items():
        try:
            process.wait(timeout=max(1.0, min(60.0, report.left() - 25)))
            if job[1] == 1:
                continue
            found = json.loads(files[job].read_text())
        except (subprocess.TimeoutExpired, OSError, ValueError) as error:
            process.kill()
            found = {"problem": f"no answer: {type(error).__name__}", "backend": "?"}
        line = f"check {job[0]} L={found.get('every', job[1])} {found['backend']}{job[2]}: "
        if found["problem"] is None:
            line += (
                f"ok, output {found['output']:.2e}, state {found['state']:.5e} "
                f"(storage {found['storage']:.5e}), ring {found['entry']:.1e}"
            )
            if job[1]:
                right.add(job)
        else:
            line += f"WRONG, {found['problem']}"
        report.add(line, what="check", **found)
    return right


# Drift


def drift(report: Report, right: Right, device: str, steps: int, heads: int, batch: int) -> None:
    """State and output error against float64 over many steps, requantised at every step and at every L-th."""
    name: Name = "gluon" if device == "cuda" else "reference"
    for kind in KEY_HEADS:
        if report.left() < 6:
            return
        decay = torch.logspace(-3, -1, heads, device=device)  # mean -g per head
        scale = torch.rand(heads, 128, device=device) + 0.5
        key_heads = max(1, KEY_HEADS[kind] * heads // HEADS)
        zero = torch.zeros(batch, heads, 128, 128, dtype=torch.float64, device=device)
        truth, slots = zero, torch.arange(batch, device=device)
        each = LAYOUT.pack(zero)
        pools = {every: LAYOUT.pack(zero) for every in LENGTHS if (kind, every, "") in right}
        rings = {
            every: Ring.empty(
                batch, key_heads, heads, LAYOUT, every, per_channel=kind == "kda", device=device
            )
            for every in pools
        }
        step = ring_update.functions(name, LAYOUT)[0]
        wide = scale.double()[:, None]
        squares: dict[int, Tensor | float] = dict.fromkeys((1, *pools), 0.0)
        norm: Tensor | float = 0.0
        for turn in range(steps):
            inputs = draw(kind, batch, device, turn, decay)
            q, k, v, g, beta = (x.double() for x in inputs)
            o, truth = recurrent_step(q, k, v, g, beta, truth)
            outs = {every: torch.empty_like(inputs[2]) for every in squares}
            baseline(inputs, each, slots, outs[1], scale)
            for every, pool in pools.items():
                step(*inputs, pool, rings[every], slots, outs[every], scale, LAYOUT)
            if turn >= steps - 256:
                norm = norm + o.square().sum()
                for every, out in outs.items():
                    squares[every] = squares[every] + (out.double() - o).square().sum()
            if turn + 1 in (256, 1024, steps) or (turn % 256 == 0 and report.left() < 3):
                found = {1: LAYOUT.unpack(each).double()}
                for every, pool in pools.items():
                    found[every] = ring_state(LAYOUT.unpack(pool).double(), rings[every], slots)
                errors = {
                    every: float((x * wide - truth).norm() / truth.norm())
                    for every, x in found.items()
                }
                last = turn + 1 == steps
                outputs = {every: float(x / norm) ** 0.5 for every, x in squares.items() if last}
                text = ", ".join(
                    f"L={every}: {x:.5f} ({errors[1] / x:.2f}x less)" for every, x in errors.items()
                )
                if last:
                    text += "; outputs " + ", ".join(
                        f"L={every}: {x:.5f}" for every, x in outputs.items()
                    )
                report.add(
                    f"drift {kind} {name} {turn + 1} steps, state error {text}",
                    what="drift", kind=kind, backend=name, steps=turn + 1, state=errors,
                    outputs=outputs,
                )  # fmt: skip
                if report.left() < 3:
                    return


def main() -> int:
    """Checks, then times, then drift, while time is left."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--deadline", type=float, default=95.0, help="seconds")
    parser.add_argument(
        "--worker", nargs=3, metavar=("KIND", "L", "VARIANT"), help=argparse.SUPPRESS
    )
    parser.add_argument(
        "--drift-on-cpu", type=int, metavar="STEPS", help="drift of the reference only"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    if arguments.worker:
        kind, every, variant = arguments.worker
        worker(kind, int(every), variant, arguments.out)
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    report = Report(arguments.out / "ring.json", arguments.deadline)
    everything: Right = {(kind, every, "") for kind in KEY_HEADS for every in LENGTHS}
    if arguments.drift_on_cpu:
        drift(report, everything, "cpu", arguments.drift_on_cpu, 2, 1)
        return 0
    right = run_checks(arguments.out, report)
    time_all(right, report, BATCHES)
    try:
        drift(report, right, "cuda", 4096, 8, 2)
    except Exception as error:
        report.add(f"drift: {type(error).__name__}: {str(error)[:300]}", what="error")
    return 0 if right >= everything else 1


if __name__ == "__main__":
    sys.exit(main())
