"""`hybridstate bench quality`: answers after compressed hits, and with the live state in every format."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hybridstate.cli.bench_options import Masks, PlanFolder
from hybridstate.cli.bench_output import (
    OutputPath,
    check_output,
    check_partial,
    finish,
    partial_of,
    recorder,
)
from hybridstate.cli.options import (
    Device,
    Dtype,
    Force,
    GateInput,
    GateInputFrom,
    Json,
    LocalModel,
    Quiet,
    WMax,
    check_device,
    parse_gate_input,
)
from hybridstate.cli.output import Output, command

UNTRAINED = 0.1
"""Below this share of right answers a dense model cannot show what a compressed one loses."""


def quality(
    model: LocalModel,
    plan: PlanFolder = None,
    w_max: WMax = None,
    gate_input: GateInput = "auto",
    gate_input_from: GateInputFrom = None,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="Format of the live state, as in calibrate; repeatable, none for no format. [default: all]",
            show_default=False,
        ),
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks",
            metavar="TASK",
            help="own (the embedded models' tasks), ruler, or a task's name; repeatable. [default: own, ruler]",
            show_default=False,
        ),
    ] = None,
    qa: Annotated[
        Path | None,
        typer.Option(
            "--qa",
            metavar="FILE",
            help="Questions in SQuAD's form (XQuAD), .json or .xz: adds qa_1.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(
            "--tokens",
            metavar="N",
            help="Length of a prompt, repeatable; choose what the model was trained for. [default: 4096]",
            show_default=False,
        ),
    ] = None,
    boundary: Annotated[
        list[str] | None,
        typer.Option(
            "--boundary",
            metavar="prompt|question",
            help="Cached prefixes end one token before the prompt's end, or before 64 tokens of prose and "
            "the question; repeatable. [default: prompt; own tasks also question]",
            show_default=False,
        ),
    ] = None,
    questions: Annotated[
        int, typer.Option("--questions", metavar="N", help="Per task and length.")
    ] = 30,
    replays: Annotated[
        int, typer.Option("--replays", metavar="N", help="Measured rounds after the warm one.")
    ] = 3,
    seeds: Masks = 5,
    chunk: Annotated[
        int,
        typer.Option(
            "--chunk", metavar="N", help="Prefill tokens between two writes of a formatted state."
        ),
    ] = 512,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="T", help="Of the replies; 0 is greedy.")
    ] = 0.0,
    slots: Annotated[
        int | None,
        typer.Option(
            "--slots",
            metavar="N",
            help="Cached states per arm. [default: as many as questions]",
            show_default=False,
        ),
    ] = None,
    resident: Annotated[
        bool,
        typer.Option(
            "--resident",
            help="Refuse blocks with an eviction, a token hit of at most 0.70, or under 95 % loaded requests.",
        ),
    ] = False,
    repeats: Annotated[
        int, typer.Option("--repeats", metavar="N", help="Timed requests per arm, 0 for none.")
    ] = 5,
    rows: Annotated[
        int | None,
        typer.Option(
            "--rows",
            metavar="N",
            help="Sequences decoded at once. [default: 64, on a GPU by memory]",
            show_default=False,
        ),
    ] = None,
    within: Annotated[
        float | None,
        typer.Option(
            "--within",
            metavar="SECONDS",
            help="Begin no further block after that long, and say which are missing.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            metavar="FILE",
            help="Earlier result of the same options, whole or partial; its blocks are not run again.",
            show_default=False,
        ),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    output: OutputPath = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Answers after compressed hits (NR, WR, INT8, random masks), and with the live state in every format.

    One unscored warm request per prefix, then measured replays through the prefix cache, compressed states
    only. RULER's tasks are generated here on CC0 prose; the embedded models were trained on their own tasks
    and not on RULER's. Prompts are synthetic and plain text, without a chat template.
    """
    with command("bench quality", model=model, json=json, quiet=quiet) as out:
        check_device(device)
        check_output(output, force=force, reads=(qa, gate_input_from))
        check_partial(output, force=force, resume=resume)
        from hybridstate import api

        result = api.bench_quality(
            model,
            plan=plan,
            w_max=w_max,
            gate_input=parse_gate_input(gate_input),
            gate_input_from=gate_input_from,
            formats=[] if formats == ["none"] else formats,
            tasks=named_tasks(tasks, qa=qa is not None),
            qa=qa,
            tokens=tokens,
            boundaries=boundary,
            questions=questions,
            replays=replays,
            seeds=seeds,
            chunk=chunk,
            temperature=temperature,
            slots=slots,
            resident=resident,
            repeats=repeats,
            rows=rows,
            within=within,
            resume=resume,
            device=device,
            dtype=dtype,
            progress=out.progress,
            record=recorder(out, output),
        ).to_json()
        quality_tables(out, result)
        finish(out, "quality", result, output, force=force, draw=_draw)
        if output is not None:
            partial_of(output).unlink(missing_ok=True)


def named_tasks(given: Sequence[str] | None, *, qa: bool) -> list[str] | None:
    """Tasks of a list that may name the two suites."""
    if given is None:
        return None
    from hybridstate.quality import ruler
    from hybridstate.quality import tasks as own

    suites = {"own": own.TASKS, "ruler": ruler.TASKS if qa else ruler.TASKS[:-1]}
    return [task for name in given for task in suites.get(name, (name,))]


def _draw(result: dict[str, Any], folder: Path) -> None:
    from hybridstate.figures.quality import quality_figures

    quality_figures(result, str(result["model"]), folder)


# -- tables -------------------------------------------------------------------------------------------


def quality_tables(out: Output, result: Mapping[str, Any]) -> None:
    """A table per suite, boundary and length: arms against tasks; then tasks with their hit rates, and checks."""
    groups = dict.fromkeys((b["suite"], b["boundary"], b["tokens"]) for b in result["blocks"])
    for suite, boundary, tokens in groups:
        blocks = [
            b
            for b in result["blocks"]
            if (b["suite"], b["boundary"], b["tokens"]) == (suite, boundary, tokens)
        ]
        _arm_table(
            out, result, blocks, f"{suite} tasks, {tokens:,} tokens, cached up to the {boundary}"
        )
    _task_table(out, result)
    _notes(out, result)


def _arm_table(
    out: Output, result: Mapping[str, Any], blocks: Sequence[Mapping[str, Any]], title: str
) -> None:
    """One row per arm, random masks pooled; a column per task where they are few."""
    names = [b["task"] for b in blocks] if len(blocks) <= 6 else []
    rows = []
    for label, arms in arm_rows(result):
        present = [[b["arms"][arm] for arm in arms if arm in b["arms"]] for b in blocks]
        if not all(present):
            continue
        means = [sum(c["accuracy"] for c in cells) / len(cells) for cells in present]
        single = [cells[0] for cells in present]
        errors = [c["accuracy_se"] for c in single]
        error = (
            sum(e**2 for e in errors) ** 0.5 / len(errors)
            if len(arms) == 1 and None not in errors
            else None
        )
        columns = [
            f"{100 * mean:.1f}"
            + (
                f" ±{100 * c['accuracy_se']:.1f}"
                if len(arms) == 1 and c["accuracy_se"] is not None
                else ""
            )
            for mean, c in zip(means, single, strict=True)
        ]
        every = [c for cells in present for c in cells]
        rows.append(
            (
                label,
                f"{single[0]['bytes']:,}" if single[0]["bytes"] else "",
                f"{sum(c['hit']['token_hit'] for c in every) / len(every):.3f}",
                *(columns if names else ()),
                f"{100 * sum(means) / len(means):.1f}"
                + (f" ±{100 * error:.1f}" if error is not None else ""),
                f"{100 * sum(c['same_reply'] for c in every) / len(every):.1f}",
                f"{sum(c['kl_first'] for c in every) / len(every):.2g}",
            )
        )
    out.table(
        f"{result['model']}, {title}, synthetic questions",
        ("arm", "bytes", "token hit", *names, "mean %", "as dense %", "KL"),
        rows,
        note="accuracy in % with its standard error over questions; as dense: replies equal to the dense arm's; KL: "
        "first token, nats, from dense; random: mean of the masks",
    )


def arm_rows(result: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Rows of a table: each arm alone, random masks of one cutoff together."""
    rows: dict[str, list[str]] = {}
    for arm in result["arms"]:
        label = f"random-{arm['w_max']}" if arm["seed"] is not None else arm["arm"]
        rows.setdefault(label, []).append(arm["arm"])
    return list(rows.items())


def _task_table(out: Output, result: Mapping[str, Any]) -> None:
    cutoffs = list(dict.fromkeys(a["w_max"] for a in result["arms"] if a["w_max"] is not None))
    shown = ["dense", *(f"{policy}-{w}" for w in cutoffs[-1:] for policy in ("nr", "wr"))]
    rows = []
    for block in result["blocks"]:
        arms = block["arms"]
        random = next((r for r in block["random"] if r["w_max"] == cutoffs[-1]), None)
        cells = [
            f"{100 * arms[name]['accuracy']:.1f}"
            + (
                ""
                if arms[name]["accuracy_se"] is None
                else f" ±{100 * arms[name]['accuracy_se']:.1f}"
            )
            if name in arms
            else ""
            for name in shown
        ]
        rows.append(
            (
                block["task"],
                f"{block['tokens']:,}",
                block["boundary"],
                f"{block['hit_pooled']:.3f}",
                *cells,
                "" if random is None else f"{100 * random['mean']:.1f}",
                f"{block['questions']} x {block['replays']}",
                block["source"],
            )
        )
    last = cutoffs[-1] if cutoffs else ""
    out.table(
        f"{result['model']}, by task, synthetic questions",
        ("task", "tokens", "cached to", "hit", *shown, f"random-{last}", "replays", "text"),
        rows,
        note="hit: tokens from the cache over all input tokens, all cached arms pooled",
    )


def _notes(out: Output, result: Mapping[str, Any]) -> None:
    found = result["whole_window"]
    if found is not None:
        out.note(
            f"{found['arm']} on prefixes of {found['prefix_tokens']} tokens, all replayed: states within "
            f"{found['state_error']:.1e} of recomputation, {found['same_reply_as_recompute']:.0%} of the replies equal"
        )
    for entry in result["summary"]:
        if entry["arm"] == "dense" and entry["accuracy"] < UNTRAINED:
            out.note(
                f"the dense model answers {entry['accuracy']:.1%} of the {entry['suite']} tasks at {entry['tokens']:,} "
                "tokens: it does not know their form, so accuracy cannot show a loss; read `as dense` and KL"
            )
    for entry in result["refused"]:
        why = next(iter(entry["arms"].values()))
        out.note(
            f"refused: {entry['task']}, {entry['tokens']:,} tokens ({entry['boundary']}): {why}"
        )
    for entry in result["left_out"]:
        out.note(f"left out: {entry['task']}, {entry['tokens']:,} tokens: {entry['why']}")
