"""Bytes of the real models, to the byte, and the identities that hold for every model."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridstate.errors import PlanMismatch
from hybridstate.families import FAMILIES, LinearLayer, ModelSpec
from hybridstate.plan.accounting import account, conv_bytes, packed_bits, temporal_bytes
from hybridstate.plan.select import Selection, select


@dataclass(frozen=True)
class Model:
    """Geometry of a released model and its published bytes."""

    family: str
    layers: int
    key_heads: int
    value_heads: int
    temporal: int
    conv: int
    dense: int
    per_tp8_rank: int
    limit: float
    key_dim: int = 128
    value_dim: int = 128


RELEASED = {
    "Kimi-Linear": Model(
        "kimi_linear", 20, 32, 32, 41_943_040, 1_474_560, 43_417_600, 5_427_200, 29.44
    ),
    "Qwen3-Next": Model(
        "qwen3_next", 36, 16, 32, 75_497_472, 1_769_472, 77_266_944, 9_658_368, 43.67
    ),
    "Qwen3.6-35B": Model(
        "qwen3_5_moe", 30, 16, 32, 62_914_560, 1_474_560, 64_389_120, 8_048_640, 43.67
    ),
    "Kimi-K3": Model(
        "kimi_k3", 69, 96, 96, 434_110_464, 15_261_696, 449_372_160, 56_171_520, 29.44
    ),
}


def spec_of(model: Model) -> ModelSpec:
    family = next(f for f in FAMILIES if f.name == model.family)
    layers = tuple(
        LinearLayer(
            i, i, model.key_heads, model.value_heads, model.key_dim, model.value_dim, 4, f"l.{i}."
        )
        for i in range(model.layers)
    )
    return ModelSpec(family, "softplus", None, layers, model.layers)


def keep(spec: ModelSpec, counts: list[int]) -> Selection:
    """A selection that retains the first `counts[l]` units of each layer."""
    horizons = []
    for layer, count in zip(spec.layers, counts, strict=True):
        values = np.zeros(spec.units(layer))
        values[:count] = np.inf
        shape = (layer.value_heads, -1) if spec.unit == "channel" else (-1,)
        horizons.append(values.reshape(shape))
    return select(horizons, 16)


@pytest.mark.parametrize("name", RELEASED)
def test_dense_bytes_of_released_models(name: str) -> None:
    model = RELEASED[name]
    spec = spec_of(model)
    result = account(spec, keep(spec, [0] * model.layers))
    assert result.temporal_dense_bytes == temporal_bytes(spec) == model.temporal
    assert result.conv_bytes == conv_bytes(spec) == model.conv
    assert result.dense_bytes == model.dense
    assert result.dense_bytes // 8 == model.per_tp8_rank
    assert result.dense_bytes % 8 == 0


@pytest.mark.parametrize("name", RELEASED)
def test_keeping_nothing_leaves_the_convolution_state(name: str) -> None:
    model = RELEASED[name]
    spec = spec_of(model)
    result = account(spec, keep(spec, [0] * model.layers))
    assert result.ragged_bytes == result.padded_bytes == model.conv
    assert result.ratio_temporal_ragged is None
    assert result.layout_gain is None
    assert result.ratio_full_limit == result.ratio_full_ragged
    assert result.ratio_full_ragged == pytest.approx(model.limit, abs=0.005)


@pytest.mark.parametrize("name", RELEASED)
def test_keeping_everything_saves_nothing(name: str) -> None:
    model = RELEASED[name]
    spec = spec_of(model)
    result = account(spec, keep(spec, [spec.units(layer) for layer in spec.layers]))
    assert result.ragged_bytes == result.padded_bytes == result.dense_bytes
    assert result.ratio_full_ragged == result.ratio_temporal_padded == result.layout_gain == 1.0


def test_kimi_linear_at_w_16_saves_as_published() -> None:
    """35.87 % of 20 x 4,096 channels: 2.63x with the convolution state."""
    spec = spec_of(RELEASED["Kimi-Linear"])
    total = round(0.3587 * 20 * 4096)
    counts = [total // 20 + (i < total % 20) for i in range(20)]
    result = account(spec, keep(spec, counts))
    assert result.ratio_full_ragged == pytest.approx(2.628, abs=0.002)


@given(
    family=st.sampled_from(["qwen3_5", "kimi_linear"]),
    key_heads=st.integers(1, 3),
    bundle=st.integers(1, 3),
    key_dim=st.integers(1, 6),
    value_dim=st.integers(1, 7),
    data=st.data(),
)
def test_bytes_add_up_for_any_geometry(
    family: str, key_heads: int, bundle: int, key_dim: int, value_dim: int, data: st.DataObject
) -> None:
    heads = key_heads * (bundle if family == "qwen3_5" else 1)
    model = Model(family, 3, key_heads, heads, 0, 0, 0, 0, 0.0, key_dim, value_dim)
    spec = spec_of(model)
    units = spec.units(spec.layers[0])
    counts = data.draw(st.lists(st.integers(0, units), min_size=3, max_size=3))
    result = account(spec, keep(spec, counts))
    unit_bytes = result.temporal_dense_bytes // (3 * units)
    assert unit_bytes * 3 * units == 3 * heads * key_dim * value_dim * 4
    assert result.temporal_ragged_bytes == sum(counts) * unit_bytes
    assert result.temporal_padded_bytes == 3 * max(counts) * unit_bytes
    assert result.ragged_bytes <= result.padded_bytes <= result.dense_bytes
    assert result.conv_bytes == 3 * (2 * key_heads * key_dim + heads * value_dim) * 3 * 2
    if sum(counts):
        assert result.layout_gain == pytest.approx(max(counts) / (sum(counts) / 3))
    document = result.to_json()
    assert all(v is None or math.isfinite(v) for v in document.values())
    assert all(isinstance(v, int) for k, v in document.items() if k.endswith("_bytes"))


def test_selection_of_another_model_is_refused() -> None:
    spec = spec_of(RELEASED["Kimi-Linear"])
    other = select([np.ones(4)] * 20, 16)
    with pytest.raises(PlanMismatch, match="the selection covers"):
        account(spec, other)


@pytest.mark.parametrize(
    ("key_dim", "k_hi", "bits"),
    [(128, 16, 9.875), (128, 0, 9.0), (128, 128, 16.0), (128, 32, 10.75), (96, 16, 61 / 6)],
)
def test_packed_bits(key_dim: int, k_hi: int, bits: float) -> None:
    assert packed_bits(key_dim, k_hi, 32) == pytest.approx(bits, rel=1e-15)


def test_packed_format_saves_what_is_published() -> None:
    assert 1 - packed_bits(128, 16) / 32 == pytest.approx(0.69140625, rel=1e-15)


def test_short_last_group_costs_a_whole_scale() -> None:
    assert packed_bits(8, 0, 32, value_dim=48) == pytest.approx(8 + 2 * 32 / 48)


@pytest.mark.parametrize("k_hi", [-1, 129])
def test_protected_channels_outside_the_head_are_refused(k_hi: int) -> None:
    with pytest.raises(PlanMismatch, match=r"0\.\.128"):
        packed_bits(128, k_hi)
