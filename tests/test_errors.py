"""Every error class has its own exit code and is drawn in the module docstring."""

import json
import math
from pathlib import Path

from hybridstate import errors
from hybridstate.errors import NumericError, SourceError


def test_each_class_has_its_documented_code() -> None:
    classes = errors.HybridStateError.__subclasses__()
    codes = {cls.__name__: cls.exit_code for cls in classes}
    assert sorted(codes.values()) == [2, 3, 4, 5, 6, 7]
    assert len({cls.code for cls in classes}) == len(classes)
    lines = (errors.__doc__ or "").splitlines()
    for name, code in codes.items():
        assert any(line.split()[1:3] == [name, str(code)] for line in lines if "──" in line), name


def test_error_carries_message_hint_and_facts() -> None:
    error = errors.SourceError("x is missing", hint="fetch it", file="x", found=1)
    assert str(error) == "x is missing"
    assert error.to_json() == {
        "code": "cannot-read-model",
        "message": "x is missing",
        "hint": "fetch it",
        "context": {"file": "x", "found": 1},
    }


def test_message_and_hint_stay_one_line_whatever_a_file_is_called() -> None:
    error = SourceError("no x\ny\x1b[31m", hint="try a\rb")
    assert error.message == str(error) == r"no x\ny\x1b[31m"
    assert error.hint == r"try a\rb"


def test_context_is_strict_json() -> None:
    found = NumericError("x", found=math.nan, index=[1, -math.inf], file=Path("a")).to_json()
    assert found["context"] == {"found": "nan", "index": [1, "-inf"], "file": "a"}
    json.dumps(found, allow_nan=False)
