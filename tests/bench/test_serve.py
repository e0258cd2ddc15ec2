"""`bench serve` on small models: measured bytes, the operating point, fed-back replies, workers, the fit."""

import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from hybridstate import bench_serve
from hybridstate.bench import serve_workers
from hybridstate.bench.scheduler import Limits
from hybridstate.bench.serve import Bench, Subject, thinned
from hybridstate.bench.serve_workers import Setting, load_subject
from hybridstate.bench.serving_arms import Arm
from hybridstate.bench.serving_points import operating_point
from hybridstate.bench.serving_resume import padded_to, read_earlier
from hybridstate.bench.serving_setup import profile_of
from hybridstate.bench.sweep import Options
from hybridstate.bench.traces import generated
from hybridstate.checkpoint import open_checkpoint
from hybridstate.cli.main import app
from hybridstate.cli.output import Output
from hybridstate.cli.serving_output import serving_tables
from hybridstate.errors import NumericError, SourceError, UsageError
from hybridstate.plan.select import random_selection
from hybridstate.runtime.admission import Admission
from hybridstate.runtime.parallel import Ranks
from hybridstate.runtime.serving import _powers

SCALE = 1 / 256
SMALL: dict[str, Any] = {
    "scale": SCALE,
    "conversations": 4,
    "clients": 3,
    "limits": (2,),
    "device": "cpu",
    "w_max": (16,),
}


def subject_of(model: Path, cutoffs: tuple[int, ...] = (16,)) -> Subject:
    setting = Setting(
        str(model),
        None,
        "auto",
        None,
        "cpu",
        "wildchat-shape",
        None,
        2,
        SCALE,
        Options(cutoffs=cutoffs),
    )
    return load_subject(setting, "cpu", Ranks())


@pytest.fixture(scope="module")
def result(tiny_kda: Path) -> dict[str, Any]:
    return bench_serve(
        tiny_kda,
        ratios=(0.25, 0.5),
        seeds=1,
        arms=("damp", "wr+int8", "damp+nr"),
        fit=True,
        **SMALL,
    )


def test_the_document_has_every_point_in_the_same_bytes(result: dict[str, Any]) -> None:
    assert result["simulated"] is False
    assert result["trace"]["synthetic"] is True
    assert "lengths are 0.00390625 of the published ones" in result["trace"]["note"]
    names = ["dense", "damp", "wr-16+int8", "damp+nr-16"]
    assert {(p["arm"], p["ratio"]) for p in result["points"]} == {
        (name, ratio) for name in names for ratio in (0.25, 0.5)
    }
    for point in result["points"]:
        spent = point["native_bytes"] + point["compressed_bytes"] + point["staging_bytes"]
        assert spent <= point["budget_bytes"]
        assert len(point["seeds"]) == len(point["reclamation_digests"]) == 1
        mean = point["mean"]
        assert mean["completed"] == mean["hybridstate"]["requests"]
        assert 0 < mean["mean_ttft_ms"] <= mean["mean_e2e_latency_ms"]
        assert point["operations"]["prefill"]
        assert point["engine"]["sizes"] == [1, 2]
    hits = result["operating_point"]["dense_token_hit_rates"]
    chosen = f"{result['operating_point']['ratio']:g}"
    assert abs(hits[chosen] - 0.5) == min(abs(hit - 0.5) for hit in hits.values())
    replayed = {p["arm"]: p["mean"]["hybridstate"]["replayed_tokens"] for p in result["points"]}
    assert replayed["dense"] == replayed["damp+nr-16"] == 0
    json.dumps(result, allow_nan=False)


def test_the_control_shares_nothing(result: dict[str, Any]) -> None:
    assert {p["arm"] for p in result["control"]} == {p["arm"] for p in result["points"]}
    assert all(p["mean"]["hybridstate"]["token_hit_rate"] == 0 for p in result["control"])


def test_half_of_the_points_are_predicted(result: dict[str, Any]) -> None:
    """Seconds of a busy machine are not asserted; what the cache does has to be predicted."""
    fitted = result["fit"]
    assert len(fitted["points"]) == len(result["points"])
    assert fitted["largest_hit_error"] < 0.03
    assert "standard_errors" in fitted["cost_model"]["decode"]


def test_a_recorded_run_fits_a_simulation(
    tmp_path: Path, tiny_kda: Path, result: dict[str, Any]
) -> None:
    file = tmp_path / "serve.json"
    file.write_text(json.dumps({"result": result}))
    arguments = ["bench", "simulate", str(tiny_kda), "--fit", str(file), "--scale", str(SCALE)]
    arguments += ["--conversations", "4", "--clients", "3", "--limit", "2", "--ratio", "0.25"]
    arguments += ["--seeds", "1", "--arm", "damp", "--w-max", "16", "--no-control", "-q", "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["result"]
    assert len(found["fit"]["points"]) == len(result["points"])
    assert found["cost_model"]["source"].startswith("4 of 8 measured points")
    other = CliRunner().invoke(app, [*arguments, "--think", "1"])
    assert other.exit_code == 3
    assert "think_s 0" in other.output


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
def test_bytes_are_those_of_the_tensors(family: str, tiny_checkpoint: Callable[..., Path]) -> None:
    model = tiny_checkpoint(family, tokenizer=True)
    subject = subject_of(model)
    chosen = random_selection(subject.selections[16], 7)
    subject.selections[16] = chosen
    profile = profile_of(open_checkpoint(str(model)))
    for arm in profile.arms((16,)):
        found = subject.measured(arm)
        engine = subject.engine(found, 4)
        held = sum(t.numel() * t.element_size() for t in (*engine.pool.states, *engine.pool.conv))
        assert found.live.full_bytes * 4 == held
        if found.cached is not None:
            store = subject.store(found, engine, 3)
            assert found.cached.full_bytes == store.packed_bytes


def test_an_engine_is_used_again_while_it_is_large_enough(tiny_kda: Path) -> None:
    subject = subject_of(tiny_kda)
    arms = {
        arm.name: subject.measured(arm)
        for arm in profile_of(open_checkpoint(str(tiny_kda))).arms((16,))
    }
    bench = Bench(subject, running=2, length=80, chunk=32)
    trace, dense = generated("wildchat-shape", 3, scale=SCALE), arms["dense"]
    engines = []
    for name, slots in (("dense", 12), ("wr-16+int8", 16), ("dense", 14)):
        pools, _ = arms[name].pools(dense.live, slots, native=5)
        found = bench.serve(arms[name], pools, trace, Limits(3, 2), Admission(shortest=4), 0)
        assert len(found.run.served) == sum(len(trace.make(n).turns) for n in range(3))
        assert found.cache.pools.native == pools.native
        assert found.operations["keys"]
        engines.append(bench._engines["fp32"])
    assert engines[0] is engines[1] is not engines[2]


def test_an_engine_that_is_too_small_is_gone_before_the_next_one_comes(
    tiny_kda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps and their engine hold each other, with pool, lines and graphs."""
    subject = subject_of(tiny_kda)
    arm = subject.measured(profile_of(open_checkpoint(str(tiny_kda))).arms((16,))[0])
    bench = Bench(subject, running=2, length=80, chunk=32)
    first = bench._serving(arm, 4)
    bench._warmed.add((id(first), arm.name))
    small = weakref.ref(first)
    del first
    made = Subject.engine

    def engine(self: Subject, *given: Any, **options: Any) -> Any:
        assert small() is None
        return made(self, *given, **options)

    monkeypatch.setattr(Subject, "engine", engine)
    gc.disable()
    try:
        assert bench._serving(arm, 9).engine.pool.slots >= 9
        assert not bench._warmed
    finally:
        gc.enable()


def test_rows_are_thinned_evenly() -> None:
    rows = [[7.0, float(n)] for n in range(1, 1001)]
    assert thinned(rows[:5]) == rows[:5]
    kept = thinned(rows, 11)
    assert kept[:2] == [[7.0, 1.0], [7.0, 101.0]]
    assert kept[-1] == rows[-1]
    assert thinned([[3.0, 1e-9]]) == [[3.0, 1e-7]], "a time of zero cannot be fitted"
    assert thinned([]) == []


def test_deadline_says_what_is_missing(tiny_kda: Path) -> None:
    found = bench_serve(
        tiny_kda, ratios=(0.5,), seeds=1, arms=("damp",), control=False, deadline=0.0, **SMALL
    )
    assert all("before the deadline" in point["skipped"] for point in found["points"])
    assert found["operating_point"]["dense_token_hit_rate"] is None


def test_a_failing_arm_is_reported_and_the_others_go_on(
    tiny_kda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Subject.store

    def broken(self: Subject, arm: Arm, engine: Any, packed: int, *rest: Any) -> Any:
        if arm.name == "int8" and packed > 1:
            raise RuntimeError("CUDA error\nmore")
        return store(self, arm, engine, packed, *rest)

    monkeypatch.setattr(Subject, "store", broken)
    options = {**SMALL, "conversations": 2, "clients": 2}
    found = bench_serve(
        tiny_kda, ratios=(0.25,), seeds=1, arms=("damp", "int8"), control=False, **options
    )
    points = {p["arm"]: p for p in found["points"]}
    assert points["int8"]["skipped"] == "int8: RuntimeError: CUDA error"
    assert "mean" in points["damp"]
    with pytest.raises(NumericError, match="dense arm failed at every point"):
        operating_point([{**points["int8"], "arm": "dense"}])


def test_workers_find_the_same_hits(tiny_kda: Path, result: dict[str, Any]) -> None:
    """Two processes; which prefixes are cached depends on the order of events, not on who runs them."""
    found = bench_serve(
        tiny_kda, ratios=(0.5,), seeds=1, arms=("damp",), control=False, workers=2, **SMALL
    )
    here = {p["arm"]: p for p in result["points"] if p["ratio"] == 0.5}
    for point in found["points"]:
        same = here[point["arm"]]
        assert point["token_hit_rate"] == pytest.approx(same["token_hit_rate"], abs=0.03)
    with pytest.raises(UsageError, match="at least 1"):
        bench_serve(tiny_kda, workers=0, **SMALL)


def end_worker(_job: object) -> None:
    """As the system ends a process that asks for too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_is_one_line(tiny_kda: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_workers, "_work", end_worker)
    monkeypatch.setattr(serve_workers, "_begin", print)
    with pytest.raises(UsageError, match="a worker process ended before its run"):
        bench_serve(tiny_kda, ratios=(0.5,), seeds=1, arms=("damp",), workers=2, **SMALL)


def sleep_long(_job: object) -> None:
    """A run of a large model, which nobody waits for after Ctrl-C."""
    time.sleep(300)


def test_ctrl_c_does_not_wait_for_the_runs_of_workers(
    tiny_kda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may take minutes; the points before it are in the partial file."""
    monkeypatch.setattr(serve_workers, "_work", sleep_long)
    monkeypatch.setattr(serve_workers, "_begin", print)
    served = ("cpu", "wildchat-shape", None, 4, SCALE, Options(clients=1, limits=(1,)))
    setting = Setting(str(tiny_kda), None, "auto", None, *served)
    workers = serve_workers.Workers(setting, here=None, count=2)  # type: ignore[arg-type]
    assert workers._pool is not None
    running = [workers._pool.submit(sleep_long, None) for _ in range(2)]
    while not all(run.running() for run in running):
        time.sleep(0.05)
    processes = list(workers._pool._processes.values())
    began = time.monotonic()
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        workers.close()
    assert time.monotonic() - began < 60
    assert not any(process.is_alive() for process in processes)


ORPHAN = """
import multiprocessing, os, sys, time
from hybridstate.bench.serve_workers import _end_with_parent

def child():
    _end_with_parent()
    print(os.getpid(), flush=True)
    time.sleep(120)

if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=child).start()
    time.sleep(120)
"""


def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        child = int(started.stdout.readline())
        started.kill()
    for _ in range(100):
        if not Path(f"/proc/{child}").exists() or "\nState:\tZ" in status(child):
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the started process outlived the one that started it")


def status(process: int) -> str:
    try:
        return Path(f"/proc/{process}/status").read_text()
    except OSError:
        return "\nState:\tZ"


def test_a_run_goes_on_where_another_ended(
    tmp_path: Path, tiny_kda: Path, result: dict[str, Any]
) -> None:
    file = tmp_path / "serve.json"
    file.write_text(json.dumps({"result": result}))
    arguments = {**SMALL, "seeds": 1, "deadline": 0.0, "resume": file}
    found = bench_serve(tiny_kda, ratios=(0.25, 0.5, 1.0), arms=("damp", "wr+int8"), **arguments)
    told = {(p["arm"], p["ratio"]): "skipped" not in p for p in found["points"]}
    assert told == {(name, ratio): ratio < 1 for name, ratio in told}
    assert all("skipped" not in point for point in found["control"])
    assert len(told) == 9 + 2  # two points of an arm that was not asked for stay
    with pytest.raises(UsageError, match=r"another scale \(.*, here .*\), trace"):
        bench_serve(tiny_kda, **{**arguments, "scale": 2 * SCALE})
    with pytest.raises(UsageError, match=r"another think_s \(0, here 1\)$"):
        bench_serve(tiny_kda, think=1.0, **arguments)
    changed = {**result, "points": [{**p, "slots_native": 1} for p in result["points"]]}
    file.write_text(json.dumps(changed))
    with pytest.raises(UsageError, match="another slots_native for dense"):
        bench_serve(tiny_kda, ratios=(0.25,), **arguments)


def test_a_run_goes_on_with_more_seeds_of_some_points(
    tmp_path: Path, tiny_kda: Path, result: dict[str, Any]
) -> None:
    file = tmp_path / "serve.json"
    file.write_text(json.dumps({"result": result, "provenance": {"commit": "abc"}}))
    arguments = {**SMALL, "control": False, "seeds": 2, "resume": file}
    found = bench_serve(tiny_kda, ratios=(0.25,), arms=("damp",), **arguments)
    assert found["continued"] == ["abc"]
    assert len(found["points"]) == len(result["points"])
    assert found["control"] == result["control"]
    for old in result["points"]:
        (new,) = (
            p for p in found["points"] if (p["arm"], p["ratio"]) == (old["arm"], old["ratio"])
        )
        chosen = old["ratio"] == found["operating_point"]["ratio"]
        more = 2 if (old["arm"] in ("dense", "damp") and (old["ratio"] == 0.25 or chosen)) else 1
        if old["arm"] == "dense" and old["ratio"] != 0.25:
            more = 1
        assert len(new["seeds"]) == len(new["output_digests"]) == more, old["arm"]
        assert new["seeds"][0] == old["seeds"][0]
        rates = [seed["hybridstate"]["token_hit_rate"] for seed in new["seeds"]]
        assert new["token_hit_rate"] == pytest.approx(np.mean(rates))
        assert len(new["operations"]["prefill"]) >= len(old["operations"]["prefill"])
    for point in found["points"]:
        dense = next(
            p for p in found["points"] if (p["arm"], p["ratio"]) == ("dense", point["ratio"])
        )
        both = min(len(dense["seeds"]), len(point["seeds"]))
        ours, theirs = (
            np.mean([seed["mean_ttft_ms"] for seed in p["seeds"][:both]]) for p in (point, dense)
        )
        assert point["against_dense"]["ttft"] == pytest.approx(ours / theirs - 1)
    file.write_text(json.dumps({"result": found}))
    fewer = bench_serve(tiny_kda, ratios=(0.25,), arms=("damp",), **{**arguments, "seeds": 1})
    assert (found["seeds"], fewer["seeds"], fewer["points"]) == (2, 2, found["points"])
    alone = bench_serve(
        tiny_kda, ratios=(0.25,), arms=(), **{**arguments, "seeds": 2, "resume": None}
    )
    theirs = next(p for p in found["points"] if (p["arm"], p["ratio"]) == ("dense", 0.25))
    assert theirs["output_digests"] == alone["points"][0]["output_digests"]


def test_what_an_earlier_run_has_is_recorded_from_the_first_point_on(
    tmp_path: Path, tiny_kda: Path, result: dict[str, Any]
) -> None:
    """A run that goes on and is cut short leaves one file to go on from, not two halves."""
    file = tmp_path / "serve.json"
    file.write_text(json.dumps({"result": result}))
    told: list[dict[str, Any]] = []
    arguments: dict[str, Any] = {**SMALL, "control": False, "seeds": 2, "resume": file}
    bench_serve(tiny_kda, ratios=(0.25,), arms=("damp",), record=told.append, **arguments)
    for record in told:
        for name in ("points", "control"):
            places = [(p["arm"], p["ratio"], p["limit"]) for p in record[name]]
            assert sorted(places) == sorted(
                (p["arm"], p["ratio"], p["limit"]) for p in result[name]
            )
    assert [sum(len(p["seeds"]) for p in r["points"]) for r in told] == [
        len(result["points"]) + n for n in range(1, 1 + len(told))
    ]


def altered(result: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A copy with another value; `seeds` and `engine` are those of every point."""
    found: dict[str, Any] = json.loads(json.dumps(result))
    if path[0] not in ("seeds", "engine"):
        places = [found]
    else:
        points = [*found["points"], *found["control"]]
        places = [seed for p in points for seed in p["seeds"]] if path[0] == "seeds" else points
        path = path[path[0] == "seeds" :]
    for place in places:
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value
    return found


NOTE = "static horizons of the weights, gate input -0.5 (given)"
OTHER: dict[str, tuple[tuple[str, ...], Any, str, bool]] = {
    "model": (("model",), "another", "model (another, here {model})", True),
    "clients": (("clients",), 4, "clients (4, here 3)", True),
    "think time": (("think_s",), 0.5, "think_s (0.5, here 0)", True),
    "policy": (("policy",), "cost", "policy (cost, here lru)", True),
    "scope": (("budget_scope",), "state+kv", "budget_scope (state+kv, here state)", True),
    "admission": (("admission", "every"), 16, "admission (every 16, here 0)", True),
    "ranks": (("profile", "tp"), 2, "tp (2, here 1)", True),
    "gate input": (("profile", "note"), NOTE, "gate input (-0.5, here {gate})", True),
    "goal": (
        ("seeds", "goodput_slos_ms", "ttft"),
        200.0,
        "goodput goal (ttft 200, here 10000)",
        True,
    ),
    "plan": (("plan_digest",), "ab", "plan_digest (ab, here none)", False),
    "dtype": (("dtype",), "bfloat16", "dtype (bfloat16, here float32)", False),
    "trace": (
        ("trace", "name"),
        "shared-prefix",
        "trace (name shared-prefix, here wildchat-shape)",
        False,
    ),
    "control": (("control_trace", "conversations"), 8, "control_trace (conversations 8, here 6)", False),
    "chunk": (("engine", "chunk"), 7, "prefill chunk (7, here {chunk})", False),
    "batches": (("engine", "sizes"), [1, 3], "batch size for limit 2 (3, here 2)", True),
    "device": (("device", "name"), "NVIDIA H200", "device (NVIDIA H200, here {device})", False),
    "weights": (("profile", "synthetic"), True, "synthetic weights (True, here False)", False),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER)
def test_another_sweep_does_not_go_on(
    name: str,
    tmp_path: Path,
    tiny_kda: Path,
    result: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Points that are not asked for stay, so nothing else would say that they ran otherwise."""
    path, value, told, early = OTHER[name]
    file = tmp_path / "serve.json"
    file.write_text(json.dumps({"result": altered(result, path, value)}))
    if early:  # told before the model is loaded
        monkeypatch.setattr(serve_workers, "load_subject", None)
    gate = re.search(r"gate input (\S+)", result["profile"]["note"])
    assert gate is not None
    facts = {"model": result["model"], "gate": gate[1], "device": result["device"]["name"]}
    facts["chunk"] = result["points"][0]["engine"]["chunk"]
    arguments: dict[str, Any] = {**SMALL, "seeds": 1, "resume": file}
    with pytest.raises(UsageError) as refused:
        bench_serve(tiny_kda, ratios=(1.0,), arms=("damp",), **arguments)
    assert refused.value.message == f"the earlier run had another {told.format(**facts)}"


def test_a_gate_input_that_is_given_is_the_one_of_the_model(
    tmp_path: Path, tiny_kda: Path, result: dict[str, Any]
) -> None:
    """The number counts, not where it came from."""
    file = tmp_path / "serve.json"
    file.write_text(json.dumps({"result": result}))
    given = profile_of(open_checkpoint(str(tiny_kda)), gate_input=-0.3)
    read_earlier(file).check_options(result["model"], given, earlier_options(result))
    other = profile_of(open_checkpoint(str(tiny_kda)), gate_input=-0.25)
    with pytest.raises(UsageError, match=r"another gate input \(-0\.3, here -0\.25\)$"):
        read_earlier(file).check_options(result["model"], other, earlier_options(result))


def earlier_options(result: dict[str, Any]) -> Options:
    return Options(clients=result["clients"], limits=(2,), cutoffs=(16,))


NO_RESULT = {
    "missing": (None, "No such file"),
    "of another verb": ({"command": "bench update", "result": {}}, "it is a result of `bench update`"),
    "simulated": ({"command": "bench simulate", "result": {}}, "it is a result of `bench simulate`"),
    "simulated, bare": ({"simulated": True, "points": []}, "it is simulated"),
    "that failed": ({"command": "bench serve", "ok": False, "result": None}, "it holds no result"),
    "a list": ([1], "the document is a list, an object is expected"),
    "half": ({"command": "bench serve", "result": {"points": []}}, "no 'control'"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_RESULT)
def test_a_file_that_cannot_go_on_is_told_before_the_model_is_loaded(
    name: str, tmp_path: Path, tiny_kda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_workers, "load_subject", None)
    content, why = NO_RESULT[name]
    file = tmp_path / "given.json"
    if content is not None:
        file.write_text(json.dumps(content))
    with pytest.raises(SourceError, match=rf"cannot read the points of given\.json: .*{why}"):
        bench_serve(tiny_kda, resume=file, **SMALL)


def test_batches_are_padded_as_engines_pad_them() -> None:
    for running in range(1, 40):
        sizes = _powers(running)
        for limit in range(1, running + 1):
            assert padded_to(limit, running) == min(size for size in sizes if size >= limit)


def test_commits_of_a_run_that_goes_on(
    tmp_path: Path, tiny_kda: Path, result: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others than its own, each once, in order; from the document of a file or of `--json`."""
    monkeypatch.setattr("hybridstate.bench.serving_resume.environment", lambda: {"commit": "own"})
    file = tmp_path / "serve.json"
    ran = {**result, "continued": ["b", "own", "b", "a"]}
    for document, expected in (
        ({"result": ran, "provenance": {"commit": "c"}}, ["b", "a", "c"]),
        ({"result": ran, "provenance": {"commit": "own"}}, ["b", "a"]),
        ({"result": {**ran, "provenance": {"commit": "d"}}}, ["b", "a", "d"]),
        ({"result": result, "provenance": {"commit": "own"}}, []),
        (result, ["unknown"]),
    ):
        file.write_text(json.dumps(document))
        assert read_earlier(file).commits == expected


def test_seeds_that_ran_otherwise_are_told(
    tmp_path: Path, tiny_kda: Path, result: dict[str, Any]
) -> None:
    """Kept points and earlier seeds of a captured run beside eager ones, and why an arm has no more seeds."""
    captured = {"mode": "cuda-graph", "prompts": {"mode": "cuda-graph"}}
    earlier = json.loads(json.dumps(result))
    for point in (*earlier["points"], *earlier["control"]):
        point["engine"] = captured
    file = tmp_path / "serve.json"
    file.write_text(json.dumps({"result": earlier}))
    arguments: dict[str, Any] = {**SMALL, "control": False, "seeds": 2, "resume": file}
    found = bench_serve(tiny_kda, ratios=(0.25,), arms=("damp",), **arguments)
    point = next(p for p in found["points"] if (p["arm"], p["ratio"]) == ("dense", 0.25))
    assert point["earlier_engines"] == [captured]
    assert point["engine"]["mode"] == "eager"
    found["points"][-1]["not_continued"] = f"{found['points'][-1]['arm']}: RuntimeError: CUDA error"
    out = Output("bench serve")
    serving_tables(out, found)
    told = " ".join(out.warnings)
    last = found["points"][-1]
    where = f"{last['arm']} at ratio {last['ratio']:g}"
    assert f"no more seeds of {where}: RuntimeError: CUDA error" in told
    assert "seeds ran in different ways, whose seconds do not compare" in told
    assert "steps eager, prompts eager (dense, damp)" in told
    assert "before the deadline" not in told
    out = Output("bench serve")
    serving_tables(out, result)
    assert out.warnings == []


def test_command_writes_document_and_figures(tmp_path: Path, tiny_kda: Path) -> None:
    arguments = ["bench", "serve", str(tiny_kda), "--device", "cpu", "--scale", str(SCALE)]
    arguments += ["--conversations", "3", "--clients", "2", "--limit", "2", "--seeds", "1"]
    arguments += ["--arm", "nr+int8", "--w-max", "8", "--w-max", "16", "--no-control"]
    arguments += ["--ratio", "0.2", "--ratio", "0.4"]
    folder = tmp_path / "out"
    done = CliRunner().invoke(app, [*arguments, "--json", "-q", "-o", str(folder)])
    assert done.exit_code == 0, done.output
    assert {path.name for path in folder.iterdir()} == {
        "serve.json",
        "serving_cutoffs.csv",
        "serving_cutoffs.png",
        "serving_ratios.csv",
        "serving_ratios.png",
    }
    assert not list(tmp_path.glob("*.partial.json"))
    document = json.loads((folder / "serve.json").read_text())
    assert document["command"] == "bench serve"
    rows = (folder / "serving_ratios.csv").read_text().splitlines()
    assert len(rows) == 1 + len(document["result"]["points"])
    assert np.isfinite(float(rows[1].split(",")[7]))
