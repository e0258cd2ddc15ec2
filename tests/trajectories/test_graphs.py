"""Steps on fixed tensors: the numbers of the model's own cache and functions, on every family; graphs on a GPU."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybridstate.families.published import CONFIGS
from hybridstate.quant.arms import Arm, plain_arm
from hybridstate.quant.formats import FORMATS
from hybridstate.quant.simulate import Simulation, simulate
from hybridstate.trajectories import graphs
from hybridstate.trajectories.dummy import dummy_model
from hybridstate.trajectories.graphs import Replay, attend, conv_step, has_plain_attention
from hybridstate.trajectories.model import LoadedModel, load_model
from hybridstate.trajectories.prompts import Prompt, make_prompts, shipped_texts
from hybridstate.trajectories.protocol import Protocol
from hybridstate.trajectories.record import Recording, plain_step_ms, record
from hybridstate.trajectories.stages import timed
from tests.families.saved import available, save
from tests.tolerances import assert_within, relative_rms

SMALL = Protocol(
    profile="custom",
    prompts_per_split=1,
    input_tokens=24,
    new_tokens=22,
    windows=(0, 6),
    anchors=(2, 5),
    horizon=7,
)
GDN = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "vocab_size": 512,
}
KDA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "pad_token_id": 509,
    "bos_token_id": 510,
    "eos_token_id": 511,
    "vocab_size": 512,
    "linear_attn_config": {
        "full_attn_layers": [3],
        "kda_layers": [1, 2, 4],
        "head_dim": 16,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    },
}


def small(folder: Path, name: str, **more: object) -> Path:
    """A folder with the config of a published model, made small."""
    config = dict(CONFIGS[name]) | (GDN if name.startswith("Qwen") else KDA) | more
    if "rope_parameters" in config:
        config["rope_parameters"] = dict(config["rope_parameters"], mrope_section=[2, 1, 1])
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def build(case: str, folder: Path, device: str = "cpu") -> LoadedModel:
    """`tiny-*`: trained; `gdn-B`: B value heads per key head, experts; `kda`: latent attention, experts."""
    if case.startswith("tiny"):
        return load_model(case, device=device)
    if case == "kda":
        return dummy_model(small(folder / case, "Kimi-Linear-48B-A3B"), device=device)
    heads = 2 * int(case.removeprefix("gdn-"))
    path = small(folder / case, "Qwen3.6-35B-A3B", linear_num_value_heads=heads)
    return dummy_model(path, device=device)


def drawn(protocol: Protocol, count: int = 3) -> tuple[Prompt, ...]:
    return make_prompts(lambda text: list(text.encode()), shipped_texts(), protocol, seed=0)[:count]


def arms_of(loaded: LoadedModel) -> tuple[Arm, ...]:
    """Every way of storing: plain, protected channels, whole-state scales, random, deferred, carried over."""
    protected = tuple(torch.arange(2).repeat(layer.value_heads, 1) for layer in loaded.spec.layers)
    int8 = plain_arm("int8-step")
    return (
        *(plain_arm(name) for name in ("fp32", "fp16", "bf16", "fp8", "int4", "nvfp4")),
        int8,
        Arm("stochastic", FORMATS["int8-step-stochastic"], seed=5),
        Arm("damp", FORMATS["int8-step"], protected),
        Arm("damp-nvfp4", FORMATS["nvfp4"], protected),
        replace(int8, name="every-4", every=4),
        replace(int8, name="every-8", every=8),
        replace(int8, name="feedback-fp16", feedback="fp16"),
        replace(int8, name="feedback-int4", feedback="int4"),
    )


def assert_same_recording(found: Recording, expected: Recording, tolerance: str) -> None:
    assert torch.equal(found.generated, expected.generated)
    for name in ("anchors", "weights", "mean_log_decay"):
        for a, b in zip(getattr(found, name), getattr(expected, name), strict=True):
            assert_within(a, b, tolerance)


def assert_same_simulation(found: Simulation, expected: Simulation, relative: float) -> None:
    scale = float(expected.kl.max())
    assert np.abs(found.kl - expected.kl).mean() < relative * scale
    np.testing.assert_allclose(found.nll.mean(), expected.nll.mean(), rtol=relative)
    assert (found.same_top == expected.same_top).mean() > 1 - relative
    np.testing.assert_allclose(found.state_error[0], expected.state_error[0], rtol=0.05, atol=1e-6)
    assert found.saturated == expected.saturated


@pytest.mark.parametrize("case", ["gdn-1", "gdn-2", "gdn-3", "kda"])
def test_fixed_tensors_record_and_validate_what_the_models_own_cache_does(
    case: str, tmp_path: Path
) -> None:
    loaded = build(case, tmp_path)
    prompts = drawn(SMALL)
    options = {"temperature": 1.0, "seed": 3}
    own = record(loaded, prompts, SMALL, **options, fixed=False)
    fixed = record(loaded, prompts, SMALL, **options, fixed=True)
    assert_same_recording(fixed, own, "replay-logits-f32")
    runs = [
        simulate(loaded, prompts, own.generated, arms_of(loaded), chunk=16, batch=64, fixed=fixed)
        for fixed in (False, True)
    ]
    assert_same_simulation(runs[1], runs[0], 0.05)


class HostReads(TorchDispatchMode):
    """Notes operations that read a value on the host or bring one from it: no graph can hold them."""

    NAMES = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "lift_fresh")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.total += 1
        if name in self.NAMES:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", ["gdn-2", "kda"])
def test_no_step_reads_a_value_on_the_host(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = build(case, tmp_path)
    watched: list[HostReads] = []
    plain = Replay.__call__

    def watch(self: Replay, phase: Any = None) -> None:
        with HostReads() as seen:
            plain(self, phase)
        watched.append(seen)

    monkeypatch.setattr(Replay, "__call__", watch)
    prompts = drawn(SMALL)
    recording = record(loaded, prompts, SMALL, temperature=1.0, seed=3, fixed=True)
    simulate(
        *(loaded, prompts, recording.generated, arms_of(loaded)), chunk=24, batch=64, fixed=True
    )
    assert len(watched) > SMALL.new_tokens
    assert all(seen.total > 100 for seen in watched)
    assert not any(seen.found for seen in watched), [seen.found for seen in watched if seen.found]


@pytest.mark.parametrize(
    ("name", "plain"),
    [("qwen3_next", True), ("olmo_hybrid", True), ("lara_mini", False), ("glm5_next", False)],
)
def test_windows_and_indexed_attention_keep_the_models_own_cache(
    name: str, plain: bool, tmp_path: Path
) -> None:
    if not available(name):
        pytest.skip("this transformers has no such class")
    assert has_plain_attention(load_model(save(name, tmp_path / name))) is plain


def test_attention_of_one_query_equals_the_plain_one_under_a_mask() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, 1, 8, generator=generator)
    key, value = (torch.randn(2, 3, 10, d, generator=generator) for d in (8, 5))
    mask = torch.arange(10) < 7

    class Module(torch.nn.Module):
        pass

    out, _ = attend(Module(), query, key, value, mask[None, None, None], scaling=0.3)
    rows = [x.repeat_interleave(2, 1)[:, :, :7] for x in (key, value)]
    expected = torch.softmax(query @ rows[0].mT * 0.3, -1) @ rows[1]
    torch.testing.assert_close(out, expected.transpose(1, 2))


@pytest.mark.parametrize("activation", [None, "silu", "gelu"])
def test_the_convolution_equals_torchs_and_advances_its_window(activation: str | None) -> None:
    from transformers.activations import ACT2FN

    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(2, 6, 9, generator=generator)
    weight, bias = (torch.randn(6, n, generator=generator) for n in (4, 1))
    whole = torch.nn.functional.conv1d(inputs, weight[:, None], bias[:, 0], groups=6)[..., -1:]
    window = inputs[..., 4:8].clone()
    out = conv_step(inputs[..., 8:], window, weight, bias[:, 0], activation)
    torch.testing.assert_close(out, whole if activation is None else ACT2FN[activation](whole))
    assert torch.equal(window, inputs[..., 5:])


def test_without_a_gpu_a_step_runs_eagerly_and_says_why() -> None:
    seen = []
    replay = Replay(seen.append, torch.device("cpu"))
    for phase in (1, 2, 1):
        replay(phase)
    assert seen == [1, 2, 1]
    assert (replay.mode, replay.reason) == ("eager", "no GPU")


def test_a_refused_step_gives_its_graphs_up_and_says_so() -> None:
    """A result must not call steps captured that run eagerly from then on."""
    seen: list[Any] = []
    replay = Replay(seen.append, torch.device("cpu"))
    replay.reason, replay.mode = None, "cuda-graph"
    replay._graphs[1] = SimpleNamespace(replay=lambda: seen.append("graph"))
    replay(1)
    replay.refuse("another rank captures none")
    replay(1)
    assert seen == ["graph", 1]
    told = {"mode": "eager", "reason": "another rank captures none", "graphs": 0}
    assert replay.to_json() == told
    replay.refuse("later")
    assert replay.to_json() == told


LONGER = replace(
    SMALL, input_tokens=64, new_tokens=200, anchors=(4, 9), horizon=40, windows=(0, 100)
)


def say(line: str) -> None:
    """To the screen of a run with -s, at once."""
    sys.stdout.write(f"\n{line}\n")
    sys.stdout.flush()


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["tiny-gdn", "tiny-kda", "gdn-2", "gdn-3", "kda"])
def test_graphs_give_the_numbers_of_the_same_steps_run_eagerly(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run with -s: prints what was captured and milliseconds a step."""
    loaded = build(case, tmp_path, "cuda")
    prompts = drawn(LONGER)
    arms = arms_of(loaded)

    def run() -> tuple[Recording, Simulation, float, dict[str, Any]]:
        with timed() as stages:
            recording = record(loaded, prompts, LONGER, temperature=1.0, seed=3)
            outcome = simulate(loaded, prompts, recording.generated, arms, chunk=64, batch=64)
        step = plain_step_ms(loaded, prompts, LONGER, temperature=1.0, seed=3, updates=60)
        return recording, outcome, step, stages.facts

    captured, simulated, fast, facts = run()
    say(f"{case}: generation {facts['generation']}, validation {facts['validation']}")
    assert facts["generation"]["mode"] == "cuda-graph", facts["generation"]["reason"]
    assert facts["validation"]["mode"] == "cuda-graph", facts["validation"]["reason"]
    assert facts["validation"]["graphs"] == 3  # every 8th, every 4th and every other update
    monkeypatch.setattr(graphs, "WARM_UP", 1 << 60)
    eager, expected, slow, facts = run()
    assert facts["generation"]["mode"] == "eager"
    same = torch.equal(captured.generated, eager.generated)
    say(f"{case}: {fast:.2f} ms a step, eagerly {slow:.2f} ms; tokens equal: {same}")
    assert same
    assert_same_recording(captured, eager, "replay-logits-f32")
    assert_same_simulation(simulated, expected, 0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["tiny-gdn", "tiny-kda"])
def test_a_graph_on_a_gpu_gives_the_models_own_numbers(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch.backends.cudnn, "allow_tf32", False
    )  # its grouped convolution, not ours
    loaded = load_model(case, device="cuda", dtype=torch.float32)
    prompts = drawn(SMALL)
    options = {"temperature": 0.0, "seed": 3}
    own = record(loaded, prompts, SMALL, **options, fixed=False)
    fixed = record(loaded, prompts, SMALL, **options)
    assert torch.equal(fixed.generated, own.generated)
    for found, expected in zip(fixed.anchors, own.anchors, strict=True):
        assert relative_rms(found, expected) < 1e-3
