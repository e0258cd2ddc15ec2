"""Uniform numbers for stochastic rounding: the same on every device and in every grouping of sequences.

A counter hash (the 32-bit finaliser of MurmurHash3) of seed, arm, layer, update, sequence and the place
inside the state replaces a generator, which would have to be advanced in the same order everywhere.
"""

from typing import Final

import torch

_MASK: Final = 0xFFFFFFFF


def uniform(
    shape: torch.Size,
    sequences: torch.Tensor,
    key: tuple[int | torch.Tensor, ...],
    device: torch.device,
) -> torch.Tensor:
    """Numbers in [0, 1) of `shape [B, ...]`, float32.

    Args:
        sequences: `[B]` number of each row's sequence.
        key: what else tells this draw from others, e.g. seed, layer ordinal, update; a number may be a
            0-dimensional int64 tensor on the device, as in a captured step.
    """
    count = int(torch.Size(shape[1:]).numel())
    rows = row_hashes(sequences, key, device)
    places = torch.arange(count, dtype=torch.int64, device=device) * 0x9E3779B1
    hashed = _mix(_mix(places[None, :] + rows[:, None]) ^ rows[:, None])
    return ((hashed >> 8).to(torch.float32) / float(1 << 24)).reshape(shape)


def row_hashes(
    sequences: torch.Tensor, key: tuple[int | torch.Tensor, ...], device: torch.device
) -> torch.Tensor:
    """What `uniform` mixes with the place inside a row's state: int64 `[B]`, below 2**32."""
    salt: int | torch.Tensor = 0x9E3779B9
    for part in key:
        mixed = salt ^ (part & _MASK)
        salt = _mix_int(mixed) if isinstance(mixed, int) else _mix(mixed)
    return _mix((sequences.to(device, torch.int64) + 1) * 0x85EBCA6B + salt)


def _mix(h: torch.Tensor) -> torch.Tensor:
    h = h & _MASK
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & _MASK
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & _MASK
    return h ^ (h >> 16)


def _mix_int(h: int) -> int:
    h &= _MASK
    h ^= h >> 16
    h = (h * 0x85EBCA6B) & _MASK
    h ^= h >> 13
    h = (h * 0xC2B2AE35) & _MASK
    return h ^ (h >> 16)
