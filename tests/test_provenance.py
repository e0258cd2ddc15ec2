"""Canonical JSON, digests, versions, and folders that appear whole or not at all."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridstate import __version__, provenance
from hybridstate.cli.bench_output import check_output
from hybridstate.errors import SourceError, UsageError
from hybridstate.provenance import (
    canonical_json,
    check_apart,
    check_output_folder,
    check_writable,
    environment,
    fresh_folder,
    readable_json,
    sha256_bytes,
    sha256_file,
    sha256_json,
    write_file,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@given(value=st.dictionaries(st.text(max_size=5), JSON, max_size=5))
def test_canonical_json_does_not_depend_on_key_order(value: dict[str, object]) -> None:
    reversed_keys = dict(reversed(value.items()))
    assert canonical_json(value) == canonical_json(reversed_keys)
    assert sha256_json(value) == sha256_bytes(canonical_json(reversed_keys))


def test_canonical_json_has_no_spaces_and_refuses_nan() -> None:
    assert canonical_json({"b": [1, 2.5], "a": "é"}) == '{"a":"é","b":[1,2.5]}'.encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"a": float("nan")})


def test_file_digest_is_that_of_its_bytes(tmp_path: Path) -> None:
    data = bytes(range(256)) * 5000
    (tmp_path / "x").write_bytes(data)
    assert sha256_file(tmp_path / "x") == sha256_bytes(data)
    with pytest.raises(SourceError, match="No such file"):
        sha256_file(tmp_path / "y")


def test_environment_names_versions_without_importing_them() -> None:
    code = (
        "import sys; from hybridstate.provenance import environment; e = environment(device='x');"
        "print(e['hybridstate'], e['device'], e['numpy'] is not None, 'fla_core' in e,"
        "[m for m in ('torch', 'numpy', 'transformers', 'triton') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [__version__, "x", "True", "True", "[]"]


def test_environment_is_made_of_fields() -> None:
    record = environment()
    assert record["commit"] is None or len(record["commit"]) == 40
    assert all(value is None or isinstance(value, str | bool) for value in record.values())


def test_new_folder_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "out"
    with fresh_folder(target) as partial:
        (partial / "x").write_text("1")
        assert not target.exists()
    assert (target / "x").read_text() == "1"
    assert [p.name for p in target.parent.iterdir()] == ["out"]


def test_failure_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with fresh_folder(tmp_path / "out") as partial:
            (partial / "x").write_text("1")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_failure_with_force_leaves_the_old_files(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("old")

    def fail() -> None:
        with fresh_folder(tmp_path, force=True) as partial:
            (partial / "x").write_text("new")
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert (tmp_path / "x").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_occupied_folder_is_refused_and_force_replaces_same_names_only(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "mine").write_text("keep")
    (target / "x").write_text("old")
    with pytest.raises(UsageError, match="is not empty"):
        check_output_folder(target)
    with fresh_folder(target, force=True) as partial:
        (partial / "x").write_text("new")
        (partial / "sub").mkdir()
        (partial / "sub" / "y").write_text("y")
    assert (target / "mine").read_text() == "keep"
    assert (target / "x").read_text() == "new"
    assert (target / "sub" / "y").read_text() == "y"


def test_force_replaces_a_folder_of_the_same_kind_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "old-part").write_text("")
    with pytest.raises(UsageError, match=r"holds no plan\.json"):
        check_output_folder(target, force=True, replaces=["plan.json"])
    (target / "plan.json").write_text("old")
    with fresh_folder(target, force=True, replaces=["plan.json"]) as partial:
        (partial / "plan.json").write_text("new")
    assert [p.name for p in target.iterdir()] == ["plan.json"]
    assert (target / "plan.json").read_text() == "new"


def test_empty_folder_is_used_and_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with fresh_folder(tmp_path / "empty") as partial:
        (partial / "x").write_text("1")
    assert (tmp_path / "empty" / "x").exists()
    with pytest.MonkeyPatch.context() as patch:
        (tmp_path / "here").mkdir()
        patch.chdir(tmp_path / "here")
        with fresh_folder(Path(".")) as partial:
            (partial / "x").write_text("1")
        assert Path("x").exists()
    with pytest.raises(UsageError, match="is a file"):
        check_output_folder(tmp_path / "empty" / "x")


def test_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    write_file(tmp_path / "sub" / "x", b"1")
    write_file(tmp_path / "sub" / "x", b"2")
    assert [p.name for p in (tmp_path / "sub").iterdir()] == ["x"]
    assert (tmp_path / "sub" / "x").read_bytes() == b"2"
    with pytest.raises(UsageError, match="cannot write"):
        write_file(tmp_path / "sub" / "x" / "y", b"3")


def test_commit_of_a_copy_without_git_comes_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRIDSTATE_COMMIT", "0" * 40)
    assert provenance._git(tmp_path) == {"commit": "0" * 40, "modified": None}
    (tmp_path / ".git").mkdir()
    assert provenance._git(tmp_path) == {"commit": "0" * 40, "modified": None}
    monkeypatch.delenv("HYBRIDSTATE_COMMIT")
    assert provenance._git(tmp_path) == {"commit": None, "modified": None}


def test_full_disk_is_a_usage_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="out: No space left"), fresh_folder(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_error_of_another_file_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), fresh_folder(tmp_path / "out"):
        (tmp_path / "input").read_bytes()
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, message in (
        ("file/below", "is a file"),
        ("dangling", "a link to nothing"),
        ("loop", "a link to nothing"),
        ("a" * 300, "too long"),
    ):
        with pytest.raises(UsageError, match=message):
            check_output_folder(tmp_path / name)


def test_folder_that_refuses_writing_is_found_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UsageError, match="refuses it"):
        check_output_folder(tmp_path / "out")


def test_folder_that_only_seems_writable_is_found_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write everywhere, and fails on a read-only file system or in /proc."""
    check_writable(tmp_path / "out.json")
    (tmp_path / "out.json").write_text("old")
    check_writable(tmp_path / "out.json")
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]

    def refused(self: Path, **_more: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "touch", refused)
    with pytest.raises(UsageError, match="out: Read-only file system"):
        check_output_folder(tmp_path / "out")
    with pytest.raises(UsageError, match=r"sub/out\.json: Read-only file system"):
        check_output(tmp_path / "sub" / "out.json", force=False)


@pytest.mark.parametrize("replaces", [(), ("mark",)])
def test_mount_point_is_filled_from_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaces: tuple[str, ...]
) -> None:
    """A sibling would lie on another disk, from which nothing can be renamed."""
    target = tmp_path / "volume"
    target.mkdir()
    (target / "mark").write_text("old")
    (target / "other").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda self: self == target)
    with fresh_folder(target, force=True, replaces=replaces) as folder:
        assert folder.parent == target
        (folder / "mark").write_text("new")
    assert (target / "mark").read_text() == "new"
    kept = {"mark"} if replaces else {"mark", "other"}
    assert {path.name for path in target.iterdir()} == kept


def test_link_to_a_folder_is_filled_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with fresh_folder(tmp_path / "link") as folder:
        (folder / "a").write_text("x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "a").read_text() == "x"


def test_remains_of_a_killed_run_are_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / f".out.partial-{os.getpid()}").mkdir()
    with fresh_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("x")
    assert (tmp_path / "out" / "a").exists()


def test_output_must_not_replace_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "out" / "model").mkdir(parents=True)
    for read in (tmp_path / "out", tmp_path / "out" / "model"):
        with pytest.raises(UsageError, match="would replace"):
            check_apart(tmp_path / "x" / ".." / "out", read)
    check_apart(tmp_path / "out", None, "tiny-kda", tmp_path)


def test_folder_that_another_process_filled_meanwhile_is_left_alone(tmp_path: Path) -> None:
    def second() -> None:
        with fresh_folder(tmp_path / "out") as folder:
            (folder / "a").write_text("second")
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "a").write_text("first")

    with pytest.raises(UsageError, match="by another process meanwhile"):
        second()
    assert (tmp_path / "out" / "a").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_readable_json_keeps_values_and_puts_numbers_on_one_line() -> None:
    value = {
        "samples": [1.5e-05, -2, 0.0, None, True],
        "rows": [[1, 2], [3.0, 4]],
        "names": ["a", "[\n1,\n2\n]"],
        "empty": [],
        "points": [{"x": [1]}, {"x": []}],
        "word": "größer",
    }
    text = readable_json(value).decode()
    assert json.loads(text) == value
    assert ' "samples": [1.5e-05, -2, 0.0, null, true],\n' in text
    assert ' "rows": [\n  [1, 2],\n  [3.0, 4]\n ],\n' in text
    assert '"x": [1]' in text
    assert "größer" in text
    assert text.endswith("}\n")
    with pytest.raises(ValueError, match="JSON"):
        readable_json([float("nan")])


@given(JSON)
def test_readable_json_is_the_value(value: object) -> None:
    assert json.loads(readable_json(value)) == value
