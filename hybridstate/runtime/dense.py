"""A dense feed-forward block, down(silu(gate x) * up x), in three launches, after a trial on its own weights."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import linear

from hybridstate.kernels.dispatch import by_kernels
from hybridstate.runtime.fused import join_projections, plain_weight
from hybridstate.trajectories.launches import Refused, agree, is_silu, scaled_rows

_ROWS: Final = 8
"""Rows of a trial at each scale."""
_SCALES: Final = (1.0, 1 / 4, 4.0)


class DenseStep:
    """One block.

    Args:
        module: of transformers; its weights become views of a joined one.

    Raises:
        AttributeError, ValueError: the module is built differently.
    """

    def __init__(self, module: Any) -> None:
        self._down = plain_weight(module.down_proj)
        self._joined, at = join_projections([module.gate_proj, module.up_proj])
        self._inner = at[1]
        if self._down.shape[1] != self._inner or at[2] != 2 * self._inner:
            raise ValueError("another feed-forward block")

    def __call__(self, x: Tensor) -> Tensor:
        """`[..., D]` to `[..., D]`."""
        from hybridstate.kernels import norms

        joined = linear(x.reshape(-1, x.shape[-1]), self._joined)
        product = norms.gated if by_kernels(x) else norms.gated_reference
        gate, up = joined[:, : self._inner], joined[:, self._inner : 2 * self._inner]
        return linear(product(up, gate, "silu"), self._down).view(x.shape)


@torch.no_grad()
def dense_step(module: Any, refused: Refused | None = None) -> Callable[[Tensor], Tensor] | None:
    """The step of a feed-forward block where a trial gives what the module gives, else None.

    `refused` takes the error of one that failed.
    """
    if not type(module).__name__.endswith("MLP") or "forward" in module.__dict__:
        return None
    try:
        step = DenseStep(module)
        x = scaled_rows(_ROWS, step._joined.shape[1], step._down, _SCALES)
        same = is_silu(module) and agree(step(x), module(x))
    except Exception as error:  # compilers and drivers raise anything; the module runs
        if refused is not None:
            refused.add(module, error)
        return None
    return step if same else None
