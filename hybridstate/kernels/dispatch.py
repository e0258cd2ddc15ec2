"""Whether tensors go through the Triton kernels or through their torch twins."""

from torch import Tensor

INTERPRETED = False
"""Kernels on the CPU too; tests set it under Triton's interpreter."""


def by_kernels(x: Tensor) -> bool:
    """Kernels for tensors on a CUDA device, twins elsewhere."""
    return x.is_cuda or INTERPRETED
