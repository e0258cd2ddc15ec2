"""Every failure of the table: the right reason, a next step, nothing of a refused shard in the cache."""

import time

import pytest

from tests.hub.cases import HUB_CASES, SHARD, HubCase, prepare
from tests.hub.conftest import Reader
from tests.hub.standin import StandIn


@pytest.mark.parametrize("case", HUB_CASES, ids=lambda case: case.what)
def test_a_failure_is_what_the_table_says(hub: StandIn, read: Reader, case: HubCase) -> None:
    prepare(hub, case)
    started = time.monotonic()
    found = read(case.model, **dict(case.job))
    assert time.monotonic() - started < 20, "every request has a time limit"
    read(environment={"HF_TOKEN": None}, offline=True)
    if case.reason is None:
        assert found["ok"], found
        return
    assert (found["ok"], found["exit"]) == (False, 3)
    assert found["context"]["reason"] == case.reason
    assert found["hint"]
    assert "\n" not in found["message"]
    assert not list(read.cache.rglob(f"{SHARD}*"))
