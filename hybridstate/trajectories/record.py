"""Running the reference model: what it generates, its states at the anchors, how long errors would live.

The weight of an error made at update t (DAMP Eq. 15),

    W_{t,u} = 1 + sum_{j=1..H} prod_{r=1..j} a_{t+r,u}^2 ,      a = exp(g),

is accumulated while the model generates, so no decay sequence is ever stored.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hybridstate.errors import NumericError
from hybridstate.trajectories.model import (
    LoadedModel,
    decode,
    prefill,
    recurrent_states,
    reference_decode,
    reference_prefill,
    swap,
)
from hybridstate.trajectories.prompts import Prompt
from hybridstate.trajectories.protocol import Protocol

Progress = Callable[[str, int, int], None]

REPEAT = 32
"""Tokens of a stretch that counts as repeated when it occurred before."""


@dataclass(frozen=True, slots=True)
class Recording:
    """One batch of B sequences; lists run over the linear layers, A anchors each.

    Attributes:
        generated: `[B, N]` token ids.
        anchors: per layer `[A, B, H, K, V]` float32, state after the anchor's update.
        weights: per layer `[A, B, H]` (GDN) or `[A, B, H, K]` (KDA) float64, W of DAMP Eq. 15.
        mean_log_decay: per layer `[B, H]` or `[B, H, K]` float64, over the decoding updates.
    """

    generated: torch.Tensor
    anchors: tuple[torch.Tensor, ...]
    weights: tuple[torch.Tensor, ...]
    mean_log_decay: tuple[torch.Tensor, ...]


class _Weights:
    """W of every anchor of every layer, one update at a time."""

    def __init__(self, positions: tuple[int, ...], horizon: int, layers: int) -> None:
        self.positions = positions
        self.horizon = horizon
        self.total: list[torch.Tensor | None] = [None] * layers
        self.survival: list[torch.Tensor | None] = [None] * layers
        self.sum: list[torch.Tensor | None] = [None] * layers

    def follow(self, ordinal: int, update: int, g: torch.Tensor) -> None:
        """Take the log decay `[B, H]` or `[B, H, K]` of update number `update` (from 1)."""
        g = g.to(torch.float64)
        present = self.sum[ordinal]
        self.sum[ordinal] = g.clone() if present is None else present + g
        total, survival = self.total[ordinal], self.survival[ordinal]
        if total is None or survival is None:
            total = torch.ones((len(self.positions), *g.shape), dtype=g.dtype, device=g.device)
            survival = total.clone()
            self.total[ordinal], self.survival[ordinal] = total, survival
        squared = torch.exp(2.0 * g)
        for place, position in enumerate(self.positions):
            if position < update <= position + self.horizon:
                survival[place] *= squared
                total[place] += survival[place]


@torch.no_grad()
def record(
    loaded: LoadedModel,
    prompts: tuple[Prompt, ...],
    protocol: Protocol,
    *,
    temperature: float,
    seed: int,
    first: int = 0,
    progress: Progress | None = None,
) -> Recording:
    """Generate from equally long prompts and record what the scores need.

    Args:
        temperature: 0 is greedy.
        seed: with the prompt's place (`first` plus its row) seeds the sampling of that sequence, so
            that results do not depend on how prompts are batched.
        progress: called with `record`, updates done, updates in all.

    Raises:
        NumericError: a state is not finite; names prompt, layer, head and channel.
    """
    tokens = torch.from_numpy(np.stack([p.tokens for p in prompts]))
    banned = stop_tokens(loaded)
    draws = np.stack(
        [
            np.random.Generator(np.random.PCG64([seed, first + row])).random(protocol.new_tokens)
            for row in range(len(prompts))
        ]
    )
    positions = tuple(position for _, position in protocol.positions())
    weights = _Weights(positions, protocol.horizon, len(loaded.spec.layers))
    anchors: list[list[torch.Tensor]] = [[] for _ in loaded.spec.layers]
    update = 0

    def watched(
        ordinal: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights.follow(ordinal, update, g)
        return reference_decode(ordinal, q, k, v, g, beta, initial_state)

    generated: list[torch.Tensor] = []
    if progress is not None:
        progress("record", 0, protocol.new_tokens)
    logits, cache = prefill(loaded, tokens, chunk=protocol.chunk)
    check_states(loaded, recurrent_states(cache), prompts, "after the prompt")
    with swap(loaded, decode=watched):
        for update in range(1, protocol.new_tokens + 1):
            chosen = sample(logits, draws[:, update - 1], temperature=temperature, banned=banned)
            generated.append(chosen)
            logits = decode(loaded, chosen, cache)
            if update in positions:
                present = recurrent_states(cache)
                check_states(loaded, present, prompts, f"after update {update}")
                for layer, state in zip(anchors, present, strict=True):
                    layer.append(state.to("cpu", torch.float32, copy=True))
            if progress is not None:
                progress("record", update, protocol.new_tokens)
    check_states(loaded, recurrent_states(cache), prompts, f"after update {update}")
    return Recording(
        generated=torch.stack(generated, dim=1).cpu(),
        anchors=tuple(torch.stack(layer) for layer in anchors),
        weights=tuple(_known(total).cpu() for total in weights.total),
        mean_log_decay=tuple(_known(s).cpu() / protocol.new_tokens for s in weights.sum),
    )


def _known(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None  # every linear layer runs at every update
    return tensor


def sample(
    logits: torch.Tensor, draws: NDArray[np.float64], *, temperature: float, banned: list[int]
) -> torch.Tensor:
    """Next token `[B]` from logits `[B, vocabulary]`: greedy, or by inverse distribution function.

    `draws` holds one uniform number per sequence; the lowest token whose cumulative probability exceeds
    it is taken, in float64, so that a draw means the same on every device.
    """
    logits = logits.to(torch.float64)
    if banned:
        logits = logits.index_fill(1, torch.tensor(banned, device=logits.device), -torch.inf)
    if temperature == 0:
        return logits.argmax(-1)
    cumulative = torch.softmax(logits / temperature, -1).cumsum(-1)
    aims = torch.from_numpy(draws).to(logits.device)[:, None] * cumulative[:, -1:]
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


@dataclass(frozen=True, slots=True)
class PrefixObservation:
    """What a prefill showed of P prefixes, lists over the linear layers.

    Attributes:
        mean_log_decay: `[P, H]` or `[P, H, K]` float64, over all prefix tokens.
        states: `[P, H, K, V]` float32, at the last token.
    """

    mean_log_decay: tuple[NDArray[np.float64], ...]
    states: tuple[NDArray[np.float32], ...]


@torch.no_grad()
def observe_prefixes(
    loaded: LoadedModel, tokens: NDArray[np.int64], *, progress: Progress | None = None
) -> PrefixObservation:
    """Prefill prefixes `[P, T]` one after another and keep mean log-decays and final states."""
    decays: list[list[NDArray[np.float64]]] = [[] for _ in loaded.spec.layers]
    finals: list[list[NDArray[np.float32]]] = [[] for _ in loaded.spec.layers]

    def watched(
        ordinal: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        decays[ordinal].append(g[0].to(torch.float64).mean(0).cpu().numpy())
        return reference_prefill(ordinal, q, k, v, g, beta, initial_state)

    with swap(loaded, prefill=watched):
        for done, row in enumerate(torch.from_numpy(tokens), start=1):
            _, cache = prefill(loaded, row[None])
            for layer, state in zip(finals, recurrent_states(cache), strict=True):
                layer.append(state[0].float().cpu().numpy().copy())
            if progress is not None:
                progress("prefixes", done, len(tokens))
    return PrefixObservation(
        mean_log_decay=tuple(np.stack(layer) for layer in decays),
        states=tuple(np.stack(layer) for layer in finals),
    )
