"""Tables of docs/results.md and docs/quality.md from recorded `bench quality`: by arm, mask, task and format."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tables
from recordings import QUALITY, ROOT, Run, runs

from hybridstate.figures.paired import (
    Estimate,
    Group,
    Result,
    answers,
    blocks_of,
    cutoffs,
    difference,
    groups,
    masks,
    over_masks,
    rows,
)

ENDS = {"prompt": "to the prompt", "question": "to the question"}
SUITES = {"own": "own", "ruler": "RULER"}
READ = (
    "Scores in %, in brackets points from dense on the same questions with their standard error (0: no question "
    "scored otherwise); of random masks, which keep as many units per layer as NR, mean and SD over the masks. *To the "
    "prompt*: cached up to one token before the prompt's end; *to the question*: 64 tokens of prose and the question "
    "follow. KL: of the first token from dense, nats, cached to the prompt. *Beyond noise*: by more than two standard "
    "errors."
)
"""How the tables by arm and by format are read."""


def points(found: Estimate | None, mark: str = " ± ") -> str:
    """A difference in percentage points with its standard error, or the SD over masks; 0 where nothing differs."""
    if found is None:
        return ""
    if found.mean == 0 and not found.spread:
        return "0"
    error = "" if found.spread is None else f"{mark}{100 * found.spread:.1f}"
    return f"{100 * found.mean:+.1f}{error}"


def title(result: Result, group: Group, *, end: bool = True) -> str:
    """A group in words, with its length where there are several."""
    suite, boundary, tokens = group
    several = len({tokens for _, _, tokens in groups(result)}) > 1
    parts = [SUITES[suite], f"{tokens:,} tokens" if several else "", ENDS[boundary] if end else ""]
    return ", ".join(filter(None, parts))


def quality(result: Result) -> str:
    """Every arm but the formats: score and difference from dense on the same questions, KL, TTFT."""
    first = groups(result)[0]
    timed = [t for t in result["ttft"] if (t["suite"], t["boundary"], t["tokens"]) == first]
    seconds = timed[0]["seconds"] if timed else {}
    lines = []
    for label, names in _labels(result, formats=False):
        cells = _cells(result, names)
        if cells:
            timing = seconds.get(names[0], {}).get("median") if len(names) == 1 else None
            lines.append([label, *cells, tables.milliseconds(timing)])
    return "\n\n".join([tables.markdown([*_head(result, "arm"), "TTFT"], lines), *_notes(result)])


def formats(result: Result) -> str:
    """Formats of the live state through prefill and every decoded token, against dense FP32 (DAMP appendix B)."""
    lines = [
        [label, *cells]
        for label, names in [("fp32 (dense)", ["dense"]), *_labels(result, formats=True)]
        if (cells := _cells(result, names))
    ]
    return tables.markdown(_head(result, "state"), lines)


def against_masks(result: Result) -> str:
    """NR and WR against the mean of the random masks of the same size; which of the masks do as well as NR."""
    known = rows(result)
    lines = []
    for group in groups(result):
        for w_max in cutoffs(result):
            names, nr, wr = masks(result, w_max), f"nr-{w_max}", f"wr-{w_max}"
            kl = over_masks(result, group, w_max, "kl_first")
            if kl is None or not all((group, name) in known for name in (nr, wr)):
                continue
            cells = ["", "", ""]
            if answers(result, group):
                above = [points(difference(result, group, [name], names)) for name in (nr, wr)]
                cells = [*above, f"{equal_masks(result, group, w_max)} of {len(names)}"]
            kls = [known[group, name]["kl_first"] for name in (nr, wr)]
            lines.append(
                [
                    f"{w_max}, {title(result, group)}",
                    *cells,
                    *map(tables.significant, (*kls, kl.mean)),
                ]
            )
    head = ["W_max, tasks, cached", "NR above random", "WR above random", "masks as good as NR"]
    return tables.markdown([*head, "KL, NR", "KL, WR", "KL, random"], lines) if lines else ""


def equal_masks(result: Result, group: Group, w_max: int) -> int:
    """How many random masks score at least what NR scores."""
    known = rows(result)
    score = known[group, f"nr-{w_max}"]["accuracy"]
    return sum(
        known[group, name]["accuracy"] >= score - 1e-9  # sums of the same scores in another order
        for name in masks(result, w_max)
    )


def by_task(result: Result) -> str:
    """Scores of every arm but the formats, a column per task that the dense arm answers at all."""
    found: dict[tuple[str, int], list[Result]] = {}
    for group in groups(result):
        for block in blocks_of(result, group):
            found.setdefault((block["task"], block["tokens"]), []).append(block)
    shown = {
        key: blocks
        for key, blocks in found.items()
        if any(block["arms"]["dense"]["accuracy"] > 0 for block in blocks)
    }
    several = len({tokens for _, tokens in found}) > 1
    lines = []
    for label, names in _labels(result, formats=False):
        cells = [
            " / ".join(
                f"{100 * sum(block['arms'][n]['accuracy'] for n in names) / len(names):.1f}"
                for block in blocks
                if all(name in block["arms"] for name in names)
            )
            for blocks in shown.values()
        ]
        if any(cells):
            lines.append([label, *cells])
    head = ["arm", *(f"{task}, {n:,}" if several else task for task, n in shown)]
    parts = [tables.markdown(head, lines)] if shown else []
    zero = {task: blocks for (task, _), blocks in found.items() if (task, _) not in shown}
    if zero:
        parts.append(_no_answer(zero))
    return "\n\n".join([*parts, _protocol(result)])


def _no_answer(zero: Mapping[str, Sequence[Result]]) -> str:
    """One line for all tasks of which the dense arm answers nothing."""
    best = max(
        arm["accuracy"] for blocks in zero.values() for b in blocks for arm in b["arms"].values()
    )
    highest = "no arm does" if best == 0 else f"no arm answers more than {100 * best:.1f} % of one"
    return (
        f"Nothing answered with a dense cache, so nothing to lose ({highest}): {', '.join(zero)}."
    )


def _protocol(result: Result) -> str:
    """Questions, errors and hits of the blocks."""
    blocks, own = result["blocks"], [g for g in groups(result) if answers(result, g)]
    counts = dict.fromkeys(
        f"{b['questions']} x {b['replays']} ({SUITES[b['suite']]})"
        for group in groups(result)
        for b in blocks_of(result, group)
    )
    hits = [100 * b["hit_pooled"] for b in blocks]
    ends = " / ".join(dict.fromkeys(ENDS[boundary] for _, boundary, _ in own))
    largest = max(
        (
            b["arms"][arm]["accuracy_se"] or 0.0
            for group in own
            for b in blocks_of(result, group)
            for arm in b["arms"]
        ),
        default=0.0,
    )
    return (
        f"Scores in %{f', cached {ends}' if ends else ''}; random: mean of the masks. Questions x replays: "
        f"{', '.join(counts)}; the standard error of one score is at most {100 * largest:.1f} points. Tokens from the "
        f"cache over all input tokens: {min(hits):.1f} to {max(hits):.1f} %."
    )


def _labels(result: Result, *, formats: bool) -> list[tuple[str, list[str]]]:
    """Arms by what a row is called; the masks of one cutoff are one row."""
    found: dict[str, list[str]] = {}
    for arm in result["arms"]:
        if (arm["state"] != "fp32") == formats:
            label = arm["arm"] if arm["seed"] is None else f"random-{arm['w_max']}"
            found.setdefault(label, []).append(arm["arm"])
    return list(found.items())


def _head(result: Result, first: str) -> list[str]:
    found = groups(result)
    head = [first, "bytes"]
    for group in found:
        shown = title(result, group)
        head.append(shown if answers(result, group) else f"equal replies, {shown}")
    return [*head, *(f"KL, {title(result, g, end=False)}" for g in found if g[1] == "prompt")]


def _cells(result: Result, names: Sequence[str]) -> list[str]:
    """Bytes, a cell per group, KL where the cache ends at the prompt; empty where an arm was not measured."""
    known, found = rows(result), groups(result)
    if any((group, name) not in known for group in found for name in names):
        return []
    size = known[found[0], names[0]]["bytes"]
    cells = [f"{size:,}" if size else ""]
    kls = []
    for group in found:
        mean = {
            key: sum(known[group, name][key] for name in names) / len(names)
            for key in ("accuracy", "same_reply", "kl_first")
        }
        if group[1] == "prompt":
            kls.append(tables.significant(mean["kl_first"]))
        if not answers(result, group):
            cells.append(tables.percent(mean["same_reply"]))
        else:
            cells.append(f"{100 * mean['accuracy']:.1f} {_apart(result, group, names)}")
    return [*cells, *kls]


def _apart(result: Result, group: Group, names: Sequence[str]) -> str:
    """Behind a score: points from dense; the dense arm's own standard error."""
    if names[0] == "dense":
        error = rows(result)[group, "dense"]["accuracy_se"]
        return "" if error is None else f"± {100 * error:.1f}"
    if len(names) == 1:
        return f"({points(difference(result, group, names))})"
    w_max = next(arm["w_max"] for arm in result["arms"] if arm["arm"] == names[0])
    return f"({points(over_masks(result, group, w_max, 'difference'), ', SD ')})"


def _notes(result: Result) -> list[str]:
    parts = []
    if result["refused"]:
        names = ", ".join(
            f"{r['task']} ({r['tokens']:,}, {r['boundary']})" for r in result["refused"]
        )
        parts.append(f"Refused, cache not resident: {names}.")
    if result["left_out"]:
        names = ", ".join(f"{r['task']} ({r['tokens']:,}): {r['why']}" for r in result["left_out"])
        parts.append(f"Left out: {names}.")
    return parts


# --- docs/quality.md ----------------------------------------------------------------------------------


def overview(results: Mapping[str, Result]) -> str:
    """Points from dense of all models side by side, the arms that the papers name."""
    columns = [(r, g) for r in results.values() for g in groups(r) if answers(r, g)]
    if not columns:
        return ""
    dense = [rows(r)[g, "dense"] for r, g in columns]
    lines = [["dense, score", *(f"{100 * d['accuracy']:.1f} %" for d in dense)]]
    for w_max in sorted({w for r in results.values() for w in cutoffs(r)}):
        for policy in ("nr", "wr"):
            lines.append(_overview_row(f"{policy}-{w_max}", columns))
        random = [over_masks(r, g, w_max, "difference") for r, g in columns]
        lines.append([f"random-{w_max}", *(points(e, ", SD ") for e in random)])
        lines.append(_overview_row(f"nr-{w_max}+int8", columns))
    lines += [_overview_row(n, columns) for n in ("fp16", "bf16", "int8-step", "damp", "int4")]
    head = ["minus dense, points", *(f"`{r['model']}`, {ENDS[g[1]]}" for r, g in columns)]
    return tables.markdown(head, [line for line in lines if any(line[1:])])


def _overview_row(name: str, columns: Sequence[tuple[Result, Group]]) -> list[str]:
    cells = [points(difference(r, g, [name])) if (g, name) in rows(r) else "" for r, g in columns]
    return [name, *cells]


def windows(results: Mapping[str, Result]) -> str:
    """The check that a replay of the whole prefix is recomputation."""
    lines = [
        [
            f"`{name}`, `{found['arm']}`",
            f"{found['state_error']:.2g}",
            f"{found['state_error_limit']:g}",
            tables.percent(found["same_reply_as_recompute"], 0),
            f"{found['prefix_tokens']:,} of {found['window']:,}",
            f"{found['omitted_units']:,}",
            str(found["questions"]),
        ]
        for name, result in results.items()
        if (found := result["whole_window"])
    ]
    head = ["", "states from recomputation", "allowed", "equal replies", "tokens replayed"]
    return tables.markdown([*head, "units rebuilt", "questions"], lines) if lines else ""


def _recorded() -> dict[str, Run]:
    return {run.name: run for run in runs(QUALITY, merge=merged)}


def _sources(found: Mapping[str, Run]) -> str:
    names = [path for run in found.values() for path, _ in run.files]
    return f"Sources: {', '.join(f'[{p.name}](../{p.relative_to(ROOT)})' for p in names)}."


def overview_block() -> str:
    """Table, pictures and sources."""
    import pictures

    found = _recorded()
    if not (table := overview({name: run.result for name, run in found.items()})):
        return ""
    drawn = [
        pictures.link(name, "quality_cutoffs", name)
        for name in found
        if (pictures.FIGURES / name / "quality_cutoffs.png").exists()
    ]
    return "\n\n".join([table, *drawn, _sources(found)])


def windows_block() -> str:
    """The table of `windows` over all recordings."""
    return windows({name: run.result for name, run in _recorded().items()})


BLOCKS: dict[str, Callable[[], str]] = {
    "quality": overview_block,
    "quality-window": windows_block,
}


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
    window = windows({str(result["model"]): result})
    for part in (quality, against_masks, by_task, formats):
        sys.stdout.write(part(result) + "\n\n")
    sys.stdout.write(f"{window}\n")
    for name in sys.argv[1:]:
        if not name.endswith(".json"):
            Path(name).mkdir(parents=True, exist_ok=True)
            quality_figures(result, str(result["model"]), Path(name))


if __name__ == "__main__":
    main()
