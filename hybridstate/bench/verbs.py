"""The bench verbs of `hybridstate.api`, each as the list of its stages; libraries load when one is called."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hybridstate.defaults import W_MAX
from hybridstate.errors import UsageError

if TYPE_CHECKING:
    from hybridstate.bench.codecs import CodecReport
    from hybridstate.bench.decode import Decoded
    from hybridstate.bench.restore import Restored
    from hybridstate.bench.update import UpdateReport
    from hybridstate.plan.store import Plan

    Progress = Callable[[str, int, int], None]


def _own_plan(model: str | Path) -> "Plan | None":
    """The plan in an exported checkpoint, which names it in its config; None for any other."""
    from hybridstate.checkpoint import open_checkpoint
    from hybridstate.plan.store import STATE_PLAN, read_plan

    checkpoint = open_checkpoint(str(model), weights=True)
    return read_plan(checkpoint.path) if STATE_PLAN in checkpoint.config else None


def bench_restore(
    model: str | Path,
    *,
    plan: str | Path | None = None,
    w_max: Sequence[int] | None = None,
    gate_input: float | None = None,
    gate_input_from: str | Path | None = None,
    tasks: Sequence[str] | None = None,
    questions: int = 16,
    tokens: int = 1024,
    seeds: int = 5,
    repeats: int = 5,
    interventions: bool = False,
    rows: int | None = None,
    device: str = "auto",
    progress: "Progress | None" = None,
) -> "Restored":
    """What a checkpoint costs to keep, to load, and in answers, on cached prefixes of real prompts.

    Args:
        model: folder or embedded name.
        plan: take its selection instead of cutoffs; without `w_max`, that of an exported checkpoint's own plan.
        w_max: cutoffs in tokens.
        gate_input, gate_input_from: a_s that selects units at these cutoffs, see `analyze`.
        tasks: of `quality.tasks.TASKS`.
        questions: per task, and prose prefixes.
        tokens: length of a prompt.
        seeds: random masks per cutoff.
        repeats: timed requests per arm.
        interventions: also take state, KV or both away.
        rows: sequences that run at once, by default 32 on a CPU and 256 on a GPU.
        device: `auto`, `cpu` or `cuda`.
        progress: called with (stage, done, total).

    Raises:
        UsageError: an option is out of range.
        PlanMismatch: the plan is for another model, or selects nothing.
        NumericError: a correctness check failed; nothing is reported then.
        MissingRequirement: a GPU was asked for and there is none.
    """
    from hybridstate.bench.cases import DEFAULT_TASKS, Options
    from hybridstate.bench.cutoffs import planned_selection, selections_at
    from hybridstate.bench.restore import run_restore
    from hybridstate.horizons.gate_input import resolve_gate_input
    from hybridstate.plan.store import read_plan
    from hybridstate.trajectories.model import load_model
    from hybridstate.trajectories.prompts import heldout_text

    if plan is not None and w_max:
        raise UsageError("a plan brings its own cutoff", hint="give either --plan or --w-max")
    given = None if plan is None else read_plan(plan)
    if given is None and not w_max:
        own = _own_plan(model)
        given = own if own is not None and own.document.selection is not None else None
    if given is not None and (gate_input is not None or gate_input_from is not None):
        raise UsageError("a plan brings its own selection", hint="leave the gate input out")
    chosen = tuple(tasks or DEFAULT_TASKS)
    options = Options(chosen, questions, tokens, seeds, repeats, interventions=interventions)
    options.check()
    loaded = load_model(str(model), device=device)
    a_s = None
    if given is not None:
        selections = [planned_selection(given, loaded)]
    else:
        a_s = resolve_gate_input(loaded.checkpoint, given=gate_input, measured=gate_input_from)
        selections = selections_at(loaded, tuple(dict.fromkeys(w_max or W_MAX)), a_s[0])
    return run_restore(
        loaded,
        selections,
        options.on(loaded.device.type, rows),
        heldout_text(),
        plan=given,
        gate_input=a_s,
        progress=progress,
    )


def bench_update(
    model: str | Path | None = None,
    *,
    plan: str | Path | None = None,
    states: Sequence[str] | None = None,
    gates: Sequence[str] | None = None,
    overlap: bool = False,
    requantise_every: Sequence[int] = (),
    batches: Sequence[int] | None = None,
    samples: int = 30,
    device: str = "auto",
    progress: "Progress | None" = None,
) -> "UpdateReport":
    """Time of one recurrent update on pooled states, dense and packed, behind a float64 check.

    Args:
        model: folder or embedded name whose layers give the sizes; without one, the embedded models
            and layers of released ones.
        plan: take its number of FP16 channels.
        states: of `fp32`, `bf16`, `fp16`, `damp`, `damp-scaled` (with a value scale); all by default.
        gates: of `fused` (raw projections enter the kernel) and `given`; fused on a GPU, given on a CPU by default.
        overlap: launches of every format may overlap (programmatic dependent launch).
        requantise_every: also time packed steps that rewrite a state once in so many steps, 2 to 16 each.
        batches: requests per step.
        samples: measured rounds.
        device: `auto`, `cpu` or `cuda`.
        progress: called with (stage, done, total).

    Raises:
        UsageError, NumericError, PlanMismatch, MissingRequirement: as `bench_restore`.
    """
    from hybridstate.bench.update import EMBEDDED, FORMATS, PUBLISHED, UpdateDims, run_update
    from hybridstate.checkpoint import open_checkpoint
    from hybridstate.plan.compare import verify_against
    from hybridstate.plan.store import read_plan
    from hybridstate.trajectories.model import torch_device

    target, given = torch_device(device), None if plan is None else read_plan(plan)
    if model is None:
        if given is not None:
            raise UsageError("a plan needs its model", hint="give MODEL before --plan")
        dims: tuple[UpdateDims, ...] = (*EMBEDDED, *PUBLISHED)
    else:
        checkpoint = open_checkpoint(model, weights=True)
        checkpoint.spec.check_plannable()
        if given is not None:
            verify_against(given, checkpoint)
        given = _own_plan(model) if given is None else given
        precision = None if given is None else given.document.precision
        k_hi = None if precision is None else precision.k_hi
        name, kind = checkpoint.name, checkpoint.spec.family.kind
        sizes = dict.fromkeys(
            (n.key_heads, n.value_heads, n.key_dim, n.value_dim) for n in checkpoint.spec.layers
        )
        dims = tuple(UpdateDims(name, kind, *size, k_hi) for size in sizes)
    return run_update(
        dims=dims,
        batches=batches,
        formats=states or FORMATS,
        gates=gates,
        overlap=overlap,
        requantise_every=requantise_every,
        device=target,
        samples=samples,
        progress=progress,
    )


def bench_codecs(
    *,
    sizes: Sequence[str] | None = None,
    slots: int = 8,
    samples: int = 20,
    device: str = "auto",
    progress: "Progress | None" = None,
) -> "CodecReport":
    """Time of moving states between dense, packed and checkpoint layouts, behind a byte-for-byte check.

    Args:
        sizes: of `kimi-linear`, `qwen3-next`, `tiny`; the first on a GPU and the last on a CPU by default.
        slots: slots moved by one launch.
        samples: measured rounds.
        device: `auto`, `cpu` or `cuda`.
        progress: called with (stage, done, total).

    Raises:
        UsageError, NumericError, MissingRequirement: as `bench_restore`.
    """
    from hybridstate.bench.codecs import run_codecs
    from hybridstate.trajectories.model import torch_device

    return run_codecs(
        models=sizes,
        slots=slots,
        samples=samples,
        device=torch_device(device),
        progress=progress,
    )


def bench_decode(
    model: str | Path,
    *,
    plan: str | Path | None = None,
    states: Sequence[str] | None = None,
    batches: Sequence[int] | None = None,
    input_tokens: int = 256,
    output_tokens: int = 64,
    requantise_every: Sequence[int] = (),
    k_hi: int | None = None,
    graph: bool = True,
    dummy: bool = False,
    device: str = "auto",
    progress: "Progress | None" = None,
) -> "Decoded":
    """Time per output token with the state in the package's pool; only the pool exists between steps.

    Args:
        model: folder or embedded name, original or exported; with `dummy` a folder with a config, or a published name.
        plan: key order, FP16 channels and interval of the packed state; an exported checkpoint brings its own.
        states: of `fp32`, `bf16`, `fp16`, `damp`; the first and the last by default.
        batches: sequences decoded at once.
        input_tokens, output_tokens: prefilled, and decoded and timed, per sequence.
        requantise_every: also decode packed states that are written at every so-manieth update, 1 to 16 each.
        k_hi: FP16 channels without a plan.
        graph: capture the step in a CUDA graph on a GPU.
        dummy: synthetic weights of the config's dimensions; adds components, bytes and the update alone.
        device: `auto`, `cpu` or `cuda`.
        progress: called with (stage, done, total).

    Raises:
        UsageError, NumericError, PlanMismatch, MissingRequirement: as `bench_restore`.
    """
    from hybridstate.bench.decode import Options, run_decode
    from hybridstate.plan.compare import verify_against
    from hybridstate.plan.store import read_plan
    from hybridstate.quant.risk import check_k_hi
    from hybridstate.runtime.orders import planned_interval
    from hybridstate.trajectories.model import load_model
    from hybridstate.trajectories.prompts import heldout_text

    options = Options(
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        requantise_every=tuple(requantise_every),
        k_hi=k_hi,
        graph=graph,
    ).given(states, batches)
    if dummy:
        from hybridstate.bench.decode_dummy import run_dummy_decode
        from hybridstate.trajectories.dummy import dummy_model

        if plan is not None:
            raise UsageError("no plan was made for synthetic weights", hint="leave --plan out")
        options.check()
        options.formats()
        made = dummy_model(model, device=device)
        check_k_hi(k_hi, made.spec)
        options = options.on(made.device.type)
        return run_dummy_decode(made, options, heldout_text(), progress=progress)
    given = None if plan is None else read_plan(plan)
    if given is None:
        own = _own_plan(model)
        given = own if own is not None and own.document.precision is not None else None
    if given is not None and k_hi is not None:
        raise UsageError(
            "a plan brings its own FP16 channels",
            hint="give either --plan or --k-hi" if plan else "leave --k-hi out: MODEL has a plan",
        )
    options.check()
    options.formats(planned_interval(given))  # before the model is loaded
    loaded = load_model(str(model), device=device)
    check_k_hi(k_hi, loaded.spec)
    if given is not None:
        verify_against(given, loaded.checkpoint)
    return run_decode(
        loaded, options.on(loaded.device.type), heldout_text(), plan=given, progress=progress
    )
