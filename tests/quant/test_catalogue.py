"""Names of arms: what each means, groups, refusals."""

from pathlib import Path

import pytest

from hybridstate.checkpoint import open_checkpoint
from hybridstate.errors import UsageError
from hybridstate.quant.catalogue import DEFAULT, GROUPS, parse, parse_list


def test_every_name_of_every_group_parses_to_itself() -> None:
    for members in GROUPS.values():
        for name in members:
            assert parse(name).name == name


def test_parts_of_a_name() -> None:
    arm = parse("damp-int4-k32-energy-per-head-every-8+reorder")
    assert (arm.low.name, arm.k_hi, arm.selector, arm.shared) == ("int4", 32, "energy", False)
    assert (arm.every, arm.reorder, arm.feedback) == (8, True, None)
    assert parse("damp").k_hi is None
    assert parse("damp-k0").k_hi == 0
    assert parse("int8-every-4").every == 4
    assert parse("int8-feedback-int4").feedback == "int4"
    assert parse("int8-step").selector is None
    assert parse("int4+reorder").reorder


@pytest.mark.parametrize(
    "name",
    [
        *("int3", "damp-int3", "fp32+reorder", "int8-every-0", "damp-every-0", "damp-k", "", "SR"),
        *("damp-k" + "9" * 5000, "int8-every-" + "9" * 5000, "damp-k\N{ARABIC-INDIC DIGIT THREE}"),
    ],
    ids=lambda name: name[:20],
)
def test_names_that_mean_nothing_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="no storage format"):
        parse(name)


def test_lists_start_with_fp32_and_name_each_arm_once() -> None:
    assert tuple(arm.name for arm in parse_list(None)) == DEFAULT
    assert tuple(arm.name for arm in parse_list("default")) == DEFAULT
    assert [arm.name for arm in parse_list("damp, int8-step,damp")] == ["fp32", "damp", "int8-step"]
    everything = [arm.name for arm in parse_list("all")]
    assert len(everything) == len(set(everything))
    assert set(everything) == {name for group in GROUPS.values() for name in group}
    with pytest.raises(UsageError, match="no storage format given"):
        parse_list(" , ")


def test_more_channels_than_a_head_has_are_refused(tiny_gdn: Path) -> None:
    with pytest.raises(UsageError, match="damp-k32 protects 32 channels, the state has 8"):
        parse_list("damp-k32", open_checkpoint(str(tiny_gdn), weights=True).spec)
