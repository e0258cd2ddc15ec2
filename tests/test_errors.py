"""Every error class has its own exit code and is drawn in the module docstring."""

from hybridstate import errors


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
