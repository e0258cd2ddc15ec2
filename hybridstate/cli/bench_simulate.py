"""`hybridstate bench simulate`: serving with the real prefix cache and predicted seconds."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hybridstate.cli.bench_output import OutputPath, check_output, finish
from hybridstate.cli.options import Force, Json, Quiet
from hybridstate.cli.output import command
from hybridstate.cli.serving_options import (
    ArmNames,
    Balances,
    BudgetScope,
    Clients,
    Control,
    Conversations,
    Cutoffs,
    Every,
    Policy,
    Ranks,
    Ratios,
    RunningLimits,
    Seeds,
    Think,
    TraceFile,
    TraceName,
)
from hybridstate.cli.serving_output import serving_tables


def simulate(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Model whose sizes and horizons count. [default: synthetic horizons with Kimi-Linear's sizes]",
            show_default=False,
        ),
    ] = None,
    trace: TraceName = "wildchat-shape",
    trace_file: TraceFile = None,
    conversations: Conversations = 256,
    scale: Annotated[
        float,
        typer.Option(
            "--scale", metavar="X", help="Lengths as a share of the published ones, at most 1."
        ),
    ] = 1.0,
    arm: ArmNames = None,
    w_max: Cutoffs = None,
    ratio: Ratios = None,
    limit: RunningLimits = None,
    clients: Clients = 256,
    think: Think = 0.0,
    seeds: Seeds = 5,
    policy: Policy = "lru",
    every: Every = 0,
    budget_scope: BudgetScope = "state",
    kv_bytes: Annotated[
        int | None,
        typer.Option(
            "--kv-bytes",
            metavar="N",
            help="Attention bytes per token. [default: from the config]",
            show_default=False,
        ),
    ] = None,
    tp: Ranks = 1,
    balance: Balances = None,
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
            help="Recorded bench serve: fit the cost model to half of its points and predict the others.",
            show_default=False,
        ),
    ] = None,
    exchange: Annotated[
        Path | None,
        typer.Option(
            "--exchange",
            metavar="FILE",
            help="Recorded bench exchange: what a placement adds to a store and a load.",
            show_default=False,
        ),
    ] = None,
    control: Control = True,
    output: OutputPath = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Conversations through the two-tier prefix cache at equal bytes, without tensors.

    The cache is the one that engines run; seconds come from a cost model. The dense arm runs first. The
    operating point is the working set at which its first seed hits closest to half of the tokens; every point
    is reported.

    Arms: dense is the baseline. nr and wr store a part of each state, and on a hit put zeros for the rest or
    replay a window. int8 stores every value in 8 bits. bf16 and damp hold live and stored states in fewer
    bits. A sum (nr+int8) is both.
    """
    with command("bench simulate", model=model, json=json, quiet=quiet) as out:
        check_output(output, force=force, reads=(trace_file, cost, fit, exchange))
        from hybridstate import api

        result = api.bench_simulate(
            model,
            trace=trace,
            trace_file=trace_file,
            conversations=conversations,
            scale=scale,
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
            exchange=exchange,
            control=control,
            progress=out.progress,
        )
        serving_tables(out, result)
        finish(out, "simulate", result, output, force=force, draw=_draw)


def _draw(result: dict[str, Any], folder: Path) -> None:
    from hybridstate.figures.serving import serving_figures

    serving_figures(result, str(result["model"]), folder)
