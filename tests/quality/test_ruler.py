"""RULER's tasks as generated here: answers are in the context, lengths are exact, scoring is RULER's."""

import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from hybridstate.errors import SourceError, UsageError
from hybridstate.quality import ruler
from hybridstate.quality.questions import FILLER_TOKENS, own_block, ruler_block
from hybridstate.trajectories.model import LoadedModel, load_model
from hybridstate.trajectories.prompts import heldout_text

SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": f"Paragraph {n} says that the harbour of town {n} was built in 18{n:02}.",
                    "qas": [
                        {
                            "question": f"When was the harbour of town {n} built?",
                            "answers": [{"text": f"18{n:02}"}, {"text": f"in 18{n:02}"}],
                        }
                    ],
                }
                for n in range(20)
            ]
        }
    ]
}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> ruler.Material:
    path = tmp_path_factory.mktemp("qa") / "squad.json.xz"
    path.write_bytes(lzma.compress(json.dumps(SQUAD).encode()))
    return ruler.Material.of(heldout_text(), path)


@pytest.fixture(scope="module")
def loaded(tiny_kda: Path) -> LoadedModel:
    return load_model(str(tiny_kda))


def generator(seed: int = 1) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def test_twelve_tasks_six_of_them_without_text() -> None:
    assert len(ruler.TASKS) == 12
    assert len(ruler.OFFLINE) == 6
    assert len(ruler.ON_PROSE) == 5
    assert set(ruler.SOURCE) == set(ruler.TASKS)


@pytest.mark.parametrize("task", ruler.TASKS)
def test_every_answer_is_in_the_context_and_none_in_the_question(
    task: str, material: ruler.Material
) -> None:
    for seed in range(4):
        made = ruler.draft(task, material, generator(seed))
        context = made.context(min(60, made.largest))
        assert all(answer in context for answer in made.answers)
        assert not any(answer in made.question for answer in made.answers)
        assert made.context(20) == made.context(20), "a draft is fixed"


@pytest.mark.parametrize("task", ruler.NEEDLES)
def test_needles_of_a_task(task: str, material: ruler.Material) -> None:
    kind = ruler.NEEDLES[task]
    made = ruler.draft(task, material, generator())
    lines = made.context(30).count("One of the special magic")
    extra = 30 if kind.haystack == "needles" else 0
    assert lines == kind.keys * kind.values + extra
    assert len(made.answers) == kind.asked * kind.values
    assert ("What are all" in made.question) == (len(made.answers) > 1)


def test_common_words_are_the_most_common_in_the_list(material: ruler.Material) -> None:
    made = ruler.draft("cwe", material, generator())
    for units in (90, 500):
        listed = made.context(units).rsplit("Memorize the ones", 1)[1].split()
        counts = {word: listed.count(word) for word in set(listed)}
        best = sorted(counts, key=lambda w: -counts[w])[:10]
        assert set(best) == set(made.answers)


def test_frequent_words_rank_two_to_four(material: ruler.Material) -> None:
    made = ruler.draft("fwe", material, generator())
    words = made.context(400).rsplit("coded words. ", 1)[1].split()
    counts = {word: words.count(word) for word in set(words)}
    assert sorted(counts, key=lambda w: -counts[w])[:4] == ["...", *made.answers]


def test_the_chain_names_every_variable_that_holds_the_value(material: ruler.Material) -> None:
    made = ruler.draft("vt", material, generator())
    held: dict[str, str] = {}
    for line in made.context(12).splitlines():
        if line.startswith("VAR "):
            name, source = line[4:].strip().split(" = ")
            held[name] = held[source[4:]] if source.startswith("VAR ") else source
    value = made.question.split("the value ")[1].split()[0]
    assert {name for name, found in held.items() if found == value} == set(made.answers)


def test_scoring() -> None:
    assert ruler.score(" 12, 34 and 56", ("12", "34", "78"), "all") == pytest.approx(2 / 3)
    assert ruler.score("the Panthers", ("panthers", "bears"), "part") == 1.0
    assert ruler.score("a\x00b", ("ab",), "all") == 0.0
    assert ruler.score("nothing", ("x",), "part") == 0.0


@pytest.mark.parametrize("task", ["niah_single_1", "niah_multiquery", "fwe", "qa_1"])
def test_blocks_have_exact_lengths_and_keep_the_answers_in_the_prefix(
    task: str, material: ruler.Material, loaded: LoadedModel
) -> None:
    block = ruler_block(loaded, task, material, tokens=1400, questions=4)
    assert block.context.shape[1] + block.suffix.shape[1] == 1400
    assert loaded.tokenizer is not None
    for row in range(4):
        text = loaded.tokenizer.decode(block.context[row].tolist())
        found = [answer in text for answer in block.references[row]]
        assert any(found) if block.rule == "part" else all(found)
        assert block.score(row, ", ".join(block.references[row])) == 1.0
    again = ruler_block(loaded, task, material, tokens=1400, questions=4)
    assert again.context.equal(block.context)
    assert again.suffix.equal(block.suffix)


def test_the_end_of_the_prompt_leaves_one_token(loaded: LoadedModel) -> None:
    block = own_block(loaded, "recall", tokens=300, questions=3)
    end = block.at_the_end()
    assert block.suffix.shape[1] == FILLER_TOKENS + 5
    assert (end.prefix, end.suffix.shape[1], end.tokens) == (299, 1, 300)
    assert block.first(2).questions == 2
    assert block.score(0, block.references[0][0] + ";") == 1.0
    assert block.score(0, "?" + block.references[0][0]) == 0.0


def test_refusals(material: ruler.Material, loaded: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="are needed"):
        ruler_block(loaded, "cwe", material, tokens=600, questions=1)
    with pytest.raises(UsageError, match="unknown RULER task"):
        ruler.draft("qa_2", material, generator())
    with pytest.raises(UsageError, match="needs its questions"):
        ruler.draft("qa_1", ruler.Material.of("A sentence of some length here."), generator())
    for content in ("{}", '{"data": []}', "no json"):
        (tmp_path / "qa.json").write_text(content)
        with pytest.raises(SourceError):
            ruler.Material.of("Some text.", tmp_path / "qa.json")
