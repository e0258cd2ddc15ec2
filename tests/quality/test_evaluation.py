"""Several seeds: what is averaged, what a stopped run keeps, parts that merge, greedy beside sampled."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridstate import api
from hybridstate.errors import NumericError, SourceError, UsageError
from hybridstate.quality import evaluation
from hybridstate.quality.calibration import Calibration
from hybridstate.quality.evaluation import Clock, OutOfTime, Part, over_draws, units
from hybridstate.quant import calibration as stages
from hybridstate.trajectories import record as recording
from hybridstate.trajectories.protocol import protocol, with_sequences
from hybridstate.trajectories.store import TrajectoryStore

SMALL: dict[str, Any] = {
    "k_hi": 2,
    "temperature": 1.0,
    "input_tokens": 24,
    "new_tokens": 20,
    "windows": (0,),
    "anchors": (2, 5),
    "horizon": 8,
    "batch": 60,
    "formats": "int8-step,damp,damp-random,int8-step-stochastic",
}
FILES = ("calibration.json", "calibration.safetensors")


def calibrate(model: Path, out: Path | None, **changes: Any) -> Calibration:
    return api.calibrate(model, out, **(SMALL | changes))


def test_seeds_are_pooled_and_their_spread_is_given(tiny_kda: Path, tmp_path: Path) -> None:
    seen: list[str] = []
    found = calibrate(
        *(tiny_kda, tmp_path / "out"),
        seeds=2,
        sequences=6,
        greedy=True,
        progress=lambda stage, *_: seen.append(stage),
    )
    document = json.loads((tmp_path / "out" / "calibration.json").read_text())
    assert document == json.loads(json.dumps(found.to_json()))
    assert "seed-1: validate" in seen
    assert "greedy: record" in seen
    assert document["validation_seeds"] == [0, 1]
    assert document["validation_sequences"] == 2 * 6
    assert document["unfinished"] == []
    assert document["step_bins"] == [[1, 1], [2, 2], [3, 4], [5, 8], [9, 16], [17, 19]]
    assert document["prefill_chunk"] == 8192
    alone = [calibrate(tiny_kda, None, seed=n, sequences=6) for n in (0, 1)]
    for place, row in enumerate(document["validation"]):
        means = [one.divergences[place].kl for one in alone]
        assert row["kl"] == pytest.approx(np.mean(means))
        assert row["kl_spread"] == pytest.approx(np.std(means, ddof=1))
        assert row["samples"]["kl"] == pytest.approx(means)
        assert len(row["steps"]["kl"]) == 6
    both = [one.document["split_agreement"] for one in alone]
    assert document["over_seeds"]["split_agreement"]["mean"] == pytest.approx(np.mean(both))
    assert document["over_seeds"]["objective"]["damp"]["spread"] > 0
    assert [row["seed"] for row in document["per_seed"]] == [0, 1]
    # the choices are the first seed's
    assert all(np.array_equal(found.arrays[k], alone[0].arrays[k]) for k in found.arrays)
    greedy = document["greedy"]
    assert greedy["temperature"] == 0
    assert greedy["fingerprint"] not in {row["fingerprint"] for row in document["per_seed"]}
    assert [row["format"] for row in greedy["validation"]] == [r.format for r in found.divergences]


def test_random_channels_and_stochastic_rounding_differ_between_seeds(tiny_gdn: Path) -> None:
    found = calibrate(tiny_gdn, None, seeds=2)
    rows = {row.format: row for row in found.divergences}
    for name in ("damp-random", "int8-step-stochastic"):
        first, second = rows[name].samples["kl"]
        assert first != second


def test_parts_of_whole_seeds_merge_to_the_bytes_of_one_run(
    tiny_gdn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = SMALL | {"seeds": 2}
    calibrate(tiny_gdn, tmp_path / "whole", seeds=2)
    parts = [tmp_path / "a", tmp_path / "b"]
    for number, folder in enumerate(parts, start=1):
        api.calibrate_part(tiny_gdn, folder, f"{number}/2", **options)
        assert [p.name for p in folder.iterdir()] == [f"seed-{number - 1}"]
    monkeypatch.setattr(stages, "record", lambda *_, **__: pytest.fail("nothing is left to record"))
    calibrate(tiny_gdn, tmp_path / "merged", seeds=2, merge=parts)
    for file in FILES:
        assert (tmp_path / "merged" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    assert not (tmp_path / ".merged.trajectories").exists()


def test_a_part_of_other_options_or_a_damaged_one_leaves_nothing_behind(
    tiny_gdn: Path, tmp_path: Path
) -> None:
    part, out = tmp_path / "part", tmp_path / "out"
    api.calibrate_part(tiny_gdn, part, "1/1", **SMALL)
    with pytest.raises(UsageError, match=r"part/seed-0 was finished with other options \(k_hi"):
        calibrate(tiny_gdn, out, merge=[part], k_hi=3)
    with pytest.raises(UsageError, match="holds no part of this run"):
        calibrate(tiny_gdn, out, merge=[tmp_path / "absent"])
    (part / "seed-0" / "result.safetensors").write_bytes(b"cut")
    with pytest.raises(SourceError, match=r"part/seed-0: cannot read a finished seed"):
        calibrate(tiny_gdn, out, merge=[part])
    assert not (tmp_path / ".out.trajectories").exists()
    calibrate(tiny_gdn, out, k_hi=3)  # without the wrong part all is well


@pytest.mark.skipif(sys.platform == "win32", reason="no advisory locks")
def test_a_refused_process_leaves_the_recording_of_the_other_alone(
    tiny_gdn: Path, tmp_path: Path
) -> None:
    place = tmp_path / ".out.trajectories" / "seed-0"
    theirs = TrajectoryStore.open(place, {"run": "theirs"}, 1)
    partial = place / ".batch-000.safetensors.partial-0"
    partial.write_text("half a batch")
    for options in ({}, {"merge": [tmp_path / "absent"]}):
        with pytest.raises(UsageError, match=r"another process|holds no part"):
            calibrate(tiny_gdn, tmp_path / "out", **options)
        assert partial.read_text() == "half a batch"
    theirs.close()  # as if it had been killed: its half batch goes, its place is free
    calibrate(tiny_gdn, tmp_path / "out")
    assert not place.parent.exists()


def test_a_deadline_keeps_finished_seeds_and_the_same_command_continues(
    tiny_gdn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrate(tiny_gdn, tmp_path / "whole", seeds=2)

    def late(clock: Clock, progress: Any, prefix: str) -> Any:
        def advance(stage: str, *_: int) -> None:
            if prefix.startswith("seed-1") and stage == "validate":
                raise OutOfTime("stopped after 1 s")

        return advance

    monkeypatch.setattr(Clock, "watched", late)
    found = calibrate(tiny_gdn, tmp_path / "out", seeds=2)
    assert found.document["unfinished"] == ["seed-1"]
    assert found.document["validation_seeds"] == [0]
    assert "not finished: seed-1" in found.warnings
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    calls: list[int] = []
    original = recording.record
    monkeypatch.setattr(stages, "record", lambda *a, **k: (calls.append(1), original(*a, **k))[1])
    calibrate(tiny_gdn, tmp_path / "out", seeds=2)
    assert not calls  # seed 0 was finished, the trajectories of seed 1 were recorded
    for file in FILES:
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    with pytest.raises(OutOfTime, match="with seeds left to do"):
        calibrate(tiny_gdn, tmp_path / "never", deadline=0.0)
    assert not (tmp_path / ".never.trajectories").exists()


def test_infinite_states_of_a_later_seed_leave_the_earlier_ones(
    tiny_kda: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = recording.record

    def broken(*args: Any, **options: Any) -> recording.Recording:
        if options["seed"] == 1:
            raise NumericError("recurrent state is nan after update 3: prompt fit/code/0")
        return original(*args, **options)

    monkeypatch.setattr(stages, "record", broken)
    with pytest.raises(NumericError, match="prompt fit/code/0"):
        calibrate(tiny_kda, tmp_path / "out", seeds=2)
    kept = tmp_path / ".out.trajectories" / "seed-0"
    assert (kept / "result.json").is_file()
    monkeypatch.setattr(stages, "record", original)
    with pytest.raises(UsageError, match=r"finished with other options \(formats") as refused:
        calibrate(tiny_kda, tmp_path / "out", seeds=2, formats="fp16")
    assert str(refused.value.hint).startswith(f"out has an unfinished run in {kept.parent}: ")
    assert calibrate(tiny_kda, tmp_path / "out", seeds=2, formats="fp16", force=True).document[
        "validation_seeds"
    ] == [0, 1]


def test_parts_and_seeds_that_make_no_sense_are_refused(tiny_gdn: Path, tmp_path: Path) -> None:
    for text in ("0/2", "3/2", "1", "a/b", "1/2/3", "-1/2"):
        with pytest.raises(UsageError, match="no part of a run"):
            Part.parse(text)
    for seeds in (0, -1, 10**12):
        with pytest.raises(UsageError, match="seeds must be 1 to 1,000"):
            units(0, seeds, greedy=False)
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds no part"):
        api.calibrate_part(tiny_gdn, tmp_path, "1/2", **SMALL)
    assert (tmp_path / "mine.txt").read_text() == "mine"
    with pytest.raises(UsageError, match="sequences must be at least 1"):
        with_sequences(protocol("quick"), 0, 3)


def test_more_validation_sequences_leave_fitting_and_batches_alone() -> None:
    paper = with_sequences(protocol("paper"), 20, 3)
    assert (paper.validation_prompts, paper.prompts_per_domain, paper.batch) == (7, 15, 45)
    assert with_sequences(protocol("paper"), 12, 3) == protocol("paper")
    assert with_sequences(protocol("paper", batch=6), 20, 3).batch == 6


def test_part_shares_of_seeds_and_of_batches() -> None:
    three = units(5, 3, greedy=True)
    assert [u.label for u in three] == ["seed-5", "seed-6", "seed-7", "greedy"]
    assert [u.label for u in Part(2, 2).whole(three)] == ["seed-6", "greedy"]
    assert Part(2, 2).batches(three, 9) is None
    one = units(5, 1, greedy=False)
    assert Part(2, 2).whole(one) == ()
    assert Part(2, 2).batches(one, 5) == (1, 3)


def test_spread_of_nested_numbers() -> None:
    found = over_draws([{"a": 1.0, "b": {"c": None}}, {"a": 3.0, "b": {"c": 2}}])
    assert found == {"a": {"mean": 2.0, "spread": pytest.approx(2**0.5)}, "b": {"c": None}}
    assert over_draws([4]) == {"mean": 4.0, "spread": None}
    assert evaluation.SPREAD_OF[0] == "split_agreement"
