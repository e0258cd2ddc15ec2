"""Counts that memory cannot hold, refused before any work and with the bytes."""

import os
import sys
from typing import Final

import torch

from hybridstate.errors import UsageError

SAMPLE_BYTES: Final = 32
"""Of a second that is kept: a Python float and its place in a list."""

HOST: Final = torch.device("cpu")


def memory(device: torch.device) -> int:
    """Bytes of a device, free or not; without bound where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError):  # Windows, and systems that do not count pages
        return sys.maxsize


def check_room(option: str, count: int, each: int, what: str, device: torch.device = HOST) -> None:
    """Refuse a count of things that are held at once and take more memory than there is.

    Args:
        option: that asks for them.
        each: bytes that one takes at least.
        what: they are.

    Raises:
        UsageError: naming the option, the bytes, and the largest count that there is memory for.
    """
    held = memory(device)
    if count * each > held:
        raise UsageError(
            f"{option} {count:,}: {what} take {count * each / 2**30:,.1f} GiB, "
            f"the {device.type} has {held / 2**30:,.1f}",
            hint=f"at most {held // each:,} could fit",
            found=count,
            expected=held // each,
        )


def check_samples(option: str, count: int) -> None:
    """Refuse more samples than can be kept, which every one is.

    Raises:
        UsageError: they take more than the host's memory.
    """
    check_room(option, count, SAMPLE_BYTES, "samples, which are all kept,")
