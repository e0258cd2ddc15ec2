"""Architectures as data: detection, tensor names, sizes, gates, coupled axes, runtime hooks."""

from hybridstate.families.detect import detect
from hybridstate.families.spec import AxisRule, Family, Gate, LinearLayer, ModelSpec, Runtime
from hybridstate.families.table import FAMILIES

__all__ = [
    "FAMILIES",
    "AxisRule",
    "Family",
    "Gate",
    "LinearLayer",
    "ModelSpec",
    "Runtime",
    "detect",
]
