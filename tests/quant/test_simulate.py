"""The requantised recurrence: Eq. 13 in float64, arms in one batch, chunked prefill, comparisons."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hybridstate.errors import NumericError
from hybridstate.families import LinearLayer
from hybridstate.kernels import reference
from hybridstate.kernels.layout import PackedLayout
from hybridstate.kernels.ring_reference import Ring
from hybridstate.quant.arms import Arm, plain_arm
from hybridstate.quant.formats import FORMATS, Format
from hybridstate.quant.ring import ring_bits
from hybridstate.quant.simulate import (
    STATE_BYTES,
    channel_errors,
    compare,
    comparison_steps,
    requantised_decode,
    sequences_together,
    simulate,
    state_errors,
)
from hybridstate.trajectories.model import LoadedModel, load_model, prefill, reference_decode
from hybridstate.trajectories.prompts import Prompt, make_prompts, shipped_texts
from hybridstate.trajectories.protocol import Protocol
from tests.families.saved import available, save
from tests.tolerances import assert_within

SMALL = Protocol("custom", 1, input_tokens=40, new_tokens=20, windows=(0,), anchors=(4,), horizon=8)


@pytest.fixture(scope="module", params=["tiny_gdn", "tiny_kda"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return load_model(str(request.getfixturevalue(request.param)))


@pytest.fixture(scope="module")
def prompts() -> tuple[Prompt, ...]:
    return make_prompts(lambda text: list(text.encode()), shipped_texts(), SMALL, seed=0)[:2]


def arms_of(loaded: LoadedModel) -> tuple[Arm, ...]:
    protected = tuple(torch.arange(2).repeat(layer.value_heads, 1) for layer in loaded.spec.layers)
    plain = tuple(plain_arm(name) for name in ("fp32", "fp16", "bf16", "int8-step"))
    return (*plain, Arm("damp", FORMATS["int8-step"], protected))


INT8 = plain_arm("int8-step")
MECHANISMS = {
    "int8-step": INT8,
    "stochastic": Arm("stochastic", FORMATS["int8-step-stochastic"], seed=5),
    "deferred": replace(INT8, every=4),
    "feedback-fp16": replace(INT8, feedback="fp16"),
    "feedback-int4": replace(INT8, feedback="int4"),
}


@pytest.mark.parametrize("mechanism", list(MECHANISMS))
@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("bundle", [1, 2, 3])
def test_accumulated_error_is_the_sum_of_transported_local_errors(
    kda: bool, bundle: int, mechanism: str
) -> None:
    """Delta S_t = R_t + sum_i A_t ... A_{i+1} R_i, with A = (I - beta k k^T) Lambda (DAMP Eq. 13)."""
    generator = torch.Generator().manual_seed(bundle)
    batch, key_heads, key_dim, value_dim, updates = 2, 2, 8, 12, 12
    heads = key_heads * bundle

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    step = requantised_decode((plain_arm("fp32"), MECHANISMS[mechanism]))
    largest = 0.0
    state = randn(batch, heads, key_dim, value_dim).repeat(2, 1, 1, 1)
    transported = torch.zeros(batch, heads, key_dim, value_dim, dtype=torch.float64)
    for _ in range(updates):
        q, k = randn(batch, key_heads, key_dim), randn(batch, key_heads, key_dim)
        v, beta = randn(batch, heads, value_dim), torch.sigmoid(randn(batch, heads))
        g = -torch.exp(randn(batch, heads, key_dim) if kda else randn(batch, heads))
        both = [x.repeat(2, *[1] * (x.dim() - 1)) for x in (q, k, v, g, beta)]
        exact_update = reference.recurrent_step(q, k, v, g, beta, state[batch:])[1]
        _, state = step(0, *both, state)
        local = state[batch:] - exact_update
        unit = reference.l2norm(k).repeat_interleave(bundle, 1)
        decay = g.exp() if kda else g.exp()[..., None].expand(-1, -1, key_dim)
        transition = (
            torch.eye(key_dim, dtype=torch.float64)
            - beta[..., None, None] * unit[..., :, None] * unit[..., None, :]
        ) @ torch.diag_embed(decay)
        transported = transition @ transported + local
        error = state[batch:] - state[:batch]
        largest = max(largest, float(local.abs().max()))
        assert (error - transported).abs().max() < 1e-10
    assert largest > 1e-6


def recurrence(seed: int, updates: int):  # type: ignore[no-untyped-def]
    """Inputs of `updates` KDA steps, one sequence, d_k != d_v."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    for _ in range(updates):
        q, k, v = randn(1, 2, 8), randn(1, 2, 8), randn(1, 4, 40)
        yield q, k, v, -torch.exp(randn(1, 4, 8) - 2), torch.sigmoid(randn(1, 4))


def run(arms: tuple[Arm, ...], updates: int) -> list[torch.Tensor]:
    """States `[A, 4, 8, 40]` after every update."""
    step = requantised_decode(arms)
    state = torch.zeros(len(arms), 4, 8, 40)
    seen = []
    for inputs in recurrence(3, updates):
        _, state = step(0, *(x.repeat(len(arms), *[1] * (x.dim() - 1)) for x in inputs), state)
        seen.append(state.clone())
    return seen


def test_writing_at_every_update_is_per_step_requantisation_exactly() -> None:
    damp = Arm("damp", FORMATS["int8-step"], (torch.arange(2).repeat(4, 1),))
    arms = (plain_arm("fp32"), INT8, replace(INT8, every=1), damp, replace(damp, every=1))
    for state in run(arms, 12):
        assert torch.equal(state[1], state[2])
        assert torch.equal(state[3], state[4])


def test_a_deferred_write_stores_the_exact_update_of_what_the_last_write_stored() -> None:
    """Replaying the inputs since the last write on its reconstruction gives every state between."""
    updates, every = 13, 4
    states = run((plain_arm("fp32"), replace(INT8, every=every)), updates)
    written = torch.zeros(1, 4, 8, 40)
    ring = []
    for update, inputs in enumerate(recurrence(3, updates), start=1):
        ring.append(inputs)
        rebuilt = written
        for q, k, v, g, beta in ring:
            rebuilt = reference.recurrent_step(q, k, v, g, beta, rebuilt)[1]
        if update % every == 0:
            written, ring = INT8.reconstruct(rebuilt, 0), []
            rebuilt = written
        assert torch.equal(states[update - 1][1:], rebuilt)


def test_feedback_and_fewer_writes_lower_the_accumulated_error() -> None:
    arms = (
        plain_arm("fp32"),
        INT8,
        replace(INT8, feedback="int4"),
        replace(INT8, feedback="fp16"),
        replace(INT8, every=8),
    )
    last = run(arms, 200)[-1]
    step, int4, fp16, deferred = [(x - last[0]).norm().item() for x in last[1:]]
    assert fp16 < step
    assert int4 < step
    assert deferred < step


def test_int4_residuals_stay_within_half_a_step_of_their_groups_scale() -> None:
    x = torch.randn(1, 2, 3, 40, generator=torch.Generator().manual_seed(0))
    arm = replace(INT8, feedback="int4")
    stored = arm.reconstruct(x, 0)
    carried = arm.residual(x, stored)
    assert (stored + carried - x).norm() < (stored - x).norm() / 6
    assert (replace(INT8, feedback="fp16").residual(x, stored) + stored - x).abs().max() < 1e-5


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("every", [4, 8, 16])
def test_a_ring_is_counted_as_the_kernels_keep_it(every: int, per_channel: bool) -> None:
    layer = LinearLayer(0, 0, 16, 32, 128, 128, 4, "")
    arm = replace(INT8, every=every)
    ring = Ring.empty(1, 16, 32, PackedLayout(128, 128, 16), every, per_channel=per_channel)
    assert arm.ring_bits(layer, per_channel=per_channel) == ring.bits_per_value
    assert ring_bits(layer, every, per_channel=per_channel) == ring.bits_per_value
    assert INT8.ring_bits(layer, per_channel=per_channel) == 0
    assert ring_bits(layer, 1, per_channel=per_channel) == 0


def test_resident_bits_of_sixteen_updates_at_published_sizes() -> None:
    qwen, kimi = (LinearLayer(0, 0, heads, 32, 128, 128, 4, "") for heads in (16, 32))
    assert 9.875 + ring_bits(qwen, 16, per_channel=False) == pytest.approx(12.7207, abs=1e-4)
    assert 9.875 + ring_bits(kimi, 16, per_channel=True) == pytest.approx(15.5020, abs=1e-4)


def test_fp32_arm_has_no_error_and_coarser_formats_have_more(
    loaded: LoadedModel, prompts: tuple[Prompt, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    generated = torch.randint(3, 200, (2, 21), generator=generator)
    arms = arms_of(loaded)
    found = simulate(loaded, prompts, generated, arms, chunk=8192, batch=36)
    assert found.kl.shape == found.nll.shape == found.same_top.shape == (5, 2, 20)
    assert found.steps == (1, 2, 4, 8, 16, 20)
    assert not found.kl[0].any()
    assert found.same_top[0].all()
    assert not found.state_error[:, 0].any()
    last = found.state_error[-1].mean(-1)
    assert 0 < last[1] < last[2]  # FP16 keeps three more bits than BF16
    assert last[1] < last[4] <= last[3]  # protecting channels cannot hurt the state
    assert (found.kl[1:].mean((1, 2)) > 0).all()
    assert not any(found.saturated)


def test_grouping_sequences_changes_nothing(
    loaded: LoadedModel, prompts: tuple[Prompt, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    generated = torch.randint(3, 200, (2, 9), generator=generator)
    arms = arms_of(loaded)[:4]
    seen: list[tuple[str, int, int]] = []
    together = simulate(loaded, prompts, generated, arms, chunk=8192, batch=36)
    apart = simulate(
        loaded,
        prompts,
        generated,
        arms,
        chunk=8192,
        batch=1,
        progress=lambda *step: seen.append(step),
    )
    np.testing.assert_allclose(together.nll[0], apart.nll[0], rtol=1e-5)
    for kl, alone in zip(together.kl[1:], apart.kl[1:], strict=True):  # of FP32 itself it is 0
        assert_within(kl, alone, "rounded-kl")
    np.testing.assert_allclose(together.state_error, apart.state_error, rtol=2e-2, atol=1e-7)
    for layer, a, b in zip(
        loaded.spec.layers, together.channel_error, apart.channel_error, strict=True
    ):
        assert a.shape == (4, layer.value_heads, layer.key_dim)
        assert not a[0].any()
        np.testing.assert_allclose(a.sum((1, 2)), b.sum((1, 2)), rtol=0.1)
    assert seen[-1] == ("validate", 16, 16)
    assert len(seen) == 16


def test_a_gpu_runs_as_many_sequences_together_as_their_states_allow(loaded: LoadedModel) -> None:
    assert sequences_together(loaded, 5, 36) == 7
    assert sequences_together(loaded, 50, 36) == 1
    on_gpu = replace(loaded, device=torch.device("cuda"))
    state = sum(4 * x.value_heads * x.key_dim * x.value_dim for x in loaded.spec.layers)
    assert sequences_together(on_gpu, 35, 36) == STATE_BYTES // (35 * state)


def test_the_prompt_is_stored_at_every_chunk_end(
    loaded: LoadedModel, prompts: tuple[Prompt, ...]
) -> None:
    """A format that forgets everything leaves exactly what came after the last write."""
    amnesia = Arm("amnesia", Format("zero", lambda _: 0.0, torch.zeros_like))
    generator = torch.Generator().manual_seed(0)
    generated = torch.randint(3, 200, (2, 3), generator=generator)
    arms = (plain_arm("fp32"), amnesia)
    whole = simulate(loaded, prompts, generated, arms, chunk=40, batch=36)
    pieces = simulate(loaded, prompts, generated, arms, chunk=16, batch=36)
    # attention remembers what the layers computed from forgotten states, so chunking shows
    assert np.abs(whole.kl[1] - pieces.kl[1]).max() > 1e-9
    np.testing.assert_allclose(whole.state_error[:, 1], 1.0)
    np.testing.assert_allclose(pieces.state_error[:, 1], 1.0)
    np.testing.assert_allclose(whole.nll[0], pieces.nll[0], rtol=1e-5)


def test_values_beyond_fp16_are_counted_before_they_are_stored(
    loaded: LoadedModel, prompts: tuple[Prompt, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage clamps them, so a count of what storage returned is always zero."""
    monkeypatch.setattr(
        "hybridstate.quant.simulate.reference_decode",
        lambda ordinal, q, k, v, *rest: reference_decode(ordinal, q, k, 1e9 * v, *rest),
    )
    arms = arms_of(loaded)
    generated = torch.randint(3, 200, (2, 4), generator=torch.Generator().manual_seed(0))
    found = dict(
        zip(
            (arm.name for arm in arms),
            simulate(loaded, prompts, generated, arms, chunk=64, batch=36).saturated,
            strict=True,
        )
    )
    assert found["fp16"] > found["damp"] > 0
    assert found["fp32"] == found["bf16"] == found["int8-step"] == 0


def test_a_state_that_is_not_finite_stops_with_its_place(
    loaded: LoadedModel, prompts: tuple[Prompt, ...]
) -> None:
    def overflowing(x: torch.Tensor) -> torch.Tensor:
        return x * torch.inf

    arms = (plain_arm("fp32"), Arm("bad", Format("bad", lambda _: 0.0, overflowing)))
    with pytest.raises(NumericError, match=r"recurrent state is .* layer 0, head"):
        simulate(loaded, prompts, torch.zeros(2, 3, dtype=torch.int64), arms, chunk=64, batch=4)


def test_comparison_in_float64_by_hand() -> None:
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.2, 0.5, 0.3])
    logits = torch.log(torch.tensor(np.stack([p, q])))
    kl, same, nll, hit = compare(logits, torch.tensor([2]), 2)
    assert hit.shape == (2, 1)
    assert kl[:, 0] == pytest.approx([0.0, float((p * np.log(p / q)).sum())])
    assert same[:, 0].tolist() == [True, False]
    assert nll[:, 0] == pytest.approx([-np.log(0.25), -np.log(0.3)])


def test_state_error_is_relative_per_layer_then_averaged() -> None:
    state = torch.ones(1, 2, 3, 4)
    first = torch.cat([state, state * 1.1])
    second = torch.cat([state * 100, state * 100])
    assert state_errors([first, second], 2)[:, 0] == pytest.approx([0.0, 0.05], rel=1e-5)


def test_errors_of_a_diverging_state_stay_finite() -> None:
    """Squares of these values are beyond FP32."""
    state = torch.ones(1, 2, 3, 4)
    states = [torch.cat([state, state * 1e25])]
    assert state_errors(states, 2)[1] == pytest.approx([1e25], rel=1e-5)
    assert channel_errors(states, 2)[0][1].numpy() == pytest.approx(
        4e50 * np.ones((2, 3)), rel=1e-5
    )


def test_steps_are_powers_of_two_and_the_last() -> None:
    assert comparison_steps(20) == (1, 2, 4, 8, 16, 20)
    assert comparison_steps(16) == (1, 2, 4, 8, 16)
    assert comparison_steps(1) == (1,)


@pytest.mark.parametrize("name", ["glm5_next"])
def test_a_safe_gate_model_is_teacher_forced_as_one_forward_pass_scores_it(
    name: str, tmp_path: Path
) -> None:
    """Its cache holds more than keys and values, and all arms share it."""
    if not available(name):
        pytest.skip("this transformers has no such class")
    model = load_model(save(name, tmp_path / name))
    assert model.spec.gate == "safe"
    rng = np.random.default_rng(0)
    tokens = rng.integers(2, model.vocabulary, (2, 40 + 12))
    drawn = tuple(Prompt("math", "validate", i, row[:40], ()) for i, row in enumerate(tokens))
    generated = torch.from_numpy(tokens[:, 40:])
    arms = (plain_arm("fp32"), plain_arm("int8-step"), replace(INT8, name="deferred", every=4))
    found = simulate(model, drawn, generated, arms, chunk=64, batch=36)
    logits, _ = prefill(model, torch.from_numpy(tokens[:, :-1]), keep_logits=True)
    expected = -torch.log_softmax(logits.double(), -1).gather(
        2, torch.from_numpy(tokens[:, 1:])[..., None]
    )[..., 0]
    np.testing.assert_allclose(found.nll[0], expected[:, 40:].numpy(), rtol=1e-4)
    last = found.state_error[-1].mean(-1)
    assert 0 == last[0] < last[2] < last[1] < 0.1
