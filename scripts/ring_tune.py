"""Deferred requantisation on a GPU: check every kernel against its twin, then time them and measure their drift.

    python scripts/ring_tune.py --out DIR --deadline 95

Checks run first, one process for each gate and ring length, which also compile; a kernel whose check fails is not
timed. Times are CUDA-graph replays over slots rotated above four times the L2 cache, beside the kernel that
requantises at every step, an in-place pass over as many bytes as that one moves, and a sum over as many bytes as the
packed states have. Inputs and states are random (synthetic). `ring.json` is rewritten after every line.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hybridstate.kernels import ring_update
from hybridstate.kernels.layout import PackedLayout
from hybridstate.kernels.reference import recurrent_step
from hybridstate.kernels.ring_reference import Ring, ring_state

HEADS, KEY_HEADS = 32, {"gdn": 16, "kda": 32}
LENGTHS = (4, 8, 16)
BATCHES = (256, 64, 8, 1)
LAYOUT = PackedLayout(128, 128, 16)
STATE_BYTES = HEADS * LAYOUT.head_bytes
Step = Callable[..., None]

VARIANTS: dict[str, dict[str, Any]] = {
    "": {"early": False, "overlap": 0},
    ", 168 registers": {"registers": 168},
    ", early": {"early": True, "overlap": 0},
    ", overlapped": {"early": False, "overlap": 2},
    ", early, overlapped": {"early": True, "overlap": 2},
    ", 168 registers, overlapped": {"registers": 168, "overlap": 2},
}
"""When a rewrite is made ready, whether a launch starts beside the end of the one before, registers a thread."""


class Report:
    """Lines on the terminal and the same as JSON in a file, both as they come."""

    def __init__(self, path: Path, deadline: float) -> None:
        self.path, self.start, self.deadline = path, time.monotonic(), deadline
        self.rows: list[dict[str, Any]] = []

    def left(self) -> float:
        """Seconds to the deadline."""
        return self.start + self.deadline - time.monotonic()

    def add(self, line: str, **row: Any) -> None:
        """One result."""
        print(f"{time.monotonic() - self.start:6.1f} s  {line}", flush=True)
        self.rows.append(row)
        self.path.write_text(json.dumps({"rows": self.rows}, indent=1))


def draw(
    kind: str, batch: int, device: str, seed: int, mean_decay: Tensor | None = None
) -> list[Tensor]:
    """q, k, v (BF16), log decay and beta of one step."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    heads = HEADS if mean_decay is None else mean_decay.shape[0]
    key_heads = max(1, KEY_HEADS[kind] * heads // HEADS)
    gate = (batch, heads, 128) if kind == "kda" else (batch, heads)
    g = -0.2 * torch.rand(gate, generator=generator, device=device)
    if mean_decay is not None:
        g = g * 10.0 * (mean_decay[:, None] if kind == "kda" else mean_decay)
    vectors = [normal(batch, key_heads, 128).bfloat16() for _ in range(2)]
    return [*vectors, normal(batch, heads, 128).bfloat16(), g, normal(batch, heads).sigmoid()]


# Checks


def baseline(inputs: list[Tensor], pool: Tensor, slots: Tensor, out: Tensor, scale: Tensor) -> None:
    """The product's step that requantises every time."""
    from hybridstate.kernels import update

    q, k, v, g, beta = inputs
    update.packed_step(
        q,
        k,
        v,
        g,
        beta,
        pool,
        slots,
        layout=LAYOUT,
        value_scale=scale,
        out=out,
        backend="gluon" if pool.is_cuda else "reference",
    )


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
    name: ring_update.Name = "gluon" if every else "triton"
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


Right = set[tuple[str, int, str]]
"""Gate, length and variant whose check passed."""


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


# Times


def random_pool(slots: int) -> Tensor:
    """Random packed states; 32 slots are packed and repeated."""
    generator = torch.Generator("cuda").manual_seed(1)
    count = min(slots, 32)
    some = LAYOUT.pack(
        torch.randn((count, HEADS, 128, 128), generator=generator, device="cuda"), check=False
    )
    return some.repeat(-(-slots // count), 1, 1)[:slots].contiguous()


def new_ring(kind: str, slots: int, every: int) -> Ring:
    """Empty rings for a pool."""
    return Ring.empty(
        slots, KEY_HEADS[kind], HEADS, LAYOUT, every, per_channel=kind == "kda", device="cuda"
    )


def capture(launches: list[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of some launches; one of them runs before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launches[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return graph


def cycle_times(
    graphs: list[torch.cuda.CUDAGraph], launches: int, rounds: int
) -> list[list[float]]:
    """Microseconds of a launch in every graph of a cycle, for several cycles after one that warms up."""
    marks = [
        [torch.cuda.Event(enable_timing=True) for _ in range(len(graphs) + 1)]
        for _ in range(rounds + 1)
    ]
    for row in marks:
        row[0].record()
        for graph, mark in zip(graphs, row[1:], strict=True):
            graph.replay()
            mark.record()
    torch.cuda.synchronize()
    return [[a.elapsed_time(b) * 1e3 / launches for a, b in pairwise(row)] for row in marks[1:]]


def step_bytes(kind: str, batch: int, every: int) -> dict[str, float]:
    """Bytes of one step, mean over L, by part; every = 1 requantises at every step."""
    key_heads = KEY_HEADS[kind]
    entry = 256 * (HEADS + key_heads + (HEADS if kind == "kda" else 0))
    sums = 0 if kind == "kda" or every == 1 else HEADS * 4 * every
    gates = HEADS * 4 * (128 if kind == "kda" else 1)
    return {
        "state": batch * STATE_BYTES * (1 + 1 / every),
        "ring": batch * ((every - 1) / 2 * entry + (every - 1) / every * entry + sums),
        "io": batch * (256 * (2 * key_heads + 2 * HEADS) + gates + 4 * HEADS),
    }


def time_all(right: Right, report: Report, batches: tuple[int, ...]) -> None:
    """Every kernel at every batch."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    for batch in batches:
        sets = max(3, -(-4 * cache // (batch * STATE_BYTES)))
        pool = random_pool(sets * batch)
        order = torch.randperm(sets * batch, device="cuda")
        parts = [x.clone() for x in order.split(batch)]
        passes(batch, sets, report)
        for kind in KEY_HEADS:
            if report.left() < 4:
                return
            try:
                time_kind(kind, batch, sets, pool, parts, right, report)
            except Exception as error:
                report.add(
                    f"{kind} B={batch}: {type(error).__name__}: {str(error)[:300]}", what="error"
                )
        del pool
        torch.cuda.empty_cache()


def passes(batch: int, sets: int, report: Report) -> None:
    """`x += 1` over the bytes of a requantising step, and a sum over the bytes of the packed states."""
    memory = torch.ones(sets, batch * STATE_BYTES // 4, device="cuda")
    graphs = {
        "in-place pass": capture([partial(x.add_, 1.0) for x in memory]),
        "read pass": capture([partial(torch.sum, x) for x in memory]),
    }
    for name, graph in graphs.items():
        times = [x[0] for x in cycle_times([graph], sets, 12)]
        moved = batch * STATE_BYTES * (2 if name == "in-place pass" else 1)
        middle = statistics.median(times)
        report.add(
            f"B={batch:3d} {name}: {middle:6.1f} us, {moved / middle / 1e6:.2f} TB/s",
            what=name, batch=batch, us=times, bytes=moved,
        )  # fmt: skip


def time_kind(
    kind: str, batch: int, sets: int, pool: Tensor, parts: list[Tensor],
    right: Right, report: Report,
) -> None:  # fmt: skip
    """Requantising at every step, then each length: mixed phases, aligned, aligned with two kernels."""
    inputs = draw(kind, batch, "cuda", 3)
    out = torch.empty_like(inputs[2])
    scale = torch.rand(HEADS, 128, device="cuda") + 0.5
    try:
        graph = capture([partial(baseline, inputs, pool, s, out, scale) for s in parts])
        line(kind, batch, sets, 1, "every step, update.py", cycle_times([graph], sets, 12), report)
    except Exception as error:
        report.add(
            f"{kind} B={batch} update.py: {type(error).__name__}: {str(error)[:200]}", what="error"
        )
    everything = torch.arange(sets * batch, device="cuda")
    for every in LENGTHS if batch >= 64 else (8,):
        ring, rounds = new_ring(kind, sets * batch, every), 4 if every == 16 else 6
        for variant, options in VARIANTS.items():
            if (kind, every, variant) not in right or report.left() < 3:
                continue
            if variant and batch < 64:
                continue
            step = partial(ring_update.functions("gluon", LAYOUT)[0], **options)

            def launches(
                mode: str, ring: Ring = ring, step: Step = step
            ) -> list[Callable[[], Any]]:
                return [
                    partial(step, *inputs, pool, ring, s, out, scale, LAYOUT, mode=mode)
                    for s in parts
                ]

            def show(
                name: str, times: list[list[float]], every: int = every, ring: Ring = ring,
                variant: str = variant,
            ) -> None:  # fmt: skip
                line(kind, batch, sets, every, name + variant, times, report, ring)

            graph = capture(launches("phase"))
            ring.start(everything)
            for part in parts:  # each set spread evenly, whatever its slots are called
                place = torch.arange(batch, device="cuda", dtype=torch.int32) % every
                ring.phases[part] = place[:, None].expand(-1, HEADS).contiguous()
            show("mixed", cycle_times([graph] * every, sets, rounds))
            ring.start(everything, stagger=False)
            show("aligned", cycle_times([graph] * every, sets, rounds))
            if variant or every != 8:
                continue
            two = [capture(launches(mode)) for mode in ("append", "rewrite")]
            ring.start(everything, stagger=False)
            graphs = [two[0]] * (every - 1) + [two[1]]
            show("aligned, two kernels", cycle_times(graphs, sets, rounds))
        del ring


def line(
    kind: str, batch: int, sets: int, every: int, name: str, times: list[list[float]],
    report: Report, ring: Ring | None = None,
) -> None:  # fmt: skip
    """One result: mean over the cycle, its slowest and fastest step, bytes and resident bits."""
    moved = step_bytes(kind, batch, every)
    total = sum(moved.values())
    means = [statistics.fmean(x) for x in times]
    steps = [statistics.median(x) for x in zip(*times, strict=True)]
    middle = statistics.median(means)
    bits = LAYOUT.bits_per_value + (0.0 if ring is None else ring.bits_per_value)
    report.add(
        f"B={batch:3d} {kind} L={every:2d} {name:28s} {middle:6.1f} us (steps {min(steps):5.1f} to "
        f"{max(steps):5.1f}), {total / 1e6:6.1f} MB, {total / middle / 1e6:.2f} TB/s, {bits:.2f} bits",
        what="step", kind=kind, batch=batch, every=every, name=name, sets=sets, us_mean=means,
        us_steps=steps, bytes=moved, bits_per_value=bits,
    )  # fmt: skip


# Drift


def drift(report: Report, right: Right, device: str, steps: int, heads: int, batch: int) -> None:
    """State and output error against float64 over many steps, requantised at every step and at every L-th."""
    name: ring_update.Name = "gluon" if device == "cuda" else "reference"
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
