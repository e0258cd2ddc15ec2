"""Which parts of a hybrid model's recurrent state to keep, and at which precision."""

__version__ = "0.1.0"
