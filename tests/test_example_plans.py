"""The bundles in plans/ are current: they open, and belong to the models that ship."""

from pathlib import Path

import pytest

from hybridstate.checkpoint import EMBEDDED, open_checkpoint
from hybridstate.plan.compare import verify_against
from hybridstate.plan.store import read_plan

PLANS = Path(__file__).resolve().parents[1] / "plans"


@pytest.mark.parametrize("name", EMBEDDED)
def test_example_bundle_fits_its_model(name: str) -> None:
    plan = read_plan(PLANS / name)
    verify_against(plan, open_checkpoint(name))
    assert plan.document.selection is not None
    assert plan.document.precision is not None
