"""Conversations to serve: recorded ones from files, or generated and labelled synthetic.

A conversation is a sequence of turns; the prompt of a turn is everything before it (prompts and generated replies) and
the turn's own tokens. Formats: ShareGPT JSON, OpenAI `messages` JSONL (also WildChat's `conversation`), Mooncake JSONL
(512 tokens per hash), and generated ones. Conversations are made when they are asked for: a trace of any length
takes no memory.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from hybridstate.checkpoint.documents import an_object, parse_json, read_bytes, read_lines
from hybridstate.errors import SourceError, UsageError, reading
from hybridstate.runtime.radix import Tokens

Encode = Callable[[str], Sequence[int]]

GENERATED: Final = ("wildchat-shape", "shared-prefix", "no-sharing")
FORMATS: Final = ("sharegpt", "messages", "mooncake")

MOONCAKE_BLOCK: Final = 512
"""Tokens that one hash of a Mooncake trace stands for."""

_MOONCAKE_FORM: Final = "one object a line with timestamp, input_length, output_length and hash_ids"

MAX_CONTEXT: Final = 16_384
MAX_REPLY: Final = 1_024
MAX_PROMPT: Final = (1_000, 8_000)
"""The published serving trace: initial prompts, contexts and replies in tokens (DASC C.3)."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation.

    Attributes:
        tokens: appended to what was said before.
        reply: tokens to generate, at least 1.
        recorded: the recorded reply, fed back where nothing generates one.
    """

    tokens: Tokens
    reply: int
    recorded: Tokens


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of one client, in order; `start` is its arrival in seconds, None for as soon as a client is free."""

    number: int
    turns: tuple[Turn, ...]
    start: float | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Conversations by number.

    Attributes:
        name: format or generator.
        synthetic: whether the tokens were made up.
        note: what was done to the data, in a sentence.
        size: number of conversations.
        make: conversation by number, the same one every time.
    """

    name: str
    synthetic: bool
    note: str
    size: int
    make: Callable[[int], Conversation]

    def order(self, seed: int) -> NDArray[np.int64]:
        """The order in which clients take conversations: as recorded where they have arrival times, else shuffled."""
        if self.size and self.make(0).start is not None:
            return np.arange(self.size)
        return np.random.Generator(np.random.PCG64(seed)).permutation(self.size)

    def to_json(self) -> dict[str, Any]:
        """What the conversations are."""
        return {
            "name": self.name,
            "synthetic": self.synthetic,
            "note": self.note,
            "conversations": self.size,
        }


def byte_tokens(text: str) -> Sequence[int]:
    """One token per byte, for models and simulations without a tokenizer."""
    return list(text.encode())


# -- generated ----------------------------------------------------------------------------------


@cache
def _prose(encode: Encode) -> Tokens:
    """The shipped prose as tokens, twice in a row so that every excerpt is one slice."""
    folder = files("hybridstate") / "prompts"
    lines = (folder / "prose.jsonl").read_text(encoding="utf-8").splitlines()
    text = (folder / "heldout.txt").read_text(encoding="utf-8")
    text += "".join(json.loads(line)["text"] for line in lines if line)
    once = np.asarray(encode(text), np.int32)
    return np.concatenate([once, once])


def _excerpt(
    rng: np.random.Generator, length: int, head: str = "", encode: Encode = byte_tokens
) -> Tokens:
    """`length` tokens of prose behind `head`, which keeps excerpts apart from their first tokens on."""
    prose = _prose(encode)
    opening = np.asarray(encode(head), np.int32)[:length] if head else prose[:0]
    rest = length - len(opening)
    if rest > len(prose) // 2:
        raise UsageError(f"an excerpt has at most {len(prose) // 2:,} tokens, asked for {length:,}")
    at = int(rng.integers(len(prose) // 2))
    return np.concatenate([opening, prose[at : at + rest]])


def wildchat_shape(
    conversations: int = 256,
    *,
    turns: int = 4,
    prompt: tuple[int, int] = MAX_PROMPT,
    context: int = MAX_CONTEXT,
    reply: int = MAX_REPLY,
    seed: int = 0,
    encode: Encode = byte_tokens,
) -> Trace:
    """Conversations of the published trace's shape, with prose for words.

    First prompts are uniform between the bounds; later prompts and replies log-normal (median 64 and 256 tokens), cut
    so that no context passes `context`. Lengths scale with the bounds for models that were trained on less (`scaled`).
    """
    scale = reply / MAX_REPLY

    def make(number: int) -> Conversation:
        rng = np.random.Generator(np.random.PCG64([seed, number]))
        found, total = [], 0
        for turn in range(turns):
            answer = int(np.clip(rng.lognormal(np.log(256 * scale), 0.9), 4, reply))
            if turn == 0:
                length = int(rng.integers(prompt[0], prompt[1] + 1))
                answer = min(answer, max(1, context - length))
            else:
                length = int(np.clip(rng.lognormal(np.log(64 * scale), 1.0), 4, prompt[1]))
            if total + length + answer > context:
                answer = min(answer, max(1, (context - total) // 2))
                length = context - total - answer
            if length < 1:
                break
            tokens = _excerpt(rng, length, f"{number:08d} " if turn == 0 else "", encode)
            found.append(Turn(tokens, answer, _excerpt(rng, answer, "", encode)))
            total += length + answer
        return Conversation(number, tuple(found))

    note = (
        f"synthetic: prose in {conversations} conversations of {turns} turns, first prompts {prompt[0]:,}-"
        f"{prompt[1]:,} tokens, contexts at most {context:,}, replies at most {reply:,}; lengths log-normal"
    )
    return Trace("wildchat-shape", True, note, conversations, make)


def shared_prefix(
    groups: int = 64,
    per_group: int = 16,
    *,
    system: int = 2_048,
    question: int = 128,
    reply: int = 256,
    seed: int = 0,
    encode: Encode = byte_tokens,
) -> Trace:
    """Single requests in groups with a common system prompt."""

    def make(number: int) -> Conversation:
        group = number % groups
        shared = np.random.Generator(np.random.PCG64([seed, 1, group]))
        own = np.random.Generator(np.random.PCG64([seed, 2, number]))
        tokens = np.concatenate(
            [
                _excerpt(shared, system, f"{group:08d} ", encode),
                _excerpt(own, question, f"{number:08d} ", encode),
            ]
        )
        return Conversation(number, (Turn(tokens, reply, _excerpt(own, reply, "", encode)),))

    note = (
        f"synthetic: {groups} system prompts of {system:,} tokens, {per_group} questions of {question} tokens to each, "
        f"replies of {reply}"
    )
    return Trace("shared-prefix", True, note, groups * per_group, make)


def no_sharing(
    conversations: int = 1_024,
    *,
    prompt: tuple[int, int] = MAX_PROMPT,
    reply: int = 256,
    seed: int = 0,
    encode: Encode = byte_tokens,
) -> Trace:
    """The control: single requests of which no two share a prefix, so no cache can gain anything."""

    def make(number: int) -> Conversation:
        rng = np.random.Generator(np.random.PCG64([seed, 3, number]))
        length = int(rng.integers(prompt[0], prompt[1] + 1))
        tokens = _excerpt(rng, length, f"{number:08d} ", encode)
        return Conversation(number, (Turn(tokens, reply, _excerpt(rng, reply, "", encode)),))

    note = f"synthetic: {conversations} unrelated prompts of {prompt[0]:,}-{prompt[1]:,} tokens, replies of {reply}"
    return Trace("no-sharing", True, note, conversations, make)


def scaled(scale: float, tokens: int, smallest: int = 1) -> int:
    """A length of the published trace times the stated factor, for models that were trained on shorter contexts."""
    return max(smallest, round(scale * tokens))


def generated(
    name: str, conversations: int, *, scale: float = 1.0, encode: Encode = byte_tokens
) -> Trace:
    """A generated trace by name, every length times `scale`."""
    prompt = (scaled(scale, MAX_PROMPT[0], 16), scaled(scale, MAX_PROMPT[1], 32))
    if name == "wildchat-shape":
        trace = wildchat_shape(
            conversations,
            prompt=prompt,
            context=scaled(scale, MAX_CONTEXT, 64),
            reply=scaled(scale, MAX_REPLY, 4),
            encode=encode,
        )
    elif name == "no-sharing":
        reply = scaled(scale, 256, 2)
        trace = no_sharing(conversations, prompt=prompt, reply=reply, encode=encode)
    else:
        trace = shared_prefix(
            groups=max(1, conversations // 16),
            per_group=min(16, conversations),
            system=scaled(scale, 2_048, 16),
            question=scaled(scale, 128, 16),
            reply=scaled(scale, 256, 2),
            encode=encode,
        )
    if scale == 1:
        return trace
    return replace(trace, note=f"{trace.note}; lengths are {scale:g} of the published ones")


def control_for(clients: int, scale: float = 1.0, encode: Encode = byte_tokens) -> Trace:
    """Prompts that share nothing, two for every client and at most 512."""
    return generated("no-sharing", min(512, 2 * clients), scale=scale, encode=encode)


def longest(trace: Trace) -> int:
    """Tokens of the longest conversation, prompts and replies together."""
    return max(
        sum(len(turn.tokens) + turn.reply for turn in trace.make(number).turns)
        for number in range(trace.size)
    )


# -- recorded -----------------------------------------------------------------------------------


def read_trace(
    path: Path,
    style: Literal["sharegpt", "messages", "mooncake"],
    *,
    encode: Encode = byte_tokens,
    turns: int | None = None,
    prompt: tuple[int, int] | None = None,
    context: int = MAX_CONTEXT,
    reply: int = MAX_REPLY,
    limit: int | None = None,
    vocabulary: int = 256,
) -> Trace:
    """Conversations of a file.

    Args:
        style: its format.
        encode: text to tokens.
        turns: keep conversations of at least so many turns, and those turns; None keeps all.
        prompt: keep conversations whose first prompt has so many tokens; longer ones are dropped, not cut.
        context: turns that would pass it are dropped.
        reply: longer replies are cut.
        limit: at most so many conversations.
        vocabulary: of the tokens that stand for Mooncake's hashes.

    Raises:
        SourceError: the file cannot be read, or holds no such conversation.
    """
    if style == "mooncake":
        return _mooncake(path, context=context, reply=reply, limit=limit, vocabulary=vocabulary)
    kept: list[Conversation] = []
    for messages in _messages(path, style):
        if limit is not None and len(kept) == limit:
            break
        found = _turns(messages, encode, context, reply, turns)
        first = len(found[0].tokens) if found else 0
        long_enough = len(found) >= (turns or 1)
        if long_enough and (prompt is None or prompt[0] <= first <= prompt[1]):
            kept.append(Conversation(len(kept), tuple(found)))
    if not kept:
        raise SourceError(f"{path.name} holds no conversation that fits", file=str(path))
    note = f"{len(kept)} conversations of {path.name}, replies cut at {reply:,}, contexts at {context:,} tokens"
    return Trace(style, False, note, len(kept), kept.__getitem__)


def _messages(path: Path, style: str) -> list[list[tuple[str, str]]]:
    """(role, text) of every conversation; roles are `user` and `assistant`, others are joined to the next user."""
    with reading(path, f"cannot read {path.name}"):
        rows = _conversations(path) if style == "sharegpt" else read_lines(path)
    hint = (
        "sharegpt: a list with `conversations` of {from, value}; messages: one object a line with `messages` or "
        "`conversation` of {role, content}"
    )
    part = "conversation" if style == "sharegpt" else "line"
    found = []
    for number, row in rows:
        with reading(path, f"{path.name} is no {style} file: {part} {number}", hint=hint):
            found.append(_row(row))
    return found


def _conversations(path: Path) -> list[tuple[int, Any]]:
    """The entries of a JSON list, counted from one."""
    try:
        rows = parse_json(read_bytes(path))
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(rows, list):
        raise TypeError("a list of conversations is expected")
    return list(enumerate(rows, start=1))


def _row(row: Any) -> list[tuple[str, str]]:
    parts: Any = row if isinstance(row, list) else None
    for key in ("conversations", "messages", "conversation"):
        if parts is None and isinstance(row, dict) and key in row:
            parts = row[key]
    if not isinstance(parts, list):
        raise TypeError("a row without a list of messages")
    for part in parts:
        an_object(part, "a message")
    roles = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant"}
    return [
        (
            roles.get(part.get("role", part.get("from")), "system"),
            str(part["content"] if "content" in part else part["value"]),
        )
        for part in parts
    ]


def _turns(
    messages: list[tuple[str, str]], encode: Encode, context: int, reply: int, turns: int | None
) -> list[Turn]:
    found: list[Turn] = []
    asked, total = "", 0
    for role, text in messages:
        if role != "assistant":
            asked += text
            continue
        tokens = np.asarray(encode(asked), np.int32)
        answer = np.asarray(encode(text), np.int32)[:reply]
        total += len(tokens) + len(answer)
        if not len(tokens) or not len(answer) or total > context or len(found) == turns:
            break
        found.append(Turn(tokens, len(answer), answer))
        asked = ""
    return found


def _mooncake(path: Path, *, context: int, reply: int, limit: int | None, vocabulary: int) -> Trace:
    rows: list[tuple[float, int, int, list[int]]] = []
    failed = f"cannot read {path.name} as a Mooncake trace"
    with reading(path, failed, hint=_MOONCAKE_FORM):
        lines = read_lines(path)
    for place, value in lines:
        if limit is not None and len(rows) == limit:
            break
        with reading(path, f"{failed}: line {place}", hint=_MOONCAKE_FORM):
            row = an_object(value, "a request")
            length, hashes = int(row["input_length"]), [int(h) for h in row["hash_ids"]]
            if 0 < length <= context and len(hashes) * MOONCAKE_BLOCK >= length:
                output = min(reply, max(1, int(row["output_length"])))
                at = float(row["timestamp"]) / 1e3
                if not np.isfinite(at):
                    raise ValueError(f"a request at {at} seconds")
                rows.append((at, length, output, hashes))
    if not rows:
        raise SourceError(
            f"{path.name} holds no request of at most {context:,} tokens", file=str(path)
        )
    start = min(row[0] for row in rows)
    rows.sort(key=lambda row: row[0])

    def make(number: int) -> Conversation:
        seconds, length, output, hashes = rows[number]
        blocks = [_block(value, vocabulary) for value in hashes]
        tokens = np.concatenate(blocks)[:length]
        rng = np.random.Generator(np.random.PCG64([7, number]))
        recorded = rng.integers(0, vocabulary, output).astype(np.int32)
        return Conversation(number, (Turn(tokens, output, recorded),), seconds - start)

    note = (
        f"{len(rows)} requests of {path.name} with at most {context:,} tokens; lengths, arrivals and shared blocks are "
        "recorded, the tokens stand for their hashes"
    )
    return Trace("mooncake", False, note, len(rows), make)


def _block(value: int, vocabulary: int) -> Tokens:
    rng = np.random.Generator(np.random.PCG64([11, abs(value)]))
    return rng.integers(0, vocabulary, MOONCAKE_BLOCK).astype(np.int32)
