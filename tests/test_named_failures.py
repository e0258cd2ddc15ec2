"""A run that is cut short has named its failures."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import time

def test_fails():
    raise RuntimeError("at 3:4:\\nx = y\\nthe cause")

def test_takes_long():
    time.sleep(60)
"""


@pytest.mark.parametrize("workers", [(), ("-n", "1")])
def test_a_failure_is_named_before_the_run_ends(workers: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    if workers:
        pytest.importorskip("xdist")
    root = str(Path(__file__).parents[1])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.named_failures", *workers]
    with subprocess.Popen(
        [*command, "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": root}, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        line = next(x for x in process.stdout if "FAILED" in x)
        assert process.poll() is None
        process.terminate()
    assert "test_some.py::test_fails: RuntimeError: at 3:4: .. the cause" in line
