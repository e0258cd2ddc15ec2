"""What recorded `bench quality` says, in sentences whose numbers are read from the recordings.

As in `findings`: results of one section by model in, Markdown out. Beyond noise means beyond two standard errors of
the difference on the same questions.
"""

from collections.abc import Mapping, Sequence

from findings import bullets, models
from quality_tables import ENDS, READ, equal_masks, points
from tables import Result, percent, significant

from hybridstate.figures.paired import (
    Estimate,
    Group,
    answers,
    blocks_of,
    cutoffs,
    difference,
    groups,
    masks,
    mean_difference,
    over_masks,
    rows,
)

Results = Mapping[str, Result]

PAPER_NR = 0.013
"""Largest change from dense at W_max = 16, Kimi-Linear and Qwen3-Next (DASC 5.2, Table 2)."""
VISIBLE = 1e-3
"""KL of a first token below which arms are not compared, nats."""
PAPER_DAMP = 0.0004
"""Largest change from FP32 with DAMP on RULER (DAMP appendix B)."""


def beyond(found: Estimate) -> bool:
    """Whether a difference is more than two of its standard errors."""
    return found.spread is not None and abs(found.mean) > 2 * found.spread


def hits(results: Results) -> str:
    """Compressed hits against dense ones, what contradicts the paper first."""
    results = {name: r for name, r in results.items() if cutoffs(r)}
    if not results:
        return ""
    loaded = min(share for r in results.values() for share in r["loaded"].values())
    lead = (
        "Two trained models of five million parameters on questions whose answers lie in the state alone; nothing is "
        f"claimed for large ones. {'All' if loaded == 1 else percent(loaded)} measured requests of every cached arm "
        f"started from a cached state{', compressed arms from a compressed one' if _compressed(results) else ''}."
    )
    said = (_zeros(results), _random(results), _replay(results), _int8(results))
    return "\n\n".join([lead, bullets((*said, _ruler(results), _time(results))), READ])


def _compressed(results: Results) -> bool:
    """Whether every hit of the arms that compress came from a compressed state."""
    return all(
        block["arms"][arm["arm"]]["hit"]["compressed_hits"]
        == block["arms"][arm["arm"]]["hit"]["hits"]
        for result in results.values()
        for block in result["blocks"]
        for arm in result["arms"]
        if arm["w_max"] is not None or arm["arm"] == "int8-checkpoint"
    )


def own(result: Result) -> list[Group]:
    return [group for group in groups(result) if answers(result, group)]


def _zeros(results: Results) -> str:
    """NR against dense, and whether that is what DASC reports."""
    lines, first, worst = [], [], {}
    for name, result in results.items():
        if not own(result):
            continue
        found = {
            (group, w): difference(result, group, [f"nr-{w}"])
            for group in own(result)
            for w in cutoffs(result)
        }
        first += [abs(e.mean) for (_, w), e in found.items() if w == 16]
        lost = {key: e for key, e in found.items() if e.mean < 0 and beyond(e)}
        worst[name] = min(e.mean for e in found.values())
        if not lost:
            largest = max(found.values(), key=lambda e: abs(e.mean))
            lines.append(
                f"`{name}` loses nothing beyond noise at any cutoff (largest change {points(largest)} points; "
                f"{_single(result)})"
            )
            continue
        shown = [
            f"{ENDS[group[1]]} "
            + ", ".join(f"{points(e)} at {w}" for (g, w), e in lost.items() if g == group)
            for group in dict.fromkeys(group for group, _ in lost)
        ]
        lines.append(f"`{name}` loses beyond noise {'; '.join(shown)} ({_single(result)})")
    if not lines:
        return ""
    text = f"**Zeros (NR) against a dense cache.** {'. '.join(lines)}."
    if first:
        verdict = "within that" if max(first) <= PAPER_NR else "more"
        text += (
            f" DASC reports at most {100 * PAPER_NR:.1f} points on any benchmark at W_max 16 (Table 2). The mean of "
            f"the tasks is {verdict} here: at most {100 * max(first):.1f}."
        )
    if min(worst, key=lambda n: worst[n]) == "tiny-kda" and len(worst) > 1:
        text += (
            " That key channels (KDA) lose as the cutoff grows and heads (GDN) hardly do is DASC's order too: RULER at "
            "4k, W_max 512, Kimi-Linear .95 to .92, Qwen3-Next .84 to .83 (Tables 5 and 6)."
        )
    return text


def _unanswered(result: Result) -> list[Group]:
    """Groups in RULER's formats that the dense arm cannot answer."""
    return [g for g in groups(result) if g[0] == "ruler" and not answers(result, g)]


def _single(result: Result) -> str:
    """The task that NR loses most of, where the mean over tasks may hide it."""
    found = {
        (block["task"], group, w): mean_difference([block], [f"nr-{w}"], ["dense"])
        for group in own(result)
        for block in blocks_of(result, group)
        for w in cutoffs(result)
    }
    task, group, w = worst = min(found, key=lambda key: found[key].mean)
    return f"most in one task: `{task}` {ENDS[group[1]]} at {w}, {points(found[worst])}"


def _random(results: Results) -> str:
    """The same bytes, other units."""
    above: list[Estimate] = []
    parts = []
    for name, result in results.items():
        cases, equal, spreads = 0, 0, []
        cells = []
        for group in own(result):
            found = []
            for w in cutoffs(result):
                names = masks(result, w)
                if not names:
                    continue
                found.append(difference(result, group, [f"nr-{w}"], names))
                cases += len(names)
                equal += equal_masks(result, group, w)
                over = over_masks(result, group, w, "accuracy")
                spreads.append(0.0 if over is None else over.spread or 0.0)
            above += found
            cells.append(f"{ENDS[group[1]]} {', '.join(map(points, found))}")
        if cases:
            parts.append(
                f"`{name}` {'; '.join(cells)}; {equal} of {cases} masks score as NR or better, SD over masks up to "
                f"{100 * max(spreads):.1f}"
            )
    if not parts:
        return ""
    clear = sum(e.mean > 0 and beyond(e) for e in above)
    claim = "lose more" if all(e.mean > 0 for e in above) else "do not always lose more"
    shown = next(iter(results.values()))
    return (
        f"**Random masks of the same bytes {claim}**, beyond noise in {clear} of {len(above)} cases (masks held "
        f"fixed). NR above the mean of the masks at W_max {', '.join(map(str, cutoffs(shown)))}: {'. '.join(parts)}. "
        "DASC has the same for Kimi-Linear and Kimi-K3, mixed differences for Qwen3-Next."
    )


def _replay(results: Results) -> str:
    """WR minus NR on the same questions."""
    found = {
        (name, group, w): difference(result, group, [f"wr-{w}"], [f"nr-{w}"])
        for name, result in results.items()
        for group in own(result)
        for w in cutoffs(result)
    }
    if not found:
        return ""
    best, least = (f(found, key=lambda k: found[k].mean) for f in (max, min))
    clear = [e for e in found.values() if beyond(e)]
    text = (
        f"**A replay (WR) changes answers beyond noise in {len(clear)} of {len(found)} cases.** Most for "
        f"{_where(best)}: {points(found[best])} points over NR; least for {_where(least)}: {points(found[least])}."
    )
    farther = {
        case: (wr, nr)
        for case in found
        if (wr := _kl(results[case[0]], case[1], f"wr-{case[2]}"))
        > (nr := _kl(results[case[0]], case[1], f"nr-{case[2]}"))
        and wr > VISIBLE
    }
    if farther:
        case = max(farther, key=lambda c: farther[c][0] / farther[c][1])
        told = [significant(kl) for kl in farther[case]]
        text += (
            f" Its first token can be farther from dense than NR's: {_where(case)} KL {told[0]} against {told[1]}. "
            "The window is replayed from zeros, without what came before it."
        )
    return text


def _where(case: tuple[str, Group, int]) -> str:
    name, group, w = case
    return f"`{name}` {ENDS[group[1]]} at {w}"


def _kl(result: Result, group: Group, name: str) -> float:
    return float(rows(result)[group, name]["kl_first"])


def _int8(results: Results) -> str:
    """INT8 on top of a cutoff, and of nothing."""
    pairs = []
    for result in results.values():
        names = [f"{policy}-{w}" for policy in ("nr", "wr") for w in cutoffs(result)]
        for group in own(result):
            found = [(f"{n}+int8", n) for n in names] + [("int8-checkpoint", "dense")]
            pairs += [difference(result, group, [a], [b]) for a, b in found]
    if not pairs:
        return ""
    largest = max(pairs, key=lambda e: abs(e.mean))
    clear = sum(map(beyond, pairs))
    claim = "cost nothing that can be seen" if not clear else f"change {clear} cases beyond noise"

    def smaller(result: Result) -> str:
        known, group = rows(result), groups(result)[0]
        last = f"nr-{cutoffs(result)[-1]}+int8"
        return f"{known[group, 'dense']['bytes'] / known[group, last]['bytes']:.1f}x"

    last = cutoffs(next(iter(results.values())))[-1]
    return (
        f"**INT8 checkpoints {claim}**, alone or on top of a cutoff: of {len(pairs)} differences the largest is "
        f"{points(largest)} points. At W_max {last} with INT8 a checkpoint is {models(results, smaller)} smaller than "
        "dense."
    )


def untrained(results: Results) -> str:
    """Where the dense models themselves cannot answer RULER's formats; empty otherwise."""
    found = {
        name: rows(result)[group, "dense"]["accuracy"]
        for name, result in results.items()
        for group in _unanswered(result)
    }
    if not found:
        return ""
    scores = ", ".join(f"`{name}` {percent(score)}" for name, score in found.items())
    return (
        f"Answered with a dense cache: {scores}. The models do not know these formats, so scores cannot show a loss; "
        "KL and the share of replies equal to dense's can."
    )


def _ruler(results: Results) -> str:
    """Where scores are zero: equal replies, and which KL is the wrong way round."""
    parts, wrong, nearer = [], [], []
    for name, result in results.items():
        known, last = rows(result), cutoffs(result)[-1]
        for group in _unanswered(result):
            for w in cutoffs(result):
                kl = over_masks(result, group, w, "kl_first")
                nr, wr = (_kl(result, group, f"{policy}-{w}") for policy in ("nr", "wr"))
                nearer.append(wr < nr)
                if kl is not None and nr > kl.mean:
                    wrong.append(
                        f"`{name}` at {w} ({significant(nr)} against {significant(kl.mean)})"
                    )
            equal = over_masks(result, group, last, "same_reply")
            shares = [known[group, f"{policy}-{last}"]["same_reply"] for policy in ("nr", "wr")]
            shown = [*shares, *([] if equal is None else [equal.mean])]
            parts.append(f"`{name}` {' / '.join(map(percent, shown))} at {last}")
    if not parts:
        return ""
    text = (
        f"**RULER's formats.** {untrained(results)} Equal replies with NR / WR / random: "
        f"{', '.join(parts)}."
    )
    if wrong:
        text += (
            " **NR's first token is farther from dense than that of random masks** for "
            f"{', '.join(wrong)}. A reading: one token is left to read, and NR left out what remembers those before it."
        )
    return f"{text} WR, which replays them, is nearer to dense than NR in {sum(nearer)} of {len(nearer)} cases."


def _time(results: Results) -> str:
    """Seconds of one request in models too small to save any."""
    parts, slower, cases = [], 0, 0
    repeats = min(r["protocol"]["repeats"] for r in results.values())
    for name, result in results.items():
        ratios: dict[str, list[float]] = {"nr": [], "wr": [], "recompute": []}
        for timed in result["ttft"]:
            medians = {arm: found["median"] for arm, found in timed["seconds"].items()}
            for arm, median in medians.items():
                policy = arm.split("-")[0]
                if policy in ratios:
                    ratios[policy].append(median / medians["dense"])
                if policy == "wr":
                    cases += 1
                    slower += median > medians["recompute"]
        if all(ratios.values()):
            nr, wr, again = (f"{min(x):.1f} to {max(x):.1f}" for x in ratios.values())
            parts.append(f"`{name}` NR {nr}, WR {wr}, recomputing {again}")
    if not parts:
        return ""
    return (
        f"**Time to the first token: WR is slower than reading the whole prompt again in {slower} of {cases} cases.** "
        f"Over that of a dense hit: {'; '.join(parts)}. A replay is a second pass. Our reading: `bench quality` "
        "launches both from the host, call by call, which in models this small takes longer than the work, so that a "
        "window costs about what the whole prompt does. `bench serve` captures prompts and replays, and there WR [is "
        "timed](serving.md#measured) without those launches. "
        f"With {repeats} timed requests per arm, differences between cutoffs are noise."
    )


def formats(results: Results) -> str:
    """Formats of the live state: what answers show, and what they do not."""
    results = {n: r for n, r in results.items() if any(a["state"] != "fp32" for a in r["arms"])}
    if not results:
        return ""
    said = (_unchanged(results), _lossy(results), _replies(results), _writes(results))
    return f"{bullets(said)}\n\nColumns as [above](#answers-after-compressed-hits)."


def _formats(result: Result) -> list[str]:
    return [arm["arm"] for arm in result["arms"] if arm["state"] != "fp32"]


def _apart(results: Results, name: str) -> list[Estimate]:
    return [
        difference(r, group, [name])
        for r in results.values()
        for group in own(r)
        if name in _formats(r)
    ]


def _all_formats(results: Results) -> Sequence[str]:
    return list(dict.fromkeys(name for r in results.values() for name in _formats(r)))


def _unchanged(results: Results) -> str:
    """Formats with which no question of any model scores otherwise."""
    same = [
        name
        for name in _all_formats(results)
        if all(e.mean == 0 and not e.spread for e in _apart(results, name))
    ]
    damp = _apart(results, "damp")
    if not damp:
        return ""
    largest = max(abs(e.mean) for e in damp)
    verdict = "as in the paper" if largest <= PAPER_DAMP else "more than in the paper"
    changed = "no answer" if "damp" in same else f"the score by up to {100 * largest:.1f} points"
    text = f"**DAMP changes {changed}**, {verdict} (appendix B: at most {100 * PAPER_DAMP:.2f} points on RULER)."
    others = [f"`{name}`" for name in same if name != "damp"]
    if others:
        text += (
            f" But no question scores otherwise with {', '.join(others)} either, so these answers give the choice of "
            "channels no credit."
        )
    return text


def _lossy(results: Results) -> str:
    """Formats that lose answers beyond noise, model by model."""
    lost = [
        f"`{name}` {points(e)} (`{model}`, {ENDS[group[1]]})"
        for name in _all_formats(results)
        for model, r in results.items()
        for group in own(r)
        if name in _formats(r) and (e := difference(r, group, [name])).mean < 0 and beyond(e)
    ]
    if not lost:
        return "No format loses answers beyond noise."
    return f"Beyond noise lose: {', '.join(lost)}."


def _replies(results: Results) -> str:
    """The longer replies of RULER's formats tell formats apart."""

    def shares(name: str) -> str:
        def share(result: Result) -> str:
            group = next(iter(_unanswered(result)), None)
            row = None if group is None else rows(result).get((group, name))
            return "" if row is None else percent(row["same_reply"])

        return f"`{name}` {models(results, share)}"

    if not all(_unanswered(r) for r in results.values()):
        return ""
    names = (
        "recompute",
        "fp16",
        "bf16",
        "damp",
        "int8-step",
        "damp-random",
        "fp8",
        "nvfp4",
        "int4",
    )
    return (
        f"**Longer replies do tell them apart.** Of up to {_longest(results)} tokens to RULER's formats, equal to "
        f"dense's ({' / '.join(f'`{name}`' for name in results)}): {', '.join(map(shares, names))}. A reply differs "
        "once one of its tokens does, which is far stricter than an answer; *recompute* is what arithmetic alone does, "
        "`damp-random` has DAMP's bytes."
    )


def _longest(results: Results) -> int:
    return max(int(b["budget"]) for r in results.values() for b in r["blocks"])


def _writes(results: Results) -> str:
    """How often a state was rounded, beside a calibration's validation."""
    result = next(iter(results.values()))
    chunk = result["protocol"]["chunk"]
    tokens = max(b["prefix_tokens"] for b in result["blocks"])
    own = max(b["budget"] for r in results.values() for b in r["blocks"] if b["suite"] == "own")
    return (
        f"Few writes: a prefix of {tokens:,} tokens in chunks of {chunk} is rounded {-(-tokens // chunk)} times, an "
        f"answer at most {own} times more. [Calibrations](#precision-of-the-live-state) write at thousands of steps in "
        "a row, and there formats differ."
    )
