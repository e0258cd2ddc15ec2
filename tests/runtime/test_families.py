"""Families that the other tests of the runtime leave out: they decode from our pool and are served from the cache."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hybridstate.bench.decode_check import simulated_logits
from hybridstate.bench.scheduler import Limits, Scheduler
from hybridstate.runtime.admission import Admission, Pools
from hybridstate.runtime.engine import DecodeEngine
from hybridstate.runtime.prefix_cache import PrefixCache
from hybridstate.runtime.serving import ServingEngine
from hybridstate.runtime.slots import RESERVED
from hybridstate.runtime.tensor_store import TensorStore
from hybridstate.trajectories.model import LoadedModel, load_model
from tests.bench.test_engine_executor import CONVERSATIONS, LONGEST, TRACE, TURNS, Kept
from tests.runtime.test_engine import STEPS, assert_simulated, draw, prefix_of, run_steps
from tests.runtime.test_serving import alone
from tests.tolerances import assert_within

FAMILIES = ("qwen3_5_moe", "qwen3_next", "olmo_hybrid")


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> LoadedModel:
    return load_model(str(tiny_checkpoint(request.param, key_dim=16)))


def test_decoding_from_the_pool(loaded: LoadedModel) -> None:
    """FP32 like transformers, packed like the simulated rounding."""
    prefix, forced = prefix_of(loaded), draw(3, STEPS, seed=1)
    got = run_steps(DecodeEngine(loaded, state="fp32", slots=4), prefix, forced)
    assert_within(got, simulated_logits(loaded, None, prefix, forced), "replay-logits-f32")
    engine = DecodeEngine(loaded, state="damp", slots=4, k_hi=8)
    assert_simulated(loaded, engine, prefix, forced, run_steps(engine, prefix, forced))


def test_replies_through_the_cache(loaded: LoadedModel) -> None:
    """Half of the units are cached, a replay of everything restores the others: every reply is that of its prompt."""
    pools = Pools(native=5, packed=4, watermark=1)
    engine = DecodeEngine(loaded, state="fp32", slots=pools.native + RESERVED)
    serving = ServingEngine(engine, running=3, length=LONGEST, sizes=(1, 3), chunk=16)
    shapes = [(layer.value_heads, layer.key_dim) for layer in loaded.spec.layers]
    masks = [(torch.arange(h * k) % 2 == 0).view(h, k) for h, k in shapes]
    store = TensorStore(engine.pool, pools.packed, masks, window=64, replay=serving.replay)
    cache = PrefixCache(pools, store, Admission(shortest=2, every=8))
    kept = Kept(serving, cache)
    run = Scheduler(TRACE, cache, kept, Limits(clients=4, running=3), seed=1).serve()
    assert len(run.served) == CONVERSATIONS * TURNS
    for prompt, output in kept.outputs:
        assert output.tolist() == alone(loaded, prompt, len(output))
    assert {"miss", "compressed"} <= {served.tier for served in run.served}
    assert sum(served.replayed for served in run.served) > 0
    cache.audit()
