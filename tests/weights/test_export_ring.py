"""`export-plan --kernels` of plans that write their packed state at every L-th update."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridstate import api
from hybridstate.checkpoint import open_checkpoint
from hybridstate.errors import UsageError
from hybridstate.kernels.ring_update import ring_layout
from hybridstate.weights.card import CARD
from hybridstate.weights.export import step_spec
from tests.plan.calibrated import write_calibration


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gdn", {}),
        ("kda", {"weights": False}),
        ("gdn", {"key_order": "per-head", "value_order": "fold", "weights": False}),
        ("gdn", {"key_order": "expand", "value_order": "common"}),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(str(v) for v in x.values()) or "default",
)
def test_the_module_of_a_plan_with_an_interval(
    kind: str, options: dict[str, Any], tmp_path: Path, tiny_gdn: Path, tiny_kda: Path
) -> None:
    """It names plan, interval and bits, passes its check alone, and comes out byte-equal twice."""
    model = tiny_gdn if kind == "gdn" else tiny_kda
    calibration = write_calibration(tmp_path / "cal", model, values=True)
    texts = []
    for name in ("a", "b"):
        made = api.export_plan(
            model, out=tmp_path / name, calibration=calibration, kernels=tmp_path / f"{name}-kernels",
            requantise_every=4, **options,
        )  # fmt: skip
        assert made.kernels is not None
        texts.append(made.kernels.read_bytes())
    assert texts[0] == texts[1]
    text, precision = texts[0].decode(), made.plan.document.precision
    assert precision is not None
    spec, layer = step_spec(made.plan), open_checkpoint(model).spec.layers[0]
    assert (spec.every, spec.stored) == (4, ring_layout(spec.layout))
    own = options.get("key_order", "shared") != "shared"
    assert spec.ring_key_heads == (layer.value_heads if own else layer.key_heads)
    assert f'PLAN = "{made.digest}"' in text
    assert "EVERY = 4\n" in text
    if not own:
        assert f"{precision.bits_per_value_with_ring:.3f} bits per value" in text
    if made.layout is not None:
        card = (made.path / CARD).read_text()
        assert "written once in 4 updates" in card
        assert f"{precision.bits_per_value_with_ring:.3f} bits per value" in card
        assert "--requantise-every 4" in card
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-I", str(made.kernels), "--check", "--device", "cpu"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reference beside the recurrence" in done.stdout


def test_longer_intervals_are_refused_before_the_first_byte(tmp_path: Path, tiny_gdn: Path) -> None:
    calibration = write_calibration(tmp_path / "cal", tiny_gdn)
    with pytest.raises(UsageError, match="once in 1 to 16 updates") as told:
        api.export_plan(
            tiny_gdn, out=tmp_path / "out", calibration=calibration, kernels=tmp_path / "kernels",
            requantise_every=17,
        )  # fmt: skip
    assert str(told.value.hint) == "take 16 or less"
    assert [p.name for p in tmp_path.iterdir()] == ["cal"]
