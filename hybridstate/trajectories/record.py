"""Running the reference model: what it generates, its states at the anchors, how long errors would live.

The weight of an error made at update t (DAMP Eq. 15),

    W_{t,u} = 1 + sum_{j=1..H} prod_{r=1..j} a_{t+r,u}^2 ,      a = exp(g),

is accumulated while the model generates, so no decay sequence is ever stored. On a GPU the step that samples,
decodes and notes the decays is a CUDA graph (`trajectories.graphs`); elsewhere the same step runs eagerly.
"""

import time
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from hybridstate.errors import NumericError
from hybridstate.families import ModelSpec
from hybridstate.trajectories.graphs import (
    WARM_UP,
    Replay,
    fixed_cache,
    fixed_decode,
    in_place_decode,
    uses_fixed,
)
from hybridstate.trajectories.model import (
    LoadedModel,
    decode,
    prefill,
    recurrent_states,
    reference_decode,
    swap,
)
from hybridstate.trajectories.prompts import Prompt
from hybridstate.trajectories.protocol import Protocol
from hybridstate.trajectories.stages import fact, stage

Progress = Callable[[str, int, int], None]
Arrays: TypeAlias = dict[str, tuple[torch.dtype, tuple[int, ...]]]
AnchorSink: TypeAlias = Callable[[int, list[torch.Tensor]], None]
"""Takes an anchor's place and every layer's state `[B, H, K, V]`, which change once it returns."""

REPEAT = 32
"""Tokens of a stretch that counts as repeated when it occurred before."""


@dataclass(frozen=True, slots=True)
class Recording:
    """One batch of B sequences; lists run over the linear layers, A anchors each.

    Attributes:
        generated: `[B, N]` token ids.
        anchors: per layer `[A, B, H, K, V]` float32, state after the anchor's update; none where a sink took
            them.
        weights: per layer `[A, B, H]` (GDN) or `[A, B, H, K]` (KDA) float64, W of DAMP Eq. 15.
        mean_log_decay: per layer `[B, H]` or `[B, H, K]` float64, over the decoding updates.
    """

    generated: torch.Tensor
    anchors: tuple[torch.Tensor, ...]
    weights: tuple[torch.Tensor, ...]
    mean_log_decay: tuple[torch.Tensor, ...]

    def arrays(self) -> dict[str, torch.Tensor]:
        """All but the anchors, under their names on disk."""
        found = {"generated": self.generated.to(torch.int32)}
        for ordinal, weights in enumerate(self.weights):
            found[f"weights.{ordinal}"] = weights
            found[f"mean_log_decay.{ordinal}"] = self.mean_log_decay[ordinal]
        return found


def batch_arrays(spec: ModelSpec, protocol: Protocol, sequences: int) -> Arrays:
    """Dtype and shape of everything that a recorded batch holds, by its name on disk."""
    anchors = len(protocol.positions())
    found: Arrays = {"generated": (torch.int32, (sequences, protocol.new_tokens))}
    for layer in spec.layers:
        state = (layer.value_heads, layer.key_dim, layer.value_dim)
        units = spec.decay_shape(layer)
        place = layer.ordinal
        found[f"anchors.{place}"] = (torch.float32, (anchors, sequences, *state))
        found[f"weights.{place}"] = (torch.float64, (anchors, sequences, *units))
        found[f"mean_log_decay.{place}"] = (torch.float64, (sequences, *units))
    return found


class _Weights:
    """W of every anchor, one update at a time, from the log decays that a step notes.

    `now` holds the decays of the present update, of all layers in one float64 vector, so that an update costs a
    few operations whatever the number of layers; `views[ordinal]` is a layer's part, `[B, H]` or `[B, H, K]`.
    """

    def __init__(
        self, spec: ModelSpec, sequences: int, protocol: Protocol, device: torch.device
    ) -> None:
        self.positions = tuple(position for _, position in protocol.positions())
        self.horizon = protocol.horizon
        self.shapes = [(sequences, *spec.decay_shape(layer)) for layer in spec.layers]
        self.sizes = [int(np.prod(shape)) for shape in self.shapes]
        self.now = torch.zeros(sum(self.sizes), dtype=torch.float64, device=device)
        self.views = self._split(self.now)
        self.sum = torch.zeros_like(self.now)
        self.total = self.now.new_ones((len(self.positions), len(self.now)))
        self.survival = torch.ones_like(self.total)

    def follow(self, update: int) -> None:
        """Take the decays of update number `update` (from 1)."""
        self.sum += self.now
        following = [
            place
            for place, position in enumerate(self.positions)
            if position < update <= position + self.horizon
        ]
        if following:
            squared = torch.exp(2.0 * self.now)
        for place in following:
            self.survival[place] *= squared
            self.total[place] += self.survival[place]

    def layers(self) -> tuple[torch.Tensor, ...]:
        """W per layer, `[A, B, H]` or `[A, B, H, K]`."""
        return self._split(self.total)

    def means(self, updates: int) -> tuple[torch.Tensor, ...]:
        """Mean log decay per layer over all updates."""
        return self._split(self.sum / updates)

    def _split(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = flat.split(self.sizes, -1)
        pairs = zip(parts, self.shapes, strict=True)
        return tuple(part.unflatten(-1, shape) for part, shape in pairs)


class Generation:
    """A prefilled batch that samples and decodes its own next tokens.

    Args:
        cache, logits: of the prefilled prompts; the cache is taken over.
        draws: `[B, N]` uniform numbers, one column per token.
        notes: per layer where the log decays of an update go, or None to note nothing.
        fixed: fixed tensors throughout, which a graph needs; by default where `uses_fixed`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        cache: Any,
        logits: torch.Tensor,
        draws: NDArray[np.float64],
        *,
        temperature: float,
        notes: tuple[torch.Tensor, ...] | None = None,
        fixed: bool | None = None,
    ) -> None:
        device = loaded.device
        fixed = uses_fixed(loaded) if fixed is None else fixed
        self.loaded = loaded
        self.temperature = temperature
        self.draws = torch.from_numpy(draws).to(device)
        self.generated = torch.zeros(draws.shape, dtype=torch.int64, device=device)
        self.cache = fixed_cache(loaded, cache, draws.shape[1]) if fixed else cache
        self.fixed = fixed
        self.replay = Replay(self._step, device, fixed=fixed)
        self._logits = logits.clone()
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        self._banned = torch.tensor(stop_tokens(loaded), dtype=torch.int64, device=device)
        self._decode = in_place_decode(loaded) if fixed else reference_decode
        self._notes = notes

    def running(self) -> AbstractContextManager[None]:
        """The context in which `replay` may be called."""
        if self.fixed:
            return fixed_decode(self.loaded, self._noting)
        return swap(self.loaded, decode=self._noting)

    def close(self) -> None:
        """Let go of the cache and the graphs, which refer to each other."""
        self.replay.close()
        self.cache = None

    def _noting(
        self,
        ordinal: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._notes is not None:
            self._notes[ordinal].copy_(g)
        return self._decode(ordinal, q, k, v, g, beta, initial_state)

    def _step(self, _phase: Hashable) -> None:
        """Sample a token of every sequence and feed it."""
        draws = self.draws.index_select(1, self._at)[:, 0]
        chosen = sample(self._logits, draws, temperature=self.temperature, banned=self._banned)
        self.generated.index_copy_(1, self._at, chosen[:, None])
        self._logits.copy_(decode(self.loaded, chosen, self.cache))
        self._at.add_(1)


@torch.no_grad()
def record(
    loaded: LoadedModel,
    prompts: tuple[Prompt, ...],
    protocol: Protocol,
    *,
    temperature: float,
    seed: int,
    first: int = 0,
    anchors: AnchorSink | None = None,
    fixed: bool | None = None,
    progress: Progress | None = None,
) -> Recording:
    """Generate from equally long prompts and record what the scores need.

    Args:
        temperature: 0 is greedy.
        seed: with the prompt's place (`first` plus its row) seeds the sampling of that sequence, so
            that results do not depend on how prompts are batched.
        anchors: takes the states at the anchors; by default they stay in memory.
        fixed: see `Generation`.
        progress: called with `record`, updates done, updates in all.

    Raises:
        NumericError: a state is not finite; names prompt, layer, head and channel.
    """
    held: list[list[torch.Tensor]] = [[] for _ in loaded.spec.layers]
    weights = _Weights(loaded.spec, len(prompts), protocol, loaded.device)

    def keep(_place: int, states: list[torch.Tensor]) -> None:
        for layer, state in zip(held, states, strict=True):
            layer.append(state.to("cpu", torch.float32, copy=True))

    if progress is not None:
        progress("record", 0, protocol.new_tokens)
    with stage("prefill"):
        tokens = torch.from_numpy(np.stack([p.tokens for p in prompts]))
        logits, cache = prefill(loaded, tokens, chunk=protocol.chunk)
        check_states(loaded, recurrent_states(cache), prompts, "after the prompt")
        draws = uniform_draws(seed, first, len(prompts), protocol.new_tokens)
        run = Generation(
            loaded,
            cache,
            logits,
            draws,
            temperature=temperature,
            notes=weights.views,
            fixed=fixed,
        )
        del cache, logits
    started = time.perf_counter()
    with stage("generate"), run.running():
        for update in range(1, protocol.new_tokens + 1):
            run.replay()
            weights.follow(update)
            if update in weights.positions:
                states = recurrent_states(run.cache)
                check_states(loaded, states, prompts, f"after update {update}")
                (anchors or keep)(weights.positions.index(update), states)
            if progress is not None:
                progress("record", update, protocol.new_tokens)
        check_states(loaded, recurrent_states(run.cache), prompts, f"after update {update}")
    elapsed = time.perf_counter() - started
    mode = run.replay.to_json()
    run.close()
    fact("generation", mode | {"batch": len(prompts), "updates": update})
    fact("recorded_step_ms", 1e3 * elapsed / update)
    return Recording(
        generated=run.generated.cpu(),
        anchors=() if anchors is not None else tuple(torch.stack(layer) for layer in held),
        weights=tuple(total.cpu() for total in weights.layers()),
        mean_log_decay=tuple(mean.cpu() for mean in weights.means(protocol.new_tokens)),
    )


@torch.no_grad()
def plain_step_ms(
    loaded: LoadedModel,
    prompts: tuple[Prompt, ...],
    protocol: Protocol,
    *,
    temperature: float,
    seed: int,
    updates: int = 128,
) -> float:
    """Milliseconds of one step of the same generation with nothing recorded, after its warm-up.

    `record` notes its own mean as `recorded_step_ms`: captures, decays, weights and waiting for the disk included.
    """
    with stage("plain generation, for comparison"):
        tokens = torch.from_numpy(np.stack([p.tokens for p in prompts]))
        logits, cache = prefill(loaded, tokens, chunk=protocol.chunk)
        draws = uniform_draws(seed, 0, len(prompts), protocol.new_tokens)
        run = Generation(loaded, cache, logits, draws, temperature=temperature)
        del cache, logits
        count = min(updates, protocol.new_tokens - WARM_UP - 1)
        with run.running():
            for _ in range(WARM_UP + 1):
                run.replay()
            run.generated.sum().item()  # waits for a GPU
            started = time.perf_counter()
            for _ in range(count):
                run.replay()
            run.generated.sum().item()
        elapsed = time.perf_counter() - started
        run.close()
    return 1e3 * elapsed / count


def uniform_draws(seed: int, first: int, sequences: int, tokens: int) -> NDArray[np.float64]:
    """`[B, N]` numbers in [0, 1) that depend on the seed and each sequence's number alone."""
    rows = range(first, first + sequences)
    return np.stack([np.random.Generator(np.random.PCG64([seed, r])).random(tokens) for r in rows])


def sample(
    logits: torch.Tensor,
    draws: torch.Tensor | NDArray[np.float64],
    *,
    temperature: float,
    banned: torch.Tensor | list[int],
) -> torch.Tensor:
    """Next token `[B]` from logits `[B, vocabulary]`: greedy, or by inverse distribution function.

    `draws` holds one uniform number per sequence; the lowest token whose cumulative probability exceeds
    it is taken, in float64, so that a draw means the same on every device.
    """
    logits = logits.to(torch.float64)
    if len(banned):
        index = torch.as_tensor(banned, device=logits.device)
        logits = logits.index_fill(1, index, -torch.inf)
    if temperature == 0:
        return logits.argmax(-1)
    cumulative = torch.softmax(logits / temperature, -1).cumsum(-1)
    aims = torch.as_tensor(draws, device=logits.device)[:, None] * cumulative[:, -1:]
    chosen = (cumulative <= aims).sum(-1)
    # Rounding may point behind the last token that has any probability.
    last = (cumulative < cumulative[:, -1:]).sum(-1)
    return torch.minimum(chosen, last)


def stop_tokens(loaded: LoadedModel) -> list[int]:
    """Ids that would end a generation, and the tokenizer's other special tokens: never sampled."""
    found: set[int | None] = set()
    for config in (loaded.model.config, getattr(loaded.model, "generation_config", None)):
        value = getattr(config, "eos_token_id", None)
        found.update(value if isinstance(value, list | tuple) else [value])
    if loaded.tokenizer is not None:
        found.update(loaded.tokenizer.all_special_ids)
    return sorted(token for token in found if token is not None and 0 <= token < loaded.vocabulary)


def check_states(
    loaded: LoadedModel,
    states: list[torch.Tensor],
    prompts: tuple[Prompt, ...],
    when: str,
) -> None:
    """Raise for the first NaN or infinity in `[B, H, K, V]` states, saying exactly where it is."""
    for layer, state in zip(loaded.spec.layers, states, strict=True):
        if bool(torch.isfinite(state).all()):
            continue
        row, head, channel, column = torch.nonzero(~torch.isfinite(state))[0].tolist()
        value = float(state[row, head, channel, column])
        raise NumericError(
            f"recurrent state is {value} {when}: prompt {prompts[row].name}, layer {layer.index}, "
            f"head {head}, channel {channel}, column {column}",
            hint="check the checkpoint's decay tensors, or load with another dtype",
            prompt=prompts[row].name,
            layer=layer.index,
            head=head,
            channel=channel,
            index=[row, head, channel, column],
            found=str(value),
            expected="finite values",
        )


def repeated_share(generated: torch.Tensor, length: int = REPEAT) -> float:
    """Share of stretches of `length` tokens in `[B, N]` that occurred earlier in their sequence."""
    repeated = total = 0
    for row in generated.tolist():
        seen: set[tuple[int, ...]] = set()
        for end in range(length, len(row) + 1):
            stretch = tuple(row[end - length : end])
            repeated += stretch in seen
            total += 1
            seen.add(stretch)
    return repeated / total if total else 0.0
