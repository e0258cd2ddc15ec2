"""Launches on small states, as tests run them, for `compile_launches`: a lane holds little, and sums differ in form."""

from typing import Any

import torch

from hybridstate.kernels.layout import PackedLayout
from hybridstate.kernels.multi_token import run_tokens
from hybridstate.kernels.ring_reference import Ring
from hybridstate.kernels.ring_update import ring_flush, ring_step
from hybridstate.kernels.update import dense_step, packed_step
from tests.kernels.cases import DENSE, DENSE_BF16, SMALL, Case, draw, fused

RINGS = (
    PackedLayout(24, 40, 8),
    PackedLayout(13, 37, 5),
    PackedLayout(11, 37, 2),
    PackedLayout(64, 64, 16, order="natural"),
    PackedLayout(128, 128, 16, order="natural"),
)
ODD = (PackedLayout(12, 37, 4), PackedLayout(23, 37, 16), PackedLayout(40, 33, 32))
"""Few rows in FP16 over an odd number of columns."""


def steps() -> None:
    """Decode steps, and some tokens, of the small states."""
    odd = (Case("few rows", layout, "kda") for layout in ODD)
    for case in (*SMALL, *DENSE, *DENSE_BF16, *odd):
        for seed in range(2):
            inputs = draw(case, seed)
            arguments = inputs.on("cpu")
            options: dict[str, Any] = {"layout": case.layout, "backend": "triton"}
            if seed:
                options["fusion"] = fused(case)
            out = torch.empty(inputs.v.shape)
            if isinstance(case.layout, PackedLayout):
                packed_step(**arguments, **options, out=out)
            else:
                dense_step(**arguments, **options, out=out)
        vectors = [inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta]
        tokens = [x[:, None].expand(x.shape[0], 3, *x.shape[1:]) for x in vectors]
        last = {"layout": case.layout, "backend": "triton", "value_scale": inputs.value_scale}
        run_tokens(*tokens, arguments["pool"], inputs.slots, **last)


def rings() -> None:
    """Steps and flushes of short and long rings."""
    for layout in RINGS:
        for per_channel in (False, True):
            for every in (4, 16):
                q, v = torch.empty(3, 2, layout.key_dim), torch.empty(3, 4, layout.value_dim)
                g = torch.empty(3, 4, layout.key_dim) if per_channel else torch.empty(3, 4)
                beta, scale = torch.empty(3, 4), torch.empty(4, layout.value_dim)
                pool = torch.zeros(4, 4, layout.head_bytes, dtype=torch.uint8)
                ring = Ring.empty(4, 2, 4, layout, every, per_channel=per_channel)
                options: dict[str, Any] = {"layout": layout, "backend": "triton"}
                slots = torch.arange(3)
                ring_step(q, q, v, g, beta, pool, ring, slots, value_scale=scale, **options)
                ring_flush(pool, ring, slots, **options)
