"""The scheduler on a real engine and a prefix cache on its pool: every reply is that of its prompt alone."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from hybridstate.bench.engine_executor import EngineExecutor
from hybridstate.bench.recording import RecordingExecutor, RecordingStore
from hybridstate.bench.scheduler import Limits, Request, Scheduler
from hybridstate.bench.traces import Conversation, Trace, Turn
from hybridstate.errors import NumericError
from hybridstate.runtime.admission import Admission, Pools
from hybridstate.runtime.engine import DecodeEngine
from hybridstate.runtime.prefix_cache import PrefixCache
from hybridstate.runtime.radix import Tokens
from hybridstate.runtime.serving import ServingEngine
from hybridstate.runtime.slots import RESERVED
from hybridstate.runtime.tensor_store import TensorStore
from hybridstate.trajectories.model import LoadedModel, load_model
from tests.runtime.test_serving import alone

CONVERSATIONS, TURNS, LONGEST = 7, 3, 96


@pytest.fixture(scope="module", params=["qwen3_5", "kimi_linear"])
def loaded(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> LoadedModel:
    return load_model(str(tiny_checkpoint(request.param)))


def conversation(number: int) -> Conversation:
    """Two system prompts, then turns and replies of different lengths."""
    rng = np.random.Generator(np.random.PCG64(number))
    system = np.random.Generator(np.random.PCG64(100 + number % 2)).integers(3, 90, 9)
    turns = []
    for turn in range(TURNS):
        tokens = rng.integers(3, 90, int(rng.integers(3, 12)))
        if turn == 0:
            tokens = np.concatenate([system, tokens])
        reply = int(rng.integers(1, 7))
        turns.append(Turn(tokens.astype(np.int32), reply, np.zeros(reply, np.int32)))
    return Conversation(number, tuple(turns))


TRACE = Trace("two system prompts", True, "random tokens", CONVERSATIONS, conversation)


class Kept(EngineExecutor):
    """Remembers prompts and outputs."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.outputs: list[tuple[Tokens, Tokens]] = []

    def output(self, request: Request) -> Tokens:
        found = super().output(request)
        self.outputs.append((request.prompt, found))
        return found


@pytest.mark.parametrize("window", [0, 64])
def test_replies_through_the_cache_are_those_of_prompts_alone(
    loaded: LoadedModel, window: int
) -> None:
    """Whole checkpoints, or half of the units and a replay of everything."""
    pools = Pools(native=5, packed=4, watermark=1)
    engine = DecodeEngine(loaded, state="fp32", slots=pools.native + RESERVED)
    serving = ServingEngine(engine, running=3, length=LONGEST, sizes=(1, 3), chunk=16)
    masks = None
    if window:
        shapes = [(n.value_heads, n.key_dim) for n in loaded.spec.layers]
        masks = [(torch.arange(h * k) % 2 == 0).view(h, k) for h, k in shapes]
    tensors = TensorStore(engine.pool, pools.packed, masks, window=window, replay=serving.replay)
    ticks = iter(range(1_000_000))
    store = RecordingStore(tensors, 1, 1, lambda: float(next(ticks)))
    cache = PrefixCache(pools, store, Admission(shortest=2, every=8))
    kept = Kept(serving, cache, store, lambda: float(next(ticks)))
    executor = RecordingExecutor(kept, 1)
    run = Scheduler(TRACE, cache, executor, Limits(clients=4, running=3), seed=1).serve()
    assert len(run.served) == len(kept.outputs) == CONVERSATIONS * TURNS
    for prompt, output in kept.outputs:
        assert output.tolist() == alone(loaded, prompt, len(output))
    tiers = {served.tier for served in run.served}
    assert {"miss", "compressed"} <= tiers
    assert run.peak == 3
    assert executor.operations["decode"]
    assert (sum(served.replayed for served in run.served) > 0) == bool(window)
    cache.audit()
    assert serving.lines.available == 3
    assert not serving.live


def test_what_the_scheduler_must_not_do_is_refused(loaded: LoadedModel) -> None:
    pools = Pools(native=2)
    engine = DecodeEngine(loaded, state="fp32", slots=pools.native + RESERVED)
    serving = ServingEngine(engine, running=1, length=LONGEST)
    cache = PrefixCache(pools, TensorStore(engine.pool, 0))
    executor = EngineExecutor(serving, cache)
    first, second = (
        Request(conversation(n), 0, conversation(n).turns[0].tokens, 1, np.empty(0), 0.0)
        for n in range(2)
    )
    with pytest.raises(NumericError, match="without a hold"):
        executor.prefill(first, 0, 1)
    first.lease, second.lease = cache.acquire(first.prompt), cache.acquire(second.prompt)
    assert executor.prefill(first, 0, 2) > 0
    with pytest.raises(NumericError, match="2 prompt tokens have run"):
        executor.prefill(first, 3, 4)
    with pytest.raises(NumericError, match="more requests run"):
        executor.prefill(second, 0, 1)
    executor.close(first)
    executor.close(first)
    assert serving.lines.available == 1
    assert executor.drain() == 0.0
