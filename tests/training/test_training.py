"""Data, loop and yardstick of the training of the embedded models, at a size for one core."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from training import data, evaluate, ngram, release, train

STAGES = (data.Stage(4, 32, 0.5), data.Stage(4, 64, 0.5))


def noise() -> dict[str, data.Bytes]:
    rng = np.random.default_rng(0)
    return {name: rng.integers(0, 256, 5000).astype(np.uint8) for name in data.LANGUAGE_ODDS}


def test_batch_follows_from_seed_and_step_alone() -> None:
    batches = data.Batches(7, noise(), STAGES, 0.5)
    first, second = batches.batch(1, 5), batches.batch(1, 5)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    ids, codes, windows = first
    assert ids.shape == codes.shape == (4, 65)
    assert windows.min() >= 64
    assert windows.max() <= 128
    assert not np.array_equal(ids, batches.batch(1, 6)[0])


def test_task_share_and_codes() -> None:
    batches = data.Batches(1, noise(), (data.Stage(16, 128, 1.0),), 0.625)
    language = [(batches.batch(0, step)[1] == data.LANGUAGE).all(1).mean() for step in range(8)]
    assert np.mean(language) == pytest.approx(0.375, abs=0.02)


@pytest.mark.slow
def test_held_out_prose_is_in_no_corpus() -> None:
    text = data.held_out().tobytes()
    corpora = [c.tobytes() for c in data.corpora().values()]
    for start in range(1000, len(text) - 200, len(text) // 12):
        assert all(text[start : start + 120] not in corpus for corpus in corpora)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "optimiser"), [("gdn", "adamw"), ("kda", "muon")])
def test_training_lowers_the_loss_and_the_release_loads(
    kind: str, optimiser: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "curriculum", lambda tokens, scale: (data.Stage(4, 32, 1.0),))
    text = np.frombuffer(b"abcd" * 2000, np.uint8)
    monkeypatch.setattr(data, "corpora", lambda: dict.fromkeys(data.LANGUAGE_ODDS, text))
    recipe = train.Recipe(
        kind, optimiser, smoke=True, steps=14, seconds=600, workers=0, lr=1e-2, task_share=0.25
    )
    lines: list[str] = []
    run = train.train(recipe, torch.device("cpu"), None, lines.append)
    assert run.steps == 14
    assert run.log[-1]["language"] < 7.0  # 8 bits at the start
    assert any("stage" in line for line in lines)
    release.write_release(run.model, kind, tmp_path / "out", config=False)
    release.round_to_release(run.model, kind)
    copy = release.build(kind, smoke=True)
    release.load_released(copy, kind, tmp_path / "out" / "model.safetensors")
    for (name, a), (_, b) in zip(
        run.model.named_parameters(), copy.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name


def test_retention_counts_crossings() -> None:
    before = {"l.A_log": np.log([1.0, 1.0]), "l.dt_bias": np.array([-5.0, 0.0])}
    after = {"l.A_log": np.log([1.0, 1.0]), "l.dt_bias": np.array([0.0, 0.0])}
    table = evaluate.retention(before, after, "gdn")["64"]
    assert (table["initial"], table["trained"], table["crossed"]) == (0.5, 0.0, 0.5)


def test_ngram_is_witten_bell() -> None:
    rng = np.random.default_rng(0)
    train_text, text = (rng.integers(97, 100, n).astype(np.uint8) for n in (300, 60))
    grams = [Counter(bytes(train_text[i : i + n]) for i in range(301 - n)) for n in (1, 2, 3)]

    def probability(history: bytes, byte: int, order: int) -> float:
        if order == 0:
            return 1 / 256
        context = history[len(history) - order + 1 :]
        after = {g: c for g, c in grams[order - 1].items() if g[:-1] == context}
        lower = probability(history, byte, order - 1)
        if not after:
            return lower
        hits = after.get(context + bytes([byte]), 0)
        return (hits + len(after) * lower) / (sum(after.values()) + len(after))

    expected = [
        -np.log2(probability(bytes(text[max(0, i - 2) : i]), int(text[i]), min(3, i + 1)))
        for i in range(1, 59)
    ]
    found = ngram.bits_per_byte(train_text, text, order=3, window=59, count=1)
    assert found == pytest.approx(float(np.mean(expected)), rel=1e-9)
