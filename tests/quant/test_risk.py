"""Risk against a float64 NumPy twin written from the equations, selection, averages, agreement."""

from pathlib import Path

import numpy as np
import pytest
import torch

from hybridstate.checkpoint import open_checkpoint
from hybridstate.errors import NumericError, UsageError
from hybridstate.quant.arms import Arm
from hybridstate.quant.formats import FORMATS
from hybridstate.quant.risk import (
    Place,
    check_k_hi,
    default_k_hi,
    equal_weights,
    local_error,
    objective,
    protect,
    protect_random,
    risk,
    split_agreement,
    weighted,
)
from tests.quant.test_formats import int8_by_hand


def case(kda: bool, bundle: int, seed: int):  # type: ignore[no-untyped-def]
    """States [N, H, K, V], decays after each anchor [N, H(, K), horizon], places; d_k != d_v."""
    rng = np.random.default_rng(seed)
    n, heads, key_dim, value_dim, horizon = 6, 2 * bundle, 8, 12, 5
    scale = np.exp(rng.normal(size=(n, heads, key_dim, 1)))
    states = (rng.normal(size=(n, heads, key_dim, value_dim)) * scale).astype(np.float32)
    shape = (n, heads, key_dim, horizon) if kda else (n, heads, horizon)
    a = np.exp(-np.exp(rng.normal(size=shape) - 1))
    places = (
        [Place("math", 0, 0)] * 2 + [Place("math", 0, 4)] + [Place("code", i, 0) for i in "123"]
    )
    return states, a, places


def twin(states, a, places):  # type: ignore[no-untyped-def]
    """C of Eq. 15, loops only."""
    n, heads, key_dim, _ = states.shape
    stored = int8_by_hand(states)
    value = np.zeros((n, heads, key_dim))
    for i in range(n):
        for h in range(heads):
            for u in range(key_dim):
                e = sum(float(d) ** 2 for d in stored[i, h, u] - states[i, h, u].astype(float))
                decays = a[i, h, u] if a.ndim == 4 else a[i, h]
                w, product = 1.0, 1.0
                for factor in decays:
                    product *= factor**2
                    w += product
                value[i, h, u] = e * w
    by_domain = {}
    for domain in ("math", "code"):
        by_sequence = {}
        for i, place in enumerate(places):
            if place.domain == domain:
                by_sequence.setdefault(place.sequence, {}).setdefault(place.window, []).append(i)
        sequences = [
            np.mean([value[rows].mean(0) for rows in windows.values()], axis=0)
            for windows in by_sequence.values()
        ]
        by_domain[domain] = np.mean(sequences, axis=0)
    return np.mean(list(by_domain.values()), axis=0)


@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("bundle", [1, 2, 3])
def test_risk_equals_its_twin(kda: bool, bundle: int) -> None:
    states, a, places = case(kda, bundle, seed=bundle)
    weights = torch.from_numpy(1 + np.cumprod(a**2, -1).sum(-1))
    error = local_error(torch.from_numpy(states), FORMATS["int8-step"])
    found = risk(weighted(error, weights), places)
    # the reconstruction itself is float32: one rounding of a code times a scale
    np.testing.assert_allclose(found, twin(states, a, places), rtol=1e-4)
    assert np.array_equal(np.argsort(found, axis=1), np.argsort(twin(states, a, places), axis=1))


def test_averages_give_equal_weight_inside_each_level() -> None:
    places = [Place("a", 0, 0)] * 2 + [Place("a", 0, 1), Place("a", 1, 0), Place("b", 2, 0)]
    assert equal_weights(places).tolist() == [1 / 16, 1 / 16, 1 / 8, 1 / 4, 1 / 2]
    full = [Place(d, s, w) for d, ss in (("a", (0, 1)), ("b", (2, 3))) for s in ss for w in (0, 1)]
    assert equal_weights(full * 3) == pytest.approx(np.full(24, 1 / 24))


def test_value_heads_of_a_bundle_share_the_channels_of_largest_summed_score() -> None:
    scores = np.array([[9.0, 0.0, 5.0, 1.0], [0.0, 4.0, 5.0, 1.0], [1.0, 1, 1, 1], [1.0, 1, 1, 1]])
    assert protect(scores, 2, key_heads=2).tolist() == [[0, 2], [0, 2], [0, 1], [0, 1]]
    assert protect(scores, 2, key_heads=4).tolist() == [[0, 2], [1, 2], [0, 1], [0, 1]]
    assert protect(scores, 0, key_heads=2).shape == (4, 0)
    assert protect(scores, 4, key_heads=2).tolist() == [[0, 1, 2, 3]] * 4


def test_random_channels_are_shared_ascending_and_repeatable() -> None:
    first = protect_random((6, 40), 5, 3, seed=(7, 0))
    assert first.shape == (6, 5)
    assert np.array_equal(first, protect_random((6, 40), 5, 3, seed=(7, 0)))
    assert not np.array_equal(first, protect_random((6, 40), 5, 3, seed=(7, 1)))
    assert np.array_equal(first[0], first[1])
    assert not np.array_equal(first[1], first[2])
    assert (np.diff(first, axis=1) > 0).all()


def test_default_share_of_protected_channels() -> None:
    assert [default_k_hi(d) for d in (8, 64, 96, 128, 192, 256)] == [8, 16, 16, 16, 32, 32]


def test_k_hi_beyond_the_key_channels_is_refused(tiny_gdn: Path) -> None:
    spec = open_checkpoint(tiny_gdn).spec
    assert check_k_hi(None, spec) == 8
    assert check_k_hi(0, spec) == 0
    for wrong in (-1, 9):
        with pytest.raises(UsageError, match=f"k_hi is {wrong}, the state has 8"):
            check_k_hi(wrong, spec)


def test_objective_sums_each_channel_in_its_format() -> None:
    states, a, places = case(True, 1, seed=3)
    tensor, weights = torch.from_numpy(states), torch.from_numpy(1 + a.sum(-1))
    protected = torch.tensor([[1, 6], [0, 2]])
    arm = Arm("damp", FORMATS["int8-step"], (protected,))
    low = risk(weighted(local_error(tensor, FORMATS["int8-step"]), weights), places)
    high = risk(weighted(local_error(tensor, FORMATS["fp16"]), weights), places)
    mask = np.zeros((2, 8), dtype=bool)
    np.put_along_axis(mask, protected.numpy(), True, axis=1)
    assert objective(tensor, weights, places, arm, 0) == pytest.approx(
        np.where(mask, high, low).sum(), rel=1e-12
    )
    best = Arm("damp", FORMATS["int8-step"], (torch.from_numpy(protect(low, 2, 2)).long(),))
    assert objective(tensor, weights, places, best, 0) <= objective(tensor, weights, places, arm, 0)


def test_a_risk_that_is_not_finite_is_named() -> None:
    products = np.ones((2, 3, 4))
    products[1, 2, 3] = np.nan
    with pytest.raises(NumericError, match="risk of head 2, channel 3"):
        risk(products, [Place("a", 0, 0), Place("a", 1, 0)])


def test_split_agreement_is_overlap_beside_chance_and_rank_correlation() -> None:
    rng = np.random.default_rng(0)
    scores = rng.random((2, 16))
    found = split_agreement([(scores, scores * 2), (scores, np.ones((2, 16)))], 4, (2, 2))
    assert found.random_overlap == 0.25
    assert found.spearman == pytest.approx(1.0)
    assert found.constant_heads == 2
    assert 0.5 <= found.overlap < 1
