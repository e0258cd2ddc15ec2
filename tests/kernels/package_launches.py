"""Launches as the package makes them, for `compile_launches`: of prompts and steps of models, and of their states."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hybridstate.kernels import attention, experts, norms, prefill, prefill_inputs, router, storage
from hybridstate.kernels.fusion import StepFusion, draw_fusion
from hybridstate.kernels.layout import DenseLayout, PackedLayout
from hybridstate.kernels.multi_token import run_tokens
from hybridstate.kernels.packed_rows import KeptRows, gather_packed, scatter_packed
from hybridstate.kernels.ring_reference import Ring
from hybridstate.kernels.ring_update import ring_flush, ring_step
from hybridstate.kernels.update import dense_step, packed_step
from tests.kernels import transfer_cases as transfer


@dataclass(frozen=True)
class Sizes:
    """A model: width, linear heads of keys and values, attention, experts."""

    width: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    per_channel: bool
    inner: int
    expert_inner: int = 0
    experts: int = 0
    latent: bool = False

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def units(self) -> int:
        return self.heads * (self.key_dim if self.per_channel else 1)


QWEN = Sizes(2048, 16, 32, 128, 128, False, 512, 512, 256)
KIMI = Sizes(2304, 32, 32, 128, 128, True, 9216, 1024, 256, latent=True)
TINY_GDN = Sizes(256, 1, 2, 128, 128, False, 512)
TINY_KDA = Sizes(256, 2, 2, 128, 128, True, 512)
MODELS: Final = {"qwen": QWEN, "kimi": KIMI, "tiny-gdn": TINY_GDN, "tiny-kda": TINY_KDA}
LENGTHS: Final = (1, 2, 33, 4096)
BATCHES: Final = (1, 256)


def joined(rows: int, m: Sizes, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Columns of one product for all projections: convolved channels, gate, raw decays, raw strengths."""
    widths = [m.channels, m.heads * m.value_dim, m.units, m.heads]
    padded = -(-sum(widths) // 8) * 8
    return torch.empty(rows, padded, dtype=dtype)[:, : sum(widths)].split(widths, 1)


def fusion_of(m: Sizes) -> StepFusion:
    """Gates of the model's kind, derived in the kernels."""
    shape = (m.heads, m.key_dim) if m.per_channel else (m.heads,)
    return StepFusion(
        torch.zeros(m.heads), torch.zeros(shape), -5.0 if m.per_channel else None, beta_scale=1.0
    )


def operands(x: Tensor, m: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v by head."""
    keys = m.key_heads * m.key_dim
    q, k, v = x.split([keys, keys, m.heads * m.value_dim], 1)
    return (
        q.unflatten(1, (m.key_heads, -1)),
        k.unflatten(1, (m.key_heads, -1)),
        v.unflatten(1, (m.heads, -1)),
    )


def prompt_inputs(m: Sizes, dtype: torch.dtype) -> None:
    """A prompt between its projection and the recurrence."""
    for tokens in LENGTHS:
        mixed, _, decay, strength = joined(tokens, m, dtype)
        taps = torch.empty(m.channels, 4, dtype=dtype)
        for window in (dtype, torch.float32):
            held = torch.empty(m.channels, 3, dtype=window)
            prefill_inputs.convolve(mixed, held, taps, None)
        prefill_inputs.convolve(mixed, held, taps, torch.empty(m.channels, dtype=dtype))
        prefill_inputs.gates(decay, strength, fusion_of(m))
        count = torch.zeros(1, dtype=torch.int64)
        prefill_inputs.convolve(mixed, held, taps, None, count)
        prefill_inputs.gates(decay, strength, fusion_of(m), count)


def prompt_recurrence(m: Sizes, dtype: torch.dtype) -> None:
    """A prompt through the recurrence, from a state and from none."""
    for tokens in LENGTHS:
        q, k, v = (x[None] for x in operands(torch.empty(tokens, m.channels, dtype=dtype), m))
        gate = (m.heads, m.key_dim) if m.per_channel else (m.heads,)
        g, beta = torch.empty(1, tokens, *gate), torch.empty(1, tokens, m.heads)
        state = torch.empty(1, m.heads, m.key_dim, m.value_dim)
        for before in (None, state):
            prefill.prefill(q, k, v, g, beta, before)


def step_norms(m: Sizes, dtype: torch.dtype) -> None:
    """Norms, convolution and gated products of a step and of a prompt."""
    weight, head = torch.empty(m.width, dtype=dtype), torch.empty(m.value_dim, dtype=dtype)
    taps = torch.empty(m.channels, 4, dtype=dtype)
    for rows in (*BATCHES, 33):
        x = torch.empty(rows, 1, m.width, dtype=dtype)
        for centred in (False, True):
            norms.rms_norm(x, weight, 1e-6, zero_centred=centred)
        mixed, gate, _, _ = joined(rows, m, dtype)
        o = torch.empty(rows, m.heads, m.value_dim, dtype=dtype)
        for activation in ("silu", "sigmoid"):
            gates = gate.unflatten(1, (m.heads, -1))
            norms.rms_norm(o, head, 1e-6, gate=gates, activation=activation)
        slots = torch.zeros(rows, dtype=torch.int64)
        pool = torch.empty(300, m.channels, 3, dtype=dtype)
        norms.conv_step(mixed, pool, taps, None, slots)
        norms.conv_step(
            mixed, torch.empty(rows, m.channels, 4, dtype=dtype), taps, taps[:, 0].contiguous()
        )
        both = torch.empty(rows, 2 * m.inner, dtype=dtype)
        norms.gated(both[:, m.inner :], both[:, : m.inner], "silu")


def mixtures(m: Sizes, dtype: torch.dtype) -> None:
    """Router and experts of a step."""
    gate_up = torch.empty(m.experts, 2 * m.expert_inner, m.width, dtype=dtype)
    down = torch.empty(m.experts, m.width, m.expert_inner, dtype=dtype)
    for rows in (*BATCHES, 1024):  # short prompts too
        x = torch.empty(rows, m.width, dtype=dtype)
        bias = torch.empty(m.experts) if m.per_channel else None
        logits = torch.empty(rows, m.experts, dtype=dtype if bias is None else torch.float32)
        weights, chosen = router.route(logits, 8, bias=bias, factor=2.5)
        shared = torch.empty(rows, m.width, dtype=dtype)
        experts.experts_step(x, gate_up, down, chosen, weights)
        gate = None if bias is not None else torch.empty(rows, 8, dtype=dtype)[:, 1]
        experts.experts_step(x, gate_up, down, chosen, weights, shared, gate)


def step_attention(m: Sizes, dtype: torch.dtype) -> None:
    """Attention of a step over lines and over a masked cache, new keys and values."""
    for rows, length, masked in ((1, 96, False), (1, 8200, True), (256, 1024, False)):
        places = torch.zeros(rows, dtype=torch.int64)
        seen = torch.zeros(rows, length, dtype=torch.bool)
        if m.latent:
            q = torch.empty(rows, 32, 576, dtype=dtype)
            keys: Tensor = torch.empty(rows, 1, length, 576, dtype=dtype)
            values, width, new = None, 512, torch.empty(rows, 1, 64, dtype=dtype)
            attention.append_step(new, keys, places, places, first=512)
        else:
            q = torch.empty(rows, 16, 256, dtype=dtype)
            keys = torch.empty(rows, 2, length, 256, dtype=dtype)
            values, width, new = torch.empty_like(keys), 0, torch.empty(rows, 2, 256, dtype=dtype)
            attention.append_step(new, keys, places, places)
        if masked:
            attention.attention_step(q, keys, values, seen, 0.1, width)
            continue
        attention.attention_step(q, keys, values, None, 0.1, width, lines=places, lengths=places)


def updates(m: Sizes, dtype: torch.dtype) -> None:
    """Decode steps, rings and several tokens by the plain kernels, on packed and dense states."""
    packed = PackedLayout(m.key_dim, m.value_dim, 16, order="natural")
    fragment = PackedLayout(m.key_dim, m.value_dim, 16, order="fragment")
    dense = DenseLayout(m.key_dim, m.value_dim)
    derived = draw_fusion(m.heads, m.key_dim, m.per_channel, torch.Generator())
    plain = fusion_of(m)
    scale = torch.empty(m.heads, m.value_dim)
    slots = torch.zeros(3, dtype=torch.int64)
    mixed, _, decay, strength = joined(3, m, dtype)
    vectors = operands(mixed, m)
    raw = decay.unflatten(1, (m.heads, m.key_dim)) if m.per_channel else decay
    given = (*vectors, raw, strength)
    for fusion, layout in ((derived, packed), (plain, packed), (plain, fragment)):
        pool = torch.empty(4, m.heads, layout.head_bytes, dtype=torch.uint8)
        options: dict[str, Any] = {"layout": layout, "fusion": fusion, "backend": "triton"}
        packed_step(*given, pool, slots, value_scale=scale, **options)
    for fusion, kind in (
        (derived, torch.float32),
        (plain, torch.float32),
        (derived, torch.float16),
        (plain, torch.bfloat16),
    ):
        options = {"fusion": fusion, "backend": "triton"}
        options["layout"] = DenseLayout(m.key_dim, m.value_dim, kind)
        pool = torch.empty(4, m.heads, m.key_dim, m.value_dim, dtype=kind)
        dense_step(*given, pool, slots, value_scale=None, **options)
    pool = torch.empty(4, m.heads, packed.head_bytes, dtype=torch.uint8)
    ring = Ring.empty(4, m.key_heads, m.heads, packed, 8, per_channel=m.per_channel)
    options = {"layout": packed, "backend": "triton"}
    ring_step(
        *vectors, raw, strength, pool, ring, slots, value_scale=scale, fusion=plain, **options
    )
    ring_flush(pool, ring, slots, **options)
    for tokens in (1, 64):
        some = tuple(x[:1, None].expand(3, tokens, *x.shape[1:]) for x in (*vectors, raw, strength))
        run_tokens(*some, pool, slots, value_scale=scale, **options)
        states = torch.empty(4, m.heads, m.key_dim, m.value_dim)
        run_tokens(*some, states, slots, layout=dense, backend="triton")


def moves() -> None:
    """Slots between pools, checkpoints and caches."""
    square, odd = PackedLayout(128, 128, 16), PackedLayout(24, 40, 16)
    for layout in (square, odd, PackedLayout(128, 128, 16, order="natural")):
        with suppress(AssertionError):  # nothing was computed
            transfer.check_pack(layout, "cpu")
        with suppress(AssertionError):
            transfer.check_packed_checkpoint(layout, "cpu", per_channel=False)
        state = torch.empty(2, layout.head_bytes, dtype=torch.uint8)
        kept = KeptRows.from_mask(torch.ones(2, layout.key_dim, dtype=torch.bool), layout)
        rows = kept.buffers(1, layout)
        gather_packed(state, kept, rows, layout, backend="triton")
        scatter_packed(rows, kept, state, layout, backend="triton")
    for codec, scale in transfer.FORMS:
        with suppress(AssertionError):
            transfer.check_rows(codec, scale, "cpu", per_channel=codec == "fp32")
    for shape, dtype in (((3, 2, 8, 20), torch.float32), ((3, 2, 21), torch.uint8)):
        with suppress(AssertionError):
            transfer.check_copy("cpu", shape, dtype)


def storing() -> None:
    """Formats of a calibration, all arms at once."""
    heads, key_dim, value_dim = 2, 128, 128
    arms = torch.arange(3, dtype=torch.int32)
    tables = storage.StorageTables(
        arms,
        torch.zeros(3, heads, key_dim, dtype=torch.uint8),
        torch.zeros(3, heads, value_dim, dtype=torch.int32),
        torch.ones(3, heads, value_dim),
    )
    state = torch.empty(6, heads, key_dim, value_dim)
    storage.store_in_place(state, tables, arms, 2, torch.zeros(6, dtype=torch.int32), arms)
