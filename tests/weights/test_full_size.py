"""Exports at full size from sparse folders: memory of one tensor, holes kept, nothing finished-looking when killed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridstate.checkpoint import open_checkpoint
from hybridstate.plan.compare import verify_against
from hybridstate.plan.store import read_plan
from tests.plan.calibrated import write_calibration
from tests.released import BY_NAME, write
from tests.tiny import write_checkpoint

MEASURED = """
import json, sys, time
from hybridstate import api
import torch, safetensors  # what the verb imports is not what it needs per shard
status = lambda name: int(dict(x.split(":", 1) for x in open("/proc/self/status"))[name].split()[0]) * 1024
before, start = status("VmRSS"), time.perf_counter()
made = api.export_plan(sys.argv[1], out=sys.argv[2], calibration=sys.argv[3])
print(json.dumps({"seconds": time.perf_counter() - start, "before": before, "peak": status("VmHWM"),
                  "moved": len(made.layout.moves), "bytes": made.layout.nbytes}))
"""

KILLED = """
import os, signal, sys
from hybridstate import api
def die(stage, done, total):
    if stage == "write":
        os.kill(os.getpid(), signal.SIGKILL)
api.export_plan(sys.argv[1], out=sys.argv[2], calibration=sys.argv[3], progress=die)
"""


def run(code: str, *arguments: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def allocated(folder: Path) -> int:
    return sum(p.stat().st_blocks * 512 for p in folder.rglob("*") if p.is_file())


def fill(folder: Path, name: str, seed: int) -> bytes:
    """Random bytes in place of a tensor's hole."""
    entry = open_checkpoint(folder).entries[name]
    data = np.random.default_rng(seed).bytes(entry.end - entry.start)
    with entry.file.open("r+b") as stream:
        stream.seek(entry.start)
        stream.write(data)
    return data


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory needs /proc")
def test_an_export_of_163_gb_needs_the_memory_of_its_largest_moved_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write(BY_NAME["Qwen3-Next-80B-A3B-Instruct"], tmp_path / "model")
    source = open_checkpoint(model)
    first = source.spec.layers[0]
    projection = first.prefix + "in_proj_qkvz.weight"
    before = np.frombuffer(fill(model, projection, 1), np.uint16).reshape(12288, 2048)
    if allocated(model) > 1 << 30:
        pytest.skip("this file system stores holes")
    calibration = write_calibration(tmp_path / "calibration", model, k_hi=16)
    out = tmp_path / "out"
    done = run(MEASURED, model, out, calibration)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    sizes = [file.stat().st_size for file in source.files]
    with capsys.disabled():
        sys.stdout.write(
            f" [{sum(sizes) / 1e9:.0f} GB in {len(sizes)} shards: {found['seconds']:.1f} s, peak "
            f"{found['peak'] / 1e6:.0f} MB ({found['before'] / 1e6:.0f} before), largest shard "
            f"{max(sizes) / 1e6:.0f} MB, {allocated(out) / 1e6:.0f} MB on disk] "
        )
    assert found["peak"] - found["before"] < 8 * before.nbytes
    assert found["peak"] < 1.5 * max(sizes)
    assert found["moved"] == 2 * len(source.spec.layers)  # in_proj_qkvz and conv1d
    assert allocated(out) <= allocated(model) + (8 << 20)
    target = open_checkpoint(out)
    assert [file.stat().st_size for file in target.files] == sizes
    assert target.shapes == source.shapes
    plan = read_plan(out)
    assert verify_against(plan, target) in ("original", "exported")  # holes have no order
    order = plan.arrays[f"layers.{first.index}.key_order"][:: first.bundle]
    after = np.frombuffer(target.read_raw(projection), np.uint16).reshape(16, 768, 2048)
    groups = before.reshape(16, 768, 2048)
    for head in (0, 7, 15):
        for start in (0, 128):  # q, then k; v and z stay
            moved = groups[head, start : start + 128][order[head].astype(int)]
            assert (after[head, start : start + 128] == moved).all()
        assert (after[head, 256:] == groups[head, 256:]).all()


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
@pytest.mark.parametrize("key_order", ["shared", "expand"])
def test_a_killed_export_leaves_no_folder_that_looks_finished(
    key_order: str, tmp_path: Path
) -> None:
    code = KILLED.replace("progress=die", f"progress=die, key_order={key_order!r}")
    model = write_checkpoint(tmp_path / "model", "qwen3_5", value_heads=6, shards=3)
    calibration = write_calibration(tmp_path / "calibration", model)
    out = tmp_path / "out"
    assert run(code, model, out, calibration).returncode == -signal.SIGKILL
    assert not out.exists()
    left = [path for path in tmp_path.iterdir() if path.name not in ("model", "calibration")]
    assert len(left) == 1
    assert left[0].name.startswith(".out.partial-")
    assert {p.name for p in left[0].rglob("*") if p.is_file()} == {
        "model-00001-of-00003.safetensors"
    }  # no config, no index, no plan: nothing loads it
    code = code.replace("os.kill(os.getpid(), signal.SIGKILL)", "pass")
    assert run(code, model, out, calibration).returncode == 0
    assert (out / "config.json").is_file()
    assert os.listdir(out / "state_plan")
