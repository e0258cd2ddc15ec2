"""Sizes of recurrent layers that `bench update` times, and random inputs for them."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hybridstate.kernels.fusion import NO_FUSION, StepFusion


@dataclass(frozen=True, slots=True)
class UpdateDims:
    """One recurrent layer.

    Attributes:
        name: of the model.
        kind: "gdn" or "kda".
        key_heads, value_heads, key_dim, value_dim: Hk, H, K, V on one GPU.
        k_hi: FP16 key rows under `damp`; None means 16 of every 128 key channels.
        lower_bound: of the safe gate; None where the gate is softplus.
        beta_scale: the strength is this times a sigmoid.
    """

    name: str
    kind: str
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    k_hi: int | None = None
    lower_bound: float | None = None
    beta_scale: float = 1.0

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
    UpdateDims("kimi-k3, one of 8", "kda", 12, 12, 128, 128, lower_bound=-5.0),
    UpdateDims("olmo-hybrid", "gdn", 30, 30, 96, 192, beta_scale=2.0),
)
"""Layers of the released models on one GPU; those of Qwen3.5 and Qwen3.6-35B are as Qwen3-Next's."""


def input_dtype(device: torch.device) -> torch.dtype:
    """BF16 on a GPU, as models run there; float32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def random_inputs(
    layer: UpdateDims, batch: int, device: torch.device, seed: int, *, fused: bool = False
) -> tuple[Tensor, ...]:
    """q, k, v, g, beta and an output buffer; `fused`: g and beta are raw projections in the dtype of v."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype, heads = input_dtype(device), layer.value_heads

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    gate = (batch, heads, layer.key_dim) if layer.kind == "kda" else (batch, heads)
    uniform = torch.rand(gate, generator=generator, device=device)
    v = draw(batch, heads, layer.value_dim).to(dtype)
    q = draw(batch, layer.key_heads, layer.key_dim).to(dtype)
    k = draw(batch, layer.key_heads, layer.key_dim).to(dtype)
    logits = draw(batch, heads)
    if fused:
        return q, k, v, draw(*gate).to(dtype), logits.to(dtype), torch.empty_like(v)
    return q, k, v, -0.2 * uniform, logits.sigmoid(), torch.empty_like(v)


def random_fusion(layer: UpdateDims, device: torch.device, seed: int, *, fused: bool) -> StepFusion:
    """The layer's gate with random parameters that decay by some percent a token, or nothing fused."""
    if not fused:
        return NO_FUSION
    generator = torch.Generator(device).manual_seed(seed + 1)
    heads = layer.value_heads
    bias = (heads, layer.key_dim) if layer.kind == "kda" else (heads,)
    return StepFusion(
        a_log=torch.randn(heads, generator=generator, device=device) - 1.0,
        dt_bias=torch.randn(bias, generator=generator, device=device) - 2.0,
        lower_bound=layer.lower_bound,
        beta_scale=layer.beta_scale,
    )
