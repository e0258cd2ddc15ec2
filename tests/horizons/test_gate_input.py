"""Choosing a_s: a planted value is found, ties and flat objectives are called what they are, recordings are checked."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import spearmanr

from hybridstate.checkpoint import DecayParameters, open_checkpoint
from hybridstate.errors import PlanMismatch, SourceError, UsageError
from hybridstate.horizons.gate_input import (
    GRID,
    choose_gate_input,
    read_gate_input,
    resolve_gate_input,
)
from hybridstate.horizons.static import static_horizons

Layers = list[NDArray[np.float64]]


def layers_of(rng: np.random.Generator, a_log: str = "spread") -> list[DecayParameters]:
    """Three layers of 3 heads x 8 channels (KDA), or with one A for all units."""
    found = []
    for layer in range(3):
        spread = rng.normal(0, 1.2, 3) if a_log == "spread" else np.full(3, 0.4)
        found.append(
            DecayParameters(
                layer=layer,
                a_log=spread,
                dt_bias=rng.normal(-1, 1.5, (3, 8)),
                a_log_dtype="F32",
                dt_bias_dtype="F32",
            )
        )
    return found


def static_of(layers: Sequence[DecayParameters], gate: str = "softplus") -> Any:
    bound = None if gate == "softplus" else -5.0
    return lambda a_s: [
        static_horizons(layer, gate=gate, lower_bound=bound, gate_input=a_s)  # type: ignore[arg-type]
        for layer in layers
    ]


def noisy(horizons: Layers, prefixes: int, rng: np.random.Generator, noise: float) -> Layers:
    return [
        layer[None] * np.exp(noise * rng.normal(size=(prefixes, *layer.shape)))
        for layer in horizons
    ]


@pytest.mark.parametrize("gate", ["softplus", "safe"])
@pytest.mark.parametrize("objective", ["rank", "median"])
def test_a_planted_gate_input_is_found(gate: str, objective: Any) -> None:
    rng = np.random.default_rng(5)
    static = static_of(layers_of(rng), gate)
    observed = noisy(static(0.8), 6, rng, 0.02)
    found = choose_gate_input(static, observed, objective)
    assert found.gate_input == pytest.approx(0.8, abs=0.3 if objective == "rank" else 0.11)
    assert not found.flat
    assert not found.at_border
    assert found.pairs == 18


def test_the_rank_objective_is_the_median_of_spearman() -> None:
    rng = np.random.default_rng(6)
    static = static_of(layers_of(rng))
    observed = noisy(static(-0.3), 4, rng, 1.0)
    found = choose_gate_input(static, observed, "rank")
    expected = [
        np.median(
            [
                spearmanr(layer.ravel(), prefix.ravel()).statistic
                for layer, seen in zip(static(a_s), observed, strict=True)
                for prefix in seen
            ]
        )
        for a_s in GRID
    ]
    assert found.values == pytest.approx(expected, abs=1e-12)
    assert found.value == pytest.approx(max(expected))
    assert found.worst == pytest.approx(min(expected))
    best = [a for a, value in zip(GRID, expected, strict=True) if value > max(expected) - 1e-9]
    assert found.gate_input == min(best, key=lambda a: (abs(a), a))


def test_one_A_for_all_units_makes_the_rank_objective_flat() -> None:
    """A monotone change of every horizon cannot change an order; the median objective still decides."""
    rng = np.random.default_rng(7)
    static = static_of(layers_of(rng, "one"))
    observed = noisy(static(-1.0), 4, rng, 0.3)
    rank = choose_gate_input(static, observed, "rank")
    assert rank.flat
    assert rank.gate_input == 0.0  # the smallest |a_s| of all ties
    median = choose_gate_input(static, observed, "median")
    assert not median.flat
    assert median.gate_input == pytest.approx(-1.0, abs=0.11)


def test_a_value_outside_the_grid_is_at_its_border() -> None:
    rng = np.random.default_rng(8)
    static = static_of(layers_of(rng))
    found = choose_gate_input(static, noisy(static(3.5), 3, rng, 0.01), "median")
    assert found.gate_input == 2.0
    assert found.at_border


def test_constant_layers_are_counted_and_decide_nothing() -> None:
    static = static_of(layers_of(np.random.default_rng(9)))
    observed = [np.ones((2, 3, 8)) for _ in range(3)]
    found = choose_gate_input(static, observed, "rank")
    assert (found.constant_pairs, found.value, found.flat) == (6, None, True)
    with pytest.raises(UsageError, match="rank or median, found 'mean'"):
        choose_gate_input(static, observed, "mean")  # type: ignore[arg-type]


# -- recordings ------------------------------------------------------------------------------------


def recording(digests: dict[str, str], **changes: Any) -> dict[str, Any]:
    choice = {"gate_input": 0.7, "flat": False} | changes
    return {
        "result": {
            "validation": {
                "model_digests": digests,
                "gate_input_objective": "rank",
                "gate_input_choices": {"rank": choice, "median": {"gate_input": -1, "flat": False}},
            }
        }
    }


def test_a_recorded_choice_is_taken_for_its_own_model(tiny_kda: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_kda)
    for layer in checkpoint.spec.layers:
        checkpoint.decay(layer)
    digests = checkpoint.digests()
    file = tmp_path / "validate.json"
    file.write_text(json.dumps(recording(digests)))
    assert resolve_gate_input(checkpoint, measured=file) == (0.7, "measured")
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())  # as editors on Windows write it
    assert resolve_gate_input(checkpoint, measured=file) == (0.7, "measured")
    assert resolve_gate_input(checkpoint, given=0.2) == (0.2, "given")
    assert resolve_gate_input(checkpoint)[1] == "paper"
    (tmp_path / "analysis.json").write_text(json.dumps(recording(digests)["result"]))
    assert read_gate_input(tmp_path, digests, objective="median") == -1.0
    with pytest.raises(UsageError, match="not both"):
        resolve_gate_input(checkpoint, given=0.2, measured=file)
    with pytest.raises(PlanMismatch, match=r"another checkpoint: decay digest .*has 0000"):
        read_gate_input(file, digests | {"decay": "0" * 64})
    file.write_text(json.dumps(recording(digests, flat=True)))
    with pytest.raises(UsageError, match="was flat over the grid"):
        read_gate_input(file, digests)


@pytest.mark.parametrize("value", [10**400, float("inf"), float("nan"), None, "x", []])
def test_a_gate_input_that_is_no_finite_number_is_told_with_its_file(
    tmp_path: Path, value: Any
) -> None:
    file = tmp_path / "edited.json"
    file.write_text(json.dumps(recording({}, gate_input=value)))
    with pytest.raises(
        SourceError, match=r"edited\.json: no validation with a measured gate input"
    ):
        read_gate_input(file, {})


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"result": {"validation": null}}', "[" * 100_000, '{"result": {}}'],
)
def test_a_file_that_is_no_validation_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(content)
    with pytest.raises(SourceError, match="no validation with a measured gate input"):
        read_gate_input(file, {})
    with pytest.raises(SourceError, match="no validation"):
        read_gate_input(tmp_path / "absent.json", {})
