"""`bench serve`: conversations through the prefix cache on the real engine, every arm in the same bytes."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridstate.errors import MissingRequirement, UsageError, check_seconds

if TYPE_CHECKING:
    from hybridstate.bench.serving_arms import Arm
    from hybridstate.bench.sweep import Options
    from hybridstate.plan.store import Plan

Progress = Callable[[str, int, int], None]
Record = Callable[[dict[str, Any]], None]


def bench_serve(
    model: str | Path,
    *,
    plan: str | Path | None = None,
    gate_input: float | None = None,
    trace: str = "wildchat-shape",
    trace_file: Path | None = None,
    conversations: int = 256,
    scale: float | None = None,
    arms: Sequence[str] | None = None,
    w_max: Sequence[int] | None = None,
    ratios: Sequence[float] | None = None,
    limits: Sequence[int] | None = None,
    clients: int = 256,
    think: float = 0.0,
    seeds: int = 5,
    policy: str = "lru",
    every: int = 0,
    budget_scope: str = "state",
    tp: int = 1,
    balances: Sequence[str] | None = None,
    control: bool = True,
    fit: bool = False,
    workers: int = 1,
    deadline: float | None = None,
    resume: Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    progress: Progress | None = None,
    record: Record | None = None,
) -> dict[str, Any]:
    """Serve conversations on the real engine; generated replies are fed back.

    Args:
        model: folder or embedded name.
        plan: FP16 channels and orders of the packed state; an exported checkpoint brings its own.
        gate_input: that selects units, see `analyze`.
        trace, trace_file, conversations: what is served, see `bench.traces`.
        scale: lengths over the published ones; by default the largest of 1, 1/2, 1/4 ... that the model's positions
            allow.
        arms, w_max, ratios, limits, clients, think, seeds, policy, every, budget_scope, control: as `bench_simulate`.
        tp: ranks that share the heads of linear attention, one process and on CUDA one GPU each.
        balances: placements of the arms with a cutoff over the ranks, `off` and `storage`.
        fit: fit the cost model on half of the points and predict the others.
        workers: processes, on CUDA one GPU each.
        deadline: seconds after which no run begins; what is missing is said.
        resume: an earlier result of the same sweep, perhaps a partial one; its seeds are not run again, and points that
            are not asked for stay.
        device: `auto`, `cpu` or `cuda`.
        dtype: of the weights: `auto`, `float32`, `bfloat16` or `float16`.
        progress: called with (stage, done, total).
        record: receives the result so far after every seed of a point.

    Raises:
        UsageError: an option is out of range.
        SourceError: a file or the model cannot be read.
        UnsupportedModel: attention that keeps more than keys and values.
        PlanMismatch: the plan is for another model, or the ranks do not divide the heads.
        NumericError: a check failed.
        MissingRequirement: a GPU was asked for and there is none, or fewer than ranks.
    """
    from hybridstate.bench.serve_workers import Peers, Setting, Worker, Workers
    from hybridstate.bench.serving_arms import served_arms
    from hybridstate.bench.serving_resume import read_earlier
    from hybridstate.bench.serving_setup import (
        context_limit,
        fit_points,
        fitting_scale,
        make_options,
        profile_of,
    )
    from hybridstate.bench.sweep import Sweep, chosen_arms
    from hybridstate.bench.timing import device_record
    from hybridstate.checkpoint import open_checkpoint
    from hybridstate.trajectories.model import torch_device

    options = make_options(
        arms=arms,
        w_max=w_max,
        ratios=ratios,
        limits=limits,
        clients=clients,
        think=think,
        seeds=seeds,
        policy=policy,
        every=every,
        budget_scope=budget_scope,
        tp=tp,
        balances=balances,
        control=control,
    )
    if deadline is not None:
        check_seconds("--deadline", deadline)
    target = torch_device(device)
    _check_ranks(options, workers, target.type)
    _check_workers(workers, target.type)
    earlier = None if resume is None else read_earlier(resume)
    checkpoint = open_checkpoint(str(model), weights=True)
    profile = profile_of(checkpoint, gate_input=gate_input)
    if earlier is not None:
        earlier.check_options(checkpoint.name, profile, options)
    every_arm = served_arms(profile.arms(options.cutoffs, tp=tp, balances=options.balances))
    named = chosen_arms(every_arm, options.arms)
    setting = Setting(
        model=str(model),
        plan=None if plan is None else str(plan),
        dtype=dtype,
        gate_input=gate_input,
        device=target.type,
        trace=trace,
        trace_file=trace_file,
        conversations=conversations,
        scale=fitting_scale(context_limit(checkpoint.config)) if scale is None else scale,
        options=options,
        deadline=None if deadline is None else time.time() + deadline,
    )
    with ExitStack() as open_until_the_end:
        peers = None
        if tp > 1:
            peers = open_until_the_end.enter_context(Peers(setting))
        here = (
            Worker(setting, str(target))
            if peers is None
            else Worker(setting, str(peers.device), peers.ranks)
        )
        subject = here.subject
        _check_orders(subject.plan, named, tp)
        dense = subject.measured(every_arm[0])
        chosen = [subject.measured(arm) for arm in named]
        kv_bytes = subject.kv_bytes(dense)
        header: dict[str, Any] = {
            "model": subject.loaded.checkpoint.name,
            "profile": {
                **profile.to_json(tp, options.balances),
                "synthetic": subject.loaded.synthetic,
                "kv_bytes_per_token": kv_bytes,
            },
            "plan_digest": None if subject.plan is None else subject.plan.digest,
            "scale": setting.scale,
            "positions": context_limit(checkpoint.config),
            "longest_conversation": here.length,
            "dtype": str(subject.loaded.dtype).removeprefix("torch."),
            "workers": workers,
            "simulated": False,
            "device": device_record(target),
        }
        known = None
        if earlier is not None:
            control_trace = here.control if control else None
            known = earlier.points(header, here.trace, control_trace, here.chunk)
            header["continued"] = earlier.commits
        pool = Workers(setting, here, workers, peers)
        open_until_the_end.callback(here.close)
        open_until_the_end.callback(pool.close)
        sweep = Sweep(
            dense,
            chosen,
            here.trace,
            here.control,
            options,
            kv_bytes=kv_bytes,
            serve=pool,
            progress=progress,
            record=None
            if record is None
            else lambda found: record({**header, **found, "fit": None}),
            known=known,
        )
        header |= sweep.header()
        if earlier is not None and not control:
            # its control points stay, and what they were served
            header["control_trace"] = earlier.document.get("control_trace")
        found = sweep.run()
    fitted = None
    measured = [point for point in found["points"] if "skipped" not in point]
    if fit and len(measured) > 1:
        fitted, _ = fit_points(measured, here.trace, options, "these points")
    return {**header, **found, "fit": fitted}


def _check_workers(workers: int, device: str) -> None:
    """Refuse more workers than GPUs.

    Raises:
        UsageError: fewer than one, or more than there are.
    """
    import torch

    if workers < 1:
        raise UsageError("--workers must be at least 1", found=workers)
    if device == "cuda" and workers > torch.cuda.device_count():
        raise UsageError(
            f"{workers} workers need a GPU each, there are {torch.cuda.device_count()}",
            hint="every run has a GPU to itself",
        )


def _check_ranks(options: "Options", workers: int, device: str) -> None:
    """Refuse ranks that cannot be had, and placements that are not served.

    Raises:
        UsageError: workers beside ranks, `hybrid`, or a placement without ranks.
        MissingRequirement: fewer GPUs than ranks.
    """
    import torch

    if "hybrid" in options.balances:
        raise UsageError(
            "--balance hybrid moves heads, and the ranks of this engine have them in order",
            hint="--balance off or storage; bench simulate serves hybrid with predicted seconds",
        )
    if options.tp == 1:
        if set(options.balances) != {"off"}:
            raise UsageError("--balance places checkpoints over ranks", hint="add --tp 2")
        return
    if workers > 1:
        raise UsageError("--workers and --tp do not go together: a run has every GPU")
    if device == "cuda" and torch.cuda.device_count() < options.tp:
        raise MissingRequirement(
            f"--tp {options.tp} needs {options.tp} GPUs, found {torch.cuda.device_count()}",
            hint="take fewer ranks, or --device cpu (gloo)",
        )


def _check_orders(plan: "Plan | None", arms: "Sequence[Arm]", tp: int) -> None:
    """Refuse a plan's packed state on several ranks.

    Raises:
        UsageError: its orders and scales are those of all heads.
    """
    packed = [arm.name for arm in arms if arm.live_format == "damp"]
    if tp > 1 and plan is not None and packed:
        raise UsageError(
            f"{packed[0]}: the orders of a plan are not cut for {tp} ranks",
            hint="leave --plan out, or name other arms: --arm nr --arm wr --arm int8",
        )
