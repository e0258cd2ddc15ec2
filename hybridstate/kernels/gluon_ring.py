"""Deferred requantisation on packed 128 x 128 states with matrix instructions (Gluon, NVIDIA).

The mathematics and the ring are those of `ring_reference.py`; layouts and passes those of `gluon_update.py`. A step
whose ring has room reads the packed head once (pass 1 alone) and appends its input; the step that fills the ring
writes the head anew, in the same launch. Phases are per slot and head, read and written by the one program that owns
the head: no host decision, no atomic, fit for CUDA graphs.

- While the head is on its way to shared memory, the ring is folded into two sums per value column: scores
  k . (fade_i * k_i) and q . (fade_i * k_i) of the held entries, times their pseudo values. Lanes own 4 channels of
  every entry, so a ring row is one 256-byte access, and sums over entries stay inside a lane.
- A rewrite is S <- decay S + sum_i (fade_i k_i) u_i^T over at most 16 entries: one matrix product of depth 16 per
  tile, whose accumulators meet the codes' in the same registers. Both factors are float16.
"""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from hybridstate.kernels.fusion import NO_FUSION, StepFusion
from hybridstate.kernels.gluon_parts import (
    MMA,
    NORM_EPSILON,
    SHARED1,
    SHARED2,
    SHARED3,
    UP,
    _barrier,
    _exp,
    _float16,
    _grid,
    _own_sums,
    _reciprocal,
    _release_next_grid,
    _to_column,
    _to_row,
    _view,
    _wait_for_previous_grid,
    _write_strength,
)
from hybridstate.kernels.gluon_update import _sums_over_codes, _sums_over_halves
from hybridstate.kernels.layout import PackedLayout
from hybridstate.kernels.ring_fold import (
    COLUMNS,
    DEPTH,
    ENTRIES,
    Q_SCALE,
    VALUE_ROWS,
    W,
    _floored,
    _fold_operands,
    _fold_poison,
    _gates,
    _group_poison,
    _log_decay_of,
    _rewrite,
    _ring_rows,
    _start_copy,
    _with_present,
)
from hybridstate.kernels.ring_reference import Ring


@gluon.jit
def ring_kernel(
    q, k, v, g, beta, pool, ring_keys, ring_values, ring_gates, phases, value_scale, slots, out,
    a_log, dt_bias, q_batch, k_batch, v_batch, g_batch, beta_batch, out_batch, slot_bytes,
    head_bytes,
    H: gl.constexpr, HK: gl.constexpr, KDA: gl.constexpr, SCALED: gl.constexpr,
    HIGH: gl.constexpr, EVERY: gl.constexpr, SPAN: gl.constexpr, MODE: gl.constexpr,
    GATE: gl.constexpr, LOWER: gl.constexpr, LOGIT: gl.constexpr, OVERLAP: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """Grid: batch * H, one warp each. MODE 0: by phase; 1: append always; 2: rewrite always.

    SPAN: room of a ring, EVERY - 1, rounded up to a power of two. GATE, LOWER, LOGIT: fusion.py.
    OVERLAP: 0 none; 1 start beside the end of the kernel before; 2 also read packed states, rings and phases there,
    which that kernel then must not write. EARLY: make ready for a rewrite before the head is there.
    """
    RING: gl.constexpr = gl.BlockedLayout([SPAN, 4], [1, 32], [1, 1], [1, 0])
    FLAT: gl.constexpr = gl.SliceLayout(0, RING)
    ROOM: gl.constexpr = EVERY - 1
    bh = gl.program_id(0)
    b = bh // H
    h = bh % H
    key_head = h // (H // HK)
    columns = _grid(8, 16, 16, VALUE_ROWS)
    p_out = out + b.to(gl.int64) * out_batch + h * 128
    if OVERLAP == 1:
        _wait_for_previous_grid()
        _release_next_grid()
    slot = gl.load(slots + b).to(gl.int64)
    if slot < 0:
        if OVERLAP == 2:
            _wait_for_previous_grid()  # it may still read what `out` held
        zero = gl.full([8, 16], 0.0, out.dtype.element_ty, layout=VALUE_ROWS)
        gl.store(p_out + columns, zero)
        return
    p_phase = phases + slot * H + h
    count = gl.load(p_phase)
    head = pool + slot * slot_bytes + h * head_bytes
    p_halves, p_codes, p_scales, halves, codes, scales = _start_copy(head, HIGH)

    # The ring and the present input, while the head is on its way.
    p_keys = ring_keys + (slot * HK + key_head) * (ROOM * 128)
    p_values = ring_values + (slot * H + h) * (ROOM * 128)
    flat = gl.arange(0, 128, layout=FLAT)
    held = gl.arange(0, SPAN, layout=gl.SliceLayout(1, RING)) < count
    past_keys = _ring_rows(p_keys, held, flat)
    past_values = _ring_rows(p_values, held, flat)
    if OVERLAP == 2:
        _wait_for_previous_grid()
        _release_next_grid()  # not earlier: the next kernel reads states once this has waited
    q_row = gl.load(q + b.to(gl.int64) * q_batch + key_head * 128 + flat).to(gl.float32)
    k_row = gl.load(k + b.to(gl.int64) * k_batch + key_head * 128 + flat).to(gl.float32)
    value = gl.load(v + b.to(gl.int64) * v_batch + h * 128 + columns).to(gl.float32)
    if SCALED:
        value_scale_row = gl.load(value_scale + h * 128 + columns)
    strength = _write_strength(
        gl.load(beta + b.to(gl.int64) * beta_batch + h).to(gl.float32), LOGIT
    )
    rate = 0.0
    bias = 0.0
    if GATE > 0:
        rate = gl.load(a_log + h)
    if KDA:
        p_gates = ring_gates + (slot * H + h) * (ROOM * 128)
        if GATE > 0:
            bias = gl.load(dt_bias + h * 128 + flat)
        g_row = gl.load(g + b.to(gl.int64) * g_batch + h * 128 + flat).to(gl.float32)
        g_row = _floored(_log_decay_of(g_row, rate, bias, GATE, LOWER))
        g_row = g_row.to(gl.float16).to(gl.float32)
    else:
        p_gates = ring_gates + (slot * H + h) * EVERY
        if GATE > 0:
            bias = gl.load(dt_bias + h)
        g_row = gl.load(g + b.to(gl.int64) * g_batch + h).to(gl.float32)
        g_row = _log_decay_of(g_row, rate, bias, GATE, LOWER)
        g_row = _floored(g_row)
    fades, total = _gates(p_gates, held, count, g_row, flat, KDA, SPAN <= EVERY)
    if KDA:
        past_keys = past_keys * _exp(fades)
    k_scores = gl.sum(past_keys * gl.expand_dims(k_row, 0), 1)
    q_scores = gl.sum(past_keys * gl.expand_dims(q_row, 0), 1)
    if not KDA:
        fade = _exp(fades)
        k_scores = k_scores * fade
        q_scores = q_scores * fade
    k_ring = gl.sum(gl.expand_dims(k_scores, 1) * past_values, 0)
    q_ring = gl.sum(gl.expand_dims(q_scores, 1) * past_values, 0)
    k_ring = _to_column(gl.convert_layout(gl.reshape(k_ring, [8, 16]), VALUE_ROWS), W)
    q_ring = _to_column(gl.convert_layout(gl.reshape(q_ring, [8, 16]), VALUE_ROWS), W)

    vectors = gl.allocate_shared_memory(gl.float32, [8, 2, 16], SHARED2)
    decays = gl.allocate_shared_memory(gl.float32, [8, 16], SHARED1)
    if KDA:
        a_row = _exp(total)
        k_read = k_row * a_row * UP
        q_read = q_row * a_row * UP
        decay = 1.0  # already in k_read, q_read and per channel below
        _view(decays, gl.float32, [8, 16], SHARED2).store(gl.reshape(a_row, [8, 16]))
    else:
        decay = _exp(total)
        k_read = k_row * UP
        q_read = q_row * UP
    both = gl.permute(gl.reshape(gl.join(k_read, q_read), [8, 16, 2]), [0, 2, 1])
    _barrier()  # the layout changes above may have used the same memory
    _view(vectors, gl.float32, [8, 2, 16], SHARED3).store(both)
    q_norm = gl.rsqrt(gl.sum(q_row * q_row, 0) + NORM_EPSILON) * Q_SCALE
    k_norm = gl.rsqrt(gl.sum(k_row * k_row, 0) + NORM_EPSILON)
    kq = gl.sum(k_row * q_row, 0) * q_norm * k_norm
    target = _to_column(value, W) * strength
    if SCALED:
        c = _to_column(value_scale_row, W)
        target = target * _reciprocal(c)
    else:
        c = 1.0
    # The rewrite comes last: its shared memory then takes the place of `vectors`, which it no longer reads.
    if MODE == 1:
        _finish(
            p_out, p_keys, p_values, p_gates, p_phase, count, k_row, g_row, total, flat,
            p_halves, p_codes, p_scales, halves, codes, scales, vectors, decays, decay,
            k_ring, q_ring, k_norm, q_norm, kq, strength, target, c,
            h % (H // HK) == 0, HIGH, KDA, SCALED, ROOM, EARLY, False,
        )  # fmt: skip
    elif MODE == 2:
        _finish(
            p_out, p_keys, p_values, p_gates, p_phase, count, k_row, g_row, total, flat,
            p_halves, p_codes, p_scales, halves, codes, scales, vectors, decays, decay,
            k_ring, q_ring, k_norm, q_norm, kq, strength, target, c,
            h % (H // HK) == 0, HIGH, KDA, SCALED, ROOM, EARLY, True,
        )  # fmt: skip
    elif count < ROOM:
        _finish(
            p_out, p_keys, p_values, p_gates, p_phase, count, k_row, g_row, total, flat,
            p_halves, p_codes, p_scales, halves, codes, scales, vectors, decays, decay,
            k_ring, q_ring, k_norm, q_norm, kq, strength, target, c,
            h % (H // HK) == 0, HIGH, KDA, SCALED, ROOM, EARLY, False,
        )  # fmt: skip
    else:
        _finish(
            p_out, p_keys, p_values, p_gates, p_phase, count, k_row, g_row, total, flat,
            p_halves, p_codes, p_scales, halves, codes, scales, vectors, decays, decay,
            k_ring, q_ring, k_norm, q_norm, kq, strength, target, c,
            h % (H // HK) == 0, HIGH, KDA, SCALED, ROOM, EARLY, True,
        )  # fmt: skip


@gluon.jit
def _finish(
    p_out, p_keys, p_values, p_gates, p_phase, count, k_row, g_row, total, flat,
    p_halves, p_codes, p_scales, halves, codes, scales, vectors, decays, decay,
    k_ring, q_ring, k_norm, q_norm, kq, strength, target, c, first_of_key_head,
    HIGH: gl.constexpr, KDA: gl.constexpr, SCALED: gl.constexpr, ROOM: gl.constexpr,
    EARLY: gl.constexpr, REWRITE: gl.constexpr,
):  # fmt: skip
    """Wait for the head, read it, write the output; then rewrite or append.

    With EARLY what a rewrite needs of the ring is made ready before the wait; it then occupies registers meanwhile.
    """
    key = (k_row * k_norm).to(gl.float16)
    if REWRITE:
        present = gl.convert_layout(key, COLUMNS, assert_trivial=True).to(gl.float32)
        if KDA:
            g = gl.convert_layout(g_row, COLUMNS, assert_trivial=True)
        else:
            g = g_row
        if EARLY:
            left, right, rests = _fold_operands(
                p_keys, p_values, p_gates, count, present, g, HIGH, KDA, True
            )
    async_copy.wait_group(0)
    _barrier()
    if HIGH < 8:
        sums = _sums_over_codes(codes, scales, vectors, 8 - HIGH, HIGH, W)
    else:
        sums = gl.zeros([128, 8], gl.float32, layout=MMA)
    if HIGH > 0:
        sums = _sums_over_halves(sums, halves, vectors, HIGH, W, False)
    k_state, q_state = _own_sums(sums, W)
    k_state = k_state * decay + k_ring
    q_state = q_state * decay + q_ring
    delta = target - k_state * (k_norm * strength)
    o = q_state * q_norm + kq * delta
    if SCALED:
        o = o * c
    columns = _grid(8, 16, 16, VALUE_ROWS)
    gl.store(p_out + columns, _to_row(o, W).to(p_out.dtype.element_ty))
    if REWRITE:
        if not EARLY:
            left, right, rests = _fold_operands(
                p_keys, p_values, p_gates, count, present, g, HIGH, KDA, True
            )
        left = _with_present(left, delta, count)
        _rewrite(
            p_halves, p_codes, p_scales, halves, codes, scales, decays, decay, left, right, rests,
            _group_poison(delta), HIGH, KDA,
        )  # fmt: skip
        gl.store(p_phase, 0)
    else:
        entry = _float16(_to_row(delta, W))
        _append(
            p_keys, p_values, p_gates, p_phase, count, key, entry, g_row, total, flat,
            first_of_key_head, KDA, ROOM,
        )  # fmt: skip


@gluon.jit
def _append(
    p_keys, p_values, p_gates, p_phase, count, key, value, g, total, flat, first_of_key_head,
    KDA: gl.constexpr, ROOM: gl.constexpr,
):  # fmt: skip
    """Put the present input behind the held ones; a full ring is left alone rather than overrun."""
    if count < ROOM:
        gl.store(p_values + count * 128 + _grid(8, 16, 16, VALUE_ROWS), value)
        if first_of_key_head:
            gl.store(p_keys + count * 128 + flat, key)
        if KDA:
            gl.store(p_gates + count * 128 + flat, g.to(gl.float16))
        else:
            gl.store(p_gates + count, total)
        gl.store(p_phase, count + 1)


@gluon.jit
def flush_kernel(
    pool, ring_keys, ring_values, ring_gates, phases, slots, slot_bytes, head_bytes,
    H: gl.constexpr, HK: gl.constexpr, KDA: gl.constexpr, HIGH: gl.constexpr,
    EVERY: gl.constexpr,
):  # fmt: skip
    """Grid: batch * H, one warp each: fold what the ring holds into the packed head and empty the ring."""
    ROOM: gl.constexpr = EVERY - 1
    bh = gl.program_id(0)
    b = bh // H
    h = bh % H
    slot = gl.load(slots + b).to(gl.int64)
    if slot < 0:
        return
    p_phase = phases + slot * H + h
    count = gl.load(p_phase)
    if count == 0:
        return
    head = pool + slot * slot_bytes + h * head_bytes
    p_halves, p_codes, p_scales, halves, codes, scales = _start_copy(head, HIGH)
    p_keys = ring_keys + (slot * HK + h // (H // HK)) * (ROOM * 128)
    p_values = ring_values + (slot * H + h) * (ROOM * 128)
    decays = gl.allocate_shared_memory(gl.float32, [8, 16], SHARED1)
    held = gl.arange(0, DEPTH, layout=gl.SliceLayout(1, ENTRIES)) < count
    columns = gl.arange(0, 128, layout=COLUMNS)
    zero = gl.zeros([128], gl.float32, layout=COLUMNS)
    if KDA:
        p_gates = ring_gates + (slot * H + h) * (ROOM * 128)
        _fades, total = _gates(p_gates, held, count, zero, columns, KDA, False)
        _view(decays, gl.float32, [8, 16], SHARED2).store(gl.reshape(_exp(total), [8, 16]))
        decay = 1.0
        left, right, rests = _fold_operands(
            p_keys, p_values, p_gates, count, zero, zero, HIGH, KDA, False
        )
    else:
        p_gates = ring_gates + (slot * H + h) * EVERY
        _fades, total = _gates(p_gates, held, count, 0.0, columns, KDA, False)
        decay = _exp(total)
        left, right, rests = _fold_operands(
            p_keys, p_values, p_gates, count, zero, 0.0, HIGH, KDA, False
        )
    async_copy.wait_group(0)
    _barrier()
    _rewrite(
        p_halves,
        p_codes,
        p_scales,
        halves,
        codes,
        scales,
        decays,
        decay,
        left,
        right,
        rests,
        _fold_poison(left, right),
        HIGH,
        KDA,
    )
    gl.store(p_phase, 0)


MODES = {"phase": 0, "append": 1, "rewrite": 2}
"""What a launch does after its output: as each head's phase says, or one thing for every head."""


def ring_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, ring: Ring,
    slots: Tensor, out: Tensor, value_scale: Tensor | None, layout: PackedLayout,
    fusion: StepFusion = NO_FUSION, mode: str = "phase", overlap: int = 0,
    early: bool = False, registers: int | None = None,
) -> None:  # fmt: skip
    """Launch `ring_kernel`; arguments as in `ring_update.ring_step`, already checked.

    `append` needs room in every ring of the batch; a full ring would lose the input.
    `overlap`, `early`: see the kernel. `registers`: at most so many a thread; with 168 a multiprocessor holds nine
    programs rather than the eight that the compiler's choice leaves room for with a value scale. Not the default: some
    versions of the compiler then spill (docs/kernels.md).
    """
    limit = {} if registers is None else {"maxnreg": registers}
    batch, heads, _ = v.shape
    ring_kernel[(batch * heads,)](
        q, k, v, g, beta, pool, ring.keys, ring.values, ring.gates, ring.phases,
        out if value_scale is None else value_scale, slots, out,
        out if fusion.a_log is None else fusion.a_log,
        out if fusion.dt_bias is None else fusion.dt_bias,
        q.stride(0), k.stride(0), v.stride(0), g.stride(0), beta.stride(0), out.stride(0),
        pool.stride(0), layout.head_bytes,
        H=heads, HK=q.shape[1], KDA=g.dim() == 3, SCALED=value_scale is not None,
        HIGH=layout.k_hi // 16, EVERY=ring.every,
        SPAN=max(2, triton.next_power_of_2(ring.every - 1)), MODE=MODES[mode],
        GATE=fusion.gate, LOWER=fusion.lower_bound or 0.0, LOGIT=fusion.beta_scale or 0.0, OVERLAP=overlap, EARLY=early,
        num_warps=1, enable_fp_fusion=True, launch_pdl=overlap > 0, **limit,
    )  # fmt: skip


def ring_flush(pool: Tensor, ring: Ring, slots: Tensor, layout: PackedLayout) -> None:
    """Launch `flush_kernel`; arguments as in `ring_update.ring_flush`, already checked."""
    heads = pool.shape[1]
    flush_kernel[(slots.shape[0] * heads,)](
        pool, ring.keys, ring.values, ring.gates, ring.phases, slots, pool.stride(0),
        layout.head_bytes, H=heads, HK=ring.keys.shape[1], KDA=ring.per_channel,
        HIGH=layout.k_hi // 16, EVERY=ring.every, num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
