"""Files of other forms, and options of other sizes, end serving benches with one line before anything is allocated."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hybridstate.bench.cost_model import CostModel
from hybridstate.bench.serve import check_fits
from hybridstate.bench.serving_arms import Arm
from hybridstate.bench.serving_setup import make_options, trace_of, with_exchange
from hybridstate.cli.main import app
from hybridstate.errors import SourceError, UsageError
from hybridstate.plan.capacity import State

POINT = {"live_bytes": 1e999, "operations": {}, "mean_ttft_s": 1.0, "token_hit_rate": 0.5}
FILES = {
    "deep": "[" * 100_000,
    "a long number": '{"points": [' + "9" * 5000 + "]}",
    "text": "no JSON",
    "a list": "[1, 2]",
    "infinite points": json.dumps({"points": [POINT, POINT]}),
    "no ranks": json.dumps({"protocol": {"tp": 0, "backend": "gloo"}, "exchange": [{}]}),
    "infinite ranks": json.dumps({"protocol": {"tp": 1e999, "backend": "gloo"}, "exchange": []}),
    "a huge coefficient": json.dumps({"pack": {"call": 10**400, "byte": 1}}),
    "latin": b"\xff\xfe",
}
SIMULATE = ["bench", "simulate", "--conversations", "3", "--clients", "2", "--seeds", "1"]
SIMULATE += ["--limit", "2", "--ratio", "1", "--no-control"]


@pytest.fixture(params=FILES)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path, content = tmp_path / "given.json", FILES[request.param]
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("option", ["--fit", "--cost", "--exchange"])
def test_recordings_of_another_form_are_one_line(file: Path, option: str) -> None:
    done = CliRunner().invoke(app, [*SIMULATE, option, str(file)])
    assert done.exit_code == 3, done.output
    assert "given.json" in done.output or "cost model" in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize("style", ["sharegpt", "messages", "mooncake", "wildchat-shape"])
def test_traces_of_another_form_are_one_line(file: Path, style: str) -> None:
    with pytest.raises(SourceError, match=r"given\.json"):
        trace_of(style, file, 3)


@pytest.mark.parametrize("read", [lambda p: with_exchange(CostModel.default(), p), CostModel.read])
def test_missing_files_are_one_line(read: Callable[[Path], Any], tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"cannot read .*gone\.json"):
        read(tmp_path / "gone.json")


def test_earlier_runs_of_another_form_are_one_line(file: Path, tiny_kda: Path) -> None:
    arguments = ["bench", "serve", str(tiny_kda), "--device", "cpu", "--scale", "0.004"]
    arguments += ["--conversations", "2", "--clients", "1", "--limit", "1", "--seeds", "1"]
    done = CliRunner().invoke(app, [*arguments, "--resume", str(file)])
    assert done.exit_code == 3, done.output
    assert "cannot read the points of given.json" in done.output


@pytest.mark.parametrize(
    "options", [{"ratios": (1e-9,)}, {"ratios": (1.0, 1e-4)}, {"clients": 10**9}]
)
def test_more_slots_than_states_could_ever_fill_are_refused(options: dict[str, Any]) -> None:
    given: dict[str, Any] = {
        "arms": None, "w_max": None, "ratios": None, "limits": None, "clients": 256, "think": 0.0,
        "seeds": 1, "policy": "lru", "every": 0, "budget_scope": "state",
    }  # fmt: skip
    with pytest.raises(UsageError, match="dense slots, at most 1,000,000"):
        make_options(**{**given, **options})


def test_slots_that_the_device_cannot_hold_are_refused() -> None:
    state = State("dense", None, "fp32", 2**40, 0)
    check_fits(Arm("dense", State("dense", None, "fp32", 2**20, 0)), 8, 0, torch.device("cpu"))
    with pytest.raises(UsageError, match=r"nr-16: slots of [\d,]+\.0 GiB, the cpu has"):
        check_fits(Arm("nr-16", state, state), 1000, 1000, torch.device("cpu"))
