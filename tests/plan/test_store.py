"""Bundles on disk: byte-equal, atomic, and every damage is named in one line."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from hybridstate.errors import HybridStateError, PlanMismatch, SourceError, UsageError
from hybridstate.plan.store import content_digest, read_plan, seal, write_plan
from tests.plan.sample import sample, sample_content

OPTIONS: dict[str, Any] = {
    "key_heads": 2,
    "bundle": 2,
    "key_dim": 8,
    "value_dim": 12,
    "layers": 3,
    "unit": "head",
    "dasc": True,
    "damp": True,
    "k_hi": 4,
    "exported": True,
}


@given(
    seed=st.integers(0, 2**32),
    key_heads=st.integers(1, 4),
    bundle=st.integers(1, 3),
    key_dim=st.integers(4, 9),
    value_dim=st.integers(1, 7),
    layers=st.integers(1, 4),
    unit=st.sampled_from(["head", "channel"]),
    parts=st.sampled_from([(True, True), (True, False), (False, True)]),
)
def test_bundle_round_trips(
    tmp_path_factory: pytest.TempPathFactory, parts: tuple[bool, bool], **options: Any
) -> None:
    plan = sample(**options, dasc=parts[0], damp=parts[1])
    folder = write_plan(plan, tmp_path_factory.mktemp("plan") / "bundle")
    again = read_plan(folder)
    assert again.document == plan.document
    assert again.digest == content_digest(again) == plan.digest
    assert again.arrays.keys() == plan.arrays.keys()
    for name, array in plan.arrays.items():
        assert again.arrays[name].tobytes() == array.tobytes(), name
        assert again.arrays[name].dtype == array.dtype, name
    assert sorted(p.name for p in folder.iterdir()) == ["plan.json", "plan.safetensors"]


def test_two_processes_write_the_same_bytes(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tests.plan.sample import sample\n"
        "from hybridstate.plan.store import write_plan\n"
        "write_plan(sample(7), Path(sys.argv[1])); assert 'torch' not in sys.modules"
    )
    for name in ("one", "two"):
        subprocess.run([sys.executable, "-c", script, str(tmp_path / name)], check=True)
    for file in ("plan.json", "plan.safetensors"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_digest_ignores_time_host_and_command_but_not_content() -> None:
    content, arrays = sample_content(0, **OPTIONS)
    plain = seal(content, arrays).digest
    content["provenance"] |= {"time": "now", "host": "here", "argv": ["hybridstate"]}
    assert seal(content, arrays).digest == plain
    content["provenance"]["commit"] = "abc"
    assert seal(content, arrays).digest != plain
    content["provenance"]["commit"] = None
    arrays["layers.0.risk"][0, 0] += 1
    assert seal(content, arrays).digest != plain


def test_non_empty_folder_is_refused_unless_forced(tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    write_plan(sample(0), folder)
    with pytest.raises(UsageError, match="not empty"):
        write_plan(sample(1), folder)
    assert read_plan(folder).digest == sample(0).digest
    write_plan(sample(1), folder, force=True)
    assert read_plan(folder).digest == sample(1).digest
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"]


def test_force_does_not_replace_a_strangers_folder(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match=r"holds no plan\.json"):
        write_plan(sample(), tmp_path, force=True)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def disk_full(plan: object) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hybridstate.plan.store.canonical", disk_full)
    with pytest.raises(UsageError, match="bundle: No space"):
        write_plan(sample(), tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


def test_missing_plan_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no plan\.json"):
        read_plan(tmp_path)


def test_plan_is_found_from_its_file_and_from_an_exported_checkpoint(tmp_path: Path) -> None:
    write_plan(sample(), tmp_path / "model" / "state_plan")
    assert read_plan(tmp_path / "model").digest == sample().digest
    assert read_plan(tmp_path / "model" / "state_plan" / "plan.json").digest == sample().digest


def test_exported_order_moves_unit_arrays_with_the_weights() -> None:
    plan = sample(unit="channel", bundle=1)
    order = plan.arrays["layers.0.key_order"]
    retained = plan.arrays["layers.0.retained"]
    moved = plan.unit_array(0, "retained", "exported")
    assert moved is not None
    for head in range(len(order)):
        assert (moved[head] == retained[head][order[head]]).all()
    assert plan.unit_array(0, "retained", "original") is retained
    exported = plan.key_order(0, "exported")
    assert exported is not None
    assert (exported == np.arange(8)).all()


# --- damage ------------------------------------------------------------------------------------


def _edit_json(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = json.loads((folder / "plan.json").read_text())
        edit(content)
        (folder / "plan.json").write_text(json.dumps(content))

    return damage


def _edit_arrays(edit: Callable[[dict[str, Any]], object], **save_options: Any) -> Any:
    def damage(folder: Path) -> None:
        arrays = {k: v.copy() for k, v in read_plan(folder).arrays.items()}
        edit(arrays)
        (folder / "plan.safetensors").write_bytes(save(arrays, **save_options))

    return damage


def _truncate(file: str, size: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / file).write_bytes((folder / file).read_bytes()[:size])

    return damage


DAMAGE: dict[str, tuple[Callable[[Path], None], int, str]] = {
    "no-arrays-file": (lambda f: (f / "plan.safetensors").unlink(), 3, "plan.safetensors"),
    "empty-json": (_truncate("plan.json", 0), 3, "JSON"),
    "half-json": (_truncate("plan.json", 700), 3, "JSON"),
    "json-list": (lambda f: (f / "plan.json").write_text("[]"), 3, "object"),
    "json-nan": (lambda f: (f / "plan.json").write_text('{"a": NaN}'), 3, "NaN"),
    "json-twice": (lambda f: (f / "plan.json").write_text('{"a": 1, "a": 1}'), 3, "twice"),
    "json-deep": (lambda f: (f / "plan.json").write_text("[" * 100_000), 3, "JSON"),
    "json-bytes": (lambda f: (f / "plan.json").write_bytes(b"\xff\xfe\x00"), 3, "JSON"),
    "other-schema": (_edit_json(lambda c: c.update(schema="else")), 3, "schema"),
    "newer": (_edit_json(lambda c: c.update(schema_version=3)), 6, "newer|reads up to 2"),
    "unknown-key": (_edit_json(lambda c: c["model"].update(extra=1)), 3, "model.extra"),
    "edited-field": (_edit_json(lambda c: c["model"].update(name="x")), 3, "digest"),
    "empty-arrays": (_truncate("plan.safetensors", 0), 3, "safetensors"),
    "half-header": (_truncate("plan.safetensors", 40), 3, "safetensors"),
    "half-arrays": (_truncate("plan.safetensors", 900), 3, "safetensors"),
    "metadata": (_edit_arrays(lambda a: None, metadata={"a": "b"}), 3, "metadata"),
    "array-gone": (_edit_arrays(lambda a: a.pop("layers.1.risk")), 3, "layers.1.risk"),
    "array-extra": (
        _edit_arrays(lambda a: a.update(more=np.zeros(2, np.float32))),
        3,
        "more",
    ),
    "array-shape": (
        _edit_arrays(lambda a: a.update({"layers.1.risk": np.zeros((2, 2), np.float32)})),
        3,
        "layers.1.risk",
    ),
    "array-dtype": (
        _edit_arrays(lambda a: a.update({"layers.0.risk": a["layers.0.risk"].astype("f8")})),
        3,
        "layers.0.risk",
    ),
    "tampered": (
        _edit_arrays(lambda a: a["layers.1.retained"].__setitem__(0, 0)),
        3,
        "layers.1.retained",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_bundle_gets_one_clear_line(tmp_path: Path, kind: str) -> None:
    damage, exit_code, named = DAMAGE[kind]
    folder = write_plan(sample(), tmp_path / "bundle")
    damage(folder)
    with pytest.raises(HybridStateError, match=named) as caught:
        read_plan(folder)
    assert caught.value.exit_code == exit_code
    assert "\n" not in caught.value.message
    assert str(tmp_path) in caught.value.message


@given(data=st.data())
def test_random_damage_never_escapes_as_a_bug(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = write_plan(sample(layers=1), tmp_path_factory.mktemp("fuzz") / "bundle")
    file = folder / data.draw(st.sampled_from(["plan.json", "plan.safetensors"]))
    raw = bytearray(file.read_bytes())
    start = data.draw(st.integers(0, len(raw) - 1))
    if data.draw(st.booleans()):
        raw[start] ^= data.draw(st.integers(1, 255))
    else:
        del raw[start : start + data.draw(st.integers(1, 64))]
    file.write_bytes(raw)
    failure: HybridStateError | None = None
    try:
        again = read_plan(folder)
    except HybridStateError as error:
        failure = error
    if failure is None:  # white space in the JSON may change; content may not
        assert again.digest == sample(layers=1).digest
    else:
        assert failure.exit_code in (3, 6)
        assert "\n" not in failure.message
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("name", "edit", "problem"),
    [
        ("layers.0.key_order", lambda a: a.__setitem__((1, 0), a[1, 1]), "not a permutation"),
        ("layers.0.key_order", lambda a: a.__setitem__(0, a[0][::-1].copy()), "ascend"),
        ("layers.0.key_order", lambda a: a.__setitem__(1, np.arange(8)), "differ"),
        ("layers.0.retained", lambda a: a.__setitem__(0, 0), "selection says"),
        ("layers.0.retained", lambda a: a.__setitem__(0, 2), "0 or 1"),
        ("layers.0.replay_window", lambda a: a.__setitem__(0, 4), "window"),
        ("layers.0.horizon", lambda a: a.__setitem__(0, np.nan), "NaN"),
        ("layers.0.risk", lambda a: a.__setitem__((0, 0), np.inf), "finite"),
    ],
)
def test_array_without_meaning_is_refused_when_sealed(
    name: str, edit: Callable[[Any], None], problem: str
) -> None:
    content, arrays = sample_content(3, **OPTIONS)
    edit(arrays[name])
    with pytest.raises(SourceError, match=problem) as caught:
        seal(content, arrays)
    assert name in caught.value.message


def test_counts_that_disagree_with_masks_are_refused() -> None:
    for path, problem in ((("selection", "w_replay"), "longest window"),):
        content, arrays = sample_content(3, **OPTIONS)
        content[path[0]][path[1]] += 1
        with pytest.raises(SourceError, match=problem):
            seal(content, arrays)
    content, arrays = sample_content(3, **OPTIONS)
    content["accounting"]["temporal_ragged_bytes"] += 4
    with pytest.raises(SourceError, match="temporal_ragged_bytes"):
        seal(content, arrays)
    content, arrays = sample_content(3, **OPTIONS)
    content["selection"]["layers"][1]["offset"] += 1
    with pytest.raises(SourceError, match="offset"):
        seal(content, arrays)


def test_newer_schema_names_both_versions(tmp_path: Path) -> None:
    folder = write_plan(sample(), tmp_path / "bundle")
    _edit_json(lambda c: c.update(schema_version=9, brand_new_block={}))(folder)
    with pytest.raises(PlanMismatch, match=r"version 9.*up to 2"):
        read_plan(folder)


def test_bundle_written_by_schema_version_1_still_reads() -> None:
    """A stored bundle, not a generated one: it fails when readers leave old plans behind."""
    plan = read_plan(Path(__file__).parents[1] / "data" / "plan-v1")
    assert plan.digest == "02152e5889effde2fc6640ccd3cca44ffabeffe5e9b9a3d2883886feb4a9991c"
    assert plan.document.schema_version == 1
    assert plan.document.selection is not None
    assert plan.document.precision is not None
    assert plan.document.calibration is not None
