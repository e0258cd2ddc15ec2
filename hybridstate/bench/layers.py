"""Sizes of recurrent layers that `bench update` times, and random inputs for them."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class UpdateDims:
    """One recurrent layer: `kind` is "gdn" or "kda"; `k_hi` None means 16 of every 128 key channels."""

    name: str
    kind: str
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    k_hi: int | None = None

    @property
    def protected(self) -> int:
        """FP16 key rows under `damp`."""
        default = min(self.key_dim, 16 * max(1, round(self.key_dim / 128)))
        return default if self.k_hi is None else self.k_hi


EMBEDDED: Final = (
    UpdateDims("tiny-gdn", "gdn", 4, 8, 128, 128),
    UpdateDims("tiny-kda", "kda", 4, 4, 128, 128),
)
"""The models in the package."""

PUBLISHED: Final = (
    UpdateDims("qwen3-next", "gdn", 16, 32, 128, 128),
    UpdateDims("kimi-linear", "kda", 32, 32, 128, 128),
)
"""Layers of the released models on one GPU."""


def input_dtype(device: torch.device) -> torch.dtype:
    """BF16 on a GPU, as models run there; float32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def random_inputs(
    layer: UpdateDims, batch: int, device: torch.device, seed: int
) -> tuple[Tensor, ...]:
    """q, k, v, g, beta and an output buffer."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype, heads = input_dtype(device), layer.value_heads

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    gate = (batch, heads, layer.key_dim) if layer.kind == "kda" else (batch, heads)
    uniform = torch.rand(gate, generator=generator, device=device)
    v = draw(batch, heads, layer.value_dim).to(dtype)
    return (
        draw(batch, layer.key_heads, layer.key_dim).to(dtype),
        draw(batch, layer.key_heads, layer.key_dim).to(dtype),
        v,
        -0.2 * uniform,
        draw(batch, heads).sigmoid(),
        torch.empty_like(v),
    )
