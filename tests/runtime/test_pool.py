"""Slots: bytes, poison, allocation, contents."""

import os
from dataclasses import replace

import pytest
import torch

from hybridstate.errors import NumericError, PlanMismatch, UsageError
from hybridstate.families import FAMILIES, LinearLayer, ModelSpec
from hybridstate.runtime.pool import STATE_FORMATS, StatePool, default_k_hi

KEY, VALUE, WIDTH = 40, 12, 4


def make_spec(bundle: int = 2, *, key_dim: int = KEY, value_dim: int = VALUE) -> ModelSpec:
    layer = LinearLayer(
        index=0,
        ordinal=0,
        key_heads=2,
        value_heads=2 * bundle,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_width=WIDTH,
        prefix="model.layers.0.linear_attn.",
    )
    layers = (layer, replace(layer, index=2, ordinal=1, prefix="model.layers.2.linear_attn."))
    return ModelSpec(FAMILIES[0], "softplus", None, layers, 4)


def random_contents(
    spec: ModelSpec, batch: int, seed: int = 0
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return (
        [draw(batch, n.value_heads, n.key_dim, n.value_dim) for n in spec.layers],
        [draw(batch, n.conv_channels, WIDTH - 1).bfloat16() for n in spec.layers],
    )


@pytest.mark.parametrize("bundle", [1, 2, 3])
@pytest.mark.parametrize("state", STATE_FORMATS)
def test_pool_holds_exactly_the_bytes_it_accounts(state: str, bundle: int) -> None:
    spec = make_spec(bundle)
    pool = StatePool(spec, 5, state=state)
    held = sum(t.numel() * t.element_size() for t in (*pool.states, *pool.conv))
    assert held == pool.nbytes == 5 * pool.slot_bytes
    assert pool.conv_bytes == sum(2 * n.conv_channels * (WIDTH - 1) for n in spec.layers)


def test_packed_slot_takes_9_875_bits_a_value_at_the_paper_s_dimensions() -> None:
    spec = make_spec(key_dim=128, value_dim=128)
    packed, dense = (StatePool(spec, 1, state=s).temporal_bytes for s in ("damp", "fp32"))
    assert packed * 32 == dense * 9.875


@pytest.mark.parametrize("state", STATE_FORMATS)
def test_free_slots_read_as_nan(state: str) -> None:
    pool = StatePool(make_spec(), 3, state=state)
    slots = pool.alloc(2)
    assert slots is not None
    with pytest.raises(NumericError, match="block 0: non-finite state in slot 0"):
        pool.require_finite(slots)
    pool.write(slots, *random_contents(pool.spec, 2))
    pool.require_finite(slots)
    pool.free(slots)
    states, conv = pool.read(slots)
    # INT8 codes under a NaN scale and FP16 NaN rows leave nothing readable
    assert all(bool(torch.isnan(t).all()) for t in (*states, *conv))


def test_one_unwritten_unit_is_found() -> None:
    pool = StatePool(make_spec(), 2)
    slots = pool.alloc(2)
    assert slots is not None
    pool.write(slots, *random_contents(pool.spec, 2))
    pool.states[1][1, 3, 17, 5] = float("nan")
    with pytest.raises(
        NumericError, match=r"block 2: non-finite state in slot 1, head 3"
    ) as raised:
        pool.require_finite(slots)
    assert raised.value.context["index"] == [3, 17, 5]


def test_large_finite_states_pass_although_their_sum_overflows() -> None:
    pool = StatePool(make_spec(), 1)
    slots = pool.alloc(1)
    assert slots is not None
    states, conv = random_contents(pool.spec, 1)
    pool.write(slots, [torch.full_like(s, 3e38) for s in states], conv)
    pool.require_finite(slots)


@pytest.mark.parametrize("state", STATE_FORMATS)
def test_copy_is_bitwise_and_leaves_the_source_alone(state: str) -> None:
    pool = StatePool(make_spec(), 4, state=state)
    slots = pool.alloc(2)
    assert slots is not None
    pool.write(slots, *random_contents(pool.spec, 2))
    target = pool.alloc(2)
    assert target is not None
    pool.copy(slots, target)
    for tensor in (*pool.states, *pool.conv):
        assert torch.equal(tensor[slots], tensor[target])


def test_dense_contents_come_back_in_their_precision() -> None:
    spec = make_spec(3)
    states, conv = random_contents(spec, 2)
    for state, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        pool = StatePool(spec, 2, state=state)
        slots = pool.alloc(2)
        assert slots is not None
        pool.write(slots, states, conv)
        read, windows = pool.read(slots)
        assert all(torch.equal(r, s.to(dtype).float()) for r, s in zip(read, states, strict=True))
        assert all(map(torch.equal, windows, conv))


def test_a_full_pool_answers_none_and_prefers_contiguous_slots() -> None:
    pool = StatePool(make_spec(), 6)
    first, second = pool.alloc(2), pool.alloc(2)
    assert first is not None
    assert second is not None
    pool.free(first)
    assert pool.alloc(5) is None
    third = pool.alloc(1)
    assert third is not None
    assert third.tolist() == [0]
    pair = pool.alloc(2)
    assert pair is not None
    assert pair.tolist() == [4, 5]
    assert pool.available == 1


def test_freeing_twice_is_refused() -> None:
    pool = StatePool(make_spec(), 2)
    slots = pool.alloc(1)
    assert slots is not None
    pool.free(slots)
    with pytest.raises(UsageError, match="freed twice"):
        pool.free(slots)


@pytest.mark.parametrize(
    ("key_dim", "expected"), [(128, 16), (96, 16), (256, 32), (8, 8), (64, 16)]
)
def test_default_protected_channels_follow_the_key_dimension(key_dim: int, expected: int) -> None:
    assert default_k_hi(make_spec(key_dim=key_dim).layers[0]) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [({"state": "fp8"}, "unknown state format"), ({"slots": 0}, "at least one slot")],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"slots": 1, "state": "fp32"} | options
    with pytest.raises(UsageError, match=message):
        StatePool(make_spec(), **arguments)  # type: ignore[arg-type]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="a GPU is here")
def test_kernels_write_read_and_copy_the_bits_of_torch() -> None:
    spec = make_spec()
    states, conv = random_contents(spec, 2)
    slots, found = torch.tensor([3, 1]), []
    for backend in ("reference", "triton"):
        pool = StatePool(spec, 5, state="damp")
        pool._backend = backend  # type: ignore[assignment]
        pool.write(slots, states, conv)
        pool.copy(slots, torch.tensor([0, 4]))
        found.append((*pool.states, *pool.conv, *(x for part in pool.read(slots) for x in part)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.nan_to_num(-1.0), other.nan_to_num(-1.0))


def test_layers_of_different_shapes_are_written_and_read_each() -> None:
    spec = make_spec()
    wide = replace(spec.layers[1], value_dim=2 * VALUE)
    spec = replace(spec, layers=(spec.layers[0], wide))
    pool = StatePool(spec, 2, state="damp", k_hi=KEY)
    states, conv = random_contents(spec, 1)
    pool.write(torch.tensor([1]), states, conv)
    pool.copy(torch.tensor([1]), torch.tensor([0]))
    for state, back in zip(states, pool.read(torch.tensor([0]))[0], strict=True):
        assert torch.equal(back, state.half().float())
    with pytest.raises(PlanMismatch, match="different shapes"):
        _ = pool.layers


def test_a_state_that_is_not_finite_is_not_packed() -> None:
    spec = make_spec()
    pool = StatePool(spec, 2, state="damp")
    states, conv = random_contents(spec, 1)
    states[1][0, 2, 20, 3] = float("nan")
    with pytest.raises(NumericError, match=r"not finite|non-finite"):
        pool.write(torch.tensor([0]), states, conv)
