"""`bench decode`: the check before the time, and what a row says."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hybridstate import api
from hybridstate.bench import decode as module
from hybridstate.bench import decode_check
from hybridstate.bench.decode import Options, run_decode
from hybridstate.cli.main import app
from hybridstate.errors import NumericError, UsageError
from hybridstate.kernels import ring_reference
from hybridstate.kernels.ring_reference import Ring
from hybridstate.runtime.engine import DecodeEngine, DecodeRun
from hybridstate.trajectories.model import LoadedModel, load_model
from hybridstate.trajectories.prompts import heldout_text
from tests.plan.calibrated import write_calibration

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
        assert row["pool_bytes_between_steps"] == row["pool_bytes"]
        assert row["steps_with_pool_checked"] == module.TIMED_CHECK_TOKENS + 1 + 3
    assert [s["batch"] for s in result["speedups"]] == [1, 1, 3, 3]


def test_every_step_updates_each_layer_once(loaded: LoadedModel) -> None:
    result = run_decode(loaded, OPTIONS, heldout_text()).to_json()
    for row in result["rows"]:
        assert row["update_calls_per_layer_per_step"] == 1
        assert row["kernel_launches_per_layer_per_step"] == 0  # the reference is no kernel
        assert row["torch_gathers_per_layer_per_step"] == 0


def test_pool_is_checked_after_every_step(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {"step": 0, "check_bytes": 0}

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(DecodeRun, name)

        def call(*operands: Any) -> Any:
            calls[name] += 1
            return real(*operands)

        return call

    for name in calls:
        monkeypatch.setattr(DecodeRun, name, counted(name))
    run_decode(loaded, OPTIONS, heldout_text())
    starts = 3 + 2 * 3  # one run per check and per row
    assert calls["check_bytes"] == calls["step"] + starts


def test_wrong_step_refuses_to_report(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    real = DecodeEngine.advance

    def damaged(self: DecodeEngine, ordinal: int, *operands: Any) -> tuple[torch.Tensor, Any]:
        o, handle = real(self, ordinal, *operands)
        return o * 1.01, handle

    monkeypatch.setattr(DecodeEngine, "advance", damaged)
    with pytest.raises(NumericError, match=r"fp32 on reference \(eager\), batch 2: logits are"):
        run_decode(loaded, OPTIONS, heldout_text())


def captured_as(replayed: Callable[[DecodeRun, torch.Tensor], torch.Tensor]) -> Any:
    """A stand-in for graph capture whose replay returns what `replayed` makes of the logits."""

    def capture(run: DecodeRun) -> None:
        logits = torch.empty(len(run.slots), run.engine.loaded.model.config.vocab_size)

        def replay() -> None:
            logits.copy_(replayed(run, run._forward()))

        run.graph, run._logits, run.mode = replay, logits, "cuda-graph"

    return capture


def last_sequence_off_at(batch: int) -> Callable[[DecodeRun, torch.Tensor], torch.Tensor]:
    def replayed(run: DecodeRun, logits: torch.Tensor) -> torch.Tensor:
        factor = torch.ones(len(logits), 1)
        factor[-1] = 1.02 if len(logits) == batch else 1.0
        return logits * factor

    return replayed


def test_captured_step_that_is_wrong_at_one_batch_is_timed_eagerly_there(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs were checked at batch 2, where this one is right, and its first rows are always right."""
    monkeypatch.setattr(DecodeRun, "capture", captured_as(last_sequence_off_at(3)))
    result = run_decode(loaded, OPTIONS, heldout_text()).to_json()
    assert {check["mode"] for check in result["checks"]} == {"cuda-graph"}
    for row in result["rows"]:
        assert row["mode"] == ("eager" if row["batch"] == 3 else "cuda-graph")
        assert row["check"]["sequences"] == row["batch"]
        if row["batch"] == 3:
            assert "captured steps are 2.0e-02 from the simulated run" in row["eager_because"]
        else:
            assert row["eager_because"] is None


def test_captured_step_that_is_wrong_in_the_check_is_never_timed(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DecodeRun, "capture", captured_as(last_sequence_off_at(2)))
    result = run_decode(loaded, OPTIONS, heldout_text()).to_json()
    assert {entry["mode"] for entry in (*result["checks"], *result["rows"])} == {"eager"}
    assert all("captured steps are" in row["eager_because"] for row in result["rows"])


def test_eager_step_that_is_wrong_at_a_timed_batch_refuses_to_report(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = DecodeEngine.advance

    def damaged(self: DecodeEngine, ordinal: int, *operands: Any) -> tuple[torch.Tensor, Any]:
        o, handle = real(self, ordinal, *operands)
        return (o * 1.01 if len(o) == 3 else o), handle

    monkeypatch.setattr(DecodeEngine, "advance", damaged)
    with pytest.raises(NumericError, match="batch 3: logits are"):
        run_decode(loaded, OPTIONS, heldout_text())


def test_errors_name_the_worst_sequence() -> None:
    expected = torch.ones(2, 100, 5)
    found = expected.clone()
    found[1, 99] = 1.5
    error, row_error = decode_check.errors(found, expected)
    assert row_error == pytest.approx((0.25 / 2) ** 0.5)
    assert error == pytest.approx(row_error / 10)
    found[0, 0, 0] = float("nan")
    assert not decode_check.errors(found, expected)[0] <= 1


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


def test_more_tokens_than_positions_are_refused(loaded: LoadedModel) -> None:
    with pytest.raises(UsageError, match="--input-tokens and --output-tokens: 10,"):
        run_decode(loaded, replace(OPTIONS, output_tokens=10**10), heldout_text())


def test_intervals_are_checked_timed_and_counted(loaded: LoadedModel) -> None:
    options = Options(
        ("damp",), (1, 3), 24, output_tokens=9, warmup=1, k_hi=4, requantise_every=(1, 4, 16)
    )
    with pytest.raises(UsageError, match="9 output tokens are fewer than the 16 updates"):
        run_decode(loaded, options, heldout_text())
    options = replace(options, requantise_every=(1, 4))
    result = run_decode(loaded, options, heldout_text()).to_json()
    assert json.loads(json.dumps(result, allow_nan=False))
    assert [(c["state"], c["tokens"]) for c in result["checks"]] == [
        ("damp", 2 * 16),
        ("damp-every-4", 2 * 16),
    ]
    every_step, ringed = (c["logit_distance_to_fp32"] for c in result["checks"])
    assert ringed < every_step
    assert [(r["batch"], r["state"]) for r in result["rows"]] == [
        (batch, state) for batch in (1, 3) for state in ("damp", "damp-every-4")
    ]
    for row in result["rows"]:
        every = row["requantise_every"]
        pool = DecodeEngine(
            loaded, state="damp", slots=row["batch"], k_hi=4, requantise_every=every
        ).pool
        assert len(row["tpot_s"]["samples"]) == 9 // every
        assert row["check"]["tokens"] == row["batch"] * (4 if every == 1 else every + 2)
        assert row["pool_bytes_between_steps"] == row["batch"] * pool.slot_bytes
        assert row["state_bytes_moved_per_step"] == row["batch"] * pool.step_bytes
        assert row["ring_bytes_per_request"] == pool.ring_bytes
    for wrong in (0, 17):
        with pytest.raises(UsageError, match=f"--requantise-every {wrong}: 1 to 16"):
            replace(options, requantise_every=(wrong,)).check()


def test_a_ring_that_forgets_is_refused(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries that are lost, writes that come late, and rings that begin full of another request's inputs."""
    options = replace(OPTIONS, states=("damp",), batches=(1,), output_tokens=4)
    real_append, real_start = ring_reference._append, Ring.start

    def lost(ring: Ring, rows: torch.Tensor, full: torch.Tensor, entry: Any) -> None:
        real_append(ring, rows, full, (entry[0], entry[1] * 0, entry[2]))

    def late(ring: Ring, slots: torch.Tensor, *, stagger: bool = True) -> None:
        real_start(ring, slots, stagger=True)

    for name, owner, damaged in (("_append", ring_reference, lost), ("start", Ring, late)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, damaged)
            with pytest.raises(NumericError, match="damp-every-4 on reference"):
                run_decode(loaded, replace(options, requantise_every=(4,)), heldout_text())


def test_the_interval_of_a_plan_is_decoded(tmp_path: Path, tiny_gdn: Path) -> None:
    calibration = write_calibration(tmp_path / "calibration", tiny_gdn, k_hi=4)
    out = tmp_path / "exported"
    api.export_plan(tiny_gdn, out=out, calibration=calibration, requantise_every=4)
    options = {"batches": (1,), "input_tokens": 12, "output_tokens": 5, "device": "cpu"}
    for model, plan in ((tiny_gdn, out), (out, None)):
        result = api.bench_decode(
            model, plan=plan, states=("damp",), requantise_every=(1,), **options
        ).to_json()
        assert [row["state"] for row in result["rows"]] == ["damp-every-4", "damp"]
        gathers = [row["torch_gathers_per_layer_per_step"] for row in result["rows"]]
        assert gathers == ([2, 0] if plan else [0, 0])


def test_the_option_says_what_its_rows_are(tiny_gdn: Path) -> None:
    options = ["--batch", "1", "--input-tokens", "12", "--output-tokens", "5", "--device", "cpu"]
    found = CliRunner().invoke(
        app, ["bench", "decode", str(tiny_gdn), "--requantise-every", "4", *options]
    )
    assert found.exit_code == 0, found.output
    assert "damp-every-4" in found.output
    assert "times are means over L steps" in " ".join(found.output.split())
    refused = CliRunner().invoke(
        app, ["bench", "decode", str(tiny_gdn), "--requantise-every", "20", *options]
    )
    assert refused.exit_code == 2
    assert "--requantise-every 20: 1 to 16" in " ".join(refused.output.split())
