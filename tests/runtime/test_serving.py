"""Requests that join and leave: every reply is that of the request alone, whatever runs beside it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from hybridstate.errors import NumericError, UnsupportedModel, UsageError
from hybridstate.runtime.engine import DecodeEngine
from hybridstate.runtime.orders import StoredOrder
from hybridstate.runtime.serving import HeldKeys, Live, ServingEngine, joined_keys
from hybridstate.trajectories.cache import forward, new_cache, prefill, recurrent_states
from hybridstate.trajectories.model import LoadedModel, load_model
from tests.tolerances import relative_rms

PROMPTS = (7, 2, 19, 11, 4)
"""Tokens of the prompts; more requests than lines."""
REPLIES = (5, 9, 3, 6, 8)


@pytest.fixture(scope="module", params=["qwen3_5", "kimi_linear"])
def loaded(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> LoadedModel:
    return load_model(str(tiny_checkpoint(request.param)))


def prompts(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.Generator(np.random.PCG64(seed))
    return [rng.integers(3, 90, length).astype(np.int32) for length in PROMPTS]


def alone(loaded: LoadedModel, prompt: np.ndarray, reply: int) -> list[int]:
    """Greedy tokens of the plain model."""
    past, step = new_cache(loaded), torch.from_numpy(prompt.astype(np.int64))[None]
    found: list[int] = []
    with torch.no_grad():
        while len(found) < reply:
            found.append(int(forward(loaded, step, past)[0, -1].argmax()))
            step = torch.tensor([[found[-1]]])
    return found


def serving(
    loaded: LoadedModel, state: str = "fp32", running: int = 3, chunk: int = 6
) -> ServingEngine:
    engine = DecodeEngine(
        loaded, state=state, slots=running + 1, k_hi=4 if state == "damp" else None
    )
    return ServingEngine(
        engine, running=running, length=32, sizes=(2, running), chunk=chunk, audit=True
    )


def run(
    server: ServingEngine, asked: list[np.ndarray], replies: tuple[int, ...]
) -> list[list[int]]:
    """All requests through the server, admitted as soon as there is room."""
    waiting = list(range(len(asked)))
    running: dict[int, Live] = {}
    found: list[list[int]] = [[] for _ in asked]
    while waiting or running:
        while waiting:
            live = server.admit(asked[waiting[0]])
            if live is None:
                break
            server.prefill(live)
            running[waiting.pop(0)] = live
        step = [live for n, live in running.items() if len(live.output) < replies[n]]
        if step:
            server.decode_step(step)
        for number in [n for n, live in running.items() if len(live.output) >= replies[n]]:
            found[number] = server.finish(running.pop(number))
    return found


def test_replies_are_those_of_each_request_alone(loaded: LoadedModel) -> None:
    asked = prompts()
    found = run(serving(loaded), asked, REPLIES)
    assert found == [alone(loaded, p, n) for p, n in zip(asked, REPLIES, strict=True)]


@pytest.mark.parametrize("state", ["bf16", "damp"])
def test_other_formats_reply_as_one_request_at_a_time(loaded: LoadedModel, state: str) -> None:
    asked = prompts(1)
    found = run(serving(loaded, state), asked, REPLIES)
    for prompt, reply, tokens in zip(asked, REPLIES, found, strict=True):
        server = serving(loaded, state, running=2)
        assert run(server, [prompt], (reply,)) == [tokens]
    whole = serving(loaded, state, running=2, chunk=64)
    live = whole.admit(asked[2])
    assert live is not None
    assert whole.prefill_chunk(live) == PROMPTS[2]


def test_a_prompt_passes_the_format_at_every_chunk(loaded: LoadedModel) -> None:
    states = []
    for chunk in (64, 5):
        server = serving(loaded, "bf16", running=2, chunk=chunk)
        live = server.admit(prompts()[2])
        assert live is not None
        server.prefill(live)
        states.append(server.engine.pool.read(torch.tensor([live.slot]))[0])
    errors = [relative_rms(a, b) for a, b in zip(*states, strict=True)]
    assert 1e-5 < max(errors) < 2e-2


def test_everything_is_given_back_poisoned(loaded: LoadedModel) -> None:
    server = serving(loaded)
    run(server, prompts(), REPLIES)
    assert server.lines.available == 3
    assert server.engine.pool.available == 4
    assert not server.live
    for held in (*server.lines.keys.values(), *server.lines.values.values()):
        assert bool(torch.isnan(held).all())
    assert all(bool(torch.isnan(state).all()) for state in server.engine.pool.states)


def test_a_cached_prefix_is_continued(loaded: LoadedModel) -> None:
    """The state of another request's prefix, its keys in two parts; the last token runs with the decode step."""
    prompt = prompts()[2]
    server = serving(loaded)
    first = server.admit(prompt)
    assert first is not None
    server.prefill(first, end=18)
    (spare,) = server.engine.pool.alloc(1).tolist()
    server.engine.pool.copy(torch.tensor([first.slot]), torch.tensor([spare]))
    keys = server.keys(first, 18)
    parts = [keys.cut(0, 5), keys.cut(5, 18)]
    server.finish(first)
    live = server.admit(prompt, slot=spare, hit_tokens=18, kv=parts)
    assert live is not None
    assert not live.output
    for _ in range(4):
        server.decode_step([live])
    assert server.finish(live) == alone(loaded, prompt, 4)
    assert server.engine.pool.available == 3  # the slot was not this engine's
    assert server.to_json()["prefill"] == "torch on cpu"


def test_orders_and_scales_are_undone_for_a_prefill(loaded: LoadedModel) -> None:
    layer = loaded.spec.layers[0]
    generator = torch.Generator().manual_seed(4)
    heads, keys, values = layer.value_heads, layer.key_dim, layer.value_dim

    def orders(width: int) -> torch.Tensor:
        return torch.stack([torch.randperm(width, generator=generator) for _ in range(heads)])

    scale = torch.rand((heads, values), generator=generator) + 0.5
    order = StoredOrder(None, orders(keys), orders(values), scale)
    state = torch.randn((2, heads, keys, values), generator=generator)
    assert relative_rms(order.model_states(order.states(state)), state) < 1e-6
    server = serving(loaded)
    server.engine.orders = tuple(order for _ in loaded.spec.layers)
    asked = prompts()[:2]
    found = run(server, asked, REPLIES[:2])
    assert found == [alone(loaded, p, n) for p, n in zip(asked, REPLIES, strict=False)]


def test_what_cannot_run_is_refused(loaded: LoadedModel) -> None:
    server = serving(loaded, running=2)
    with pytest.raises(UsageError, match="a prompt of 40 tokens"):
        server.admit(np.ones(40, np.int32))
    with pytest.raises(UsageError, match="a prompt of 0 tokens"):
        server.admit([])
    with pytest.raises(UsageError, match="comes with the slot"):
        server.admit([1, 2, 3], hit_tokens=2)
    with pytest.raises(NumericError, match="no keys and values for every"):
        server.admit([1, 2, 3], slot=0, hit_tokens=2, kv=[])
    live = server.admit([1, 2, 3])
    assert live is not None
    with pytest.raises(UsageError, match="3 tokens, 0 have run"):
        server.decode_step([live])
    with pytest.raises(UsageError, match="each once"):
        server.decode_step([live, live])
    with pytest.raises(UsageError, match="keys of 3 were asked"):
        server.keys(live, 3)
    part = HeldKeys(server.lines.read(live.line, 1))
    with pytest.raises(NumericError, match="keys of 1 tokens for a hit of 2"):
        server.admit([1, 2, 3], slot=0, hit_tokens=2, kv=[part])
    assert server.admit([1, 2]) is not None
    assert server.admit([1, 2]) is None
    with pytest.raises(NumericError, match="of this engine"):
        joined_keys([HeldKeys({}), None])
    with pytest.raises(UsageError, match="at least one request"):
        ServingEngine(server.engine, running=0, length=4)
    with pytest.raises(UsageError, match="no batch size"):
        ServingEngine(server.engine, running=4, length=4, sizes=(1, 2))


def test_several_steps_are_as_many_single_ones(loaded: LoadedModel) -> None:
    asked, marks = prompts()[:3], []
    server, single = serving(loaded), serving(loaded)
    many, one = ([s.admit(p) for p in asked] for s in (server, single))
    for live in (*many, *one):
        assert live is not None
        (server if live in many else single).prefill(live)
    found = server.decode_steps(many, 4, lambda: marks.append(len(marks)))  # type: ignore[arg-type]
    assert found == [single.decode_step(one) for _ in range(4)]  # type: ignore[arg-type]
    assert marks == [0, 1, 2, 3]
    for a, b in zip(many, one, strict=True):
        assert a is not None
        assert b is not None
        assert (a.output, a.done) == (b.output, b.done)
    room = server.lines.length - max(live.done for live in many if live is not None)
    with pytest.raises(UsageError, match="is full"):
        server.decode_steps(many, room + 1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a step needs requests"):
        server.decode_steps(many, 0)  # type: ignore[arg-type]


def test_a_full_line_ends_a_request(loaded: LoadedModel) -> None:
    server = serving(loaded)
    live = server.admit(np.ones(31, np.int32))
    assert live is not None
    server.prefill(live)
    server.decode_step([live])
    with pytest.raises(UsageError, match="a line of 32 tokens is full"):
        server.decode_step([live])


def test_attention_with_more_than_keys_is_refused(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = DecodeEngine(loaded, state="fp32", slots=1)
    monkeypatch.setattr("hybridstate.runtime.serving.has_plain_attention", lambda _: False)
    with pytest.raises(UnsupportedModel, match="no line holds"):
        ServingEngine(engine, running=1, length=4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tiny-gdn", "tiny-kda"])
def test_captured_batches_reply_like_the_model_on_a_gpu(name: str) -> None:
    loaded = load_model(name, device="cuda", dtype=torch.float32)
    engine = DecodeEngine(loaded, state="fp32", slots=4)
    server = ServingEngine(engine, running=3, length=96, sizes=(2, 3), chunk=16, audit=True)
    replies = tuple(8 * reply for reply in REPLIES)
    found = run(server, prompts(), replies)
    expected = [alone(loaded, p, n) for p, n in zip(prompts(), replies, strict=True)]
    same = [
        a == b
        for one, other in zip(found, expected, strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    assert sum(same) > 0.9 * len(same)  # a near tie may go either way and the rest follows it
    assert server.to_json()["mode"] == "cuda-graph"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tiny-gdn", "tiny-kda"])
def test_prompts_and_several_steps_on_a_gpu(name: str) -> None:
    """States of a prompt in two pieces against the model's own code, then captured steps together and one by one."""
    loaded = load_model(name, device="cuda", dtype=torch.float32)
    engine = DecodeEngine(loaded, state="fp32", slots=4)
    server = ServingEngine(engine, running=2, length=400, chunk=200)
    tokens = torch.randint(3, 250, (333,), generator=torch.Generator().manual_seed(5))
    first, second = (server.admit(tokens.numpy()) for _ in range(2))
    assert first is not None
    assert second is not None
    for live in (first, second):
        server.prefill(live)
    found, _ = engine.pool.read(torch.tensor([first.slot], device="cuda"))
    _, cache = prefill(loaded, tokens[None])
    for ours, theirs in zip(found, recurrent_states(cache), strict=True):
        assert relative_rms(ours, theirs) < 1e-4
    told = server.to_json()
    assert told["prefill"] == "triton, tf32x3 products"
    assert told["replaced_modules"]["prompts"] == len(loaded.spec.layers)
    assert told["replaced_modules"]["dense"] > 0
    for _ in range(12):
        server.decode_step([first])
    for steps in (1, 4, 7):
        server.decode_steps([second], steps)
    assert first.output == second.output
