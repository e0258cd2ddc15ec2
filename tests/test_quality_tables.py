"""Tables and sentences of recorded `bench quality` are what the raw replays say."""

import copy
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import quality_findings
import quality_tables
import recordings

from hybridstate.figures import paired

ROOT = Path(__file__).parents[1]
PROMPT = ("own", "prompt", 4096)


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    found = recordings.runs(recordings.QUALITY, merge=quality_tables.merged)
    return {run.name: run.result for run in found}


def raw(model: str, boundary: str, arm: str) -> list[list[float]]:
    """Per own task the score of each question, averaged over replays, straight from the file."""
    document = json.loads((ROOT / "benchmarks" / f"quality-{model}.json").read_text())
    tasks = []
    for block in document["result"]["blocks"]:
        if block["boundary"] == boundary:
            replays = [line.split() for line in block["arms"][arm]["samples"]]
            assert len(replays) == block["replays"]
            tasks.append(
                [statistics.fmean(map(float, each)) for each in zip(*replays, strict=True)]
            )
    return tasks


def table(text: str) -> dict[str, list[str]]:
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in rows}


@pytest.mark.parametrize(
    ("model", "boundary", "arm"),
    [
        ("tiny-kda", "prompt", "nr-512"),
        ("tiny-kda", "question", "wr-128"),
        ("tiny-gdn", "prompt", "nr-64"),
    ],
)
def test_a_cell_is_the_score_and_the_paired_difference(
    results: dict[str, Any], model: str, boundary: str, arm: str
) -> None:
    scores, dense = raw(model, boundary, arm), raw(model, boundary, "dense")
    apart = [
        [x - y for x, y in zip(*pair, strict=True)] for pair in zip(scores, dense, strict=True)
    ]
    mean = statistics.fmean(map(statistics.fmean, apart))
    error = sum(statistics.variance(d) / len(d) for d in apart) ** 0.5 / len(apart)
    score = statistics.fmean(map(statistics.fmean, scores))
    cell = f"{100 * score:.1f} ({100 * mean:+.1f} ± {100 * error:.1f})"
    assert table(quality_tables.quality(results[model]))[arm][1 + (boundary == "question")] == cell


def test_random_masks_are_a_mean_over_five(results: dict[str, Any]) -> None:
    model = "tiny-kda"
    names = [f"random-64-{seed}" for seed in (1234, 2027, 3407, 4519, 5683)]
    by_mask = [statistics.fmean(map(statistics.fmean, raw(model, "prompt", n))) for n in names]
    dense = statistics.fmean(map(statistics.fmean, raw(model, "prompt", "dense")))
    mean, spread = statistics.fmean(by_mask), statistics.stdev(by_mask)
    cell = f"{100 * mean:.1f} ({100 * (mean - dense):+.1f}, SD {100 * spread:.1f})"
    assert table(quality_tables.quality(results[model]))["random-64"][1] == cell
    score = statistics.fmean(map(statistics.fmean, raw(model, "prompt", "nr-64")))
    row = table(quality_tables.against_masks(results[model]))["64, own, to the prompt"]
    assert row[0].startswith(f"{100 * (score - mean):+.1f} ± ")
    assert row[2] == f"{sum(m >= score for m in by_mask)} of 5"


def test_the_recorded_runs_are_whole(results: dict[str, Any]) -> None:
    assert set(results) == {"tiny-gdn", "tiny-kda"}
    for result in results.values():
        assert result["complete"]
        assert not result["refused"]
        assert not result["left_out"]
        assert set(result["loaded"].values()) == {1.0}
        assert {group[0] for group in paired.groups(result)} == {"own", "ruler"}
        assert paired.groups(result)[0] == PROMPT
        window = result["whole_window"]
        assert window["prefix_tokens"] <= window["window"]
        assert window["state_error"] <= window["state_error_limit"]
        assert window["same_reply_as_recompute"] == 1.0
    rows = table(quality_tables.windows(results))
    assert [row[0] for name, row in rows.items() if "wr-512" in name] == ["0", "0"]


def test_tasks_without_answers_are_one_line(results: dict[str, Any]) -> None:
    text = quality_tables.by_task(results["tiny-gdn"])
    assert text.splitlines()[0] == "| arm | recall | registers | latest | counts | tracking |"
    (line,) = [x for x in text.splitlines() if x.startswith("Nothing answered")]
    assert line.count(",") == 12
    assert "niah_single_1" in line


def test_findings_follow_the_recordings(results: dict[str, Any]) -> None:
    """Other numbers make other sentences: nothing about the models is written down."""
    said = quality_findings.hits(results)
    assert "The mean of the tasks is within that here: at most 0.5" in said
    assert "lose more" in said
    other = copy.deepcopy(results)
    for block in other["tiny-gdn"]["blocks"]:
        if block["suite"] == "own":
            for line, row in enumerate(block["arms"]["nr-16"]["samples"]):
                block["arms"]["nr-16"]["samples"][line] = " ".join("0" for _ in row.split())
    changed = quality_findings.hits(other)
    assert "The mean of the tasks is more here: at most 92.0" in changed
    assert "do not always lose more" in changed
    assert "`tiny-gdn` loses beyond noise" in changed
    formats = quality_findings.formats(results)
    assert "DAMP changes no answer" in formats
    for block in other["tiny-kda"]["blocks"]:
        block["arms"]["damp"]["samples"] = block["arms"]["int4"]["samples"]
    assert "DAMP changes the score by up to 3.5 points" in quality_findings.formats(other)
    assert quality_findings.hits({}) == quality_findings.formats({}) == ""


def test_one_question_has_no_standard_error() -> None:
    arms = {name: {"samples": ["1", "0"] if name == "a" else ["1", "1"]} for name in "ab"}
    block = {"suite": "own", "boundary": "prompt", "tokens": 8, "arms": arms}
    found = paired.difference({"blocks": [block]}, ("own", "prompt", 8), ["a"], ["b"])
    assert found == (-0.5, None)
    assert quality_tables.points(found) == "-50.0"
