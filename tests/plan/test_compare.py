"""Two plans side by side."""

from hybridstate.plan.compare import diff
from hybridstate.plan.store import seal
from tests.plan.sample import sample, sample_content
from tests.plan.test_store import OPTIONS


def test_equal_plans_differ_nowhere() -> None:
    found = diff(sample(1), sample(1))
    assert found.same
    assert found.fields == found.arrays == ()


def test_field_and_array_differences_are_named_with_their_place() -> None:
    content, arrays = sample_content(1, **OPTIONS)
    left = seal(content, arrays)
    content["horizons"]["epsilon"] = 1e-2
    content["provenance"]["notes"] = ["synthetic"]
    changed = arrays["layers.1.risk"].copy()
    changed[2, 5] += 1
    changed[3, 0] += 1
    right = seal(content, arrays | {"layers.1.risk": changed})
    found = diff(left, right)
    assert not found.same
    assert [(f.path, f.left, f.right) for f in found.fields] == [
        ("horizons.epsilon", 1e-3, 1e-2),
        ("provenance.notes", [], ["synthetic"]),
    ]
    (array,) = found.arrays
    assert (array.name, array.changed, array.first) == ("layers.1.risk", 2, (2, 5))
    assert found.to_json()["arrays"][0]["first"] == [2, 5]


def test_blocks_and_arrays_of_one_side_are_listed() -> None:
    content, arrays = sample_content(1, **OPTIONS)
    both = seal(content, arrays)
    for block in ("selection", "horizons", "accounting"):
        del content[block]
    kept = {name: a for name, a in arrays.items() if "key_order" in name or "risk" in name}
    found = diff(both, seal(content, kept))
    assert {f.path for f in found.fields} == {"selection", "horizons", "accounting"}
    assert {a.what for a in found.arrays} == {"only on the left"}
    assert len(found.arrays) == 9


def test_infinite_entries_compare_by_bits() -> None:
    content, arrays = sample_content(1, **OPTIONS)
    left = seal(content, arrays)
    horizon = arrays["layers.0.horizon"].copy()
    horizon[0] = 1e30  # was infinite
    found = diff(left, seal(content, arrays | {"layers.0.horizon": horizon}))
    assert found.arrays[0].changed == 1
    assert found.arrays[0].what.startswith("inf against")
