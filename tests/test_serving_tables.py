"""docs/serving.md is what its script writes, and its tables hold recorded numbers."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridstate.bench.cost_model import CostModel
from hybridstate.bench.serving_arms import kimi_profile
from hybridstate.bench.simulate import Simulation
from hybridstate.bench.sweep import Options
from hybridstate.bench.traces import generated

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture(scope="module")
def script() -> Any:
    sys.path.insert(0, str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("serving_tables", SCRIPTS / "serving_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(SCRIPTS))
    return module


def test_the_page_is_up_to_date(script: Any) -> None:
    assert script.main(["--check"]) == 0


def test_tables_of_a_run(script: Any) -> None:
    options = Options(
        arms=("nr", "int8"), cutoffs=(16,), ratios=(0.5, 1.0), limits=(4, 2), clients=16, seeds=1
    )
    trace = generated("wildchat-shape", 16, scale=1 / 16)
    cost = CostModel.default()
    result = Simulation(kimi_profile(), trace, cost, options, scale=1 / 16).run()
    dense = next(p for p in result["points"] if p["arm"] == "dense" and p["ratio"] == 0.5)
    assert f"{dense['mean']['mean_ttft_ms'] / 1e3:.3f} s" in script.sweep(result)
    rows = script.operating(result).splitlines()
    assert len(rows) == 2 + 3 * 3, "three arms at two limits and on the control"
    assert sum("| control |" in row for row in rows) == 3
    assert "DASC reports -42 %" in script.finding(result)
    assert "0.0625 of the published ones" in script.conditions(result)
    assert script.fit(result) == ""
    rows = [{"fitted": n % 2 == 0, "ttft_error": 0.1 * n, "hit_error": 0.0} for n in range(4)]
    fitted = {"points": rows, "largest_ttft_error": 0.3, "largest_hit_error": 0.0}
    assert "of the 2 others 1 are within" in script.fit({"fit": fitted})
