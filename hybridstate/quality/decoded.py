"""Task accuracy after thousands of requantised updates: facts, prose, then a question about every fact.

The text is teacher-forced: the prompt's part is prefilled, the rest is decoded token by token through the
stored state, so each fact has been through at least `filler` updates when it is asked. An answer counts when
every one of its bytes is the arm's most likely token.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from hybridstate.quality.divergence import standard_error
from hybridstate.quality.tasks import CHANCE, examination
from hybridstate.quant.simulate import Simulation
from hybridstate.trajectories.model import LoadedModel
from hybridstate.trajectories.prompts import Prompt
from hybridstate.trajectories.protocol import Protocol

DECODED: Final = ("recall", "registers")
FILLER: Final = 2048
"""Most bytes of prose between the last fact and the first question."""


@dataclass(frozen=True, slots=True)
class TaskTexts:
    """Texts of one draw, all of the protocol's prompt and generated length together.

    Attributes:
        tasks: of each text.
        prompts: its prefilled part.
        following: `[S, N + 1]` the tokens that are decoded.
        answers: per text, (start, stop) of every answer in `following`.
        filler: bytes of prose before the first question.
    """

    tasks: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    following: torch.Tensor
    answers: tuple[tuple[tuple[int, int], ...], ...]
    filler: int


@dataclass(frozen=True, slots=True, eq=False)
class TaskScores:
    """Share of exact answers: A arms, S texts.

    Attributes:
        tasks: of each text.
        correct: `[A, S]`.
        questions: `[S]`.
        filler: see `TaskTexts`.
    """

    formats: tuple[str, ...]
    tasks: tuple[str, ...]
    correct: NDArray[np.float64]
    questions: NDArray[np.int64]
    filler: int


def task_texts(
    loaded: LoadedModel, protocol: Protocol, *, per_task: int, seed: int
) -> TaskTexts | None:
    """`per_task` texts of each task; None where prompt and generated text are too short for them.

    For tokenizers of one token per byte; another one raises.

    Raises:
        ValueError: the tokenizer does not give one token per byte.
    """
    total, start = protocol.input_tokens + protocol.new_tokens, protocol.input_tokens
    tasks, prompts, following, answers = [], [], [], []
    for place, task in enumerate(DECODED):
        for number in range(per_task):
            found = _text(task, protocol, [seed, place, number])
            if found is None:
                return None
            text, spans = found
            ids = np.asarray(loaded.encode(text.decode("ascii")), dtype=np.int64)
            if len(ids) != total:
                raise ValueError(f"{len(ids)} tokens for {total} bytes of {task}")
            name = f"{task}-{number}"
            prompts.append(Prompt("task", "validate", number, ids[:start], (name,)))
            following.append(ids[start:])
            answers.append(tuple((a - start, b - start) for a, b in spans))
            tasks.append(task)
    return TaskTexts(
        tuple(tasks),
        tuple(prompts),
        torch.from_numpy(np.stack(following)),
        tuple(answers),
        _filler(protocol),
    )


def room_for_tasks(protocol: Protocol, *, seed: int) -> bool:
    """Whether prompt and generated text are long enough for the texts of `task_texts`."""
    places = enumerate(DECODED)
    return all(_text(task, protocol, [seed, place, 0]) is not None for place, task in places)


def _filler(protocol: Protocol) -> int:
    return min(FILLER, protocol.new_tokens // 2)


def _text(
    task: str, protocol: Protocol, seed: list[int]
) -> tuple[bytes, tuple[tuple[int, int], ...]] | None:
    """Text of a task and where its answers lie; None where they do not fit behind the prompt."""
    total = protocol.input_tokens + protocol.new_tokens
    rng = np.random.Generator(np.random.PCG64(seed))
    try:
        text, spans = examination(task, tokens=total, rng=rng, filler_tokens=_filler(protocol))
    except ValueError:
        return None
    return (text, spans) if spans[0][0] > protocol.input_tokens else None


def score_answers(simulation: Simulation, texts: TaskTexts) -> TaskScores:
    """Exact answers of a simulation of the texts."""
    correct = np.empty((len(simulation.arms), len(texts.tasks)))
    for row, spans in enumerate(texts.answers):
        # position n tells what follows token n, so token t is told at t - 1
        exact = [simulation.hit[:, row, a - 1 : b - 1].all(1) for a, b in spans]
        correct[:, row] = np.mean(exact, axis=0)
    return TaskScores(
        formats=tuple(arm.name for arm in simulation.arms),
        tasks=texts.tasks,
        correct=correct,
        questions=np.array([len(spans) for spans in texts.answers], dtype=np.int64),
        filler=texts.filler,
    )


def task_accuracy(draws: list[TaskScores]) -> dict[str, Any]:
    """Accuracy per format and task over the texts of all draws; errors are over texts."""
    first = draws[0]
    correct = np.concatenate([draw.correct for draw in draws], 1)
    tasks = np.array([task for draw in draws for task in draw.tasks])
    questions = np.concatenate([draw.questions for draw in draws])
    rows = []
    for place, name in enumerate(first.formats):
        for task in dict.fromkeys(first.tasks):
            chosen = tasks == task
            exact = correct[place, chosen]
            change = exact - correct[0, chosen]
            rows.append(
                {
                    "format": name,
                    "task": task,
                    "accuracy": float(exact.mean()),
                    "accuracy_error": standard_error(exact),
                    "below_fp32": float(-change.mean()),
                    "below_fp32_error": standard_error(change),
                }
            )
    return {
        "synthetic": True,
        "filler_updates": first.filler,
        "texts": {task: int((tasks == task).sum()) for task in dict.fromkeys(first.tasks)},
        "questions": {
            task: int(questions[tasks == task].sum()) for task in dict.fromkeys(first.tasks)
        },
        "chance": {task: CHANCE[task] for task in dict.fromkeys(first.tasks)},
        "rows": rows,
    }
