"""Tables and pictures of a calibration from a small real run of every kind of arm."""

import csv
from pathlib import Path
from typing import Any

import calibration_tables as tables
import findings
import pytest

from hybridstate import api
from hybridstate.figures.calibration import calibration_figures, steps_figure

FORMATS = (
    "int8-step+reorder,nvfp4,damp-energy,damp-retention-only,damp-per-head,"
    "damp-k4,damp-k8,int8-every-4,int8-feedback-int4,damp-every-4"
)


@pytest.fixture(scope="module")
def result(tiny_gdn: Path) -> dict[str, Any]:
    found = api.calibrate(
        *(tiny_gdn, None),
        formats=f"default,{FORMATS}",
        k_hi=2,
        seeds=2,
        greedy=True,
        temperature=1.0,
        input_tokens=24,
        new_tokens=36,
        batch=200,
        windows=(0,),
        anchors=(2, 5),
        horizon=8,
    )
    rows = [
        {
            "format": row.format,
            "task": "recall",
            "accuracy": 0.75,
            "accuracy_error": 0.02,
            "below_fp32": 0.1,
            "below_fp32_error": None,
        }
        for row in found.divergences
    ]
    answered = {
        "filler_updates": 18,
        "texts": {"recall": 4},
        "questions": {"recall": 128},
        "chance": {"recall": 0.01},
        "rows": rows,
    }
    return found.to_json() | {"task_accuracy": answered}


def test_greedy_texts_are_set_beside_sampled_ones(result: dict[str, Any]) -> None:
    rows = {
        name: {r["format"]: r for r in part["validation"]}
        for name, part in (("1", result), ("0", result["greedy"]))
    }
    ratio = rows["0"]["damp"]["kl"] / rows["1"]["damp"]["kl"]
    text = findings.greedy({"tiny": result})
    assert f"`damp` {ratio:.2g} times" in text or f"`damp` {ratio:.0f} times" in text
    assert "carries" not in text, "int8-feedback-fp16 was not run"
    assert findings.greedy({"tiny": result | {"greedy": None}}) == ""


def test_every_table_names_its_rows_and_its_sample(result: dict[str, Any]) -> None:
    found = {title: table(result) for title, table in tables.TABLES}
    assert all(found.values()), [title for title, text in found.items() if not text]
    text = found["Storage formats of the live state"]
    assert "| nvfp4 |" in text
    assert "6 sequences of 35 updates from 2 seeds" in text
    assert "18.48 %" in text  # DAMP 4.1, from the list of published numbers
    text = found["Which key channels are kept in FP16"]
    assert "damp-retention-only is undefined" in text
    assert "from channels per value head (SD over seeds" in text
    assert "ring" in found["Baselines the papers lack"]
    assert "chunks of 8,192" in found["Divergence over steps"]
    assert "| 4 |" in found["How many key channels are kept in FP16"]
    assert "75.0 ± 2.0" in found["Answers after thousands of updates"]
    assert "93.2 %" in found["Agreement of two halves of the prompts"]
    assert "69 %" in found["Where the error of INT8 sits"]
    assert "Rank correlation" in found["Where the error of INT8 sits"]
    assert "| greedy |" in found["Greedy trajectories"]
    for text in found.values():
        widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
        assert "nan" not in text.lower()
        assert "None" not in text
        assert widths


def test_missing_seeds_are_said_wherever_seeds_are_counted(result: dict[str, Any]) -> None:
    cut = result | {"unfinished": ["seed-2", "seed-3", "greedy"]}
    assert "from 2 of 4 seeds" in tables.formats(cut)
    assert "over 2 of 4 seeds" in tables.agreement(cut)
    text = findings.precision({"tiny": cut | {"validation": with_errors_only(cut)}})
    assert "2 of 4 seeds. Seed 2, seed 3 and the greedy row are missing" in text
    assert tables.unfinished(result) == ""


def with_errors_only(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows with one more, as if channels had also been chosen by their local error."""
    damp = next(row for row in result["validation"] if row["format"] == "damp")
    return [*result["validation"], damp | {"format": "damp-error-only"}]


def test_sentences_hold_the_numbers_of_the_recording(result: dict[str, Any]) -> None:
    named = {"tiny": result | {"validation": with_errors_only(result)}}
    rows = tables.by_format(result)
    text = findings.precision(named)
    assert "local error: 1.00 (seeds 1.00 to 1.00)" in text
    assert f"random channels {findings.times(result, 'damp-random', 'damp')}" in text
    assert "2 seeds." in text
    assert "nothing is claimed for large models" in text
    assert f"{rows['nvfp4']['steps']['state_error'][0]:.2g} after 1" in text
    assert findings.precision({"tiny": result}) == ""  # needs the selectors
    assert (findings.steps(named) == "") == (rows["int8-step"]["steps"]["slope"] is None)
    lost = findings.answers(named)
    assert "in no format" in lost  # equal rows, no standard error of the difference


def test_older_recordings_give_what_they_have() -> None:
    row = {
        "format": "fp16",
        "kl": 1e-6,
        "kl_error": 1e-7,
        "top1": 1.0,
        "state_error": 0.01,
        "perplexity_ratio": 1.0,
        "bits_per_value": 16,
        "bits_per_value_with_ring": 16,
    }
    old = {
        "validation": [row],
        "validation_sequences": 12,
        "validation_positions": 4095,
        "seed": 0,
        "objective": {},
        "skipped": {},
        "key_order_gap": {},
        "k_hi": 16,
        "model": {"kind": "gdn"},
    }
    found = {title: table(old) for title, table in tables.TABLES}
    assert [title for title, text in found.items() if text] == ["Storage formats of the live state"]
    for sentence in (findings.precision, findings.selectors, findings.steps, findings.answers):
        assert sentence({"old": old}) == ""


def test_pictures_have_their_numbers_beside_them(result: dict[str, Any], tmp_path: Path) -> None:
    names = calibration_figures(result, "tiny", tmp_path)
    assert names == ("state_magnitude", "channel_error", "divergence_bits", "error_steps")
    for name in names:
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    heat = rows_of(tmp_path / "state_magnitude.csv")
    assert len(heat) == 8 * 12
    shares = rows_of(tmp_path / "channel_error.csv")
    for values in ("as they are", "scaled and reordered"):
        mine = [float(row["share_of_head_sorted"]) for row in shares if row["values"] == values]
        assert sum(mine) == pytest.approx(1.0, abs=0.01)
        assert mine == sorted(mine, reverse=True)
    assert calibration_figures({"validation": []}, "tiny", tmp_path) == ()


def test_a_state_that_diverged_does_not_ruin_the_axis(
    result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    rows = [dict(row) for row in result["validation"]]
    nvfp4 = next(row for row in rows if row["format"] == "nvfp4")
    errors = [*nvfp4["steps"]["state_error"][:-1], 1.2e10]
    nvfp4["steps"] = nvfp4["steps"] | {"state_error": errors}
    assert steps_figure(result | {"validation": rows}, "tiny", tmp_path)
    right = drawn[0].axes[1]
    assert right.get_ylim()[1] < 100
    assert [text.get_text() for text in right.texts] == ["nvfp4 goes on to 1e+10"]
    last = [row for row in rows_of(tmp_path / "error_steps.csv") if row["format"] == "nvfp4"][-1]
    assert float(last["state_error"]) == 1.2e10


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_the_late_slope_leaves_the_first_steps_out() -> None:
    bins = [(1, 1), *((1 + 2**n, 2 ** (n + 1)) for n in range(12))]
    middle = [(first * last) ** 0.5 for first, last in bins]
    kl = [1e-6 * (x if x < 128 else 128**0.5 * x**0.5) for x in middle]
    steps = {"kl": kl, "slope": 0.8, "slope_low": 0.8, "slope_high": 0.8}
    rows = [{"format": "damp", "steps": steps}]
    found = {"validation": rows, "step_bins": bins, "validation_sequences": 3}
    assert tables.late_slope(found, "damp") == "0.50"
    assert tables.slope(found, "damp") == "0.80 (no spread)"
    assert tables.slope(found, "absent") == tables.late_slope(found, "absent") == ""
    alone = steps | {"slope_low": None, "slope_high": None}
    found = {"validation": [rows[0] | {"steps": alone}], "validation_sequences": 1}
    assert tables.slope(found, "damp") == "0.80 (one sequence)"
