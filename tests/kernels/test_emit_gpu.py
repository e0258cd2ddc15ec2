"""Emitted modules with rings, alone in a process on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridstate.kernels.emit import MODULE_FILE, StepSpec, emit
from hybridstate.kernels.layout import PackedLayout
from tests.kernels.test_emit import ok

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("key_heads", "per_channel", "k_hi", "every"),
    [(16, False, 16, 8), (32, True, 16, 8), (16, False, 0, 2), (32, True, 32, 16)],
)
def test_the_check_passes_for_every_ring_kernel(
    key_heads: int, per_channel: bool, k_hi: int, every: int, tmp_path: Path
) -> None:
    """Full-size heads: both kernels beside the module's reference, and all three beside float64."""
    layout = PackedLayout(128, 128, k_hi)
    spec = StepSpec(layout, key_heads, 32, per_channel=per_channel, every=every)
    (tmp_path / MODULE_FILE).write_text(emit(spec))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-I", MODULE_FILE, "--check", "--device", "cuda"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("reference", "triton", "gluon"):
        for title in (name, f"{name} with value scale", f"{name} beside the recurrence"):
            assert ok(done.stdout, title), done.stdout
