"""Two processes run each test once, and one summary counts them all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# The first process waits in the first module until the second one is at work in the last.
MODULE = """
import os, time
from pathlib import Path
import pytest

@pytest.fixture(scope="module")
def made():
    yield
    with open("ended", "a") as file:
        file.write(f"{os.getpid()} {__name__}\\n")

@pytest.mark.parametrize("i", range(6))
def test_passes(i, made):
    deadline = time.monotonic() + 60
    while __name__ == "test_0" and not Path("second").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    with open("ran", "a") as file:
        file.write(f"{os.getpid()} {__name__} {i}\\n")

def test_is_skipped():
    pytest.skip("no such thing here")
"""
FAILS = """
from pathlib import Path

def test_fails(capsys):
    Path("second").touch()
    with capsys.disabled():
        print(f"[{1 + 2} of 4]")
    assert 3 == 4, "of the last module"
"""
DIES = """
import os
from pathlib import Path

def test_dies():
    Path("second").touch()
    os._exit(9)
"""
ROOT = str(Path(__file__).parents[1])


def run(folder: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "tests.two_ends", "-p", "no:cacheprovider"),
            *("-ra", "--rootdir", str(folder), *options, str(folder)),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": ROOT, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    for i in range(8):
        (tmp_path / f"test_{i}.py").write_text(MODULE)
    return tmp_path


@pytest.mark.skipif(os.cpu_count() == 1, reason="needs two cores")
def test_each_test_runs_once_and_counts_once(modules: Path) -> None:
    (modules / "test_9.py").write_text(FAILS)
    done = run(modules)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "1 failed, 48 passed, 8 skipped" in done.stdout.splitlines()[-1]
    assert "of the last module" in done.stdout
    assert done.stdout.count("[3 of 4]") == 1
    assert done.stdout.count("test session starts") == 1
    assert "no such thing here" in done.stdout
    lines = [line.split() for line in (modules / "ran").read_text().splitlines()]
    assert sorted(rest for _, *rest in lines) == [
        [f"test_{i}", str(j)] for i in range(8) for j in range(6)
    ]
    assert len({process for process, *_ in lines}) == 2
    ended = [line.split() for line in (modules / "ended").read_text().splitlines()]
    assert len(ended) <= 8 + 1
    assert {module for _, module in ended} == {f"test_{i}" for i in range(8)}


@pytest.mark.skipif(os.cpu_count() == 1, reason="needs two cores")
def test_a_second_process_that_dies_is_a_failure(modules: Path) -> None:
    (modules / "test_9.py").write_text(DIES)
    done = run(modules)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    # the one that ended it and the one it had claimed next
    assert "2 failed, 47 passed, 8 skipped" in done.stdout.splitlines()[-1]
    assert "second process ended with status 9" in done.stdout
    assert "FAILED test_9.py::test_dies" in done.stdout


def test_broken_modules_and_the_first_failure_end_both(modules: Path) -> None:
    (modules / "test_9.py").write_text("import no_such_module_at_all")
    done = run(modules)
    assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout + done.stderr
    assert not (modules / "ran").exists()
    (modules / "test_9.py").write_text(FAILS + "\ndef test_is_left_out(): pass\n")
    done = run(modules, "-x")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].strip("= ").startswith("1 failed")
    assert "of the last module" in done.stdout
