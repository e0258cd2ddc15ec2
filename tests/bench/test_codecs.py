"""`bench codecs`: exact bytes, every transfer checked first, a wrong one refused."""

import json
from typing import Any

import pytest

from hybridstate.bench import codec_work
from hybridstate.bench.codec_work import KIMI_LINEAR, TINY
from hybridstate.bench.codecs import run_codecs
from hybridstate.errors import NumericError, UsageError


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    found: dict[str, Any] = run_codecs(slots=2, samples=2, warmup=1).to_json()
    return found


def test_every_timed_transfer_was_compared(result: dict[str, Any]) -> None:
    names = [row["transfer"] for row in result["rows"]]
    assert names == [check["transfer"] for check in result["checks"]]
    assert all(check["compared_bytes"] > 0 == check["different"] for check in result["checks"])
    assert len(set(names)) == len(names)
    assert {"pack natural", "gather int8, ragged", "copy back omitted units"} <= set(names)
    assert "synthetic" in result["protocol"]["inputs"]
    assert "says nothing" in result["protocol"]["backend_note"]
    json.dumps(result, allow_nan=False)


def test_bytes_are_those_read_and_written(result: dict[str, Any]) -> None:
    nbytes = {row["transfer"]: row["bytes"] for row in result["rows"]}
    rows = TINY.layers * TINY.heads * TINY.key_dim
    row = 4 * TINY.value_dim
    assert (
        nbytes["gather fp32, all units"] == 2 * (rows * 2 * row + 16) + 8 * rows + 8 * TINY.layers
    )
    whole = nbytes["gather fp32, all units"] - nbytes["gather int8, all units"]
    assert whole == 2 * rows * (row - (TINY.value_dim + 4))
    packed = TINY.layers * TINY.heads * (16 * 2 * TINY.value_dim + 16 * (TINY.value_dim + 8))
    assert nbytes["pack natural"] == 2 * (TINY.dense_bytes + packed + 16) + 16 * TINY.layers
    assert KIMI_LINEAR.dense_bytes == 41_943_040


def test_a_wrong_transfer_ends_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    right = codec_work.copy_slots

    def forgets(*arguments: Any, backend: str) -> None:
        if backend == "reference":
            right(*arguments, backend="reference")

    monkeypatch.setattr(codec_work, "copy_slots", forgets)
    with pytest.raises(NumericError, match=r"copy packed slots: .* bytes differ"):
        run_codecs(slots=2, samples=1)


def test_unknown_sizes_and_counts_are_refused() -> None:
    with pytest.raises(UsageError, match="no sizes for 'huge'"):
        run_codecs(models=["huge"])
    with pytest.raises(UsageError, match="positive"):
        run_codecs(slots=0)
