"""Which prefixes horizons are validated on (DASC A.2): tiers of lengths, chosen without chance.

Tiers are worked off in descending order. For a target of T tokens, documents of at least `chars_per_token * T`
characters are eligible; the first `candidates` of them are tokenised, ordered by token count (equal counts by place
in the file), and the `per_tier` shortest with at least T tokens are taken. Where fewer qualify, the longest available
ones are taken, which may be shorter than T: a fallback, counted. A longer document keeps its last T tokens. What one
tier took is gone for the later ones.

One long plain text has no documents to choose from: its stretches lie evenly over it and never overlap.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hybridstate.errors import SourceError, UsageError
from hybridstate.trajectories.documents import Document, Documents

Encode = Callable[[str], list[int]]
Progress = Callable[[str, int, int], None]

PAPER_TIERS: Final = (16_384, 8_192, 4_096, 1_024)
"""Target lengths for Qwen3-Next and Kimi-Linear (DASC A.2)."""

SHORT_TIERS: Final = (2_048, 1_024, 512, 128)
"""For the range 128 to 2,048 of Kimi-K3, whose spread is not published."""

BYTE_TIERS: Final = (4_096, 2_048, 1_024, 256)
"""For byte tokenizers, where a token is a fifth of a word."""

PER_TIER: Final = 8
CPU_PER_TIER: Final = 2
"""Enough to see that all is well without a GPU; the published protocol has 8."""

CHARS_PER_TOKEN: Final = 3.5
CANDIDATES: Final = 500
BYTE_VOCABULARY: Final = 512
"""A tokenizer with at most so many tokens counts as one of bytes."""


@dataclass(frozen=True, slots=True)
class Prefixes:
    """What to select.

    Attributes:
        tiers: target lengths in tokens, distinct; they are sorted in descending order.
        per_tier: prefixes of each length.
        chars_per_token: an eligible document has at least that many characters per target token.
        candidates: eligible documents that are tokenised.
    """

    tiers: tuple[int, ...]
    per_tier: int = PER_TIER
    chars_per_token: float = CHARS_PER_TOKEN
    candidates: int = CANDIDATES

    def check(self) -> None:
        """Refuse what selects nothing.

        Raises:
            UsageError: naming the option.
        """
        if not self.tiers or len(set(self.tiers)) != len(self.tiers) or min(self.tiers) < 2:
            raise UsageError(
                f"--tiers takes distinct lengths of at least 2 tokens, found {list(self.tiers)}",
                found=list(self.tiers),
            )
        for option, value in (("per-tier", self.per_tier), ("candidates", self.candidates)):
            if value < 1:
                raise UsageError(f"--{option} must be at least 1, found {value}", found=value)
        if not 0 <= self.chars_per_token < float("inf"):
            raise UsageError(
                f"--chars-per-token must be a number from 0 on, found {self.chars_per_token}"
            )


def default_prefixes(vocabulary: int, *, device: str, given_text: bool) -> Prefixes:
    """Tiers and characters per token that fit the tokenizer and the text.

    Args:
        vocabulary: tokens of the model.
        device: `cpu` takes fewer prefixes of each length.
        given_text: the user gave a file; the held-out prose is too short for the paper's tiers.
    """
    per_tier = CPU_PER_TIER if device == "cpu" else PER_TIER
    if vocabulary <= BYTE_VOCABULARY:
        return Prefixes(BYTE_TIERS, per_tier, chars_per_token=1.0)
    return Prefixes(PAPER_TIERS if given_text else SHORT_TIERS, per_tier)


def choose_prefixes(
    vocabulary: int,
    *,
    device: str,
    given_text: bool,
    tiers: Sequence[int] | None = None,
    per_tier: int | None = None,
    chars_per_token: float | None = None,
    candidates: int | None = None,
) -> Prefixes:
    """The defaults of `default_prefixes`, with what was given in their place.

    Raises:
        UsageError: see `Prefixes.check`.
    """
    default = default_prefixes(vocabulary, device=device, given_text=given_text)
    chosen = Prefixes(
        tiers=default.tiers if tiers is None else tuple(tiers),
        per_tier=default.per_tier if per_tier is None else per_tier,
        chars_per_token=default.chars_per_token if chars_per_token is None else chars_per_token,
        candidates=default.candidates if candidates is None else candidates,
    )
    chosen.check()
    return chosen


@dataclass(frozen=True, slots=True)
class Prefix:
    """One selected prefix.

    Attributes:
        tier: target length T.
        tokens: int64 `[n]`, n at most T.
        source: index of the document in its file.
        start: first token taken, counted in the document.
    """

    tier: int
    tokens: NDArray[np.int64]
    source: int
    start: int

    @property
    def fallback(self) -> bool:
        """Shorter than its tier asks for."""
        return len(self.tokens) < self.tier


@dataclass(frozen=True, slots=True)
class TierCount:
    """How one tier was filled: of `eligible` documents `tokenised` were looked at, `qualified` had T tokens."""

    tier: int
    eligible: int
    tokenised: int
    qualified: int
    selected: int
    fallbacks: int


@dataclass(frozen=True, slots=True)
class SelectedPrefixes:
    """Prefixes in the released order: tiers descending, inside a tier ascending token counts."""

    items: tuple[Prefix, ...]
    tiers: tuple[TierCount, ...]

    def to_json(self) -> dict[str, Any]:
        """Counts per tier and where every prefix came from."""
        return {
            "tiers": [asdict(tier) for tier in self.tiers],
            "fallbacks": sum(tier.fallbacks for tier in self.tiers),
            "sources": [
                {"source": p.source, "start": p.start, "tokens": len(p.tokens), "tier": p.tier}
                for p in self.items
            ],
        }


def select_prefixes(
    encode: Encode, documents: Documents, wanted: Prefixes, *, progress: Progress | None = None
) -> SelectedPrefixes:
    """Select prefixes as the module says.

    Raises:
        SourceError: a plain text is too short, or a file has fewer documents than prefixes are wanted.
        UsageError: see `Prefixes.check`.
    """
    wanted.check()
    if documents.format == "text":
        return _stretches(encode, documents, wanted)
    ids: dict[int, list[int]] = {}
    left = [item for item in documents.items if item.text.strip()]
    chosen: list[Prefix] = []
    counts: list[TierCount] = []
    for place, tier in enumerate(sorted(wanted.tiers, reverse=True), start=1):
        eligible = [item for item in left if len(item.text) >= wanted.chars_per_token * tier]
        looked_at = eligible[: wanted.candidates]
        picked, qualified = _pick(encode, ids, looked_at, tier, wanted.per_tier)
        if len(picked) < wanted.per_tier:  # too few eligible ones: the longest of the others
            taken = {item.index for item in looked_at}
            others = sorted(
                (item for item in left if item.index not in taken),
                key=lambda item: (-len(item.text), item.index),
            )
            extra = others[: wanted.per_tier - len(picked)]
            for item in extra:
                ids.setdefault(item.index, encode(item.text))
            extra = [item for item in extra if ids[item.index]]
            picked = sorted(picked + extra, key=lambda item: (len(ids[item.index]), item.index))
        if len(picked) < wanted.per_tier:
            raise SourceError(
                f"{documents.name}: {len(documents.items)} documents, too few for "
                f"{len(wanted.tiers)} tiers of {wanted.per_tier} prefixes",
                hint="give a longer file, or fewer prefixes with --per-tier",
                found=len(documents.items),
                expected=len(wanted.tiers) * wanted.per_tier,
            )
        made = [_last(ids[item.index], item.index, tier) for item in picked]
        chosen += made
        gone = {item.index for item in picked}
        left = [item for item in left if item.index not in gone]
        fallbacks = sum(prefix.fallback for prefix in made)
        counts.append(
            TierCount(tier, len(eligible), len(looked_at), qualified, len(made), fallbacks)
        )
        if progress is not None:
            progress("select", place, len(wanted.tiers))
    return SelectedPrefixes(tuple(chosen), tuple(counts))


def _pick(
    encode: Encode, ids: dict[int, list[int]], items: Sequence[Document], tier: int, count: int
) -> tuple[list[Document], int]:
    """The shortest documents of at least `tier` tokens, or the longest available; how many qualified."""
    for item in items:
        if item.index not in ids:
            ids[item.index] = encode(item.text)
    ordered = sorted(items, key=lambda item: (len(ids[item.index]), item.index))
    ordered = [item for item in ordered if ids[item.index]]
    long = [item for item in ordered if len(ids[item.index]) >= tier]
    return (long[:count] if len(long) >= count else ordered[-count:]), len(long)


def _last(ids: Sequence[int], source: int, tier: int) -> Prefix:
    start = max(0, len(ids) - tier)
    return Prefix(tier, np.asarray(ids[start:], dtype=np.int64), source, start)


def _stretches(encode: Encode, documents: Documents, wanted: Prefixes) -> SelectedPrefixes:
    """Stretches of one text: round by round one of each tier, with equal gaps between them."""
    ids = np.asarray(encode(documents.items[0].text), dtype=np.int64)
    tiers = sorted(wanted.tiers, reverse=True)
    needed = wanted.per_tier * sum(tiers)
    if ids.size < needed:
        raise SourceError(
            f"{documents.name}: {wanted.per_tier} prefixes each of {', '.join(map(str, tiers))} "
            f"tokens need {needed:,} tokens, the text has {ids.size:,}",
            hint="ask for fewer or shorter prefixes with --per-tier and --tiers",
            found=int(ids.size),
            expected=needed,
        )
    rest, parts = int(ids.size) - needed, wanted.per_tier * len(tiers)
    found: dict[int, list[Prefix]] = {tier: [] for tier in tiers}
    start = 0
    for place in range(parts):
        tier = tiers[place % len(tiers)]
        at = start + place * rest // parts
        found[tier].append(Prefix(tier, ids[at : at + tier], 0, at))
        start += tier
    return SelectedPrefixes(
        tuple(prefix for tier in tiers for prefix in found[tier]),
        tuple(
            TierCount(tier, wanted.per_tier, wanted.per_tier, wanted.per_tier, wanted.per_tier, 0)
            for tier in tiers
        ),
    )
