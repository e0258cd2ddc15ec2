"""Figures of `analyze`: the same bytes every time, and the numbers behind them; what those of `bench decode` say."""

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hybridstate import api
from hybridstate.bench.components import COMPONENTS
from hybridstate.figures import analysis_figures, decode_figures, figure_names, style
from hybridstate.plan.retention import retention_map

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, "Figure"]:
    """Every figure that the test saves, by the stem of its file."""
    from matplotlib.figure import Figure

    found: dict[str, Figure] = {}
    save = Figure.savefig

    def kept(figure: Figure, path: Path, **options: object) -> None:
        found[path.stem] = figure
        save(figure, path, **options)

    monkeypatch.setattr(Figure, "savefig", kept)
    return found


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.parametrize("model", ["tiny_gdn", "tiny_kda"])
def test_pictures_and_numbers_are_reproducible(
    tmp_path: Path, model: str, request: pytest.FixtureRequest
) -> None:
    analysis = api.analyze(request.getfixturevalue(model), tp=2, balance="hybrid")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        analysis_figures(analysis, tmp_path / name)
    files = sorted(p.name for p in (tmp_path / "a").iterdir())
    names = figure_names(analysis.spec.unit, 2)
    assert ("channels" in names) == (model == "tiny_kda")
    assert files == sorted(f"{n}.{k}" for n in names for k in ("csv", "png"))
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


def test_csv_files_hold_the_numbers_of_the_analysis(tmp_path: Path, tiny_kda: Path) -> None:
    analysis = api.analyze(tiny_kda)
    analysis_figures(analysis, tmp_path)
    histogram = rows(tmp_path / "horizons.csv")
    assert sum(int(row["units"]) for row in histogram) == 3 * 32
    retained = rows(tmp_path / "retained.csv")
    assert len(retained) == 4 * 3 * 4
    for cutoff in analysis.cutoffs:
        w = cutoff.selection.w_max
        shares = [float(r["share"]) for r in retained if int(r["w_max"]) == w]
        assert np.mean(shares) == pytest.approx(cutoff.selection.fraction)
        (line,) = [r for r in rows(tmp_path / "bytes.csv") if int(r["w_max"]) == w]
        assert int(line["full_ragged_bytes"]) == cutoff.accounting.ragged_bytes


def test_extreme_horizons_are_drawn_and_counted(tmp_path: Path, tiny_gdn: Path) -> None:
    from dataclasses import replace

    from hybridstate.plan.analysis import cutoffs_at

    analysis = api.analyze(tiny_gdn)
    extreme = tuple(np.where(np.arange(h.size) % 2, np.inf, 0.0) for h in analysis.horizons)
    changed = replace(
        analysis, horizons=extreme, cutoffs=cutoffs_at(analysis.spec, extreme, [16, 64, 99, 4, 5])
    )
    analysis_figures(changed, tmp_path)
    histogram = {r["from_tokens"]: int(r["units"]) for r in rows(tmp_path / "horizons.csv")}
    assert histogram["0"] == histogram["inf"] == 9


def test_planning_figures_hold_the_numbers_of_the_placement(tmp_path: Path, tiny_kda: Path) -> None:
    analysis = api.analyze(tiny_kda, tp=2, balance="hybrid")
    analysis_figures(analysis, tmp_path)
    loads = rows(tmp_path / "load.csv")
    for cutoff, placement in zip(analysis.cutoffs, analysis.capacity.placements, strict=True):
        w = str(cutoff.selection.w_max)
        for name, units in (
            ("computed, contiguous heads", placement.contiguous_units),
            ("computed, permuted heads", placement.compute_units),
            ("stored", placement.stored_units),
        ):
            found = [int(r["units"]) for r in loads if r["w_max"] == w and r["load"] == name]
            assert found == list(units)
    states = {s.w_max: s for s in analysis.capacity.checkpoints if s.stored == "fp32"}
    dense = analysis.capacity.dense.full_bytes
    for row in rows(tmp_path / "capacity.csv"):
        if row["series"] == "ragged, balanced" and int(row["w_max"]) in states:
            state = states[int(row["w_max"])]
            assert int(row["slot_bytes"]) == state.full_bytes
            assert float(row["ratio_full"]) == pytest.approx(dense / state.full_bytes, rel=1e-8)


def test_capacity_is_drawn_where_a_checkpoint_takes_no_bytes(
    tmp_path: Path, tiny_kda: Path
) -> None:
    """No convolution and nothing retained: such a cutoff has no ratio."""
    from dataclasses import replace

    from hybridstate.plan.analysis import cutoffs_at
    from hybridstate.plan.capacity import capacity

    analysis = api.analyze(tiny_kda)
    layers = tuple(replace(layer, conv_width=1) for layer in analysis.spec.layers)
    spec = replace(analysis.spec, layers=layers)
    horizons = tuple(np.full_like(h, 20.0) for h in analysis.horizons)
    cutoffs = cutoffs_at(spec, horizons, [16, 64])
    planned = capacity(spec, horizons, [c.selection for c in cutoffs])
    changed = replace(analysis, spec=spec, horizons=horizons, cutoffs=cutoffs, capacity=planned)
    analysis_figures(changed, tmp_path)
    ratios = {(r["series"], r["w_max"]): r["ratio_full"] for r in rows(tmp_path / "capacity.csv")}
    assert (ratios["ragged", "16"], ratios["ragged", "64"]) == ("1", "")


@pytest.mark.parametrize("model", ["tiny_gdn", "tiny_kda"])
def test_no_title_or_legend_is_cut_off_or_covers_a_curve(
    tmp_path: Path, model: str, request: pytest.FixtureRequest, drawn: dict[str, "Figure"]
) -> None:
    """One cutoff gives the narrowest pictures; the name is as long as those of released models."""
    from dataclasses import replace

    analysis = api.analyze(request.getfixturevalue(model), w_max=(64,), tp=2, balance="hybrid")
    long = replace(analysis.source, name="NVIDIA-Nemotron-3-Super-120B-A12B")
    analysis_figures(replace(analysis, source=long), tmp_path)
    assert set(drawn) == set(figure_names(analysis.spec.unit, 2))
    for name, figure in drawn.items():
        figure.draw_without_rendering()  # at its own resolution, not that of the file
        assert all(axes.get_legend() is None for axes in figure.axes), name
        titles = [t for axes in figure.axes for t in (axes.title, axes._left_title)]  # type: ignore[attr-defined]
        texts = [t for t in (*titles, figure._suptitle) if t is not None and t.get_text()]  # type: ignore[attr-defined]
        for item in (*texts, *figure.legends):
            box = item.get_window_extent()
            assert box.x0 >= 0 <= box.y0, (name, item)
            assert box.x1 <= figure.bbox.x1, (name, item)
            assert box.y1 <= figure.bbox.y1, (name, item)


def test_grey_blocks_are_called_what_they_are(tiny_gdn: Path) -> None:
    from dataclasses import replace

    analysis = api.analyze(tiny_gdn)
    assert style.grey_label(analysis) == "full attention (no recurrent state)"
    family = replace(analysis.spec.family, analysis_only=True)
    mixed = replace(analysis, spec=replace(analysis.spec, family=family))
    assert style.grey_label(mixed) == "other blocks (no recurrent state)"


def test_channel_picture_names_its_block_from_both_bases(tmp_path: Path, tiny_kda: Path) -> None:
    analysis = api.analyze(tiny_kda)
    analysis_figures(analysis, tmp_path)
    nearest = retention_map(analysis.spec, analysis.cutoffs[0].selection)
    channels = rows(tmp_path / "channels.csv")
    block = nearest.blocks[nearest.nearest_median]
    assert {(r["block_from_0"], r["block_from_1"]) for r in channels} == {
        (str(block), str(block + 1))
    }
    assert len(channels) == 4 * 8


def test_decay_and_maps_cover_every_unit(tmp_path: Path, tiny_gdn: Path) -> None:
    analysis = api.analyze(tiny_gdn)
    analysis_figures(analysis, tmp_path)
    units = sum(h.size for h in analysis.horizons)
    assert sum(int(r["units"]) for r in rows(tmp_path / "decay.csv")) == units
    maps = rows(tmp_path / "horizon_map.csv")
    assert len(maps) == units
    found = [float(r["horizon_tokens"]) for r in maps]
    np.testing.assert_allclose(found, np.concatenate(analysis.horizons), rtol=1e-8)


@pytest.mark.parametrize(
    ("order", "backend", "older"),
    [
        ("tiles8", "gluon", True),
        ("tiles8", "triton", False),  # without matrix instructions the engine still takes tiles
        ("mma16816-columns128", "gluon", False),
    ],
)
def test_pictures_of_decode_steps_say_what_they_draw_and_which_kernels_ran(
    tmp_path: Path, drawn: dict[str, "Figure"], order: str, backend: str, older: bool
) -> None:
    step: dict[str, Any] = {"batch": 256, "bytes_s": 0.011}
    step["components"] = {name: {"s": 0.001, "launches": 1} for name in COMPONENTS}
    layouts = {
        "fp32": "tiles8-k128-v128-float32",
        "damp": "mma16816-columns128-k128-v128-f16x16-i8g32-f32scale",
        "bf16": f"{order}-k128-v128-bfloat16",
    }
    steps = [
        step | {"state": state, "layout_id": layout, "backend": backend}
        for state, layout in layouts.items()
    ]
    result = {
        "model": "Kimi-Linear-48B-A3B (synthetic weights)",
        "device": {"name": "NVIDIA H200"},
        "protocol": {"input_tokens": 256, "output_tokens": 64},
        "rows": steps,
        "speedups": [{"state": s, "batch": 256, "fp32_over_this": 1.25} for s in ("damp", "bf16")],
    }
    assert decode_figures(result, tmp_path) == ("tpot", "components")
    tpot, parts = (drawn[name].axes[0] for name in ("tpot", "components"))
    titles = [axes.get_title(loc="left") for axes in (tpot, parts)]
    assert titles[0].startswith("cut of the time per output token against FP32,\nKimi-Linear")
    assert titles[1].startswith("a decode step by component")
    assert ("(bf16: older kernels)" in titles[1]) == older
    assert tpot.get_legend_handles_labels()[1] == [
        "damp",
        "bf16, older kernels" if older else "bf16",
    ]
    assert [row["note"] for row in rows(tmp_path / "tpot.csv")] == ["", "older kernels" * older]
    for name, axes in (("tpot", tpot), ("components", parts)):
        drawn[name].draw_without_rendering()
        box = axes._left_title.get_window_extent()  # type: ignore[attr-defined]
        assert box.x1 <= drawn[name].bbox.x1, name
        assert box.y1 <= drawn[name].bbox.y1, name
