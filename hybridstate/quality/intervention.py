"""Does the model need its state? Continue a cached prefix with parts of it zeroed (DASC 3.2, Table 1a).

`nothing` resumes the prefix as it is. `zero-kv` zeroes the attention keys and values, `zero-linear` the recurrent
states while the convolution windows stay, `zero-linear-conv` those windows too; `zero-both` is KV and recurrent states,
`zero-all` everything. `other-prompt` takes the recurrent states of the next case of the batch.

Every arm of a case resumes from one captured prefix, prefilled once. After each arm that prefix is compared bit by bit
with a sealed copy, and the resumed cache must already hold every token of it: the arms differ in what was zeroed, never
in what was cached.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import torch

from hybridstate.errors import NumericError, UsageError
from hybridstate.provenance import sha256_bytes
from hybridstate.quality import tasks
from hybridstate.quality.arms import Outcomes, cached_prefix
from hybridstate.quality.reuse import (
    Cases,
    Text,
    batches,
    divergence,
    mean_and_error,
    paired_interval,
    score,
    top1_agreement,
)
from hybridstate.runtime.restore import KeyValue, Prefix, resume
from hybridstate.trajectories.model import LoadedModel

Intervention = Literal[
    "nothing",
    "zero-kv",
    "zero-linear",
    "zero-linear-conv",
    "zero-both",
    "zero-all",
    "other-prompt",
]
Step = Callable[[int], None]
Progress = Callable[[str, int, int], None]

INTERVENTIONS: Final[tuple[Intervention, ...]] = (
    "nothing",
    "zero-kv",
    "zero-linear",
    "zero-linear-conv",
    "zero-both",
    "other-prompt",
)
"""What `bench restore --interventions` takes away."""

PROBE: Final[tuple[Intervention, ...]] = (
    "nothing",
    "zero-kv",
    "zero-linear",
    "zero-linear-conv",
    "zero-both",
    "zero-all",
)
"""Rows of Table 1a, and those with the convolution windows zeroed as well."""

DEPTHS: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Where in the context the needle lies, as a share of its length."""

SEED: Final = 20_261_130
FILLER_TOKENS: Final = 64
NEEDLE_BYTES: Final = 8
_ZERO_STATES: Final = ("zero-linear", "zero-linear-conv", "zero-both", "zero-all")
_ZERO_KV: Final = ("zero-kv", "zero-both", "zero-all")
_ZERO_CONV: Final = ("zero-linear-conv", "zero-all")


def taken_away(
    prefix: Prefix, name: Intervention
) -> tuple[KeyValue, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """KV, recurrent states and convolution windows to resume from; `prefix` itself stays as it is."""
    states, conv, kv = prefix.states, prefix.conv, prefix.kv
    if name in _ZERO_STATES:
        states = tuple(torch.zeros_like(state) for state in states)
    if name in _ZERO_CONV:
        conv = tuple(torch.zeros_like(window) for window in conv)
    if name in _ZERO_KV:
        kv = {b: (torch.zeros_like(k), torch.zeros_like(v)) for b, (k, v) in kv.items()}
    return kv, states, conv


def run_interventions(
    loaded: LoadedModel,
    cases: Cases,
    outcomes: Outcomes,
    *,
    rows: int,
    done: Step,
    names: Sequence[Intervention] = INTERVENTIONS,
) -> tuple[str, ...]:
    """Run the interventions `names`, the first of which must be `nothing`, on one batch of cases.

    A batch of one case has no other prompt and leaves that arm out. Nothing is packed here.

    Returns:
        sha256 of each captured prefix, one per `rows` cases.

    Raises:
        NumericError: an arm did not resume from the whole cached prefix, or changed it.
    """
    if names[0] != "nothing":
        raise NumericError("the first intervention must be `nothing`, the reference of all KL")
    whole = cached_prefix(loaded, cases.context, rows=rows)
    digests = []
    for start in range(0, whole.batch, rows):
        chosen = list(range(start, min(start + rows, whole.batch)))
        part, sealed = whole.rows(chosen), whole.rows(chosen)
        digests.append(_digest(part))
        subset = cases.rows(chosen)
        reference: torch.Tensor | None = None
        for name in names:
            if name == "other-prompt" and whole.batch < 2:
                continue
            kv, states, conv = taken_away(part, name)
            if name == "other-prompt":
                states = whole.rows([(row + 1) % whole.batch for row in chosen]).states
            past = resume(loaded, kv, states, conv)
            require_hit(past, part, name)
            scores = score(loaded, past, subset)
            require_same(part, sealed, name)
            reference = scores.log_probs if reference is None else reference
            kl = divergence(reference, scores.log_probs)
            top1 = top1_agreement(reference, scores.log_probs)
            outcomes.add(name, subset, scores.exact, scores.bits, kl, top1)
            done(len(chosen))
    return tuple(digests)


def require_hit(past: Any, prefix: Prefix, name: str) -> None:
    """The cache about to be continued holds every token of the prefix, so none is computed again.

    Raises:
        NumericError: a block holds another number of tokens.
    """
    for block in prefix.kv:
        held = int(past.layers[block].get_seq_length())
        if held != prefix.length:
            raise NumericError(
                f"{name}: block {block} resumes from {held} tokens, the cached prefix has "
                f"{prefix.length}",
                block=block,
                found=held,
                expected=prefix.length,
            )


def require_same(prefix: Prefix, sealed: Prefix, name: str) -> None:
    """The cached prefix is bit by bit the sealed copy.

    Raises:
        NumericError: an arm wrote into it, so later arms would not start from the same bytes.
    """
    pairs = zip(_tensors(prefix), _tensors(sealed), strict=True)
    if not all(torch.equal(a, b) for a, b in pairs):
        raise NumericError(f"{name} changed the cached prefix that all arms share", arm=name)


def _tensors(prefix: Prefix) -> Iterator[torch.Tensor]:
    yield prefix.tokens
    yield from prefix.states
    yield from prefix.conv
    for block in sorted(prefix.kv):
        yield from prefix.kv[block]


def _digest(prefix: Prefix) -> str:
    parts = (
        sha256_bytes(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()).encode()
        for tensor in _tensors(prefix)
    )
    return sha256_bytes(b"".join(parts))


# -- one needle at five depths ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProbeOptions:
    """How much to ask.

    Attributes:
        examples: questions at each depth.
        tokens: bytes of a whole prompt, filler and question included.
        rows: sequences that run at once.
        depths: places of the needle, from 0 (first) to 1 (last thing in the context).
    """

    examples: int = 100
    tokens: int = 1024
    rows: int = 32
    depths: tuple[float, ...] = DEPTHS

    @classmethod
    def on(cls, device: str, *, examples: int) -> "ProbeOptions":
        """As many sequences at once as a device takes well."""
        return cls(examples=examples, rows=256 if device == "cuda" else 32)

    def check(self) -> None:
        """Refuse what cannot run.

        Raises:
            UsageError: naming the option.
        """
        if self.examples < 1:
            raise UsageError(f"--intervention must be at least 1 here, found {self.examples}")
        if self.tokens < 256:
            raise UsageError(f"a prompt needs at least 256 tokens, found {self.tokens}")


def needle(rng: np.random.Generator, *, tokens: int, depth: float) -> tasks.Question:
    """One fact `QZK:vbt;` in neutral prose, asked after 64 more bytes: the form of RULER's NIAH-S1.

    Args:
        tokens: bytes of the whole prompt.
        depth: share of the context's prose that stands before the fact.
    """
    key = bytes(rng.integers(65, 91, 3).astype(np.uint8))
    value = bytes(rng.integers(97, 123, 3).astype(np.uint8))
    question = b"?" + key + b":"
    room = tokens - FILLER_TOKENS - len(question) - NEEDLE_BYTES
    before = round(depth * room)
    context = tasks.prose(rng, before) + key + b":" + value + b";" + tasks.prose(rng, room - before)
    return tasks.Question(context, tasks.prose(rng, FILLER_TOKENS), question, value)


def probe(
    loaded: LoadedModel, options: ProbeOptions, *, progress: Progress | None = None
) -> dict[str, Any]:
    """Accuracy at each depth under every intervention of `PROBE`, as plain JSON values.

    Raises:
        NumericError: see `run_interventions`.
        UsageError: an option is out of range.
    """
    options.check()
    outcomes = Outcomes()
    digests: list[str] = []
    finished, total = 0, len(options.depths) * options.examples * len(PROBE)

    def done(count: int) -> None:
        nonlocal finished
        finished += count
        if progress is not None:
            progress("intervention", finished, total)

    kinds = {depth: f"depth {depth:g}" for depth in options.depths}
    prefixes: set[int] = set()
    for place, (depth, kind) in enumerate(kinds.items()):
        rng = np.random.Generator(np.random.PCG64([SEED, place]))
        texts = []
        for _ in range(options.examples):
            asked = needle(rng, tokens=options.tokens, depth=depth)
            parts = (asked.context, asked.filler + asked.question, asked.answer)
            texts.append(Text(*(part.decode() for part in parts)))
        for cases in batches(loaded, kind, texts):
            prefixes.add(int(cases.context.shape[1]))
            digests += run_interventions(
                loaded, cases, outcomes, rows=options.rows, done=done, names=PROBE
            )
    return {
        "task": "one needle in neutral prose (the form of RULER NIAH-S1)",
        "task_data": "synthetic",
        "depths": list(options.depths),
        "examples_per_depth": options.examples,
        "tokens": options.tokens,
        "prefix_tokens": sorted(prefixes),
        "seed": SEED,
        "chance": tasks.CHANCE["recall"],
        "prefix": {
            "captured": len(digests),
            "checked": len(digests) * len(PROBE),
            "digests": digests,
            "check": "resumed with all tokens cached, bit-equal after every intervention",
        },
        "arms": [_arm(outcomes, name, kinds) for name in PROBE],
    }


def _arm(outcomes: Outcomes, name: str, kinds: dict[float, str]) -> dict[str, Any]:
    """Accuracy by depth and over all, the paired difference from `nothing`, KL to it."""
    found = [outcomes.get(name, kind) for kind in kinds.values()]
    reference = [outcomes.get("nothing", kind) for kind in kinds.values()]
    exact = np.concatenate([outcome.exact for outcome in found])
    difference = exact - np.concatenate([outcome.exact for outcome in reference])
    accuracy, error = mean_and_error(exact)
    interval = paired_interval(difference, SEED)
    return {
        "arm": name,
        "accuracy": accuracy,
        "accuracy_se": error,
        "difference": float(difference.mean()),
        "difference_interval_95": None if interval is None else list(interval),
        "kl": float(np.concatenate([outcome.kl for outcome in found]).mean()),
        "by_depth": [
            {"depth": depth, "accuracy": float(outcome.exact.mean()), "cases": len(outcome.exact)}
            for depth, outcome in zip(kinds, found, strict=True)
        ],
    }
