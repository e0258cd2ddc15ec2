"""`bench decode`: the check before the time, and what a row says."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridstate.bench import decode as module
from hybridstate.bench.decode import Options, run_decode
from hybridstate.errors import NumericError, UsageError
from hybridstate.runtime.engine import DecodeEngine
from hybridstate.trajectories.model import LoadedModel, load_model
from hybridstate.trajectories.prompts import heldout_text

OPTIONS = Options(
    ("fp32", "bf16", "damp"), (1, 3), input_tokens=24, output_tokens=3, warmup=1, k_hi=4
)


@pytest.fixture(scope="module", params=["tiny_gdn", "tiny_kda"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    folder: Path = request.getfixturevalue(request.param)
    return load_model(str(folder))


def test_every_format_is_checked_and_timed_at_every_batch(loaded: LoadedModel) -> None:
    stages: list[tuple[str, int, int]] = []
    result = run_decode(
        loaded, OPTIONS, heldout_text(), progress=lambda *step: stages.append(step)
    ).to_json()
    assert json.loads(json.dumps(result, allow_nan=False))
    assert [(r["batch"], r["state"]) for r in result["rows"]] == [
        (batch, state) for batch in (1, 3) for state in OPTIONS.states
    ]
    assert all(len(r["tpot_s"]["samples"]) == 3 for r in result["rows"])
    assert {r["backend"] for r in result["rows"]} == {"reference"}
    assert {r["mode"] for r in result["rows"]} == {"eager"}
    for check in result["checks"]:
        assert check["logit_error"] <= check["logit_limit"]
        assert check["state"] == "fp32" or check["logit_distance_to_fp32"] > 0
    assert stages[-1] == ("decoding", 6, 6)


def test_bytes_are_those_of_the_pool(loaded: LoadedModel) -> None:
    result = run_decode(loaded, OPTIONS, heldout_text()).to_json()
    for row in result["rows"]:
        pool = DecodeEngine(loaded, state=row["state"], slots=row["batch"], k_hi=4).pool
        assert row["state_bytes_per_request"] == pool.slot_bytes
        assert row["pool_bytes"] == row["batch"] * pool.slot_bytes
        assert row["state_bytes_moved_per_step"] == 2 * row["batch"] * pool.temporal_bytes
    assert [s["batch"] for s in result["speedups"]] == [1, 1, 3, 3]


def test_wrong_step_refuses_to_report(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    real = DecodeEngine.advance

    def damaged(self: DecodeEngine, ordinal: int, *operands: Any) -> tuple[torch.Tensor, Any]:
        o, handle = real(self, ordinal, *operands)
        return o * 1.01, handle

    monkeypatch.setattr(DecodeEngine, "advance", damaged)
    with pytest.raises(NumericError, match=r"fp32 on reference \(eager\): logits are"):
        run_decode(loaded, OPTIONS, heldout_text())


def test_limit_separates_rounding_from_the_wrong_format(loaded: LoadedModel) -> None:
    """Were the packed state left in FP32, its check would fail."""
    result = run_decode(loaded, OPTIONS, heldout_text()).to_json()
    damp = next(c for c in result["checks"] if c["state"] == "damp")
    assert damp["logit_error"] < 0.5 * damp["logit_distance_to_fp32"]


@pytest.mark.parametrize(
    ("states", "message"),
    [(("fp8",), "--state fp8"), (("fp32", "fp32"), "given twice"), ((), "not at all")],
)
def test_bad_formats_are_refused(states: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Options(states, (1,)).check()


def test_batch_sizes_follow_the_device() -> None:
    assert Options().on("cpu").batches == module.CPU_BATCHES
    assert Options().on("cuda").batches == module.GPU_BATCHES
    assert Options().given(None, [2]).on("cuda").batches == (2,)


def test_text_too_short_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(UsageError, match="the held-out prose has"):
        run_decode(loaded, OPTIONS, "short")
