"""Selection: strict cutoff, replay windows, offsets, and random masks that anybody can redraw."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridstate.defaults import RANDOM_MASK_SEEDS
from hybridstate.errors import NumericError, UsageError
from hybridstate.plan.select import overlap, random_selection, replay_windows, select

HORIZON = st.one_of(
    st.floats(0, 1e7),
    st.sampled_from([0.0, 1.38, 4.0, 4.01, 16.0, 64.0, 512.0, float("inf")]),
)
LAYERS = st.lists(st.lists(HORIZON, min_size=1, max_size=12), min_size=1, max_size=5)
W_MAX = st.integers(4, 4096)


def arrays(layers: list[list[float]]) -> tuple[np.ndarray, ...]:
    return tuple(np.array(values, np.float64) for values in layers)


def test_unit_at_the_cutoff_is_omitted() -> None:
    selection = select(arrays([[64.0, np.nextafter(64.0, 65.0), 63.0]]), 64)
    assert selection.retained[0].tolist() == [False, True, False]
    assert selection.near_cutoff == 2


def test_ties_are_counted_within_a_relative_millionth() -> None:
    selection = select(arrays([[64 * (1 + 0.9e-6), 64 * (1 + 1.1e-6), 64 * (1 - 0.9e-6)]]), 64)
    assert selection.near_cutoff == 2


@pytest.mark.parametrize(
    ("horizon", "w_max", "window"),
    [
        (0.0, 16, 4),
        (1.38, 16, 4),
        (4.0, 16, 4),
        (4.01, 16, 8),
        (8.0, 16, 8),
        (16.0, 16, 16),
        (70.0, 100, 100),
        (64.0, 100, 64),
        (2.0**20, 2**20, 2**20),
        (2.0**20 - 0.5, 2**21, 2**20),
        (5.0, 5, 5),
        (4.5, 5, 5),
    ],
)
def test_replay_window_of_one_unit(horizon: float, w_max: int, window: int) -> None:
    selection = select(arrays([[horizon]]), w_max)
    assert selection.replay_window[0].tolist() == [window]
    assert selection.w_replay == window


def test_window_of_a_power_of_two_is_itself_and_one_step_above_doubles() -> None:
    for exponent in range(2, 30):
        exact = float(2**exponent)
        above = np.nextafter(exact, np.inf)
        windows = replay_windows(np.array([exact, above]), 2**30)
        assert windows.tolist() == [2**exponent, 2 ** (exponent + 1)]


def test_retained_units_have_no_window_and_nothing_omitted_means_no_replay() -> None:
    selection = select(arrays([[100.0, np.inf]]), 64)
    assert selection.replay_window[0].tolist() == [0, 0]
    assert selection.w_replay == 0
    assert selection.replay_tokens(1000) == 0


def test_replay_is_capped_by_the_prefix() -> None:
    selection = select(arrays([[60.0]]), 64)
    assert (selection.replay_tokens(1000), selection.replay_tokens(10)) == (64, 10)


def test_infinite_horizons_are_retained_and_zero_ones_are_not() -> None:
    selection = select(arrays([[np.inf, 0.0]]), 4096)
    assert selection.retained[0].tolist() == [True, False]


@pytest.mark.parametrize(
    ("w_max", "message"),
    [(3, "at least 4"), (0, "at least 4"), (-4, "at least 4"), (2**31, r"below 2\*\*31")],
)
def test_impossible_cutoff_is_refused(w_max: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        select(arrays([[1.0]]), w_max)


@pytest.mark.parametrize("bad", [float("nan"), -1.0])
def test_impossible_horizon_is_refused(bad: float) -> None:
    with pytest.raises(NumericError, match=r"horizon \[1\] of linear layer 0"):
        select(arrays([[1.0, bad]]), 16)


@given(layers=LAYERS, w_max=W_MAX)
def test_counts_offsets_and_windows_agree(layers: list[list[float]], w_max: int) -> None:
    selection = select(arrays(layers), w_max)
    assert selection.units == tuple(len(values) for values in layers)
    assert selection.counts == tuple(sum(h > w_max for h in values) for values in layers)
    assert selection.offsets[0] == 0
    assert np.diff(selection.offsets).tolist() == list(selection.counts)
    omitted = [h for values in layers for h in values if h <= w_max]
    windows = np.concatenate(selection.replay_window)
    masks = np.concatenate(selection.retained)
    assert ((windows == 0) == masks).all()
    for h, window in zip(omitted, windows[~masks], strict=True):
        assert window >= min(h, w_max)
        assert 4 <= window <= w_max
        assert window == w_max or window <= max(4, 2 * h)
    assert selection.w_replay == (int(windows.max()) if omitted else 0)


@given(layers=LAYERS, w_max=W_MAX)
def test_a_larger_cutoff_keeps_a_subset(layers: list[list[float]], w_max: int) -> None:
    small, large = select(arrays(layers), w_max), select(arrays(layers), 2 * w_max)
    for a, b in zip(small.retained, large.retained, strict=True):
        assert not (b & ~a).any()


@given(layers=LAYERS, w_max=W_MAX, seed=st.sampled_from(RANDOM_MASK_SEEDS))
def test_random_mask_matches_the_count_of_every_layer(
    layers: list[list[float]], w_max: int, seed: int
) -> None:
    selection = select(arrays(layers), w_max)
    drawn = random_selection(selection, seed)
    assert drawn.counts == selection.counts
    assert drawn.seed == seed
    assert drawn.mask_digest == random_selection(selection, seed).mask_digest
    omitted = sum(drawn.units) - sum(drawn.counts)
    assert drawn.w_replay == (w_max if omitted else 0)


def test_random_mask_is_one_permutation_per_layer_of_one_generator() -> None:
    horizons = (np.arange(12.0).reshape(3, 4), np.arange(20.0).reshape(5, 4))
    selection = select(horizons, 6)
    drawn = random_selection(selection, 1234)
    generator = np.random.Generator(np.random.PCG64(1234))
    for mask, kept in zip(drawn.retained, selection.counts, strict=True):
        expected = np.sort(generator.permutation(mask.size)[:kept])
        assert mask.shape[1] == 4
        np.testing.assert_array_equal(np.flatnonzero(mask), expected)


def test_random_mask_of_a_known_seed_does_not_change() -> None:
    selection = select((np.array([1.0, 99.0, 99.0, 1.0, 99.0, 1.0]),), 16)
    drawn = random_selection(selection, 1234).retained[0]
    assert drawn.tolist() == [True, False, False, False, True, True]


@given(layers=LAYERS, w_max=W_MAX)
def test_overlap_with_itself_is_complete(layers: list[list[float]], w_max: int) -> None:
    selection = select(arrays(layers), w_max)
    same = overlap(selection, selection)
    assert same.both == same.either == sum(selection.counts)
    assert same.jaccard == 1.0


def test_overlap_counts_both_and_either() -> None:
    a = select(arrays([[99.0, 99.0, 1.0, 1.0]]), 16)
    b = select(arrays([[99.0, 1.0, 99.0, 1.0]]), 16)
    result = overlap(a, b)
    assert (result.both, result.either, result.expected) == (1, 3, 1.0)
    assert result.to_json()["jaccard"] == pytest.approx(1 / 3)


def test_overlap_of_different_models_is_refused() -> None:
    with pytest.raises(NumericError, match="different units"):
        overlap(select(arrays([[1.0]]), 16), select(arrays([[1.0, 2.0]]), 16))
