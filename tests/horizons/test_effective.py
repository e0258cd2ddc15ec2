"""Effective decay factors: geometric means, pooled percentiles and rank correlation, against scipy."""

import numpy as np
import pytest
from scipy.stats import gmean, spearmanr

from hybridstate.horizons.effective import band, domain_decays, effective, pooled, units_at


def test_units_of_all_layers_are_pooled_in_order() -> None:
    heads = np.arange(6.0).reshape(2, 3)
    channels = 10 + np.arange(12.0).reshape(2, 3, 2)
    found = pooled([heads, channels])
    assert found.shape == (2, 9)
    assert found[1].tolist() == [3, 4, 5, 16, 17, 18, 19, 20, 21]


def test_effective_decay_is_the_geometric_mean() -> None:
    rng = np.random.default_rng(1)
    decay = rng.uniform(0.1, 1.0, (5, 40, 7))  # sequences, tokens, units
    found = effective(np.log(decay).mean(axis=1))
    assert found == pytest.approx(gmean(decay.reshape(-1, 7), axis=0))
    low, high = band(np.log(decay).mean(axis=1))
    each = gmean(decay, axis=1)
    assert low == pytest.approx(np.percentile(each, 10, axis=0))
    assert high == pytest.approx(np.percentile(each, 90, axis=0))


def test_domains_are_ranked_against_math() -> None:
    rng = np.random.default_rng(2)
    rows = {name: -rng.exponential(size=(4, 50)) for name in ("math", "code", "prose")}
    found = {row.domain: row for row in domain_decays(rows, tokens=16)}
    assert found["math"].with_reference is None
    for name in ("code", "prose"):
        expected = spearmanr(np.exp(rows["math"].mean(0)), np.exp(rows[name].mean(0))).statistic
        assert found[name].with_reference == pytest.approx(expected, abs=1e-12)
    factors = np.exp(rows["code"].mean(0))
    quantiles = (found["code"].p10, found["code"].p50, found["code"].p90)
    assert quantiles == pytest.approx(tuple(np.percentile(factors, (10, 50, 90))))
    assert (found["code"].sequences, found["code"].tokens) == (4, 64)
    same = domain_decays({"math": np.zeros((2, 5)), "code": rows["code"][:, :5]}, tokens=1)
    assert same[1].with_reference is None  # every unit alike: no order


def test_units_stand_at_the_percentiles() -> None:
    factors = np.array([0.5, 0.1, 0.9, 0.3, 0.7, 0.2, 0.4, 0.6, 0.8, 0.0, 1.0])
    assert factors[list(units_at(factors))].tolist() == [0.1, 0.5, 0.9]
