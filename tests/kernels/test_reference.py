"""The reference recurrences against transformers, the equation, and hand-computed gates."""

import math

import pytest
import torch
from torch import Tensor

from hybridstate.errors import NumericError
from hybridstate.kernels.reference import (
    chunk_prefill,
    dequantise_groups,
    gate_safe,
    gate_softplus,
    l2norm,
    quantise_groups,
    recurrent_loop,
    recurrent_step,
)
from tests.tolerances import assert_within

SHAPES = [  # B, T, Hk, H, K, V
    pytest.param(2, 100, 2, 6, 12, 20, id="H/Hk=3,T=100"),
    pytest.param(1, 65, 3, 6, 16, 8, id="H/Hk=2,T=65"),
    pytest.param(3, 64, 2, 2, 8, 12, id="H/Hk=1,T=64"),
    pytest.param(1, 1, 1, 2, 8, 12, id="T=1"),
]
KINDS = ["gdn", "kda"]


def inputs(
    kind: str, B: int, T: int, Hk: int, H: int, K: int, V: int, seed: int = 0
) -> list[Tensor]:
    """q, k, v, g, beta, S0 in float64; decays from 1 - 1e-4 to e^-50 per token."""
    torch.manual_seed(seed)
    gate_shape = (B, T, H, K) if kind == "kda" else (B, T, H)
    g = -torch.exp(torch.randn(gate_shape, dtype=torch.float64) * 3 - 2)
    g[:, ::7] = -50.0
    return [
        torch.randn(B, T, Hk, K, dtype=torch.float64),
        torch.randn(B, T, Hk, K, dtype=torch.float64),
        torch.randn(B, T, H, V, dtype=torch.float64),
        g,
        torch.rand(B, T, H, dtype=torch.float64) * 1.5,
        torch.randn(B, H, K, V, dtype=torch.float64),
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("B", "T", "Hk", "H", "K", "V"), SHAPES)
def test_chunks_equal_the_loop(kind: str, B: int, T: int, Hk: int, H: int, K: int, V: int) -> None:
    args = inputs(kind, B, T, Hk, H, K, V)
    o, state = recurrent_loop(*args)
    for tensors, name in ((args, "reference-f64"), ([x.float() for x in args], "reference-f32")):
        chunk_o, chunk_state = chunk_prefill(*tensors)
        assert chunk_state.dtype == tensors[0].dtype
        assert_within(chunk_o, o, name)
        assert_within(chunk_state, state, name)


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_in_two_parts_equals_prefill_at_once(kind: str) -> None:
    *args, state = inputs(kind, 1, 90, 2, 4, 8, 12)
    o, end = chunk_prefill(*args, state)
    first, middle = chunk_prefill(*[x[:, :37] for x in args], state)
    second, end_two = chunk_prefill(*[x[:, 37:] for x in args], middle)
    assert_within(torch.cat([first, second], 1), o, "reference-f64")
    assert_within(end_two, end, "reference-f64")


@pytest.mark.parametrize("kind", KINDS)
def test_segments_do_not_show(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = inputs(kind, 1, 150, 2, 4, 8, 12)
    o, end = chunk_prefill(*args)
    monkeypatch.setattr("hybridstate.kernels.reference.SEGMENT", 64)
    o_parts, end_parts = chunk_prefill(*args)
    assert_within(o_parts, o, "reference-f64")
    assert_within(end_parts, end, "reference-f64")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", [-50.0, -1e4, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_strong_decay_stays_finite(kind: str, decay: float, dtype: torch.dtype) -> None:
    args = [x.to(dtype) for x in inputs(kind, 1, 70, 2, 2, 8, 12)]
    args[3].fill_(decay)
    o, state = chunk_prefill(*args)
    loop_o, loop_state = recurrent_loop(*[x.double() for x in args])
    assert torch.isfinite(o).all()
    assert torch.isfinite(state).all()
    assert_within(o, loop_o, "reference-f32")
    assert_within(state, loop_state, "reference-f32")


def test_no_decay_at_all_is_the_plain_delta_rule() -> None:
    for kind in KINDS:
        args = inputs(kind, 1, 96, 2, 4, 8, 12)
        args[3].zero_()
        o, state = recurrent_loop(*args)
        chunk_o, chunk_state = chunk_prefill(*args)
        assert_within(chunk_o, o, "reference-f64")
        assert_within(chunk_state, state, "reference-f64")


def test_the_step_follows_the_equation_written_out_for_one_head() -> None:
    q, k, v, g, beta, S = (x[0] for x in inputs("kda", 1, 1, 1, 1, 3, 2))
    q, k, v, g, beta, S = q[0, 0], k[0, 0], v[0, 0], g[0, 0], float(beta[0, 0]), S[0]
    g = g / 100
    kn = [float(x) / math.sqrt(float((k * k).sum()) + 1e-6) for x in k]
    qn = [float(x) / math.sqrt(float((q * q).sum()) + 1e-6) / math.sqrt(3) for x in q]
    decayed = [[math.exp(float(g[u])) * float(S[u, c]) for c in range(2)] for u in range(3)]
    delta = [beta * (float(v[c]) - sum(kn[u] * decayed[u][c] for u in range(3))) for c in range(2)]
    new = [[decayed[u][c] + kn[u] * delta[c] for c in range(2)] for u in range(3)]
    out = [sum(qn[u] * new[u][c] for u in range(3)) for c in range(2)]
    o, state = recurrent_step(
        q[None, None],
        k[None, None],
        v[None, None],
        g[None, None],
        torch.tensor([[beta]], dtype=torch.float64),
        S[None, None],
    )
    assert torch.allclose(o[0, 0], torch.tensor(out, dtype=torch.float64), rtol=1e-13)
    assert torch.allclose(state[0, 0], torch.tensor(new, dtype=torch.float64), rtol=1e-13)


@pytest.mark.parametrize("repeated", [False, True], ids=["key heads", "already repeated"])
def test_gdn_matches_transformers(repeated: bool) -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    q, k, v, g, beta, S = (x.float() for x in inputs("gdn", 2, 70, 2, 4, 8, 12))
    g = g.clamp_min(-1.0)  # transformers sums log decays in float32, which costs it digits
    wide_q, wide_k = q.repeat_interleave(2, 2), k.repeat_interleave(2, 2)
    mine = chunk_prefill(wide_q if repeated else q, wide_k if repeated else k, v, g, beta, S)
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        theirs = getattr(modeling, name)(
            wide_q,
            wide_k,
            v,
            g=g,
            beta=beta,
            initial_state=S,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        assert_within(mine[0], theirs[0].double(), "transformers-f32")
        assert_within(mine[1], theirs[1].double(), "transformers-f32")


def test_kda_matches_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    q, k, v, g, beta, S = (x.float() for x in inputs("kda", 2, 70, 3, 3, 8, 12))
    g = g.clamp_min(-1.0)
    mine = chunk_prefill(q, k, v, g, beta, S)
    for name in ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"):
        theirs = getattr(modeling, name)(
            q,
            k,
            v,
            g=g,
            beta=beta,
            initial_state=S,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        assert_within(mine[0], theirs[0].double(), "transformers-f32")
        assert_within(mine[1], theirs[1].double(), "transformers-f32")


def test_half_precision_values_keep_a_float32_state() -> None:
    q, k, v, g, beta, S = inputs("gdn", 1, 40, 1, 2, 8, 12)
    o, state = chunk_prefill(q.bfloat16(), k.bfloat16(), v.bfloat16(), g.float(), beta.float())
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert S.shape == state.shape


def test_shapes_that_would_broadcast_are_refused() -> None:
    q, k, v, g, beta, S = inputs("gdn", 2, 5, 2, 4, 8, 12)
    with pytest.raises(NumericError, match="beta has shape"):
        chunk_prefill(q, k, v, g, beta[:1], S)
    with pytest.raises(NumericError, match="state has shape"):
        chunk_prefill(q, k, v, g, beta, S.mT)
    with pytest.raises(NumericError, match="do not divide"):
        chunk_prefill(q, k, v[:, :, :3], g[:, :, :3], beta[:, :, :3])
    with pytest.raises(NumericError, match="overflows"):
        chunk_prefill(q, k, v, g[..., None].expand(-1, -1, -1, 8), beta, S, chunk=64)
    with pytest.raises(NumericError, match="no tokens"):
        chunk_prefill(*(x[:, :0] for x in (q, k, v, g, beta)), S)


def test_softplus_gate_by_hand() -> None:
    a_log = torch.tensor([0.0, math.log(2.0)], dtype=torch.float64)
    bias = torch.tensor([0.5, -1.0], dtype=torch.float64)
    a = torch.tensor([[0.5, 1.0], [30.0, 30.0]], dtype=torch.float64)
    expected = torch.tensor(
        [[-math.log1p(math.e), -2 * math.log(2.0)], [-30.5, -58.0]], dtype=torch.float64
    )
    assert torch.allclose(gate_softplus(a, a_log, bias), expected, rtol=1e-12)


def test_gates_broadcast_a_log_over_channels() -> None:
    a_log, bias = torch.randn(3), torch.randn(3, 5)
    a = torch.randn(2, 3, 5)
    soft, safe = gate_softplus(a, a_log, bias), gate_safe(a, a_log, bias, -5.0)
    for h in range(3):
        assert torch.allclose(soft[:, h], -a_log[h].exp() * (a[:, h] + bias[h]).exp().log1p())
        assert torch.allclose(safe[:, h], -5 / (1 + (-a_log[h].exp() * (a[:, h] + bias[h])).exp()))


def test_safe_gate_by_hand_multiplies_by_its_bound() -> None:
    # rate 2, input 0.25 + 0.25: sigmoid(1); a large input saturates at the bound
    g = gate_safe(
        torch.tensor([0.25, 50.0]),
        torch.tensor([math.log(2.0)] * 2),
        torch.tensor([0.25] * 2),
        -5.0,
    )
    assert torch.allclose(g, torch.tensor([-5 / (1 + math.exp(-1)), -5.0]))


def test_l2norm_puts_epsilon_inside_the_root() -> None:
    assert torch.equal(l2norm(torch.zeros(4)), torch.zeros(4))
    assert l2norm(torch.tensor([3e-3, 4e-3])).norm() == pytest.approx(
        5e-3 / math.sqrt(25e-6 + 1e-6), rel=1e-5
    )


def test_groups_round_half_to_even_and_keep_a_short_last_group() -> None:
    x = torch.zeros(2, 37)
    x[0, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])
    x[0, 32:] = torch.tensor([254.0, 1.0, 3.0, -254.0, 5.0])
    codes, scales = quantise_groups(x, 32)
    assert scales.tolist() == [[1.0, 2.0], [0.0, 0.0]]
    assert codes[0, :4].tolist() == [127, 0, 2, -2]
    assert codes[0, 32:].tolist() == [127, 0, 2, -127, 2]
    assert not codes[1].any()
    assert torch.equal(dequantise_groups(codes, scales, 32)[0, 32:], codes[0, 32:] * 2.0)


@pytest.mark.parametrize("magnitude", [1e-42, 1e-38, 1e-12, 1e30])
def test_group_error_is_half_a_step_at_any_magnitude(magnitude: float) -> None:
    x = torch.randn(50, 40) * magnitude
    codes, scales = quantise_groups(x)
    step = scales.repeat_interleave(32, -1)[:, :40]
    # a scale in the subnormal range is itself rounded, by at most 1.4e-45, 127 times over
    assert ((dequantise_groups(codes, scales) - x).abs() <= step * 0.5001 + 2e-43).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_input_is_refused_with_its_place(bad: float) -> None:
    x = torch.zeros(3, 40)
    x[1, 7] = bad
    with pytest.raises(NumericError, match=r"not finite at index \[1, 7\]"):
        quantise_groups(x)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_every_input(kind: str) -> None:
    args = [x.requires_grad_() for x in inputs(kind, 1, 40, 2, 2, 4, 6)]
    o, state = chunk_prefill(*args)
    (o.sum() + state.sum()).backward()
    assert all(x.grad is not None and torch.isfinite(x.grad).all() for x in args)
