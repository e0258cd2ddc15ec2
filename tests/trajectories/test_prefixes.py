"""Prefix selection of DASC A.2: tiers, eligibility, the shortest that fit, fallbacks, left truncation."""

import numpy as np
import pytest

from hybridstate.errors import SourceError, UsageError
from hybridstate.trajectories.documents import Document, Documents, plain_text
from hybridstate.trajectories.prefixes import (
    BYTE_TIERS,
    PAPER_TIERS,
    SHORT_TIERS,
    Prefixes,
    choose_prefixes,
    default_prefixes,
    select_prefixes,
)


def encode(text: str) -> list[int]:
    """A token for every two characters, its value their place in the text."""
    return list(range(len(text) // 2))


def documents(*characters: int) -> Documents:
    items = tuple(Document(i, "x" * n) for i, n in enumerate(characters))
    return Documents("made", "json", "0" * 64, items)


def test_the_shortest_that_reach_the_target_are_taken() -> None:
    made = documents(90, 44, 60, 40, 200, 39, 50)
    found = select_prefixes(encode, made, Prefixes((20,), 3, chars_per_token=2.0))
    assert [p.source for p in found.items] == [3, 1, 6]  # 20, 22, 25 tokens
    assert [len(p.tokens) for p in found.items] == [20, 20, 20]
    assert [p.start for p in found.items] == [0, 2, 5]  # left truncation keeps the last T tokens
    assert found.items[2].tokens.tolist() == list(range(5, 25))
    tier = found.tiers[0]
    assert (tier.eligible, tier.tokenised, tier.qualified, tier.fallbacks) == (6, 6, 6, 0)


def test_long_conversations_go_to_the_long_tier_and_are_gone_afterwards() -> None:
    made = documents(*[20 + 2 * n for n in range(30)])
    found = select_prefixes(encode, made, Prefixes((10, 25), 4, chars_per_token=2.0))
    assert [p.tier for p in found.items] == [25] * 4 + [10] * 4  # descending, whatever was given
    sources = [p.source for p in found.items]
    assert sources == [15, 16, 17, 18, 0, 1, 2, 3]
    assert len(set(sources)) == 8


def test_only_the_first_candidates_are_tokenised() -> None:
    seen: list[str] = []

    def counting(text: str) -> list[int]:
        seen.append(text)
        return encode(text)

    made = documents(*[100 - n for n in range(40)])
    wanted = Prefixes((10,), 2, chars_per_token=2.0, candidates=5)
    found = select_prefixes(counting, made, wanted)
    assert len(seen) == 5
    assert [p.source for p in found.items] == [3, 4]  # 48 tokens each, of the first five
    assert (found.tiers[0].eligible, found.tiers[0].tokenised) == (40, 5)


def test_equal_lengths_keep_the_order_of_the_file() -> None:
    found = select_prefixes(encode, documents(30, 30, 30, 30), Prefixes((10,), 3))
    assert [p.source for p in found.items] == [0, 1, 2]


def test_too_few_long_ones_fall_back_to_the_longest_available() -> None:
    made = documents(10, 100, 70, 66, 64, 20)  # eligible at 3 characters a token: 66 and up
    found = select_prefixes(encode, made, Prefixes((34,), 3, chars_per_token=1.9))
    assert [(p.source, len(p.tokens), p.fallback) for p in found.items] == [
        (3, 33, True),
        (2, 34, False),
        (1, 34, False),
    ]
    assert found.tiers[0].fallbacks == 1
    assert found.to_json()["fallbacks"] == 1
    few = select_prefixes(encode, made, Prefixes((45,), 3, chars_per_token=2.0))
    assert [(p.source, len(p.tokens)) for p in few.items] == [(3, 33), (2, 35), (1, 45)]
    assert (few.tiers[0].eligible, few.tiers[0].fallbacks) == (1, 2)


def test_too_few_documents_are_refused() -> None:
    with pytest.raises(SourceError, match="3 documents, too few for 2 tiers of 2"):
        select_prefixes(encode, documents(50, 50, 50), Prefixes((10, 5), 2))
    with pytest.raises(SourceError, match="too few"):
        select_prefixes(encode, documents(50, 0, 0), Prefixes((10,), 2))


def test_stretches_of_a_book_never_overlap_and_span_it() -> None:
    book = plain_text("a book", "y" * 2000)  # 1000 tokens
    found = select_prefixes(encode, book, Prefixes((100, 20, 5), 4))
    assert [len(p.tokens) for p in found.items] == [100] * 4 + [20] * 4 + [5] * 4
    used = np.concatenate([p.tokens for p in found.items])
    assert len(set(used.tolist())) == used.size == 500
    assert max(p.start for p in found.items) > 900
    assert [p.start for p in found.items[:4]] == [0, 250, 500, 750]
    assert found.to_json()["sources"][4] == {"source": 0, "start": 141, "tokens": 20, "tier": 20}
    with pytest.raises(SourceError, match=r"need 1,500 tokens, the text has 1,000"):
        select_prefixes(encode, book, Prefixes((300,), 5))


def test_defaults_fit_tokenizer_text_and_device() -> None:
    assert default_prefixes(264, device="cuda", given_text=True) == Prefixes(
        BYTE_TIERS, 8, chars_per_token=1.0
    )
    assert default_prefixes(150_000, device="cuda", given_text=True) == Prefixes(PAPER_TIERS)
    assert default_prefixes(150_000, device="cuda", given_text=False).tiers == SHORT_TIERS
    assert default_prefixes(264, device="cpu", given_text=False).per_tier == 2
    given = choose_prefixes(264, device="cpu", given_text=False, tiers=(64,), per_tier=1)
    assert given == Prefixes((64,), 1, chars_per_token=1.0)


@pytest.mark.parametrize(
    "wanted",
    [
        Prefixes(()),
        Prefixes((8, 8)),
        Prefixes((1,)),
        Prefixes((8,), 0),
        Prefixes((8,), candidates=0),
        Prefixes((8,), chars_per_token=float("nan")),
        Prefixes((8,), chars_per_token=-1.0),
    ],
)
def test_what_selects_nothing_is_refused(wanted: Prefixes) -> None:
    with pytest.raises(UsageError):
        select_prefixes(encode, documents(50), wanted)
