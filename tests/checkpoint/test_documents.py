"""JSON that users hand in: a byte order mark is accepted everywhere, and refusals are in plain words."""

import json
import re
from pathlib import Path

import pytest

from hybridstate import api
from hybridstate.checkpoint.documents import parse_json, read_lines, read_object, result_of
from hybridstate.plan.calibration import read_calibration
from hybridstate.plan.store import read_plan
from hybridstate.quality import ruler
from tests.plan.calibrated import write_calibration
from tests.tiny import write_checkpoint

MARK = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "not JSON: Expecting value: line 1"),
        (b"{", "not JSON: Expecting property name"),
        (b"\xff\xfe{\x00}\x00", "not JSON: byte 0 is not UTF-8 text"),
        (b'{"a": "\xe9"}', "not JSON: byte 7 is not UTF-8 text"),
        (b"[" * 100_000, "not JSON: nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON: Exceeds the limit"),
        (b'{"a": NaN}', "not JSON: NaN is no finite number"),
        (b'{"a": -Infinity}', "not JSON: -Infinity is no finite number"),
        (b'{"a": 1e999}', "not JSON: 1e999 is no finite number"),
        (b"[1]", "the document is a list, an object is expected"),
        (b"null", "the document is null, an object is expected"),
        (b"true", "the document is a truth value, an object is expected"),
        (b"3.5", "the document is a number, an object is expected"),
        (b'"x"', "the document is text, an object is expected"),
    ],
)
def test_what_is_no_object_is_told_in_plain_words(raw: bytes, why: str, tmp_path: Path) -> None:
    file = tmp_path / "given.json"
    file.write_bytes(raw)
    with pytest.raises((ValueError, TypeError), match=re.escape(why)) as failed:
        read_object(file)
    assert "sys." not in str(failed.value)


def test_what_the_system_refuses_is_told_without_its_number(tmp_path: Path) -> None:
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "x", "No such file or directory")):
        with pytest.raises(OSError, match=f"^{why}$"):
            read_object(path)


def test_results_and_lines(tmp_path: Path) -> None:
    assert result_of({"result": {"a": 1}}) == {"a": 1} == result_of({"a": 1})
    for document, why in (({"result": None}, "holds no result"), ({"result": []}, "is a list")):
        with pytest.raises(TypeError, match=why):
            result_of(document)
    file = tmp_path / "lines.jsonl"
    file.write_bytes(MARK + '{"a": "\u2028\x85"}\r\n\n  \n[2]'.encode())
    assert read_lines(file) == [(1, {"a": "\u2028\x85"}), (4, [2])]
    file.write_bytes(b"1\n{\n")
    with pytest.raises(ValueError, match=r"^line 2: not JSON: "):
        read_lines(file)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", "qwen3_5", value_heads=6, shards=3, tokenizer=True)


def marked(file: Path) -> Path:
    file.write_bytes(MARK + file.read_bytes())
    return file


def test_models_calibrations_and_plans_may_start_with_a_byte_order_mark(
    tmp_path: Path, model: Path
) -> None:
    """Editors on Windows write one; what is exported has none, since engines refuse it."""
    calibration = write_calibration(tmp_path / "cal", model)
    expected = read_calibration(calibration)
    marked(calibration / "calibration.json")
    assert read_calibration(calibration).digests == expected.digests
    config = json.loads((model / "config.json").read_bytes())
    marked(model / "config.json")
    api.export_plan(model, out=tmp_path / "out", w_max=64, calibration=calibration)
    written = (tmp_path / "out" / "config.json").read_bytes()
    assert not written.startswith(MARK)
    assert parse_json(written).keys() == {*config, "state_plan"}
    bundle = tmp_path / "out" / "state_plan"
    before = read_plan(bundle)
    marked(bundle / "plan.json")
    assert read_plan(bundle).digest == before.digest


def test_questions_may_start_with_a_byte_order_mark(tmp_path: Path) -> None:
    item = {"question": "Who?", "answers": [{"text": "I"}]}
    document = {"data": [{"paragraphs": [{"context": "It was I.", "qas": [item]}]}]}
    file = tmp_path / "questions.json"
    file.write_bytes(MARK + json.dumps(document).encode())
    material = ruler.Material.of("A sentence of some length here.", file)
    assert material.questions == ((0, "Who?", ("I",)),)
