"""Copies that run together leave the bits of copies that run one by one; replies of a batch are those of its rows."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hybridstate.quality.generation import Replies, Sampling, generate
from hybridstate.quality.questions import Block, own_block
from hybridstate.quality.replay import (
    EXACT,
    ArmCache,
    Policy,
    Replayed,
    ReuseArm,
    Served,
    serve,
    stored_prefixes,
)
from hybridstate.quant.arms import plain_arm
from hybridstate.runtime.restore import Prefix, Units
from hybridstate.trajectories.model import LoadedModel, load_model

QUESTIONS = 4
ORDERS = ((2, 0, 3, 1), (1, 3, 0, 2), (0, 1, 2, 3))


@pytest.fixture(scope="module", params=["tiny_gdn", "tiny_kda"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    folder: Path = request.getfixturevalue(request.param)
    return load_model(str(folder))


@pytest.fixture(scope="module")
def block(loaded: LoadedModel) -> Block:
    return replace(own_block(loaded, "registers", tokens=256, questions=QUESTIONS), budget=4)


@pytest.fixture(scope="module")
def prefix(loaded: LoadedModel, block: Block) -> Prefix:
    return stored_prefixes(loaded, block, [EXACT], chunk=64, rows=8)[0]


@pytest.fixture(scope="module")
def units(loaded: LoadedModel) -> Units:
    rng = np.random.Generator(np.random.PCG64(5))
    shapes = [
        (n.value_heads,) if loaded.spec.unit == "head" else (n.value_heads, n.key_dim)
        for n in loaded.spec.layers
    ]
    return Units.of([rng.random(shape) < 0.5 for shape in shapes])


@pytest.mark.parametrize("slots", [QUESTIONS, 3, 1])
@pytest.mark.parametrize("kind", ["fp32", "int8"])
@pytest.mark.parametrize("policy", ["dense", "nr", "wr"])
def test_together_is_one_by_one(
    loaded: LoadedModel,
    block: Block,
    prefix: Prefix,
    units: Units,
    policy: Policy,
    kind: str,
    slots: int,
) -> None:
    """Evictions, repeated prompts and freed slots included, bit for bit."""
    window = 16 if policy == "wr" else 0
    kept = None if policy == "dense" else units
    arm = ReuseArm("x", policy, "int8" if kind == "int8" else "fp32", kept, 16, window)
    twice = replace(block, context=block.context.clone(), suffix=block.suffix.clone())
    twice.context[3], twice.suffix[3] = twice.context[1], twice.suffix[1]
    both = [
        ArmCache(
            *(loaded, arm, twice, prefix.rows([0, 1, 2, 1]), Replayed(loaded, prefix, 8)),
            slots=slots,
            timed=timed,
        )
        for timed in (False, True)
    ]
    for cache in both:
        cache.warm()
    for place, order in enumerate(ORDERS, 1):
        found = [cache.round(order, last=place == len(ORDERS)) for cache in both]
        for together, single in zip(found[0][:2], found[1][:2], strict=True):
            assert all(a.equal(b) for a, b in zip(together, single, strict=True))
        assert (found[0][2] == found[1][2]).all()
    counters = [cache.cache.counters.to_json() for cache in both]
    assert counters[0] == counters[1]
    assert both[0].cache.digest == both[1].cache.digest


def served(loaded: LoadedModel, block: Block, prefix: Prefix, units: Units) -> list[Served]:
    arms = [
        ReuseArm("dense", "dense"),
        ReuseArm("nr", "nr", "fp32", units, 16),
        ReuseArm("wr", "wr", "int8", units, 16, 16),
    ]
    replayed = Replayed(loaded, prefix, 8)
    return [
        serve(loaded, arm, block, prefix, replayed, slots=QUESTIONS, rounds=3, seed=1)
        for arm in arms
    ]


def test_rounds_of_equal_bits_are_kept_once(
    loaded: LoadedModel, block: Block, prefix: Prefix, units: Units
) -> None:
    for every in served(loaded, block, prefix, units):
        once = every.once(QUESTIONS)
        assert (every.rows, once.rows) == (3 * QUESTIONS, QUESTIONS)
        assert all(a.equal(b[:QUESTIONS]) for a, b in zip(once.states, every.states, strict=True))
        assert once.residency(block.tokens) == every.residency(block.tokens)
        assert once.once(QUESTIONS) is once
        every.conv[0][QUESTIONS, 0, 0] += 1.0
        assert every.once(QUESTIONS) is every


def test_batched_replies_are_those_of_single_requests(
    loaded: LoadedModel, block: Block, prefix: Prefix, units: Units
) -> None:
    arms = [ReuseArm("dense", "dense"), ReuseArm("nr", "nr", "fp32", units, 16)]
    arms.append(ReuseArm("bf16", "dense", storage=plain_arm("bf16")))
    every = served(loaded, block, prefix, units)
    every[2] = every[0]

    def replies(block: Block, arms: list[ReuseArm], found: list[Served]) -> Replies:
        return generate(loaded, block, arms, found, chunk=64, sampling=Sampling())

    rounds = replies(block, arms, every)
    once = replies(block, arms, [one.once(QUESTIONS) for one in every])
    assert (np.tile(once.tokens, (1, 3, 1)) == rounds.tokens).all()
    assert (once.first.repeat(1, 3, 1) - rounds.first).abs().max() < 1e-5
    for row in range(QUESTIONS):
        part = slice(row, row + 1)
        alone = replace(block, context=block.context[part], suffix=block.suffix[part])
        for place, arm in enumerate(arms):
            held = every[place]
            mine = replace(
                held,
                states=tuple(state[part] for state in held.states),
                conv=tuple(window[part] for window in held.conv),
                prefix=prefix.rows([row]),
                cached=held.cached[part],
            )
            single = replies(alone, [arm], [mine])
            assert (single.tokens[0, 0] == once.tokens[place, row]).all()
            assert torch.allclose(single.first[0, 0], once.first[place, row], atol=1e-4)
