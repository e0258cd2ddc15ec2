"""The verbs, each as the list of its stages. No mathematics, no printing: read this file first."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridstate.bench.verbs import bench_decode as bench_decode
from hybridstate.bench.verbs import bench_restore as bench_restore
from hybridstate.bench.verbs import bench_update as bench_update
from hybridstate.defaults import EPSILON, W_MAX
from hybridstate.errors import UsageError

if TYPE_CHECKING:
    from hybridstate.checkpoint.inspection import Inspection
    from hybridstate.horizons.observed import HorizonValidation
    from hybridstate.plan.analysis import Analysis
    from hybridstate.plan.placement import Balance
    from hybridstate.quality.calibration import Calibration
    from hybridstate.quality.verify import Verification
    from hybridstate.weights.export import ExportedPlan

    Progress = Callable[[str, int, int], None]


def analyze(
    model: str | Path,
    *,
    w_max: Sequence[int] = W_MAX,
    gate_input: float | None = None,
    epsilon: float = EPSILON,
    lower_bound: float | None = None,
    tp: int = 1,
    balance: "Balance" = "off",
    budget: int | None = None,
    concurrency: int | None = None,
    offline: bool = False,
    cache_dir: Path | None = None,
    progress: "Progress | None" = None,
) -> "Analysis":
    """Retention horizons from the weights alone, and what each cutoff keeps and saves.

    Reads config, headers and the decay tensors; imports neither torch nor transformers.

    Args:
        model: folder, Hub name (`org/name[@revision]`) or embedded name.
        w_max: cutoffs in tokens.
        gate_input: representative gate input a_s, None for the paper's value or the default of the gate.
        epsilon: share still present at the horizon.
        lower_bound: l of the safe gate, for configs that do not state it.
        tp: tensor-parallel ranks that share the heads.
        balance: placement on them: `off`, `storage` or `hybrid`.
        budget: bytes per rank for all states, to count slots.
        concurrency: requests wanted at once in that budget.
        offline, cache_dir: see `checkpoint.open_checkpoint`.
        progress: called with (stage, done, total) while a Hub model is read.

    Raises:
        SourceError, UnsupportedModel, NumericError, UsageError: see `hybridstate.errors`.
        PlanMismatch: the ranks do not divide the heads, or `hybrid` with quantised linear weights.
    """
    from hybridstate.checkpoint import open_checkpoint
    from hybridstate.horizons.static import static_horizons
    from hybridstate.plan.analysis import (
        Analysis,
        cutoffs_at,
        model_warnings,
        near_cutoff_warnings,
        source_of,
    )
    from hybridstate.plan.capacity import capacity, check_request
    from hybridstate.plan.placement import check_permutable, check_tp

    check_request(budget, concurrency)
    checkpoint = open_checkpoint(
        model, lower_bound=lower_bound, offline=offline, cache_dir=cache_dir, progress=progress
    )
    spec = checkpoint.spec
    check_tp(spec, tp)
    if balance == "hybrid":
        check_permutable(checkpoint)
    a_s = spec.default_gate_input if gate_input is None else gate_input
    a_s_source = spec.default_gate_input_source if gate_input is None else "given"
    horizons = tuple(
        static_horizons(
            checkpoint.decay(layer),
            gate=spec.gate,
            lower_bound=spec.lower_bound,
            gate_input=a_s,
            epsilon=epsilon,
        )
        for layer in spec.layers
    )
    cutoffs = cutoffs_at(spec, horizons, w_max)
    planned = capacity(
        spec,
        horizons,
        [cutoff.selection for cutoff in cutoffs],
        tp=tp,
        balance=balance,
        budget=budget,
        requests=concurrency,
    )
    return Analysis(
        source=source_of(checkpoint),
        spec=spec,
        gate_input=a_s,
        gate_input_source=a_s_source,
        epsilon=epsilon,
        horizons=horizons,
        cutoffs=cutoffs,
        capacity=planned,
        warnings=model_warnings(checkpoint, gate_input_source=a_s_source)
        + near_cutoff_warnings(cutoffs)
        + planned.warnings,
    )


def inspect(
    model: str | Path,
    *,
    lower_bound: float | None = None,
    offline: bool = False,
    cache_dir: Path | None = None,
    progress: "Progress | None" = None,
) -> "Inspection":
    """Which architecture a checkpoint is and how it is stored, from config and headers alone.

    Args:
        model: folder, Hub name (`org/name[@revision]`) or embedded name.
        lower_bound: l of the safe gate, for configs that do not state it.
        offline, cache_dir, progress: see `analyze`.

    Raises:
        SourceError, UnsupportedModel, NumericError, UsageError: see `hybridstate.errors`.
    """
    from hybridstate.checkpoint import open_checkpoint
    from hybridstate.checkpoint.inspection import inspect_checkpoint

    return inspect_checkpoint(
        open_checkpoint(
            model, lower_bound=lower_bound, offline=offline, cache_dir=cache_dir, progress=progress
        )
    )


def validate_horizons(
    model: str | Path,
    *,
    prefixes: int = 8,
    tokens: int = 1024,
    w_max: Sequence[int] = W_MAX,
    gate_input: float | None = None,
    epsilon: float = EPSILON,
    lower_bound: float | None = None,
    device: str = "cpu",
    progress: "Progress | None" = None,
) -> "HorizonValidation":
    """Run the model on held-out prose and compare static horizons with what its gates did.

    Args:
        model: folder or embedded name.
        prefixes, tokens: how many stretches of the held-out book, and how long.
        w_max: cutoffs at which the decisions are compared.
        gate_input, epsilon, lower_bound: see `analyze`.
        device: `auto`, `cpu` or `cuda`.
        progress: called with (stage, done, total).

    Raises:
        SourceError, UnsupportedModel, NumericError, MissingRequirement: see `hybridstate.errors`.
    """
    from hybridstate.checkpoint import require_weights
    from hybridstate.horizons.observed import observed_horizons, state_magnitude, validate
    from hybridstate.trajectories import prompts
    from hybridstate.trajectories.model import load_model
    from hybridstate.trajectories.record import observe_prefixes

    require_weights(model)
    static = analyze(
        model, w_max=w_max, gate_input=gate_input, epsilon=epsilon, lower_bound=lower_bound
    )
    loaded = load_model(model, device=device, lower_bound=lower_bound)
    text = prompts.prefixes(loaded.encode, prompts.heldout_text(), count=prefixes, tokens=tokens)
    seen = observe_prefixes(loaded, text, progress=progress)
    return validate(
        static.horizons,
        [observed_horizons(mean, epsilon) for mean in seen.mean_log_decay],
        [state_magnitude(states, loaded.spec.unit) for states in seen.states],
        indices=[layer.index for layer in loaded.spec.layers],
        w_max=w_max,
        tokens=tokens,
        source="Bleak House, held out",
        gate_input=static.gate_input,
    )


def calibrate(
    model: str | Path,
    out: str | Path | None = None,
    *,
    profile: str = "quick",
    k_hi: int | None = None,
    formats: str | None = None,
    prompts: str | Path | None = None,
    seed: int = 0,
    temperature: float | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    lower_bound: float | None = None,
    force: bool = False,
    progress: "Progress | None" = None,
    **options: Any,
) -> "Calibration":
    """Choose the key channels to keep in FP16, and measure every format on prompts left aside.

    Args:
        model: folder or embedded name.
        out: output folder, read by `export_plan`; appears whole or not at all.
        profile: `quick`, or `paper` for the published protocol.
        k_hi: FP16 key channels per head; 12.5 % of them by default.
        formats: what to compare, comma-separated names and groups of `quant.catalogue`.
        prompts: JSONL file of `{"text": ..., "domain": ...}` instead of the texts shipped here.
        seed: of the prompt draw, the sampling and the random channels.
        temperature: of the reference trajectories; by default 1.0 for embedded models, else greedy.
        device: `auto`, `cpu` or `cuda`.
        dtype: of the weights; `auto` is float32 on a CPU and bfloat16 on a GPU.
        lower_bound: see `analyze`.
        force: replace files of an earlier calibration.
        progress: called with (stage, done, total); stages record, score, validate.
        **options: other fields of `trajectories.protocol.Protocol`.

    Raises:
        SourceError, UnsupportedModel, NumericError, UsageError, MissingRequirement: see
            `hybridstate.errors`.
    """
    from hybridstate.provenance import check_output_folder
    from hybridstate.quality.calibration import assemble
    from hybridstate.quant.calibration import record_batches, run_fields, score, trajectory_store
    from hybridstate.quant.catalogue import parse_list
    from hybridstate.quant.risk import check_k_hi
    from hybridstate.quant.simulate import simulate
    from hybridstate.trajectories.model import load_model, torch_dtype
    from hybridstate.trajectories.prompts import make_prompts, read_texts, shipped_texts
    from hybridstate.trajectories.protocol import protocol

    target = None if out is None else Path(out)
    if target is not None:
        check_output_folder(target, force=force)
    settings = protocol(profile, temperature=temperature, **options)
    texts = shipped_texts() if prompts is None else read_texts(Path(prompts))
    loaded = load_model(model, device=device, dtype=torch_dtype(dtype), lower_bound=lower_bound)
    channels = check_k_hi(k_hi, loaded.spec)
    names = parse_list(formats, loaded.spec)
    drawn = make_prompts(loaded.encode, texts, settings, seed=seed)
    run = run_fields(loaded, drawn, settings, seed)
    with trajectory_store(target, run, len(loaded.spec.layers), force=force) as store:
        generated = record_batches(loaded, drawn, settings, store, seed=seed, progress=progress)
        scores = score(
            loaded, drawn, settings, store, k_hi=channels, seed=seed, names=names, progress=progress
        )
        held_out = [row for row, prompt in enumerate(drawn) if prompt.split == "validate"]
        outcome = simulate(
            loaded,
            tuple(drawn[row] for row in held_out),
            generated[held_out],
            scores.arms,
            chunk=settings.chunk,
            batch=settings.batch,
            progress=progress,
        )
        source = "shipped" if prompts is None else Path(prompts).name
        calibration = assemble(
            loaded, drawn, settings, scores, generated, outcome, channels, seed=seed, source=source
        )
        if target is not None:
            calibration.write(target, force=force)
    return calibration


def export_plan(
    model: str | Path,
    *,
    out: str | Path,
    w_max: int | None = None,
    policy: str | Path | None = None,
    calibration: str | Path | None = None,
    weights: bool | None = None,
    tp: int | None = None,
    balance: "Balance" = "off",
    kernels: str | Path | None = None,
    gate_input: float | None = None,
    epsilon: float = EPSILON,
    lower_bound: float | None = None,
    check: bool = False,
    dry_run: bool = False,
    force: bool = False,
    offline: bool = False,
    cache_dir: Path | None = None,
    progress: "Progress | None" = None,
) -> "ExportedPlan":
    """A plan bundle, and where a key order was calibrated, the checkpoint that carries it.

    Args:
        model: folder, embedded name, or without weights to write a Hub name.
        out: output folder; appears whole or not at all.
        w_max: cutoff in tokens; without it the plan has no selection.
        policy: a Model-Optimizer DASC policy that gives cutoff, gate input and epsilon instead.
        calibration: folder of `calibrate`; without it the plan has no packed state.
        weights: write the permuted checkpoint; by default exactly when its order can be absorbed.
        tp, balance: ranks to place the selection on, and how; None leaves placement to the engine.
        kernels: folder for one self-contained module of the decode step, specialised to the plan.
        gate_input, epsilon, lower_bound: see `analyze`.
        check: before the folder appears, read the plan back and compare both models.
        dry_run: do everything but write.
        force: replace an earlier export.
        offline, cache_dir: see `checkpoint.open_checkpoint`.
        progress: called with (stage, done, total).

    Raises:
        UsageError: nothing to export, output folder not empty, disk too small.
        SourceError, UnsupportedModel, NumericError, PlanMismatch: see `hybridstate.errors`.
    """
    from hybridstate.checkpoint import open_checkpoint
    from hybridstate.plan.build import build_plan
    from hybridstate.plan.calibration import read_calibration
    from hybridstate.plan.placement import place
    from hybridstate.plan.policy import read_policy
    from hybridstate.plan.policy_model import policy_selection
    from hybridstate.plan.store import OUTPUT_MARKS
    from hybridstate.provenance import check_apart, check_output_folder
    from hybridstate.weights.export import ExportedPlan, check_kernels, write_export
    from hybridstate.weights.permute import layer_orders
    from hybridstate.weights.rewrite import check_disk, lay_out

    target = Path(out)
    check_output_folder(target, force=force, replaces=OUTPUT_MARKS)
    check_apart(target, model, calibration)
    checkpoint = open_checkpoint(
        model,
        lower_bound=lower_bound,
        weights=bool(weights) or (weights is None and calibration is not None),
        offline=offline,
        cache_dir=cache_dir,
        progress=progress,
    )
    model = checkpoint.address or model  # a branch may move meanwhile
    measured = None if calibration is None else read_calibration(calibration)
    if weights and measured is None and balance != "hybrid":
        raise UsageError(
            "without a calibration no weight moves, so there is no checkpoint to write",
            hint="add --calibration DIR or --balance hybrid, or leave --weights out",
        )
    theirs = None if policy is None else read_policy(policy)
    if theirs is not None:
        if w_max is not None or gate_input is not None:
            raise UsageError("a policy brings its cutoff and gate input: leave yours out")
        w_max, gate_input, epsilon = (
            theirs.selected_wmax,
            theirs.static_gate_input,
            theirs.epsilon,
        )
    if (tp is None and balance != "off") or (tp is not None and w_max is None):
        raise UsageError(
            "a placement needs both the ranks and a selection",
            hint="add --tp P and --w-max N, or leave --balance and --tp out",
        )
    if w_max is None:
        plan = build_plan(checkpoint, calibration=measured)
    else:
        found = analyze(
            model,
            w_max=(w_max,),
            gate_input=gate_input,
            epsilon=epsilon,
            lower_bound=lower_bound,
            tp=1 if tp is None else tp,
            balance=balance,
            offline=offline,
            cache_dir=cache_dir,
        )
        chosen = found.cutoffs[0].selection
        if theirs is not None:
            chosen = policy_selection(theirs, checkpoint)
        plan = build_plan(
            checkpoint,
            horizons=found.horizons,
            gate_input=found.gate_input,
            gate_input_source=found.gate_input_source,
            epsilon=epsilon,
            selection=chosen,
            calibration=measured,
            placement=None if tp is None else place(found.spec, chosen, tp=tp, mode=balance),
        )
    layout = None
    if weights or (weights is None and measured is not None and measured.key_order == "shared"):
        layout = lay_out(checkpoint, layer_orders(plan, checkpoint.spec))
        check_disk(layout, target)
    module = None if kernels is None else Path(kernels)
    check_kernels(plan, module, target, force=force)
    if dry_run:
        return ExportedPlan(target, plan, layout, written=False)
    return write_export(
        checkpoint,
        plan,
        layout,
        target,
        kernels=module,
        check=(lambda made: verify(model, made, progress=progress).to_json()) if check else None,
        force=force,
        progress=progress,
    )


def verify(
    original: str | Path,
    exported: str | Path,
    *,
    device: str = "cpu",
    prompts: int = 4,
    prompt_tokens: int = 192,
    new_tokens: int = 32,
    bf16: bool = True,
    progress: "Progress | None" = None,
) -> "Verification":
    """Account for every tensor of an exported checkpoint, then compare both models' numbers.

    Args:
        original, exported: the two folders; the plan is read from `exported`.
        device: `auto`, `cpu` or `cuda`.
        prompts, prompt_tokens, new_tokens: how much text, and how many greedy tokens follow.
        bf16: also compare both in BF16.
        progress: called with (stage, done, total).

    Raises:
        PlanMismatch: not the two checkpoints of one plan, or a tensor differs.
        NumericError: a state, a logit or a token differs.
    """
    from hybridstate.quality.verify import verify as compare

    return compare(
        original,
        exported,
        device=device,
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        bf16=bf16,
        progress=progress,
    )
