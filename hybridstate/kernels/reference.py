"""The recurrences of GDN and KDA in plain torch, with their gates and the group quantiser.

One token of one value head (state S [K, V], key rows, value columns; DAMP Eq. 1-2):

    S <- diag(exp(g)) S                 g scalar (GDN) or one value per key channel (KDA)
    S <- S + k (x) beta (v - S^T k)
    o  = S^T q / sqrt(K)

q and k are L2-normalised here. Shapes, everywhere: q, k [B, T, Hk, K]; v [B, T, H, V];
beta [B, T, H]; g [B, T, H] or [B, T, H, K], natural log; S [B, H, K, V]. Value head h reads key
head h // (H // Hk), so inputs whose key heads were already repeated work too. Arithmetic is
float64 when the state or the values are float64, float32 otherwise.
"""

import torch
from torch import Tensor

from hybridstate.defaults import GROUP, L2_EPSILON
from hybridstate.errors import NumericError

CHUNK_SCALAR = 64
"""Tokens per chunk with one decay per head."""

CHUNK_CHANNEL = 32
"""Tokens per chunk with one decay per key channel: exponents stay within 32 * 44 / 2 = 704."""

PAIR_FLOOR = -44.0
"""Log decay of one token that separates the tokens before and after it: exp(-44) = 8e-20."""

SEGMENT = 2048
"""Tokens prepared at once; bounds the float64 temporaries."""


def l2norm(x: Tensor, eps: float = L2_EPSILON) -> Tensor:
    """x / sqrt(sum(x^2) + eps) along the last axis."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def gate_softplus(a: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """g = -exp(A_log) softplus(a + dt_bias), the gate of Qwen, OLMo and Kimi-Linear.

    Args:
        a: gate input [..., H] (GDN) or [..., H, K] (KDA).
        a_log: [H].
        dt_bias: [H] or [H, K].

    Returns:
        Log decay, shape of `a`; softplus is the identity above 20, as in every framework.
    """
    rate = a_log.exp() if dt_bias.dim() == a_log.dim() else a_log.exp().unsqueeze(-1)
    return -rate * torch.nn.functional.softplus(a + dt_bias, threshold=20.0)


def gate_safe(a: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """g = lower_bound * sigmoid(exp(A_log) (a + dt_bias)), the gate of Kimi-K3 and GLM.

    The bound multiplies, it does not clamp. Arguments as in gate_softplus; `lower_bound` is
    negative, for instance -5.
    """
    rate = a_log.exp() if dt_bias.dim() == a_log.dim() else a_log.exp().unsqueeze(-1)
    return lower_bound * torch.sigmoid(rate * (a + dt_bias))


def quantise_groups(x: Tensor, group: int = GROUP, *, check: bool = True) -> tuple[Tensor, Tensor]:
    """Symmetric INT8 with one scale per `group` values of the last axis (DAMP Eq. 5-6).

    s = max|x| / 127, code = round_half_even(x / s) in [-127, 127]. A group of zeros gets scale 0
    and codes 0. The last group is shorter when `group` does not divide V.

    Args:
        x: [..., V], float32 or float64.
        group: values per scale.
        check: refuse non-finite input (costs one synchronisation on a GPU).

    Returns:
        codes int8 [..., V] and scales float32 [..., ceil(V / group)].

    Raises:
        NumericError: `x` holds a NaN or an infinity.
    """
    width = x.shape[-1]
    padded = x if width % group == 0 else torch.nn.functional.pad(x, (0, -width % group))
    groups = padded.unflatten(-1, (-1, group))
    scales = quotient(groups.abs().amax(-1), 127.0).to(torch.float32)
    # the maximum passes on every NaN and infinity, and is a group's size smaller than the state
    if check and not bool(torch.isfinite(scales).all()):
        _refuse_non_finite(x)
    divisor = torch.where(scales > 0, scales, torch.ones_like(scales)).to(x.dtype).unsqueeze(-1)
    codes = (groups / divisor).round_().clamp_(-127, 127)
    return codes.to(torch.int8).flatten(-2)[..., :width], scales


def quotient(x: Tensor, divisor: float) -> Tensor:
    """x / divisor as IEEE rounds it; on a GPU torch multiplies by the reciprocal of a plain number instead."""
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def _refuse_non_finite(x: Tensor) -> None:
    """Name the first value that float32 cannot hold."""
    first = torch.nonzero(~torch.isfinite(x.to(torch.float32)))[0].tolist()
    raise NumericError(
        f"state to quantise is not finite at index {first}",
        index=first,
        expected="finite values",
    )


def dequantise_groups(codes: Tensor, scales: Tensor, group: int = GROUP) -> Tensor:
    """code * scale: int8 [..., V] and float32 [..., ceil(V / group)] to float32 [..., V]."""
    width = codes.shape[-1]
    if width % group == 0:
        groups: Tensor = codes.unflatten(-1, (-1, group)).to(torch.float32) * scales.unsqueeze(-1)
        return groups.flatten(-2)
    return codes.to(torch.float32) * scales.repeat_interleave(group, dim=-1)[..., :width]


def recurrent_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token, straight from the equation.

    Args:
        q, k: [B, Hk, K], before normalisation.
        v: [B, H, V].
        g: log decay [B, H] or [B, H, K].
        beta: [B, H].
        state: [B, H, K, V]; not modified.

    Returns:
        o [B, H, V] in the dtype of `v`, and the new state in float32 (float64 for a float64 state).
    """
    work = _work_dtype(v, state)
    repeat = v.shape[-2] // q.shape[-2]
    qn = (l2norm(q.to(work)) * q.shape[-1] ** -0.5).repeat_interleave(repeat, -2)
    kn = l2norm(k.to(work)).repeat_interleave(repeat, -2)
    decay = g.to(work).exp()
    decay = decay[..., None] if g.dim() == 3 else decay[..., None, None]
    new = state.to(work) * decay
    delta = (v.to(work) - _read(new, kn)) * beta.to(work)[..., None]
    new = new + kn.unsqueeze(-1) * delta.unsqueeze(-2)
    return _read(new, qn).to(v.dtype), new


def recurrent_loop(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Token by token over T; the slow truth that `chunk_prefill` is compared with.

    Returns:
        o [B, T, H, V] in the dtype of `v`, and the final state [B, H, K, V].
    """
    state = _start(q, v, initial_state)
    outputs = torch.empty_like(v)
    for t in range(v.shape[1]):
        outputs[:, t], state = recurrent_step(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], state)
    return outputs, state


def chunk_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    *,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence over T tokens by matrix products; `recurrent_loop` up to rounding.

    Inside a chunk the delta rule is a unit lower triangular system (I + A) U = beta (V - K~ S)
    with A_ij = beta_i sum_u k_iu k_ju exp(G_iu - G_ju) for j < i, G the running sum of log decays.

    Args:
        q, k, v, g, beta: see the module docstring; any float dtypes, T at least 1.
        initial_state: [B, H, K, V] or None for zeros.
        chunk: tokens per chunk; by default equal pieces of at most 64 with one decay per head and
            32 with one per channel (also the most there).

    Returns:
        o [B, T, H, V] in the dtype of `v`, and the final state [B, H, K, V] in float32 or float64.

    Raises:
        NumericError: shapes do not fit together.
    """
    check_shapes(q, k, v, g, beta, initial_state)
    state = _start(q, v, initial_state)
    per_channel = g.dim() == 4
    most = CHUNK_CHANNEL if per_channel else CHUNK_SCALAR
    tokens = min(v.shape[1], SEGMENT)
    # 71 tokens are two chunks of 36 rather than two of 64: a short suffix pays for no padding
    size = chunk or -(-tokens // -(-tokens // most))
    if per_channel and size > CHUNK_CHANNEL:
        raise NumericError(
            f"chunk {size} overflows with one decay per channel", found=size, expected=CHUNK_CHANNEL
        )
    outputs = torch.empty_like(v)
    for first in range(0, v.shape[1], SEGMENT):
        part = slice(first, first + SEGMENT)
        inputs = [x[:, part] for x in (q, k, v, g, beta)]
        outputs[:, part], state = _segment(inputs, state, size, per_channel)
    return outputs, state


def _segment(
    inputs: list[Tensor], state: Tensor, size: int, per_channel: bool
) -> tuple[Tensor, Tensor]:
    """One run of chunks: `inputs` are q, k, v, g, beta of a segment, `state` the state before."""
    tokens, heads = inputs[2].shape[1:3]
    repeat = heads // inputs[0].shape[2]
    pad = -tokens % size
    q, k, v, g, beta = (_chunked(x, pad, size) for x in inputs)  # [B, heads, N, C, ...]
    q = l2norm(q.to(state.dtype)) * q.shape[-1] ** -0.5
    k = l2norm(k.to(state.dtype))
    v, beta = v.to(state.dtype), beta.to(state.dtype).unsqueeze(-1)
    # Long sums of log decays lose digits in float32 before their differences become negligible.
    # exp(-800) is zero in float64, and a finite floor keeps -inf - -inf out of the differences.
    log_decay = g.to(torch.float64).clamp_min(-800.0)
    total = log_decay.cumsum(3)
    to_last = total[:, :, :, -1:] - total
    if per_channel:
        q, k = q.repeat_interleave(repeat, 1), k.repeat_interleave(repeat, 1)
        kk, qk = _channel_products(q, k, log_decay)
    else:
        pair = (total.unsqueeze(-1) - total.unsqueeze(-2)).to(state.dtype)
        above = torch.ones(size, size, dtype=torch.bool, device=g.device).triu(1)
        pair = pair.masked_fill_(above, float("-inf")).exp()
        kk = (k @ k.mT).repeat_interleave(repeat, 1) * pair
        qk = (q @ k.mT).repeat_interleave(repeat, 1) * pair
        q, k = q.repeat_interleave(repeat, 1), k.repeat_interleave(repeat, 1)
        total, to_last = total.unsqueeze(-1), to_last.unsqueeze(-1)
    from_start, to_end = total.to(state.dtype).exp(), to_last.to(state.dtype).exp()
    right = torch.cat([v, k * from_start], -1) * beta
    solved = torch.linalg.solve_triangular(kk * beta, right, upper=False, unitriangular=True)
    values, reads = solved.split([v.shape[-1], k.shape[-1]], -1)
    q, k = q * from_start, (k * to_end).mT
    last = from_start[:, :, :, -1].unsqueeze(-1)  # [B, H, N, K or 1, 1]
    outputs = torch.empty_like(v)
    for n in range(v.shape[2]):
        written = values[:, :, n] - reads[:, :, n] @ state
        outputs[:, :, n] = q[:, :, n] @ state + qk[:, :, n] @ written
        state = state * last[:, :, n] + k[:, :, n] @ written
    return outputs.flatten(2, 3)[:, :, :tokens].transpose(1, 2).to(inputs[2].dtype), state


def _channel_products(q: Tensor, k: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """sum_u {k, q}_iu k_ju exp(G_iu - G_ju) for j <= i, zero above the diagonal; [..., C, C].

    exp(G_i) and exp(-G_j) are formed apart so that the sum over u is a matrix product. They are
    taken relative to the middle of the chunk, which halves the exponents' range, in float64, with
    the decay of one token floored at exp(-44): a pair with such a token between interacts by less
    than 1e-19 either way.
    """
    total = log_decay.clamp_min(PAIR_FLOOR).cumsum(-2)
    total = total - total[..., total.shape[-2] // 2, None, :]
    forward = total.exp()
    right = (k / forward).mT
    return (
        ((k * forward) @ right).tril().to(k.dtype),
        ((q * forward) @ right).tril().to(k.dtype),
    )


def _chunked(x: Tensor, pad: int, size: int) -> Tensor:
    """[B, T, heads, ...] to [B, heads, N, C, ...], zero tokens appended: no decay, no write."""
    x = x.transpose(1, 2)
    if pad:
        x = torch.cat([x, x.new_zeros(*x.shape[:2], pad, *x.shape[3:])], 2)
    return x.reshape(*x.shape[:2], -1, size, *x.shape[3:])


def _read(state: Tensor, key: Tensor) -> Tensor:
    """S^T k for every head: [..., K, V] and [..., K] to [..., V]."""
    read: Tensor = key.unsqueeze(-2) @ state
    return read.squeeze(-2)


def _work_dtype(v: Tensor, state: Tensor | None) -> torch.dtype:
    wide = v.dtype == torch.float64 or (state is not None and state.dtype == torch.float64)
    return torch.float64 if wide else torch.float32


def _start(q: Tensor, v: Tensor, initial_state: Tensor | None) -> Tensor:
    work = _work_dtype(v, initial_state)
    if initial_state is not None:
        return initial_state.to(work)
    return torch.zeros(
        v.shape[0], v.shape[-2], q.shape[-1], v.shape[-1], dtype=work, device=v.device
    )


def check_shapes(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None
) -> None:
    """Refuse inputs that would broadcast into a wrong answer."""
    batch, tokens, heads, value_dim = v.shape
    if not tokens:
        raise NumericError("a prefill of no tokens", tensor="v", found=list(v.shape))
    key_heads, key_dim = q.shape[-2:]
    expected = {
        "q": (q, (batch, tokens, key_heads, key_dim)),
        "k": (k, (batch, tokens, key_heads, key_dim)),
        "g": (g, (batch, tokens, heads) + ((key_dim,) if g.dim() == 4 else ())),
        "beta": (beta, (batch, tokens, heads)),
    }
    if initial_state is not None:
        expected["state"] = (initial_state, (batch, heads, key_dim, value_dim))
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise NumericError(
                f"{name} has shape {tuple(tensor.shape)}, expected {shape}",
                tensor=name,
                found=list(tensor.shape),
                expected=list(shape),
            )
    if heads % key_heads:
        raise NumericError(f"{heads} value heads do not divide by {key_heads} key heads")
