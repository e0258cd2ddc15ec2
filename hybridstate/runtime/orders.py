"""How the operands of one update are rearranged for a state in stored order, and back.

A plan made from a checkpoint reorders key channels and value columns: the kernel reads q, k and, for KDA, the decays
through an index, v and o are gathered in torch. A checkpoint exported by `export-plan` carries the orders and
needs neither, except for key orders of each value head's own; value scales c are never in the weights. An update with
a ring takes no index: its keys are shared by value heads, so torch gathers. The state in the pool is T = S / c (DAMP
Eq. 17, 18):

    T <- a T + k (beta (v / c - k a T))      o = c (q T)
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from hybridstate.errors import PlanMismatch
from hybridstate.families import LinearLayer
from hybridstate.kernels.fusion import NO_FUSION, StepFusion
from hybridstate.kernels.ring_reference import LONGEST
from hybridstate.plan.compare import verify_against
from hybridstate.plan.store import Order, Plan
from hybridstate.trajectories.model import LoadedModel

INDEXED_CHANNELS: Final = 256
"""Key channels that the kernel's index of bytes can name."""


@dataclass(frozen=True, slots=True)
class StoredOrder:
    """How one layer's operands are rearranged before the update; None where nothing moves.

    Attributes:
        shared_key: `[Hk, K]`, where the value heads of a key head share their order.
        key: `[H, K]`, for operands and states with one row per value head.
        value: `[H, V]`.
        scale: FP32 `[H, V]` in stored order.
        indexed: whether the update can read through an index of bytes.
    """

    shared_key: torch.Tensor | None = None
    key: torch.Tensor | None = None
    value: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    indexed: bool = True

    fusion: StepFusion = field(init=False, default=NO_FUSION)
    """What the kernel gathers by itself: q, k and decays per channel, through an index of bytes."""

    def __post_init__(self) -> None:
        if self.indexed and self.key is not None and self.key.shape[-1] <= INDEXED_CHANNELS:
            index = self.key.to(torch.uint8).contiguous()
            object.__setattr__(self, "fusion", StepFusion(key_index=index))

    @property
    def _gathered(self) -> torch.Tensor | None:
        """The key order where torch has to gather it: no index, or one of bytes cannot name the channels."""
        return None if self.fusion is not NO_FUSION else self.key

    @property
    def gathers_keys(self) -> bool:
        """Whether q, k and decays are gathered in torch, so that gates have to be derived before."""
        return self._gathered is not None

    def gathers(self, *, per_channel: bool) -> int:
        """Gathers in torch around one update; each is a launch beside the kernel's on a GPU."""
        keys = (
            0 if self._gathered is None else 3 if per_channel else 2
        )  # q, k and decays per channel
        return keys + (0 if self.value is None else 2)  # v and o

    def key_heads(self, layer: LinearLayer) -> int:
        """Key heads of q and k as a ring's update takes them: all value heads where each has an order of its own."""
        own = self.key is not None and self.shared_key is None
        return layer.value_heads if own else layer.key_heads

    def queries(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        """q or k `[B, Hk, K]` as the update takes it: as it is, or gathered, by value head if orders differ there."""
        if self._gathered is None:
            return x
        if self.shared_key is not None:
            return _take(x, self.shared_key)
        return _take(x.repeat_interleave(heads // x.shape[1], 1), self._gathered)

    def decay(self, g: torch.Tensor) -> torch.Tensor:
        """Log decay `[B, H]` or `[B, H, K]` as the update takes it."""
        return g if g.dim() == 2 or self._gathered is None else _take(g, self._gathered)

    def values(self, v: torch.Tensor) -> torch.Tensor:
        """v `[B, H, V]` in stored order."""
        return v if self.value is None else _take(v, self.value)

    def scaled(self, v: torch.Tensor) -> torch.Tensor:
        """v `[B, H, V]` in stored order over c: what the recurrence of T = S / c writes (DAMP Eq. 17)."""
        return v if self.scale is None else v.float() / self.scale

    def unscaled(self, o: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Read-out of T `[B, H, V]` times c, in the model's dtype (DAMP Eq. 18)."""
        return (o if self.scale is None else o * self.scale).to(dtype)

    def outputs(self, o: torch.Tensor) -> torch.Tensor:
        """o `[B, H, V]` back in model order."""
        return o if self.value is None else _take(o, self.value.argsort(-1))

    def states(self, state: torch.Tensor) -> torch.Tensor:
        """State `[B, H, K, V]` from model order to stored order; scaling is the packer's."""
        if self.key is not None:
            state = state.gather(2, self.key[None, :, :, None].expand_as(state))
        if self.value is not None:
            state = state.gather(3, self.value[None, :, None, :].expand_as(state))
        return state if self.scale is None else state / self.scale[None, :, None, :]

    def model_states(self, state: torch.Tensor) -> torch.Tensor:
        """State `[B, H, K, V]` from stored order back to model order, c undone: what a prefill continues from."""
        if self.scale is not None:
            state = state * self.scale[None, :, None, :]
        if self.value is not None:
            index = self.value[None, :, None, :].expand_as(state)
            state = torch.empty_like(state).scatter_(3, index, state)
        if self.key is not None:
            index = self.key[None, :, :, None].expand_as(state)
            state = torch.empty_like(state).scatter_(2, index, state)
        return state


def _take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.gather(-1, index.expand_as(x))


def stored_orders(
    plan: Plan | None, loaded: LoadedModel, *, indexed: bool = True
) -> tuple[tuple[StoredOrder, ...], int | None]:
    """Per linear layer the rearrangement that `plan` asks for, and its `k_hi`.

    Without a plan nothing moves and the first channels are the protected ones. `indexed`: see `StoredOrder`.

    Raises:
        PlanMismatch: the plan is for another checkpoint, or has no packed state.
    """
    if plan is None:
        return tuple(StoredOrder() for _ in loaded.spec.layers), None
    precision = plan.document.precision
    if precision is None:
        raise PlanMismatch(
            "the plan has no packed state (it was exported without a calibration)",
            hint="run `hybridstate calibrate`, then `export-plan --calibration`",
        )
    order = verify_against(plan, loaded.checkpoint)
    return tuple(
        _stored_order(plan, layer, order, loaded.device, indexed) for layer in loaded.spec.layers
    ), precision.k_hi


def planned_interval(plan: Plan | None) -> int:
    """Updates between two writes of the packed state that `plan` asks for; 1 without one.

    Raises:
        PlanMismatch: more than the ring kernels hold.
    """
    precision = None if plan is None else plan.document.precision
    every = 1 if precision is None else precision.requantise_every
    if every > LONGEST:
        raise PlanMismatch(
            f"the plan writes its packed state once in {every} updates, this engine once in {LONGEST} at most",
            hint=f"export the plan with --requantise-every {LONGEST} or less",
            found=every,
            expected=LONGEST,
        )
    return every


def _stored_order(
    plan: Plan, layer: LinearLayer, order: Order, device: torch.device, indexed: bool
) -> StoredOrder:
    keys = plan.key_order(layer.index, order)
    key = shared = value = scale = None
    if keys is not None and not bool((keys == np.arange(layer.key_dim)).all()):
        key = torch.from_numpy(keys.astype(np.int64)).to(device)
        bundled = key.unflatten(0, (layer.key_heads, -1))
        if bool((bundled == bundled[:, :1]).all()):
            shared = bundled[:, 0].contiguous()
    values = plan.value_order(layer.index, order)
    if values is not None and not bool((values == np.arange(layer.value_dim)).all()):
        value = torch.from_numpy(values.astype(np.int64)).to(device)
    scales = plan.value_scale(layer.index, order)
    if scales is not None:
        scale = torch.from_numpy(scales.astype(np.float32)).to(device)
    return StoredOrder(shared, key, value, scale, indexed)
