"""One decode step with deferred requantisation, in place: the counterpart of `update.packed_step`.

gluon      packed 128 x 128 heads in fragment order (a multiple of 16 FP16 rows) on NVIDIA GPUs, one launch
triton     any dimensions in natural order, one launch
reference  float64 in torch on any device; synchronises

Ring and packed state belong together: whoever copies, stores or hands over one must take both, or `ring_flush` first.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from hybridstate.errors import MissingRequirement, NumericError
from hybridstate.kernels.fusion import NO_FUSION, StepFusion, draw_fusion
from hybridstate.kernels.layout import PackedLayout
from hybridstate.kernels.ring_reference import Ring, ring_read, ring_state
from hybridstate.kernels.ring_reference import ring_flush as reference_ring_flush
from hybridstate.kernels.ring_reference import ring_step as reference_ring_step
from hybridstate.kernels.update import (
    OUTPUT_ERROR,
    STATE_MARGIN,
    Choice,
    Name,
    _canonical,
    _inner_contiguous,
)

LEAST_HEADS = 2048
"""Heads in a launch from which a ring with mixed phases saves time, on 132 multiprocessors."""


def ring_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    ring: Ring,
    slots: Tensor,
    *,
    layout: PackedLayout,
    value_scale: Tensor | None = None,
    fusion: StepFusion = NO_FUSION,
    out: Tensor | None = None,
    backend: Name | Literal["auto"] = "auto",
) -> Tensor:
    """Read the packed state and the ring, write the output; append to the ring, or rewrite where it is full.

    Args:
        q, k, v, g, beta, pool, slots, layout, value_scale, out: as in `update.packed_step`. Log decays below -100
            count as -100; KDA's are rounded to float16, once, on arrival.
        ring: of this pool, updated in place.
        fusion: gates and strengths from raw projections, as in `update.packed_step`; no key order per value head,
            because value heads share the ring's keys, and no counter of clipped values.
        backend: force one implementation.

    Returns:
        o [B, H, V].

    Raises:
        NumericError: shapes or dtypes do not fit.
        MissingRequirement: a forced implementation cannot run here.
    """
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out
    _check(q, k, v, g, beta, pool, ring, slots, out, value_scale, layout)
    if fusion is not NO_FUSION:
        fusion.check(v.shape[1], layout.key_dim, per_channel=g.dim() == 3)
        if fusion.key_index is not None or fusion.saturated is not None:
            raise NumericError(
                "a ring takes neither a key index nor a counter of clipped values",
                hint="Permute the weights (export), or use packed_step.",
            )
    name = _choose(_canonical(v.device), layout).name if backend == "auto" else backend
    rows = [_inner_contiguous(x) for x in (q, k, v, g, beta)]
    functions(name, layout)[0](
        *rows,
        pool,
        ring,
        slots,
        out,
        value_scale,
        layout,
        fusion,
    )
    return out


def ring_flush(
    pool: Tensor,
    ring: Ring,
    slots: Tensor,
    *,
    layout: PackedLayout,
    backend: Name | Literal["auto"] = "auto",
) -> None:
    """Fold what the rings of some slots hold into their packed states: before a snapshot, checkpoint or hand-over.

    Costs one requantisation, as any rewrite; slots whose ring is empty are left alone, padding (-1) too.
    """
    name = _choose(_canonical(pool.device), layout).name if backend == "auto" else backend
    functions(name, layout)[1](pool, ring, slots, layout)


def advised_every(batch: int, heads: int) -> int:
    """Steps between two rewrites that made a step fastest on an H200, 128 x 128: 8 for large batches, 1 (no ring).

    Below, a rewriting program is the tail of the launch and the ring buys accuracy only (batch 8 of 32 heads: 10.9 us
    with mixed phases against 7.2; 64: 27.2 against 29.4; 256: 67.8 against 91.6, GDN). A ring belongs to its slots,
    so an engine decides when it makes its pool, by the batch it is made for.
    """
    return 8 if batch * heads >= LEAST_HEADS else 1


def ring_layout(layout: PackedLayout) -> PackedLayout:
    """The same storage in an order that has a ring kernel: its own for 128 x 128, natural for any other head."""
    return layout if _is_square(layout) else replace(layout, order="natural")


def functions(name: Name, layout: PackedLayout) -> tuple[Callable[..., None], Callable[..., None]]:
    """Step and flush behind a name; imports Triton only when asked for.

    Raises:
        MissingRequirement: it cannot run this layout, or Triton is missing.
    """
    if name == "reference":
        return reference_ring_step, reference_ring_flush
    module: Any
    try:
        if name == "triton" and layout.order == "natural":
            from hybridstate.kernels import ring_triton as module

            return module.ring_step, module.ring_flush
        if name == "gluon" and layout.order == "fragment" and _is_square(layout):
            from hybridstate.kernels import gluon_ring as module

            return module.ring_step, module.ring_flush
    except ImportError as error:
        raise MissingRequirement(
            f"the {name} ring kernels need Triton 3.6 or later ({error})",
            hint="Install triton, or use backend='reference'.",
        ) from error
    raise MissingRequirement(
        f"no {name} ring kernel for layout {layout.layout_id}",
        hint="Use order='natural' for triton, 128 x 128 in fragment order for gluon.",
    )


def backend(device: torch.device | str, layout: PackedLayout) -> Choice:
    """Implementation that `backend="auto"` uses, and why; the first call per device and layout tests it (seconds)."""
    return _choose(_canonical(device), layout)


@lru_cache(maxsize=64)
def _choose(device: str, layout: PackedLayout) -> Choice:
    if not device.startswith("cuda"):
        return Choice("reference", f"reference: no kernel runs on {device}")
    name: Name = "gluon" if layout.order == "fragment" else "triton"
    before = "" if name == "gluon" else f"gluon: {_gluon_obstacle(layout)}; "
    try:
        step, flush = functions(name, layout)
        found = [check(step, flush, device, layout, per_channel=x) for x in (False, True)]
        problem = next((x["problem"] for x in found if x["problem"]), None)
    except Exception as error:  # compilers and drivers raise anything; the reason is reported
        problem = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if problem is None:
        return Choice(name, f"{before}{name}: passed its self-test on {device}")
    return Choice("reference", f"{before}{name}: {problem}; reference: what is left")


def _is_square(layout: PackedLayout) -> bool:
    """Whether the heads are those of the Gluon kernel."""
    return (layout.key_dim, layout.value_dim) == (128, 128)


def _gluon_obstacle(layout: PackedLayout) -> str:
    """Why the Gluon kernel does not run on a layout in natural order."""
    if not _is_square(layout):
        return f"heads of {layout.key_dim} x {layout.value_dim}, not 128 x 128"
    return layout.fragment_obstacle or "the pool is in natural order"


def check(
    step: Callable[..., None],
    flush: Callable[..., None],
    device: torch.device | str,
    layout: PackedLayout,
    *,
    per_channel: bool,
    every: int = 8,
    key_heads: int = 2,
    heads: int = 4,
    batch: int = 5,
    steps: int = 11,
    scaled: bool = True,
    fused: bool = False,
    seed: int = 20,
) -> dict[str, Any]:
    """Several steps at mixed phases, then a flush, beside `ring_reference` in float64 on the same device.

    The reference is restarted from the tested pool and ring before every step, so that an error shows where it
    arises and rounding to another INT8 code is not carried on.

    Returns:
        Largest relative RMS errors: `output` of any step, `state` after any rewrite and `storage`, what storing
        the exact states gives; `problems`, what is wrong in order, and `problem`, the first of them or None.
    """
    generator = torch.Generator().manual_seed(seed)
    K, V = layout.key_dim, layout.value_dim

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    scale = draw(heads, V).mul(0.3).exp() if scaled else None
    fusion = NO_FUSION
    if fused:
        drawn = draw_fusion(heads, K, per_channel, generator)
        fusion = StepFusion(drawn.a_log, drawn.dt_bias, drawn.lower_bound, drawn.beta_scale)
        fusion = fusion.to(torch.device(device))
    pool = layout.pack(draw(batch + 1, heads, K, V))
    ring = Ring.empty(
        batch + 1, key_heads, heads, layout, every, per_channel=per_channel, device=device
    )
    slots = torch.randperm(batch + 1, generator=generator)[:batch]
    ring.start(torch.arange(batch + 1, device=device))
    slots[1] = -1
    slots = slots.to(device)
    live = slots >= 0
    rows = slots[live]
    worst = {"output": 0.0, "state": 0.0, "storage": 0.0, "entry": 0.0}
    problems = []
    for turn in range(steps + 1):
        before, held = pool.clone(), _copied(ring)
        wanted_pool, wanted = before.clone(), _copied(ring)
        exact_state = layout.unpack(before[rows]).double()
        if turn == steps:
            exact = ring_state(exact_state, held, rows)
            moved = held.phases[rows] > 0
            flush(pool, ring, slots, layout)
            reference_ring_flush(wanted_pool, wanted, slots, layout)
        else:
            vectors = [draw(batch, key_heads, K).bfloat16() for _ in range(2)]
            v = draw(batch, heads, V).bfloat16()
            g = -0.2 * draw(*((batch, heads, K) if per_channel else (batch, heads))).abs()
            beta = draw(batch, heads).sigmoid()
            inputs = [_apart(x) for x in (*vectors, v, g, beta)]
            out = torch.full_like(v, float("nan"))
            step(*inputs, pool, ring, slots, out, scale, layout, fusion)
            expected = torch.empty(v.shape, dtype=torch.float64, device=device)
            qd, kd, vd, gd, betad = (x.double() for x in inputs)
            reference_ring_step(
                qd, kd, vd, gd, betad, wanted_pool, wanted, slots, expected, scale, layout, fusion
            )
            found = out.double()
            worst["output"] = max(worst["output"], _relative(found[live], expected[live]))
            if bool((found[~live] != 0).any()):
                problems.append(f"a padding row is not zero at step {turn}")
            qd, kd, gd, betad = fusion.derive(qd, kd, gd, betad)
            stored = vd[live] / (1.0 if scale is None else scale.double())
            _, entry, sums = ring_read(
                qd[live], kd[live], stored, gd[live], betad[live], exact_state, held, rows
            )
            exact = ring_state(exact_state, held, rows, entry, sums)
            moved = held.phases[rows] >= every - 1
        after = pool.clone()
        if not torch.equal(ring.phases, wanted.phases):
            problems.append(f"phases differ after step {turn}")
        still = torch.ones(after.shape[:2], dtype=torch.bool, device=device)
        still[rows] = ~moved
        if not torch.equal(after[still], before[still]):
            problems.append(f"a state was written out of turn at step {turn}")
        if bool(moved.any()):
            error = _relative(layout.unpack(after[rows][moved]).double(), exact[moved])
            least = _relative(layout.unpack(layout.pack(exact[moved])).double(), exact[moved])
            worst["state"] = max(worst["state"], error)
            worst["storage"] = max(worst["storage"], least)
            if not error < least * STATE_MARGIN + 1e-6:
                problems.append(
                    f"state error {error:.2e} at step {turn}, storage alone gives {least:.2e}"
                )
        found_ring = _copied(ring)
        for name in ("keys", "values", "gates"):
            mine, theirs = getattr(found_ring, name), getattr(wanted, name)
            worst["entry"] = max(worst["entry"], _relative(mine.double(), theirs.double()))
    for name, part in (("output", "output"), ("ring", "entry")):
        if not worst[part] < OUTPUT_ERROR:
            problems.append(f"{name} error {worst[part]:.1e}, at most {OUTPUT_ERROR:.0e}")
    return {**worst, "problem": problems[0] if problems else None, "problems": problems}


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def _apart(x: Tensor) -> Tensor:
    """The same [B, ...] with NaN between its rows, as columns of a fused projection lie."""
    rows = x.flatten(1)
    wide = x.new_full((len(x), rows.shape[1] + 8), float("nan"))
    wide[:, : rows.shape[1]] = rows
    apart: Tensor = wide[:, : rows.shape[1]].unflatten(1, x.shape[1:])
    return apart


def _copied(ring: Ring) -> Ring:
    """A copy that later steps leave alone."""
    return Ring(*(x.clone() for x in ring.parts))


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    ring: Ring,
    slots: Tensor,
    out: Tensor,
    value_scale: Tensor | None,
    layout: PackedLayout,
) -> None:
    """Refuse what a kernel would read out of bounds or broadcast."""
    batch, heads, _ = v.shape
    key_heads, width = q.shape[1], layout.key_dim
    room, places = ring.every - 1, pool.shape[0]
    gate = (places, heads, room, width) if g.dim() == 3 else (places, heads, ring.every)
    expected = {
        "q": (q, (batch, key_heads, width)),
        "k": (k, (batch, key_heads, width)),
        "v": (v, (batch, heads, layout.value_dim)),
        "g": (g, (batch, heads, width) if g.dim() == 3 else (batch, heads)),
        "beta": (beta, (batch, heads)),
        "slots": (slots, (batch,)),
        "out": (out, (batch, heads, layout.value_dim)),
        "pool": (pool, (places, heads, layout.head_bytes)),
        "ring.keys": (ring.keys, (places, key_heads, room, width)),
        "ring.values": (ring.values, (places, heads, room, layout.value_dim)),
        "ring.gates": (ring.gates, gate),
        "ring.phases": (ring.phases, (places, heads)),
    }
    if value_scale is not None:
        expected["value_scale"] = (value_scale, (heads, layout.value_dim))
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise NumericError(
                f"{name} has shape {tuple(tensor.shape)}, expected {shape}",
                tensor=name,
                found=list(tensor.shape),
                expected=list(shape),
            )
    if pool.dtype != torch.uint8 or slots.dtype != torch.int64 or not pool[:1].is_contiguous():
        raise NumericError("pool must be contiguous uint8 and slots int64")
