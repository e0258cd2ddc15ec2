"""Bits of the inputs that a state written every L-th time keeps between two writes."""

from hybridstate.families import LinearLayer


def ring_bits(layer: LinearLayer, every: int, *, per_channel: bool) -> float:
    """Bits per state value of the inputs kept between two writes, 0 where every update writes.

    What `kernels.ring_reference.Ring` keeps of a value head: `every` - 1 entries of FP16 k (shared by the value
    heads of a key head), FP16 pseudo value and, for one decay per key channel, FP16 log decays; for one decay per
    head `every` FP32 sums of them; a counter.
    """
    if every == 1:
        return 0.0
    entry = 16 * (layer.key_dim * layer.key_heads / layer.value_heads + layer.value_dim)
    if per_channel:
        entry += 16 * layer.key_dim
    fixed = 32 + (0 if per_channel else 32 * every)
    return ((every - 1) * entry + fixed) / (layer.key_dim * layer.value_dim)
