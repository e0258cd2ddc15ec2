"""What one run of `bench serve` cached is gone when the next run's slots come."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from hybridstate.bench.scheduler import Limits
from hybridstate.bench.serve import Bench, Subject
from hybridstate.bench.serving_setup import profile_of
from hybridstate.bench.traces import generated
from hybridstate.checkpoint import open_checkpoint
from hybridstate.runtime.admission import Admission
from hybridstate.runtime.serving import HeldKeys, LineKeys
from tests.bench.test_serve import SCALE, subject_of


@pytest.mark.parametrize("name", ["dense", "wr-16+int8", "damp+nr-16"])
def test_slots_and_keys_of_a_run_are_gone_before_the_next_run(
    name: str, tiny_kda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gigabytes beside an engine that stays: slots go with the run, keys in the nodes of its tree before the next."""
    subject = subject_of(tiny_kda)
    arms = {
        arm.name: subject.measured(arm)
        for arm in profile_of(open_checkpoint(str(tiny_kda))).arms((16,))
    }
    made, cut = Subject.store, LineKeys.cut
    slots: list[Any] = []
    keys: list[Any] = []

    def store(self: Subject, *given: Any) -> Any:
        assert all(reference() is None for reference in (*slots, *keys))
        found = made(self, *given)
        slots.extend(map(weakref.ref, (found, found.checkpoints)))
        return found

    def noted(self: LineKeys, start: int, end: int) -> HeldKeys:
        found = cut(self, start, end)
        keys.extend(weakref.ref(x) for pair in found.blocks.values() for x in pair)
        return found

    bench = Bench(subject, running=2, length=80, chunk=32)
    pools, _ = arms[name].pools(arms["dense"].live, 14, native=5)
    trace = generated("wildchat-shape", 3, scale=SCALE)
    monkeypatch.setattr(Subject, "store", store)
    monkeypatch.setattr(LineKeys, "cut", noted)
    gc.collect()
    gc.disable()
    try:
        for seed in range(2):
            bench.serve(arms[name], pools, trace, Limits(3, 2), Admission(shortest=4), seed)
            assert all(reference() is None for reference in slots)
    finally:
        gc.enable()
    assert len(slots) == 4
    assert keys
