"""`bench serve` on two ranks (gloo): the tokens of one rank, equal decisions, checkpoints placed either way."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hybridstate import bench_serve
from hybridstate.bench.serve import Bench, Served, ToldExecutor
from hybridstate.bench.serve_workers import Peers, Setting, Worker
from hybridstate.bench.serving_arms import Arm
from hybridstate.bench.serving_setup import profile_of
from hybridstate.bench.sweep import Case, Job, Options
from hybridstate.checkpoint import open_checkpoint
from hybridstate.cli.main import app
from hybridstate.errors import MissingRequirement, NumericError, PlanMismatch, UsageError
from hybridstate.runtime.admission import Pools
from hybridstate.runtime.parallel import Ranks

SCALE = 1 / 256
SMALL: dict[str, Any] = {
    "scale": SCALE,
    "conversations": 4,
    "clients": 3,
    "limits": (2,),
    "device": "cpu",
    "w_max": (16,),
    "ratios": (0.25,),
    "seeds": 1,
    "control": False,
}
ARMS = ("nr", "wr", "int8", "nr+int8", "damp+nr")
POOLS = Pools(native=4, packed=5, watermark=2)
"""Fewer slots than the conversations leave states: some are demoted, some evicted, some loaded."""


CUTOFFS = {"qwen3_5": 256, "kimi_linear": 32}
"""At which the ranks keep different numbers of units, so that some travel."""


def cutoff_of(model: Path) -> int:
    return next(w for family, w in CUTOFFS.items() if family in model.name)


def setting_of(model: Path, tp: int = 2) -> Setting:
    options = Options(
        cutoffs=(cutoff_of(model),), clients=3, limits=(2,), tp=tp, balances=("off", "storage")
    )
    return Setting(str(model), None, "auto", None, "cpu", "wildchat-shape", None, 4, SCALE, options)


def arms_of(model: Path, tp: int) -> dict[str, Arm]:
    balances = ("off", "storage") if tp > 1 else ("off",)
    profile, cutoff = profile_of(open_checkpoint(str(model))), cutoff_of(model)
    arms = profile.arms((cutoff,), tp=tp, balances=balances)
    return {arm.name.replace(f"-{cutoff}", ""): arm for arm in arms}


@pytest.fixture(scope="module", params=["qwen3_5", "kimi_linear"])
def model(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> Path:
    heads = {"key_heads": 4, "value_heads": 8} if request.param == "qwen3_5" else {}
    return tiny_checkpoint(request.param, tokenizer=True, **heads)


NAMES = ("dense", "nr", "wr", "nr+int8", "nr storage", "wr storage", "nr+int8 storage")


@pytest.fixture(scope="module")
def found(model: Path) -> dict[str, dict[int, Served]]:
    """The same arm in the same pools on one rank and on two, by plain name."""
    from dataclasses import replace

    alone = Worker(setting_of(model, 1), "cpu")
    pools = {name: POOLS if name != "dense" else replace(POOLS, packed=0) for name in NAMES}
    served: dict[str, dict[int, Served]] = {name: {} for name in NAMES}
    one, two = arms_of(model, 1), arms_of(model, 2)
    kept: list[Served] = []

    def told(bench: Bench, *arguments: Any) -> Served:
        kept.append(serve(bench, *arguments))
        return kept[-1]

    serve = Bench.serve
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bench, "serve", told)
        for name in NAMES:
            alone.serve(Job(Case(one[name.split(" ")[0]], 1.0, 2), pools[name], 0))
            served[name][1] = kept[-1]
        assert all(two[name].remote_bytes > 0 for name in NAMES if "storage" in name)
        with Peers(setting_of(model)) as peers:
            here = Worker(setting_of(model), "cpu", peers.ranks)
            for name in NAMES:
                outcome = peers.serve(here, Job(Case(two[name], 1.0, 2), pools[name], 0))
                assert outcome is not None
                assert outcome.error is None
                served[name][2] = kept[-1]
            here.close()
    return served


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_do_what_one_does(found: dict[str, dict[int, Served]], name: str) -> None:
    """Tokens, hits, victims and slots; the digest also covers rank 1, which compared its own with rank 0's."""
    one, two = found[name][1], found[name][2]
    assert two.outputs == one.outputs
    assert two.cache.digest == one.cache.digest
    assert two.cache.counters == one.cache.counters
    if name != "dense":
        assert one.cache.counters.demotions > 0
        assert one.cache.counters.tokens_compressed > 0


@pytest.mark.slow
def test_arms_without_all_units_say_other_things(found: dict[str, dict[int, Served]]) -> None:
    """The comparison above is between arms that differ: omitted units change some reply."""
    assert found["nr"][1].outputs != found["dense"][1].outputs


@pytest.fixture(scope="module")
def result(tiny_kda: Path) -> dict[str, Any]:
    return bench_serve(tiny_kda, tp=2, balances=("off", "storage"), arms=ARMS, **SMALL)


def test_arms_with_a_cutoff_run_once_per_placement(result: dict[str, Any]) -> None:
    rows = {point["arm"]: point for point in result["points"]}
    assert {name: row["balance"] for name, row in rows.items()} == {
        "dense": "off",
        "int8": "off",
        "nr-16": "off",
        "wr-16": "off",
        "nr-16+int8": "off",
        "damp+nr-16": "off",
        "nr-16 storage": "storage",
        "wr-16 storage": "storage",
        "nr-16+int8 storage": "storage",
    }
    assert result["profile"]["tp"] == 2
    assert result["profile"]["balances"] == ["off", "storage"]
    for row in rows.values():
        assert row["tp"] == 2
        assert "skipped" not in row
        spent = row["native_bytes"] + row["compressed_bytes"] + row["staging_bytes"]
        assert spent <= row["budget_bytes"]
        assert row["mean"]["hybridstate"]["skipped_nonfinite"] == 0
    assert rows["nr-16 storage"]["cached_bytes"] <= rows["nr-16"]["cached_bytes"]
    json.dumps(result, allow_nan=False)


def test_a_rank_holds_its_share_of_the_bytes(tiny_kda: Path, result: dict[str, Any]) -> None:
    alone = bench_serve(tiny_kda, arms=("int8",), **SMALL)
    for one, two in zip(alone["points"], result["points"], strict=False):
        assert one["arm"] == two["arm"]
        assert (one["live_bytes"], one["cached_bytes"]) == (
            2 * two["live_bytes"],
            2 * two["cached_bytes"],
        )
        assert one["dense_slots"] == two["dense_slots"]
        assert one["output_digests"] == two["output_digests"]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny-gdn", "tiny-kda"])
def test_trained_models_say_the_same_on_two_ranks(model: str) -> None:
    """Where both have as many slots; a rank's placed slots may be one fewer."""
    options = {**SMALL, "arms": ("nr", "wr"), "w_max": (64,), "scale": 1 / 64}
    one = {point["arm"]: point for point in bench_serve(model, **options)["points"]}
    placed = bench_serve(model, tp=2, balances=("off", "storage"), **options)["points"]
    compared = 0
    for point in placed:
        alone = one[point["arm"].split(" ")[0]]
        assert point["token_hit_rate"] == alone["token_hit_rate"]
        if all(point[n] == alone[n] for n in ("slots_native", "slots_compressed")):
            compared += 1
            assert point["output_digests"] == alone["output_digests"]
            assert point["reclamation_digests"] == alone["reclamation_digests"]
    assert compared >= 2


def test_a_rank_that_fails_ends_the_run(tiny_kda: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here rank 0: the other waits for it in the middle of a layer, and is ended."""
    serve = Bench.serve

    def broken(self: Bench, arm: Arm, *rest: Any) -> Any:
        if arm.name == "int8":
            raise RuntimeError("out of memory\nmore")
        return serve(self, arm, *rest)

    monkeypatch.setattr(Bench, "serve", broken)
    monkeypatch.setattr("hybridstate.bench.serve_workers.SAID_WITHIN", 1.0)
    with pytest.raises(NumericError, match=r"rank 0: RuntimeError: out of memory$"):
        bench_serve(tiny_kda, tp=2, arms=("int8",), **SMALL)
    assert not torch.distributed.is_initialized()


def test_a_rank_that_never_comes_is_not_waited_for(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridstate.bench.serve_workers._serve_rank", print)
    with pytest.raises(NumericError, match="rank 1: its process ended"):
        Peers(setting_of(model))


def test_ranks_that_generate_otherwise_are_found(
    tiny_kda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replies that differ would be fed back, and each rank would answer another conversation."""
    monkeypatch.setattr(ToldExecutor, "digest", "0" * 64)
    with pytest.raises(NumericError, match="decided otherwise than rank 0 about replies"):
        bench_serve(tiny_kda, tp=2, arms=("int8",), **SMALL)


def test_what_is_not_served_is_said(tiny_kda: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for options, error, match in (
        ({"balances": ("storage",)}, UsageError, "places checkpoints over ranks"),
        ({"tp": 2, "balances": ("hybrid",)}, UsageError, "hybrid moves heads"),
        ({"tp": 2, "workers": 2}, UsageError, "do not go together"),
        ({"tp": 3}, PlanMismatch, "--tp 3 does not divide"),
        ({"tp": 0}, UsageError, "--tp must be at least 1"),
        (
            {"tp": 2, "balances": ("storage",), "arms": ("damp+nr-16 storage",)},
            UsageError,
            "no arm",
        ),
    ):
        with pytest.raises(error, match=match):
            bench_serve(tiny_kda, **{**SMALL, **options})
    monkeypatch.setattr("hybridstate.trajectories.model.torch_device", torch.device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(MissingRequirement, match="--tp 2 needs 2 GPUs, found 1"):
        bench_serve(tiny_kda, tp=2, **{**SMALL, "device": "cuda"})


def test_command(tmp_path: Path, tiny_kda: Path) -> None:
    arguments = ["bench", "serve", str(tiny_kda), "--device", "cpu", "--scale", str(SCALE)]
    arguments += ["--conversations", "3", "--clients", "2", "--limit", "2", "--seeds", "1"]
    arguments += ["--arm", "nr", "--w-max", "16", "--no-control", "--ratio", "0.2", "--tp", "2"]
    arguments += ["--balance", "off", "--balance", "storage"]
    file = tmp_path / "serve.json"
    done = CliRunner().invoke(app, [*arguments, "-o", str(file)])
    assert done.exit_code == 0, done.output
    assert "at TP 2, 2 clients" in done.output
    points = json.loads(file.read_text())["result"]["points"]
    assert [(p["arm"], p["tp"]) for p in points] == [
        ("dense", 2),
        ("nr-16", 2),
        ("nr-16 storage", 2),
    ]


def test_seconds_are_those_of_the_slowest_rank() -> None:
    """One rank's clock is its own."""
    ticks = iter([1.0, 2.0, 4.0])
    clock = Ranks().together(lambda: next(ticks))
    assert [clock(), clock()] == [1.0, 2.0]
