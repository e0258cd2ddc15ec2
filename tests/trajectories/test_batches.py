"""Batches written while they are recorded, the time of stages, and random numbers of a captured step."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from hybridstate.errors import UsageError
from hybridstate.quant.rounding import uniform
from hybridstate.trajectories.batches import BatchWriter
from hybridstate.trajectories.stages import Stages, fact, overlapped, stage, timed

ARRAYS = {
    "anchors.0": (torch.float32, (2, 3, 4, 5, 6)),
    "anchors.1": (torch.float32, (2, 3, 4, 5, 6)),
    "weights.0": (torch.float64, (2, 3, 4)),
    "generated": (torch.int32, (3, 7)),
}


def states(place: int) -> list[torch.Tensor]:
    return [torch.full((3, 4, 5, 6), 10.0 * place + layer) for layer in range(2)]


def test_a_batch_written_in_any_order_reads_as_one_file(tmp_path: Path) -> None:
    path = tmp_path / "batch-000.safetensors"
    rest = {
        "generated": torch.arange(21).reshape(3, 7),
        "weights.0": torch.rand(2, 3, 4, dtype=torch.float64),
    }
    with BatchWriter(path, ARRAYS) as writer:
        for place in (1, 0):
            kept = states(place)
            writer.anchor(place, kept)
            kept[0].zero_()  # states change once they are handed over
        assert not path.exists()
        writer.finish(rest)
    found = load_file(path)
    assert path.stat().st_size == writer.nbytes
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    for place in range(2):
        for layer, expected in enumerate(states(place)):
            assert torch.equal(found[f"anchors.{layer}"][place], expected)
    assert torch.equal(found["generated"], rest["generated"].to(torch.int32))
    assert torch.equal(found["weights.0"], rest["weights.0"])


def test_a_batch_that_was_not_finished_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        with BatchWriter(tmp_path / "b", ARRAYS) as writer:
            writer.anchor(0, states(0))
            raise ValueError("stopped")

    with pytest.raises(ValueError, match="stopped"):
        interrupted()
    assert not list(tmp_path.iterdir())


def test_too_little_space_is_refused_before_anything_is_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(UsageError, match="has 1,000 bytes left"):
        BatchWriter(tmp_path / "b", ARRAYS)
    assert not list(tmp_path.iterdir())


def test_stages_add_up_and_an_inner_one_pauses_the_outer() -> None:
    now = iter(range(100))
    clock = Stages(lambda: float(next(now)))  # every look at the clock is a second
    with clock.stage("outer"):
        with clock.stage("inner"):
            pass
        with clock.stage("inner"):
            pass
    found = clock.to_json()
    assert found["stages_s"] == {"other": 2.0, "outer": 3.0, "inner": 2.0}
    assert found["wall_s"] == 7.0


def test_without_a_clock_stages_cost_nothing_and_facts_are_dropped() -> None:
    with stage("alone"):
        fact("kept", 1)
    with timed() as stages, stage("named"):
        fact("kept", 2)
        overlapped("write", 1.5)
    found = stages.to_json()
    assert found["kept"] == 2
    assert found["overlapped_s"] == {"write": 1.5}
    assert set(found["stages_s"]) == {"other", "named"}


@pytest.mark.parametrize("update", [-1024, 0, 1, 4096])
def test_a_captured_step_draws_the_same_random_numbers(update: int) -> None:
    rows = torch.tensor([3, 17])
    shape = torch.Size((2, 2, 4, 5))
    plain = uniform(shape, rows, (5, 1, update), rows.device)
    captured = uniform(shape, rows, (5, 1, torch.tensor(update)), rows.device)
    assert torch.equal(plain, captured)
    assert not torch.equal(plain, uniform(shape, rows, (5, 1, update + 1), rows.device))
