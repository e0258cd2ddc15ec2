"""`hybridstate calibrate`: which key channels need FP16, and what every format costs."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hybridstate.cli.options import (
    Device,
    DryRun,
    Dtype,
    Force,
    Json,
    LocalModel,
    LowerBound,
    OutputFolder,
    Quiet,
    Seed,
    check_device,
)
from hybridstate.cli.output import Output, command


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(
        "calibrate",
        short_help="Choose FP16 key channels on real trajectories, measure every format.",
        epilog="Example: hybridstate calibrate tiny-gdn -o calibration\n\n"
        "Example: hybridstate calibrate ./Qwen3.6-35B-A3B --profile paper --device cuda -o out",
    )(calibrate)


def calibrate(
    model: LocalModel,
    output: OutputFolder = None,
    profile: Annotated[
        str,
        typer.Option(
            "--profile",
            metavar="quick|paper",
            help="quick: 9 prompts, minutes on a CPU. paper: 36 prompts, 4,096 tokens each.",
        ),
    ] = "quick",
    k_hi: Annotated[
        int | None,
        typer.Option(
            "--k-hi",
            metavar="N",
            help="FP16 key channels per head. [default: 16 of 128]",
            show_default=False,
        ),
    ] = None,
    formats: Annotated[
        str | None,
        typer.Option(
            "--formats",
            metavar="LIST",
            help="Names and groups, comma-separated: default, formats, budgets, selectors, baselines, "
            "paper, all. [default: default]",
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help='JSONL of {"text": ..., "domain": ...} instead of the shipped texts.',
            show_default=False,
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            metavar="FLOAT",
            help="Of the reference text. [default: 1 for embedded models, else greedy]",
            show_default=False,
        ),
    ] = None,
    seed: Seed = 0,
    seeds: Annotated[
        int,
        typer.Option(
            "--seeds",
            metavar="N",
            help="Whole calibrations, from --seed on: other prompts, texts, random masks and rounding. "
            "The first one's channels are kept, the errors are over all.",
        ),
    ] = 1,
    sequences: Annotated[
        int | None,
        typer.Option(
            "--sequences",
            metavar="N",
            help="Least validation sequences per seed. [default: the profile's]",
            show_default=False,
        ),
    ] = None,
    tasks: Annotated[
        int,
        typer.Option(
            "--tasks",
            metavar="N",
            help="Embedded models: texts per task and seed whose facts are asked after thousands of updates.",
        ),
    ] = 0,
    greedy: Annotated[
        bool,
        typer.Option("--greedy", help="Also calibrate on greedy text, as a second row."),
    ] = False,
    part: Annotated[
        str | None,
        typer.Option(
            "--part",
            metavar="I/N",
            help="Do part I of N into -o: whole seeds, or recorded batches of fewer seeds than N.",
            show_default=False,
        ),
    ] = None,
    merge: Annotated[
        list[Path] | None,
        typer.Option(
            "--merge",
            metavar="FOLDER",
            help="Take what a --part run of the same options finished; may be repeated.",
            show_default=False,
        ),
    ] = None,
    deadline: Annotated[
        float | None,
        typer.Option(
            "--deadline",
            metavar="SECONDS",
            help="Stop then, report the seeds finished so far; the same command continues.",
            show_default=False,
        ),
    ] = None,
    dummy: Annotated[
        bool,
        typer.Option(
            "--dummy",
            help="SYNTHETIC weights of MODEL's dimensions, made on the device: MODEL is a folder with "
            "config.json, Qwen3.6-35B-A3B or Kimi-Linear-48B-A3B. For what a run costs.",
        ),
    ] = False,
    measure_recording: Annotated[
        bool,
        typer.Option(
            "--measure-recording", help="Also time generation without recording, in the same run."
        ),
    ] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    lower_bound: LowerBound = None,
    dry_run: DryRun = False,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Which key channels of the live state need FP16, and how far each format moves the model.

    Generates text with FP32 states, scores every key channel by its INT8 error and how long its
    decay keeps that error, then runs each format update by update on prompts left aside. With -o
    it writes calibration.json and calibration.safetensors for export-plan.
    """
    with command("calibrate", model=model, json=json, quiet=quiet) as out:
        from hybridstate.provenance import check_output_folder, environment
        from hybridstate.quant.catalogue import parse_list

        _check(temperature, seed, seeds, sequences, tasks, deadline)
        check_device(device)
        parse_list(formats)
        if part is not None:
            _check_part(part, output)
        elif output is not None:
            check_output_folder(output, force=force)
        if tasks:
            _check_tasks(out, model, tasks, profile, seed)
        options: dict[str, Any] = {
            "profile": profile,
            "k_hi": k_hi,
            "formats": formats,
            "prompts": prompts,
            "seed": seed,
            "seeds": seeds,
            "sequences": sequences,
            "tasks": tasks,
            "greedy": greedy,
            "temperature": temperature,
            "device": device,
            "dtype": dtype,
            "lower_bound": lower_bound,
            "merge": merge or (),
            "deadline": deadline,
            "dummy": dummy,
            "measure_recording": measure_recording,
        }
        if dry_run:
            _dry_run(out, model, output, options)
            return
        from hybridstate import api
        from hybridstate.bench.timing import device_record
        from hybridstate.cli.calibrate_tables import (
            calibration_tables,
            stage_line,
            stage_table,
        )
        from hybridstate.trajectories.stages import OTHER, timed

        if part is not None and output is not None:
            api.calibrate_part(model, output, part, force=force, progress=out.progress, **options)
            out.note(f"part {part} is finished in {output}: --merge takes it")
            out.result({"part": part, "written": [str(output)]})
            return
        with timed() as stages:
            try:
                found = api.calibrate(model, output, force=force, progress=out.progress, **options)
            except BaseException:
                if set(stages.seconds) - {OTHER}:  # not where options were refused
                    out.note(f"until then: {stage_line(stages.to_json())}")
                raise
        if dummy:
            out.warn(f"{model}: synthetic weights; nothing here says anything about trained ones")
        for warning in found.warnings:
            out.warn(warning)
        calibration_tables(out, found)
        result = found.to_json()
        result["measured"] = stages.to_json()
        if dummy:
            result["synthetic"] = True
        stage_table(out, result["measured"])
        hardware = device_record(result["versions"]["device"])
        result["provenance"] = environment(device=hardware["name"], hardware=hardware)
        if output is not None and not result["unfinished"]:
            names = ("calibration.json", "calibration.safetensors")
            result["written"] = [str(output / name) for name in names]
            out.note(f"wrote {' and '.join(names)} to {output}")
        out.result(result)


def _check(
    temperature: float | None,
    seed: int,
    seeds: int,
    sequences: int | None,
    tasks: int,
    deadline: float | None,
) -> None:
    import math

    from hybridstate.errors import UsageError, check_seconds

    if temperature is not None and not (math.isfinite(temperature) and temperature >= 0):
        raise UsageError(f"--temperature must be 0 or a positive number, found {temperature}")
    if seed < 0:
        raise UsageError(f"--seed must not be negative, found {seed}")
    for name, value, least in (
        ("--seeds", seeds, 1),
        ("--sequences", sequences, 1),
        ("--tasks", tasks, 0),
    ):
        if value is not None and value < least:
            raise UsageError(f"{name} must be at least {least}, found {value}")
    if deadline is not None:
        check_seconds("--deadline", deadline)


def _check_tasks(out: Output, model: str, tasks: int, profile: str, seed: int) -> None:
    """Say where questions cannot be asked."""
    from hybridstate.checkpoint import EMBEDDED
    from hybridstate.quality.decoded import room_for_tasks
    from hybridstate.trajectories.protocol import protocol

    if model not in EMBEDDED:
        trained = " and ".join(EMBEDDED)
        out.warn(f"--tasks {tasks} asks nothing: only {trained} were trained on the tasks")
    elif not room_for_tasks(protocol(profile), seed=seed):
        out.warn(
            f"--tasks {tasks} asks nothing: texts of the {profile} profile are too short for facts and questions"
        )


def _check_part(part: str, output: Path | None) -> None:
    from hybridstate.errors import UsageError
    from hybridstate.quality.evaluation import Part

    Part.parse(part)
    if output is None:
        raise UsageError("a part of a run needs an output folder", hint="-o PART")


def _dry_run(out: Output, model: str, folder: Path | None, options: dict[str, Any]) -> None:
    from hybridstate.quality.forecast import dry_run

    name, plan = dry_run(model, **options)
    profile = options["profile"]
    each = ", each draw" if "draws" in plan else ""
    out.table(
        f"{name}: would run profile {profile}{each}",
        ("quantity", "value"),
        [(quantity.replace("_", " "), value) for quantity, value in plan.items()],
        note="trajectories are kept beside the output folder until it is written",
    )
    if folder is not None:
        out.text(f"would write calibration.json and calibration.safetensors to {folder}")
    out.result({"dry_run": True, "profile": profile, **plan})
