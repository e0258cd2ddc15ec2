"""`export-plan` and `verify`: the folder an engine loads, and the proof that it is the same model."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hybridstate.api.analysis import analyze
from hybridstate.defaults import EPSILON
from hybridstate.errors import UnsupportedModel, UsageError

if TYPE_CHECKING:
    from hybridstate.plan.orders import KeyOrder, ValueOrder
    from hybridstate.plan.placement import Balance
    from hybridstate.quality.verify import Verification
    from hybridstate.weights.export import ExportedPlan

    Progress = Callable[[str, int, int], None]


def export_plan(
    model: str | Path,
    *,
    out: str | Path,
    w_max: int | Literal["auto"] | None = None,
    max_kl: float | None = None,
    measured_from: str | Path | None = None,
    load: str = "nr",
    policy: str | Path | None = None,
    calibration: str | Path | None = None,
    weights: bool | None = None,
    tp: int | None = None,
    balance: "Balance" = "off",
    kernels: str | Path | None = None,
    key_order: "KeyOrder" = "shared",
    value_order: "ValueOrder" = "none",
    requantise_every: int = 1,
    gate_input: float | None = None,
    gate_input_from: str | Path | None = None,
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
        w_max: cutoff in tokens; without it the plan has no selection. `auto` takes the largest one of
            `measured_from` whose KL is at most `max_kl`.
        max_kl, measured_from, load: nats per token, a recorded `bench restore`, and `nr` or `wr`.
        policy: a Model-Optimizer DASC policy that gives cutoff, gate input and epsilon instead.
        calibration: folder of `calibrate`; without it the plan has no packed state.
        weights: write the permuted checkpoint; by default exactly when its order can be absorbed.
        tp, balance: ranks to place the selection on, and how; None leaves placement to the engine.
        kernels: folder for one self-contained module of the decode step, specialised to the plan.
        key_order: `shared` by the value heads of a key head, `per-head` (left to the kernel), or `expand` (q and k
            replicated, one key head for each value head).
        value_order: `none`, `fold` (each head's own) or `common` (one per layer); the last two bring value scales and
            need a calibration with `damp+reorder`.
        requantise_every: updates between two writes of the packed state.
        gate_input, gate_input_from, epsilon, lower_bound: see `analyze`.
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
    from hybridstate.plan.measured import read_measured
    from hybridstate.plan.placement import place
    from hybridstate.plan.policy import read_policy
    from hybridstate.plan.policy_model import policy_selection
    from hybridstate.plan.store import OUTPUT_MARKS
    from hybridstate.provenance import check_apart, check_output_folder
    from hybridstate.weights.export import ExportedPlan, check_kernels, write_export
    from hybridstate.weights.orders import absorbs_something, layer_orders
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
        if w_max is not None or gate_input is not None or gate_input_from is not None:
            raise UsageError("a policy brings its cutoff and gate input: leave yours out")
        w_max, gate_input, epsilon = (
            theirs.selected_wmax,
            theirs.static_gate_input,
            theirs.epsilon,
        )
    tested = None
    if w_max == "auto":
        if max_kl is None or measured_from is None:
            raise UsageError(
                "a cutoff taken from measurements needs a bound and the measurements",
                hint="add --max-kl X and --measured FILE of `hybridstate bench restore -o FILE`",
            )
        tested = read_measured(measured_from, checkpoint.digests(), policy=load)
        w_max = tested.choose(max_kl)
    elif max_kl is not None or measured_from is not None:
        raise UsageError("--max-kl and --measured choose a cutoff", hint="add --w-max auto")
    if (tp is None and balance != "off") or (tp is not None and w_max is None):
        raise UsageError(
            "a placement needs both the ranks and a selection",
            hint="add --tp P and --w-max N, or leave --balance and --tp out",
        )
    warnings: tuple[str, ...] = ()
    if w_max is None:
        plan = build_plan(
            checkpoint,
            calibration=measured,
            key_order=key_order,
            value_order=value_order,
            requantise_every=requantise_every,
        )
    else:
        found = analyze(
            model,
            w_max=(w_max,),
            gate_input=gate_input,
            gate_input_from=gate_input_from,
            epsilon=epsilon,
            lower_bound=lower_bound,
            tp=1 if tp is None else tp,
            balance=balance,
            offline=offline,
            cache_dir=cache_dir,
        )
        warnings = found.warnings
        chosen = found.cutoffs[0].selection
        if theirs is not None:
            chosen = policy_selection(theirs, checkpoint)
        if tested is not None:
            tested.require_mask(chosen)
        plan = build_plan(
            checkpoint,
            horizons=found.horizons,
            gate_input=found.gate_input,
            gate_input_source=found.gate_input_source,
            epsilon=epsilon,
            selection=chosen,
            measured=None if tested is None or max_kl is None else tested.block(max_kl),
            calibration=measured,
            key_order=key_order,
            value_order=value_order,
            requantise_every=requantise_every,
            placement=None if tp is None else place(found.spec, chosen, tp=tp, mode=balance),
        )
    layout = None
    if weights or (weights is None and measured is not None and absorbs_something(plan)):
        if not absorbs_something(plan):
            raise UnsupportedModel(
                "value heads that share a key head have key orders of their own, which weights cannot hold, and "
                "nothing else of this plan moves a weight",
                hint="--key-order shared, --key-order expand, or --no-weights and let the kernel gather",
            )
        layout = lay_out(checkpoint, layer_orders(plan, checkpoint.spec))
        check_disk(layout, target)
    module = None if kernels is None else Path(kernels)
    check_kernels(plan, module, target, force=force)
    if dry_run:
        return ExportedPlan(target, plan, layout, written=False, warnings=warnings)
    written = write_export(
        checkpoint,
        plan,
        layout,
        target,
        kernels=module,
        check=(lambda made: verify(model, made, progress=progress).to_json()) if check else None,
        force=force,
        progress=progress,
    )
    return replace(written, warnings=warnings)


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
