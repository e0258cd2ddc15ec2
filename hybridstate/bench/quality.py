"""`bench quality`: answers after compressed hits, and with the live state in every format (DASC 5, DAMP appendix B).

Tasks in RULER's templates and the embedded models' own ones, through the real prefix cache by the warm and replay
protocol of `quality.replay`. All arms see the same prompts, warm and replay in the same order with the same seeds and
as many cached states. Formats of the live state are written at the end of every prefill chunk, the cached prefix
included, and at every decoded token; DASC's arms keep the live state in FP32.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from hybridstate.bench.quality_arms import stored_bytes
from hybridstate.bench.quality_rows import Rows, loaded_share, summary
from hybridstate.bench.quality_times import first_token_times
from hybridstate.bench.quality_window import whole_window
from hybridstate.bench.timing import device_record
from hybridstate.defaults import RANDOM_MASK_SEEDS
from hybridstate.errors import NumericError, UsageError
from hybridstate.quality import ruler, tasks
from hybridstate.quality.generation import Sampling, generate
from hybridstate.quality.questions import FILLER_TOKENS, SEED, Block, own_block, ruler_block
from hybridstate.quality.replay import (
    LOADED,
    TOKEN_HIT,
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

BOUNDARIES: Final = ("prompt", "question")
OWN_TASKS: Final = tasks.TASKS
LOADED_IN_ALL: Final = 0.99
"""Under residency, the least share of loaded requests of an arm over all blocks (DASC C)."""
BATCH_BYTES: Final = 14 << 30
"""States and attention keys decoded at once on a GPU; temporaries take about three times as much."""
PASS_TOKENS: Final = {"cpu": 16_384, "cuda": 131_072}
"""Tokens of one forward pass."""
CPU_ROWS: Final = 64

Progress = Callable[[str, int, int], None]
Record = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Options:
    """What to run.

    Attributes:
        tasks: of `quality.tasks.TASKS` and `quality.ruler.TASKS`.
        tokens: lengths of prompts.
        questions: per task and length.
        replays: measured rounds.
        boundaries: ends of cached prefixes: `prompt` (one token before a repeated prompt's end) or `question` (before
            64 tokens of prose and the question); empty is `prompt`, and `question` as well for the models' own tasks.
        seeds: random masks per cutoff.
        chunk: prefill tokens between two writes of a formatted state.
        temperature, seed: of the replies; 0 is greedy.
        slots: cached states per arm, by default as many as questions.
        resident: refuse blocks whose cache was not resident.
        repeats: timed requests per arm, 0 for none.
        rows: sequences decoded at once.
        within: seconds after which no further block is begun.
    """

    tasks: tuple[str, ...]
    tokens: tuple[int, ...] = (4096,)
    questions: int = 30
    replays: int = 3
    boundaries: tuple[str, ...] = ()
    seeds: int = 5
    chunk: int = 512
    temperature: float = 0.0
    seed: int = SEED
    slots: int | None = None
    resident: bool = False
    repeats: int = 5
    rows: int | None = None
    within: float | None = None

    def check(self) -> None:
        """Refuse what cannot run.

        Raises:
            UsageError: naming the option.
        """
        known = (*OWN_TASKS, *ruler.TASKS)
        for option, given, allowed in (
            ("--tasks", self.tasks, known),
            ("--boundary", self.boundaries, BOUNDARIES),
        ):
            unknown = [name for name in given if name not in allowed]
            if unknown:
                raise UsageError(
                    f"{option} {unknown[0]!r:.40} is not known",
                    hint=f"choose from {', '.join(allowed)}",
                )
        if not self.tasks or not self.tokens:
            raise UsageError("no task or no length given")
        if not 0 <= self.seeds <= len(RANDOM_MASK_SEEDS):
            raise UsageError(f"--seeds takes 0 to {len(RANDOM_MASK_SEEDS)}, found {self.seeds}")
        if not 0 <= self.temperature < 100:
            raise UsageError(f"--temperature takes 0 to 100, found {self.temperature}")
        for name, value, least in (
            ("questions", self.questions, 1),
            ("replays", self.replays, 1),
            ("chunk", self.chunk, 1),
            ("tokens", min(self.tokens), 256),
            ("slots", 1 if self.slots is None else self.slots, 1),
            ("rows", 1 if self.rows is None else self.rows, 1),
            ("repeats", self.repeats, 0),
        ):
            if value < least:
                raise UsageError(f"--{name} must be at least {least}, found {value}")


@dataclass(slots=True)
class Quality:
    """Everything measured so far; `to_json` is the stored document's `result`."""

    header: dict[str, Any]
    blocks: list[dict[str, Any]] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)
    whole_window: dict[str, Any] | None = None
    ttft: list[dict[str, Any]] = field(default_factory=list)
    complete: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            **self.header,
            "complete": self.complete,
            "whole_window": self.whole_window,
            "summary": summary(self.blocks),
            "loaded": loaded_share(self.blocks),
            "blocks": list(self.blocks),
            "refused": list(self.refused),
            "left_out": list(self.left_out),
            "ttft": list(self.ttft),
        }


def run_quality(
    loaded: LoadedModel,
    arms: Sequence[ReuseArm],
    options: Options,
    material: ruler.Material,
    *,
    header: dict[str, Any] | None = None,
    progress: Progress | None = None,
    record: Record | None = None,
) -> Quality:
    """Run every arm on every block.

    Args:
        arms: dense first.
        header: more facts about where the arms are from.
        progress: called with (stage, done, total).
        record: receives the result after every block, so that a run that is stopped leaves what it has.

    Raises:
        UsageError: an option is out of range.
        NumericError: a state is not finite, WR with a whole window is not recomputation, or every block was refused.
    """
    options.check()
    assert arms[0].name == "dense"
    report: Progress = progress or (lambda _stage, _done, _total: None)
    keep: Record = record or (lambda _result: None)
    begun = time.monotonic()
    quality = Quality(_header(loaded, arms, options) | (header or {}))
    plan = list(_planned(options))
    quality.whole_window = whole_window(loaded, arms, questions=min(8, options.questions))
    keep(quality.to_json())
    for place, (task, tokens, boundaries) in enumerate(plan):
        report("blocks", place, len(plan))
        late = options.within is not None and time.monotonic() - begun > options.within
        block, why = None, f"not begun within {options.within} s"
        if not late:
            block, why = _made(loaded, task, material, tokens, options)
        if block is None:
            quality.left_out.append({"task": task, "tokens": tokens, "why": why})
            continue
        for boundary in boundaries:
            whole = block.at_the_end() if boundary == "prompt" else block
            started = time.monotonic()
            found, refused = _fitting(loaded, arms, whole, boundary, options)
            found["seconds"] = time.monotonic() - started
            if refused and options.resident:
                quality.refused.append(
                    {"task": task, "tokens": tokens, "boundary": boundary, "arms": refused}
                )
            else:
                quality.blocks.append(found)
            group = {"suite": found["suite"], "boundary": boundary, "tokens": tokens}
            timed = [{key: entry[key] for key in group} for entry in quality.ttft]
            if options.repeats and group not in timed:
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
    prefix = stored_prefixes(
        loaded, block, [arms[0].storage], chunk=options.chunk, rows=rows_prefill
    )[0]
    replayed = Replayed(loaded, prefix, rows_prefill)
    whole = None
    if any(arm.policy == "recompute" for arm in arms):
        whole = prefill(loaded, torch.cat([block.context, block.suffix], 1))
    refused: dict[str, str] = {}
    mode = ""
    for group in _groups(loaded, arms, block, prefix, options, divisor):
        served = _served(loaded, group, block, prefix, replayed, options, per_pass)
        replies = generate(
            loaded,
            block,
            group,
            served,
            chunk=options.chunk,
            sampling=Sampling(options.temperature, options.seed),
            whole=whole,
        )
        mode = replies.mode
        for place, (arm, kept) in enumerate(zip(group, served, strict=True)):
            hit = kept.residency(block.tokens)
            if arm.policy == "recompute":
                hit["not_resident"] = []
            elif hit["not_resident"]:
                refused[arm.name] = f"{arm.name}: {', '.join(hit['not_resident'])}"
            size = kept.slot_bytes if arm.storage.exact else stored_bytes(loaded, arm)
            more = {"bytes": size, "hit": hit}
            rows.add(arm, replies.tokens[place], replies.first[place], more)
    return {**rows.to_json(arms), "steps": mode}, refused


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
        made = stored_prefixes(
            loaded, block, [arm.storage for arm in formatted], chunk=options.chunk, rows=together
        )
        own = {arm.name: found for arm, found in zip(formatted, made, strict=True)}
    served = []
    for arm in group:
        mine = own.get(arm.name, prefix)
        if arm.policy == "recompute":
            served.append(without_cache(loaded, block, mine, rounds=options.replays))
            continue
        served.append(
            serve(
                loaded,
                arm,
                block,
                mine,
                replayed,
                slots=options.slots or block.questions,
                rounds=options.replays,
                seed=options.seed,
            )
        )
    return served


def _groups(
    loaded: LoadedModel,
    arms: Sequence[ReuseArm],
    block: Block,
    prefix: Prefix,
    options: Options,
    divisor: int,
) -> Iterator[Sequence[ReuseArm]]:
    """Arms that run together: as many as rows allow, at least one."""
    rows = options.rows
    if rows is None and loaded.device.type == "cpu":
        rows = CPU_ROWS
    if rows is None:
        keys = [tensor[0] for pair in prefix.kv.values() for tensor in pair]
        held = [*(state[0] for state in prefix.states), *keys]
        row = sum(tensor.numel() * tensor.element_size() for tensor in held)
        unseen = min(options.chunk, int(block.suffix.shape[1]))
        rows = min(BATCH_BYTES // row, PASS_TOKENS["cuda"] // unseen)
    count = max(1, rows // divisor // (block.questions * options.replays))
    for start in range(0, len(arms), count):
        yield arms[start : start + count]


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


def _header(loaded: LoadedModel, arms: Sequence[ReuseArm], options: Options) -> dict[str, Any]:
    settings = {name: getattr(options, name) for name in options.__slots__}
    return {
        "model": loaded.checkpoint.name,
        "model_digests": loaded.checkpoint.digests(),
        "device": device_record(loaded.device),
        "protocol": {
            **{k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()},
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "conv_dtype": "bfloat16",
            "filler_tokens": FILLER_TOKENS,
            "mask_seeds": list(RANDOM_MASK_SEEDS[: options.seeds]),
            "dense_spill": False,
            "warm_requests": "one per prefix, not scored",
            "resident_rules": {
                "token_hit_above": TOKEN_HIT,
                "loaded_at_least": LOADED,
                "loaded_at_least_in_all": LOADED_IN_ALL,
            },
            "formats": "written at the end of every prefill chunk and at every decoded token; simulated "
            "in an FP32 container",
            "data": "synthetic, in RULER's templates and in the models' own; prose is CC0",
            "ruler_left_out": "qa_2 (needs HotpotQA)",
        },
        "arms": [
            {
                "arm": arm.name,
                "policy": arm.policy,
                "checkpoint": arm.kind,
                "state": arm.storage.name,
                "w_max": arm.w_max,
                "w_replay": arm.w_replay,
                "seed": arm.seed,
                "retained_units": None if arm.units is None else arm.units.counts[0],
                "units": None if arm.units is None else arm.units.counts[1],
                "mask_digest": None if arm.units is None else arm.units.digest,
            }
            for arm in arms
        ],
    }
