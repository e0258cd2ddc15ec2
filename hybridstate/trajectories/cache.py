"""Driving a model token by token through its cache, and moving linear-attention states in and out.

Sequences of a batch have equal lengths, so nothing is ever padded. Tensors that leave this module are
clones: the cache updates its own in place.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hybridstate.errors import NumericError

if TYPE_CHECKING:
    from hybridstate.trajectories.model import LoadedModel


@dataclass(frozen=True, slots=True)
class LayerStates:
    """States of the linear layers, in ordinal order."""

    recurrent: tuple[torch.Tensor, ...]
    """`[B, H, K, V]` float32 each."""
    conv: tuple[torch.Tensor, ...]
    """`[B, C, W]` each, W the convolution's kernel width; its first column is never read again."""


ATTENTION = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
"""Attention of torch on a GPU: all kernels but cuDNN's, which plans anew at every new length of a prompt."""


def forward(
    loaded: "LoadedModel", tokens: torch.Tensor, cache: Any, **options: Any
) -> torch.Tensor:
    """Logits `[B, T, vocabulary]` of `tokens [B, T]` after the cache, which advances."""
    inputs = {"input_ids": tokens.to(loaded.device), loaded.cache_argument: cache}
    with sdpa_kernel([*ATTENTION]) if loaded.device.type == "cuda" else nullcontext():
        logits: torch.Tensor = loaded.model(**inputs, use_cache=True, **options).logits
    return logits


def new_cache(loaded: "LoadedModel") -> Any:
    """An empty cache of the layout this model's config asks for."""
    from transformers import DynamicCache

    return DynamicCache(config=loaded.model.config.get_text_config(decoder=True))


@torch.no_grad()
def prefill(
    loaded: "LoadedModel",
    tokens: torch.Tensor,
    *,
    chunk: int | None = None,
    cache: Any = None,
    after_chunk: Callable[[Any, int], None] | None = None,
    keep_logits: bool = False,
) -> tuple[torch.Tensor, Any]:
    """Run `tokens [B, T]` through the model in chunks, continuing `cache` when one is given.

    Args:
        chunk: tokens per call; all at once by default.
        after_chunk: called with the cache and the tokens done after each chunk, e.g. to quantise.
        keep_logits: return logits of every position rather than of the last one.

    Returns:
        logits `[B, T, vocabulary]` or `[B, vocabulary]`, and the cache.
    """
    total = tokens.shape[1]
    step = chunk or total
    cache = new_cache(loaded) if cache is None else cache
    kept: list[torch.Tensor] = []
    for start in range(0, total, step):
        piece = tokens[:, start : start + step]
        kept.append(forward(loaded, piece, cache, logits_to_keep=0 if keep_logits else 1))
        if after_chunk is not None:
            after_chunk(cache, min(start + step, total))
    return (torch.cat(kept, dim=1) if keep_logits else kept[-1][:, -1]), cache


@torch.no_grad()
def decode(loaded: "LoadedModel", tokens: torch.Tensor, cache: Any) -> torch.Tensor:
    """One token per sequence: `tokens [B]` in, logits `[B, vocabulary]` out; the cache advances."""
    return forward(loaded, tokens.unsqueeze(1), cache)[:, -1]


def linear_layers(cache: Any) -> list[Any]:
    """The cache's linear-attention layers, in ordinal order."""
    return [layer for layer in cache.layers if hasattr(layer, "recurrent_states")]


def recurrent_states(cache: Any) -> list[torch.Tensor]:
    """The cache's own recurrent tensors `[B, H, K, V]`, not clones: writing changes the cache."""
    return [layer.recurrent_states[0] for layer in linear_layers(cache)]


@torch.no_grad()
def states(cache: Any) -> LayerStates:
    """Clones of every linear layer's recurrent and convolution state."""
    layers = linear_layers(cache)
    return LayerStates(
        recurrent=tuple(layer.recurrent_states[0].clone() for layer in layers),
        conv=tuple(layer.conv_states[0].clone() for layer in layers),
    )


@torch.no_grad()
def set_states(cache: Any, values: LayerStates) -> None:
    """Copy states into the cache, which may be empty; the caller keeps its tensors.

    A convolution state may come with its last W - 1 columns, the ones that are read.

    Raises:
        NumericError: for another number of layers or another shape than the cache holds.
    """
    layers = linear_layers(cache)
    if not len(layers) == len(values.recurrent) == len(values.conv):
        raise NumericError(
            f"states of {len(values.recurrent)} layers for a cache with {len(layers)} linear layers",
            found=len(values.recurrent),
            expected=len(layers),
        )
    for ordinal, layer in enumerate(layers):
        conv, recurrent = values.conv[ordinal], values.recurrent[ordinal]
        present = layer.conv_states[0]
        if present is not None and conv.shape[-1] == present.shape[-1] - 1:
            conv = torch.nn.functional.pad(conv, (1, 0))
        for name, old, new in (
            ("convolution", present, conv),
            ("recurrent", layer.recurrent_states[0], recurrent),
        ):
            if old is not None and old.shape != new.shape:
                raise NumericError(
                    f"{name} state of linear layer {ordinal} has shape {tuple(new.shape)}, "
                    f"the cache holds {tuple(old.shape)}",
                    layer=ordinal,
                    found=list(new.shape),
                    expected=list(old.shape),
                )
        layer.has_previous_state[0] = False  # replace rather than append
        layer.update_conv_state(conv, conv_kernel_size=conv.shape[-1])
        layer.update_recurrent_state(recurrent)


@torch.no_grad()
def select_sequences(cache: Any, rows: list[int]) -> None:
    """Rearrange the batch of the whole cache, attention included; rows may repeat."""
    device = next(layer.recurrent_states[0].device for layer in linear_layers(cache))
    cache.reorder_cache(torch.tensor(rows, device=device))
