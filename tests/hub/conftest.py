"""A stand-in of the Hub and a process that reads from it, both kept for the whole session."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hub.standin import FIRST_COMMIT, Repo, StandIn, running

# HUB_TEST_PYTHON may name an interpreter with another huggingface_hub; it needs NumPy, nothing else.
ROOT = Path(__file__).resolve().parents[2]


def hub_environment(stand_in: StandIn, home: Path) -> dict[str, str]:
    """Environment of a process whose Hub is the stand-in: no login, no offline mode, private folders."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "HUGGING", "TRANSFORMERS_")) and "proxy" not in name.lower()
    }
    return inherited | {
        "HF_ENDPOINT": stand_in.endpoint,
        "HF_HOME": str(home / "hf"),
        "XDG_CACHE_HOME": str(home / "cache"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "HF_HUB_DOWNLOAD_TIMEOUT": "1",
        "NO_COLOR": "1",
        "PYTHONPATH": str(ROOT),
    }


class Reader:
    """Opens models in the worker; each test has a cache of its own."""

    def __init__(self, process: "subprocess.Popen[str]", cache: Path) -> None:
        self.process, self.cache = process, cache

    def __call__(self, model: str = "org/model", **job: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(
            json.dumps({"model": model, "cache": str(self.cache)} | job) + "\n"
        )
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def error(self, model: str = "org/model", **job: Any) -> dict[str, Any]:
        """The error of a model that must not open."""
        found = self(model, **job)
        assert found["ok"] is False
        assert found["exit"] == 3
        assert "\n" not in found["message"]
        return found


@pytest.fixture(scope="session")
def servers() -> Iterator[StandIn]:
    with running() as stand_in:
        yield stand_in


@pytest.fixture(scope="session")
def worker(
    servers: StandIn, tmp_path_factory: pytest.TempPathFactory
) -> Iterator["subprocess.Popen[str]"]:
    home = tmp_path_factory.mktemp("home")
    process = subprocess.Popen(
        [os.environ.get("HUB_TEST_PYTHON", sys.executable), "-m", "tests.hub.worker"],
        cwd=ROOT,
        env=hub_environment(servers, home),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.wait(timeout=10)
    process.stdout.close()


@pytest.fixture
def hub(servers: StandIn, tiny_kda_shards: Path) -> StandIn:
    """The stand-in with one repository, `org/model`: Kimi-Linear layout in three shards."""
    servers.reset()
    servers.repos["org/model"] = Repo({FIRST_COMMIT: tiny_kda_shards})
    return servers


@pytest.fixture(scope="session")
def tiny_kda_shards(tiny_checkpoint: Any) -> Path:
    folder: Path = tiny_checkpoint("kimi_linear", shards=3)
    return folder


@pytest.fixture
def read(worker: "subprocess.Popen[str]", tmp_path: Path) -> Reader:
    return Reader(worker, tmp_path / "hybridstate-cache")
