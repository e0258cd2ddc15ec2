"""Recorded results with one value edited by hand: read as they are, or one line that names the place."""

import copy
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridstate.bench.cost_model import CostModel
from hybridstate.bench.quality_record import earlier as earlier_quality
from hybridstate.bench.recorded_form import check
from hybridstate.bench.serving_form import ResultToFit
from hybridstate.bench.serving_points import Outcome, compare, point_of
from hybridstate.bench.serving_resume import earlier, read_earlier
from hybridstate.bench.serving_setup import with_exchange
from hybridstate.errors import HybridStateError, SourceError, UsageError

RECORDED = Path(__file__).parents[2] / "benchmarks"
VALUES: list[Any] = [
    None, -1, -0.5, 10**30, 10**400, 1e308, "text", "", "1", [], {}, True, False, 0, [1], {"a": 1}, 2.5, [[]],
]  # fmt: skip
MEASURED = (
    "blocks",
    "refused",
    "left_out",
    "ttft",
    "whole_window",
    "complete",
    "summary",
    "loaded",
)
PYTHON = (
    *("subscriptable", "iterable", "indices", "unhashable", "unsupported", "attribute", "int()"),
    *("Input should", "Field required", "Value error", "valid ", "not permitted", "another value"),
    *("pydantic", "\n"),
)
"""What Python and pydantic say of a wrong value, which is no help to whoever edited the file."""

Place = tuple[str | int, ...]


def document(name: str) -> Any:
    return json.loads((RECORDED / f"{name}.json").read_text())


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    inside = (
        value if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0)
    )
    for key in inside:
        yield (*at, key)
        yield from places(value[key], (*at, key))


def edited(whole: Any, chance: random.Random) -> tuple[Any, str]:
    """A copy with one entry deleted, replaced, or that of another place; kinds of places are equally likely."""
    kinds: dict[Place, list[Place]] = {}
    for place in places(whole):
        kinds.setdefault(tuple("" if isinstance(k, int) else k for k in place), []).append(place)
    place, other = (chance.choice(chance.choice(list(kinds.values()))) for _ in range(2))
    found = copy.deepcopy(whole)
    at = found
    for key in place[:-1]:
        at = at[key]
    what = chance.randrange(4)
    if what == 0:
        del at[place[-1]]
    elif what == 1:
        value = whole
        for key in other:
            value = value[key]
        at[place[-1]] = copy.deepcopy(value)
    else:
        at[place[-1]] = chance.choice(VALUES)
    return found, f"{place}: {what}"


def continued_serve(path: Path) -> None:
    """A further seed of every point, and the tables' comparison."""
    before = read_earlier(path)
    whole = document("serve-tiny-kda-tp2-think")["result"]["points"][0]
    goal = whole["seeds"][0]["goodput_slos_ms"]
    other = next((theirs for theirs in before.goals if theirs != goal), goal)
    points = list(earlier({**before.document, "goal": other}, {"goal": goal}).values())
    found = Outcome(whole["seeds"][0], "digest", "replies", whole["operations"], whole["engine"])
    more = [point_of({k: p[k] for k in ("arm", "ratio", "limit")}, [found], p) for p in points]
    compare(more)
    json.dumps(more, allow_nan=False)


def continued_quality(path: Path) -> None:
    header = {k: v for k, v in slim_quality()["result"].items() if k not in MEASURED}
    json.dumps(earlier_quality(path, header).to_json(), allow_nan=False)


def exchanged(path: Path) -> None:
    json.dumps(with_exchange(CostModel.default(), path).to_json(), allow_nan=False)


def costed(path: Path) -> None:
    json.dumps(CostModel.read(path).to_json(), allow_nan=False)


def slim_serve() -> Any:
    """With few rows, so that an edit of any other kind is as likely."""
    whole = document("serve-tiny-kda-tp2-think")
    for point in whole["result"]["points"]:
        point["operations"] = {kind: rows[:3] for kind, rows in point["operations"].items()}
    return whole


def slim_quality() -> Any:
    whole = document("quality-tiny-kda")
    result = whole["result"]
    result["arms"], result["blocks"] = result["arms"][:3], result["blocks"][:2]
    names = [arm["arm"] for arm in result["arms"]]
    for block in result["blocks"]:
        block["arms"] = {name: block["arms"][name] for name in names}
        block["dense_replies"], block["references"] = [], []
    return whole


FILES: dict[str, tuple[Callable[[], Any], Callable[[Path], None], int]] = {
    "serve": (slim_serve, continued_serve, 150),
    "quality": (slim_quality, continued_quality, 250),
    "exchange": (lambda: document("exchange-tiny-kda"), exchanged, 250),
    "cost": (lambda: CostModel.default().to_json(), costed, 250),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", FILES)
def test_an_edited_file_is_read_or_one_line(name: str, tmp_path: Path) -> None:
    make, read, count = FILES[name]
    whole, chance = make(), random.Random(20_261_201)
    path = tmp_path / "edited.json"
    refused: list[tuple[str, HybridStateError]] = []
    for _ in range(count):
        changed, what = edited(whole, chance)
        path.write_text(json.dumps(changed))
        try:
            read(path)
        except (SourceError, UsageError) as error:
            refused.append((what, error))
    for what, error in refused:
        told = "edited.json" if isinstance(error, SourceError) else "the earlier run had another"
        assert told in error.message, (what, error.message)
        assert not any(word in error.message for word in PYTHON), (what, error.message)
    assert len(refused) > count / 10


@pytest.mark.parametrize("name", sorted(p.stem for p in RECORDED.glob("serve-tiny-*.json")))
def test_recorded_runs_can_go_on(name: str) -> None:
    assert read_earlier(RECORDED / f"{name}.json").document["points"]


def place(points: list[Any], *keys: str | int) -> Any:
    at: Any = points
    for key in keys:
        at = at[key]
    return at


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        ((1, "limit"), "32", "points[1].limit is the text '32', a whole number is expected"),
        ((1, "ratio"), 0, "points[1].ratio is 0, a number above 0 is expected"),
        ((1, "arm"), "wr-64", "points[1] has the kind 'int8', 'wr' is expected of the arm 'wr-64'"),
        ((0, "seeds"), [], "points[0].seeds has 0 entries, at least 1 are expected"),
        ((0, "seeds", 1), 7, "points[0].seeds[1] is 7, an object is expected"),
        ((0, "seeds", 1, "mean_ttft_ms"), None, "points[0].seeds[1].mean_ttft_ms is null, a number is expected"),
        ((0, "seeds", 0, "itl"), 1, "points[0].seeds[0] has the unknown 'itl'"),
        ((0, "reclamation_digests"), ["a"], "points[0] has 2 seeds and 1 reclamation_digests"),
        ((0, "operations", "copy", 2), [1], "points[0].operations cannot be fitted: measured copy 2 is [1.0], 2"),
        ((0, "operations", "copy", 2), [1, 0], "points[0].operations.copy[2] took 0 seconds, a number above 0"),
        ((0, "engine", "sizes"), "all", "points[0].engine.sizes is the text 'all', a list is expected"),
        ((0, "slots_native"), 10**9, "points[0].slots_native is 1000000000, a number of at most 50000000 is expected"),
    ],
)  # fmt: skip
def test_the_place_of_a_wrong_value_is_told(
    keys: tuple[str | int, ...], value: Any, said: str, tmp_path: Path
) -> None:
    whole, path = slim_serve(), tmp_path / "given.json"
    place(whole["result"]["points"], *keys[:-1])[keys[-1]] = value
    path.write_text(json.dumps(whole))
    message = f"cannot read the points of given.json: {said}"
    with pytest.raises(SourceError, match=re.escape(message)) as failed:
        read_earlier(path)
    assert failed.value.hint is not None


def test_a_point_that_stands_there_twice_is_told(tmp_path: Path) -> None:
    whole, path = slim_serve(), tmp_path / "given.json"
    points = whole["result"]["points"]
    points.append(points[0])
    path.write_text(json.dumps(whole))
    with pytest.raises(SourceError, match=r"points\[0\] and points\[6\] are both dense at ratio 1"):
        read_earlier(path)


def test_seeds_of_which_one_lacks_its_time_are_told(tmp_path: Path) -> None:
    whole, path = slim_serve(), tmp_path / "given.json"
    del whole["result"]["points"][0]["seeds"][1]["hybridstate"]["wall_s"]
    path.write_text(json.dumps(whole))
    with pytest.raises(
        SourceError, match=r"points\[0\] has seeds with and without hybridstate\.wall_s"
    ):
        read_earlier(path)


def test_a_fit_takes_points_without_what_only_a_run_that_goes_on_needs() -> None:
    points = slim_serve()["result"]["points"]
    for point in points:
        for name in ("mean", "reclamation_digests", "output_digests", "engine", "kind"):
            del point[name]
    check(ResultToFit, {"points": [*points, {"skipped": "no room"}]})
    points[2]["mean_ttft_s"] = 0
    with pytest.raises(ValueError, match=r"points\[2\]\.mean_ttft_s is 0, a number above 0"):
        check(ResultToFit, {"points": points})
