"""What the package launches compiles for Hopper, and a kernel that does not is found; no GPU needed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`compile_launches` in a process whose Triton is not an interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.kernels.compile_launches", *arguments]
    return subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_every_kernel_compiles_as_its_callers_launch_it() -> None:
    """By two workers; the run plants faults of its own and says so where it does not find them."""
    done = run("--workers", "2")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert done.stdout.endswith(": 0 problems\n")
