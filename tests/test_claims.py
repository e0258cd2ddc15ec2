"""The table of published and recorded values."""

import re
from pathlib import Path

import calibration_tables
import claims
import pytest
import recordings

ROOT = Path(__file__).parents[1]


def anchors(page: str) -> set[str]:
    """Headings of a page as their links are written."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub("[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_claim_has_both_values_and_a_place_to_read_on() -> None:
    for name, published, here, link in (*claims.DASC, *claims.DAMP):
        assert published(), name
        assert here(), name
        page, anchor = link.split("#")
        assert anchor in anchors(page or "results.md"), link


def test_values_are_those_of_the_recordings() -> None:
    table = claims.claims()
    rows = dict(re.findall(r"^\| \[(.+?)\]\(.+?\) \| (.+) \|$", table, re.M))
    assert len(rows) == len(claims.DASC) + len(claims.DAMP)
    (served,) = (
        document["result"]
        for path, document in recordings.recorded("serve-*.json")
        if path.name == "serve-tiny-kda-think.json"
    )
    (point,) = (
        p
        for p in served["points"]
        if p["arm"] == "nr-64" and p["ratio"] == served["operating_point"]["ratio"]
    )
    first = next(row for name, row in rows.items() if name.startswith("mean time to the first"))
    assert f"`tiny-kda` {100 * point['against_dense']['ttft']:+.1f} % (`nr-64`)" in first
    assert first.startswith(
        "-25.6 % / -42 % / -16.1 % at 8 ranks with hardly any queue; Kimi-K3 in a queue -15.7"
    )
    (whole,) = (row for name, row in rows.items() if name.startswith("time per output token"))
    assert whole.startswith("Kimi-Linear -14.5 %, Qwen3.6-35B -19 % | ")


def test_nothing_is_said_without_recordings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(recordings, "BENCHMARKS", tmp_path)
    assert claims.claims() == ""


def test_answers_are_those_of_the_formats_that_the_paper_names() -> None:
    """DAMP's SR is scaling and reordering (its Table 1), no rounding at random, and its DAMP has it."""
    rows = [line for line in claims.claims().splitlines() if "AIME" in line]
    wanted = {
        "answers with FP32 states, DAMP, plain INT8": "85.46, 83.82, 18.48 %",
        "the same, INT8 with values scaled and reordered": "63.98 %",
    }
    for line, (claim, published) in zip(rows, wanted.items(), strict=True):
        assert line.startswith(f"| [{claim}](#storage-formats-of-the-live-state) |")
        assert published in line
    assert set(claims.ANSWERED) < set(calibration_tables.PUBLISHED)
    assert "stochastic" not in "".join(calibration_tables.PUBLISHED)
