"""Options of `bench quality`."""

from dataclasses import dataclass
from typing import Final

from hybridstate.bench.room import check_room, check_samples
from hybridstate.defaults import RANDOM_MASK_SEEDS
from hybridstate.errors import UsageError
from hybridstate.quality import ruler, tasks
from hybridstate.quality.questions import SEED

BOUNDARIES: Final = ("prompt", "question")
OWN_TASKS: Final = tasks.TASKS


@dataclass(frozen=True, slots=True)
class Options:
    """What to run.

    Attributes:
        tasks: of `quality.tasks.TASKS` and `quality.ruler.TASKS`.
        tokens: lengths of prompts.
        questions: per task and length.
        replays: measured rounds.
        boundaries: ends of cached prefixes: `prompt` (one token before a repeated prompt's end) or `question` (before
            64 tokens of prose and the question); empty is `prompt`, and `question` as well for the models' own tasks.
        seeds: random masks per cutoff.
        chunk: prefill tokens between two writes of a formatted state.
        temperature, seed: of the replies; 0 is greedy.
        slots: cached states per arm, by default as many as questions.
        resident: refuse blocks whose cache was not resident.
        repeats: timed requests per arm, 0 for none.
        rows: sequences decoded at once.
        within: seconds after which no further block is begun.
    """

    tasks: tuple[str, ...]
    tokens: tuple[int, ...] = (4096,)
    questions: int = 30
    replays: int = 3
    boundaries: tuple[str, ...] = ()
    seeds: int = 5
    chunk: int = 512
    temperature: float = 0.0
    seed: int = SEED
    slots: int | None = None
    resident: bool = False
    repeats: int = 5
    rows: int | None = None
    within: float | None = None

    def check(self) -> None:
        """Refuse what cannot run.

        Raises:
            UsageError: naming the option.
        """
        known = (*OWN_TASKS, *ruler.TASKS)
        for option, given, allowed, suites in (
            ("--tasks", self.tasks, known, ("own", "ruler")),
            ("--boundary", self.boundaries, BOUNDARIES, ()),
        ):
            unknown = [name for name in given if name not in allowed]
            if unknown:
                raise UsageError(
                    f"{option} {unknown[0]!r:.40} is not known",
                    hint=f"choose from {', '.join((*suites, *allowed))}",
                )
        if not self.tasks or not self.tokens:
            raise UsageError("no task or no length given")
        if not 0 <= self.seeds <= len(RANDOM_MASK_SEEDS):
            raise UsageError(f"--seeds takes 0 to {len(RANDOM_MASK_SEEDS)}, found {self.seeds}")
        if not 0 <= self.temperature < 100:
            raise UsageError(f"--temperature takes 0 to 100, found {self.temperature}")
        for name, value, least in (
            ("questions", self.questions, 1),
            ("replays", self.replays, 1),
            ("chunk", self.chunk, 1),
            ("tokens", min(self.tokens), 256),
            ("slots", 1 if self.slots is None else self.slots, 1),
            ("rows", 1 if self.rows is None else self.rows, 1),
            ("repeats", self.repeats, 0),
        ):
            if value < least:
                raise UsageError(f"--{name} must be at least {least}, found {value}")
        check_samples("--repeats", self.repeats)
        check_room("--questions", self.questions, 8 * max(self.tokens), "prompts")
        check_room("--replays", self.replays, 8 * self.questions, "scores of all questions")
