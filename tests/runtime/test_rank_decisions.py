"""Ranks of a tensor-parallel engine: the real cache on two processes decides alike, reclamation by reclamation."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hybridstate.errors import NumericError
from hybridstate.runtime.admission import Admission, Pools
from hybridstate.runtime.exchange import agree
from hybridstate.runtime.prefix_cache import PrefixCache
from tests.runtime.cache_stress import Stress

OPERATIONS = 600
POOLS = {
    "two-tier": Pools(native=8, packed=6, watermark=2),
    "cost": Pools(native=8, packed=6, watermark=2, policy="cost"),
}


def fewest(done: int) -> int:
    """Transfers that have ended on all ranks: the minimum over them."""
    import torch.distributed as dist

    number = torch.tensor(done)
    dist.all_reduce(number, op=dist.ReduceOp.MIN)
    return int(number)


class Lagging(Stress):
    """A rank whose transfers end only when somebody waits, or at every fifth operation."""

    lags = False
    operations = 0

    def operate(self) -> None:
        self.operations += 1
        if self.lags and self.operations % 5 == 0 and self.store.pending:
            self.store.end(self.store.pending[-1])
        super().operate()

    def _count(self, name: str, action: Callable[[], object]) -> None:
        if not (self.lags and name == "transfer"):
            super()._count(name, action)


def stress(pools: Pools, agreed: Callable[[int], int], *, lags: bool) -> Stress:
    made = Lagging(11, pools, Admission(shortest=1))
    made.lags = lags
    made.cache = PrefixCache(pools, made.store, Admission(shortest=1), agreed)
    return made


def _serve(rank: int, folder: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", world_size=2, rank=rank)
    try:
        found = {
            "one by one": _run(rank, "two-tier", 1, lags=True),
            "batched": _run(rank, "cost", 16, lags=True),
            "another victim": _run(rank, "two-tier", 1, broken=True),
        }
        Path(folder, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    finally:
        dist.destroy_process_group()


def _run(rank: int, arm: str, batched: int, *, lags: bool = False, broken: bool = False) -> str:
    """Random operations on both ranks; rank 1 lags, or evicts another state once."""
    run = stress(POOLS[arm], fewest, lags=lags and rank == 1)
    try:
        for number in range(OPERATIONS):
            run.operate()
            if broken and rank == 1 and number == OPERATIONS // 2:
                victim = run.cache.tiers.order.victim(lambda s: s.eligible)
                assert victim is not None
                run.cache.tiers.evict(victim)
                run.cache.tiers.sign()
            if number % batched == 0:
                agree(run.cache.digest)
        agree(run.cache.digest)
    except NumericError as error:
        return str(error)
    return f"agreed on {run.cache.tiers.reclamations}"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(_serve, args=(str(folder),), nprocs=2)
    return [json.loads((folder / f"{rank}.json").read_text("utf-8")) for rank in range(2)]


@pytest.mark.parametrize("case", ["one by one", "batched"])
def test_every_reclamation_is_the_same_on_both_ranks(
    outcomes: list[dict[str, str]], case: str
) -> None:
    """Victims and slots compared after every operation, or 16 at a time; transfers of one rank end later."""
    first, second = (found[case] for found in outcomes)
    assert first == second
    assert int(first.removeprefix("agreed on ")) > OPERATIONS // 10


def test_a_rank_that_evicts_another_state_is_found(outcomes: list[dict[str, str]]) -> None:
    for found in outcomes:
        assert "ranks [1] decided otherwise" in found["another victim"]
