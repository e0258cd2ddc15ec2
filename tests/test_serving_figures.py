"""Pictures of `bench serve` and `bench simulate`: placements that agree both show."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridstate.figures import serving, serving_figures

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
