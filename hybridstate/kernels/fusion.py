"""What a decode step derives from a layer's raw projections inside the kernel, and the same in torch.

Models compute the decay from a projection `a` with two parameters per head, and the strength of a write from a
projection `b`. Fused into the step they cost no launch and no memory traffic of their own. A plan that could not
permute the weights adds one key order per value head, which the kernel reads as bytes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridstate.errors import NumericError
from hybridstate.kernels.reference import gate_safe, gate_softplus

GATE_GIVEN = 0
"""`g` is the log decay."""

GATE_SOFTPLUS = 1
"""`g` is the raw input of `reference.gate_softplus`."""

GATE_SAFE = 2
"""`g` is the raw input of `reference.gate_safe`."""


@dataclass(frozen=True, slots=True, eq=False)
class StepFusion:
    """Options of one step; tensors live on the pool's device, contiguous.

    Attributes:
        a_log: float32 [H]; with it `g` holds the raw gate input, without it the log decay.
        dt_bias: float32 [H], or [H, K] where decays are per key channel; comes with `a_log`.
        lower_bound: negative; the safe gate (Kimi-K3) instead of softplus.
        beta_scale: `beta` holds logits and the strength is this times their sigmoid (2 where a model allows
            negative eigenvalues); None: `beta` is the strength.
        key_index: uint8 [H, K], stored row -> key channel of that value head; q, k and per-channel gates are
            gathered by it. None: they come in stored order.
        saturated: int32 [1] on the device; values of FP16 rows clipped at 65,504 are added to it.
    """

    a_log: Tensor | None = None
    dt_bias: Tensor | None = None
    lower_bound: float | None = None
    beta_scale: float | None = None
    key_index: Tensor | None = None
    saturated: Tensor | None = None

    @property
    def gate(self) -> int:
        """One of the GATE constants, for the kernels."""
        if self.a_log is None:
            return GATE_GIVEN
        return GATE_SOFTPLUS if self.lower_bound is None else GATE_SAFE

    def to(self, device: torch.device) -> "StepFusion":
        """The same with its tensors on `device`."""
        tensors = (self.a_log, self.dt_bias, self.key_index, self.saturated)
        a_log, dt_bias, key_index, saturated = (
            None if x is None else x.to(device) for x in tensors
        )
        return StepFusion(a_log, dt_bias, self.lower_bound, self.beta_scale, key_index, saturated)

    def check(self, heads: int, key_dim: int, *, per_channel: bool) -> None:
        """Refuse tensors that the kernels would misread.

        Raises:
            NumericError: shape, dtype or strides do not fit.
        """
        if (self.a_log is None) != (self.dt_bias is None):
            raise NumericError("a_log and dt_bias come together")
        if self.a_log is None and self.lower_bound is not None:
            raise NumericError("a lower bound needs a_log and dt_bias")
        if self.key_index is not None and key_dim > 256:
            raise NumericError(f"a key index of bytes cannot name {key_dim} channels")
        bias_shape = (heads, key_dim) if per_channel else (heads,)
        for name, tensor, shape, dtype in (
            ("a_log", self.a_log, (heads,), torch.float32),
            ("dt_bias", self.dt_bias, bias_shape, torch.float32),
            ("key_index", self.key_index, (heads, key_dim), torch.uint8),
            ("saturated", self.saturated, (1,), torch.int32),
        ):
            if tensor is None:
                continue
            if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
                raise NumericError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected contiguous {dtype} {shape}",
                    tensor=name,
                )

    def derive(
        self, q: Tensor, k: Tensor, g: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, log decay and strength as `reference.recurrent_step` takes them; the kernels' twin.

        Args:
            q, k: [B, Hk, K].
            g: [B, H] or [B, H, K].
            beta: [B, H].

        Returns:
            q, k ([B, H, K] with a key index), g and beta; gates in float64 for float64 input, float32 otherwise.
        """
        if self.beta_scale is not None:
            beta = self.beta_scale * _wide(beta).sigmoid()
        if self.a_log is not None and self.dt_bias is not None:
            raw = _wide(g)
            a_log, dt_bias = self.a_log.to(raw.dtype), self.dt_bias.to(raw.dtype)
            if self.lower_bound is None:
                g = gate_softplus(raw, a_log, dt_bias)
            else:
                g = gate_safe(raw, a_log, dt_bias, self.lower_bound)
        if self.key_index is not None:
            heads = self.key_index.shape[0]
            order = self.key_index.long().expand(q.shape[0], -1, -1)
            q, k = (x.repeat_interleave(heads // x.shape[1], 1).gather(2, order) for x in (q, k))
            g = g.gather(2, order) if g.dim() == 3 else g
        return q, k, g, beta


def draw_fusion(
    heads: int, key_dim: int, per_channel: bool, generator: torch.Generator
) -> StepFusion:
    """Random options for a test on the CPU: softplus for GDN, the safe gate and a key order per head for KDA."""
    bias = (heads, key_dim) if per_channel else (heads,)
    orders = torch.stack([torch.randperm(key_dim, generator=generator) for _ in range(heads)])
    return StepFusion(
        a_log=torch.randn(heads, generator=generator),
        dt_bias=torch.randn(bias, generator=generator),
        lower_bound=-5.0 if per_channel else None,
        beta_scale=2.0,
        key_index=orders.to(torch.uint8) if per_channel else None,
    )


NO_FUSION = StepFusion()
"""Log decay and strength given, keys in stored order, nothing counted."""


def _wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x if x.dtype == torch.float64 else x.float()
