"""Counts that cannot be held, or that a model has no positions for, end with one line before any work."""

import pytest
import torch
from typer.testing import CliRunner

from hybridstate.bench import room
from hybridstate.bench.room import check_room, check_samples
from hybridstate.bench.serving_setup import make_options
from hybridstate.cli.main import app
from hybridstate.errors import UsageError

MANY = "10000000000"
MORE = "1" + "0" * 30
QUALITY = [
    "bench",
    "quality",
    "tiny-kda",
    "--device",
    "cpu",
    "--tasks",
    "recall",
    "--format",
    "none",
]
QUALITY += ["--seeds", "0", "--tokens", "256"]
RESTORE = ["bench", "restore", "tiny-kda", "--device", "cpu", "--tokens", "256"]
UPDATE = ["bench", "update", "tiny-kda", "--device", "cpu"]
CODECS = ["bench", "codecs", "--device", "cpu"]
SERVE = ["bench", "serve", "tiny-kda", "--device", "cpu"]


@pytest.mark.parametrize("count", [MANY, MORE], ids=["many", "more"])
@pytest.mark.parametrize(
    "command",
    [
        [*QUALITY, "--questions"],
        [*QUALITY, "--questions", "2", "--replays"],
        [*QUALITY, "--questions", "2", "--repeats"],
        [*RESTORE, "--questions"],
        [*RESTORE, "--repeats"],
        [*UPDATE, "--batch"],
        [*UPDATE, "--batch", "1", "--samples"],
        [*CODECS, "--slots"],
        [*CODECS, "--samples"],
        ["bench", "exchange", "tiny-kda", "--device", "cpu", "--w-max", "16", "--repeats"],
        [*SERVE, "--limit"],
        ["bench", "simulate", "--limit"],
        ["calibrate", "tiny-kda", "--device", "cpu", "--tasks"],
        ["analyze", "tiny-kda", "--validate", "--intervention"],
    ],
    ids=lambda command: f"{' '.join(command[:2])} {command[-1]}",
)
def test_what_cannot_be_held_is_refused_before_the_model_is_loaded(
    command: list[str], count: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridstate.trajectories.model.load_model", None)
    done = CliRunner().invoke(app, [*command, count])
    assert done.exit_code == 2, done.output
    said = next(line for line in done.output.splitlines() if line.startswith("error: "))
    assert f"{command[-1]} {int(count):,}: " in said


def test_slots_and_states_are_counted_in_the_bytes_of_the_model() -> None:
    slots = CliRunner().invoke(app, [*QUALITY, "--questions", "2", "--slots", MANY])
    assert slots.exit_code == 2, slots.output
    assert "--slots 10,000,000,000: cached states of an arm take" in slots.output
    few = make_options(
        arms=None, w_max=None, ratios=None, limits=[1_000_000], clients=256, think=0.0, seeds=1,
        policy="lru", every=0, budget_scope="state",
    )  # fmt: skip
    assert max(few.limits) == 1_000_000


def test_more_rows_than_questions_take_no_more_slots() -> None:
    command = [*RESTORE, "--w-max", "16", "--tasks", "recall", "--questions", "2", "--seeds", "0"]
    done = CliRunner().invoke(app, [*command, "--repeats", "1", "--rows", MORE, "-q"])
    assert done.exit_code == 0, done.output


def test_the_largest_count_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "memory", lambda _: 1 << 30)
    device = torch.device("cpu")
    check_room("--slots", 1024, 1 << 20, "slots", device)
    with pytest.raises(
        UsageError, match=r"--slots 1,025: slots take 1\.0 GiB, the cpu has 1\.0"
    ) as found:
        check_room("--slots", 1025, 1 << 20, "slots", device)
    assert found.value.hint == "at most 1,024 could fit"
    check_samples("--samples", 1 << 25)
    with pytest.raises(UsageError, match="samples, which are all kept, take"):
        check_samples("--samples", (1 << 25) + 1)


def test_a_system_that_does_not_tell_its_memory_bounds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(name: str) -> int:
        raise ValueError(f"unrecognized configuration name {name}")

    for stand_in in (unknown, None):
        if stand_in is None:
            monkeypatch.delattr(room.os, "sysconf")
        else:
            monkeypatch.setattr(room.os, "sysconf", stand_in)
        check_samples("--seeds", 10**12)
