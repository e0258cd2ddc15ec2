"""Scoring of restored states: exact match equals greedy decoding, KL, intervals."""

from pathlib import Path

import numpy as np
import pytest
import torch

from hybridstate.errors import SourceError
from hybridstate.quality.reuse import (
    Cases,
    Text,
    batches,
    divergence,
    mean_and_error,
    paired_interval,
    score,
    top1_agreement,
)
from hybridstate.trajectories.cache import decode, new_cache, prefill
from hybridstate.trajectories.model import LoadedModel, load_model


@pytest.fixture(scope="module")
def loaded(tiny_kda: Path) -> LoadedModel:
    return load_model(str(tiny_kda))


def greedy(loaded: LoadedModel, prompt: torch.Tensor, count: int) -> torch.Tensor:
    logits, past = prefill(loaded, prompt)
    tokens = [logits.argmax(-1)]
    for _ in range(count - 1):
        tokens.append(decode(loaded, tokens[-1], past).argmax(-1))
    return torch.stack(tokens, 1)


def test_exact_means_that_greedy_decoding_gives_the_target(loaded: LoadedModel) -> None:
    context = torch.randint(97, 122, (4, 20), generator=torch.Generator().manual_seed(0))
    suffix = torch.randint(97, 122, (4, 6), generator=torch.Generator().manual_seed(1))
    target = greedy(loaded, torch.cat([context, suffix], 1), 3)
    target[1, 0] += 1  # wrong from the first token, in the middle, at the end
    target[2, 1] += 1
    target[3, 2] += 1
    cases = Cases("x", (0, 1, 2, 3), context, suffix, target, (3, 3, 3, 3))
    _, past = prefill(loaded, context)
    found = score(loaded, past, cases)
    assert found.exact.tolist() == [1, 0, 0, 0]
    again = score(loaded, new_cache(loaded), cases, seen=20)
    np.testing.assert_allclose(again.bits, found.bits, rtol=1e-5)


def test_bits_are_per_byte_of_the_target(loaded: LoadedModel) -> None:
    cases = Cases(
        "x",
        (0,),
        torch.full((1, 5), 97),
        torch.full((1, 2), 98),
        torch.tensor([[99, 100]]),
        (4,),
    )
    _, past = prefill(loaded, cases.context)
    found = score(loaded, past, cases)
    chosen = found.log_probs.gather(-1, cases.target[..., None]).sum()
    assert found.bits[0] == pytest.approx(-float(chosen) / np.log(2) / 4, rel=1e-6)


def test_cases_of_equal_lengths_share_a_batch(loaded: LoadedModel) -> None:
    texts = [Text("abcd", "?a", "x"), Text("efg", "?a", "x"), Text("hijk", "?b", "y")]
    found = batches(loaded, "recall", texts)
    assert [batch.numbers for batch in found] == [(0, 2), (1,)]
    assert found[0].context.tolist() == [list(b"abcd"), list(b"hijk")]
    assert found[0].unseen.tolist() == [list(b"?a"), list(b"?b")]
    assert found[0].rows([1, 1]).numbers == (2, 2)


def test_case_without_a_question_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(SourceError, match="recall case 0 has an empty part"):
        batches(loaded, "recall", [Text("abc", "", "x")])


def test_divergence_is_kl_averaged_over_positions() -> None:
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    other = logits + torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(1))
    p, q = (torch.softmax(x.double(), -1) for x in (logits, other))
    expected = (p * (p / q).log()).sum(-1).mean(-1)
    found = divergence(torch.log_softmax(logits, -1), torch.log_softmax(other, -1))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert divergence(logits, logits).tolist() == [0, 0]


def test_interval_covers_a_clear_difference_and_repeats() -> None:
    differences = np.random.Generator(np.random.PCG64(0)).normal(0.3, 0.2, 200)
    interval = paired_interval(differences, seed=7)
    assert interval is not None
    low, high = interval
    assert 0.25 < low < differences.mean() < high < 0.35
    assert paired_interval(differences, seed=7) == (low, high)
    half_width = 1.96 * differences.std(ddof=1) / np.sqrt(200)
    assert high - low == pytest.approx(2 * half_width, rel=0.1)


def test_interval_needs_two_cases() -> None:
    assert paired_interval(np.array([0.3]), seed=7) is None
    assert paired_interval(np.array([0.3, 0.1]), seed=7) is not None


def test_standard_error_needs_two_cases() -> None:
    assert mean_and_error(np.array([2.0])) == (2.0, None)
    mean, error = mean_and_error(np.array([1.0, 2.0, 3.0]))
    assert mean == 2.0
    assert error == pytest.approx(1 / np.sqrt(3))


def test_top1_agreement_is_the_share_of_positions_with_the_same_most_likely_token() -> None:
    one = torch.tensor([[[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]], [[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]]])
    other = one.clone()
    other[1, 0] = torch.tensor([5.0, 2.0, 1.0])
    assert top1_agreement(one, other).tolist() == [1.0, 0.5]
