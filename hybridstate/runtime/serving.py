"""Continuous batching: requests of different lengths that join and leave, each with a pool slot and a line.

    admit -> prefill_chunk ... -> decode_step ... -> finish

A prefill chunk starts from what the slot holds and ends packed in the slot: a prompt passes the state format at every
chunk's end, as decoding does at every token. Decoding pads its batch to one of a few sizes; each size is one captured
graph on a GPU, whose slots, lines, lengths and tokens are tensors that are filled in before every step. So is a prompt
there, padded to one of a few lengths (`prompt_step`), where all linear layers run in few launches.

Slots belong to whoever admits: to this engine, or to a prefix cache whose `TensorStore` has the same pool. Lines are
this engine's own, poisoned when a request leaves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from hybridstate.errors import NumericError, UnsupportedModel, UsageError
from hybridstate.kernels.prefill import Geometry, choose
from hybridstate.runtime import restore
from hybridstate.runtime.engine import DecodeEngine
from hybridstate.runtime.kv import LineCache, block_shapes
from hybridstate.runtime.prompt_step import PromptSteps
from hybridstate.runtime.radix import Keys, Tokens
from hybridstate.runtime.step import PooledStep
from hybridstate.runtime.tiers import Prefix
from hybridstate.trajectories.cache import forward, linear_layers, prefill
from hybridstate.trajectories.graphs import Replay, has_plain_attention

ALIGNED: Final = 16
"""Integers that a row of a step's inputs is padded to, so that every row begins where kernels expect it."""
CHUNK: Final = 2048
"""Prompt tokens of one prefill call unless told."""


@dataclass(frozen=True, slots=True)
class HeldKeys:
    """Keys and values of consecutive tokens, `[1, G, n, width]` pairs by block, on their own."""

    blocks: dict[int, tuple[Tensor, Tensor]]

    def cut(self, start: int, end: int) -> "HeldKeys":
        """A copy of the tokens `start` to `end`, so that the rest can be freed."""
        return HeldKeys(
            {
                block: (k[:, :, start:end].clone(), v[:, :, start:end].clone())
                for block, (k, v) in self.blocks.items()
            }
        )


@dataclass(frozen=True, slots=True)
class LineKeys:
    """Keys and values of the first tokens of a line; only what is cut from it is copied."""

    lines: LineCache
    line: int
    tokens: int

    def cut(self, start: int, end: int) -> HeldKeys:
        """A copy of the tokens `start` to `end`."""
        return HeldKeys(self.lines.read(self.line, self.tokens)).cut(start, end)


@dataclass(eq=False, slots=True)
class Live:
    """A running request.

    Attributes:
        prompt: int64 `[n]` on the host.
        slot: of the pool.
        line: of the lines.
        done: tokens whose state the slot holds, prompt and output together.
        output: generated tokens.
        owned: whether `finish` frees the slot.
    """

    prompt: Tensor
    slot: int
    line: int
    done: int
    output: list[int] = field(default_factory=list)
    owned: bool = False

    @property
    def next_token(self) -> int:
        """The token that the next decode step feeds."""
        return self.output[-1] if self.output else int(self.prompt[-1])

    @property
    def ready(self) -> bool:
        """Whether all but the last known token has run."""
        return self.done == len(self.prompt) + len(self.output) - 1


class _Batch:
    """The tensors of one batch size and its step."""

    def __init__(self, engine: DecodeEngine, lines: LineCache, size: int) -> None:
        device = engine.loaded.device

        self._width = -(-size // ALIGNED) * ALIGNED
        self._inputs = torch.zeros((4, self._width), dtype=torch.int64, device=device)
        self.slots, self.rows, self.lengths, tokens = self._inputs[:, :size]
        self.tokens = tokens[:, None]
        self.step = PooledStep(engine, lines, self.slots, self.rows, self.lengths)

    def fill(self, requests: Sequence[Live]) -> None:
        """Name the requests; the rest is padding."""
        spare = self._width - len(requests)
        values = (
            [r.slot for r in requests] + [-1] * spare,
            [r.line for r in requests] + [-1] * spare,
            [r.done for r in requests] + [0] * spare,
            [r.next_token for r in requests] + [0] * spare,
        )
        self._inputs.copy_(torch.tensor(values, dtype=torch.int64))


class ServingEngine:
    """Running requests of one model on one pool.

    Args:
        engine: model, state format and pool.
        running: requests at once, the server's limit.
        length: tokens of the longest request, prompt and reply.
        sizes: batch sizes that steps are padded to; powers of two up to `running` by default.
        chunk: prompt tokens of one prefill call.
        audit: refuse states that are not finite before every chunk; costs a pass over the slot.

    Raises:
        UnsupportedModel: attention that keeps more than keys and values.
    """

    def __init__(
        self,
        engine: DecodeEngine,
        *,
        running: int,
        length: int,
        sizes: Sequence[int] | None = None,
        chunk: int = CHUNK,
        audit: bool = False,
    ) -> None:
        loaded = engine.loaded
        if not has_plain_attention(loaded):
            raise UnsupportedModel(
                f"{loaded.checkpoint.name}: its attention keeps more than keys and values, which no line holds",
                hint="bench restore and bench decode run it on the model's own cache",
            )
        if running < 1 or chunk < 1:
            raise UsageError("a server runs at least one request, in chunks of at least one token")
        self.engine = engine
        self.chunk = chunk
        self._audit = audit
        self._device = loaded.device
        self.sizes = tuple(sorted(sizes or _powers(running)))
        if self.sizes[-1] < running:
            raise UsageError(f"no batch size for {running} running requests in {self.sizes}")
        probe = torch.zeros(1, 2, dtype=torch.int64)
        held = restore.capture(loaded, probe, prefill(loaded, probe)[1]).kv
        prompts = engine.modules.prompts and loaded.device.type == "cuda"
        self.lines = LineCache(loaded, block_shapes(loaded, held), running + prompts, length)
        self._spare = self.lines.alloc(int(prompts)) or []
        """A line for prefixes that are replayed before their request has one, where prompts are captured."""
        self._prompts = PromptSteps(engine, self.lines, min(chunk, length)) if prompts else None
        self._blank = [
            torch.zeros(n.conv_channels, n.conv_width - 1, dtype=loaded.dtype, device=loaded.device)
            for n in loaded.spec.layers
        ]
        self.live: list[Live] = []
        self._batches: dict[int, _Batch] = {}
        self._replay = Replay(self._run_batch, self._device)

    # -- a request -----------------------------------------------------------------------------

    def admit(
        self,
        tokens: Tokens | Sequence[int],
        *,
        slot: int | None = None,
        hit_tokens: int = 0,
        kv: Sequence[Keys | None] = (),
    ) -> Live | None:
        """Begin a request; None when no line or no slot is free.

        Args:
            tokens: its prompt.
            slot: a slot of its own that holds the state of its first `hit_tokens` tokens; None takes a free one and
                begins with the zero state. Its contents do not matter at `hit_tokens` 0.
            hit_tokens: tokens that need not run, fewer than the prompt has.
            kv: their keys and values, in consecutive parts.

        Raises:
            UsageError: an empty prompt, one that no line holds, or a hit that covers all of it.
            NumericError: keys and values do not cover the hit.
        """
        prompt = torch.from_numpy(np.asarray(tokens).astype(np.int64))
        if not hit_tokens < len(prompt) <= self.lines.length:
            raise UsageError(
                f"a prompt of {len(prompt)} tokens, {hit_tokens} of them cached, for lines of {self.lines.length}"
            )
        if hit_tokens and slot is None:
            raise UsageError("a cached prefix comes with the slot that holds its state")
        pool = self.engine.pool
        if not self.lines.available or (slot is None and not pool.available):
            return None
        held = self._held_keys(hit_tokens, kv)
        owned = slot is None
        if slot is None:
            taken = pool.alloc(1)
            assert taken is not None, "one is free"
            slot = int(taken[0])
        (line,) = self.lines.alloc(1) or [0]
        live = Live(prompt, slot, line, hit_tokens, owned=owned)
        rows = torch.tensor([line], device=self._device)
        for block, pair in held.items():
            self.lines.write(block, rows, 0, *pair)
        if len(prompt) == 1:  # its first step reads the slot, a prefill from the start does not
            self._clear(slot)
        self.live.append(live)
        return live

    def prefill_chunk(self, live: Live, end: int | None = None) -> int:
        """Run one chunk of the prompt, at most to `end`; tokens that ran.

        Behind the last token of the prompt the first token is generated.
        """
        last = len(live.prompt) if end is None else min(end, len(live.prompt))
        stop = min(last, live.done + self.chunk)
        if stop <= live.done or live.output:
            return 0
        pool, start = self.engine.pool, live.done
        slots = torch.tensor([live.slot], device=self._device)
        if self._audit and start:
            pool.require_finite(slots)
        if self._prompts is not None and self._prompts.takes(stop - start, stop):
            tokens = live.prompt[start:stop]
            token = self._prompts(tokens, start, slot=live.slot, line=live.line)
        else:
            token = self._run_prompt(live, slots, stop)
        live.done = stop
        if stop == len(live.prompt):
            live.output.append(token)
        return stop - start

    def prefill(self, live: Live, end: int | None = None) -> None:
        """Chunks up to `end` of the prompt, or all of it."""
        while self.prefill_chunk(live, end):
            pass

    def capture_prompts(
        self, slot: int, window: int = 0, fewest: Callable[[int], int] = int
    ) -> None:
        """Capture prompts of every length, and replays of up to `window` tokens, before the first one comes.

        In a slot that nobody uses, and only on a GPU; `fewest` as in `PromptSteps.capture`.
        """
        if self._prompts is not None:
            self._prompts.capture(slot, self._spare[0], window, fewest)

    def decode_step(self, requests: Sequence[Live]) -> list[int]:
        """One token for each request; see `decode_steps`."""
        return self.decode_steps(requests, 1)[0]

    def decode_steps(
        self, requests: Sequence[Live], steps: int, after: Callable[[], None] | None = None
    ) -> list[list[int]]:
        """`steps` tokens for each request, greedy; all but the last token of every prompt has run.

        A token feeds the next step where it lies; all of them go to the host at the end, which settles the device.

        Args:
            after: called when a step has been launched.

        Returns:
            Tokens of the requests, by step.

        Raises:
            UsageError: no step, too many requests, one twice, one whose prompt has not run, or one whose line is full.
        """
        if steps < 1 or not requests or len(set(map(id, requests))) != len(requests):
            raise UsageError("a step needs requests, each once")
        size = next((n for n in self.sizes if n >= len(requests)), None)
        if size is None:
            raise UsageError(f"{len(requests)} requests in a step, at most {self.sizes[-1]}")
        for live in requests:
            if not live.ready:
                raise UsageError(f"a prompt of {len(live.prompt)} tokens, {live.done} have run")
            if live.done + steps > self.lines.length:
                raise UsageError(f"a line of {self.lines.length} tokens is full")
        if size not in self._batches:
            self._batches[size] = _Batch(self.engine, self.lines, size)
        batch = self._batches[size]
        batch.fill(requests)
        chosen = torch.empty((steps, size), dtype=torch.int64, device=self._device)
        for number in range(steps):
            self._replay(size)
            chosen[number] = batch.tokens[:, 0]
            if after is not None:
                after()
        found: list[list[int]] = chosen[:, : len(requests)].tolist()
        for number, live in enumerate(requests):
            live.done += steps
            live.output.extend(row[number] for row in found)
        return found

    def finish(self, live: Live) -> list[int]:
        """End a request; its line is poisoned, and its slot where this engine took it. Returns its output."""
        self.live.remove(live)
        self.lines.free([live.line])
        if live.owned:
            self.engine.pool.free(torch.tensor([live.slot], device=self._device))
        return live.output

    # -- for a prefix cache --------------------------------------------------------------------

    def keys(self, live: Live, end: int) -> LineKeys:
        """Keys and values of the first `end` tokens, for a cache that cuts what it keeps."""
        if end > live.done:
            raise UsageError(f"{live.done} tokens have run, keys of {end} were asked for")
        return LineKeys(self.lines, live.line, end)

    def replay(self, prefix: Prefix, window: int) -> tuple[Tensor, ...]:
        """States of a prefix after its last `window` tokens from zero, in the pool's order (`tensor_store.Replay`)."""
        tokens, kv = torch.from_numpy(prefix.tokens.astype(np.int64)), joined_keys(prefix.kv)
        prompts, count = self._prompts, min(window, len(tokens))
        if prompts is not None and prompts.takes(count, len(tokens)):
            rows = torch.tensor(self._spare, device=self._device)
            for block, pair in kv.items():
                self.lines.write(block, rows, 0, *pair)
            start = len(tokens) - count
            return tuple(prompts.replayed(tokens[start:], start, self._spare[0]))
        whole = restore.Prefix(tokens[None].to(self._device), (), (), kv)
        states = restore.replay(self.engine.loaded, whole, window, self.engine.modules)
        return tuple(o.states(s) for o, s in zip(self.engine.orders, states, strict=True))

    def to_json(self) -> dict[str, Any]:
        """How steps ran."""
        return {
            "sizes": list(self.sizes),
            "chunk": self.chunk,
            "line_bytes": self.lines.nbytes,
            "replaced_modules": self.engine.modules.replaced,
            "kept_modules": self.engine.modules.refused.reasons,
            "prefill": self._prefill_runs(),
            "prompts": None if self._prompts is None else self._prompts.to_json(),
            **self._replay.to_json(),
        }

    def _prefill_runs(self) -> str:
        """How the recurrence of prompts runs in the first linear layer, and why."""
        loaded = self.engine.loaded
        n, per_channel = loaded.spec.layers[0], loaded.spec.unit == "channel"
        geometry = Geometry(n.key_heads, n.value_heads, n.key_dim, n.value_dim, per_channel)
        return choose(self._device, loaded.dtype, geometry).reason

    # -- inside --------------------------------------------------------------------------------

    def _run_batch(self, size: Any) -> None:
        batch = self._batches[size]
        batch.tokens.copy_(batch.step(batch.tokens).argmax(-1, keepdim=True))

    @torch.no_grad()
    def _run_prompt(self, live: Live, slots: Tensor, stop: int) -> int:
        """Advance slot and line to `stop`; the most likely next token."""
        loaded, modules, start = self.engine.loaded, self.engine.modules, live.done
        pool, orders = self.engine.pool, self.engine.orders
        tokens = live.prompt[start:stop]
        states: list[Tensor] = []
        conv: list[Tensor] = []
        if start:
            stored, conv = pool.read(slots)
            states = [o.model_states(s) for o, s in zip(orders, stored, strict=True)]
        kv = self.lines.read(live.line, start) if start else {}
        past = restore.resume(loaded, kv, *(([], []) if modules.prompts else (states, conv)))
        if modules.prompts:
            windows = [window[0] for window in conv] or self._blank
            with modules.prompt(windows, states or [None] * len(windows)) as after:
                logits = forward(loaded, tokens[None], past, logits_to_keep=1)
            held = [after[layer.ordinal] for layer in loaded.spec.layers]
            states, conv = [s for _, s in held], [w[None] for w, _ in held]
        else:
            logits = forward(loaded, tokens[None], past, logits_to_keep=1)
            layers = linear_layers(past)
            widths = [1 - layer.conv_width for layer in loaded.spec.layers]
            states = [n.recurrent_states[0] for n in layers]
            conv = [n.conv_states[0][..., w:] for n, w in zip(layers, widths, strict=True)]
        rows = torch.tensor([live.line], device=self._device)
        for block in self.lines.shapes:
            new = past.layers[block]
            self.lines.write(
                block, rows, start, new.keys[:, :, start:stop], new.values[:, :, start:stop]
            )
        pool.write(slots, [o.states(s) for o, s in zip(orders, states, strict=True)], conv)
        return int(logits[0, -1].argmax())

    def _clear(self, slot: int) -> None:
        pool, device = self.engine.pool, self._device
        slots = torch.tensor([slot], device=device)
        layers = pool.spec.layers
        pool.write(
            slots,
            [torch.zeros(1, n.value_heads, n.key_dim, n.value_dim, device=device) for n in layers],
            [torch.zeros(1, n.conv_channels, n.conv_width - 1, device=device) for n in layers],
        )

    def _held_keys(
        self, tokens: int, kv: Sequence[Keys | None]
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """Keys and values of the first `tokens` tokens by block."""
        if not tokens:
            return {}
        held = joined_keys(kv)
        if set(held) != set(self.lines.shapes):
            raise NumericError("the cached prefix has no keys and values for every attention block")
        for keys, _ in held.values():
            if keys.shape[2] != tokens:
                raise NumericError(f"keys of {keys.shape[2]} tokens for a hit of {tokens}")
        return held


def joined_keys(parts: Sequence[Keys | None]) -> dict[int, tuple[Tensor, Tensor]]:
    """Consecutive parts as one pair of tensors per block.

    Raises:
        NumericError: a part is missing or not this engine's.
    """
    held = [part for part in parts if isinstance(part, HeldKeys)]
    if len(held) != len(parts):
        raise NumericError("a part of the cached prefix has no keys and values of this engine")
    if len(held) == 1:
        return held[0].blocks
    return {
        block: (
            torch.cat([part.blocks[block][0] for part in held], 2),
            torch.cat([part.blocks[block][1] for part in held], 2),
        )
        for block in (held[0].blocks if held else {})
    }


def _powers(most: int) -> list[int]:
    """1, 2, 4 and so on below `most`, and `most`."""
    return sorted({*(1 << n for n in range(most.bit_length())), most} - {0})
