"""Decode steps on fixed tensors: captured in CUDA graphs on a GPU, run as they are elsewhere.

Decoding token by token is bound by launches (thousands of small kernels a step), so on a GPU the whole step is
captured once and replayed. Everything a step reads or writes then lies at a fixed address: keys and values in a
cache of full length, states and convolution windows updated in place, counters on the device. Three parts that
transformers leaves slow are replaced meanwhile, with the same meaning:

* attention of one query over the padded cache reads keys and values once, whatever the number of query heads;
* latent attention (MLA) multiplies the query by the expansion instead of expanding the whole cache at every step:
  q . (W_k c) = (W_k^T q) . c  and  sum p (W_v c) = W_v (sum p c);
* the one-token convolution is a product and a sum rather than a grouped convolution.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final

import torch

from hybridstate.kernels import update
from hybridstate.kernels.dispatch import brief
from hybridstate.kernels.layout import DenseLayout
from hybridstate.trajectories.cache import linear_layers, new_cache
from hybridstate.trajectories.launches import fewer_launches
from hybridstate.trajectories.model import LoadedModel, RecurrenceFn, reference_decode, swap

ATTENTION: Final = "hybridstate_decode"
"""Name under which the one-query attention is registered in transformers."""
PLAIN_LAYERS: Final = frozenset({"LinearAttentionLayer", "DynamicLayer"})
"""Cache layers of transformers whose attention `attend` computes."""
WARM_UP: Final = 2
"""Eager steps before the first capture: libraries initialise and kernels compile in them."""


class Replay:
    """A step captured once per phase; `mode` says what runs, `reason` why nothing was captured.

    The step takes the phase, which selects its operations; whatever else changes from call to call it reads
    from tensors. The first calls run eagerly and count as steps like any other, so nothing is ever undone: a
    capture executes nothing.
    """

    def __init__(
        self, step: Callable[[Hashable], None], device: torch.device, *, fixed: bool = True
    ) -> None:
        self._step = step
        self._device = device
        self._graphs: dict[Hashable, Any] = {}
        self._seen: dict[Hashable, int] = {}
        self._pool: Any = None
        self.mode = "eager"
        self.reason: str | None = None if device.type == "cuda" else "no GPU"
        if self.reason is None and not fixed:
            self.reason = "the model's attention keeps its own cache"

    @torch.no_grad()
    def __call__(self, phase: Hashable = None) -> None:
        """One step."""
        graph = self._graphs.get(phase)
        if graph is None and self._ready(phase):
            graph = self._capture(phase)
        if graph is None:
            self.eager(phase)
        else:
            graph.replay()

    @torch.no_grad()
    def eager(self, phase: Hashable = None) -> None:
        """One step without a graph, for steps that also do work on the host."""
        self._seen[phase] = self._seen.get(phase, 0) + 1
        self._step(phase)

    def has(self, phase: Hashable) -> bool:
        """Whether the step of this phase is captured."""
        return phase in self._graphs

    def to_json(self) -> dict[str, Any]:
        """What ran, and how many graphs."""
        return {"mode": self.mode, "reason": self.reason, "graphs": len(self._graphs)}

    def refuse(self, reason: str) -> None:
        """Run eagerly from here on, without graphs; a reason that there is already stays."""
        self.reason = self.reason or reason
        self.mode = "eager"
        self._graphs.clear()

    def close(self) -> None:
        """Free the graphs and what the step holds; it cannot run again."""
        self._graphs.clear()
        self._pool = None
        self._step = _closed
        self.reason = self.reason or "closed"

    def _ready(self, phase: Hashable) -> bool:
        warm = self._seen.get(phase, 0) >= (1 if self._graphs else WARM_UP)
        return self.reason is None and warm

    def _capture(self, phase: Hashable) -> Any:
        """The captured step, or None from the first failure on."""
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads copy recorded states meanwhile; only this one's calls belong to the graph.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._step(phase)
        except Exception as error:  # compilers and drivers raise anything; the step runs eagerly
            self.refuse(brief(error))
            return None
        self._pool = graph.pool()
        self._graphs[phase] = graph
        self.mode = "cuda-graph"
        return graph


def _closed(_phase: Hashable) -> None:
    raise RuntimeError("this step was closed")


def uses_fixed(loaded: LoadedModel) -> bool:
    """Whether this model's steps run on fixed tensors by default: on a GPU, where all attention is plain.

    Sliding windows and indexed attention keep the model's own cache and attention, and run eagerly.
    """
    return loaded.device.type == "cuda" and has_plain_attention(loaded)


def has_plain_attention(loaded: LoadedModel) -> bool:
    """Whether every layer of the model's cache is linear or keeps all keys and values."""
    return {type(layer).__name__ for layer in new_cache(loaded).layers} <= PLAIN_LAYERS


def fixed_cache(loaded: LoadedModel, cache: Any, room: int) -> Any:
    """A cache of full length for `room` more tokens; takes over what `cache` holds, which is emptied."""
    transformers: Any = import_module("transformers")
    config = loaded.model.config.get_text_config(decoder=True)
    # A length of whole 64s keeps rows of scores aligned for matrix products.
    length = int(cache.get_seq_length()) + room
    fixed = transformers.StaticCache(config=config, max_cache_len=-(-length // 64) * 64)
    for place, layer in enumerate(cache.layers):
        if hasattr(layer, "recurrent_states"):
            fixed.layers[place] = layer
            state = layer.recurrent_states[0]
            if not state.is_contiguous():
                layer.recurrent_states[0] = state.contiguous()
        else:
            fixed.layers[place].update(layer.keys, layer.values)
            layer.keys = layer.values = None
    assert len(linear_layers(fixed)) == len(loaded.spec.layers)
    return fixed


def in_place_decode(loaded: LoadedModel) -> RecurrenceFn:
    """One token of a layer, writing the state it was given: our FP32 kernel on a GPU, else the reference."""
    layouts = [DenseLayout(layer.key_dim, layer.value_dim) for layer in loaded.spec.layers]
    on_gpu = loaded.device.type == "cuda"
    fused = on_gpu and all(update.backend(loaded.device, x) == "triton" for x in set(layouts))
    slots: dict[int, torch.Tensor] = {}

    def kernel(
        ordinal: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert initial_state is not None
        rows = len(initial_state)
        if rows not in slots:  # at the first step, which is never captured
            slots[rows] = torch.arange(rows, device=initial_state.device)
        operands = (q, k, v, g.float(), beta.float(), initial_state, slots[rows])
        o = update.dense_step(*operands, layout=layouts[ordinal], backend="triton")
        return o, initial_state

    def reference(
        ordinal: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert initial_state is not None
        o, state = reference_decode(ordinal, q, k, v, g, beta, initial_state)
        initial_state.copy_(state)
        return o, initial_state

    return kernel if fused else reference


@contextmanager
def fixed_decode(loaded: LoadedModel, decode: RecurrenceFn) -> Iterator[None]:
    """Run one-token steps on a `fixed_cache`: `decode` as recurrence, our attention and convolution."""
    config = loaded.model.config.get_text_config(decoder=True)
    before = config._attn_implementation
    _register()
    latent = [module for module in loaded.model.modules() if is_latent(module)]
    for module in latent:
        module.expand_kv = _unexpanded
    config._attn_implementation = ATTENTION
    try:
        with swap(loaded, decode=decode, conv=conv_step), fewer_launches(loaded.model):
            yield
    finally:
        config._attn_implementation = before
        for module in latent:
            del module.expand_kv


def conv_step(
    x: torch.Tensor,
    window: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
    """One token of a causal depthwise convolution.

    Args:
        x: `[B, C, 1]`.
        window: `[B, C, W]` last inputs, advanced in place.
        weight: `[C, W]`.
        bias: `[C]` or None.
        activation: name in transformers, or None.

    Returns:
        `[B, C, 1]` in the dtype of `x`.
    """
    if window.is_cuda and activation in ("silu", "swish"):
        from hybridstate.kernels import norms

        return norms.conv_step(x[..., 0], window, weight.contiguous(), bias)[..., None]
    window.copy_(torch.cat([window[:, :, 1:], x.to(window.dtype)], -1))
    total = (window.float() * weight.float()).sum(-1, keepdim=True)
    if bias is not None:
        total = total + bias.float()[:, None]
    total = total.to(x.dtype)
    if activation is None:
        return total
    if activation in ("silu", "swish"):
        return torch.nn.functional.silu(total)
    act: torch.Tensor = import_module("transformers.activations").ACT2FN[activation](total)
    return act


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_more: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one query per sequence over a padded cache.

    Args:
        query: `[B, H, 1, D]`.
        key, value: `[B, G, T, D]`, H a multiple of G; latents `[B, 1, T, R]` and rotary keys
            `[B, 1, T, P]` in a module whose `expand_kv` is replaced.
        attention_mask: bool, broadcasts to `[B, 1, 1, T]`; None attends everywhere.

    Returns:
        `[B, 1, H, D]` and no weights.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if "expand_kv" in module.__dict__:
        return _latent(module, query, key, value, attention_mask, scale), None
    batch, heads, _, _ = query.shape
    groups = key.shape[1]
    packed = query.reshape(batch * groups, heads // groups, -1)
    scores = _product(packed, key.flatten(0, 1).mT).unflatten(0, (batch, groups)) * scale
    shares = _shares(scores, attention_mask).to(value.dtype).flatten(0, 1)
    out = torch.bmm(shares, value.flatten(0, 1))
    return out.reshape(batch, 1, heads, -1).to(query.dtype), None


def _latent(
    module: Any,
    query: torch.Tensor,
    latent: torch.Tensor,
    rotary: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Attention on latents: the expansion is applied to the query and to the result."""
    nope, heads = module.qk_nope_head_dim, query.shape[1]
    expansion = module.kv_b_proj.weight.unflatten(0, (heads, -1))  # [H, nope + V, R]
    plain, turned = query[:, :, 0, :nope], query[:, :, 0, nope:]
    folded = torch.bmm(plain.transpose(0, 1), expansion[:, :nope]).transpose(0, 1)  # [B, H, R]
    scores = _product(folded, latent[:, 0].mT) + _product(turned, rotary[:, 0].mT)
    shares = _shares((scores * scale)[:, None], mask)[:, 0].to(latent.dtype)
    mixed = torch.bmm(shares, latent[:, 0])  # [B, H, R]
    out = torch.bmm(mixed.transpose(0, 1), expansion[:, nope:].mT)  # [H, B, V]
    return out.transpose(0, 1)[:, None].to(query.dtype)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Batched product in float32, without copies in float32 where the device can."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    if a.is_cuda:
        try:
            return torch.bmm(a, b, out_dtype=torch.float32)
        except (TypeError, RuntimeError):
            return torch.bmm(a, b).float()
    return torch.bmm(a.float(), b.float())


def _shares(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Softmax in float32 of `[B, G, heads, T]` where the mask allows."""
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    return torch.softmax(scores, -1)


def _unexpanded(latent: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands in for `expand_kv` while `attend` works on latents."""
    return latent, rotary


@torch.no_grad()
def is_latent(module: Any) -> bool:
    """Whether a module expands latents the way `attend` folds, tried on one random latent."""
    needed = ("expand_kv", "kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
    if not all(hasattr(module, name) for name in needed) or module.kv_b_proj.bias is not None:
        return False
    weight = module.kv_b_proj.weight
    latent = torch.ones(1, 1, 1, module.kv_lora_rank, device=weight.device, dtype=weight.dtype)
    rotary = torch.ones(1, 1, 1, module.qk_rope_head_dim, device=weight.device, dtype=weight.dtype)
    key, value = module.expand_kv(latent, rotary)
    nope, heads = module.qk_nope_head_dim, key.shape[1]
    if weight.dim() != 2 or weight.shape[0] % heads:
        return False
    ours = (weight @ latent.flatten()).unflatten(0, (heads, -1))
    split = [nope, ours.shape[1] - nope]
    ours_key, ours_value = ours.split(split, 1)
    return bool(
        key.shape[-1] == nope + module.qk_rope_head_dim
        and torch.allclose(key[0, :, 0, :nope], ours_key, rtol=2e-2, atol=1e-3)
        and torch.equal(key[0, :, 0, nope:], rotary[0, 0].expand(heads, -1))
        and torch.allclose(value[0, :, 0], ours_value, rtol=2e-2, atol=1e-3)
    )


def _register() -> None:
    """Make `attend` known to transformers, with the boolean masks of its SDPA path."""
    masking: Any = import_module("transformers.masking_utils")
    modeling: Any = import_module("transformers.modeling_utils")
    modeling.ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
    masking.ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, masking.sdpa_mask)
