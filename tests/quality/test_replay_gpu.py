"""The warm and replay protocol on a GPU: captured steps, kernels of the cache, the same replies as on a CPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from hybridstate.bench.cutoffs import selections_at
from hybridstate.bench.quality_arms import reuse_arms, storage_arms
from hybridstate.bench.quality_window import whole_window
from hybridstate.quality.generation import Replies, Sampling, generate
from hybridstate.quality.questions import own_block
from hybridstate.quality.replay import (
    EXACT,
    ArmCache,
    Replayed,
    serve,
    stored_prefixes,
    without_cache,
)
from hybridstate.trajectories.cache import prefill
from hybridstate.trajectories.model import LoadedModel, load_model

pytestmark = pytest.mark.gpu

SAME = 0.9
"""Share of replies that have to be equal: sums in another order break a tie now and then."""


def replies(loaded: LoadedModel, *, fixed: bool | None) -> Replies:
    """All load policies and two formats on four questions, twelve tokens each."""
    block = replace(own_block(loaded, "registers", tokens=640, questions=4).at_the_end(), budget=12)
    arms = (
        *reuse_arms(loaded, selections_at(loaded, (64,)), 1),
        *storage_arms(loaded, ["bf16", "int8-step"], None),
    )
    prefix = stored_prefixes(loaded, block, [EXACT], chunk=256, rows=8)[0]
    replayed = Replayed(loaded, prefix, 8)
    found = []
    for arm in arms:
        if arm.policy == "recompute":
            found.append(without_cache(loaded, block, prefix, rounds=1))
            continue
        mine = stored_prefixes(loaded, block, [arm.storage], chunk=256, rows=8)[0]
        kept = prefix if arm.storage.exact else mine
        one = serve(loaded, arm, block, kept, replayed, slots=4, rounds=1, seed=1)
        assert one.residency(block.tokens)["not_resident"] == []
        found.append(one)
    whole = prefill(loaded, torch.cat([block.context, block.suffix], 1))
    return generate(
        loaded, block, arms, found, chunk=256, sampling=Sampling(), whole=whole, fixed=fixed
    )


def same(a: Replies, b: Replies) -> float:
    return float(np.mean((a.tokens == b.tokens).all(-1)))


@pytest.mark.parametrize("name", ["tiny-gdn", "tiny-kda"])
def test_captured_steps_reply_as_plain_ones_and_as_a_cpu(name: str) -> None:
    loaded = load_model(name, device="cuda", dtype=torch.float32)
    captured, plain = replies(loaded, fixed=None), replies(loaded, fixed=False)
    assert captured.mode == "cuda-graph"
    assert same(captured, plain) >= SAME
    assert same(captured, replies(load_model(name), fixed=False)) >= SAME


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_windows_are_recomputation(dtype: torch.dtype) -> None:
    loaded = load_model("tiny-kda", device="cuda", dtype=dtype)
    arms = reuse_arms(loaded, selections_at(loaded, (512,)), 0)
    found = whole_window(loaded, arms, questions=8)
    assert found is not None
    assert found["same_reply_as_dense"] == 1.0


@pytest.mark.parametrize("name", ["tiny-gdn", "tiny-kda"])
def test_copies_together_are_copies_one_by_one(name: str) -> None:
    """All kinds of arms, with room for all states and for half of them; then one round stands for all."""
    loaded = load_model(name, device="cuda", dtype=torch.float32)
    block = own_block(loaded, "registers", tokens=640, questions=6).at_the_end()
    prefix = stored_prefixes(loaded, block, [EXACT], chunk=256, rows=8)[0]
    replayed = Replayed(loaded, prefix, 8)
    for arm in reuse_arms(loaded, selections_at(loaded, (64,)), 1):
        if arm.policy == "recompute":
            continue
        for slots in (6, 3):
            found = []
            for timed in (False, True):
                cache = ArmCache(loaded, arm, block, prefix, replayed, slots=slots, timed=timed)
                cache.warm()
                rounds = [cache.round(order) for order in ((3, 1, 5, 0, 2, 4), range(6))]
                found.append([x for states, conv, _ in rounds for x in (*states, *conv)])
            assert all(a.equal(b) for a, b in zip(*found, strict=True)), (arm.name, slots)
        every = serve(loaded, arm, block, prefix, replayed, slots=6, rounds=3, seed=1)
        once = every.once(6)
        assert (every.rows, once.rows) == (18, 6)
        both = [
            generate(loaded, block, [arm], [one], chunk=256, sampling=Sampling())
            for one in (every, once)
        ]
        assert (both[0].tokens == np.tile(both[1].tokens, (1, 3, 1))).mean() >= SAME
