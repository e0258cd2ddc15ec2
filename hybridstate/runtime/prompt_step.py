"""Prompts as captured steps: one graph for each of a few lengths that prompts are padded to.

A prefill of a small model is bound by launches, like a decode step, and a cached prefix then saves nothing that a
clock could see. A captured prompt has a fixed number of tokens. Which line it continues, behind how many tokens, and
how many of its own count, are numbers on the device; states and windows come and go in tensors of their own. Tokens
behind those that count write nowhere, see nothing and leave the states as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hybridstate.errors import NumericError
from hybridstate.runtime.kv import LineCache, line_layer_class
from hybridstate.trajectories.cache import forward, new_cache
from hybridstate.trajectories.graphs import Replay

if TYPE_CHECKING:
    from hybridstate.runtime.engine import DecodeEngine

SHORTEST: Final = 32
"""Tokens of the shortest captured prompt: a chunk of the recurrence."""
_HEAD: Final = 8
"""Integers before the tokens of a prompt: line, line written to, tokens held, tokens that count, every second one."""


@dataclass(frozen=True, slots=True)
class Prompted:
    """What a prompt leaves, overwritten by the next one.

    Attributes:
        logits: `[vocabulary]` of the last token.
        states: FP32 `[1, H, K, V]` per linear layer.
        windows: `[C, W - 1]` per linear layer.
    """

    logits: Tensor
    states: tuple[Tensor, ...]
    windows: tuple[Tensor, ...]


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
        self._states = [
            torch.zeros(1, n.value_heads, n.key_dim, n.value_dim, device=device) for n in layers
        ]
        self._windows = [
            torch.zeros(n.conv_channels, n.conv_width - 1, dtype=loaded.dtype, device=device)
            for n in layers
        ]
        self._found: dict[int, Prompted] = {}
        self._replay = Replay(self._run, device)

    def takes(self, count: int, end: int) -> bool:
        """Whether `count` tokens up to `end` run as a captured prompt, now or once it has run eagerly."""
        return self._replay.reason is None and count <= self.sizes[-1] and end <= self.lines.length

    @torch.no_grad()
    def __call__(
        self,
        tokens: Tensor,
        start: int,
        line: int,
        states: Sequence[Tensor] = (),
        windows: Sequence[Tensor] = (),
        *,
        write: bool = True,
    ) -> Prompted:
        """Run tokens of a sequence whose first `start` tokens' keys and values lie in a line.

        Args:
            tokens: int64 `[T]` on the host, at most the longest.
            start: tokens before them.
            line: of the lines.
            states: FP32 `[1, H, K, V]` per linear layer before them; none for zeros.
            windows: `[1, C, W - 1]` or `[C, W - 1]` per linear layer; none for zeros.
            write: put their keys and values into the line; without, it holds them already.

        Raises:
            NumericError: no tokens, too many, or more than the line holds.
        """
        count = len(tokens)
        if not 0 < count <= self.sizes[-1] or start + count > self.lines.length:
            raise NumericError(
                f"a prompt of {count} tokens behind {start}, lines of {self.lines.length}"
            )
        size = next(n for n in self.sizes if n >= count)
        values = torch.zeros(_HEAD + size, dtype=torch.int64)
        values[:_HEAD:2] = torch.tensor([line, line if write else -1, start, count])
        values[_HEAD : _HEAD + count] = tokens
        self._inputs[: len(values)].copy_(values)
        for held, given in ((self._states, states), (self._windows, windows)):
            if given:
                torch._foreach_copy_(
                    held, [x.view(y.shape) for x, y in zip(given, held, strict=True)]
                )
            else:
                torch._foreach_zero_(held)
        self._replay(size)
        return self._found[size]

    def capture(self, line: int) -> None:
        """Capture every length now rather than when it comes; overwrites a line that nobody uses."""
        for size in self.sizes:
            tokens = torch.zeros(min(size, self.lines.length), dtype=torch.int64)
            while self._replay.reason is None and not self._replay.has(size):
                self(tokens, 0, line)

    def to_json(self) -> dict[str, Any]:
        """How prompts ran."""
        return self._replay.to_json()

    def _run(self, size: Any) -> None:
        """The step on `size` tokens of the inputs."""
        loaded, modules = self.engine.loaded, self.engine.modules
        line, target, start, count = (self._inputs[n : n + 1] for n in range(0, _HEAD, 2))
        tokens = self._inputs[None, _HEAD : _HEAD + size]
        place = torch.arange(size, device=tokens.device)
        counts = place < count
        lines, targets = (torch.where(counts, x, -1) for x in (line, target))
        positions = start + place
        past = new_cache(loaded)
        for block in self.lines.shapes:
            past.layers[block] = line_layer_class()(self.lines, block)
        with (
            self.lines.active(loaded, lines, positions, targets),
            modules.prompt(self._windows, self._states, count) as after,
        ):
            options = {"position_ids": positions[None], "logits_to_keep": count - 1}
            logits = forward(loaded, tokens, past, **options)[0, -1]
        held = [after[layer.ordinal] for layer in loaded.spec.layers]
        self._found[size] = Prompted(logits, tuple(s for _, s in held), tuple(w for w, _ in held))
