"""Every numeric tolerance of the test suite, in one table.

The metric is the relative RMS error, ||actual - expected|| / ||expected||, which does not reward large
outliers being averaged away by many zeros as `allclose` does; `max_abs` bounds single elements where given.
Tightening a line is free; loosening one needs its reason in the line.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Bounds on the relative RMS error and, optionally, on the largest absolute error."""

    relative_rms: float
    max_abs: float | None = None


TOLERANCES: dict[str, Tolerance] = {
    # horizons: float64 on stored values against hand-computed or mpmath values
    "horizon": Tolerance(1e-12),
    # float64 reference against float64 reference in another order of operations
    "reference-f64": Tolerance(1e-12),
    # float32 step or chunk recurrence against the float64 reference
    "reference-f32": Tolerance(2e-6),
    # our recurrences against transformers' functions, both float32
    "transformers-f32": Tolerance(5e-6),
    # one fused update on packed or dense state against the reference on the same packed state, float32
    "kernel-f32": Tolerance(5e-6),
    # FP16 and BF16 state rows differ from the reference by one rounding at the most
    "kernel-f16": Tolerance(1e-3),
    "kernel-bf16": Tolerance(8e-3),
    # INT8 with one scale per 32 values: half a step is at most 1/254 of the group's largest value
    "int8-group": Tolerance(8e-3),
    # original against permuted model, float32 logits (reduction order changes)
    "export-logits-f32": Tolerance(1e-5),
    # window replay or chunked prefill against one full prefill, float32 logits
    "replay-logits-f32": Tolerance(1e-5),
    # what a padded prompt leaves against what the prompt leaves: states, windows, keys and values, float32
    "padded-prompt-f32": Tolerance(1e-5),
    # the same of one or two tokens: norms magnify their roundings, because their states hold next to nothing
    "padded-short-prompt-f32": Tolerance(5e-5),
    # the same on a GPU, prompts of any length
    "padded-prompt-gpu-f32": Tolerance(5e-5),
    # states replayed there: every replay begins with a state that holds next to nothing
    "padded-replay-gpu-f32": Tolerance(1e-4),
    # padded prompts with states in fewer bits, on any device: a rounding flips, and with it later keys and replays
    "padded-prompt-rounded": Tolerance(1e-2),
    # KL of requantised states, sequences together or one by one: float32 sums differ, and with them a code flips
    "rounded-kl": Tolerance(2e-1),
    # gates in float32 against float64
    "gate-f32": Tolerance(1e-6),
}

BF16_ERROR_RATIO = 1.05
"""Exported BF16 logits may be at most this many times as far from float32 as the original's."""


def as_float64(values: Any) -> NDArray[np.float64]:
    """NumPy view of an array or tensor of any dtype, on any device."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)


def relative_rms(actual: Any, expected: Any) -> float:
    """||actual - expected|| / ||expected||; the plain norm of the error where `expected` is all zero."""
    a, e = as_float64(actual), as_float64(expected)
    assert a.shape == e.shape, f"shape {a.shape} against {e.shape}"
    scale = float(np.linalg.norm(e))
    return float(np.linalg.norm(a - e)) / (scale or 1.0)


def assert_within(actual: Any, expected: Any, name: str) -> None:
    """Fail with both metrics unless `actual` is within the named tolerance of `expected`."""
    tolerance = TOLERANCES[name]
    a, e = as_float64(actual), as_float64(expected)
    assert np.isfinite(e).all(), f"{name}: the expectation itself is not finite"
    assert np.isfinite(a).all(), f"{name}: {int((~np.isfinite(a)).sum())} values are not finite"
    error = relative_rms(a, e)
    worst = float(np.abs(a - e).max(initial=0.0))
    bound = "" if tolerance.max_abs is None else f" (at most {tolerance.max_abs:.1e})"
    message = (
        f"{name}: relative RMS {error:.2e} (at most {tolerance.relative_rms:.1e}), "
        f"largest absolute error {worst:.2e}{bound}"
    )
    assert error <= tolerance.relative_rms, message
    assert tolerance.max_abs is None or worst <= tolerance.max_abs, message
