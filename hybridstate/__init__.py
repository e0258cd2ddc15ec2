"""Compression of the recurrent state of hybrid linear-attention models: analyse, calibrate, plan, measure."""

__version__ = "0.1.0"
