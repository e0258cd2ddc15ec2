"""Keys and values of running requests: one line of fixed length per request, read and written in place.

A line belongs to one request from its first token to its last, whatever the others do, so sequences of different
lengths decode as one batch. The lines of a step and their lengths are tensors: a captured step reads them anew at every
replay, and a line of -1 is padding.

A block with latent attention (MLA) keeps its latents and rotary keys in one row, and its queries and results pass
through the expansion instead of every cached row: q . (W_k c) = (W_k^T q) . c and sum p (W_v c) = W_v (sum p c).

transformers sees an ordinary cache (`step_cache`) and an attention function registered by name.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor

from hybridstate.errors import NumericError, UsageError
from hybridstate.kernels.dispatch import by_kernels
from hybridstate.trajectories.graphs import is_latent
from hybridstate.trajectories.model import LoadedModel

ATTENTION: Final = "hybridstate_lines"
"""Name under which the attention over lines is registered in transformers."""

_ACTIVE: list["LineCache"] = []
"""The caches of the steps being run, innermost last."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What one attention block keeps of a token.

    Attributes:
        groups: key-value heads; 1 for latents.
        key_width: columns of a key; of a latent where `latent`.
        value_width: columns of a value; of a rotary key where `latent`.
        latent: whether values are the first columns of the keys.
    """

    groups: int
    key_width: int
    value_width: int
    latent: bool


class LineCache:
    """Lines for every full-attention block.

    Args:
        loaded: the model; its attention blocks keep plain keys and values or latents.
        shapes: by block (`block_shapes`).
        lines: requests at once.
        length: tokens of one line.
    """

    def __init__(
        self, loaded: LoadedModel, shapes: Mapping[int, BlockShape], lines: int, length: int
    ) -> None:
        if lines < 1 or length < 1:
            raise UsageError(f"a cache of {lines} lines of {length} tokens holds nothing")
        self.shapes = dict(shapes)
        self.length = length
        self._free = list(range(lines))
        device = loaded.device
        self.keys: dict[int, Tensor] = {}
        """`[lines, groups, length, key width]` by block; latents with their rotary keys behind them."""
        self.values: dict[int, Tensor] = {}
        """`[lines, groups, length, value width]` by block; none for latents."""
        for block, shape in self.shapes.items():
            width = shape.key_width + (shape.value_width if shape.latent else 0)
            size = (lines, shape.groups, length)
            self.keys[block] = torch.empty((*size, width), dtype=loaded.dtype, device=device)
            if not shape.latent:
                self.values[block] = torch.empty(
                    (*size, shape.value_width), dtype=loaded.dtype, device=device
                )
        self.poison(range(lines))
        self.step_lines = torch.empty(0, dtype=torch.int64, device=device)
        """Lines of the present step, `[B]`."""
        self.step_targets = self.step_lines
        """Lines that the step writes to, `[B]`."""
        self._prompt = False
        self.step_lengths = torch.empty(0, dtype=torch.int64, device=device)
        """Tokens in each before it, `[B]`."""

    @property
    def nbytes(self) -> int:
        """Bytes of all lines."""
        held = (*self.keys.values(), *self.values.values())
        return sum(x.numel() * x.element_size() for x in held)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        held = (*self.keys.values(), *self.values.values())
        return sum(x.shape[1] * x.shape[3] * x.element_size() for x in held)

    @property
    def available(self) -> int:
        """Free lines."""
        return len(self._free)

    def alloc(self, count: int) -> list[int] | None:
        """The lowest free lines; None when fewer are free."""
        if count > len(self._free):
            return None
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def free(self, lines: list[int]) -> None:
        """Poison lines and take them back."""
        if set(lines) & set(self._free) or len(set(lines)) != len(lines):
            raise UsageError(f"lines freed twice: {lines}")
        self.poison(lines)
        self._free = sorted([*self._free, *lines])

    def poison(self, lines: Any) -> None:
        """Overwrite lines with NaN, so that a row read too far shows."""
        rows = list(lines)
        for held in (*self.keys.values(), *self.values.values()):
            held[rows] = float("nan")

    def write(self, block: int, lines: Tensor, start: int, keys: Tensor, values: Tensor) -> None:
        """Put tokens `[B, G, n, width]` of a block at `start` of the lines `[B]`."""
        end = start + keys.shape[2]
        if end > self.length:
            raise NumericError(f"{end} tokens do not fit a line of {self.length}")
        shape = self.shapes[block]
        if shape.latent:
            self.keys[block][lines, :, start:end] = torch.cat([keys, values], -1)
        else:
            self.keys[block][lines, :, start:end] = keys
            self.values[block][lines, :, start:end] = values

    def read(self, line: int, tokens: int) -> dict[int, tuple[Tensor, Tensor]]:
        """What transformers caches of the first tokens of a line, `[1, G, tokens, width]` by block; views."""
        found = {}
        for block, shape in self.shapes.items():
            rows = self.keys[block][line : line + 1, :, :tokens]
            if shape.latent:
                found[block] = rows[..., : shape.key_width], rows[..., shape.key_width :]
            else:
                found[block] = rows, self.values[block][line : line + 1, :, :tokens]
        return found

    def append(self, block: int, keys: Tensor, values: Tensor) -> None:
        """One token `[B, G, 1, width]` of every line of the step, at its length."""
        from hybridstate.kernels import attention

        put = attention.append_step if by_kernels(keys) else attention.append_reference
        held, at = self.keys[block], (self.step_targets, self.step_lengths)
        put(keys[:, :, 0], held, *at)
        if self.shapes[block].latent:
            put(values[:, :, 0], held, *at, self.shapes[block].key_width)
        else:
            put(values[:, :, 0], self.values[block], *at)

    def attend(self, module: Any, query: Tensor, scale: float) -> Tensor:
        """Attention of the step's tokens `[B, H, 1, D]`; `[B, 1, H, V]`."""
        block = module.layer_idx
        keys, shape = self.keys[block], self.shapes[block]
        if not shape.latent:
            return self._attend(query[:, :, 0], keys, self.values[block], scale)[:, None]
        nope, heads = module.qk_nope_head_dim, query.shape[1]
        expansion = module.kv_b_proj.weight.unflatten(0, (heads, -1))  # [H, nope + V, R]
        plain, turned = query[:, :, 0, :nope], query[:, :, 0, nope:]
        folded = torch.bmm(plain.transpose(0, 1), expansion[:, :nope]).transpose(0, 1)
        joined = torch.cat([folded, turned], -1)  # [B, H, R + rotary]
        mixed = self._attend(joined, keys, None, scale, shape.key_width)  # [B, H, R]
        out = torch.bmm(mixed.transpose(0, 1), expansion[:, nope:].mT)  # [H, B, V]
        return out.transpose(0, 1)[:, None]

    def _attend(
        self, query: Tensor, keys: Tensor, values: Tensor | None, scale: float, width: int = 0
    ) -> Tensor:
        from hybridstate.kernels.attention import PROGRAMS, attention_reference, attention_step

        lengths = self.step_lengths + 1  # the new token sees itself
        if by_kernels(query):
            # many tokens of a prompt fill the device without cutting lines into parts
            many = self._prompt and len(query) * keys.shape[1] >= PROGRAMS
            part = keys.shape[2] if many else None
            at: dict[str, Any] = {"lines": self.step_lines, "lengths": lengths, "part": part}
            return attention_step(query, keys, values, None, scale, width, **at)
        lines = self.step_lines.clamp(min=0)
        seen = torch.arange(keys.shape[2], device=keys.device) < lengths[:, None]
        hidden = ~seen[:, None, :, None]
        rows = keys[lines].masked_fill(hidden, 0.0)
        held = None if values is None else values[lines].masked_fill(hidden, 0.0)
        out = attention_reference(query, rows, held, seen, scale, width)
        return out.masked_fill((self.step_lines < 0)[:, None, None], 0.0)

    @contextmanager
    def active(
        self, loaded: LoadedModel, lines: Tensor, lengths: Tensor, targets: Tensor | None = None
    ) -> Iterator[None]:
        """Run one token of each of the lines `[B]` behind their first `lengths [B]` through this cache.

        `[B]` sequences of one token, or one of B tokens whose rows name the same line one token further each.

        Args:
            targets: of a prompt, lines that keys and values are written to, -1 for nowhere; `lines` without one.
        """
        _register()
        config = loaded.model.config.get_text_config(decoder=True)
        before = config._attn_implementation
        latent = [m for m in loaded.model.modules() if hasattr(m, "expand_kv")]
        for module in latent:
            module.expand_kv = _unexpanded
        self.step_lines, self.step_lengths = lines, lengths
        self.step_targets = lines if targets is None else targets
        self._prompt = targets is not None
        config._attn_implementation = ATTENTION
        _ACTIVE.append(self)
        try:
            yield
        finally:
            _ACTIVE.pop()
            config._attn_implementation = before
            for module in latent:
                del module.expand_kv


def block_shapes(
    loaded: LoadedModel, kv: Mapping[int, tuple[Tensor, Tensor]]
) -> dict[int, BlockShape]:
    """Shapes of the attention blocks from what transformers has cached of any tokens."""
    latent = {
        module.layer_idx
        for module in loaded.model.modules()
        if hasattr(module, "expand_kv") and is_latent(module)
    }
    return {
        block: BlockShape(keys.shape[1], keys.shape[3], values.shape[3], block in latent)
        for block, (keys, values) in kv.items()
    }


def _unexpanded(latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Stands in for `expand_kv` while attention works on latents."""
    return latent, rotary


def _attend(
    module: Any,
    query: Tensor,
    _key: Any,
    _value: Any,
    _mask: Any,
    scaling: float | None = None,
    **_more: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers over the lines of the running step."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.shape[2] == 1:
        return _ACTIVE[-1].attend(module, query, scale), None
    return _ACTIVE[-1].attend(module, by_token(query), scale).transpose(0, 1), None


def by_token(x: Tensor) -> Tensor:
    """`[1, H, T, D]` of one sequence as `[T, H, 1, D]`: T sequences of one token."""
    return x[0].transpose(0, 1)[:, :, None]


@cache
def _register() -> None:
    """Known as an attention alone, so transformers makes no mask for it: lengths say what a token sees."""
    modeling: Any = import_module("transformers.modeling_utils")
    modeling.ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)


@cache
def line_layer_class() -> Any:
    """The cache layer of an attention block: appends to the active cache's lines."""
    cache_utils: Any = import_module("transformers.cache_utils")

    class LineLayer(cache_utils.DynamicLayer):  # type: ignore[misc]
        is_compileable = True

        def __init__(self, lines: LineCache, block: int) -> None:
            super().__init__()
            self.lines, self.block = lines, block
            self.is_initialized = True
            self.keys, self.values = lines.keys[block], lines.values.get(block)

        def update(self, keys: Tensor, values: Tensor, *_args: Any, **_kwargs: Any) -> Any:
            if keys.shape[2] == 1:
                self.lines.append(self.block, keys, values)
            elif keys.shape[0] == 1 and keys.shape[2] == len(self.lines.step_lines):
                self.lines.append(self.block, by_token(keys), by_token(values))
            else:
                raise NumericError("lines advance by one token each, or one line by all of them")
            return keys, values

        def get_seq_length(self, *_args: Any, **_kwargs: Any) -> int:
            return 1

        def get_mask_sizes(self, *_args: Any, **_kwargs: Any) -> tuple[int, int]:
            return 1, 0

    return LineLayer
