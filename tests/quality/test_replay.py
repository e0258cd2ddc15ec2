"""The warm and replay protocol: hits are compressed, arms are paired, replies are those of a model without a cache."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridstate.bench.cutoffs import selections_at
from hybridstate.quality.generation import Replies, Sampling, generate
from hybridstate.quality.questions import Block, own_block
from hybridstate.quality.replay import (
    EXACT,
    Replayed,
    ReuseArm,
    Served,
    serve,
    stored_prefixes,
    without_cache,
)
from hybridstate.quant.arms import plain_arm
from hybridstate.runtime.restore import Prefix, Units
from hybridstate.trajectories.cache import forward, new_cache, prefill, recurrent_states
from hybridstate.trajectories.model import LoadedModel, load_model

ROUNDS = 2


@pytest.fixture(scope="module", params=["tiny_gdn", "tiny_kda"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    folder: Path = request.getfixturevalue(request.param)
    return load_model(str(folder))


@pytest.fixture(scope="module")
def block(loaded: LoadedModel) -> Block:
    found = own_block(loaded, "registers", tokens=256, questions=3)
    return replace(found, budget=4)


@pytest.fixture(scope="module")
def prefix(loaded: LoadedModel, block: Block) -> Prefix:
    return stored_prefixes(loaded, block, [EXACT], chunk=64, rows=8)[0]


def some_units(loaded: LoadedModel) -> Units:
    rng = np.random.Generator(np.random.PCG64(5))
    shapes = [
        (n.value_heads,) if loaded.spec.unit == "head" else (n.value_heads, n.key_dim)
        for n in loaded.spec.layers
    ]
    return Units.of([rng.random(shape) < 0.5 for shape in shapes])


def served(
    loaded: LoadedModel, arm: ReuseArm, block: Block, prefix: Prefix, slots: int = 3
) -> Served:
    replayed = Replayed(loaded, prefix, 8)
    return serve(loaded, arm, block, prefix, replayed, slots=slots, rounds=ROUNDS, seed=1)


def answered(
    loaded: LoadedModel,
    block: Block,
    prefix: Prefix,
    arms: list[ReuseArm],
    sampling: Sampling | None = None,
    fixed: bool | None = None,
) -> Replies:
    whole = prefill(loaded, torch.cat([block.context, block.suffix], 1))
    found = []
    for arm in arms:
        if arm.policy == "recompute":
            found.append(without_cache(loaded, block, prefix, rounds=ROUNDS))
        else:
            mine = stored_prefixes(loaded, block, [arm.storage], chunk=64, rows=8)[0]
            found.append(served(loaded, arm, block, mine))
    chosen = sampling or Sampling()
    return generate(loaded, block, arms, found, chunk=64, sampling=chosen, whole=whole, fixed=fixed)


@torch.no_grad()
def alone(loaded: LoadedModel, prompt: torch.Tensor, count: int) -> list[int]:
    past, step = new_cache(loaded), prompt[None]
    found: list[int] = []
    while len(found) < count:
        found.append(int(forward(loaded, step, past)[0, -1].argmax()))
        step = torch.tensor([[found[-1]]])
    return found


@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_compressed_arms_hit_compressed_states_only(
    loaded: LoadedModel, block: Block, prefix: Prefix, kind: str
) -> None:
    assert kind in ("fp32", "int8")
    for policy in ("nr", "wr"):
        arm = ReuseArm(
            "x", policy, "int8" if kind == "int8" else "fp32", some_units(loaded), 16, 16
        )
        found = served(loaded, arm, block, prefix)
        hit = found.residency(block.tokens)
        assert hit["hits"] == hit["compressed_hits"] == hit["requests"] == 6
        assert hit["token_hit"] == pytest.approx(block.prefix / 256)
        assert hit["not_resident"] == []
        assert found.replayed == (6 * 16 if policy == "wr" else 0)


def test_dense_states_come_back_bit_for_bit(
    loaded: LoadedModel, block: Block, prefix: Prefix
) -> None:
    found = served(loaded, ReuseArm("dense", "dense"), block, prefix)
    assert found.compressed == 0
    assert found.hits == 6
    for state, exact in zip(found.states, prefix.states, strict=True):
        assert state.equal(torch.cat([exact] * ROUNDS))


def test_omitted_units_are_zero_and_the_others_exact(
    loaded: LoadedModel, block: Block, prefix: Prefix
) -> None:
    units = some_units(loaded)
    found = served(loaded, ReuseArm("nr", "nr", "fp32", units, 16), block, prefix)
    for state, exact, mask in zip(found.states, prefix.states, units.masks, strict=True):
        kept = mask.view(*mask.shape, *[1] * (3 - mask.dim())).expand(exact.shape[1:])
        assert state[:3].equal(torch.where(kept, exact, torch.zeros_like(exact)))


def test_the_order_is_the_same_for_all_arms_and_differs_by_round(
    loaded: LoadedModel, block: Block, prefix: Prefix
) -> None:
    first = served(loaded, ReuseArm("dense", "dense"), block, prefix)
    second = served(loaded, ReuseArm("nr", "nr", "fp32", some_units(loaded), 16), block, prefix)
    assert first.order == second.order
    assert all(sorted(order) == [0, 1, 2] for order in first.order)


def test_too_few_slots_are_seen(loaded: LoadedModel, block: Block, prefix: Prefix) -> None:
    arm = ReuseArm("nr", "nr", "fp32", some_units(loaded), 16)
    hit = served(loaded, arm, block, prefix, slots=2).residency(block.tokens)
    assert hit["loaded"] < 1.0
    assert any("evictions" in why or "loaded" in why for why in hit["not_resident"])


def test_replies_equal_those_without_a_cache(
    loaded: LoadedModel, block: Block, prefix: Prefix
) -> None:
    arms = [ReuseArm("dense", "dense"), ReuseArm("recompute", "recompute")]
    found = answered(loaded, block, prefix, arms)
    prompts = torch.cat([block.context, block.suffix], 1)
    expected = np.array([alone(loaded, prompt, block.budget) for prompt in prompts])
    for arm in range(2):
        assert (found.tokens[arm].reshape(ROUNDS, 3, -1) == expected).all()


def test_steps_on_fixed_tensors_give_the_same_replies(
    loaded: LoadedModel, block: Block, prefix: Prefix
) -> None:
    """What a GPU runs, without its graph."""
    arms = [
        ReuseArm("dense", "dense"),
        ReuseArm("recompute", "recompute"),
        ReuseArm("bf16", "dense", storage=plain_arm("bf16")),
    ]
    for sampling in (Sampling(), Sampling(1.5, 3)):
        plain = answered(loaded, block, prefix, arms, sampling, fixed=False)
        fixed = answered(loaded, block, prefix, arms, sampling, fixed=True)
        assert (plain.tokens == fixed.tokens).all()


def test_replay_of_the_whole_prefix_is_recomputation(
    loaded: LoadedModel, block: Block, prefix: Prefix
) -> None:
    arm = ReuseArm("wr", "wr", "fp32", some_units(loaded), 512, 512)
    found = served(loaded, arm, block, prefix)
    assert found.replayed == 6 * block.prefix
    for state, exact in zip(found.states, prefix.states, strict=True):
        assert (state[:3] - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.parametrize("name", ["bf16", "int8-step", "int8-step-stochastic"])
def test_formats_together_are_formats_alone(
    loaded: LoadedModel, block: Block, prefix: Prefix, name: str
) -> None:
    arms = [ReuseArm("dense", "dense"), ReuseArm(name, "dense", storage=plain_arm(name))]
    both = answered(loaded, block, prefix, arms)
    single = answered(loaded, block, prefix, arms[1:])
    assert (both.tokens[1] == single.tokens[0]).all()
    assert both.first[1].sub(single.first[0]).abs().max() < 1e-5
    assert not both.first[1].equal(both.first[0])


def test_formatted_prefill_is_written_at_every_chunk(loaded: LoadedModel, block: Block) -> None:
    arm = plain_arm("bf16")
    found = stored_prefixes(loaded, block, [arm, plain_arm("fp16")], chunk=64, rows=8)
    assert len(found) == 2
    state, tokens = found[0].states[0], block.context[:1]
    assert state.equal(state.bfloat16().float())

    def write(cache: Any, _done: int) -> None:
        for kept in recurrent_states(cache):
            kept.copy_(kept.bfloat16().float())

    _, past = prefill(loaded, tokens, chunk=64, after_chunk=write)
    for mine, other in zip(found[0].states, recurrent_states(past), strict=True):
        assert (mine[0] - other[0]).norm() <= 1e-3 * other[0].norm()


def test_samples_are_paired_over_arms(loaded: LoadedModel, block: Block, prefix: Prefix) -> None:
    arms = [ReuseArm("dense", "dense"), ReuseArm("again", "dense")]
    sampled = answered(loaded, block, prefix, arms, Sampling(2.0, 7))
    assert (sampled.tokens[0] == sampled.tokens[1]).all()
    rounds = sampled.tokens[0].reshape(ROUNDS, 3, -1)
    assert (rounds[0] != rounds[1]).any()
    greedy = answered(loaded, block, prefix, arms[:1]).tokens[0].reshape(ROUNDS, 3, -1)
    assert (greedy[0] == greedy[1]).all()


def test_a_selection_by_horizon_runs(loaded: LoadedModel, block: Block, prefix: Prefix) -> None:
    chosen = selections_at(loaded, (64,))[0]
    units = Units.of(chosen.retained)
    arm = ReuseArm("wr-64", "wr", "fp32", units, 64, chosen.w_replay)
    assert served(loaded, arm, block, prefix).hits == 6
