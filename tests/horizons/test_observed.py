"""Observed horizons, state magnitudes and the two kinds of agreement, against values by hand and scipy."""

import json
import math

import numpy as np
import pytest
from scipy.stats import spearmanr

from hybridstate.errors import NumericError
from hybridstate.horizons.observed import (
    agreement,
    cutoff_agreement,
    layer_agreements,
    observed_horizons,
    rank_agreement,
    rank_correlation,
    state_magnitude,
)


def test_observed_horizon_uses_the_mean_log_decay() -> None:
    mean = np.log(np.array([[0.5, 0.999], [0.1, 1.0]]))
    found = observed_horizons(mean, 1e-3)
    assert found[0] == pytest.approx([math.log(1e-3) / math.log(0.5), 6904.3], rel=1e-4)
    assert found[1, 1] == math.inf


@pytest.mark.parametrize("value", [math.nan, 0.1])
def test_an_impossible_mean_is_named(value: float) -> None:
    with pytest.raises(NumericError, match=r"mean log-decay at \[1, 0\]"):
        observed_horizons(np.array([[-1.0], [value]]), 1e-3)


def test_magnitude_is_a_head_norm_or_a_row_norm() -> None:
    state = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
    heads = state_magnitude(state, "head")
    assert heads.shape == (1, 2)
    assert heads[0, 1] == pytest.approx(np.linalg.norm(state[0, 1]))
    rows = state_magnitude(state, "channel")
    assert rows.shape == (1, 2, 3)
    assert rows[0, 1, 2] == pytest.approx(np.linalg.norm(state[0, 1, 2]))


def test_rank_correlation_is_spearman_with_average_ranks() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        x, y = rng.integers(0, 6, (2, 17)).astype(float)
        assert rank_correlation(x, y) == pytest.approx(spearmanr(x, y).statistic, abs=1e-12)
    assert rank_correlation(np.ones(4), np.arange(4.0)) is None


def test_infinite_horizons_rank_last() -> None:
    assert rank_correlation(np.array([1.0, 2.0, math.inf]), np.array([3.0, 4.0, 5.0])) == 1.0


def test_constant_pairs_are_counted_and_left_out() -> None:
    static = [np.array([1.0, 2.0, 3.0]), np.array([5.0, 5.0, 5.0])]
    observed = [np.array([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]), np.array([[1.0, 2.0, 3.0]] * 2)]
    found = rank_agreement(static, observed)
    assert (found.pairs, found.constant_pairs) == (4, 2)
    assert (found.median, found.lower_quartile, found.upper_quartile) == (0.0, -0.5, 0.5)
    nothing = rank_agreement(static[1:], observed[1:])
    assert nothing.median is None
    assert nothing.constant_pairs == 2


def test_cutoff_agreement_is_strict_and_counts_lost_units() -> None:
    static = [np.array([10.0, 64.0, 65.0])]
    observed = [np.array([[100.0, 10.0, 100.0], [10.0, 65.0, 64.0]])]
    found = cutoff_agreement(static, observed, 64)
    assert found.same_side == pytest.approx(3 / 6)
    assert (found.omitted, found.omitted_but_longer) == (4, 2)


def test_agreement_is_plain_json_and_perfect_on_itself() -> None:
    static = [np.array([[1.0, 20.0], [300.0, 4.0]])]
    observed = [np.stack([static[0], static[0] * 1.01])]
    options = {"w_max": (16, 64), "gate_input": -0.3, "gate_input_source": "default"}
    found = agreement(static, observed, [1 / observed[0]], **options).to_json()
    assert json.loads(json.dumps(found)) == json.loads(json.dumps(found, allow_nan=False))
    assert found["horizons"]["median"] == pytest.approx(1.0)
    assert found["magnitudes"]["median"] == pytest.approx(-1.0)
    assert [c["same_side"] for c in found["cutoffs"]] == [1.0, 1.0]
    layers = layer_agreements(static, observed, [1 / observed[0]], [2])
    assert layers[0].index == 2
    assert layers[0].horizons == pytest.approx(1.0)
    assert len(layers[0].horizons_by_prefix) == found["prefixes"] == 2


def test_agreement_can_be_of_some_prefixes() -> None:
    static = [np.array([1.0, 2.0, 3.0])]
    observed = [np.array([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [1.0, 2.0, 3.0]])]
    options = {"w_max": (4,), "gate_input": 0.0, "gate_input_source": "given"}
    odd = agreement(static, observed, observed, prefixes=[1], **options)
    even = agreement(static, observed, observed, prefixes=range(0, 3, 2), **options)
    assert (odd.prefixes, odd.horizons.median) == (1, pytest.approx(-1.0))
    assert (even.prefixes, even.horizons.median) == (2, pytest.approx(1.0))
