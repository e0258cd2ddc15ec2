"""Both gates against values worked out by hand or in high precision, and the odd values."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mp

from hybridstate.checkpoint import DecayParameters
from hybridstate.errors import NumericError, UsageError
from hybridstate.horizons.static import static_horizons, static_log_decay
from tests.tolerances import assert_within


def decay(a_log: list[float], dt_bias: list[float] | list[list[float]]) -> DecayParameters:
    return DecayParameters(
        np.array(a_log, np.float64), np.array(dt_bias, np.float64), "F32", "F32", layer=7
    )


def softplus(a_log: list[float], dt_bias: list[float], a_s: float = 0.0) -> list[float]:
    parameters = decay(a_log, dt_bias)
    return [float(h) for h in static_horizons(parameters, gate="softplus", gate_input=a_s)]


def test_softplus_gate_by_hand() -> None:
    # A_log = 0, dt_bias = 0, a_s = 0: g = -ln 2, so H = ln 1000 / ln 2
    assert softplus([0.0], [0.0])[0] == pytest.approx(math.log(1000) / math.log(2), rel=1e-15)
    # A_log = ln 2 halves it
    assert softplus([math.log(2)], [0.0])[0] == pytest.approx(4.98289214, rel=1e-8)


def test_safe_gate_by_hand() -> None:
    # sigmoid(0) = 1/2: g = -5/2; a large pre-activation saturates at g = -5, H = 1.3816
    parameters = decay([0.0, 3.0], [0.0, 10.0])
    horizons = static_horizons(parameters, gate="safe", lower_bound=-5.0, gate_input=0.0)
    assert horizons[0] == pytest.approx(math.log(1000) / 2.5, rel=1e-15)
    assert horizons[1] == pytest.approx(1.3815510557964274, rel=1e-12)


def test_scale_sits_inside_the_safe_gates_sigmoid() -> None:
    parameters = decay([1.0], [-2.0])
    g = static_log_decay(parameters, gate="safe", lower_bound=-5.0, gate_input=0.5)
    assert g[0] == pytest.approx(-5.0 / (1.0 + math.exp(1.5 * math.e)), rel=1e-14)


def test_channels_share_the_scale_of_their_head() -> None:
    parameters = decay([0.0, math.log(4.0)], [[-1.0, 2.0, 0.5], [-1.0, 2.0, 0.5]])
    horizons = static_horizons(parameters, gate="softplus", gate_input=-0.3)
    assert horizons.shape == (2, 3)
    np.testing.assert_allclose(horizons[0], 4 * horizons[1], rtol=1e-14)


@pytest.mark.parametrize("gate", ["softplus", "safe"])
@pytest.mark.parametrize("a_s", [-0.3, 0.0, 0.8])
def test_horizons_agree_with_fifty_digits(gate: str, a_s: float) -> None:
    mp.dps = 50
    rng = np.random.default_rng(3)
    a_log = rng.uniform(-6, 2, 16).astype(np.float32).astype(np.float64)
    dt_bias = rng.uniform(-8, 6, 16).astype(np.float32).astype(np.float64)
    expected = []
    for a, b in zip(a_log, dt_bias, strict=True):
        x = mp.mpf(float(b)) + mp.mpf(a_s)
        scale = mp.exp(mp.mpf(float(a)))
        if gate == "softplus":
            g = -scale * mp.log(1 + mp.exp(x))
        else:
            g = mp.mpf(-5) / (1 + mp.exp(-scale * x))
        expected.append(float(mp.log(mp.mpf("0.001")) / g))
    horizons = static_horizons(
        decay(list(a_log), list(dt_bias)),
        gate="safe" if gate == "safe" else "softplus",
        lower_bound=-5.0 if gate == "safe" else None,
        gate_input=a_s,
    )
    assert_within(horizons, expected, "horizon")


@given(
    a_log=st.floats(-8, 3),
    dt_bias=st.floats(-12, 12),
    a_s=st.floats(-2, 1.9),
    gate=st.sampled_from(["softplus", "safe"]),
)
def test_a_larger_gate_input_never_lengthens_a_horizon(
    a_log: float, dt_bias: float, a_s: float, gate: str
) -> None:
    parameters = decay([a_log], [dt_bias])
    bound = -5.0 if gate == "safe" else None
    kind = "safe" if gate == "safe" else "softplus"
    low = static_horizons(parameters, gate=kind, lower_bound=bound, gate_input=a_s)
    high = static_horizons(parameters, gate=kind, lower_bound=bound, gate_input=a_s + 0.1)
    assert high[0] <= low[0]


@given(a_log=st.floats(-30, 30), dt_bias=st.floats(-1e3, 1e3))
def test_safe_gate_never_forgets_faster_than_its_bound(a_log: float, dt_bias: float) -> None:
    horizons = static_horizons(
        decay([a_log], [dt_bias]), gate="safe", lower_bound=-5.0, gate_input=0.8
    )
    assert horizons[0] >= math.log(1000) / 5 * (1 - 1e-12)


def test_underflowing_decay_has_an_infinite_horizon() -> None:
    assert softplus([-800.0], [0.0]) == [math.inf]
    assert softplus([0.0], [-800.0]) == [math.inf]
    safe = static_horizons(decay([5.0], [-800.0]), gate="safe", lower_bound=-5.0, gate_input=0.0)
    assert safe[0] == math.inf


def test_overflowing_decay_has_a_zero_horizon() -> None:
    assert softplus([800.0], [0.0]) == [0.0]


def test_nan_horizon_names_layer_unit_and_values() -> None:
    parameters = decay([0.0, math.inf], [0.0, -math.inf])
    with pytest.raises(NumericError, match=r"layer 7, unit \[1\].*A_log inf and dt_bias -inf"):
        static_horizons(parameters, gate="softplus", gate_input=0.0)


def test_cancelling_infinities_name_the_channel() -> None:
    parameters = decay([0.0, math.inf], [[0.0, 0.0], [0.0, -math.inf]])
    with pytest.raises(NumericError, match=r"unit \[1, 1\]"):
        static_horizons(parameters, gate="softplus", gate_input=0.0)


@pytest.mark.parametrize("epsilon", [0.0, 1.0, -1.0, 2.0, math.nan])
def test_epsilon_outside_the_unit_interval_is_refused(epsilon: float) -> None:
    with pytest.raises(UsageError, match="epsilon must lie between 0 and 1"):
        static_horizons(decay([0.0], [0.0]), gate="softplus", gate_input=0.0, epsilon=epsilon)


def test_safe_gate_without_a_bound_is_refused() -> None:
    with pytest.raises(UsageError, match="needs a lower bound"):
        static_horizons(decay([0.0], [0.0]), gate="safe", gate_input=0.0)
