"""Serving with the real cache and a predicted engine: every arm, working set and seed, in the same bytes.

The dense arm runs first at every working set; the operating point is the one whose dense token hit rate is closest to
one half, chosen before any other arm runs. Every point is reported. A control without shared prefixes runs at the
operating point: there, no arm can gain by its cache.

The working set is what the clients' latest requests leave behind, by default two states each (one token before the end
of the prompt, and behind the reply); `ratio` is that number over the dense arm's slots, which running requests share.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from hybridstate.bench.cost_model import CostModel, fit
from hybridstate.bench.scheduler import Limits, Request, Run, Scheduler, Seconds
from hybridstate.bench.serving_arms import Arm, Profile, Scope
from hybridstate.bench.serving_stats import Goal, mean_over_seeds, statistics
from hybridstate.bench.traces import Trace, no_sharing
from hybridstate.errors import SourceError, UsageError
from hybridstate.plan.placement import Balance
from hybridstate.runtime.admission import Admission, Pools
from hybridstate.runtime.prefix_cache import PrefixCache
from hybridstate.runtime.radix import Keys, Tokens
from hybridstate.runtime.tiers import Finished, Prefix, Transfer

Progress = Callable[[str, int, int], None]

RATIOS: Final = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
"""Working set over dense slots."""

LIMITS: Final = (32, 16, 8)
"""Running requests at once (DASC C.3); the first sweeps all ratios, the others run at the operating point."""

DEFAULT_ARMS: Final = ("dense", "nr", "wr", "int8", "damp", "nr+int8", "damp+nr")
"""Kinds of arms; a cutoff follows where one belongs."""

TARGET_HIT: Final = 0.5
SPARE_NATIVE: Final = 4
"""Native slots beyond the running requests' in an arm with two pools."""


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
            self.seconds += self._cost.seconds("prefill", length - replayed, length)
        return replayed

    def finite(self, slot: int) -> bool:
        """There are no numbers."""
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

    def prefill(self, request: Request, start: int, end: int) -> float:
        """Predicted."""
        return self._cost.seconds("prefill", start, end)

    def decode(self, batch: Sequence[Request], steps: int) -> Seconds:
        """Predicted; every step adds one token of context per request."""
        context = sum(request.context for request in batch)
        first = self._cost.seconds("decode", len(batch), self._state_bytes, context)
        slope = self._cost.coefficients["decode"][3] * len(batch)
        return np.asarray(first + slope * np.arange(steps), np.float64)

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
        """None: nothing was computed."""
        return None

    def close(self, request: Request) -> None:
        """Nothing to do."""


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


@dataclass(frozen=True)
class Options:
    """What is simulated.

    Attributes:
        arms: kinds of `DEFAULT_ARMS`, or names of arms; dense always runs.
        cutoffs: of the arms that have one.
        ratios, limits: working set over dense slots, and running requests at once.
        clients: conversations at once.
        seeds: orders of the conversations.
        think: mean seconds before a client's next turn.
        policy, admission: of the cache.
        scope: what the budget covers.
        tp, balances: ranks, and placements of the arms with a cutoff.
        control: whether the trace without sharing runs too.
        goal: of the goodput.
    """

    arms: Sequence[str] = DEFAULT_ARMS
    cutoffs: Sequence[int] = (16, 64)
    ratios: Sequence[float] = RATIOS
    limits: Sequence[int] = LIMITS
    clients: int = 256
    seeds: int = 5
    think: float = 0.0
    policy: str = "lru"
    admission: Admission = field(default_factory=Admission)
    scope: Scope = "state"
    tp: int = 1
    balances: Sequence[Balance] = ("off",)
    control: bool = True
    goal: Goal = field(default_factory=Goal)

    @property
    def working_set(self) -> int:
        """States that the clients' latest requests leave behind."""
        kept = len(self.admission.prompt) + self.admission.finished
        return self.clients * max(1, kept)

    def check(self) -> None:
        """Refuse options that are out of range.

        Raises:
            UsageError: one is.
        """
        for name, smallest in (("clients", self.clients), ("seeds", self.seeds), ("tp", self.tp)):
            if smallest < 1:
                raise UsageError(f"--{name} must be at least 1", found=smallest)
        if not self.ratios or min(self.ratios) <= 0 or not np.isfinite(self.ratios).all():
            raise UsageError("--ratio must be positive", found=list(self.ratios))
        if not 0 <= self.think < float("inf"):
            raise UsageError("--think must be at least 0 seconds", found=self.think)
        if not self.limits or min(self.limits) < 1:
            raise UsageError("--limit must be at least 1", found=list(self.limits))


class Simulation:
    """All points of one profile and trace.

    Args:
        profile: the model.
        trace: what is served.
        cost: predicted seconds.
        options: what is simulated.
        progress: called with (stage, done, total).
    """

    def __init__(
        self,
        profile: Profile,
        trace: Trace,
        cost: CostModel,
        options: Options,
        progress: Progress | None = None,
    ) -> None:
        options.check()
        if options.scope == "state+kv" and profile.kv_bytes < 1:
            raise UsageError(
                f"the attention bytes per token of {profile.name} are not known",
                hint="give them with --kv-bytes",
            )
        self.profile, self.trace, self.cost, self.options = profile, trace, cost, options
        every = profile.arms(options.cutoffs, tp=options.tp, balances=options.balances)
        self.dense = every[0]
        self.arms = [arm for arm in every[1:] if _wanted(arm.name, options.arms)]
        unknown = [
            w for w in options.arms if w != "dense" and not any(_wanted(a.name, [w]) for a in every)
        ]
        if unknown:
            raise UsageError(
                f"no arm is called {', '.join(unknown)}",
                hint=f"there are {', '.join(arm.name for arm in every)}",
            )
        self._progress = progress or (lambda *_: None)
        self._done = 0
        extra = (len(options.limits) - 1) + (1 if options.control else 0)
        self._total = (len(options.ratios) + extra) * (1 + len(self.arms))

    def run(self) -> dict[str, Any]:
        """The whole document; dense first, then the operating point, then the other arms."""
        options, first = self.options, self.options.limits[0]
        points = [self.point(self.dense, self.trace, ratio, first) for ratio in options.ratios]
        chosen = min(points, key=lambda p: (abs(_hit(p) - TARGET_HIT), p["ratio"]))
        operating = float(chosen["ratio"])
        cases = [(ratio, first) for ratio in options.ratios]
        cases += [(operating, limit) for limit in options.limits[1:]]
        points += [
            self.point(self.dense, self.trace, *case) for case in cases[len(options.ratios) :]
        ]
        for arm in self.arms:
            points += [self.point(arm, self.trace, *case) for case in cases]
        control = []
        if options.control:
            trace = no_sharing(min(512, max(64, 2 * options.clients)))
            control = [self.point(arm, trace, operating, first) for arm in (self.dense, *self.arms)]
        _compare(points)
        _compare(control)
        return {
            "model": self.profile.name,
            "profile": {
                "note": self.profile.note,
                "synthetic": self.profile.synthetic,
                "kv_bytes_per_token": self.profile.kv_bytes,
                "tp": options.tp,
                "balances": list(options.balances),
            },
            "trace": self.trace.to_json(),
            "cost_model": self.cost.to_json(),
            "simulated": True,
            "budget_scope": options.scope,
            "clients": options.clients,
            "working_set": options.working_set,
            "think_s": options.think,
            "admission": {
                "prompt": list(options.admission.prompt),
                "junctions": options.admission.junctions,
                "every": options.admission.every,
                "finished": options.admission.finished,
            },
            "policy": options.policy,
            "seeds": options.seeds,
            "operating_point": {
                "ratio": operating,
                "rule": f"dense token hit rate closest to {TARGET_HIT:g}, chosen before other arms ran",
                "dense_token_hit_rate": _hit(chosen),
            },
            "points": points,
            "control": control,
        }

    def point(self, arm: Arm, trace: Trace, ratio: float, limit: int) -> dict[str, Any]:
        """All seeds of one arm at one working set and limit."""
        options = self.options
        slots = max(1, round(options.working_set / ratio))
        limits = Limits(options.clients, limit, think=options.think)
        found: dict[str, Any] = {
            **arm.to_json(),
            "ratio": ratio,
            "limit": limit,
            "dense_slots": slots,
        }
        self._progress("simulate", self._done, self._total)
        self._done += 1
        try:
            pools, spent = arm.pools(
                self.dense.live,
                slots,
                native=limit + SPARE_NATIVE,
                kv_bytes=self.profile.kv_bytes,
                scope=options.scope,
                policy=options.policy,
            )
        except UsageError as error:
            return {**found, "skipped": error.message}
        seeds, digests = [], []
        for seed in range(options.seeds):
            run, cache = simulate_once(
                arm, pools, trace, self.cost, limits, admission=options.admission, seed=seed
            )
            seeds.append(
                statistics(
                    run, cache.counters, clients=options.clients, limit=limit, goal=options.goal
                )
            )
            digests.append(cache.digest)
        return {
            **found,
            **spent,
            "slots_native": pools.native,
            "slots_compressed": pools.packed,
            "kv_tokens": pools.kv_tokens,
            "reclamation_digests": digests,
            "mean": mean_over_seeds(seeds),
            "seeds": seeds,
        }


def _hit(point: Mapping[str, Any]) -> float:
    return float(point["mean"]["hybridstate"]["token_hit_rate"]) if "mean" in point else -1.0


def _wanted(name: str, arms: Sequence[str]) -> bool:
    """Whether an arm's name, or its name without the cutoff and placement, is among `arms`."""
    plain = name.split(" ")[0]
    kind = "+".join(part.split("-")[0] for part in plain.split("+"))
    return name in arms or plain in arms or kind in arms


def _compare(points: Sequence[dict[str, Any]]) -> None:
    """Add every point's change against the dense arm at the same ratio and limit."""
    dense = {(p["ratio"], p["limit"]): p for p in points if p["arm"] == "dense" and "mean" in p}
    for point in points:
        base = dense.get((point["ratio"], point["limit"]))
        if base is None or "mean" not in point:
            continue
        point["against_dense"] = {
            name: point["mean"][key] / base["mean"][key] - 1 if base["mean"][key] else 0.0
            for name, key in (
                ("ttft", "mean_ttft_ms"),
                ("e2e", "mean_e2e_latency_ms"),
                ("tpot", "mean_tpot_ms"),
            )
        }


def fit_and_predict(
    points: Sequence[Mapping[str, Any]],
    predict: Callable[[Mapping[str, Any], CostModel], tuple[float, float]],
) -> dict[str, Any]:
    """Fit the cost model on every other measured point and predict the rest.

    Args:
        points: measured operating points: `operations` (kind -> rows of `cost_model.features` arguments, seconds last),
            `mean_ttft_s` and `token_hit_rate`, and whatever `predict` needs.
        predict: mean TTFT in seconds and token hit rate of a point under a cost model.

    Returns:
        The fitted model with standard errors, and measured beside predicted numbers of every point.

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
    for point in points[::2]:
        for kind, rows in point["operations"].items():
            merged.setdefault(kind, []).extend(rows)
    model = fit(merged, f"{len(points[::2])} of {len(points)} measured points")
    rows = []
    for number, point in enumerate(points):
        ttft, hit = predict(point, model)
        rows.append(
            {
                "point": number,
                "fitted": number % 2 == 0,
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
