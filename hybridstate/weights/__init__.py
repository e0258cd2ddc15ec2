"""Checkpoints rewritten so that an engine finds the state in the order a plan stores it."""
