"""A Hub, a proxy or a network that misbehaves: retried where that helps, else told apart in one line."""

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridstate.checkpoint import open_checkpoint
from tests.hub.conftest import Reader
from tests.hub.standin import FIRST_COMMIT, Fault, Repo, StandIn

SHARD = "model-00002-of-00003.safetensors"
SECRET = "hf_" + "q" * 34


@pytest.mark.parametrize("kind", ["429", "503", "cut"])
@pytest.mark.parametrize("at", ["/api/models", "config.json", "index.json", SHARD])
def test_what_passes_is_retried(
    hub: StandIn, read: Reader, tiny_kda_shards: Path, kind: str, at: str
) -> None:
    if kind == "cut" and at == "/api/models":
        at = "config.json"
    hub.faults.append(Fault(kind, at=at, times=2, seconds=0.01))
    found = read()
    assert found["digests"] == open_checkpoint(tiny_kda_shards).digests()
    assert found["requests"] == len(hub.log)


@pytest.mark.parametrize("kind", ["429", "500"])
def test_what_does_not_pass_ends_after_five_tries(hub: StandIn, read: Reader, kind: str) -> None:
    hub.faults.append(Fault(kind, at=SHARD))
    error = read.error()
    assert f"status {kind}, 5 times" in error["message"]
    assert error["context"]["reason"] == ("rate-limited" if kind == "429" else "unreachable")
    assert len([seen for seen in hub.log if SHARD in seen.path]) == 5


@pytest.mark.parametrize("seconds", [270, -270])
def test_a_long_wait_is_told_and_not_waited_for(hub: StandIn, read: Reader, seconds: float) -> None:
    """Asked for with Retry-After, or as what is left of the window that the Hub counts requests in."""
    hub.faults.append(Fault("429", at="/api/", seconds=seconds))
    started = time.monotonic()
    error = read.error()
    assert "asks to wait 270 s" in error["message"]
    assert time.monotonic() - started < 5
    assert len(hub.log) == 1


def test_a_connection_cut_each_time_ends(hub: StandIn, read: Reader) -> None:
    hub.faults.append(Fault("cut", at=SHARD))
    error = read.error()
    assert error["context"]["reason"] == "unreachable"
    assert SHARD in error["message"]


@pytest.mark.parametrize("at", ["/api/models", SHARD])
def test_the_repository_is_named_once(hub: StandIn, read: Reader, at: str) -> None:
    hub.faults.append(Fault("500", at=at))
    assert read.error()["message"].count("org/model") == 1


def test_a_server_that_ignores_ranges_costs_no_shard(
    hub: StandIn, read: Reader, tmp_path: Path, tiny_kda_shards: Path
) -> None:
    """The body of the whole shard is offered and not read."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny_kda_shards.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes() + bytes(64 << 20))
    hub.repos["org/model"] = Repo({FIRST_COMMIT: folder})
    hub.faults.append(Fault("ignore-range", at=SHARD))
    error = read.error()
    assert error["context"]["reason"] == "no-ranges"
    assert "ignores byte ranges" in error["message"]
    assert "which were not read" in error["message"]
    assert "hf download" in error["hint"]
    assert len([seen for seen in hub.log if SHARD in seen.path]) == 1


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no-content-range", "Content-Range 'is missing'"),
        ("other-range", "sent other bytes of"),
        ("longer", "contradicts itself about bytes"),
        ("encoded", "encoding 'gzip'"),
        ("416", "ends before the bytes that were asked for"),
        ("other-commit", "asked for commit 111111111111, the server answered with '222222222222'"),
    ],
)
def test_an_answer_that_is_not_the_range_is_refused(
    hub: StandIn, read: Reader, kind: str, message: str
) -> None:
    hub.faults.append(Fault(kind, at=SHARD))
    assert message in read.error()["message"]
    assert not list(read.cache.rglob(f"{SHARD}*"))


def test_a_file_that_changes_its_size_between_ranges_is_refused(hub: StandIn, read: Reader) -> None:
    hub.faults.append(Fault("other-size", at=SHARD, after=1))
    error = read.error()
    assert "bytes now and had" in error["message"]
    assert error["context"]["reason"] == "changed"


@pytest.mark.parametrize("size", [0, 5])
def test_a_shard_that_is_too_short(
    hub: StandIn, read: Reader, tmp_path: Path, tiny_kda_shards: Path, size: int
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny_kda_shards.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / SHARD).write_bytes(bytes(size))
    hub.repos["org/model"] = Repo({FIRST_COMMIT: folder})
    error = read.error()
    assert SHARD in error["message"]
    assert error["context"]["reason"] == "short"


def test_a_slow_answer_is_retried(hub: StandIn, read: Reader) -> None:
    hub.faults.append(Fault("late", at=SHARD, times=1, seconds=1.2))
    assert read()["ok"]


def test_a_redirect_loop_ends(hub: StandIn, read: Reader) -> None:
    hub.faults.append(Fault("loop", at=SHARD))
    assert "TooManyRedirects" in read.error()["message"]


def test_a_gated_model_names_the_page_and_the_login(hub: StandIn, read: Reader) -> None:
    hub.repos["org/model"].gated = True
    error = read.error()
    assert error["context"]["reason"] == "gated"
    assert f"{hub.endpoint}/org/model" in error["hint"]
    assert "hf auth login" in error["hint"]
    refused = read.error(environment={"HF_TOKEN": SECRET})
    assert "has no access yet" in refused["hint"]
    assert read(environment={"HF_TOKEN": "allowed"})["ok"]
    read(environment={"HF_TOKEN": None}, offline=True)


def test_a_private_model_needs_a_login(hub: StandIn, read: Reader) -> None:
    hub.repos["org/model"].private = True
    error = read.error()
    assert error["context"]["reason"] == "missing"
    assert "or it is private" in error["message"]
    assert read(environment={"HF_TOKEN": "allowed"})["ok"]
    read(environment={"HF_TOKEN": None}, offline=True)


def test_missing_repository_revision_and_file_are_told_apart(
    hub: StandIn, read: Reader, tmp_path: Path
) -> None:
    (tmp_path / "no-config").mkdir()
    hub.repos["org/no-config"] = Repo({FIRST_COMMIT: tmp_path / "no-config"})
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "config.json").write_text("{}")
    (tmp_path / "torch" / "pytorch_model.bin").write_bytes(b"")
    hub.repos["org/torch"] = Repo({FIRST_COMMIT: tmp_path / "torch"})
    reasons: dict[str, str] = {}
    messages: dict[str, str] = {}
    for model in (
        "org/nothing",
        "org/model@v9",
        f"org/model@{'9' * 40}",
        "org/no-config",
        "org/torch",
    ):
        error = read.error(model)
        reasons[model], messages[model] = error["context"]["reason"], error["message"]
        assert error["hint"]
    assert list(reasons.values()) == [
        "missing",
        "missing-revision",
        "missing-revision",
        "missing-file",
        "missing-file",
    ]
    assert "no model repository org/nothing" in messages["org/nothing"]
    assert "has no config.json" in messages["org/no-config"]
    assert "(it has pytorch_model.bin)" in messages["org/torch"]


def test_a_shard_that_the_repository_lacks(
    hub: StandIn, read: Reader, tmp_path: Path, tiny_kda_shards: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny_kda_shards.iterdir():
        if file.name != SHARD:
            (folder / file.name).write_bytes(file.read_bytes())
    hub.repos["org/model"] = Repo({FIRST_COMMIT: folder})
    error = read.error()
    assert f"shard {SHARD} is missing from org/model@" in error["message"]
    assert not [seen for seen in hub.log if seen.range]


def test_a_file_that_vanishes_after_it_was_listed(hub: StandIn, read: Reader) -> None:
    hub.faults.append(Fault("404", at=SHARD))
    assert read.error()["context"]["reason"] in ("missing", "missing-file")


def test_a_token_that_is_not_accepted(hub: StandIn, read: Reader) -> None:
    hub.faults.append(Fault("bad-token"))
    error = read.error(environment={"HF_TOKEN": SECRET})
    read(environment={"HF_TOKEN": None}, offline=True)
    assert error["context"]["reason"] == "login"
    assert "hf auth login" in error["hint"]


def test_an_answer_that_is_not_the_hubs(hub: StandIn, read: Reader) -> None:
    hub.faults.append(Fault("not-the-hub", at="/api/"))
    error = read.error()
    assert error["context"]["reason"] == "no-listing"
    assert "HF_ENDPOINT" in error["hint"]


def test_a_damaged_shard_is_refused_as_in_a_folder_and_not_kept(
    hub: StandIn, read: Reader, tmp_path: Path, tiny_kda_shards: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny_kda_shards.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    data = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(data[:-7])
    hub.repos["org/model"] = Repo({FIRST_COMMIT: folder})
    assert f"{SHARD} is truncated: {len(data) - 7} bytes" in read.error()["message"]
    assert not list(read.cache.rglob(f"{SHARD}.header"))


def test_a_token_is_never_printed(hub: StandIn, read: Reader) -> None:
    faults: list[Callable[[], Any]] = [
        lambda: hub.repos["org/model"].__setattr__("gated", True),
        lambda: hub.faults.append(Fault("bad-token")),
        lambda: hub.faults.append(Fault("ignore-range", at=SHARD)),
        lambda: hub.faults.append(Fault("500", at=SHARD)),
    ]
    for spoil in faults:
        hub.faults.clear()
        hub.repos["org/model"].gated = False
        spoil()
        assert SECRET not in json.dumps(read.error(environment={"HF_TOKEN": SECRET}))
    read(environment={"HF_TOKEN": None}, offline=True)
    assert f"Bearer {SECRET}" in {seen.authorization for seen in hub.log}
    assert not [f for f in read.cache.rglob("*") if f.is_file() and SECRET in f.read_text("latin1")]


def test_answers_that_make_no_sense_are_survived(
    hub: StandIn, read: Reader, tiny_kda_shards: Path
) -> None:
    """Every third answer is random in status, headers and body: one clear error or the right result."""
    right = open_checkpoint(tiny_kda_shards).digests()
    hub.chaos = random.Random(20261130)
    outcomes = Counter[str]()
    for number in range(60):
        read.cache = read.cache.with_name(f"cache-{number}")
        found = read()
        if found["ok"]:
            assert found["digests"] == right
            outcomes["right"] += 1
            continue
        assert found["exit"] == 3, found
        text = found["message"] + found["hint"]
        assert "\n" not in text
        assert "\x1b" not in text
        assert len(text) < 1000
        outcomes[found["context"].get("reason", "header")] += 1
    assert outcomes["right"] >= 1
    assert len(outcomes) >= 5
