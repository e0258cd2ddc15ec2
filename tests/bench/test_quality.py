"""`bench quality`: the report, its refusals, what a stopped run leaves, figures and tables."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hybridstate.bench import quality
from hybridstate.bench.cutoffs import selections_at
from hybridstate.bench.quality import run_quality
from hybridstate.bench.quality_arms import reuse_arms, storage_arms, stored_bytes
from hybridstate.bench.quality_options import Options
from hybridstate.bench.quality_window import whole_window
from hybridstate.bench.restore import RECOMPUTE_KL
from hybridstate.cli.bench_quality import named_tasks
from hybridstate.cli.main import app
from hybridstate.errors import NumericError, SourceError, UsageError
from hybridstate.figures.quality import quality_figures
from hybridstate.plan.accounting import account
from hybridstate.plan.store import read_plan
from hybridstate.quality.generation import generate
from hybridstate.quality.replay import Replayed
from hybridstate.quality.ruler import Material
from hybridstate.quality.tasks import TASKS
from hybridstate.trajectories.model import LoadedModel, load_model
from hybridstate.trajectories.prompts import heldout_text

ROOT = Path(__file__).parents[2]
MATERIAL = Material.of(heldout_text())
OPTIONS = Options(
    ("recall", "niah_single_1"),
    tokens=(640,),
    questions=2,
    replays=2,
    seeds=2,
    repeats=1,
    chunk=256,
)


@pytest.fixture(scope="module")
def loaded(tiny_kda: Path) -> LoadedModel:
    return load_model(str(tiny_kda))


@pytest.fixture(scope="module")
def arms(loaded: LoadedModel) -> Any:
    return (
        *reuse_arms(loaded, selections_at(loaded, (16, 512)), 2),
        *storage_arms(loaded, ["bf16"], None),
    )


@pytest.fixture(scope="module")
def recorded() -> list[dict[str, Any]]:
    return []


@pytest.fixture(scope="module")
def result(loaded: LoadedModel, arms: Any, recorded: list[dict[str, Any]]) -> dict[str, Any]:
    return run_quality(loaded, arms, OPTIONS, MATERIAL, record=recorded.append).to_json()


def test_every_arm_on_every_block(result: dict[str, Any], arms: Any) -> None:
    assert json.loads(json.dumps(result, allow_nan=False))
    assert result["complete"]
    names = [arm.name for arm in arms]
    assert names[:7] == [
        *("dense", "recompute", "int8-checkpoint"),
        *("nr-16", "wr-16", "nr-16+int8", "wr-16+int8"),
    ]
    blocks = {(b["task"], b["boundary"]) for b in result["blocks"]}
    assert blocks == {("recall", "prompt"), ("recall", "question"), ("niah_single_1", "prompt")}
    for block in result["blocks"]:
        assert list(block["arms"]) == names
        assert block["rows_divided_by"] == 1
        stages = {"other", "prefill", "prefill of formats", "cache", "replies", "scores"}
        assert set(block["stages_s"]) == stages
        assert block["seconds"] == pytest.approx(sum(block["stages_s"].values()))
        for arm in block["arms"].values():
            samples = [float(x) for row in arm["samples"] for x in row.split()]
            assert [len(row.split()) for row in arm["samples"]] == [2, 2]
            assert arm["accuracy"] == pytest.approx(sum(samples) / 4)


def test_dense_and_recompute_agree_and_hits_are_counted(result: dict[str, Any]) -> None:
    for block in result["blocks"]:
        arms = block["arms"]
        assert arms["dense"]["kl_first"] == 0.0
        assert arms["recompute"]["kl_first"] < RECOMPUTE_KL[torch.float32]
        assert arms["recompute"]["hit"]["token_hit"] == 0.0
        expected = block["prefix_tokens"] / block["tokens"]
        for name, arm in arms.items():
            if name != "recompute":
                assert arm["hit"]["token_hit"] == pytest.approx(expected)
                assert arm["hit"]["evictions"] == 0
        assert arms["nr-16"]["hit"]["compressed_hits"] == 4
        assert arms["bf16"]["same_reply"] <= 1.0
        assert block["hit_pooled"] == pytest.approx(expected)


def test_bytes_are_those_of_the_accounting(
    loaded: LoadedModel, arms: Any, result: dict[str, Any]
) -> None:
    found = result["blocks"][0]["arms"]
    for selection in selections_at(loaded, (16, 512)):
        accounting = account(loaded.spec, selection)
        assert found[f"nr-{selection.w_max}"]["bytes"] == accounting.ragged_bytes
        assert found["dense"]["bytes"] == accounting.dense_bytes
    bf16 = next(arm for arm in arms if arm.name == "bf16")
    conv = sum(n.conv_channels * (n.conv_width - 1) * 2 for n in loaded.spec.layers)
    assert stored_bytes(loaded, bf16) - conv == (found["dense"]["bytes"] - conv) / 2


def test_summary_weighs_tasks_alike(result: dict[str, Any]) -> None:
    row = next(r for r in result["summary"] if r["arm"] == "nr-512" and r["suite"] == "own")
    cell = next(b for b in result["blocks"] if b["task"] == "recall")["arms"]["nr-512"]
    assert row["tasks"] == 1
    assert row["accuracy"] == cell["accuracy"]
    assert row["accuracy_se"] == pytest.approx(cell["accuracy_se"])


def test_a_stopped_run_leaves_what_it_has(
    result: dict[str, Any], recorded: list[dict[str, Any]]
) -> None:
    assert [len(r["blocks"]) for r in recorded] == [0, 1, 2, 3]
    assert not any(r["complete"] for r in recorded)
    assert recorded[0]["whole_window"] is not None


def same_but_for_time(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> bool:
    times = ("seconds", "stages_s")
    return [{k: v for k, v in x.items() if k not in times} for x in a] == [
        {k: v for k, v in x.items() if k not in times} for x in b
    ]


@pytest.fixture
def half(recorded: list[dict[str, Any]], result: dict[str, Any], tmp_path: Path) -> Path:
    """The document of a run that was killed after its first block."""
    assert result["complete"]
    path = tmp_path / "half.partial.json"
    path.write_text(json.dumps({"schema": "x", "result": recorded[1]}))
    return path


def test_a_killed_run_goes_on_without_its_blocks(
    loaded: LoadedModel,
    arms: Any,
    result: dict[str, Any],
    half: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[tuple[str, str]] = []
    real = quality.run_block

    def counted(*args: Any) -> Any:
        ran.append((args[2].task, args[3]))
        return real(*args)

    monkeypatch.setattr(quality, "run_block", counted)
    kept: list[dict[str, Any]] = []
    again = run_quality(loaded, arms, OPTIONS, MATERIAL, resume=half, record=kept.append).to_json()
    assert ran == [("recall", "question"), ("niah_single_1", "prompt")]
    assert same_but_for_time(again["blocks"], result["blocks"])
    assert again["blocks"][0] == result["blocks"][0]
    assert again["summary"] == result["summary"]
    assert again["complete"]
    assert [len(r["blocks"]) for r in kept] == [1, 2, 3]
    groups = [(t["suite"], t["boundary"]) for t in again["ttft"]]
    assert groups == [("own", "prompt"), ("own", "question"), ("ruler", "prompt")]
    whole = half.with_name("whole.json")
    whole.write_text(json.dumps(again))
    run_quality(loaded, arms, replace(OPTIONS, within=-1.0), MATERIAL, resume=whole)
    assert len(ran) == 2


def test_blocks_stay_in_the_order_of_the_plan(
    loaded: LoadedModel, arms: Any, result: dict[str, Any], tmp_path: Path
) -> None:
    """A later block that was measured first does not change the tables."""
    path = tmp_path / "last.json"
    path.write_text(json.dumps({**result, "blocks": result["blocks"][1:]}))
    again = run_quality(loaded, arms, replace(OPTIONS, repeats=1), MATERIAL, resume=path)
    assert same_but_for_time(again.to_json()["blocks"], result["blocks"])


def test_another_run_is_not_continued(loaded: LoadedModel, arms: Any, half: Path) -> None:
    for change, name in (({"questions": 3}, "questions"), ({"chunk": 128}, "chunk")):
        with pytest.raises(UsageError, match=f"another {name}"):
            run_quality(loaded, arms, replace(OPTIONS, **change), MATERIAL, resume=half)
    with pytest.raises(UsageError, match="another arms"):
        run_quality(loaded, arms[:3], OPTIONS, MATERIAL, resume=half)
    fewer = replace(OPTIONS, tasks=("recall",), boundaries=("prompt",))
    assert len(run_quality(loaded, arms, fewer, MATERIAL, resume=half).blocks) == 1
    for text in ("{", "[]", '{"result": {"blocks": []}}'):
        half.write_text(text)
        with pytest.raises(SourceError, match=r"cannot read the blocks of half\.partial\.json"):
            run_quality(loaded, arms, OPTIONS, MATERIAL, resume=half)


def test_equal_rounds_are_answered_once(
    loaded: LoadedModel, arms: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = replace(OPTIONS, tasks=("recall",), boundaries=("prompt",), repeats=0)
    some = [*arms[:2], *arms[3:5], *storage_arms(loaded, ["int8-step-stochastic"], None)]
    once = run_quality(loaded, some, one, MATERIAL).blocks
    assert [a["rounds_decoded"] for a in once[0]["arms"].values()] == [1, 1, 1, 1, 2]
    monkeypatch.setattr(quality, "_repeats", lambda _arm, _options: False)
    every = run_quality(loaded, some, one, MATERIAL).blocks
    for name, arm in once[0]["arms"].items():
        other = every[0]["arms"][name]
        assert other["rounds_decoded"] == 2
        assert arm["kl_first"] == pytest.approx(other["kl_first"], rel=1e-3, abs=1e-9)
        for key in ("samples", "hit", "accuracy", "same_reply", "rounds_differ", "difference"):
            assert arm[key] == other[key]
    assert once[0]["dense_replies"] == every[0]["dense_replies"]


def test_no_time_is_an_error_and_little_time_is_said(loaded: LoadedModel, arms: Any) -> None:
    with pytest.raises(NumericError, match="none was begun"):
        run_quality(loaded, arms[:1], replace(OPTIONS, within=-1.0, repeats=0), MATERIAL)


def test_blocks_that_were_not_resident_are_refused(loaded: LoadedModel, arms: Any) -> None:
    few = replace(OPTIONS, tasks=("recall",), slots=1, resident=True, boundaries=("prompt",))
    with pytest.raises(NumericError, match="no block can be reported"):
        run_quality(loaded, [arms[0], arms[3]], few, MATERIAL)
    kept = run_quality(loaded, [arms[0], arms[3]], replace(few, resident=False), MATERIAL)
    hit = kept.blocks[0]["arms"]["nr-16"]["hit"]
    assert hit["not_resident"]
    short = replace(few, slots=None, boundaries=("question",), tokens=(256,))
    low = run_quality(loaded, [arms[0], arms[3]], replace(short, resident=False), MATERIAL)
    assert low.blocks[0]["arms"]["dense"]["hit"]["token_hit"] > 0.7


def test_a_full_device_gets_fewer_arms_at_once(
    loaded: LoadedModel, arms: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def small(*args: Any, **options: Any) -> Any:
        sizes.append(len(args[2]))
        if len(args[2]) > 2:
            raise torch.OutOfMemoryError("no room")
        return generate(*args, **options)

    monkeypatch.setattr("hybridstate.bench.quality.generate", small)
    one = replace(OPTIONS, tasks=("recall",), boundaries=("prompt",), repeats=0, rows=16)
    found = run_quality(loaded, [*arms[:2], *arms[3:5]], one, MATERIAL)
    assert sizes == [4, 2, 2]
    assert len(found.blocks[0]["arms"]) == 4
    assert found.blocks[0]["rows_divided_by"] == 2


def test_whole_window_is_checked(
    loaded: LoadedModel, arms: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = whole_window(loaded, arms, questions=2)
    assert found is not None
    assert found["prefix_tokens"] <= found["window"]
    assert found["state_error"] <= 1e-5
    assert found["same_reply_as_recompute"] == 1.0
    assert whole_window(loaded, arms[:3], questions=2) is None

    real = Replayed.__call__

    def wrong(self: Any, prefix: Any, window: int) -> Any:
        return [1.5 * state for state in real(self, prefix, window)]

    monkeypatch.setattr(Replayed, "__call__", wrong)
    with pytest.raises(NumericError, match="recomputation"):
        whole_window(loaded, arms, questions=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": ("riddles",)}, "--tasks"),
        ({"boundaries": ("middle",)}, "--boundary"),
        ({"tokens": (64,)}, "--tokens"),
        ({"questions": 0}, "--questions"),
        ({"replays": 0}, "--replays"),
        ({"seeds": 6}, "--seeds"),
        ({"temperature": -1.0}, "--temperature"),
        ({"slots": 0}, "--slots"),
    ],
)
def test_options_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(OPTIONS, **change).check()


def test_formats_take_their_channels_from_the_plan(loaded: LoadedModel) -> None:
    with pytest.raises(UsageError, match="from a plan"):
        storage_arms(loaded, ["damp"], None)
    model = load_model("tiny-kda")
    plan = read_plan(ROOT / "plans" / "tiny-kda")
    names = [arm.name for arm in storage_arms(model, None, plan)]
    assert {"fp16", "bf16", "int8-step", "damp", "damp-random"} <= set(names)
    damp, random = storage_arms(model, ["damp", "damp-random"], plan)
    keys = plan.key_order(model.spec.layers[0].index)
    assert keys is not None
    assert damp.storage.protected is not None
    assert random.storage.protected is not None
    assert damp.storage.protected[0].equal(torch.from_numpy(keys[:, :16].astype("int64")))
    assert not random.storage.protected[0].equal(damp.storage.protected[0])
    with pytest.raises(UsageError, match="not what the plan holds"):
        storage_arms(model, ["damp-k4"], plan)


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_figures_and_their_numbers(result: dict[str, Any], tmp_path: Path) -> None:
    quality_figures(result, "tiny", tmp_path)
    for name in ("quality_cutoffs", "quality_ttft", "quality_formats"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
        rows = table(tmp_path / f"{name}.csv")
        assert rows
    summary = {
        (r["suite"], r["boundary"], str(r["tokens"]), r["arm"]): r["accuracy"]
        for r in result["summary"]
    }
    found = [row for row in table(tmp_path / "quality_cutoffs.csv") if row["arm"] == "nr"]
    assert len(found) == 2 * 3
    for row in found:
        group = (row["suite"], row["boundary"], row["tokens"])
        score = summary[*group, f"nr-{row['w_max']}"]
        assert math.isclose(float(row["score"]), score, rel_tol=1e-8, abs_tol=1e-12)
        apart = score - summary[*group, "dense"]
        assert math.isclose(float(row["minus_dense"]), apart, rel_tol=1e-8, abs_tol=1e-12)


def test_tables_of_the_results(result: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import quality_findings
    import quality_tables

    assert "| random-512 |" in quality_tables.quality(result)
    assert "| 512, own, to the prompt |" in quality_tables.against_masks(result)
    assert "the standard error of one score" in quality_tables.by_task(result)
    assert "| bf16 |" in quality_tables.formats(result)
    assert "`wr-512`" in quality_tables.windows({"tiny": result})
    assert "Time to the first token" in quality_findings.hits({"tiny": result})
    assert "Few writes" in quality_findings.formats({"tiny": result})
    twice = quality_tables.merged([result, result])
    assert len(twice["blocks"]) == 2 * len(result["blocks"])
    with pytest.raises(ValueError, match="other models or arms"):
        quality_tables.merged([result, {**result, "model": "other"}])
    dense = next(r for r in result["summary"] if r["arm"] == "dense" and r["suite"] == "ruler")
    assert bool(quality_findings.untrained({"tiny": result})) == (dense["accuracy"] < 0.1)


def test_suites_by_name() -> None:
    assert named_tasks(None, qa=False) is None
    assert named_tasks(["own", "cwe"], qa=False) == [*TASKS, "cwe"]
    assert "qa_1" in (named_tasks(["ruler"], qa=True) or [])
    assert "qa_1" not in (named_tasks(["ruler"], qa=False) or [])


def test_command_writes_result_and_figures(tiny_kda: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    command = f"bench quality {tiny_kda} --tasks registers --tokens 320 --questions 2 --replays 1"
    command += f" --seeds 1 --w-max 16 --format bf16 --repeats 1 --device cpu --boundary prompt -o {folder}"
    found = CliRunner().invoke(app, command.split())
    assert found.exit_code == 0, found.output
    assert sorted(p.name for p in folder.iterdir())[0] == "quality.json"
    document = json.loads((folder / "quality.json").read_text())
    assert document["result"]["blocks"][0]["task"] == "registers"
    assert "token hit" in found.output
    assert not list(tmp_path.glob("*.partial.json"))
    again = tmp_path / "again"
    resumed = f"{command[: command.index(' -o ')]} --resume {folder / 'quality.json'} -o {again}"
    found = CliRunner().invoke(app, resumed.split())
    assert found.exit_code == 0, found.output
    blocks = [
        json.loads((f / "quality.json").read_text())["result"]["blocks"] for f in (folder, again)
    ]
    assert blocks[0] == blocks[1]
