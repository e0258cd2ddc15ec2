"""Tables of docs/results.md about full size: what a calibration and a decode step cost there, emitted modules.

Weights, decays and calibrations behind them are synthetic; every table says so.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from calibration_tables import paper
from recordings import recorded
from tables import Result, markdown, milliseconds, percent, times

from hybridstate.figures.decode import earlier_runs, older_kernels, uniform_routing

STAGES = {
    "load": "weights made on the GPU",
    "prefill": "prefill",
    "generate": "generation, recorded",
    "write": "writing that generation did not hide",
    "plain generation, for comparison": "plain generation, for comparison",
    "read": "reading the records",
    "risk": "risk of every channel",
    "J": "objective J of each format",
    "validate-prefill": "validation, prefill",
    "validate": "validation, decode steps",
    "other": "everything else",
}
"""Stages of a run in the order they happen; their seconds add up to the wall time."""
UPDATED = {"Qwen3.6-35B-A3B": "qwen3-next", "Kimi-Linear-48B-A3B": "kimi-linear"}
"""Names under which `bench update` has the layers of these models."""
PUBLISHED = {"qwen3_5_moe": "qwen36", "kimi_linear": "kimi_linear"}


def at_scale(results: Mapping[str, Result]) -> str:
    """Where the time of a paper-profile calibration goes, a column per geometry, with memory and disk."""
    found = list(results.values())
    measured = [result["measured"] for result in found]
    minutes = paper()["damp.calibration_minutes"]
    rows = [
        [f"{label}, s", *(f"{m['stages_s'][stage]:.1f}" for m in measured)]
        for stage, label in STAGES.items()
        if all(stage in m["stages_s"] for m in measured)
    ]
    unnamed = {stage for m in measured for stage in m["stages_s"]} - STAGES.keys()
    rows += [
        [f"{stage}, s", *(f"{m['stages_s'].get(stage, 0.0):.1f}" for m in measured)]
        for stage in sorted(unnamed)
    ]
    rows += [
        ["**wall time, s**", *(f"**{m['wall_s']:.1f}**" for m in measured)],
        ["sum of the stages, s", *(f"{sum(m['stages_s'].values()):.1f}" for m in measured)],
        ["DAMP A.2, trained model", *(_minutes(result, minutes) for result in found)],
        ["one recorded step, ms", *(f"{m['recorded_step_ms']:.2f}" for m in measured)],
        ["one plain step, ms", *(f"{m['plain_step_ms']:.2f}" for m in measured)],
        [
            "cost of recording",
            *(percent(m["recorded_step_ms"] / m["plain_step_ms"] - 1) for m in measured),
        ],
        ["peak on the GPU, GB", *(_gb(m, "device_allocated_bytes") for m in measured)],
        ["reserved there, GB", *(_gb(m, "device_reserved_bytes") for m in measured)],
        ["peak on the host, GB", *(_gb(m, "host_rss_bytes") for m in measured)],
        ["recorded on disk, GB", *(f"{m['recorded_bytes'] / 1e9:.1f}" for m in measured)],
        ["sequences at once", *(str(m["generation"]["batch"]) for m in measured)],
        ["rows validated at once", *(str(m["validation"]["rows"]) for m in measured)],
    ]
    table = markdown(["", *(f"{name}, synthetic weights" for name in results)], rows)
    protocol = found[0]["protocol"]
    formats = ", ".join(row["format"] for row in found[0]["validation"])
    return (
        f"{table}\n\nThe whole paper profile: {3 * protocol['prompts_per_split']} prompts a domain of "
        f"{protocol['input_tokens']:,} tokens, {protocol['new_tokens']:,} generated tokens each, "
        f"{protocol['dtype']} weights, validation of {formats} on {found[0]['validation_sequences']} sequences. "
        "Stages are seconds of one run on one GPU. The published times are for trained weights on other "
        "software; what they include is not said. The divergences of synthetic weights are in the files "
        "and say nothing: "
        f"FP16 alone gives a KL of {_fp16(found)}."
    )


def _fp16(results: list[Result]) -> str:
    rows = [row for result in results for row in result["validation"] if row["format"] == "fp16"]
    return " and ".join(f"{row['kl']:.2f}" for row in rows)


def _gb(measured: Result, key: str) -> str:
    return f"{measured['peak_memory'][key] / 1e9:.1f}"


def _minutes(result: Result, minutes: Mapping[str, Any]) -> str:
    name = PUBLISHED.get(result["model"]["family"])
    return f"{minutes[name]:g} min" if name else ""


def decode(result: Result) -> str:
    """Decode steps on synthetic weights: time by batch and format, where it goes, and what the packed state saves."""
    base = {r["batch"]: r["tpot_s"]["median"] for r in result["rows"] if r["state"] == "fp32"}
    order = sorted(result["rows"], key=lambda row: (row["batch"], row["state"] != "fp32"))
    counted = any(row.get("experts_used") for row in order)
    rows = [
        [
            _step(row),
            f"{row['backend']}, {row['mode']}",
            milliseconds(row["tpot_s"]["median"]),
            times(base[row["batch"]] / row["tpot_s"]["median"]) if row["batch"] in base else "",
            milliseconds(row["bytes_s"]),
            percent(row["state_share_of_bytes"]),
            *([_experts(row.get("experts_used"))] if counted else []),
        ]
        for row in order
    ]
    head = ["batch, state", "ran on", "TPOT", "FP32 over this", "its bytes alone", "state's share"]
    head += ["experts used a layer"] if counted else []
    parts = [markdown(head, rows)]
    timed = [row for row in order if row["components"] and row["state"] not in ("bf16", "fp16")]
    if timed:
        names = list(timed[0]["components"])
        rows = [
            [_step(row), *(f"{1e3 * row['components'][name]['s']:.2f}" for name in names)]
            for row in timed
        ]
        parts.append(markdown(["ms of a step", *names], rows))
    if result["savings"]:
        rows = [
            [
                str(saving["batch"]),
                milliseconds(saving["saved_s"]),
                milliseconds(saving["isolated_saving_s"]),
                percent(saving["share_of_isolated"], 0),
                percent(saving["cut_by_bytes"]),
                percent(saving["tpot_cut"]),
                percent(saving["paper_tpot_cut"]),
                *(percent(_update_share(order, saving["batch"], n)) for n in ("fp32", "damp")),
            ]
            for saving in sorted(result["savings"], key=lambda saving: saving["batch"])
        ]
        head = [
            "batch",
            "saved by DAMP",
            "by the updates alone",
            "saved step time over saved update time",
            "cut of bytes",
            "cut of TPOT",
            "cut in the paper",
            "update's share of an FP32 step",
            "of a DAMP step",
        ]
        parts.append(markdown(head, rows))
    notes = (_decode_note(result), _earlier_runs(result["rows"]), _slower_kernels(result))
    return "\n\n".join([*parts, *filter(None, notes)])


def _decode_note(result: Result) -> str:
    """What the columns mean, and how far the bytes can be trusted."""
    note = (
        "Weights are synthetic, so times count and answers do not. *Its bytes alone*: what a step moves, at the "
        "bandwidth of an in-place pass"
    )
    uniform = uniform_routing(result["rows"])
    if not uniform and any(row.get("experts_used") for row in result["rows"]):
        note += " (experts that the timed steps used, counted at each)"
    note += (
        "; *state's share*: of those bytes. Components come from one profiled step"
        f"{_same_token(result)}; *between kernels*: the median step less the sum of the others, and *update's share*: "
        "the time of the recurrent update over that step."
    )
    if uniform:
        note += (
            " Bytes of experts are those of uniform routing. The synthetic routers may use fewer experts, so a step "
            "can take less time than *its bytes alone*, and the true cut of bytes is then larger than *cut of bytes*."
        )
    if any(saving["paper_tpot_cut"] for saving in result["savings"]):
        note += " The paper measured the trained model at batch 256 on another server."
    if result.get("stopped"):
        note += " The run stopped at its deadline; what was measured until then is shown."
    return note


def _earlier_runs(rows: Sequence[Result]) -> str:
    """Which batches are of earlier runs, and what those runs did not count; or ""."""
    marked = [row for row in rows if row.get("commit")]
    if not marked:
        return ""
    text = f"Rows of {earlier_runs(rows)}, as this run ended before them"
    plain = [{key: value for key, value in row.items() if key != "commit"} for row in marked]
    if uniform_routing(plain):
        text += "; the bytes of their experts are those of uniform routing"
    if older_kernels([*plain, *rows]):
        text += "; 16-bit states lay in tiles there"
    return f"{text}."


def _same_token(result: Result) -> str:
    """Of older runs: what the profiled step was given, unlike the timed ones."""
    if all("experts_used_profiled" in row for row in result["rows"] if not row.get("commit")):
        return ""
    return (
        " (one token for all sequences, whose experts may be others than those of the timed steps)"
    )


def _update_share(rows: Sequence[Result], batch: int, state: str) -> float | None:
    """Share of the median step that the recurrent update takes; None where the step was not taken apart."""
    for row in rows:
        update = (row["components"] or {}).get("recurrent update")
        if (row["batch"], row["state"]) == (batch, state) and update:
            return float(update["s"] / row["tpot_s"]["median"])
    return None


def _experts(used: Result | None) -> str:
    return f"{used['per_layer_mean']:.1f} of {used['of'] / used['layers']:.0f}" if used else ""


def _slower_kernels(result: Result) -> str:
    """Of a run whose 16-bit states lay in tiles: what the matrix order, which the engine has since, takes; or ""."""
    states = older_kernels(result["rows"])
    old = {
        row["state"]: row
        for row in sorted(result["rows"], key=lambda row: row["batch"])
        if row["state"] in states
    }
    if not old:
        return ""
    named = " and ".join(state.upper() for state in old)
    text = (
        f"{named} states lay in tiles in this run; since then the engine keeps them in the order of matrix "
        "instructions (commit 058b877), so their steps here are those of slower kernels"
    )
    name = next((UPDATED[key] for key in UPDATED if result["model"].startswith(key)), None)
    batch = max(row["batch"] for row in old.values())
    now = {
        row["state"]: row["step_s"]["median"]
        for _, document in recorded("update.json")
        for row in document["result"]["rows"]
        if (row["dims"]["name"], row["batch"], row["gate"]) == (name, batch, "fused")
    }
    if set(old) <= set(now):
        before = [row["isolated_update"]["per_layer_s"]["median"] for row in old.values()]
        text += (
            f": one layer's update at batch {batch} took {_micro(before)} µs here and takes "
            f"{_micro([now[state] for state in old])} µs in [update.json](../benchmarks/update.json)"
        )
    return f"{text}."


def _micro(seconds: Sequence[float]) -> str:
    return " and ".join(f"{1e6 * s:.0f}" for s in seconds)


def _step(row: Result) -> str:
    return f"batch {row['batch']}, {row['state']}"


def emitted(result: Result) -> str:
    """What each emitted module's own check compared, and how long it took where modules ran one by one."""
    modules = result["modules"]
    timed = any("seconds" in found for found in modules.values())
    rows = [
        [
            name,
            "all passed" if found["ok"] else "FAILED",
            ", ".join(_checks(found["output"])),
            *([f"{found['seconds']:.1f}" if "seconds" in found else ""] if timed else []),
        ]
        for name, found in modules.items()
    ]
    columns = ["module for", "result", "compared with its reference"]
    passed = sum(found["ok"] for found in modules.values())
    beside = "" if timed else " Modules ran side by side, which is why they have no times."
    return (
        f"{markdown([*columns, *(['s, compilation included'] if timed else [])], rows)}\n\n"
        f"{passed} of {len(modules)} passed. Each line is `python module.py --check` in a process of its own "
        f"on {result['device']}: one file with torch and triton alone.{beside} Exported weights hold the key order; "
        "a module for a bundle, a plan without weights, applies it. Geometries are published; calibrations, also "
        f"those of the embedded models, are {result['calibrations']}."
    )


def _checks(lines: list[str]) -> list[str]:
    """Backends named in the output, each with how many comparisons it passed."""
    passed: dict[str, int] = {}
    for line in lines:
        words = line.split()
        if words and words[-1] == "ok":
            name = words[0].rstrip(",")
            passed[name] = passed.get(name, 0) + 1
    return [f"{name} {count}" if count > 1 else name for name, count in passed.items()]
