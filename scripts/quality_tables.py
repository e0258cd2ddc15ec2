"""Tables of docs/results.md from recorded `bench quality`: answers by arm, by task, by format, and the checks."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tables

Result = Mapping[str, Any]
Group = tuple[str, str, int]

SUITES = {"own": "the embedded models' tasks", "ruler": "RULER's formats"}
BOUNDARIES = {
    "prompt": "cached up to one token before the prompt's end",
    "question": "cached up to 64 tokens of prose before the question",
}


def groups(result: Result) -> list[Group]:
    """Suites, boundaries and lengths in the order they ran."""
    return list(dict.fromkeys((r["suite"], r["boundary"], r["tokens"]) for r in result["summary"]))


def quality(result: Result) -> str:
    """Mean score of the tasks by arm, a column per suite, boundary and length; random masks as mean and SD."""
    found = {((r["suite"], r["boundary"], r["tokens"]), r["arm"]): r for r in result["summary"]}
    columns = groups(result)
    rows = []
    for label, names in _labels(result["arms"], formats=False):
        first = next((found[g, names[0]] for g in columns if (g, names[0]) in found), None)
        if first is None:
            continue
        size = f"{first['bytes']:,}" if first["bytes"] else ""
        rows.append([label, size, *(_cell(found, group, names) for group in columns)])
    head = ["arm", "bytes of a checkpoint", *(_title(group) for group in columns)]
    return "\n\n".join([tables.markdown(head, rows), *_checks(result)])


def by_task(result: Result) -> str:
    """Every task: dense, NR, WR and random masks at the largest cutoff, with the pooled hit rate."""
    cutoffs = [a["w_max"] for a in result["arms"] if a["w_max"] is not None]
    w_max = max(cutoffs) if cutoffs else None
    rows = []
    for block in result["blocks"]:
        arms = block["arms"]
        random = next((r for r in block["random"] if r["w_max"] == w_max), None)
        masks = "" if random is None else tables.percent(random["mean"])
        if random is not None and random["sd_over_masks"] is not None:
            masks += f", SD {100 * random['sd_over_masks']:.1f}"
        rows.append(
            [
                f"{block['task']}, {block['tokens']:,}, to the {block['boundary']}",
                tables.percent(block["hit_pooled"]),
                *(
                    _score(arms[name])
                    for name in ("dense", f"nr-{w_max}", f"wr-{w_max}")
                    if name in arms
                ),
                masks,
                f"{block['questions']} x {block['replays']}",
            ]
        )
    given = ("NR", "WR") if cutoffs else ()
    head = ["task", "token hit", "dense", *(f"{p} {w_max}" for p in given), f"random {w_max}"]
    return tables.markdown([*head, "questions x replays"], rows)


def formats(result: Result) -> str:
    """Formats of the live state through prefill and every decoded token, against dense FP32 (DAMP appendix B)."""
    found = {((r["suite"], r["boundary"], r["tokens"]), r["arm"]): r for r in result["summary"]}
    columns = groups(result)
    rows = []
    for label, names in [("fp32 (dense)", ["dense"]), *_labels(result["arms"], formats=True)]:
        first = next((found[g, names[0]] for g in columns if (g, names[0]) in found), None)
        if first is None:
            continue
        cells = []
        for group in columns:
            row = found.get((group, names[0]))
            cells += ["", ""] if row is None else [_score(row), tables.significant(row["kl_first"])]
        rows.append([label, f"{first['bytes']:,}", *cells])
    head = ["state", "bytes"]
    for group in columns:
        head += [_title(group), "KL"]
    return tables.markdown(head, rows)


def untrained(result: Result, *, below: float = 0.1) -> str:
    """A sentence where the dense model itself cannot answer RULER's formats; empty otherwise."""
    for row in result["summary"]:
        if row["arm"] == "dense" and row["suite"] == "ruler" and row["accuracy"] < below:
            return (
                f"With a dense cache `{result['model']}` answers {tables.percent(row['accuracy'])} in RULER's formats: "
                "it does not know them, so accuracy cannot show a loss there. KL can, and so can the share of equal "
                "replies in the recorded file."
            )
    return ""


def _labels(arms: Sequence[Result], *, formats: bool) -> list[tuple[str, list[str]]]:
    rows: dict[str, list[str]] = {}
    for arm in arms:
        if (arm["state"] != "fp32") != formats:
            continue
        label = arm["arm"] if arm["seed"] is None else f"random-{arm['w_max']}"
        rows.setdefault(label, []).append(arm["arm"])
    return list(rows.items())


def _cell(found: Mapping[tuple[Group, str], Result], group: Group, names: Sequence[str]) -> str:
    values = [found[group, name] for name in names if (group, name) in found]
    if len(values) != len(names):
        return ""
    if len(values) == 1:
        return _score(values[0])
    scores = [row["accuracy"] for row in values]
    mean = sum(scores) / len(scores)
    spread = (sum((s - mean) ** 2 for s in scores) / (len(scores) - 1)) ** 0.5
    return f"{tables.percent(mean)}, SD {100 * spread:.1f}"


def _score(row: Result) -> str:
    error = row["accuracy_se"]
    return tables.percent(row["accuracy"]) + ("" if error is None else f" ± {100 * error:.1f}")


def _title(group: Group) -> str:
    suite, boundary, tokens = group
    return f"{SUITES[suite]}, {tokens:,} tokens, {BOUNDARIES[boundary]}"


def _checks(result: Result) -> list[str]:
    parts = []
    found = result["whole_window"]
    if found is not None:
        parts.append(
            f"WR equals recomputation: `{found['arm']}` replays all {found['prefix_tokens']} tokens of a prefix; "
            f"states within {tables.significant(found['state_error'])} (limit {found['state_error_limit']:g}), "
            f"{tables.percent(found['same_reply_as_recompute'], 0)} of the replies equal."
        )
    if untrained(result):
        parts.append(untrained(result))
    if result["refused"]:
        names = ", ".join(
            f"{r['task']} ({r['tokens']:,}, {r['boundary']})" for r in result["refused"]
        )
        parts.append(f"Refused, cache not resident: {names}.")
    if result["left_out"]:
        names = ", ".join(f"{r['task']} ({r['tokens']:,}): {r['why']}" for r in result["left_out"])
        parts.append(f"Left out: {names}.")
    return parts


def merged(results: Sequence[Result]) -> dict[str, Any]:
    """One result of several recordings of one model with the same arms, e.g. of its two suites."""
    whole = dict(results[0])
    for other in results[1:]:
        if (other["model"], other["arms"]) != (whole["model"], whole["arms"]):
            raise ValueError("the recordings are of other models or arms")
        for name in ("summary", "blocks", "refused", "left_out", "ttft"):
            whole[name] = [*whole[name], *other[name]]
        whole["whole_window"] = whole["whole_window"] or other["whole_window"]
        whole["complete"] = whole["complete"] and other["complete"]
    return whole


def main() -> None:
    """`python scripts/quality_tables.py FILE.json... [FOLDER]`: print the tables, draw the figures."""
    from hybridstate.figures.quality import quality_figures

    files = [Path(name) for name in sys.argv[1:] if name.endswith(".json")]
    result = merged([json.loads(file.read_text())["result"] for file in files])
    for part in (quality, by_task, formats):
        sys.stdout.write(part(result) + "\n\n")
    for name in sys.argv[1:]:
        if not name.endswith(".json"):
            Path(name).mkdir(parents=True, exist_ok=True)
            quality_figures(result, str(result["model"]), Path(name))


if __name__ == "__main__":
    main()
