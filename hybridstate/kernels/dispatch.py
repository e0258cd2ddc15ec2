"""Whether tensors go through the Triton kernels or through their torch twins, and what to say where kernels fail."""

from torch import Tensor

INTERPRETED = False
"""Kernels on the CPU too; tests set it under Triton's interpreter."""


def by_kernels(x: Tensor) -> bool:
    """Kernels for tensors on a CUDA device, twins elsewhere."""
    return x.is_cuda or INTERPRETED


def brief(error: Exception) -> str:
    """Kind and cause of an error in one line.

    Triton's compiler quotes the source first and names the cause last, in the innermost of nested functions; all others
    begin with it.
    """
    compiler = type(error).__module__.startswith("triton.compiler")
    while compiler and isinstance(error.__cause__, type(error)):
        error = error.__cause__
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[-1 if compiler else 0].strip():.200}".rstrip(": ")
