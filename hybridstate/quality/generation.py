"""Replies of many arms in one batch, from restored states, every state kept in its arm's format.

Row block i of the batch is arm i: R requests each, the same in every block. The suffix is read in chunks and the state
is written at each one's end; then one token after another, written at each. On a GPU a step is a CUDA graph.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hybridstate.errors import NumericError
from hybridstate.quality.questions import Block
from hybridstate.quality.replay import ReuseArm, Served
from hybridstate.quant.simulate import Storage
from hybridstate.runtime.restore import KeyValue, resume
from hybridstate.trajectories.cache import decode, linear_layers, prefill, recurrent_states
from hybridstate.trajectories.graphs import (
    Replay,
    fixed_cache,
    fixed_decode,
    in_place_decode,
    uses_fixed,
)
from hybridstate.trajectories.model import LoadedModel, reference_decode, swap


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: 0 is greedy.
        seed: of the noise, the same for every arm: request r draws the same numbers at step t in each.
    """

    temperature: float = 0.0
    seed: int = 0

    def noise(self, rows: int, vocabulary: int, step: int) -> torch.Tensor:
        """Gumbel noise float32 `[R, vocabulary]` of one step."""
        rng = np.random.Generator(np.random.PCG64([self.seed, step]))
        return torch.from_numpy(rng.gumbel(size=(rows, vocabulary)).astype(np.float32))


@dataclass(frozen=True, slots=True)
class Replies:
    """What A arms answered to R requests.

    Attributes:
        tokens: int64 `[A, R, budget]`.
        first: log-probabilities of the first token, FP32 `[A, R, vocabulary]`, on the device.
        mode: how the steps ran.
    """

    tokens: NDArray[np.int64]
    first: torch.Tensor
    mode: str


@torch.no_grad()
def generate(
    loaded: LoadedModel,
    block: Block,
    arms: Sequence[ReuseArm],
    served: Sequence[Served],
    *,
    chunk: int,
    sampling: Sampling,
    whole: Any = None,
    fixed: bool | None = None,
) -> Replies:
    """Read the suffix and generate `block.budget` tokens per request.

    Args:
        served: of every arm as many rows R.
        chunk: tokens of the suffix between two writes of the state.
        whole: logits `[N, vocabulary]` and cache of whole prompts, for arms without a prefix cache.
        fixed: keep everything at fixed addresses, which a graph needs; by default where `uses_fixed`.

    Raises:
        NumericError: a state is not finite at the end.
    """
    requests = served[0].rows
    rounds = requests // block.questions
    questions = list(range(block.questions)) * rounds
    numbers = torch.arange(requests, device=loaded.device)
    storage = Storage(tuple(arm.storage.to(loaded.device) for arm in arms), numbers)
    past = resume(loaded, _keys(served, questions), *_states(served))
    suffix = block.suffix[questions].repeat(len(arms), 1)

    def write(cache: Any, done: int) -> None:
        for ordinal, state in enumerate(recurrent_states(cache)):
            storage.write(state, ordinal, -block.prefix - done)

    logits, past = prefill(loaded, suffix, chunk=chunk, cache=past, after_chunk=write)
    logits = logits.float()
    for place, arm in enumerate(arms):
        if arm.policy == "recompute":
            rows = slice(place * requests, (place + 1) * requests)
            logits[rows] = _replace(past, rows, whole, questions)
    first = torch.log_softmax(logits, -1).unflatten(0, (len(arms), requests))
    chosen = _Chooser(sampling, len(arms), requests, logits)
    tokens = [chosen(logits, 0).clone()]
    mode = "none"
    if block.budget > 1:
        steps = _Steps(loaded, past, storage, chosen, block.budget, fixed)
        del past
        tokens += steps.run(tokens[0])
        mode = steps.mode
        past = steps.cache
    for layer, state in zip(loaded.spec.layers, recurrent_states(past), strict=True):
        if not bool(torch.isfinite(state.sum(dtype=torch.float32))):
            raise NumericError(
                f"{block.task}: block {layer.index}: a state is not finite after the replies",
                layer=layer.index,
            )
    found = torch.stack(tokens, 1).unflatten(0, (len(arms), requests))
    return Replies(found.cpu().numpy().astype(np.int64), first, mode)


def _states(served: Sequence[Served]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    layers = range(len(served[0].states))
    return (
        [torch.cat([s.states[n] for s in served]) for n in layers],
        [torch.cat([s.conv[n] for s in served]) for n in layers],
    )


def _keys(served: Sequence[Served], questions: list[int]) -> KeyValue:
    index = torch.tensor(questions, device=served[0].prefix.tokens.device)
    return {
        block: (
            torch.cat([s.prefix.kv[block][0][index] for s in served]),
            torch.cat([s.prefix.kv[block][1][index] for s in served]),
        )
        for block in served[0].prefix.kv
    }


def _replace(past: Any, rows: slice, whole: Any, questions: list[int]) -> torch.Tensor:
    """Give rows of a cache what whole prefills left; returns their logits. `whole` is (logits, cache)."""
    logits, cache = whole
    index = torch.tensor(questions, device=logits.device)
    for mine, other in zip(linear_layers(past), linear_layers(cache), strict=True):
        for name in ("recurrent_states", "conv_states"):
            target, source = getattr(mine, name)[0], getattr(other, name)[0]
            width = min(target.shape[-1], source.shape[-1])
            target[rows, ..., -width:] = source[index][..., -width:].to(target.dtype)
    for mine, other in zip(past.layers, cache.layers, strict=True):
        if getattr(other, "keys", None) is not None:
            mine.keys[rows] = other.keys[index]
            mine.values[rows] = other.values[index]
    chosen: torch.Tensor = logits.float()[index]
    return chosen


class _Chooser:
    """The next token of every row; noise is written outside of a captured step."""

    def __init__(self, sampling: Sampling, arms: int, requests: int, like: torch.Tensor) -> None:
        self.sampling, self.arms, self.requests = sampling, arms, requests
        self.vocabulary = like.shape[-1]
        self.noise = torch.zeros(
            (requests if sampling.temperature else 0), self.vocabulary, device=like.device
        )

    def draw(self, step: int) -> None:
        """Noise of the next step."""
        if self.sampling.temperature:
            self.noise.copy_(self.sampling.noise(self.requests, self.vocabulary, step))

    def pick(self, logits: torch.Tensor) -> torch.Tensor:
        """Tokens `[A * R]` of logits `[A * R, vocabulary]`."""
        if not self.sampling.temperature:
            return logits.argmax(-1)
        blocks = logits.float().unflatten(0, (self.arms, self.requests))
        chosen: torch.Tensor = (blocks / self.sampling.temperature + self.noise).argmax(-1)
        return chosen.flatten()

    def __call__(self, logits: torch.Tensor, step: int) -> torch.Tensor:
        """`draw`, then `pick`."""
        self.draw(step)
        return self.pick(logits)


class _Steps:
    """One token per row and call, each state through its storage."""

    def __init__(
        self,
        loaded: LoadedModel,
        past: Any,
        storage: Storage,
        chosen: _Chooser,
        budget: int,
        fixed: bool | None,
    ) -> None:
        self.loaded, self.storage, self.chosen, self.budget = loaded, storage, chosen, budget
        self.fixed = uses_fixed(loaded) if fixed is None else fixed
        self.cache = fixed_cache(loaded, past, budget) if self.fixed else past
        self._decode = in_place_decode(loaded) if self.fixed else reference_decode
        self._update = torch.zeros((), dtype=torch.int64, device=loaded.device)
        self._tokens = torch.zeros(
            chosen.arms * chosen.requests, dtype=torch.int64, device=loaded.device
        )
        self._due: tuple[int, ...] = ()
        self.mode = "eager"

    def run(self, first: torch.Tensor) -> list[torch.Tensor]:
        """The tokens after `first`."""
        self._tokens.copy_(first)
        replay = Replay(self._step, self.loaded.device, fixed=self.fixed)
        found = []
        running: Callable[[], Any] = (
            (lambda: fixed_decode(self.loaded, self._recurrence))
            if self.fixed
            else (lambda: swap(self.loaded, decode=self._recurrence))
        )
        with running():
            for step in range(1, self.budget):
                self.chosen.draw(step)
                replay(self.storage.due(step))
                found.append(self._tokens.clone())
        self.mode = replay.mode if replay.reason is None else f"{replay.mode} ({replay.reason})"
        replay.close()
        return found

    def _step(self, due: Hashable) -> None:
        assert isinstance(due, tuple)
        self._due = due
        self._update.add_(1)
        logits = decode(self.loaded, self._tokens, self.cache)
        self._tokens.copy_(self.chosen.pick(logits))

    def _recurrence(
        self,
        ordinal: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o, state = self._decode(ordinal, q, k, v, g, beta, initial_state)
        if self._due:
            self.storage.write(state, ordinal, self._update, self._due)
        return o, state
