"""`bench quality`: answers after compressed hits, and with the live state in every format (DASC 5, DAMP appendix B).

Tasks in RULER's templates and the embedded models' own ones, through the real prefix cache by the warm and replay
protocol of `quality.replay`. All arms see the same prompts, warm and replay in the same order with the same seeds and
as many cached states. Formats of the live state are written at the end of every prefill chunk, the cached prefix
included, and at every decoded token; DASC's arms keep the live state in FP32.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from hybridstate.bench.quality_arms import stored_bytes
from hybridstate.bench.quality_options import BOUNDARIES, OWN_TASKS, Options
from hybridstate.bench.quality_record import LOADED_IN_ALL, Quality, earlier, run_header
from hybridstate.bench.quality_rows import Rows, loaded_share
from hybridstate.bench.quality_times import first_token_times
from hybridstate.bench.quality_window import whole_window
from hybridstate.bench.room import check_room
from hybridstate.errors import NumericError, UsageError
from hybridstate.plan.accounting import temporal_bytes
from hybridstate.quality import ruler
from hybridstate.quality.generation import Sampling, generate
from hybridstate.quality.questions import Block, own_block, ruler_block
from hybridstate.quality.replay import (
    Replayed,
    ReuseArm,
    Served,
    serve,
    stored_prefixes,
    without_cache,
)
from hybridstate.runtime.restore import Prefix
from hybridstate.trajectories.cache import prefill
from hybridstate.trajectories.model import LoadedModel
from hybridstate.trajectories.stages import stage, timed

BATCH_BYTES: Final = 14 << 30
"""States and attention keys decoded at once on a GPU; temporaries take about three times as much."""
PASS_TOKENS: Final = {"cpu": 16_384, "cuda": 131_072}
"""Tokens of one forward pass."""
CPU_ROWS: Final = 64

Progress = Callable[[str, int, int], None]
Record = Callable[[dict[str, Any]], None]


def run_quality(
    loaded: LoadedModel,
    arms: Sequence[ReuseArm],
    options: Options,
    material: ruler.Material,
    *,
    header: dict[str, Any] | None = None,
    resume: Path | None = None,
    progress: Progress | None = None,
    record: Record | None = None,
) -> Quality:
    """Run every arm on every block.

    Args:
        arms: dense first.
        header: more facts about where the arms are from.
        resume: an earlier result of the same options, perhaps a partial one; its blocks are not run again.
        progress: called with (stage, done, total).
        record: receives the result after every block, so that a run that is stopped leaves what it has.

    Raises:
        UsageError: an option is out of range, or the earlier result is of other options.
        SourceError: the earlier result cannot be read.
        NumericError: a state is not finite, WR with a whole window is not recomputation, or every block was refused.
    """
    options.check()
    state = temporal_bytes(loaded.spec)
    check_room("--questions", options.questions, state, "states of their prefixes", loaded.device)
    if options.slots is not None:
        check_room("--slots", options.slots, state, "cached states of an arm", loaded.device)
    assert arms[0].name == "dense"
    report: Progress = progress or (lambda _stage, _done, _total: None)
    keep: Record = record or (lambda _result: None)
    begun = time.monotonic()
    plan = list(_planned(options))
    keys = [(task, tokens, end) for task, tokens, ends in plan for end in ends]
    quality = Quality(run_header(loaded, arms, options) | (header or {}), plan=keys)
    if resume is not None:
        quality.go_on(earlier(resume, quality.header))
    if quality.whole_window is None:
        quality.whole_window = whole_window(loaded, arms, questions=min(8, options.questions))
    keep(quality.to_json())
    for place, (task, tokens, ends) in enumerate(plan):
        report("blocks", place, len(plan))
        boundaries = [end for end in ends if (task, tokens, end) not in quality.done]
        if not boundaries:
            continue
        late = options.within is not None and time.monotonic() - begun > options.within
        block, why = None, f"not begun within {options.within} s"
        if not late:
            block, why = _made(loaded, task, material, tokens, options)
        if block is None:
            quality.left_out.append({"task": task, "tokens": tokens, "why": why})
            continue
        for boundary in boundaries:
            whole = block.at_the_end() if boundary == "prompt" else block
            with timed() as clock:
                found, refused = _fitting(loaded, arms, whole, boundary, options)
            clock.settle()
            seconds = {"seconds": sum(clock.seconds.values()), "stages_s": dict(clock.seconds)}
            found |= {"asked_tokens": tokens, **seconds}
            if refused and options.resident:
                quality.refused.append(
                    {"task": task, "tokens": tokens, "boundary": boundary, "arms": refused}
                )
            else:
                quality.blocks.append(found)
            group = {"suite": found["suite"], "boundary": boundary, "tokens": found["tokens"]}
            known = [{key: entry[key] for key in group} for entry in quality.ttft]
            if options.repeats and group not in known:
                times = first_token_times(loaded, arms, whole, options.repeats)
                quality.ttft.append(group | times)
            keep(quality.to_json())
    report("blocks", len(plan), len(plan))
    if not quality.blocks:
        why = (
            "; ".join(quality.refused[0]["arms"].values()) if quality.refused else "none was begun"
        )
        raise NumericError(
            f"no block can be reported: {why:.300}",
            hint="longer prompts raise the token hit, more --slots avoid evictions"
            if quality.refused
            else "give more time with --within, or longer prompts with --tokens",
        )
    short = {n: x for n, x in loaded_share(quality.blocks).items() if x < LOADED_IN_ALL}
    if options.resident and short:
        name, share = next(iter(short.items()))
        raise NumericError(
            f"{name} loaded a state in {share:.1%} of all its requests, {LOADED_IN_ALL:.0%} are needed",
            hint="give more --slots",
        )
    quality.complete = not any("begun" in entry["why"] for entry in quality.left_out)
    return quality


def _fitting(
    loaded: LoadedModel, arms: Sequence[ReuseArm], block: Block, boundary: str, options: Options
) -> tuple[dict[str, Any], dict[str, str]]:
    """`run_block`, with fewer arms at once where the device's memory does not suffice."""
    for divisor in (1, 2, 4):
        try:
            return run_block(loaded, arms, block, boundary, options, divisor)
        except torch.OutOfMemoryError:
            pass  # the frames that hold its tensors are gone once this clause is left
        gc.collect()  # so are keys and captured steps that hold each other
        torch.cuda.empty_cache()
    return run_block(loaded, arms, block, boundary, options, 8)


def run_block(
    loaded: LoadedModel,
    arms: Sequence[ReuseArm],
    block: Block,
    boundary: str,
    options: Options,
    divisor: int = 1,
) -> tuple[dict[str, Any], dict[str, str]]:
    """All arms on one block.

    Args:
        boundary: what the block's prefixes end at.
        divisor: of the rows that run at once.

    Returns:
        Its entry, and by arm why its cache was not resident.
    """
    rows = Rows(loaded, block, boundary, options.replays)
    per_pass = PASS_TOKENS[loaded.device.type] // divisor
    rows_prefill = max(1, per_pass // block.prefix)
    whole = None
    with stage("prefill"):
        exact = [arms[0].storage]
        prefix = stored_prefixes(loaded, block, exact, chunk=options.chunk, rows=rows_prefill)[0]
        replayed = Replayed(loaded, prefix, rows_prefill)
        if any(arm.policy == "recompute" for arm in arms):
            whole = prefill(loaded, torch.cat([block.context, block.suffix], 1))
    refused: dict[str, str] = {}
    mode = ""
    limit = _rows_at_once(loaded, arms, block, prefix, options, divisor)
    for group in _groups(arms, block, options, limit):
        served = _served(loaded, group, block, prefix, replayed, options, per_pass)
        answers: dict[str, tuple[NDArray[np.int64], torch.Tensor]] = {}
        for some in _alike(served, limit):
            with stage("replies"):
                replies = generate(
                    *(loaded, block, [group[n] for n in some], [served[n] for n in some]),
                    chunk=options.chunk,
                    sampling=Sampling(options.temperature, options.seed),
                    whole=whole,
                )
            mode = mode or replies.mode
            for place, n in enumerate(some):
                answers[group[n].name] = replies.tokens[place], replies.first[place]
        for arm, kept in zip(group, served, strict=True):
            hit = kept.residency(block.tokens)
            if arm.policy == "recompute":
                hit["not_resident"] = []
            elif hit["not_resident"]:
                refused[arm.name] = f"{arm.name}: {', '.join(hit['not_resident'])}"
            size = kept.slot_bytes if arm.storage.exact else stored_bytes(loaded, arm)
            with stage("scores"):
                rows.add(arm, *answers[arm.name], {"bytes": size, "hit": hit})
    return {**rows.to_json(arms), "steps": mode, "rows_divided_by": divisor}, refused


def _served(
    loaded: LoadedModel,
    group: Sequence[ReuseArm],
    block: Block,
    prefix: Any,
    replayed: Replayed,
    options: Options,
    per_pass: int,
) -> list[Served]:
    """What each arm's cache returns; formatted states are prefilled together."""
    formatted = [arm for arm in group if not arm.storage.exact]
    own: dict[str, Any] = {}
    if formatted:
        together = max(1, per_pass // options.chunk)
        with stage("prefill of formats"):
            made = stored_prefixes(
                *(loaded, block, [arm.storage for arm in formatted]),
                chunk=options.chunk,
                rows=together,
            )
        own = {arm.name: found for arm, found in zip(formatted, made, strict=True)}
    served = []
    for arm in group:
        mine = own.get(arm.name, prefix)
        with stage("cache"):
            if arm.policy == "recompute":
                found = without_cache(loaded, block, mine, rounds=options.replays)
            else:
                found = serve(
                    *(loaded, arm, block, mine, replayed),
                    slots=options.slots or block.questions,
                    rounds=options.replays,
                    seed=options.seed,
                )
            served.append(found.once(block.questions) if _repeats(arm, options) else found)
    return served


def _repeats(arm: ReuseArm, options: Options) -> bool:
    """Whether equal states give equal replies: nothing is drawn."""
    return options.temperature == 0 and arm.storage.low.stochastic is None


def _rows_at_once(
    loaded: LoadedModel,
    arms: Sequence[ReuseArm],
    block: Block,
    prefix: Prefix,
    options: Options,
    divisor: int,
) -> int:
    """Sequences decoded at once, a divisor of what there is where all of it would fit."""
    rows = options.rows
    if rows is None and loaded.device.type == "cpu":
        rows = CPU_ROWS
    if rows is None:
        keys = [tensor[0] for pair in prefix.kv.values() for tensor in pair]
        held = [*(state[0] for state in prefix.states), *keys]
        row = sum(tensor.numel() * tensor.element_size() for tensor in held)
        unseen = min(options.chunk, int(block.suffix.shape[1]))
        rows = min(BATCH_BYTES // row, PASS_TOKENS["cuda"] // unseen)
    return max(1, min(rows, sum(_rows(arm, block, options) for arm in arms)) // divisor)


def _rows(arm: ReuseArm, block: Block, options: Options) -> int:
    """Sequences of an arm whose rounds are equal wherever they may be."""
    return block.questions * (1 if _repeats(arm, options) else options.replays)


def _groups(
    arms: Sequence[ReuseArm], block: Block, options: Options, limit: int
) -> Iterator[Sequence[ReuseArm]]:
    """Arms that are served together, in order: as many as `limit` rows allow, at least one."""
    group: list[ReuseArm] = []
    for arm in arms:
        if group and sum(_rows(one, block, options) for one in [*group, arm]) > limit:
            yield group
            group = []
        group.append(arm)
    yield group


def _alike(served: Sequence[Served], limit: int) -> Iterator[list[int]]:
    """Places of arms with as many rows each, which decode together: as many as `limit` allows, at least one."""
    for rows in dict.fromkeys(one.rows for one in served):
        places = [n for n, one in enumerate(served) if one.rows == rows]
        count = max(1, limit // rows)
        yield from (places[start : start + count] for start in range(0, len(places), count))


def _planned(options: Options) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """Task, length and boundaries of each block: the models' own tasks first, they take the least time."""
    for tokens in options.tokens:
        for task in sorted(options.tasks, key=lambda name: name in ruler.TASKS):
            own = task in OWN_TASKS
            yield task, tokens, options.boundaries or (BOUNDARIES if own else BOUNDARIES[:1])


def _made(
    loaded: LoadedModel, task: str, material: ruler.Material, tokens: int, options: Options
) -> tuple[Block | None, str]:
    """The block, or why there is none."""
    count = options.questions
    try:
        if task in OWN_TASKS:
            return own_block(loaded, task, tokens=tokens, questions=count), ""
        return ruler_block(loaded, task, material, tokens=tokens, questions=count), ""
    except UsageError as error:
        return None, error.message
