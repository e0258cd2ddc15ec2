"""Check and time every form of the decode kernels on one GPU: `kernel_tune.py --out DIR --deadline SECONDS`.

Each variant is first compared with float64 on the same stored states, then timed as the replay of a CUDA graph over
rotated pools above four times the L2 cache. One line per variant and batch at once, and DIR/kernel_tune.json grows
as it goes. Inputs are synthetic. The most wanted variants come first; what the deadline leaves out is named.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hybridstate.bench.timing import device_record, measure_launches, rotation
from hybridstate.kernels import gluon_update, triton_update
from hybridstate.kernels.fusion import NO_FUSION, StepFusion
from hybridstate.kernels.layout import DenseLayout, Layout, PackedLayout
from hybridstate.kernels.reference import recurrent_step

DEVICE = torch.device("cuda")
BATCHES = (256, 64, 16, 8, 4, 1)
LAUNCHES = 10
"""Fewest launches of a graph, so that its own start weighs little."""


@dataclass(frozen=True)
class Variant:
    """One compiled form: layout, gate, and the launcher's own options."""

    name: str
    layout: Layout
    kind: str = "gdn"
    fused: bool = False
    indexed: bool = False
    counted: bool = False
    safe: bool = False
    key_heads: int = 16
    heads: int = 32
    batches: tuple[int, ...] = BATCHES
    options: dict[str, Any] = field(default_factory=dict)
    launcher: Callable[..., None] = gluon_update.packed_step

    @property
    def hk(self) -> int:
        return self.heads if self.kind == "kda" else self.key_heads


def packed(k: int = 128, v: int = 128, hi: int = 16) -> PackedLayout:
    return PackedLayout(k, v, hi)


def variants() -> Iterator[Variant]:
    """Most wanted first."""
    p = packed()
    for kind in ("gdn", "kda"):
        for overlap in (0, 2):
            o = {"columns": 128, "overlap": overlap}
            yield Variant(f"{kind} packed 128 fused overlap {overlap}", p, kind, True, options=o)
    for kind in ("gdn", "kda"):
        yield Variant(f"{kind} packed 128 given gate", p, kind, options={"columns": 128})
    for kind in ("gdn", "kda"):  # what a caller gets: columns and warps by the batch
        for overlap in (0, 2):
            o = {"overlap": overlap}
            every = (1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1)
            name = f"{kind} packed product fused overlap {overlap}"
            yield Variant(name, p, kind, True, batches=every, options=o)
    for kind in ("gdn", "kda"):
        for columns in (64, 32):
            for overlap in (0, 2):
                o = {"columns": columns, "overlap": overlap}
                yield Variant(
                    f"{kind} packed {columns} fused overlap {overlap}", p, kind, True, options=o
                )
    small = (64, 16, 8, 4, 1)
    for columns, warps in ((32, 8), (64, 8), (32, 4), (64, 4), (128, 8)):
        for overlap in (0, 2):
            o = {"columns": columns, "warps": warps, "overlap": overlap}
            name = f"gdn split {columns} x {warps} fused overlap {overlap}"
            yield Variant(name, p, "gdn", True, batches=small, options=o)
    o = {"columns": 32, "warps": 8}
    yield Variant(
        "kda split 32 x 8 safe index count", p, "kda", True, True, True, True, batches=small,
        options=o,
    )  # fmt: skip
    for kind in ("gdn", "kda"):
        f32 = DenseLayout(128, 128, torch.float32, "tiles")
        o = {"columns": 8, "warps": 1}
        dense = triton_update.dense_step
        yield Variant(f"{kind} fp32 tiles 8 fused", f32, kind, True, options=o, launcher=dense)
        o = o | {"overlap": 2}
        name = f"{kind} fp32 tiles 8 fused overlap 2"
        yield Variant(name, f32, kind, True, options=o, launcher=dense)
    for dtype in (torch.bfloat16, torch.float16):
        layout = DenseLayout(128, 128, dtype, "fragment")
        short = str(dtype).removeprefix("torch.")
        for columns in (64, 32):
            for overlap in (0, 2):
                o = {"columns": columns, "overlap": overlap}
                yield Variant(
                    f"gdn {short} {columns} fused overlap {overlap}", layout, "gdn", True, options=o
                )
        yield Variant(f"kda {short} 64 fused", layout, "kda", True, options={"columns": 64})
    for overlap in (1,):
        o = {"columns": 128, "overlap": overlap}
        yield Variant(f"gdn packed 128 fused overlap {overlap}", p, "gdn", True, options=o)
    o = {"columns": 128}
    yield Variant("kda packed 128 safe index count", p, "kda", True, True, True, True, options=o)
    yield Variant("gdn packed 128 index", p, "gdn", True, True, options=o)
    yield Variant("gdn packed 128 count", p, "gdn", True, counted=True, options=o)
    layouts: tuple[tuple[Layout, int], ...] = (
        (DenseLayout(128, 128, torch.bfloat16, "fragment"), 8),
        (packed(96, 192), 8),
        (packed(256, 256, 32), 8),
        (packed(64, 64), 4),
        (packed(hi=0), 8),
    )
    for shape, warps in layouts:
        o = {"columns": 32, "warps": warps}
        name = f"gdn split 32 x {warps} {shape.layout_id}"
        yield Variant(name, shape, "gdn", True, batches=(8, 1), options=o)
    olmo = packed(96, 192)
    for columns in (64, 32):
        o = {"columns": columns}
        yield Variant(
            f"olmo 96x192 {columns}", olmo, "gdn", True, key_heads=30, heads=30, options=o
        )
    for k, v in ((64, 64), (192, 128), (256, 256), (128, 96), (128, 256)):
        other = packed(k, v, 16 * max(1, round(k / 128)))
        for columns in (128, 64, 32):
            if columns <= other.block:
                name = f"gdn {k}x{v} {columns}"
                yield Variant(name, other, "gdn", True, batches=(64,), options={"columns": columns})
    o = {"columns": 128}
    for hi in (0, 32, 64, 128):
        yield Variant(f"gdn packed hi {hi}", packed(hi=hi), "gdn", True, batches=(256,), options=o)
    plain = PackedLayout(128, 128, 16, order="natural")
    step = triton_update.packed_step
    for kind in ("gdn", "kda"):
        yield Variant(f"{kind} plain triton natural", plain, kind, True, launcher=step)
    rows = DenseLayout(96, 192, torch.float32)
    yield Variant(
        "olmo fp32 rows 8", rows, "gdn", True, key_heads=30, heads=30, batches=(64,),
        options={"columns": 8, "warps": 1}, launcher=triton_update.dense_step,
    )  # fmt: skip


def inputs(variant: Variant, batch: int, seed: int = 0) -> dict[str, Any]:
    """q, k, v as views of one row; raw or given gates; everything a step takes but pool, slots and out."""
    gen = torch.Generator(DEVICE).manual_seed(seed)
    layout, H, HK = variant.layout, variant.heads, variant.hk
    K, V = layout.key_dim, layout.value_dim

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen, device=DEVICE)

    row = normal(batch, 2 * HK * K + H * V).bfloat16()
    q, k, v = row.split([HK * K, HK * K, H * V], 1)
    gate = (batch, H, K) if variant.kind == "kda" else (batch, H)
    g, beta, fusion = -0.2 * normal(*gate).abs(), normal(batch, H).sigmoid(), NO_FUSION
    if variant.fused:
        g, beta = normal(*gate).bfloat16(), normal(batch, H).bfloat16()
        order = torch.argsort(normal(H, K), -1).to(torch.uint8)
        fusion = StepFusion(
            a_log=normal(H) - 1.0,
            dt_bias=normal(*gate[1:]) - 2.0,
            lower_bound=-5.0 if variant.safe else None,
            beta_scale=1.0,
            key_index=order if variant.indexed else None,
            saturated=torch.zeros(1, dtype=torch.int32, device=DEVICE) if variant.counted else None,
        )
    scaled = isinstance(layout, PackedLayout)
    return {
        "vectors": (q.view(batch, HK, K), k.view(batch, HK, K), v.view(batch, H, V), g, beta),
        "scale": normal(H, V).mul(0.3).exp() if scaled else None,
        "fusion": fusion,
    }


def check(variant: Variant) -> dict[str, float]:
    """Errors of one step with a padding row; raises where they are too large."""
    batch, layout = 5, variant.layout
    found = inputs(variant, batch, seed=3)
    gen = torch.Generator(DEVICE).manual_seed(4)
    shape = (batch + 2, variant.heads, layout.key_dim, layout.value_dim)
    pool = layout.pack(torch.randn(shape, generator=gen, device=DEVICE))
    before = pool.clone()
    slots = torch.tensor([5, -1, 0, 3, 6], device=DEVICE)
    q, k, v, g, beta = found["vectors"]
    out = torch.full(v.shape, float("nan"), dtype=v.dtype, device=DEVICE)
    run(variant, found, pool, slots, out)
    torch.cuda.synchronize()
    live, rows = slots >= 0, slots[slots >= 0]
    scale = found["scale"]
    wide = 1.0 if scale is None else scale.double()[:, None]
    wide_g, wide_beta = g.double(), beta.double()
    dq, dk, dg, db = found["fusion"].derive(q.double(), k.double(), wide_g, wide_beta)
    state = layout.unpack(before[rows]).double() * wide
    o, exact = recurrent_step(dq[live], dk[live], v[live].double(), dg[live], db[live], state)
    best = layout.unpack(layout.pack(exact / wide)).double() * wide
    got = layout.unpack(pool[rows]).double() * wide

    def error(x: torch.Tensor, y: torch.Tensor) -> float:
        return float((x.double() - y).norm() / y.norm())

    result = {
        "output_error": error(out[live], o),
        "state_error": error(got, exact),
        "storage_error": error(best, exact),
    }
    unused = [i for i in range(batch + 2) if i not in rows.tolist()]
    wrong = []
    if not result["output_error"] < 4e-3:
        wrong.append("output")
    if not result["state_error"] < result["storage_error"] * 1.005 + 1e-6:
        wrong.append("state")
    if not torch.equal(pool[unused], before[unused]) or out[1].any():
        wrong.append("padding")
    if wrong:
        raise ValueError(f"wrong {wrong}: {result}")
    return result


def run(
    variant: Variant,
    found: dict[str, Any],
    pool: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """One launch."""
    variant.launcher(
        *found["vectors"], pool, slots, out, found["scale"], variant.layout, found["fusion"],
        **variant.options,
    )  # fmt: skip


def timed(variant: Variant, batch: int) -> dict[str, Any]:
    """Samples of one launch."""
    layout = variant.layout
    one_way = batch * variant.heads * layout.head_bytes
    sets = rotation(one_way, DEVICE)
    found = inputs(variant, batch)
    shape = (min(sets * batch, 16), variant.heads, layout.key_dim, layout.value_dim)
    some = layout.pack(torch.randn(shape, device=DEVICE))
    pool = some.new_empty(sets * batch, *some.shape[1:])
    for part in pool.split(len(some)):
        part.copy_(some[: len(part)])
    out = torch.empty(found["vectors"][2].shape, dtype=torch.bfloat16, device=DEVICE)
    order = torch.randperm(sets * batch, device=DEVICE).split(batch)
    launches = [partial(run, variant, found, pool, s.clone(), out) for s in order]
    launches = launches * -(-LAUNCHES // len(launches))
    samples = measure_launches(launches, device=DEVICE, warmup=2, repeat=15)
    io = sum(x.numel() * x.element_size() for x in found["vectors"]) + out.numel() * 2
    return {
        "median_us": samples.median * 1e6,
        "p10_us": samples.quantile(0.1) * 1e6,
        "p90_us": samples.quantile(0.9) * 1e6,
        "gb_per_s": (2 * one_way + io) / samples.median / 1e9,
        "sets": sets,
        "samples_s": list(samples.seconds),
    }


def memory_pass(layout: Layout, heads: int, batch: int) -> dict[str, Any]:
    """`x += 1` over the same states."""
    one_way = batch * heads * layout.head_bytes
    sets = rotation(one_way, DEVICE)
    pool = torch.ones(sets, one_way // 4, device=DEVICE)
    launches = [partial(x.add_, 1.0) for x in pool] * -(-LAUNCHES // sets)
    samples = measure_launches(launches, device=DEVICE, warmup=2, repeat=15)
    return {
        "median_us": samples.median * 1e6,
        "gb_per_s": 2 * one_way / samples.median / 1e9,
        "samples_s": list(samples.seconds),
    }


def main() -> int:
    """Checks, times, prints; exit code 1 if a variant was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--deadline", type=float, default=150.0, help="seconds")
    parser.add_argument("--only", default="", help="part of a variant's name")
    arguments = parser.parse_args()
    start = time.monotonic()
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "kernel_tune.json"
    record: dict[str, Any] = {"device": device_record(DEVICE), "inputs": "synthetic", "rows": []}
    wrong = 0

    def note(row: dict[str, Any], line: str) -> None:
        record["rows"].append(row)
        path.write_text(json.dumps(record) + "\n")
        sys.stdout.write(f"{time.monotonic() - start:6.1f}s {line}\n")
        sys.stdout.flush()

    for label, layout in (
        ("packed", packed()),
        ("bf16", DenseLayout(128, 128, torch.bfloat16)),
        ("fp32", DenseLayout(128, 128)),
    ):
        for batch in BATCHES:
            found = memory_pass(layout, 32, batch)
            note(
                {"pass": label, "batch": batch} | found,
                f"pass {label:8s} B={batch:4d} {found['median_us']:8.2f} µs {found['gb_per_s']:7.0f} GB/s",
            )
    for variant in variants():
        if arguments.only not in variant.name:
            continue
        if time.monotonic() - start > arguments.deadline:
            note(
                {"variant": variant.name, "left_out": True}, f"{variant.name}: left out (deadline)"
            )
            continue
        row: dict[str, Any] = {"variant": variant.name, "layout": variant.layout.layout_id}
        try:
            row["check"] = check(variant)
        except Exception as error:  # a failing variant must not end the run
            text = f"{type(error).__name__}: {error}"[:400]
            note(row | {"failed": text}, f"{variant.name:36s} FAILED {text}")
            wrong += 1
            continue
        errors = " ".join(f"{k[:-6]} {v:.2e}" for k, v in row["check"].items())
        note(row, f"{variant.name:36s} ok {errors}")
        for batch in variant.batches:
            try:
                found = timed(variant, batch)
            except Exception as error:
                note(
                    row | {"batch": batch, "failed": str(error)[:400]}, f"B={batch} FAILED {error}"
                )
                continue
            note(
                row | {"batch": batch} | found,
                f"{variant.name:36s} B={batch:4d} {found['median_us']:8.2f} µs"
                f" ({found['p10_us']:.2f}-{found['p90_us']:.2f}) {found['gb_per_s']:6.0f} GB/s",
            )
    sys.stdout.write(f"{wrong} variants failed\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
