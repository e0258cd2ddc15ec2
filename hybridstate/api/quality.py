"""`bench quality`: RULER's and the embedded models' tasks through the prefix cache, every arm on the same prompts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridstate.defaults import W_MAX

if TYPE_CHECKING:
    from hybridstate.bench.quality_record import Quality

    Progress = Callable[[str, int, int], None]
    Record = Callable[[dict[str, Any]], None]


def bench_quality(
    model: str | Path,
    *,
    plan: str | Path | None = None,
    w_max: Sequence[int] | None = None,
    gate_input: float | None = None,
    gate_input_from: str | Path | None = None,
    formats: Sequence[str] | None = None,
    tasks: Sequence[str] | None = None,
    qa: str | Path | None = None,
    tokens: Sequence[int] | None = None,
    boundaries: Sequence[str] | None = None,
    questions: int = 30,
    replays: int = 3,
    seeds: int = 5,
    chunk: int = 512,
    temperature: float = 0.0,
    seed: int | None = None,
    slots: int | None = None,
    resident: bool = False,
    repeats: int = 5,
    rows: int | None = None,
    within: float | None = None,
    resume: str | Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    progress: "Progress | None" = None,
    record: "Record | None" = None,
) -> "Quality":
    """Task accuracy after compressed hits and with the live state in every format, by warm and replay.

    Args:
        model: folder or embedded name.
        plan: FP16 channels of the DAMP formats; an exported checkpoint brings its own.
        w_max: cutoffs in tokens.
        gate_input, gate_input_from: a_s that selects units at these cutoffs, see `analyze`.
        formats: of the live state, as `calibrate` names them; every one the plan allows by default. Empty for none.
        tasks: of `quality.tasks.TASKS` and `quality.ruler.TASKS`; all by default, `qa_1` only with `qa`.
        qa: questions in SQuAD's form, JSON or xz.
        tokens: lengths of prompts, 4,096 by default.
        boundaries, questions, replays, seeds, chunk, temperature, seed, slots, resident, repeats, rows, within:
            see `bench.quality_options.Options`.
        resume: an earlier result of the same options, perhaps a partial one; its blocks are not run again.
        device: `auto`, `cpu` or `cuda`.
        dtype: of the weights: `auto`, `float32`, `bfloat16` or `float16`.
        progress: called with (stage, done, total).
        record: receives the result so far after every block.

    Raises:
        UsageError: an option is out of range, or a format needs a plan.
        SourceError: the questions or the earlier result cannot be read.
        PlanMismatch: the plan is for another model.
        NumericError: a check failed, or no block was resident.
        MissingRequirement: a GPU was asked for and there is none.
    """
    from hybridstate.bench.cutoffs import selections_at
    from hybridstate.bench.quality import run_quality
    from hybridstate.bench.quality_arms import reuse_arms, storage_arms
    from hybridstate.bench.quality_options import OWN_TASKS, Options
    from hybridstate.bench.serving_setup import check_context
    from hybridstate.checkpoint import open_checkpoint
    from hybridstate.errors import check_seconds
    from hybridstate.horizons.gate_input import resolve_gate_input
    from hybridstate.plan.store import STATE_PLAN, read_plan
    from hybridstate.quality import ruler
    from hybridstate.quality.questions import SEED
    from hybridstate.quant.catalogue import parse
    from hybridstate.trajectories.model import load_model, torch_dtype
    from hybridstate.trajectories.prompts import heldout_text

    every = (*OWN_TASKS, *ruler.TASKS) if qa else (*OWN_TASKS, *ruler.TASKS[:-1])
    options = Options(
        tasks=tuple(dict.fromkeys(tasks or every)),
        tokens=tuple(dict.fromkeys(tokens or (4096,))),
        boundaries=tuple(dict.fromkeys(boundaries or ())),
        questions=questions,
        replays=replays,
        seeds=seeds,
        chunk=chunk,
        temperature=temperature,
        seed=SEED if seed is None else seed,
        slots=slots,
        resident=resident,
        repeats=repeats,
        rows=rows,
        within=within,
    )
    options.check()
    if within is not None:
        check_seconds("--within", within)
    weights = torch_dtype(dtype)
    for name in formats or ():
        parse(name)
    material = ruler.Material.of(heldout_text(), None if qa is None else Path(qa))
    given = None if plan is None else read_plan(plan)
    checkpoint = open_checkpoint(str(model), weights=True)
    check_context(checkpoint.config, max(options.tokens), "--tokens")
    if given is None and STATE_PLAN in checkpoint.config:
        given = read_plan(checkpoint.path)
    loaded = load_model(str(model), device=device, dtype=weights)
    a_s = resolve_gate_input(loaded.checkpoint, given=gate_input, measured=gate_input_from)
    selections = selections_at(loaded, tuple(dict.fromkeys(w_max or W_MAX)), a_s[0])
    arms = (*reuse_arms(loaded, selections, seeds), *storage_arms(loaded, formats, given))
    header = {
        "gate_input": a_s[0],
        "gate_input_source": a_s[1],
        "plan_digest": None if given is None else given.digest,
        "qa_file": None if qa is None else Path(qa).name,
    }
    return run_quality(
        *(loaded, arms, options, material),
        header=header,
        resume=None if resume is None else Path(resume),
        progress=progress,
        record=record,
    )
