"""Several requests at once on a real model, too little room, broken states; and faults that this has to see."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridstate.runtime.admission import Admission, Pools
from hybridstate.runtime.tiers import CachedState, Tier
from hybridstate.trajectories.model import LoadedModel, load_model
from tests.runtime.cache_stress import Pending
from tests.runtime.cached_model import CachedModel
from tests.runtime.model_stress import LateStore, ModelStress

OPERATIONS = 600
"""On each model; `scripts/cache_stress.py` does 6,000 on each embedded one."""

POOLS = Pools(native=4, packed=2, watermark=1)


@pytest.fixture(scope="module", params=["qwen3_5", "kimi_linear"])
def loaded(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> LoadedModel:
    return load_model(str(tiny_checkpoint(request.param)))


def stress(loaded: LoadedModel, **options: Any) -> ModelStress:
    engine = CachedModel(loaded, POOLS, Admission(shortest=1), store=LateStore)
    return ModelStress(engine, 20, **options)


def test_every_reply_among_refused_and_broken_states_is_that_of_a_run_without_a_cache(
    loaded: LoadedModel,
) -> None:
    run = stress(loaded)
    seen, counters = run.run(OPERATIONS), run.cache.counters
    assert seen.replies > 25
    assert counters.skipped_nonfinite == seen.broken - seen.broken_known > 2
    assert counters.skipped_full > 0
    assert seen.while_moving > 2
    assert seen.overtaken > 0
    assert seen.stopped > 0
    assert counters.waits > 0
    assert counters.demotions > 0


def test_a_broken_state_that_is_not_refused_shows(loaded: LoadedModel) -> None:
    run = stress(loaded, breaking=0.5)

    class Blind:
        def finite(self, slot: int) -> bool:
            return True

        def __getattr__(self, name: str) -> Any:
            return getattr(run.store, name)

    run.cache.store = Blind()  # type: ignore[assignment]
    with pytest.raises(AssertionError, match="broken state"):
        run.run(OPERATIONS)


def test_a_demotion_committed_before_its_transfer_shows(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pending, "done", lambda self: True)
    with pytest.raises(AssertionError, match=r"went before the transfer|is not finite"):
        stress(loaded, breaking=0).run(OPERATIONS)


def test_a_state_evicted_under_its_reader_shows(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        CachedState, "eligible", property(lambda self: self.tier is not Tier.DEMOTING)
    )
    with pytest.raises(AssertionError, match=r"the reply to .* differs"):
        stress(loaded, breaking=0).run(OPERATIONS)
