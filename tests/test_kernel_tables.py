"""Tables of docs/kernels.md and the picture of `bench update`."""

import csv
import json
from pathlib import Path

import kernel_tables
import pytest
import recordings

from hybridstate.bench.update import UpdateDims, run_update
from hybridstate.figures.update import update_figure


@pytest.mark.parametrize("name", kernel_tables.TABLES)
def test_recorded_tables_have_as_many_cells_in_every_row(name: str) -> None:
    pattern, table = kernel_tables.TABLES[name]
    for _, document in recordings.recorded(pattern):
        lines = table(document["result"]).splitlines()
        assert len({line.count("|") for line in lines}) <= 1
        assert len(lines) != 1


def test_the_fastest_packed_form_of_every_batch_is_bold() -> None:
    rows = [
        {"variant": name, "batch": batch, "median_us": us}
        for name, times in (
            ("gdn packed 128", (5.0, 9.0)),
            ("gdn packed 64", (6.0, 8.0)),
            ("gdn fp32 tiles", (1.0, 1.0)),
        )
        for batch, us in zip((256, 64), times, strict=True)
    ]
    text = kernel_tables.forms({"rows": rows})
    assert "| gdn packed 128 | **5** | 9 |" in text
    assert "| gdn packed 64 | 6 | **8** |" in text
    assert "| gdn fp32 tiles | 1 | 1 |" in text


@pytest.mark.parametrize(
    ("layout_id", "words"),
    [
        ("mma16816-columns128-k96-v192-f16x16-i8g32-f32scale", "fragment order, 96 x 192, 16 FP16 channels"),
        ("natural-k128-v128-f16x0-i8g32-f32scale", "natural order, 128 x 128, 0 FP16 channels"),
        ("rows-k128-v128-float32", "rows, 128 x 128, FP32"),
    ],
)  # fmt: skip
def test_layouts_are_named_in_words(layout_id: str, words: str) -> None:
    assert kernel_tables.layout_words(layout_id) == words
    rows = [
        {"variant": f"gdn split 32 x 8 {part}", "layout": layout_id}
        for part in (layout_id, layout_id[18:])
    ]
    rows += [{"variant": row["variant"], "batch": 1, "median_us": 4.0} for row in rows]
    assert kernel_tables.forms({"rows": rows}).count(f"| gdn split 32 x 8, {words} |") == 2


def test_rivals_name_both_packed_formats_and_overlapped_launches_their_ratio() -> None:
    layer = UpdateDims("small", "gdn", 1, 2, 16, 32, k_hi=8)
    found = run_update(dims=(layer,), batches=(1,), requantise_every=(8,), samples=1)
    result = json.loads(json.dumps(found.to_json()))
    lines = kernel_tables.rivals(result).splitlines()
    assert [line.split(" | ")[2] for line in lines[2:]] == [
        "DAMP", "DAMP with a value scale", "DAMP, L = 8",
    ]  # fmt: skip
    text = kernel_tables.overlapped(result)
    assert text.splitlines()[-1].startswith("| small | 1 | ")
    row = {"kernel": "k", "batch": 256, "counted_bytes": 103e6, "model_bytes": 100e6}
    assert "| k | 256 | 103.0 | 100.0 | +3.0 % |" in kernel_tables.counted({"rows": [row]})


def test_the_picture_of_updates_keeps_its_numbers(tmp_path: Path) -> None:
    layer = UpdateDims("small", "gdn", 1, 2, 16, 32, k_hi=8)
    found = run_update(
        dims=(layer,), batches=(1, 2), formats=("fp32", "damp"), requantise_every=(2,), samples=2
    )
    result = json.loads(json.dumps(found.to_json()))
    update_figure(result, tmp_path)
    with (tmp_path / "latency.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [(r["state"], r["batch"]) for r in rows] == [
        (state, batch)
        for state in ("FP32", "DAMP, every step", "DAMP, every 2 steps")
        for batch in "12"
    ]
    fastest = 1e9 * max(row["pass_gb_per_s"] for row in result["rows"])
    assert float(rows[0]["floor_s"]) == pytest.approx(int(rows[0]["bytes"]) / fastest)
    assert (tmp_path / "latency.png").stat().st_size > 10_000
