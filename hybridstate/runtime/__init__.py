"""Execution: slots of state, checkpoints restored from bytes, batched decoding on our own pool."""
