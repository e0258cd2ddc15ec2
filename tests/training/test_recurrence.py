"""The plain recurrence and the limited attention used in training, against direct evaluations."""

from types import SimpleNamespace

import pytest
import torch

from training import recurrence


@pytest.mark.parametrize("repeat", [1, 2])
@pytest.mark.filterwarnings("ignore")
def test_plain_recurrence_is_that_of_transformers(repeat: int) -> None:
    from transformers.models.kimi_linear import modeling_kimi_linear
    from transformers.models.qwen3_5 import modeling_qwen3_5

    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 9, 2, 6, generator=draw) for _ in range(2))
    v = torch.randn(2, 9, 2 * repeat, 10, generator=draw)
    beta = torch.rand(2, 9, 2 * repeat, generator=draw)
    start = torch.randn(2, 2 * repeat, 6, 10, generator=draw)
    options = {"initial_state": start, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    gate = -torch.rand(2, 9, 2 * repeat, generator=draw)
    wide_q, wide_k = (x.repeat_interleave(repeat, 2) for x in (q, k))  # as 5.17 passes them
    expected, last = modeling_qwen3_5.torch_chunk_gated_delta_rule(
        wide_q, wide_k, v, g=gate, beta=beta, **options
    )
    found, state = recurrence.plain(q, k, v, gate, beta, start, torch.float64)
    torch.testing.assert_close(found.float(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.float(), last, rtol=1e-4, atol=1e-5)
    if repeat == 1:
        channels = -torch.rand(2, 9, 2, 6, generator=draw)
        expected, last = modeling_kimi_linear.chunk_kimi_delta_attention(
            q, k, v, channels, beta, **options
        )
        found, state = recurrence.plain(q, k, v, channels, beta, start, torch.float64)
        torch.testing.assert_close(found.float(), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state.float(), last, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("steps", [64, 128, 384])
def test_first_rows_see_their_window_and_the_others_everything(steps: int) -> None:
    draw = torch.Generator().manual_seed(1)
    q = torch.randn(3, 4, steps, 8, generator=draw)
    k, v = (torch.randn(3, 2, steps, 8, generator=draw) for _ in range(2))
    module = SimpleNamespace(windows=torch.tensor([64, 100]))
    found, _ = recurrence.local_attention(module, q, k, v, None, scaling=0.3)  # type: ignore[arg-type]
    scores = q @ k.repeat_interleave(2, 1).mT * 0.3
    back = torch.arange(steps)[:, None] - torch.arange(steps)
    for row, window in enumerate((64, 100, steps)):
        seen = (back >= 0) & (back < window)
        weights = scores[row].masked_fill(~seen, -torch.inf).softmax(-1)
        expected = (weights @ v[row].repeat_interleave(2, 0)).transpose(0, 1)
        torch.testing.assert_close(found[row], expected, rtol=1e-4, atol=1e-5)
