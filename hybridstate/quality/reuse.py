"""What a restored state still knows: exact answers, and the distance of the next tokens from a dense restore.

A case is a cached context, a suffix the cache has not seen (neutral filler, then the question) and a target. Everything
is scored in one pass over `suffix + target[:-1]`: a greedy answer equals the target exactly when every target token is
the most likely one given those before it, so no token has to be generated.

Cases of a batch have equal lengths in each part, so that nothing is padded.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hybridstate.errors import SourceError
from hybridstate.trajectories.cache import forward
from hybridstate.trajectories.model import LoadedModel

RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Cases:
    """A batch of cases of one kind.

    Attributes:
        kind: the task's name, or `prose`.
        numbers: position of each case among all cases of its kind, `[B]`.
        context: tokens whose state is cached, int64 `[B, n_p]`.
        suffix: filler and question, `[B, T]`, T at least 1.
        target: tokens that are scored, `[B, A]`.
        bytes_per_target: UTF-8 bytes of each target, `[B]`.
    """

    kind: str
    numbers: tuple[int, ...]
    context: torch.Tensor
    suffix: torch.Tensor
    target: torch.Tensor
    bytes_per_target: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def unseen(self) -> torch.Tensor:
        """What the model reads after the cached prefix, `[B, T + A - 1]`."""
        return torch.cat([self.suffix, self.target[:, :-1]], dim=1)

    def rows(self, rows: Sequence[int]) -> "Cases":
        """The cases `rows`, which may repeat."""
        index = torch.tensor(list(rows))
        return Cases(
            self.kind,
            tuple(self.numbers[r] for r in rows),
            self.context[index],
            self.suffix[index],
            self.target[index],
            tuple(self.bytes_per_target[r] for r in rows),
        )


@dataclass(frozen=True, slots=True)
class Text:
    """One case before tokenisation."""

    context: str
    suffix: str
    target: str


def batches(loaded: LoadedModel, kind: str, texts: Iterable[Text]) -> list[Cases]:
    """Tokenise cases and group those of equal lengths, longest group first.

    The parts are tokenised apart: the boundary of a cached prefix is a token boundary.
    """
    groups: dict[tuple[int, int, int], list[tuple[int, list[list[int]], int]]] = {}
    for number, text in enumerate(texts):
        parts = [loaded.encode(part) for part in (text.context, text.suffix, text.target)]
        if not all(parts):
            raise SourceError(f"{kind} case {number} has an empty part", index=number)
        lengths = (len(parts[0]), len(parts[1]), len(parts[2]))
        groups.setdefault(lengths, []).append((number, parts, len(text.target.encode())))
    found = []
    for group in sorted(groups.values(), key=len, reverse=True):
        context, suffix, target = (
            torch.tensor([parts[i] for _, parts, _ in group]) for i in range(3)
        )
        numbers, sizes = zip(*((number, size) for number, _, size in group), strict=True)
        found.append(Cases(kind, numbers, context, suffix, target, sizes))
    return found


@dataclass(frozen=True, slots=True)
class Scores:
    """Per case: float64 `[B]` each, and the log-probabilities behind them.

    Attributes:
        exact: 1 where greedy decoding gives the whole target.
        bits: bits per byte of the target.
        log_probs: FP32 `[B, A, vocabulary]`.
    """

    exact: NDArray[np.float64]
    bits: NDArray[np.float64]
    log_probs: torch.Tensor


@torch.no_grad()
def score(loaded: LoadedModel, past: Any, cases: Cases, *, seen: int = 0) -> Scores:
    """Score the cases after the cache `past`; `seen=0` also serves a full recomputation.

    Args:
        past: a cache that holds the contexts, or an empty one with `seen = n_p`.
        seen: tokens of the context to read first.
    """
    tokens = torch.cat([cases.context[:, :seen], cases.unseen], dim=1)
    scored = cases.target.shape[1]
    logits = forward(loaded, tokens, past, logits_to_keep=scored)[:, -scored:]
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    target = cases.target.to(loaded.device)
    exact = (log_probs.argmax(-1) == target).all(-1)
    nats = -log_probs.gather(-1, target[..., None])[..., 0].double().sum(-1)
    sizes = np.array(cases.bytes_per_target, dtype=np.float64)
    return Scores(
        exact=exact.double().cpu().numpy(),
        bits=nats.cpu().numpy() / np.log(2.0) / sizes,
        log_probs=log_probs,
    )


@torch.no_grad()
def divergence(reference: torch.Tensor, other: torch.Tensor) -> NDArray[np.float64]:
    """KL(reference || other) in nats, the mean over the A scored positions of each case, `[B]`."""
    # normalised again in float64: the float32 sums are off by 1e-7, more than a close arm's distance
    p, q = (torch.log_softmax(x.double(), dim=-1) for x in (reference, other))
    result: NDArray[np.float64] = (p.exp() * (p - q)).sum(-1).mean(-1).clamp_min(0).cpu().numpy()
    return result


@torch.no_grad()
def top1_agreement(reference: torch.Tensor, other: torch.Tensor) -> NDArray[np.float64]:
    """Share of the A scored positions of each case whose most likely token is the same, `[B]`."""
    same = reference.argmax(-1) == other.argmax(-1)
    result: NDArray[np.float64] = same.double().mean(-1).cpu().numpy()
    return result


def mean_and_error(values: NDArray[np.float64]) -> tuple[float, float | None]:
    """Mean over cases and its standard error (None for a single case)."""
    if len(values) < 2:
        return float(values.mean()), None
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))


def paired_interval(
    differences: NDArray[np.float64], seed: int, *, resamples: int = RESAMPLES
) -> tuple[float, float] | None:
    """95 % percentile bootstrap interval of the mean of paired differences, over cases; None for a single case.

    Args:
        differences: one value per case, `[N]`.
        seed: of `PCG64`.
    """
    if len(differences) < 2:
        return None
    generator = np.random.Generator(np.random.PCG64(seed))
    drawn = generator.integers(0, len(differences), size=(resamples, len(differences)))
    low, high = np.percentile(differences[drawn].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)
