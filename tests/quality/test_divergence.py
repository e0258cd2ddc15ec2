"""Summaries of a simulation against values by hand."""

import math

import numpy as np
import pytest
import torch

from hybridstate.families import LinearLayer
from hybridstate.quality.divergence import divergences, standard_error
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
    return Simulation(arms, kl, same, nll, (1, 2), error, (0, 7), (np.zeros((2, 1, 8)),), 8192)


def test_means_are_over_positions_then_sequences_with_errors_over_sequences() -> None:
    exact, damp = divergences(simulation(), LAYER, per_channel=True)
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
