"""Every task means what its docstring says, checked by an independent reader of the prompts."""

import re
from collections import Counter

import numpy as np
import pytest

from hybridstate.quality import tasks

LENGTHS = (1024, 5120, 6144)


def question(task: str, tokens: int, seed: int) -> tasks.Question:
    return tasks.make(task, tokens=tokens, rng=np.random.default_rng([seed, tokens]))


def solve(task: str, context: bytes) -> dict[bytes, bytes]:
    """Read the facts of a context from left to right and return the answer to every address."""
    known: dict[bytes, bytes] = {}
    if task in ("recall", "latest"):
        known = dict(re.findall(rb"([A-Z]{3}[:=])([a-z]{3});", context))
    elif task == "registers":
        known = dict(re.findall(rb"(@\d>)([a-p]);", context))
    elif task == "counts":
        counts = Counter(re.findall(rb"\+([A-Z]);", context))
        known = {b"#" + symbol + b":": b"%d" % n for symbol, n in counts.items()}
    else:
        for key, value in re.findall(rb"(&[A-Z]~)([a-pA-Z]);", context):
            known[key] = known[b"&" + value + b"~"] if value.isupper() else value
    return known


@pytest.mark.parametrize("task", tasks.TASKS)
@pytest.mark.parametrize("tokens", [192, *LENGTHS])
def test_prompt_has_the_asked_length_and_the_answer_follows_from_the_facts(
    task: str, tokens: int
) -> None:
    for seed in range(12):
        found = question(task, tokens, seed)
        assert len(found.prompt) == tokens
        assert found.question[:1] == b"?"
        assert solve(task, found.context)[found.question[1:]] == found.answer
        assert len(found.filler) == 64
        assert not re.search(rb"[^a-z .\n]", found.filler)


@pytest.mark.parametrize("task", tasks.TASKS)
def test_same_seed_gives_the_same_question(task: str) -> None:
    assert question(task, 1024, 3) == question(task, 1024, 3)
    assert question(task, 1024, 3) != question(task, 1024, 4)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_recall_holds_32_distinct_pairs_and_asks_each_as_often(tokens: int) -> None:
    places: list[int] = []
    for seed in range(200):
        found = question("recall", tokens, seed)
        pairs = re.findall(rb"([A-Z]{3}):([a-z]{3});", found.context)
        assert len(pairs) == len({key for key, _ in pairs}) == 32
        places.append([key for key, _ in pairs].index(found.question[1:4]))
    assert abs(float(np.mean(places)) - 15.5) < 2.5  # standard error 0.65
    assert len(set(places)) > 28


@pytest.mark.parametrize(("task", "writes"), [("registers", 150), ("latest", 48), ("tracking", 24)])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_deciding_overwrite_lies_256_tokens_back(task: str, writes: int, tokens: int) -> None:
    for seed in range(40):
        found = question(task, tokens, seed)
        address = found.question[1:]
        facts = [m.start() for m in re.finditer(re.escape(address), found.context)]
        assert len(re.findall(rb"[:=>~][a-zA-Z]{1,3};", found.context)) == writes
        assert len(facts) >= 2  # an older value was overwritten
        length = len(address) + len(found.answer) + 1
        assert len(found.context) + 64 - (facts[-1] + length) >= tasks.BACK


def test_chance_is_low() -> None:
    assert max(tasks.CHANCE.values()) <= 0.125
    for task in ("registers", "tracking", "counts"):
        answers = Counter(question(task, 1024, seed).answer for seed in range(320))
        assert max(answers.values()) / 320 <= tasks.CHANCE[task] + 0.06


@pytest.mark.parametrize("task", tasks.TASKS)
def test_document_marks_exactly_the_answers(task: str) -> None:
    for seed in range(6):
        text, mask = tasks.document(task, tokens=2048, rng=np.random.default_rng(seed))
        assert len(text) == len(mask) == 2048
        asked = 0
        passages = re.finditer(rb"\?([A-Z]{3}[:=]|@\d>|#[A-Z]:|&[A-Z]~)([a-z0-9]{1,3});", text)
        for match in passages:
            start, stop = match.span(2)
            asked += stop - start
            assert mask[start:stop].all()
            if task != "counts":  # counts begin anew in every passage
                before = text[: match.start()]
                assert solve(task, before)[match[1]] == match[2]
        assert asked <= mask.sum() <= asked + 3  # a question may be cut at the end
        assert asked > 0


def test_prose_of_the_caller_fills_the_context() -> None:
    def dots(rng: np.random.Generator, length: int) -> bytes:
        return b"." * length

    found = tasks.make("recall", tokens=1024, rng=np.random.default_rng(0), fill=dots)
    assert len(found.prompt) == 1024
    assert set(re.sub(rb"[A-Z]{3}:[a-z]{3};", b"", found.context)) == {ord(".")}


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="unknown task 'sums'"):
        question("sums", 1024, 0)
    with pytest.raises(ValueError, match="at least 64"):
        question("recall", 120, 0)
