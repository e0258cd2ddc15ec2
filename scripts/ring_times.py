"""Times of `ring_tune.py`: CUDA-graph replays of every kernel, beside plain passes over as many bytes."""

import statistics
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from ring_setup import (
    HEADS,
    KEY_HEADS,
    LAYOUT,
    LENGTHS,
    STATE_BYTES,
    VARIANTS,
    Report,
    Right,
    Step,
    baseline,
    draw,
    new_ring,
    random_pool,
)
from torch import Tensor

from hybridstate.kernels import ring_update
from hybridstate.kernels.ring_reference import Ring


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
            f"B={batch:3d} {name}: {middle:6.1f} µs, {moved / middle / 1e6:.2f} TB/s",
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
        f"B={batch:3d} {kind} L={every:2d} {name:28s} {middle:6.1f} µs (steps {min(steps):5.1f} to "
        f"{max(steps):5.1f}), {total / 1e6:6.1f} MB, {total / middle / 1e6:.2f} TB/s, {bits:.2f} bits",
        what="step", kind=kind, batch=batch, every=every, name=name, sets=sets, us_mean=means,
        us_steps=steps, bytes=moved, bits_per_value=bits,
    )  # fmt: skip
