"""Decoding from our pool: equal to transformers, nothing but the pool between steps."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridstate import api
from hybridstate.bench.decode_check import simulated_logits
from hybridstate.errors import NumericError, PlanMismatch, UsageError
from hybridstate.plan.store import read_plan
from hybridstate.runtime.engine import DecodeEngine, StateHandle
from hybridstate.runtime.orders import StoredOrder
from hybridstate.runtime.pool import STATE_FORMATS
from hybridstate.runtime.restore import Prefix, capture
from hybridstate.trajectories.cache import prefill
from hybridstate.trajectories.model import LoadedModel, load_model
from tests.plan.calibrated import write_calibration
from tests.tolerances import assert_within, relative_rms

MODELS = [
    ("qwen3_5", {"key_heads": 4, "value_heads": 4, "key_dim": 16}),
    ("qwen3_5", {"key_heads": 2, "value_heads": 6, "key_dim": 32, "value_dim": 40}),
    ("kimi_linear", {"key_dim": 32}),
]
STEPS = 4
FLIPS = 0.15
"""Share of a format's own error that rounding flips may cost: sums in another order move a code by one now and then."""


@pytest.fixture(scope="module", params=MODELS, ids=lambda p: f"{p[0]}-{p[1].get('value_heads', 0)}")
def loaded(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> LoadedModel:
    family, options = request.param
    return load_model(str(tiny_checkpoint(family, **options)))


def draw(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 90, (batch, length), generator=torch.Generator().manual_seed(seed))


def prefix_of(loaded: LoadedModel, batch: int = 3, length: int = 21) -> Prefix:
    tokens = draw(batch, length)
    _, past = prefill(loaded, tokens)
    return capture(loaded, tokens, past)


def run_steps(engine: DecodeEngine, prefix: Prefix, forced: torch.Tensor) -> torch.Tensor:
    run = engine.start(prefix, room=forced.shape[1])
    logits = torch.stack([run.step(column).clone() for column in forced.T])
    run.check_bytes()
    run.close()
    return logits


def assert_simulated(
    loaded: LoadedModel,
    engine: DecodeEngine,
    prefix: Prefix,
    forced: torch.Tensor,
    got: torch.Tensor,
) -> None:
    """The engine is far closer to its format's simulation than the format is to FP32."""
    expected = simulated_logits(loaded, engine, prefix, forced)
    own_error = relative_rms(expected, simulated_logits(loaded, None, prefix, forced))
    assert own_error > 1e-5
    assert relative_rms(got, expected) < FLIPS * own_error


def shuffled(loaded: LoadedModel, *, shared: bool, seed: int = 5) -> tuple[StoredOrder, ...]:
    generator = torch.Generator().manual_seed(seed)

    def permutations(rows: int, width: int) -> torch.Tensor:
        return torch.stack([torch.randperm(width, generator=generator) for _ in range(rows)])

    orders = []
    for layer in loaded.spec.layers:
        if shared:
            bundled = permutations(layer.key_heads, layer.key_dim)
            orders.append(StoredOrder(bundled, bundled.repeat_interleave(layer.bundle, 0)))
        else:
            orders.append(StoredOrder(None, permutations(layer.value_heads, layer.key_dim)))
    return tuple(orders)


def test_fp32_pool_decodes_like_transformers(loaded: LoadedModel) -> None:
    prefix, forced = prefix_of(loaded), draw(3, STEPS, seed=1)
    got = run_steps(DecodeEngine(loaded, state="fp32", slots=4), prefix, forced)
    assert_within(got, simulated_logits(loaded, None, prefix, forced), "replay-logits-f32")


@pytest.mark.parametrize("state", [s for s in STATE_FORMATS if s != "fp32"])
def test_other_formats_equal_the_simulated_rounding(loaded: LoadedModel, state: str) -> None:
    prefix, forced = prefix_of(loaded), draw(3, STEPS, seed=1)
    engine = DecodeEngine(loaded, state=state, slots=3, k_hi=8)
    got = run_steps(engine, prefix, forced)
    assert_simulated(loaded, engine, prefix, forced, got)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "per-head"])
def test_key_order_moves_the_protected_channels_and_nothing_else(
    loaded: LoadedModel, shared: bool
) -> None:
    prefix, forced = prefix_of(loaded), draw(3, STEPS, seed=1)
    engine = DecodeEngine(loaded, state="damp", slots=3, k_hi=8)
    plain = run_steps(engine, prefix, forced)
    engine.orders = shuffled(loaded, shared=shared)
    got = run_steps(engine, prefix, forced)
    assert_simulated(loaded, engine, prefix, forced, got)
    assert relative_rms(got, plain) > 1e-5


def test_value_order_and_scale_are_undone_in_the_output(loaded: LoadedModel) -> None:
    prefix, forced = prefix_of(loaded), draw(3, STEPS, seed=1)
    engine = DecodeEngine(loaded, state="damp", slots=3, k_hi=8)
    generator = torch.Generator().manual_seed(2)
    engine.orders = tuple(
        StoredOrder(
            value=torch.stack(
                [torch.randperm(n.value_dim, generator=generator) for _ in range(n.value_heads)]
            ),
            scale=torch.rand(n.value_heads, n.value_dim, generator=generator) + 0.5,
        )
        for n in loaded.spec.layers
    )
    got = run_steps(engine, prefix, forced)
    assert_simulated(loaded, engine, prefix, forced, got)


def test_nothing_but_the_pool_holds_a_state_between_steps(loaded: LoadedModel) -> None:
    prefix, forced = prefix_of(loaded), draw(3, STEPS, seed=1)
    engine = DecodeEngine(loaded, state="damp", slots=3)
    run = engine.start(prefix, room=STEPS)
    del prefix
    shapes = {(3, n.value_heads, n.key_dim, n.value_dim) for n in loaded.spec.layers}
    for column in forced.T:
        run.step(column)
        gc.collect()
        held = [
            tuple(x.shape)
            for x in gc.get_objects()
            if type(x) is torch.Tensor and tuple(x.shape) in shapes and x.is_floating_point()
        ]
        assert held == []
    assert run.check_bytes() == engine.pool.slot_bytes
    assert engine.pool.temporal_bytes == sum(
        n.value_heads * layout.head_bytes
        for n, layout in zip(loaded.spec.layers, engine.pool.layouts, strict=True)
    )


def test_pool_of_another_size_between_steps_is_refused(loaded: LoadedModel) -> None:
    engine = DecodeEngine(loaded, state="damp", slots=3)
    run = engine.start(prefix_of(loaded), room=STEPS)
    wider = torch.cat([engine.pool.states[0], engine.pool.states[0]])
    engine.pool.states = (wider, *engine.pool.states[1:])
    with pytest.raises(NumericError, match="bytes between steps, accounted"):
        run.check_bytes()


def test_layer_that_is_updated_twice_in_a_step_is_refused(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = DecodeEngine(loaded, state="fp32", slots=3).start(prefix_of(loaded), room=STEPS)
    run.step(torch.tensor([5, 6, 7]))
    assert run.engine.update_calls == [1] * len(loaded.spec.layers)
    real = DecodeEngine.advance

    def twice(self: DecodeEngine, *operands: Any) -> tuple[torch.Tensor, Any]:
        real(self, *operands)
        return real(self, *operands)

    monkeypatch.setattr(DecodeEngine, "advance", twice)
    with pytest.raises(NumericError, match="linear layer 0 was updated 2 times in one step"):
        run.step(torch.tensor([5, 6, 7]))


def test_gathers_are_counted(loaded: LoadedModel) -> None:
    index, many = torch.zeros(1, 1, dtype=torch.int64), torch.arange(300)[None]
    assert StoredOrder().gathers(per_channel=True) == 0
    assert StoredOrder(key=index).gathers(per_channel=True) == 0  # the kernel's index
    assert StoredOrder(key=many).gathers(per_channel=True) == 3  # more than bytes can name
    assert StoredOrder(many, many).gathers(per_channel=False) == 2
    assert StoredOrder(value=index).gathers(per_channel=False) == 2


def test_two_batches_share_a_pool_without_touching_each_other(loaded: LoadedModel) -> None:
    first, second = prefix_of(loaded, batch=2), prefix_of(loaded, batch=3, length=17)
    forced = draw(3, STEPS, seed=1)
    engine = DecodeEngine(loaded, state="damp", slots=6)
    alone = run_steps(engine, second, forced)
    run = engine.start(first, room=STEPS)
    before = [t[run.slots].clone() for t in (*engine.pool.states, *engine.pool.conv)]
    assert torch.equal(run_steps(engine, second, forced), alone)
    after = [t[run.slots] for t in (*engine.pool.states, *engine.pool.conv)]
    assert all(map(torch.equal, before, after))


def test_closed_run_leaves_poisoned_free_slots(loaded: LoadedModel) -> None:
    engine = DecodeEngine(loaded, state="damp", slots=3)
    run = engine.start(prefix_of(loaded), room=1)
    run.close()
    assert engine.pool.available == 3
    with pytest.raises(NumericError):
        engine.pool.require_finite(torch.arange(3))


def test_more_tokens_than_room_are_refused(loaded: LoadedModel) -> None:
    run = DecodeEngine(loaded, state="fp32", slots=3).start(prefix_of(loaded), room=1)
    run.step(torch.tensor([5, 6, 7]))
    with pytest.raises(UsageError, match="no room"):
        run.step(torch.tensor([5, 6, 7]))


def test_batch_larger_than_the_pool_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(UsageError, match="3 sequences do not fit into 2 free slots"):
        DecodeEngine(loaded, state="fp32", slots=2).start(prefix_of(loaded), room=1)


def test_state_of_another_layer_is_refused(loaded: LoadedModel) -> None:
    engine = DecodeEngine(loaded, state="fp32", slots=1)
    x = torch.zeros(1, 1, 1)
    with pytest.raises(NumericError, match="not its own"):
        engine.advance(0, x, x, x, x, x, StateHandle(1, torch.zeros(1, dtype=torch.int64)))


def test_capture_without_a_gpu_says_why(loaded: LoadedModel) -> None:
    run = DecodeEngine(loaded, state="fp32", slots=3).start(prefix_of(loaded), room=1)
    assert run.capture() == "no GPU"
    assert run.mode == "eager"


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
def test_original_with_its_plan_equals_the_exported_checkpoint(
    family: str, tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    original = tiny_checkpoint(family, key_dim=16)
    calibration = write_calibration(tmp_path / "calibration", original, k_hi=4)
    api.export_plan(original, out=tmp_path / "exported", calibration=calibration)
    plan, forced = read_plan(tmp_path / "exported"), draw(3, STEPS, seed=1)
    logits, gathers = [], []
    for folder in (original, tmp_path / "exported"):
        model = load_model(str(folder))
        prefix = prefix_of(model)
        engine = DecodeEngine(model, state="damp", slots=3, plan=plan)
        assert {layout.k_hi for layout in engine.pool.layouts} == {4}  # type: ignore[union-attr]
        gathers.append([order.shared_key is not None for order in engine.orders])
        logits.append(run_steps(engine, prefix, forced))
        assert_simulated(model, engine, prefix, forced, logits[-1])
    assert all(gathers[0])
    assert not any(gathers[1])
    assert relative_rms(*logits) < 1e-3


def test_plan_for_another_model_is_refused(
    loaded: LoadedModel, tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    other = tiny_checkpoint("qwen3_5", seed=3)
    calibration = write_calibration(tmp_path / "calibration", other)
    api.export_plan(other, out=tmp_path / "plan", calibration=calibration, weights=False)
    plan = read_plan(tmp_path / "plan")
    with pytest.raises(PlanMismatch, match="the plan was made for"):
        DecodeEngine(loaded, state="damp", slots=1, plan=plan)
    with pytest.raises(UsageError, match="fp32 is stored densely"):
        DecodeEngine(loaded, state="fp32", slots=1, plan=plan)


def test_plan_without_a_packed_state_is_refused(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    folder = tiny_checkpoint("qwen3_5")
    api.export_plan(folder, out=tmp_path / "plan", w_max=64)
    with pytest.raises(PlanMismatch, match="no packed state"):
        DecodeEngine(
            load_model(str(folder)), state="damp", slots=1, plan=read_plan(tmp_path / "plan")
        )


@pytest.mark.gpu
@pytest.mark.parametrize("state", STATE_FORMATS)
@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
def test_captured_steps_equal_eager_ones(
    family: str, state: str, tiny_checkpoint: Callable[..., Path]
) -> None:
    sizes = {"key_dim": 128} | ({"value_dim": 128} if family == "qwen3_5" else {})
    model = load_model(str(tiny_checkpoint(family, **sizes)), device="cuda")
    prefix, forced = prefix_of(model), draw(3, STEPS, seed=1).cuda()
    engine = DecodeEngine(model, state=state, slots=3)
    assert engine.backend != "reference"
    eager = run_steps(engine, prefix, forced)
    run = engine.start(prefix, room=STEPS)
    problem = run.capture()
    if problem is not None:
        run.close()
        pytest.skip(f"this transformers cannot be captured: {problem}")
    captured = torch.stack([run.step(column).clone() for column in forced.T])
    assert run.mode == "cuda-graph"
    assert run.check_bytes() == engine.pool.slot_bytes
    run.close()
    assert relative_rms(captured, eager) < 1e-2
