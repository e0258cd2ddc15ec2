"""`api.analyze`: the stages put together, on tiny checkpoints of both kinds."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hybridstate import api
from hybridstate.checkpoint import open_checkpoint
from hybridstate.errors import UsageError
from hybridstate.families import ModelSpec
from hybridstate.plan.analysis import horizon_quantiles
from tests.tiny import bf16, write_checkpoint


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "olmo_hybrid", "kimi_linear"])
def test_horizons_are_those_of_the_stored_values(
    tiny_checkpoint: Callable[..., Path], family: str
) -> None:
    folder = tiny_checkpoint(family)
    analysis = api.analyze(folder)
    checkpoint = open_checkpoint(folder)
    for layer, horizons in zip(checkpoint.spec.layers, analysis.horizons, strict=True):
        a_name, dt_name = checkpoint.decay_tensors(layer)
        a_log = checkpoint.read(a_name).astype(np.float64).reshape(-1)
        dt_bias = checkpoint.read(dt_name).astype(np.float64)
        if family == "kimi_linear":
            a_log, dt_bias = a_log[:, None], dt_bias.reshape(4, 8)
        g = -np.exp(a_log) * np.log1p(np.exp(dt_bias - 0.3))
        np.testing.assert_allclose(horizons, np.log(1e-3) / g, rtol=1e-12)


def test_rounding_a_log_to_bf16_moves_horizons(tiny_kda: Path) -> None:
    """Why the decay parameters are read as stored: a BF16 copy gives other horizons."""
    checkpoint = open_checkpoint(tiny_kda)
    stored = checkpoint.decay(checkpoint.spec.layers[0]).a_log
    rounded = bf16(stored.astype(np.float32)).astype(np.float64)
    shift = np.abs(np.exp(stored - rounded) - 1)
    assert 1e-4 < shift.max() < 2e-2


def test_json_form_is_finite_and_adds_up(tiny_kda: Path) -> None:
    analysis = api.analyze(tiny_kda, w_max=[64, 16, 64])
    document = json.loads(json.dumps(analysis.to_json(), allow_nan=False))
    assert [c["w_max"] for c in document["cutoffs"]] == [16, 64]
    for cutoff in document["cutoffs"]:
        w = str(cutoff["w_max"])
        assert cutoff["retained"] == sum(layer["retained"][w] for layer in document["layers"])
    read = document["model"]["read"]
    assert read["tensor_bytes"] == 3 * (4 * 4 + 4 * 32)
    assert read["tensor_bytes"] + read["header_bytes"] < read["checkpoint_bytes"]
    assert document["horizons"]["a_s_source"] == "paper"


def test_given_gate_input_and_epsilon_are_used_and_recorded(tiny_gdn: Path) -> None:
    published, given = api.analyze(tiny_gdn), api.analyze(tiny_gdn, gate_input=1.0, epsilon=1e-2)
    assert (given.gate_input, given.gate_input_source, given.epsilon) == (1.0, "given", 1e-2)
    assert all((a > b).all() for a, b in zip(published.horizons, given.horizons, strict=True))


def test_a_default_that_no_paper_gives_is_not_called_published(
    tiny_kda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert api.analyze(tiny_kda).gate_input_source == "paper"
    assert not any("gate input" in w for w in api.analyze(tiny_kda).warnings)
    monkeypatch.setattr(ModelSpec, "default_gate_input_source", "default")
    found = api.analyze(tiny_kda)
    assert found.gate_input_source == "default"
    assert "a larger one shortens every horizon and drops more units" in found.warnings[0]
    assert api.analyze(tiny_kda, gate_input=0.0).gate_input_source == "given"


def test_two_runs_agree_to_the_byte(tiny_gdn: Path) -> None:
    first, second = (json.dumps(api.analyze(tiny_gdn).to_json()) for _ in range(2))
    assert first == second


def test_impossible_cutoff_is_refused(tiny_gdn: Path) -> None:
    with pytest.raises(UsageError, match="at least 4 tokens"):
        api.analyze(tiny_gdn, w_max=[64, 2])


def test_checkpoint_warnings_and_near_ties_are_passed_on(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "qwen3_5", shards=2)
    (folder / "stray.safetensors").write_bytes(b"")
    assert "stray.safetensors" in api.analyze(folder).warnings[0]


def test_quantiles_are_values_of_the_data_and_null_where_infinite() -> None:
    result = horizon_quantiles(np.array([[0.0, 5.0], [np.inf, np.inf]]))
    assert result == {
        "min": 0.0,
        "p10": 0.0,
        "median": 5.0,
        "p90": None,
        "max": None,
        "units": 4,
        "infinite": 2,
        "zero": 1,
    }
