"""The commands on Hub models, each in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.hub.conftest import ROOT, hub_environment
from tests.hub.standin import FIRST_COMMIT, SECOND_COMMIT, Fault, Repo, StandIn


@dataclass(frozen=True)
class Ran:
    code: int
    stdout: str
    stderr: str

    @property
    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.stdout)["result"]
        return found


Run = Callable[..., Ran]


@pytest.fixture
def run(hub: StandIn, tmp_path: Path) -> Run:
    """`run("analyze", "org/model")` in a fresh home whose Hub is the stand-in."""

    def command(*arguments: str | Path, **environment: str) -> Ran:
        done = subprocess.run(
            [sys.executable, "-m", "hybridstate", *map(str, arguments)],
            cwd=tmp_path,
            env=hub_environment(hub, tmp_path / "home") | environment,
            capture_output=True,
            encoding="utf-8",
        )
        assert "Traceback" not in done.stderr, done.stderr
        return Ran(done.returncode, done.stdout, done.stderr)

    return command


def test_analyze_prints_commit_and_traffic_and_works_offline_afterwards(
    run: Run, hub: StandIn
) -> None:
    first = run("analyze", "org/model")
    assert first.code == 0, first.stderr
    assert f"org/model: commit {FIRST_COMMIT} of the default branch" in first.stderr
    assert f"asked the Hub {len(hub.log)} times, received {hub.body_bytes:,} bytes" in first.stderr
    hub.log.clear()
    second = run("analyze", "org/model", "--offline")
    assert second.stdout == first.stdout
    assert hub.log == []


def test_dry_run_prints_requests_and_bytes_and_then_spends_them(run: Run, hub: StandIn) -> None:
    dry = run("analyze", "org/model", "--dry-run", "--json", "--quiet")
    hub_part = dry.result["hub"]
    assert hub_part["commit"] == FIRST_COMMIT
    assert (hub_part["requests_made"], hub_part["bytes_received"]) == (
        len(hub.log),
        hub.body_bytes,
    )
    run("analyze", "org/model", "--cache-dir", "other")
    made = hub.log[hub_part["requests_made"] :]
    assert hub_part["requests"] == len(made)
    assert hub_part["bytes"] == sum(seen.nbytes for seen in made)
    human = run("analyze", "org/model", "--dry-run")
    assert "would ask the Hub for" in human.stdout
    assert "headers of 3 shards" in human.stdout


def test_json_names_the_commit(run: Run) -> None:
    read = run("analyze", "hf://org/model@main", "--json").result["model"]["hub"]
    assert (read["repo"], read["revision"], read["commit"]) == ("org/model", "main", FIRST_COMMIT)
    assert read["requests"] > 0


def test_inspect_reads_no_tensor(run: Run, hub: StandIn) -> None:
    assert run("inspect", "org/model").code == 0
    ranges = [seen for seen in hub.log if seen.range]
    assert len(ranges) == 6  # two per shard: length and header


def test_a_plan_of_a_hub_model_is_pinned_to_one_commit(
    run: Run, hub: StandIn, tmp_path: Path, tiny_kda_shards: Path, tiny_checkpoint: Any
) -> None:
    """The branch moves between the two times that the model is opened."""
    other = tiny_checkpoint("kimi_linear", shards=3, seed=7)
    hub.repos["org/model"] = Repo(
        {FIRST_COMMIT: tiny_kda_shards, SECOND_COMMIT: other}, moves_to=SECOND_COMMIT
    )
    done = run("export-plan", "org/model", "--w-max", "16", "--no-weights", "-o", "plan")
    assert done.code == 0, done.stderr
    plan = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert plan["model"]["revision"] == FIRST_COMMIT
    assert plan["model"]["name"] == "org/model"
    local = run("export-plan", tiny_kda_shards, "--w-max", "16", "-o", "local")
    assert local.code == 0, local.stderr
    mine, theirs = (tmp_path / p / "plan.safetensors" for p in ("plan", "local"))
    assert mine.read_bytes() == theirs.read_bytes()
    verified = run("plan", "verify", "plan", f"org/model@{FIRST_COMMIT}")
    assert verified.code == 0, verified.stderr
    assert run("plan", "verify", "plan", f"org/model@{SECOND_COMMIT}").code == 6


@pytest.mark.parametrize(
    "command",
    [
        ["analyze", "org/model", "--validate", "--offline"],
        ["calibrate", "org/model", "--dry-run"],
        ["verify", "org/model", "org/model"],
        ["bench", "restore", "org/model"],
        ["export-plan", "org/model", "--w-max", "16", "--weights", "-o", "out"],
    ],
)
def test_commands_that_need_weights_download_nothing(
    run: Run, hub: StandIn, command: list[str]
) -> None:
    done = run(*command)
    assert done.code == 3, done.stderr
    assert "hf download org/model --local-dir model" in done.stderr
    assert hub.log == []


def test_a_failure_writes_nothing(run: Run, hub: StandIn, tmp_path: Path) -> None:
    hub.faults.append(Fault("ignore-range", at="model-00002"))
    done = run("analyze", "org/model", "-o", "out", "--json")
    assert done.code == 3
    document = json.loads(done.stdout)
    assert document["error"]["context"]["reason"] == "no-ranges"
    assert not (tmp_path / "out").exists()


def test_no_command_prints_the_token(run: Run, hub: StandIn) -> None:
    token = "hf_" + "w" * 30
    hub.repos["org/model"].gated = True
    for extra in ({}, {"HYBRIDSTATE_DEBUG": "1"}):
        done = subprocess.run(
            [sys.executable, "-m", "hybridstate", "analyze", "org/model", "--json"],
            env=hub_environment(hub, Path(os.devnull)) | {"HF_TOKEN": token} | extra,
            capture_output=True,
            encoding="utf-8",
            cwd=ROOT,
        )
        assert done.returncode == 3
        assert token not in done.stdout + done.stderr
    assert any(token in str(seen.authorization) for seen in hub.log)


def test_a_folder_never_loads_the_hub_library(tiny_kda_shards: Path) -> None:
    code = (
        "import sys; from hybridstate import analyze; analyze(sys.argv[1], w_max=(16,)); "
        "print(sorted(m for m in sys.modules if m.split('.')[0] in "
        "('huggingface_hub', 'httpx', 'httpx2', 'concurrent', 'torch')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_kda_shards)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert done.stdout.strip() == "[]"
