"""Padded prompts on lines give what prompts of their own length give, in pieces, behind hits and replayed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridstate.errors import NumericError
from hybridstate.runtime.engine import DecodeEngine
from hybridstate.runtime.prompt_step import PromptSteps, padded_lengths
from hybridstate.runtime.serving import ServingEngine
from hybridstate.runtime.tiers import Prefix
from hybridstate.trajectories.dummy import dummy_model
from hybridstate.trajectories.model import LoadedModel, load_model
from tests.runtime.capture_rules import Rules
from tests.runtime.test_step import MODELS
from tests.tolerances import assert_within
from tests.trajectories.test_graphs import small

LENGTH = 90


@pytest.fixture(params=["qwen3_5", "kimi_linear"])
def loaded(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> LoadedModel:
    return load_model(str(tiny_checkpoint(request.param)))


def prompt(length: int, seed: int = 0) -> np.ndarray:
    rng = np.random.Generator(np.random.PCG64(seed))
    return rng.integers(3, 90, length).astype(np.int32)


def server(loaded: LoadedModel, *, padded: bool, state: str = "fp32") -> ServingEngine:
    """A server whose prompts are padded, or not, wherever it runs."""
    every = 4 if state == "ring" else 1
    state = "damp" if state == "ring" else state
    k_hi = 4 if state == "damp" else None
    engine = DecodeEngine(loaded, state=state, slots=4, k_hi=k_hi, requantise_every=every)
    made = ServingEngine(engine, running=3, length=LENGTH, sizes=(3,), chunk=50)
    if made._prompts is None and padded:
        made._spare = made.lines.alloc(1) or []
        made._prompts = PromptSteps(engine, made.lines, 50)
    if not padded:
        made._prompts = None
    return made


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptSteps, "takes", lambda self, count, end: count <= self.sizes[-1])


def test_lengths_cover_every_prompt() -> None:
    assert padded_lengths(8) == (32,)
    assert padded_lengths(300) == (32, 48, 64, 96, 128, 192, 256, 320)
    assert padded_lengths(5058)[-3:] == (3072, 4096, 5088)
    for longest in (1, 31, 32, 33, 48, 100, 2048):
        assert padded_lengths(longest)[-1] >= longest
        assert list(padded_lengths(longest)) == sorted(set(padded_lengths(longest)))


@pytest.mark.parametrize("state", ["fp32", "bf16", "damp", "ring"])
@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 83])
def test_a_padded_prompt_leaves_what_the_prompt_leaves(
    loaded: LoadedModel, length: int, state: str
) -> None:
    """83 tokens are two chunks, of 50 and 33; another prompt has used line, inputs and buffers before."""
    found = []
    for padded in (True, False):
        made = server(loaded, padded=padded, state=state)
        other = made.admit(prompt(70, seed=1))
        assert other is not None
        made.prefill(other)
        made.finish(other)
        live = made.admit(prompt(length))
        assert live is not None
        made.prefill(live)
        states, windows = made.engine.pool.read(torch.tensor([live.slot]))
        keys = made.lines.read(live.line, length)
        beyond = made.lines.keys[min(keys)][live.line, :, length:]
        assert beyond.isnan().all()
        while len(live.output) < 5:
            made.decode_step([live])
        found.append((states, windows, keys, live.output))
    (states, windows, keys, output), expected = found
    pairs = list(zip([*states, *windows], [*expected[0], *expected[1]], strict=True))
    for block, pair in keys.items():
        pairs += zip(pair, expected[2][block], strict=True)
    name = "padded-prompt-f32" if length > 2 else "padded-short-prompt-f32"
    for ours, theirs in pairs:
        assert_within(ours, theirs, name if state == "fp32" else "padded-prompt-rounded")
    assert output == expected[3]


def test_a_replayed_window_writes_nothing(loaded: LoadedModel) -> None:
    tokens, states = prompt(70), []
    for padded in (True, False):
        made = server(loaded, padded=padded)
        live = made.admit(tokens)
        assert live is not None
        made.prefill(live)
        kv = made.keys(live, 70).cut(0, 70)
        before = {b: made.lines.keys[b][live.line].clone() for b in made.lines.shapes}
        states.append([made.replay(Prefix(tokens, [kv]), n) for n in (1, 40, 500)])
        for block, keys in before.items():
            assert torch.equal(made.lines.keys[block][live.line], keys) or keys.isnan().any()
            same = torch.nan_to_num(made.lines.keys[block][live.line])
            assert torch.equal(same, torch.nan_to_num(keys))
    for ours, theirs in zip(*states, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert_within(a, b, "replay-logits-f32")


@pytest.mark.parametrize("every", [1, 4])
def test_a_state_that_is_not_finite_is_refused(loaded: LoadedModel, every: int) -> None:
    """Behind a cached prefix, in a packed pool, with a ring too."""
    engine = DecodeEngine(loaded, state="damp", slots=4, k_hi=4, requantise_every=every)
    made = ServingEngine(engine, running=3, length=LENGTH, sizes=(3,), chunk=50)
    made._spare = made.lines.alloc(1) or []
    made._prompts = PromptSteps(engine, made.lines, 50)
    live = made.admit(prompt(20))
    assert live is not None
    made.prefill_chunk(live, 10)
    engine.pool.conv[0][live.slot] = float("nan")
    with pytest.raises(NumericError, match=f"state to pack in slot {live.slot} is not finite"):
        made.prefill_chunk(live)


def test_prompts_that_do_not_fit_are_refused(loaded: LoadedModel) -> None:
    made = server(loaded, padded=True)
    steps = made._prompts
    assert steps is not None
    with pytest.raises(NumericError, match="behind 80"):
        steps(torch.arange(20), 80, slot=0, line=0)
    with pytest.raises(NumericError, match="0 tokens"):
        steps(torch.arange(0), 0, slot=0, line=0)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("state", ["fp32", "bf16", "fp16", "damp", "ring"])
def test_a_prompt_asks_the_host_nothing(
    loaded: LoadedModel, state: str, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twins that select by masks stand aside; on a GPU one launch each takes their place."""
    made = server(loaded, padded=True, state=state)
    steps = made._prompts
    assert steps is not None
    steps(torch.arange(3, 43), 0, slot=1, line=0)
    steps._fill(torch.arange(3, 23), 40, 1, 0)
    monkeypatch.setattr("hybridstate.runtime.pool.pack_states", lambda *_a, **_k: None)
    monkeypatch.setattr("hybridstate.runtime.pool.unpack_states", lambda *_a, **_k: None)
    monkeypatch.setattr("hybridstate.kernels.attention.append_reference", lambda *_a: None)
    with torch.no_grad(), Rules():
        steps._run((again, 48))


class FakeReplay:
    """Captures a phase at its second call, or fails at a phase of its own."""

    def __init__(self, fails: object = None) -> None:
        self.reason: str | None = None
        self.calls: list[object] = []
        self._fails = fails

    def __call__(self, phase: object) -> None:
        self.calls.append(phase)
        if phase == self._fails and self.calls.count(phase) == 2:
            self.reason = "refused"

    def has(self, phase: object) -> bool:
        return self.reason is None and self.calls.count(phase) > 1

    def refuse(self, reason: str) -> None:
        self.reason = self.reason or reason


def captured(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, *given: Any
) -> tuple[PromptSteps, FakeReplay]:
    """Steps and the replay that counts captures; `given`: phase that fails, replay window, numbers of the ranks."""
    fails, window, *fewest = given
    made = server(loaded, padded=True)
    steps = made._prompts
    assert steps is not None
    replay = FakeReplay(fails)
    monkeypatch.setattr(steps, "_replay", replay)
    for size in steps.sizes:
        steps._outcome[size], steps._states[size] = torch.tensor([0, 1]), []
    made.capture_prompts(1, window, *fewest)
    return steps, replay


@pytest.mark.parametrize("window", [0, 1, 32, 33, 500])
def test_replays_are_captured_before_the_clock_starts(
    loaded: LoadedModel, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every length that a replay of so many tokens, or fewer, is padded to, and no other."""
    steps, replay = captured(loaded, monkeypatch, None, window)
    needed = {
        next(size for size in steps.sizes if size >= n)
        for n in range(1, min(window, steps.sizes[-1]) + 1)
    }
    for size in steps.sizes:
        assert replay.has((False, size))
        assert replay.has((True, size)) == (size in needed)


def test_ranks_capture_together_or_not_at_all(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that fails in the middle; the other stops at the same call and pads no prompt from then on."""
    monkeypatch.undo()
    asked: list[int] = []

    def noted(number: int) -> int:
        asked.append(number)
        return number

    failing, one = captured(loaded, monkeypatch, (False, 48), 40, noted)
    answers = iter(asked)
    other, two = captured(loaded, monkeypatch, None, 40, lambda number: min(number, next(answers)))
    assert next(answers, None) is None
    assert two.calls == one.calls
    assert (one.reason, two.reason) == ("refused", "another rank captures none")
    assert not failing.takes(1, 1)
    assert not other.takes(1, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("state", ["fp32", "damp"])
@pytest.mark.parametrize("model", sorted(MODELS))
def test_captured_prompts_equal_eager_ones_on_a_gpu(model: str, state: str, tmp_path: Path) -> None:
    """The same requests and replays twice: while they are captured, and from graphs alone."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    name, changes = MODELS[model]
    loaded = dummy_model(
        small(tmp_path / model, name, **changes), device="cuda", dtype=torch.float32
    )
    whole = server(loaded, padded=True, state=state)
    plain = server(loaded, padded=False, state=state)
    assert whole._prompts is not None, whole.engine.modules.refused.reasons
    for number in range(3):
        for length in (1, 17, 33, 50, 83, 90):
            states, replays = [], []
            for made in (whole, plain):
                tokens = prompt(length, seed=number)
                live = made.admit(tokens)
                assert live is not None
                made.prefill(live)
                slot = torch.tensor([live.slot], device="cuda")
                states.append([x.clone() for held in made.engine.pool.read(slot) for x in held])
                kv = made.keys(live, length).cut(0, length)
                states[-1] += [x for pair in kv.blocks.values() for x in pair]
                prefix = Prefix(tokens, [kv])
                replays.append([x.clone() for n in (1, 33, 50) for x in made.replay(prefix, n)])
                made.finish(live)
            for found, kind in ((states, "prompt"), (replays, "replay")):
                name = f"padded-{kind}-gpu-f32" if state == "fp32" else "padded-prompt-rounded"
                for ours, theirs in zip(*found, strict=True):
                    assert_within(ours, theirs, name)
        free = whole.engine.pool.alloc(1)
        assert free is not None
        whole.capture_prompts(int(free[0]), 50)
        whole.engine.pool.free(free)
    ran = whole.to_json()["prompts"]
    graphs = 2 * len(whole._prompts.sizes)
    assert ran == {"mode": "cuda-graph", "reason": None, "graphs": graphs}
