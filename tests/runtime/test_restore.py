"""Checkpoints to bytes and back, and the load policies, on random tiny models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridstate.errors import NumericError, PlanMismatch, UsageError
from hybridstate.families import ModelSpec
from hybridstate.plan.accounting import account
from hybridstate.plan.select import Selection, select
from hybridstate.runtime.pool import StatePool
from hybridstate.runtime.restore import (
    Prefix,
    Units,
    capture,
    join,
    load,
    refresh,
    replay,
    resume,
    resume_slots,
    store,
    zero_fill,
)
from hybridstate.trajectories.cache import new_cache, prefill
from hybridstate.trajectories.model import LoadedModel, load_model
from tests.tolerances import assert_within

MODELS = [
    ("qwen3_5", {"key_heads": 4, "value_heads": 4}),
    ("qwen3_5", {"key_heads": 2, "value_heads": 4}),
    ("qwen3_5", {"key_heads": 2, "value_heads": 6}),
    ("qwen3_next", {"key_heads": 2, "value_heads": 6}),
    ("olmo_hybrid", {"key_heads": 4, "value_heads": 4}),
    ("kimi_linear", {}),
]


@pytest.fixture(scope="module", params=MODELS, ids=lambda p: f"{p[0]}-{p[1].get('value_heads', 0)}")
def loaded(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> LoadedModel:
    family, options = request.param
    return load_model(str(tiny_checkpoint(family, **options)))


def tokens_of(loaded: LoadedModel, batch: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 90, (batch, length), generator=generator)


def prefix_of(loaded: LoadedModel, length: int, batch: int = 2) -> Prefix:
    tokens = tokens_of(loaded, batch, length)
    _, past = prefill(loaded, tokens)
    return capture(loaded, tokens, past)


def half(spec: ModelSpec, w_max: int = 16) -> Selection:
    """Every other unit retained, the others with horizons just above w_max / 2."""
    horizons = []
    for layer in spec.layers:
        shape = (layer.value_heads,)
        if spec.unit == "channel":
            shape = (layer.value_heads, layer.key_dim)  # type: ignore[assignment]
        alternate = np.arange(int(np.prod(shape))) % 2
        horizons.append(np.where(alternate == 0, 1e6, 0.75 * w_max).reshape(shape))
    return select(horizons, w_max)


def test_heads_without_a_retained_unit_are_counted(loaded: LoadedModel) -> None:
    spec = loaded.spec
    every, units = Units.every(spec), Units.of(half(spec).retained)
    heads = sum(layer.value_heads for layer in spec.layers)
    assert every.heads == (0, heads)
    # every other unit: half of the heads, or some channels of every head
    assert units.heads == ((heads - units.counts[0]) if spec.unit == "head" else 0, heads)
    masks = [np.zeros(mask.shape, dtype=np.bool_) for mask in half(spec).retained]
    masks[0].reshape(len(masks[0]), -1)[1, -1] = True
    assert Units.of(masks).heads == (heads - 1, heads)


def loaded_slots(prefix: Prefix, units: Units, spec: ModelSpec) -> tuple[StatePool, torch.Tensor]:
    pool = StatePool(spec, prefix.batch)
    slots = pool.alloc(prefix.batch)
    assert slots is not None
    for row in range(prefix.batch):
        load(store(prefix, row, units), units, pool, row)
    return pool, slots


def next_logits(loaded: LoadedModel, past: Any, suffix: torch.Tensor) -> torch.Tensor:
    logits, _ = prefill(loaded, suffix, cache=past, keep_logits=True)
    return logits


def test_dense_checkpoint_restores_bit_for_bit(loaded: LoadedModel) -> None:
    prefix, units = prefix_of(loaded, 37), Units.every(loaded.spec)
    pool, slots = loaded_slots(prefix, units, loaded.spec)
    states, conv = pool.read(slots)
    assert all(map(torch.equal, states, prefix.states))
    assert all(map(torch.equal, conv, prefix.conv))
    suffix = tokens_of(loaded, 2, 9, seed=1)
    direct = next_logits(loaded, resume(loaded, prefix.kv, prefix.states, prefix.conv), suffix)
    restored = next_logits(loaded, resume_slots(loaded, prefix.kv, pool, slots), suffix)
    assert torch.equal(direct, restored)


def test_dense_restore_continues_like_one_uninterrupted_prefill(loaded: LoadedModel) -> None:
    tokens = tokens_of(loaded, 2, 46)
    whole, _ = prefill(loaded, tokens, keep_logits=True)
    _, past = prefill(loaded, tokens[:, :37])
    prefix = capture(loaded, tokens[:, :37], past)
    # the checkpoint's BF16 window is the only difference
    exact = [
        layer.conv_states[0][..., 1:] for layer in past.layers if hasattr(layer, "conv_states")
    ]
    got = next_logits(loaded, resume(loaded, prefix.kv, prefix.states, exact), tokens[:, 37:])
    assert_within(got, whole[:, 37:], "replay-logits-f32")


def test_checkpoint_is_as_long_as_accounted(loaded: LoadedModel) -> None:
    prefix, selection = prefix_of(loaded, 21), half(loaded.spec)
    accounting = account(loaded.spec, selection)
    buffer = store(prefix, 0, Units.of(selection.retained))
    assert (buffer.dtype, buffer.dim()) == (torch.uint8, 1)
    assert len(buffer.numpy().tobytes()) == accounting.ragged_bytes
    dense = store(prefix, 0, Units.every(loaded.spec))
    assert len(dense.numpy().tobytes()) == accounting.dense_bytes


def test_bytes_lie_in_the_stated_order_without_padding(loaded: LoadedModel) -> None:
    prefix, retained = prefix_of(loaded, 21), half(loaded.spec).retained
    expected = b""
    for state, mask in zip(prefix.states, retained, strict=True):
        expected += state[1].numpy()[mask].tobytes()
    for window in prefix.conv:
        expected += window[1].contiguous().view(torch.int16).numpy().tobytes()
    units = Units.of(retained)
    buffer = store(prefix, 1, units)
    assert buffer.numpy().tobytes() == expected
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), buffer])[1:]
    pool = StatePool(loaded.spec, 2)
    load(shifted, units, pool, 1)
    for state, mask, loaded_state in zip(prefix.states, retained, pool.states, strict=True):
        where = torch.from_numpy(mask)
        assert torch.equal(loaded_state[1][where], state[1][where])
        assert loaded_state[0].isnan().all()
        assert loaded_state[1][~where].isnan().all()
    with pytest.raises(PlanMismatch, match="these masks need"):
        load(buffer[:-1], units, pool, 0)
    with pytest.raises(UsageError, match="rows order"):
        load(buffer, units, StatePool(loaded.spec, 1, dense_order="columns"), 0)


def test_omitted_units_stay_poisoned_until_a_policy_settles_them(loaded: LoadedModel) -> None:
    prefix, units = prefix_of(loaded, 21), Units.of(half(loaded.spec).retained)
    pool, slots = loaded_slots(prefix, units, loaded.spec)
    with pytest.raises(NumericError, match="non-finite state"):
        resume_slots(loaded, prefix.kv, pool, slots)
    zero_fill(pool, slots, units)
    pool.require_finite(slots)
    states, _ = pool.read(slots)
    for state, kept, mask in zip(states, prefix.states, units.masks, strict=True):
        wide = mask.view(1, *mask.shape, *[1] * (3 - mask.dim())).expand_as(kept)
        assert torch.equal(state, torch.where(wide, kept, torch.zeros_like(kept)))


def test_refresh_copies_omitted_units_and_nothing_else(loaded: LoadedModel) -> None:
    prefix, units = prefix_of(loaded, 40), Units.of(half(loaded.spec).retained)
    pool, slots = loaded_slots(prefix, units, loaded.spec)
    replayed = replay(loaded, prefix, 16)
    refresh(pool, slots, units, replayed)
    states, conv = pool.read(slots)
    for state, kept, fresh, mask in zip(states, prefix.states, replayed, units.masks, strict=True):
        wide = mask.view(1, *mask.shape, *[1] * (3 - mask.dim())).expand_as(kept)
        assert torch.equal(state, torch.where(wide, kept, fresh))
    assert all(map(torch.equal, conv, prefix.conv))


@pytest.mark.parametrize("window", [29, 64])
def test_replay_of_the_whole_prefix_is_full_recomputation(loaded: LoadedModel, window: int) -> None:
    prefix = prefix_of(loaded, 29)
    for got, expected in zip(replay(loaded, prefix, window), prefix.states, strict=True):
        assert_within(got, expected, "replay-logits-f32")


def test_wr_on_a_short_prefix_continues_like_the_dense_restore(loaded: LoadedModel) -> None:
    selection = half(loaded.spec, w_max=64)
    prefix, units = prefix_of(loaded, 29), Units.of(selection.retained)
    assert selection.w_replay >= prefix.length
    pool, slots = loaded_slots(prefix, units, loaded.spec)
    refresh(pool, slots, units, replay(loaded, prefix, selection.w_replay))
    suffix = tokens_of(loaded, 2, 9, seed=1)
    dense = next_logits(loaded, resume(loaded, prefix.kv, prefix.states, prefix.conv), suffix)
    refreshed = next_logits(loaded, resume_slots(loaded, prefix.kv, pool, slots), suffix)
    assert_within(refreshed, dense, "replay-logits-f32")


@pytest.fixture(scope="module", params=["qwen3_5", "kimi_linear"])
def deep(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> LoadedModel:
    """Eight layers, so that linear layers stand above a full-attention one."""
    return load_model(str(tiny_checkpoint(request.param, layers=8)))


def test_replay_sees_no_state_and_no_token_before_its_window(deep: LoadedModel) -> None:
    prefix = prefix_of(deep, 40)
    other = Prefix(
        torch.cat([tokens_of(deep, 2, 24, seed=9), prefix.tokens[:, 24:]], 1),
        tuple(torch.full_like(s, float("nan")) for s in prefix.states),
        tuple(torch.full_like(c, float("nan")) for c in prefix.conv),
        prefix.kv,
    )
    assert all(map(torch.equal, replay(deep, other, 16), replay(deep, prefix, 16)))


@pytest.mark.parametrize("place", [3, 30], ids=["before the window", "inside it"])
def test_replay_attends_to_cached_keys(deep: LoadedModel, place: int) -> None:
    prefix = prefix_of(deep, 40)
    kv = {b: (k.clone(), v.clone()) for b, (k, v) in prefix.kv.items()}
    for keys, values in kv.values():
        keys[:, :, place] += 1.0
        values[:, :, place] += 1.0
    changed = replay(deep, Prefix(prefix.tokens, prefix.states, prefix.conv, kv), 16)
    expected, above = replay(deep, prefix, 16), min(prefix.kv)
    for layer, got, was in zip(deep.spec.layers, changed, expected, strict=True):
        assert torch.equal(got, was) == (layer.index < above)


def test_replay_keeps_absolute_positions(tiny_checkpoint: Callable[..., Path]) -> None:
    """Where states forget everything at once, a window beyond the convolutions' reach is exact."""
    model = load_model(str(tiny_checkpoint("qwen3_5", layers=8)))
    for name, parameter in model.model.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            parameter.fill_(6.0)
    prefix = prefix_of(model, 120)
    for got, expected in zip(replay(model, prefix, 64), prefix.states, strict=True):
        assert_within(got, expected, "replay-logits-f32")


def test_replay_changes_neither_the_prefix_nor_its_keys(loaded: LoadedModel) -> None:
    prefix = prefix_of(loaded, 40)
    before = [t.clone() for pair in prefix.kv.values() for t in pair]
    replay(loaded, prefix, 16)
    after = [t for pair in prefix.kv.values() for t in pair]
    assert all(map(torch.equal, before, after))


def test_snapshot_does_not_follow_the_cache_it_came_from(loaded: LoadedModel) -> None:
    tokens = tokens_of(loaded, 2, 21)
    _, past = prefill(loaded, tokens)
    prefix = capture(loaded, tokens, past)
    before = [t.clone() for t in (*prefix.states, *prefix.conv)]
    prefill(loaded, tokens_of(loaded, 2, 5, seed=3), cache=past)
    assert all(map(torch.equal, before, (*prefix.states, *prefix.conv)))
    assert all(k.shape[2] == 21 for k, _ in prefix.kv.values())


def test_continuing_twice_from_one_prefix_gives_the_same(loaded: LoadedModel) -> None:
    prefix, suffix = prefix_of(loaded, 21), tokens_of(loaded, 2, 7, seed=1)
    runs = [
        next_logits(loaded, resume(loaded, prefix.kv, prefix.states, prefix.conv), suffix)
        for _ in range(2)
    ]
    assert torch.equal(*runs)


def test_rows_and_join_are_inverse(loaded: LoadedModel) -> None:
    prefix = prefix_of(loaded, 12)
    again = join([prefix.rows([0]), prefix.rows([1])])
    assert torch.equal(again.tokens, prefix.tokens)
    assert all(map(torch.equal, again.states, prefix.states))
    assert all(map(torch.equal, again.conv, prefix.conv))
    assert all(torch.equal(again.kv[b][0], prefix.kv[b][0]) for b in prefix.kv)


def test_prefix_shorter_than_the_convolution_window_is_padded_with_zeros(
    loaded: LoadedModel,
) -> None:
    prefix = prefix_of(loaded, 2)
    width = loaded.spec.layers[0].conv_width - 1
    assert all(window.shape[-1] == width for window in prefix.conv)
    assert all(bool((window[..., 0] == 0).all()) for window in prefix.conv)


def test_non_finite_state_is_not_cached(loaded: LoadedModel) -> None:
    tokens = tokens_of(loaded, 1, 8)
    _, past = prefill(loaded, tokens)
    next(x for x in past.layers if hasattr(x, "recurrent_states")).recurrent_states[0][0, 1] = (
        float("inf")
    )
    with pytest.raises(NumericError, match="block 0: the recurrent state after 8 tokens"):
        capture(loaded, tokens, past)


def test_window_without_tokens_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(UsageError, match="nothing to replay"):
        replay(loaded, prefix_of(loaded, 8), 0)


def test_only_fp32_pools_take_checkpoints(loaded: LoadedModel) -> None:
    prefix, units = prefix_of(loaded, 8), Units.every(loaded.spec)
    with pytest.raises(UsageError, match="fp32 pool"):
        load(store(prefix, 0, units), units, StatePool(loaded.spec, 1, state="bf16"), 0)


def test_empty_cache_is_left_empty_by_resume_without_states(loaded: LoadedModel) -> None:
    prefix = prefix_of(loaded, 8)
    past = resume(loaded, prefix.kv, (), ())
    assert past.get_seq_length() == 8
    assert new_cache(loaded).get_seq_length() == 0


def test_checkpoint_that_retains_nothing_is_the_convolution_alone(loaded: LoadedModel) -> None:
    shapes = [mask.shape for mask in Units.every(loaded.spec).masks]
    none = select([np.zeros(shape) for shape in shapes], 16)
    prefix, units = prefix_of(loaded, 21), Units.of(none.retained)
    assert store(prefix, 0, units).numel() == account(loaded.spec, none).conv_bytes
    pool, slots = loaded_slots(prefix, units, loaded.spec)
    zero_fill(pool, slots, units)
    states, conv = pool.read(slots)
    assert all(bool((state == 0).all()) for state in states)
    assert all(map(torch.equal, conv, prefix.conv))
