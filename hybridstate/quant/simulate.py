"""The true requantised recurrence: every update reads what storage returned and writes through storage.

    S^q_t = Q( A_t S^q_{t-1} + beta_t k_t v_t^T )                  DAMP Eq. 7

All arms run in one batch on identical tokens (teacher forcing): row block 0 is FP32, block i is arm i. The
prompt is prefilled in FP32 arithmetic and stored at the end of every chunk, as a server does, so arms part
at the first chunk's end. Since whole layers run on the requantised state, errors also travel between
layers, which a one-shot error measurement cannot see.
"""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from hybridstate.quant.arms import Arm
from hybridstate.quant.together import Together
from hybridstate.trajectories.graphs import (
    Replay,
    fixed_cache,
    fixed_decode,
    in_place_decode,
    uses_fixed,
)
from hybridstate.trajectories.model import (
    LoadedModel,
    RecurrenceFn,
    decode,
    prefill,
    recurrent_states,
    reference_decode,
    select_sequences,
    swap,
)
from hybridstate.trajectories.prompts import Prompt
from hybridstate.trajectories.record import check_states
from hybridstate.trajectories.stages import fact, stage

Progress = Callable[[str, int, int], None]

STATE_BYTES: Final = 16 << 30
"""FP32 states of one validation pass on a GPU; temporaries take a few times one layer's share."""
CHANNEL_SAMPLES: Final = 16
"""Updates of a sequence at which the accumulated error of each key channel is taken."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Per position of A arms (the first is FP32) over S sequences and N positions.

    Attributes:
        kl: `[A, S, N]` KL divergence of the arm's next-token distribution from FP32's, in nats.
        same_top: `[A, S, N]` whether both prefer the same token.
        nll: `[A, S, N]` negative log-likelihood of the token that follows, in nats.
        hit: `[A, S, N]` whether the arm's most likely token is the one that follows.
        steps: updates after which states were compared, the last one included.
        state_error: `[steps, A, S]`, ||S^q - S|| / ||S|| per layer, mean over layers.
        saturated: per arm, values beyond FP16 that were to be stored as FP16, at chunk ends and compared updates.
        channel_error: per linear layer `[A, H, K]`, ||S^q_u - S_u||^2 per key channel, mean over sequences
            and over `CHANNEL_SAMPLES` evenly spaced updates.
    """

    kl: NDArray[np.float64]
    same_top: NDArray[np.bool_]
    nll: NDArray[np.float64]
    hit: NDArray[np.bool_]
    steps: tuple[int, ...]
    state_error: NDArray[np.float64]
    saturated: tuple[int, ...]
    channel_error: tuple[NDArray[np.float64], ...]


@dataclass(frozen=True, slots=True)
class Simulation(Outcome):
    """The outcome of all sequences.

    Attributes:
        arms: the arms as run.
        chunk: prefill tokens between two writes of the state.
        slow: why a GPU stored arm after arm instead of all at once; None where it did not.
    """

    arms: tuple[Arm, ...]
    chunk: int
    slow: str | None = None


class Storage:
    """What A arms keep of the states of S sequences over one pass; row block i of a state is arm i's.

    Args:
        arms: how each block is stored.
        sequences: `[S]` number of each sequence, for stochastic rounding.
    """

    def __init__(self, arms: tuple[Arm, ...], sequences: torch.Tensor | None = None) -> None:
        self.arms = arms
        self.sequences = sequences
        self.together = Together(arms)
        self._residuals: dict[tuple[int, int], torch.Tensor] = {}

    def due(self, update: int) -> tuple[int, ...]:
        """Arms that write at `update`, which counts from 1; below 1 it is a prefill chunk, where all do."""
        return tuple(
            place
            for place, arm in enumerate(self.arms)
            if not arm.exact and (update < 1 or update % arm.every == 0)
        )

    def write(
        self,
        state: torch.Tensor,
        ordinal: int,
        update: int | torch.Tensor,
        due: tuple[int, ...] | None = None,
    ) -> None:
        """Pass `[A * S, H, K, V]` through storage, in place, so that it holds what a read returns.

        An arm that defers its writes keeps the exact state meanwhile: that is what replaying the inputs since
        the last write on what that write stored gives.

        Args:
            update: counts from 1, below 1 in prefill; a 0-dimensional tensor inside a captured step.
            due: the arms that write; `due(update)` by default, which a tensor cannot be asked.
        """
        if due is None:
            due = self.due(int(update))
        blocks = state.chunk(len(self.arms))
        for place in self.together.write(state, ordinal, due, update, self.sequences):
            arm, block = self.arms[place], blocks[place]
            carried = self._residuals.get((place, ordinal))
            if carried is not None:
                block.add_(carried)
            stored = arm.reconstruct(block, ordinal, update, self.sequences)
            if arm.feedback is not None:
                residual = arm.residual(block, stored)
                if carried is None:
                    self._residuals[place, ordinal] = residual
                else:  # at its old address, where a captured step finds it
                    carried.copy_(residual)
            block.copy_(stored)


def requantised_decode(
    arms: tuple[Arm, ...],
    before: Callable[[torch.Tensor, int], None] | None = None,
    storage: Storage | None = None,
) -> RecurrenceFn:
    """A decode function for `swap`: one reference update, then each row block through its storage.

    The output reads the updated state before it is stored, as the fused kernel does. `before` sees each
    layer's updated state and its ordinal, before it is stored. Every layer counts its own updates.
    """
    kept = Storage(arms) if storage is None else storage
    updates: dict[int, int] = {}

    def step(
        ordinal: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o, state = reference_decode(ordinal, q, k, v, g, beta, initial_state)
        if before is not None:
            before(state, ordinal)
        updates[ordinal] = updates.get(ordinal, 0) + 1
        kept.write(state, ordinal, updates[ordinal])
        return o, state

    return step


@torch.no_grad()
def simulate(
    loaded: LoadedModel,
    prompts: tuple[Prompt, ...],
    generated: torch.Tensor,
    arms: tuple[Arm, ...],
    *,
    chunk: int,
    batch: int,
    fixed: bool | None = None,
    progress: Progress | None = None,
) -> Simulation:
    """Teacher-force `generated [S, N + 1]` after the prompts under every arm.

    Args:
        arms: the first must store FP32; it is what the others are compared with.
        chunk: prefill tokens between two writes of the state.
        batch: rows per pass on a CPU; sequences are grouped so that all arms of one run together.
        fixed: keep everything at fixed addresses, which a graph needs; by default where `uses_fixed`.
        progress: called with `validate`, updates done, updates in all.

    Raises:
        NumericError: a state is not finite; names prompt, arm, layer, head and channel.
    """
    assert arms[0].exact
    group = sequences_together(loaded, len(arms), batch)
    updates = generated.shape[1] - 1
    starts = range(0, len(prompts), group)
    arms = tuple(arm.to(loaded.device) for arm in arms)
    generated = generated.to(loaded.device, torch.int64)
    parts: list[Outcome] = []
    slow: str | None = None
    for done, start in enumerate(starts):

        def advance(update: int, before: int = done * updates) -> None:
            if progress is not None:
                progress("validate", before + update, len(starts) * updates)

        rows = slice(start, start + group)
        one = _Pass(loaded, prompts[rows], generated[rows], arms, chunk, start, fixed)
        parts.append(one.run(advance))
        slow = one.storage.together.reason
    shares = [part.kl.shape[1] / len(prompts) for part in parts]
    return Simulation(
        arms=arms,
        kl=np.concatenate([p.kl for p in parts], 1),
        same_top=np.concatenate([p.same_top for p in parts], 1),
        nll=np.concatenate([p.nll for p in parts], 1),
        hit=np.concatenate([p.hit for p in parts], 1),
        steps=parts[0].steps,
        state_error=np.concatenate([p.state_error for p in parts], 2),
        saturated=tuple(sum(p.saturated[i] for p in parts) for i in range(len(arms))),
        channel_error=tuple(
            np.sum([share * error for share, error in zip(shares, errors, strict=True)], axis=0)
            for errors in zip(*(part.channel_error for part in parts), strict=True)
        ),
        chunk=chunk,
        slow=slow,
    )


def sequences_together(loaded: LoadedModel, arms: int, batch: int) -> int:
    """Sequences per pass: `batch` rows on a CPU, `STATE_BYTES` of states on a GPU, at least one.

    A GPU takes as long for one sequence as for many; the number does not depend on free memory, so that
    a run repeats itself.
    """
    if loaded.device.type == "cpu":
        return max(1, batch // arms)
    layers = loaded.spec.layers
    state = sum(4 * x.value_heads * x.key_dim * x.value_dim for x in layers)
    return max(1, STATE_BYTES // (arms * state))


class _Pass:
    """Teacher forcing of one group of S sequences under A arms.

    A step reads its token, update number and place from tensors and writes its divergences into them, so that
    on a GPU it is one graph per set of arms that write. The few updates that also count saturated values, on
    the host, run eagerly.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        prompts: tuple[Prompt, ...],
        generated: torch.Tensor,
        arms: tuple[Arm, ...],
        chunk: int,
        first: int,
        fixed: bool | None,
    ) -> None:
        device = loaded.device
        self.loaded, self.prompts, self.arms, self.chunk = loaded, prompts, arms, chunk
        self.fixed = uses_fixed(loaded) if fixed is None else fixed
        self.generated = generated
        self.updates = generated.shape[1] - 1
        self.everyone = list(range(len(prompts))) * len(arms)
        self.steps = comparison_steps(self.updates)
        self.saturated = [0] * len(arms)
        self.storage = Storage(arms, torch.arange(first, first + len(prompts), device=device))
        self._counting = False
        self._due: tuple[int, ...] = ()
        self._update = torch.zeros(1, dtype=torch.int64, device=device)
        self._rows = torch.tensor(self.everyone, device=device)
        self._decode = in_place_decode(loaded) if self.fixed else reference_decode
        shape = (len(arms), len(prompts), self.updates)
        self.kl, self.nll = (
            torch.empty(shape, dtype=torch.float64, device=device) for _ in range(2)
        )
        self.same_top, self.hit = (
            torch.empty(shape, dtype=torch.bool, device=device) for _ in range(2)
        )
        self.cache: Any = None

    def run(self, advance: Callable[[int], None]) -> Outcome:
        """Prefill, then every update; `advance` is told the updates done."""
        with stage("validate-prefill"):
            self._prefill()
        replay = Replay(self._step, self.loaded.device, fixed=self.fixed)
        sampled = channel_samples(self.updates)
        errors: list[NDArray[np.float64]] = []
        channels: list[torch.Tensor] = []
        with stage("validate"), self._running():
            for update in range(1, self.updates + 1):
                self._counting = update in self.steps
                due = self.storage.due(update)
                if self._counting:
                    replay.eager(due)
                    errors.append(state_errors(recurrent_states(self.cache), len(self.arms)))
                else:
                    replay(due)
                if update in sampled:
                    found = channel_errors(recurrent_states(self.cache), len(self.arms))
                    pairs = zip(channels, found, strict=True)
                    channels = [a + b for a, b in pairs] if channels else found
                advance(update)
            names = ", ".join(arm.name for arm in self.arms)
            check_states(
                self.loaded,
                recurrent_states(self.cache),
                self.prompts * len(self.arms),
                f"after validating {names}",
            )
        fact("validation", replay.to_json() | {"rows": len(self.everyone), "updates": self.updates})
        return Outcome(
            kl=self.kl.cpu().numpy(),
            same_top=self.same_top.cpu().numpy(),
            nll=self.nll.cpu().numpy(),
            hit=self.hit.cpu().numpy(),
            steps=self.steps,
            state_error=np.stack(errors),
            saturated=tuple(self.saturated),
            channel_error=tuple((total / len(sampled)).cpu().numpy() for total in channels),
        )

    def _prefill(self) -> None:
        """All prompts under all arms; up to the end of the first chunk all arms are one."""
        tokens = torch.from_numpy(np.stack([p.tokens for p in self.prompts]))
        self._counting = True
        _, cache = prefill(self.loaded, tokens[:, : self.chunk])
        select_sequences(cache, self.everyone)
        self._store(cache, self.chunk)
        if tokens.shape[1] > self.chunk:
            rest = tokens[self.everyone, self.chunk :]
            _, cache = prefill(
                self.loaded, rest, chunk=self.chunk, cache=cache, after_chunk=self._store
            )
        self.cache = fixed_cache(self.loaded, cache, self.updates) if self.fixed else cache

    def _store(self, cache: Any, done: int) -> None:
        for ordinal, state in enumerate(recurrent_states(cache)):
            self._count(state, ordinal)
            self.storage.write(state, ordinal, -done)

    def _count(self, state: torch.Tensor, ordinal: int) -> None:
        """Before the store: afterwards nothing lies beyond FP16 any more."""
        if self._counting:
            blocks = state.chunk(len(self.arms))
            for place, (arm, block) in enumerate(zip(self.arms, blocks, strict=True)):
                self.saturated[place] += arm.saturated(block, ordinal)

    def _running(self) -> AbstractContextManager[None]:
        """The context of the steps."""
        if self.fixed:
            return fixed_decode(self.loaded, self._requantised)
        return swap(self.loaded, decode=self._requantised)

    def _requantised(
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
        self._count(state, ordinal)
        self.storage.write(state, ordinal, self._update[0], self._due)
        return o, state

    def _step(self, due: Hashable) -> None:
        """One update under all arms, and the comparison of what they predict."""
        assert isinstance(due, tuple)
        self._due = due
        present = self.generated.index_select(1, self._update)[:, 0]
        at = self._update.clone()
        self._update.add_(1)
        logits = decode(self.loaded, present.index_select(0, self._rows), self.cache)
        following = self.generated.index_select(1, self._update)[:, 0]
        found = compare(logits, following, len(self.arms))
        for kept, values in zip((self.kl, self.same_top, self.nll, self.hit), found, strict=True):
            kept.index_copy_(2, at, values[..., None])


def comparison_steps(updates: int) -> tuple[int, ...]:
    """1, 2, 4, ... and the last update."""
    powers = {1 << n for n in range(updates.bit_length())}
    return tuple(sorted({p for p in powers if p <= updates} | {updates}))


def channel_samples(updates: int) -> tuple[int, ...]:
    """Evenly spaced updates up to the last one at which errors per channel are taken."""
    count = min(CHANNEL_SAMPLES, updates)
    return tuple(round(updates * (n + 1) / count) for n in range(count))


def compare(
    logits: torch.Tensor, following: torch.Tensor, arms: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """KL from FP32, equal top token, NLL and hit of `following [S]`, each `[A, S]`, from `[A * S, vocab]`.

    In float64: the divergences of good formats are smaller than float32 rounding of a sum of log terms.
    """
    log_p = torch.log_softmax(logits.to(torch.float64), -1).unflatten(0, (arms, -1))
    reference = log_p[0]
    kl = (reference.exp() * (reference - log_p)).sum(-1).clamp_min(0.0)
    top = log_p.argmax(-1)
    nll = -log_p.gather(2, following.expand(arms, -1)[..., None])[..., 0]
    return kl, top == top[0], nll, top == following


def state_errors(states: list[torch.Tensor], arms: int) -> NDArray[np.float64]:
    """||S^q - S|| / ||S|| of each arm and sequence, mean over layers: `[A, S]`.

    Squares are summed in float64: a format whose error grows with every update leaves FP32's range.
    """
    total = torch.zeros(())
    for state in states:
        blocks = state.unflatten(0, (arms, -1))
        scale = blocks[0].flatten(1).norm(dim=1, dtype=torch.float64)
        apart = (blocks - blocks[0]).flatten(2).norm(dim=2, dtype=torch.float64)
        total = total.to(state.device) + apart / scale.clamp_min(torch.finfo(torch.float32).tiny)
    return np.asarray((total / len(states)).cpu().numpy(), dtype=np.float64)


def channel_errors(states: list[torch.Tensor], arms: int) -> list[torch.Tensor]:
    """||S^q_u - S_u||^2 of each key channel, mean over sequences, per layer `[A, H, K]` float64."""
    found = []
    for state in states:
        blocks = state.chunk(arms)
        squares = [(b - blocks[0]).double().square().sum(-1).mean(0) for b in blocks]
        found.append(torch.stack(squares))
    return found
