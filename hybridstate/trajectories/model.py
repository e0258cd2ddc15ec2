"""Loading a model and taking over its recurrence (`trajectories.recurrence`)."""

import inspect
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from hybridstate.trajectories.recurrence import (
    Recurrence,
    RecurrenceFn,
    install,
    reference_decode,
    reference_prefill,
    swap,
    watch,
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
        return encode(text, self.tokenizer, self.checkpoint, self.vocabulary)

    @property
    def synthetic(self) -> bool:
        """Whether the weights were made here (`trajectories.dummy`) rather than read."""
        return not self.checkpoint.entries

    @property
    def vocabulary(self) -> int:
        """Tokens that the model embeds."""
        return int(self.model.config.get_text_config(decoder=True).vocab_size)


def encode(
    text: str, tokenizer: Any | None, checkpoint: Checkpoint, vocabulary: int | None = None
) -> list[int]:
    """Token ids without special tokens; `vocabulary`, where known, is what the model embeds.

    Raises:
        SourceError: see `LoadedModel.encode`.
    """
    if tokenizer is None:
        raise SourceError(
            f"{checkpoint.path}: no tokenizer files, so text cannot be encoded",
            hint="copy tokenizer.json and tokenizer_config.json next to the weights",
            expected=list(TOKENIZER_FILES),
        )
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    if vocabulary is not None and ids and max(ids) >= vocabulary:
        raise SourceError(
            f"{checkpoint.path}: the tokenizer gives token {max(ids)}, the model embeds {vocabulary}",
            hint="the tokenizer files belong to another model",
            found=max(ids),
            expected=f"below {vocabulary}",
        )
    return ids


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
    with quiet_loading():
        model = loader.from_pretrained(
            str(checkpoint.path), dtype=dtype, local_files_only=True, trust_remote_code=False
        )
    model.to(target)
    for module, ordinal in linear_modules(model, spec):
        _restore_decay(module, checkpoint, ordinal)
    return take_over(model, checkpoint, tokenizer_of(checkpoint), target, dtype)


def take_over(
    model: Any,
    checkpoint: Checkpoint,
    tokenizer: Any | None,
    target: torch.device,
    dtype: torch.dtype,
) -> LoadedModel:
    """A model on its device, with our recurrence in place of its own."""
    spec = checkpoint.spec
    model.eval().requires_grad_(False)
    recurrence = Recurrence(key_heads=tuple(layer.key_heads for layer in spec.layers))
    runtime = spec.family.runtime
    assert runtime is not None  # linear_modules has refused
    for module, ordinal in linear_modules(model, spec):
        watch(module, recurrence, ordinal)
        install(type(module).__module__, runtime.prefill, runtime.decode)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
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
def quiet_loading() -> Iterator[None]:
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


def tokenizer_of(checkpoint: Checkpoint) -> Any | None:
    """The tokenizer beside the weights; None where there are no files of one."""
    import transformers

    if not any((checkpoint.path / name).is_file() for name in TOKENIZER_FILES):
        return None
    return transformers.AutoTokenizer.from_pretrained(
        str(checkpoint.path), local_files_only=True, trust_remote_code=False
    )


def linear_modules(model: Any, spec: ModelSpec) -> list[tuple[Any, int]]:
    """Each linear-attention module with its ordinal, found by the family's attribute name.

    Raises:
        UnsupportedModel: a layer that should be linear is not there.
    """
    runtime = spec.family.runtime
    attribute = "" if runtime is None else runtime.attribute
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
