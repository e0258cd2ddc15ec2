"""Calibration prompts: texts of one domain concatenated to the input length, disjoint across splits."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hybridstate.checkpoint.documents import parse_json, read_bytes
from hybridstate.checkpoint.header import why_no_json
from hybridstate.errors import SourceError
from hybridstate.trajectories.protocol import DOMAINS, SPLITS, Protocol

Encode = Callable[[str], list[int]]

HELDOUT: Final = "Bleak House, held out"
"""What `heldout_text` is."""


@dataclass(frozen=True, slots=True)
class Text:
    """One source text."""

    id: str
    text: str
    domain: str = "given"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of exactly the protocol's length."""

    domain: str
    split: str
    number: int
    tokens: NDArray[np.int64]
    sources: tuple[str, ...]
    """Ids of the texts it was made from, in order."""

    @property
    def name(self) -> str:
        """`fit/math/0`."""
        return f"{self.split}/{self.domain}/{self.number}"

    @property
    def digest(self) -> str:
        """sha256 of the token ids as little-endian int32."""
        return hashlib.sha256(self.tokens.astype("<i4").tobytes()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Where the prompt came from; the tokens themselves are reproducible from it."""
        return {"name": self.name, "sources": list(self.sources), "digest": self.digest}


def shipped_texts() -> dict[str, list[Text]]:
    """The texts of `hybridstate/prompts`, by domain."""
    folder = resources.files("hybridstate") / "prompts"
    return {
        domain: _parse((folder / f"{domain}.jsonl").read_text("utf-8"), f"{domain}.jsonl")
        for domain in DOMAINS
    }


def heldout_text() -> str:
    """200 KB of prose that no embedded model was trained on."""
    return (resources.files("hybridstate") / "prompts" / "heldout.txt").read_text("utf-8")


def read_texts(path: Path) -> dict[str, list[Text]]:
    """Texts of a JSONL file of `{"text": ..., "id"?: ..., "domain"?: ...}`, by domain in order.

    Raises:
        SourceError: the file is missing, or a line is not such an object.
    """
    try:
        content = read_bytes(path).decode("utf-8-sig")
    except OSError as error:
        raise SourceError(f"cannot read prompts {path}: {error}", file=str(path)) from error
    except UnicodeDecodeError as error:
        raise SourceError(
            f"cannot read prompts {path}: {why_no_json(error)}", file=str(path)
        ) from error
    domains: dict[str, list[Text]] = {}
    for text in _parse(content, str(path)):
        domains.setdefault(text.domain, []).append(text)
    if not domains:
        raise SourceError(f"{path}: no prompts", file=str(path))
    return domains


def _parse(content: str, file: str) -> list[Text]:
    texts = []
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            item = parse_json(line)
            if not isinstance(item, dict):
                raise TypeError(f"an object is expected, found {line.strip():.40}")
            text, domain = item.get("text"), item.get("domain", "given")
            if not (isinstance(text, str) and isinstance(domain, str) and text and domain):
                raise TypeError("text and domain must be texts that are not empty")
            (text + domain).encode()  # half of a surrogate pair is no text
        except (ValueError, TypeError, RecursionError) as error:
            raise SourceError(
                f"{file} line {number}: {error}",
                hint='each line is {"id": "...", "text": "...", "domain": "..."}',
                file=file,
                index=number,
            ) from error
        texts.append(Text(str(item.get("id", f"line-{number}")), text, domain))
    return texts


def make_prompts(
    encode: Encode, texts: dict[str, list[Text]], protocol: Protocol, *, seed: int
) -> tuple[Prompt, ...]:
    """Prompts of all splits and domains: split by split, domain by domain.

    The texts of a domain are shuffled once; each prompt takes the next ones until it has enough tokens and
    keeps the last `input_tokens`. No text serves two prompts.

    Raises:
        SourceError: a domain has too little text.
    """
    wanted = protocol.prompts_per_domain
    shared = len(SPLITS) * protocol.prompts_per_split
    prompts: list[Prompt] = []
    for place, (domain, items) in enumerate(sorted(texts.items())):
        order = np.random.Generator(np.random.PCG64([seed, place])).permutation(len(items))
        queue = iter([items[i] for i in order])
        for made in range(wanted):
            ids: list[int] = []
            sources: list[str] = []
            while len(ids) < protocol.input_tokens:
                text = next(queue, None)
                if text is None:
                    raise SourceError(
                        f"domain {domain}: texts for {made} of {wanted} prompts of "
                        f"{protocol.input_tokens} tokens",
                        hint="give more texts with --prompts, or fewer or shorter prompts",
                        found=made,
                        expected=wanted,
                    )
                ids += encode(text.text)
                sources.append(text.id)
            prompts.append(
                Prompt(
                    domain=domain,
                    split=SPLITS[made % len(SPLITS)] if made < shared else SPLITS[-1],
                    number=made // len(SPLITS)
                    if made < shared
                    else protocol.prompts_per_split + made - shared,
                    tokens=np.asarray(ids[-protocol.input_tokens :], dtype=np.int64),
                    sources=tuple(sources),
                )
            )
    return tuple(sorted(prompts, key=lambda p: (SPLITS.index(p.split), p.domain, p.number)))


def prefixes(encode: Encode, text: str, *, count: int, tokens: int) -> NDArray[np.int64]:
    """`count` evenly spaced stretches of `tokens` tokens of one text: `[count, tokens]`.

    Raises:
        SourceError: the text is too short for stretches that do not overlap.
    """
    ids = np.asarray(encode(text), dtype=np.int64)
    if ids.size < count * tokens:
        raise SourceError(
            f"{count} prefixes of {tokens} tokens need {count * tokens} tokens, the text has {ids.size}",
            hint="ask for fewer or shorter prefixes",
            found=int(ids.size),
            expected=count * tokens,
        )
    starts = [place * (ids.size // count) for place in range(count)]
    return np.stack([ids[start : start + tokens] for start in starts])


def domain_stretches(
    encode: Encode, *, count: int, tokens: int
) -> dict[str, tuple[NDArray[np.int64], ...]]:
    """`count` stretches of `tokens` tokens of each shipped domain, its texts in order with blank lines between.

    Raises:
        SourceError: a domain is too short for stretches that do not overlap.
    """
    return {
        domain: tuple(
            prefixes(encode, "\n\n".join(t.text for t in texts), count=count, tokens=tokens)
        )
        for domain, texts in shipped_texts().items()
    }
