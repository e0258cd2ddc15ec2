"""Compressed slots over two ranks: states come back bit for bit, wherever their units were stored."""

from pathlib import Path

import numpy as np
import pytest
import torch

from hybridstate.errors import PlanMismatch
from hybridstate.families import ModelSpec
from hybridstate.plan.placement import Placement, place
from hybridstate.plan.select import Selection, select
from hybridstate.runtime.exchange import Exchange, routes
from hybridstate.runtime.parallel import Ranks, rank_spec
from hybridstate.runtime.pool import StatePool
from hybridstate.runtime.tensor_store import TensorStore
from hybridstate.runtime.tiers import Prefix
from tests.plan.geometry import SPECS

MODELS = {"gdn": "qwen3-next", "kda": "kimi-linear"}
SLOTS = 3


def model(name: str, layers: int = 2) -> ModelSpec:
    """The first linear layers of a published model with few channels."""
    from dataclasses import replace

    spec = next(s for key, s in SPECS.items() if MODELS[name] in key.lower().replace("_", "-"))
    small = [replace(n, key_heads=4, value_heads=8 if name == "gdn" else 4) for n in spec.layers]
    return replace(spec, layers=tuple(replace(n, key_dim=6, value_dim=8) for n in small[:layers]))


def kept(spec: ModelSpec, lean: str) -> Selection:
    """Everything of the first rank's heads is kept and little, or nothing, of the second's."""
    horizons, rng = [], np.random.Generator(np.random.PCG64(1))
    for layer in spec.layers:
        shape = spec.decay_shape(layer)
        chosen = np.zeros(shape, bool)
        chosen[: layer.value_heads // 2] = rng.random((layer.value_heads // 2, *shape[1:])) < 0.9
        if lean == "most":
            chosen[-1] = True
        horizons.append(np.where(chosen, 1000.0, 1.0))
    return select(horizons, 64)


def store(
    spec: ModelSpec, chosen: Selection, placement: Placement, rank: int, kind: str
) -> TensorStore:
    ranks = Ranks(rank, 2)
    pool = StatePool(rank_spec(spec, 2), SLOTS, conv_dtype=torch.float32)
    route = routes(spec, chosen, placement)[rank]
    masks = [torch.from_numpy(ranks.own(mask)) for mask in chosen.retained]
    return TensorStore(pool, 2, masks, kind=kind, exchange=Exchange(route))  # type: ignore[arg-type]


def _rank(rank: int, folder: str, name: str, lean: str) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", world_size=2, rank=rank)
    try:
        spec = model(name)
        chosen = kept(spec, lean)
        placement = place(spec, chosen, tp=2, mode="storage")
        assert placement.remote_units > 0
        for kind in ("fp32", "int8"):
            _round_trip(store(spec, chosen, placement, rank, kind), chosen, rank, kind)
        Path(folder, f"{rank}.ok").touch()
    finally:
        dist.destroy_process_group()


def _round_trip(made: TensorStore, chosen: Selection, rank: int, kind: str) -> None:
    """Two states into compressed slots, and out again in the other order."""
    pool, generator = made.pool, torch.Generator().manual_seed(7 + rank)
    states = [
        [torch.randn(x.shape[1:], generator=generator) for x in pool.states] for _ in range(2)
    ]
    for number, state in enumerate(states):
        for tensor, value in zip(pool.states, state, strict=True):
            tensor[1] = value
        for window in pool.conv:
            window[1] = float(number)
        made.pack(1, 1 + number, aside=False)
    for number in (1, 0):
        made.freed(2, packed=False)
        made.load(1 + number, 2, Prefix(np.zeros(1, np.int32), []))
        for tensor, state, mask in zip(pool.states, states[number], chosen.retained, strict=True):
            here = torch.from_numpy(Ranks(rank, 2).own(mask))
            rows = (here if here.dim() == 2 else here[:, None]).expand(state.shape[:2])
            expected = torch.where(rows[..., None], state, 0.0)
            if kind == "fp32":
                assert torch.equal(tensor[2], expected)
            else:
                step = expected.abs().amax(-1, keepdim=True) / 127
                assert bool(((tensor[2] - expected).abs() <= step).all())
        assert all(bool((window[2] == number).all()) for window in pool.conv)


@pytest.mark.parametrize("lean", ["most", "all"])
@pytest.mark.parametrize("name", MODELS)
def test_states_come_back_from_other_ranks(name: str, lean: str, tmp_path: Path) -> None:
    """`all`: one rank computes every retained unit, so the other stores half of them and has none of its own."""
    torch.multiprocessing.spawn(_rank, args=(str(tmp_path), name, lean), nprocs=2)
    assert len(list(tmp_path.glob("*.ok"))) == 2


@pytest.mark.parametrize("kind", ["fp32", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_slots_are_as_large_on_every_rank(name: str, kind: str) -> None:
    spec = model(name)
    chosen = kept(spec, "most")
    placement = place(spec, chosen, tp=2, mode="storage")
    sizes = [store(spec, chosen, placement, rank, kind).checkpoints.slot_bytes for rank in range(2)]
    per_row = 32 if kind == "fp32" else 12
    rows = placement.slot_units * (6 if name == "gdn" else 1)
    assert sizes == [rows * per_row] * 2
    assert store(spec, chosen, placement, 0, kind).scratch_bytes > 0


def test_other_units_than_the_exchange_moves_are_refused() -> None:
    spec = model("kda")
    chosen = kept(spec, "most")
    route = routes(spec, chosen, place(spec, chosen, tp=2, mode="storage"))[0]
    with pytest.raises(PlanMismatch, match="rank 0 exchanges"):
        TensorStore(StatePool(rank_spec(spec, 2), 2), 1, exchange=Exchange(route))
    with pytest.raises(PlanMismatch, match="differ in size"):
        TensorStore(
            StatePool(rank_spec(spec, 2), 2, state="damp", k_hi=2),
            1,
            kind="packed",
            exchange=Exchange(route),
        )
