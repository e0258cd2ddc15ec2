"""Shapes, variants, random inputs and the report of `ring_tune.py` and `ring_times.py`. Everything is synthetic."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridstate.kernels.layout import PackedLayout
from hybridstate.kernels.ring_reference import Ring

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


Right = set[tuple[str, int, str]]
"""Gate, length and variant whose check passed."""


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
