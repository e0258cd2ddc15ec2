"""`bench exchange`: what placing checkpoints over tensor-parallel ranks gains in slots and costs per store and load.

One process per rank, joined by NCCL on GPUs and by gloo on CPUs. A store gathers the retained units of a rank's states,
sends the remote ones and writes the slots; a load reverses it. Every arm is checked first: each unit holds its number,
so a slot proves which unit it has, and a load must return every state bit for bit.
"""

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridstate.bench.room import check_samples
from hybridstate.bench.timing import Samples
from hybridstate.errors import MissingRequirement, NumericError, UsageError
from hybridstate.families import ModelSpec
from hybridstate.plan.accounting import TEMPORAL_BYTES, conv_bytes, temporal_bytes
from hybridstate.plan.placement import Balance, Placement, place
from hybridstate.plan.select import Selection
from hybridstate.runtime.exchange import Exchange, Route, rank_heads, routes

Progress = Callable[[str, int, int], None]
WARMUP = 3


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One arm as every rank runs it.

    Attributes:
        w_max, mode, checkpoints: the arm; checkpoints move together.
        routes: one per rank.
        rows: per rank, rows of its retained units among all units it computes, `[n_r]`.
        numbers: per rank, packed-unit number of each of those rows.
        slot_numbers: per rank, packed-unit number that each of its slots must hold, `[stored]`.
        units: all units a rank computes, retained or not.
        width: values of one unit.
    """

    w_max: int
    mode: Balance
    checkpoints: int
    routes: tuple[Route, ...]
    rows: tuple[np.ndarray[Any, Any], ...]
    numbers: tuple[np.ndarray[Any, Any], ...]
    slot_numbers: tuple[np.ndarray[Any, Any], ...]
    units: int
    width: int


def task(spec: ModelSpec, selection: Selection, placement: Placement, *, checkpoints: int) -> Task:
    """The arm of one placement."""
    made = routes(spec, selection, placement)
    per_head = 1 if spec.unit == "head" else spec.layers[0].key_dim
    numbers: list[list[int]] = [[] for _ in range(placement.tp)]
    next_number = 0
    owned = [rank_heads(spec, placement, rank) for rank in range(placement.tp)]
    kept_rows: list[list[np.ndarray[Any, Any]]] = [[] for _ in range(placement.tp)]
    for ordinal, mask in enumerate(selection.retained):
        for rank in range(placement.tp):
            heads = list(owned[rank][ordinal])
            kept = np.flatnonzero(np.asarray(mask)[heads].reshape(-1))
            kept_rows[rank].append(kept + ordinal * len(heads) * per_head)
            numbers[rank].extend(range(next_number, next_number + len(kept)))
            next_number += len(kept)
    rows = [np.concatenate(parts) for parts in kept_rows]
    slots: list[np.ndarray[Any, Any]] = []
    flat = [np.array(n, np.int64) for n in numbers]
    for rank, route in enumerate(made):
        held = np.full(route.stored_units, -1, np.int64)
        held[route.kept_slots] = flat[rank][route.kept]
        slots.append(held)
    if placement.mode != "off":
        for number, (owner, slot) in enumerate(
            zip(placement.storage_owner.tolist(), placement.storage_slot.tolist(), strict=True)
        ):
            slots[owner][slot] = number
    layers = len(spec.layers)
    return Task(
        w_max=selection.w_max,
        mode=placement.mode,
        checkpoints=checkpoints,
        routes=made,
        rows=tuple(rows),
        numbers=tuple(flat),
        slot_numbers=tuple(slots),
        units=layers * spec.layers[0].value_heads // placement.tp * per_head,
        width=spec.unit_values(spec.layers[0]),
    )


def run_rank(
    rank: int, tasks: Sequence[Task], store_file: str, folder: str, device: str, repeats: int
) -> None:
    """The process of one rank: check and time every task, leave the seconds in a file of `folder`."""
    import torch.distributed as dist

    cuda = device == "cuda"
    where = torch.device(f"cuda:{rank}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(where)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{store_file}",
        world_size=len(tasks[0].routes),
        rank=rank,
    )
    try:
        times = [run_task(rank, job, where, repeats) for job in tasks]
        np.save(Path(folder) / f"rank-{rank}.npy", np.array(times))
    except NumericError as error:
        Path(folder, f"rank-{rank}.error").write_text(str(error), encoding="utf-8")
        raise
    except (RuntimeError, MemoryError) as error:
        if "allocate" in str(error):  # torch's and NumPy's words for too little memory
            Path(folder, f"rank-{rank}.memory").write_text(str(error), encoding="utf-8")
        raise
    finally:
        dist.destroy_process_group()


def run_task(rank: int, job: Task, where: torch.device, repeats: int) -> list[list[float]]:
    """Seconds of every store and every load of one rank, after the check.

    Raises:
        NumericError: a slot holds another unit than the placement says, or a load changed a state.
    """
    import torch.distributed as dist

    exchange = Exchange(job.routes[rank], device=where)
    rows = torch.from_numpy(job.rows[rank]).to(where)
    states = torch.full((job.checkpoints, job.units, job.width), math.nan, device=where)
    marks = torch.from_numpy(job.numbers[rank]).to(where, torch.float32)
    marks = marks + 0.25 * torch.arange(job.checkpoints, device=where)[:, None]
    states[:, rows] = marks[:, :, None].expand(-1, -1, job.width)
    shape = (job.checkpoints, job.routes[rank].slot_units, job.width)
    slots = torch.full(shape, math.nan, device=where)
    back = torch.full_like(states, math.nan)
    units = torch.empty((job.checkpoints, len(rows), job.width), device=where)

    def store() -> None:
        torch.index_select(states, 1, rows, out=units)
        exchange.store(units, slots)

    def load() -> None:
        exchange.load(slots, units)
        back[:, rows] = units

    store()
    held = torch.from_numpy(job.slot_numbers[rank]).to(where, torch.float32)
    expected = held + 0.25 * torch.arange(job.checkpoints, device=where)[:, None]
    right = bool((slots[:, : len(held)] == expected[:, :, None]).all())
    right = right and bool(slots[:, len(held) :].isnan().all())
    units.fill_(math.nan)
    load()
    same = bool(torch.equal(back[:, rows], states[:, rows]))
    moved = exchange.units_sent
    meant = (len(job.routes[rank].sent) + len(job.routes[rank].received_slots)) * job.checkpoints
    if not right or not same or moved != meant:
        raise NumericError(
            f"exchange of {job.mode} at W_max {job.w_max}, rank {rank}: slots right {right}, states "
            f"returned {same}, units sent {moved} of {meant}"
        )

    def clock(call: Callable[[], None]) -> list[float]:
        seconds = []
        for number in range(WARMUP + repeats):
            _settle(where)
            dist.barrier()
            start = time.perf_counter()
            call()
            _settle(where)
            if number >= WARMUP:
                seconds.append(time.perf_counter() - start)
        return seconds

    return [clock(store), clock(load)]


def _settle(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Result of `run_exchange`; `rows` are plain JSON values, one per cutoff, mode and number of checkpoints."""

    model: str
    protocol: dict[str, Any]
    device: dict[str, Any]
    rows: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; every sample included."""
        return {
            "model": self.model,
            "protocol": self.protocol,
            "device": self.device,
            "exchange": list(self.rows),
        }


def run_exchange(
    model: str,
    spec: ModelSpec,
    selections: Sequence[Selection],
    *,
    tp: int,
    modes: Sequence[Balance],
    checkpoints: Sequence[int],
    device: str,
    hardware: dict[str, Any],
    synthetic: bool = False,
    repeats: int = 20,
    progress: Progress | None = None,
) -> Exchanged:
    """Check and time the exchange of every selection under every mode.

    Args:
        model: name for the tables.
        selections: of `plan.select`.
        tp: ranks, one process and on CUDA one GPU each.
        modes: of `plan.placement.BALANCES`.
        checkpoints: how many travel in one exchange.
        device: `cpu` or `cuda`.
        hardware: what the timings were taken on.
        synthetic: horizons are made up; said in the protocol.
        repeats: samples of each store and load.

    Raises:
        UsageError: fewer than two ranks, nothing to move.
        MissingRequirement: fewer GPUs than ranks.
        PlanMismatch: the ranks do not divide the heads.
        NumericError: a unit arrived elsewhere than the placement says.
        MemoryError: a rank has too little memory for so many checkpoints.
    """
    if tp < 2:
        raise UsageError(f"an exchange needs at least 2 ranks, found {tp}", found=tp, expected=2)
    check_samples("--repeats", repeats)
    if device == "cuda" and torch.cuda.device_count() < tp:
        raise MissingRequirement(
            f"--tp {tp} needs {tp} GPUs, found {torch.cuda.device_count()}",
            hint="take fewer ranks, or --device cpu (gloo)",
        )
    arms = [
        (selection, place(spec, selection, tp=tp, mode=mode))
        for selection in selections
        for mode in modes
    ]
    tasks = [
        task(spec, selection, placement, checkpoints=count)
        for selection, placement in arms
        for count in checkpoints
    ]
    with tempfile.TemporaryDirectory() as folder:
        processes: Any = import_module("torch.multiprocessing")  # untyped
        context = processes.spawn(
            run_rank,
            args=(tasks, str(Path(folder) / "rendezvous"), folder, device, repeats),
            nprocs=tp,
            join=False,
        )
        if progress is not None:
            progress("exchange", 0, len(tasks))
        try:
            while not context.join():
                continue
        except processes.ProcessRaisedException:
            if short := sorted(Path(folder).glob("*.memory")):
                raise MemoryError(
                    f"{short[0].stem}: {short[0].read_text(encoding='utf-8')}"
                ) from None
            failed = sorted(Path(folder).glob("*.error"))
            if not failed:
                raise
            raise NumericError(failed[0].read_text(encoding="utf-8")) from None
        if progress is not None:
            progress("exchange", len(tasks), len(tasks))
        times = np.stack([np.load(Path(folder) / f"rank-{rank}.npy") for rank in range(tp)])
    slowest = times.max(axis=0)  # a store is done when the last rank is
    rows = []
    by_arm = [(selection, placement) for selection, placement in arms for _ in checkpoints]
    for (selection, placement), job, seconds in zip(by_arm, tasks, slowest, strict=True):
        rows.append(_row(spec, selection, placement, job, seconds))
    return Exchanged(
        model=model,
        protocol={
            "tp": tp,
            "backend": "nccl" if device == "cuda" else "gloo",
            "unit": spec.unit,
            "repeats": repeats,
            "synthetic_horizons": synthetic,
            "seconds": "of the slowest rank, gather and scatter included",
        },
        device=hardware,
        rows=tuple(rows),
    )


def _row(
    spec: ModelSpec,
    selection: Selection,
    placement: Placement,
    job: Task,
    seconds: np.ndarray[Any, Any],
) -> dict[str, Any]:
    unit_bytes = job.width * TEMPORAL_BYTES
    conv = conv_bytes(spec) // placement.tp
    dense = temporal_bytes(spec) // placement.tp + conv
    slot = placement.slot_units * unit_bytes + conv
    return {
        "w_max": selection.w_max,
        "mode": placement.mode,
        "checkpoints": job.checkpoints,
        "units": int(sum(placement.compute_units)),
        "remote_units": placement.remote_units,
        "remote_bytes": placement.remote_units * unit_bytes * job.checkpoints,
        "slot_units": placement.slot_units,
        "slot_bytes": slot,
        "dense_slot_bytes": dense,
        "capacity": dense / slot,
        "store_s": Samples(seconds[0].tolist()).to_json(),
        "load_s": Samples(seconds[1].tolist()).to_json(),
    }
