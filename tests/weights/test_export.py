"""The kernel module comes out of a plan with the plan's dimensions, order and digest."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridstate import api
from hybridstate.checkpoint import open_checkpoint
from hybridstate.errors import UsageError
from hybridstate.kernels.emit import MODULE_FILE
from hybridstate.weights.export import step_spec
from tests.plan.calibrated import write_calibration


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory, tiny_gdn: Path) -> Path:
    return write_calibration(tmp_path_factory.mktemp("cal") / "cal", tiny_gdn)


def export(model: Path, out: Path, calibration: Path | None, **options: Any) -> Any:
    return api.export_plan(model, out=out, w_max=64, calibration=calibration, **options)


def test_module_names_the_plan_and_passes_its_check(
    tmp_path: Path, tiny_gdn: Path, calibration: Path
) -> None:
    made = export(tiny_gdn, tmp_path / "out", calibration, kernels=tmp_path / "out" / "kernels")
    assert made.kernels == tmp_path / "out" / "kernels" / MODULE_FILE
    assert made.to_json()["kernels"] == str(made.kernels)
    text = made.kernels.read_text()
    layer = open_checkpoint(tiny_gdn).spec.layers[0]
    assert f'PLAN = "{made.digest}"' in text
    assert f"HEADS, KEY_HEADS = {layer.value_heads}, {layer.key_heads}" in text
    assert f'LAYOUT.layout_id == "{made.plan.document.layout_id}"' in text
    assert "KEY_INDEX" not in text
    done = subprocess.run(
        [sys.executable, str(made.kernels), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_plan_whose_order_stays_out_of_the_weights_brings_its_index(
    tmp_path: Path, tiny_gdn: Path, calibration: Path
) -> None:
    made = export(
        tiny_gdn, tmp_path / "out", calibration, weights=False, kernels=tmp_path / "kernels"
    )
    spec = step_spec(made.plan)
    for layer in open_checkpoint(tiny_gdn).spec.layers:
        order = made.plan.arrays[f"layers.{layer.index}.key_order"]
        assert (order == spec.key_index[layer.index]).all()
    assert "KEY_INDEX" in made.kernels.read_text()


def test_kernels_without_a_packed_state_are_refused(tmp_path: Path, tiny_gdn: Path) -> None:
    with pytest.raises(UsageError, match="without a packed state"):
        export(tiny_gdn, tmp_path / "out", None, kernels=tmp_path / "kernels")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_module_is_kept_unless_forced(
    tmp_path: Path, tiny_gdn: Path, calibration: Path
) -> None:
    file = tmp_path / "kernels" / MODULE_FILE
    file.parent.mkdir()
    file.write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        export(tiny_gdn, tmp_path / "out", calibration, kernels=file.parent)
    assert file.read_text() == "mine"
    assert not (tmp_path / "out").exists()
    export(tiny_gdn, tmp_path / "out", calibration, kernels=file.parent, force=True)
    assert file.read_text() != "mine"


@pytest.mark.parametrize("place", ["below a file", "a file", "a folder of that name"])
def test_a_module_that_cannot_be_written_is_told_before_the_plan_is(
    place: str, tmp_path: Path, tiny_gdn: Path, calibration: Path
) -> None:
    """Whole or not at all: the folder of the plan does not appear without its module."""
    file = tmp_path / "file"
    file.touch()
    kernels = {"below a file": file / "kernels", "a file": file}.get(place, tmp_path / "kernels")
    if place == "a folder of that name":
        (kernels / MODULE_FILE).mkdir(parents=True)
    with pytest.raises(UsageError, match=rf"cannot write .*{MODULE_FILE}: .* is a (file|folder)"):
        export(tiny_gdn, tmp_path / "out", calibration, kernels=kernels, force=True)
    assert not (tmp_path / "out").exists()
