"""`hybridstate bench serve`: serving with the real prefix cache and the real engine."""

from pathlib import Path
from typing import Annotated, Any, Final

import typer

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
    Force,
    GateInput,
    Json,
    LocalModel,
    Quiet,
    check_device,
    parse_gate_input,
)
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
from hybridstate.errors import UsageError

MOST_WORKERS: Final = 128
"""Each is a process with the model; all of them start at once."""


def serve(
    model: LocalModel,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            metavar="DIR",
            help="Plan of the packed state. [default: the first channels in FP16]",
            show_default=False,
        ),
    ] = None,
    gate_input: GateInput = "auto",
    trace: TraceName = "wildchat-shape",
    trace_file: TraceFile = None,
    conversations: Conversations = 256,
    scale: Annotated[
        float | None,
        typer.Option(
            "--scale",
            metavar="X",
            help="Lengths as a share of the published ones. [default: 1, 1/2 ... as the model's positions allow]",
            show_default=False,
        ),
    ] = None,
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
    tp: Ranks = 1,
    balance: Balances = None,
    control: Control = True,
    fit: Annotated[
        bool,
        typer.Option(
            "--fit",
            help="Fit `bench simulate`'s cost model on half of the points and predict the others.",
        ),
    ] = False,
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", help="Processes, on CUDA one GPU each.")
    ] = 1,
    deadline: Annotated[
        float | None,
        typer.Option(
            "--deadline",
            metavar="S",
            help="No run begins after so many seconds; what is missing is said.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            metavar="FILE",
            help="Earlier result of the same sweep, whole or partial; its seeds are kept and not run again.",
            show_default=False,
        ),
    ] = None,
    device: Device = "auto",
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype", metavar="NAME", help="Of the weights: auto, float32, bfloat16 or float16."
        ),
    ] = "auto",
    output: OutputPath = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Conversations through the two-tier prefix cache on the real engine, every arm in the same bytes.

    Generated replies are fed back. The dense arm runs first. The operating point is the working set at which
    its first seed hits closest to half of the tokens; every point is reported. With -o FILE.json the points so
    far are in FILE.partial.json. With --tp, one process and GPU per rank serve together; hybrid placements are
    only simulated.

    Arms: dense is the baseline. nr and wr store a part of each state, and on a hit put zeros for the rest or
    replay a window. int8 stores every value in 8 bits. bf16 and damp hold live and stored states in fewer
    bits. A sum (nr+int8) is both.
    """
    with command("bench serve", model=model, json=json, quiet=quiet) as out:
        check_device(device)
        check_output(output, force=force, reads=(trace_file,))
        if workers > MOST_WORKERS:
            raise UsageError(f"--workers must be at most {MOST_WORKERS}, found {workers}")
        check_partial(output, force=force, resume=resume)
        from hybridstate import api

        result = api.bench_serve(
            model,
            plan=plan,
            gate_input=parse_gate_input(gate_input),
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
            tp=tp,
            balances=balance,
            control=control,
            fit=fit,
            workers=workers,
            deadline=deadline,
            resume=resume,
            device=device,
            dtype=dtype,
            progress=out.progress,
            record=recorder(out, output),
        )
        serving_tables(out, result)
        finish(out, "serve", result, output, force=force, draw=_draw)
        if output is not None:
            partial_of(output).unlink(missing_ok=True)


def _draw(result: dict[str, Any], folder: Path) -> None:
    from hybridstate.figures.serving import serving_figures

    serving_figures(result, str(result["model"]), folder)
