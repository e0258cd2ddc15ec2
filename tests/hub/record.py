"""What `analyze` costs on the network for every released layout, from the stand-in, cold and offline.

    python -m tests.hub.record -o benchmarks/reading.json

Layouts are those of tests/released.py: released names and shapes, synthetic decay values, holes elsewhere.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hybridstate import analyze
from tests.hub.conftest import ROOT, Reader, hub_environment
from tests.hub.standin import FIRST_COMMIT, Repo, StandIn, running
from tests.released import RELEASES, Released, write


def measure(release: Released, servers: StandIn, worker: "subprocess.Popen[str]") -> dict[str, Any]:
    """One release: from disk, from the stand-in, and again offline."""
    with tempfile.TemporaryDirectory() as place:
        folder = write(release, Path(place) / release.name)
        local = analyze(folder, w_max=(16,))
        servers.reset()
        servers.repos[f"org/{release.name}"] = Repo({FIRST_COMMIT: folder})
        read = Reader(worker, Path(place) / "cache")
        found = read(f"org/{release.name}")
        requests, received = len(servers.log), servers.body_bytes
        servers.log.clear()
        again = read(f"org/{release.name}", offline=True)
        assert found["digests"] == again["digests"] == local.source.digests
        assert servers.log == []
        return {
            "name": release.name,
            "family": found["family"],
            "bytes": local.source.checkpoint_bytes,
            "shards": local.source.files,
            "touched": found["files"],
            "tensor_bytes": local.source.tensor_bytes,
            "local_header_bytes": local.source.header_bytes,
            "requests": requests,
            "received": received,
            "parts": found["cost"],
            "offline_requests": 0,
        }


def main() -> None:
    """Measure every release and write the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    output = parser.parse_args().output
    with tempfile.TemporaryDirectory() as home, running() as servers:
        worker = subprocess.Popen(
            [sys.executable, "-m", "tests.hub.worker"],
            cwd=ROOT,
            env=hub_environment(servers, Path(home)) | {"HF_HUB_DOWNLOAD_TIMEOUT": "60"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        rows = [measure(release, servers, worker) for release in RELEASES]
        assert worker.stdin is not None
        worker.stdin.close()
        worker.wait(timeout=10)
    document = {
        "synthetic": "released names and shapes, decay values synthetic, all other bytes holes",
        "huggingface_hub": version("huggingface_hub"),
        "releases": rows,
    }
    output.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
