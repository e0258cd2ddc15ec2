"""Prompts are deterministic, of equal length, disjoint across splits; bad files are named by line."""

from pathlib import Path

import numpy as np
import pytest

from hybridstate.errors import SourceError, UsageError
from hybridstate.trajectories.prompts import (
    heldout_text,
    make_prompts,
    prefixes,
    read_texts,
    shipped_texts,
)
from hybridstate.trajectories.protocol import PROFILES, SPLITS, protocol


def encode(text: str) -> list[int]:
    return list(text.encode())


def encode_by_four(text: str) -> list[int]:
    """Four bytes per token, about what the tokenizers of released models reach."""
    return list(text.encode()[::4])


@pytest.mark.parametrize("tokenizer", [encode, encode_by_four])
def test_shipped_texts_fill_the_paper_profile_without_sharing_a_text(tokenizer) -> None:  # type: ignore[no-untyped-def]
    prompts = make_prompts(tokenizer, shipped_texts(), PROFILES["paper"], seed=0)
    assert len(prompts) == 36
    assert {(p.split, p.domain) for p in prompts} == {
        (s, d) for s in SPLITS for d in ("math", "code", "prose")
    }
    assert all(p.tokens.shape == (1024,) for p in prompts)
    sources = [source for p in prompts for source in p.sources]
    assert len(sources) == len(set(sources))
    assert len({p.digest for p in prompts}) == 36


def test_same_seed_gives_same_tokens_and_another_seed_others() -> None:
    first, again, other = (
        [p.digest for p in make_prompts(encode, shipped_texts(), PROFILES["quick"], seed=seed)]
        for seed in (3, 3, 4)
    )
    assert first == again
    assert first != other


def test_too_little_text_says_how_far_it_went(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"text": "' + "x" * 600 + '"}\n\n{"text": "' + "y" * 600 + '"}\n')
    texts = read_texts(path)
    assert list(texts) == ["given"]
    with pytest.raises(SourceError, match="texts for 2 of 3 prompts of 512 tokens"):
        make_prompts(encode, texts, PROFILES["quick"], seed=0)


@pytest.mark.parametrize(
    "line",
    [
        "[1]",
        "null",
        '{"id": "a"}',
        '{"text": ""}',
        '{"text": 3}',
        "{",
        '{"text": "\\ud800"}',
        "[" * 100_000,
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(SourceError, match=r"mine\.jsonl line 2"):
        read_texts(path)


def test_a_missing_or_empty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="cannot read prompts"):
        read_texts(tmp_path / "absent.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(SourceError, match="no prompts"):
        read_texts(tmp_path / "empty.jsonl")
    with pytest.raises(SourceError, match=r"cannot read prompts .*: Is a directory$"):
        read_texts(tmp_path)
    (tmp_path / "utf16.jsonl").write_bytes('{"text": "a"}'.encode("utf-16"))
    with pytest.raises(SourceError, match="byte 0 is not UTF-8 text"):
        read_texts(tmp_path / "utf16.jsonl")


def test_a_byte_order_mark_and_other_line_ends_inside_a_text_are_kept_apart(tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    path.write_bytes('\ufeff{"text": "one\u2028line"}\r\n{"text": "two"}\r\n'.encode())
    assert [text.text for text in read_texts(path)["given"]] == ["one\u2028line", "two"]


def test_prefixes_are_stretches_of_the_held_out_book() -> None:
    found = prefixes(encode, heldout_text(), count=8, tokens=4096)
    assert found.shape == (8, 4096)
    assert len({row.tobytes() for row in found}) == 8
    assert np.array_equal(found[0], encode(heldout_text())[:4096])
    with pytest.raises(SourceError, match="prefixes of 1000000 tokens"):
        prefixes(encode, heldout_text(), count=2, tokens=10**6)


def test_profiles_state_the_published_protocol_and_options_are_checked() -> None:
    paper = PROFILES["paper"]
    assert paper.positions() == (
        (0, 256),
        (0, 512),
        (0, 768),
        (2048, 2304),
        (2048, 2560),
        (2048, 2816),
    )
    assert protocol("quick", horizon=8, input_tokens=None).horizon == 8
    with pytest.raises(UsageError, match="no calibration profile"):
        protocol("slow")
    with pytest.raises(UsageError, match="the last anchor needs"):
        protocol("quick", horizon=1000)
    with pytest.raises(UsageError, match="prompts_per_split"):
        protocol("quick", prompts_per_split=0)
    with pytest.raises(UsageError, match="windows must not overlap"):
        protocol("quick", windows=(0, 48), horizon=8)
    with pytest.raises(UsageError, match="anchors count from 1"):
        protocol("quick", anchors=(0,))
