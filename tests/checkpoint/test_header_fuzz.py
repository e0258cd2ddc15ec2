"""Two hundred thousand damaged headers, the same ones every time."""

import json
from pathlib import Path

import pytest

from tests.checkpoint.header_fuzz import KINDS, SEED, VALID, parse, run

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "benchmarks" / "header-fuzz.json"


def test_every_starting_file_is_valid() -> None:
    for data in VALID:
        parse(data)


def test_damaged_headers_are_refused_or_understood_as_the_library_does() -> None:
    """Any exception but SourceError fails; so does a file that one of the two accepts without a reason."""
    tally = run(200_000)
    assert tally.crashed == []
    assert tally.laxer == []
    assert tally.unexplained == []
    assert tally.cases == tally.accepted + sum(tally.refused.values()) == 200_000
    assert set(tally.refused) == set(KINDS)
    assert tally.accepted > 10_000


@pytest.mark.skipif(not RECORDED.exists(), reason="the long run is not recorded in this tree")
def test_the_recorded_run_tried_a_million_cases_and_found_nothing() -> None:
    found = json.loads(RECORDED.read_text())
    assert found["cases"] >= 1_000_000
    assert found["seed"] == SEED
    assert found["other_exceptions"] == 0
    assert found["accepted_here_refused_by_safetensors"] == 0
    assert found["unexplained"] == 0
    assert set(found["refused"]) == set(KINDS)
