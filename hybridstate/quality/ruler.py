"""RULER's tasks, generated here: prompts in its templates, answers by its rules, nothing downloaded.

    niah_single_1 niah_multikey_2 niah_multikey_3 vt cwe fwe          as in RULER, which needs no text for them
    niah_single_2 niah_single_3 niah_multikey_1 niah_multivalue
    niah_multiquery                                                   on CC0 prose where RULER takes essays
    qa_1                                                              questions of a file in SQuAD's form (XQuAD)

RULER's second QA task needs HotpotQA and is left out. Words come from the same CC0 prose instead of a word list. The
templates and numbers are those of RULER (Hsieh et al., 2024; NVIDIA/RULER, Apache-2.0); differences: needles never lie
in the last stretch before the question, which the cache has not seen, and words, essays and documents are others.
"""

import lzma
import re
import string
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal

import numpy as np

from hybridstate.checkpoint.documents import an_object, parse_json, read_bytes
from hybridstate.errors import UNREADABLE, SourceError, UsageError

Rule = Literal["all", "part"]
Generator = np.random.Generator

OFFLINE: Final = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe")
ON_PROSE: Final = (
    *("niah_single_2", "niah_single_3", "niah_multikey_1"),
    *("niah_multivalue", "niah_multiquery"),
)
QA: Final = "qa_1"
TASKS: Final = (*OFFLINE, *ON_PROSE, QA)
BUDGETS: Final = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
"""Tokens generated at most, by the first part of a task's name (RULER's constants)."""
SOURCE: Final = {
    **dict.fromkeys(OFFLINE, "generated (RULER's construction)"),
    **dict.fromkeys(ON_PROSE, "CC0 prose instead of RULER's essays"),
    QA: "SQuAD-form file instead of SQuAD itself",
}
DEPTHS: Final = 40
"""Evenly spaced places at which a needle may stand."""

_NOISE: Final = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
)
_NEEDLE: Final = "One of the special magic {kind} for {key} is: {value}."
_CONTROL: Final = re.compile(r"[\x00-\x1f]")


@dataclass(frozen=True, slots=True)
class Kind:
    """One needle task: number of asked keys, values of each, needles in all, and what surrounds them."""

    haystack: Literal["noise", "prose", "needles"]
    keys: int = 1
    asked: int = 1
    values: int = 1
    words: bool = True
    """Keys are words; else UUIDs."""
    numbers: bool = True
    """Values are numbers; else UUIDs."""


NEEDLES: Final = {
    "niah_single_1": Kind("noise"),
    "niah_single_2": Kind("prose"),
    "niah_single_3": Kind("prose", numbers=False),
    "niah_multikey_1": Kind("prose", keys=4),
    "niah_multikey_2": Kind("needles"),
    "niah_multikey_3": Kind("needles", words=False, numbers=False),
    "niah_multivalue": Kind("prose", values=4),
    "niah_multiquery": Kind("prose", keys=4, asked=4),
}


@dataclass(frozen=True, slots=True)
class Draft:
    """One instance whose context can be made longer or shorter.

    Attributes:
        context: text with so many units of haystack, instruction in front.
        question: text after it, answer prefix included.
        answers: references.
        rule: `all` counts the share of references found, `part` whether any is.
        largest: units of haystack there are at most.
    """

    context: Callable[[int], str]
    question: str
    answers: tuple[str, ...]
    rule: Rule
    largest: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Material:
    """Texts that instances are made of.

    Attributes:
        sentences: of CC0 prose, in order.
        words: lower-case words of that prose, sorted.
        documents: paragraphs of the QA file; questions `(paragraph, question, answers)`.
    """

    sentences: tuple[str, ...]
    words: tuple[str, ...]
    documents: tuple[str, ...] = ()
    questions: tuple[tuple[int, str, tuple[str, ...]], ...] = ()

    @classmethod
    def of(cls, prose: str, qa: Path | None = None) -> "Material":
        """From a text and an optional file in SQuAD's form, plain or xz.

        Raises:
            SourceError: the file is not of that form.
        """
        flat = " ".join("".join(c if ord(c) < 128 else " " for c in prose).split())
        sentences = tuple(s for s in re.split(r"(?<=[.!?])\s+", flat) if len(s) > 20)
        words = tuple(sorted(set(re.findall(r"\b[a-z]{4,9}\b", flat))))
        if qa is None:
            return cls(sentences, words)
        documents, questions = _squad(qa)
        return cls(sentences, words, documents, questions)


def draft(task: str, material: Material, rng: Generator) -> Draft:
    """One instance of a task.

    Raises:
        UsageError: no such task, or a QA task without its file.
    """
    if task in NEEDLES:
        return _needles(NEEDLES[task], material, rng)
    if task == "vt":
        return _variables(rng)
    if task == "cwe":
        return _common_words(material, rng)
    if task == "fwe":
        return _frequent_words(rng)
    if task == QA:
        if not material.questions:
            raise UsageError(
                f"{QA} needs its questions", hint="give --qa FILE, a JSON file in SQuAD's form"
            )
        return _documents(material, rng)
    raise UsageError(f"unknown RULER task {task!r}", hint=f"choose from {', '.join(TASKS)}")


def budget(task: str) -> int:
    """Tokens generated at most."""
    return BUDGETS[re.split(r"_", task)[0]]


def score(reply: str, answers: Sequence[str], rule: Rule) -> float:
    """RULER's string match, in lower case: the share of references in the reply, or whether any is."""
    text = _CONTROL.sub("\n", reply).strip().lower()
    found = [float(answer.lower() in text) for answer in answers]
    return max(found) if rule == "part" else sum(found) / len(found)


# -- needles ----------------------------------------------------------------------------------------


def _value(rng: Generator, numbers: bool) -> str:
    return (
        str(rng.integers(1_000_000, 10_000_000)) if numbers else str(uuid.UUID(bytes=rng.bytes(16)))
    )


def _key(rng: Generator, material: Material, words: bool) -> str:
    if not words:
        return str(uuid.UUID(bytes=rng.bytes(16)))
    first, second = rng.choice(len(material.words), 2, replace=False)
    return f"{material.words[first]}-{material.words[second]}"


def _needles(kind: Kind, material: Material, rng: Generator) -> Draft:
    keys = [_key(rng, material, kind.words) for _ in range(kind.keys)]
    noun = "numbers" if kind.numbers else "uuids"
    values = {key: [_value(rng, kind.numbers) for _ in range(kind.values)] for key in keys}
    lines = [
        _NEEDLE.format(kind=noun, key=key, value=value) for key in keys for value in values[key]
    ]
    order = [lines[i] for i in rng.permutation(len(lines))]
    asked = keys[: kind.asked]
    answers = tuple(value for key in asked for value in values[key])
    places = np.sort(rng.choice(DEPTHS, len(order), replace=False)) / (DEPTHS - 1)
    start = int(rng.integers(len(material.sentences)))
    seed = int(rng.integers(1 << 31))

    def context(units: int) -> str:
        inner = np.random.Generator(np.random.PCG64(seed))
        if kind.haystack == "noise":
            hay = [_NOISE] * units
        elif kind.haystack == "prose":
            count = len(material.sentences)
            hay = [material.sentences[(start + i) % count] for i in range(units)]
        else:
            hay = [
                _NEEDLE.format(
                    kind=noun,
                    key=_key(inner, material, kind.words),
                    value=_value(inner, kind.numbers),
                )
                for _ in range(units)
            ]
        for place, line in zip(places[::-1], order[::-1], strict=True):
            hay.insert(round(place * units), line)
        joined = (" " if kind.haystack == "prose" else "\n").join(hay)
        return f"{_instruction(noun, len(answers))}\n{joined}"

    return Draft(context, _asking(noun, asked, len(answers)), answers, "all")


def _instruction(noun: str, answers: int) -> str:
    if answers == 1:
        one = noun[:-1]
        return (
            f"A special magic {one} is hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {one} afterwards."
        )
    return (
        f"Some special magic {noun} are hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {noun} afterwards."
    )


def _asking(noun: str, asked: Sequence[str], answers: int) -> str:
    query = asked[0] if len(asked) == 1 else ", ".join(asked[:-1]) + ", and " + asked[-1]
    if answers == 1:
        what = f"special magic {noun[:-1]} for {query} mentioned in the provided text"
        return f"\nWhat is the {what}? The {what} is"
    what = f"special magic {noun} for {query} mentioned in the provided text"
    return f"\nWhat are all the {what}? The {what} are"


# -- variables, words -------------------------------------------------------------------------------


def _chain(rng: Generator, hops: int = 4) -> tuple[str, list[str], list[str]]:
    """Value, variables and statements of one chain."""
    letters = np.array(list(string.ascii_uppercase))
    names: list[str] = []
    while len(names) < hops + 1:
        name = "".join(rng.choice(letters, 5))
        names += [] if name in names else [name]
    value = str(rng.integers(10_000, 100_000))
    lines = [f"VAR {names[0]} = {value}"]
    lines += [f"VAR {b} = VAR {a} " for a, b in pairwise(names)]
    return value, names, lines


def _traced(value: str, names: Sequence[str]) -> str:
    return (
        f"\nQuestion: Find all variables that are assigned the value {value} in the text above. "
        "Answer: According to the chain(s) of variable assignment in the text above, "
        f"{len(names)} variables are assigned the value {value}, they are:"
    )


def _variables(rng: Generator) -> Draft:
    task = (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    )
    shown, shown_names, shown_lines = _chain(rng)
    example = "\n".join([_NOISE, *shown_lines]) + _traced(shown, shown_names)
    example += " " + " ".join(shown_names) + "\n\n"
    value, names, lines = _chain(rng)
    places = np.sort(rng.random(len(lines)))

    def context(units: int) -> str:
        hay = [_NOISE] * units
        for place, line in zip(places[::-1], lines[::-1], strict=True):
            hay.insert(int(place * (units + 1)), line)
        return task + example + task + "\n".join(hay)

    return Draft(context, _traced(value, names), tuple(names), "all")


def _common_words(material: Material, rng: Generator) -> Draft:
    """Ten words often, the others seldom, in a numbered list after one short example of the same form.

    30 and 3 times as in RULER; in lists of fewer than 450 words 6 and 1 times, as RULER does below 4k tokens.
    """
    order = [material.words[i] for i in rng.permutation(len(material.words))]
    shown, rest = order[:20], order[20:]
    seed = int(rng.integers(1 << 31))
    task = (
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n"
    )
    question = (
        "\nQuestion: What are the 10 most common words in the above list? "
        "Answer: The top 10 words that appear most often in the list are:"
    )

    def listed(often: Sequence[str], seldom: Sequence[str], times: tuple[int, int]) -> str:
        words = [*(w for w in often for _ in range(times[0]))]
        words += [w for w in seldom for _ in range(times[1])]
        inner = np.random.Generator(np.random.PCG64(seed))
        return " ".join(f"{n}. {words[i]}" for n, i in enumerate(inner.permutation(len(words)), 1))

    def answered(often: Sequence[str]) -> str:
        return " " + " ".join(f"{n}. {word}" for n, word in enumerate(often, 1))

    common, others = rest[:10], rest[10:]
    example = task + listed(shown[:10], shown[10:20], (2, 1)) + question + answered(shown[:10])

    def context(units: int) -> str:
        times = (30, 3) if units >= 450 else (6, 1)
        seldom = others[: max(0, units - 10 * times[0]) // times[1]]
        return f"{example}\n\n{task}{listed(common, seldom, times)}"

    return Draft(context, question, tuple(common), "all", largest=3 * len(others))


def _frequent_words(rng: Generator, alpha: float = 2.0, vocabulary: int = 500) -> Draft:
    """Coded words drawn with zeta(2) odds; the most frequent is written as dots, the next three are asked."""
    letters = np.array(list(string.ascii_lowercase))
    words: list[str] = []
    while len(words) < vocabulary:
        word = "".join(rng.choice(letters, 6))
        words += [] if word in words else [word]
    words[0] = "..."
    odds = np.arange(1, vocabulary + 1, dtype=np.float64) ** -alpha
    seed = int(rng.integers(1 << 31))
    task = (
        "Read the following coded text and track the frequency of each coded word. Find the three "
        "most frequently appeared coded words. "
    )
    question = (
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
        "three most frequently appeared words in the above coded text? Answer: According to the "
        "coded text above, the three most frequently appeared words are:"
    )

    def context(units: int) -> str:
        # counts, not draws, so that the three asked words are the most frequent in every length
        counts = np.maximum((units * odds / odds.sum()).astype(np.int64), 0)
        drawn = np.repeat(np.arange(vocabulary), counts)
        inner = np.random.Generator(np.random.PCG64(seed))
        return task + " ".join(words[i] for i in inner.permutation(drawn))

    return Draft(context, question, tuple(words[1:4]), "all")


# -- documents ----------------------------------------------------------------------------------------


def _documents(material: Material, rng: Generator) -> Draft:
    paragraph, asked, answers = material.questions[int(rng.integers(len(material.questions)))]
    others = [i for i in rng.permutation(len(material.documents)) if i != paragraph]
    place = float(rng.random())
    task = (
        "Answer the question based on the given documents. Only give me the answer and do not "
        "output any other words."
    )

    def context(units: int) -> str:
        chosen = others[: max(0, units - 1)]
        chosen.insert(round(place * len(chosen)), paragraph)
        texts = [f"Document {n}:\n{material.documents[i]}" for n, i in enumerate(chosen, 1)]
        return f"{task}\n\nThe following are given documents.\n\n" + "\n\n".join(texts)

    question = f"\n\n{task}\n\nQuestion: {asked} Answer:"
    return Draft(context, question, answers, "part", largest=len(material.documents))


def _squad(
    path: Path,
) -> tuple[tuple[str, ...], tuple[tuple[int, str, tuple[str, ...]], ...]]:
    """Paragraphs and questions of a file in SQuAD's form."""
    try:
        raw = read_bytes(path)
        unpacked = lzma.decompress(raw) if path.suffix == ".xz" else raw
        document = an_object(parse_json(unpacked), "the document")
        documents: list[str] = []
        questions: list[tuple[int, str, tuple[str, ...]]] = []
        for article in document["data"]:
            for part in article["paragraphs"]:
                for item in part["qas"]:
                    answers = tuple(dict.fromkeys(str(a["text"]) for a in item["answers"]))
                    if answers:
                        questions.append((len(documents), str(item["question"]), answers))
                documents.append(str(part["context"]))
    except (OSError, lzma.LZMAError, *UNREADABLE) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise SourceError(
            f"cannot read questions from {path.name}: {reason}",
            hint="a JSON file in SQuAD's form, plain or .xz",
            file=str(path),
        ) from error
    if not questions:
        raise SourceError(f"{path.name} holds no question with an answer", file=str(path))
    return tuple(documents), tuple(questions)
