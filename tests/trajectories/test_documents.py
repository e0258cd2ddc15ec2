"""Reading texts: three forms told apart by content, and one clear line for what is none of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from hybridstate.errors import SourceError
from hybridstate.trajectories.documents import plain_text, read_documents

SHAREGPT: list[dict[str, Any]] = [
    {
        "id": "a",
        "conversations": [
            {"from": "human", "value": "What is 2+2?"},
            {"from": "gpt", "value": "4."},
        ],
    },
    {"id": "b", "conversations": []},
    {"id": "c", "conversations": [{"from": "system", "value": "Be brief."}]},
]


def write(folder: Path, name: str, content: str | bytes) -> Path:
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def test_sharegpt_turns_become_blocks(tmp_path: Path) -> None:
    found = read_documents(write(tmp_path, "share.json", json.dumps(SHAREGPT, indent=2)))
    assert (found.name, found.format) == ("share.json", "json")
    assert [item.text for item in found.items] == [
        "User: What is 2+2?\n\nAssistant: 4.",
        "",
        "System: Be brief.",
    ]
    assert [item.index for item in found.items] == [0, 1, 2]


def test_messages_are_read_line_by_line(tmp_path: Path) -> None:
    lines = [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "one"}]}]},
        {"messages": [{"role": "assistant", "content": None}, {"role": "tool", "content": "7"}]},
        {"text": "alone\u2028still one line"},
    ]
    content = "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n"
    found = read_documents(write(tmp_path, "chats", content))
    assert found.format == "jsonl"
    assert [item.text for item in found.items] == [
        "User: Hi\n\nAssistant: Yes",
        "User: one",
        "Tool: 7",
        "alone\u2028still one line",
    ]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("book.txt", '{"text": "a novel may begin like this"}'),
        ("book", "[Illustration]\n\nIt was the best of times."),
        ("book.md", "[1] a note"),
        ("book", "{braces} begin it"),
    ],
)
def test_everything_else_is_plain_text(tmp_path: Path, name: str, content: str) -> None:
    found = read_documents(write(tmp_path, name, content))
    assert found.format == "text"
    assert found.items[0].text == content


def test_a_mark_at_the_start_and_broken_surrogates_do_no_harm(tmp_path: Path) -> None:
    found = read_documents(write(tmp_path, "a.jsonl", b'\xef\xbb\xbf{"text": "x \\ud800 y"}'))
    assert found.items[0].text == "x \ufffd y"
    assert found.items[0].text.encode()


@pytest.mark.parametrize(
    ("name", "content", "line", "what"),
    [
        ("a.jsonl", '{"text": "x"}\n\n{"text": 3}', 3, "no conversations, messages or text"),
        ("a.jsonl", '{"text": "x"}\n{"text": ', 2, "no JSON"),
        ("a.jsonl", "12", 1, "an object is expected"),
        ("a.jsonl", '{"messages": "hello"}', 1, "messages is no list"),
        ("a.jsonl", '{"messages": [{"content": "x"}]}', 1, r"messages\[0\] has no role"),
        ("a.jsonl", '{"messages": [{"role": "u", "content": 5}]}', 1, "no content that is text"),
        ("a.json", '[\n{"text": "x"},\n{"conversations": 7}]', 3, "conversations is no list"),
        ("a.json", '[\n{"text": "x"}\n{"text": "y"}]', 3, "comma is missing"),
        ("a.json", '[{"text": "x"}', 1, "does not end"),
        ("a.json", '[{"text": "x"}]\nmore', 2, "something follows"),
        ("a.json", '[{"text": "x"},\n\n{"text": nope}]', 3, "no JSON"),
        ("a", "[" + '{"text": ' * 100_000, 1, "no JSON: nested too deeply"),
        ("a.jsonl", '{"text": ' + "9" * 5000 + "}", 1, "no JSON: a number has too many digits"),
    ],
)
def test_malformed_input_gives_file_line_and_form(
    tmp_path: Path, name: str, content: str, line: int, what: str
) -> None:
    file = write(tmp_path, name, content)
    with pytest.raises(SourceError, match=what) as caught:
        read_documents(file)
    assert f"{file} line {line}:" in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < len(str(file)) + 200
    assert '"conversations"' in str(caught.value.hint)
    assert caught.value.context["line"] == line


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"\xff\xfe", "no UTF-8"),
        (b"", "no text"),
        (b"[]", "no text"),
        (b' \n{"text": " "}', "no text"),
    ],
)
def test_unreadable_and_empty_files_are_refused(tmp_path: Path, content: bytes, what: str) -> None:
    with pytest.raises(SourceError, match=what):
        read_documents(write(tmp_path, "a.json", content))
    with pytest.raises(SourceError, match="No such file"):
        read_documents(tmp_path / "absent.json")


def test_a_given_text_is_one_document() -> None:
    found = plain_text("a book", "It was")
    assert (found.format, len(found.items), len(found.digest)) == ("text", 1, 64)
