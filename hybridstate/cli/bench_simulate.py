"""`hybridstate bench simulate`: serving with the real prefix cache and predicted seconds."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hybridstate.cli.bench_output import OutputPath, check_output, finish
from hybridstate.cli.options import Force, Json, Quiet
from hybridstate.cli.output import Output, command


def simulate(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Model whose sizes and horizons count. [default: synthetic horizons with Kimi-Linear's sizes]",
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        str,
        typer.Option(
            "--trace",
            metavar="NAME",
            help="wildchat-shape, shared-prefix, no-sharing; sharegpt, messages, mooncake with --trace-file.",
        ),
    ] = "wildchat-shape",
    trace_file: Annotated[
        Path | None,
        typer.Option(
            "--trace-file",
            metavar="FILE",
            help="Recorded conversations; wildchat-shape takes WildChat's JSONL.",
            show_default=False,
        ),
    ] = None,
    conversations: Annotated[
        int, typer.Option("--conversations", metavar="N", help="Conversations, at most.")
    ] = 256,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            "--arm",
            metavar="NAME",
            help="nr, wr, int8, bf16, damp, nr+int8, wr+int8, damp+nr, damp+wr, with or without a cutoff "
            "(nr-16); repeatable. [default: all but bf16, wr+int8, damp+wr]",
            show_default=False,
        ),
    ] = None,
    w_max: Annotated[
        list[int] | None,
        typer.Option(
            "--w-max",
            metavar="N",
            help="Cutoff in tokens, repeatable. [default: 16, 64]",
            show_default=False,
        ),
    ] = None,
    ratio: Annotated[
        list[float] | None,
        typer.Option(
            "--ratio",
            metavar="X",
            help="Working set over dense slots, repeatable. [default: 0.5, 1, 1.5, 2, 3, 4]",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        list[int] | None,
        typer.Option(
            "--limit",
            metavar="N",
            help="Running requests at once, repeatable: the first at every ratio. [default: 32, 16, 8]",
            show_default=False,
        ),
    ] = None,
    clients: Annotated[
        int, typer.Option("--clients", metavar="N", help="Conversations at once.")
    ] = 256,
    think: Annotated[
        float,
        typer.Option("--think", metavar="S", help="Mean seconds before a client's next turn."),
    ] = 0.0,
    seeds: Annotated[
        int, typer.Option("--seeds", metavar="N", help="Orders of the conversations.")
    ] = 5,
    policy: Annotated[
        str, typer.Option("--policy", metavar="NAME", help="lru, leaf-lru or cost.")
    ] = "lru",
    every: Annotated[
        int, typer.Option("--every", metavar="N", help="Also keep a state every N prompt tokens.")
    ] = 0,
    budget_scope: Annotated[
        str, typer.Option("--budget-scope", metavar="state|state+kv", help="What the bytes cover.")
    ] = "state",
    kv_bytes: Annotated[
        int | None,
        typer.Option(
            "--kv-bytes",
            metavar="N",
            help="Attention bytes per token. [default: from the config]",
            show_default=False,
        ),
    ] = None,
    tp: Annotated[int, typer.Option("--tp", metavar="P", help="Tensor-parallel ranks.")] = 1,
    balance: Annotated[
        list[str] | None,
        typer.Option(
            "--balance",
            metavar="MODE",
            help="Placement of the arms with a cutoff, repeatable: off, storage, hybrid. [default: off]",
            show_default=False,
        ),
    ] = None,
    cost: Annotated[
        Path | None,
        typer.Option(
            "--cost",
            metavar="FILE",
            help="Cost model as JSON. [default: rooflines, not measured]",
            show_default=False,
        ),
    ] = None,
    fit: Annotated[
        Path | None,
        typer.Option(
            "--fit",
            metavar="FILE",
            help="Measured points: fit the cost model to half of them and predict the others.",
            show_default=False,
        ),
    ] = None,
    control: Annotated[
        bool, typer.Option("--control/--no-control", help="Also serve prompts that share nothing.")
    ] = True,
    output: OutputPath = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Conversations through the two-tier prefix cache at equal bytes, without tensors.

    The cache is the one that engines run; seconds come from a cost model. The dense arm runs first and its
    token hit rate chooses the operating point; every point is reported.
    """
    with command("bench simulate", model=model, json=json, quiet=quiet) as out:
        check_output(output, force=force)
        from hybridstate import api

        result = api.bench_simulate(
            model,
            trace=trace,
            trace_file=trace_file,
            conversations=conversations,
            arms=arm,
            w_max=w_max,
            ratios=ratio,
            limits=limit,
            clients=clients,
            think=think,
            seeds=seeds,
            policy=policy,
            every=every,
            budget_scope=budget_scope,
            kv_bytes=kv_bytes,
            tp=tp,
            balances=balance,
            cost=cost,
            fit=fit,
            control=control,
            progress=out.progress,
        )
        simulate_tables(out, result)
        finish(out, "simulate", result, output, force=force)


def simulate_tables(out: Output, result: dict[str, Any]) -> None:
    """Fit, every point, the control."""
    if result["fit"] is not None:
        _fit_table(out, result["fit"])
    synthetic = "synthetic " if result["trace"]["synthetic"] else ""
    operating = result["operating_point"]
    _points_table(
        out,
        f"{result['model']}: {synthetic}trace {result['trace']['name']}, simulated, {result['clients']} clients",
        result["points"],
        note=f"{result['trace']['note']}; {result['profile']['note']}; seconds: {result['cost_model']['source']}; "
        f"ratio: working set of {result['working_set']} states over dense slots; every arm has the dense arm's bytes; "
        f"means of {result['seeds']} seeds over all requests; change: mean TTFT against dense",
    )
    out.text(
        f"operating point: ratio {operating['ratio']:g}, dense token hit rate "
        f"{100 * operating['dense_token_hit_rate']:.1f} % ({operating['rule']})"
    )
    if result["control"]:
        _points_table(
            out,
            "control: synthetic prompts that share nothing",
            result["control"],
            note="no cache can gain here; live states of fewer bytes still decode faster",
        )


def _points_table(out: Output, title: str, points: list[dict[str, Any]], note: str) -> None:
    out.table(
        title,
        (
            "arm",
            "ratio",
            "limit",
            "native",
            "compressed",
            "hit %",
            "TTFT s",
            "P95 s",
            "TPOT ms",
            "E2E s",
            "replayed",
            "evicted",
            "change",
        ),
        [_point_row(point) for point in points],
        note=note,
    )
    for text in dict.fromkeys(point["skipped"] for point in points if "skipped" in point):
        out.warn(text)


def _point_row(point: dict[str, Any]) -> tuple[object, ...]:
    head = (point["arm"], f"{point['ratio']:g}", point["limit"])
    if "mean" not in point:
        return (*head, *(None,) * 10)
    mean, ours = point["mean"], point["mean"]["hybridstate"]
    change = point.get("against_dense", {}).get("ttft")
    return (
        *head,
        point["slots_native"],
        point["slots_compressed"],
        f"{100 * ours['token_hit_rate']:.1f}",
        f"{mean['mean_ttft_ms'] / 1e3:.3f}",
        f"{mean['p95_ttft_ms'] / 1e3:.3f}",
        f"{mean['mean_tpot_ms']:.2f}",
        f"{mean['mean_e2e_latency_ms'] / 1e3:.3f}",
        round(ours["replayed_tokens"]),
        round(ours["evictions_dense"] + ours["evictions_compressed"]),
        None if change is None else f"{100 * change:+.1f}%",
    )


def _fit_table(out: Output, fitted: dict[str, Any]) -> None:
    rows: list[tuple[object, ...]] = []
    for kind, terms in fitted["cost_model"].items():
        if kind == "source" or "standard_errors" not in terms:
            continue
        for term, value in terms.items():
            if term != "standard_errors":
                rows.append((kind, term, f"{value:.4g}", f"{terms['standard_errors'][term]:.2g}"))
    out.table("fitted cost model, seconds", ("operation", "per", "value", "+/-"), rows)
    out.table(
        "measured and predicted points",
        ("point", "used", "TTFT s", "predicted", "error", "hit %", "predicted", "points"),
        [
            (
                row["point"],
                "fitted" if row["fitted"] else "predicted",
                f"{row['measured_ttft_s']:.3f}",
                f"{row['predicted_ttft_s']:.3f}",
                f"{100 * row['ttft_error']:+.1f}%",
                f"{100 * row['measured_hit']:.1f}",
                f"{100 * row['predicted_hit']:.1f}",
                f"{100 * row['hit_error']:+.1f}",
            )
            for row in fitted["points"]
        ],
        note=f"largest errors of points that were not fitted: {100 * fitted['largest_ttft_error']:.1f} % in mean TTFT, "
        f"{100 * fitted['largest_hit_error']:.1f} points in hit rate",
    )
