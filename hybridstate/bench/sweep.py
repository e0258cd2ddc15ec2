"""A serving comparison: every arm, working set, limit and seed in the same bytes, whoever serves.

The dense arm runs first, one seed at every working set; the operating point is the one whose dense token hit rate is
closest to one half, chosen before any other arm runs. Every point is reported. A control without shared prefixes runs
at the operating point: there, no arm can gain by its cache.

The working set is what the clients' latest requests leave behind, by default two states each (one token before the end
of the prompt, and behind the reply); `ratio` is that number over the dense arm's slots, which running requests share.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from hybridstate.bench.scheduler import Limits
from hybridstate.bench.serving_arms import Arm, Scope, kind_of
from hybridstate.bench.serving_points import (
    TARGET_HIT,
    Key,
    Outcome,
    compare,
    differing,
    hit_rate,
    operating_point,
    point_of,
)
from hybridstate.bench.serving_stats import Goal
from hybridstate.bench.traces import Trace
from hybridstate.errors import UsageError
from hybridstate.plan.placement import Balance
from hybridstate.runtime.admission import Admission, Pools

Progress = Callable[[str, int, int], None]

RATIOS: Final = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
"""Working set over dense slots."""

LIMITS: Final = (32, 16, 8)
"""Running requests at once (DASC C.3); the first sweeps all ratios, the others run at the operating point."""

DEFAULT_ARMS: Final = ("dense", "nr", "wr", "int8", "damp", "nr+int8", "damp+nr")
"""Kinds of arms; a cutoff follows where one belongs."""

MOST_SLOTS: Final = 1_000_000
"""Dense slots of a point: more states than any of these traces leaves behind."""

SPARE_NATIVE: Final = 4
"""Native slots beyond the running requests' in an arm with two pools."""


@dataclass(frozen=True)
class Options:
    """What is compared.

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

    @property
    def admission_json(self) -> dict[str, Any]:
        """What the cache keeps, for a document."""
        return {
            "prompt": list(self.admission.prompt),
            "junctions": self.admission.junctions,
            "every": self.admission.every,
            "finished": self.admission.finished,
        }

    @property
    def goal_json(self) -> dict[str, float]:
        """The goal in milliseconds, as the statistics of a seed have it."""
        goals = {"ttft": self.goal.ttft, "tpot": self.goal.tpot, "e2el": self.goal.e2e}
        return {name: 1e3 * goal for name, goal in goals.items() if np.isfinite(goal)}

    def load(self, limit: int) -> Limits:
        """The load with that many running requests."""
        return Limits(self.clients, limit, think=self.think)

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
        slots = self.working_set / min(self.ratios)
        if slots > MOST_SLOTS:
            raise UsageError(
                f"--ratio {min(self.ratios):g} asks for {slots:.3g} dense slots, at most {MOST_SLOTS:,}",
                hint=f"{self.clients:,} clients leave {self.working_set:,} states behind",
                found=min(self.ratios),
            )
        if not 0 <= self.think < float("inf"):
            raise UsageError("--think must be at least 0 seconds", found=self.think)
        if not self.limits or min(self.limits) < 1:
            raise UsageError("--limit must be at least 1", found=list(self.limits))


@dataclass(frozen=True, slots=True)
class Case:
    """One arm at one working set and limit, on the trace or on the control."""

    arm: Arm
    ratio: float
    limit: int
    control: bool = False

    @property
    def key(self) -> Key:
        """Of its point."""
        return self.arm.name, self.ratio, self.limit, self.control


@dataclass(frozen=True, slots=True)
class Job:
    """One seed of a case."""

    case: Case
    pools: Pools
    seed: int


Serve = Callable[[Sequence[Job]], Iterable[Outcome | None]]
"""Outcomes of jobs in their order; None for one that was not begun."""


class Sweep:
    """All points of one trace.

    Args:
        dense, arms: the baseline and the others.
        trace, control: what is served, and prompts that share nothing.
        options: what is compared.
        kv_bytes: attention bytes per token.
        serve: runs jobs.
        progress: called with (stage, done, total).
        record: receives the points so far after every seed, in the order of the cases, then what `known` has more.
        known: points of an earlier run (`serving_resume`). Their seeds are not run again, and those that this sweep
            does not ask for stay as they are.

    Raises:
        UsageError: an option is out of range.
    """

    def __init__(
        self,
        dense: Arm,
        arms: Sequence[Arm],
        trace: Trace,
        control: Trace,
        options: Options,
        *,
        kv_bytes: int,
        serve: Serve,
        stage: str = "serve",
        progress: Progress | None = None,
        record: Callable[[dict[str, Any]], None] | None = None,
        known: Mapping[Key, Mapping[str, Any]] | None = None,
    ) -> None:
        options.check()
        if options.scope == "state+kv" and kv_bytes < 1:
            raise UsageError(
                "the attention bytes per token of this model are not known",
                hint="give them with --kv-bytes",
            )
        self.dense, self.arms = dense, list(arms)
        self.trace, self.control, self.options = trace, control, options
        self._kv_bytes = kv_bytes
        self._serve = serve
        self._stage = stage
        self._progress = progress or (lambda *_: None)
        self._record = record or (lambda _: None)
        self._known = known or {}
        extra = (len(options.limits) - 1) + (1 if options.control else 0)
        self._total = (len(options.ratios) + extra) * (1 + len(self.arms)) * options.seeds
        self._done: dict[Key, set[int]] = {}
        self._late: set[tuple[Key, int]] = set()
        self._failed: dict[Key, dict[str, Any]] = {}
        self._found: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        """Points, control and operating point: one seed of dense, then that point, then the other working sets.

        There all arms run seed by seed, dense among them, so that what is compared ran at about the same time. Working
        sets next to the operating point come first, so that a run which is cut short has those; the control and the
        other limits come last.
        """
        self._check_known()
        options, first = self.options, self.options.limits[0]
        points: list[dict[str, Any]] = []
        control: list[dict[str, Any]] = []
        self._found = {"points": points, "control": control}
        self._collect([Case(self.dense, ratio, first) for ratio in options.ratios], points, seeds=1)
        begun = {_key(p): p for p in points}
        elsewhere = [
            p
            for key, p in self._known.items()
            if (key[0], *key[2:]) == (self.dense.name, first, False) and key not in begun
        ]
        operating = float(operating_point([*points, *elsewhere])["ratio"])
        if operating not in options.ratios:  # of an earlier run; other arms run there besides
            self._total += (1 + len(self.arms)) * options.seeds
        self._found["operating_point"] = {
            "ratio": operating,
            "rule": f"dense token hit rate of the first seed closest to {TARGET_HIT:g}, chosen before other arms ran",
        }
        self._known = {**self._known, **{key: p for key, p in begun.items() if _seeds(p)}}
        self._failed = {key: p for key, p in begun.items() if p.get("failed")}
        points.clear()
        every = (self.dense, *self.arms)
        self._collect([Case(arm, operating, first) for arm in every], points)
        others = sorted(
            (ratio for ratio in options.ratios if ratio != operating),
            key=lambda ratio: (abs(ratio - operating), ratio),
        )
        self._collect([Case(arm, ratio, first) for ratio in others for arm in every], points)
        if options.control:
            self._collect([Case(arm, operating, first, True) for arm in every], control)
        limits = [Case(arm, operating, limit) for limit in options.limits[1:] for arm in every]
        self._collect(limits, points)
        kept = self._kept()
        points += kept["points"]
        control += kept["control"]
        compare(points)
        compare(control)
        dense = [p for p in points if (p["arm"], p["limit"]) == (self.dense.name, first)]
        dense.sort(key=lambda p: float(p["ratio"]))
        hits = {f"{p['ratio']:g}": hit_rate(p) for p in dense if "mean" in p}
        self._found["operating_point"] |= {
            "dense_token_hit_rate": hits.get(f"{operating:g}"),
            "dense_token_hit_rates": hits,
        }
        # an earlier run may have had more
        self._found["seeds"] = max(
            [options.seeds, *(len(p["seeds"]) for p in (*points, *control) if "mean" in p)]
        )
        self._found["seeds_asked"] = options.seeds
        self._found["not_begun"] = len(self._late)
        return self._found

    def _collect(
        self, cases: Sequence[Case], into: list[dict[str, Any]], seeds: int | None = None
    ) -> None:
        """Serve the cases seed by seed, so that a run which is cut short has some of each, and add their points."""
        seeds = seeds or self.options.seeds
        prepared = [(case, *self._prepare(case)) for case in cases]
        old = [self._held(case, head) for case, head, _ in prepared]
        for (case, _, pools), point in zip(prepared, old, strict=True):
            held = self.options.seeds if pools is None else min(self.options.seeds, _seeds(point))
            self._done.setdefault(case.key, set()).update(range(held))
        jobs = [
            (number, Job(case, pools, seed))
            for seed in range(seeds)
            for number, (case, _, pools) in enumerate(prepared)
            if pools is not None and seed >= _seeds(old[number])
        ]
        found: list[list[Outcome | None]] = [[] for _ in cases]
        waiting = {number for number, _ in jobs}
        base = len(into)

        def put() -> None:
            """The points that have a seed, or get none, into the result."""
            into[base:] = [
                (old[number] or head)
                if pools is None or _seeds(old[number]) >= seeds
                else point_of(head, found[number], old[number])
                for number, (_, head, pools) in enumerate(prepared)
                if number not in waiting or any(found[number])
            ]
            compare(into)

        self._told()
        outcomes = self._serve([job for _, job in jobs])
        for (number, job), outcome in zip(jobs, outcomes, strict=True):
            found[number].append(outcome)  # a point's seeds come in their order
            self._done[job.case.key].add(job.seed)
            self._told()
            if outcome is None:
                self._late.add((job.case.key, job.seed))
            else:
                put()
                kept = self._kept()
                self._record(
                    {**self._found, **{name: [*self._found[name], *kept[name]] for name in kept}}
                )
        waiting.clear()
        put()

    def _kept(self) -> dict[str, list[dict[str, Any]]]:
        """Points of an earlier run that this one has not come to, or does not ask for."""
        kept: dict[str, list[dict[str, Any]]] = {"points": [], "control": []}
        here = {_key(p, name == "control") for name in kept for p in self._found[name]}
        for key, point in self._known.items():
            if key not in here:
                kept["control" if key[3] else "points"].append(dict(point))
        return kept

    def _check_known(self) -> None:
        """Compare the points of an earlier run at this one's working sets, before any seed runs.

        Raises:
            UsageError: one ran in other pools.
        """
        options, arms = self.options, {arm.name: arm for arm in (self.dense, *self.arms)}
        for name, ratio, limit, control in self._known:
            swept = ratio in options.ratios and limit == options.limits[0] and not control
            if swept and name in arms:
                case = Case(arms[name], ratio, limit)
                self._held(case, self._prepare(case)[0])

    def _held(self, case: Case, head: Mapping[str, Any]) -> dict[str, Any] | None:
        """The point of an earlier run with the seeds that it has; None without one.

        Raises:
            UsageError: it ran in other pools.
        """
        found = self._known.get(case.key)
        if found is None or not found.get("seeds"):
            return None
        held = {"tp": 1, **found}  # what results without it ran with
        other = [name for name, value in head.items() if held.get(name) != value]
        if other:
            values = "; ".join(f"{name} {differing(held.get(name), head[name])}" for name in other)
            raise UsageError(
                f"the earlier run had another {', '.join(other)} for {case.arm.name} at ratio {case.ratio:g}: {values}",
                hint="resume with the same options on the same kind of device",
            )
        return dict(found)

    def _told(self) -> None:
        """Progress: seeds that ran, were there before or cannot run."""
        self._progress(self._stage, sum(map(len, self._done.values())), self._total)

    def _prepare(self, case: Case) -> tuple[dict[str, Any], Pools | None]:
        """What is known of a point before it runs, and its pools; None where the bytes hold none, or dense failed."""
        options = self.options
        if case.key in self._failed:
            return dict(self._failed[case.key]), None
        slots = max(1, round(options.working_set / case.ratio))
        head: dict[str, Any] = {
            **case.arm.to_json(),
            "tp": options.tp,
            "ratio": case.ratio,
            "limit": case.limit,
            "dense_slots": slots,
        }
        try:
            pools, spent = case.arm.pools(
                self.dense.live,
                slots,
                native=case.limit + SPARE_NATIVE,
                kv_bytes=self._kv_bytes,
                scope=options.scope,
                policy=options.policy,
            )
        except UsageError as error:
            return {**head, "skipped": error.message}, None
        return {
            **head,
            **spent,
            "slots_native": pools.native,
            "slots_compressed": pools.packed,
            "kv_tokens": pools.kv_tokens,
        }, pools

    def header(self) -> dict[str, Any]:
        """The options, for the document."""
        options = self.options
        return {
            "trace": self.trace.to_json(),
            "control_trace": self.control.to_json() if options.control else None,
            "budget_scope": options.scope,
            "clients": options.clients,
            "working_set": options.working_set,
            "think_s": options.think,
            "admission": options.admission_json,
            "policy": options.policy,
            "seeds": options.seeds,
        }


def _key(point: Mapping[str, Any], control: bool = False) -> Key:
    return point["arm"], point["ratio"], point["limit"], control


def _seeds(point: Mapping[str, Any] | None) -> int:
    """How many seeds of a point are known."""
    return 0 if point is None else len(point.get("seeds", ()))


def wanted(name: str, arms: Sequence[str]) -> bool:
    """Whether an arm's name, or its name without the cutoff and placement, is among `arms`."""
    return name in arms or name.split(" ")[0] in arms or kind_of(name) in arms


def chosen_arms(every: Sequence[Arm], names: Sequence[str]) -> list[Arm]:
    """The arms of those names beside dense, which comes first in `every`.

    Raises:
        UsageError: a name that no arm has.
    """
    unknown = [
        name for name in names if name != "dense" and not any(wanted(a.name, [name]) for a in every)
    ]
    if unknown:
        raise UsageError(
            f"no arm is called {', '.join(unknown)}",
            hint=f"there are {', '.join(arm.name for arm in every)}",
        )
    return [arm for arm in every[1:] if wanted(arm.name, names)]
