"""Steps on pool slots and cache lines: the model's own logits, whatever the lengths; padding touches nothing."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridstate.bench.decode_check import errors, simulated_logits
from hybridstate.errors import NumericError, UsageError
from hybridstate.kernels import dispatch
from hybridstate.runtime import fused
from hybridstate.runtime.dense import dense_step
from hybridstate.runtime.engine import DecodeEngine
from hybridstate.runtime.kv import LineCache, block_shapes
from hybridstate.runtime.restore import Prefix, capture, resume
from hybridstate.runtime.step import PooledStep
from hybridstate.trajectories import launches
from hybridstate.trajectories.cache import forward, prefill, recurrent_states
from hybridstate.trajectories.dummy import dummy_model
from hybridstate.trajectories.model import LoadedModel
from tests.tolerances import assert_within
from tests.trajectories.test_graphs import GDN, KDA, small

MODELS = {"gdn": ("Qwen3.6-35B-A3B", GDN), "kda": ("Kimi-Linear-48B-A3B", KDA)}


@pytest.fixture(scope="module", params=sorted(MODELS))
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    name, changes = MODELS[request.param]
    folder: Path = tmp_path_factory.mktemp("steps") / request.param
    return dummy_model(small(folder, name, **changes))


def draw(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 500, (batch, length), generator=torch.Generator().manual_seed(seed))


def prefix_of(loaded: LoadedModel, batch: int, length: int, seed: int = 0) -> Prefix:
    tokens = draw(batch, length, seed)
    return capture(loaded, tokens, prefill(loaded, tokens)[1])


@pytest.mark.parametrize("state", ["fp32", "damp"])
def test_steps_on_lines_equal_the_model(loaded: LoadedModel, state: str) -> None:
    prefix, forced = prefix_of(loaded, 3, 21), draw(3, 4, seed=1)
    engine = DecodeEngine(loaded, state=state, slots=5, k_hi=8 if state == "damp" else None)
    engine.pool.alloc(1)  # slots and rows differ
    run = engine.start(prefix, room=4, fixed=True)
    found = torch.stack([run.step(column).clone() for column in forced.T])
    run.check_bytes()
    expected = simulated_logits(loaded, engine, prefix, forced)
    if state == "fp32":
        assert_within(found, expected, "replay-logits-f32")
    else:
        assert errors(found, expected)[0] < 1e-2  # rounding flips
    dense = sum(hasattr(block.mlp, "gate_proj") for block in loaded.model.model.layers)
    assert engine.modules.replaced["linear"] == 3
    assert engine.modules.replaced["mixtures"] == 4 - dense
    assert engine.modules.replaced["norms"] == 0
    assert engine.modules.replaced["prompts"] == 3
    assert engine.modules.prompts


def test_a_feed_forward_block_is_replaced_only_by_its_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OtherMLP(torch.nn.Module):
        def __init__(self, swapped: bool, bias: bool = False) -> None:
            super().__init__()
            self.gate_proj = torch.nn.Linear(12, 20, bias=bias)
            self.up_proj = torch.nn.Linear(12, 20, bias=bias)
            self.down_proj = torch.nn.Linear(20, 12, bias=bias)
            self.swapped = swapped

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = self.gate_proj(x), self.up_proj(x)
            a, b = (b, a) if self.swapped else (a, b)
            found: torch.Tensor = self.down_proj(torch.nn.functional.silu(a) * b)
            return found

    monkeypatch.setattr(dispatch, "INTERPRETED", True)
    module = OtherMLP(swapped=False)
    step = dense_step(module)
    assert step is not None
    x = torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(1))
    assert_within(step(x), module(x), "kernel-f32")
    assert dense_step(OtherMLP(swapped=True)) is None
    assert dense_step(OtherMLP(swapped=False, bias=True)) is None
    assert dense_step(torch.nn.Linear(2, 2)) is None


@pytest.mark.slow
def test_a_prompt_through_kernels_equals_the_model(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the interpreter, in two pieces; the recurrence is the reference's there."""
    tokens = draw(1, 9, seed=2)
    engine = DecodeEngine(loaded, state="fp32", slots=1)
    modules = engine.modules
    past, windows = resume(loaded, {}, [], []), []
    for layer in loaded.spec.layers:
        windows.append(torch.zeros(layer.conv_channels, layer.conv_width - 1))
    states: list[torch.Tensor | None] = [None] * len(windows)
    monkeypatch.setattr(dispatch, "INTERPRETED", True)
    for piece in (tokens[:, :2], tokens[:, 2:]):
        with torch.no_grad(), modules.prompt(windows, states) as after:
            logits = forward(loaded, piece, past)
        windows = [after[n][0] for n in range(len(windows))]
        states = [after[n][1] for n in range(len(states))]
    expected, cache = prefill(loaded, tokens, keep_logits=True)
    assert_within(logits, expected[:, 2:], "replay-logits-f32")
    for ours, theirs in zip(states, recurrent_states(cache), strict=True):
        assert_within(ours, theirs, "replay-logits-f32")


@pytest.mark.slow
def test_a_step_of_kernels_equals_the_model(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the interpreter: every module is tried on its kernels, then one step runs on them, one row padding."""
    prefix, forced = prefix_of(loaded, 1, 9), draw(1, 1, seed=1)
    monkeypatch.setattr(dispatch, "INTERPRETED", True)
    monkeypatch.setattr(fused, "_ROWS", 2)
    monkeypatch.setattr(launches, "_ROUTED", 4)
    engine = DecodeEngine(loaded, state="fp32", slots=2, backend="triton")
    slots, rows, lengths = torch.tensor([1, -1]), torch.tensor([0, -1]), torch.tensor([9, 0])
    engine.pool.write(slots[:1], prefix.states, prefix.conv)
    lines = LineCache(loaded, block_shapes(loaded, prefix.kv), 1, 12)
    for block, (keys, values) in prefix.kv.items():
        lines.write(block, rows[:1], 0, keys, values)
    found = PooledStep(engine, lines, slots, rows, lengths)(torch.tensor([[int(forced[0])], [7]]))
    assert engine.modules.replaced["norms"] > 8
    dense = sum(hasattr(block.mlp, "gate_proj") for block in loaded.model.model.layers)
    assert engine.modules.replaced["dense"] == dense
    assert engine.modules.replaced["linear"] == 3
    expected = simulated_logits(loaded, None, prefix, forced)
    assert_within(found[None, :1], expected, "replay-logits-f32")


def test_modules_pass_their_trials_on_kernels(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "INTERPRETED", True)
    monkeypatch.setattr(fused, "_ROWS", 2)
    monkeypatch.setattr(launches, "_TRIAL", 1e-5)
    layer = loaded.spec.layers[0]
    block = loaded.model.model.layers[layer.index]
    module = getattr(block, loaded.spec.family.runtime.attribute)
    assert fused.linear_step(loaded, module, layer) is not None
    assert fused.expert_step(loaded.model.model.layers[1].mlp) is not None


def test_mixtures_and_layers_with_other_options_keep_their_code(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where small or saturated weights hide the option from ordinary inputs."""
    for place in ("shared", "routed", "router", "result"):
        mixture = deepcopy(loaded.model.model.layers[1].mlp)
        shared = getattr(mixture, "shared_expert", None) or mixture.shared_experts
        if place == "shared":
            shared.gate_proj.weight.data *= 1e-2
            option: tuple[Any, str, Any] = (shared, "act_fn", torch.nn.GELU())
        elif place == "routed":
            mixture.experts.gate_up_proj.data *= 1e-2
            option = (mixture.experts, "act_fn", torch.nn.GELU())
        elif place == "router":
            option = (mixture.gate, "norm_topk_prob", False)
        else:
            option = (mixture, "forward", lambda x: (x, None))
        assert fused.expert_step(mixture) is not None, place
        setattr(*option)
        assert fused.expert_step(mixture) is None, place
    layer, runtime = loaded.spec.layers[0], loaded.spec.family.runtime
    assert runtime is not None
    module = getattr(loaded.model.model.layers[layer.index], runtime.attribute)
    assert fused.linear_step(loaded, module, layer) is not None
    with monkeypatch.context() as patch:
        patch.setattr(module, "activation", "gelu")
        assert fused.linear_step(loaded, module, layer) is None


def test_lengths_differ_and_padding_touches_nothing(loaded: LoadedModel) -> None:
    prefixes = [prefix_of(loaded, 1, length, seed=length) for length in (5, 17)]
    forced = draw(2, 3, seed=2)
    engine = DecodeEngine(loaded, state="fp32", slots=4)
    lines = LineCache(loaded, block_shapes(loaded, prefixes[0].kv), 3, 24)
    slots, rows = torch.tensor([2, -1, 0]), torch.tensor([1, -1, 2])
    for prefix, place in zip(prefixes, (0, 2), strict=True):
        engine.pool.write(slots[place : place + 1], prefix.states, prefix.conv)
        for block, (keys, values) in prefix.kv.items():
            lines.write(block, rows[place : place + 1], 0, keys, values)
    untouched = [state[[1, 3]].clone() for state in engine.pool.states]
    step = PooledStep(engine, lines, slots, rows, torch.tensor([5, 0, 17]))
    found = []
    for column in forced.T:
        tokens = torch.tensor([[int(column[0])], [7], [int(column[1])]])
        found.append(step(tokens)[[0, 2]])
    assert step.lengths.tolist() == [8, 3, 20]
    for place, prefix in enumerate(prefixes):
        expected = simulated_logits(loaded, None, prefix, forced[place : place + 1])
        assert_within(torch.stack(found)[:, place : place + 1], expected, "replay-logits-f32")
    for state, before in zip(engine.pool.states, untouched, strict=True):
        assert torch.equal(state[[1, 3]].nan_to_num(7.0), before.nan_to_num(7.0))
    held = lines.read(2, 20)
    assert all(bool(torch.isfinite(x).all()) for pair in held.values() for x in pair)
    assert bool(torch.isnan(lines.keys[next(iter(lines.shapes))][2, :, 20:]).all())


def test_modules_made_on_a_device_lie_there_though_fresh_memory_is_poisoned() -> None:
    """Shows the fault only where nothing in the process was made on a device before: run it alone."""
    with torch.device("meta"):
        assert torch.nn.Embedding(4, 2).weight.is_meta
        assert torch.empty(3).is_meta
    assert bool(torch.isnan(torch.empty(3)).all())


def test_joined_projections_leave_the_model_as_it_was(loaded: LoadedModel) -> None:
    tokens = draw(2, 9, seed=4)
    before = prefill(loaded, tokens)[0]
    assert DecodeEngine(loaded, state="fp32", slots=1).modules.replaced["linear"] == 3
    assert torch.equal(prefill(loaded, tokens)[0], before)
    mixture = loaded.model.model.layers[1].mlp
    weight = getattr(mixture, "shared_expert", None) or mixture.shared_experts
    held = weight.gate_proj.weight.data_ptr()
    assert DecodeEngine(loaded, state="fp32", slots=1).modules.replaced["linear"] == 3
    assert weight.gate_proj.weight.data_ptr() == held  # joined once
    assert not any("forward" in module.__dict__ for module in loaded.model.modules())


def test_lines_are_counted_and_poisoned(loaded: LoadedModel) -> None:
    prefix = prefix_of(loaded, 1, 5)
    lines = LineCache(loaded, block_shapes(loaded, prefix.kv), 2, 8)
    assert lines.alloc(3) is None
    assert lines.alloc(2) == [0, 1]
    block, (keys, values) = next(iter(prefix.kv.items()))
    lines.write(block, torch.tensor([1]), 2, keys, values)
    found = lines.read(1, 7)[block]
    assert torch.equal(found[0][:, :, 2:], keys)
    assert torch.equal(found[1][:, :, 2:], values)
    with pytest.raises(NumericError, match="9 tokens do not fit"):
        lines.write(block, torch.tensor([1]), 4, keys, values)
    lines.free([1])
    assert bool(torch.isnan(lines.keys[block][1]).all())
    assert lines.available == 1
    with pytest.raises(UsageError, match="freed twice"):
        lines.free([1])
    with pytest.raises(UsageError, match="holds nothing"):
        LineCache(loaded, lines.shapes, 0, 8)
    per_token = sum(x.shape[1] * (x.shape[3]) for pair in prefix.kv.values() for x in pair)
    assert lines.token_bytes == per_token * 4
    assert lines.nbytes == 2 * 8 * lines.token_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(MODELS))
def test_captured_steps_equal_the_model_on_a_gpu(name: str, tmp_path: Path) -> None:
    model, changes = MODELS[name]
    wide = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    if name == "kda":
        wide = {"linear_attn_config": {**changes["linear_attn_config"], "head_dim": 128}}  # type: ignore[dict-item]
    loaded = dummy_model(
        small(tmp_path / name, model, **{**changes, **wide}), device="cuda", dtype=torch.float32
    )
    prefix, forced = prefix_of(loaded, 3, 21), draw(3, 4, seed=1).cuda()
    for state, limit in (("fp32", 1e-4), ("damp", 1e-2)):
        engine = DecodeEngine(loaded, state=state, slots=3)
        run = engine.start(prefix, room=4)
        assert run.capture() is None
        found = torch.stack([run.step(column).clone() for column in forced.T])
        assert errors(found, simulated_logits(loaded, engine, prefix, forced))[0] < limit
        assert engine.modules.replaced["linear"] == 3
