"""Models in folders and on the Hub: checked headers, single tensors by byte range, values as stored."""

from hybridstate.checkpoint.header import TensorEntry
from hybridstate.checkpoint.parts import Origin
from hybridstate.checkpoint.source import (
    EMBEDDED,
    Checkpoint,
    DecayParameters,
    open_checkpoint,
    require_weights,
)

__all__ = [
    "EMBEDDED",
    "Checkpoint",
    "DecayParameters",
    "Origin",
    "TensorEntry",
    "open_checkpoint",
    "require_weights",
]
