"""Points of a serving comparison seed by seed, with a made-up server: what a run has that ends early, and goes on."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from hybridstate.bench.serving_arms import kimi_profile
from hybridstate.bench.serving_points import Outcome, other_commits
from hybridstate.bench.serving_resume import earlier
from hybridstate.bench.sweep import Job, Options, Sweep, chosen_arms
from hybridstate.bench.traces import no_sharing, wildchat_shape
from hybridstate.errors import UsageError

EVERY = kimi_profile().arms((16,))
NAMES = ("dense", "nr-16", "wr-16")
TRACE = wildchat_shape(8)
RATIOS = (0.5, 1.0)
SEEDS = 3
HITS = {0.5: 0.7, 1.0: 0.5}


class Server:
    """Ends after some outcomes; the hit rate depends on the working set alone.

    Args:
        left: outcomes until the deadline.
        failing: name of an arm and its seed that fails.
        late: name of an arm and its seed that comes too late, though a later one does not.
    """

    def __init__(
        self,
        left: int = 1000,
        failing: tuple[str, int] | None = None,
        late: tuple[str, int] | None = None,
    ) -> None:
        self.left, self.failing, self.late = left, failing, late
        self.begun: list[tuple[str, float, bool, int]] = []

    def __call__(self, jobs: Sequence[Job]) -> Iterator[Outcome | None]:
        for job in jobs:
            case = job.case
            if not self.left or (case.arm.name, job.seed) == self.late:
                yield None
                continue
            self.left -= 1
            self.begun.append((case.arm.name, case.ratio, case.control, job.seed))
            if (case.arm.name, job.seed) == self.failing:
                yield Outcome({}, "", error="RuntimeError: refused")
                continue
            times = {f"mean_{name}_ms": 10.0 + job.seed for name in ("ttft", "e2e_latency", "tpot")}
            hit = {"token_hit_rate": 0.0 if case.control else HITS[case.ratio]}
            digest = f"{case.arm.name} {case.ratio:g} {job.seed}"
            rows = {"prefill": [[float(job.seed), 1.0]]}
            yield Outcome({**times, "hybridstate": hit}, digest, digest, rows, {"mode": "eager"})


def sweep(
    server: Server, *, seeds: int = SEEDS, known: dict[str, Any] | None = None, **options: Any
) -> tuple[dict[str, Any], list[dict[str, Any]], list[tuple[str, int, int]]]:
    """Result, records made on the way, and progress."""
    records: list[dict[str, Any]] = []
    told: list[tuple[str, int, int]] = []
    given: dict[str, Any] = {"ratios": RATIOS, "limits": (4,), "clients": 8, **options}
    made = Sweep(
        EVERY[0],
        chosen_arms(EVERY, NAMES),
        TRACE,
        no_sharing(8),
        Options(cutoffs=(16,), seeds=seeds, **given),
        kv_bytes=0,
        serve=server,
        progress=lambda *step: told.append(step),
        # a copy: the sweep goes on with its lists
        record=lambda found: records.append({**found, "points": list(found["points"])}),
        known=None if known is None else earlier(known, {}),
    )
    return made.run(), records, told


def places(found: dict[str, Any], name: str = "points") -> list[tuple[str, float]]:
    return [(point["arm"], point["ratio"]) for point in found[name]]


def counts(found: dict[str, Any], name: str = "points") -> list[int]:
    return [len(point.get("seeds", ())) for point in found[name]]


ORDER = [(name, ratio) for ratio in (1.0, 0.5) for name in NAMES]
"""The operating point, and the working set next to it."""


def test_seeds_of_all_arms_come_before_the_next_seed() -> None:
    server = Server()
    found, records, told = sweep(server)
    assert places(found) == ORDER
    assert places(found, "control") == [(name, 1.0) for name in NAMES]
    assert counts(found) == [SEEDS] * 6
    assert counts(found, "control") == [SEEDS] * 3
    begun = [(name, ratio, seed) for name, ratio, control, seed in server.begun if not control]
    first = [("dense", ratio, 0) for ratio in RATIOS]
    assert begun == first + [
        (*place, seed)
        for group in (ORDER[:3], ORDER[3:])
        for seed in range(SEEDS)
        for place in group
        if (*place, seed) not in first
    ]
    assert len(records) == len(server.begun)
    for number, record in enumerate(records, 1):
        assert len(set(places(record))) == len(places(record))
        assert sum(counts(record)) + sum(counts(record, "control")) == number
    whole = (len(RATIOS) + 1) * len(NAMES) * SEEDS
    assert [total for _, _, total in told] == [whole] * len(told)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert told[-1] == ("serve", whole, whole)
    for point in found["points"]:
        assert point["reclamation_digests"] == point["output_digests"]
        assert point["operations"]["prefill"] == [[float(seed), 1.0] for seed in range(SEEDS)]


@pytest.mark.parametrize("left", range(6 * SEEDS + 1))
def test_a_run_that_is_cut_short_has_the_first_seeds_and_goes_on(left: int) -> None:
    """After any number of outcomes: seeds 0, 1 ... of every point, arms of one working set at most one apart."""
    found, records, told = sweep(Server(left), control=False)
    assert len(records) == left
    assert places(found)[0][0] == "dense"
    assert sorted(places(found)) == sorted(ORDER)
    assert sum(counts(found)) == left
    assert told[-1][1] == told[-1][2], "what was not begun is counted"
    for several in (counts(found)[:3], counts(found)[3:]):
        assert max(several) - min(several) <= 1
    assert found["not_begun"] == 6 * SEEDS - left
    for point in found["points"]:
        begun = range(len(point.get("seeds", ())))
        expected = [f"{point['arm']} {point['ratio']:g} {n}" for n in begun]
        assert point.get("output_digests", []) == expected
        assert ("not begun before the deadline" in point.get("skipped", "")) == (
            "mean" not in point
        )
    if not left:
        return
    whole, _, _ = sweep(Server(), control=False)
    for document in (found, records[-1]):
        server = Server()
        rest, _, told = sweep(server, known=document, control=False)
        by_place = dict(zip(places(rest), rest["points"], strict=True))
        for place, point in zip(places(whole), whole["points"], strict=True):
            assert by_place[place]["output_digests"] == point["output_digests"]
            assert by_place[place]["mean"] == point["mean"]
        assert len(server.begun) == 6 * SEEDS - left
        assert told[-1][1] == told[-1][2]


def test_points_of_an_earlier_run_keep_their_place_in_every_record() -> None:
    """Two seeds become three; arms and working sets that are not asked for stay at the end."""
    first, _, _ = sweep(Server(), seeds=2)
    server = Server()
    found, records, _ = sweep(server, known=first, ratios=(1.0,), control=False)
    assert [seed for *_, seed in server.begun] == [2] * 3
    for record in (*records, found):
        assert sorted(places(record)) == sorted(ORDER)
        assert places(record, "control") == places(first, "control")
    assert places(found)[:3] == ORDER[:3]
    assert counts(found) == [3 if ratio == 1.0 else 2 for _, ratio in places(found)]
    assert [sum(counts(record)) for record in records] == [13, 14, 15]
    assert found["seeds"] == 3


def test_the_operating_point_of_an_earlier_run_counts_in_the_progress() -> None:
    """Other arms run there too, though the working set was not asked for."""
    first, _, _ = sweep(Server(), seeds=1)
    server = Server()
    found, _, told = sweep(server, seeds=2, known=first, ratios=(0.5,))
    assert found["operating_point"]["ratio"] == 1.0
    assert [(n, r, c) for n, r, c, _ in server.begun] == [
        *((name, ratio, False) for name, ratio in ORDER),
        *((name, 1.0, True) for name in NAMES),
    ]
    assert all(done <= total for _, done, total in told)
    assert told[-1][1] == told[-1][2]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_an_arm_that_fails_says_so_and_keeps_the_seeds_before(seed: int) -> None:
    """Those of the same run as those of an earlier one; what ran behind the failure is left out, and said."""
    broken, said = ("nr-16", seed), "nr-16: RuntimeError: refused"
    found, records, _ = sweep(Server(failing=broken), control=False)
    for point in found["points"]:
        failed = point["arm"] == "nr-16"
        assert len(point.get("seeds", ())) == (seed if failed else SEEDS)
        assert point.get("left_out", 0) == (SEEDS - 1 - seed if failed else 0)
        assert point.get("not_continued") == (said if failed and seed else None)
        assert point.get("skipped") == (said if failed and not seed else None)
        assert point.get("failed", False) == (failed and not seed)
    for document in (found, records[-1]):
        rest, _, _ = sweep(Server(), known=document, control=False)
        assert counts(rest) == [SEEDS] * 6
        for point in rest["points"]:
            assert not {"not_continued", "left_out", "failed", "skipped"} & set(point)
            digests = [f"{point['arm']} {point['ratio']:g} {n}" for n in range(SEEDS)]
            assert point["output_digests"] == digests


def test_dense_that_fails_first_is_served_once_and_cannot_be_chosen() -> None:
    """Its point says why, and the rule's choice is that of the seeds in the table."""

    class Refused(Server):
        def __call__(self, jobs: Sequence[Job]) -> Iterator[Outcome | None]:
            for job, outcome in zip(jobs, super().__call__(jobs), strict=True):
                case = job.case
                refused = (case.arm.name, case.ratio, case.control) == ("dense", 1.0, False)
                yield Outcome({}, "", error="RuntimeError: refused") if refused else outcome

    server = Refused()
    found, _, told = sweep(server, control=False)
    assert server.begun.count(("dense", 1.0, False, 0)) == 1
    assert found["operating_point"]["ratio"] == 0.5
    assert set(found["operating_point"]["dense_token_hit_rates"]) == {"0.5"}
    (failed,) = [p for p in found["points"] if (p["arm"], p["ratio"]) == ("dense", 1.0)]
    assert failed["failed"]
    assert failed["skipped"] == "dense: RuntimeError: refused"
    assert told[-1][1] == told[-1][2]


def test_points_that_a_deadline_came_before_do_not_stay() -> None:
    """Cut short before the operating point was known: the control of the ratio that stood for it is no result."""
    first, _, _ = sweep(Server(0))
    assert {ratio for _, ratio in places(first, "control")} == {0.5}
    found, _, _ = sweep(Server(), known=first)
    assert found["operating_point"]["ratio"] == 1.0
    assert places(found, "control") == [(name, 1.0) for name in NAMES]
    assert counts(found, "control") == [SEEDS] * 3
    assert sorted(places(found)) == sorted(ORDER)


def test_an_arm_that_fails_keeps_what_an_earlier_run_has() -> None:
    broken = ("nr-16", 2)
    first, _, _ = sweep(Server(), seeds=2, control=False)
    found, _, _ = sweep(Server(failing=broken), known=first, control=False)
    for point in found["points"]:
        failed = point["arm"] == "nr-16"
        assert len(point["seeds"]) == (2 if failed else 3)
        assert point.get("not_continued") == ("nr-16: RuntimeError: refused" if failed else None)
    rest, _, _ = sweep(Server(), known=found, control=False)
    assert counts(rest) == [3] * 6
    assert not any("not_continued" in point for point in rest["points"])


@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_seed_is_missing_between_two(seed: int) -> None:
    """Workers read the clock one after the other, and it may be set back: a later seed may begin where one did not."""
    server = Server(late=("nr-16", seed))
    found, _, _ = sweep(server, control=False)
    assert found["not_begun"] == 2
    for point in found["points"]:
        gap = point["arm"] == "nr-16"
        assert len(point.get("seeds", ())) == (seed if gap else SEEDS)
        assert point.get("left_out", 0) == (SEEDS - 1 - seed if gap else 0)
    again = Server()
    rest, _, _ = sweep(again, known=found, control=False)
    assert rest["not_begun"] == 0
    assert [(n, r, s) for n, r, _, s in again.begun] == [
        ("nr-16", ratio, n) for ratio in (1.0, 0.5) for n in range(seed, SEEDS)
    ]
    whole, _, _ = sweep(Server(), control=False)
    by_place = dict(zip(places(rest), rest["points"], strict=True))
    assert [by_place[place] for place in places(whole)] == whole["points"]


def test_a_kept_point_forgets_what_its_run_left_out() -> None:
    first, _, _ = sweep(Server(late=("nr-16", 1)), control=False)
    found, _, _ = sweep(Server(), known=first, seeds=1, control=False)
    assert any("left_out" in point for point in first["points"])
    assert not any("left_out" in point for point in found["points"])
    assert (found["seeds"], found["seeds_asked"]) == (SEEDS, 1)


def test_other_pools_are_refused_before_any_seed_runs() -> None:
    """The arm would come last."""
    first, _, _ = sweep(Server(), seeds=1, control=False)
    other = next(p for p in first["points"] if (p["arm"], p["ratio"]) == ("wr-16", 0.5))
    slots = other["slots_compressed"]
    other["slots_compressed"] = 7
    server = Server()
    match = rf"another slots_compressed for wr-16 at ratio 0\.5: slots_compressed 7, here {slots}$"
    with pytest.raises(UsageError, match=match):
        sweep(server, known=first)
    assert server.begun == []
    sweep(server, known=first, ratios=(1.0,))


def test_another_sweep_is_refused_with_both_values() -> None:
    document: dict[str, Any] = {
        "points": [],
        "control": [],
        "think_s": 1.0,
        "admission": {"every": 0, "finished": True},
        "trace": {"name": "wildchat-shape", "note": "prose; 4 turns; at most 8,192", "size": 3},
        "plan_digest": None,
    }
    for name, ours, told in (
        ("think_s", 0.5, "think_s (1, here 0.5)"),
        ("admission", {"every": 16, "finished": True}, "admission (every 0, here 16)"),
        ("plan_digest", "ab", "plan_digest (none, here ab)"),
        ("absent", 3, "absent (none, here 3)"),
        ("trace", {**document["trace"], "note": "", "size": 4}, "trace (size 3, here 4)"),
        (
            "trace",
            {**document["trace"], "note": "prose; 4 turns; at most 4,096"},
            "trace (note at most 8,192, here at most 4,096)",
        ),
    ):
        assert earlier({**document, name: ours}, {name: ours}) == {}
        with pytest.raises(UsageError) as refused:
            earlier(document, {name: ours})
        assert refused.value.message == f"the earlier run had another {told}"
    with pytest.raises(UsageError, match=r"another think_s \(.*\), plan_digest \(.*\)$"):
        earlier(document, {"think_s": 2.0, "plan_digest": "ab"})
    for cause, name in (("admission", "working_set"), ("trace", "prefill chunk")):
        with pytest.raises(UsageError, match=rf"another {name} \(none, here 9\)$"):
            earlier(document, {name: 9})
        with pytest.raises(UsageError, match=rf"another {cause} \([^()]*\)$"):
            earlier(document, {name: 9, cause: {}})


def test_commits_of_earlier_seeds_are_others_each_once() -> None:
    assert other_commits(["a", "a", "b", "c", "b", "a"], "b") == ["a", "c"]
    assert other_commits(["b", "b"], "b") == []
    assert other_commits(["unknown"], None) == ["unknown"]


def test_points_without_pools_are_counted_as_done(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = type(EVERY[0]).pools

    def refused(self: Any, *given: Any, **options: Any) -> Any:
        if self.name == "wr-16":
            raise UsageError("no slot fits")
        return pools(self, *given, **options)

    monkeypatch.setattr(type(EVERY[0]), "pools", refused)
    found, _, told = sweep(Server(), control=False)
    skipped = [p for p in found["points"] if p["arm"] == "wr-16"]
    assert [p["skipped"] for p in skipped] == ["no slot fits"] * 2
    assert told[-1][1] == told[-1][2]
