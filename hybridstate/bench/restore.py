"""`bench restore`: what a checkpoint costs to keep, to load, and in answers (DASC 4.2, 5.2, Table 2).

Real cached prefixes go through pack, bytes and unpack into poisoned slots, then through a load policy, and the request
goes on with 64 tokens of neutral filler and the question. Correctness comes first: a dense checkpoint must come back
bit for bit and continue bit for bit, and must agree with a full recomputation; otherwise nothing is reported.

Arms: dense, full recomputation, and for each cutoff NR, WR and NR under random masks with the same counts per layer.
All arms see the same prompts. Random masks are reported as mean and sample SD over seeds, and DASC minus their mean as
a paired bootstrap interval over prompts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from hybridstate.bench.cases import FILLER_TOKENS, PROSE, QUESTION_SEED, Options, make_cases
from hybridstate.bench.cutoffs import Cutoff, make_arms
from hybridstate.bench.timing import Samples, device_record, measure
from hybridstate.defaults import RANDOM_MASK_SEEDS
from hybridstate.errors import NumericError
from hybridstate.plan.select import Selection, overlap
from hybridstate.plan.store import Plan
from hybridstate.quality import tasks
from hybridstate.quality.arms import (
    Arm,
    Outcomes,
    cached_prefix,
    check_length,
    restore_into,
    retained_by,
    run_arms,
)
from hybridstate.quality.intervention import INTERVENTIONS, run_interventions
from hybridstate.quality.reuse import Cases, mean_and_error, paired_interval, score
from hybridstate.runtime.pool import StatePool
from hybridstate.runtime.restore import (
    Prefix,
    load,
    replay,
    resume,
    resume_slots,
    store,
)
from hybridstate.trajectories.cache import forward, new_cache
from hybridstate.trajectories.model import LoadedModel

BOOTSTRAP_SEED: Final = 20_261_130

RECOMPUTE_KL: Final = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}
"""Most nats per token between a dense restore and a full recomputation: the checkpoint rounds convolution windows to
BF16, and prefill in other pieces rounds differently; a wrong state is far above either."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Restored:
    """Everything measured, as JSON-able values; `to_json` is the stored document's `result`."""

    result: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The result as plain values."""
        return self.result


# -- correctness --------------------------------------------------------------------------------


def bit_equal_restore(
    loaded: LoadedModel, dense: Arm, cases: Cases, pool: StatePool
) -> dict[str, Any]:
    """A dense checkpoint restores states, windows and logits bit for bit.

    Raises:
        NumericError: it does not; nothing may be reported.
    """
    cases = cases.rows(range(min(2, len(cases))))
    prefix = cached_prefix(loaded, cases.context, rows=len(cases))
    slots, units = pool.alloc(len(cases)), retained_by(dense)
    assert slots is not None
    for row, slot in enumerate(slots):
        buffer = store(prefix, row, units)
        check_length(buffer, dense)
        load(buffer, units, pool, int(slot))
    states, conv = pool.read(slots)
    restored = score(loaded, resume_slots(loaded, prefix.kv, pool, slots), cases)
    kept = score(loaded, resume(loaded, prefix.kv, prefix.states, prefix.conv), cases)
    pool.free(slots)
    equal = {
        "states": all(map(torch.equal, states, prefix.states)),
        "conv": all(map(torch.equal, conv, prefix.conv)),
        "logits": torch.equal(restored.log_probs, kept.log_probs),
    }
    if not all(equal.values()):
        wrong = ", ".join(name for name, same in equal.items() if not same)
        raise NumericError(
            f"a dense checkpoint does not come back bit for bit ({wrong}); nothing is reported",
            hint="this is a defect of pack, unpack or the cache, not of the model",
            **equal,
        )
    return {"dense_restore_bit_equal": equal, "cases": len(cases)}


def recompute_agrees(outcomes: Outcomes, dtype: torch.dtype) -> dict[str, Any]:
    """Dense restore against full recomputation, over all cases: the noise floor of every KL.

    Raises:
        NumericError: they differ by more than rounding.
    """
    per_kind = {kind: outcomes.get("recompute", kind) for kind in outcomes.kinds()}
    kl = float(np.concatenate([outcome.kl for outcome in per_kind.values()]).mean())
    same = np.concatenate(
        [outcome.exact == outcomes.get("dense", kind).exact for kind, outcome in per_kind.items()]
    )
    limit = RECOMPUTE_KL[dtype]
    if not kl <= limit:
        raise NumericError(
            f"a dense restore is {kl:.3g} nats per token from full recomputation, at most {limit:g} "
            "is rounding; nothing is reported",
            hint="run with --device cpu, where the model runs in float32",
            found=kl,
            expected=limit,
        )
    return {"recompute_kl": kl, "recompute_kl_limit": limit, "same_answers": float(same.mean())}


# -- time to the first token --------------------------------------------------------------------


def first_token_samples(
    loaded: LoadedModel, arms: Sequence[Arm], cases: Cases, options: Options, progress: Progress
) -> dict[str, Samples]:
    """Seconds from a request's arrival to its first token, one request at a time.

    Counted: load, replay or zero-fill, prefill of what is not cached (`recompute`: everything). Not counted: making the
    checkpoint, and poisoning the slot, which only this bench does. KV of the prefix is in place, as in a paged cache.
    Arms take turns, so that a machine which slows down does not make the later ones look slow.
    """
    case = cases.rows([0])
    prefix = cached_prefix(loaded, case.context, rows=1)
    pool = StatePool(loaded.spec, 1, device=loaded.device)
    timed = [arm for arm in arms if arm.seed is None]  # a random mask costs what NR costs
    requests = {
        arm.name: partial(
            _request,
            loaded,
            arm,
            torch.empty(0) if arm.units is None else store(prefix, 0, arm.units),
            prefix,
            case,
            pool,
        )
        for arm in timed
    }
    found: dict[str, list[float]] = {name: [] for name in requests}
    rounds = options.warmup + options.repeats
    for number in range(rounds):
        for name, request in requests.items():
            taken = measure(request, device=loaded.device, warmup=0, repeat=1).seconds
            found[name] += taken if number >= options.warmup else ()
        progress("time to first token", number + 1, rounds)
    return {name: Samples(seconds) for name, seconds in found.items()}


@torch.no_grad()
def _request(
    loaded: LoadedModel,
    arm: Arm,
    buffer: torch.Tensor,
    prefix: Prefix,
    case: Cases,
    pool: StatePool,
) -> int:
    suffix = case.suffix.to(loaded.device)
    if arm.policy == "recompute":
        past = new_cache(loaded)
        suffix = torch.cat([prefix.tokens, suffix], dim=1)
    else:
        slot = torch.zeros(1, dtype=torch.int64, device=loaded.device)
        window = min(arm.w_replay, prefix.length) if arm.policy == "wr" else 0
        replayed = {window: replay(loaded, prefix, window)} if window else {}
        restore_into(buffer, arm, pool, slot, replayed, prefix.length, 0)
        past = resume(loaded, prefix.kv, *pool.read(slot))
    return int(forward(loaded, suffix, past, logits_to_keep=1)[0, -1].argmax())


# -- the bench ----------------------------------------------------------------------------------


def run_restore(
    loaded: LoadedModel,
    selections: Sequence[Selection],
    options: Options,
    prose: str,
    *,
    plan: Plan | None = None,
    gate_input: tuple[float, str] | None = None,
    progress: Progress | None = None,
) -> Restored:
    """Run every arm on every case and time one request per arm.

    Args:
        selections: one per cutoff, distinct `w_max`.
        prose: held-out text.
        plan: where the selection is from, if from a plan.
        gate_input: a_s of the static horizons and where it is from, if they selected.

    Raises:
        NumericError: a correctness check failed; nothing is reported then.
        UsageError: an option is out of range.
    """
    options.check()
    report: Progress = progress or (lambda _stage, _done, _total: None)
    arms, cutoffs = make_arms(loaded, selections, options.seeds)
    groups = make_cases(loaded, options, prose)
    together = min(options.rows, max(map(len, groups)))
    pool = StatePool(loaded.spec, max(2, together), device=loaded.device)
    check = bit_equal_restore(loaded, arms[0], groups[0], pool)
    outcomes, total = Outcomes(), sum(len(group) for group in groups) * len(arms)
    finished = 0

    def done(count: int) -> None:
        nonlocal finished
        finished += count
        report("answers", finished, total)

    for group in groups:
        run_arms(loaded, arms, group, pool, outcomes, done=done)
    check |= recompute_agrees(outcomes, loaded.dtype)
    removed = Outcomes()
    if options.interventions:
        for group in groups:
            run_interventions(loaded, group, removed, rows=options.rows, done=lambda _count: None)
    del pool
    samples = first_token_samples(loaded, arms, groups[0], options, report)
    dense = arms[0].checkpoint_bytes
    return Restored(
        {
            "model": loaded.checkpoint.name,
            "model_digests": loaded.checkpoint.digests(),
            "device": device_record(loaded.device),
            "protocol": {
                **_protocol(loaded, options, groups),
                "selection": "static horizons" if plan is None else "plan",
                "plan_digest": None if plan is None else plan.digest,
                "gate_input": None if gate_input is None else gate_input[0],
                "gate_input_source": None if gate_input is None else gate_input[1],
            },
            "check": check,
            "arms": [_arm_json(arm, dense, outcomes, samples, groups, cutoffs) for arm in arms],
            "comparisons": [
                row for cutoff in cutoffs for row in _comparisons(cutoff, outcomes, options)
            ],
            "interventions": [
                {"arm": name, **_scores_json(removed, name)}
                for name in INTERVENTIONS
                if removed.covers(name)
            ],
        }
    )


def _protocol(loaded: LoadedModel, options: Options, groups: Sequence[Cases]) -> dict[str, Any]:
    lengths: dict[str, dict[str, list[int]]] = {}
    for group in groups:
        sizes = lengths.setdefault(group.kind, {"prefix": [], "suffix": [], "target": []})
        for key, part in zip(sizes, (group.context, group.suffix, group.target), strict=True):
            sizes[key] = sorted({*sizes[key], int(part.shape[1])})
    return {
        "device": str(loaded.device),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "conv_dtype": "bfloat16",
        "prefill": "chunked reference in torch",
        "unit": loaded.spec.unit,
        "tasks": list(options.tasks),
        "task_data": "synthetic",
        "questions": options.questions,
        "tokens": options.tokens,
        "filler_tokens": FILLER_TOKENS,
        "question_seed": QUESTION_SEED,
        "bootstrap_seed": BOOTSTRAP_SEED,
        "mask_seeds": list(RANDOM_MASK_SEEDS[: options.seeds]),
        "lengths_tokens": lengths,
        "ttft_tokens": {
            "prefix": int(groups[0].context.shape[1]),
            "suffix": int(groups[0].suffix.shape[1]),
        },
    }


def _scores_json(outcomes: Outcomes, arm: str) -> dict[str, Any]:
    """Accuracy per task; KL and bits per byte on prose; every case."""
    result: dict[str, Any] = {"tasks": {}}
    for kind in outcomes.kinds():
        outcome = outcomes.get(arm, kind)
        kl, kl_error = mean_and_error(outcome.kl)
        shared = {
            "cases": len(outcome.kl),
            "kl": kl,
            "kl_se": kl_error,
            "top1_agreement": float(outcome.top1.mean()),
        }
        samples = {"kl_samples": outcome.kl.tolist()}
        if kind == PROSE:
            bits, bits_error = mean_and_error(outcome.bits)
            result[PROSE] = {
                **shared,
                "bits_per_byte": bits,
                "bits_per_byte_se": bits_error,
                **samples,
                "bits_per_byte_samples": outcome.bits.tolist(),
            }
        else:
            accuracy, error = mean_and_error(outcome.exact)
            result["tasks"][kind] = {
                **shared,
                "accuracy": accuracy,
                "accuracy_se": error,
                "chance": tasks.CHANCE[kind],
                **samples,
                "exact_samples": outcome.exact.astype(int).tolist(),
            }
    return result


def _arm_json(
    arm: Arm,
    dense_bytes: int,
    outcomes: Outcomes,
    samples: dict[str, Samples],
    groups: Sequence[Cases],
    cutoffs: Sequence[Cutoff],
) -> dict[str, Any]:
    retained, units = (0, 0) if arm.units is None else arm.units.counts
    empty, heads = (0, 0) if arm.units is None else arm.units.heads
    accounting = next((c.accounting for c in cutoffs if c.selection.w_max == arm.w_max), None)
    size = arm.checkpoint_bytes
    window = arm.w_replay if arm.policy == "wr" else 0
    prefixes: dict[str, int] = {}
    for group in groups:
        prefixes[group.kind] = max(prefixes.get(group.kind, 0), int(group.context.shape[1]))
    timing = samples.get(arm.name)
    return {
        "arm": arm.name,
        "policy": arm.policy,
        "w_max": arm.w_max,
        "seed": arm.seed,
        "retained_units": retained,
        "units": units,
        "heads_without_retained_units": empty,
        "heads": heads,
        "mask_digest": None if arm.units is None else arm.units.digest,
        "checkpoint_bytes": size,
        "ratio_full": dense_bytes / size if size else None,
        "ratio_temporal": accounting.ratio_temporal_ragged if accounting else None,
        "replayed_tokens": min(window, int(groups[0].context.shape[1])),  # of the timed request
        "replayed_tokens_by_kind": {kind: min(window, n) for kind, n in prefixes.items()},
        **_scores_json(outcomes, arm.name),
        "ttft_s": timing.to_json() if timing else None,
    }


def _comparisons(cutoff: Cutoff, outcomes: Outcomes, options: Options) -> Iterator[dict[str, Any]]:
    """DASC (NR) against the mean of the random masks, per task and on prose."""
    if not cutoff.random:
        return
    w_max = cutoff.selection.w_max
    names = [f"random-{w_max}-{seed}" for seed in RANDOM_MASK_SEEDS[: options.seeds]]
    shared = [overlap(cutoff.selection, random).to_json() for random in cutoff.random]
    for kind in outcomes.kinds():
        for metric in ("accuracy",) if kind != PROSE else ("kl", "bits_per_byte"):
            field = {"accuracy": "exact", "kl": "kl", "bits_per_byte": "bits"}[metric]
            ours = getattr(outcomes.get(f"nr-{w_max}", kind), field)
            random = np.stack([getattr(outcomes.get(name, kind), field) for name in names])
            seeds = random.mean(axis=1)
            differences = ours - random.mean(axis=0)
            interval = paired_interval(differences, BOOTSTRAP_SEED)
            yield {
                "w_max": w_max,
                "kind": kind,
                "metric": metric,
                "dasc": float(ours.mean()),
                "random_mean": float(seeds.mean()),
                "random_sd": float(seeds.std(ddof=1)) if len(seeds) > 1 else None,
                "random_by_seed": seeds.tolist(),
                "overlap": shared,
                "difference": float(differences.mean()),
                "interval_95": None if interval is None else list(interval),
                "cases": len(differences),
            }
