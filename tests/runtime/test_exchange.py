"""Units between ranks: exact inverse, only remote units travel, real process groups of 2 and 4 ranks."""

from pathlib import Path

import numpy as np
import pytest
import torch

from hybridstate.bench.exchange import run_exchange, task
from hybridstate.errors import NumericError, UsageError
from hybridstate.families import ModelSpec
from hybridstate.plan.placement import BALANCES, Balance, place
from hybridstate.plan.select import Selection, select
from hybridstate.runtime.exchange import Exchange, agree, rank_heads, routes
from tests.plan.geometry import SPECS

MODELS = ("qwen3-next", "kimi-linear")


def spec_of(name: str) -> ModelSpec:
    return next(spec for key, spec in SPECS.items() if name in key.lower().replace("_", "-"))


def selection_of(spec: ModelSpec, share: float, seed: int = 0) -> Selection:
    """Uneven over heads, so that ranks differ: the kept share falls from the first head to the last."""
    generator = np.random.default_rng(seed)
    horizons = []
    for layer in spec.layers:
        shape = (layer.value_heads,) + ((layer.key_dim,) if spec.unit == "channel" else ())
        lean = np.linspace(2 * share, 0, layer.value_heads)
        kept = generator.random(shape) < (lean if spec.unit == "head" else lean[:, None])
        horizons.append(np.where(kept, 1000.0, 1.0))
    return select(tuple(horizons), 64)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mode", BALANCES)
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_routes_are_a_bijection_that_moves_only_what_must(
    model: str, mode: Balance, tp: int
) -> None:
    spec = spec_of(model)
    selection = selection_of(spec, 0.4)
    placement = place(spec, selection, tp=tp, mode=mode)
    made = routes(spec, selection, placement)
    assert sum(len(route.sent) for route in made) == placement.remote_units
    sent = np.array([route.send_splits for route in made])
    received = np.array([route.receive_splits for route in made])
    assert np.array_equal(sent, received.T)
    assert np.array_equal(sent, placement.transfers)
    for route in made:
        assert route.stored_units == placement.stored_units[route.rank]
        local = np.concatenate([route.kept, route.sent])
        assert np.array_equal(np.sort(local), np.arange(route.local_units))
        slots = np.concatenate([route.kept_slots, route.received_slots])
        assert np.array_equal(np.sort(slots), np.arange(route.stored_units))
    if mode == "off":
        assert placement.remote_units == 0


def test_every_head_is_computed_once() -> None:
    spec = spec_of("qwen3-next")
    placement = place(spec, selection_of(spec, 0.4), tp=4, mode="hybrid")
    heads = [rank_heads(spec, placement, rank) for rank in range(4)]
    for ordinal, layer in enumerate(spec.layers):
        every = sorted(head for rank in heads for head in rank[ordinal])
        assert every == list(range(layer.value_heads))


def test_nothing_remote_needs_no_process_group() -> None:
    spec = spec_of("kimi-linear")
    selection = selection_of(spec, 0.3)
    route = routes(spec, selection, place(spec, selection, tp=2, mode="off"))[1]
    exchange = Exchange(route)
    units = torch.randn(2, route.local_units, 3)
    slots = torch.full((2, route.slot_units, 3), float("nan"))
    exchange.store(units, slots)
    back = torch.full_like(units, float("nan"))
    exchange.load(slots, back)
    assert torch.equal(back, units)
    assert exchange.units_sent == 0


def test_wrong_shapes_are_named() -> None:
    spec = spec_of("kimi-linear")
    selection = selection_of(spec, 0.3)
    route = routes(spec, selection, place(spec, selection, tp=2, mode="off"))[0]
    with pytest.raises(NumericError, match=rf"rank 0 exchanges \[B, {route.local_units}, "):
        Exchange(route).store(torch.zeros(1, 3, 2), torch.zeros(1, route.slot_units, 2))


@pytest.mark.parametrize(("model", "tp"), [("qwen3-next", 2), ("kimi-linear", 4)])
def test_gloo_ranks_store_what_the_placement_says(model: str, tp: int) -> None:
    """Every rank checks each slot's unit number and that loads return every state, then times it."""
    spec = spec_of(model)
    selection = selection_of(spec, 0.02 if model == "qwen3-next" else 0.2)
    result = run_exchange(
        model,
        spec,
        [selection],
        tp=tp,
        modes=("off", "storage", "hybrid"),
        checkpoints=(1, 2),
        device="cpu",
        hardware={"name": "cpu"},
        synthetic=True,
        repeats=2,
    ).to_json()
    rows = {(row["mode"], row["checkpoints"]): row for row in result["exchange"]}
    assert rows["off", 1]["remote_units"] == 0
    assert rows["storage", 1]["remote_units"] >= rows["hybrid", 1]["remote_units"]
    assert rows["storage", 1]["capacity"] > rows["off", 1]["capacity"]
    assert all(len(row["store_s"]["samples"]) == 2 for row in rows.values())


def _decide(rank: int, folder: str, digests: list[str]) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", world_size=2, rank=rank)
    try:
        agree("ab" * 32)
        try:
            agree(digests[rank])
            found = "agreed"
        except NumericError as error:
            found = str(error)
        Path(folder, f"{rank}.txt").write_text(found, encoding="utf-8")
    finally:
        dist.destroy_process_group()


def test_ranks_that_decide_differently_all_find_out(tmp_path: Path) -> None:
    digests = ["ab" * 32, "ac" * 32]
    torch.multiprocessing.spawn(_decide, args=(str(tmp_path), digests), nprocs=2)
    for rank in range(2):
        assert "ranks [1] decided otherwise" in (tmp_path / f"{rank}.txt").read_text("utf-8")


def test_a_digest_is_a_sha256() -> None:
    with pytest.raises(UsageError, match="64 hexadecimal digits"):
        agree("abc")


def test_one_rank_exchanges_nothing() -> None:
    spec = spec_of("kimi-linear")
    with pytest.raises(UsageError, match="at least 2 ranks"):
        run_exchange(
            "m",
            spec,
            [selection_of(spec, 0.3)],
            modes=("off",),
            checkpoints=(1,),
            device="cpu",
            hardware={},
            tp=1,
        )


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_nccl_ranks_store_what_the_placement_says(model: str) -> None:
    tp = min(4, torch.cuda.device_count())
    if tp < 2:
        pytest.skip("needs two GPUs")
    tp = 2 if tp == 3 else tp
    spec = spec_of(model)
    result = run_exchange(
        model,
        spec,
        [selection_of(spec, 0.4)],
        tp=tp,
        modes=BALANCES,
        checkpoints=(1, 8),
        device="cuda",
        hardware={"name": "gpu"},
        synthetic=True,
        repeats=3,
    )
    assert len(result.rows) == 6


def test_the_task_numbers_units_as_the_plan_does() -> None:
    spec = spec_of("qwen3-next")
    selection = selection_of(spec, 0.4)
    placement = place(spec, selection, tp=2, mode="hybrid")
    job = task(spec, selection, placement, checkpoints=1)
    every = np.sort(np.concatenate(job.numbers))
    assert np.array_equal(every, np.arange(sum(placement.compute_units)))
    assert all((held >= 0).all() for held in job.slot_numbers)
