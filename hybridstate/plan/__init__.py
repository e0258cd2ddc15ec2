"""The plan: which units to keep, how to store the rest, and what both cost."""
