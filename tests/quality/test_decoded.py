"""Questions after thousands of updates: where answers lie, and what counts as one."""

from pathlib import Path

import numpy as np
import pytest
import torch

from hybridstate.quality.decoded import (
    DECODED,
    TaskScores,
    score_answers,
    task_accuracy,
    task_texts,
)
from hybridstate.quality.tasks import examination
from hybridstate.quant.arms import plain_arm
from hybridstate.quant.simulate import Simulation, simulate
from hybridstate.trajectories.model import load_model
from hybridstate.trajectories.protocol import protocol


@pytest.mark.parametrize("task", ["recall", "registers", "latest", "counts", "tracking"])
def test_every_fact_is_asked_once_after_the_filler(task: str) -> None:
    text, spans = examination(task, tokens=3000, rng=np.random.default_rng(1), filler_tokens=512)
    assert len(text) == 3000
    addresses = [text[:a].rpartition(b"?")[2] for a, _ in spans]
    assert len(set(addresses)) == len(addresses) > 5
    first = spans[0][0] - len(addresses[0]) - 1
    for address, (a, b) in zip(addresses, spans, strict=True):
        assert text[b : b + 1] == b";"
        if task in ("recall", "registers", "latest"):
            wrote = text.rfind(address + text[a:b] + b";", 0, first)
            assert 0 <= wrote <= first - 512
            assert text.find(address, wrote + 1, first) == -1  # the last write of that address
    with pytest.raises(ValueError, match="at least 64"):
        examination(task, tokens=100, rng=np.random.default_rng(1))


def test_an_answer_counts_when_all_its_tokens_are_the_likeliest() -> None:
    loaded = load_model("tiny-gdn")
    settings = protocol(
        "quick", input_tokens=256, new_tokens=768, windows=(0,), anchors=(2,), horizon=4
    )
    texts = task_texts(loaded, settings, per_task=2, seed=0)
    assert texts is not None
    assert texts.tasks == ("recall", "recall", "registers", "registers")
    assert texts.following.shape == (4, 768)
    arms = (plain_arm("fp32"), plain_arm("int4"))
    hit = np.ones((2, 4, 767), dtype=bool)
    a, b = texts.answers[0][3]
    hit[1, 0, b - 2] = False  # the position before the last byte of one answer
    nothing = np.zeros((2, 4, 767))
    found = Simulation(
        nothing, hit, nothing, hit, (767,), np.zeros((1, 2, 4)), (0, 0), (), arms, 64
    )
    scores = score_answers(found, texts)
    assert b - a == 3
    assert scores.correct[0].tolist() == [1, 1, 1, 1]
    assert scores.correct[1].tolist() == [1 - 1 / 32, 1, 1, 1]
    table = task_accuracy([scores, scores])
    row = {(r["format"], r["task"]): r for r in table["rows"]}["int4", "recall"]
    assert row["accuracy"] == pytest.approx(1 - 1 / 64)
    assert row["below_fp32"] == pytest.approx(1 / 64)
    assert table["questions"] == {"recall": 4 * 32, "registers": 4 * 8}
    assert table["synthetic"] is True


def test_the_embedded_model_answers_after_updates_and_int4_forgets() -> None:
    loaded = load_model("tiny-kda")
    settings = protocol(
        "quick", input_tokens=160, new_tokens=240, windows=(0,), anchors=(2,), horizon=4
    )
    assert task_texts(loaded, settings, per_task=1, seed=0) is None  # 32 pairs need more room
    texts, spans = examination("registers", tokens=360, rng=np.random.default_rng(0))
    ids = torch.tensor([loaded.encode(texts.decode())])
    found = simulate(
        loaded,
        (_prompt(ids[0, :160].numpy()),),
        ids[:, 160:],
        (plain_arm("fp32"), plain_arm("int4")),
        chunk=64,
        batch=2,
    )
    exact = [found.hit[:, 0, a - 161 : b - 161].all(1) for a, b in spans]
    assert np.mean(exact, axis=0)[0] > 0.8


def test_short_runs_and_unknown_tokenizers_have_no_questions(tiny_gdn: Path) -> None:
    small = protocol("quick", input_tokens=32, new_tokens=24, windows=(0,), anchors=(2,), horizon=4)
    assert task_texts(load_model(tiny_gdn), small, per_task=1, seed=0) is None
    assert DECODED == ("recall", "registers")
    assert TaskScores(("fp32",), (), np.empty((1, 0)), np.empty(0, dtype=np.int64), 1).filler == 1


def _prompt(tokens: np.ndarray):  # type: ignore[no-untyped-def,type-arg]
    from hybridstate.trajectories.prompts import Prompt

    return Prompt("task", "validate", 0, tokens, ())
