"""Loading a model and taking over its recurrence.

The modeling files of transformers look up their two recurrence functions by name in their own
module. `load_model` puts a dispatcher under each name for good: it finds the running layer through
forward hooks and calls whatever `swap` has installed for that model, by default the reference
maths of `kernels.reference`. So no optional package is ever dispatched to, two models of one family can
be loaded side by side, and a replacement sees the same call on every transformers version:

    prefill(ordinal, q, k, v, g, beta, initial_state) -> (o, S)     any number of tokens T
    decode(ordinal, q, k, v, g, beta, initial_state) -> (o, S)      one token, no T axis

with q, k `[B, T, H_k, K]` before L2 norm and scale (never expanded to the value heads), v
`[B, T, H, V]`, log-decay g `[B, T, H]` or `[B, T, H, K]`, beta `[B, T, H]`, S `[B, H, K, V]` (key
rows, value columns; `None` before the first token) and `ordinal` the position among the linear layers.
"""

import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from hybridstate.checkpoint import Checkpoint, open_checkpoint
from hybridstate.errors import (
    MissingRequirement,
    NumericError,
    SourceError,
    UnsupportedModel,
    UsageError,
)
from hybridstate.families import ModelSpec
from hybridstate.kernels import reference
from hybridstate.trajectories.cache import (
    LayerStates,
    decode,
    forward,
    linear_layers,
    new_cache,
    prefill,
    recurrent_states,
    select_sequences,
    set_states,
    states,
)

__all__ = [
    "LayerStates",
    "LoadedModel",
    "RecurrenceFn",
    "decode",
    "forward",
    "linear_layers",
    "load_model",
    "new_cache",
    "prefill",
    "recurrent_states",
    "reference_decode",
    "reference_prefill",
    "select_sequences",
    "set_states",
    "states",
    "swap",
    "torch_device",
    "torch_dtype",
]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class RecurrenceFn(Protocol):
    """What `swap` takes: one layer's recurrence, over T tokens (prefill) or over one (decode)."""

    def __call__(
        self,
        ordinal: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


def reference_prefill(
    ordinal: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chunked reference recurrence, used for every call of more than one token."""
    return reference.chunk_prefill(q, k, v, g, beta, initial_state)


def reference_decode(
    ordinal: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference recurrence of one token."""
    if initial_state is None:
        shape = (q.shape[0], v.shape[1], q.shape[2], v.shape[2])
        initial_state = q.new_zeros(shape, dtype=torch.float32)
    return reference.recurrent_step(q, k, v, g, beta, initial_state)


@dataclass(slots=True)
class Recurrence:
    """The functions one loaded model runs at the moment, and which of its layers is running."""

    prefill: RecurrenceFn = reference_prefill
    decode: RecurrenceFn = reference_decode
    key_heads: tuple[int, ...] = ()
    """Key heads of each linear layer, to undo the expansion that some versions do."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, in evaluation mode and without gradients."""

    model: Any
    tokenizer: Any | None
    spec: ModelSpec
    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    recurrence: Recurrence
    cache_argument: str
    """The forward argument that takes a cache: `past_key_values`, from 5.24 on `cache`."""

    def encode(self, text: str) -> list[int]:
        """Token ids without special tokens.

        Raises:
            SourceError: no tokenizer, or one with more tokens than the model embeds.
        """
        if self.tokenizer is None:
            raise SourceError(
                f"{self.checkpoint.path}: no tokenizer files, so text cannot be encoded",
                hint="copy tokenizer.json and tokenizer_config.json next to the weights",
                expected=list(TOKENIZER_FILES),
            )
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        if ids and max(ids) >= self.vocabulary:
            raise SourceError(
                f"{self.checkpoint.path}: the tokenizer gives token {max(ids)}, the model embeds "
                f"{self.vocabulary}",
                hint="the tokenizer files belong to another model",
                found=max(ids),
                expected=f"below {self.vocabulary}",
            )
        return ids

    @property
    def vocabulary(self) -> int:
        """Tokens that the model embeds."""
        return int(self.model.config.get_text_config(decoder=True).vocab_size)


_RUNNING: list[tuple[Recurrence, int]] = []
"""Stack of (recurrence, ordinal) of the linear layers being executed, innermost last."""


def load_model(
    path_or_name: str | Path,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    lower_bound: float | None = None,
) -> LoadedModel:
    """Load a folder or an embedded model, offline and without remote code.

    Args:
        path_or_name: a folder in the released layout, or an embedded name such as `tiny-gdn`.
        device: torch device, or `auto` for a GPU if there is one.
        dtype: of the weights; float32 on CPU and bfloat16 on a GPU unless given. Decay
            parameters always keep the precision they are stored in.
        lower_bound: l of the safe gate, for configs that do not state it.

    Raises:
        SourceError, UnsupportedModel, NumericError: from the checkpoint or a mismatching model.
    """
    import transformers

    target = torch_device(device)
    checkpoint = open_checkpoint(path_or_name, lower_bound=lower_bound, weights=True)
    spec = checkpoint.spec
    if dtype is None:
        dtype = torch.float32 if target.type == "cpu" else torch.bfloat16
    loader = _model_class(transformers, checkpoint)
    with _quiet_loading():
        model = loader.from_pretrained(
            str(checkpoint.path), dtype=dtype, local_files_only=True, trust_remote_code=False
        )
    model.to(target).eval().requires_grad_(False)
    recurrence = Recurrence(key_heads=tuple(layer.key_heads for layer in spec.layers))
    runtime = spec.family.runtime
    assert runtime is not None  # _model_class has refused
    for module, ordinal in _linear_modules(model, spec, runtime.attribute):
        _restore_decay(module, checkpoint, ordinal)
        _watch(module, recurrence, ordinal)
        _install(type(module).__module__, runtime.prefill, runtime.decode)
    return LoadedModel(
        model=model,
        tokenizer=_tokenizer(transformers, checkpoint),
        spec=spec,
        checkpoint=checkpoint,
        device=target,
        dtype=dtype,
        recurrence=recurrence,
        cache_argument="cache"
        if "cache" in inspect.signature(model.forward).parameters
        else "past_key_values",
    )


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_dtype(name: str) -> torch.dtype | None:
    """The dtype of that name; None for `auto`, which `load_model` resolves.

    Raises:
        UsageError: unknown name.
    """
    if name == "auto":
        return None
    if name not in DTYPES:
        raise UsageError(f"{name!r} is not a dtype here", hint=f"auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def torch_device(device: str) -> torch.device:
    """The torch device of that name, `auto` included.

    Raises:
        UsageError: no such device.
        MissingRequirement: its hardware is absent.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        target = torch.device(device)
        if target.type not in ("cpu", "cuda"):
            raise RuntimeError(target.type)
    except RuntimeError as error:
        raise UsageError(
            f"{device!r} is not a device", hint="use cpu, cuda or cuda:N", found=device
        ) from error
    if target.type == "cuda" and not torch.cuda.is_available():
        raise MissingRequirement(
            f"device {device} asked for, but torch {torch.__version__} sees no GPU",
            hint="use --device cpu, or install a CUDA build of torch",
            device=device,
        )
    count = torch.cuda.device_count() if target.type == "cuda" else 1
    if (target.index or 0) >= count:
        raise MissingRequirement(
            f"device {device} asked for, the last is {count - 1}", device=device
        )
    return target


@contextmanager
def swap(
    loaded: LoadedModel,
    prefill: RecurrenceFn | None = None,
    decode: RecurrenceFn | None = None,
) -> Iterator[None]:
    """Run the model with other recurrence functions; `None` keeps the present one."""
    recurrence = loaded.recurrence
    before = recurrence.prefill, recurrence.decode
    recurrence.prefill = prefill or recurrence.prefill
    recurrence.decode = decode or recurrence.decode
    try:
        yield
    finally:
        recurrence.prefill, recurrence.decode = before


def _model_class(transformers: Any, checkpoint: Checkpoint) -> Any:
    """The class named in the config, or the causal-LM class of its model type."""
    checkpoint.spec.check_plannable()
    config = checkpoint.config
    if checkpoint.spec.family.runtime is None:
        raise _no_class(transformers, checkpoint)
    for name in config.get("architectures") or ():
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    if config.get("model_type") in transformers.CONFIG_MAPPING:
        return transformers.AutoModelForCausalLM
    raise _no_class(transformers, checkpoint)


def _no_class(transformers: Any, checkpoint: Checkpoint) -> UnsupportedModel:
    return UnsupportedModel(
        f"{checkpoint.name}: transformers {transformers.__version__} cannot run "
        f"{checkpoint.spec.family.name} models",
        hint="weight-only commands (analyze, export-plan without --calibration) still work",
        found=checkpoint.config.get("architectures"),
    )


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Silence transformers' progress bars and advice while weights load, and its hints at slow paths."""
    from transformers.utils import logging as theirs

    # It names every kernel package that is absent; the torch path is the one we want.
    logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)
    verbosity, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        theirs.set_verbosity(verbosity)
        if bars:
            theirs.enable_progress_bar()


def _tokenizer(transformers: Any, checkpoint: Checkpoint) -> Any | None:
    if not any((checkpoint.path / name).is_file() for name in TOKENIZER_FILES):
        return None
    return transformers.AutoTokenizer.from_pretrained(
        str(checkpoint.path), local_files_only=True, trust_remote_code=False
    )


def _linear_modules(model: Any, spec: ModelSpec, attribute: str) -> list[tuple[Any, int]]:
    """Each linear-attention module with its ordinal, found by the family's attribute name."""
    named = {
        int(match.group(1)): module
        for name, module in model.named_modules()
        if (match := re.search(rf"(?:^|\.)layers\.(\d+)\.{attribute}$", name))
        and "visual" not in name
    }
    missing = [layer.index for layer in spec.layers if layer.index not in named]
    if missing:
        raise UnsupportedModel(
            f"{spec.family.name}: the loaded model has no layers.{missing[0]}.{attribute}",
            hint="the config and the weights disagree about which layers are linear",
            found=sorted(named),
            expected=[layer.index for layer in spec.layers],
        )
    return [(named[layer.index], layer.ordinal) for layer in spec.layers]


def _restore_decay(module: Any, checkpoint: Checkpoint, ordinal: int) -> None:
    """Put A_log and dt_bias back as stored: loading in bfloat16 moves horizons by up to 1.6 %."""
    layer = checkpoint.spec.layers[ordinal]
    family = checkpoint.spec.family
    for suffix in (family.a_log, family.dt_bias):
        leaf = suffix.rsplit(".", 1)[-1]
        owners = [
            (owner, leaf)
            for owner in module.modules()
            if leaf in dict(owner.named_parameters(recurse=False))
        ]
        stored = checkpoint.read(layer.prefix + suffix)
        if len(owners) != 1:
            raise UnsupportedModel(
                f"{type(module).__name__} has {len(owners)} parameters named {leaf}, expected one",
                tensor=layer.prefix + suffix,
            )
        owner, name = owners[0]
        present = getattr(owner, name)
        flat = np.asarray(stored, dtype=np.float32).reshape(-1)
        if flat.size != present.numel():
            raise NumericError(
                f"{layer.prefix}{suffix} stores {flat.size} values, the model uses {present.numel()}",
                tensor=layer.prefix + suffix,
                found=flat.size,
                expected=present.numel(),
            )
        values = torch.from_numpy(flat.copy()).reshape(present.shape).to(present.device)
        setattr(owner, name, torch.nn.Parameter(values, requires_grad=False))


def _watch(module: Any, recurrence: Recurrence, ordinal: int) -> None:
    """Announce the layer to the dispatcher while it runs."""

    def enter(_module: Any, _args: Any) -> None:
        _RUNNING.append((recurrence, ordinal))

    def leave(_module: Any, _args: Any, _output: Any) -> None:
        _RUNNING.pop()

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


def _install(module_name: str, prefill: str, decode: str) -> None:
    """Put dispatchers under the two names of a modeling module, once per process."""
    modeling = sys.modules[module_name]
    for name, single in ((prefill, False), (decode, True)):
        original = getattr(modeling, name)
        if not hasattr(original, "original"):
            setattr(modeling, name, _dispatcher(original, single))


def _dispatcher(original: Callable[..., Any], single: bool) -> Callable[..., Any]:
    """A stand-in for one recurrence function of a modeling file.

    Models that `load_model` did not load keep their own function.
    """

    def dispatch(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not _RUNNING:
            result: tuple[torch.Tensor, torch.Tensor] = original(query, key, value, *args, **kwargs)
            return result
        recurrence, ordinal = _RUNNING[-1]
        g, beta = kwargs["g"], kwargs["beta"]
        repeat = key.shape[2] // recurrence.key_heads[ordinal]
        if repeat > 1:  # transformers before 5.24 expands the key heads first
            query, key = query[:, :, ::repeat], key[:, :, ::repeat]
        state = kwargs["initial_state"]
        if single:
            q, k, v, g, beta = (x[:, 0] for x in (query, key, value, g, beta))
            o, state = recurrence.decode(ordinal, q, k, v, g, beta, state)
            return o.unsqueeze(1).to(value.dtype), state
        o, state = recurrence.prefill(ordinal, query, key, value, g, beta, state)
        return o.to(value.dtype), state

    dispatch.original = original  # type: ignore[attr-defined]
    return dispatch
