"""`analyze --tp --balance --budget --concurrency`, as a user meets them."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hybridstate.cli.capacity_tables import capacity_tables, size
from hybridstate.cli.main import app
from hybridstate.cli.output import Output
from hybridstate.plan.analysis import Analysis, Source, cutoffs_at
from hybridstate.plan.capacity import capacity
from tests.plan.geometry import SPECS
from tests.synthetic import FITS, NOTE, synthetic_horizons

ALL = ("--tp", "2", "--balance", "storage", "--budget", "1MiB", "--concurrency", "3")


def run(*arguments: str | Path, **environment: str) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env=environment)


def test_without_ranks_and_budget_nothing_is_added(tiny_kda: Path) -> None:
    plain = run("analyze", tiny_kda, "-q").stdout
    assert "per rank" not in plain
    assert "slots" not in plain


def test_tables_say_ranks_bytes_slots_requests_and_the_cutoff(tiny_kda: Path) -> None:
    result = run("analyze", tiny_kda, "-q", *ALL)
    assert result.exit_code == 0, result.output
    for part in (
        "channels per rank, 2 ranks, placement storage",
        "bytes of one state on the fullest of 2 ranks",
        "usable slots of one pool of 1 MiB per rank",
        "requests at once in 1 MiB per rank, live states FP32",
        "requests at once in 1 MiB per rank, live states packed",
        "cached prefixes beside 3 requests, live states FP32",
        "smallest W_max that allows 3 requests at once",
        "5, 4 or 3 slots per request",
        "holds 3, 2 or 1",
    ):
        assert part in result.stdout, part


def test_json_carries_the_same(tiny_gdn: Path) -> None:
    found: dict[str, Any] = json.loads(run("analyze", tiny_gdn, "--json", *ALL).stdout)["result"]
    planned = found["capacity"]
    assert (planned["tp"], planned["balance"], planned["unit"]) == (2, "storage", "head")
    assert planned["budget_bytes_per_rank"] == 2**20
    dense = planned["states"][0]
    assert dense["usable_slots"] == 2**20 // dense["full_bytes"] - 1
    assert len(planned["placements"]) == len(found["cutoffs"]) == 4
    assert {(r["sized"], r["held"]) for r in planned["reservations"]} == {(5, 3), (4, 2), (3, 1)}
    assert len(planned["arms"]) == 2 * 10
    assert set(planned["smallest_w_max"]) == {"overlap", "no overlap", "no buffer"}
    for cutoff in found["cutoffs"]:
        assert cutoff["retention"]["pairs"]["mixed"] == 0


@pytest.mark.parametrize("model", list(FITS))
def test_tables_of_full_size_models_fit_sixty_columns(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every line that is not a note (those wrap) fits, and no table falls back to records."""
    monkeypatch.setenv("COLUMNS", "60")
    spec, horizons = SPECS[model], synthetic_horizons(model)
    cutoffs = cutoffs_at(spec, horizons, list(FITS[model].retained))
    analysis = Analysis(
        source=Source("synthetic", Path(), {}, {}, 0, 0, 0, 0, 0),
        spec=spec,
        gate_input=0.0,
        gate_input_source="given",
        epsilon=1e-3,
        horizons=horizons,
        cutoffs=cutoffs,
        capacity=capacity(
            spec,
            horizons,
            [c.selection for c in cutoffs],
            tp=8,
            balance="storage",
            budget=8 * 2**30,
            requests=64,
        ),
        warnings=(NOTE,),
    )
    out = Output("analyze")
    capacity_tables(out, analysis)
    out._print_result()
    lines = capsys.readouterr().out.splitlines()
    rules = [line for line in lines if line.startswith("──")]
    assert len(rules) == 8
    assert max(map(len, rules)) <= 60


@pytest.mark.parametrize(
    ("options", "code", "mentions"),
    [
        (["--tp", "3"], 6, "does not divide the 4 heads"),
        (["--tp", "0"], 2, "at least 1"),
        (["--balance", "best"], 2, "takes off, storage or hybrid"),
        (["--budget", "much"], 2, "a size such as 8GiB"),
        (["--concurrency", "4"], 2, "needs the memory"),
        (["--budget", "1GiB", "--concurrency", "0"], 2, "at least 1"),
    ],
)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_impossible_options_are_refused_also_by_a_dry_run(
    tiny_kda: Path, options: list[str], code: int, mentions: str, dry: list[str]
) -> None:
    result = run("analyze", tiny_kda, *options, *dry)
    assert result.exit_code == code, result.output
    assert mentions in result.stderr


def test_none_does_not_say_that_nothing_is_retained(tiny_kda: Path) -> None:
    """With a safe gate near 1 even the longest cutoff keeps units, so memory is not the live states'."""
    result = run("analyze", tiny_kda, "--lower-bound", "-5", "--gate-input", "-40", *ALL)
    assert result.exit_code == 0, result.output
    assert "none: no cutoff of up to 1,048,576 tokens is enough" in result.stdout


def test_budget_without_a_usable_dense_slot_is_a_warning_in_tables_and_json(
    tiny_kda: Path,
) -> None:
    options = ("analyze", tiny_kda, "--budget", "8")
    assert "holds no usable dense slot" in run(*options).stderr
    (warning,) = json.loads(run(*options, "--json").stdout)["warnings"]
    assert warning.startswith("a budget of 8 bytes per rank")


@pytest.mark.parametrize(("output", "report"), [("out", "out"), ("out/data", "out")])
def test_results_and_page_need_folders_of_their_own(
    tiny_kda: Path, tmp_path: Path, output: str, report: str
) -> None:
    options = ("-o", tmp_path / output, "--report", tmp_path / report)
    result = run("analyze", tiny_kda, *options)
    assert result.exit_code == 2, result.output
    assert "need folders of their own" in result.stderr
    assert not list(tmp_path.iterdir())


def test_page_may_lie_inside_the_results(tiny_kda: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("analyze", tiny_kda, "-o", out, "--report", out / "report", "--w-max", "16")
    assert result.exit_code == 0, result.output
    assert (out / "report" / "index.html").is_file()


def test_sizes_are_printed_without_needless_digits() -> None:
    assert size(20 * 2**40) == "20,480 GiB"
    assert [size(n) for n in (8 * 2**30, 3 * 2**29, 2**20, 1000)] == [
        "8 GiB",
        "1.5 GiB",
        "1 MiB",
        "1,000 bytes",
    ]
