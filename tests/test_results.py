"""Tables and pictures of recorded results show what the file says, cell by cell."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import quality_tables
import recordings
import results_page
import scale_tables
import tables
import validation_findings

from hybridstate.bench.components import COMPONENTS
from hybridstate.figures import decode, decode_figures, precision_figure, restore_figure
from hybridstate.figures.decode import UNIFORM_ROUTING, earlier_runs


def arm(name: str, policy: str, w_max: int | None, accuracy: float, kl: float) -> dict[str, Any]:
    return {
        "arm": name,
        "policy": policy,
        "w_max": w_max,
        "seed": None,
        "retained_units": 0 if policy == "recompute" else 6 if w_max else 8,
        "units": 0 if policy == "recompute" else 8,
        "ratio_full": None if policy == "recompute" else 1.25 if w_max else 1.0,
        "tasks": {"recall": {"accuracy": accuracy}},
        "prose": {"kl": kl, "bits_per_byte": 1.9 + kl},
        "ttft_s": None if policy == "random" else {"median": 0.01234},
    }


def comparison(kind: str, metric: str, mean: float, spread: float | None) -> dict[str, Any]:
    return {
        "w_max": 64,
        "kind": kind,
        "metric": metric,
        "dasc": 0.75,
        "random_mean": mean,
        "random_sd": spread,
        "difference": 0.25,
        "interval_95": [0.125, 0.375],
        "cases": 16,
        "overlap": [{"jaccard": 0.5}, {"jaccard": 0.625}],
    }


RESULT: dict[str, Any] = {
    "arms": [
        arm("dense", "dense", None, 0.96875, 0.0),
        arm("recompute", "recompute", None, 0.96875, 1e-4),
        arm("nr-64", "nr", 64, 0.75, 0.05),
        arm("wr-64", "wr", 64, 0.875, 0.02),
    ],
    "comparisons": [
        comparison("recall", "accuracy", 0.5, 0.0625),
        comparison("prose", "kl", 0.1, None),
    ],
    "interventions": [],
}


def cells(text: str) -> list[list[str]]:
    return [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines()]


def test_restore_table() -> None:
    head, _, *rows = cells(tables.restore(RESULT))
    assert head == ["restored with", "kept", "size", "recall", "prose KL", "bits/byte", "TTFT"]
    assert rows == [
        ["dense", "100.0 %", "1.00x", "96.9 %", "0", "1.900", "12.3 ms"],
        ["recompute", "", "", "96.9 %", "0.0001", "1.900", "12.3 ms"],
        ["W_max 64, NR", "75.0 %", "1.25x", "75.0 %", "0.05", "1.950", "12.3 ms"],
        ["W_max 64, WR", "75.0 %", "1.25x", "87.5 %", "0.02", "1.920", "12.3 ms"],
        ["W_max 64, random", "75.0 %", "1.25x", "50.0 % ± 6.2 %", "0.1", "", ""],
    ]


def test_advantage_table_gives_points_intervals_and_overlap() -> None:
    _, _, *rows = cells(tables.advantage(RESULT))
    assert rows[0] == [
        "W_max 64, recall",
        "+25.0 points",
        "+12.5 to +37.5",
        "16",
        "50.0 % to 62.5 %",
    ]


def test_advantage_table_has_no_interval_for_a_single_case() -> None:
    single = RESULT["comparisons"][0] | {"interval_95": None, "cases": 1}
    _, _, row = cells(tables.advantage(RESULT | {"comparisons": [single]}))
    assert row[1:4] == ["+25.0 points", "one case", "1"]
    equal = RESULT["comparisons"][0] | {"interval_95": [0.0, 0.0], "difference": 0.0}
    _, _, row = cells(tables.advantage(RESULT | {"comparisons": [equal]}))
    assert row[2] == "no spread"


def test_restore_figure_keeps_the_numbers_behind_it(tmp_path: Path) -> None:
    restore_figure(RESULT, "tiny", tmp_path)
    with (tmp_path / "restore.csv").open(newline="") as stream:
        rows = {(r["kind"], r["policy"]): r for r in csv.DictReader(stream)}
    assert (tmp_path / "restore.png").stat().st_size > 10_000
    assert float(rows["recall", "nr"]["value"]) == 0.75
    assert float(rows["recall", "random"]["sd_over_masks"]) == 0.0625
    assert float(rows["prose", "dense"]["value"]) == 0.0


def test_decode_table_compares_with_fp32_at_the_same_batch() -> None:
    row = {
        "backend": "gluon",
        "mode": "graph",
        "state_bytes_per_request": 1_628_160,
        "whole_step_state_gb_per_s": 1234.5,
    }
    result = {
        "rows": [
            row | {"batch": 8, "state": "fp32", "tpot_s": {"median": 0.003}},
            row | {"batch": 8, "state": "damp", "tpot_s": {"median": 0.002}},
        ]
    }
    _, _, fp32, damp = cells(tables.decode(result))
    assert fp32[4] == "1.00x"
    assert damp == ["batch 8, damp", "gluon, graph", "1,628,160", "2 ms", "1.50x", "1,234.5"]


def test_short_tables_have_a_row_a_batch_and_a_column_a_state() -> None:
    rows = [
        {"batch": 8, "state": state, "tpot_s": {"median": t}, "step_s": {"median": t / 1000}}
        for state, t in (("fp32", 0.003), ("damp", 0.002))
    ]
    rows = [row | {"dims": {"name": "tiny-kda"}} for row in rows]
    rows += [rows[0] | {"batch": 9}, rows[0] | {"dims": {"name": "tiny-gdn"}}]
    head, _, row = cells(tables.decode_by_state({"rows": rows[:2]}))
    assert head == ["batch", "fp32", "damp"]
    assert row == ["8", "3 ms", "2 ms, 1.50x"]
    head, _, row = cells(tables.update_by_state({"rows": rows}, ("tiny-kda",), (8,)))
    assert head == ["layer of", "batch", "fp32", "damp"]
    assert row == ["tiny-kda", "8", "3 µs", "2 µs, 1.50x"]


CALIBRATION: dict[str, Any] = {
    "validation_sequences": 3,
    "validation_positions": 191,
    "validation_steps": [1, 2, 4],
    "validation": [
        {
            "format": name,
            "bits_per_value": bits,
            "kl": kl,
            "kl_error": error,
            "top1": 1 - kl,
            "state_error": 10 * kl,
            "state_error_steps": [kl, 2 * kl, 10 * kl],
            "perplexity_ratio": 1 + kl,
        }
        for name, bits, kl, error in (
            ("fp32", 32, 0.0, 0.0),
            ("int8-step", 9, 0.009, 0.0002),
            ("damp", 9.875, 0.0065, None),
        )
    ],
}


def test_precision_table() -> None:
    text = tables.precision(CALIBRATION)
    _, _, fp32, int8, damp = cells(text.split("\n\n")[0])
    assert fp32 == ["fp32", "32", "0", "100.00 %", "0.0000", "1.0000x"]
    assert int8 == ["int8-step", "9", "9.00e-03 ± 2e-04", "99.10 %", "0.0900", "1.0090x"]
    assert damp[:3] == ["damp", "9.875", "6.50e-03"]
    assert "3 sequences of 191 updates" in text


def test_precision_table_is_short_and_counts_missing_seeds() -> None:
    rows = [CALIBRATION["validation"][2] | {"format": f"damp-k{k}"} for k in (4, 8)]
    cut = {"validation_seeds": [0, 1, 2], "unfinished": ["seed-3", "greedy"]}
    text = tables.precision(CALIBRATION | cut | {"validation": CALIBRATION["validation"] + rows})
    assert "damp-k4" not in text
    assert "from 3 of 4 seeds (the time on the GPU ended)" in text


def test_full_size_table_adds_up_and_says_synthetic() -> None:
    found = {
        document["result"]["model"]["name"]: document["result"]
        for _, document in recordings.recorded("calibrate-*.json")
        if recordings.synthetic(document["result"])
    }
    text = scale_tables.at_scale(found)
    table = cells(text.split("\n\n")[0])
    for column, result in enumerate(found.values(), start=1):
        seconds = [float(row[column]) for row in table[2:] if row[0].endswith(", s")]
        wall = float(next(row for row in table if "wall" in row[0])[column].strip("*"))
        total = seconds.pop()  # the table's own sum
        assert sum(seconds) == pytest.approx(wall, abs=0.05 * len(seconds))
        assert total == pytest.approx(wall, abs=0.1)
        measured = result["measured"]
        cost = measured["recorded_step_ms"] / measured["plain_step_ms"] - 1
        assert f"{100 * cost:.1f} %" in text
        assert cost < 0.3
        assert result["synthetic"]
    assert all("synthetic" in head for head in table[0][1:])


FULL_SIZE_STEP = {
    "backend": "gluon",
    "mode": "graph",
    "bytes_s": 0.011,
    "state_share_of_bytes": 0.25,
    "batch": 256,
}
FULL_SIZE_SAVING = {
    "batch": 256,
    "saved_s": 0.003,
    "isolated_saving_s": 0.004,
    "share_of_isolated": 0.75,
    "tpot_cut": 1 / 6,
    "cut_by_bytes": 0.2,
    "paper_tpot_cut": 0.19,
}


def full_size(**changes: Any) -> dict[str, Any]:
    """FP32 and packed steps of 18 and 15 ms; the first spends 2 ms in experts and 4.5 in updates."""
    parts = {name: {"s": 0.0, "launches": 0} for name in COMPONENTS}
    parts |= {"experts": {"s": 0.002, "launches": 7}}
    parts |= {"recurrent update": {"s": 0.0045, "launches": 3}}
    rows = [
        FULL_SIZE_STEP | {"state": state, "tpot_s": {"median": t}, "components": found} | changes
        for state, t, found in (("damp", 0.015, None), ("fp32", 0.018, parts))
    ]
    return {"model": "m", "rows": rows, "savings": [FULL_SIZE_SAVING]}


def test_full_size_decode_says_what_arrives_of_the_saving() -> None:
    text = scale_tables.decode(full_size() | {"stopped": "deadline"})
    times, parts, saved, note = text.split("\n\n")
    assert cells(times)[2:] == [
        ["batch 256, fp32", "gluon, graph", "18 ms", "1.00x", "11 ms", "25.0 %"],
        ["batch 256, damp", "gluon, graph", "15 ms", "1.20x", "11 ms", "25.0 %"],
    ]
    (shown,) = cells(parts)[2:]
    taken = dict(zip(cells(parts)[0], shown, strict=True))
    assert shown[0] == "batch 256, fp32"
    assert (taken["experts"], taken["recurrent update"], taken["attention"]) == (
        "2.00",
        "4.50",
        "0.00",
    )
    found = dict(zip(cells(saved)[0], cells(saved)[2], strict=True))
    assert found == {
        "batch": "256",
        "saved by DAMP": "3 ms",
        "by the updates alone": "4 ms",
        "saved step time over saved update time": "75 %",
        "cut of bytes": "20.0 %",
        "cut of TPOT": "16.7 %",
        "cut in the paper": "19.0 %",
        "update's share of an FP32 step": "25.0 %",
        "of a DAMP step": "",
    }
    assert "synthetic" in note
    assert "deadline" in note
    assert "routing" not in note


def test_full_size_bytes_say_whether_experts_were_counted(tmp_path: Path) -> None:
    """Without a count they are those of uniform routing and no bound; the picture says so too."""
    assumed = full_size(bytes={"experts": 10, "states": 10})
    assert "Bytes of experts are those of uniform routing." in scale_tables.decode(assumed)
    assert "one token for all sequences" in scale_tables.decode(assumed)
    used = {"per_layer_mean": 180.25, "total": 721, "layers": 4, "of": 1024, "steps": 64}
    counted = full_size(
        bytes={"experts": 10, "states": 10}, experts_used=used, experts_used_profiled=used
    )
    text = scale_tables.decode(counted)
    assert "uniform" not in text
    assert "one token for all sequences" not in text
    assert cells(text.split("\n\n")[0])[2][-1] == "180.2 of 256"
    for result, note in ((assumed, UNIFORM_ROUTING), (counted, "")):
        speedups = [{"state": "damp", "batch": 256, "fp32_over_this": 1.2}]
        drawn = result | {
            "speedups": speedups,
            "device": {"name": "a GPU"},
            "protocol": {"input_tokens": 256, "output_tokens": 64},
        }
        assert decode_figures(drawn, tmp_path) == ("tpot", "components")
        lines = list(csv.reader((tmp_path / "tpot.csv").read_text().splitlines()))
        assert ["damp by bytes", "256", "20", note] in lines


def test_sixteen_bit_steps_of_older_kernels_are_named() -> None:
    for path, document in recordings.recorded("decode-*-synthetic.json"):
        result = document["result"]
        tiles = (row for row in result["rows"] if row.get("layout_id", "").startswith("tiles"))
        old = [row for row in tiles if not row.get("commit")]
        text = scale_tables.decode(result)
        assert ("slower kernels" in text) == any(row["state"] == "bf16" for row in old), path.name
    row = {"state": "bf16", "layout_id": "tiles8-k128-v128-bfloat16", "batch": 256}
    row["isolated_update"] = {"per_layer_s": {"median": 183.1e-6}}
    packed = {"state": "damp", "backend": "gluon", "batch": 256}
    result = {"model": "Kimi-Linear-48B-A3B (synthetic weights)", "rows": [row, packed]}
    text = scale_tables._slower_kernels(result)
    now = next(
        found["step_s"]["median"]
        for _, document in recordings.recorded("update.json")
        for found in document["result"]["rows"]
        if (found["dims"]["name"], found["batch"], found["state"]) == ("kimi-linear", 256, "bf16")
        and found["gate"] == "fused"
    )
    assert f"took 183 µs here and takes {1e6 * now:.0f} µs" in text
    packed["backend"] = "triton"  # a GPU where tiles are what the engine takes
    assert scale_tables._slower_kernels(result) == ""
    packed["backend"] = "gluon"
    row["layout_id"] = "mma16816-columns128-k128-v128-bfloat16"
    assert scale_tables._slower_kernels(result) == ""


def test_steps_of_an_earlier_run_are_named_and_the_notes_are_about_the_others(
    tmp_path: Path,
) -> None:
    """A run that ended before the small batches keeps their rows; pictures and pages say of which run they are."""
    used = {"per_layer_mean": 180.25, "total": 721, "layers": 4, "of": 1024, "steps": 64}
    counted = full_size(
        bytes={"experts": 10, "states": 10}, experts_used=used, experts_used_profiled=used
    )
    assumed = full_size(bytes={"experts": 10, "states": 10})
    marked = [row | {"commit": "abcdef0123", "batch": b} for b in (4, 1) for row in assumed["rows"]]
    result = counted | {"rows": [*counted["rows"], *marked]}
    assert earlier_runs(result["rows"]) == "batch 1 and 4: run of abcdef0"
    assert earlier_runs(counted["rows"]) == ""
    text = scale_tables.decode(result)
    assert "Rows of batch 1 and 4: run of abcdef0, as this run ended before them" in text
    assert "; the bytes of their experts are those of uniform routing." in text
    assert "Bytes of experts" not in text
    assert "one token for all sequences" not in text
    assert "slower kernels" not in text
    speedups = [{"state": "damp", "batch": batch, "fp32_over_this": 1.2} for batch in (256, 4, 1)]
    drawn = result | {
        "speedups": speedups,
        "device": {"name": "a GPU"},
        "protocol": {"input_tokens": 256, "output_tokens": 64},
    }
    assert decode_figures(drawn, tmp_path) == ("tpot", "components")
    assert UNIFORM_ROUTING not in (tmp_path / "tpot.csv").read_text()
    assert decode._title(drawn).endswith("64 out\n(batch 1 and 4: run of abcdef0)")


def test_recordings_of_one_model_are_one_run_where_they_belong_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recordings, "BENCHMARKS", tmp_path)
    parts: dict[str, Any] = {
        key: [1] for key in ("summary", "blocks", "refused", "left_out", "ttft")
    }
    parts |= {"arms": ["dense"], "whole_window": None, "complete": True}
    for name, model, arms in (("a", "m", ["dense"]), ("b", "m", ["dense"]), ("c", "m", ["other"])):
        result = parts | {"model": model, "arms": arms}
        (tmp_path / f"quality-{name}.json").write_text(json.dumps({"result": result}))
    both, other = recordings.runs("quality-*.json", merge=quality_tables.merged)
    assert [path.stem for path, _ in both.files] == ["quality-a", "quality-b"]
    assert both.result["blocks"] == [1, 1]
    assert [path.stem for path, _ in other.files] == ["quality-c"]
    assert len(list(recordings.runs("quality-*.json"))) == 3


def test_emitted_table_counts_what_each_module_compared() -> None:
    found = {
        "ok": True,
        "seconds": 7.1,
        "output": ["packing   ok", "triton, tables ok", "triton ok"],
    }
    failed = found | {"ok": False, "output": ["packing   ok", "triton 0.3 FAILED"]}
    modules = {"a geometry": found, "another": failed}
    text = scale_tables.emitted({"device": "cuda", "calibrations": "synthetic", "modules": modules})
    assert "| a geometry | all passed | packing, triton 2 | 7.1 |" in text
    assert "| another | FAILED | packing | 7.1 |" in text
    assert "1 of 2 passed." in text
    assert "side by side" not in text
    for found in modules.values():
        found.pop("seconds")
    text = scale_tables.emitted({"device": "cuda", "calibrations": "synthetic", "modules": modules})
    assert "| a geometry | all passed | packing, triton 2 |\n" in text
    assert "side by side" in text


def test_sentences_of_validations_hold_recorded_numbers() -> None:
    results = {
        recordings.model_name(path, document): document["result"]
        for path, document in recordings.recorded(recordings.VALIDATED)
    }
    text = validation_findings.validation(results)
    for result in results.values():
        cutoffs = result["validation"]["cutoffs"]
        assert f"{sum(c['omitted_but_longer'] for c in cutoffs):,} (" in text
    assert "flat" in validation_findings.gate_input(results)
    assert (
        validation_findings.intervention({})
        == validation_findings.decay({})
        == validation_findings.gate_input({})
        == ""
    )


def test_every_recorded_table_is_on_the_page_once() -> None:
    page = results_page.results()
    assert "`tiny-gdn`" in page
    for section in results_page.RESULTS:
        found = [
            path
            for path, document in recordings.recorded(section.pattern)
            if section.wanted(document["result"]) and not section.table
        ]
        assert page.count(f"{'#' * section.level} {section.title}\n") <= 1
        for path in found if section.joint else ():
            assert f"(../benchmarks/{path.name})" in page, path.name
    for name in ("training", "emitted", "validate-tiny-gdn", "calibrate-tiny-kda"):
        assert f"(../benchmarks/{name}.json)" in page, name
    assert "| nan" not in page


def test_precision_figure_keeps_the_numbers_behind_it(tmp_path: Path) -> None:
    precision_figure(CALIBRATION, "tiny", tmp_path)
    with (tmp_path / "precision.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [(r["format"], r["updates"]) for r in rows][:3] == [
        ("int8-step", "1"),
        ("int8-step", "2"),
        ("int8-step", "4"),
    ]
    assert (tmp_path / "precision.png").stat().st_size > 10_000


def test_update_table_names_layer_batch_and_state() -> None:
    result = {
        "rows": [
            {
                "dims": {"name": "tiny-kda"},
                "batch": 8,
                "state": "damp",
                "backend": "gluon",
                "bits_per_value": 9.875,
                "step_s": {"median": 1.234e-5, "p90": 1.3e-5},
                "gb_per_s": 2345.6,
                "pass_gb_per_s": None,
            }
        ],
        "speedups": [{"dims": "tiny-kda", "batch": 8, "state": "damp", "fp32_over_this": 2.9}],
    }
    _, _, row = cells(tables.update(result))
    assert row == ["tiny-kda, batch 8, damp", "gluon", "9.875", "12.3 µs", "2.90x", "2,346", ""]


def test_training_table_puts_the_zeroed_state_beside_the_answers() -> None:
    need = {
        "nothing": {"recall": 0.95, "prose_bits_per_byte": 1.774},
        "zero-linear": {"recall": 0.0, "prose_bits_per_byte": 1.829},
    }
    model = {
        "prose_bits_per_byte": 1.707,
        "exact_match": {"recall": {"chance": 0.0, "1024": 0.959, "6144": 0.945}},
        "need_of_state": {"1024": need},
        "retained": {"64": {"initial": 0.7, "trained": 0.73}},
    }
    _, _, *rows = cells(tables.training({"models": {"tiny": model}}))
    assert [row[1] for row in rows] == ["1.707 (+0.055)", "95.9 / 94.5 / 0.0 %", "70.0 %, 73.0 %"]


def test_source_says_when_the_code_was_changed_beside_its_commit() -> None:
    path = recordings.BENCHMARKS / "some.json"
    for modified, said in ((True, " (modified tree)"), (False, ""), (None, "")):
        provenance = {"commit": "0123456789abcdef", "modified": modified}
        line = recordings.source_line(path, {"result": {"provenance": provenance}})
        assert line.endswith(f", commit 0123456789ab{said}.")
