"""Prompts as captured steps: one graph for each of a few lengths that prompts are padded to.

A prefill of a small model is bound by launches, like a decode step, and a cached prefix then saves nothing that a
clock could see. A captured prompt has a fixed number of tokens. The slot and the line it continues, how many tokens
they hold and how many of its own count are numbers on the device. Tokens behind those that count write nowhere, see
nothing and leave the states as they are.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hybridstate.errors import NumericError
from hybridstate.kernels.layout import all_finite
from hybridstate.runtime.kv import LineCache, line_layer_class
from hybridstate.trajectories.cache import forward, new_cache
from hybridstate.trajectories.graphs import Replay

if TYPE_CHECKING:
    from hybridstate.runtime.engine import DecodeEngine

SHORTEST: Final = 32
"""Tokens of the shortest captured prompt: a chunk of the recurrence."""
_HEAD: Final = 8
"""Integers before the tokens of a prompt: slot, line, tokens held, tokens that count; each begins 16 bytes."""


def padded_lengths(longest: int) -> tuple[int, ...]:
    """Lengths from `SHORTEST` on, two in every doubling, the last just enough for `longest`."""
    sizes: list[int] = []
    size = SHORTEST
    while size < longest:
        sizes += [n for n in (size, size + size // 2) if n < longest]
        size *= 2
    return (*sizes, -(-longest // SHORTEST) * SHORTEST)


class PromptSteps:
    """Captured prompts of one engine; eager ones without a GPU, for comparison.

    Args:
        engine: whose linear layers all run prompts in few launches (`StepModules.prompts`).
        lines: keys and values.
        longest: tokens of one prompt at most.
    """

    def __init__(self, engine: "DecodeEngine", lines: LineCache, longest: int) -> None:
        loaded = engine.loaded
        device = loaded.device

        self.engine, self.lines = engine, lines
        self.sizes = padded_lengths(longest)
        self._inputs = torch.zeros(_HEAD + self.sizes[-1], dtype=torch.int64, device=device)
        layers = loaded.spec.layers
        self._blank = [
            torch.zeros(n.conv_channels, n.conv_width - 1, dtype=loaded.dtype, device=device)
            for n in layers
        ]
        self._outcome: dict[int, Tensor] = {}
        """By length: the first token of the reply, and whether all states are finite."""
        self._states: dict[int, list[Tensor]] = {}
        """By length: states behind replayed tokens, in the pool's order."""
        self._replay = Replay(self._run, device)

    def takes(self, count: int, end: int) -> bool:
        """Whether `count` tokens up to `end` run as a captured prompt, now or once it has run eagerly."""
        return self._replay.reason is None and count <= self.sizes[-1] and end <= self.lines.length

    @torch.no_grad()
    def __call__(self, tokens: Tensor, start: int, *, slot: int, line: int) -> int:
        """Run tokens behind those that a slot and a line hold; the most likely next token.

        Args:
            tokens: int64 `[T]` on the host, at most the longest.
            start: tokens before them; at 0 the contents of the slot do not matter.
            slot: of the pool; state and windows advance.
            line: of the lines; takes their keys and values.

        Raises:
            NumericError: no tokens, too many, more than the line holds, or a state to pack that is not finite.
        """
        size = self._fill(tokens, start, slot, line)
        self._replay((False, size))
        token, finite = self._outcome[size].tolist()
        if not finite and self.engine.pool.state == "damp":
            raise NumericError(f"state to pack in slot {slot} is not finite")
        return int(token)

    @torch.no_grad()
    def replayed(self, tokens: Tensor, start: int, line: int) -> list[Tensor]:
        """States behind tokens from the zero state, FP32 `[1, H, K, V]` in the pool's order, until the next call.

        The line holds their keys and values, and those of `start` tokens before them; it stays as it is.
        """
        size = self._fill(tokens, start, -1, line)
        self._replay((True, size))
        return self._states[size]

    def _fill(self, tokens: Tensor, start: int, slot: int, line: int) -> int:
        """Write the inputs; the length that the tokens are padded to."""
        count = len(tokens)
        if not 0 < count <= self.sizes[-1] or start + count > self.lines.length:
            raise NumericError(
                f"a prompt of {count} tokens behind {start}, lines of {self.lines.length}"
            )
        size = next(n for n in self.sizes if n >= count)
        values = torch.zeros(_HEAD + size, dtype=torch.int64)
        values[:_HEAD:2] = torch.tensor([slot, line, start, count])
        values[_HEAD : _HEAD + count] = tokens
        self._inputs[: len(values)].copy_(values)
        return size

    def capture(
        self, slot: int, line: int, window: int = 0, fewest: Callable[[int], int] = int
    ) -> None:
        """Capture every length now rather than when it comes; overwrites a slot and a line that nobody uses.

        Args:
            slot, line: of the pool and of the lines.
            window: tokens of the longest replay; replays of no more are captured too.
            fewest: the smallest of all ranks' numbers. Where one rank captures nothing, none does: a rank whose prompts
                have their own length would wait for others whose prompts are padded.
        """

        def until(phase: tuple[bool, int], run: Callable[[], object]) -> None:
            while fewest(int(self._replay.reason is None and not self._replay.has(phase))):
                run()

        below = 0
        for size in self.sizes:
            tokens = torch.zeros(min(size, self.lines.length), dtype=torch.int64)
            until((False, size), partial(self, tokens, 0, slot=slot, line=line))
            if below < window:  # its keys and values are those that the prompt has just written
                until((True, size), partial(self.replayed, tokens, 0, line))
            below = size
        if not fewest(int(self._replay.reason is None)):
            self._replay.refuse("another rank captures none")

    def to_json(self) -> dict[str, Any]:
        """How prompts ran."""
        return self._replay.to_json()

    def _run(self, phase: Any) -> None:
        """The step of (whether from zero and to nowhere, number of tokens) on the inputs."""
        (again, size), engine = phase, self.engine
        loaded, pool, orders = engine.loaded, engine.pool, engine.orders
        slot, line, start, count = (self._inputs[n : n + 1] for n in range(0, _HEAD, 2))
        tokens = self._inputs[None, _HEAD : _HEAD + size]
        place = torch.arange(size, device=tokens.device)
        lines = torch.where(place < count, line, -1)
        positions = start + place
        windows = self._blank
        states: list[Tensor | None] = [None] * len(orders)
        if not again:
            stored, held = pool.read(slot, ask=False)
            fresh = start > 0
            windows = [torch.where(fresh, x[0], 0.0) for x in held]
            states = [
                torch.where(fresh, o.model_states(s), 0.0)
                for o, s in zip(orders, stored, strict=True)
            ]
        past = new_cache(loaded)
        for block in self.lines.shapes:
            past.layers[block] = line_layer_class()(self.lines, block)
        targets = torch.full_like(lines, -1) if again else lines
        with (
            self.lines.active(loaded, lines, positions, targets),
            engine.modules.prompt(windows, states, count) as after,
        ):
            options = {"position_ids": positions[None], "logits_to_keep": count - 1}
            logits = forward(loaded, tokens, past, **options)[0, -1]
        found = [after[layer.ordinal] for layer in loaded.spec.layers]
        ours = [o.states(state) for o, (_, state) in zip(orders, found, strict=True)]
        if again:
            self._states[size] = ours
            return
        pool.put(slot, ours, [window[None] for window, _ in found])
        self._outcome[size] = torch.stack([logits.argmax(), all_finite(ours).long()])
