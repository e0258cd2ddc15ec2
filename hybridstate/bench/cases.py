"""The requests of `bench restore`: generated questions and held-out prose, in batches of equal lengths."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from hybridstate.bench.room import check_room, check_samples
from hybridstate.defaults import RANDOM_MASK_SEEDS
from hybridstate.errors import UsageError
from hybridstate.quality import tasks
from hybridstate.quality.reuse import Cases, Text, batches
from hybridstate.trajectories.model import LoadedModel

FILLER_TOKENS: Final = 64
PROSE: Final = "prose"
PROSE_TARGET_TOKENS: Final = 64
DEFAULT_TASKS: Final = ("recall", "registers")
QUESTION_SEED: Final = 20_261_130


@dataclass(frozen=True, slots=True)
class Options:
    """What to run.

    Attributes:
        tasks: names from `quality.tasks.TASKS`.
        questions: per task, and prose prefixes as far as the text has room.
        tokens: bytes of a whole prompt (and of a prose prefix).
        seeds: random masks per cutoff, at most five.
        repeats: timed requests per arm, after `warmup` untimed ones.
        interventions: also remove state, KV or both without packing anything.
        rows: sequences that run at once.
    """

    tasks: tuple[str, ...] = DEFAULT_TASKS
    questions: int = 16
    tokens: int = 1024
    seeds: int = 5
    repeats: int = 5
    warmup: int = 1
    interventions: bool = False
    rows: int = 32

    def on(self, device: str, rows: int | None) -> "Options":
        """The same with a fitting number of rows where none is given."""
        return replace(self, rows=rows if rows is not None else 256 if device == "cuda" else 32)

    def check(self) -> None:
        """Refuse what cannot run.

        Raises:
            UsageError: naming the option.
        """
        unknown = [task for task in self.tasks if task not in tasks.TASKS]
        if unknown or not self.tasks:
            raise UsageError(
                f"unknown task {unknown[0]!r}" if unknown else "no task given",
                hint=f"choose from {', '.join(tasks.TASKS)}",
            )
        if not 0 <= self.seeds <= len(RANDOM_MASK_SEEDS):
            raise UsageError(f"--seeds takes 0 to {len(RANDOM_MASK_SEEDS)}, found {self.seeds}")
        for name, value, least in (
            ("questions", self.questions, 1),
            ("repeats", self.repeats, 1),
            ("warmup", self.warmup, 0),
            ("rows", self.rows, 1),
            ("tokens", self.tokens, 256),
        ):
            if value < least:
                raise UsageError(f"--{name} must be at least {least}, found {value}")
        check_samples("--repeats", self.repeats)
        check_room("--questions", self.questions, self.tokens * len(self.tasks), "their texts")


def make_cases(loaded: LoadedModel, options: Options, prose: str) -> list[Cases]:
    """Questions of every task and prose windows, in batches of equal lengths, at most `rows` long."""
    found: list[Cases] = []
    windows = list(prose_texts(prose, options))  # first: it refuses an absurd length
    for number, task in enumerate(options.tasks):
        rng = np.random.Generator(np.random.PCG64([QUESTION_SEED, number]))
        texts = []
        for _ in range(options.questions):
            question = tasks.make(task, tokens=options.tokens, rng=rng, filler_tokens=FILLER_TOKENS)
            suffix = question.filler + question.question
            texts.append(Text(*(p.decode() for p in (question.context, suffix, question.answer))))
        found += batches(loaded, task, texts)
    found += batches(loaded, PROSE, windows)
    return [
        batch.rows(range(start, min(start + options.rows, len(batch))))
        for batch in found
        for start in range(0, len(batch), options.rows)
    ]


def prose_texts(prose: str, options: Options) -> Iterator[Text]:
    """Windows spread evenly over a text: prefix, neutral filler, and what follows the prefix.

    They never overlap, so a short text gives fewer of them than there are questions: intervals and standard errors
    take cases as independent.

    Raises:
        UsageError: the text is too short for one window.
    """
    rng = np.random.Generator(np.random.PCG64([QUESTION_SEED, len(tasks.TASKS)]))
    text = "".join(c for c in prose if ord(c) < 128)  # one byte a character, so lengths are equal
    span = options.tokens + PROSE_TARGET_TOKENS
    if len(text) < span:
        raise UsageError(f"the held-out prose has {len(text)} bytes, {span} are needed")
    count = min(options.questions, len(text) // span)
    for start in np.linspace(0, len(text) - span, count).astype(int):
        window = text[start : start + span]
        filler = tasks.prose(rng, FILLER_TOKENS).decode()
        yield Text(window[: options.tokens], filler, window[options.tokens :])
