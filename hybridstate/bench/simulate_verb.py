"""`bench_simulate` of `hybridstate.api`, as the list of its stages."""

import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridstate.errors import UsageError

if TYPE_CHECKING:
    from hybridstate.bench.serving_arms import Profile

    Progress = Callable[[str, int, int], None]


def bench_simulate(
    model: str | Path | None = None,
    *,
    trace: str = "wildchat-shape",
    trace_file: Path | None = None,
    conversations: int = 256,
    scale: float = 1.0,
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
    kv_bytes: int | None = None,
    tp: int = 1,
    balances: Sequence[str] | None = None,
    cost: Path | None = None,
    fit: Path | None = None,
    exchange: Path | None = None,
    control: bool = True,
    progress: "Progress | None" = None,
) -> dict[str, Any]:
    """Serve conversations with the real prefix cache and predicted seconds, every arm in the same bytes.

    Imports neither torch nor transformers.

    Args:
        model: folder, Hub name or embedded name whose sizes and static horizons count; without one, synthetic horizons
            with Kimi-Linear's sizes and published retention.
        trace, trace_file, conversations, scale: what is served, see `serving_setup.trace_of`.
        arms: kinds of arms beside dense, see `bench.serving_arms`.
        w_max: cutoffs in tokens.
        ratios: working set over dense slots.
        limits: running requests at once; the first at every ratio, the others at the operating point.
        clients, think: conversations at once, and mean seconds before a client's next turn.
        seeds: orders of the conversations.
        policy: order of eviction.
        every: also keep a state every so many prompt tokens, 0 for none.
        budget_scope: `state` or `state+kv`.
        kv_bytes: attention bytes per token, from the config by default.
        tp, balances: ranks, and placements of the arms with a cutoff.
        cost: JSON of a cost model.
        fit: a recorded `bench serve` on the same trace; the cost model is fitted to half of its points.
        exchange: a recorded `bench exchange`; what a placement adds to a store and a load.
        control: whether prompts that share nothing run too.
        progress: called with (stage, done, total).

    Raises:
        UsageError: an option is out of range.
        SourceError: a file or the model cannot be read.
        UnsupportedModel, NumericError, PlanMismatch: as `analyze`.
    """
    from hybridstate.bench.cost_model import CostModel
    from hybridstate.bench.serving_arms import kimi_profile
    from hybridstate.bench.serving_setup import make_options, recorded_fit, trace_of, with_exchange
    from hybridstate.bench.simulate import Simulation

    if kv_bytes is not None and kv_bytes < 0:
        raise UsageError("--kv-bytes must not be negative", found=kv_bytes)
    if cost is not None and fit is not None:
        raise UsageError("a fit makes its own cost model", hint="give either --cost or --fit")
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
    served = trace_of(trace, trace_file, conversations, scale=scale)
    profile = (
        kimi_profile() if model is None else _profile(str(model), "hybrid" in options.balances)
    )
    if kv_bytes is not None:
        profile = replace(profile, kv_bytes=kv_bytes)
    seconds, fitted = CostModel.default() if cost is None else CostModel.read(cost), None
    if fit is not None:
        fitted, seconds = recorded_fit(fit, served, options, profile.name)
    if exchange is not None:
        seconds = with_exchange(seconds, exchange)
    result = Simulation(profile, served, seconds, options, progress, scale=scale).run()
    hardware = {"device": "none", "name": platform.processor() or platform.machine()}
    return {**result, "fit": fitted, "device": hardware}


def _profile(model: str, permuted: bool) -> "Profile":
    from hybridstate.bench.serving_setup import profile_of
    from hybridstate.checkpoint import open_checkpoint
    from hybridstate.plan.placement import check_permutable

    checkpoint = open_checkpoint(model)
    if permuted:
        check_permutable(checkpoint)
    return profile_of(checkpoint)
