"""Retention horizons from the weights alone (DASC Eq. 2 to 4).

With the gate input replaced by one representative value a_s, the log-decay of a unit is

    softplus gate    g = -exp(A_log) * softplus(a_s + dt_bias)
    safe gate        g = l * sigmoid(exp(A_log) * (a_s + dt_bias))         l < 0, a multiplier

and its horizon in tokens is H = ln(epsilon) / g. All in float64 on the values as stored.
"""

import math

import numpy as np
from numpy.typing import NDArray

from hybridstate.checkpoint import DecayParameters
from hybridstate.defaults import EPSILON
from hybridstate.errors import NumericError, UsageError
from hybridstate.families import Gate


def static_log_decay(
    decay: DecayParameters, *, gate: Gate, lower_bound: float | None, gate_input: float
) -> NDArray[np.float64]:
    """Log-decay g per step, at most zero: `[H]` for one dt_bias per head, `[H, K]` per channel.

    Raises:
        UsageError: the safe gate without a lower bound.
    """
    a_log = decay.a_log if decay.dt_bias.ndim == 1 else decay.a_log[:, None]
    a = gate_input + decay.dt_bias
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if gate == "softplus":
            return -np.exp(a_log) * np.logaddexp(0.0, a)
        if lower_bound is None:
            raise UsageError("the safe gate needs a lower bound")
        return lower_bound * _sigmoid(np.exp(a_log) * a)


def check_epsilon(epsilon: float) -> None:
    """Refuse a share that is none.

    Raises:
        UsageError: outside (0, 1).
    """
    if not 0 < epsilon < 1:
        raise UsageError(f"epsilon must lie between 0 and 1, found {epsilon}", found=epsilon)


def static_horizons(
    decay: DecayParameters,
    *,
    gate: Gate,
    lower_bound: float | None = None,
    gate_input: float,
    epsilon: float = EPSILON,
) -> NDArray[np.float64]:
    """Horizon in tokens of every unit: `[H]` (GDN) or `[H, K]` (KDA).

    Infinite where the decay underflows to zero, zero where it overflows.

    Raises:
        NumericError: a horizon is NaN (names the unit).
        UsageError: epsilon outside (0, 1), or the safe gate without a lower bound.
    """
    check_epsilon(epsilon)
    log_decay = static_log_decay(decay, gate=gate, lower_bound=lower_bound, gate_input=gate_input)
    with np.errstate(divide="ignore"):
        horizons = math.log(epsilon) / log_decay  # g underflows to -0.0, never to +0.0: H = inf
    bad = np.argwhere(np.isnan(horizons))
    if len(bad):
        unit = [int(i) for i in bad[0]]
        where = "" if decay.layer is None else f"layer {decay.layer}, "
        raise NumericError(
            f"{where}unit {unit}: the horizon is NaN from A_log {decay.a_log[unit[0]]} and dt_bias "
            f"{decay.dt_bias[tuple(unit)]}",
            hint="infinite decay parameters cancel out; the checkpoint is damaged",
            layer=decay.layer,
            index=unit,
        )
    return np.asarray(horizons, dtype=np.float64)


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """1 / (1 + exp(-x)), computed from the side that does not overflow."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)
