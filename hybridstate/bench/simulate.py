"""Serving with the real cache and a predicted engine: `bench.sweep` with seconds of a cost model, and its fit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridstate.bench.cost_model import CostModel, fit
from hybridstate.bench.scheduler import Limits, Request, Run, Scheduler, Seconds
from hybridstate.bench.serving_arms import WATERMARK, Arm, Profile
from hybridstate.bench.serving_points import Outcome, hit_rate
from hybridstate.bench.serving_stats import mean_over_seeds, statistics
from hybridstate.bench.sweep import Job, Options, Progress, Sweep, chosen_arms
from hybridstate.bench.traces import Trace, control_for
from hybridstate.errors import SourceError
from hybridstate.plan.capacity import State
from hybridstate.runtime.admission import Admission, Pools
from hybridstate.runtime.prefix_cache import PrefixCache
from hybridstate.runtime.radix import Keys, Tokens
from hybridstate.runtime.tiers import Finished, Prefix, Transfer


class CostedStore:
    """A store that moves nothing and adds up seconds; transfers beside the computation queue on one stream."""

    def __init__(self, arm: Arm, cost: CostModel) -> None:
        self._arm = arm
        self._cost = cost
        self._stream = 0.0
        self.now = 0.0
        self.seconds = 0.0
        """On the computation, since the last `take`."""
        live, cached = arm.live.full_bytes, (arm.cached or arm.live).full_bytes
        sent = cost.seconds("exchange", arm.remote_bytes) if arm.remote_bytes else 0.0
        self._copy = cost.seconds("copy", live)
        self._pack = cost.seconds("pack", cached) + sent
        self._load = cost.seconds("load", cached) + sent
        self._check = cost.seconds("check", live)

    def copy(self, source: int, target: int) -> None:
        """Seconds on the computation."""
        self.seconds += self._copy

    def pack(self, source: int, target: int, *, aside: bool) -> Transfer:
        """Seconds on the computation, or later on the other stream."""
        if not aside:
            self.seconds += self._pack
            return Finished()
        self._stream = max(self._stream, self.now + self.seconds) + self._pack
        return _Ending(self, self._stream)

    def load(self, source: int, target: int, prefix: Prefix) -> int:
        """Seconds of the load and of a replay."""
        length = len(prefix.tokens)
        replayed = min(self._arm.replay, length)
        self.seconds += self._load
        if replayed:
            self.seconds += self._cost.seconds("replay", length - replayed, length)
        return replayed

    def finite(self, slot: int) -> bool:
        """There are no numbers; seconds of looking at them."""
        self.seconds += self._check
        return True

    def freed(self, slot: int, *, packed: bool) -> None:
        """Nothing to do."""

    def take(self) -> float:
        """Seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


@dataclass(frozen=True, slots=True)
class _Ending:
    store: CostedStore
    at: float

    def done(self) -> bool:
        return self.store.now + self.store.seconds >= self.at

    def wait(self) -> None:
        self.store.seconds += max(0.0, self.at - self.store.now - self.store.seconds)


class CostedExecutor:
    """An engine of predicted seconds; its replies are the recorded ones."""

    def __init__(self, arm: Arm, cost: CostModel) -> None:
        self.store = CostedStore(arm, cost)
        self._cost = cost
        self._state_bytes = arm.live.full_bytes
        self._kept: dict[int, int] = {}

    def prefill(self, request: Request, start: int, end: int) -> float:
        """Predicted."""
        return self._cost.seconds("prefill", start, end)

    def decode(self, batch: Sequence[Request], steps: int) -> Seconds:
        """Predicted; every step adds one token of context per request, the call's own time is the last one's."""
        context = sum(request.context for request in batch)
        first = self._cost.seconds("decode", len(batch), self._state_bytes, context)
        *_, slope, per_call = self._cost.coefficients["decode"]
        found = np.asarray(first + slope * len(batch) * np.arange(steps), np.float64)
        found[-1] += per_call
        return found

    def drain(self) -> float:
        """The store's seconds."""
        return self.store.take()

    def advance(self, now: float) -> None:
        """The store's clock."""
        self.store.now = now

    def output(self, request: Request) -> Tokens:
        """The recorded reply."""
        return request.recorded[: request.produced]

    def keys(self, request: Request, end: int) -> Keys | None:
        """None: nothing was computed; seconds of copying the tokens since the last call."""
        assert request.lease is not None, "a running request holds a lease"
        since = self._kept.get(id(request), request.lease.hit_tokens)
        self._kept[id(request)] = end
        if end > since:
            self.store.seconds += self._cost.seconds("keys", end - since)
        return None

    def close(self, request: Request) -> None:
        """Nothing is left of it."""
        self._kept.pop(id(request), None)


def simulate_once(
    arm: Arm,
    pools: Pools,
    trace: Trace,
    cost: CostModel,
    limits: Limits,
    *,
    admission: Admission | None = None,
    seed: int = 0,
) -> tuple[Run, PrefixCache]:
    """One seed of one point."""
    executor = CostedExecutor(arm, cost)
    cache = PrefixCache(pools, executor.store, admission)
    run = Scheduler(trace, cache, executor, limits, seed).serve()
    cache.audit()
    return run, cache


class Simulation(Sweep):
    """All points of one profile and trace.

    Args:
        profile: the model.
        trace: what is served.
        cost: predicted seconds.
        options: what is simulated.
        progress: called with (stage, done, total).
        scale: of the control's lengths, as the trace's.
    """

    def __init__(
        self,
        profile: Profile,
        trace: Trace,
        cost: CostModel,
        options: Options,
        progress: Progress | None = None,
        *,
        scale: float = 1.0,
    ) -> None:
        options.check()
        every = profile.arms(options.cutoffs, tp=options.tp, balances=options.balances)
        super().__init__(
            every[0],
            chosen_arms(every, options.arms),
            trace,
            control_for(options.clients, scale),
            options,
            kv_bytes=profile.kv_bytes,
            serve=lambda jobs: map(self._simulate, jobs),
            stage="simulate",
            progress=progress,
        )
        self.profile, self.cost = profile, cost

    def run(self) -> dict[str, Any]:
        """The whole document."""
        return {
            "model": self.profile.name,
            "profile": self.profile.to_json(self.options.tp, self.options.balances),
            **self.header(),
            "cost_model": self.cost.to_json(),
            "simulated": True,
            **super().run(),
        }

    def _simulate(self, job: Job) -> Outcome:
        case, options = job.case, self.options
        run, cache = simulate_once(
            case.arm,
            job.pools,
            self.control if case.control else self.trace,
            self.cost,
            options.load(case.limit),
            admission=options.admission,
            seed=job.seed,
        )
        found = statistics(
            run, cache.counters, clients=options.clients, limit=case.limit, goal=options.goal
        )
        return Outcome(found, cache.digest)


def predict(
    point: Mapping[str, Any], trace: Trace, cost: CostModel, options: Options
) -> tuple[float, float]:
    """Mean TTFT in seconds and token hit rate of a measured point, in the pools that it ran with."""
    live = State("live", None, "fp32", int(point["live_bytes"]), 0)
    packed = int(point["slots_compressed"])
    cached = State("cached", None, "fp32", int(point["cached_bytes"]), 0) if packed else None
    arm = Arm(str(point["arm"]), live, cached, int(point["replay_window"]))
    pools = Pools(
        native=int(point["slots_native"]),
        packed=packed,
        kv_tokens=point["kv_tokens"],
        native_bytes=live.full_bytes,
        packed_bytes=1 if cached is None else cached.full_bytes,
        watermark=WATERMARK if packed else 0,
        policy=options.policy,
    )
    limit = int(point["limit"])
    found = []
    for seed in range(len(point["seeds"])):
        run, cache = simulate_once(
            arm,
            pools,
            trace,
            cost,
            options.load(limit),
            admission=options.admission,
            seed=seed,
        )
        found.append(
            statistics(run, cache.counters, clients=options.clients, limit=limit, goal=options.goal)
        )
    mean = mean_over_seeds(found)
    return mean["mean_ttft_ms"] / 1e3, hit_rate({"mean": mean})


def fit_and_predict(
    points: Sequence[Mapping[str, Any]],
    predict: Callable[[Mapping[str, Any], CostModel], tuple[float, float]],
) -> dict[str, Any]:
    """Fit the cost model on every other measured point of each arm (`fitted_half`) and predict the rest.

    Args:
        points: measured operating points: `operations` (kind -> rows of `cost_model.features` arguments, seconds last),
            `mean_ttft_s` and `token_hit_rate`, and whatever `predict` needs.
        predict: mean TTFT in seconds and token hit rate of a point under a cost model.

    Returns:
        The fitted model with standard errors, and measured beside predicted numbers of every point, with its arm,
        ratio and limit where they are known.

    Raises:
        SourceError: fewer than two points, or one without its measurements.
    """
    if len(points) < 2:
        raise SourceError("a fit needs at least two measured points: one to fit, one to predict")
    for number, point in enumerate(points):
        missing = {"operations", "mean_ttft_s", "token_hit_rate"} - set(point)
        if missing:
            raise SourceError(f"measured point {number} has no {', '.join(sorted(missing))}")
    merged: dict[str, list[Sequence[float]]] = {}
    used = fitted_half(points)
    for point, fits in zip(points, used, strict=True):
        for kind, rows in point["operations"].items() if fits else ():
            merged.setdefault(kind, []).extend(rows)
    model = fit(merged, f"{sum(used)} of {len(points)} measured points")
    rows = []
    for number, point in enumerate(points):
        ttft, hit = predict(point, model)
        rows.append(
            {
                "point": number,
                **{name: point[name] for name in ("arm", "ratio", "limit") if name in point},
                "fitted": used[number],
                "measured_ttft_s": point["mean_ttft_s"],
                "predicted_ttft_s": ttft,
                "ttft_error": ttft / point["mean_ttft_s"] - 1,
                "measured_hit": point["token_hit_rate"],
                "predicted_hit": hit,
                "hit_error": hit - point["token_hit_rate"],
            }
        )
    held = [row for row in rows if not row["fitted"]]
    return {
        "cost_model": model.to_json(),
        "points": rows,
        "largest_ttft_error": max(abs(row["ttft_error"]) for row in held),
        "largest_hit_error": max(abs(row["hit_error"]) for row in held),
    }


def fitted_half(points: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Which points a fit uses: every other one of each arm, beginning with the first of every other arm.

    So both halves have all arms, and what only one arm does (a replay, a load) is fitted and predicted.
    """
    seen: dict[str, int] = {}
    found = []
    for point in points:
        arm = str(point.get("arm"))
        number = seen.setdefault(arm, len(seen) % 2)
        found.append(number % 2 == 0)
        seen[arm] = number + 1
    return found
