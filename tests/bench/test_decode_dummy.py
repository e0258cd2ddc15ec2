"""`bench decode --dummy` on small synthetic models: blocks are checked, components sum to the step, bytes add up."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import decode_at_scale
import pytest
import torch
from typer.testing import CliRunner

from hybridstate.bench import components, decode_dummy
from hybridstate.bench.components import (
    ExpertCount,
    component,
    placed,
    step_bytes,
    step_components,
)
from hybridstate.bench.decode import Options
from hybridstate.cli.main import app
from hybridstate.errors import NumericError, UsageError
from hybridstate.runtime import fused
from hybridstate.runtime.engine import DecodeEngine
from hybridstate.trajectories.dummy import dummy_model
from hybridstate.trajectories.model import LoadedModel
from hybridstate.trajectories.prompts import heldout_text
from tests.runtime.test_step import MODELS, draw, prefix_of
from tests.trajectories.test_graphs import small

OPTIONS = Options(("fp32", "damp"), (1, 3), input_tokens=12, output_tokens=2, warmup=1)


@pytest.fixture(scope="module", params=sorted(MODELS))
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    name, changes = MODELS[request.param]
    return dummy_model(small(tmp_path_factory.mktemp("dummy") / name, name, **changes))


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_dummy, "CHECK_ROWS", 4)


def test_rows_are_checked_timed_and_labelled(loaded: LoadedModel) -> None:
    seen: list[dict[str, Any]] = []
    result = decode_dummy.run_dummy_decode(
        loaded, OPTIONS, heldout_text(), report=seen.append
    ).to_json()
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert result["synthetic"]
    assert "synthetic" in result["model"]
    assert seen == result["rows"]
    assert [(r["batch"], r["state"]) for r in seen] == [
        (3, "fp32"), (3, "damp"), (1, "fp32"), (1, "damp")
    ]  # fmt: skip
    for row in seen:
        assert row["check"]["module_error_median_worst"] < 1e-4
        assert row["check"]["rows"] == row["batch"]
        assert row["isolated_update"]["layers"] == len(loaded.spec.layers)
        assert row["components"] is None
        assert row["eager_because"] == "no GPU"
        used = row["experts_used"]
        assert used["steps"] == OPTIONS.output_tokens
        assert used["total"] == pytest.approx(used["layers"] * used["per_layer_mean"])
        assert 2 <= used["per_layer_mean"] <= min(8, 2 * row["batch"])
        assert row["bytes"]["experts"] == pytest.approx(
            used["total"] / used["of"] * expert_bytes(loaded), abs=1
        )
        assert row["experts_used_profiled"] is None
    assert "stopped" not in result
    saving = result["savings"][0]
    assert saving["saved_s"] == pytest.approx(saving["fp32_tpot_s"] - saving["damp_tpot_s"])
    assert 0 < saving["cut_by_bytes"] < saving["state_share_of_bytes"] < 1


def test_verb_prints_draws_and_labels(
    loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times of components are made up: only a GPU has kernels to take apart."""
    made = step_components([("dense_kernel", 1e-3), ("nvjet_a", 2e-3)], 4e-3)
    monkeypatch.setattr(decode_dummy, "profiled", lambda *_: {"components": made, "longest": []})
    name = "Qwen3.6-35B-A3B" if loaded.spec.unit == "head" else "Kimi-Linear-48B-A3B"
    folder = tmp_path_factory.mktemp("verb")
    config = small(folder / name, name, **dict(MODELS.values())[name])
    target = folder / "out"
    options = ["--batch", "1", "--input-tokens", "12", "--output-tokens", "2", "--device", "cpu"]
    found = CliRunner().invoke(
        app, ["bench", "decode", str(config), "--dummy", *options, "-o", str(target)]
    )
    assert found.exit_code == 0, found.output
    assert "synthetic weights" in found.output
    assert "what the packed state saves" in " ".join(found.output.split())
    written = {path.name for path in target.iterdir()}
    assert written == {*("decode.json", "tpot.png", "tpot.csv", "components.png", "components.csv")}
    rows = (target / "components.csv").read_text().splitlines()
    assert rows[1] == "1,fp32,recurrent update,1"
    assert len(rows) == 1 + 2 * len(made)
    refused = CliRunner().invoke(
        app, ["bench", "decode", str(config), "--dummy", "--plan", str(folder), *options]
    )
    assert refused.exit_code == 2
    assert "leave --plan out" in " ".join(refused.output.split())


def test_bytes_of_a_step(loaded: LoadedModel) -> None:
    engine = DecodeEngine(loaded, state="fp32", slots=2)
    found = step_bytes(loaded, engine, 2, 1000)
    assert found["states"] == 2 * 2 * engine.pool.temporal_bytes
    assert found["keys and values"] == 1000
    experts = expert_bytes(loaded)
    assert found["experts"] == pytest.approx(experts * (1 - (1 - 2 / 8) ** 2), rel=1e-6)
    embedding = loaded.model.get_input_embeddings().weight
    everything = sum(p.numel() * 4 for p in loaded.model.parameters())
    assert found["other weights"] == everything - experts - embedding.numel() * 4 + 2 * 4 * 64
    counted = step_bytes(loaded, engine, 2, 1000, experts=12345)
    assert counted == found | {"experts": 12345}


def expert_bytes(loaded: LoadedModel) -> int:
    return sum(p.numel() * 4 for p in loaded.model.parameters() if p.dim() == 3 and len(p) == 8)


@pytest.mark.parametrize("own_code", [False, True], ids=["few-launches", "own-code"])
@pytest.mark.parametrize("uneven", [False, True], ids=["random", "uneven"])
def test_counted_experts_are_those_that_the_routers_chose(
    loaded: LoadedModel, own_code: bool, uneven: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the count every mixture's router is asked on the inputs of the step."""
    if own_code:
        monkeypatch.setattr("hybridstate.runtime.step.expert_step", lambda *_: None)
    mixtures = [module for module in loaded.model.modules() if hasattr(module, "experts")]
    weight = mixtures[1].gate.weight
    held = weight.detach().clone()
    if uneven:
        weight.data.zero_()  # equal logits: every token takes the same two
    engine = DecodeEngine(loaded, state="fp32", slots=5)
    # a trial does not take a router that decides nothing: that mixture keeps its own code
    assert engine.modules.replaced["mixtures"] == (0 if own_code else len(mixtures) - uneven)
    run = engine.start(prefix_of(loaded, 5, 9), room=3, fixed=True)
    inputs: list[torch.Tensor] = []
    handles = [
        module.register_forward_pre_hook(lambda _, args: inputs.append(args[0].flatten(0, -2)))
        for module in mixtures
    ]
    count = ExpertCount(loaded.model)
    chosen = []
    for column in draw(5, 3, seed=2).T:
        inputs.clear()
        with count.watching():
            run.step(column)
        count.add()
        pairs = zip(mixtures, list(inputs), strict=True)
        chosen.append([len(set(module.gate(x)[2].flatten().tolist())) for module, x in pairs])
    for handle in handles:
        handle.remove()
    weight.data.copy_(held)
    expected = torch.tensor(chosen, dtype=torch.float64).mean(0).tolist()
    assert count.per_layer == pytest.approx(expected)
    assert (expected[1] == 2) == uneven
    assert len({tuple(step) for step in chosen}) > 1  # steps differ, none was counted twice
    found = count.to_json()
    assert found is not None
    assert (found["layers"], found["of"]) == (len(mixtures), 8 * len(mixtures))
    assert found["steps"] == 3
    assert count.nbytes == pytest.approx(expert_bytes(loaded) * found["total"] / found["of"], abs=1)
    uniform = step_bytes(loaded, engine, 5, 0)["experts"]
    assert not uneven or count.nbytes < uniform


def test_experts_of_other_ranks_and_unseen_mixtures_do_not_count(loaded: LoadedModel) -> None:
    count = ExpertCount(loaded.model)
    count.add()
    assert count.to_json() is count.nbytes is None
    count._chosen = [torch.tensor([[0, 3], [3, 8]])] * len(count._chosen)
    count.add()
    assert set(count.per_layer or ()) == {2.0}
    none = ExpertCount(torch.nn.Linear(2, 2))
    none.add()
    assert none.to_json() is none.nbytes is None


def test_a_run_that_ends_early_is_a_whole_result(loaded: LoadedModel) -> None:
    for allowed, left_out in ((2, ["decoding", "components"]), (4, ["components"])):
        asked: list[str] = []

        def go_on(stage: str, asked: list[str] = asked, allowed: int = allowed) -> bool:
            asked.append(stage)
            return len(asked) <= allowed

        result = decode_dummy.run_dummy_decode(
            loaded, OPTIONS, heldout_text(), go_on=go_on
        ).to_json()
        assert len(result["rows"]) == allowed
        assert result["stopped"] == "deadline"
        assert result["left_out"] == left_out
        assert {"speedups", "savings", "protocol", "device"} <= set(result)


def test_fp32_and_packed_steps_are_taken_apart_first() -> None:
    forms = [("bf16", 1), ("damp", 8), ("fp32", 1), ("fp16", 1), ("damp", 1)]
    assert sorted(forms, key=decode_dummy._urgency) == [
        ("fp32", 1), ("damp", 1), ("damp", 8), ("bf16", 1), ("fp16", 1)
    ]  # fmt: skip


def test_script_of_full_size_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, changes = MODELS["kda"]
    folder, target = small(tmp_path / name, name, **changes), tmp_path / "out" / "decode.json"
    options = "--device cpu --batch 2 --batch 1 --state fp32 --state damp --requantise-every 3"
    options += " --input-tokens 12 --output-tokens 3"
    for deadline, rows in ((600, 6), (0, 0)):
        arguments = [*options.split(), "--deadline", str(deadline), "--json", str(target)]
        monkeypatch.setattr("sys.argv", ["decode_at_scale.py", str(folder), *arguments])
        assert decode_at_scale.main() == 0
        document = json.loads(target.read_text())
        assert document["arguments"][0] == str(folder)
        result = document["result"]
        states = ["fp32", "damp", "damp-every-3"] * 2
        assert [row["state"] for row in result["rows"]] == states[:rows]
        assert result.get("stopped") == (None if rows else "deadline")
        assert result["savings"] or not rows


def test_wrong_gate_is_refused(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    real = DecodeEngine.update

    def damaged(self: DecodeEngine, *operands: Any) -> torch.Tensor:
        return real(self, *operands) * 1.2

    monkeypatch.setattr(DecodeEngine, "update", damaged)
    monkeypatch.setattr(fused, "_linear_trial", lambda *_: True)
    with pytest.raises(NumericError, match="from the plain model are layers"):
        decode_dummy.run_dummy_decode(loaded, OPTIONS, heldout_text())


def test_trained_weights_are_refused(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(loaded), "synthetic", property(lambda _: False))
    with pytest.raises(UsageError, match="synthetic weights only"):
        decode_dummy.run_dummy_decode(loaded, OPTIONS, heldout_text())


def test_components_sum_to_the_step() -> None:
    kernels = [
        ("dense_kernel", 8e-3),
        ("conv_kernel", 1e-3),
        ("gate_up_kernel", 5e-3),
        ("nvjet_sm90_tst_64x8", 2e-3),
        ("attention_kernel", 1e-3),
        ("rms_norm_kernel", 5e-4),
        ("nvjet_sm90_tst_256x8", 3e-4),
        ("void at::native::vectorized_elementwise_kernel<4>", 1e-4),
    ]
    found = step_components(kernels, 20e-3)
    assert sum(part["s"] for part in found.values()) == pytest.approx(20e-3)
    assert found["output layer"] == {"s": 3e-4, "launches": 1}
    assert found["projections"]["launches"] == 1
    assert found["between kernels"]["s"] == pytest.approx(20e-3 - sum(s for _, s in kernels))
    update = ("packed_kernel", "split_kernel", "dense_kernel", "ring_kernel", "flush_kernel")
    assert {component(name) for name in update} == {"recurrent update"}
    assert component("Memset (Device)") == "other kernels"


def test_a_gated_product_is_the_experts_only_in_a_mixture() -> None:
    """A dense block, a mixture, and a dense block before a mixture without a shared expert."""
    mixer, dense = ["conv_kernel", "dense_kernel"], ["nvjet_a", "gated_kernel", "nvjet_b"]
    routed = ["route_kernel", "order_kernel", "gate_up_kernel", "down_kernel", "combine_kernel"]
    step = [*mixer, *dense, *mixer, *dense, *routed, *mixer, *dense, *mixer, *routed, "nvjet_c"]
    found = placed(step)
    pairs = list(zip(step, found, strict=True))
    gated = [owner for name, owner in pairs if name == "gated_kernel"]
    assert gated == ["other kernels", "experts", "other kernels"]
    assert found.count("experts") == 2 * 4 + 1
    assert found.count("projections") == 6
    assert found.count("norms and routing") == 2
    assert found[-1] == "output layer"
    parts = step_components([(name, 1e-6) for name in step], 1e-3)
    assert parts["experts"]["launches"] == found.count("experts")
    assert placed([]) == []


@pytest.mark.gpu
@pytest.mark.parametrize("kind", sorted(MODELS))
def test_components_of_a_captured_step_on_a_gpu(kind: str, tmp_path: Path) -> None:
    name, changes = MODELS[kind]
    wide = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    if kind == "kda":
        wide = {"linear_attn_config": {**changes["linear_attn_config"], "head_dim": 128}}
    loaded = dummy_model(small(tmp_path / name, name, **{**changes, **wide}), device="cuda")
    result = decode_dummy.run_dummy_decode(loaded, OPTIONS, heldout_text()).to_json()
    mixtures = result["replaced_modules"]["mixtures"]
    assert result["replaced_modules"]["linear"] == 3
    assert mixtures >= 3
    for row in result["rows"]:
        assert row["mode"] == "cuda-graph"
        parts = row["components"]
        assert sum(part["s"] for part in parts.values()) == pytest.approx(row["tpot_s"]["median"])
        assert parts["recurrent update"]["launches"] == parts["convolution"]["launches"] == 3
        assert parts["experts"]["launches"] == 5 * mixtures
        assert parts["attention"]["launches"] >= 3
        assert parts["output layer"]["launches"] == 1
        assert row["bytes_s"] > 0
        for key in ("experts_used", "experts_used_profiled"):
            assert row[key]["layers"] == mixtures
            assert 2 <= row[key]["per_layer_mean"] <= min(8, 2 * row["batch"])
        assert row["experts_used"]["steps"] == OPTIONS.output_tokens


def test_intervals_are_checked_over_their_writes(loaded: LoadedModel) -> None:
    options = replace(OPTIONS, states=("damp",), output_tokens=5, requantise_every=(4,))
    result = decode_dummy.run_dummy_decode(loaded, options, heldout_text()).to_json()
    assert [(r["batch"], r["state"]) for r in result["rows"]] == [
        (3, "damp"), (3, "damp-every-4"), (1, "damp"), (1, "damp-every-4")
    ]  # fmt: skip
    every_step, ringed = result["rows"][:2]
    assert (every_step["check"]["tokens"], ringed["check"]["tokens"]) == (2, 5)
    assert len(ringed["tpot_s"]["samples"]) == 1
    for row in result["rows"]:
        assert row["check"]["module_error_median_worst"] < 1e-4
        assert row["check"]["state_error_worst"] < 1e-2
    moved = [row["state_bytes_moved_per_step"] for row in (every_step, ringed)]
    engine = DecodeEngine(loaded, state="damp", slots=1, requantise_every=4)
    assert moved[1] == 3 * engine.pool.step_bytes


def test_components_are_the_mean_over_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(([("ring_kernel", 1e-3)], [("ring_kernel", 3e-3), ("conv_kernel", 2e-3)]))
    monkeypatch.setattr(components, "kernel_times", lambda _: next(times))
    pool = SimpleNamespace(every=2)
    run = SimpleNamespace(graph=lambda: None, undone=nullcontext, engine=SimpleNamespace(pool=pool))
    found = components.profiled(run, 4e-3)  # type: ignore[arg-type]
    assert found is not None
    parts = found["components"]
    assert parts["recurrent update"] == {"s": pytest.approx(2e-3), "launches": 1}
    assert parts["convolution"] == {"s": pytest.approx(1e-3), "launches": 0.5}
    assert sum(part["s"] for part in parts.values()) == pytest.approx(4e-3)
