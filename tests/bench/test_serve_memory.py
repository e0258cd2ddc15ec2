"""Compressed slots of one run of `bench serve`, and the keys that its cache kept, are gone when the next run's come."""

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
from tests.bench.test_serve import SCALE, subject_of


@pytest.mark.parametrize("name", ["wr-16+int8", "damp+nr-16"])
def test_slots_of_a_run_are_gone_before_the_next_run(
    name: str, tiny_kda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gigabytes beside an engine that stays; the parts of a prefix cache hold each other."""
    subject = subject_of(tiny_kda)
    arms = {
        arm.name: subject.measured(arm)
        for arm in profile_of(open_checkpoint(str(tiny_kda))).arms((16,))
    }
    made = Subject.store
    slots: list[Any] = []

    def store(self: Subject, *given: Any) -> Any:
        assert all(reference() is None for reference in slots)
        found = made(self, *given)
        slots.extend(map(weakref.ref, (found, found.checkpoints)))
        return found

    monkeypatch.setattr(Subject, "store", store)
    bench = Bench(subject, running=2, length=80, chunk=32)
    pools, _ = arms[name].pools(arms["dense"].live, 14, native=5)
    trace = generated("wildchat-shape", 3, scale=SCALE)
    gc.collect()
    gc.disable()
    try:
        for seed in range(2):
            bench.serve(arms[name], pools, trace, Limits(3, 2), Admission(shortest=4), seed)
    finally:
        gc.enable()
    assert len(slots) == 4
