"""Questions of one task as token blocks of equal lengths: a cached prefix, an unseen suffix, how a reply is scored.

A prompt has exactly the asked number of tokens. Its last `suffix` tokens, neutral prose and the question, are what the
cache has not seen; everything to be remembered lies before. The two parts are tokenised apart, so that the end of a
cached prefix is a token boundary. Prompts are plain text: no chat template.
"""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from hybridstate.errors import UsageError
from hybridstate.quality import ruler, tasks
from hybridstate.trajectories.model import LoadedModel

SEED: Final = 20_261_130
FILLER_TOKENS: Final = 64
"""Least tokens of neutral prose between cached prefix and question."""


@dataclass(frozen=True, slots=True)
class Block:
    """N questions of one task and length: what one flush of the cache serves.

    Attributes:
        task: name.
        source: where its text is from.
        tokens: of a whole prompt.
        context: int64 `[N, n_p]`, the cached prefix.
        suffix: int64 `[N, T]`.
        references: per question.
        rule: of `ruler.score`, or `exact`: the reply begins with the reference.
        budget: tokens generated.
        chance: accuracy of guessing, None where it is not defined.
    """

    task: str
    source: str
    tokens: int
    context: torch.Tensor
    suffix: torch.Tensor
    references: tuple[tuple[str, ...], ...]
    rule: str
    budget: int
    chance: float | None = None

    @property
    def questions(self) -> int:
        """N."""
        return len(self.context)

    @property
    def prefix(self) -> int:
        """n_p."""
        return int(self.context.shape[1])

    def at_the_end(self) -> "Block":
        """The same prompts cached up to their last token: what a repeated prompt finds (a match leaves one to run)."""
        context = torch.cat([self.context, self.suffix[:, :-1]], 1)
        return replace(self, context=context, suffix=self.suffix[:, -1:])

    def first(self, questions: int) -> "Block":
        """Its first questions."""
        part = slice(0, questions)
        return replace(
            self,
            context=self.context[part],
            suffix=self.suffix[part],
            references=self.references[part],
        )

    def score(self, question: int, reply: str) -> float:
        """Of one reply, between 0 and 1."""
        references = self.references[question]
        if self.rule == "exact":
            return float(reply.startswith(references[0]))
        return ruler.score(reply, references, "part" if self.rule == "part" else "all")


def own_block(loaded: LoadedModel, task: str, *, tokens: int, questions: int) -> Block:
    """A task of `quality.tasks`, which the embedded models were trained on.

    Raises:
        UsageError: too few tokens, or a tokenizer that gives prompts of several lengths.
    """
    rng = np.random.Generator(np.random.PCG64([SEED, tokens, tasks.TASKS.index(task)]))
    made = []
    for _ in range(questions):
        try:
            made.append(tasks.make(task, tokens=tokens, rng=rng, filler_tokens=FILLER_TOKENS))
        except ValueError as error:
            raise UsageError(str(error)) from error
    contexts = [loaded.encode(q.context.decode()) for q in made]
    suffixes = [loaded.encode((q.filler + q.question).decode()) for q in made]
    answers = [q.answer.decode() for q in made]
    size, tail = min(map(len, contexts)), min(map(len, suffixes))
    # other tokenizers give lengths that differ a little: the oldest tokens of a part go
    return Block(
        task,
        "generated (the embedded models' own task)",
        size + tail,
        torch.tensor([c[-size:] for c in contexts]),
        torch.tensor([s[-tail:] for s in suffixes]),
        tuple((a,) for a in answers),
        "exact",
        max(len(loaded.encode(a)) for a in answers),
        tasks.CHANCE[task],
    )


def ruler_block(
    loaded: LoadedModel, task: str, material: ruler.Material, *, tokens: int, questions: int
) -> Block:
    """A RULER task: haystacks as long as fit, neutral prose in front up to the exact length.

    Raises:
        UsageError: too few tokens for the task.
    """
    drafts = [
        ruler.draft(
            task,
            material,
            np.random.Generator(np.random.PCG64([SEED, tokens, ruler.TASKS.index(task), number])),
        )
        for number in range(questions)
    ]
    asked = [loaded.encode(d.question) for d in drafts]
    tail = max(map(len, asked)) + FILLER_TOKENS
    room = tokens - tail
    rng = np.random.Generator(np.random.PCG64([SEED, tokens, len(ruler.TASKS)]))
    contexts, suffixes = [], []
    units = 0
    for draft, question in zip(drafts, asked, strict=True):
        units, ids = _fitted(loaded, draft, room, units, task, tokens)
        contexts.append(_padded(loaded, ids, room, rng))
        suffixes.append(_padded(loaded, question, tail, rng))
    return Block(
        task,
        ruler.SOURCE[task],
        tokens,
        torch.tensor(contexts),
        torch.tensor(suffixes),
        tuple(d.answers for d in drafts),
        drafts[0].rule,
        ruler.budget(task),
    )


def _fitted(
    loaded: LoadedModel, draft: ruler.Draft, room: int, guess: int, task: str, tokens: int
) -> tuple[int, list[int]]:
    """The most haystack whose context fits into `room` tokens; `guess` is the last instance's size."""

    def ids(units: int) -> list[int]:
        return loaded.encode(draft.context(units))

    smallest = ids(1)
    if len(smallest) > room:
        raise UsageError(
            f"{task}: {tokens} tokens leave {room} for the context, {len(smallest)} are needed",
            hint="ask for longer prompts with --tokens, or leave the task out",
        )
    low, found = 1, smallest
    high = guess + max(2, guess // 16) if guess else 2
    while high <= draft.largest:
        tried = ids(high)
        if len(tried) > room:
            break
        low, found, high = high, tried, high * 2
    high = min(high, draft.largest + 1)
    if guess and low < guess < high:
        tried = ids(guess)
        if len(tried) <= room:
            low, found = guess, tried
        else:
            high = guess
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        tried = ids(middle)
        if len(tried) <= room:
            low, found = middle, tried
        else:
            high = middle
    return low, found


def _padded(
    loaded: LoadedModel, ids: list[int], length: int, rng: np.random.Generator
) -> list[int]:
    """Neutral prose in front of `ids`, exactly `length` tokens in all."""
    missing = length - len(ids)
    front: list[int] = []
    size = 8 * missing + 64  # bytes, more than enough for any tokenizer
    while missing and len(front) < missing:
        front = loaded.encode(tasks.prose(rng, size).decode())
        size *= 2
    return front[len(front) - missing :] + ids if missing else ids
