"""Summaries of a simulation against values by hand."""

import math

import numpy as np
import pytest
import torch

from hybridstate.families import LinearLayer
from hybridstate.quality.divergence import (
    Measured,
    divergences,
    finite,
    growth,
    measure,
    pooled,
    standard_error,
    step_bins,
)
from hybridstate.quant.arms import Arm, plain_arm
from hybridstate.quant.formats import FORMATS
from hybridstate.quant.simulate import Simulation

LAYER = LinearLayer(0, 0, 1, 1, 8, 32, 4, "")


def simulation() -> Simulation:
    arms = (plain_arm("fp32"), Arm("damp", FORMATS["int8-step"], (torch.zeros(1, 2).long(),)))
    kl = np.zeros((2, 3, 2))
    kl[1] = [[0.1, 0.3], [0.2, 0.2], [0.4, 0.8]]
    same = np.ones((2, 3, 2), dtype=bool)
    same[1, 0, 0] = False
    nll = np.full((2, 3, 2), 2.0)
    nll[1] = 2.5
    error = np.zeros((2, 2, 3))
    error[0, 1], error[1, 1] = 0.05, [0.1, 0.2, 0.3]
    hit = np.ones((2, 3, 2), dtype=bool)
    zeros = (np.zeros((2, 1, 8)),)
    return Simulation(kl, same, nll, hit, (1, 2), error, (0, 7), zeros, arms, 8192)


def test_means_are_over_positions_then_sequences_with_errors_over_sequences() -> None:
    exact, damp = divergences(measure(simulation(), LAYER, per_channel=True))
    assert (exact.kl, exact.top1, exact.perplexity_ratio, exact.state_error) == (0, 1, 1, 0)
    assert damp.kl == pytest.approx((0.2 + 0.2 + 0.6) / 3)
    assert damp.kl_error == pytest.approx(np.std([0.2, 0.2, 0.6], ddof=1) / math.sqrt(3))
    assert damp.top1 == pytest.approx(5 / 6)
    assert damp.perplexity_ratio == pytest.approx(math.exp(0.5))
    assert damp.state_error == pytest.approx(0.2)
    assert damp.state_error_error == pytest.approx(0.1 / math.sqrt(3))
    assert damp.state_error_steps == pytest.approx((0.05, 0.2))
    assert damp.saturated == 7
    assert damp.bits_per_value_with_ring == damp.bits_per_value
    assert damp.bits_per_value == pytest.approx((2 * 16 + 6 * 9) / 8)
    document = damp.to_json()
    assert document["state_error_steps"] == list(damp.state_error_steps)
    samples = document["samples"]
    assert samples["kl"] == pytest.approx([0.2, 0.2, 0.6])
    assert samples["top1"] == pytest.approx([0.5, 1, 1])
    assert samples["state_error"] == pytest.approx([0.1, 0.2, 0.3])


def test_one_sequence_has_no_standard_error() -> None:
    assert standard_error(np.array([3.0])) is None
    assert standard_error(np.array([3.0, 3.0])) == 0.0


def test_infinity_is_none_in_json() -> None:
    """Draws that finished before errors were summed in float64 hold infinite ones."""
    assert standard_error(np.array([3.0, np.inf])) is None
    found = finite({"a": (1.0, math.inf), "b": [{"c": math.nan, "d": 2}], "e": "inf"})
    assert found == {"a": [1.0, None], "b": [{"c": None, "d": 2}], "e": "inf"}


def test_bins_end_at_powers_of_two_and_at_the_last_step() -> None:
    assert step_bins(11) == ((1, 1), (2, 2), (3, 4), (5, 8), (9, 11))
    assert step_bins(4096)[-2:] == ((1025, 2048), (2049, 4096))
    for updates in range(1, 70):
        covered = [step for a, b in step_bins(updates) for step in range(a, b + 1)]
        assert covered == list(range(1, updates + 1))


def test_a_power_law_has_its_exponent_as_slope() -> None:
    bins = step_bins(4096)
    middle = np.array([math.sqrt(a * b) for a, b in bins])
    noise = np.random.default_rng(0).lognormal(0.0, 0.1, (20, 1))
    slope, low, high = growth(bins, noise * 1e-6 * middle**0.7)
    assert slope == pytest.approx(0.7)
    assert low == pytest.approx(0.7)  # the sequences differ by a factor, which moves no slope
    steep = np.concatenate([1e-6 * middle[None] ** b for b in (0.4, 0.6, 0.8, 1.0)])
    slope, low, high = growth(bins, steep)
    assert slope is not None
    assert low is not None
    assert high is not None
    assert 0.4 < low < slope < high < 1.0
    assert growth(bins, np.zeros((3, len(bins)))) == (None, None, None)
    assert growth(step_bins(20), np.ones((3, 6))) == (None, None, None)  # one bin too few


def test_draws_are_pooled_with_the_spread_of_their_means() -> None:
    one = measure(simulation(), LAYER, per_channel=True)
    assert one.bins == ((1, 1), (2, 2))
    assert one.kl[1, 0].tolist() == [0.1, 0.3]
    other = Measured.from_arrays(
        one.describe(), one.arrays() | {"kl": 2 * one.kl, "saturated": one.saturated + 1}
    )
    both = divergences(pooled([one, other]))[1]
    mean = (0.2 + 0.2 + 0.6) / 3
    assert both.kl == pytest.approx(1.5 * mean)
    assert both.kl_spread == pytest.approx(np.std([mean, 2 * mean], ddof=1))
    assert both.samples["kl"] == pytest.approx([mean, 2 * mean])
    assert both.saturated == 7 + 8
    assert both.steps.kl == pytest.approx(
        (1.5 * (0.1 + 0.2 + 0.4) / 3, 1.5 * (0.3 + 0.2 + 0.8) / 3)
    )
    assert both.steps.top1 == pytest.approx((2 / 3, 1.0))
    assert both.steps.state_error == pytest.approx((0.05, 0.2))
    assert both.steps.perplexity_ratio == pytest.approx((math.exp(0.5), math.exp(0.5)))
    assert both.steps.slope is None
