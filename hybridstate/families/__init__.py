"""Architectures as data: detection, tensor names, sizes, gates, coupled axes, runtime hooks."""

from hybridstate.families.detect import detect
from hybridstate.families.spec import AxisRule, Family, Gate, LinearLayer, ModelSpec, Runtime
from hybridstate.families.table import FAMILIES
from hybridstate.families.values import check_log_scale, sign_warning

__all__ = [
    "FAMILIES",
    "AxisRule",
    "Family",
    "Gate",
    "LinearLayer",
    "ModelSpec",
    "Runtime",
    "check_log_scale",
    "detect",
    "sign_warning",
]
