"""Model folders: checked headers and byte-range reads of single tensors, values as stored."""

from hybridstate.checkpoint.header import TensorEntry
from hybridstate.checkpoint.source import EMBEDDED, Checkpoint, DecayParameters, open_checkpoint

__all__ = ["EMBEDDED", "Checkpoint", "DecayParameters", "TensorEntry", "open_checkpoint"]
