"""Pictures of `bench serve` and `bench simulate`: placements that agree both show, lines are of the arms they name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridstate.figures import serving, serving_figures
from hybridstate.figures.serving import policy_figure

MEAN = {"mean_ttft_ms": 200.0, "mean_e2e_latency_ms": 900.0, "p95_ttft_ms": 400.0}


def result(*balances: str) -> dict[str, Any]:
    """Zeros at two cutoffs, the same numbers with every placement."""
    mean = MEAN | {"mean_tpot_ms": 7.0, "hybridstate": {"token_hit_rate": 0.5}}
    same = {"kind": "nr", "ratio": 1.0, "limit": 8, "seeds": [0], "mean": mean}
    return {
        "points": [
            same | {"arm": f"nr-{w_max} {balance}", "w_max": w_max, "balance": balance}
            for balance in balances
            for w_max in (8, 64)
        ],
        "operating_point": {"ratio": 1.0},
        "trace": {"synthetic": True, "name": "a"},
        "simulated": True,
        "profile": {"tp": 2},
        "think_s": 0,
    }


@pytest.mark.parametrize("balances", [("off",), ("off", "storage"), ("off", "storage", "hybrid")])
def test_no_placement_hides_another(
    balances: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that is taken away leaves a gap at its markers, in every panel."""
    drawn: list[Any] = []
    monkeypatch.setattr(serving, "save_figure", lambda figure, *_: drawn.append(figure))
    serving_figures(result(*balances), "a model", tmp_path)
    (figure,) = drawn
    (legend,) = figure.legends
    named = [text.get_text().removeprefix("zeros (NR), ") for text in legend.get_texts()]
    assert named == ["zeros (NR)", *balances[1:]]
    legend.remove()

    def pixels() -> np.ndarray:
        figure.canvas.draw()
        return np.asarray(figure.canvas.buffer_rgba())[..., :3].astype(int)

    pixels()  # the layout is found once
    figure.set_layout_engine("none")
    whole = pixels()
    for axes in figure.axes:
        assert len(axes.lines) == len(balances)
        for line in axes.lines:
            line.set_visible(False)
            changed = np.abs(pixels() - whole).max(2) > 64
            # two dots or two rings have 140 at least, what is left of those behind equal markers 50 at most
            assert changed.sum() > 100, line.get_label()
            line.set_visible(True)


def point(arm: str, ratio: float, ttft_ms: float, w_max: int | None = None) -> dict[str, Any]:
    """One mean of a sweep."""
    mean = MEAN | {
        "mean_tpot_ms": 7.0,
        "hybridstate": {"token_hit_rate": 0.5},
        "mean_ttft_ms": ttft_ms,
    }
    kind = arm.split("-")[0]
    where = {"balance": "off", "ratio": ratio, "limit": 8, "seeds": [0]}
    return {"arm": arm, "kind": kind, "w_max": w_max, **where, "mean": mean}


def test_working_sets_are_drawn_at_the_cutoff_that_is_fastest_at_the_operating_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 wins at ratio 1, 64 at ratio 2: the line is of 16 throughout."""
    drawn: list[Any] = []
    monkeypatch.setattr(serving, "save_figure", lambda figure, *_: drawn.append(figure))
    found = result() | {
        "points": [
            point("dense", 1.0, 500.0),
            point("nr-16", 1.0, 300.0, 16),
            point("nr-64", 1.0, 400.0, 64),
            point("nr-16", 2.0, 390.0, 16),
            point("nr-64", 2.0, 100.0, 64),
        ]
    }
    found["points"][4]["seeds"] = [0, 1]
    serving_figures(found, "a model", tmp_path)
    line = next(line for line in drawn[-1].axes[0].lines if line.get_label() == "zeros (NR) 16")
    assert list(line.get_ydata()) == [0.3, 0.39]
    hollow = [line for line in drawn[-1].axes[0].lines if line.get_markerfacecolor() == "white"]
    assert [list(line.get_ydata()) for line in hollow] == [[0.5], [0.3, 0.39]]
    found["points"][2]["mean"]["mean_ttft_ms"] = 301.0  # a tie: the larger cutoff
    serving_figures(found, "a model", tmp_path)
    assert "zeros (NR) 64" in [line.get_label() for line in drawn[-1].axes[0].lines]


def test_policies_have_a_line_for_dense_and_for_the_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(serving, "save_figure", lambda *parts: drawn.append(parts))
    points = [
        point("nr-64", 1.0, 300.0, 64),
        point("dense", 2.0, 800.0),
        point("dense", 1.0, 500.0),
    ]
    runs = [result() | {"policy": policy, "points": points} for policy in ("lru", "cost")]
    policy_figure(runs, "nr-64", "a model", tmp_path)
    ((figure, path, header, rows),) = drawn
    assert path == tmp_path / "serving_policies"
    labels = [line.get_label() for line in figure.axes[0].lines]
    assert labels == ["dense, lru", "nr-64, lru", "dense, cost", "nr-64, cost"]
    assert list(figure.axes[0].lines[0].get_ydata()) == [0.5, 0.8]
    assert {len(row) for row in rows} == {len(header)}
    assert [row[:2] for row in rows[:2]] == [("lru", "dense"), ("lru", "dense")]
