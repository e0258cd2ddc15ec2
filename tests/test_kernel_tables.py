"""Tables of docs/kernels.md and the picture of `bench update`."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kernel_tables
import pytest
import recordings
import torch
import update_tables

from hybridstate.bench.update import UpdateDims, run_update
from hybridstate.figures.update import update_figure
from hybridstate.kernels.layout import DenseLayout, PackedLayout


@pytest.mark.parametrize("name", kernel_tables.TABLES)
def test_recorded_tables_have_as_many_cells_in_every_row(name: str) -> None:
    pattern, table = kernel_tables.TABLES[name]
    for _, document in recordings.recorded(pattern):
        text, _, below = table(document["result"]).partition("\n\n")
        lines = text.splitlines()
        assert len({line.count("|") for line in lines}) <= 1
        assert len(lines) != 1
        assert "|" not in below


def _forms(**times: Sequence[float]) -> list[dict[str, Any]]:
    """Rows of forms at batches 256 and 64, or at all of the table."""
    return [
        {"variant": name.replace("_", " "), "batch": batch, "median_us": us}
        for name, some in times.items()
        for batch, us in zip(kernel_tables.FORM_BATCHES, some, strict=False)
    ]


def test_the_fastest_packed_form_of_every_batch_is_bold() -> None:
    rows = _forms(
        gdn_packed_128=(5.0, 9.0),
        gdn_packed_64=(6.0, 8.0),
        gdn_packed_product=(4.0, 7.0),  # one of the others, timed again
        gdn_fp32_tiles=(1.0, 1.0),
    )
    text = kernel_tables.forms({"rows": rows})
    assert "| gdn packed product | 4 | 7 |" in text
    assert "| gdn packed 128 | **5** | 9 |" in text
    assert "| gdn packed 64 | 6 | **8** |" in text
    assert "| gdn fp32 tiles | 1 | 1 |" in text


@pytest.mark.parametrize(
    ("layout_id", "words"),
    [
        ("mma16816-columns128-k96-v192-f16x16-i8g32-f32scale", "fragment order, 96 x 192, 16 FP16 channels"),
        ("natural-k128-v128-f16x0-i8g32-f32scale", "natural order, 128 x 128, 0 FP16 channels"),
        ("rows-k128-v128-float32", "rows, 128 x 128, FP32"),
        ("columns-k128-v96-float32", "columns, 128 x 96, FP32"),
        ("tiles8-k128-v128-float32", "tiles of 8 columns, 128 x 128, FP32"),
        ("tiles16-k64-v64-bfloat16", "tiles of 16 columns, 64 x 64, BF16"),
    ],
)  # fmt: skip
def test_layouts_are_named_in_words(layout_id: str, words: str) -> None:
    assert kernel_tables.layout_words(layout_id) == words
    row = {"layout": layout_id, "batch": 1, "median_us": 4.0}
    names = (f"gdn split 32 x 8 {layout_id}", "gdn tiles 32", "gdn packed hi 6")
    lines = kernel_tables.forms({"rows": [row | {"variant": name} for name in names]}).splitlines()
    labels = [line.split(" | ")[0] for line in lines[2:]]
    assert labels == [f"| gdn split 32 x 8, {words}", "| gdn tiles 32", "| gdn packed hi 6"]


@pytest.mark.parametrize(
    "layout",
    [
        *(DenseLayout(64, 64, torch.float32, order) for order in ("rows", "columns", "tiles")),
        DenseLayout(128, 128, torch.bfloat16, "fragment"),
        *(PackedLayout(128, 128, 16, order=order) for order in ("fragment", "natural")),
    ],
)
def test_every_layout_has_words(layout: DenseLayout | PackedLayout) -> None:
    words = kernel_tables.layout_words(layout.layout_id)
    assert f", {layout.key_dim} x {layout.value_dim}, " in words


def test_forms_of_earlier_runs_are_marked_and_their_commits_named() -> None:
    first, second, third = _forms(gdn_packed_128=(5.0,), gdn_packed_64=(6.0,), gdn_packed_32=(7.0,))
    old = {"commit": "a" * 40}
    text = kernel_tables.forms({"rows": [first, second | old, third | {"commit": "b" * 40}]})
    assert "| gdn packed 128 | **5** |" in text
    assert r"| gdn packed 64\* | 6 |" in text
    assert text.splitlines()[-1].startswith(
        rf"\* Of an earlier run, with the kernels of commit {'a' * 12} and {'b' * 12}"
    )
    assert "earlier" not in kernel_tables.forms({"rows": [first]})
    left_out = {"variant": "gdn packed 16", "left_out": True}
    assert kernel_tables.forms({"rows": [first, left_out]}) == kernel_tables.forms(
        {"rows": [first]}
    )


def test_forms_of_both_widths_are_compared_with_equal_launches() -> None:
    rows = _forms(
        gdn_packed_product_fused_overlap_0=(9.0, 8.0, 7.0, 6.0, 5.0, 4.0),
        gdn_packed_product_fused_overlap_2=(6.0,) * 6,
        gdn_fp32_tiles_8_fused=(18.0,) * 6,
        gdn_fp32_tiles_8_fused_overlap_2=(15.0,) * 6,
        kda_fp32_tiles_8_fused=(18.0,) * 6,
    )
    lines = kernel_tables.dispatched({"rows": rows}).splitlines()
    assert lines[2:] == [
        "| gdn | one after another | 2.00x | 2.25x | 2.57x | 3.00x | 3.60x | 4.50x |",
        "| gdn | overlapped | 2.50x | 2.50x | 2.50x | 2.50x | 2.50x | 2.50x |",
    ]
    assert kernel_tables.dispatched({"rows": rows[:6]}) == ""


def test_what_overlapping_and_fusing_change_is_said_beside_how_times_repeat() -> None:
    times = {
        "packed_128_fused_overlap_0": (90.0, 30.0),
        "packed_128_fused_overlap_2": (87.0, 26.5),
        "packed_128_given_gate": (89.0, 29.0),
        "packed_product_fused_overlap_0": (90.04, 30.0),
    }
    rows = _forms(**{f"{kind}_{name}": us for kind in ("gdn", "kda") for name, us in times.items()})
    text = kernel_tables.gains({"rows": rows})
    assert "takes off 3.0 / 3.0 µs at batch 256 and 3.5 / 3.5 µs at 64." in text
    assert "costs 1.0 / 1.0 µs at batch 256" in text
    assert "took 0.0 / 0.0 µs less" in text
    assert kernel_tables.gains({"rows": rows[:-2]}) == ""


def test_emitted_modules_are_counted() -> None:
    modules = {"a": {"ok": True}, "b": {"ok": False}, "c": {"ok": True}}
    assert kernel_tables.emitted({"device": "cuda", "modules": modules}).startswith("2 of 3 ")


def test_rivals_name_both_packed_formats_and_overlapped_launches_their_ratio() -> None:
    layer = UpdateDims("small", "gdn", 1, 2, 16, 32, k_hi=8)
    found = run_update(dims=(layer,), batches=(1,), requantise_every=(8,), samples=1)
    result = json.loads(json.dumps(found.to_json()))
    lines = update_tables.rivals(result).splitlines()
    assert [line.split(" | ")[2] for line in lines[2:]] == [
        "DAMP", "DAMP with a value scale", "DAMP, L = 8",
    ]  # fmt: skip
    text = update_tables.overlapped(result)
    assert text.splitlines()[-1].startswith("| small | 1 | ")
    row = {"kernel": "k", "batch": 256, "counted_bytes": 103e6, "model_bytes": 100e6}
    assert "| k | 256 | 103.0 | 100.0 | +3.0 % |" in kernel_tables.counted({"rows": [row]})


def _step(name: str, batch: int, us: float, gb_per_s: float) -> dict[str, object]:
    return {
        "dims": {"name": name, "value_heads": 12},
        "batch": batch,
        "state": "damp",
        "step_s": {"median": us * 1e-6},
        "pass_s": {"median": 20e-6},
        "gb_per_s": gb_per_s,
        "pass_gb_per_s": 4000.0,
    }


def test_shares_of_the_pass_are_by_bytes_and_by_time_and_bold_below_the_wanted() -> None:
    rows = [_step("k3", 64, 9.0, 2000.0), _step("k3", 128, 25.0, 3000.0)]
    plain = {"rows": [*rows, _step("k3", 512, 80.0, 3600.0)]}
    text = update_tables.shares(plain, {"rows": [_step("k3", 128, 22.0, 3200.0)]}).splitlines()
    assert text[2:] == [
        "| k3 | 128 | 1,536 | 25.0 | 20.0 | **75.0 %** | 80.0 % | 22.0 | 20.0 | 80.0 % | 90.9 % |",
        "| k3 | 512 | 6,144 | 80.0 | 20.0 | 90.0 % | 25.0 % |  |  |  |  |",
    ]
    # 9 µs at half the pass's bytes a second: half of it is more than the bytes take
    assert update_tables.over_pass(plain).splitlines()[-1] == "| k3 | 4.5 | 6.2 | 8.0 |"


def test_the_fastest_fp32_kernel_is_named_where_it_is_a_peers() -> None:
    def entry(batch: int, **seconds: float) -> dict[str, object]:
        places = {"ours": "fp32, in place", "peer": "fp32, out of place"}
        return {
            "dims": "layer",
            "batch": batch,
            "state": "damp",
            "fastest": {
                places[who]: {
                    "who": f"{who} 1.0: kernel",
                    "seconds": x,
                    "over_damp": x / 2,
                }
                for who, x in seconds.items()
            },
        }

    result = {"fastest": [entry(1, ours=2.0, peer=1.0), entry(8, ours=3.0, peer=4.0)]}
    text = update_tables.fastest_fp32(result)
    assert "| layer | 0.50x, peer | 1.50x |" in text
    assert "peer" not in update_tables.fastest_fp32(result, batches=(8,))
    assert update_tables.fastest_fp32(result, layers=()) == ""


def test_peers_are_named_with_version_place_and_failures() -> None:
    base = {"peer": "other 1.2", "kernel": "step", "state": "fp32", "in_place": False}
    rows = [
        base | {"dims": "one", "batch": 1, "step_s": {}},
        base | {"dims": "two", "batch": 1, "failed": "TypeError"},
    ]
    text = update_tables.peers({"peers": rows})
    assert "| other 1.2 | step | fp32 | out of place | one; two | 1 | 1 |" in text
    assert update_tables.peers({"peers": []}) == ""


def _ring_row(name: str, us: float, **other: Any) -> dict[str, Any]:
    base = {"what": "step", "kind": "gdn", "batch": 256, "every": 8, "bits_per_value": 11.0}
    return base | {"name": name, "us_mean": [us], "us_steps": [us] * 8} | other


def test_ring_steps_are_told_apart_by_what_they_do() -> None:
    rows = [
        _ring_row("mixed phases", 70.0),
        _ring_row("aligned, one kernel", 64.0, us_steps=[50.0, 51.0, 52.0, 110.0]),
        _ring_row("aligned, two kernels", 61.0, us_steps=[48.0, 51.0, 110.0]),
        _ring_row("aligned", 9.0, batch=8),
    ]
    lines = kernel_tables.ring_steps({"rows": rows}).splitlines()
    assert lines[2:] == [
        "| gdn | 8 | one | 50.0 | 52.0 | 110.0 | 64.0 | +6.0 |",
        "| gdn | 8 | two | 48.0 | 51.0 | 110.0 | 61.0 | +9.0 |",
    ]


def test_ring_steps_of_other_launches_are_left_out() -> None:
    """Else rows of one length are named alike, beside the mixed phases of another launch."""
    plain = [_ring_row("mixed", 70.0), _ring_row("aligned", 64.0)]
    others = [
        _ring_row(f"{phases}, {launch}", 1.0)
        for launch in ("168 registers", "early, overlapped")
        for phases in ("mixed", "aligned")
    ]
    text = kernel_tables.ring_steps({"rows": plain + others})
    assert text == kernel_tables.ring_steps({"rows": plain})
    assert text.splitlines()[2:] == ["| gdn | 8 | one | 64.0 | 64.0 | 64.0 | 64.0 | +6.0 |"]


def test_ring_lengths_without_a_time_have_no_row() -> None:
    rows = [
        _ring_row("every step, update.py", 92.0, every=1),
        _ring_row("every step, update.py", 7.0, every=1, batch=8),
        _ring_row("mixed", 70.0, every=4),
        _ring_row("mixed", 68.0),
        _ring_row("aligned", 66.0),
        _ring_row("aligned, two kernels", 63.0),
        _ring_row("mixed, 168 registers", 1.0),
        _ring_row("mixed, overlapped", 2.0, every=16),  # another launch alone
        _ring_row("mixed", 11.0, batch=8),
    ]
    lines = kernel_tables.ring({"rows": rows}).splitlines()
    assert [line.split(" |  |  |  | ")[0] for line in lines[2:]] == [
        "| 256 | every step | 92 |  |  | 11.00",
        "| 256 | L = 4 | 70 |  |  | 11.00",
        "| 256 | L = 8 | 68 | 66 | 63 | 11.00",
        "| 8 | every step | 7 |  |  | 11.00",
        "| 8 | L = 8 | 11 |  |  | 11.00",
    ]


def test_every_launch_of_a_ring_has_a_row_of_its_own() -> None:
    rows = [
        _ring_row("mixed, early, overlapped", 69.4, every=4),
        _ring_row("mixed", 67.8),
        _ring_row("aligned", 66.1),
        _ring_row(
            "aligned, two kernels", 63.5
        ),  # not a launch: two kernels, one for each kind of step
        _ring_row("mixed, 168 registers", 66.0),
        _ring_row("aligned, 168 registers", 62.6),
        _ring_row("mixed, early, overlapped", 67.79),
        _ring_row("mixed", 74.9, kind="kda"),
        _ring_row("mixed", 27.2, batch=64),
        _ring_row("mixed, early, overlapped", 23.6, batch=64),
        _ring_row("mixed", 10.9, batch=8),  # alone at its batch
    ]
    lines = kernel_tables.ring_launches({"rows": rows}).splitlines()
    assert lines[2:] == [
        "| 256 | plain | 67.8 | 66.1 | 74.9 |  |",
        "| 256 | 168 registers | 66.0 (-1.8) | 62.6 (-3.5) |  |  |",
        "| 256 | early, overlapped | 67.8 (+0.0) |  |  |  |",
        "| 64 | plain | 27.2 |  |  |  |",
        "| 64 | early, overlapped | 23.6 (-3.6) |  |  |  |",
    ]
    assert kernel_tables.ring_launches({"rows": rows[:4]}) == ""


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "programs"),
    [(125, 21760, 1, 10), (150, 22272, 1, 10), (189, 512, 1, 8), (72, 256, 1, 28), (56, 15872, 8, 4)],
)  # fmt: skip
def test_programs_on_a_multiprocessor(
    registers: int, shared: int, warps: int, programs: int
) -> None:
    assert kernel_tables.programs_that_fit(registers, shared, warps) == programs


def test_compiled_variants_say_how_many_programs_fit() -> None:
    found = {"registers": 56, "local": 0, "shared": 15872, "instructions": 776}
    text = kernel_tables.compiled({"gluon gdn split 32 x 8": found})
    assert "| gluon gdn split 32 x 8 | 56 | 0 | 15,872 | 776 | 4 |" in text


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
    without = [row for row in result["rows"] if row["state"] != "fp32"]
    update_figure(result | {"rows": without}, tmp_path)  # nothing to be faster than
