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
    "null": "null",
    "no result": '{"ok": false, "result": null}',
    "a result that is a list": '{"result": []}',
}
PYTHON = ("object", "subscriptable", "iterable", "indices", "Errno", "codec", "recursion", "sys.")
"""What Python says of a wrong value, which is no help to whoever gave the file."""
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
    error = next(line for line in done.output.splitlines() if line.startswith("error: "))
    assert "given.json" in error
    assert not any(word in error.replace("an object is expected", "") for word in PYTHON), error
    assert "Traceback" not in done.output


@pytest.mark.parametrize("style", ["sharegpt", "messages", "mooncake", "wildchat-shape"])
def test_traces_of_another_form_are_one_line(file: Path, style: str) -> None:
    with pytest.raises(SourceError, match=r"given\.json") as failed:
        trace_of(style, file, 3)
    error = failed.value.message.replace("an object is expected", "")
    assert not any(word in error for word in PYTHON), error


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


MARK = "\ufeff"
MESSAGES = {
    "messages": [
        {"role": "user", "content": "ask\u2028on"},
        {"role": "assistant", "content": "said"},
    ]
}
LONG = [{"role": "user", "content": "x" * 1500}, {"role": "assistant", "content": "said"}]
REQUEST = {"timestamp": 0, "input_length": 9, "output_length": 2, "hash_ids": [1]}


@pytest.mark.parametrize(
    ("style", "content"),
    [
        ("sharegpt", json.dumps([MESSAGES], ensure_ascii=False)),
        ("messages", f"{json.dumps(MESSAGES, ensure_ascii=False)}\r\n\n"),
        ("wildchat-shape", json.dumps({"conversation": LONG * 4})),
        ("mooncake", f"{json.dumps(REQUEST)}\n"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mark", ["", MARK], ids=["plain", "byte order mark"])
def test_traces_may_start_with_a_byte_order_mark_and_hold_any_line_separator(
    style: str, content: str, mark: str, tmp_path: Path
) -> None:
    """U+2028 stands inside JSON strings as it is; only a line feed ends a line."""
    file = tmp_path / "given.json"
    file.write_text(mark + content, encoding="utf-8", newline="")
    assert trace_of(style, file, 3).size == 1


def test_a_wrong_line_of_a_trace_is_named(tmp_path: Path) -> None:
    file = tmp_path / "given.json"
    good = json.dumps(REQUEST)
    for lines, style, where in (
        ([good, "", "{"], "mooncake", "line 3: not JSON"),
        ([good, '{"input_length": 9}'], "mooncake", "line 2: no 'hash_ids'"),
        ([good, "7"], "mooncake", "line 2: a request is a number, an object is expected"),
        ([json.dumps(MESSAGES), "nonsense"], "messages", "line 2: not JSON"),
        ([json.dumps(MESSAGES), "{}"], "messages", "line 2: a row without a list of messages"),
        ([json.dumps([MESSAGES, {"messages": [3]}])], "sharegpt", "conversation 2: a message is a number"),
    ):  # fmt: skip
        file.write_text("\n".join(lines))
        with pytest.raises(SourceError, match=rf"given\.json.*: {where}"):
            trace_of(style, file, 3)


def test_a_cost_model_may_start_with_a_byte_order_mark_and_says_what_is_assumed(
    tmp_path: Path,
) -> None:
    file = tmp_path / "cost.json"
    document = CostModel.default().to_json()
    file.write_text(MARK + json.dumps(document), encoding="utf-8")
    assert CostModel.read(file).to_json() == document
    file.write_text(json.dumps({name: document[name] for name in ("prefill", "decode", "copy")}))
    assert CostModel.read(file).source == "cost.json; assumed: pack, load, exchange, check, keys"
