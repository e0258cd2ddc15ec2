"""Numbers of a recorded `bench quality` that pictures and tables share: paired differences, means over masks."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Result = Mapping[str, Any]
Group = tuple[str, str, int]
"""Suite, where the cached prefix ends, tokens of a prompt."""

ANSWERS: Final = 0.1
"""Where the dense arm's mean score is below it, scores cannot show a loss."""


class Estimate(NamedTuple):
    """A mean, and its standard error or SD; None where there is one sample."""

    mean: float
    spread: float | None


def groups(result: Result) -> list[Group]:
    """Groups of blocks in the order they ran, the model's own tasks first."""
    found = dict.fromkeys((r["suite"], r["boundary"], r["tokens"]) for r in result["summary"])
    return sorted(found, key=lambda group: group[0] != "own")


def rows(result: Result) -> dict[tuple[Group, str], Result]:
    """The summary's row of every group and arm."""
    return {((r["suite"], r["boundary"], r["tokens"]), r["arm"]): r for r in result["summary"]}


def cutoffs(result: Result) -> list[int]:
    """Every W_max of the arms, ascending."""
    return sorted({arm["w_max"] for arm in result["arms"] if arm["w_max"] is not None})


def masks(result: Result, w_max: int) -> list[str]:
    """The arms that keep as many units per layer as NR at `w_max`, drawn at random."""
    return [a["arm"] for a in result["arms"] if a["seed"] is not None and a["w_max"] == w_max]


def answers(result: Result, group: Group) -> bool:
    """Whether the dense arm answers enough of a group for scores to show a loss."""
    return float(rows(result)[group, "dense"]["accuracy"]) >= ANSWERS


def blocks_of(result: Result, group: Group) -> list[Result]:
    """One block per task."""
    return [b for b in result["blocks"] if (b["suite"], b["boundary"], b["tokens"]) == group]


def by_question(block: Result, arms: Sequence[str]) -> NDArray[np.float64]:
    """Scores `[questions]`, averaged over replays and `arms`."""
    samples = [
        [[float(x) for x in line.split()] for line in block["arms"][arm]["samples"]] for arm in arms
    ]
    scores: NDArray[np.float64] = np.array(samples, np.float64).mean((0, 1))
    return scores


def difference(
    result: Result, group: Group, arms: Sequence[str], against: Sequence[str] = ("dense",)
) -> Estimate:
    """Mean score of `arms` minus that of `against` on the same questions, tasks weighing alike.

    The standard error is over questions: variances of the tasks' means add, masks are held fixed.
    """
    return mean_difference(blocks_of(result, group), arms, against)


def mean_difference(
    blocks: Sequence[Result], arms: Sequence[str], against: Sequence[str]
) -> Estimate:
    """The same over some blocks."""
    found = [by_question(block, arms) - by_question(block, against) for block in blocks]
    mean = sum(float(d.mean()) for d in found) / len(found)
    if any(len(d) < 2 for d in found):
        return Estimate(mean, None)
    variance = sum(float(d.var(ddof=1)) / len(d) for d in found)
    return Estimate(mean, variance**0.5 / len(found))


def over_masks(result: Result, group: Group, w_max: int, metric: str) -> Estimate | None:
    """Mean and sample SD over the random masks of a column of the summary; None without masks."""
    found = rows(result)
    names = masks(result, w_max)
    if not names or any((group, name) not in found for name in names):
        return None
    values = np.array([found[group, name][metric] for name in names], np.float64)
    return Estimate(float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else None)
