"""What torch's operations may not do inside a capture, told on any device."""

from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

REFUSED: Final = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.lift_fresh.default,
)
"""Reading a number, sizes that depend on values, and tensors of numbers from the host."""
INDEXED: Final = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default)


class Rules(TorchDispatchMode):
    """Refuses what fails or is frozen in a capture."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        assert func not in REFUSED, f"{func} cannot be captured"
        indices = args[1] if func in INDEXED else ()
        assert all(x is None or x.dtype == torch.int64 for x in indices), "a mask is a wait"
        return func(*args, **(kwargs or {}))
